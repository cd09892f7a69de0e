"""The listings of blob stores for all replicas of a broker, at their intervals and within a limit of work.

One daemon begins the listings, in the order in which they are due. With thousands of journals, a daemon for
each journal would take most of the event loop's time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from gazette.runtime.agenda import Agenda, Allowance, Slots
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope, sleep_unless
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.blobs.registry import ActiveStore

AGAIN_PER_S: Final = 100.0
"""Limit of repeated listings that begin in a second. First listings have no limit: appends wait for them."""
_AT_A_TIME: Final = 32
_PATIENCE_S: Final = 0.25
"""Seconds after which a running listing occupies no slot: another first listing may begin."""
_TICK_S: Final = 0.05
_IDLE_S: Final = 3600.0
_SOON_S: Final = 1.0
"""Seconds between the first two listings of a replica. The time doubles with each listing."""
_RECOVERY_S: Final = 300.0


class Refreshed(Protocol):
    """The part of a replica that its listings use."""

    async def refresh(self) -> None:
        """List the blob stores of the journal once. Failures are noted, and not raised."""
        ...

    def refresh_interval_s(self, soon_s: float) -> float:
        """Return the seconds until the next listing: at most ``soon_s``, unless the journal seems to be
        new."""
        ...

    def unhealthy_stores(self) -> Sequence[ActiveStore]:
        """Return the stores for whose recovery a failed listing waits; none after a successful listing."""
        ...

    @property
    def is_listed(self) -> bool:
        """True once a listing has succeeded."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    replica: Refreshed
    soon_s: float = _SOON_S
    due_at: float = 0.0
    task: asyncio.Task[None] | None = None
    slot: int = 0


class Refresher:
    """Begins listings for the replicas that were added. Run ``run`` as a daemon. Loop-bound.

    A new replica lists more often, at intervals that double. So does a replica after ``list_now``. If too
    many listings are due, each journal is listed less often than its interval says.
    """

    def __init__(self, clock: Clock, scope: TaskScope) -> None:
        self._clock = clock
        self._scope = scope
        self._entries: dict[Refreshed, _Entry] = {}
        self._first: Agenda[_Entry] = Agenda()
        """Replicas without a listing that has succeeded, by the time of the next listing."""
        self._again: Agenda[_Entry] = Agenda()
        """Replicas whose stores were listed, by the time of the next listing."""
        self._allowance = Allowance(AGAIN_PER_S, clock.monotonic())
        self._slots = Slots(_AT_A_TIME, _PATIENCE_S, clock.monotonic())
        self._waiting: dict[ActiveStore, set[_Entry]] = {}
        """By store: replicas to list once the store is healthy."""
        self._changed = asyncio.Event()

    def add(self, replica: Refreshed) -> None:
        """List the stores of a replica now, and then at its intervals, until ``remove``."""
        entry = self._entries[replica] = _Entry(replica)
        self._first.push(entry, self._clock.monotonic())
        self._changed.set()

    def remove(self, replica: Refreshed) -> None:
        """End a running listing for the replica, and begin no more. May be repeated."""
        entry = self._entries.pop(replica, None)
        if entry is None:
            return
        entry.due_at = math.inf  # The queues drop the entry.
        if entry.task is not None:
            entry.task.cancel()

    def list_now(self, replica: Refreshed) -> None:
        """List the stores of a replica now, and soon again. Cancel its listing if one runs."""
        entry = self._entries.get(replica)
        if entry is None:
            return
        entry.soon_s = _SOON_S
        if entry.task is None:
            self._schedule(entry, 0.0)
        else:
            entry.task.cancel()  # `_ended` schedules the next listing.

    async def run(self) -> NoReturn:
        """Begin listings when they are due, for ever."""
        while True:
            self._changed.clear()
            next_s = self._begin_due(self._clock.monotonic())
            await sleep_unless(self._clock, next_s, self._changed)

    def _schedule(self, entry: _Entry, after_s: float) -> None:
        queue = self._again if entry.replica.is_listed else self._first
        queue.push(entry, self._clock.monotonic() + after_s)
        if queue.first() is entry:
            self._changed.set()

    def _begin_due(self, now: float) -> float:
        """Begin due listings, as far as their limits permit. Return the seconds until the next look."""
        while self._begin_first(now):
            pass
        while (repeated := self._again.first()) is not None and repeated.due_at <= now:
            if not self._allowance.take(now):
                return _TICK_S
            self._again.take(now)  # This takes ``repeated``, the first entry.
            self._begin(repeated)
        waits = [_IDLE_S]
        if (entry := self._first.first()) is not None:
            waits.append(entry.due_at - now if entry.due_at > now else self._slots.next_s(now))
        if repeated is not None:
            waits.append(repeated.due_at - now)
        return max(min(waits), _TICK_S)

    def _begin_first(self, now: float) -> bool:
        """Begin the first listing that is due. Return False if none is due, or none may begin now."""
        entry = self._first.take(now) if self._slots.are_free(now) else None
        if entry is not None:
            self._begin(entry)
        return entry is not None

    def _begin(self, entry: _Entry) -> None:
        entry.due_at = math.inf
        entry.slot = self._slots.take()
        entry.task = self._scope.spawn(entry.replica.refresh(), name="refresh")
        entry.task.add_done_callback(partial(self._ended, entry))

    def _ended(self, entry: _Entry, task: asyncio.Task[None]) -> None:
        """Schedule the next listing of a replica, and begin another listing in the free slot."""
        entry.task = None
        self._slots.free(entry.slot)
        if not task.cancelled() and not self._scope.is_stopping:
            self._begin_first(self._clock.monotonic())
        if self._entries.get(entry.replica) is not entry or self._scope.is_stopping:
            return
        if task.cancelled():  # By `list_now`.
            self._schedule(entry, 0.0)
            return
        for active in entry.replica.unhealthy_stores():
            self._await_healthy(active, entry)
        self._schedule(entry, entry.replica.refresh_interval_s(entry.soon_s))
        entry.soon_s *= 2

    def _await_healthy(self, active: ActiveStore, entry: _Entry) -> None:
        if active not in self._waiting:
            self._waiting[active] = set()
            self._scope.spawn(self._on_healthy(active), name=f"wait for {active.url}")
        self._waiting[active].add(entry)

    async def _on_healthy(self, active: ActiveStore) -> None:
        """List the stores of all waiting replicas once ``active`` is healthy. After `_RECOVERY_S`, give up:
        the next failed listings of these replicas wait for the store again."""
        try:
            async with timeout(_RECOVERY_S):
                await active.wait_healthy()
        except TimeoutError:
            del self._waiting[active]
            return
        for entry in self._waiting.pop(active):
            self.list_now(entry.replica)
