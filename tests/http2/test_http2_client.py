"""Our gRPC client over HTTP/2, against servers of the package grpcio, our own, and none at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.client.rpc.channel import TlsSettings
from gazette.client.rpc.errors import END_OF_STREAM
from gazette.errors import Invalid
from gazette.http2 import frames as fr
from gazette.http2.connection import FIRST_BYTES, SHARED_BYTES
from gazette.http2.grpc_client import Http2Channel, Http2Transport
from gazette.http2.headers import encode_fields
from gazette.http2.metadata import timeout_field, timeout_of
from gazette.http2.resolve import HostResolver
from gazette.net.grpc.grpc_server import GrpcServer
from gazette.net.http_server import bind_tcp
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from gazette.runtime.tls import tls_context
from tests.conftest import make_certificate
from tests.net.test_http2_server import LARGEST, METHOD, Handlers, frame_of
from tests.raw_server import raw_server
from tests.support.instant_clock import eventually
from tests.support.loop_time import LoopTime, turns

CODE = grpc.StatusCode
State = grpc.ChannelConnectivity
LARGE = 24 << 20
HEAD = b"\x88" + encode_fields([(b"content-type", b"application/grpc")])
OK = encode_fields([(b"grpc-status", b"0")])
PONG = fr.ping(bytes(8), ack=True)


class Served:
    """Handlers at an address, served by grpcio or by our own server."""

    def __init__(self, own: bool, options: tuple[tuple[str, Any], ...] = ()) -> None:
        self.handlers = Handlers()
        self.own = own
        self.options = options
        self.port = 0
        self.server: Any = None

    async def start(self) -> None:
        listener = bind_tcp("127.0.0.1", self.port)
        self.port = int(listener.getsockname()[1])
        if self.own:
            self.server = GrpcServer(SystemClock(), max_recv_bytes=1 << 30, limit=10)
            self.server.listen(listener, None)
        else:
            listener.close()
            limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            self.server = grpc.aio.server(options=[*limits, *self.options])
            self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.add_generic_rpc_handlers((self.handlers.table(),))
        await self.server.start()

    def channel(self, **options: Any) -> Any:
        chosen = {
            "grpc.max_receive_message_length": -1,
            "grpc.initial_reconnect_backoff_ms": 20,
            "grpc.max_reconnect_backoff_ms": 20,
        }
        return Http2Channel(f"127.0.0.1:{self.port}", None, [*{**chosen, **options}.items()])


@pytest.fixture(params=["grpcio", "own"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    served = Served(own=request.param == "own")
    await served.start()
    yield served
    served.handlers.gate.set()
    await served.server.stop(0)


@contextlib.asynccontextmanager
async def answering(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Any]:
    """Serve raw connections. Yield a channel to them."""
    options = [
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.keepalive_time_ms", 3_600_000),
    ]
    async with (
        raw_server(answer) as server,
        Http2Channel(server.target, None, options) as channel,
    ):
        yield channel


def frames(
    *each: bytes, then: Callable[[], None] = lambda: None
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Return a server that answers the first call with these frames, then reads on.

    ``then`` is called once the client has answered a ping behind them, or has disconnected: all were handled.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(fr.settings({}))
        received = b""
        while b"/test.Service/" not in received:
            received += await reader.read(1 << 16)
        writer.write(b"".join(each))
        rest = b""
        while PONG not in rest and (more := await reader.read(1 << 16)):
            rest += more
        then()
        while await reader.read(1 << 16):
            pass

    return answer


def double(channel: Any) -> Any:
    return channel.unary_unary(f"{METHOD}Double")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


@pytest.mark.parametrize(
    ("code", "text", "details"),
    [
        (fr.FaultCode.PROTOCOL_ERROR, "", "up: PROTOCOL_ERROR"),
        (fr.FaultCode.ENHANCE_YOUR_CALM, "too much", "up: ENHANCE_YOUR_CALM too much"),
    ],
)
async def test_the_reason_of_a_server_for_an_end_is_the_reason_of_its_calls(
    code: fr.FaultCode, text: str, details: str
) -> None:
    async with answering(frames(fr.goaway(1, code, text))) as channel:
        error = await failure(double(channel)(b""))
        assert error.code() is CODE.UNAVAILABLE
        assert (error.details() or "").endswith(details)


async def test_a_server_that_refuses_pings_gets_fewer() -> None:
    refused = fr.goaway(1, fr.FaultCode.ENHANCE_YOUR_CALM, "too_many_pings")
    async with answering(frames(refused)) as channel:
        before = channel.keepalive_s
        assert "too_many_pings" in str(await failure(double(channel)(b"x")))
        assert channel.keepalive_s == 2 * before
    async with answering(frames(fr.goaway(1, fr.FaultCode.ENHANCE_YOUR_CALM, "calm"))) as channel:
        before = channel.keepalive_s
        await failure(double(channel)(b"x"))
        assert channel.keepalive_s == before


async def test_metadata_goes_both_ways(served: Served) -> None:
    async with served.channel() as channel:
        call = double(channel)(b"ab", metadata=(("a", "text"), ("b-bin", b"\x00\xff")))
        assert await call.initial_metadata() == (("first", "1"),)
        assert await call == b"abab"
        sent = dict(await call.trailing_metadata())
        assert (sent["a"], sent["b-bin"]) == ("text", b"\x00\xff")
        error = await failure(double(channel)(b"abort"))
        assert error.code() is CODE.NOT_FOUND
        assert error.details() == "ünïcode %"
        trailing: Any = error.trailing_metadata()
        assert dict(trailing) == {"k": "v", "k-bin": b"\xff"}
        with pytest.raises(ValueError, match="bad"):
            double(channel)(b"", metadata=(("bad", "line\n"),))
        assert await double(channel)(b"x") == b"xx"


async def test_large_messages_pass_the_windows_in_both_directions(served: Served) -> None:
    """Other calls of the connection go on meanwhile."""
    async with served.channel() as channel:
        large = bytes(LARGE)
        async with TaskScope("large") as scope:
            task = scope.spawn(_awaited(double(channel)(large)), name="one")
            for _ in range(20):
                assert await double(channel)(b"x") == b"xx"
        assert len(task.result()) == 2 * LARGE
        call = channel.stream_unary(f"{METHOD}Length")()
        for _ in range(50):
            await call.write(bytes(1 << 20))
        await call.done_writing()
        assert await call == str(50 << 20).encode()


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_server_that_reads_nothing_holds_the_writer_up(served: Served) -> None:
    """A writer that is cancelled meanwhile ends its call, and the server's handler."""
    async with served.channel() as channel:
        call = channel.stream_stream(f"{METHOD}Echo")()
        written = 0

        async def write() -> None:
            nonlocal written
            while True:
                await call.write(bytes(1 << 18))
                written += 1

        async with TaskScope("writer") as scope:
            task = scope.spawn(write(), name="write")
            for _ in range(200):
                await SystemClock().sleep(0.005)
                before = written
            while written != before:
                before = written
                await SystemClock().sleep(0.05)
            task.cancel()
        assert call.cancelled()
        assert written < 200, "the writer was held up at none of the windows"
        assert await double(channel)(b"x") == b"xx"


