"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math


class ManualClock:
    """A `gazette.runtime.clock.Clock` whose time passes only by ``advance``.

    ``now`` starts at a realistic Unix time: near the epoch, code that prunes producers, or flushes
    fragments at round times, misbehaves.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 1_000.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Wait until ``advance`` has let ``seconds`` pass. Zero yields to other tasks once."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), woken))
        await woken

    @property
    def sleepers(self) -> int:
        """Number of tasks that sleep on this clock."""
        return sum(1 for _, _, woken in self._sleepers if not woken.done())

    @property
    def next_s(self) -> float:
        """Seconds until the first sleeping task is due. Infinite if no task sleeps."""
        due_times = [time_s for time_s, _, woken in self._sleepers if not woken.done()]
        return min(due_times) - self._monotonic if due_times else math.inf

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass. Wake every sleeping task that is due, in order of its time."""
        self._now += seconds
        self._monotonic += seconds
        while self._sleepers and self._sleepers[0][0] <= self._monotonic:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)

    def jump(self, seconds: float) -> None:
        """Move only the wall clock by ``seconds``, as an administrator or NTP would."""
        self._now += seconds
