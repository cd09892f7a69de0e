"""``gazctl read`` and ``gazctl produce``: committed messages as lines of JSON, from and to journals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import ReadParams
from gazette.errors import GazetteError, Invalid, NotAllowed, NotFound
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.declared_output import decoder_of, load_declared
from gazette.gazctl.flags import ProduceMessagesFlags, ReadMessagesFlags
from gazette.gazctl.io.record_splitter import LineSplitter
from gazette.gazctl.journals.list import list_journals
from gazette.gazctl.journals.lookup import write_head
from gazette.gazctl.journals.read import is_over
from gazette.gazctl.journals.waits import WaitReasons
from gazette.gazctl.last_messages import MessageJournal, find_last, is_data
from gazette.history.columns import MessageFormat
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.codec import CODEC_ERRORS
from gazette.message.envelope import Envelope
from gazette.message.envelope_reader import CommittedReader, OnMalformed, UncommittedReader
from gazette.message.exact_numbers import ExactDocument, exact_float
from gazette.message.framing.frames import MalformedMessage
from gazette.message.message import CSVRecord
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.message.publishing.outputs import Output
from gazette.message.uuid import clock_unix_ns
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.decoders import json_decoder
from gazette.runtime.numbers import counted
from gazette.runtime.tasks import BlockingPool, TaskScope

READ_BYTES: Final = 1 << 17
_TICKS_PER_S: Final = 10**9


# Reading.


async def read(context: Context) -> int:
    flags = context.flags(ReadMessagesFlags)
    selector = _selector(context, flags.selector)
    for name, number in (("--limit", flags.limit), ("--last", flags.last)):
        if number < 0:
            raise Invalid(f"invalid number ({number}; expected >= 0)", path=name)
    if flags.last and (flags.tail or flags.begin):
        raise Invalid(
            "excludes --tail and --begin, which say another place to begin at",
            path="--last",
            hint="Leave --tail and --begin out.",
        )
    client = await context.broker()
    writer = MessageWriter(context, client, flags)
    context.on_signal = writer.on_signal
    await (writer.follow(selector) if flags.follow else writer.read_once(selector))
    # An interrupt is the normal end of a read with --follow, and ends any other read early.
    return 0 if flags.follow else context.interrupted_code


class _Place(NamedTuple):
    """Where a read of a journal begins. It is of no use in a later journal of that name."""

    create_revision: int
    source: SourceCheckpoint


@dataclass(slots=True)
class MessageWriter:
    """All reads of one command."""

    context: Context
    client: Client
    flags: ReadMessagesFlags
    interrupted: bool = False
    _written: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once all reads have to end: by an interrupt, at the limit, or after the last one."""
    _names: set[str] = field(default_factory=set)
    """Journals that are read."""
    _suspended: set[str] = field(default_factory=set)
    """Journals that were skipped since they are suspended."""
    _places: dict[str, _Place] = field(default_factory=dict)
    """By journal that is to be read again, or later: where to begin."""
    _listed: dict[str, ListedJournal] = field(default_factory=dict)
    """The last list of journals, with --follow."""
    _first_revision: int = 0
    """Revision of the first list of journals."""
    _waits: WaitReasons = field(init=False)

    def __post_init__(self) -> None:
        self._waits = WaitReasons(self.context, self.client)

    def on_signal(self) -> bool:
        """End all reads. The second signal cancels them."""
        first, self.interrupted = not self.interrupted, True
        self._ended.set()
        return first

    async def read_once(self, selector: LabelSelector) -> None:
        """Read one journal after the other, each to its head. Raise ``NotFound`` if no journal matches."""
        listed = await list_journals(self.context, self.client, selector)
        if not listed.journals:
            await _require_no_directory(self.context, self.client)
            raise _nothing_matches(selector)

        async def every() -> None:
            for journal in listed.journals:
                if self._begins(journal) and not self._ended.is_set():
                    await self._read(journal)
            self._ended.set()

        await self._until_ended(every())

    async def follow(self, selector: LabelSelector) -> None:
        """Read from the journals that match, including those that match later, until all reads have to end. A
        journal that is fully suspended is read once it resumes."""

        async def watch() -> None:
            async with TaskScope("journals") as scope:
                async for listed in self.client.watch_journals(selector):
                    if not self._first_revision:
                        self._first_revision = listed.header.etcd.revision
                        if not listed.journals:
                            self.context.terminal.note("no journal matches yet")
                    self._listed = {journal.spec.name: journal for journal in listed.journals}
                    for journal in listed.journals:
                        if self._begins(journal):
                            scope.spawn(self._follow(journal), name=journal.spec.name)

        await self._until_ended(watch())

    async def _until_ended(self, reads: Any) -> None:
        """Run ``reads`` until they end, or until all reads have to end."""
        async with self._waits.noting(), TaskScope("read") as scope:
            scope.spawn(reads, name="reads")
            scope.spawn(self._end(scope), name="end")

    async def _end(self, scope: TaskScope) -> None:
        await self._ended.wait()
        scope.cancel()

    def _begins(self, journal: ListedJournal) -> bool:
        """Return True if the read of a journal must begin now: it is not read yet, and not fully suspended.
        Report a suspended journal as skipped."""
        spec = journal.spec
        if spec.name in self._names:
            return False
        if spec.suspend_level is SuspendLevel.FULL:
            if spec.name not in self._suspended:
                self._suspended.add(spec.name)
                self.context.terminal.note(f"skipped {spec.name}: it is fully suspended")
            if self.flags.tail and spec.suspend is not None:  # Later messages follow this offset.
                place = _Place(journal.create_revision, SourceCheckpoint(spec.suspend.offset))
                self._places.setdefault(spec.name, place)
            return False
        self._suspended.discard(spec.name)
        self._names.add(spec.name)
        return True

    async def _follow(self, journal: ListedJournal) -> None:
        """Read a journal until all reads end, or until it is deleted or suspended. Begin again if the list
        has the journal again."""
        name = journal.spec.name
        while True:
            try:
                await self._read(journal)
                return
            except (NotFound, NotAllowed) as error:
                if not is_over(error):
                    raise
                self.context.terminal.note(f"{name}: {error.message}")
            self._names.discard(name)
            latest = self._listed.get(name)
            # If the list has not changed yet, it will change, and `watch` then begins another read.
            if latest is None or latest.mod_revision == journal.mod_revision:
                return
            if not self._begins(latest):
                return
            journal = latest

    async def _read(self, journal: ListedJournal) -> None:
        """Write the messages of one journal, up to its head. With --follow, go on until all reads end."""
        flags, name = self.flags, journal.spec.name
        cls, to_json = self._type_of(journal)
        begin, end, to_skip = flags.begin, 0, 0
        place = self._places.pop(name, None)
        source = None
        if place is not None:
            begin = 0
            if place.create_revision == journal.create_revision:
                source = place.source
                begin = source.read_through
        elif flags.tail:
            is_new = 0 < self._first_revision < journal.create_revision
            begin = 0 if is_new else await write_head(self.context, self.client, name)
        elif flags.last:
            by_line = journal.spec.labels.value_of(CONTENT_TYPE) == CONTENT_JSON_LINES
            messages = MessageJournal(
                name, not flags.uncommitted, by_line, lambda params: self._counted(params, cls)
            )
            begin, end, to_skip = await find_last(self.context, self.client, messages, flags.last)
            if not flags.follow and begin == end:
                return
        params = ReadParams(name, begin, block=flags.follow, end_offset=0 if flags.follow else end)
        malformed = self._skipped if flags.skip_malformed else None
        options: dict[str, Any] = {} if flags.uncommitted else {"source": source}
        options["bytes_of"] = self._waits.unbounded if flags.follow else self._waits.bounded
        reader = self._reader(params, cls, malformed, **options)
        read_through = begin
        try:
            async with aclosing(reader.batches()) as batches:
                async for batch in batches:
                    data = [envelope for envelope in batch if is_data(envelope)]
                    written = data[to_skip:]
                    to_skip -= len(data) - len(written)
                    if not self._write(name, written, to_json):
                        return
                    read_through = batch[-1].end
        except (NotFound, NotAllowed):  # A journal that resumes is read from here.
            reached = SourceCheckpoint(read_through) if flags.uncommitted else reader.checkpoint()
            self._places[name] = _Place(journal.create_revision, reached)
            raise

    def _reader(
        self, params: ReadParams, kind: Any, malformed: OnMalformed | None, **options: Any
    ) -> Any:
        reader_type: Any = UncommittedReader if self.flags.uncommitted else CommittedReader
        return reader_type(
            self.client, params, kind, uuid=self.flags.uuid, on_malformed=malformed, **options
        )

    def _counted(self, params: ReadParams, kind: Any) -> AsyncGenerator[list[Envelope[Any]], None]:
        """Read for `find_last`: like the later read, but with acknowledgements, and without notes."""
        malformed = _ignore if self.flags.skip_malformed else None
        options: dict[str, Any] = {} if self.flags.uncommitted else {"acknowledgements": True}
        options["bytes_of"] = self._waits.bounded
        return self._reader(params, kind, malformed, **options).batches()  # type: ignore[no-any-return]

    def _type_of(self, journal: ListedJournal) -> tuple[Any, Callable[[Any], Any]]:
        """Return the type of a journal's messages, and the function from a message to JSON. Raise ``Invalid``
        if its content type gives no type, or if the class of protobuf messages was not given."""
        name = journal.spec.name
        content_type = journal.spec.labels.value_of(CONTENT_TYPE) or ""
        match content_type:
            case labels if labels == CONTENT_JSON_LINES:
                return ExactDocument, _itself
            case labels if labels == CONTENT_CSV:
                return CSVRecord, list
            case labels if labels == CONTENT_PROTO_FIXED:
                if not self.flags.message:
                    raise Invalid(
                        f"{name} holds protobuf messages, which are not read without their class",
                        path="--message",
                        hint="Give the generated class as module:Class, importable from here "
                        "(PYTHONPATH).",
                    )
                from google.protobuf.json_format import MessageToDict

                return MessageFormat(message=self.flags.message).message_type(), MessageToDict
        raise Invalid(
            f"{name} holds no messages: its label {CONTENT_TYPE} is {content_type or 'not set'}",
            hint=f"`gazctl journals read -l name={name}` writes its bytes.",
        )

    def _write(
        self, journal: str, wanted: list[Envelope[Any]], shown: Callable[[Any], Any]
    ) -> bool:
        """Write messages as lines. Return False once the wanted number is written."""
        if self._ended.is_set():
            return False
        if self.flags.limit:
            wanted = wanted[: self.flags.limit - self._written]
        self._written += len(wanted)
        lines = [
            msgspec.json.encode(self._document(journal, envelope, shown)) for envelope in wanted
        ]
        if lines:
            self.context.terminal.stdout.write(b"\n".join([*lines, b""]))
            self.context.terminal.stdout.flush()
        if self.flags.limit and self._written >= self.flags.limit:
            self._ended.set()
            return False
        return True

    def _document(self, journal: str, one: Envelope[Any], shown: Callable[[Any], Any]) -> Any:
        message = shown(one.message)
        if not self.flags.meta:
            return message
        time = clock_unix_ns(one.clock) / _TICKS_PER_S if one.clock else None
        return {"journal": journal, "offset": one.begin, "time": time, "message": message}

    def _skipped(self, error: MalformedMessage) -> None:
        self.context.terminal.note(f"skipped: {error}")


