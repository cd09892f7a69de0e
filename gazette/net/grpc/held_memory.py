"""Memory of messages that no handler has taken yet, and of responses that wait for room at their caller.

A message counts with its full length as soon as its prefix announces it. A compressed message that the
handler has taken counts with its decompressed length until the handler takes the next message.
"""

from __future__ import annotations

from typing import Final, Protocol

from gazette.http2.connection import FIRST_BYTES, STREAM_BYTES

HELD_MAX: Final = 3 << 25
"""Upper bound of the bytes that all calls of a server hold together."""
_PLENTY: Final = 1 << 25
"""While all calls together hold fewer bytes, a call may send `STREAM_BYTES` ahead of its handler."""


class Holder(Protocol):
    """A call that holds messages."""

    def give_up_messages(self) -> None:
        """Drop the messages, and end the call. `HeldMemory` does not count them any more."""
        ...


class HeldMemory:
    """The memory that calls hold, at most ``most`` bytes together. Loop-bound.

    When little is left, a call may send less ahead of its handler. When nothing is left, the call that has
    held messages longest gives them up: it makes no progress. A call with progress holds nothing between two
    messages, and then counts as a new holder.
    """

    __slots__ = ("_held", "_most", "_total")

    def __init__(self, most: int = HELD_MAX) -> None:
        self._most = most
        self._total = 0
        self._held: dict[Holder, int] = {}

    @property
    def total(self) -> int:
        """Bytes that are held."""
        return self._total

    @property
    def ahead_bytes(self) -> int:
        """Bytes that a call may send ahead of its handler."""
        return STREAM_BYTES if self._total < _PLENTY else FIRST_BYTES

    def hold(self, holder: Holder, length: int) -> None:
        """Count ``length`` bytes for ``holder`` from now on, in place of its former count."""
        self._total += length - self._held.get(holder, 0)
        if length:
            self._held[holder] = length
        else:
            self._held.pop(holder, None)
        while self._total > self._most:
            oldest = next(iter(self._held))  # A dict keeps the order in which keys were inserted.
            self._total -= self._held.pop(oldest)
            oldest.give_up_messages()
