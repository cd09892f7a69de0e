"""What a shard's thread needs of the world beyond it: `ShardIO`. The shard itself, or a test, provides it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gazette.consumer.transaction.transaction import Phases
from gazette.message.envelope import Envelope
from gazette.message.sequencer.sequencer import ReplayRange
from gazette.runtime.tasks import OpFuture


@dataclass(frozen=True, slots=True)
class FinishedTransaction:
    """What the outside learns of a transaction that is committed and acknowledged."""

    read_through: dict[str, int]
    publish_at: dict[str, int]
    messages: int
    bytes: int
    phases: Phases | None


class ShardIO(Protocol):
    """What a transactor needs of its shard beyond the thread. Every method may be called from it."""

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        """Append an acknowledgement that a checkpoint held; a journal that is gone counts as done."""
        ...

    def require_assigned(self) -> None:
        """Block until the shard is known to be still its owner's, who is about to take its store over.
        Raises ``Closed`` if it is not."""
        ...

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        """Read a range of a source again, blocking."""
        ...

    def progress(self, read_through: dict[str, int]) -> None:
        """Offsets were read through without a transaction."""
        ...

    def finished(self, transaction: FinishedTransaction) -> None: ...

    def read_again(self, journal: str, begin: int, end: int) -> bytes:
        """Bytes of a source, blocking; fewer, or none, if they have been deleted."""
        ...

    def skipped(self, journal: str, reason: str) -> None:
        """A message was skipped, as the shard's poison policy says."""
        ...

    def stalled(self, reason: str) -> None:
        """A transaction has been ready to commit for long, and its predecessor is not done."""
        ...