def _itself(value: Any) -> Any:
    return value


def _ignore(_error: MalformedMessage) -> None:
    """Ignore a malformed frame: the later read reports it."""


# Publishing.


async def produce(context: Context) -> int:
    flags = context.flags(ProduceMessagesFlags)
    declared = load_declared(flags.declared) if flags.declared else None
    output = _output(context, flags.selector) if declared is None else declared
    if declared is not None and (context.loaded.arguments or flags.selector or flags.key):
        raise Invalid(
            "is given, and journals or --key are, too",
            path="--declared",
            hint="The declaration has the journals and the key.",
        )
    decode = object_of if declared is None else decoder_of(declared)
    client = await context.broker()
    if isinstance(output, str):
        listed = await client.list_journals(LabelSelector.of(name=output))
        if not listed.journals:
            await _require_no_directory(context, client)
            raise _nothing_matches(LabelSelector.of(name=output))
    pool = BlockingPool("input", 1)
    try:
        # --timeout applies to each commit.
        async with ClientPublisher(
            client,
            mapping=flags.mapping,  # type: ignore[arg-type]
            timeout_s=context.timeout_s,
            uuid=flags.uuid,
        ) as publisher:
            producing = Producing(publisher, output, flags.key, decode)
            source = read_lines(context.terminal.stdin, pool)
            async with aclosing(source):
                if flags.one_transaction:
                    await producing.publish_whole(source)
                else:
                    await producing.publish_each(source)
    finally:
        # The thread may wait for input that never comes: let it end with the process.
        pool.close()
    context.terminal.note(f"published {counted(producing.committed, 'message')}")
    return 0


