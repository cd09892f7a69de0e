"""Stage 11 of the byte path: takes bytes from `client/read/retry_reader`, gives batches of envelopes.

Use these readers in programs that read journals and are no consumers. `UncommittedReader` yields every
message as it was written. `CommittedReader` adds stage 12: it yields each message once, when committed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from gazette.client.journals import get_journal
from gazette.client.new_journals import once_known
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.errors import Corrupt, Invalid, NotYet, Unavailable
from gazette.labels import CONTENT_TYPE, MESSAGE_TIME, MESSAGE_UUID
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import Framing, MalformedMessage
from gazette.message.framing.framing import framing_of
from gazette.message.labelled_time import labelled_time
from gazette.message.message_time import MessageTime, TimeReader
from gazette.message.sequencer.sequencer import PRUNE_HORIZON_NS, ReplayRange, Sequencer
from gazette.message.uuid import AGE_STEPS, clock_at, clock_span
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal_life import JournalLife

if TYPE_CHECKING:
    from gazette.client.client import Client
    from gazette.client.read.retry_reader import RetryReader

log = logging.getLogger(__name__)

M = TypeVar("M")

RING_SIZE: Final = 8192
"""Greatest number of messages of open transactions that a reader keeps in memory. The reader reads longer
transactions a second time."""
BATCH_MAX: Final = 4096
_READ_BYTES_MAX: Final = 1 << 20
_NOT_YET_S: Final = 1.0
"""Seconds between two reads of bytes that no broker has."""
_STALL_S: Final = 60.0
"""Seconds for which a broker that has just started may lack bytes that this reader has read before."""

_HORIZON: Final = clock_span(PRUNE_HORIZON_NS)

OnMalformed: TypeAlias = Callable[[MalformedMessage], None]
"""Callback for each malformed frame. Reading continues after the frame unless the callback raises."""

BytesOf: TypeAlias = "Callable[[ReadParams], RetryReader]"
"""Function that opens the bytes of a journal."""


class ByteSource(Protocol):
    """The methods of `gazette.client.read.retry_reader.RetryReader` that these readers use."""

    @property
    def offset(self) -> Offset: ...

    async def read(self, max_bytes: int = 0, /) -> bytes: ...

    def close(self) -> None: ...


TimeOf: TypeAlias = str | Callable[[Any], Any] | MessageTime
"""The time of messages: the name of a field, a function of a message, or a `MessageTime`."""


class MessageForm(NamedTuple, Generic[M]):
    """Options of a reader of messages. For an omitted option, the label of the journal counts."""

    message_type: type[M]
    uuid: str
    """Place of the UUID. Empty: the place in the label of the journal."""
    time: TimeOf | None
    """Time of messages. None: the time in the label of the journal, or else the clock of the publisher."""

    async def resolve(
        self, client: Client, journal: JournalName
    ) -> tuple[Framing[M], TimeReader | None]:
        """Return the framing of a journal, and the reader of its messages' times (None if no time is
        declared). Raise `NotFound` if the journal does not exist. Raise `Invalid` if the content type is
        unknown, or cannot hold the type. Errors of listing reach the caller.
        """
        listed = await once_known(client, journal, lambda: get_journal(client, journal))
        labels = listed.spec.labels
        place = self.uuid or labels.value_of(MESSAGE_UUID) or ""
        try:
            framing = framing_of(
                labels.value_of(CONTENT_TYPE) or "", self.message_type, place=place
            )
            time, label = MessageTime.of(self.time), labels.value_of(MESSAGE_TIME)
            if time is None and label:
                time = labelled_time(label).unbounded
        except Invalid as error:
            raise error.within(journal) from error
        return framing, None if time is None else TimeReader(time, client.clock.now)


async def read_batches(
    source: ByteSource,
    journal: JournalName,
    framing: Framing[M],
    *,
    times: TimeReader | None = None,
    on_malformed: OnMalformed | None = None,
    may_jump: bool = True,
) -> AsyncGenerator[list[Envelope[M]], None]:
    """Yield the envelopes of a source's bytes, until its end or until it raises ``NotYet``. Close
    the source. ``times`` reads the declared times of messages.

    If the journal has lost bytes, log a warning and continue after them; without ``may_jump``, raise
    `OffsetJump`. Raise `TruncatedFrame` if the end cuts a message. Raise `MalformedMessage` for a message
    that does not decode, unless ``on_malformed`` is given. Errors of the source reach the caller.
    """
    decoder: EnvelopeDecoder[M] | None = None
    try:
        while True:
            try:
                chunk = await source.read(_READ_BYTES_MAX)
            except OffsetJump as jump:
                if not may_jump:
                    raise
                log.warning(
                    "%(journal)s: the journal lost bytes; reading continues at offset %(offset)d: %(reason)s",
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
                decoder = EnvelopeDecoder(journal, framing, source.offset - len(chunk), times)
            decoder.feed(chunk)
            while batch := _decode(decoder, on_malformed):
                yield batch
        if decoder is not None:
            decoder.finish()
    finally:
        source.close()


def _decode(decoder: EnvelopeDecoder[M], on_malformed: OnMalformed | None) -> list[Envelope[M]]:
    """Return the next batch. Give malformed frames to ``on_malformed``, then skip them. If it is None, raise
    their errors."""
    while True:
        try:
            return decoder.decode()
        except MalformedMessage as error:
            if on_malformed is None:
                raise
            if error.is_whole:
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
    """Reader of every message of a journal, with duplicates and messages that are rolled back. Loop-bound.

    ``params`` gives the offsets at which the reader begins and ends. Without ``block``, reading ends at the
    head of the journal. The reader calls ``on_malformed`` with each malformed frame; without this function,
    a malformed frame ends the reading. ``uuid`` is the place of the UUID in messages. If it is empty, the
    journal's label counts. ``time`` is the field, function or `MessageTime` with the time of messages. If it
    is None, the label counts, or else the publisher's clock. ``bytes_of`` replaces ``client.retry_reader``.
    """

    def __init__(
        self,
        client: Client,
        params: ReadParams,
        message_type: type[M],
        *,
        uuid: str = "",
        time: TimeOf | None = None,
        on_malformed: OnMalformed | None = None,
        bytes_of: BytesOf | None = None,
    ) -> None:
        self._client = client
        self._bytes_of = bytes_of or client.retry_reader
        self._form = MessageForm(message_type, uuid, time)
        self._params = params
        self._on_malformed = on_malformed

    async def batches(self) -> AsyncGenerator[list[Envelope[M]], None]:
        """Yield non-empty batches, in order. For the errors see `MessageForm.resolve` and `read_batches`.

        Close the generator if you cancel it or do not exhaust it. Closing releases everything.
        """
        params = self._params
        framing, times = await self._form.resolve(self._client, params.journal)
        source = self._bytes_of(params)
        batches = read_batches(
            source, params.journal, framing, times=times, on_malformed=self._on_malformed
        )
        async with aclosing(batches):
            async for batch in batches:
                yield batch


class CommittedReader(Generic[M]):
    """Reader of the committed messages of a journal, each once. Loop-bound.

    ``source`` is the `checkpoint` at which an earlier reader stopped. Without it, the reader begins at the
    offset of ``params``. If the first message of a transaction is not among the last ``ring_size`` messages
    at the commit, the reader reads the transaction twice. ``acknowledgements`` includes acknowledgements. For
    ``uuid``, ``time`` and ``bytes_of``, see `UncommittedReader`. The reader forgets producers after 24 hours
    of silence, as shards do: see `Sequencer.checkpoint`.
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
        uuid: str = "",
        time: TimeOf | None = None,
        on_malformed: OnMalformed | None = None,
        bytes_of: BytesOf | None = None,
    ) -> None:
        self._client = client
        self._bytes_of = bytes_of or client.retry_reader
        self._form = MessageForm(message_type, uuid, time)
        self._batch_max = batch_max
        self._acknowledgements = acknowledgements
        self._on_malformed = on_malformed
        sources = {}
        if source is not None:
            sources[params.journal] = source
            params = replace(params, offset=max(params.offset, source.read_through))
        self._params = params
        self._sequencer: Sequencer[M] = Sequencer(sources, ring_size)
        self._prune_at = 0
        """When messages reach this clock, the reader forgets silent producers."""

    async def batches(self) -> AsyncGenerator[list[Envelope[M]], None]:
        """Yield non-empty batches, in order. Iterate this once.

        Asking for the next batch marks the former batch as consumed. Raise `Corrupt` if the journal has
        lost messages of an open transaction, and ``Unavailable`` if brokers lack such messages for a minute.
        Other errors are those of `MessageForm.resolve` and `read_batches`.
        """
        params, sequencer = self._params, self._sequencer
        framing, times = await self._form.resolve(self._client, params.journal)
        skip = None if self._on_malformed is None else self._skip
        source = self._bytes_of(params)
        incoming = read_batches(source, params.journal, framing, times=times, on_malformed=skip)
        async with aclosing(incoming):
            async for queued in incoming:
                self._prune(queued[-1].clock)
                index = 0
                while index < len(queued):
                    index = sequencer.queue_batch(queued, index)
                    if sequencer.replay_range is not None:
                        replayed = self._replayed(sequencer.replay_range, source.life)
                        async with aclosing(replayed):
                            async for batch in replayed:
                                yield batch
                    for batch in self._dequeued():
                        yield batch

    def checkpoint(self) -> SourceCheckpoint:
        """Return the checkpoint from which a reader resumes after the last consumed batch."""
        return self._sequencer.checkpoint().get(self._params.journal, SourceCheckpoint())

    def consumed(self) -> None:
        """Mark the last batch as consumed now. Without this call, asking for the next batch marks it."""
        self._sequencer.consumed()

    def _prune(self, clock: int) -> None:
        """Forget silent producers once in each hour of messages. ``clock`` is the clock of the next batch."""
        now_ns = int(self._client.clock.now() * 1e9)
        step = _HORIZON // AGE_STEPS
        latest = clock_at(now_ns) + _HORIZON
        if clock > latest or clock < self._prune_at <= latest + step:
            return  # Clocks beyond ``latest`` do not count, even if they did while ``now_ns`` was wrong.
        self._sequencer.checkpoint(PRUNE_HORIZON_NS, now_ns)
        self._prune_at = clock + step

    def _skip(self, error: MalformedMessage) -> None:
        assert self._on_malformed is not None
        self._on_malformed(error)
        # All messages before the frame are consumed. A reader that resumes here skips the frame.
        self._sequencer.consumed()
        self._sequencer.skip(error.journal, error.end)

    def _dequeued(self) -> Iterator[list[Envelope[M]]]:
        while batch := self._sequencer.dequeue(self._batch_max):
            if not self._acknowledgements:
                batch = [envelope for envelope in batch if not envelope.is_ack]
            if batch:
                yield batch

    async def _replayed(
        self, wanted: ReplayRange, life: JournalLife | None
    ) -> AsyncGenerator[list[Envelope[M]], None]:
        """Read a range again for the sequencer, and yield the messages that become ready. Raise ``Corrupt``
        if the journal lacks a part of the range, or has another life."""
        journal, begin, end = wanted
        if begin < end:
            params = replace(self._params, offset=begin, end_offset=end, life=life, block=False)
            framing, times = await self._form.resolve(self._client, journal)
            # The first read of this range has reported its malformed frames.
            skip = None if self._on_malformed is None else _ignore
            source = _KnownBytes(self._client, self._bytes_of(params))
            replay = read_batches(
                source, journal, framing, times=times, on_malformed=skip, may_jump=False
            )
            try:
                async with aclosing(replay):
                    async for batch in replay:
                        self._sequencer.feed_replay(batch)
                        for ready in self._dequeued():
                            yield ready
            except OffsetJump as jump:
                raise cannot_replay(wanted, jump) from jump
        self._sequencer.end_replay()


