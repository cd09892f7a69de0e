"""Facts derived from the keys: members, demand, the leader, and members that may leave.

``State`` is rebuilt from its KeySpace after every change, as the first of its observers. ``local_items``,
which the resolver needs, is built at once. Facts that only the leader needs are built on demand.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gazette.allocator.loads import Loads
from gazette.allocator.model import (
    ASSIGNMENTS,
    ITEMS,
    MEMBERS,
    DecodedKV,
    IsConsistent,
    Member,
    MemberId,
    Progress,
    unknown_progress,
)


class Mirror(Protocol):
    """The methods of ``gazette.keyspace.key_space.KeySpace`` that this module uses."""

    @property
    def root(self) -> str: ...
    def prefixed(self, prefix: str) -> Sequence[DecodedKV]: ...


@dataclass(frozen=True, slots=True)
class LocalItem:
    """An item that is assigned to this member.

    ``assignments`` are all assignments of the item, in key order. Ours is ``assignments[index]``.
    """

    item: DecodedKV
    assignments: tuple[DecodedKV, ...]
    index: int

    @property
    def assignment(self) -> DecodedKV:
        return self.assignments[self.index]


class Demand:
    """Capacity and demand of one snapshot of members and items. Costs O(members + items).

    Invariants: ``limits[m] == item limit - shed.get(m, 0) >= 0``. ``member_slots`` is their sum.
    """

    def __init__(self, members: Sequence[DecodedKV], items: Sequence[DecodedKV]) -> None:
        self.replication = _replication(members, items)
        """Number of replicas of every item: the desired number, or fewer while members leave."""
        self.item_slots = sum(self.replication.values())
        self.limits: dict[MemberId, int] = {
            kv.decoded.id: max(0, kv.decoded.value.item_limit()) for kv in members
        }
        self.needed_from: dict[MemberId, int] = {}
        """Items that cannot do without a leaving member: by member, the least replication among
        them. The member serves no other items. Members that keep items because others are full are
        left out.
        """
        self.crowded: dict[MemberId, int] = {}
        """By leaving member, the number of assignments that it keeps because the other members are full."""
        self.shed = self._shed(members)
        for member, granted in self.shed.items():
            self.limits[member] -= granted
        self.member_slots = sum(self.limits.values())
        self.zone_slots: dict[str, int] = {}
        for (zone, _), limit in sorted(self.limits.items()):
            if limit > 0:
                self.zone_slots[zone] = self.zone_slots.get(zone, 0) + limit

    def _shed(self, members: Sequence[DecodedKV]) -> dict[MemberId, int]:
        """Return the capacity that exiting members need not offer any more, the oldest member first.

        The result never exceeds what the other members can absorb. An item may need a member that exits, to
        have its replicas on distinct members. Then capacity for that item remains, at the members that leave
        last. Those still hand over the rest. ``limits`` must be those of the keys.
        """
        useful = sum(limit > 0 for limit in self.limits.values())
        wanted = sorted(self.replication.values())
        excess = sum(self.limits.values()) - self.item_slots
        granted: dict[MemberId, int] = {}
        exiting = [
            kv for kv in members if kv.decoded.value.exiting() and self.limits[kv.decoded.id] > 0
        ]
        exiting.sort(key=lambda kv: kv.raw.create_revision)
        for gone_before, kv in enumerate(exiting):
            member: MemberId = kv.decoded.id
            needed_from = useful - gone_before
            needing = len(wanted) - bisect_left(wanted, needed_from)
            spare = self.limits[member] - min(self.limits[member], needing)
            grant = max(0, min(spare, excess))
            if grant:
                granted[member] = grant
                excess -= grant
            if grant == spare:
                self.needed_from[member] = needed_from
            else:
                self.crowded[member] = spare - grant
        return granted

    @cached_property
    def network_hash(self) -> int:
        """Hash of what the cluster needs and offers.

        These are the limits of members, the replication of items, and the part of their capacity
        that leaving members need not offer.
        """
        digest = hashlib.blake2b(digest_size=8)
        for table in (self.limits, self.replication, self.shed, self.needed_from):
            parts = (f"{key}\0{number}" for key, number in table.items())
            digest.update("\0".join(parts).encode())
            digest.update(b"\1")
        return int.from_bytes(digest.digest(), "big")


def _replication(members: Sequence[DecodedKV], items: Sequence[DecodedKV]) -> dict[str, int]:
    """Return the number of replicas of each item.

    While members leave, items may have as few replicas as ``least_replication`` allows, if the
    members that stay cannot hold more. So a hand-off need not wait for a replacement to start.
    """
    desired = {kv.decoded.id: max(0, kv.decoded.value.desired_replication()) for kv in items}
    if not any(kv.decoded.value.exiting() for kv in members):
        return desired
    least = {kv.decoded.id: max(0, kv.decoded.value.least_replication()) for kv in items}
    staying = [
        limit
        for kv in members
        if not kv.decoded.value.exiting() and (limit := max(0, kv.decoded.value.item_limit()))
    ]
    room = sum(staying)
    for cap in range(len(staying), 0, -1):
        reduced = {item: min(wanted, max(least[item], cap)) for item, wanted in desired.items()}
        if sum(reduced.values()) <= room:
            return reduced
    return {item: min(wanted, max(least[item], 1)) for item, wanted in desired.items()}


class State:
    """The allocator's view of a KeySpace, for one member.

    It owns nothing: everything is derived from the KeySpace. Lists of the KeySpace are replaced,
    never changed. So a holder of ``items``, ``members`` or ``assignments`` holds a snapshot.
    ``local_key`` is the key of this process's member. The key may be absent.
    """

    def __init__(
        self,
        ks: Mirror,
        local_key: str,
        is_consistent: IsConsistent,
        progress: Progress = unknown_progress,
    ) -> None:
        self.ks = ks
        self.root = ks.root
        self.local_key = local_key
        self.is_consistent = is_consistent
        self.progress = progress
        self.items: Sequence[DecodedKV] = ()
        self.members: Sequence[DecodedKV] = ()
        self.assignments: Sequence[DecodedKV] = ()
        self.local_items: list[LocalItem] = []
        self.local_member: DecodedKV | None = None
        self.local_count = 0
        """Number of our assignments, including those of deleted items."""
        self._demand: Demand | None = None
        self.observe()

    def observe(self) -> None:
        """Rebuild from the KeySpace. Register this as an observer before all observers that use ``State``."""
        self.items = self.ks.prefixed(self.root + ITEMS)
        self.members = self.ks.prefixed(self.root + MEMBERS)
        self.assignments = self.ks.prefixed(self.root + ASSIGNMENTS)
        self.local_member = next((kv for kv in self.members if kv.key == self.local_key), None)
        self._demand = None
        self._find_local()

    def _find_local(self) -> None:
        zone, _, suffix = self.local_key.removeprefix(self.root + MEMBERS).partition("#")
        assignments = self.assignments
        ours = [
            index
            for index, kv in enumerate(assignments)
            if kv.decoded.suffix == suffix and kv.decoded.zone == zone
        ]
        self.local_count = len(ours)
        self.local_items = []
        for index in ours:
            item_id: str = assignments[index].decoded.item_id
            item = self.item(item_id)
            if item is None:
                continue
            begin, end = index, index + 1
            while begin > 0 and assignments[begin - 1].decoded.item_id == item_id:
                begin -= 1
            while end < len(assignments) and assignments[end].decoded.item_id == item_id:
                end += 1
            siblings = tuple(assignments[begin:end])
            self.local_items.append(LocalItem(item, siblings, index - begin))

    def item(self, item_id: str) -> DecodedKV | None:
        return _find(self.items, f"{self.root}{ITEMS}{item_id}")

    def member(self, zone: str, suffix: str) -> DecodedKV | None:
        return _find(self.members, f"{self.root}{MEMBERS}{zone}#{suffix}")

    def peers(self) -> dict[str, int]:
        """Return the CreateRevision of each other member's key, by the endpoint it advertises."""
        return {
            kv.decoded.value.spec.endpoint: kv.raw.create_revision
            for kv in self.members
            if kv.key != self.local_key
        }

    def assignments_of(self, item_id: str) -> Sequence[DecodedKV]:
        """Return the assignments of one item, in key order."""
        prefix = f"{self.root}{ASSIGNMENTS}{item_id}#"
        begin = bisect_left(self.assignments, prefix, key=_key)
        end = begin
        while end < len(self.assignments) and self.assignments[end].key.startswith(prefix):
            end += 1
        return self.assignments[begin:end]

    @property
    def leader(self) -> DecodedKV | None:
        """The oldest member. A member that lost its key and came back is the youngest."""
        return min(self.members, key=lambda kv: kv.raw.create_revision, default=None)

    def is_leader(self) -> bool:
        leader = self.leader
        return leader is not None and leader.key == self.local_key

    def should_exit(self) -> bool:
        """Return True if the local member is exiting and holds nothing any more."""
        local = self.local_member
        if local is None:
            return False
        member: Member = local.decoded
        return member.value.exiting() and self.local_count == 0

    @property
    def demand(self) -> Demand:
        if self._demand is None:
            self._demand = Demand(self.members, self.items)
        return self._demand

    @property
    def network_hash(self) -> int:
        """Hash that changes whenever other assignments may become desirable.

        It does not depend on the present assignments.
        """
        return self.demand.network_hash

    def loads(self) -> Loads:
        """Return a new `Loads` of the present assignments, which the caller may change."""
        return Loads(self.demand.limits, (kv.decoded for kv in self.assignments))

    def members_by_id(self) -> Mapping[MemberId, DecodedKV]:
        return {kv.decoded.id: kv for kv in self.members}


def _key(kv: DecodedKV) -> str:
    return kv.key


def _find(kvs: Sequence[DecodedKV], key: str) -> DecodedKV | None:
    index = bisect_left(kvs, key, key=_key)
    if index < len(kvs) and kvs[index].key == key:
        return kvs[index]
    return None
