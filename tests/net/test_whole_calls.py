"""Calls that arrive as a whole are offered to a function of their method, and need no task."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette.http2 import frames as fr
from gazette.http2.connection import BEGIN_WORK, Http2Connection
from gazette.http2.headers import Fields, HeaderDecoder, encode_fields
from gazette.http2.messages import prefixed
from gazette.http2.metadata import status_of
from gazette.net.grpc.grpc_call import GrpcCall
from gazette.net.grpc.turns import SHARE
from gazette.net.grpc.whole_call import WHOLE_BYTES_MAX, WholeCall
from gazette.runtime.clock import SystemClock
from gazette.runtime.metrics import GRPC_SERVER_HANDLED, GRPC_SERVER_STARTED
from gazette.runtime.tasks import TaskScope
from tests.net.test_http2_server import METHOD, Served, requests
from tests.support.loop_time import LoopTime
from tests.support.metrics import value_of

LENGTH = f"{METHOD}Length"
STARTED = GRPC_SERVER_STARTED.labels("client_stream", "test.Service", "Length")


class Taker:
    """Takes calls of Length, and answers with what ``serve`` makes of each."""

    def __init__(self) -> None:
        self.offered: list[list[list[bytes] | None]] = []
        self.calls: list[WholeCall] = []
        self.gone = 0
        self.serve: Callable[[WholeCall], bool] = self.answer

    def take(self, calls: Sequence[WholeCall]) -> list[WholeCall]:
        self.offered.append([call.messages() for call in calls])
        self.calls += calls
        return [call for call in calls if not self.serve(call)]

    def answer(self, call: WholeCall) -> bool:
        messages = call.messages()
        if messages is None:
            return False
        call.answer(b"whole %d" % sum(map(len, messages)))
        return True

    def keep(self, call: WholeCall) -> bool:
        call.on_gone = self._on_gone
        return True

    def _on_gone(self) -> None:
        self.gone += 1


@pytest.fixture
async def taker() -> Taker:
    return Taker()


@pytest.fixture
async def served(taker: Taker) -> AsyncIterator[Served]:
    served = Served()
    served.server.take_whole_calls(LENGTH, taker.take)
    await served.server.start()
    yield served
    for writer in WRITERS:
        writer.close()
    WRITERS.clear()
    await served.channel.close()
    await served.server.stop(0)


WRITERS: list[asyncio.StreamWriter] = []
"""The connections of a test, to be closed at its end."""


class Wire:
    """A client of frames: what it sends arrives in one piece."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._next = 1
        self.out = b""
        self.pings = self.answered = 0
        self.answers: dict[int, bytes] = {}
        self.trailers: dict[int, bytes] = {}

    async def connect(self, window: int = fr.WINDOW_MAX) -> Wire:
        self.reader, self.writer = await self.served.raw()
        WRITERS.append(self.writer)
        self.writer.write(fr.PREFACE + fr.settings({fr.INITIAL_WINDOW_SIZE: window}))
        return self

    def call(self, content: bytes, *extra: tuple[bytes, bytes], ended: bool = True) -> int:
        stream, self._next = self._next, self._next + 2
        head = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", LENGTH.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *extra,
        ]
        self.out += fr.frame(fr.HEADERS, fr.END_HEADERS, stream, encode_fields(head))
        flags = fr.END_STREAM if ended else 0
        for at in range(0, len(content), fr.FRAME_BYTES_MIN):
            part = content[at : at + fr.FRAME_BYTES_MIN]
            last = at + len(part) == len(content)
            self.out += fr.frame(fr.DATA, flags if last else 0, stream, part)
        return stream

    def send(self, frame: bytes = b"") -> None:
        self.writer.write(self.out + frame)
        self.out = b""

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            head = await self.reader.readexactly(fr.HEAD_BYTES)
            length, kind, flags, stream = fr.read_head(head, 0)
            payload = await self.reader.readexactly(length)
            if kind == fr.DATA:
                self.answers[stream] = self.answers.get(stream, b"") + payload
            if kind == fr.HEADERS and flags & fr.END_STREAM:
                self.trailers[stream] = payload
            if kind == fr.PING and flags & fr.ACK:
                self.answered += 1

    async def has_arrived(self) -> None:
        """Wait until the server has read what was sent: it answers a ping behind that."""
        self.pings += 1
        self.send(fr.ping(self.pings.to_bytes(8)))
        await self.until(lambda: self.answered == self.pings)

    def fields(self, stream: int) -> Fields:
        """Return the fields by which a call was ended."""
        return HeaderDecoder().decode(self.trailers[stream])

    async def ended(self, *streams: int) -> None:
        await self.until(lambda: all(one in self.trailers for one in streams))


