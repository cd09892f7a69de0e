"""A queue of entries ordered by due time, and two limits: actions a second, and actions at one time."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Generic, Protocol, TypeVar


class Due(Protocol):
    """An entry that is due at ``due_at``; never, if that is infinite."""

    due_at: float


D = TypeVar("D", bound=Due)


class Agenda(Generic[D]):
    """A queue ordered by due time. It has each entry once: a later ``push`` replaces an earlier one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, D]] = []
        self._order = itertools.count()

    def push(self, entry: D, due_at: float) -> None:
        entry.due_at = due_at
        heapq.heappush(self._heap, (due_at, next(self._order), entry))

    def first(self) -> D | None:
        """Return the entry that is due first; None if there are no entries."""
        while self._heap:
            due_at, _, entry = self._heap[0]
            # After a second ``push`` of the entry, its older item stays in the heap until it comes first.
            if due_at == entry.due_at:
                return entry
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> D | None:
        """Remove and return the entry that is due first; None if it is due after ``now``."""
        entry = self.first()
        if entry is None or entry.due_at > now:
            return None
        heapq.heappop(self._heap)
        entry.due_at = math.inf
        return entry


class Allowance:
    """Permits ``per_s`` actions a second. After a pause of 1 s, ``per_s`` actions may begin at once."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._at = now

    def take(self, now: float) -> bool:
        """Return True if an action is permitted at ``now``, and count it."""
        self._left = min(self._left + (now - self._at) * self._per_s, self._per_s)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    @property
    def next_s(self) -> float:
        """The seconds after the last ``take`` until one more action is permitted."""
        return max(1 - self._left, 0.0) / self._per_s


class Slots:
    """Permits ``count`` actions at a time. Each round of ``patience_s`` seconds begins with all slots free.

    So a burst does not fill the event loop, and actions that hang block others for one round at most.
    """

    def __init__(self, count: int, patience_s: float, now: float) -> None:
        self._count = count
        self._patience_s = patience_s
        self._round = 0
        """Number of the present round. Actions of former rounds are not counted any more."""
        self._begun_at = now
        self._taken = 0  # Actions of this round that have not ended.

    def are_free(self, now: float) -> bool:
        """Return True if one more action may begin at ``now``."""
        if now - self._begun_at >= self._patience_s:
            self._round, self._begun_at, self._taken = self._round + 1, now, 0
        return self._taken < self._count

    def take(self) -> int:
        """Count one more action. Return its slot, for ``free``."""
        self._taken += 1
        return self._round

    def free(self, slot: int) -> None:
        """Count one action less, unless its slot is of a former round."""
        if slot == self._round:
            self._taken -= 1

    def next_s(self, now: float) -> float:
        """Return the seconds after ``now`` until slots are free even if no action ends."""
        return max(self._begun_at + self._patience_s - now, 0.0)
