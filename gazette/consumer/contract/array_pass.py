"""The interface by which an application has its shards decode and sequence messages in arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import Framing
from gazette.message.sequencer.sequencer import Sequencer
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset


class MessageRows(Sequence[Envelope[Any]]):
    """Committed messages of one source in columns, without acknowledgements.

    Each access to an envelope decodes its message again. A slice shares the columns.
    """

    @abstractmethod
    def distinct(self, attribute: str) -> Sequence[Hashable] | None:
        """Return the different values of an attribute of the messages; None if no column has them."""

    @abstractmethod
    def size_of(self, count: int) -> int:
        """Return the bytes of the journal from the first to the last of the first ``count`` messages. Other
        messages between them count."""


class ArrayPass(Protocol):
    """Decoding and sequencing in arrays. The methods return a decoder and a sequencer with the same results
    as the decoder and sequencer of objects."""

    chunk_bytes: int
    """Bytes of a source to decode together: waiting chunks are joined until they have as many bytes."""

    def prepare(self) -> None:
        """Load or compile code for decoders. Block, for a minute at the first use on a machine."""
        ...

    def new_decoder(
        self, journal: JournalName, framing: Framing[Any], offset: Offset
    ) -> EnvelopeDecoder[Any]:
        """Return the decoder of a source. Raise ``Invalid`` if its messages have no columns."""
        ...

    def new_sequencer(
        self, sources: Mapping[JournalName, SourceCheckpoint], ring_size: int
    ) -> Sequencer[Any]:
        """Return the sequencer of a shard, whose batches are `MessageRows`."""
        ...
