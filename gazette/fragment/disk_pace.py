"""Stage 6 of the byte path: measures if the spool disk is fast enough for the event loop.

A small write or read takes microseconds, since it ends in the page cache. A thread would cost more than it
frees. But a slow disk would stop the whole broker, and cost it its lease: for example one that must write
back before it takes more. So operations are timed. After a slow one, the next ones run in threads, for all
spools of the disk. The loop is used again once the disk has been fast for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

SLOW_S: Final = 0.010
"""Seconds. Twice as long as the interpreter may delay a thread, which is no fault of the disk."""
FAST_AGAIN_S: Final = 5.0
FAST_AGAIN_OPERATIONS: Final = 16
_UNIT_BYTES: Final = 1 << 19
"""Operations on more bytes may take longer, in proportion."""


@dataclass(slots=True)
class Pace:
    """The pace of one kind of operations on a disk. ``monotonic`` returns the seconds of a clock."""

    monotonic: Callable[[], float]
    _slow_at: float | None = None
    """The time at which the last slow operation ended; None: fast."""
    _fast: int = 0
    """Number of fast operations since."""

    @property
    def is_fast(self) -> bool:
        """True if operations may run on the event loop."""
        return self._slow_at is None

    def note(self, began: float, length: int) -> None:
        """Record an operation on ``length`` bytes that ends now, on the loop or
        in a thread, successful or not.

        ``began`` is its ``monotonic`` time.
        """
        ended = self.monotonic()
        if ended - began >= SLOW_S * max(1.0, length / _UNIT_BYTES):
            self._slow_at, self._fast = ended, 0
            return
        slow_at = self._slow_at
        if slow_at is None:
            return
        self._fast += 1
        if self._fast >= FAST_AGAIN_OPERATIONS and ended - slow_at >= FAST_AGAIN_S:
            self._slow_at = None


@dataclass(slots=True)
class DiskPace:
    """The pace of one disk. Writes and reads have one each, as they wait for different things."""

    monotonic: Callable[[], float]
    writes: Pace = field(init=False)
    """For writes, and for the creation of files."""
    reads: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.writes, self.reads = Pace(self.monotonic), Pace(self.monotonic)
