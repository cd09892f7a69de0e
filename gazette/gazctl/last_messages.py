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
from gazette.gazctl.journals.lookup import write_head
from gazette.message.envelope import Envelope
from gazette.message.framing.frames import MalformedMessage
from gazette.message.message import Acknowledgement
from gazette.message.uuid import CONTINUE_TXN
from gazette.protocol.ids import JournalName, Offset

FIRST_BYTES: Final = 1 << 16
"""Bytes at the end of a journal in the first read."""
GROWTH: Final = 4
WHOLE_BYTES: Final = 1 << 22
"""Bytes to read if a transaction may have begun before the bytes that were read."""
TRANSACTION_BYTES_MAX: Final = 1 << 26
"""Bytes to read if a transaction's acknowledgement was read, but none of its messages."""
_READ_BYTES: Final = 1 << 16


class LastMessages(NamedTuple):
    """The last messages: those from ``begin`` to ``end``, without the first ``skipped`` ones."""

    begin: Offset
    end: Offset
    skipped: int


@dataclass(frozen=True, slots=True)
class MessageJournal:
    """A journal of messages. ``read`` yields some of them, with acknowledgements.

    ``committed``: it yields them in the order in which they commit.
    """

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

    Read more until the later half of the bytes has ``count`` messages. Read up to `WHOLE_BYTES` if a
    transaction may have begun earlier, and up to ``transaction_bytes_max`` if none of its messages was read.
    If such a transaction may still lack some of the last messages, tell the user.
    """
    end = await write_head(context, client, journal.name)
    begins = await _fragment_begins(context, client, journal.name)
    size = FIRST_BYTES
    while True:
        begin = await _begin_of(client, journal, begins, end, size)
        try:
            found = await _count(journal, begin, end)
        except MalformedMessage:
            if begin == 0:
                raise
            found = None  # The read may begin within a message.
        if found is not None:
            lacking = found.lacking(count)
            unseen = any(not one.messages for one in lacking)
            look = transaction_bytes_max if unseen else WHOLE_BYTES
            if begin == 0 or (found.late >= count and (size >= look or not lacking)):
                break
        size *= GROWTH
    if lacking:
        context.terminal.note(_lacking_text(journal.name, lacking, begin, count))
    return LastMessages(begin, end, max(0, found.total - count))


def _lacking_text(journal: JournalName, lacking: list[_Headless], begin: Offset, count: int) -> str:
    number = "A transaction," if len(lacking) == 1 else f"{len(lacking)} transactions, the last one"
    return (
        f"{journal}: some of the last {count} messages may be missing. {number} acknowledged at "
        f"{lacking[-1].acknowledged}, may have begun before offset {begin}, where reading began. To get all, "
        f"read the whole journal: gazctl read {journal} | tail -n {count}"
    )


def is_data(envelope: Envelope[Any]) -> bool:
    """Return False for an acknowledgement."""
    return not (envelope.is_ack or isinstance(envelope.message, Acknowledgement))


class _Headless(NamedTuple):
    """A transaction that may have begun before the bytes that were read."""

    position: int
    """Number of read messages before those of the transaction."""
    messages: int
    acknowledged: Offset


@dataclass(slots=True)
class _Counted:
    """Counts of read messages. ``late``: those of the later half of the bytes."""

    total: int = 0
    late: int = 0
    headless: list[_Headless] = field(default_factory=list)

    def lacking(self, count: int) -> list[_Headless]:
        """Return the transactions whose unread messages would be among the last ``count``."""
        return [one for one in self.headless if one.position > self.total - count]


async def _count(journal: MessageJournal, begin: Offset, end: Offset) -> _Counted:
    found = _Counted()
    if begin == end:
        return found
    middle = begin + (end - begin) // 2
    pending: Counter[bytes] = Counter()  # Messages of a transaction that may have begun before.
    begun: set[bytes] = set()  # Producers whose next transaction begins in the bytes.
    async with aclosing(journal.read(ReadParams(journal.name, begin, end_offset=end))) as batches:
        async for batch in batches:
            for one in batch:
                unknown = journal.committed and begin > 0 and one.producer not in begun
                if is_data(one):
                    found.total += 1
                    found.late += one.begin >= middle
                    pending[one.producer] += unknown
                elif unknown:
                    messages = pending.pop(one.producer, 0)
                    found.headless.append(_Headless(found.total - messages, messages, one.begin))
                if one.flags != CONTINUE_TXN:
                    begun.add(one.producer)
    return found


async def _fragment_begins(context: Context, client: Client, journal: JournalName) -> list[Offset]:
    stored = await fragments_of(context, client, FragmentsParams(journal))
    return sorted(one.fragment.begin for one in stored)


async def _begin_of(
    client: Client, journal: MessageJournal, begins: list[Offset], end: Offset, size: int
) -> Offset:
    """Return an offset about ``size`` bytes before the end at which a message begins; 0 for all bytes.

    If messages are not lines, return the begin of a fragment.
    """
    wanted = end - size
    if wanted <= (begins[0] if begins else 0):
        return 0
    if journal.by_line:
        return await _next_line(client, journal.name, wanted, end)
    return max(one for one in begins if one <= wanted)


async def _next_line(client: Client, journal: JournalName, offset: Offset, end: Offset) -> Offset:
    """Return the offset of the first line that begins at ``offset`` or later."""
    params = ReadParams(journal, offset - 1, end_offset=end)
    async with client.retry_reader(params) as reader:
        try:
            while piece := await reader.read(_READ_BYTES):
                if (at := piece.find(b"\n")) >= 0:
                    return reader.offset - len(piece) + at + 1
        except OffsetJump as jump:
            return jump.offset
        except NotYet:
            pass
    return end
