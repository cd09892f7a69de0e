"""Our gRPC server over HTTP/2, as clients of the package grpcio see it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import hpack
import pytest

from gazette.errors import Invalid
from gazette.http2 import frames as fr
from gazette.http2.connection import Http2Connection
from gazette.http2.grpc_client import Http2Channel
from gazette.http2.headers import encode_fields
from gazette.http2.messages import prefixed
from gazette.net.grpc.grpc_server import Admit, GrpcServer
from gazette.net.grpc.held_memory import HELD_MAX
from gazette.net.grpc.server_connection import (
    IDLE_S,
    KEEPALIVE_S,
    STALL_S,
    ServerConnection,
)
from gazette.net.http_server import ReloadedTls, TlsFiles, bind_tcp
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.runtime.tls import tls_context
from tests.conftest import make_certificate
from tests.support.instant_clock import eventually
from tests.support.loop_time import LoopClock, LoopTime, turns

LARGEST = 4 << 20
METHOD = "/test.Service/"


class Handlers:
    """Handlers of each kind, and what became of calls."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.running = asyncio.Event()
        self.gate = asyncio.Event()

    async def double(self, request: bytes, call: Any) -> bytes:
        if request == b"abort":
            await call.abort(
                grpc.StatusCode.NOT_FOUND, "ünïcode %", (("k", "v"), ("k-bin", b"\xff"))
            )
        await call.send_initial_metadata((("first", "1"),))
        call.set_trailing_metadata(tuple(one for one in call.invocation_metadata() if one[0] < "n"))
        return request * 2

    async def count(self, request: bytes, call: Any) -> AsyncIterator[bytes]:
        del call
        for _ in range(int(request)):
            yield bytes(100_000)

    async def length(self, requests: Any, call: Any) -> bytes:
        del call
        return str(sum([len(request) async for request in requests])).encode()

    async def echo(self, requests: Any, call: Any) -> AsyncIterator[bytes]:
        del call
        async for request in requests:
            yield request

    async def ignore(self, requests: Any, call: Any) -> bytes:
        del requests, call
        await SystemClock().sleep(0.1)  # More arrives meanwhile than is read.
        return b"enough"

    async def hang(self, request: bytes, call: Any) -> bytes:
        del request, call
        self.running.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b"done"

    async def status(self, request: bytes, call: Any) -> bytes:
        call.set_code(grpc.StatusCode.DATA_LOSS)
        call.set_details("as set")
        return request

    async def defect(self, request: bytes, call: Any) -> bytes:
        del request, call
        raise ValueError("a defect")

    async def metadata(self, request: bytes, call: Any) -> bytes:
        call.set_trailing_metadata((("key", "line\n"),))
        return request

    async def refused(self, request: bytes, call: Any) -> bytes:
        del request, call
        raise Invalid("of the handler")

    def table(self) -> grpc.GenericRpcHandler[Any, Any]:
        return grpc.method_handlers_generic_handler(
            "test.Service",
            {
                "Double": grpc.unary_unary_rpc_method_handler(self.double),
                "Count": grpc.unary_stream_rpc_method_handler(self.count),
                "Length": grpc.stream_unary_rpc_method_handler(self.length),
                "Echo": grpc.stream_stream_rpc_method_handler(self.echo),
                "Ignore": grpc.stream_unary_rpc_method_handler(self.ignore),
                "Hang": grpc.unary_unary_rpc_method_handler(self.hang),
                "Status": grpc.unary_unary_rpc_method_handler(self.status),
                "Defect": grpc.unary_unary_rpc_method_handler(self.defect),
                "Metadata": grpc.unary_unary_rpc_method_handler(self.metadata),
                "Refused": grpc.unary_unary_rpc_method_handler(self.refused),
            },
        )


