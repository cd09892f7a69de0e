"""What services of applications find at our gRPC server: registrations and contexts as of `grpc.aio`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from gazette.http2.grpc_client import Http2Channel
from gazette.net.grpc.grpc_server import GrpcServer
from gazette.net.http_server import ReloadedTls, TlsFiles, bind_tcp, bind_unix
from gazette.runtime.clock import SystemClock
from tests.facts import call_refused
from tests.support.instant_clock import eventually
from tests.test_server import certificates, plain_channel

__all__ = ["certificates"]

SERVICE: Final = "test.Asked"


@dataclass
class Status(grpc.Status):
    code: grpc.StatusCode = grpc.StatusCode.ALREADY_EXISTS
    details: str = "as a status"
    trailing_metadata: Any = (("key", "value"),)


class Asked:
    """Handlers that ask their contexts. ``seen`` is what they learned."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.entered = asyncio.Event()
        self.contexts: list[Any] = []

    async def peer(self, request: bytes, context: Any) -> bytes:
        self.seen.append(context.time_remaining())
        self.seen.append((context.peer_identity_key(), context.peer_identities()))
        self.seen.append(dict(context.auth_context()))
        self.seen.append([(each.key, each.value) for each in context.invocation_metadata()])
        context.set_compression(grpc.Compression.Gzip)
        context.disable_next_message_compression()
        return str(context.peer()).encode()

    async def end(self, request: bytes, context: Any) -> bytes:
        context.add_done_callback(self.ended)
        context.set_trailing_metadata((("key", "value"),))
        assert context.trailing_metadata() == (("key", "value"),)
        assert not context.done()
        if request == b"abort":
            await context.abort_with_status(Status())
        return request

    async def fail(self, request: bytes, context: Any) -> bytes:
        match request:
            case b"number":
                context.set_code(5)
                context.set_details("by its number")
            case b"abort":
                await context.abort(5, "by its number")
            case b"unknown":
                await context.abort(99, "no status")
            case b"cancelled":
                raise asyncio.CancelledError
            case b"long":
                raise ValueError("x" * 100_000)
            case b"trailing":
                context.set_trailing_metadata((("key", 5),))
            case b"much":
                context.set_trailing_metadata((("key", "x" * 100_000),))
            case b"head":
                await context.send_initial_metadata((("Key", "value"),))
        return request

    async def hang(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        context.add_done_callback(self.ended)
        self.contexts.append(context)
        self.entered.set()
        async for one in requests:
            yield one

    def ended(self, context: Any) -> None:
        self.seen.append((context.done(), context.cancelled()))
        context.add_done_callback(lambda _: self.seen.append("at once"))

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "Peer": grpc.unary_unary_rpc_method_handler(self.peer),
            "End": grpc.unary_unary_rpc_method_handler(self.end),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Hang": grpc.stream_stream_rpc_method_handler(self.hang),
        }


@asynccontextmanager
async def served(listener: Any, tls: ReloadedTls | None = None) -> AsyncIterator[Asked]:
    asked = Asked()
    server = GrpcServer(SystemClock(), max_recv_bytes=1 << 20, limit=10)
    # As code does that protoc generates.
    server.add_registered_method_handlers(SERVICE, asked.handlers())
    server.listen(listener, tls)
    await server.start()
    try:
        yield asked
    finally:
        await server.stop(0.0)


async def call(channel: Any, method: str, request: bytes, **options: Any) -> bytes:
    answer: bytes = await channel.unary_unary(f"/{SERVICE}/{method}")(request, **options)
    return answer


