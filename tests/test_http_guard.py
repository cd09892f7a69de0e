"""Requests that pages of strangers can make a browser send: refused, whatever is behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gazette.cluster.etcd.client import Etcd
from gazette.net.http_guard import GuardRules, HttpGuard, is_loopback
from gazette.net.http_server import HttpServer, bind_tcp, bind_unix
from gazette.runtime.file_limit import ConnectionLimits
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture
from tests.consumer.apps import Tally
from tools.simulation.remote_store import RemoteDatabase

ORIGIN: Final = "https://console.example"
VERBS: Final = ("POST", "PUT", "PATCH", "DELETE", "TRACE", "ANYTHING")


async def seen(request: Request) -> Response:
    await request.body()
    return PlainTextResponse(f"{request.url.path} {request.url.query}")


class Guarded:
    """A served application behind a guard, which is sent raw requests."""

    def __init__(self, rules: GuardRules, host: str = "127.0.0.1") -> None:
        methods = ["GET", "HEAD", "OPTIONS", *VERBS]
        app = Starlette(routes=[Route("/{path:path}", seen, methods=methods)])
        self.sock = bind_tcp(host, 0)
        self.host, self.port = self.sock.getsockname()[:2]
        limit = ConnectionLimits.of_process().http
        self.server = HttpServer(self.sock, HttpGuard(app, rules), tls=None, limit=limit)
        self.scope = TaskScope("test")
        self.server.start(self.scope)

    async def ask(self, request: str) -> tuple[int, str]:
        """Return the code and the body of the first answer."""
        answer = await raw(self.host, self.port, request)
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split(" ")[1]), body

    async def close(self) -> None:
        await self.server.stop(0.0)
        await self.scope.stop()


async def raw(host: str, port: int, request: str) -> str:
    """Return all that a server answers before it closes, or for HTTP/1.1 the first answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request.encode("latin-1"))
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                None,
            )
            body = await (reader.read() if length is None else reader.readexactly(length))
        return (head + body).decode("latin-1")
    finally:
        writer.close()


@pytest.fixture
async def keyless() -> AsyncIterator[Guarded]:
    rules = GuardRules.of(keyless=True, hosts=("Broker.Example", "fd00::7"), origins=(ORIGIN,))
    guarded = Guarded(rules)
    yield guarded
    await guarded.close()


@pytest.fixture
async def keyed() -> AsyncIterator[Guarded]:
    guarded = Guarded(GuardRules.of(keyless=False, hosts=("broker.example",), origins=(ORIGIN,)))
    yield guarded
    await guarded.close()


def get(host: str, target: str = "/a") -> str:
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.:80",
        "127.0.0.1",
        "127.8.9.10:8080",
        "[::1]",
        "[::1]:8080",
        "[0:0:0:0:0:0:0:1]:80",
        "[::ffff:127.0.0.1]:80",
        "broker.example",
        "BROKER.example.:8081",
        "[fd00::7]:8081",
        "[FD00:0::7]",
        "localhost:",
    ],
)
async def test_hosts_that_are_served(keyless: Guarded, host: str) -> None:
    assert await keyless.ask(get(host)) == (200, "/a ")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("evil.localhost", 403),
        ("127.0.0.1.evil.example", 403),
        ("broker.example.evil", 403),
        ("192.0.2.1", 403),
        ("[2001:db8::1]:80", 403),
        ("0.0.0.0", 403),
        ("[::]", 403),
        ("2130706433", 403),
        ("0x7f.1", 403),
        ("127.1", 403),
        ("127.0.0.01", 403),
        ("", 400),
        ("localhost:80:80", 400),
        ("localhost:http", 400),
        ("user@localhost", 400),
        ("localhost/evil", 400),
        ("local host", 400),
        ("localhost, evil.example", 400),
        ("[::1", 400),
        ("[evil]", 400),
        ("[::1%25lo]", 400),
        ("\xff", 400),
        ("localhost:١", 400),
    ],
)
async def test_hosts_that_are_refused(keyless: Guarded, host: str, code: int) -> None:
    request = get(host).encode("utf-8").decode("latin-1")
    assert (await keyless.ask(request))[0] == code


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_requests_without_a_host_or_with_two(keyless: Guarded, version: str) -> None:
    start = f"GET /a HTTP/{version}\r\n"
    assert (await keyless.ask(f"{start}\r\n"))[0] == 400
    assert (await keyless.ask(f"{start}Host: localhost\r\nHost: evil.example\r\n\r\n"))[0] == 400
    assert (await keyless.ask(f"{start}Host: localhost\r\nHost: localhost\r\n\r\n"))[0] == 400
    assert (await keyless.ask(f"{start}Host: evil.example\r\n\r\n"))[0] == 403
    assert (await keyless.ask(f"{start}Host: localhost\r\n\r\n"))[0] == 200


