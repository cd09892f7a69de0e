"""Facts derived from the keys: members, demand, the leader, and members that may leave.

``State`` is rebuilt from its KeySpace after every change, as the first of its observers. ``local_items``,
which the resolver needs, is built at once. Facts that only the leader needs are built on demand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final, Protocol

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

_ID: Final = attrgetter("decoded.id")
_ITEM_ID: Final = attrgetter("decoded.item_id")


class Mirror(Protocol):
    """The methods of ``gazette.cluster.keyspace.key_space.KeySpace`` that this module uses."""

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
        self._items: dict[str, DecodedKV] = {}
        self.assigned: Mapping[str, tuple[DecodedKV, ...]] = {}
        """The assignments of each item that has some, in key order."""
        self._demand: Demand | None = None
        self.observe()

    def observe(self) -> None:
        """Rebuild from the KeySpace. Register this as an observer before all observers that use ``State``."""
        self.items = self.ks.prefixed(self.root + ITEMS)
        self.members = self.ks.prefixed(self.root + MEMBERS)
        self.assignments = self.ks.prefixed(self.root + ASSIGNMENTS)
        self.local_member = next((kv for kv in self.members if kv.key == self.local_key), None)
        self._demand = None
        self._items = dict(zip(map(_ID, self.items), self.items, strict=True))
        self.assigned = dict(self._siblings(self.assigned))
        self._find_local()

    def _find_local(self) -> None:
        """Find our items. An unchanged item stays the same object, so that observers find changes quickly."""
        zone, _, suffix = self.local_key.removeprefix(self.root + MEMBERS).partition("#")
        former = {local.item.decoded.id: local for local in self.local_items}
        self.local_count, self.local_items = 0, []
        for item_id, siblings in self.assigned.items():
            for index, kv in enumerate(siblings):
                if kv.decoded.suffix == suffix and kv.decoded.zone == zone:
                    self.local_count += 1
                    item = self._items.get(item_id)
                    if item is not None:
                        local = former.get(item_id)
                        if local is None or (local.item, local.assignments) != (item, siblings):
                            local = LocalItem(item, siblings, index)
                        self.local_items.append(local)

    def _siblings(
        self, before: Mapping[str, tuple[DecodedKV, ...]]
    ) -> Iterator[tuple[str, tuple[DecodedKV, ...]]]:
        """Yield the assignments of each item. Unchanged ones are the same object as in ``before``."""
        for item_id, siblings in groupby(self.assignments, key=_ITEM_ID):
            present = tuple(siblings)
            former = before.get(item_id)
            yield item_id, former if former == present else present

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
        """The oldest member. A member that lost its key and came back is the youngest."""
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


def _key(kv: DecodedKV) -> str:
    return kv.key


def _find(kvs: Sequence[DecodedKV], key: str) -> DecodedKV | None:
    index = bisect_left(kvs, key, key=_key)
    if index < len(kvs) and kvs[index].key == key:
        return kvs[index]
    return None