class Served:
    """A server, its handlers, and a client."""

    def __init__(
        self,
        limit: int = 100,
        admit: Admit | None = None,
        held_max: int = HELD_MAX,
        tls: TlsFiles | None = None,
    ) -> None:
        self.handlers = Handlers()
        self.server = GrpcServer(
            LoopClock(), max_recv_bytes=LARGEST, limit=limit, held_max=held_max
        )
        self.server.add_generic_rpc_handlers((self.handlers.table(),), admit)
        listener = bind_tcp("127.0.0.1", 0)
        self.port = int(listener.getsockname()[1])
        self.server.listen(listener, None if tls is None else ReloadedTls(tls))
        self.channel: Any = self.connect()

    def connect(self, **options: Any) -> Any:
        chosen = [("grpc.max_receive_message_length", -1), *options.items()]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=chosen)

    def unary(self, method: str) -> Any:
        return self.channel.unary_unary(f"{METHOD}{method}")

    def connection(self) -> Http2Connection:
        """Return the only connection."""
        (protocol,) = self.server.connections
        return protocol.http2

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.server.start()
    yield served
    await served.channel.close()
    await served.server.stop(0)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_call_with_metadata(served: Served) -> None:
    metadata = (("a", "b"), ("c-bin", b"\x00\x01"), ("user-agent", "x"))
    call = served.unary("Double")(b"ab", metadata=metadata)
    assert await call == b"abab"
    assert tuple(await call.initial_metadata()) == (("first", "1"),)
    trailing: Any = tuple(await call.trailing_metadata())
    assert trailing == (("a", "b"), ("c-bin", b"\x00\x01"))


async def test_a_call_that_is_aborted(served: Served) -> None:
    error = await failure(served.unary("Double")(b"abort"))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "ünïcode %")
    trailing: Any = tuple(error.trailing_metadata())
    assert trailing == (("k", "v"), ("k-bin", b"\xff"))


async def requests(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(size)


async def test_streams_of_requests_and_responses(served: Served) -> None:
    channel = served.channel
    counted = channel.unary_stream(f"{METHOD}Count")(b"200")
    assert sum([len(response) async for response in counted]) == 20_000_000
    assert await channel.stream_unary(f"{METHOD}Length")(requests(30, 1 << 20)) == b"31457280"
    assert await channel.stream_unary(f"{METHOD}Length")(requests(0, 0)) == b"0"
    echoed = channel.stream_stream(f"{METHOD}Echo")(requests(20, 300_000))
    assert [len(response) async for response in echoed] == [300_000] * 20


async def test_many_calls_at_once_on_one_connection(served: Served) -> None:
    calls = [served.unary("Double")(b"%d" % number) for number in range(300)]
    assert await asyncio.gather(*calls) == [b"%d%d" % (number, number) for number in range(300)]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
async def test_calls_that_arrive_at_once_wait_for_their_turn(secure: bool, tmp_path: Path) -> None:
    """Their connection is not read meanwhile, and calls of another one are answered in between."""
    chain, key = make_certificate(tmp_path)
    served = Served(tls=TlsFiles(str(chain), str(key)) if secure else None)
    context = tls_context(ca_file=str(chain)) if secure else None
    if context is not None:
        context.set_alpn_protocols(["h2"])
    await served.server.start()
    many = 1_500
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", served.port, ssl=context, server_hostname="localhost" if secure else None
    )
    head = b"\x83\x86\x44\x14/test.Service/Double\x41\x04here\x5f\x10application/grpc"
    again = b"\x83\x86\xc0\xbf\xbe"
    calls = [fr.PREFACE + fr.settings({}) + fr.frame(fr.HEADERS, 0x5, 1, head)]
    for n in range(3, 2 * many + 3, 2):
        calls.append(fr.frame(fr.HEADERS, fr.END_HEADERS, n, again))
        calls.append(fr.frame(fr.DATA, 1, n, prefixed(b"a")))
    async with Http2Channel(
        f"localhost:{served.port}", None if context is None else lambda: context
    ) as channel:
        double = channel.unary_unary(f"{METHOD}Double")
        assert await double(b"x") == b"xx"  # A connection takes longer to make than they to end.
        writer.write(b"".join(calls))
        await eventually(lambda: any(one.has_backlog for one in served.server.connections))
        assert await double(b"x") == b"xx"
        assert any(one.has_backlog for one in served.server.connections)
    seen = b""
    while seen.count(prefixed(b"aa")) < many:
        seen += await reader.read(1 << 16)
    assert not any(one.has_backlog for one in served.server.connections)
    writer.close()
    await served.channel.close()
    await served.server.stop(0)


