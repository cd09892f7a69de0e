"""How long a caller may keep an append waiting: a deadline that tells the caller's pauses from our own."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

_LATE_S: Final = 0.05
"""A timer that is later than this tells that the loop stood still, as on a machine with too much to do."""
_GRACE_S: Final = 0.25
"""How long we then look at what came meanwhile before it is the caller who is late."""


class Patience:
    """Raises ``TimeoutError`` out of its block after ``seconds``; None: never.

    Not if the loop stood still when it was due: whatever came in that time was there, and nobody looked.
    Then the caller gets a little more, and ``stalled`` says that nothing can be told of how fast it is. An
    append that was broken off for it would fail for good, as its outcome is unknown.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self.stalled = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        if self._seconds is not None:
            self._set(self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, tb)

    def _set(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        self._timer = loop.call_at(due, self._on_due, due)

    def _on_due(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        if now - due > _LATE_S:
            self.stalled = True
            self._set(_GRACE_S)
        else:
            self._timeout.reschedule(now)
