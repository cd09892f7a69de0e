"""Memory of messages that have arrived, or are announced, and that no handler has taken yet. And memory of
responses that wait for room at their caller.

A message counts from its announcement on, with all of its length: that is what it will take. One that was
compressed counts with its whole length once it is taken, until the next one is.
"""

from __future__ import annotations

from typing import Final, Protocol

from gazette.http2.connection import FIRST_BYTES, STREAM_BYTES

HELD_MAX: Final = 3 << 25
"""Bytes that all calls of a server hold together."""
_PLENTY: Final = 1 << 25
"""Bytes up to which each call may be as far ahead of its handler as it likes."""


class Holder(Protocol):
    """A call that holds messages."""

    def give_up_messages(self) -> None:
        """Drop them, and end. The memory was released already."""
        ...


class HeldMemory:
    """Bytes that calls hold, at most ``most`` of all together. Loop-bound.

    If there is little room, calls may send less ahead. Without room, the call that has held something for
    the longest time gives its messages up. A call that makes progress holds nothing between two of its
    messages.
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
        """Count that ``holder`` holds ``length`` bytes from now on; with zero, that it holds none."""
        self._total += length - self._held.get(holder, 0)
        if length:
            self._held[holder] = length
        else:
            self._held.pop(holder, None)
        while self._total > self._most:
            oldest = next(iter(self._held))
            self._total -= self._held.pop(oldest)
            oldest.give_up_messages()