async def test_compressed_requests(served: Served) -> None:
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        call = served.unary("Double")(b"x" * 5000, compression=compression)
        assert await call == b"x" * 10_000


async def test_the_largest_message(served: Served) -> None:
    call = served.channel.stream_unary(f"{METHOD}Length")(requests(1, LARGEST))
    assert await call == str(LARGEST).encode()
    for method in ("Double", "Length"):
        error = await failure(
            served.channel.stream_unary(METHOD + method)(requests(1, LARGEST + 1))
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("method", "code", "details"),
    [
        ("Status", grpc.StatusCode.DATA_LOSS, "as set"),
        ("Defect", grpc.StatusCode.UNKNOWN, "a defect"),
        ("Refused", grpc.StatusCode.UNKNOWN, "of the handler"),
        ("Unknown", grpc.StatusCode.UNIMPLEMENTED, "not found"),
    ],
)
async def test_how_calls_fail(
    served: Served, method: str, code: grpc.StatusCode, details: str
) -> None:
    error = await failure(served.unary(method)(b"x"))
    assert error.code() is code
    assert details in (error.details() or "")
    assert await served.unary("Double")(b"x") == b"xx"


async def test_a_call_has_as_much_time_as_its_caller_gives_it(served: Served) -> None:
    error = await failure(served.unary("Hang")(b"", timeout=0.05))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    while not served.handlers.cancelled:
        await SystemClock().sleep(0)


async def test_a_caller_that_goes_away_ends_its_call(served: Served) -> None:
    call = served.unary("Hang")(b"")
    await served.handlers.running.wait()
    call.cancel()
    while served.handlers.cancelled < 1:
        await SystemClock().sleep(0)
    # Case: all of its connection goes.
    served.handlers.running.clear()
    async with served.connect(**{"grpc.use_local_subchannel_pool": 1}) as other:
        _ = other.unary_unary(f"{METHOD}Hang")(b"")
        await served.handlers.running.wait()
    while served.handlers.cancelled < 2:
        await SystemClock().sleep(0)


async def test_calls_that_are_taken_back_at_once_leave_nothing(served: Served) -> None:
    """Their handlers have not begun: a rapid reset must not use up the places of later calls."""
    connection = await connected(served)
    head = b"\x83\x86\x44\x12" + b"/test.Service/Hang" + b"\x41\x04here\x5f\x10application/grpc"
    reader, writer = await served.raw()
    calls = b"".join(
        fr.frame(fr.HEADERS, fr.END_HEADERS, number, head)
        + fr.rst_stream(number, fr.FaultCode.CANCEL)
        for number in range(1, 41, 2)
    )
    writer.write(fr.PREFACE + fr.settings({}) + calls + fr.ping(b"12345678"))
    await reader.readuntil(b"12345678")
    (other,) = (one for one in served.server.connections if one is not connection)
    while other.is_busy:
        await SystemClock().sleep(0)
    assert not served.handlers.running.is_set()
    writer.close()


async def test_metadata_that_cannot_be_sent_is_an_error(served: Served) -> None:
    error = await failure(served.unary("Metadata")(b""))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "cannot be sent" in (error.details() or "")


async def test_a_server_that_stops_lets_calls_end(served: Served) -> None:
    call = served.unary("Hang")(b"")
    await served.handlers.running.wait()
    async with TaskScope("test") as scope:
        stopping = scope.spawn(served.server.stop(30.0), name="stop")
        while not served.connection().draining:
            await SystemClock().sleep(0)
        error = await failure(served.unary("Double")(b""))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        served.handlers.gate.set()
        assert await call == b"done"
        await stopping
    assert not served.server.connections


