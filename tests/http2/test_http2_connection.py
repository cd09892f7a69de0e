"""One connection of our HTTP/2 without a socket: beside another implementation, and against enemies."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h2.config
import h2.connection
import h2.events
import hpack
import pytest

from gazette.errors import GazetteError
from gazette.http2 import frames as fr
from gazette.http2.connection import (
    FIRST_BYTES,
    SHARED_BYTES,
    STREAM_BYTES,
    STREAMS_MAX,
    BytesLike,
    Http2Connection,
    Http2Stream,
)
from gazette.http2.flood_credit import CREDIT_MAX
from gazette.http2.frames import ConnectionFault, FaultCode
from gazette.http2.headers import Fields, RequestHead, encode_fields

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/b"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
]
HELLO = fr.PREFACE + fr.settings({})
ANSWER = encode_fields([(b":status", b"200")])


class Kept:
    """A listener that keeps what it gets. It consumes content at once, unless it ``holds``."""

    def __init__(self, stream: Http2Stream | None, *, holds: bool = False) -> None:
        self.stream = stream
        self.holds = holds
        self.content = bytearray()
        self.fields: list[Fields] = []
        self.ended = False
        self.fault: GazetteError | None = None
        self.rooms = 0
        self.rest = memoryview(b"")
        """What is sent as there is room."""

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        self.fields.append(fields)
        self.ended = ended

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        self.content += content
        self.ended = ended
        assert self.stream is not None
        if not self.holds:
            self.stream.consume(len(content))

    def on_fault(self, error: GazetteError) -> None:
        self.fault = error

    def on_room(self) -> None:
        self.rooms += 1
        self.send()

    def send(self) -> None:
        assert self.stream is not None
        if self.rest:
            self.rest = self.rest[self.stream.send(self.rest, ended=False) :]


class Server:
    """A connection of a server, its listeners, and what it has sent."""

    def __init__(self, *, holds: bool = False, streams_max: int = STREAMS_MAX) -> None:
        self.now = 0.0
        self.sent = bytearray()
        self.kept: dict[int, Kept] = {}
        self.holds = holds
        self.connection = Http2Connection(
            lambda content: self.write(content), lambda: self.now, self._accept, streams_max
        )
        self.connection.begin()

    def write(self, content: BytesLike) -> None:
        self.sent += content

    def _accept(self, stream: Http2Stream, request: RequestHead, ended: bool) -> Kept:
        kept = self.kept[stream.id] = Kept(stream, holds=self.holds)
        kept.ended = ended
        return kept

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Take what was sent, as type, flags, stream and payload of each frame."""
        result, at = [], 0
        while at < len(self.sent):
            length, kind, flags, stream = fr.read_head(self.sent, at)
            at += fr.HEAD_BYTES
            result.append((kind, flags, stream, bytes(self.sent[at : at + length])))
            at += length
        self.sent.clear()
        return result

    def codes(self, kind: int) -> list[FaultCode]:
        """Take what was sent, and return the codes of its RST_STREAM or GOAWAY frames."""
        at = 4 if kind == fr.GOAWAY else 0
        return [
            FaultCode(int.from_bytes(payload[at : at + 4], "big"))
            for sent, _, _, payload in self.frames()
            if sent == kind
        ]


def head_block(*more: tuple[str, str]) -> bytes:
    return bytes(hpack.Encoder().encode([*HEAD, *more]))


def headers(stream: int, flags: int = fr.END_HEADERS, block: bytes | None = None) -> bytes:
    return fr.frame(fr.HEADERS, flags, stream, head_block() if block is None else block)


def greeted(**options: Any) -> Server:
    server = Server(**options)
    server.connection.receive(HELLO)
    server.frames()
    return server


# Beside another implementation.


