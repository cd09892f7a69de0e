"""What HTTP/2 is attacked by, against a broker's port: attackers are cut off, and others are served."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Final

import httpx
import pytest

from gazette.auth import Claims
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.http2 import frames as fr
from gazette.http2 import socket as http2_socket
from gazette.http2.frames import FaultCode
from gazette.http2.headers import encode_fields
from gazette.net.grpc import server_connection
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.hostile.conftest import Matrix
from tests.support.instant_clock import eventually
from tests.test_authorization import ALL, AUTH, JOURNAL, broker

__all__ = ["broker"]

CLOCK: Final = SystemClock()
WAIT_S: Final = 30.0
LOG_LINES_MAX: Final = 5
BATCH: Final = 500
"""Frames that an attacker sends at a time."""
FRAMES_MAX: Final = 50_000
HELLO: Final = fr.PREFACE + fr.settings({})
TOKEN_S: Final = 86_400.0
"""It is signed when the tests are listed, and holds while they run, however long."""
TOKEN: Final = ("authorization", f"Bearer {AUTH.sign(Claims(ALL), TOKEN_S)}")


def head(method: str = "List", *more: tuple[str, str], token: bool = True) -> bytes:
    """Return the header block of a call. It adds nothing to the peer's table."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/protocol.Journal/{method}"),
        ("content-type", "application/grpc"),
        *((TOKEN,) if token else ()),
        *more,
    ]
    return encode_fields((name.encode(), value.encode()) for name, value in fields)


def begun(stream: int, block: bytes, flags: int = fr.END_HEADERS) -> bytes:
    return fr.frame(fr.HEADERS, flags, stream, block)


CALL: Final = head()
REQUEST: Final = bytes(5)
"""An empty message: a call of `List` for all journals."""


def rapid_reset(n: int) -> bytes:
    stream = 2 * n + 1
    return begun(stream, CALL) + fr.rst_stream(stream, FaultCode.CANCEL)


def continuations(n: int) -> bytes:
    return fr.frame(fr.CONTINUATION, 0, 1) if n else begun(1, CALL, 0)


def empty_data(n: int) -> bytes:
    return (b"" if n else begun(1, head("Append"))) + fr.frame(fr.DATA, 0, 1)


def bomb(n: int) -> bytes:
    """Send a field of 4,000 bytes in the table, and then blocks of references to it."""
    name = b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4_000
    return begun(2 * n + 1, CALL + (b"\xbe" * 1_000 if n else name))


FLOODS: Final[dict[str, tuple[Callable[[int], bytes], FaultCode]]] = {
    "rapid reset": (rapid_reset, FaultCode.ENHANCE_YOUR_CALM),
    "continuations": (continuations, FaultCode.ENHANCE_YOUR_CALM),
    "settings": (lambda _: fr.settings({}), FaultCode.ENHANCE_YOUR_CALM),
    "pings": (lambda _: fr.ping(bytes(8)), FaultCode.ENHANCE_YOUR_CALM),
    "empty content": (empty_data, FaultCode.ENHANCE_YOUR_CALM),
    "priorities": (lambda _: fr.frame(fr.PRIORITY, 0, 1, bytes(5)), FaultCode.ENHANCE_YOUR_CALM),
    "small updates of windows": (lambda _: fr.window_update(0, 1), FaultCode.ENHANCE_YOUR_CALM),
    "header bomb": (bomb, FaultCode.ENHANCE_YOUR_CALM),
    "large window": (
        lambda n: b"" if n else fr.window_update(0, fr.WINDOW_MAX),
        FaultCode.FLOW_CONTROL_ERROR,
    ),
    "large windows by settings": (
        lambda n: (
            b""
            if n
            else begun(1, head("Append"))
            + fr.window_update(1, 1 << 30)
            + fr.settings({fr.INITIAL_WINDOW_SIZE: fr.WINDOW_MAX})
        ),
        FaultCode.FLOW_CONTROL_ERROR,
    ),
}


async def connect(broker: BrokerFixture) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(broker.endpoint)
    return await asyncio.open_connection(url.host, url.port)


def frames_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and payload of the frames in ``data``."""
    at = 0
    while at + fr.HEAD_BYTES <= len(data):
        length, kind, _, _ = fr.read_head(data, at)
        at += fr.HEAD_BYTES
        yield kind, data[at : at + length]
        at += length


def reasons(answer: bytes) -> list[FaultCode]:
    """Return the codes of the GOAWAY frames in ``answer``."""
    return [
        FaultCode(int.from_bytes(payload[4:8], "big"))
        for kind, payload in frames_of(answer)
        if kind == fr.GOAWAY
    ]


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return what arrives until the connection ends, in whatever way."""
    answer = b""
    try:
        while part := await reader.read(1 << 16):
            answer += part
    except ConnectionError:
        pass
    return answer


async def others_are_served(broker: BrokerFixture) -> None:
    async with asyncio.timeout(WAIT_S):
        appended = await broker.client.append(AppendParams(JOURNAL), b"x")
        assert appended.commit.end > appended.commit.begin


async def nothing_is_left(broker: BrokerFixture) -> None:
    """Wait until only connections of the broker's own clients are left, and no call of the attackers runs."""
    server = broker.service.server.grpc
    async with asyncio.timeout(WAIT_S):
        while any(one.is_busy or one.is_closing for one in server.connections):
            await CLOCK.sleep(0.01)


