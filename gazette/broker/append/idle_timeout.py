"""The deadline of a caller that keeps an append waiting. It excludes pauses of the broker's own loop."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from gazette.runtime.timeouts import timeout

_LATE_S: Final = 0.05
"""Lateness of a timer, in seconds, above which the event loop itself stood still."""
_GRACE_S: Final = 0.25
"""Seconds that the caller gets in addition after a pause of the loop: its data may already be queued."""


class IdleTimeout:
    """Raises ``TimeoutError`` out of its block after ``seconds``; None: never.

    If the event loop stood still when the time was up, the block gets `_GRACE_S` more: data may already be
    queued. ``stalled`` is then True: the caller's speed is not known. Without this grace, a pause of the
    broker would fail the append for good, with an unknown outcome.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = timeout(None)
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
