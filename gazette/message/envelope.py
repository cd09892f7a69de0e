"""Stage 11 of the byte path: takes chunks of one journal's bytes, gives envelopes in batches.

Pure. An `Envelope` is a message with its journal and offsets. A task of the event loop or the thread of a
shard drives the `EnvelopeDecoder`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Generic, TypeVar

import msgspec

from gazette.errors import Bug
from gazette.message.foreign_uuids import warn_of_foreign_uuids
from gazette.message.framing.frames import Framing, MalformedMessage, TruncatedFrame
from gazette.message.message_time import MessageTime, TimeReader, UnusableTime, no_clock, unusable
from gazette.message.uuid import (
    ACK_TXN,
    NIL_PRODUCER,
    NIL_UUID,
    UUID_BYTES,
    ProducerId,
    build_uuid,
    clock_unix_ns,
    parse_columns,
)
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")

_HEAD_BYTES = 16
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Envelope(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """One message of a journal, with its offsets and the parts of its UUID.

    Each message has an envelope, so an envelope must be cheap. A ``msgspec.Struct`` takes 60 ns to make, a
    dataclass 250 ns. The garbage collector does not walk the struct.

    Decoding copies the parts of the UUID into the envelope, and sequencing uses only these. So an
    application may publish ``message`` itself, although publishing gives it another UUID.
    """

    journal: JournalName
    """Name of the journal as the reader gave it: ``name``, or ``name;meta`` with metadata."""
    begin: Offset
    """Offset of the message's first byte."""
    end: Offset
    """Offset after the message's last byte."""
    message: M
    """An instance of the requested type. If ``is_ack`` is true, it may be an `Acknowledgement`."""
    producer: ProducerId
    """Publisher of the message: six bytes."""
    clock: int
    """Logical time of the producer: units of 100 ns since 1582-10-15, then four bits of sequence. 0 without a
    UUID."""
    flags: int
    """Flags of the UUID: outside a transaction, continues a transaction, or acknowledges one.
    `FOREIGN_UUID` for a UUID of other software: the message then counts as a message without a UUID."""

    @property
    def is_ack(self) -> bool:
        """True if the message acknowledges a transaction and carries no data."""
        return self.flags == ACK_TXN

    @property
    def uuid(self) -> bytes:
        """The 16 bytes of the UUID as read. Nil for a message without a UUID, or with a foreign UUID."""
        if not self.clock and self.producer == NIL_PRODUCER:
            return NIL_UUID
        return build_uuid(self.producer, self.clock, self.flags)

    @property
    def time(self) -> datetime:
        """Event time in UTC: the time that the message holds, if its source declares ``time=``. Otherwise the
        clock of the publisher when it published the message.

        Raises ``UnusableTime`` if the declared time is unusable. If no time is declared, raises
        ``UnusableTime`` for a message without a UUID.
        """
        return _EPOCH + timedelta(microseconds=self.time_us)

    @property
    def time_us(self) -> int:
        """Event time in Unix microseconds. Raises ``UnusableTime`` in the cases of `time`."""
        if not self.clock:
            raise no_clock(self.journal, self.begin, self.end)
        return clock_unix_ns(self.clock) // 1000

    @property
    def event_us(self) -> int | None:
        """Time for the watermark, in Unix microseconds. None if the message has no time."""
        return clock_unix_ns(self.clock) // 1000 if self.clock else None


class TimedEnvelope(Envelope[M], frozen=True, gc=False):
    """A message of a source that declares the time of its messages."""

    declared: MessageTime
    found: int | str
    """Time of the message in Unix microseconds, or the reason why it has no usable time."""

    @property
    def unusable(self) -> UnusableTime | None:
        """Error of a message without a usable time. None for an acknowledgement, which needs no time."""
        if self.is_ack or not isinstance(self.found, str):
            return None
        return unusable(self.declared, self.found, self.journal, self.begin, self.end)

    @property
    def time_us(self) -> int:
        if self.is_ack:
            return super().time_us
        if (error := self.unusable) is not None:
            raise error
        assert isinstance(self.found, int)
        return self.found

    @property
    def event_us(self) -> int | None:
        return None if self.is_ack or isinstance(self.found, str) else self.found


class EnvelopeBatch(list[Envelope[M]]):
    """Envelopes of one journal, in the order of the journal."""

    run_length = 0
    """Number of decoded envelopes, if all are of one producer, outside of transactions, with rising clocks:
    a run. 0 if this is not known."""
    has_foreign = False
    """True if other software made some of the UUIDs."""

    @property
    def is_run(self) -> bool:
        """True if the batch is known to be a run, and its owner has added and removed nothing."""
        return self.run_length == len(self)


