"""All that a shard's thread needs from outside: `ShardIO`. The shard, or a test, provides it."""

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
    """Report of a transaction that is committed and acknowledged."""

    read_through: dict[str, int]
    publish_at: dict[str, int]
    messages: int
    bytes: int
    phases: Phases | None
    timers: int = 0
    """Number of timers that fired."""


class ShardIO(Protocol):
    """The shard, as its transactor needs it beyond the thread. The thread may call every method."""

    def append_recovered(self, journal: str, intent: bytes) -> OpFuture[Any]:
        """Append an acknowledgement of a restored checkpoint. A journal that is gone counts as done."""
        ...

    def require_assigned(self) -> None:
        """Block until etcd confirms that the shard still belongs to this member.

        The shard is about to take its store over. Raise ``Closed`` if it is not ours.
        """
        ...

    def replay(self, wanted: ReplayRange) -> Iterator[Sequence[Envelope[Any]]]:
        """Read a range of a source again, blocking."""
        ...

    def progress(self, read_through: dict[str, int]) -> None:
        """Report offsets that were read through without a transaction."""
        ...

    def finished(self, transaction: FinishedTransaction) -> None: ...

    def read_again(self, journal: str, begin: int, end: int) -> bytes:
        """Return bytes of a source, blocking; fewer, or none, if they have been deleted."""
        ...

    def skipped(self, journal: str, reason: str) -> None:
        """Report that a message was skipped by the shard's poison policy."""
        ...

    def stalled(self, reason: str) -> None:
        """Report that a transaction has long been ready to commit, and the prior one is not done."""
        ...