@pytest.mark.parametrize("seed", range(12))
def test_content_arrives_in_both_directions_however_it_is_cut(seed: int) -> None:
    """Of several streams, with windows of any size, and settings that change meanwhile."""
    rng = random.Random(seed)
    server = Server()
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    sizes = {2 * n + 1: rng.choice((0, 1, 70_000, 1_000_000)) for n in range(4)}
    up = {stream: rng.randbytes(size) for stream, size in sizes.items()}
    down = {stream: memoryview(rng.randbytes(rng.choice((0, 5, 300_000)))) for stream in sizes}
    expected = {stream: bytes(content) for stream, content in down.items()}
    got = {stream: bytearray() for stream in sizes}
    ended: set[int] = set()
    for stream in sizes:
        client.send_headers(stream, HEAD)
    left = dict(up)
    answering: set[int] = set()
    for _ in range(200_000):
        for stream in list(left):
            room = min(client.local_flow_control_window(stream), client.max_outbound_frame_size)
            part = left[stream][: rng.randrange(1, 20_000)][:room]
            last = len(part) == len(left[stream])
            if part or last:
                client.send_data(stream, part, end_stream=last)
                left[stream] = left[stream][len(part) :]
                if last:
                    del left[stream]
        data = client.data_to_send()
        while data:
            size = rng.choice((1, 7, 100, 30_000))
            server.connection.receive(data[:size])
            data = data[size:]
        for stream, kept in server.kept.items():
            opened = kept.stream
            assert opened is not None
            if stream not in answering:
                answering.add(stream)
                opened.send_fields(ANSWER, ended=False)
            if not opened.local_ended:
                down[stream] = down[stream][opened.send(down[stream], ended=True) :]
        for event in client.receive_data(bytes(server.sent)):
            if isinstance(event, h2.events.DataReceived):
                got[event.stream_id] += event.data or b""
                if event.stream_ended is not None:
                    continue
                if rng.random() < 0.9:
                    client.acknowledge_received_data(
                        event.flow_controlled_length or 0, event.stream_id
                    )
                else:
                    client.increment_flow_control_window(event.flow_controlled_length or 1)
                    client.increment_flow_control_window(
                        event.flow_controlled_length or 1, event.stream_id
                    )
            elif isinstance(event, h2.events.StreamEnded):
                ended.add(event.stream_id)
        server.sent.clear()
        if rng.random() < 0.01:
            client.update_settings({4: rng.choice((1, 1000, 65_535, 1 << 20))})
        if ended == set(sizes) and all(kept.ended for kept in server.kept.values()):
            break
    assert {stream: bytes(kept.content) for stream, kept in server.kept.items()} == up
    assert {stream: bytes(content) for stream, content in got.items()} == expected
    assert server.connection.streams == 0


@pytest.mark.parametrize("length", [5, 16_384, 50_000])
def test_content_sent_as_a_whole(length: int) -> None:
    """Regression: a socket that was full after the first frame lost the rest of what was to go at once."""
    content = random.Random(length).randbytes(length)
    server = greeted()
    server.connection.receive(headers(1))
    stream = server.kept[1].stream
    assert stream is not None
    write = server.write

    def full(content: BytesLike) -> None:
        write(content)
        server.connection.pause()

    server.write = full  # type: ignore[method-assign]
    assert stream.send_whole(content)
    frames = server.frames()
    assert {(kind, flags, of) for kind, flags, of, _ in frames} == {(fr.DATA, 0, 1)}
    assert b"".join(payload for *_, payload in frames) == content
    assert not stream.send_whole(content)  # The socket is full.
    server.connection.resume()
    assert stream.send_whole(b"x" * (65_535 - length))  # What is left of the peer's window.
    assert not stream.send_whole(b"x")
    assert server.kept[1].rooms == 0


# Rules of the protocol. h2spec has more of them: `make conformance` runs it.

LONG = (1).to_bytes(4, "big")


