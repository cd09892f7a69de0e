"""The two servers of a process: ports, TLS, counters, and an end within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gazette.errors import Broken, Invalid, Unavailable
from gazette.net import http_connection, http_server
from gazette.net.diagnostics import diagnostic_routes
from gazette.net.http_server import HttpServer, TlsFiles, bind_debug, bind_tcp
from gazette.net.server import Server, ServerSettings, advertised_host, warn_of_open_server
from gazette.net.streaming_body import StreamedBody
from gazette.protocol.route import grpc_target
from gazette.runtime.clock import SystemClock
from gazette.runtime.file_limit import (
    ConnectionLimits,
    file_limit,
    raise_file_limit,
    warn_of_few_files,
)
from gazette.runtime.log_setup import setup
from gazette.runtime.metrics import (
    GRPC_SERVER_HANDLED,
    GRPC_SERVER_RECEIVED,
    GRPC_SERVER_SENT,
    GRPC_SERVER_STARTED,
    HTTP_CONNECTIONS_REFUSED,
)
from gazette.runtime.ports import free_port, port_is_free
from gazette.runtime.tasks import TaskScope
from gazette.runtime.tls import tls_context
from tests.facts import is_advised, logged, raises
from tests.support.instant_clock import breathe
from tests.support.loop_time import LoopTime, turns
from tests.support.metrics import value_of

SERVICE = "test.Echo"


def plain_channel(target: str) -> Any:
    """Return a channel whose calls need no serializers: the stubs of gRPC do not know that."""
    return grpc.aio.insecure_channel(target)


class Echo:
    """A service with one method of each kind; ``gate`` holds calls to ``Hang``."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()

    async def unary(self, request: bytes, call: Any) -> bytes:
        if request == b"abort":
            await call.abort(grpc.StatusCode.NOT_FOUND, "no")
        if request == b"raise":
            raise ValueError("a defect")
        return request

    async def hang(self, request: bytes, call: Any) -> bytes:
        self.entered.set()
        await self.gate.wait()
        return request

    async def repeat(self, request: bytes, call: Any) -> None:
        for _ in range(3):
            await call.write(request)

    async def generate(self, requests: AsyncIterator[bytes], call: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    def handler(self) -> Any:
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
                "Hang": grpc.unary_unary_rpc_method_handler(self.hang),
                "Repeat": grpc.unary_stream_rpc_method_handler(self.repeat),
                "Generate": grpc.stream_stream_rpc_method_handler(self.generate),
            },
        )


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"host": "127.0.0.1", "bind_host": "127.0.0.1", **changes})


async def path(request: Request) -> Response:
    return PlainTextResponse(request.url.path)


def app() -> Starlette:
    return Starlette(routes=[Route("/{rest:path}", path)])


class Running:
    """A started server, with the echo service and an application that answers its path."""

    def __init__(self, server: Server, application: Starlette | None = None) -> None:
        self.server = server
        self.application = application or app()
        self.echo = Echo()
        self.scope = TaskScope("test")

    async def __aenter__(self) -> Self:
        self.server.grpc.add_generic_rpc_handlers((self.echo.handler(),))
        self.server.start_http(self.scope, self.application)
        await self.server.start_grpc()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.server.stop(0.0)
        await self.scope.stop()

    async def call(
        self, channel: Any, request: bytes = b"hi", timeout_s: float | None = None
    ) -> bytes:
        answer: bytes = await channel.unary_unary(f"/{SERVICE}/Unary")(request, timeout=timeout_s)
        return answer


def bound(**changes: Any) -> Server:
    server = Server(SystemClock(), settings(**changes))
    server.bind()
    return server


def free_port_pair() -> int:
    """Return a port that is free together with the next one."""
    while True:
        port = free_port()
        if port_is_free(port + 1):
            return port


async def test_grpc_and_http_are_served_and_the_grpc_endpoint_is_advertised() -> None:
    async with Running(bound()) as running:
        target, tls = grpc_target(running.server.endpoint)
        assert not tls
        async with plain_channel(target) as channel:
            assert await running.call(channel) == b"hi"
        async with httpx.AsyncClient() as http:
            response = await http.get(f"{running.server.http_endpoint}/some/path")
        assert response.text == "/some/path"
        assert "server" not in response.headers


async def test_the_http_port_follows_the_grpc_port() -> None:
    port = free_port_pair()
    server = bound(port=str(port))
    assert server.endpoint == f"http://127.0.0.1:{port}"
    assert server.http_endpoint == f"http://127.0.0.1:{port + 1}"
    await server.stop(0)


async def test_all_interfaces_are_listened_on_and_the_given_host_is_advertised() -> None:
    async with Running(bound(host="broker.example", bind_host="")) as running:
        port = running.server.endpoint.rpartition(":")[2]
        assert running.server.endpoint == f"http://broker.example:{port}"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await running.call(channel) == b"hi"