async def test_a_message_that_is_too_large_is_refused(served: Served) -> None:
    async with served.channel(**{"grpc.max_receive_message_length": 1000}) as channel:
        error = await failure(double(channel)(bytes(600)))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert await double(channel)(b"x") == b"xx"


async def test_what_is_not_read_takes_no_room_from_other_calls(served: Served) -> None:
    """Neither of calls that are cancelled, nor of requests that a handler leaves."""

    async def leave(channel: Any) -> None:
        call = channel.stream_unary(f"{METHOD}Ignore")()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(4):
                await call.write(bytes(1 << 18))
        assert await call == b"enough"

    async with served.channel() as channel:
        for _ in range(2 * SHARED_BYTES // FIRST_BYTES):
            call = channel.unary_stream(f"{METHOD}Count")(b"1000")
            assert len(await call.read()) == 100_000
            call.cancel()
        assert len(await double(channel)(bytes(LARGE))) == 2 * LARGE
        for _ in range(4):
            async with TaskScope("leave") as scope:
                for number in range(SHARED_BYTES // FIRST_BYTES // 2):
                    scope.spawn(leave(channel), name=str(number))
        assert len(await double(channel)(bytes(LARGE))) == 2 * LARGE


async def test_answers_that_nobody_reads_hold_up_no_other_call(served: Served) -> None:
    async with served.channel() as channel:
        count = channel.unary_stream(f"{METHOD}Count")
        calls = [count(b"6") for _ in range(SHARED_BYTES // FIRST_BYTES + 10)]
        for call in calls:
            assert len(await call.read()) == 100_000
        for _ in range(20):
            assert await double(channel)(b"x", timeout=10.0) == b"xx"
        for _ in range(5):  # Also those that are read in turn.
            for call in calls:
                async with timeout(10.0):
                    assert len(await call.read()) == 100_000


async def test_metadata_that_is_too_large_ends_its_own_call_only(served: Served) -> None:
    async with served.channel() as channel:
        other = channel.stream_stream(f"{METHOD}Echo")()
        await other.write(b"x")
        assert await other.read() == b"x"
        error = await failure(double(channel)(b"x", metadata=(("key", "x" * 100_000),)))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert "bytes of metadata" in (error.details() or "")
        await other.write(b"y")
        assert await other.read() == b"y"


async def test_deadlines_end_calls_at_both_ends(served: Served) -> None:
    async with served.channel() as channel:
        error = await failure(channel.unary_unary(f"{METHOD}Hang")(b"", timeout=0.2))
        assert error.code() is CODE.DEADLINE_EXCEEDED
        await eventually(lambda: served.handlers.cancelled == 1)


@pytest.mark.parametrize("timeout_s", [0.05, 3600.0])
async def test_a_call_that_its_server_cancels_may_be_late(timeout_s: float) -> None:
    """A server that sees the deadline first resets the stream. The client's timer has not run yet."""
    loop = asyncio.get_running_loop()

    async def cancelling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(fr.settings({}))
        while data := await reader.read(1 << 16):
            if b"/test.Service/" in data:
                while loop.time() < end:  # Keep the loop, and so the client's timer.
                    pass
                writer.write(fr.rst_stream(1, fr.FaultCode.CANCEL))

    async with answering(cancelling) as channel:
        end = loop.time() + 0.1
        error = await failure(double(channel)(b"x", timeout=timeout_s))
        late = timeout_s < 1
        assert error.code() is (CODE.DEADLINE_EXCEEDED if late else CODE.CANCELLED)


async def test_calls_end_with_their_connection_and_the_next_one_connects(served: Served) -> None:
    async with served.channel() as channel:
        hanging = channel.unary_unary(f"{METHOD}Hang")(b"")
        await served.handlers.running.wait()
        await served.server.stop(0)
        assert (await failure(hanging)).code() in (CODE.UNAVAILABLE, CODE.CANCELLED)
        while (await failure(double(channel)(b"x"))).code() is not (CODE.UNAVAILABLE):
            pass
        await eventually(lambda: channel.get_state() is State.TRANSIENT_FAILURE)
        await served.start()
        call = double(channel)(b"x", wait_for_ready=True)
        assert await call == b"xx"
        assert channel.get_state() is State.READY


async def test_a_server_that_drains_ends_old_calls_and_gets_no_new_ones(served: Served) -> None:
    async with served.channel() as channel, TaskScope("stop") as scope:
        hanging = channel.unary_unary(f"{METHOD}Hang")(b"")
        await served.handlers.running.wait()
        scope.spawn(served.server.stop(30), name="stop")
        await eventually(lambda: channel.get_state() is not State.READY)
        served.handlers.gate.set()
        assert await hanging == b"done"


async def test_more_calls_than_a_connection_takes_use_others_and_then_wait() -> None:
    """Calls that end meanwhile never reach the server. Connections that are not needed are closed."""
    begun = connections = 0

    async def one_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun, connections
        connections, stream = connections + 1, 1
        most.append(connections)
        writer.write(fr.settings({fr.MAX_CONCURRENT_STREAMS: 1}))
        while data := await reader.read(1 << 16):
            if b"/test.Service/" not in data:
                continue
            assert data.count(b"/test.Service/") == 1
            begun += 1
            await late.wait()
            answer = (
                fr.frame(fr.HEADERS, 4, stream, HEAD),
                fr.frame(fr.DATA, 0, stream, b"\0\0\0\0\1x"),
                fr.frame(fr.HEADERS, 5, stream, OK),
            )
            stream += 2
            writer.write(b"".join(answer))
        connections -= 1

    late = asyncio.Event()
    most: list[int] = []
    async with answering(one_at_a_time) as channel:
        calls = [double(channel)(b"") for _ in range(40)]
        await eventually(lambda: begun == 16)
        error = await failure(double(channel)(b"x", timeout=0.1))
        assert error.code() is CODE.DEADLINE_EXCEEDED
        late.set()
        assert [await call for call in calls] == [b"x"] * 40
        await eventually(lambda: connections == 1)
    assert begun == 40
    assert max(most) == 16


async def test_a_lost_connection_makes_room_for_a_call_that_waits() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def one_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(fr.settings({fr.MAX_CONCURRENT_STREAMS: 1}))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writers.extend([writer] * data.count(b"/test.Service/"))

    async with answering(one_at_a_time) as channel:
        calls = [double(channel)(b"") for _ in range(17)]
        await eventually(lambda: len(writers) == 16)
        writers[0].close()
        assert (await failure(calls[0])).code() is CODE.UNAVAILABLE
        await eventually(lambda: len(writers) == 17)


async def test_a_connection_that_is_not_needed_stays_if_a_call_begins_at_that_moment() -> None:
    begun = 0

    async def one_at_a_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        writer.write(fr.settings({fr.MAX_CONCURRENT_STREAMS: 1}))
        while data := await reader.read(1 << 16):
            begun += data.count(b"/test.Service/Hang")
            if b"/test.Service/Double" in data:  # The second call of the first connection.
                answer = (
                    fr.frame(fr.HEADERS, 4, 3, HEAD),
                    fr.frame(fr.DATA, 0, 3, b"\0\0\0\0\1x"),
                    fr.frame(fr.HEADERS, 5, 3, OK),
                )
                writer.write(b"".join(answer))

    async with answering(one_at_a_time) as channel:
        hang = channel.unary_unary(f"{METHOD}Hang")
        first, _second = hang(b""), hang(b"")
        await eventually(lambda: begun == 2)
        first.cancel()
        assert await double(channel)(b"") == b"x"


async def test_calls_use_a_connection_that_is_left_when_another_one_is_lost() -> None:
    """Also if no further one can be made."""
    first, begun = asyncio.Event(), 0

    async def one_call_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal begun
        writer.write(fr.settings({fr.MAX_CONCURRENT_STREAMS: 1}))
        stream = 1
        while data := await reader.read(1 << 16):
            if b"/test.Service/" not in data:
                continue
            begun += 1
            if begun == 2:
                server.refuse()
                break
            await first.wait()
            answer = (
                fr.frame(fr.HEADERS, 4, stream, HEAD),
                fr.frame(fr.DATA, 0, stream, b"\0\0\0\0\1x"),
                fr.frame(fr.HEADERS, 5, stream, OK),
            )
            stream += 2
            writer.write(b"".join(answer))

    async with (
        raw_server(one_call_each) as server,
        Http2Channel(server.target, None) as channel,
    ):
        held = double(channel)(b"")
        await eventually(lambda: begun == 1)
        assert (await failure(double(channel)(b""))).code() is CODE.UNAVAILABLE
        waiting = double(channel)(b"", timeout=0.2)
        assert (await failure(waiting)).code() is CODE.DEADLINE_EXCEEDED
        later = double(channel)(b"")
        first.set()
        assert [await held, await later] == [b"x", b"x"]


async def test_a_call_that_a_server_refused_unseen_is_made_once_more() -> None:
    answer = (
        fr.rst_stream(1, fr.FaultCode.REFUSED_STREAM),
        fr.frame(fr.HEADERS, 4, 3, HEAD),
        fr.frame(fr.DATA, 0, 3, b"\0\0\0\0\1x"),
        fr.frame(fr.HEADERS, 5, 3, OK),
    )
    async with answering(frames(*answer)) as channel:
        assert await double(channel)(b"x") == b"x"


async def test_compressed_responses_are_read() -> None:
    served = Served(own=False)
    served.server = None
    listener = bind_tcp("127.0.0.1", 0)
    served.port = int(listener.getsockname()[1])
    listener.close()
    server = grpc.aio.server(compression=grpc.Compression.Gzip)
    server.add_insecure_port(f"127.0.0.1:{served.port}")
    server.add_generic_rpc_handlers((served.handlers.table(),))
    await server.start()
    async with served.channel() as channel:
        assert await double(channel)(b"x" * 5000) == b"x" * 10_000
    await server.stop(0)


async def test_a_server_that_says_nothing_is_given_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with answering(silent) as channel:
        error = await failure(double(channel)(b"x"))
        assert error.code() is CODE.UNAVAILABLE
        assert "timed out" in str(error.details())


@pytest.mark.parametrize("target", ["127.0.0.1:99999", "127.0.0.1:no", "no.such.host.invalid:1"])
async def test_a_target_that_cannot_be_reached_fails_its_calls(target: str) -> None:
    async with Http2Channel(target, None) as channel:
        error = await failure(double(channel)(b"x", timeout=20))
        assert error.code() is CODE.UNAVAILABLE
        assert target in str(error.details())


class DefectiveChannel(Http2Channel):
    """A channel on a loop that does not know an argument, as some loops do not."""

    async def _open_socket(self, make: Any) -> None:
        await asyncio.get_running_loop().create_connection(make, "127.0.0.1", 1, unknown=True)  # type: ignore[call-overload]


async def test_a_defect_of_connecting_fails_its_calls() -> None:
    """Regression: calls waited for ever for a connection, if its attempt failed in an unforeseen way."""
    async with DefectiveChannel("127.0.0.1:1", None) as channel:
        for _ in range(2):
            error = await failure(double(channel)(b"x", timeout=20))
            assert error.code() is CODE.UNAVAILABLE
            assert "unexpected keyword argument" in str(error.details())


async def test_a_server_of_another_protocol_is_named() -> None:
    async def http1(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

    async with answering(http1) as channel:
        error = await failure(double(channel)(b"x"))
        assert error.code() is CODE.UNAVAILABLE
        assert "does not speak HTTP/2, or speaks it only over TLS" in str(error.details())

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)

    async with answering(silent) as channel:
        error = await failure(double(channel)(b"x"))
        assert error.code() is CODE.UNAVAILABLE
        assert "closed the connection before it spoke HTTP/2" in str(error.details())


ANSWERS = {
    "no gRPC": (
        [fr.frame(fr.HEADERS, 5, 1, b"\x88" + encode_fields([(b"content-type", b"text/html")]))],
        CODE.UNKNOWN,
    ),
    "503": ([fr.frame(fr.HEADERS, 5, 1, encode_fields([(b":status", b"503")]))], CODE.UNAVAILABLE),
    "no status": (
        [fr.frame(fr.HEADERS, 4, 1, HEAD), fr.frame(fr.DATA, 1, 1, b"\0\0\0\0\1x")],
        CODE.INTERNAL,
    ),
    "no response": (
        [fr.frame(fr.HEADERS, 4, 1, HEAD), fr.frame(fr.HEADERS, 5, 1, OK)],
        CODE.INTERNAL,
    ),
    "two responses": (
        [
            fr.frame(fr.HEADERS, 4, 1, HEAD),
            fr.frame(fr.DATA, 0, 1, b"\0\0\0\0\1x\0\0\0\0\1x"),
            fr.frame(fr.HEADERS, 5, 1, OK),
        ],
        CODE.INTERNAL,
    ),
    "a cut response": (
        [
            fr.frame(fr.HEADERS, 4, 1, HEAD),
            fr.frame(fr.DATA, 0, 1, b"\0\0\0\0\2x"),
            fr.frame(fr.HEADERS, 5, 1, OK),
        ],
        CODE.INTERNAL,
    ),
    "content first": ([fr.frame(fr.DATA, 0, 1, b"\0\0\0\0\1x")], CODE.INTERNAL),
    "two heads": ([fr.frame(fr.HEADERS, 4, 1, HEAD)] * 2, CODE.INTERNAL),
    "refused twice": (
        [fr.rst_stream(one, fr.FaultCode.REFUSED_STREAM) for one in (1, 3)],
        CODE.UNAVAILABLE,
    ),
    "calm": ([fr.rst_stream(1, fr.FaultCode.ENHANCE_YOUR_CALM)], CODE.RESOURCE_EXHAUSTED),
    "reset": ([fr.rst_stream(1, fr.FaultCode.PROTOCOL_ERROR)], CODE.INTERNAL),
    "given up": ([fr.goaway(0, fr.FaultCode.INTERNAL_ERROR, "a defect")], CODE.UNAVAILABLE),
    "drained before": ([fr.goaway(0, fr.FaultCode.NO_ERROR)], CODE.UNAVAILABLE),
    "a name that is not ASCII": (
        [fr.frame(fr.HEADERS, 5, 1, HEAD + encode_fields([("näme".encode(), b"x")]) + OK)],
        CODE.INTERNAL,
    ),
    "a value with two lines": (
        [fr.frame(fr.HEADERS, 5, 1, HEAD + encode_fields([(b"name", b"x\r\ny: z")]) + OK)],
        CODE.INTERNAL,
    ),
    "a status of many digits": (
        [fr.frame(fr.HEADERS, 5, 1, HEAD + encode_fields([(b"grpc-status", b"9" * 5_000)]))],
        CODE.UNKNOWN,
    ),
    "a push": ([fr.frame(fr.PUSH_PROMISE, 4, 1, bytes(4))], CODE.UNAVAILABLE),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_answers_that_break_a_rule_end_the_call_by_a_status(kind: str) -> None:
    answer, code = ANSWERS[kind]
    async with answering(frames(*answer)) as channel:
        error = await failure(double(channel)(b"x"))
        assert error.code() is code, error
        assert error.details()


@pytest.mark.parametrize("kind", ["unary", "read", "listen"])
async def test_a_response_that_cannot_be_decoded_ends_the_call(kind: str) -> None:
    """By a status, as a call ends that the server failed; the connection serves the next."""
    answer = (fr.frame(fr.HEADERS, 4, 1, HEAD), fr.frame(fr.DATA, 0, 1, b"\0\0\0\0\1x"), END)
    async with answering(frames(*answer)) as channel:
        make = channel.unary_unary if kind == "unary" else channel.unary_stream
        call = make(f"{METHOD}Double", None, int)(b"x")
        if kind == "listen":
            call.listen(lambda _: None)
            await eventually(call.done)
        error = await failure(call if kind == "unary" else call.read())
        assert error.code() is CODE.INTERNAL
        assert "ValueError" in str(error.details())
        assert await call.code() is CODE.INTERNAL


async def test_information_before_an_answer_is_passed_over() -> None:
    hint = fr.frame(fr.HEADERS, 4, 1, encode_fields([(b":status", b"103")]))
    rest = [
        fr.frame(fr.HEADERS, 4, 1, HEAD),
        fr.frame(fr.DATA, 0, 1, b"\0\0\0\0\1x"),
        fr.frame(fr.HEADERS, 5, 1, OK),
    ]
    async with answering(frames(hint, *rest)) as channel:
        assert await double(channel)(b"x") == b"x"


async def test_a_call_that_ended_well_can_be_read_to_its_end(served: Served) -> None:
    async with served.channel() as channel:
        call = channel.unary_stream(f"{METHOD}Count")(b"3")
        await SystemClock().sleep(0.2)  # All has arrived, most likely.
        got = [len(await call.read()) for _ in range(3)]
        assert got == [100_000] * 3
        assert await call.read() is END_OF_STREAM
        assert await call.read() is END_OF_STREAM
        assert await call.code() is CODE.OK


END = fr.frame(fr.HEADERS, 5, 1, OK)


@pytest.mark.parametrize(
    "behind",
    [fr.rst_stream(1, fr.FaultCode.NO_ERROR), fr.goaway(1, fr.FaultCode.INTERNAL_ERROR, "over")],
    ids=["reset", "lost"],
)
async def test_nothing_behind_the_status_changes_it(behind: bytes) -> None:
    """Regression: a server that ends a call early resets its stream behind the trailers."""
    answer = (fr.frame(fr.HEADERS, 4, 1, HEAD), fr.frame(fr.DATA, 0, 1, b"\0\0\0\0\1x" * 2))
    handled = asyncio.Event()
    served = frames(*answer, END, behind, fr.ping(bytes(8)), then=handled.set)
    async with answering(served) as channel:
        call = channel.stream_stream(f"{METHOD}Echo")()
        await call.write(b"x")
        got = [await call.read()]
        await handled.wait()
        got += [await call.read(), await call.read()]
        assert got == [b"x", b"x", END_OF_STREAM]
        assert await call.code() is CODE.OK


async def test_closing_gives_calls_their_grace(served: Served) -> None:
    channel = served.channel()
    async with TaskScope("close") as scope:
        hanging = channel.unary_unary(f"{METHOD}Hang")(b"")
        await served.handlers.running.wait()
        scope.spawn(channel.close(30), name="close")
        await eventually(lambda: channel.get_state() is State.SHUTDOWN)
        with pytest.raises(grpc.aio.UsageError):
            double(channel)(b"x")
        served.handlers.gate.set()
        assert await hanging == b"done"
    await channel.close()


async def test_a_server_that_is_there_is_not_given_up(served: Served) -> None:
    async with served.channel() as channel:
        hanging = channel.unary_unary(f"{METHOD}Hang")(b"")
        await served.handlers.running.wait()
        time = LoopTime()
        for seconds in (7200.0, 30.0, 7200.0):
            time.advance(seconds)
            await turns()
            assert await double(channel)(b"x") == b"xx"
        assert not hanging.done()
        served.handlers.gate.set()
        assert await hanging == b"done"


async def test_a_silent_server_is_asked_and_then_given_up() -> None:
    answered, asked_again = asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(fr.settings({}))
        await reader.readexactly(len(fr.PREFACE))
        asked = await frame_of(reader, fr.PING)
        # In front of a ping of its own, by whose answer it knows that it was heard.
        writer.write(fr.ping(asked, ack=True) + fr.ping(bytes(8)))
        assert await frame_of(reader, fr.PING) == bytes(8)
        answered.set()
        await frame_of(reader, fr.PING)
        asked_again.set()
        await reader.read()

    async with answering(answer) as channel:
        time = LoopTime()
        hanging = channel.unary_unary(f"{METHOD}Hang")(b"")
        while channel.get_state() is not State.READY:
            await turns()
        time.advance(channel.keepalive_s)
        await answered.wait()
        time.advance(20.0)
        await turns()
        assert not hanging.done()
        time.advance(channel.keepalive_s)
        await asked_again.wait()
        assert not hanging.done()
        time.advance(20.0)
        error = await failure(hanging)
        assert error.code() is CODE.UNAVAILABLE
        assert "keepalive" in str(error.details())


async def test_both_ends_send_small_frames_at_once() -> None:
    """A frame behind another one must not wait for the peer to acknowledge that one."""
    served = Served(own=True)
    await served.start()
    async with served.channel() as channel:
        assert await double(channel)(b"x") == b"xx"
        ends = [*channel._connections, *served.server.connections]
        sockets = [one._transport.get_extra_info("socket") for one in ends]
        options = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets]
        assert options == [1, 1]
    await served.server.stop(0)


async def test_numbers_of_streams_that_are_used_up_make_a_new_connection(served: Served) -> None:
    async with served.channel() as channel:
        assert await double(channel)(b"x") == b"xx"
        (first,) = channel._connections
        first._connection._next = fr.WINDOW_MAX - 2
        assert [await double(channel)(b"x") for _ in range(4)] == [b"xx"] * 4
        await eventually(lambda: first not in channel._connections)


async def test_tls_needs_a_server_of_that_name_that_speaks_http2(
    certificate: tuple[Path, Path],
) -> None:
    chain, key = certificate
    served = tls_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(chain, key)
    handlers = Handlers()

    def context() -> ssl.SSLContext:
        made = tls_context(ca_file=str(chain))
        made.set_alpn_protocols(["h2"])
        return made

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    grpcio = grpc.aio.server()
    grpcio.add_generic_rpc_handlers((handlers.table(),))
    pair = (key.read_bytes(), chain.read_bytes())
    port = grpcio.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await grpcio.start()
    transport = Http2Transport(context)
    credentials = grpc.ssl_channel_credentials()
    async with transport.channel(f"127.0.0.1:{port}", credentials, ()) as channel:
        assert await double(channel)(b"x") == b"xx"
    async with raw_server(answer, served) as server:
        for target, says in ((server.target, "HTTP/2"), (f"127.0.0.2:{port}", "127.0.0.2")):
            async with transport.channel(target, credentials, ()) as channel:
                error = await failure(double(channel)(b"x"))
                assert error.code() is CODE.UNAVAILABLE
                assert says in str(error.details())
    await grpcio.stop(0)


async def test_each_connection_reads_the_files_of_tls(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    chain, key = certificate
    trusted = tmp_path / "trusted.pem"
    handlers = Handlers()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers.table(),))
    pair = (key.read_bytes(), chain.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    transport = Http2Transport(TlsSettings(ca_file=trusted).context)
    with pytest.raises(Invalid, match=r"trusted\.pem"):
        transport.channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(), ())
    trusted.write_bytes(make_certificate(tmp_path)[0].read_bytes())
    backoff = [("grpc.initial_reconnect_backoff_ms", 20), ("grpc.max_reconnect_backoff_ms", 20)]
    channel: Any = transport.channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(), backoff)
    async with channel:
        error = await failure(double(channel)(b"x"))
        assert "the certificate of the server is not trusted" in str(error.details())
        trusted.unlink()
        while "trusted.pem" not in str((await failure(double(channel)(b"x"))).details()):
            await turns()
        trusted.write_bytes(chain.read_bytes())
        assert await double(channel)(b"x", wait_for_ready=True, timeout=30) == b"xx"
    await server.stop(0)


@pytest.mark.parametrize("silent", [1, 5])
async def test_addresses_that_do_not_answer_leave_time_for_the_next(
    served: Served, silent: int
) -> None:
    """The first attempt reaches the fourth address, and the one after it goes on from there."""
    hosts = [f"127.0.0.{2 + number}" for number in range(silent)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            full = stack.enter_context(socket.socket())
            full.bind((host, served.port))
            full.listen(0)
            for _ in range(3):  # Fill the queue of the socket: it answers no more.
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
        every = ["127.0.0.99", *hosts, "127.0.0.1"]
        found = [(0, 0, 0, "", (host, 0)) for host in every]
        async with served.channel(**{"grpc.min_reconnect_backoff_ms": 600}) as channel:
            channel._addresses = HostResolver("none", lambda *_, **options: found)
            call = double(channel)(b"x", wait_for_ready=silent > 1, timeout=60)
            assert await call == b"xx"


async def test_unix_sockets(tmp_path: Path) -> None:
    handlers = Handlers()
    path = str(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    server = GrpcServer(SystemClock(), max_recv_bytes=LARGEST, limit=10)
    server.listen(listener, None)
    server.add_generic_rpc_handlers((handlers.table(),))
    await server.start()
    async with Http2Channel(f"unix://{path}", None) as channel:
        assert await double(channel)(b"x") == b"xx"
    await server.stop(0)


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 1.5, 86_400.0, 1e6, 1e12])
def test_timeouts_are_numbers_of_eight_digits(seconds: float) -> None:
    name, value = timeout_field(seconds)
    assert len(value) <= 9
    read = timeout_of([(name, value)])
    assert read is not None
    assert min(seconds, 99_999_999) <= read <= seconds + 1
