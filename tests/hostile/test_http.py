"""Requests over HTTP that are none, that are mutated, or that never end: refused, and still served."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import grpc.aio
import httpx
import pytest
from starlette.requests import Request

from gazette.auth import Claims
from gazette.broker.http.gateway import _write_body
from gazette.net import http_connection
from gazette.protocol.pb import broker_pb2
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture
from tests.hostile.conftest import Matrix, mutated
from tests.test_authorization import ALL, AUTH, JOURNAL, broker, member

__all__ = ["broker", "member"]

DIGITS: Final = "9" * 5000
LOG_LINES_MAX: Final = 20
WAIT_S: Final = 20.0
JSON: Final = "Content-Type: application/json\r\n"
JSON_TYPE: Final = {"Content-Type": "application/json"}


def requests(path: str) -> Iterator[str]:
    """Draw requests that are wrong somewhere. ``{auth}`` is where a token may be."""
    for header in (
        f"Range: bytes={DIGITS}-",
        f"Range: bytes=-{DIGITS}",
        f"Range: bytes=0-{DIGITS}",
        "Range: bytes=\xb2-",
        "Range: bytes=5-1",
        "Range: bytes=0-1,3-4",
        f'If-Match: "{"f" * 5000}-1"',
        "If-Match: \xff\xfe",
        f"If-None-Match: {'x,' * 5000}",
        f"X: {'x' * 60_000}",
        f"X: {'x' * 200_000}",
        "X: a\r\n" * 2_000 + "Y: b",
        f"Authorization: Bearer {'x' * 7_000}",
        f"Authorization: Bearer {'x' * 15_000}",
        f"Authorization: Bearer {'x' * 60_000}",
        "Authorization: Bearer \xff",
        "Authorization: Bearer x\ty",
        "Authorization: Bearer " + "." * 1000,
        "Upgrade: websocket\r\nConnection: upgrade",
        "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings",
        "Expect: 200-ok",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: -1",
        f"Content-Length: {DIGITS}",
        "Content-Length: 1_0",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: chunked, chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 1",
        " folded: x",
        "no colon",
        "Bad Name: x",
        "Null: a\x00b",
    ):
        yield f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{{auth}}{header}\r\n\r\n"
        yield f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n{{auth}}{header}\r\n\r\n"
    for target in (
        f"{path}?offset={DIGITS}",
        f"{path}?offset=1_0",
        f"{path}?offset=%d9%a1",
        f"{path}?block=maybe",
        f"{path}?x=1",
        f"{path}?" + "&" * 5000,
        "/%ff%fe",
        "/%00",
        "/%ed%a0%80",
        "/../../etc/passwd",
        "/a/..%2f..%2fetc%2fpasswd",
        "//////",
        "/" + "a" * 15_000,
        "/" + "%2e" * 5_000,
        "*",
        "http://evil.example/a",
        "//evil.example/a",
        "\\a",
        "/a\xff",
        "/a b",
    ):
        for verb in ("GET", "HEAD", "PUT", "DELETE", "CONNECT", "TRACE", "A" * 5000):
            yield f"{verb} {target} HTTP/1.1\r\nHost: localhost\r\n{{auth}}\r\n"
    for version in ("HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.10", "http/1.1", ""):
        yield f"GET {path} {version}\r\nHost: localhost\r\n{{auth}}\r\n"
    for body in (
        "\xff\xfe\x00\x01",
        '{"offset":' + DIGITS + "}",
        '{"offset":"1_0"}',
        '{"offset":"\\u0661"}',
        '{"offset":1e400}',
        '{"journal":"\\ud800"}',
        '{"journal":1}',
        '{"header":{"process_id":5}}',
        "[" * 50_000,
        '{"a":' * 50_000,
        '"' + "x" * 100_000,
        "[1,2",
        "null",
        "NaN",
        '{"journal":"a","journal":"b"}',
    ):
        for route in (
            "/v1/journals/list",
            "/v1/journals/read",
            "/v1/shards/list",
            "/v1/shards/stat",
        ):
            head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\n{{auth}}{JSON}"
            yield f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    for chunks in ("zz\r\n", "5\r\nabcdezz\r\nzz\r\n", "-1\r\n", "f" * 5000, "1;x=" + "y" * 50_000):
        start = (
            f"PUT {path} HTTP/1.1\r\nHost: localhost\r\n{{auth}}Transfer-Encoding: chunked\r\n\r\n"
        )
        yield start + chunks
    yield "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 300
    yield "\x00" * 5_000
    yield "\r\n" * 5_000
    yield "a" * 100_000


def addressed(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def ask(url: str, request: bytes) -> int:
    """Return the code of the answer; 0 if the connection was closed without one."""
    reader, writer = await asyncio.open_connection(*addressed(url))
    try:
        writer.write(request)
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            line = await reader.readline()
            while line.startswith(b"HTTP/1.1 1"):
                await reader.readuntil(b"\r\n\r\n")
                line = await reader.readline()
    except (ConnectionError, asyncio.IncompleteReadError, ValueError):
        line = b""
    finally:
        writer.transport.abort()
    return int(line.split(b" ")[1]) if line else 0


def text_of(request: str, token: str) -> bytes:
    auth = f"Authorization: Bearer {token}\r\n" if token else ""
    return request.replace("{auth}", auth, 1).encode("latin-1")


FOREIGN: Final = (
    '{"process_id":{"zone":"a","suffix":"b"},"route":{"primary":-1},'
    '"etcd":{"cluster_id":"1","member_id":"1","revision":"1","raft_term":"1"}}'
)
"""A header of another cluster."""
INVALID: Final = {
    "/v1/journals/read": (
        "{}",
        '{"journal":"a//b"}',
        '{"journal":"a b"}',
        '{"journal":"a/journal","offset":"-2"}',
        '{"journal":"a/journal","end_offset":"-2"}',
        '{"journal":"a/journal","offset":"5","end_offset":"2"}',
        '{"journal":"a/journal","header":{}}',
        '{"journal":"a/journal","header":{"process_id":{"zone":"!","suffix":""}}}',
    ),
    "/v1/journals/list": (
        '{"selector":{"include":{"labels":[{"name":"a b","value":"x"}]}}}',
        '{"selector":{"include":{"labels":[{"name":"b"},{"name":"a"}]}}}',
        '{"watch_resume":{}}',
        f'{{"watch":true,"watch_resume":{FOREIGN}}}',
        f'{{"watch_resume":{FOREIGN}}}',
    ),
    "/v1/shards/list": ('{"selector":{"exclude":{"labels":[{"name":"a b","value":"x"}]}}}',),
    "/v1/shards/stat": (
        "{}",
        '{"shard":"a b"}',
        '{"shard":"a-shard","read_through":{"a b":"1"}}',
        '{"shard":"a-shard","read_through":{"a/journal":"-5"}}',
        '{"shard":"a-shard","header":{}}',
    ),
}
"""Bodies that are well-formed, and break a rule of the protocol."""


async def refuse_invalid(url: str, routes: Sequence[str], results: Matrix) -> None:
    headers = {"Authorization": f"Bearer {AUTH.sign(Claims(ALL), 600)}", **JSON_TYPE}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_S) as http:
        for route in routes:
            for body in INVALID[route]:
                answer = await http.post(route, content=body)
                assert answer.status_code == 400, (route, body, answer.text)
                error = answer.json()["error"]
                assert (error["httpCode"], bool(error["message"])) == (400, True), (route, body)
                results.count("refused")


async def test_invalid_requests_of_brokers(
    broker: BrokerFixture, matrix: Callable[[str], Matrix], log_lines: Callable[[], list[str]]
) -> None:
    """With a valid token they get 400 and the reason: they are the caller's mistake."""
    results = matrix("invalid JSON requests of brokers, right token")
    await refuse_invalid(broker.http, ["/v1/journals/list", "/v1/journals/read"], results)
    assert not log_lines()


