"""A broker that follows a script: a real gRPC server on 127.0.0.1, with journals in memory.

Without a script it serves appends and reads of any journal. A script changes single calls:

    broker.on_append(Reply(Status.NO_JOURNAL_PRIMARY_BROKER), Fail(after_bytes=10), LoseReply())
    broker.on_read(Send(metadata, content, fail=grpc.StatusCode.UNAVAILABLE))

Each call takes the next step of its script, and is served when no step is left. ``appends`` and
``reads`` record what was received. Several brokers can share ``journals``, as replicas do.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import grpc.aio

from gazette.protocol.append_session import LEDGER_KEY
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import ProcessId, split_journal_meta
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet, subtract, union
from gazette.protocol.pb import broker_pb2, broker_pb2_grpc
from gazette.protocol.route import EtcdHeader, Header, Route
from gazette.protocol.status import Status

CHUNK_BYTES = 1 << 17

AppendCall = AsyncIterator[broker_pb2.AppendRequest]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer an append with a status. With ``early``, do so before its content is read."""

    status: Status
    early: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Break off an append after ``after_bytes`` bytes of content. Nothing is committed."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    details: str = "scripted"
    after_bytes: int = 0
    ledger: str = ""
    """The ledger that a new primary names, with ``ABORTED``, to a session that it does not know."""


@dataclass(frozen=True, slots=True)
class LoseReply:
    """Commit an append, and break off before the answer."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class Hold:
    """Serve an append once ``until`` is set, or break it off with ``code``.

    ``reached`` is set when its content has arrived.
    """

    until: asyncio.Event
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    code: grpc.StatusCode | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Answer a read with these messages. Then end it, fail it, or (``hang``) neither."""

    messages: tuple[broker_pb2.ReadResponse, ...] = ()
    fail: grpc.StatusCode | None = None
    hang: bool = False


AppendStep = Reply | Fail | LoseReply | Hold


@dataclass(slots=True)
class RecordedAppend:
    """An Append call as it was received."""

    opening: broker_pb2.AppendRequest
    metadata: tuple[tuple[str, Any], ...]
    content: bytes = b""
    chunks: int = 0
    committed: bool = False
    commits_before: int = 0
    """Number of appends that this broker had committed when the call arrived."""

    @property
    def journal(self) -> str:
        return self.opening.journal


@dataclass(slots=True)
class StubJournal:
    """A journal in memory. ``stored`` are fragments, each with its announced URL."""

    name: str
    content: bytearray = field(default_factory=bytearray)
    registers: LabelSet = EMPTY_LABELS
    begin: int = 0
    stored: list[tuple[Fragment, str]] = field(default_factory=list)
    grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        return self.begin + len(self.content)

    def append(self, content: bytes) -> Fragment:
        begin = self.end
        self.content += content
        grown, self.grown = self.grown, asyncio.Event()
        grown.set()
        digest = hashlib.sha1(content, usedforsecurity=False).digest() if content else bytes(20)
        return Fragment(self.name, begin, self.end, digest)

    def fragment_of(self, offset: int) -> tuple[Fragment, str]:
        """Return the fragment that covers an offset: a stored one, or all bytes in memory."""
        for fragment, url in self.stored:
            if fragment.begin <= offset < fragment.end:
                return fragment, url
        begin = max([self.begin, *(fragment.end for fragment, _ in self.stored)])
        return Fragment(self.name, begin, self.end, b"\x01" * 20), ""