def test_the_reason_of_an_end_is_short() -> None:
    """What a peer sent is not sent back to it, however long it is; nor is a peer's text kept."""
    server = Server()
    with pytest.raises(ConnectionFault):
        server.connection.receive(HELLO + headers(1, block=b"\x00\x7f\xff\x7f" + b"x" * 16_000))
    (payload,) = [one for kind, _, _, one in server.frames() if kind == fr.GOAWAY]
    assert len(payload) <= 8 + fr.GOAWAY_TEXT_BYTES
    client = Http2Connection(lambda _: None, lambda: 0.0)
    long = fr.frame(fr.GOAWAY, 0, 0, bytes(7) + b"\x02" + b"x" * 16_000)
    with pytest.raises(ConnectionFault) as caught:
        client.receive(fr.settings({}) + long)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n12345678", FaultCode.PROTOCOL_ERROR),
        (fr.PREFACE + fr.ping(bytes(8)), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.frame(fr.DATA, 0, 1, b"x"), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.frame(fr.DATA, 0, 0, b"x"), FaultCode.PROTOCOL_ERROR),
        (HELLO + headers(2), FaultCode.PROTOCOL_ERROR),
        (HELLO + headers(3) + headers(1), FaultCode.STREAM_CLOSED),
        (HELLO + headers(1, 0) + fr.ping(bytes(8)), FaultCode.PROTOCOL_ERROR),
        (HELLO + headers(1, 0) + fr.frame(fr.CONTINUATION, 0, 3), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.frame(fr.CONTINUATION, 0, 1), FaultCode.PROTOCOL_ERROR),
        (HELLO + headers(1, fr.END_HEADERS, b"\x80"), FaultCode.COMPRESSION_ERROR),
        (HELLO + fr.frame(fr.RST_STREAM, 0, 1, LONG), FaultCode.PROTOCOL_ERROR),
        (HELLO + headers(1) + fr.frame(fr.RST_STREAM, 0, 1, b"x"), FaultCode.FRAME_SIZE_ERROR),
        (HELLO + fr.window_update(0, 0), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.window_update(1, 5), FaultCode.PROTOCOL_ERROR),
        (HELLO + 2 * fr.window_update(0, fr.WINDOW_MAX), FaultCode.FLOW_CONTROL_ERROR),
        (HELLO + fr.frame(fr.SETTINGS, 0, 0, b"x"), FaultCode.FRAME_SIZE_ERROR),
        (HELLO + fr.frame(fr.SETTINGS, 0, 1), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.frame(fr.SETTINGS, fr.ACK, 0, bytes(6)), FaultCode.FRAME_SIZE_ERROR),
        (HELLO + fr.settings({fr.ENABLE_PUSH: 2}), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.settings({fr.MAX_FRAME_SIZE: 1}), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.settings({fr.INITIAL_WINDOW_SIZE: 1 << 31}), FaultCode.FLOW_CONTROL_ERROR),
        (HELLO + fr.frame(fr.PING, 0, 0, b"x"), FaultCode.FRAME_SIZE_ERROR),
        (HELLO + fr.frame(fr.PING, 0, 1, bytes(8)), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.frame(fr.GOAWAY, 0, 0, b"x"), FaultCode.FRAME_SIZE_ERROR),
        (HELLO + fr.frame(fr.PUSH_PROMISE, 0, 1, bytes(4)), FaultCode.PROTOCOL_ERROR),
        (HELLO + fr.frame(fr.PRIORITY, 0, 0, bytes(5)), FaultCode.PROTOCOL_ERROR),
        (
            HELLO + headers(1) + fr.frame(fr.DATA, fr.PADDED, 1, b"\x05abc"),
            FaultCode.PROTOCOL_ERROR,
        ),
        (HELLO + fr.head(16_385, fr.DATA, 0, 1), FaultCode.FRAME_SIZE_ERROR),
    ],
)
def test_a_broken_rule_of_the_connection_ends_it(data: bytes, code: FaultCode) -> None:
    """With a reason for the peer, whether the bytes come at once or one by one."""
    for step in (len(data), 1):
        server = Server()
        with pytest.raises(ConnectionFault) as caught:
            for at in range(0, len(data), step):
                server.connection.receive(data[at : at + step])
        assert caught.value.code is code
        assert server.codes(fr.GOAWAY) == [code]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (fr.frame(fr.DATA, 0, 1, b"x"), FaultCode.STREAM_CLOSED),
        (headers(1, fr.END_HEADERS | fr.END_STREAM), FaultCode.STREAM_CLOSED),
        (fr.window_update(3, 0), FaultCode.PROTOCOL_ERROR),
        (fr.window_update(3, fr.WINDOW_MAX), FaultCode.FLOW_CONTROL_ERROR),
        (headers(3), FaultCode.PROTOCOL_ERROR),
        (headers(5, block=head_block(("connection", "close"))), FaultCode.PROTOCOL_ERROR),
        (fr.frame(fr.PRIORITY, 0, 3, b"x"), FaultCode.FRAME_SIZE_ERROR),
        (fr.frame(fr.PRIORITY, 0, 3, (3).to_bytes(4, "big") + b"x"), FaultCode.PROTOCOL_ERROR),
    ],
)
def test_a_broken_rule_of_a_stream_ends_that_stream(data: bytes, code: FaultCode) -> None:
    server = greeted()
    server.connection.receive(headers(1, fr.END_HEADERS | fr.END_STREAM) + headers(3))
    server.frames()
    server.connection.receive(data)
    assert server.codes(fr.RST_STREAM) == [code]
    server.connection.receive(headers(7))  # The connection goes on.
    assert 7 in server.kept