async def test_invalid_requests_of_members(
    member: ConsumerFixture, matrix: Callable[[str], Matrix], log_lines: Callable[[], list[str]]
) -> None:
    results = matrix("invalid JSON requests of members, right token")
    await refuse_invalid(member.http, ["/v1/shards/list", "/v1/shards/stat"], results)
    assert not log_lines()


BARE_LF: Final = (
    "GET /debug/ready HTTP/1.1\nHost: localhost\n\n",
    "GET /debug/ready HTTP/1.1\nHost: localhost\r\n\r\n",
    "GET /debug/ready HTTP/1.1\r\nHost: localhost\n\r\n",
    "GET /debug/ready HTTP/1.1\r\nHost: localhost\r\n\n",
    "\nGET /debug/ready HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /debug/ready HTTP/1.1\r\nHost: localhost\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "POST /debug/ready HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n",
    "POST /debug/ready HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: a\n\r\n",
)
"""Requests that a proxy which ends lines only with CR and LF reads as something else."""


@pytest.mark.parametrize("request_text", BARE_LF)
async def test_lines_end_with_cr_and_lf(broker: BrokerFixture, request_text: str) -> None:
    """The connection is closed after the answer: what follows may be another request for a proxy."""
    reader, writer = await asyncio.open_connection(*addressed(broker.http))
    for at in range(0, len(request_text), 7):
        writer.write(request_text[at : at + 7].encode())
        await writer.drain()
    async with asyncio.timeout(WAIT_S):
        answer = await reader.read()
    writer.close()
    assert b"HTTP/1.1 200" not in answer
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 405"))
    # Case: the same with whole line ends is served.
    whole = "GET /debug/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert await ask(broker.http, whole.encode()) == 200


