"""The simulated network, our client and our server answer as `grpc.aio` does: each test runs over all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.client.rpc.errors import END_OF_STREAM
from gazette.http2.grpc_client import Http2Channel
from gazette.net.grpc.grpc_server import GrpcServer
from gazette.net.http_server import bind_tcp
from gazette.runtime.clock import SystemClock
from gazette.testing.simulation.loop import SimNode, VirtualLoop
from gazette.testing.simulation.network import Network, SimChannel, SimServer

CODE = grpc.StatusCode


@dataclass
class Service:
    """Handlers of the four kinds of calls, and what became of them."""

    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    got: list[bytes] = field(default_factory=list)

    async def echo(self, request: bytes, context: Any) -> bytes:
        if request == b"abort":
            await context.abort(CODE.NOT_FOUND, "no such thing")
        return b"echo " + request

    async def count(self, request: bytes, context: Any) -> None:
        for number in range(int(request)):
            await context.write(b"%d" % number)

    async def join(self, requests: Any, context: Any) -> bytes:
        async for request in requests:
            self.got.append(request)
            if request == b"enough":
                break
        return b",".join(self.got)

    async def talk(self, requests: Any, context: Any) -> None:
        try:
            async for request in requests:
                await context.write(request.upper())
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.cancelled.set()  # Its end of the stream may be all that it sees.

    def handler(self) -> Any:
        return grpc.method_handlers_generic_handler(
            "test.Service",
            {
                "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
                "Count": grpc.unary_stream_rpc_method_handler(self.count),
                "Join": grpc.stream_unary_rpc_method_handler(self.join),
                "Talk": grpc.stream_stream_rpc_method_handler(self.talk),
            },
        )


Case = Callable[[Any, Service], Awaitable[None]]
LARGEST = 4 << 20
OPTIONS = [("grpc.min_reconnect_backoff_ms", 1_000), ("grpc.initial_reconnect_backoff_ms", 50)]


def over_sockets(
    case: Case, *, serve: bool, own_client: bool, own_server: bool, take: Any = None
) -> None:
    async def run() -> None:
        service = Service()
        listener = bind_tcp("127.0.0.1", 0)
        port = int(listener.getsockname()[1])
        server: Any = GrpcServer(SystemClock(), max_recv_bytes=LARGEST, limit=10)
        if not serve or not own_server:
            listener.close()
        if not own_server:
            server = grpc.aio.server(options=[("grpc.max_receive_message_length", LARGEST)])
            server.add_insecure_port(f"127.0.0.1:{port}")
        elif serve:
            server.listen(listener, None)
        server.add_generic_rpc_handlers((service.handler(),))
        if take is not None:
            server.take_whole_calls("/test.Service/Join", take)
        if serve:
            await server.start()
        else:
            await server.stop(0)
        connect: Any = grpc.aio.insecure_channel
        if own_client:
            connect = lambda target, options: Http2Channel(target, None, options)  # noqa: E731
        async with connect(f"127.0.0.1:{port}", options=OPTIONS) as channel:
            await case(channel, service)
        if serve:
            await server.stop(0)

    asyncio.run(run())


def over_simulation(case: Case, *, serve: bool, take: Any = None) -> None:
    import random

    errors: list[str] = []
    loop = VirtualLoop(errors.append)
    network = Network(loop, random.Random(1))
    network.on_error = errors.append
    at, client = SimNode(loop, "server"), SimNode(loop, "client")

    async def run() -> None:
        service = Service()
        server = SimServer(network, at, "server:80")
        server.add_generic_rpc_handlers((service.handler(),))
        if take is not None:
            server.take_whole_calls("/test.Service/Join", take)
        if serve:
            await server.start()
        channel = SimChannel(network, client, "server:80", dict(OPTIONS))
        await case(channel, service)
        await channel.close()

    task = client.spawn(run(), "case")
    loop.run(60.0)
    assert task.done(), "the case waits for ever"
    task.result()
    assert errors == []


def test_calls_that_arrive_as_a_whole() -> None:
    """The simulation offers them as our server does, and serves those that are handed back."""

    async def case(channel: Any, service: Any) -> None:
        for content, answer in ((b"now", b"whole now"), (b"later", b"later"), (b"never", None)):
            call = channel.stream_unary("/test.Service/Join")()
            await call.write(content)
            await call.done_writing()
            if answer is None:
                assert await code_of(call) is CODE.RESOURCE_EXHAUSTED
            else:
                assert await call == answer

    def take(calls: Any) -> Any:
        rest = []
        for call in calls:
            match call.messages():
                case [b"now"]:
                    call.answer(b"whole now")
                case [b"never"]:
                    call.refuse(CODE.RESOURCE_EXHAUSTED, "no")
                case _:
                    rest.append(call)
        return rest

    over_sockets(case, serve=True, own_client=True, own_server=True, take=take)
    over_simulation(case, serve=True, take=take)


OVER: dict[str, Callable[..., None]] = {
    "grpc": partial(over_sockets, own_client=False, own_server=False),
    "own client": partial(over_sockets, own_client=True, own_server=False),
    "own server": partial(over_sockets, own_client=False, own_server=True),
    "own client and server": partial(over_sockets, own_client=True, own_server=True),
    "simulation": over_simulation,
}


@pytest.fixture(params=list(OVER))
def run(request: pytest.FixtureRequest) -> Any:
    over = OVER[request.param]

    def run(case: Case, *, serve: bool = True) -> None:
        over(case, serve=serve)

    return run


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def test_unary_calls(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        echo = channel.unary_unary("/test.Service/Echo")
        assert await echo(b"this") == b"echo this"
        call = echo(b"abort")
        assert await code_of(call) is CODE.NOT_FOUND
        assert await call.details() == "no such thing"
        assert call.done()

    run(case)


def test_unknown_methods(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        assert await code_of(channel.unary_unary("/test.Service/No")(b"")) is CODE.UNIMPLEMENTED

    run(case)


def test_no_server_listens(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        echo = channel.unary_unary("/test.Service/Echo")
        assert await code_of(echo(b"")) is CODE.UNAVAILABLE
        assert await code_of(echo(b"")) is CODE.UNAVAILABLE

    run(case, serve=False)


def test_responses_are_read_to_the_end(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.unary_stream("/test.Service/Count")(b"3")
        got = [await call.read() for _ in range(4)]
        assert got == [b"0", b"1", b"2", END_OF_STREAM]
        assert await call.code() is CODE.OK
        assert [one async for one in channel.unary_stream("/test.Service/Count")(b"2")] == [
            b"0",
            b"1",
        ]

    run(case)


def test_requests_are_written(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.stream_unary("/test.Service/Join")()
        await call.write(b"a")
        await call.write(b"b")
        await call.done_writing()
        assert await call == b"a,b"
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"c")

    run(case)


def test_server_that_answers_before_all_was_written(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.stream_unary("/test.Service/Join")()
        await call.write(b"enough")
        assert await call == b"enough"
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"more")

    run(case)


def test_full_duplex(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.stream_stream("/test.Service/Talk")()
        for text in (b"a", b"b"):
            await call.write(text)
            assert await call.read() == text.upper()
        await call.done_writing()
        assert await call.read() is END_OF_STREAM
        assert await call.code() is CODE.OK

    run(case)


def test_caller_that_cancels(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.stream_stream("/test.Service/Talk")()
        await call.write(b"a")
        assert await call.read() == b"A"
        ended: list[Any] = []
        call.add_done_callback(ended.append)
        assert call.cancel()
        assert call.done()
        assert call.cancelled()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await service.cancelled.wait()
        assert ended == [call]

    run(case)


def test_message_that_is_too_large(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.unary_unary("/test.Service/Echo")(bytes((4 << 20) + 1))
        assert await code_of(call) is CODE.RESOURCE_EXHAUSTED

    run(case)


def test_closed_channels(run: Any) -> None:
    async def case(channel: Any, service: Any) -> None:
        call = channel.stream_stream("/test.Service/Talk")()
        await call.write(b"a")
        await channel.close(None)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call.read()
        with pytest.raises(grpc.aio.UsageError):
            await channel.unary_unary("/test.Service/Echo")(b"")

    run(case)