async def handed_to_a_task(begun: float) -> None:
    """Wait until one more call runs than had begun."""
    while value_of(STARTED) == begun:
        await SystemClock().sleep(0)


def kept_calls(taker: Taker) -> int:
    """Return how many calls are in memory still, although the taker forgets its own."""
    taker.calls.clear()
    gc.collect()
    return sum(isinstance(one, WholeCall | GrpcCall) for one in gc.get_objects())


async def test_calls_that_arrive_together_are_offered_together(
    served: Served, taker: Taker
) -> None:
    wire = await Wire(served).connect()
    streams = [wire.call(prefixed(b"x" * size) + prefixed(b"")) for size in (1, 2, 3)]
    wire.send()
    await wire.ended(*streams)
    assert taker.offered == [[[b"x", b""], [b"xx", b""], [b"xxx", b""]]]
    assert [wire.answers[one][5:] for one in streams] == [b"whole 1", b"whole 2", b"whole 3"]
    assert all(b"grpc-status\x010" in wire.trailers[one] for one in streams)
    assert served.connection().running == served.connection().streams == 0
    assert kept_calls(taker) == 0


async def test_a_call_whose_end_comes_later_is_served_by_its_handler(
    served: Served, taker: Taker
) -> None:
    wire, begun = await Wire(served).connect(), value_of(STARTED)
    stream = wire.call(prefixed(b"four"), ended=False)
    wire.send()
    await handed_to_a_task(begun)
    wire.send(fr.frame(fr.DATA, fr.END_STREAM, stream))
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"4"
    assert taker.offered == []


async def test_a_call_may_arrive_in_several_pieces(served: Served, taker: Taker) -> None:
    LoopTime()  # It stands still: a call may take its time to become complete.
    wire = await Wire(served).connect()
    stream = wire.call(b"", ended=False)
    for piece in (prefixed(b"one")[:3], prefixed(b"one")[3:], prefixed(b"three")):
        wire.send(fr.frame(fr.DATA, 0, stream, piece))
        await wire.has_arrived()
    assert taker.offered == []
    wire.send(fr.frame(fr.DATA, fr.END_STREAM, stream))
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"whole 8"
    assert kept_calls(taker) == 0


async def test_a_call_that_becomes_long_does_not_wait_for_its_end(
    served: Served, taker: Taker
) -> None:
    LoopTime()  # It stands still: a call may take its time to become complete.
    wire, begun = await Wire(served).connect(), value_of(STARTED)
    stream = wire.call(prefixed(bytes(2 * WHOLE_BYTES_MAX))[:-1], ended=False)
    wire.send()
    await handed_to_a_task(begun)
    wire.send(fr.frame(fr.DATA, fr.END_STREAM, stream, b"\0"))
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"%d" % (2 * WHOLE_BYTES_MAX)


async def test_many_calls_are_served_in_several_turns(served: Served, taker: Taker) -> None:
    wire = await Wire(served).connect()
    streams = [wire.call(prefixed(b"x")) for _ in range(250)]
    wire.send()
    await wire.ended(*streams)
    assert max(map(len, taker.offered)) <= SHARE // BEGIN_WORK
    assert sum(map(len, taker.offered)) == 250


async def test_a_connection_that_breaks_a_rule_costs_no_other_its_calls(
    served: Served, taker: Taker
) -> None:
    """Its fault is found while calls of another connection wait for their turn."""
    wire, enemy = await Wire(served).connect(), await Wire(served).connect()
    while sum(one.http2.settled for one in served.server.connections) < 2:
        await SystemClock().sleep(0)
    streams = [wire.call(prefixed(b"x")) for _ in range(200)]
    enemy.call(prefixed(b"y"))
    theirs, bad = served.server.connections
    theirs.data_received(wire.out)  # Both are read in one turn of the loop.
    bad.data_received(enemy.out + fr.frame(fr.PING, 0, 0, b"short"))
    await wire.ended(*streams)
    assert len([one for one in taker.offered if one[0] == [b"x"]]) > 1
    assert sum(one.count([b"x"]) for one in taker.offered) == 200


async def test_an_answer_that_finds_no_room_ends_at_the_time_limit(
    served: Served, taker: Taker
) -> None:
    wire = await Wire(served).connect(window=4)
    stream = wire.call(prefixed(b"abc"), (b"grpc-timeout", b"50m"))
    wire.send()
    await wire.ended(stream)
    assert status_of(wire.fields(stream))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    while served.connection().running:
        await SystemClock().sleep(0)