async def attack(url: str, inputs: list[bytes], results: Matrix, *, before: bool) -> None:
    for one in inputs:
        code = await ask(url, one)
        assert code < 500 or code in (501, 505), (code, one[:300])
        if before:
            # Without a token no journal is read or appended to.
            assert code not in (204, 206), (code, one[:300])
        results.count("closed" if not code else "refused" if code >= 400 else f"answered {code}")


def valid(path: str, token: str) -> list[bytes]:
    auth = f"Authorization: Bearer {token}\r\n" if token else ""
    host = f"Host: localhost\r\n{auth}"
    body = f'{{"journal":"{JOURNAL}"}}'
    return [
        f"GET {path}?offset=0&block=false HTTP/1.1\r\n{host}Range: bytes=0-10\r\n\r\n".encode(),
        f'HEAD {path} HTTP/1.1\r\n{host}If-None-Match: "1-2"\r\n\r\n'.encode(),
        f"PUT {path} HTTP/1.1\r\n{host}Content-Length: 4\r\n\r\nbody".encode(),
        f"PUT {path} HTTP/1.1\r\n{host}Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n".encode(),
        f"POST /v1/journals/read HTTP/1.1\r\n{host}{JSON}Content-Length: {len(body)}\r\n\r\n{body}".encode(),
    ]


