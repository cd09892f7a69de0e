"""Requests of a call that its handler takes as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.errors import Broken, Invalid
from gazette.http2.connection import Http2Connection, Http2Stream
from gazette.http2.headers import RequestHead
from gazette.http2.messages import MessageQueue, prefixed
from gazette.http2.metadata import EOF
from gazette.net.grpc.grpc_call import GrpcCall
from gazette.net.grpc.grpc_server import GrpcServer
from gazette.net.grpc.held_memory import HeldMemory
from gazette.net.http_server import bind_tcp
from gazette.runtime.clock import SystemClock
from gazette.runtime.timeouts import timeout


class Handler:
    """A handler that keeps what each request was, and how it was handled."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.inline: list[bool] = []
        """True for each request that was handled without a task."""
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self.rolled_back = asyncio.Event()
        self.bound: Callable[[Awaitable[None]], Awaitable[None]] = self.unbound
        self.ended: list[BaseException | None] = []

    async def unbound(self, waiting: Awaitable[None]) -> None:
        await waiting

    async def briefly(self, waiting: Awaitable[None]) -> None:
        async with timeout(0.05):
            await waiting

    async def serve(self, _requests: Any, call: Any) -> None:
        async def later(request: bytes) -> None:
            self.waiting.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                await SystemClock().sleep(0)  # A rollback may take its time.
                self.rolled_back.set()
                raise
            self.seen.append(request)
            await call.write(request)

        def handle(request: bytes) -> Coroutine[Any, Any, None] | None:
            self.inline.append(asyncio.current_task() is None)
            if request == b"wait":
                return later(request)
            if request == b"invalid":
                raise Invalid("of the request")
            self.seen.append(request)
            return None if call.send_now(prefixed(request), 1) else call.write(request)

        try:
            await call.each(handle, self.bound)
        except BaseException as error:
            self.ended.append(error)
            if isinstance(error, Invalid):
                await call.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        self.ended.append(None)


def connect(port: int) -> Any:
    """Make a channel of the package grpcio."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}")


class Caller:
    """A client of one call."""

    def __init__(self, port: int) -> None:
        self.channel = connect(port)
        self.call = self.channel.stream_stream("/test.Service/Each")()

    async def send(self, *requests: bytes) -> None:
        for request in requests:
            await self.call.write(request)

    async def answers(self, count: int) -> list[Any]:
        return [await self.call.read() for _ in range(count)]


def new_call() -> GrpcCall:
    """Make a call whose stream belongs to no socket."""
    stream = Http2Stream(Http2Connection(lambda _: None, lambda: 0.0), 1)
    return GrpcCall(stream, RequestHead(b"", b"", b"", []), MessageQueue(100), HeldMemory())


@pytest.fixture
async def handler() -> Handler:
    return Handler()


@pytest.fixture
async def caller(handler: Handler) -> AsyncIterator[Caller]:
    server = GrpcServer(SystemClock(), max_recv_bytes=1 << 20, limit=10)
    method = grpc.stream_stream_rpc_method_handler(handler.serve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", {"Each": method}),)
    )
    listener = bind_tcp("127.0.0.1", 0)
    server.listen(listener, None)
    await server.start()
    caller = Caller(int(listener.getsockname()[1]))
    yield caller
    await caller.channel.close()
    await server.stop(5)


async def test_requests_are_handled_as_they_arrive(handler: Handler, caller: Caller) -> None:
    """No task takes part, and the end of the requests is the end of the call."""
    await caller.send(b"first")
    assert await caller.answers(1) == [b"first"]
    for n in range(20):
        await caller.send(b"%d" % n)
        assert await caller.answers(1) == [b"%d" % n]
    assert all(handler.inline[1:])
    await caller.call.done_writing()
    assert await caller.answers(1) == [EOF]
    assert await caller.call.code() is grpc.StatusCode.OK
    assert handler.ended == [None]


async def test_requests_behind_one_that_waits(handler: Handler, caller: Caller) -> None:
    """They stay in order."""
    await caller.send(b"first")
    assert await caller.answers(1) == [b"first"]
    await caller.send(b"wait", b"a", b"b")
    await handler.waiting.wait()
    await caller.send(b"c")
    assert handler.seen == [b"first"]
    handler.gate.set()
    await caller.send(b"d")
    assert await caller.answers(5) == [b"wait", b"a", b"b", b"c", b"d"]
    await caller.send(b"e")
    assert await caller.answers(1) == [b"e"]
    assert handler.inline[-1]


async def test_request_that_is_refused(handler: Handler, caller: Caller) -> None:
    """Its error is that of the call."""
    await caller.send(b"first")
    assert await caller.answers(1) == [b"first"]
    await caller.send(b"invalid")
    assert await caller.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await caller.call.details() == "of the request"


@pytest.mark.parametrize("waits", [False, True])
async def test_requests_behind_one_that_fails(waits: bool) -> None:
    """They are not handled."""
    seen: list[bytes] = []

    async def handle(request: bytes) -> None:
        seen.append(request)
        if waits:
            await SystemClock().sleep(0)
        raise Invalid("of the request")

    async def bound(waiting: Awaitable[None]) -> None:
        await waiting

    call = new_call()
    task = asyncio.get_running_loop().create_task(call.each(handle, bound))
    await SystemClock().sleep(0)
    call.on_data(prefixed(b"first") + prefixed(b"later"), ended=True)
    with pytest.raises(Invalid):
        await task
    assert seen == [b"first"]


async def test_request_that_is_cut_short() -> None:
    """The end of the call is an error, after what has arrived as a whole."""
    seen: list[bytes] = []

    async def handle(request: bytes) -> None:
        seen.append(request)

    async def bound(waiting: Awaitable[None]) -> None:
        await waiting

    call = new_call()
    task = asyncio.get_running_loop().create_task(call.each(handle, bound))
    await SystemClock().sleep(0)
    call.on_data(prefixed(b"first") + prefixed(b"later")[:-1], ended=True)
    with pytest.raises(Broken):
        await task
    assert seen == [b"first"]


async def test_caller_that_goes_away(handler: Handler, caller: Caller) -> None:
    """The request under way is cancelled, and gets the time to undo what it did."""
    await caller.send(b"first")
    assert await caller.answers(1) == [b"first"]
    await caller.send(b"wait")
    await handler.waiting.wait()
    caller.call.cancel()
    await handler.rolled_back.wait()
    assert handler.seen == [b"first"]


@pytest.mark.parametrize("begun", [False, True])
async def test_waits_are_bounded(handler: Handler, caller: Caller, begun: bool) -> None:
    """The bound ends a wait for requests. It does not end the handling of one."""
    handler.bound = handler.briefly
    await caller.send(*[b"wait"] * begun)
    if begun:
        await handler.waiting.wait()
        await SystemClock().sleep(0.1)
        handler.gate.set()
        assert await caller.answers(1) == [b"wait"]
    assert await caller.call.code() is grpc.StatusCode.UNKNOWN
    assert [type(error) for error in handler.ended] == [TimeoutError]


async def test_request_that_is_left_to_the_task_when_a_bound_ends() -> None:
    """It is not begun."""
    begun: list[bytes] = []

    async def handle(request: bytes) -> None:
        begun.append(request)

    async def bound(waiting: Awaitable[None]) -> None:
        await waiting
        raise TimeoutError

    call = new_call()
    task = asyncio.get_running_loop().create_task(call.each(handle, bound))
    await SystemClock().sleep(0)
    call.on_data(prefixed(b"request"), ended=False)
    with pytest.raises(TimeoutError):
        await task
    assert begun == []
