"""Access to time. Components read it from a `Clock` that they are given, so tests can control it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Time as components see it. Passed to constructors."""

    def now(self) -> float:
        """Return Unix time in seconds. May jump."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start. Never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds. Cancellation: returns at once, nothing is left behind."""
        ...


class SystemClock:
    """The machine's clock."""

    __slots__ = ()

    # No Python function in between: publishers read the time for each message, brokers for each append.
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(seconds)
