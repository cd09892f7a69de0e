"""The calls of a shard's thread to other parts: `ShardIO`. The shard, or a test, implements them."""

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
    """Report of a transaction that is committed and acknowledged, or of a restored checkpoint, which has no
    phases."""

    read_through: dict[str, int]
    publish_at: dict[str, int]
    messages: int
    bytes: int
    phases: Phases | None
    timers: int = 0
    """Number of timers that fired."""


class ShardIO(Protocol):
    """The calls of a transactor to other parts of the shard. All methods may be called on its thread."""

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        """Append an acknowledgement of a restored checkpoint. Succeed if the journal was deleted."""
        ...

    def require_assigned(self) -> None:
        """Block until etcd confirms that the shard still belongs to this member, or raise ``Closed``.

        Called before the checkpoint is restored again, which may set a fence.
        """
        ...

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        """Yield the messages of a range of a source again. Block."""
        ...

    def progress(self, read_through: dict[str, int]) -> None:
        """Report offsets up to which sources were read without a transaction."""
        ...

    def finished(self, transaction: FinishedTransaction) -> None: ...

    def read_again(self, journal: str, begin: int, end: int) -> bytes:
        """Return bytes of a source. Block. Return ``b""`` if some of them have been deleted."""
        ...

    def skipped(self, journal: str, reason: str) -> None:
        """Report that the shard's poison policy has skipped a message or a timer. For a timer, ``journal`` is
        empty."""
        ...

    def stalled(self, reason: str) -> None:
        """Report that a transaction has reached its maximum duration, and waits for the prior commit."""
        ...
