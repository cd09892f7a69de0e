"""``gazctl journals read``: merge the content of journals into one output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gazette.client.journals import JournalList, ListedJournal
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.config.option import require_writable
from gazette.errors import Closed, GazetteError, Invalid, NotAllowed, NotFound, NotYet
from gazette.gazctl.context import CALLS_MAX, Context, parse_selector
from gazette.gazctl.flags import BrokerFlags, ReadFlags
from gazette.gazctl.io.merge import MergedOutput, MergedStream, OutputFile
from gazette.gazctl.io.message_boundaries import edges_of
from gazette.gazctl.io.time_args import parse_moment
from gazette.gazctl.journals.list import list_journals
from gazette.gazctl.journals.lookup import write_head
from gazette.gazctl.journals.waits import WaitReasons
from gazette.labels import CONTENT_TYPE
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope

READ_BYTES: Final = 1 << 18
PREVIOUS: Final = ".previous"


async def run(context: Context) -> int:
    flags = context.flags(ReadFlags)
    selector = parse_selector(flags.selector, required=True)
    begin_mod_time = parse_moment(flags.since, context.clock.now(), "--from")
    offsets = read_offsets(flags.offsets)
    if flags.offsets_out is not None:
        require_writable(flags.offsets_out, "--offsets-out")
    client = await context.broker(flags.file_root)
    async with OutputFile(flags.output, context.terminal) as file:
        reading = Reading(
            context,
            WaitReasons(context, client),
            flags,
            MergedOutput(file),
            begin_mod_time,
            offsets,
        )
        context.on_signal = reading.on_signal
        try:
            await (reading.follow(selector) if flags.block else reading.read_once(selector))
        finally:
            if flags.offsets_out is not None:
                write_offsets(flags.offsets_out, reading.offsets, flags.offsets)
    # An interrupt is the normal end of a read with --block, and ends any other read early.
    return 0 if flags.block else context.interrupted_code


@dataclass(slots=True)
class _JournalRead:
    """The read of one journal."""

    reader: RetryReader
    stream: MergedStream


@dataclass(slots=True)
class Reading:
    """All reads of one command. ``offsets`` holds the end of the written bytes by journal."""

    context: Context
    waits: WaitReasons
    flags: ReadFlags
    output: MergedOutput
    begin_mod_time: int
    offsets: dict[str, int]
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _reads: dict[str, _JournalRead] = field(default_factory=dict)
    """The reads in progress, by journal."""
    _skipped: set[str] = field(default_factory=set)
    """Suspended journals that were reported as skipped."""
    _first_revision: int = 0
    """Revision of etcd of the first list; 0 before it. Journals that were created later are new."""
    _created: dict[str, int] = field(default_factory=dict)
    """Revision of etcd at which a journal was created, when its reading began."""
    _listed: dict[str, ListedJournal] = field(default_factory=dict)
    """The journals that match now, by name. Only for reads without end."""

    def on_signal(self) -> bool:
        """End all reads at their present offsets. The second signal cancels them."""
        first = not self.stopping.is_set()
        self.stopping.set()
        self._close_readers()
        return first

    def _close_readers(self) -> None:
        for read in self._reads.values():
            read.reader.close()

    async def read_once(self, selector: LabelSelector) -> None:
        """Read to the write head, some journals at a time. The first error ends all reads."""
        listed = await list_journals(self.context, self.waits.client, selector)
        if not listed.journals:
            self.context.terminal.note("no journal matches")
        self._first_revision = listed.header.etcd.revision
        gate = asyncio.Semaphore(CALLS_MAX)

        async def one(journal: ListedJournal) -> None:
            async with gate:
                if not self.stopping.is_set() and (read := await self._open(journal)) is not None:
                    await self._copy_and_close(journal.spec.name, read)

        async with self.waits.noting(), self._showing_progress(), TaskScope("read") as scope:
            for journal in listed.journals:
                scope.spawn(one(journal), name=journal.spec.name)

    async def follow(self, selector: LabelSelector) -> None:
        """Read without end from the journals that match, including those that match later."""
        async with self.waits.noting(), TaskScope("read") as scope:
            watch = scope.daemon(self._watch(selector, scope), name="watch")
            scope.spawn(self._end_of(watch, scope), name="end")

    async def _end_of(self, watch: asyncio.Task[None], scope: TaskScope) -> None:
        """Wait until a stop is asked for. End the watch first, since it could begin more reads. Then end the
        reads."""
        await self.stopping.wait()
        watch.cancel()
        await asyncio.wait({watch})
        self._close_readers()

    async def _watch(self, selector: LabelSelector, scope: TaskScope) -> None:
        async for listed in self.waits.client.watch_journals(selector):
            if not self._first_revision:
                self._first_revision = listed.header.etcd.revision
                if not listed.journals:
                    self.context.terminal.note("no journal matches yet")
            await self._follow_list(listed, scope)

    async def _follow_list(self, listed: JournalList, scope: TaskScope) -> None:
        """End the reads of journals that are not listed any more, and begin reads of new ones.

        A journal that was deleted and created again between two lists counts as both.
        """
        self._listed = {journal.spec.name: journal for journal in listed.journals}
        for name, read in self._reads.items():
            if self._created_at(name) != self._created[name]:
                read.reader.close()
        for name, journal in self._listed.items():
            if name not in self._reads and (opened := await self._open(journal)) is not None:
                scope.spawn(self._copy_lives(name, opened), name=name)

    def _created_at(self, name: str) -> int | None:
        """Return the revision at which the listed journal was created; None if no such journal is listed."""
        journal = self._listed.get(name)
        return None if journal is None else journal.create_revision

    async def _copy_lives(self, name: str, opened: _JournalRead | None) -> None:
        """Copy a journal to the output. If it was created again meanwhile, go on with its new content."""
        while opened is not None:
            await self._copy_and_close(name, opened)
            if self.stopping.is_set() or self._created_at(name) in (None, self._created[name]):
                return
            opened = await self._open(self._listed[name])

    async def _open(self, journal: ListedJournal) -> _JournalRead | None:
        """Begin to read a journal. Return None if the journal has nothing to read."""
        spec = journal.spec
        if spec.suspend_level is SuspendLevel.FULL:
            if spec.name not in self._skipped:
                self._skipped.add(spec.name)
                self.context.terminal.note(f"skipped {spec.name}: it is fully suspended")
            return None
        self._skipped.discard(spec.name)
        if self._created.setdefault(spec.name, journal.create_revision) != journal.create_revision:
            self._created[spec.name] = journal.create_revision
            self.context.terminal.note(
                f"{spec.name} was created again: reading from its first byte"
            )
            self.offsets.pop(spec.name, None)
        offset = self.offsets.get(spec.name)
        if offset is None:
            offset = await self._first_offset(journal)
        self.offsets[spec.name] = offset
        params = ReadParams(
            spec.name,
            offset=offset,
            block=self.flags.block,
            begin_mod_time=self.begin_mod_time,
            # With cached routes, this process itself calls a broker that serves the journal.
            do_not_proxy=self.context.loaded.group(BrokerFlags).cache_size > 0,
        )
        content_type = spec.labels.value_of(CONTENT_TYPE) or ""
        stream = self.output.stream(edges_of(content_type))
        opened = self.waits.unbounded if self.flags.block else self.waits.bounded
        read = self._reads[spec.name] = _JournalRead(opened(params), stream)
        return read

    async def _first_offset(self, journal: ListedJournal) -> int:
        # A journal created after the command began is read from its first byte, even with --tail.
        if not self.flags.tail or journal.create_revision > self._first_revision:
            return 0
        return await write_head(self.context, self.waits.client, journal.spec.name)

    async def _copy_and_close(self, name: str, read: _JournalRead) -> None:
        """Copy a journal to the output, until it ends or its reader is closed."""
        try:
            if await self._copy(name, read):
                await read.stream.finish()
            # Drop a held part of a message: the next read begins with that message.
            self._note_offset(name, read)
        finally:
            read.stream.close()
            read.reader.close()
            self._reads.pop(name, None)

    async def _copy(self, name: str, read: _JournalRead) -> bool:
        """Copy until the journal ends. Return False if the reader was closed before."""
        reader = read.reader
        while True:
            try:
                piece = await reader.read(READ_BYTES)
            except OffsetJump as jump:
                await read.stream.finish()
                self.context.terminal.note(
                    f"{name}: no content at offset {jump.expected}; continuing at {jump.offset}"
                )
                self._note_offset(name, read)
                continue
            except NotYet:
                return True
            except Closed:
                return False
            except (NotFound, NotAllowed) as error:
                if not is_over(error):
                    raise
                self.context.terminal.note(f"{name}: {error.message}")
                return True
            if not piece:
                return True
            # Without a content type, a message may end only at the end of a fragment or at the head.
            fragment_end = 0 if reader.fragment is None else reader.fragment.end
            at_edge = reader.offset >= min(fragment_end, reader.write_head)
            await read.stream.write(piece, at_edge=at_edge)
            self._note_offset(name, read)

    def _note_offset(self, name: str, read: _JournalRead) -> None:
        """Note up to which offset a journal is written: without the bytes that its stream holds."""
        if read.reader.offset >= 0:
            self.offsets[name] = read.reader.offset - read.stream.held_bytes

    @asynccontextmanager
    async def _showing_progress(self) -> AsyncIterator[None]:
        """Show progress in the block, unless the content goes to the user's terminal."""
        if self.flags.output == "-":
            yield
            return
        async with self.context.reporting_progress("read", self._amounts):
            yield

    def _amounts(self) -> tuple[int, int]:
        """Return the number of written bytes, and the total: these, and the bytes still to be read."""
        written = self.output.file.bytes_written
        missing = sum(
            max(0, read.reader.write_head - max(0, read.reader.offset))
            for read in self._reads.values()
        )
        return written, written + missing


