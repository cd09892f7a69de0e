"""Credit for frames that cause work and carry no content: a peer that sends only such frames is cut off.

Pure. A new stream, a ping, a reset or an empty frame costs the peer a few bytes. It costs this side an answer
or a task. Each such frame costs credit. Time and bytes of content, sent or received, earn credit. The number
of frames earns nothing: a peer may cut its content into as many frames as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gazette.http2.frames import ConnectionFault, FaultCode

CREDIT_MAX: Final = 24_000
"""Enough for a client that begins as many calls as a connection permits, and cancels all calls at once."""
CREDIT_PER_S: Final = 1_000
BYTES_PER_CREDIT: Final = 64


class FloodCredit:
    """The credit of one connection. ``monotonic`` gives the time in seconds."""

    __slots__ = ("_at", "_left", "_monotonic")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._at = monotonic()
        self._left = float(CREDIT_MAX)

    def earn(self, length: int) -> None:
        """Count bytes of content, sent or received."""
        if self._left < CREDIT_MAX:
            self._left += length / BYTES_PER_CREDIT

    def refund(self) -> None:
        """Give the cost of a stream back to the credit: this side has ended the stream."""
        if self._left < CREDIT_MAX:
            self._left += 1

    def spend(self, cost: int = 1) -> None:
        """Charge for work without content. Raise ``ConnectionFault`` if the credit is used up."""
        self._left -= cost
        if self._left > 0:
            return
        now = self._monotonic()
        earned = (now - self._at) * CREDIT_PER_S
        self._at = now
        self._left = min(self._left + earned, float(CREDIT_MAX))
        if self._left <= 0:
            text = "too many frames without content"
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text)