@pytest.mark.parametrize("which", ["port", "http_port"])
async def test_a_port_in_use_is_a_clear_error(which: str) -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        server = Server(SystemClock(), settings(**{which: str(port)}))
        with pytest.raises(Unavailable) as caught:
            server.bind()
        await server.stop(0)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert is_advised(caught.value)


@pytest.mark.parametrize("port", ["http", "70000", "-1", "80 ", "unix:relative"])
async def test_what_is_no_port_is_invalid(port: str) -> None:
    with raises(Invalid, path="port", says=port):
        Server(SystemClock(), settings(port=port)).bind()


async def test_unix_sockets_serve_both_and_replace_stale_files(tmp_path: Path) -> None:
    sock = tmp_path / "b.sock"
    for path in (sock, tmp_path / "b.sock.http"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
    async with Running(bound(port=f"unix://{sock}", host="here")) as running:
        assert running.server.endpoint == f"unix://here{sock}"
        target, _ = grpc_target(running.server.endpoint)
        async with plain_channel(target) as channel:
            assert await running.call(channel) == b"hi"
        transport = httpx.AsyncHTTPTransport(uds=f"{sock}.http")
        async with httpx.AsyncClient(transport=transport) as http:
            assert (await http.get("http://here/x")).text == "/x"
        # Case: a socket of a listening process is not taken away from it.
        with raises(Unavailable, "address", says="Address already in use"):
            bound(port=f"unix://{sock}")
    del running


async def test_the_socket_of_a_process_that_accepts_nothing_is_in_use(tmp_path: Path) -> None:
    """As of a stopped process. Its queue is full, so that connections wait."""
    path = str(tmp_path / "sock")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(path)
            except BlockingIOError:
                break
        with raises(Unavailable, address=f"unix://{path}", says="Address already in use"):
            bound(port=f"unix://{path}")


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not to be lost")
    link = tmp_path / "link"
    link.symlink_to(path)
    for place in (path, link):
        with raises(Unavailable, "address", says="is no socket"):
            bound(port=f"unix://{place}")
    assert path.read_text() == "not to be lost"
    assert link.is_symlink()


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make ``ca.pem``, and a key pair of it for ``server`` and ``client``."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        directory, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca"
    )
    for name in ("server", "client"):
        (directory / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(directory, "req", *key, *request)
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{name}.ext")
        openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signer)
    return directory


async def test_tls_requires_a_client_certificate_iff_a_ca_is_given(certificates: Path) -> None:
    def pem(name: str) -> str:
        return str(certificates / name)

    def credentials(*, client: bool) -> grpc.ChannelCredentials:
        pair = [
            Path(pem(f"client.{kind}")).read_bytes() if client else None for kind in ("key", "pem")
        ]
        return grpc.ssl_channel_credentials(Path(pem("ca.pem")).read_bytes(), *pair)

    for ca, anonymous_works in (("", True), (pem("ca.pem"), False)):
        tls = TlsFiles(pem("server.pem"), pem("server.key"), ca)
        async with Running(bound(tls=tls)) as running:
            assert running.server.endpoint.startswith("https://127.0.0.1:")
            assert running.server.http_endpoint.startswith("https://127.0.0.1:")
            target, _ = grpc_target(running.server.endpoint)
            async with grpc.aio.secure_channel(target, credentials(client=True)) as channel:
                assert await running.call(channel) == b"hi"
            async with grpc.aio.secure_channel(target, credentials(client=False)) as channel:
                if anonymous_works:
                    assert await running.call(channel) == b"hi"
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                        await running.call(channel)
            for client in (True, False):
                context = tls_context(ca_file=pem("ca.pem"))
                if client:
                    context.load_cert_chain(pem("client.pem"), pem("client.key"))
                async with httpx.AsyncClient(verify=context) as http:
                    if client or anonymous_works:
                        assert (await http.get(f"{running.server.http_endpoint}/x")).text == "/x"
                    else:
                        with pytest.raises(httpx.TransportError):
                            await http.get(f"{running.server.http_endpoint}/x")


async def test_certificates_that_were_replaced_are_served(
    certificates: Path, tmp_path: Path
) -> None:
    def put(name: str) -> None:
        for kind in ("pem", "key"):
            shutil.copy(certificates / f"{name}.{kind}", tmp_path / f"mine.{kind}")

    def served(port: int) -> str:
        """Return the name in the certificate, which comes with the handshake."""
        context = tls_context(ca_file=str(certificates / "ca.pem"))
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            certificate: Any = secure.getpeercert()
            names = dict(pair for (pair,) in certificate["subject"])
            return str(names["commonName"])

    put("server")
    tls = TlsFiles(str(tmp_path / "mine.pem"), str(tmp_path / "mine.key"))
    async with Running(bound(tls=tls)) as running:
        ports = [
            int(url.rpartition(":")[2])
            for url in (running.server.endpoint, running.server.http_endpoint)
        ]

        async def names() -> list[str]:
            return [await asyncio.to_thread(served, port) for port in ports]

        assert await names() == ["server", "server"]
        put("client")
        assert await names() == ["client", "client"]
        # Case: what cannot be read changes nothing.
        (tmp_path / "mine.pem").unlink()
        assert await names() == ["client", "client"]


