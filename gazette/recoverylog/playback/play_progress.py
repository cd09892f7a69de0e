"""Progress and result of a player."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from gazette.recoverylog.log.fsm import RecoveryFSM


class PlayerState(enum.Enum):
    """State of a player: before it has reached the head, after that, at its end, or after an error."""

    BACKFILL = "backfill"
    TAILING = "tailing"
    LIVE = "live"
    """Play-back has ended, and the files have their paths."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """Result of a player: the directory holds the files of ``fsm``.

    ``author`` is the new author of the log, or None after a read-only recovery. ``write_head`` is the
    offset at which ``log`` ended when play-back ended, in bytes.
    """

    log: str
    fsm: RecoveryFSM
    directory: Path
    author: int | None
    write_head: int


@dataclass(frozen=True, slots=True)
class PlayProgress:
    """Progress of a player. Offsets and sizes are in bytes.

    ``offset`` is the offset of the next byte to read. ``read_through`` is the offset up to which the log is
    known to reach: 0 for an empty log, or before the first answer of a broker.
    """

    state: PlayerState
    log: str
    offset: int
    read_through: int
    bytes_read: int
    seconds: float

    @property
    def lag_bytes(self) -> int:
        return max(0, self.read_through - self.offset)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        if not self.read_through:
            return f"{self.state.value} {self.log}, its brokers are asked where it ends"
        text = f"{self.state.value} {self.log} at {self.offset} of {self.read_through}"
        if not self.bytes_per_second:
            return f"{text}, no bytes yet"
        eta = self.lag_bytes / self.bytes_per_second
        return f"{text}, {self.bytes_per_second / 1e6:.1f} MB/s, {eta:.0f} s left"