class _KnownBytes:
    """A source of bytes that were read before. While no broker has the bytes, ask again, and after `_STALL_S`
    seconds raise ``Unavailable``. Never let a broker wait: it would not report the journal's life."""

    def __init__(self, client: Client, reader: RetryReader) -> None:
        self._client = client
        self._reader = reader

    @property
    def offset(self) -> Offset:
        return self._reader.offset

    async def read(self, max_bytes: int = 0, /) -> bytes:
        journal, slept_s = self._reader.params.journal, 0.0
        while True:
            try:
                piece = await self._reader.read(max_bytes)
                self._client.waits.end(self)
                return piece
            except NotYet as error:
                if not slept_s:
                    log.warning(
                        "%(journal)s: a transaction is read again, and waits for bytes: %(reason)s",
                        {"journal": journal, "reason": error},
                    )
                if slept_s >= _STALL_S:
                    raise Unavailable(
                        f"brokers lack bytes of a transaction that were read before, for {_STALL_S:g} s",
                        hint="Check the brokers of this journal, and its fragment store "
                        "(`gazctl journals fragments`). Then read again.",
                        journal=journal,
                        offset=self.offset,
                    ) from error
                self._client.waits.note(self, journal, error)
            await self._client.clock.sleep(_NOT_YET_S)
            slept_s += _NOT_YET_S

    def close(self) -> None:
        self._client.waits.end(self)
        self._reader.close()


def cannot_replay(wanted: ReplayRange, jump: OffsetJump) -> Corrupt:
    """Return the error for a committed transaction that the journal has lost in part."""
    return Corrupt(
        f"a transaction of {wanted.journal} cannot be read again: the journal has no bytes before offset"
        f" {jump.offset} any more",
        hint="Keep fragments for longer than transactions of producers take.",
        begin=wanted.begin,
        end=wanted.end,
    )


def _ignore(_error: MalformedMessage) -> None:
    """Do nothing with a malformed frame."""
