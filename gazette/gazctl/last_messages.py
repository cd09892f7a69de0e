"""Finds the last messages of a journal: `find_last` reads growing parts of its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.errors import NotYet
from gazette.gazctl.context import Context
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.journals.lookup import journal_answering, write_head
from gazette.message.envelope import Envelope
from gazette.message.framing.frames import MalformedMessage
from gazette.message.message import Acknowledgement
from gazette.message.uuid import CONTINUE_TXN
from gazette.protocol.ids import JournalName, Offset

FIRST_BYTES: Final = 1 << 16
"""Bytes at the end of a journal in the first read."""
GROWTH: Final = 4
WHOLE_BYTES: Final = 1 << 22
"""Bytes up to which reads grow if a transaction may have begun before the bytes read so far."""
TRANSACTION_BYTES_MAX: Final = 1 << 26
"""Bytes up to which reads grow if a transaction's acknowledgement was read, but none of its messages."""
_READ_BYTES: Final = 1 << 16


class LastMessages(NamedTuple):
    """The last messages: all from ``begin`` to ``end``, except the first ``skipped`` messages."""

    begin: Offset
    end: Offset
    skipped: int


@dataclass(frozen=True, slots=True)
class MessageJournal:
    """A journal of messages. ``read`` yields some of them, with acknowledgements. With ``committed``,
    ``read`` yields messages in the order in which they commit."""

    name: JournalName
    committed: bool
    by_line: bool
    """True if each newline ends a message, so that a read may begin after any newline."""
    read: Callable[[ReadParams], AsyncGenerator[list[Envelope[Any]], None]]


async def find_last(
    context: Context,
    client: Client,
    journal: MessageJournal,
    count: int,
    *,
    transaction_bytes_max: int = TRANSACTION_BYTES_MAX,
) -> LastMessages:
    """Return the place of the last ``count`` messages, or of all if there are fewer.

    Read more until the later half of the bytes has ``count`` messages. If a transaction may have begun before
    these bytes, read up to `WHOLE_BYTES`, or ``transaction_bytes_max`` if only its acknowledgement was read.
    If messages of such a transaction may still be missing, tell the user.
    """
    end = await write_head(context, client, journal.name)
    begins = await _fragment_begins(context, client, journal.name)
    size = FIRST_BYTES
    while True:
        begin = await _begin_of(context, client, journal, begins, end, size)
        try:
            counts = await _count(journal, begin, end)
        except MalformedMessage:
            if begin == 0:
                raise
            counts = None  # The read may begin within a message.
        if counts is not None:
            lacking = counts.lacking(count)
            unseen = any(not txn.messages for txn in lacking)
            bytes_needed = transaction_bytes_max if unseen else WHOLE_BYTES
            if begin == 0 or (counts.late >= count and (size >= bytes_needed or not lacking)):
                break
        size *= GROWTH
    if lacking:
        context.terminal.note(_lacking_text(journal.name, lacking, begin, count))
    return LastMessages(begin, end, max(0, counts.total - count))


def _lacking_text(journal: JournalName, lacking: list[_Headless], begin: Offset, count: int) -> str:
    subject = (
        "A transaction," if len(lacking) == 1 else f"{len(lacking)} transactions, the last one"
    )
    return (
        f"{journal}: some of the last {count} messages may be missing. {subject} acknowledged at "
        f"{lacking[-1].acknowledged}, may have begun before offset {begin}, where reading began. To get all, "
        f"read the whole journal: gazctl read {journal} | tail -n {count}"
    )


def is_data(envelope: Envelope[Any]) -> bool:
    """Return False for an acknowledgement."""
    return not (envelope.is_ack or isinstance(envelope.message, Acknowledgement))


class _Headless(NamedTuple):
    """A transaction that may have begun before the bytes that were read."""

    position: int
    """Number of read messages before the messages of the transaction."""
    messages: int
    acknowledged: Offset


@dataclass(slots=True)
class _Counted:
    """Counts of read messages. ``late`` counts the messages in the later half of the bytes."""

    total: int = 0
    late: int = 0
    headless: list[_Headless] = field(default_factory=list)

    def lacking(self, count: int) -> list[_Headless]:
        """Return the transactions whose unread messages would be among the last ``count``."""
        return [txn for txn in self.headless if txn.position > self.total - count]


async def _count(journal: MessageJournal, begin: Offset, end: Offset) -> _Counted:
    """Count the messages of ``[begin, end)`` and of its later half, and transactions that began before."""
    counts = _Counted()
    if begin == end:
        return counts
    middle = begin + (end - begin) // 2
    pending: Counter[bytes] = Counter()  # By producer: messages of a headless transaction.
    begun: set[bytes] = set()  # Producers whose next transaction begins in the bytes that are read.
    async with aclosing(journal.read(ReadParams(journal.name, begin, end_offset=end))) as batches:
        async for batch in batches:
            for envelope in batch:
                is_headless = journal.committed and begin > 0 and envelope.producer not in begun
                if is_data(envelope):
                    counts.total += 1
                    counts.late += envelope.begin >= middle
                    pending[envelope.producer] += is_headless
                elif is_headless:
                    count = pending.pop(envelope.producer, 0)
                    counts.headless.append(_Headless(counts.total - count, count, envelope.begin))
                if envelope.flags != CONTINUE_TXN:
                    begun.add(envelope.producer)
    return counts


async def _fragment_begins(context: Context, client: Client, journal: JournalName) -> list[Offset]:
    stored = await fragments_of(context, client, FragmentsParams(journal))
    return sorted(listed.fragment.begin for listed in stored)


async def _begin_of(
    context: Context,
    client: Client,
    journal: MessageJournal,
    begins: list[Offset],
    end: Offset,
    size: int,
) -> Offset:
    """Return an offset about ``size`` bytes before the end at which a message begins. Return 0 if fewer
    bytes exist. If messages are not lines, return the begin of a fragment."""
    target = end - size
    if target <= (begins[0] if begins else 0):
        return 0
    if journal.by_line:
        return await _next_line(context, client, journal.name, target, end)
    return max((begin for begin in begins if begin <= target), default=0)


async def _next_line(
    context: Context, client: Client, journal: JournalName, offset: Offset, end: Offset
) -> Offset:
    """Return the offset of the first line that begins at ``offset``, which is above 0, or later.

    Look for a newline from the byte before ``offset`` on. Where bytes of the journal are missing, take the
    next fragment's begin for the begin of a line. Return ``end`` if no line begins before.
    """
    params = ReadParams(journal, offset - 1, end_offset=end)
    async with client.retry_reader(params) as reader:
        try:
            while True:
                async with journal_answering(context, client, journal):
                    piece = await reader.read(_READ_BYTES)
                if not piece:
                    return end
                if (newline := piece.find(b"\n")) >= 0:
                    return reader.offset - len(piece) + newline + 1
        except OffsetJump as jump:
            return jump.offset
        except NotYet:
            pass
    return end
