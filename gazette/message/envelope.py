"""The envelope: a message with its journal and offsets. Stage 11 of the byte path. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Generic, TypeVar

import msgspec

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
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Envelope(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """One message of a journal, with its offsets and the parts of its UUID.

    It is a ``msgspec.Struct`` because there is one per message. A struct takes 60 ns to make, a
    dataclass 250 ns. The garbage collector does not walk it.

    Decoding fills in the parts of the UUID, and sequencing uses only these. So an application may
    publish ``message`` itself, although publishing gives it another UUID.
    """

    journal: JournalName
    """Name by which the journal was read: ``name``, or ``name;meta`` if the reader gave metadata."""
    begin: Offset
    """Offset of the message's first byte."""
    end: Offset
    """Offset behind the message's last byte."""
    message: M
    """An instance of the requested type. If ``is_ack`` is true, it may be an `Acknowledgement`."""
    producer: ProducerId
    """Publisher of the message: six bytes."""
    clock: int
    """Logical time of the producer, in ticks of 100 ns."""
    flags: int
    """Flags of the UUID: outside a transaction, continues one, or acknowledges one. `FOREIGN_UUID` if
    other software made the UUID: the message then counts like one without a UUID."""

    @property
    def is_ack(self) -> bool:
        """True if the message acknowledges a transaction and carries no data."""
        return self.flags == ACK_TXN

    @property
    def uuid(self) -> bytes:
        """The UUID as it was read: 16 bytes. Nil for a message without one, or with a foreign one."""
        if not self.clock and self.producer == NIL_PRODUCER:
            return NIL_UUID
        return build_uuid(self.producer, self.clock, self.flags)

    @property
    def time(self) -> datetime:
        """Event time in UTC: that of the message, if its source declares ``time=``. Otherwise the clock of
        the publisher when it published the message.

        Raises ``UnusableTime`` if the declared time is missing. Without a declaration, raises it if there is
        no UUID.
        """
        return _EPOCH + timedelta(microseconds=self.time_us)

    @property
    def time_us(self) -> int:
        """Event time in Unix microseconds. Raises as `time` does."""
        if not self.clock:
            raise no_clock(self.journal, self.begin, self.end)
        return clock_unix_ns(self.clock) // 1000

    @property
    def event_us(self) -> int | None:
        """Time by which the watermark advances, in Unix microseconds. None: the message has none."""
        return clock_unix_ns(self.clock) // 1000 if self.clock else None


class TimedEnvelope(Envelope[M], frozen=True, gc=False):
    """A message of a source that declares the time of its messages."""

    declared: MessageTime
    found: int | str
    """Time of the message in Unix microseconds, or why it has none."""

    @property
    def unusable(self) -> UnusableTime | None:
        """Error of a message without a usable time. None for an acknowledgement, which needs none."""
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
    """Envelopes of one journal, in order, as they were decoded."""

    run_length = 0
    """Number of decoded envelopes if they are a run: of one producer, outside of transactions, with rising
    clocks. 0: not known."""
    has_foreign = False
    """True if other software made some of the UUIDs."""

    @property
    def is_run(self) -> bool:
        """True for a known run, if its owner has added and removed nothing."""
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

    Empty ``uuids`` mean that the messages have no UUIDs. ``times`` reads their declared times.
    """
    if not uuids:
        if times is not None:
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
