"""Streams of a server that wait for their callers: each occupies a place, and nothing is done for it.

These are calls whose first message has not arrived, and requests that were refused and have not ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc

FIRST_MESSAGE_S: Final = 10.0
"""Seconds from the head of a call to the end of its first message."""
UNFINISHED_MAX: Final = 1_000
"""Greatest number of unfinished calls of a server."""


class UnfinishedCall(Protocol):
    """The part of a call, or of a refused request, that this module uses."""

    @property
    def connection(self) -> Any:
        """The connection to which the call belongs."""
        ...

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status before its handler ends."""
        ...


class Unfinished:
    """The unfinished calls, oldest first. Loop-bound. A call that is late is ended. If there are too many,
    the oldest is ended."""

    def __init__(self, monotonic: Callable[[], float], most: int = UNFINISHED_MAX) -> None:
        self._monotonic = monotonic
        self._most = most
        self._calls: dict[UnfinishedCall, float] = {}
        """Calls, each with the time at which it must have a message."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: UnfinishedCall) -> None:
        """Watch a call from its head on."""
        if len(self._calls) >= self._most:
            self._give_up(
                grpc.StatusCode.UNAVAILABLE, "too many calls have not sent their first message"
            )
        self._calls[call] = self._monotonic() + FIRST_MESSAGE_S
        if self._timer is None:
            self._watch(FIRST_MESSAGE_S)

    def discard(self, call: UnfinishedCall) -> None:
        """Stop watching a call: its message has arrived, or it has ended."""
        self._calls.pop(call, None)

    def by_connection(self) -> Counter[Any]:
        """Return the number of unfinished calls of each connection."""
        return Counter(call.connection for call in self._calls)

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        """End the oldest call with a status."""
        call = next(iter(self._calls))
        del self._calls[call]
        call.give_up(code, details)

    def _watch(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        now = self._monotonic()
        while self._calls:
            left_s = next(iter(self._calls.values())) - now
            if left_s > 0:
                self._watch(left_s)
                return
            details = f"the first message did not arrive within {FIRST_MESSAGE_S:.0f} s"
            self._give_up(grpc.StatusCode.DEADLINE_EXCEEDED, details)
