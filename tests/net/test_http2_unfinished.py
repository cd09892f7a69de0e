"""Calls of strangers, calls without a message, and messages that are announced, over sockets."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.errors import NotAllowed
from gazette.http2 import frames as fr
from gazette.http2.connection import STREAMS_MAX
from gazette.http2.grpc_client import Http2Channel
from gazette.http2.headers import Fields, HeaderDecoder, encode_fields
from gazette.http2.messages import prefixed
from gazette.http2.metadata import Metadata, status_of
from gazette.net.grpc import unfinished
from gazette.runtime.metrics import GRPC_SERVER_HANDLED
from tests.net.test_http2_server import LARGEST, METHOD, Served, failure
from tests.raw_server import raw_server
from tests.support.instant_clock import eventually
from tests.support.loop_time import LoopTime, turns
from tests.support.metrics import value_of

TOKEN = (b"authorization", b"right")


def admit(path: str, metadata: Metadata) -> None:
    assert path.startswith(METHOD)
    if ("authorization", "right") not in metadata:
        raise NotAllowed("no token")


class Strict(Served):
    """A server that looks at the heads of calls."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(admit=admit, **bounds)


@pytest.fixture
async def strict() -> AsyncIterator[Strict]:
    served = Strict()
    await served.server.start()
    yield served
    await served.channel.close()
    await served.server.stop(0)


