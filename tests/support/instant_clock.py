"""Helpers for tests that wait for events: a clock on which sleeping takes no time, and polling for
a state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class InstantClock:
    """A `gazette.runtime.clock.Clock` whose sleeps end at once.

    ``slept`` records them, and time is ahead by their sum. Apart from that, time passes as usual.
    """

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._ahead = 0.0

    def now(self) -> float:
        return time.time() + self._ahead

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._ahead += seconds
        await asyncio.sleep(0)


async def eventually(predicate: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Let other tasks and threads run until ``predicate`` is true. Raise ``TimeoutError`` after
    ``timeout_s`` seconds.
    """
    async with asyncio.timeout(timeout_s):
        while not predicate():
            await asyncio.sleep(0.001)


async def breathe() -> None:
    """Run the tasks that are ready on the event loop once."""
    await asyncio.sleep(0)