async def test_an_incomplete_call_whose_caller_leaves_is_forgotten(
    served: Served, taker: Taker
) -> None:
    LoopTime()  # It stands still: a call may take its time to become complete.
    wire = await Wire(served).connect()
    stream = wire.call(prefixed(b"x"), ended=False)
    wire.send()
    await wire.has_arrived()
    assert served.connection().running == 1
    wire.send(fr.rst_stream(stream, fr.FaultCode.CANCEL))
    await wire.has_arrived()
    assert served.connection().running == 0
    assert kept_calls(taker) == 0


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        pytest.param(b"", b"0", id="no request"),
        pytest.param(prefixed(b"ab") * 3, b"6", id="several"),
        pytest.param(prefixed(b"x" * WHOLE_BYTES_MAX), b"%d" % WHOLE_BYTES_MAX, id="long"),
    ],
)
async def test_what_is_not_taken_is_served_by_its_handler(
    served: Served, taker: Taker, content: bytes, answer: bytes
) -> None:
    taker.serve = lambda _: False
    wire = await Wire(served).connect()
    stream = wire.call(content) if content else wire.call(b"", ended=False)
    wire.send(b"" if content else fr.frame(fr.DATA, fr.END_STREAM, stream))
    await wire.ended(stream)
    assert wire.answers[stream][5:] == answer
    assert served.connection().running == 0


@pytest.mark.parametrize(
    "content", [prefixed(b"abc")[:-1], prefixed(b"abc") + b"\0\0", b"\1" + prefixed(b"abc")[1:]]
)
async def test_requests_that_are_cut_short_or_compressed_are_not_whole(
    served: Served, taker: Taker, content: bytes
) -> None:
    wire = await Wire(served).connect()
    stream = wire.call(content)
    wire.send()
    await wire.ended(stream)
    assert taker.offered == [[None]]
    assert b"grpc-status\x010" not in wire.trailers[stream]


async def test_an_answer_that_finds_no_room_waits_for_it(served: Served, taker: Taker) -> None:
    wire = await Wire(served).connect(window=4)
    stream = wire.call(prefixed(b"abc"))
    wire.send()
    await wire.until(lambda: len(wire.answers.get(stream, b"")) == 4)
    assert served.connection().running == 1
    wire.send(fr.window_update(stream, 100))
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"whole 3"


async def kept(served: Served, taker: Taker, *extra: tuple[bytes, bytes]) -> tuple[Wire, int]:
    """Let a call be taken, and not be answered yet."""
    taker.serve = taker.keep
    wire = await Wire(served).connect()
    stream = wire.call(prefixed(bytes(10)), *extra)
    wire.send()
    while not taker.calls:
        await SystemClock().sleep(0)
    return wire, stream


async def test_an_answer_may_come_later(served: Served, taker: Taker) -> None:
    wire, stream = await kept(served, taker)
    assert served.connection().running == 1
    taker.calls[0].answer(b"late")
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"late"
    taker.calls[0].answer(b"twice")
    taker.calls[0].refuse(grpc.StatusCode.INTERNAL, "twice")
    taker.calls[0].hand_back()
    assert taker.gone == 0
    assert served.connection().running == 0


async def test_a_call_may_be_handed_back_later(served: Served, taker: Taker) -> None:
    wire, stream = await kept(served, taker)
    taker.calls[0].hand_back()
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"10"


async def test_a_call_may_be_refused(served: Served, taker: Taker) -> None:
    wire, stream = await kept(served, taker)
    taker.calls[0].refuse(grpc.StatusCode.ABORTED, "nö", (("key", "value"),))
    await wire.ended(stream)
    assert status_of(wire.fields(stream)) == (grpc.StatusCode.ABORTED, "nö")
    assert (b"key", b"value") in wire.fields(stream)


async def test_a_caller_that_goes_away_is_reported_once(served: Served, taker: Taker) -> None:
    wire, stream = await kept(served, taker)
    wire.send(fr.rst_stream(stream, fr.FaultCode.CANCEL))
    while not taker.gone:
        await SystemClock().sleep(0)
    taker.calls[0].answer(b"too late")
    assert taker.gone == 1
    assert served.connection().running == 0
    assert kept_calls(taker) == 0


