"""A message and where it was read: `Envelope`. Stage 11 of the byte path. Pure."""

from __future__ import annotations

from itertools import repeat
from typing import Generic, TypeVar

import msgspec

from gazette.message.message_uuid import (
    ACK_TXN,
    NIL_PRODUCER,
    UUID_BYTES,
    ProducerId,
    build_uuid,
    parse_columns,
)
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")


class Envelope(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """One message of a journal, with its place there and the parts of its UUID.

    A ``msgspec.Struct`` and not a dataclass, because there is one per message: it takes 60 ns to
    make where a dataclass takes 250, and the garbage collector does not walk it.

    The UUID's parts were taken when the message was decoded. They are what sequencing goes by, so
    an application may publish ``message`` itself, which gives it another UUID.
    """

    journal: JournalName
    """With the metadata segment of the read, if it had one."""
    begin: Offset
    end: Offset
    message: M
    """Of the type that was asked for. Where ``is_ack``, possibly an `Acknowledgement`."""
    producer: ProducerId
    clock: int
    flags: int

    @property
    def is_ack(self) -> bool:
        """Whether this acknowledges a transaction, rather than carrying data."""
        return self.flags == ACK_TXN

    @property
    def uuid(self) -> bytes:
        """The UUID as read, in its 16 bytes."""
        return build_uuid(self.producer, self.clock, self.flags)


def build_envelopes(
    journal: JournalName, begins: list[Offset], ends: list[Offset], messages: list[M], uuids: bytes
) -> list[Envelope[M]]:
    """Envelopes of the messages of one journal, whose UUIDs are 16 bytes each of ``uuids``.

    Empty ``uuids`` say that the messages have none.
    """
    if not uuids:
        return [
            Envelope(journal, begin, end, message, NIL_PRODUCER, 0, 0)
            for begin, end, message in zip(begins, ends, messages, strict=True)
        ]
    if len(uuids) != len(messages) * UUID_BYTES:
        raise ValueError("one UUID per message")
    producers, clocks, flags = parse_columns(uuids)
    # The loop is in C: this is the hot path of every consumer.
    return list(map(Envelope, repeat(journal), begins, ends, messages, producers, clocks, flags))