async def test_contexts_know_their_callers(tmp_path: Path) -> None:
    listener = bind_tcp("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with served(listener) as asked, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert (await call(channel, "Peer", b"")).startswith(b"ipv4:127.0.0.1:")
        time_left, identity, properties, _ = asked.seen
        assert (time_left, identity, properties) == (None, (None, None), {})
        given = (("key", "value"), ("key-bin", b"\x00"))
        await call(channel, "Peer", b"", timeout=50.0, metadata=given)
        assert 0 < asked.seen[4] < 60.0
        assert set(given) <= set(asked.seen[7])
    path = tmp_path / "server.sock"
    async with served(bind_unix(str(path))), grpc.aio.insecure_channel(f"unix:{path}") as channel:
        assert await call(channel, "Peer", b"") == b"unix:"


async def test_contexts_know_the_certificates_of_their_callers(certificates: Path) -> None:
    def pem(name: str) -> bytes:
        return (certificates / name).read_bytes()

    files = [str(certificates / name) for name in ("server.pem", "server.key", "ca.pem")]
    listener = bind_tcp("127.0.0.1", 0)
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    credentials = grpc.ssl_channel_credentials(pem("ca.pem"), pem("client.key"), pem("client.pem"))
    async with (
        served(listener, ReloadedTls(TlsFiles(*files))) as asked,
        grpc.aio.secure_channel(target, credentials) as channel,
    ):
        await call(channel, "Peer", b"")
    _, identity, properties, _ = asked.seen
    assert identity == ("x509_subject_alternative_name", [b"127.0.0.1"])
    assert properties["x509_common_name"] == [b"client"]
    assert properties["transport_security_type"] == [b"ssl"]


@pytest.mark.parametrize("request_bytes", [b"fine", b"abort"])
async def test_contexts_tell_the_end(request_bytes: bytes) -> None:
    listener = bind_tcp("127.0.0.1", 0)
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    async with served(listener) as asked, plain_channel(target) as channel:
        if request_bytes == b"fine":
            assert await call(channel, "End", request_bytes) == b"fine"
        else:
            with call_refused(grpc.StatusCode.ALREADY_EXISTS, "as a status") as caught:
                await call(channel, "End", request_bytes)
            trailing: Any = caught.value.trailing_metadata()
            assert dict(trailing) == {"key": "value"}
        assert asked.seen == [(True, False), "at once"]
        # Case: a caller that goes away.
        hanging = channel.stream_stream(f"/{SERVICE}/Hang")()
        await hanging.write(b"x")
        await asked.entered.wait()
        hanging.cancel()
        await eventually(lambda: len(asked.seen) == 4)
        assert asked.seen[2:] == [(True, True), "at once"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("request_bytes", "code", "details"),
    [
        (b"number", grpc.StatusCode.NOT_FOUND, "by its number"),
        (b"abort", grpc.StatusCode.NOT_FOUND, "by its number"),
        (b"unknown", grpc.StatusCode.UNKNOWN, "no status"),
        (b"cancelled", grpc.StatusCode.UNAVAILABLE, "the handler was cancelled"),
        (b"long", grpc.StatusCode.UNKNOWN, "xxx"),
        (b"trailing", grpc.StatusCode.INTERNAL, "cannot be sent"),
        (b"much", grpc.StatusCode.INTERNAL, "cannot be sent"),
        (b"head", grpc.StatusCode.UNKNOWN, "'Key'"),
    ],
)
async def test_whatever_a_handler_sets_its_caller_gets_a_status(
    request_bytes: bytes, code: grpc.StatusCode, details: str, own: bool
) -> None:
    """And no other call of the connection ends."""
    listener = bind_tcp("127.0.0.1", 0)
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    channel: Any = Http2Channel(target, None) if own else plain_channel(target)
    async with served(listener) as asked, channel:
        hanging = channel.stream_stream(f"/{SERVICE}/Hang")()
        await hanging.write(b"x")
        assert await hanging.read() == b"x"
        with call_refused(code, details):
            await call(channel, "Fail", request_bytes, timeout=10.0)
        await hanging.write(b"y")
        assert await hanging.read() == b"y"
        assert not asked.seen
        hanging.cancel()
        await eventually(lambda: bool(asked.seen))


async def test_a_callback_that_fails_ends_neither_connection_nor_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(context: Any) -> None:
        raise ValueError("of the application")

    listener = bind_tcp("127.0.0.1", 0)
    target = f"127.0.0.1:{listener.getsockname()[1]}"
    async with served(listener) as asked:
        async with plain_channel(target) as channel:
            calls = [channel.stream_stream(f"/{SERVICE}/Hang")() for _ in range(3)]
            for hanging in calls:
                await hanging.write(b"x")
                assert await hanging.read() == b"x"
            for context in asked.contexts[:2]:
                context.add_done_callback(fail)
            calls[0].cancel()
            await eventually(lambda: len(asked.seen) == 2)
            await calls[2].write(b"y")
            assert await calls[2].read() == b"y"
        await eventually(lambda: len(asked.seen) == 6)
    assert [record.message for record in caplog.records] == [
        "a callback at the end of a call has failed"
    ] * 2
