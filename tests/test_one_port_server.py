"""gRPC and HTTP/1.1 on the one port of our own HTTP/2 server."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gazette.http2 import frames as fr
from gazette.net.grpc import server_connection
from gazette.net.http_server import TlsFiles
from gazette.protocol.route import grpc_target
from gazette.runtime.file_limit import ConnectionLimits
from gazette.runtime.tasks import TaskScope
from gazette.runtime.tls import tls_context
from tests.support.instant_clock import breathe
from tests.support.loop_time import LoopTime, turns
from tests.test_server import Running, bound, certificates, path, plain_channel

__all__ = ["certificates"]

REQUEST = b"GET /some/path HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def port_of(running: Running) -> int:
    return int(running.server.endpoint.rpartition(":")[2])


async def connect(running: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port_of(running))


async def test_both_protocols_are_served_on_the_advertised_port() -> None:
    async with Running(bound()) as running, httpx.AsyncClient() as http:
        for _ in range(2):
            response = await http.get(f"{running.server.endpoint}/some/path")
            assert response.text == "/some/path"
            async with plain_channel(grpc_target(running.server.endpoint)[0]) as channel:
                assert await running.call(channel) == b"hi"
        assert (await http.get(f"{running.server.http_endpoint}/x")).text == "/x"


async def test_first_bytes_may_come_one_by_one() -> None:
    """The first of POST is that of HTTP/2, too."""
    async with Running(bound()) as running:
        for content, answer in (
            (REQUEST, b"/some/path"),
            (REQUEST.replace(b"GET", b"POST"), b"Method Not Allowed"),
            (fr.PREFACE + fr.settings({}), fr.frame(fr.SETTINGS, fr.ACK, 0, b"")),
        ):
            reader, writer = await connect(running)
            for at in range(len(content)):
                writer.write(content[at : at + 1])
                await writer.drain()
            await reader.readuntil(answer)
            writer.close()


async def test_a_silent_connection_is_ended() -> None:
    time = LoopTime()
    async with Running(bound()) as running:
        for content in (b"", b"PR", b"PRI *"):
            reader, writer = await connect(running)
            writer.write(content)
            await turns()
            time.advance(server_connection.FIRST_FRAMES_S)
            received = await reader.read()
            assert b"HTTP/1.1" not in received
            writer.close()


async def test_a_request_that_comes_while_the_server_stops_is_answered() -> None:
    """The connection was there before. A client that says nothing does not hold the stop up for long."""
    async with Running(bound()) as running, TaskScope("test") as scope:
        reader, writer = await connect(running)
        _, silent = await connect(running)
        while len(running.server.grpc.connections) < 2:
            await breathe()
        stopping = scope.spawn(running.server.stop(30.0), name="stop")
        await breathe()
        assert not running.server.grpc.decided.is_set()
        writer.write(REQUEST)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        await stopping
        assert running.server.grpc.decided.is_set()
        writer.close()
        silent.close()


async def test_http_has_its_own_limit_on_the_port_of_both() -> None:
    limits = ConnectionLimits(grpc=10, http=1, debug=1)
    entered, gate = asyncio.Event(), asyncio.Event()

    async def wait(_: Request) -> Response:
        entered.set()
        await gate.wait()
        return PlainTextResponse("waited")

    application = Starlette(routes=[Route("/wait", wait), Route("/{rest:path}", path)])
    async with Running(bound(limits=limits), application) as running:
        # Case: an idle connection makes room.
        first, writer = await connect(running)
        writer.write(REQUEST)
        await first.readuntil(b"/some/path")
        second, other = await connect(running)
        other.write(REQUEST)
        await second.readuntil(b"/some/path")
        assert await first.read() == b""
        # Case: the HTTP server has none to give up.
        other.write(REQUEST.replace(b"/some/path", b"/wait"))
        await entered.wait()
        third, excess = await connect(running)
        excess.write(REQUEST)
        refusal = await third.read()
        assert refusal.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in refusal
        # Case: calls of gRPC are not concerned.
        async with plain_channel(grpc_target(running.server.endpoint)[0]) as channel:
            assert await running.call(channel) == b"hi"
        gate.set()
        await second.readuntil(b"waited")
        for one in (writer, other, excess):
            one.close()


async def test_requests_for_a_server_of_http_that_has_ended_are_refused() -> None:
    async with Running(bound()) as running:
        assert running.server._http is not None
        await running.server._http.stop(0.0)
        reader, writer = await connect(running)
        writer.write(REQUEST)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Retry-After" in answer
        writer.close()


async def test_with_tls_clients_that_offer_both_get_http(certificates: Path) -> None:
    """A browser does, and so does curl. Clients of gRPC offer h2 only."""
    tls = TlsFiles(str(certificates / "server.pem"), str(certificates / "server.key"))
    context = tls_context(ca_file=str(certificates / "ca.pem"))
    async with Running(bound(tls=tls)) as running:
        async with httpx.AsyncClient(verify=context) as http:
            assert (await http.get(f"{running.server.endpoint}/x")).text == "/x"
        credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        target, _ = grpc_target(running.server.endpoint)
        async with grpc.aio.secure_channel(target, credentials) as channel:
            assert await running.call(channel) == b"hi"
        curl = ("curl", "--silent", "--cacert", str(certificates / "ca.pem"))
        for options in ((), ("--http2",), ("--http1.1",), ("--no-alpn",)):
            command = (*curl, *options, f"{running.server.endpoint}/y")
            result = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False
            )
            assert result.stdout == "/y", (options, result.stderr)


async def test_tls_that_has_agreed_on_http2_gets_nothing_else(certificates: Path) -> None:
    """The client has said what it speaks: an answer of HTTP/1.1 would be none that it understands."""
    tls = TlsFiles(str(certificates / "server.pem"), str(certificates / "server.key"))
    context = tls_context(ca_file=str(certificates / "ca.pem"))
    context.set_alpn_protocols(["h2"])
    async with Running(bound(tls=tls)) as running:
        port = port_of(running)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(REQUEST)
        answer = await reader.read()
        assert b"HTTP/1.1" not in answer
        assert b"the client does not speak HTTP/2" in answer
        writer.close()
