"""Calls that a server ends while a client writes to them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from gazette.client.rpc.errors import END_OF_STREAM
from gazette.client.rpc.stream_call import StreamCall
from gazette.http2.grpc_client import Http2Channel
from gazette.runtime.tasks import TaskScope
from tests.support.instant_clock import breathe

ROUNDS: Final = 60
PIECE: Final = bytes(1 << 20)
TRAILERS: Final = (("reason", "no token"),)


async def refuse(requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    async for _ in requests:
        break
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token", TRAILERS)


async def answer(_: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return b"enough"


async def refuse_stream(_: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token", TRAILERS)


async def end_stream(_: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """End in good order, whatever still comes."""


@pytest.fixture
async def channel() -> AsyncIterator[Http2Channel]:
    server = grpc.aio.server()
    handlers = {
        "Refuse": grpc.stream_unary_rpc_method_handler(refuse),
        "Answer": grpc.stream_unary_rpc_method_handler(answer),
        "RefuseStream": grpc.stream_stream_rpc_method_handler(refuse_stream),
        "EndStream": grpc.stream_stream_rpc_method_handler(end_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.S", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Http2Channel(f"127.0.0.1:{port}", None) as made:
        yield made
    await server.stop(0)


async def write_until_it_ends(call: StreamCall) -> None:
    while await call.write(PIECE):
        pass
    await call.done_writing()


def refused(error: grpc.aio.AioRpcError) -> tuple[Any, ...]:
    trailing: Any = error.trailing_metadata() or ()
    return error.code(), error.details(), dict(trailing)


REFUSED: Final = (grpc.StatusCode.UNAUTHENTICATED, "no token", dict(TRAILERS))


async def test_the_reason_is_that_of_the_server(channel: Any) -> None:
    method: Callable[..., Any] = channel.stream_unary("/t.S/Refuse")
    for _ in range(ROUNDS):
        call = StreamCall(method())
        await write_until_it_ends(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert refused(caught.value) == REFUSED
        await call.wait_ended()
        assert call.done()


async def test_an_answer_that_comes_early_is_returned(channel: Any) -> None:
    method: Callable[..., Any] = channel.stream_unary("/t.S/Answer")
    for _ in range(ROUNDS):
        call = StreamCall(method())
        await write_until_it_ends(call)
        assert await call == b"enough"


@pytest.mark.parametrize("method_name", ["RefuseStream", "EndStream"])
async def test_streams_end_as_the_server_ended_them(channel: Any, method_name: str) -> None:
    method: Callable[..., Any] = channel.stream_stream(f"/t.S/{method_name}")
    for _ in range(ROUNDS):
        made = method()
        call = StreamCall(made)
        await write_until_it_ends(call)
        if method_name == "EndStream":
            assert await made.read() is END_OF_STREAM
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await made.read()
            assert refused(caught.value) == REFUSED


async def test_a_closed_channel_cancels_no_task(channel: Any) -> None:
    """The caller was not cancelled: it learns that the call has ended."""
    call = StreamCall(channel.stream_unary("/t.S/Refuse")())
    await channel.close()
    assert not await call.write(PIECE)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_write_ends_with_a_channel_that_is_closed_before_the_call_was_sent() -> None:
    """As when a broker's lease ends while it is called."""
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as silent:  # It takes connections, and says nothing.
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        made = Http2Channel(target, None)
        call = StreamCall(made.stream_unary("/t.S/Answer")())
        async with TaskScope("test") as scope, asyncio.timeout(30):
            writing = scope.spawn(call.write(b"first"), name="write")
            await breathe()
            assert not writing.done()
            await made.close()
            assert await writing is False
            assert await call.write(b"second") is False
            await call.done_writing()
            with pytest.raises(asyncio.CancelledError):
                await call
    assert call.done()