async def test_absolute_targets(keyless: Guarded, keyed: Guarded) -> None:
    """The authority of the target counts, and so does Host; what is behind sees the path."""
    for guarded in (keyless, keyed):
        good = get("localhost", "http://127.0.0.1:80/a/b%2Fc?d=e")
        assert await guarded.ask(good) == (200, "/a/b/c d=e")
        assert await guarded.ask(get("localhost", "HTTP://localhost")) == (200, "/ ")
        assert await guarded.ask(get("localhost", "http://localhost?d=e")) == (200, "/ d=e")
    assert (await keyless.ask(get("localhost", "http://evil.example/a")))[0] == 403
    assert (await keyless.ask(get("evil.example", "http://localhost/a")))[0] == 403
    assert (await keyless.ask(get("localhost", "http://a@localhost/a")))[0] == 400
    assert (await keyless.ask(get("localhost", "http:///a")))[0] == 400
    for target in ("localhost:80", "a", "file:///a", "*", "?a"):
        assert (await keyless.ask(get("localhost", target)))[0] == 400


async def test_the_address_that_the_client_is_connected_to_is_served() -> None:
    """Probes and scrapers name it; a page that was rebound names itself."""
    guarded = Guarded(GuardRules.of(keyless=True, hosts=()), "127.0.0.2")
    assert await guarded.ask(get(f"127.0.0.2:{guarded.port}")) == (200, "/a ")
    await guarded.close()