async def read_lines(source: BinaryIO, pool: BlockingPool) -> AsyncGenerator[list[bytes], None]:
    """Yield the available lines of the input, until its end. Raise ``GazetteError`` if it cannot be read."""
    splitter = LineSplitter()
    read1 = getattr(source, "read1", source.read)
    while True:
        try:
            data = await pool.run(read1, READ_BYTES)
        except OSError as error:
            raise GazetteError(f"cannot read the input: {error.strerror}") from error
        if lines := splitter.feed(data) if data else splitter.finish():
            yield lines
        if not data:
            return


class Producing:
    """Publishes the lines of an input. ``committed`` counts visible messages."""

    def __init__(
        self,
        publisher: ClientPublisher,
        output: Output,
        key: str,
        decode: Callable[[bytes], Any],
    ) -> None:
        self._publisher = publisher
        self._output = output
        self._key = key
        self._decode = decode
        self._expected = "a JSON object" if decode is object_of else "a message as declared"
        self._lines = 0
        self.committed = 0

    async def publish_each(self, source: AsyncIterator[list[bytes]]) -> None:
        """Publish the available lines of the input as a transaction, repeatedly."""
        async for lines in source:
            count = 0
            async with self._publisher.transaction() as transaction:
                for line in lines:
                    count += await self._publish(transaction, line)
            self.committed += count

    async def publish_whole(self, source: AsyncIterator[list[bytes]]) -> None:
        """Publish the whole input as one transaction."""
        count = 0
        async with self._publisher.transaction() as transaction:
            async for lines in source:
                for line in lines:
                    count += await self._publish(transaction, line)
        self.committed += count

    async def _publish(self, transaction: Any, line: bytes) -> int:
        """Publish one line. Return its number of messages: 0 for a blank line, else 1."""
        self._lines += 1
        if not line.strip():
            return 0
        try:
            message = self._decode(line)
        except CODEC_ERRORS as error:
            problem = f"{self._place()} is not {self._expected}"
            raise Invalid(f"{problem}: {error}", path="stdin") from error
        try:
            key = key_at(self._key, message)
            await transaction.publish(self._output, message, key=key)
        except Invalid as error:
            raise Invalid(
                f"{self._place()} cannot be published: {error}", path="stdin", hint=error.hint
            ) from error
        return 1

    def _place(self) -> str:
        return f"line {self._lines} (after {counted(self.committed, 'committed message')})"


