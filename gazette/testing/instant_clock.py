"""For tests that wait for events: a clock on which sleeping takes no time, and polling for a state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class InstantClock:
    """A `gazette.clock.Clock` whose sleeps are over at once. They are recorded in ``slept``, and time
    is ahead by them; apart from that it passes as usual."""

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


async def eventually(predicate: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Let other tasks and threads run until something is so. Raises ``TimeoutError``."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110 - it may depend on anything
            await asyncio.sleep(0.001)


async def breathe() -> None:
    """Let what is ready on the loop run once."""
    await asyncio.sleep(0)