class StubBroker(broker_pb2_grpc.JournalServicer):
    """Broker with a script: see the module. Use as ``async with StubBroker() as broker``."""

    def __init__(
        self,
        suffix: str = "stub-broker",
        *,
        zone: str = "local",
        journals: dict[str, StubJournal] | None = None,
    ) -> None:
        self.id = ProcessId(zone, suffix)
        self.journals: dict[str, StubJournal] = {} if journals is None else journals
        self.routes: dict[str, Route] = {}
        """Routes of journals that other brokers serve, too."""
        self.missing: set[str] = set()
        """Journals that do not exist. All others do."""
        self.appends: list[RecordedAppend] = []
        self.commits: list[RecordedAppend] = []
        """Committed ones of ``appends``, in order of their commits."""
        self.reads: list[broker_pb2.ReadRequest] = []
        self.requests: list[tuple[str, Any, tuple[tuple[str, Any], ...]]] = []
        """Calls of the other methods: name, request, metadata."""
        self.answers: dict[str, Callable[[Any], Any]] = {}
        """Answers of List (an iterable), Apply, ListFragments and FragmentStoreHealth, by method."""
        self.revision = 1
        self.created = 0
        """CreateRevision of all journals in answers to reads; 0: not reported, as by the original."""
        self.port = 0
        self._append_script: deque[AppendStep] = deque()
        self._read_script: deque[Send] = deque()
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen. After a ``stop``, listen on the same port again."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        broker_pb2_grpc.add_JournalServicer_to_server(self, server)
        self.port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        self._server = server

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop listening. Calls in flight are cut after ``grace_s`` seconds."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # The script.

    def on_append(self, *steps: AppendStep) -> None:
        self._append_script.extend(steps)

    def on_read(self, *steps: Send) -> None:
        self._read_script.extend(steps)

    def journal(self, name: str) -> StubJournal:
        name, _ = split_journal_meta(name)
        return self.journals.setdefault(name, StubJournal(name))

    def content_of(self, name: str) -> bytes:
        return bytes(self.journal(name).content)

    def route_of(self, name: str) -> Route:
        name, _ = split_journal_meta(name)
        return self.routes.get(name) or Route((self.id,), 0, (self.endpoint,))

    def header(self, journal: str = "") -> Header:
        route = self.route_of(journal) if journal else Route()
        return Header(self.id, route, EtcdHeader(12, 34, self.revision, 56))

    def metadata(
        self, journal: str, offset: int, status: Status = Status.OK, *, first: bool = True
    ) -> broker_pb2.ReadResponse:
        """Return the message that this broker would send before content."""
        held = self.journal(journal)
        response = broker_pb2.ReadResponse(
            status=status.value,  # type: ignore[arg-type]
            offset=offset,
            write_head=held.end,
            header=self.header(journal).to_pb() if first else None,
            created=self.created if first else 0,
        )
        if status is Status.OK:
            fragment, url = held.fragment_of(offset)
            response.fragment.CopyFrom(fragment.to_pb())
            response.fragment_url = url
        return response

    # Append.

    async def Append(
        self, call: AppendCall, context: grpc.aio.ServicerContext[Any, Any]
    ) -> broker_pb2.AppendResponse:
        opening = await anext(aiter(call))
        append = RecordedAppend(
            opening,
            tuple(context.invocation_metadata() or ()),
            commits_before=len(self.commits),
        )
        self.appends.append(append)
        step = self._append_script.popleft() if self._append_script else None
        if isinstance(step, Reply) and step.early:
            return self._append_response(opening, step.status)
        complete = await self._read_content(call, append, step, context)
        if not complete:
            await context.abort(grpc.StatusCode.UNKNOWN, "append stream: unexpected EOF")
        if isinstance(step, Hold):
            step.reached.set()
            await step.until.wait()
            if step.code is not None:
                await context.abort(step.code, "scripted")
        status = step.status if isinstance(step, Reply) else self._append_status(opening)
        if status is not Status.OK:
            return self._append_response(opening, status)
        held = self.journal(opening.journal)
        commit = held.append(append.content)
        append.committed = True
        self.commits.append(append)
        if append.content:
            held.registers = _edited(held.registers, opening)
        if isinstance(step, LoseReply):
            await context.abort(step.code, "scripted: the reply is lost")
        response = self._append_response(opening, Status.OK)
        response.commit.CopyFrom(commit.to_pb())
        response.total_chunks = append.chunks
        return response

    async def _read_content(
        self,
        call: AppendCall,
        append: RecordedAppend,
        step: AppendStep | None,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> bool:
        """Return True if the client asked for the commit."""
        intent = False
        pieces: list[bytes] = []
        length = 0
        if isinstance(step, Fail) and step.after_bytes == 0:
            trailing = ((LEDGER_KEY, step.ledger),) if step.ledger else ()
            await context.abort(step.code, step.details, trailing)
        async for chunk in call:
            append.chunks += 1
            if intent or chunk.journal:
                await context.abort(grpc.StatusCode.UNKNOWN, "append stream: unexpected chunk")
            intent = not chunk.content
            pieces.append(chunk.content)
            length += len(chunk.content)
            if isinstance(step, Fail) and length >= step.after_bytes:
                append.content = b"".join(pieces)
                await context.abort(step.code, step.details)
        append.content = b"".join(pieces)
        return intent

    def _append_status(self, opening: broker_pb2.AppendRequest) -> Status:
        name, _ = split_journal_meta(opening.journal)
        if name in self.missing:
            return Status.JOURNAL_NOT_FOUND
        if self.route_of(name).primary_id != self.id:
            return Status.NOT_JOURNAL_PRIMARY_BROKER
        held = self.journal(name)
        if opening.offset not in (0, held.end):
            return Status.WRONG_APPEND_OFFSET
        if opening.HasField("check_registers") and held.registers:
            selector = LabelSelector.from_pb(opening.check_registers)
            if not selector.matches(held.registers):
                return Status.REGISTER_MISMATCH
        return Status.OK

    def _append_response(
        self, opening: broker_pb2.AppendRequest, status: Status
    ) -> broker_pb2.AppendResponse:
        return broker_pb2.AppendResponse(
            status=status.value,  # type: ignore[arg-type]
            header=self.header(opening.journal).to_pb(),
            registers=self.journal(opening.journal).registers.to_pb(),
        )

    # Read.

    async def Read(
        self,
        request: broker_pb2.ReadRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[broker_pb2.ReadResponse]:
        self.reads.append(request)
        if self._read_script:
            step = self._read_script.popleft()
            for message in step.messages:
                yield message
            if step.fail is not None:
                await context.abort(step.fail, "scripted")
            if step.hang:
                await asyncio.Event().wait()
            return
        async for response in self._served(request):
            yield response

    async def _served(
        self, request: broker_pb2.ReadRequest
    ) -> AsyncIterator[broker_pb2.ReadResponse]:
        name, _ = split_journal_meta(request.journal)
        if name in self.missing:
            yield self.metadata(name, 0, Status.JOURNAL_NOT_FOUND)
            return
        held = self.journal(name)
        offset = held.end if request.offset < 0 else max(request.offset, held.begin)
        first = True
        if 0 <= request.offset < request.end_offset <= offset:
            yield self.metadata(
                name, offset
            )  # The answer jumps beyond the offset that was asked for, and says so.
        while not request.end_offset or offset < request.end_offset:
            while offset >= held.end:
                if not request.block:
                    status = Status.OFFSET_NOT_YET_AVAILABLE
                    yield self.metadata(name, offset, status, first=first)
                    return
                await held.grown.wait()
            metadata = self.metadata(name, offset, first=first)
            first = False
            yield metadata
            remote = metadata.fragment_url != "" and request.do_not_proxy
            if request.metadata_only or remote:
                return
            end = min(metadata.fragment.end, request.end_offset or metadata.fragment.end)
            while offset < end:
                at = offset - held.begin
                content = bytes(held.content[at : min(at + CHUNK_BYTES, end - held.begin)])
                yield broker_pb2.ReadResponse(offset=offset, content=content)
                offset += len(content)

    # The rest.

    def _record(self, method: str, request: Any, context: Any) -> Any:
        self.requests.append((method, request, tuple(context.invocation_metadata() or ())))
        return self.answers[method](request)

    async def List(
        self, request: broker_pb2.ListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[broker_pb2.ListResponse]:
        answer = self._record("List", request, context)
        if hasattr(answer, "__aiter__"):
            async for response in answer:
                yield response
            return
        for response in answer:
            yield response

    async def Apply(
        self, request: broker_pb2.ApplyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> broker_pb2.ApplyResponse:
        response: broker_pb2.ApplyResponse = self._record("Apply", request, context)
        return response

    async def ListFragments(
        self, request: broker_pb2.FragmentsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> broker_pb2.FragmentsResponse:
        response: broker_pb2.FragmentsResponse = self._record("ListFragments", request, context)
        return response

    async def FragmentStoreHealth(
        self,
        request: broker_pb2.FragmentStoreHealthRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> broker_pb2.FragmentStoreHealthResponse:
        response: broker_pb2.FragmentStoreHealthResponse = self._record(
            "FragmentStoreHealth", request, context
        )
        return response


def _edited(registers: LabelSet, opening: broker_pb2.AppendRequest) -> LabelSet:
    if opening.HasField("subtract_registers"):
        registers = subtract(registers, LabelSet.from_pb(opening.subtract_registers))
    if opening.HasField("union_registers"):
        registers = union(LabelSet.from_pb(opening.union_registers), registers)
    return registers