def build_envelopes(
    journal: JournalName,
    begins: list[Offset],
    ends: list[Offset],
    messages: list[M],
    uuids: bytes,
    times: TimeReader | None = None,
) -> EnvelopeBatch[M]:
    """Return the envelopes of messages of one journal. ``uuids`` holds 16 bytes for each message.

    Empty ``uuids`` mean that the messages have no UUIDs. Raise ``ValueError`` for another number of bytes.
    ``times`` reads the declared times of messages. None if their source declares no time.
    """
    if not uuids:
        if times is not None:  # Make timed envelopes, with nil UUIDs.
            uuids = NIL_UUID * len(messages)
            return build_envelopes(journal, begins, ends, messages, uuids, times)
        return EnvelopeBatch(
            Envelope(journal, begin, end, message, NIL_PRODUCER, 0, 0)
            for begin, end, message in zip(begins, ends, messages, strict=True)
        )
    if len(uuids) != len(messages) * UUID_BYTES:
        raise ValueError("one UUID per message")
    producers, clocks, flags, is_run, has_foreign = parse_columns(uuids)
    columns = (repeat(journal), begins, ends, messages, producers, clocks, flags)
    # `map` loops in C, since this is the hot path of every consumer.
    batch: EnvelopeBatch[M] = EnvelopeBatch(
        map(Envelope, *columns)
        if times is None
        else map(TimedEnvelope, *columns, repeat(times.time), times.read_all(messages, clocks))
    )
    if is_run:
        batch.run_length = len(batch)
    elif has_foreign:
        batch.has_foreign = True
    return batch