def test_content_is_as_long_as_its_head_says() -> None:
    for length, content in (("3", b"ab"), ("1", b"ab")):
        server = greeted()
        block = head_block(("content-length", length))
        server.connection.receive(headers(1, block=block))
        server.connection.receive(fr.frame(fr.DATA, fr.END_STREAM, 1, content))
        assert server.codes(fr.RST_STREAM) == [FaultCode.PROTOCOL_ERROR]
        assert server.kept[1].fault is not None


def test_padding_is_no_content_and_costs_window() -> None:
    server = greeted()
    server.connection.receive(headers(1))
    for _ in range(2 * STREAM_BYTES // 256):
        frame = fr.frame(fr.DATA, fr.PADDED, 1, b"\xf0" + b"0123456789" + bytes(0xF0))
        server.connection.receive(frame)
    assert bytes(server.kept[1].content[:20]) == b"01234567890123456789"
    assert len(server.kept[1].content) == 10 * (2 * STREAM_BYTES // 256)


# Bounds.


def test_a_peer_may_send_only_so_much_ahead() -> None:
    server = greeted(holds=True)
    server.connection.receive(headers(1))
    part = bytes(1 << 14)
    frame = fr.frame(fr.DATA, 0, 1, part)
    for _ in range(FIRST_BYTES // len(part)):
        server.connection.receive(frame)
    server.frames()
    server.connection.receive(frame)
    assert server.codes(fr.RST_STREAM) == [FaultCode.FLOW_CONTROL_ERROR]


def test_a_stream_that_is_consumed_gets_a_large_window() -> None:
    server = greeted()
    server.connection.receive(headers(1))
    server.connection.receive(fr.frame(fr.DATA, 0, 1, b"x"))
    grown = [one for one in server.frames() if one[0] == fr.WINDOW_UPDATE and one[2] == 1]
    assert [int.from_bytes(one[3], "big") for one in grown] == [STREAM_BYTES - FIRST_BYTES + 1]


def test_streams_that_nobody_reads_do_not_hold_up_the_others() -> None:
    server = greeted(holds=True)
    part = bytes(1 << 14)
    streams = range(1, 4 * SHARED_BYTES // FIRST_BYTES, 2)
    for stream in streams:
        server.connection.receive(headers(stream))
        for _ in range(FIRST_BYTES // len(part)):
            server.connection.receive(fr.frame(fr.DATA, 0, stream, part))
    assert not server.codes(fr.RST_STREAM)
    # The more streams are open, the less may be sent ahead of each.
    kept = server.kept[1]
    assert kept.stream is not None
    kept.stream.consume(len(kept.content))
    grown = [one for one in server.frames() if one[0] == fr.WINDOW_UPDATE]
    assert [(one[2], int.from_bytes(one[3], "big")) for one in grown] == [(1, FIRST_BYTES)]


def test_a_peer_on_a_slow_link_hears_of_this_side() -> None:
    server = greeted()
    server.connection.receive(headers(1))
    for _ in range(10):
        server.now += 2.0
        server.connection.receive(fr.frame(fr.DATA, 0, 1, bytes(1 << 14)))
    grown = [one for one in server.frames() if one[0] == fr.WINDOW_UPDATE and one[2] == 0]
    assert [int.from_bytes(one[3], "big") for one in grown] == 3 * [3 << 14]


def test_streams_whose_handlers_run_are_bounded_although_they_were_reset() -> None:
    server = greeted()
    server.connection.running = STREAMS_MAX - 1
    server.connection.receive(headers(1) + fr.rst_stream(1, FaultCode.CANCEL) + headers(3))
    assert server.codes(fr.RST_STREAM) == [FaultCode.REFUSED_STREAM]
    stream = server.kept[1].stream
    assert stream is not None
    stream.release()
    stream.release()
    server.connection.receive(headers(5))
    assert 5 in server.kept


PLAIN = [(name.encode(), value.encode()) for name, value in HEAD]
ENCODER = hpack.Encoder()
FIRST, AGAIN = ENCODER.encode(HEAD), ENCODER.encode(HEAD)
"""A block that fills the table, and one that refers to it."""


def begun(stream: int) -> bytes:
    return headers(stream, block=FIRST if stream == 1 else AGAIN)


def cancelled(stream: int, end: bytes) -> bytes:
    """Return a call of one byte, and a frame that ends it, by the peer or by us."""
    return begun(stream) + fr.frame(fr.DATA, 0, stream, b"x") + end


@pytest.mark.parametrize(
    "frame",
    [
        lambda n: begun(2 * n + 1) + fr.rst_stream(2 * n + 1, FaultCode.CANCEL),
        lambda n: cancelled(2 * n + 1, fr.rst_stream(2 * n + 1, FaultCode.CANCEL)),
        lambda n: cancelled(2 * n + 1, fr.window_update(2 * n + 1, 0)),
        lambda n: fr.ping(bytes(8)),
        lambda n: fr.settings({fr.INITIAL_WINDOW_SIZE: n}),
        lambda n: fr.window_update(0, 1),
        lambda n: fr.frame(fr.PRIORITY, 0, 1, bytes(5)),
        lambda n: fr.frame(0x77, 0, 0, b"unknown"),
        lambda n: (headers(1) if not n else b"") + fr.frame(fr.DATA, 0, 1),
        lambda n: headers(2 * n + 2001, block=encode_fields([*PLAIN, (b"connection", b"close")])),
    ],
)
def test_floods_end_the_connection(frame: Callable[[int], bytes]) -> None:
    """Also a rapid reset: a client that makes calls, and takes each back at once."""
    server = greeted()
    with pytest.raises(ConnectionFault) as caught:
        for number in range(2 * CREDIT_MAX):
            server.connection.receive(frame(number))
            for kept in server.kept.values():
                assert kept.stream is not None
                kept.stream.release()
            server.kept.clear()
    assert caught.value.code is FaultCode.ENHANCE_YOUR_CALM


def test_a_client_may_cancel_as_many_calls_as_it_likes_that_were_of_use() -> None:
    """Of each some bytes have moved. And one that was answered costs nothing."""
    server = greeted()
    for number in range(1, 2 * CREDIT_MAX, 2):
        server.connection.receive(begun(number) + fr.frame(fr.DATA, 0, number, bytes(64)))
        kept = server.kept.pop(number)
        assert kept.stream is not None
        kept.stream.send_fields(ANSWER, ended=False)
        if number % 4 == 1:
            kept.stream.send(memoryview(bytes(64)), ended=False)
            server.connection.receive(fr.rst_stream(number, FaultCode.CANCEL))
        else:
            kept.stream.send_fields(ANSWER, ended=True)
            server.connection.receive(fr.frame(fr.DATA, fr.END_STREAM, number))
        kept.stream.release()
        if number % 512 == 1:
            server.sent.clear()
            server.connection.receive(fr.window_update(0, 1 << 14))
    # Case: many that wait, and all at once.
    server = greeted(streams_max=9_500)
    numbers = range(1, 19_000, 2)
    server.connection.receive(b"".join(map(begun, numbers)))
    server.connection.receive(b"".join(fr.rst_stream(n, FaultCode.CANCEL) for n in numbers))
    assert server.connection.streams == 0


@pytest.mark.parametrize("size", [0, 16_000])
def test_header_blocks_that_go_on_end_the_connection(size: int) -> None:
    server = greeted()
    server.connection.receive(headers(1, 0))
    with pytest.raises(ConnectionFault) as caught:
        for _ in range(20):
            server.connection.receive(fr.frame(fr.CONTINUATION, 0, 1, bytes(size)))
    assert caught.value.code is FaultCode.ENHANCE_YOUR_CALM


def test_a_peer_that_takes_nothing_is_called_back_when_it_does() -> None:
    """A window of nothing, and settings that take it away while an answer is sent."""
    server = Server()
    server.connection.receive(fr.PREFACE + fr.settings({fr.INITIAL_WINDOW_SIZE: 10}) + headers(1))
    stream = server.kept[1].stream
    assert stream is not None
    stream.send_fields(ANSWER, ended=False)
    content = memoryview(bytes(25))
    assert stream.send(content, ended=True) == 10
    server.connection.receive(fr.settings({fr.INITIAL_WINDOW_SIZE: 0}))
    assert server.kept[1].rooms == 0
    server.connection.receive(fr.window_update(1, 15))
    assert server.kept[1].rooms == 1
    assert stream.send(content[10:], ended=True) == 5
    server.connection.receive(fr.window_update(1, 100))
    assert stream.send(content[15:], ended=True) == 10
    assert stream.local_ended


def test_content_stops_where_it_fills_the_socket() -> None:
    """The rest of a large message waits in its stream, and not in the memory of the socket."""
    server = Server()
    windows = fr.settings({fr.INITIAL_WINDOW_SIZE: 1 << 24}) + fr.window_update(0, 1 << 24)
    server.connection.receive(fr.PREFACE + windows)
    server.connection.receive(headers(1))
    stream = server.kept[1].stream
    assert stream is not None
    server.frames()
    write = server.write

    def fill(content: BytesLike) -> None:
        write(content)
        if len(server.sent) >= 1 << 17:
            server.connection.pause()

    server.write = fill  # type: ignore[method-assign]
    content = memoryview(bytes(1 << 22))
    sent = stream.send(content, ended=True)
    assert 1 << 16 < sent <= 1 << 17
    server.frames()
    server.write = write  # type: ignore[method-assign]
    server.connection.resume()
    assert server.kept[1].rooms == 1
    assert sent + stream.send(content[sent:], ended=True) == len(content)
    *_, (kind, flags, _, _) = server.frames()
    assert (kind, flags) == (fr.DATA, fr.END_STREAM)


# Work.


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of Python ``call`` runs: its work, whatever machine it is on."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        del frame, argument
        count += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
    return count


def with_streams(count: int, *, window: int = 0) -> Server:
    """Return a server of so many streams, each with an answer that its peer does not take."""
    server = Server(streams_max=count)
    hello = fr.PREFACE + fr.settings({fr.INITIAL_WINDOW_SIZE: window})
    server.connection.receive(hello + b"".join(headers(2 * n + 1) for n in range(count)))
    for kept in server.kept.values():
        kept.rest = memoryview(bytes(1 << 14))
        kept.send()
    server.frames()
    return server


def test_settings_cost_as_much_with_any_number_of_streams() -> None:
    """Also a frame of thousands of values: only the last one counts."""
    sizes = b"".join(
        fr.INITIAL_WINDOW_SIZE.to_bytes(2, "big") + size.to_bytes(4, "big")
        for size in (*range(500), 0)
    )
    frame = fr.frame(fr.SETTINGS, 0, 0, sizes)
    few, many = with_streams(2), with_streams(1_000)
    cost = lines_run(lambda: few.connection.receive(frame))
    assert lines_run(lambda: many.connection.receive(frame)) == cost
    assert all(kept.rooms == 0 for kept in many.kept.values())
    # Case: the windows have changed all the same.
    many.connection.receive(fr.settings({fr.INITIAL_WINDOW_SIZE: 3}))
    assert [kept.rest.nbytes for kept in many.kept.values()][:21] == [(1 << 14) - 3] * 21


@pytest.mark.parametrize("size", [1, 1 << 14])
def test_an_update_wakes_the_streams_that_can_go_on(size: int) -> None:
    """Not all that wait. And no stream goes twice before all others had their turn."""
    server = with_streams(1_000, window=1 << 20)
    server.connection.receive(fr.window_update(0, 1 << 14))
    left = [kept for kept in server.kept.values() if kept.rest]
    for kept in left:
        kept.rooms = 0
    for number in range(1, len(left), 3):
        server.connection.receive(3 * fr.window_update(0, size))
        assert sum(kept.rooms for kept in left) <= 2 * (number + 3)
    assert max(kept.rooms for kept in left) <= 2
    # Case: the update of a stream concerns that stream.
    other = with_streams(1_000, window=0)
    other.connection.receive(fr.window_update(301, 7))
    assert [of for of, kept in other.kept.items() if kept.rooms] == [301]


@pytest.mark.parametrize("seed", range(8))
def test_windows_are_kept_to_however_they_change(seed: int) -> None:
    """Of streams and of the connection, by updates and by settings, up and down."""
    rng = random.Random(seed)
    count, first, whole = 20, 100, 65_535
    server = with_streams(count, window=first)
    given = dict.fromkeys(server.kept, 0)
    sent = {of: (1 << 14) - kept.rest.nbytes for of, kept in server.kept.items()}
    for _ in range(2_000):
        number = rng.choice(list(given))
        match rng.randrange(4):
            case 0:
                first = rng.choice((0, 1, 50, 200, 1_000))
                frame = fr.settings({fr.INITIAL_WINDOW_SIZE: first})
            case 1:
                step = rng.choice((1, 10, 300))
                given[number] += step
                frame = fr.window_update(number, step)
            case 2:
                step = rng.choice((1, 100, 3_000))
                whole += step
                frame = fr.window_update(0, step)
            case _:
                kept = server.kept[number]
                if not kept.rest:
                    kept.rest = memoryview(bytes(rng.choice((1, 200, 5_000))))
                    kept.send()
                frame = fr.ping(bytes(8))
        server.connection.receive(frame)
        for kind, _, of, payload in server.frames():
            if kind == fr.DATA:
                sent[of] += len(payload)
        total = sum(sent.values())
        assert total <= whole
        for of, kept in server.kept.items():
            room = first + given[of] - sent[of]
            assert kept.rest.nbytes == 0 or room <= 0 or total == whole, of
            assert kept.stream is not None
            assert kept.stream.window == room


def test_work_that_is_not_given_is_left_for_later() -> None:
    """Of frames, heads and long header blocks; and what is left is handled as if it had just arrived."""
    server = greeted()
    calls = b"".join(
        headers(2 * n + 1, block=head_block(("x", str(n)))) + fr.frame(fr.DATA, 1, 2 * n + 1, b"ab")
        for n in range(100)
    )
    turns, begun = 0, 0
    server.connection.receive(calls[:-5], 20)
    while server.connection.has_backlog:
        assert 0 < len(server.kept) - begun <= 5
        begun = len(server.kept)
        turns += 1
        server.connection.receive(b"", 20)
    assert turns >= 20
    server.connection.keep(calls[-5:])
    assert server.connection.has_backlog
    server.connection.receive(b"", 20)
    assert not server.connection.has_backlog
    assert [bytes(kept.content) for kept in server.kept.values()] == [b"ab"] * 100
    assert all(kept.ended for kept in server.kept.values())
    # Case: a long block is as much work as many frames.
    server.connection.receive(headers(301, block=head_block(("x", "y" * 3_000))) + headers(303), 20)
    assert server.connection.has_backlog


def test_nothing_is_sent_while_the_socket_takes_nothing() -> None:
    server = greeted()
    server.connection.receive(headers(1))
    stream = server.kept[1].stream
    assert stream is not None
    server.connection.pause()
    assert stream.send(memoryview(b"x"), ended=False) == 0
    server.connection.receive(fr.window_update(1, 5))
    assert server.kept[1].rooms == 0
    server.connection.resume()
    assert server.kept[1].rooms == 1


def test_what_is_lost_ends_every_stream() -> None:
    server = greeted()
    server.connection.receive(headers(1) + headers(3))
    server.connection.receive(fr.rst_stream(1, FaultCode.CANCEL))
    assert server.kept[1].fault is not None
    error = GazetteError("gone")
    server.connection.lose(error)
    assert server.kept[3].fault is error
    assert server.connection.streams == 0


def test_a_server_that_drains_refuses_what_clients_begin_late() -> None:
    server = greeted()
    server.connection.drain()
    server.connection.receive(headers(1))
    assert 1 in server.kept
    server.connection.drain(last=True)
    server.connection.receive(headers(3))
    assert server.codes(fr.RST_STREAM) == [FaultCode.REFUSED_STREAM]


# A client of our own.


def test_a_client_may_reset_many_streams_whose_content_is_on_its_way() -> None:
    sent = bytearray()
    client = Http2Connection(sent.extend, lambda: 0.0)
    client.begin()
    client.receive(fr.settings({}))
    streams = [client.open(head_block(), Kept(None), ended=True) for _ in range(2_000)]
    for stream in streams:
        stream.reset(FaultCode.CANCEL)
        stream.release()
    sent.clear()
    for stream in streams:
        client.receive(20 * fr.frame(fr.DATA, 0, stream.id, b"x"))
    assert not sent


def test_a_client_and_a_server_of_ours() -> None:
    server = Server()
    sent = bytearray()
    client = Http2Connection(sent.extend, lambda: 0.0)
    client.begin()
    kept = Kept(None)
    block = encode_fields([(name.encode(), value.encode()) for name, value in HEAD])
    stream = client.open(block, kept, ended=False)
    kept.stream = stream
    assert stream.send(memoryview(b"question"), ended=True) == 8
    server.connection.receive(bytes(sent))
    theirs = server.kept[1]
    assert bytes(theirs.content) == b"question"
    assert theirs.ended
    assert theirs.stream is not None
    theirs.stream.send_fields(ANSWER, ended=False)
    theirs.stream.send(memoryview(b"answer"), ended=False)
    theirs.stream.send_fields(encode_fields([(b"grpc-status", b"0")]), ended=True)
    client.receive(bytes(server.sent))
    assert bytes(kept.content) == b"answer"
    assert kept.fields == [[(b":status", b"200")], [(b"grpc-status", b"0")]]
    assert (client.streams, server.connection.streams) == (0, 0)
    # Case: calls that a server which drains has not taken may be made again.
    refused = Kept(None)
    client.open(block, refused, ended=True)
    client.receive(fr.goaway(1, FaultCode.NO_ERROR))
    assert refused.fault is not None
    with pytest.raises(GazetteError):
        client.open(block, kept, ended=True)
