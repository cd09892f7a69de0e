"""The one doorway to time, so that nothing else reads it and tests can own it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time as components see it. Passed to constructors; never read from a global."""

    def now(self) -> float:
        """Unix time in seconds. May jump."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start. Never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds. Cancellation: returns at once, nothing is left behind."""
        ...


class SystemClock:
    """The machine's clock."""

    __slots__ = ()

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
