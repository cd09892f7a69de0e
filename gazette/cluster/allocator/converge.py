"""One step from the current assignments of an item towards its desired ones.

New replicas are added at once where members have capacity. An unwanted replica is removed only when enough
other replicas are known to be consistent, or if its member keeps another assignment of the item. Every
``ItemStep`` is applied by etcd as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gazette.cluster.allocator.loads import Loads
from gazette.cluster.allocator.model import (
    Assignment,
    DecodedKV,
    IsConsistent,
    MemberId,
    Progress,
    assignment_key,
    item_assignments_prefix,
    item_key,
    unknown_progress,
)
from gazette.cluster.etcd.values import Compare, DeleteOp, Op, PutOp, Target, prefix_range

_DEAD_PER_STEP = 32  # keeps every step small enough for one transaction


@dataclass(frozen=True, slots=True)
class ItemStep:
    """Changes to make to one item now. The counts are for metrics."""

    item_id: str
    compares: tuple[Compare, ...]
    operations: tuple[PutOp | DeleteOp, ...]
    added: int = 0
    removed: int = 0
    packed: int = 0
    promoted: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """Snapshot of the state for one round of convergence.

    Invariant: ``items`` and ``assignments`` are in key order. ``members`` are the keys of all members.
    """

    root: str
    items: Sequence[DecodedKV]
    assignments: Sequence[DecodedKV]
    members: Mapping[MemberId, DecodedKV]
    is_consistent: IsConsistent
    replication: Mapping[str, int]
    """Number of replicas of each item: fewer than its specification asks for while members leave."""
    stale: frozenset[str] = frozenset()
    """Items to leave alone, because their keys in etcd differ from the mirror."""
    progress: Progress = unknown_progress
    """Order by which a replica is promoted if no replica is consistent."""


def converge(
    round_: Round, desired: Mapping[str, Sequence[MemberId]], loads: Loads
) -> Iterator[ItemStep | None]:
    """Yield the step of each item in key order, or None for an item that is stale or needs no change. The
    assignments of a deleted item may need several steps.

    ``desired`` maps items to distinct members. An item that is not in ``desired`` keeps its members. Items
    are visited lazily, and each step updates ``loads``. So a caller may pause between steps.
    """
    for item, current in _join(round_):
        item_id = item.decoded.id if item is not None else current[0].decoded.item_id
        if item_id in round_.stale:
            yield None
        elif item is None:
            for begin in range(0, len(current), _DEAD_PER_STEP):
                yield _remove_dead(round_.root, current[begin : begin + _DEAD_PER_STEP])
        else:
            yield _plan(round_, loads, item, current, desired.get(item_id))


def _join(round_: Round) -> Iterator[tuple[DecodedKV | None, Sequence[DecodedKV]]]:
    """Yield each item with its assignments. Assignments without an item come with None."""
    assignments = round_.assignments
    begin = 0
    for item in round_.items:
        while begin < len(assignments) and assignments[begin].decoded.item_id < item.decoded.id:
            end = _run_end(assignments, begin)
            yield None, assignments[begin:end]
            begin = end
        end = begin
        if begin < len(assignments) and assignments[begin].decoded.item_id == item.decoded.id:
            end = _run_end(assignments, begin)
        yield item, assignments[begin:end]
        begin = end
    while begin < len(assignments):
        end = _run_end(assignments, begin)
        yield None, assignments[begin:end]
        begin = end


def _run_end(assignments: Sequence[DecodedKV], begin: int) -> int:
    """Return the end of the run of assignments that have the same item as the assignment at ``begin``."""
    item_id = assignments[begin].decoded.item_id
    end = begin + 1
    while end < len(assignments) and assignments[end].decoded.item_id == item_id:
        end += 1
    return end


def _remove_dead(root: str, assignments: Sequence[DecodedKV]) -> ItemStep:
    """Return the step that removes the assignments of a deleted item, unless it was created again."""
    assignment: Assignment = assignments[0].decoded
    item = item_key(root, assignment.item_id)
    return ItemStep(
        assignment.item_id,
        (Compare.create_revision(item, "=", 0), *map(_unchanged, assignments)),
        tuple(Op.delete(kv.key) for kv in assignments),
        removed=len(assignments),
    )


def _unchanged(kv: DecodedKV) -> Compare:
    return Compare.mod_revision(kv.key, "=", kv.raw.mod_revision)


def _plan(
    round_: Round,
    loads: Loads,
    item: DecodedKV,
    current: Sequence[DecodedKV],
    desired: Sequence[MemberId] | None,
) -> ItemStep | None:
    """Return the step of an item, or None. ``desired`` None: the members that the item has now."""
    if desired is None:
        desired = tuple(dict.fromkeys(kv.decoded.member_id for kv in current))
    if _is_settled(current, desired):
        return None
    plan = _ItemPlan(round_, loads, item, current, desired)
    return plan.step()


def _is_settled(current: Sequence[DecodedKV], desired: Sequence[MemberId]) -> bool:
    """Return True if every desired member has its assignment, in slots 0, 1, 2 and so on. A fast path."""
    count = len(current)
    if count != len(desired):
        return False
    if count == 1:
        assignment: Assignment = current[0].decoded
        return assignment.slot == 0 and assignment.member_id == desired[0]
    members, slots = set(), set()
    for kv in current:
        members.add(kv.decoded.member_id)
        slots.add(kv.decoded.slot)
    return members == set(desired) and slots == set(range(count))


class _ItemPlan:
    """Working state of one item's step."""

    def __init__(
        self,
        round_: Round,
        loads: Loads,
        item: DecodedKV,
        current: Sequence[DecodedKV],
        desired: Sequence[MemberId],
    ) -> None:
        self.round = round_
        self.loads = loads
        self.item = item
        self.current = current
        self.desired = frozenset(desired)
        self.consistent = frozenset(
            kv.key for kv in current if round_.is_consistent(item, kv, current)
        )
        self.compares: list[Compare] = []
        self.operations: list[PutOp | DeleteOp] = []

    def step(self) -> ItemStep | None:
        """Return the changes to make now, or None. Close gaps of slots only if nothing else is to be done."""
        keep, unwanted, adds = self._diff()
        removes, rejoined = self._constrain_removes(keep, unwanted)
        keep = sorted(keep + rejoined, key=lambda kv: kv.decoded.slot)

        self._remove(removes, keep)
        promotee = self._promotee(keep)
        if promotee is not None:
            self._move(promotee, 0)
        added = self._add(adds)
        packed = 0
        if promotee is None and not removes and not added:
            packed = self._pack(keep)
        if not self.operations:
            return None
        if promotee is not None or added or packed:
            self.compares.append(self._nothing_newer())
        return ItemStep(
            self.item.decoded.id,
            tuple(self.compares),
            tuple(self.operations),
            added=added,
            removed=len(removes),
            packed=packed,
            promoted=int(promotee is not None),
        )

    def _diff(self) -> tuple[list[DecodedKV], list[DecodedKV], list[MemberId]]:
        """Return (keep, unwanted, adds). Of two assignments of one member, the second is unwanted."""
        keep: dict[MemberId, DecodedKV] = {}
        unwanted: list[DecodedKV] = []
        for kv in self.current:
            member = kv.decoded.member_id
            if member in self.desired and member not in keep:
                keep[member] = kv
            else:
                unwanted.append(kv)
        adds = [member for member in sorted(self.desired) if member not in keep]
        return list(keep.values()), unwanted, adds

    def _constrain_removes(
        self, keep: list[DecodedKV], unwanted: list[DecodedKV]
    ) -> tuple[list[DecodedKV], list[DecodedKV]]:
        """Return (removes, rejoined): unwanted assignments to remove now, and others that stay for now.

        At least as many consistent assignments remain as the item's replication, or none is removed. Begin
        with the most loaded members. The second assignment of a desired member is always removed: the first
        assignment holds the same. A step that etcd applied late may have made the second assignment, which
        keeps replicas inconsistent.
        """
        members = {kv.decoded.member_id for kv in keep}
        duplicates = [kv for kv in unwanted if kv.decoded.member_id in members]
        if duplicates:
            return duplicates, [kv for kv in unwanted if kv not in duplicates]
        replication = self.round.replication[self.item.decoded.id]
        consistent_left = len(self.consistent)
        by_load = sorted(
            unwanted, key=lambda kv: self.loads.total_ratio(kv.decoded.member_id), reverse=True
        )
        for index, kv in enumerate(by_load):
            is_consistent = kv.key in self.consistent
            if consistent_left < replication or (is_consistent and consistent_left == replication):
                return by_load[:index], by_load[index:]
            consistent_left -= is_consistent
        return by_load, []

    def _remove(self, removes: list[DecodedKV], keep: list[DecodedKV]) -> None:
        """Remove assignments, if the item and the assignments that make this safe are unchanged in etcd: each
        assignment of ``keep`` that is consistent, or of a member of ``removes``."""
        if not removes:
            return
        self.compares.append(_unchanged(self.item))
        members = {kv.decoded.member_id for kv in removes}
        self.compares += [
            _unchanged(kv)
            for kv in keep
            if kv.key in self.consistent or kv.decoded.member_id in members
        ]
        for kv in removes:
            self.compares.append(_unchanged(kv))
            self.operations.append(Op.delete(kv.key))
            self.loads.remove(kv.decoded.member_id, kv.decoded.slot)

    def _nothing_newer(self) -> Compare:
        """Return the condition that the item got no assignment meanwhile. Otherwise, a step that etcd applies
        late, after steps of another leader, could make a second primary, or give a member two slots.
        """
        begin, end = prefix_range(item_assignments_prefix(self.round.root, self.item.decoded.id))
        newest = max((kv.raw.create_revision for kv in self.current), default=0)
        return Compare(Target.CREATE_REVISION, begin, "<", newest + 1, end)

    def _promotee(self, keep: list[DecodedKV]) -> DecodedKV | None:
        """Return the replica that becomes the primary; None if the item has a primary left, or no replica.

        Prefer a consistent replica. Else prefer the replica that holds the most. A member that has just
        joined holds nothing: its promotion would drop the survivors' bytes. Of equal replicas, prefer one of
        a desired member, then the one of the member with the least share of primaries.
        """
        if not keep or any(kv.decoded.slot == 0 for kv in keep):
            return None
        candidates = [kv for kv in keep if kv.key in self.consistent]
        if not candidates:
            greatest = max(map(self.round.progress, keep))
            candidates = [kv for kv in keep if self.round.progress(kv) == greatest]

        def preference(kv: DecodedKV) -> tuple[bool, float, int]:
            member = kv.decoded.member_id
            return (
                member not in self.desired,
                self.loads.primary_ratio(member),
                kv.decoded.slot,
            )

        return min(candidates, key=preference)

    def _move(self, kv: DecodedKV, slot: int) -> None:
        """Move an assignment to another slot. Slots are part of the key: delete the key, and put its value
        and lease at the new key."""
        assignment: Assignment = kv.decoded
        zone, suffix = assignment.member_id
        key = assignment_key(self.round.root, assignment.item_id, zone, suffix, slot)
        if (unchanged := _unchanged(kv)) not in self.compares:
            self.compares.append(unchanged)
        self.operations.append(Op.delete(kv.key))
        self.operations.append(Op.put(key, kv.raw.value, lease=kv.raw.lease))
        self.loads.move(assignment.member_id, assignment.slot, slot)

    def _add(self, adds: list[MemberId]) -> int:
        """Add assignments for members that stay and have room. The item's first assignment is the primary."""
        if not self.current:
            adds = sorted(
                adds, key=lambda m: (self.loads.primary_ratio(m), self.loads.total_ratio(m), m)
            )
        slot = max((kv.decoded.slot for kv in self.current), default=-1) + 1
        added = 0
        for member in adds:
            kv = self.round.members.get(member)
            if kv is None or kv.decoded.value.exiting() or not self.loads.has_room(member):
                continue
            key = assignment_key(self.round.root, self.item.decoded.id, *member, slot)
            self.compares.append(_unchanged(kv))
            self.operations.append(Op.put(key, b"", lease=kv.raw.lease))
            self.loads.add(member, slot)
            slot += 1
            added += 1
        return added

    def _pack(self, keep: list[DecodedKV]) -> int:
        """Close the lowest gap in the slots. Move at most one assignment per step, since gaps do no harm."""
        for index, kv in enumerate(keep):
            if kv.decoded.slot != index:
                self._move(kv, index)
                return 1
        return 0