async def test_a_client_that_still_sends_gets_the_whole_answer_of_a_server_that_stops(
    served: Served,
) -> None:
    """A socket that is closed before all was read of it resets the connection: what is on its way is lost."""
    reader, writer = await served.raw()
    window = {fr.INITIAL_WINDOW_SIZE: fr.WINDOW_MAX}
    hello = fr.PREFACE + fr.settings(window) + fr.window_update(0, fr.WINDOW_MAX - 65_535)
    head = b"\x83\x86\x44\x13/test.Service/Count\x41\x04here\x5f\x10application/grpc"
    call = fr.frame(fr.HEADERS, fr.END_HEADERS, 1, head)
    writer.write(hello + call + fr.frame(fr.DATA, fr.END_STREAM, 1, prefixed(b"80")))
    # Far more than all sockets hold: the answer waits for its client.
    await eventually(lambda: any(one.is_busy for one in served.server.connections))
    seen = 0
    async with TaskScope("test") as scope:
        scope.spawn(served.server.stop(30.0), name="stop")
        while content := await reader.read(1 << 16):
            seen += len(content)
            writer.write(fr.ping(bytes(8)))
        writer.close()
    assert seen > 80 * 100_000


async def test_calls_that_do_not_end_are_cut_off(served: Served) -> None:
    call = served.unary("Hang")(b"")
    await served.handlers.running.wait()
    await served.server.stop(0.05)
    error = await failure(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert served.handlers.cancelled == 1
    await served.server.wait_for_termination()
    await served.server.stop(0)  # A second stop has no effect.


async def test_requests_that_are_not_of_grpc_are_answered_in_words(served: Served) -> None:
    reader, writer = await served.raw()
    writer.write(fr.PREFACE + fr.settings({}))
    get = b"\x82\x86\x84\x41\x04here"
    writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS | fr.END_STREAM, 1, get))
    answer = await reader.readuntil(b"HTTP/1.1.\n")
    assert b"415" in answer
    writer.close()
    # Case: HTTP/1.1, or anything else. The connection is ended.
    reader, writer = await served.raw()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"does not speak HTTP/2" in await reader.read()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (b"application/grpc", b"200"),
        (b"application/grpc+proto", b"200"),
        (b"Application/gRPC; charset=utf-8", b"200"),
        (b"application/grpc+json", b"415"),
        (b"application/grpc-web", b"415"),
        (b"application/grpc-web+proto", b"415"),
        (b"application/grpcx", b"415"),
        (b"application/json", b"415"),
        (b"", b"415"),
    ],
)
async def test_only_content_of_grpc_is_served(served: Served, kind: bytes, status: bytes) -> None:
    """A page of a browser may send other types, and other encodings would be read as protobuf."""
    reader, writer = await served.raw()
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", f"{METHOD}Double".encode())]
    block = encode_fields([*head, (b"te", b"trailers"), (b"content-type", kind)])
    writer.write(fr.PREFACE + fr.settings({}) + fr.frame(fr.HEADERS, fr.END_HEADERS, 1, block))
    writer.write(fr.frame(fr.DATA, fr.END_STREAM, 1, prefixed(b"x")))
    decoder, answered = hpack.Decoder(), b""
    while not answered:
        length, sent, _, _ = fr.read_head(await reader.readexactly(fr.HEAD_BYTES), 0)
        payload = await reader.readexactly(length)
        if sent == fr.HEADERS:
            answered = dict(decoder.decode(payload, raw=True))[b":status"]
    assert answered == status
    writer.close()