_exact_object: Final = json_decoder(dict[str, Any], float_hook=exact_float).decode


def object_of(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raise one of `CODEC_ERRORS` for a line of another form."""
    return _exact_object(line)


def key_at(path: str, message: dict[str, Any]) -> Any:
    """Return the key of a message at the path of --key; None for an empty path. Raise ``Invalid`` if the
    message has no such field."""
    if not path:
        return None
    value: Any = message
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise Invalid(
            f"it has no field {path}",
            hint="Every message needs its key. Nested fields are joined by dots.",
        )
    return value


# Which journals.


def _selector(context: Context, text: str) -> LabelSelector:
    """Return a selector of the journals that the arguments name, or else the selector of --selector. Raise
    ``Invalid`` for both or neither."""
    names = context.loaded.arguments
    if bool(names) == bool(text.strip()):  # Both, or neither.
        raise Invalid(
            "give either names of journals, or a selector",
            hint="As in `gazctl read words/part-000`, or `gazctl read -l name:prefix=words/`.",
        )
    if names:
        return LabelSelector.of(*(("name", name) for name in names))
    return parse_selector(text, required=True)


def _output(context: Context, text: str) -> Output:
    """Return where to publish: the name of the only journal, or a selector of several journals."""
    names = context.loaded.arguments
    if len(names) == 1 and not text.strip():
        return names[0]
    return _selector(context, text)


async def _require_no_directory(context: Context, client: Client) -> None:
    """Raise ``NotFound`` if an argument is the name of a directory of journals."""
    for name in context.loaded.arguments:
        directory = f"{name.rstrip('/')}/"
        listed = await client.list_journals(LabelSelector.of(("name:prefix", directory)))
        if names := [journal.spec.name for journal in listed.journals]:
            count_text = "a journal is" if len(names) == 1 else f"{len(names)} journals are"
            raise NotFound(
                f"{name} is no journal: {count_text} below it ({names[0]}{', …' if names[1:] else ''})",
                hint=f"Give one, or all of them: -l name:prefix={directory}",
            )


def _nothing_matches(selector: LabelSelector) -> NotFound:
    return NotFound(
        "no journal matches",
        hint="See `gazctl journals list` for names and labels.",
        selector=selector,
    )
