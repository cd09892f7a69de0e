"""A function that the event loop calls once after a delay, unless the alarm is unset before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls a function once, unless the alarm is unset before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        """Call the function after ``delay_s``. Do nothing if the alarm is set already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._ring)

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def unset(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        self._call()