@pytest.mark.parametrize("kind", FLOODS)
async def test_floods(
    broker: BrokerFixture,
    kind: str,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    results = matrix(f"HTTP/2 x {kind}")
    frame, expected = FLOODS[kind]
    reader, writer = await connect(broker)
    writer.write(HELLO)
    sent = 0
    async with asyncio.timeout(WAIT_S), TaskScope("answers") as scope:
        answer = scope.spawn(rest_of(reader), name="answer")
        while not answer.done() and sent < FRAMES_MAX:
            writer.write(b"".join(frame(n) for n in range(sent, sent + BATCH)))
            sent += BATCH
            results.count("frames sent", BATCH)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await CLOCK.sleep(0)
        # A socket that is closed with bytes unread is reset: the reason may be lost with that.
        found = reasons(await answer)
        assert found in ([expected], []), found
    results.count("cut off")
    writer.transport.abort()
    await others_are_served(broker)
    await nothing_is_left(broker)
    assert len(log_lines()) <= LOG_LINES_MAX, log_lines()


@pytest.mark.parametrize("window", [0, 1])
async def test_windows_that_take_nothing(
    broker: BrokerFixture,
    window: int,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    """The answers of many calls wait. What they hold ends with the connection."""
    results = matrix("HTTP/2 x windows that take nothing")
    calls = 200
    reader, writer = await connect(broker)
    writer.write(fr.PREFACE + fr.settings({fr.INITIAL_WINDOW_SIZE: window}))
    for n in range(calls):
        stream = 2 * n + 1
        writer.write(begun(stream, CALL) + fr.frame(fr.DATA, fr.END_STREAM, stream, REQUEST))
    answer, heads = b"", 0
    async with asyncio.timeout(WAIT_S):
        while heads < calls:
            answer += await reader.read(1 << 16)
            heads = sum(kind == fr.HEADERS for kind, _ in frames_of(answer))
    content = sum(len(payload) for kind, payload in frames_of(answer) if kind == fr.DATA)
    assert content <= calls * window
    connections = broker.service.server.grpc.connections
    assert sum(one.http2.running for one in connections) >= calls
    results.count("held", calls)
    await others_are_served(broker)
    writer.transport.abort()
    await nothing_is_left(broker)
    assert len(log_lines()) <= LOG_LINES_MAX, log_lines()


async def test_lists_that_are_not_taken_share_what_they_list(
    broker: BrokerFixture, matrix: Callable[[str], Matrix]
) -> None:
    """Their answers wait, and each holds a page of its own, but the journals only once."""
    results = matrix("HTTP/2 x lists that are not taken")
    calls = 300
    names = [f"listed/{n:03}" for n in range(100)]
    specs = [JournalChange(upsert=journal_spec(name, replication=1)) for name in names]
    await broker.client.apply_journals(specs)
    await broker.settled(names[-1])
    _, writer = await connect(broker)
    tracemalloc.start()
    try:
        writer.write(fr.PREFACE + fr.settings({fr.INITIAL_WINDOW_SIZE: 0}))
        for n in range(calls):
            stream = 2 * n + 1
            writer.write(begun(stream, CALL) + fr.frame(fr.DATA, fr.END_STREAM, stream, REQUEST))
        server = broker.service.server.grpc
        await eventually(lambda: len(server._memory._held) >= calls)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < calls * 28_000
    results.count("held", calls)
    await others_are_served(broker)
    writer.transport.abort()
    await nothing_is_left(broker)
    await eventually(lambda: server._memory.total == 0)


@pytest.mark.parametrize("kind", ["nothing", "preface", "half a block", "half a frame"])
async def test_connections_that_never_end(
    broker: BrokerFixture,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    """They get few bytes at a time for ever, and are ended in time."""
    monkeypatch.setattr(server_connection, "FIRST_FRAMES_S", 0.2)
    monkeypatch.setattr(server_connection, "KEEPALIVE_S", 0.2)
    monkeypatch.setattr(server_connection, "IDLE_S", 0.4)
    results = matrix(f"HTTP/2 x connections that never end, {kind}")
    first, drop = {
        "nothing": (b"", b""),
        "preface": (fr.PREFACE[:4], b""),
        "half a block": (HELLO + begun(1, CALL, 0), b""),
        "half a frame": (HELLO + fr.head(1 << 14, fr.HEADERS, fr.END_HEADERS, 1), b"\x00"),
    }[kind]
    reader, writer = await connect(broker)
    writer.write(first)
    async with asyncio.timeout(WAIT_S), TaskScope("answers") as scope:
        answer = scope.spawn(rest_of(reader), name="answer")
        while not answer.done():
            if drop:
                writer.write(drop)
            await asyncio.wait((answer,), timeout=0.02)
    results.count("ended")
    writer.transport.abort()
    await others_are_served(broker)
    assert len(log_lines()) <= LOG_LINES_MAX, log_lines()


async def test_a_client_that_reads_no_answers(
    broker: BrokerFixture, monkeypatch: pytest.MonkeyPatch, matrix: Callable[[str], Matrix]
) -> None:
    """Its calls are refused at once. Their answers are kept up to a bound, and then it is cut off."""
    monkeypatch.setattr(http2_socket, "UNREAD_BYTES_MAX", 1 << 17)
    results = matrix("HTTP/2 x answers that are not read")
    unknown = head("None", token=False)
    _, writer = await connect(broker)
    writer.write(HELLO)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    calls = 0
    try:
        async with asyncio.timeout(WAIT_S):
            while not writer.transport.is_closing():
                for n in range(calls, calls + BATCH):
                    writer.write(begun(2 * n + 1, unknown, fr.END_HEADERS | fr.END_STREAM))
                calls += BATCH
                await writer.drain()
    except ConnectionError:
        pass
    results.count("calls refused", calls)
    results.count("cut off")
    writer.transport.abort()
    await others_are_served(broker)