async def test_connections_beyond_the_limit() -> None:
    """An idle one makes room. If all are busy, the new one is closed."""
    served = Served(limit=2)
    await served.server.start()
    idle = await served.raw()
    call = served.unary("Hang")(b"")
    await served.handlers.running.wait()
    busy = served.connect(**{"grpc.use_local_subchannel_pool": 1})
    served.handlers.running.clear()
    second = busy.unary_unary(f"{METHOD}Hang")(b"")
    await served.handlers.running.wait()
    await idle[0].read()  # It was ended.
    idle[1].close()
    excess, writer = await served.raw()
    assert await excess.read() == b""
    writer.close()
    served.handlers.gate.set()
    assert (await call, await second) == (b"done", b"done")
    await busy.close()
    await served.channel.close()
    await served.server.stop(0)


def called(method: str, request: bytes = b"") -> bytes:
    """Return the frames of a first call."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"{METHOD}{method}".encode()),
        (b"content-type", b"application/grpc"),
    ]
    head = fr.frame(fr.HEADERS, fr.END_HEADERS, 1, encode_fields(fields))
    return head + fr.frame(fr.DATA, fr.END_STREAM, 1, prefixed(request))


async def frame_of(reader: asyncio.StreamReader, wanted: int) -> bytes:
    """Read up to the next frame of a kind, and return what it holds."""
    while True:
        length, kind, _, _ = fr.read_head(await reader.readexactly(fr.HEAD_BYTES), 0)
        content = await reader.readexactly(length)
        if kind == wanted:
            return content


async def connected(served: Served) -> ServerConnection:
    await served.unary("Double")(b"")
    (connection,) = served.server.connections
    return connection


async def test_clients_that_are_silent_are_asked_and_then_given_up(served: Served) -> None:
    time = LoopTime()
    reader, writer = await served.raw()
    writer.write(fr.PREFACE + fr.settings({}) + called("Hang"))
    await served.handlers.running.wait()
    time.advance(2 * KEEPALIVE_S)
    asked = await frame_of(reader, fr.PING)
    # Case: it answers, in front of a ping of its own, by whose answer it knows that it was heard.
    writer.write(fr.ping(asked, ack=True) + fr.ping(bytes(8)))
    assert await frame_of(reader, fr.PING) == bytes(8)
    # Case: it does not.
    time.advance(2 * KEEPALIVE_S)
    await frame_of(reader, fr.PING)
    assert served.handlers.cancelled == 0
    time.advance(2 * KEEPALIVE_S)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await eventually(lambda: served.handlers.cancelled == 1)
    writer.close()


async def test_connections_without_calls_are_ended_and_made_again(served: Served) -> None:
    connection = await connected(served)
    time = LoopTime()
    time.advance(0.9 * IDLE_S)
    await turns()
    assert not connection.is_closing
    time.advance(0.1 * IDLE_S + KEEPALIVE_S)
    while served.server.connections:
        await SystemClock().sleep(0)
    assert await served.unary("Double")(b"x") == b"xx"


async def test_a_client_that_takes_nothing_is_cut_off(served: Served) -> None:
    """Its windows are open, and its socket is full."""
    client = socket.create_connection(("127.0.0.1", served.port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    window = {fr.INITIAL_WINDOW_SIZE: fr.WINDOW_MAX}
    hello = fr.PREFACE + fr.settings(window) + fr.window_update(0, fr.WINDOW_MAX - 65_535)
    head = (
        b"\x83\x86\x44\x13" + b"/test.Service/Count" + b"\x41\x04here\x5f\x10" + b"application/grpc"
    )
    await loop.sock_sendall(
        client,
        hello
        + fr.frame(fr.HEADERS, fr.END_HEADERS, 1, head)
        + fr.frame(fr.DATA, fr.END_STREAM, 1, b"\x00\x00\x00\x00\x051000"[:9] + b"0"),
    )
    await eventually(lambda: any(one.is_busy for one in served.server.connections))
    time, passed = LoopTime(), 0.0
    while served.server.connections:
        await turns()
        time.advance(KEEPALIVE_S / 2)
        passed += KEEPALIVE_S / 2
        with contextlib.suppress(ConnectionError):
            client.send(fr.ping(bytes(8)))  # It is not silent.
    assert STALL_S <= passed <= STALL_S + 3 * KEEPALIVE_S
    client.close()
