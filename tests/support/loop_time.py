"""The time of an event loop, moved by a test: a limit is over at once, and none is by chance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gazette.runtime.clock import SystemClock


class LoopTime:
    """Stops the time of the running loop, by which its timers and time limits go. ``advance`` moves it.

    It concerns this test's loop alone, and ends with it. Of the code under test it needs no more than that
    it asks the loop for the time. A test's own time limits do not pass, either: pytest has one in real time.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._passed = loop.time
        self._now = loop.time()
        loop.time = lambda: self._now  # type: ignore[method-assign]

    def go_on(self) -> None:
        """Let time pass as usual from now on. A fixture of the same loop may need that."""
        loop, passed = asyncio.get_running_loop(), self._passed
        ahead_s = self._now - passed()
        loop.time = lambda: passed() + ahead_s  # type: ignore[method-assign]

    def advance(self, seconds: float) -> None:
        """Let timers be due in the next turn of the loop."""
        self._now += seconds

    async def pass_until(self, holds: Callable[[], object], step_s: float) -> None:
        """Let time pass in steps, each with some turns of the loop, until something holds."""
        while not holds():
            self.advance(step_s)
            await turns()


async def turns(count: int = 20) -> None:
    """Let the loop turn: what arrived on sockets is read, and what is ready runs."""
    for _ in range(count):
        await SystemClock().sleep(0)


class LoopClock(SystemClock):
    """The machine's clock, but that the running loop says how much time has passed."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()
