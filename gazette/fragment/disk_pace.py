"""Stage 6 of the byte path: measures if the spool disk is fast enough for the event loop.

A small write or read takes microseconds, since it ends in the page cache. A thread would cost more than it
frees. But a slow disk would stop the whole broker, and cost it its lease: for example one that must write
back before it takes more. So operations are timed. After a slow one, the next ones run in threads, for all
spools of the disk. The loop is used again once the disk has been fast for a while.

An operation also takes long if the scheduler gives its processor to another thread meanwhile. That says
nothing about the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

SLOW_S: Final = 0.010
"""Seconds. Twice as long as the interpreter may delay a thread, which is no fault of the disk."""
FAST_AGAIN_S: Final = 5.0
FAST_AGAIN_OPERATIONS: Final = 16
_UNIT_BYTES: Final = 1 << 19
"""Operations on more bytes may take longer, in proportion."""


Switches: TypeAlias = tuple[int, int]
"""The numbers of times for which a thread has waited, and for which it lost its processor."""
Began: TypeAlias = tuple[float, Switches | None]
"""The time at which an operation began, and the switches of its thread before it."""


@dataclass(slots=True)
class Pace:
    """The pace of one kind of operations on a disk. ``monotonic`` returns the seconds of a clock.

    ``switches`` returns those of the calling thread, if that clock is the machine's.
    """

    monotonic: Callable[[], float]
    switches: Callable[[], Switches | None] = lambda: None
    _slow_at: float | None = None
    """The time at which the last slow operation ended; None: fast."""
    _fast: int = 0
    """Number of fast operations since."""

    @property
    def is_fast(self) -> bool:
        """True if operations may run on the event loop."""
        return self._slow_at is None

    def begin(self) -> Began:
        """Begin an operation, on the loop or in a thread. Its thread gives the result to ``note``."""
        return self.monotonic(), self.switches()

    def note(self, began: Began, length: int) -> None:
        """Record an operation on ``length`` bytes that ends now, successful or not."""
        ended = self.monotonic()
        begin, before = began
        if ended - begin >= SLOW_S * max(1.0, length / _UNIT_BYTES):
            after = self.switches()
            if before is None or after is None or after[0] > before[0] or after[1] == before[1]:
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
    switches: Callable[[], Switches | None] = lambda: None
    writes: Pace = field(init=False)
    """For writes, and for the creation of files."""
    reads: Pace = field(init=False)

    def __post_init__(self) -> None:
        self.writes = Pace(self.monotonic, self.switches)
        self.reads = Pace(self.monotonic, self.switches)