class Raw:
    """A connection of frames, and what came back."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.ends: dict[int, Fields] = {}
        self.codes: list[int] = []
        self._decoder = HeaderDecoder()
        self._rest = b""

    async def connect(self) -> Raw:
        self.reader, self.writer = await self.served.raw()
        self.writer.write(fr.PREFACE + fr.settings({}))
        return self

    def call(self, stream: int, method: str, *more: tuple[bytes, bytes]) -> None:
        head = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", f"{METHOD}{method}".encode()),
            (b"content-type", b"application/grpc"),
            *more,
        ]
        self.writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS, stream, encode_fields(head)))

    def send(self, stream: int, content: bytes, *, ended: bool = False) -> None:
        for at in range(0, len(content), fr.FRAME_BYTES_MIN):
            part = content[at : at + fr.FRAME_BYTES_MIN]
            last = ended and at + len(part) == len(content)
            self.writer.write(fr.frame(fr.DATA, fr.END_STREAM if last else 0, stream, part))

    async def handled(self) -> None:
        """Return once the server has read all that was sent, and handlers have seen it: it answers pings."""
        for _ in range(2):
            self.writer.write(fr.ping(bytes(8)))
            while await self.frame() != (fr.PING, bytes(8)):
                pass
            await turns()

    async def status(self, stream: int) -> grpc.StatusCode:
        """Return the status by which a call ends."""
        while stream not in self.ends:
            await self.frame()
        return status_of(self.ends[stream])[0]

    async def frame(self) -> tuple[int, bytes]:
        """Take a frame. Return its kind, and what it holds."""
        head = await self.reader.readexactly(fr.HEAD_BYTES)
        length, kind, flags, of = fr.read_head(head, 0)
        payload = await self.reader.readexactly(length)
        if kind == fr.HEADERS and flags & fr.END_STREAM:
            self.ends[of] = self._decoder.decode(payload)
        return kind, payload

    async def announce(self, *streams: int) -> None:
        """Begin calls with a message whose bytes do not follow, each of almost the largest size."""
        for stream in streams:
            self.call(stream, "Length", TOKEN)
            self.send(stream, b"\0" + (LARGEST - 1000).to_bytes(4, "big"))
        await self.handled()


def handled(kind: str, method: str) -> float:
    labels = (kind, "test.Service", method, "Unauthenticated")
    return value_of(GRPC_SERVER_HANDLED.labels(*labels))


async def test_strangers_are_refused_by_the_head_of_their_calls(strict: Strict) -> None:
    """Of any kind, before a message has come. And they are counted as before."""
    before = handled("unary", "Double"), handled("client_stream", "Length")
    raw = await Raw(strict).connect()
    for stream, method in ((1, "Double"), (3, "Length"), (5, "Echo"), (7, "Count")):
        raw.call(stream, method)
        assert await raw.status(stream) is grpc.StatusCode.UNAUTHENTICATED
    (connection,) = strict.server.connections
    assert not connection.is_busy
    assert not connection.http2.is_known
    after = handled("unary", "Double"), handled("client_stream", "Length")
    assert after == (before[0] + 1, before[1] + 1)
    raw.call(9, "Double", TOKEN)
    raw.send(9, prefixed(b"x"), ended=True)
    assert await raw.status(9) is grpc.StatusCode.OK
    assert connection.http2.is_known
    raw.writer.close()


async def test_the_first_message_must_come_in_time(strict: Strict) -> None:
    time = LoopTime()
    raw = await Raw(strict).connect()
    for stream, method in ((1, "Double"), (3, "Length"), (5, "Double")):
        raw.call(stream, method, TOKEN)
    raw.send(3, prefixed(b"only the first"))
    raw.send(5, prefixed(b"half")[:-1])
    await turns()
    time.advance(unfinished.FIRST_MESSAGE_S)
    for stream in (1, 5):
        assert await raw.status(stream) is grpc.StatusCode.DEADLINE_EXCEEDED
    raw.send(3, prefixed(b"x"), ended=True)
    assert await raw.status(3) is grpc.StatusCode.OK
    await eventually(lambda: not any(one.is_busy for one in strict.server.connections))
    raw.writer.close()


GET = b"\x82\x86\x84\x41\x04here"
"""The head of a request that is not gRPC."""


async def test_refused_requests_must_end_in_time(strict: Strict) -> None:
    time = LoopTime()
    reader, writer = await strict.raw()
    writer.write(fr.PREFACE + fr.settings({}))
    for stream in (1, 3, 5, 7):
        writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS, stream, GET))
        assert b"415" in await reader.readuntil(b"HTTP/1.1.\n")
    # Until then, frames are checked as those of a call. The end of a request is its end.
    writer.write(fr.frame(fr.DATA, fr.END_STREAM, 1, b"rest"))
    writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS | fr.END_STREAM, 3, b""))
    writer.write(fr.frame(fr.DATA, 0, 5, b"more"))
    connection = strict.connection()
    while connection.streams != 2:
        await turns()
    time.advance(unfinished.FIRST_MESSAGE_S)
    await reader.readuntil(fr.rst_stream(5, fr.FaultCode.NO_ERROR))
    await reader.readuntil(fr.rst_stream(7, fr.FaultCode.NO_ERROR))
    assert not connection.streams
    writer.close()


async def test_the_oldest_of_too_many_refused_requests_is_ended(strict: Strict) -> None:
    """Calls stay: strangers may make such requests."""
    call = await Raw(strict).connect()
    call.call(1, "Double", TOKEN)
    connections = [await strict.raw() for _ in range(3)]
    for _, writer in connections:
        writer.write(fr.PREFACE + fr.settings({}))
    # As many as two connections may have open. Their windows have no room for as many answers.
    for count, (_, writer) in enumerate(connections[:2], 1):
        for stream in range(1, 2 * STREAMS_MAX, 2):
            writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS, stream, GET))
        while sum(one.http2.streams for one in strict.server.connections) <= count * STREAMS_MAX:
            await turns()
    for stream in (1, 3):
        connections[2][1].write(fr.frame(fr.HEADERS, fr.END_HEADERS, stream, GET))
    first, second, third = (fr.rst_stream(stream, fr.FaultCode.NO_ERROR) for stream in (1, 3, 5))
    content = b""
    while first not in content or second not in content:
        content += await connections[0][0].read(1 << 16)
    assert third not in content
    call.send(1, prefixed(b"x"), ended=True)
    assert await call.status(1) is grpc.StatusCode.OK
    for _, writer in connections:
        writer.close()
    call.writer.close()
    # The end of the connections ends the rest, of which nothing stays.
    await eventually(lambda: not any(one.is_busy for one in strict.server.connections))


async def test_handlers_of_applications_may_wait_for_messages() -> None:
    """A stream of requests may begin with silence, unless the server knows better."""
    time = LoopTime()
    served = Served()
    await served.server.start()
    raw = await Raw(served).connect()
    raw.call(1, "Echo")
    raw.call(3, "Double")
    await turns()
    time.advance(unfinished.FIRST_MESSAGE_S)
    assert await raw.status(3) is grpc.StatusCode.DEADLINE_EXCEEDED
    raw.send(1, prefixed(b"late"), ended=True)
    assert await raw.status(1) is grpc.StatusCode.OK
    raw.writer.close()
    await served.channel.close()
    await served.server.stop(0)


async def test_connections_make_room_whose_calls_have_no_message() -> None:
    """First those of which no call was ever served. Connections whose calls are served stay."""
    served = Strict(limit=4)
    await served.server.start()
    stranger, idle, stuck, busy = [await Raw(served).connect() for _ in range(4)]
    stranger.call(1, "Hang")
    assert await stranger.status(1) is grpc.StatusCode.UNAUTHENTICATED
    idle.call(1, "Double", TOKEN)
    idle.send(1, prefixed(b"x"), ended=True)
    assert await idle.status(1) is grpc.StatusCode.OK
    busy.call(1, "Hang", TOKEN)
    busy.send(1, prefixed(b"x"), ended=True)
    stuck.call(1, "Hang", TOKEN)
    await stuck.handled()
    await served.handlers.running.wait()
    made = []
    for victim in (stuck, stranger, idle):
        made.append(await Raw(served).connect())
        made[-1].call(1, "Hang", TOKEN)
        made[-1].send(1, prefixed(b"x"), ended=True)
        await victim.reader.read()
        victim.writer.close()
    excess, writer = await served.raw()
    assert await excess.read() == b""
    writer.close()
    served.handlers.gate.set()
    for raw in (busy, *made):
        assert await raw.status(1) is grpc.StatusCode.OK
        raw.writer.close()
    await served.channel.close()
    await served.server.stop(0)


async def test_announced_messages_count_as_if_they_were_there() -> None:
    """The call that has announced one for the longest time makes room for others."""
    served = Strict(held_max=4 * LARGEST)
    await served.server.start()
    raw = await Raw(served).connect()
    await raw.announce(1, 3, 5, 7)
    assert not raw.ends
    raw.call(9, "Length", TOKEN)
    raw.send(9, prefixed(bytes(300_000)), ended=True)
    assert await raw.status(9) is grpc.StatusCode.OK
    assert await raw.status(1) is grpc.StatusCode.UNAVAILABLE
    assert 3 not in raw.ends
    raw.writer.close()
    await eventually(lambda: not served.server.connections)
    again = await Raw(served).connect()
    await again.announce(1, 3, 5, 7)
    assert not again.ends, "something of the former connection is still counted"
    again.writer.close()
    await served.channel.close()
    await served.server.stop(0)


async def test_answers_that_their_callers_do_not_take_make_room_for_others() -> None:
    """Those that have waited for the longest time are given up."""
    served = Strict(held_max=12 * 100_000)  # Each answer has 100,000 bytes, and its call some more.
    await served.server.start()
    raw = await Raw(served).connect()
    raw.writer.write(fr.settings({fr.INITIAL_WINDOW_SIZE: 100}))
    for begin in (1, 41):  # The second time as the first: nothing of that is still counted.
        streams = range(begin, begin + 40, 2)
        for stream in streams:
            raw.call(stream, "Count", TOKEN)
            raw.send(stream, prefixed(b"1"), ended=True)
        given_up = begin // 2 + 10
        while len(raw.ends) < given_up:
            await raw.frame()
        await raw.handled()
        assert len(raw.ends) == given_up
        window = fr.settings({fr.INITIAL_WINDOW_SIZE: 1 << 20}) + fr.window_update(0, 1 << 24)
        raw.writer.write(window)
        ends = [await raw.status(stream) for stream in streams]
        assert Counter(ends) == {grpc.StatusCode.OK: 10, grpc.StatusCode.UNAVAILABLE: 10}
        assert ends[0] is grpc.StatusCode.UNAVAILABLE
        raw.writer.write(fr.settings({fr.INITIAL_WINDOW_SIZE: 100}))
    await eventually(lambda: not any(one.is_busy for one in served.server.connections))
    raw.writer.close()
    await served.channel.close()
    await served.server.stop(0)


async def test_what_a_lost_connection_has_sent_is_dropped() -> None:
    """Although its handlers have not taken it, and their tasks may be kept by a cycle."""
    served = Strict(held_max=12 * LARGEST)
    await served.server.start()
    tasks = len(asyncio.all_tasks())
    raw = await Raw(served).connect()
    bomb = gzip.compress(bytes(LARGEST))
    for stream in range(1, 21, 2):
        raw.call(stream, "Hang", TOKEN, (b"grpc-encoding", b"gzip"))
        raw.send(stream, (b"\1" + prefixed(bomb)[1:]) * 5)
    await raw.handled()
    raw.writer.transport.abort()
    await eventually(lambda: not served.server.connections)
    await eventually(lambda: len(asyncio.all_tasks()) == tasks)
    other = await Raw(served).connect()
    await other.announce(*range(1, 25, 2))
    assert not other.ends, "something of the lost connection is still counted"
    other.writer.close()
    await served.channel.close()
    await served.server.stop(0)


async def test_a_handler_gives_way_while_it_has_messages_at_hand(strict: Strict) -> None:
    """Those of other calls are served in between."""
    raw = await Raw(strict).connect()
    large = gzip.compress(bytes(LARGEST))
    raw.call(1, "Length", TOKEN, (b"grpc-encoding", b"gzip"))
    raw.call(3, "Length", TOKEN)
    raw.send(1, (b"\1" + prefixed(large)[1:]) * 40, ended=True)
    raw.send(3, prefixed(b"x"), ended=True)
    assert await raw.status(3) is grpc.StatusCode.OK
    assert 1 not in raw.ends
    assert await raw.status(1) is grpc.StatusCode.OK
    raw.writer.close()


async def test_a_server_that_answers_with_bombs(strict: Strict) -> None:
    """A client of ours inflates a response when it takes it, and says if it is too large."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = [
            (b":status", b"200"),
            (b"content-type", b"application/grpc"),
            (b"grpc-encoding", b"gzip"),
        ]
        bomb = b"\1" + prefixed(gzip.compress(bytes(LARGEST)))[1:]
        await reader.readexactly(len(fr.PREFACE))
        writer.write(fr.settings({}))
        writer.write(fr.frame(fr.SETTINGS, fr.ACK, 0))
        while True:
            length, kind, flags, stream = fr.read_head(await reader.readexactly(fr.HEAD_BYTES), 0)
            await reader.readexactly(length)
            if kind == fr.DATA and flags & fr.END_STREAM:
                writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS, stream, encode_fields(head)))
                writer.write(fr.frame(fr.DATA, 0, stream, bomb))
                end = encode_fields([(b"grpc-status", b"0")])
                writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS | fr.END_STREAM, stream, end))

    async with raw_server(serve) as server:
        for most in (LARGEST, LARGEST - 1):
            options = [("grpc.max_receive_message_length", most)]
            async with Http2Channel(server.target, None, options) as channel:
                whole: Any = channel.unary_unary("/a/b")(b"")
                stream: Any = channel.unary_stream("/a/b")(b"")
                if most == LARGEST:
                    assert await whole == await stream.read() == bytes(LARGEST)
                    continue
                for answer in (whole, stream.read()):
                    error = await failure(answer)
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