async def test_unix_sockets_serve_any_host(tmp_path: Path) -> None:
    """No page can name one."""
    rules = GuardRules.of(keyless=True, hosts=())
    app = Starlette(routes=[Route("/{path:path}", seen)])
    sock = bind_unix(str(tmp_path / "socket"))
    server = HttpServer(sock, HttpGuard(app, rules), tls=None, limit=10)
    scope = TaskScope("test")
    server.start(scope)
    reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
    writer.write(get("anything").encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await server.stop(0.0)
    await scope.stop()


async def test_any_host_is_served_with_keys(keyed: Guarded) -> None:
    for host in ("evil.example", "", "192.0.2.1"):
        assert (await keyed.ask(get(host)))[0] == 200
    assert (await keyed.ask("GET /a HTTP/1.0\r\n\r\n"))[0] == 200


def origins() -> Iterator[tuple[str, int]]:
    """Yield headers of requests that may change something, and the answer."""
    yield "", 200
    for site in ("same-origin", "none"):
        yield f"Sec-Fetch-Site: {site}\r\n", 200
        yield f"Sec-Fetch-Site: {site}\r\nOrigin: https://proxied.example\r\n", 200
    for site in ("cross-site", "same-site", "CROSS-SITE", "unheard-of", ""):
        yield f"Sec-Fetch-Site: {site}\r\n", 403
        yield f"Sec-Fetch-Site: {site}\r\nOrigin: http://localhost:80\r\n", 403
        yield f"Sec-Fetch-Site: {site}\r\nOrigin: {ORIGIN}\r\n", 200
    yield "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Site: cross-site\r\n", 403
    yield "Origin: http://localhost\r\n", 200
    yield "Origin: http://localhost:80\r\n", 200
    yield f"Origin: {ORIGIN}\r\n", 200
    for origin in ("http://localhost:3000", "https://localhost", "http://evil.example", "null"):
        yield f"Origin: {origin}\r\n", 403
        yield f"Origin: {ORIGIN}\r\nOrigin: {origin}\r\n", 403
    yield "Origin: \r\n", 403
    yield "Origin: http://localhost/path\r\n", 403


@pytest.mark.parametrize("which", ["keyless", "keyed"])
async def test_pages_of_other_origins_change_nothing(
    which: str, keyless: Guarded, keyed: Guarded
) -> None:
    guarded = keyless if which == "keyless" else keyed
    for (headers, code), verb in itertools.product(origins(), VERBS):
        request = f"{verb} /a HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: 1\r\n\r\n!"
        answer = await guarded.ask(request)
        assert answer[0] == code, (verb, headers, answer)
    for verb, (headers, _) in itertools.product(("GET", "OPTIONS"), origins()):
        request = f"{verb} /a HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n"
        assert (await guarded.ask(request))[0] == 200, headers


@pytest.mark.parametrize("which", ["keyless", "keyed"])
async def test_ambiguous_framing_ends_the_connection(
    which: str, keyless: Guarded, keyed: Guarded
) -> None:
    guarded = keyless if which == "keyless" else keyed
    chunked = "Transfer-Encoding: chunked\r\n"
    body = "0\r\n\r\n"
    smuggled = get("localhost", "/smuggled")
    for start, headers in (
        ("PUT /a HTTP/1.1", f"Content-Length: 5\r\n{chunked}"),
        ("PUT /a HTTP/1.1", f"{chunked}Content-Length: 5\r\n"),
        ("GET /a HTTP/1.1", f"{chunked}Content-Length: 0\r\n"),
        ("PUT /a HTTP/1.0", f"{chunked}"),
    ):
        reader, writer = await asyncio.open_connection(guarded.host, guarded.port)
        request = f"{start}\r\nHost: localhost\r\n{headers}\r\n{body}{smuggled}"
        writer.write(request.encode())
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 ") == 1, answer
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert b"connection: close" in answer.lower()


async def test_servers_without_keys_are_guarded(etcd: Etcd, tmp_path: Path) -> None:
    """Brokers and members: reads and writes by a rebound name, and writes by any page."""
    async with await BrokerFixture.start(
        etcd, tmp_path, allow_hosts=("proxy.example",), lease_ttl_s=60.0
    ) as broker:
        await broker.create(journal_spec("a/journal"))
        application = Tally(RemoteDatabase())
        async with await ConsumerFixture.start(
            etcd, broker, application, tmp_path, lease_ttl_s=60.0
        ) as member:
            for server, path in (
                (broker.service.server, "/a/journal"),
                (broker.service.server, "/debug/stacks"),
                (member.service.server, "/debug/stacks"),
                (member.service.server, "/metrics"),
            ):
                host, _, port = server.http_endpoint.removeprefix("http://").partition(":")
                answer = await raw(host, int(port), get("evil.example", path))
                assert answer.startswith("HTTP/1.1 403"), answer
                assert "evil" not in answer
                assert not (await raw(host, int(port), get("localhost", path))).startswith(
                    "HTTP/1.1 403"
                )
            host, _, port = broker.service.server.http_endpoint.removeprefix("http://").partition(
                ":"
            )
            cross = "Sec-Fetch-Site: cross-site\r\nContent-Length: 1\r\n\r\n!"
            for verb, path in (("PUT", "/a/journal"), ("POST", "/v1/journals/list")):
                request = f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\n{cross}"
                assert (await raw(host, int(port), request)).startswith("HTTP/1.1 403")
            named = get("proxy.example", "/a/journal")
            assert not (await raw(host, int(port), named)).startswith("HTTP/1.1 403")


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "text/json"]
)
async def test_json_must_be_declared(etcd: Etcd, tmp_path: Path, kind: str) -> None:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        host, _, port = broker.service.server.http_endpoint.removeprefix("http://").partition(":")
        start = "POST /v1/journals/list HTTP/1.1\r\nHost: localhost\r\n"
        header = f"Content-Type: {kind}\r\n" if kind else ""
        body = "Content-Length: 2\r\n\r\n{}"
        answer = await raw(host, int(port), f"{start}{header}{body}")
        assert answer.startswith("HTTP/1.1 415"), answer
        # Case: no body. A type other than JSON is refused even then.
        answer = await raw(host, int(port), f"{start}{header}Content-Length: 0\r\n\r\n")
        assert answer.startswith("HTTP/1.1 415" if kind else "HTTP/1.1 200"), answer
        for good in ("application/json", "Application/JSON; charset=utf-8"):
            declared = f"{start}Content-Type: {good}\r\n{body}"
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(declared.encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


def test_loopback() -> None:
    for host in ("localhost", "127.0.0.1", "::1", "[::1]", "127.9.9.9", "LocalHost"):
        assert is_loopback(host)
    for host in ("", "0.0.0.0", "::", "192.0.2.1", "example.com", "localhost.example"):
        assert not is_loopback(host)