async def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with raises(Invalid, path="server-cert-file", says="none.pem"):
        bound(tls=TlsFiles(str(tmp_path / "none.pem"), str(tmp_path / "none.key")))


async def test_accepted_calls_end_and_new_ones_are_refused_while_stopping() -> None:
    async with Running(bound()) as running:
        target, _ = grpc_target(running.server.endpoint)
        async with plain_channel(target) as channel, TaskScope("calls") as scope:
            hanging = channel.unary_unary(f"/{SERVICE}/Hang")(b"held")
            await running.echo.entered.wait()
            stopping = scope.spawn(running.server.stop(30.0), name="stop")
            # Of calls that race with the stop, grpcio cancels some, and does not answer some.
            with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE|CANCELLED|DEADLINE"):
                while True:
                    await running.call(channel, timeout_s=1.0)
            with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE|CANCELLED"):
                await running.call(channel, timeout_s=10.0)
            assert not stopping.done()
            running.echo.gate.set()
            assert await hanging == b"held"
            await stopping


async def test_a_call_that_comes_just_when_it_stops_holds_nothing_up() -> None:
    """The package grpcio neither serves nor ends some of these, while another call goes on."""

    async def called(running: Running, channel: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await running.call(channel)

    async def stopped() -> None:
        async with Running(bound()) as running:
            target, _ = grpc_target(running.server.endpoint)
            async with plain_channel(target) as channel, TaskScope("calls") as scope:
                held = channel.unary_unary(f"/{SERVICE}/Hang")(b"held")
                await running.echo.entered.wait()
                late = scope.spawn(called(running, channel), name="late")
                stopping = scope.spawn(running.server.stop(60.0), name="stop")
                await asyncio.wait([late], timeout=0.2)
                running.echo.gate.set()
                assert await held == b"held"
                await stopping
                await late

    async with asyncio.timeout(40.0):
        for _ in range(10):
            await asyncio.gather(*(stopped() for _ in range(12)))


async def test_an_answer_that_its_caller_takes_slowly_is_not_cut_off() -> None:
    """The handler has ended long before."""
    async with Running(bound()) as running:
        target, _ = grpc_target(running.server.endpoint)
        content = b"x" * (4 << 20)
        async with plain_channel(target) as channel, TaskScope("calls") as scope:
            call = channel.unary_stream(f"/{SERVICE}/Repeat")(content)
            assert await call.read() == content
            stopping = scope.spawn(running.server.stop(30.0), name="stop")
            with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE|CANCELLED|DEADLINE"):
                while True:
                    await running.call(channel, timeout_s=1.0)
            assert [await call.read() for _ in range(2)] == [content, content]
            await stopping


async def test_calls_that_do_not_end_are_cut_off_after_the_grace() -> None:
    async with Running(bound()) as running:
        target, _ = grpc_target(running.server.endpoint)
        async with plain_channel(target) as channel:
            hanging = channel.unary_unary(f"/{SERVICE}/Hang")(b"held")
            await running.echo.entered.wait()
            await running.server.stop(0.05)
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await hanging


async def connected(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(
        "127.0.0.1", int(server.http_endpoint.rpartition(":")[2]), limit=1 << 20
    )


def ask(writer: asyncio.StreamWriter, path: str) -> None:
    writer.write(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())


async def answer(reader: asyncio.StreamReader, body: bytes) -> bytes:
    """Return the headers of an answer with that body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    assert await reader.readexactly(len(body)) == body
    return head


async def refused(server: Server) -> None:
    """Return when no client can connect any more."""
    with pytest.raises(ConnectionRefusedError):
        while True:
            _, writer = await connected(server)
            writer.close()


async def test_a_connection_that_has_asked_nothing_yet_is_answered_while_stopping() -> None:
    time = LoopTime()
    async with Running(bound()) as running:
        reader, writer = await connected(running.server)
        idle_reader, idle_writer = await connected(running.server)
        ask(idle_writer, "/one")
        assert b"connection: close" not in await answer(idle_reader, b"/one")
        async with TaskScope("stop") as scope:
            scope.spawn(running.server.stop(30.0), name="stop")
            # An idle connection is closed after a moment; by then, no client can connect any more.
            await refused(running.server)
            time.advance(http_server.NEXT_REQUEST_S)
            assert await idle_reader.read() == b""
            ask(writer, "/late")
            assert b"connection: close" in await answer(reader, b"/late")
            assert await reader.read() == b""
        writer.close()
        idle_writer.close()


async def test_an_idle_connection_that_goes_on_asking_learns_that_it_was_the_last_time() -> None:
    LoopTime()
    async with Running(bound()) as running:
        reader, writer = await connected(running.server)
        ask(writer, "/one")
        await answer(reader, b"/one")
        async with TaskScope("stop") as scope:
            scope.spawn(running.server.stop(120.0), name="stop")
            await refused(running.server)
            ask(writer, "/two")
            assert b"connection: close" in await answer(reader, b"/two")
            assert await reader.read() == b""
        writer.close()


async def test_connections_that_are_not_accepted_yet_are_answered_while_stopping() -> None:
    listener = bind_tcp("127.0.0.1", 0)
    http = HttpServer(listener, app(), tls=None, limit=100)
    async with TaskScope("test") as scope:
        http.start(scope)
        # No turn of the loop until the server stops: the kernel has established them, it knows of none.
        clients = [socket.create_connection(listener.getsockname()) for _ in range(50)]

        async def ask_all() -> None:
            for number, client in enumerate(clients):
                reader, writer = await asyncio.open_connection(sock=client)
                ask(writer, f"/{number}")
                await answer(reader, f"/{number}".encode())
                writer.close()

        asking = scope.spawn(ask_all(), name="ask")
        await http.stop(30.0)
        await asking


async def test_a_connection_that_asks_nothing_delays_the_end_for_a_bounded_time() -> None:
    async with Running(bound()) as running:
        reader, writer = await connected(running.server)
        async with asyncio.timeout(15.0):
            await running.server.stop(30.0)
            assert await reader.read() == b""
        writer.close()


async def test_requests_that_do_not_end_are_cut_off_after_the_grace() -> None:
    entered = asyncio.Event()

    async def hang(request: Request) -> Response:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = bound()
    scope = TaskScope("test")
    server.start_http(scope, Starlette(routes=[Route("/hang", hang)]))
    reader, writer = await connected(server)
    ask(writer, "/hang")
    await entered.wait()
    async with asyncio.timeout(15.0):
        await server.stop(0.1)
        assert b"500 Internal" in await reader.read()
    writer.close()
    await scope.stop()


async def test_a_server_that_never_started_can_be_stopped() -> None:
    server = bound()
    port = int(server.http_endpoint.rpartition(":")[2])
    await server.stop(0)
    bind_tcp("127.0.0.1", port).close()


# --- Limits


@pytest.mark.parametrize(
    ("request_bytes", "status", "why"),
    [
        (b"GARBAGE\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET /" + b"x" * 70_000, 431, "65,536"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "chunked"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "HTTP/1.0"),
    ],
    ids=["no request", "long head", "transfer coding", "version"],
)
async def test_what_cannot_be_served_is_answered_with_the_reason(
    request_bytes: bytes, status: int, why: str
) -> None:
    async with Running(bound()) as running:
        reader, writer = await connected(running.server)
        writer.write(request_bytes)
        answered = await reader.read()
        writer.close()
    assert answered.startswith(b"HTTP/1.1 %d " % status)
    head, _, body = answered.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert why in body.decode()


@asynccontextmanager
async def serving(
    application: Any, send_buffer: int | None = None
) -> AsyncIterator[tuple[HttpServer, TaskScope, int]]:
    """Serve an application of ASGI without any framework around it."""
    listener = bind_tcp("127.0.0.1", 0)
    if send_buffer is not None:  # Connections inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    http = HttpServer(listener, application, tls=None, limit=2)
    scope = TaskScope("test")
    http.start(scope)
    try:
        yield http, scope, listener.getsockname()[1]
    finally:
        await http.stop(0.0)
        failure = scope.failure
        await scope.stop()
    assert failure is None


async def answers(port: int, request: bytes) -> bytes:
    """Return all that is answered before the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answered = await reader.read()
    writer.close()
    return answered


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_an_application_that_fails_is_answered_for(method: str) -> None:
    """Before the head of its answer, or with a header that cannot be sent. HEAD gets no body."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/header":
            headers = [(b"x", b"a\r\nb: c")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise ValueError("a defect")

    async with serving(application) as (_, _, port):
        for path in ("/", "/header"):
            request = f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            head, _, body = (await answers(port, request)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 500 ")
            assert bool(body) == (method == "GET")
        head, _, body = (await answers(port, b"HEAD / HTTP/2.0\r\nHost: x\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
        assert (head[:13], body) == (b"HTTP/1.1 505 ", b"")


async def test_a_head_request_that_does_not_end_is_cut_off_with_the_server() -> None:
    entered = asyncio.Event()

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    async with serving(hang) as (http, scope, port):
        asking = scope.spawn(answers(port, b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n"), name="ask")
        await entered.wait()
        await http.stop(0.0)
        assert (await asking).startswith(b"HTTP/1.1 500 ")


@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_bytes_behind_the_last_request_of_a_connection_change_nothing(
    version: str, at_once: bool
) -> None:
    """The request has taken effect, so its client must not be answered 400."""
    taken, sent = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"abc"
        taken.set()
        await sent.wait()
        await PlainTextResponse("done")(scope, receive, send)

    async with serving(application) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"PUT / HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\n"
        writer.write(f"{head}abc".encode() + (b"\r\n" if at_once else b""))
        await taken.wait()
        writer.write(b"\r\n")
        await turns()
        sent.set()
        answered = await reader.read()
        writer.close()
    assert answered.startswith(b"HTTP/1.1 200 ")


async def test_a_closed_connection_whose_client_reads_nothing_makes_room() -> None:
    """The rest of its answer waits for it, and is less than its application would have to wait for."""
    time, answered = LoopTime(), asyncio.Semaphore(0)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await Response(bytes(60_000))(scope, receive, send)
        answered.release()

    async with contextlib.AsyncExitStack() as stack:
        _, _, port = await stack.enter_async_context(serving(application, send_buffer=4096))
        for _ in range(2):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await answered.acquire()
        time.advance(http_connection.IDLE_S)
        await turns()
        last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await answers(port, last)).startswith(b"HTTP/1.1 200 ")


async def test_no_log_has_bytes_of_a_request_that_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They may be those of a token."""
    async with Running(bound()) as running:
        for line in (
            "Authorization: Bearer secret\x00",
            "Authorization Bearer secret",
            "se cret: x",
        ):
            reader, writer = await connected(running.server)
            writer.write(f"GET / HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()
    assert "an HTTP request was refused" in caplog.text
    assert "cret" not in caplog.text


def limited(connections: int) -> Server:
    return bound(limits=ConnectionLimits(grpc=connections, http=connections, debug=connections))


async def test_a_new_connection_takes_the_place_of_the_one_that_is_idle_for_longest() -> None:
    """First goes one that has asked nothing yet, then one that has its answer."""
    async with Running(limited(3)) as running:
        used, writer = await connected(running.server)
        ask(writer, "/used")
        await answer(used, b"/used")
        idle = [await connected(running.server) for _ in range(2)]
        kept = [writer]
        for number, closed in enumerate((idle[0][0], idle[1][0], used)):
            reader, writer = await connected(running.server)
            ask(writer, f"/{number}")
            await answer(reader, f"/{number}".encode())
            assert await closed.read() == b""
            kept.append(writer)
        for writer in (*kept, *(one for _, one in idle)):
            writer.close()


async def test_a_connection_is_refused_if_all_others_are_busy() -> None:
    entered, gate = asyncio.Semaphore(0), asyncio.Event()

    async def hang(request: Request) -> Response:
        entered.release()
        await gate.wait()
        return PlainTextResponse("done")

    server = limited(2)
    scope = TaskScope("test")
    server.start_http(scope, Starlette(routes=[Route("/hang", hang)]))
    busy = [await connected(server) for _ in range(2)]
    for _, writer in busy:
        ask(writer, "/hang")
        await entered.acquire()
    reader, writer = await connected(server)
    refusal = await reader.read()
    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in refusal
    assert refusal.endswith(b"\r\n\r\ntoo many connections\n")
    writer.close()
    gate.set()
    for reader, writer in busy:
        await answer(reader, b"done")
        writer.close()
    await server.stop(5.0)
    await scope.stop()


async def test_connections_in_excess_of_the_limit_of_grpc_are_closed_at_once() -> None:
    async with Running(limited(2)) as running:
        target, _ = grpc_target(running.server.endpoint)
        _, _, port = target.rpartition(":")
        async with plain_channel(target) as channel:
            assert await running.call(channel) == b"hi"
            _, idle = await asyncio.open_connection("127.0.0.1", int(port))
            reader, excess = await asyncio.open_connection("127.0.0.1", int(port))
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            assert await running.call(channel) == b"hi"
            idle.close()
            excess.close()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("part", [b"", b"GET / HTTP/1.1\r\nHost: te"])
async def test_a_head_that_does_not_come_in_time_is_given_up(used: bool, part: bytes) -> None:
    time = LoopTime()
    async with Running(bound()) as running:
        reader, writer = await connected(running.server)
        if used:
            ask(writer, "/used")
            await answer(reader, b"/used")
        writer.write(part)
        await turns()
        time.advance(http_connection.HEAD_S)
        answered = await reader.read()
        assert answered.startswith(TOO_LATE) if part else not answered
        writer.close()


TOO_LATE = b"HTTP/1.1 408 "
"""The begin of the answer to what has not come in time."""
POST = b"POST /body HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\nsome"


async def test_a_client_that_ends_its_side_gets_its_whole_answer() -> None:
    """As `nc -N` does. An answer that goes on may take its time; one that does not come is given up."""
    time, asked, gate, gone = LoopTime(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            await gate.wait()
            gate.clear()
            yield b"part"

    async def answer_slowly(request: Request) -> Response:
        asked.set()
        return StreamingResponse(parts())

    async def answer_never(request: Request) -> Response:
        asked.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return Response()

    server, scope = bound(), TaskScope("test")
    routes = [Route("/slow", answer_slowly), Route("/never", answer_never), Route("/now", path)]
    server.start_http(scope, Starlette(routes=routes))

    async def half_closed(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await connected(server)
        ask(writer, path)
        await turns()
        writer.write_eof()
        await turns()
        return reader, writer

    reader, writer = await connected(server)
    ask(writer, "/now")
    writer.write_eof()
    assert (await reader.read()).endswith(b"/now")
    writer.close()
    # Case: each part of the answer gives the next one its time.
    reader, writer = await half_closed("/slow")
    await asked.wait()
    for _ in range(5):
        time.advance(0.9 * http_connection.HALF_CLOSED_S)
        await turns()
        gate.set()
        await turns()
    assert (await reader.read()).count(b"part") == 5
    writer.close()
    # Case: a client that is gone ends its side, too.
    reader, writer = await half_closed("/never")
    assert not gone.is_set()
    time.advance(http_connection.HALF_CLOSED_S)
    await gone.wait()
    assert await reader.read() == b""
    writer.close()
    # Case: half a request is no request.
    reader, writer = await connected(server)
    writer.write(POST[:20])
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    await server.stop(0.0)
    await scope.stop()


async def test_a_client_that_ends_its_side_may_take_its_answer_slowly() -> None:
    time, content, ended = LoopTime(), bytes(1 << 16), asyncio.Event()

    async def large(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            try:
                for _ in range(512):
                    yield content
            finally:
                ended.set()

        return StreamingResponse(body())

    server, scope = bound(), TaskScope("test")
    server.start_http(scope, Starlette(routes=[Route("/large", large)]))
    reader, writer = await connected(server)
    # Without lengths of parts, a client cannot tell the end of its answer from a cut.
    writer.write(b"GET /large HTTP/1.0\r\nHost: test\r\n\r\n")
    writer.write_eof()
    await turns()
    for _ in range(3):
        time.advance(1.1 * http_connection.HALF_CLOSED_S)
        await turns()
    assert not ended.is_set()
    assert (await reader.read()).partition(b"\r\n\r\n")[2] == 512 * content
    writer.close()
    # Case: a client that takes nothing is cut off as others are.
    ended.clear()
    sock = socket.create_connection(("127.0.0.1", int(server.http_endpoint.rpartition(":")[2])))
    sock.send(b"GET /large HTTP/1.1\r\nHost: test\r\n\r\n")
    sock.shutdown(socket.SHUT_WR)
    await time.pass_until(ended.is_set, http_connection.STALL_S / 10)
    sock.close()
    await server.stop(0.0)
    await scope.stop()


async def test_a_body_that_does_not_come_is_given_up() -> None:
    time, asked, gone = LoopTime(), asyncio.Event(), asyncio.Event()

    async def read(request: Request) -> Response:
        asked.set()
        try:
            return PlainTextResponse(await request.body())
        except ClientDisconnect:
            gone.set()
            raise

    server = bound()
    scope = TaskScope("test")
    server.start_http(scope, Starlette(routes=[Route("/body", read, methods=["POST"])]))
    reader, writer = await connected(server)
    writer.write(POST)
    await asked.wait()
    time.advance(http_connection.BODY_S)
    assert (await reader.read()).startswith(TOO_LATE)
    await gone.wait()
    writer.close()
    # Case: one that does come is read, however long it takes: 96 pauses are longer than the bound together.
    reader, writer = await connected(server)
    writer.write(POST)
    for _ in range(96):
        await turns()
        time.advance(0.9 * http_connection.BODY_S)
        await turns()
        writer.write(b"x")
    await answer(reader, b"some" + b"x" * 96)
    writer.close()
    await server.stop(5.0)
    await scope.stop()


async def test_a_client_that_is_answered_before_its_body_ended_is_closed_a_little_later() -> None:
    """At once, and it might not see the answer."""
    time = LoopTime()
    server = bound()
    scope = TaskScope("test")
    server.start_http(scope, Starlette(routes=[Route("/body", path, methods=["POST"])]))
    reader, writer = await connected(server)
    writer.write(POST)
    await answer(reader, b"/body")
    writer.write(b"x")
    time.advance(http_connection.LINGER_S)
    assert await reader.read() == b""
    writer.close()
    # Case: the body ends in time, and the connection is used again.
    reader, writer = await connected(server)
    writer.write(POST)
    await answer(reader, b"/body")
    time.advance(0.9 * http_connection.LINGER_S)
    writer.write(b"x" * 96 + POST)
    await answer(reader, b"/body")
    time.advance(0.9 * http_connection.LINGER_S)
    await turns()
    assert not reader.at_eof()
    writer.close()
    await server.stop(0.1)
    await scope.stop()


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    time, ended = LoopTime(), asyncio.Event()

    async def endless(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(1 << 16)
                    await SystemClock().sleep(0)
            finally:
                ended.set()

        return StreamingResponse(body())

    server = bound()
    scope = TaskScope("test")
    server.start_http(scope, Starlette(routes=[Route("/endless", endless)]))
    sock = socket.create_connection(("127.0.0.1", int(server.http_endpoint.rpartition(":")[2])))
    sock.send(b"GET /endless HTTP/1.1\r\nHost: test\r\n\r\n")
    await time.pass_until(ended.is_set, http_connection.STALL_S / 10)
    sock.close()
    await server.stop(5.0)
    await scope.stop()


async def test_a_connection_that_cannot_begin_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Running(bound()) as running:
        with monkeypatch.context() as broken:

            async def fail(*args: Any, **kwargs: Any) -> None:
                raise ValueError("a defect")

            broken.setattr(asyncio.get_running_loop(), "connect_accepted_socket", fail)
            reader, writer = await connected(running.server)
            assert await reader.read() == b""
            writer.close()
        reader, writer = await connected(running.server)
        ask(writer, "/next")
        await answer(reader, b"/next")
        writer.close()
    assert "ValueError: a defect" in caplog.text


async def test_without_descriptors_one_line_is_logged_and_connections_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio's own server logs a traceback for each of its 2,048 attempts, each second."""
    time = LoopTime()
    refused = HTTP_CONNECTIONS_REFUSED.labels("descriptors")
    async with Running(bound()) as running:
        port = int(running.server.http_endpoint.rpartition(":")[2])
        clients = [socket.socket() for _ in range(20)]
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = value_of(refused)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            for client in clients:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            await time.pass_until(lambda: value_of(refused) >= before + 3, 1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        time.advance(1.0)
        for number, client in enumerate(clients):
            reader, writer = await asyncio.open_connection(sock=client)
            ask(writer, f"/{number}")
            await answer(reader, f"/{number}".encode())
            writer.close()
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert {one.name for one in lines} == {"gazette.net.http_accept"}
    assert len({vars(one)["cause"] for one in lines}) == 1  # So that one of them is written.


@pytest.mark.parametrize("files", [1024, 4096, 20_000, 1 << 20])
def test_limits_of_connections_leave_half_of_the_files_to_others(files: int) -> None:
    limits = ConnectionLimits.of_files(files)
    assert limits.grpc + limits.http + limits.debug <= files // 2
    assert min(limits.grpc, limits.http, limits.debug) >= 64


def test_the_soft_limit_of_files_is_raised_and_few_files_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 900), hard))
    try:
        files = raise_file_limit()
        assert files == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == file_limit()
        assert files in (hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    warn_of_few_files(4096, 1024, "--broker.limit")
    assert not caplog.records
    warn_of_few_files(4095, 1024, "--broker.limit")
    facts = {"setting": "--broker.limit", "count": 4095, "items": 1024, "needed": 4096}
    logged(caplog, **facts)


@pytest.mark.parametrize("error", [Broken("the end"), asyncio.CancelledError()])
async def test_a_body_that_fails_is_one_line_of_ours(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """A channel that is closed cancels what reads from it; uvicorn would log a traceback."""

    async def parts() -> AsyncIterator[bytes]:
        yield b"some"
        raise error

    async def body(request: Request) -> Response:
        return StreamedBody(parts())

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    lines = io.StringIO()
    setup("info", "text", stream=lines)
    server = bound()
    scope = TaskScope("test")
    try:
        server.start_http(scope, Starlette(routes=[Route("/body", body)]))
        for _ in range(3):
            reader, writer = await connected(server)
            ask(writer, "/body")
            assert (await reader.read()).endswith(b"\r\n4\r\nsome\r\n")  # Without its end.
            writer.close()
    finally:
        await server.stop(5.0)
        await scope.stop()
        root.handlers[:] = handlers
        root.setLevel(level)
    (line,) = lines.getvalue().splitlines()
    assert "gazette.net.streaming_body: the body of /body was cut off: " in line


@pytest.mark.parametrize("cut", ["error", "stop"])
async def test_a_client_of_http_1_0_notices_an_answer_that_is_cut_off(cut: str) -> None:
    """There the end of the connection is the end of the body. nginx speaks HTTP/1.0 by default."""
    sent = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"some"
        await sent.wait()
        raise Broken("the end")

    async def body(request: Request) -> Response:
        return StreamedBody(parts())

    server = bound()
    async with TaskScope("test") as scope:
        server.start_http(scope, Starlette(routes=[Route("/body", body)]))
        reader, writer = await connected(server)
        writer.write(b"GET /body HTTP/1.0\r\nHost: test\r\n\r\n")
        assert (await reader.readuntil(b"some")).endswith(b"\r\n\r\nsome")
        if cut == "error":
            sent.set()
        else:
            await server.stop(0.1)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await server.stop(5.0)


async def test_what_is_called_is_counted() -> None:
    def counts(method: str, kind: str) -> tuple[float, float, float]:
        labels = (kind, SERVICE, method)
        return (
            value_of(GRPC_SERVER_STARTED.labels(*labels)),
            value_of(GRPC_SERVER_RECEIVED.labels(*labels)),
            value_of(GRPC_SERVER_SENT.labels(*labels)),
        )

    def handled(method: str, kind: str, code: str) -> float:
        return value_of(GRPC_SERVER_HANDLED.labels(kind, SERVICE, method, code))

    async with Running(bound()) as running:
        target, _ = grpc_target(running.server.endpoint)
        async with plain_channel(target) as channel:
            before = counts("Unary", "unary")
            for request, code in ((b"hi", None), (b"abort", "NOT_FOUND"), (b"raise", "UNKNOWN")):
                if code is None:
                    await running.call(channel, request)
                else:
                    with pytest.raises(grpc.aio.AioRpcError, match=code):
                        await running.call(channel, request)
            after = counts("Unary", "unary")
            assert [b - a for a, b in zip(before, after, strict=True)] == [3, 3, 1]
            for code in ("OK", "NotFound", "Unknown"):
                assert handled("Unary", "unary", code) >= 1

            before = counts("Repeat", "server_stream")
            repeated = channel.unary_stream(f"/{SERVICE}/Repeat")(b"x")
            assert [one async for one in repeated] == [b"x"] * 3
            after = counts("Repeat", "server_stream")
            assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 3]

            generated = channel.stream_stream(f"/{SERVICE}/Generate")(iter([b"1", b"2"]))
            assert [one async for one in generated] == [b"1", b"2"]
            assert counts("Generate", "bidi_stream") == (1, 2, 2)
            assert handled("Generate", "bidi_stream", "OK") == 1


async def test_an_unknown_method_is_unimplemented() -> None:
    async with Running(bound()) as running:
        target, _ = grpc_target(running.server.endpoint)
        async with plain_channel(target) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await channel.unary_unary(f"/{SERVICE}/Nothing")(b"")


async def test_an_http_server_that_dies_fails_its_scope() -> None:
    listener = bind_tcp("127.0.0.1", 0)
    http = HttpServer(listener, app(), tls=None, limit=100)
    scope = TaskScope("test")
    http.start(scope)
    listener.shutdown(socket.SHUT_RDWR)
    while scope.failure is None:
        await turns()
    assert isinstance(scope.failure, OSError)
    await http.stop(0)


async def test_diagnostics_tell_whether_and_what() -> None:
    async def innermost() -> None:
        await asyncio.get_running_loop().create_future()

    async def outermost() -> None:
        await innermost()

    async with TaskScope("test") as scope:
        scope.spawn(outermost(), name="waits")
        await breathe()
        await _diagnostics()
        scope.cancel()


async def _diagnostics() -> None:
    reason = "starting"
    application = Starlette(routes=diagnostic_routes(lambda: reason))
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        response = await http.get("/debug/ready")
        assert (response.status_code, response.text) == (503, "starting\n")
        reason = ""
        assert (await http.get("/debug/ready")).status_code == 200
        for path in ("/metrics", "/debug/metrics"):
            text = (await http.get(path)).text
            assert "# TYPE gazette_journal_server_started_totals untyped" in text
            assert "process_resident_memory_bytes" in text
        stacks = (await http.get("/debug/stacks")).text
        assert "test_diagnostics_tell_whether_and_what" in stacks
        # All that a task awaits is there, and not its outermost function only.
        assert "in innermost" in stacks
        assert "thread MainThread" in stacks


async def test_the_debug_port_is_on_the_host_of_the_others() -> None:
    for host, expected in (("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.2", "127.0.0.2")):
        with bind_debug("0", host) as sock:
            assert sock.getsockname()[0] == expected
    with bind_debug("0", "") as sock:
        assert sock.getsockname()[0] in ("::", "0.0.0.0")
    for port in ("x", "1_0", "²", "65536", "-1"):
        with raises(Invalid, path="--debug.port", says=f'"{port}"'):
            bind_debug(port, "")


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"bind_host": ""}, True),
        ({"bind_host": "0.0.0.0"}, True),
        ({"bind_host": "192.0.2.1"}, True),
        ({"bind_host": "127.0.0.1"}, False),
        ({"bind_host": "::1"}, False),
        ({"bind_host": "localhost"}, False),
        ({"bind_host": "", "port": "unix:///run/x"}, False),
        ({"bind_host": "", "port": "unix:///run/x", "http_port": "80"}, True),
        ({"bind_host": "", "tls": TlsFiles("cert", "key")}, True),
        ({"bind_host": "", "tls": TlsFiles("cert", "key", "ca")}, False),
    ],
)
def test_servers_that_anyone_may_use_warn(
    changes: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_open_server(settings(**changes), "broker", "do everything")
    lines = [one.getMessage() for one in caplog.records]
    assert len(lines) == warns
    for line in lines:
        assert "do everything" in line
        assert "--broker.auth-keys" in line
        assert "--broker.bind-host=127.0.0.1" in line


def test_what_listens_on_loopback_is_advertised_there() -> None:
    assert advertised_host("127.0.0.1", "machine") == "127.0.0.1"
    for bind_host in ("", "0.0.0.0", "192.0.2.1"):
        assert advertised_host(bind_host, "machine") == "machine"