def is_over(error: GazetteError) -> bool:
    """Return True if the journal was deleted or suspended during the read."""
    return isinstance(error, NotFound) or status_of(error) == Status.SUSPENDED.name


def read_offsets(path: Path | None) -> dict[str, int]:
    """Return offsets by journal from a JSON file. Raise ``Invalid`` for an unreadable or another file."""
    if path is None:
        return {}
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Invalid(
            f"cannot read {path}: {error.strerror}",
            path="--offsets",
            hint="To begin with an empty file: echo '{}' > " + str(path),
        ) from error
    except ValueError as error:
        raise Invalid(f"{path} is not JSON: {error}", path="--offsets") from error
    if isinstance(value, dict) and all(
        type(offset) is int and offset >= 0 for offset in value.values()
    ):
        return value
    raise Invalid(f"{path} is not an object of offsets by journal", path="--offsets")


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def write_offsets(path: Path, offsets: Mapping[str, int], former: Path | None) -> None:
    """Write offsets atomically. If ``path`` is ``former``, from which the offsets were read, keep its old
    content in a file with the suffix `PREVIOUS`."""
    temporary = _temporary(path)
    temporary.write_text(json.dumps(dict(sorted(offsets.items())), indent=2) + "\n", "utf-8")
    if former is not None and former.exists() and path.exists() and former.samefile(path):
        path.replace(path.with_name(path.name + PREVIOUS))
    temporary.replace(path)
