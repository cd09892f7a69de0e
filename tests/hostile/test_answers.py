"""Servers that answer our client with anything: each call ends by a status in time, and others go on."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import pytest

from gazette.client.rpc.errors import map_errors
from gazette.errors import GazetteError, printable
from gazette.http2 import frames as fr
from gazette.http2.grpc_client import Http2Channel
from gazette.http2.headers import encode_fields
from gazette.http2.messages import prefixed
from gazette.http2.metadata import EOF
from gazette.protocol.pb import broker_pb2
from gazette.runtime.tasks import TaskScope
from tests.hostile.conftest import Matrix, mutated
from tests.raw_server import raw_server
from tests.support.instant_clock import eventually

SCRIPTS: Final = 144
AT_ONCE: Final = 48
CALL_S: Final = 0.3
"""Seconds that a call may take: its time limit."""
WAIT_S: Final = 30.0
OPTIONS: Final = [
    ("grpc.initial_reconnect_backoff_ms", 1),
    ("grpc.max_reconnect_backoff_ms", 5),
    ("grpc.max_receive_message_length", 1 << 20),
]
LIST: Final = "/protocol.Journal/List"
ENDED: Final = fr.END_HEADERS | fr.END_STREAM
HEAD: Final = encode_fields([(b":status", b"200"), (b"content-type", b"application/grpc")])
OK: Final = encode_fields([(b"grpc-status", b"0")])
NAMES: Final = (
    b":status",
    b":path",
    b"content-type",
    b"grpc-encoding",
    b"grpc-status",
    b"grpc-message",
    b"connection",
    b"key",
    b"key-bin",
    b"Upper",
    b"n\xc3\xa4me",
    b"\xff",
    b"",
    b"a b",
    b"line\n",
)
BOMB: Final = b"\x01" + prefixed(gzip.compress(bytes(3 << 20)))[1:]
VALUES: Final = (
    b"",
    b"0",
    b"1",
    b"7",
    b"16",
    b"17",
    b"-1",
    b"00",
    b"0x7",
    b"\xb2",
    b"9" * 5_000,
    b"100",
    b"200",
    b"503",
    b"application/grpc",
    b"application/grpc+json",
    b"gzip",
    b"deflate",
    b"x" * 300,
    b"\x1b]0;owned\x07\x1b[2J",
    b"%1B%5B31m%00%0a%E2%80%AE%",
    b"%F0%9F%E2%82%C0%80%ed%a0%80",
    b"\r\nX: y",
    b"\x00",
    b"=====",
    b"%" * 60_000,
)


def fields(dice: random.Random) -> bytes:
    given = [(dice.choice(NAMES), dice.choice(VALUES)) for _ in range(dice.randrange(5))]
    whole = [(b":status", b"200"), (b"content-type", b"application/grpc")]
    status = [(b"grpc-status", dice.choice(VALUES)), (b"grpc-message", dice.choice(VALUES))]
    chosen = [*(whole if dice.random() < 0.6 else []), *given]
    return encode_fields(chosen + (status if dice.random() < 0.5 else []))


def block(dice: random.Random) -> bytes:
    if dice.random() < 0.8:
        return fields(dice)[:16_384]
    return dice.choice((dice.randbytes(40), b"\x3f\xff\xff\xff\xff\x0f", b"\x82" * 9_000, b""))


def content(dice: random.Random) -> bytes:
    return dice.choice(
        (
            b"",
            prefixed(b""),
            prefixed(dice.randbytes(20)),
            prefixed(b"x") * dice.randrange(1_000),
            b"\x00\xff\xff\xff\xff",
            b"\x01" + prefixed(dice.randbytes(9))[1:],
            BOMB,
            dice.randbytes(dice.randrange(50)),
        )
    )[:16_384]


def one_frame(dice: random.Random) -> bytes:
    """Draw a frame, mostly of the stream of the first call."""
    stream = dice.choice((1, 1, 1, 1, 1, 3, 2, 0, fr.WINDOW_MAX))
    flags = dice.choice((0, fr.END_STREAM, fr.END_HEADERS, ENDED, fr.PADDED | 5, 0xFF))
    number = dice.choice((0, 1, 2, 7, 0x7FFFFFFF, 0xFFFFFFFF, dice.getrandbits(32)))
    long = number.to_bytes(4, "big")
    kind = dice.randrange(14)
    if kind < 4:
        return fr.frame(fr.HEADERS, dice.choice((fr.END_HEADERS, ENDED)), 1, block(dice))
    if kind < 7:
        return fr.frame(fr.DATA, flags & ~fr.PADDED, 1, content(dice))
    if kind == 7:
        setting = dice.randrange(8).to_bytes(2, "big") + long
        return fr.frame(fr.SETTINGS, 0, 0, setting * dice.choice((1, 3)))
    if kind == 8:
        text = dice.choice((b"", b"too_many_pings", b"\x1b[2J\n", dice.randbytes(9_000)))
        return fr.frame(fr.GOAWAY, 0, 0, dice.choice((bytes(4), long)) + long + text)
    if kind == 9:
        return fr.frame(fr.RST_STREAM, 0, stream, long)
    if kind == 10:
        return fr.frame(fr.WINDOW_UPDATE, 0, stream, long)
    if kind == 11:
        head = fr.frame(fr.HEADERS, 0, 1, block(dice))
        return head + fr.frame(fr.CONTINUATION, flags, stream, block(dice))
    if kind == 12:
        return fr.frame(fr.PING, flags & fr.ACK, 0, bytes(8)) * dice.choice((1, 300))
    return fr.frame(dice.randrange(256), flags, stream, dice.randbytes(dice.randrange(40)))


def script(dice: random.Random) -> tuple[bytes, bool]:
    """Draw what a server sends to a call, and whether it then closes the connection."""
    whole = [
        fr.frame(fr.HEADERS, fr.END_HEADERS, 1, HEAD),
        fr.frame(fr.DATA, 0, 1, content(dice)),
        fr.frame(fr.HEADERS, ENDED, 1, fields(dice)[:16_384]),
    ]
    sent = [one_frame(dice) for _ in range(dice.randrange(5))]
    if dice.random() < 0.5:
        sent[dice.randrange(len(sent) + 1) : 0] = whole[: dice.randrange(1, 4)]
    data = b"".join(sent)
    return (mutated(dice, data) if dice.random() < 0.3 else data), dice.random() < 0.3


class Liar:
    """A server that answers the first call of each connection by the script, until it turns honest."""

    def __init__(self, sent: bytes, closes: bool) -> None:
        self.sent = sent
        self.closes = closes
        self.honest = False
        self.lied = False
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(fr.settings({}))
        seen, stream = b"", 1
        try:
            while received := await reader.read(1 << 16):
                seen += received
                if LIST.encode() not in seen:
                    continue
                seen = b""
                if not self.honest:
                    writer.write(self.sent)
                    self.lied = True
                    if self.closes:
                        return
                    continue
                writer.write(fr.frame(fr.HEADERS, fr.END_HEADERS, stream, HEAD))
                writer.write(fr.frame(fr.DATA, 0, stream, prefixed(b"")))
                writer.write(fr.frame(fr.HEADERS, ENDED, stream, OK))
                stream += 2
        except ConnectionError:
            return
        finally:
            writer.close()


@asynccontextmanager
async def lying(sent: bytes, closes: bool) -> AsyncIterator[tuple[Liar, Http2Channel]]:
    liar = Liar(sent, closes)
    async with (
        raw_server(liar.serve) as server,
        Http2Channel(server.target, None, OPTIONS) as channel,
    ):
        yield liar, channel


class Caller:
    closed = False


async def outcome(calling: Any) -> str:
    """Return the code of our error, or OK. Nothing else may come out."""
    failure: GazetteError | None = None
    try:
        async with asyncio.timeout(WAIT_S):
            with map_errors("List", Caller()):
                await calling
    except GazetteError as error:
        failure = error
    if failure is None:
        return "OK"
    assert printable(str(failure), one_line=True) == str(failure), repr(failure)
    code = grpc.StatusCode[failure.facts["code"]]
    assert code is not grpc.StatusCode.OK
    return code.name


async def read_all(call: Any) -> None:
    while await call.read() is not EOF:
        pass


async def lie(dice: random.Random, results: Matrix) -> None:
    sent, closes = script(dice)
    decode = broker_pb2.ListResponse.FromString
    async with lying(sent, closes) as (liar, channel):
        unary = channel.unary_unary(LIST, None, decode)
        stream = channel.unary_stream(LIST, None, decode)
        results.count(await outcome(unary(b"", timeout=CALL_S)))
        results.count(await outcome(read_all(stream(b"", timeout=CALL_S))))
        liar.honest = True
        # A connection that is still there may be at any place of its script: it is replaced.
        ready = grpc.ChannelConnectivity.READY
        if liar.closes and liar.lied:  # A call may end before its connection does.
            await eventually(lambda: channel.get_state() is not ready)
        if channel.get_state() is not ready:
            call = unary(b"", timeout=WAIT_S, wait_for_ready=True)
            assert await outcome(call) == "OK", sent[:2_000]
        assert liar.connections <= 5


async def test_whatever_a_server_answers(
    dice: random.Random,
    scale: int,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    """No answer raises in the loop, or leaves a call without a status. A broken connection is replaced."""
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    results = matrix("answers of servers x calls of our client")
    seeds = [dice.getrandbits(64) for _ in range(SCRIPTS * scale)]
    for at in range(0, len(seeds), AT_ONCE):
        async with TaskScope("liars") as scope:
            for seed in seeds[at : at + AT_ONCE]:
                scope.spawn(lie(random.Random(seed), results), name=f"liar {seed}")
        assert not raised, raised
    assert not log_lines()


def trailers(*fields: tuple[bytes, bytes]) -> bytes:
    return fr.frame(fr.HEADERS, ENDED, 1, encode_fields(list(fields)))


HEADERS: Final = fr.frame(fr.HEADERS, fr.END_HEADERS, 1, HEAD)
GZIPPED: Final = fr.frame(
    fr.HEADERS, fr.END_HEADERS, 1, HEAD + encode_fields([(b"grpc-encoding", b"gzip")])
)
KNOWN: Final = [
    (HEADERS + fr.frame(fr.DATA, 0, 1, prefixed(b"")) + trailers((b"grpc-status", b"0")), "OK"),
    (HEADERS + trailers((b"grpc-status", b"7")), "PERMISSION_DENIED"),
    (HEADERS + trailers((b"grpc-status", b"-1")), "UNKNOWN"),
    (
        GZIPPED + fr.frame(fr.DATA, 0, 1, BOMB) + trailers((b"grpc-status", b"0")),
        "RESOURCE_EXHAUSTED",
    ),
    (fr.frame(fr.RST_STREAM, 0, 1, bytes([0, 0, 0, fr.FaultCode.PROTOCOL_ERROR])), "INTERNAL"),
    (fr.frame(fr.PING, 0, 0, b"short"), "UNAVAILABLE"),
]


@pytest.mark.parametrize(("sent", "code"), KNOWN, ids=[code for _, code in KNOWN])
async def test_an_answer_is_understood(sent: bytes, code: str) -> None:
    """The liar's script decides how a call ends: else the test above would show nothing."""
    async with lying(sent, closes=False) as (_, channel):
        call = channel.unary_unary(LIST, None, broker_pb2.ListResponse.FromString)
        assert await outcome(call(b"", timeout=10.0)) == code


@pytest.mark.parametrize("given_up", [b"", fr.goaway(0, fr.FaultCode.ENHANCE_YOUR_CALM, "calm")])
async def test_a_server_that_ends_each_connection_at_once(given_up: bytes) -> None:
    """Calls fail meanwhile, and connections are made with a back-off: as if none could be made."""
    connections = 0

    async def goodbye(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(fr.settings({}) + (given_up or fr.goaway(0, fr.FaultCode.NO_ERROR)))
        await reader.read(1 << 16)

    options = [("grpc.initial_reconnect_backoff_ms", 200)]
    async with (
        raw_server(goodbye) as server,
        Http2Channel(server.target, None, options) as channel,
    ):
        call, codes = channel.unary_unary(LIST), set()
        until = asyncio.get_running_loop().time() + 1.0
        waiting = call(b"", wait_for_ready=True, timeout=1.0)
        while asyncio.get_running_loop().time() < until:
            codes.add(await outcome(call(b"", timeout=5.0)))
        assert codes == {"UNAVAILABLE"}
        assert await outcome(waiting) == "DEADLINE_EXCEEDED"
    assert connections <= 6
