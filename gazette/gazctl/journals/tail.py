"""``gazctl journals tail``: the last lines of a journal, and those that follow, as safe text."""

from __future__ import annotations

import codecs
from collections import deque
from typing import Final

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.errors import Invalid, NotFound, NotYet, printable
from gazette.gazctl.context import Context
from gazette.gazctl.flags import ReadFlags, TailFlags
from gazette.gazctl.io.merge import MergedOutput, OutputFile
from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.journals.list import list_journals
from gazette.gazctl.journals.lookup import journal_answering, write_head
from gazette.gazctl.journals.read import READ_BYTES, Reading
from gazette.gazctl.journals.waits import WaitReasons
from gazette.labels import CONTENT_PROTO_FIXED, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.ids import JournalName, Offset, validate_journal_name
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.text.validation import within
from gazette.runtime.numbers import bytes_text, counted

FIRST_BYTES: Final = 1 << 16
"""Bytes at the end of a journal in the first search for lines."""
GROWTH: Final = 8
SEARCHED_BYTES_MAX: Final = 1 << 25
LINES_MAX: Final = 1_000_000


async def run(context: Context) -> int:
    flags = context.flags(TailFlags)
    names = context.loaded.arguments
    if len(names) != 1:
        raise Invalid(
            f"give the name of one journal ({len(names)} given)",
            path="NAME",
            hint="To read several journals: gazctl journals read -l SELECTOR --block --tail",
        )
    if not 0 <= flags.lines <= LINES_MAX:
        raise Invalid(f"invalid number ({flags.lines}; expected 0 to {LINES_MAX})", path="--lines")
    with within("NAME"):
        validate_journal_name(names[0])
    client = await context.broker()
    selector = LabelSelector.of(name=names[0])
    listed = (await list_journals(context, client, selector)).journals
    if not listed:
        raise NotFound(
            f"there is no journal {names[0]}", hint="See `gazctl journals list` for names."
        )
    _require_lines(listed[0])
    begins: dict[str, int] = {}
    if listed[0].spec.suspend_level is not SuspendLevel.FULL:  # Such a journal has no content.
        begins[names[0]] = await find_lines(context, client, names[0], flags.lines)
    async with PrintableOutput(context.terminal) as output:
        read_flags = ReadFlags(block=not flags.no_follow, tail=True)
        reading = Reading(
            context, WaitReasons(context, client), read_flags, MergedOutput(output), 0, begins
        )
        context.on_signal = reading.on_signal
        await (reading.read_once(selector) if flags.no_follow else reading.follow(selector))
        await output.finish()
    # An interrupt is the normal end of a command that follows a journal.
    return context.interrupted_code if flags.no_follow else 0


def _require_lines(journal: ListedJournal) -> None:
    """Raise ``Invalid`` if a journal holds no lines, by its content type."""
    name = journal.spec.name
    match journal.spec.labels.value_of(CONTENT_TYPE):
        case label if label == CONTENT_PROTO_FIXED:
            raise Invalid(
                f"{name} holds protobuf messages, and no lines",
                hint=f"Read them by: gazctl read {name} --last 10 --follow --message module:Class",
            )
        case label if label == CONTENT_RECOVERY_LOG:
            raise Invalid(
                f"{name} is a recovery log: it holds operations on files, and no lines",
                hint="See the state of its shard by `gazctl shards query` or `gazctl shards recover`.",
            )


async def find_lines(context: Context, client: Client, journal: JournalName, count: int) -> Offset:
    """Return the offset at which the last ``count`` lines of a journal begin.

    Read growing parts of the journal's end until a part has the lines, but at most `SEARCHED_BYTES_MAX`. If
    that part has fewer lines, tell the user how many.
    """
    end = await write_head(context, client, journal)
    if not count:
        return end
    size = FIRST_BYTES
    while True:
        begin = max(0, end - size)
        starts = await _line_starts(context, client, journal, begin, end, count)
        if len(starts) == count or begin == 0:
            return starts[0] if starts else begin
        if size >= SEARCHED_BYTES_MAX:
            lines = counted(len(starts), "line")
            context.terminal.note(f"{journal}: the last {bytes_text(size)} have only {lines}")
            return starts[0] if starts else begin
        size = min(size * GROWTH, SEARCHED_BYTES_MAX)


async def _line_starts(
    context: Context, client: Client, journal: JournalName, begin: Offset, end: Offset, count: int
) -> deque[Offset]:
    """Return the offsets of the last ``count`` lines that begin in ``[begin, end)`` of a journal."""
    starts: deque[Offset] = deque([0] if begin == 0 < end else [], maxlen=count)
    if begin == end:
        return starts
    async with client.retry_reader(ReadParams(journal, begin, end_offset=end)) as reader:
        while True:
            try:
                async with journal_answering(context, client, journal):
                    piece = await reader.read(READ_BYTES)
            except OffsetJump as jump:
                if starts and starts[-1] == jump.expected:
                    starts.pop()  # No byte of that line is left.
                starts.append(jump.offset)
                continue
            except NotYet:
                return starts
            if not piece:
                return starts
            base, at = reader.offset - len(piece), piece.find(b"\n") + 1
            while at:
                if base + at < end:
                    starts.append(base + at)
                at = piece.find(b"\n", at) + 1


class PrintableOutput(OutputFile):
    """Stdout, for text of others: control characters, and bytes that are no UTF-8, are escaped."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__("-", terminal)
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    async def write(self, data: bytes | bytearray) -> None:
        await super().write(printable(self._decoder.decode(data)).encode())

    async def finish(self) -> None:
        """Write the bytes of a character that is not complete."""
        await super().write(self._decoder.decode(b"", final=True).encode())
