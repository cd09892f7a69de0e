"""Finds where the last messages of a journal begin. `find_last` reads backwards, in spans that grow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
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
"""Bytes at the end of a journal that are read first."""
GROWTH: Final = 4
WHOLE_BYTES: Final = 1 << 22
"""Bytes at the end of a journal that are read if a transaction may have begun before what was read."""
TRANSACTION_BYTES_MAX: Final = 1 << 26
"""Bytes in which the messages of a transaction are looked for of which none was read."""
_READ_BYTES: Final = 1 << 16


class LastMessages(NamedTuple):
    """The last messages: what is read from ``begin`` to ``end``, without the first ``skipped`` messages."""

    begin: Offset
    end: Offset
    skipped: int


@dataclass(frozen=True, slots=True)
class MessageJournal:
    """A journal of messages. ``read`` reads some of them, with acknowledgements. ``committed``: in
    the order in which they commit.
    """

    name: JournalName
    committed: bool
    by_line: bool
    """True if each newline ends a message, so that a read may begin behind any."""
    read: Callable[[ReadParams], AsyncGenerator[list[Envelope[Any]], None]]


async def find_last(
    context: Context,
    client: Client,
    journal: MessageJournal,
    count: int,
    *,
    transaction_bytes_max: int = TRANSACTION_BYTES_MAX,
) -> LastMessages:
    """Return where the last ``count`` messages are; all of them if there are fewer.

    They lie in the later half of what is read. Transactions are whole that lie in the last `WHOLE_BYTES`. If
    no message of one is found, it is looked for in ``transaction_bytes_max`` bytes, and then noted.
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
            found = None  # It may begin within a message.
        if found is not None:
            look = transaction_bytes_max if found.headless is not None else WHOLE_BYTES
            whole = size >= look or not (found.partial or found.headless is not None)
            if begin == 0 or (found.late >= count and whole):
                break
        size *= GROWTH
    if found.headless is not None:
        context.terminal.note(
            f"{journal.name}: a transaction that is acknowledged at offset {found.headless} has no message "
            f"behind offset {begin}: messages of it are left out"
        )
    return LastMessages(begin, end, max(0, found.total - count))


def is_data(envelope: Envelope[Any]) -> bool:
    """Return False for an acknowledgement."""
    return not (envelope.is_ack or isinstance(envelope.message, Acknowledgement))


@dataclass(slots=True)
class _Counted:
    """Messages of a span. ``late`` are those of its later half."""

    total: int = 0
    late: int = 0
    partial: bool = False
    """True if a transaction that ends in the later half may have begun before the span."""
    headless: Offset | None = None
    """The last acknowledgement in the later half of which no message was in the span."""


async def _count(journal: MessageJournal, begin: Offset, end: Offset) -> _Counted:
    found = _Counted()
    if begin == end:
        return found
    middle = begin + (end - begin) // 2
    known: set[bytes] = set()
    begun: set[bytes] = set()  # Producers whose next transaction begins in the span.
    async with aclosing(journal.read(ReadParams(journal.name, begin, end_offset=end))) as batches:
        async for batch in batches:
            for one in batch:
                late = one.begin >= middle
                if is_data(one):
                    found.total += 1
                    found.late += late
                elif journal.committed and begin and late and one.producer not in begun:
                    found.partial = True
                    if one.producer not in known:
                        found.headless = one.begin
                known.add(one.producer)
                if one.flags != CONTINUE_TXN:
                    begun.add(one.producer)
    return found


async def _fragment_begins(context: Context, client: Client, journal: JournalName) -> list[Offset]:
    stored = await fragments_of(context, client, FragmentsParams(journal))
    return sorted(one.fragment.begin for one in stored)


async def _begin_of(
    client: Client, journal: MessageJournal, begins: list[Offset], end: Offset, size: int
) -> Offset:
    """Return an offset about ``size`` bytes before the end, at which a message begins.

    Without lines, that is the begin of a fragment. 0 stands for all that there is.
    """
    wanted = end - size
    if wanted <= (begins[0] if begins else 0):
        return 0
    if journal.by_line:
        return await _next_line(client, journal.name, wanted, end)
    return max(one for one in begins if one <= wanted)


async def _next_line(client: Client, journal: JournalName, offset: Offset, end: Offset) -> Offset:
    """Return the offset of the first line that begins at an offset, or behind it."""
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