class EnvelopeDecoder(Generic[M]):
    """Decoder of one journal's bytes into envelopes. After `decode` has returned an empty list, the decoder
    holds at most one incomplete frame.

    Feed it, then call `decode` until `decode` returns an empty list:

        decoder.feed(chunk)
        while batch := decoder.decode():
            ...

    ``times`` reads the declared times of messages.

    Invariant: ``begin`` is the offset of the first message that `decode` has not returned yet.
    ``end`` is the offset of the next chunk.
    """

    def __init__(
        self,
        journal: JournalName,
        framing: Framing[M],
        offset: Offset,
        times: TimeReader | None = None,
    ) -> None:
        self._times = times
        self.journal = journal
        self.framing = framing
        self.begin: Offset = offset
        self._parts: list[bytes] = []
        self._size = 0
        self._ready = False
        """True if `decode` may find a complete frame, or a malformed one."""
        self._discarding = False
        """True while the rest of a frame that is too long is dropped. ``_parts[0]`` is the frame's begin."""
        self._long_size: int | None = None
        """Length of a frame that is too long, whose begin is ``_parts[0]``. None without such a frame."""

    @property
    def end(self) -> Offset:
        return self.begin + self._size

    @property
    def pending(self) -> int:
        """Bytes of the incomplete frame that the decoder holds."""
        return sum(map(len, self._parts))

    @property
    def clock_place(self) -> str | None:
        """Place of the UUID whose clock is the time of messages. None for a declared time or no UUIDs."""
        codec = self.framing.codec
        if self._times is not None or codec.form is None:
            return None
        return DEFAULT_PLACE if codec.place is None else codec.place.text

    def feed(self, data: bytes) -> None:
        """Add the bytes that begin at ``end``."""
        if self._discarding:
            frame_end = self.framing.resume(data)
            if frame_end is None:
                self._size += len(data)
                return
            self._size += frame_end
            self._long_size, self._discarding, self._ready = self._size, False, True
            data = data[frame_end:]
        if not data:
            return
        if not self._ready:
            self._ready = self.framing.may_complete(self._head(), self._size, data)
        self._parts.append(data)
        self._size += len(data)
        if self._size > self.framing.frame_bytes_max:
            self._ready = True  # `decode` raises the error.

    def decode(self) -> list[Envelope[M]]:
        """Return the next batch of envelopes, in order. An empty batch means that more bytes are needed.

        Raise `MalformedMessage` at a malformed or too long frame, after returning all messages before it.
        Raise the error again until `skip` is called with it: for a malformed frame at each call, for a frame
        that is too long after the next `feed`.

        While the end of a frame that is too long is not known, the error's ``is_whole`` is False. Then the
        decoder raises another error at the end of the frame, after `skip`.
        """
        if not self._ready:
            return []
        if self._long_size is not None:
            raise self._too_long(self._parts[0], self._long_size)
        buffer = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [buffer]
        # Decode no frame beyond the greatest length, even if a chunk holds all of the frame.
        size_max = self.framing.frame_bytes_max
        is_cut = self._size > size_max
        try:
            batch, consumed, stopped = self._decode_buffer(buffer[:size_max] if is_cut else buffer)
        except MalformedMessage as error:
            raise error.of(self.journal) from error.__cause__
        if not batch:
            self._ready = False
            if is_cut:
                raise self._at_long_frame(buffer, size_max)
            return []
        self._drop(consumed)
        # A malformed frame is next: raise its error at the next call.
        self._ready = stopped or is_cut
        return batch

    def _at_long_frame(self, buffer: bytes, size_max: int) -> MalformedMessage:
        """Return the error of the frame at the start of the buffer, which is too long."""
        frame_end = self.framing.resume(buffer[size_max:])
        if frame_end is None:
            error = self._too_long(buffer, self._size)
            error.is_whole = False
            return error
        self._long_size, self._ready = size_max + frame_end, True
        self._parts = [buffer[:size_max], buffer[self._long_size :]]
        return self._too_long(self._parts[0], self._long_size)

    def _decode_buffer(self, buffer: bytes) -> tuple[list[Envelope[M]], int, bool]:
        """Return the messages of a buffer, their bytes, and True if a malformed frame is next."""
        frames = self.framing.decode(buffer, self.begin)
        batch = build_envelopes(
            self.journal, frames.begins, frames.ends, frames.messages, frames.uuids, self._times
        )
        if batch.has_foreign:
            warn_of_foreign_uuids(self.journal)
        return batch, frames.consumed, frames.stopped

    def skip(self, error: MalformedMessage) -> None:
        """Continue after the malformed message for which `decode` raised ``error``. Raise ``Bug`` for any
        other error. If ``is_whole`` is False, `feed` drops the rest of the frame."""
        if error.begin != self.begin or error.end > self.end:
            raise Bug(
                "cannot skip: decoding did not stop at this message",
                begin=error.begin,
                at=self.begin,
            )
        if not error.is_whole:
            self._parts = [self._parts[0][: self.framing.frame_bytes_max]]
            self._discarding, self._ready = True, False
            return
        self._ready = True
        if self._long_size is None:
            self._drop(error.end - error.begin)
            return
        self._parts = [part for part in self._parts[1:] if part]
        self._size -= self._long_size
        self.begin += self._long_size
        self._long_size = None

    def jump(self, offset: Offset) -> None:
        """Continue at another offset, because the journal has lost the bytes before it.

        Raise `MalformedMessage`, with the begin of the frame in ``raw``, if the jump cuts a frame. The
        decoder continues at ``offset`` also after the error.
        """
        cut_frame, begin, end = b"".join(self._parts), self.begin, self.end
        self._parts, self._size, self._ready, self._discarding = [], 0, False, False
        self._long_size = None
        self.begin = offset
        if cut_frame:
            raise MalformedMessage(
                f"a message is cut off: the journal continues at offset {offset}",
                begin=begin,
                end=end,
                raw=cut_frame,
                journal=self.journal,
            )

    def finish(self) -> None:
        """End the input. Raise `TruncatedFrame` if a message is incomplete."""
        try:
            self.framing.finish(b"".join(self._parts), self.begin)
        except TruncatedFrame as error:
            raise TruncatedFrame(
                error.reason, begin=error.begin, end=error.end, raw=error.raw, journal=self.journal
            ) from None

    def _head(self) -> bytes:
        """Return the first bytes of the incomplete frame."""
        if self._parts and len(self._parts[0]) < _HEAD_BYTES and len(self._parts) > 1:
            # This is rare: only tests and peers that send byte by byte make parts this short.
            self._parts = [b"".join(self._parts)]
        return self._parts[0][:_HEAD_BYTES] if self._parts else b""

    def _drop(self, size: int) -> None:
        remaining = self._parts[0][size:]
        self._parts = [remaining] if remaining else []
        self._size -= size
        self.begin += size

    def _too_long(self, raw: bytes, size: int) -> MalformedMessage:
        return MalformedMessage(
            "message is too long",
            begin=self.begin,
            end=self.begin + size,
            raw=raw,
            journal=self.journal,
        )
