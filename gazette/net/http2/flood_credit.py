"""Credit for frames that ask for work and carry nothing: a peer that only sends those is cut off.

Pure. Pings, settings, resets and empty frames cost their sender a few bytes each, and cost us an answer or a
task. Every peer sends some of them; content in either direction pays for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.net.http2.frames import ConnectionFault, FaultCode

CREDIT_MAX: Final = 4_000
CREDIT_PER_S: Final = 500
CREDIT_OF_DATA: Final = 4
"""Credit of a DATA frame with content: its receiver answers with up to two updates of windows, and may
answer each with a ping."""


@dataclass(slots=True)
class FloodCredit:
    """The credit of one connection for frames without content. ``now`` is a monotonic time in seconds."""

    now: float
    credit: float = float(CREDIT_MAX)

    def earn(self) -> None:
        """Count a DATA frame with content, sent or received."""
        if self.credit < CREDIT_MAX:
            self.credit += CREDIT_OF_DATA

    def spend(self, now: float) -> None:
        """Count a frame without content. Raise ``ConnectionFault`` if there were too many."""
        self.credit -= 1
        if self.credit > 0:
            return
        earned = (now - self.now) * CREDIT_PER_S
        self.now = now
        self.credit = min(self.credit + earned, float(CREDIT_MAX))
        if self.credit <= 0:
            text = "too many frames without content"
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text)