@pytest.mark.parametrize("with_token", [False, True], ids=["no token", "right token"])
async def test_brokers(
    broker: BrokerFixture,
    with_token: bool,
    dice: random.Random,
    scale: int,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    token = AUTH.sign(Claims(ALL), 600) if with_token else ""
    results = matrix(f"HTTP of brokers x malformed, {'right' if token else 'no'} token")
    path = f"/{JOURNAL}"
    inputs = [text_of(one, token) for one in requests(path)]
    await attack(broker.http, inputs, results, before=not token)
    results = matrix(f"HTTP of brokers x mutated, {'right' if token else 'no'} token")
    whole = valid(path, token)
    inputs = [mutated(dice, dice.choice(whole)) for _ in range(150 * scale)]
    await attack(broker.http, inputs, results, before=not token)
    lines = log_lines()
    assert len(lines) <= LOG_LINES_MAX, lines
    assert max(map(len, lines), default=0) < 1000
    headers = {"Authorization": f"Bearer {AUTH.sign(Claims(ALL), 600)}"}
    async with httpx.AsyncClient(headers=headers) as http:
        answer = await http.put(f"{broker.http}/{JOURNAL}", content=b"still served")
    assert answer.status_code == 204


async def test_members(
    member: ConsumerFixture,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    results = matrix("HTTP of members x malformed, no token")
    inputs = [text_of(one, "") for one in requests("/v1/shards/list")]
    await attack(member.http, inputs, results, before=True)
    assert len(log_lines()) <= LOG_LINES_MAX, log_lines()
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{member.http}/debug/ready")).status_code == 200


async def test_a_body_that_breaks_while_it_is_answered(
    broker: BrokerFixture, log_lines: Callable[[], list[str]]
) -> None:
    """The answer has begun: it is cut off, and nothing is logged."""
    header = f"Authorization: Bearer {AUTH.sign(Claims(ALL), 600)}\r\n"
    async with httpx.AsyncClient() as http:
        headers = {"Authorization": header.partition(": ")[2].strip()}
        await http.put(f"{broker.http}/{JOURNAL}", content=b"some", headers=headers)
    reader, writer = await asyncio.open_connection(*addressed(broker.http))
    start = f"GET /{JOURNAL}?block=true HTTP/1.1\r\nHost: localhost\r\n{header}"
    writer.write(f"{start}Transfer-Encoding: chunked\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 206")
        await reader.readuntil(b"some")
        writer.write(b"not a chunk\r\n\r\n")
        await reader.read()
    writer.close()
    assert len(log_lines()) <= 1, log_lines()


@pytest.mark.parametrize("kind", ["silent", "trickling head", "trickling body", "endless head"])
async def test_connections_that_never_end(
    broker: BrokerFixture,
    kind: str,
    scale: int,
    monkeypatch: pytest.MonkeyPatch,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    """They are closed in time, and others are served meanwhile."""
    monkeypatch.setattr(http_connection, "HEAD_S", 0.2)
    monkeypatch.setattr(http_connection, "BODY_S", 0.2)
    monkeypatch.setattr(http_connection, "LINGER_S", 0.2)
    results = matrix(f"connections that never end x {kind}")
    count = 20 + 2 * scale  # In one loop with the broker: more would measure this machine.
    drop = {
        "silent": b"",
        "trickling head": b"a",
        "trickling body": b"!",
        "endless head": b"x: " + b"y" * 1000 + b"\r\n",
    }[kind]
    first = b""
    if kind == "trickling body":
        first = f"PUT /{JOURNAL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".encode()
    elif kind == "endless head":
        first = f"GET /{JOURNAL} HTTP/1.1\r\nHost: localhost\r\n".encode()

    async def hold() -> None:
        reader, writer = await asyncio.open_connection(*addressed(broker.http))
        writer.write(first)
        closed = asyncio.Event()

        async def read() -> None:
            try:
                while await reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass
            closed.set()

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while not closed.is_set():
                if drop and not writer.transport.is_closing():
                    writer.write(drop)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await closed.wait()
        writer.transport.abort()
        results.count("closed")

    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(hold()) for _ in range(count)]
        # From a thread: a client in the broker's loop may itself be too slow for limits of 0.2 s.
        with httpx.Client(timeout=WAIT_S) as http:
            while not all(one.done() for one in held):
                answer = await asyncio.to_thread(http.get, f"{broker.http}/debug/ready")
                assert answer.status_code == 200
                results.count("others served")
    assert results.outcomes["closed"] == count
    assert len(log_lines()) <= 2, log_lines()


async def test_large_bodies_without_a_token(
    broker: BrokerFixture,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    """The append is refused while its body is still coming."""
    results = matrix("large bodies, no token")
    async with httpx.AsyncClient() as http:
        for size in (1 << 16, 1 << 20, 1 << 22):
            for _ in range(5):
                answer = await http.put(f"{broker.http}/{JOURNAL}", content=bytes(size))
                assert answer.status_code == 401, answer.text
                results.count("refused")
    assert not log_lines()


@pytest.mark.parametrize("size", [7_100, 7_200, 9_000, 15_000, 17_000, 60_000])
async def test_long_tokens(broker: BrokerFixture, size: int) -> None:
    """gRPC would refuse some of them, at random, for another reason."""
    headers = {"Authorization": f"Bearer {'x' * size}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(headers=headers) as http:
        for verb, path in (("GET", JOURNAL), ("PUT", JOURNAL), ("POST", "v1/journals/list")):
            answer = await http.request(verb, f"{broker.http}/{path}")
            assert answer.status_code == 401, (verb, answer.text)


async def test_a_body_for_an_append_that_has_ended(broker: BrokerFixture) -> None:
    """What gRPC raises for a write then is no error: the outcome of the append is known."""
    call = broker.service.peers.byte_path(broker.endpoint).append(metadata=())
    with pytest.raises(grpc.aio.AioRpcError):
        await call

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"late", "more_body": False}

    request = Request({"type": "http", "method": "PUT", "headers": []}, receive)
    await _write_body(call, broker_pb2.AppendRequest(journal=JOURNAL), request.stream())
