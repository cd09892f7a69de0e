"""Stage 11 of the byte path: takes bytes from `client/retry_reader`, gives batches of envelopes.

For programs that read journals without being a consumer. `UncommittedReader` gives every message as
it was written, `CommittedReader` (with stage 12) each message once, when it has committed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

from gazette.client.journals import get_journal
from gazette.client.reader import OffsetJump, ReadParams
from gazette.errors import Invalid, NotYet
from gazette.labels import CONTENT_TYPE
from gazette.message.envelope import Envelope
from gazette.message.envelope_decoder import EnvelopeDecoder
from gazette.message.frames import Framing, MalformedMessage
from gazette.message.framing import framing_of
from gazette.message.sequencer import ReplayRange, Sequencer
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset

if TYPE_CHECKING:
    from gazette.client.client import Client

log = logging.getLogger(__name__)

M = TypeVar("M")

RING_SIZE: Final = 8192
"""How many messages a reader keeps of open transactions, before it has to read them again."""
BATCH_MAX: Final = 4096
_READ_BYTES_MAX: Final = 1 << 20

OnMalformed: TypeAlias = Callable[[MalformedMessage], None]
"""Called with each frame that is no message; reading goes on behind it. It may raise."""


class ByteSource(Protocol):
    """The part of `gazette.client.retry_reader.RetryReader` that is needed here."""

    offset: Offset

    async def read(self, max_bytes: int = 0, /) -> bytes: ...

    def close(self) -> None: ...


async def journal_framing(client: Client, journal: JournalName, message_type: Any) -> Framing[Any]:
    """The framing of a journal's content type, for messages of a type.

    Raises what `get_journal` does, and `Invalid` if the content type is unknown, or cannot hold them.
    """
    listed = await get_journal(client, journal)
    try:
        return framing_of(listed.spec.labels.value_of(CONTENT_TYPE) or "", message_type)
    except Invalid as error:
        raise error.within(journal) from error


async def read_batches(
    source: ByteSource,
    journal: JournalName,
    framing: Framing[M],
    *,
    on_malformed: OnMalformed | None = None,
) -> AsyncGenerator[list[Envelope[M]], None]:
    """Envelopes of a source's bytes until its end, or until it says ``NotYet``. Closes the source.

    Where the journal has lost bytes it goes on behind them, with a warning. Raises what the source
    does, `TruncatedFrame` at the end, and `MalformedMessage` unless ``on_malformed`` is given.
    """
    decoder: EnvelopeDecoder[M] | None = None
    try:
        while True:
            try:
                chunk = await source.read(_READ_BYTES_MAX)
            except OffsetJump as jump:
                log.warning(
                    "%(journal)s: reading goes on at offset %(offset)d: %(reason)s",
                    {"journal": journal, "offset": jump.offset, "reason": jump},
                )
                if decoder is not None:
                    _jump(decoder, jump.offset, on_malformed)
                continue
            except NotYet:
                break
            if not chunk:
                break
            if decoder is None:
                decoder = EnvelopeDecoder(journal, framing, source.offset - len(chunk))
            decoder.feed(chunk)
            while batch := _decode(decoder, on_malformed):
                yield batch
        if decoder is not None:
            decoder.finish()
    finally:
        source.close()


def _decode(decoder: EnvelopeDecoder[M], on_malformed: OnMalformed | None) -> list[Envelope[M]]:
    while True:
        try:
            return decoder.decode()
        except MalformedMessage as error:
            if on_malformed is None:
                raise
            on_malformed(error)
            decoder.skip(error)


def _jump(decoder: EnvelopeDecoder[Any], offset: Offset, on_malformed: OnMalformed | None) -> None:
    try:
        decoder.jump(offset)
    except MalformedMessage as error:
        if on_malformed is None:
            raise
        on_malformed(error)


class UncommittedReader(Generic[M]):
    """Every message of a journal, also repeated ones and those that are rolled back. Loop-bound.

    ``params`` says where it begins and ends; without ``block`` it ends at the head of the journal.
    ``on_malformed`` is called with frames that are no message, which otherwise end the reading.
    """

    def __init__(
        self,
        client: Client,
        params: ReadParams,
        message_type: type[M],
        *,
        on_malformed: OnMalformed | None = None,
    ) -> None:
        self._client = client
        self._params = params
        self._message_type = message_type
        self._on_malformed = on_malformed

    async def batches(self) -> AsyncGenerator[list[Envelope[M]], None]:
        """Non-empty batches, in order. Raises what `journal_framing` and `read_batches` do.

        Cancellation, or not exhausting it: nothing is left but what closing the generator ends.
        """
        params = self._params
        framing = await journal_framing(self._client, params.journal, self._message_type)
        source = self._client.retry_reader(params)
        batches = read_batches(source, params.journal, framing, on_malformed=self._on_malformed)
        async with aclosing(batches):
            async for batch in batches:
                yield batch


class CommittedReader(Generic[M]):
    """The messages of a journal that have committed, each once. Loop-bound.

    ``source`` is where another such reader stopped (its `checkpoint`); without one it begins at the
    offset of ``params``. Transactions of more than ``ring_size`` messages are read twice.
    Acknowledgements are left out unless ``acknowledgements`` is set.
    """

    def __init__(
        self,
        client: Client,
        params: ReadParams,
        message_type: type[M],
        *,
        source: SourceCheckpoint | None = None,
        ring_size: int = RING_SIZE,
        batch_max: int = BATCH_MAX,
        acknowledgements: bool = False,
        on_malformed: OnMalformed | None = None,
    ) -> None:
        self._client = client
        self._message_type = message_type
        self._batch_max = batch_max
        self._acknowledgements = acknowledgements
        self._on_malformed = on_malformed
        sources = {}
        if source is not None:
            sources[params.journal] = source
            params = replace(params, offset=max(params.offset, source.read_through))
        self._params = params
        self._sequencer: Sequencer[M] = Sequencer(sources, ring_size)

    async def batches(self) -> AsyncGenerator[list[Envelope[M]], None]:
        """Non-empty batches, in order. To be iterated once.

        A batch has taken effect when the next is asked for. Raises what `journal_framing` and
        `read_batches` do, and `Corrupt` if an open transaction is not there any more.
        """
        params, sequencer = self._params, self._sequencer
        framing = await journal_framing(self._client, params.journal, self._message_type)
        skip = None if self._on_malformed is None else self._skip
        source = self._client.retry_reader(params)
        read = read_batches(source, params.journal, framing, on_malformed=skip)
        async with aclosing(read):
            async for queued in read:
                index = 0
                while index < len(queued):
                    index = sequencer.queue_batch(queued, index)
                    if sequencer.replay_range is not None:
                        replayed = self._replayed(sequencer.replay_range)
                        async with aclosing(replayed):
                            async for batch in replayed:
                                yield batch
                    for batch in self._dequeued():
                        yield batch

    def checkpoint(self) -> SourceCheckpoint:
        """What takes up the reading behind the last batch that has taken effect."""
        return self._sequencer.checkpoint().get(self._params.journal, SourceCheckpoint())

    def consumed(self) -> None:
        """Say that the last batch has taken effect, before the next is asked for."""
        self._sequencer.consumed()

    def _skip(self, error: MalformedMessage) -> None:
        assert self._on_malformed is not None
        self._on_malformed(error)
        # Everything before it has been dequeued, so that the next reader need not meet it again.
        self._sequencer.consumed()
        self._sequencer.skip(error.journal, error.end)

    def _dequeued(self) -> Iterator[list[Envelope[M]]]:
        while batch := self._sequencer.dequeue(self._batch_max):
            if not self._acknowledgements:
                batch = [envelope for envelope in batch if not envelope.is_ack]
            if batch:
                yield batch

    async def _replayed(self, wanted: ReplayRange) -> AsyncGenerator[list[Envelope[M]], None]:
        """Feed what the sequencer asks for; gives what that makes ready."""
        journal, begin, end = wanted
        if begin < end:
            params = replace(self._params, offset=begin, end_offset=end, block=True)
            framing = await journal_framing(self._client, journal, self._message_type)
            # What is malformed was reported when it was first read.
            skip = None if self._on_malformed is None else _ignore
            source = self._client.retry_reader(params)
            read = read_batches(source, journal, framing, on_malformed=skip)
            async with aclosing(read):
                async for batch in read:
                    self._sequencer.feed_replay(batch)
                    for ready in self._dequeued():
                        yield ready
        self._sequencer.end_replay()


def _ignore(_error: MalformedMessage) -> None:
    """Pass over it."""
