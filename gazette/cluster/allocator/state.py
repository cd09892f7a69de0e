"""Facts derived from the keys: members, demand, the leader, and members that may leave.

``State`` follows its KeySpace after every change, as the first of its observers. ``local_items``,
which the resolver needs, is updated at once. Facts that only the leader needs are built on demand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gazette.cluster.allocator.demand import Demand
from gazette.cluster.allocator.loads import Loads
from gazette.cluster.allocator.model import (
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
from gazette.cluster.keyspace.key_values import differences


class Mirror(Protocol):
    """The methods of ``gazette.cluster.keyspace.key_space.KeySpace`` that this module uses."""

    @property
    def root(self) -> str: ...
    def prefixed(self, prefix: str) -> Sequence[DecodedKV]: ...


@dataclass(frozen=True, slots=True)
class LocalItem:
    """An item that is assigned to this member. ``assignments`` are all assignments of the item, in key order.
    Ours is ``assignments[index]``."""

    item: DecodedKV
    assignments: tuple[DecodedKV, ...]
    index: int

    @property
    def assignment(self) -> DecodedKV:
        return self.assignments[self.index]


class State:
    """The allocator's view of a KeySpace, for one member.

    ``State`` owns nothing: everything is derived from the KeySpace. Lists of the KeySpace are replaced,
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
        self._items: dict[str, DecodedKV] = {}
        self._local: dict[str, list[LocalItem | None]] = {}
        """An entry for each of our assignments, by item. None: the item was deleted."""
        self.assigned: Mapping[str, tuple[DecodedKV, ...]] = {}
        """The assignments of each item that has some, in key order. It is replaced, never changed."""
        self._demand: Demand | None = None
        self.observe()

    def observe(self) -> None:
        """Follow the KeySpace. Register this as an observer before all observers that use ``State``.

        Except for copies of lists, only keys that have changed cause work. Unchanged entries stay the same
        objects, so that observers find changes quickly.
        """
        items = self.ks.prefixed(self.root + ITEMS)
        assignments = self.ks.prefixed(self.root + ASSIGNMENTS)
        self.members = self.ks.prefixed(self.root + MEMBERS)
        self.local_member = next((kv for kv in self.members if kv.key == self.local_key), None)
        self._demand = None
        touched = self._update_items(items) | self._update_assigned(assignments)
        if touched:
            self._update_local(touched)

    def _update_items(self, items: Sequence[DecodedKV]) -> set[str]:
        """Update the items. Return the ids of the changed items."""
        touched = set()
        for before, now, _ in differences(self.items, items):
            if now is not None:
                self._items[now.decoded.id] = now
                touched.add(now.decoded.id)
            elif before is not None:
                del self._items[before.decoded.id]
                touched.add(before.decoded.id)
        self.items = items
        return touched

    def _update_assigned(self, assignments: Sequence[DecodedKV]) -> set[str]:
        """Update the assignments. Return the ids of the items whose assignments have changed."""
        places = {
            entry.decoded.item_id: index
            for before, now, index in differences(self.assignments, assignments)
            for entry in (before, now)
            if entry is not None
        }
        self.assignments = assignments
        if places:
            assigned = dict(self.assigned)  # Others may hold the former mapping.
            for item_id, index in places.items():
                if siblings := _siblings(assignments, item_id, index):
                    assigned[item_id] = siblings
                else:
                    assigned.pop(item_id, None)
            self.assigned = assigned
        return set(places)

    def _update_local(self, touched: Iterable[str]) -> None:
        """Find our items among the changed items."""
        zone, _, suffix = self.local_key.removeprefix(self.root + MEMBERS).partition("#")
        for item_id in touched:
            item, siblings = self._items.get(item_id), self.assignments_of(item_id)
            indices = [
                index
                for index, kv in enumerate(siblings)
                if kv.decoded.suffix == suffix and kv.decoded.zone == zone
            ]
            self._local.pop(item_id, None)
            if indices:
                self._local[item_id] = [
                    None if item is None else LocalItem(item, siblings, index) for index in indices
                ]
        self.local_count = sum(map(len, self._local.values()))
        self.local_items = [
            local for item_id in sorted(self._local) for local in self._local[item_id] if local
        ]

    def item(self, item_id: str) -> DecodedKV | None:
        return self._items.get(item_id)

    def member(self, zone: str, suffix: str) -> DecodedKV | None:
        return _find(self.members, f"{self.root}{MEMBERS}{zone}#{suffix}")

    def peers(self) -> dict[str, int]:
        """Return the CreateRevision of each other member's key, by the endpoint it advertises."""
        return {
            kv.decoded.value.spec.endpoint: kv.raw.create_revision
            for kv in self.members
            if kv.key != self.local_key
        }

    def assignments_of(self, item_id: str) -> tuple[DecodedKV, ...]:
        """Return the assignments of one item, in key order."""
        return self.assigned.get(item_id, ())

    @property
    def leader(self) -> DecodedKV | None:
        """The oldest member, or None if no member exists. A member that lost its key and came back is the
        youngest."""
        return min(self.members, key=lambda kv: kv.raw.create_revision, default=None)

    def is_leader(self) -> bool:
        leader = self.leader
        return leader is not None and leader.key == self.local_key

    def should_exit(self) -> bool:
        """Return True if the local member is exiting and holds no assignment."""
        local = self.local_member
        if local is None:
            return False
        member: Member = local.decoded
        return member.value.exiting() and self.local_count == 0

    @property
    def demand(self) -> Demand:
        if self._demand is None:
            self._demand = Demand(self.members, self.items, self.assignments)
        return self._demand

    @property
    def network_hash(self) -> int:
        """Hash that changes whenever other assignments may become desirable.

        The hash does not depend on the present assignments, except on those that a leaving member keeps.
        """
        return self.demand.network_hash

    def loads(self) -> Loads:
        """Return a new `Loads` of the present assignments, which the caller may change."""
        return Loads(self.demand.limits, (kv.decoded for kv in self.assignments))

    def members_by_id(self) -> Mapping[MemberId, DecodedKV]:
        return {kv.decoded.id: kv for kv in self.members}


def _siblings(assignments: Sequence[DecodedKV], item_id: str, index: int) -> tuple[DecodedKV, ...]:
    """Return the assignments of an item, which are on both sides of ``index``."""
    begin = end = index
    while begin > 0 and assignments[begin - 1].decoded.item_id == item_id:
        begin -= 1
    while end < len(assignments) and assignments[end].decoded.item_id == item_id:
        end += 1
    return tuple(assignments[begin:end])


def _key(kv: DecodedKV) -> str:
    return kv.key


def _find(kvs: Sequence[DecodedKV], key: str) -> DecodedKV | None:
    index = bisect_left(kvs, key, key=_key)
    if index < len(kvs) and kvs[index].key == key:
        return kvs[index]
    return None
