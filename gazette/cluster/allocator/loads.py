"""Number of assignments of every member, updated while a round of convergence is planned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from gazette.cluster.allocator.model import Assignment, MemberId


class Loads:
    """Assignments per member, in total and as primary, against each member's effective limit.

    This is mutable on purpose: the plan for one item changes the options of the next item. A member without
    a limit above zero (its key may be gone) counts as infinitely loaded.
    """

    __slots__ = ("_limits", "_primaries", "_totals")

    def __init__(self, limits: Mapping[MemberId, int], assignments: Iterable[Assignment]) -> None:
        self._limits = limits
        self._totals: dict[MemberId, int] = {}
        self._primaries: dict[MemberId, int] = {}
        for assignment in assignments:
            self.add(assignment.member_id, assignment.slot)

    def add(self, member: MemberId, slot: int) -> None:
        self._totals[member] = self._totals.get(member, 0) + 1
        if slot == 0:
            self._primaries[member] = self._primaries.get(member, 0) + 1

    def remove(self, member: MemberId, slot: int) -> None:
        self._totals[member] -= 1
        if slot == 0:
            self._primaries[member] -= 1

    def move(self, member: MemberId, old_slot: int, new_slot: int) -> None:
        self.remove(member, old_slot)
        self.add(member, new_slot)

    def total(self, member: MemberId) -> int:
        return self._totals.get(member, 0)

    def primaries(self, member: MemberId) -> int:
        return self._primaries.get(member, 0)

    def has_room(self, member: MemberId) -> bool:
        return self.total(member) < self._limits.get(member, 0)

    def total_ratio(self, member: MemberId) -> float:
        return self._ratio(member, self._totals)

    def primary_ratio(self, member: MemberId) -> float:
        return self._ratio(member, self._primaries)

    def _ratio(self, member: MemberId, counts: Mapping[MemberId, int]) -> float:
        limit = self._limits.get(member, 0)
        return counts.get(member, 0) / limit if limit > 0 else math.inf