async def test_a_connection_that_is_lost_ends_its_calls(served: Served, taker: Taker) -> None:
    taker.serve = taker.keep
    wire = await Wire(served).connect()
    for _ in range(3):
        wire.call(prefixed(b"x"))
    wire.send()
    while len(taker.calls) < 3:
        await SystemClock().sleep(0)
    wire.writer.transport.abort()
    while taker.gone < 3:
        await SystemClock().sleep(0)
    assert kept_calls(taker) == 0


async def test_a_call_ends_at_its_time_limit(served: Served, taker: Taker) -> None:
    wire, stream = await kept(served, taker, (b"grpc-timeout", b"1m"))
    await wire.ended(stream)
    assert status_of(wire.fields(stream))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert taker.gone == 1
    assert served.connection().running == 0
    assert kept_calls(taker) == 0


async def test_a_defect_of_the_function_ends_its_calls_only(served: Served, taker: Taker) -> None:
    def defect(call: WholeCall) -> bool:
        taker.keep(call)
        raise ValueError("a defect")

    taker.serve = defect
    wire = await Wire(served).connect()
    stream = wire.call(prefixed(b"x"))
    wire.send()
    await wire.ended(stream)
    code, details = status_of(wire.fields(stream))
    assert code is grpc.StatusCode.UNKNOWN
    assert "a defect" in details
    assert taker.gone == 1
    taker.serve = taker.answer
    stream = wire.call(prefixed(b"x"))
    wire.send()
    await wire.ended(stream)
    assert wire.answers[stream][5:] == b"whole 1"


async def test_a_stream_that_is_reset_in_the_same_breath_is_not_offered(
    served: Served, taker: Taker
) -> None:
    wire = await Wire(served).connect()
    wire.call(prefixed(b"x"))
    wire.send(fr.rst_stream(1, fr.FaultCode.CANCEL))
    last = wire.call(prefixed(b"xy"))
    wire.send()
    await wire.ended(last)
    assert [one for offered in taker.offered for one in offered] == [[b"xy"]]
    assert served.connection().running == 0


async def test_a_server_that_stops_ends_calls_that_wait(served: Served, taker: Taker) -> None:
    wire, stream = await kept(served, taker)
    async with TaskScope("stop") as scope:
        scope.spawn(served.server.stop(0.05), name="stop")
        await wire.ended(stream)
    status = (grpc.StatusCode.UNAVAILABLE, "the server stops")
    assert status_of(wire.fields(stream)) == status
    assert taker.gone == 1


async def test_whole_calls_are_counted_as_others_are(served: Served, taker: Taker) -> None:
    def handled() -> float:
        labels = ("client_stream", "test.Service", "Length", "OK")
        return value_of(GRPC_SERVER_HANDLED.labels(*labels))

    before = handled()
    wire = await Wire(served).connect()
    for serve in (taker.answer, lambda _: False):
        taker.serve = serve
        stream = wire.call(prefixed(b"x"))
        wire.send()
        await wire.ended(stream)
    assert handled() == before + 2


async def test_callers_of_another_library_are_served_alike(served: Served, taker: Taker) -> None:
    for serve in (taker.answer, lambda _: False):
        taker.serve = serve
        answer = await served.channel.stream_unary(LENGTH)(requests(2, 10))
        assert answer in (b"20", b"whole 20")


def test_an_answer_needs_room_for_all_of_its_content() -> None:
    from gazette.http2.connection import Http2Stream, StreamListener
    from gazette.http2.headers import RequestHead

    streams: list[Http2Stream] = []
    sent: list[bytes] = []

    def accept(stream: Http2Stream, request: RequestHead, ended: bool) -> StreamListener:
        del request, ended
        streams.append(stream)
        return stream.listener

    connection = Http2Connection(lambda data: sent.append(bytes(data)), lambda: 0.0, accept)
    connection.begin()
    connection.receive(fr.PREFACE + fr.settings({fr.INITIAL_WINDOW_SIZE: 10}))
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x")]
    frame: Any = fr.frame(fr.HEADERS, fr.END_HEADERS | fr.END_STREAM, 1, encode_fields(head))
    connection.receive(frame)
    (stream,) = streams
    sent.clear()
    assert not stream.answer(b"h", bytes(11), b"t")
    assert not stream.answer(b"h", b"", b"t")
    connection.pause()
    assert not stream.answer(b"h", bytes(10), b"t")
    connection.resume()
    assert sent == []
    assert stream.answer(b"h", bytes(10), b"t")
    assert stream.over
    assert stream.window == 0
    assert connection.streams == 0
    assert not stream.answer(b"h", bytes(1), b"t")
