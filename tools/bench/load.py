"""Load of `gazette bench small | tailers`: small appends and tailing readers, for any broker of the protocol.

A client that does more than a broker would measure itself. So calls are frames that were made beforehand, on
plain sockets, in one thread. Nothing here is fit for other use: windows are opened once, and are large enough
for one measurement.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from gazette.errors import Broken, Unavailable
from gazette.http2 import frames as fr
from gazette.http2.headers import encode_fields
from gazette.http2.messages import PREFIX_BYTES, prefixed
from gazette.protocol.content import COMMIT, append_content
from gazette.protocol.pb import broker_pb2

APPEND: Final = "/protocol.Journal/Append"
BARE_APPEND: Final = "/bench.Bare/Append"
_READ: Final = "/protocol.Journal/Read"
_ADDED: Final = b"\x40"
"""First byte of a field that is written as it is, and added to the table (RFC 7541, 6.2.1)."""
_INDEXED: Final = 0x80
"""First bit of a reference to the table (6.1)."""
_FIRST_PLACE: Final = 62
"""Place in the table of the field that was added last."""
_RECEIVE_BYTES: Final = 1 << 18
_TIMEOUT_S: Final = 30.0
_STATUS_TAG: Final = b"\x08"
"""First byte of a response whose status is not OK."""
MARK: Final = b"<end of one append>"
"""Last bytes of each append that tailing readers wait for."""


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """One appender: the broker that it calls, and the content of its calls."""

    address: tuple[str, int]
    messages: bytes
    """All messages of one call."""
    path: str = APPEND

    @classmethod
    def of(cls, address: tuple[str, int], journal: str, content: bytes) -> LoadTarget:
        opening = broker_pb2.AppendRequest(journal=journal).SerializeToString()
        parts = (opening, append_content(content), COMMIT)
        return cls(address, b"".join(prefixed(part) for part in parts))


class Wire:
    """One connection, whose windows are large enough for one measurement."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.socket = socket.create_connection(address, timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next = 1
        self._rest = b""
        self._blocks: dict[str, bytes] = {}
        settings = {fr.INITIAL_WINDOW_SIZE: fr.WINDOW_MAX, fr.ENABLE_PUSH: 0}
        room = fr.window_update(0, fr.WINDOW_MAX - fr.WINDOW_DEFAULT)
        self.socket.sendall(fr.PREFACE + fr.settings(settings) + room)

    def call(self, path: str, messages: bytes) -> int:
        """Send a whole call. Return the number of its stream."""
        stream, self._next = self._next, self._next + 2
        head = fr.frame(fr.HEADERS, fr.END_HEADERS, stream, self._block(path))
        self.socket.sendall(head + fr.frame(fr.DATA, fr.END_STREAM, stream, messages))
        return stream

    def _block(self, path: str) -> bytes:
        """Return the header block of a call. As clients of gRPC do, refer to fields that were sent before."""
        known = self._blocks.get(path)
        if known is not None:
            return known
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]
        if self._blocks:  # The places in the table of other calls would move.
            return encode_fields(fields)
        last = len(fields) - 1
        self._blocks[path] = bytes(
            _INDEXED | (_FIRST_PLACE + last - place) for place in range(len(fields))
        )
        return b"".join(_ADDED + encode_fields([field])[1:] for field in fields)

    def receive(self) -> bytes:
        """Return what has arrived. Raise ``Broken`` at the end of the connection."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise Broken("a broker has closed its connection")
        return data

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Receive once. Yield kind, flags, stream and payload of each whole frame of a stream."""
        data, at = self._rest + self.receive(), 0
        while len(data) - at >= fr.HEAD_BYTES:
            length, kind, flags, stream = fr.read_head(data, at)
            end = at + fr.HEAD_BYTES + length
            if end > len(data):
                break
            payload = data[at + fr.HEAD_BYTES : end]
            at = end
            if stream:
                yield kind, flags, stream, payload
            else:
                self._answer(kind, flags, payload)
        self._rest = data[at:]

    def _answer(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == fr.SETTINGS and not flags & fr.ACK:
            self.socket.sendall(fr.frame(fr.SETTINGS, fr.ACK, 0))
        elif kind == fr.PING and not flags & fr.ACK:
            self.socket.sendall(fr.frame(fr.PING, fr.ACK, 0, payload))
        elif kind == fr.GOAWAY:
            raise Broken(f"a broker ended its connection: {payload!r}")

    def close(self) -> None:
        self.socket.close()


class Wires:
    """Connections, one to each address. Use as ``with``."""

    def __init__(self) -> None:
        self._wires: dict[tuple[str, int], Wire] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for wire in self._wires.values():
            wire.close()

    def of(self, address: tuple[str, int]) -> Wire:
        wire = self._wires.get(address)
        if wire is None:
            wire = self._wires[address] = Wire(address)
            self._selector.register(wire.socket, selectors.EVENT_READ, wire)
        return wire

    def ready(self, timeout_s: float) -> list[Wire]:
        """Return connections on which something has arrived; none after ``timeout_s``."""
        return [key.data for key, _ in self._selector.select(timeout_s)]


@dataclass(slots=True)
class _Running:
    target: LoadTarget
    began: float
    answered: bytes = b""


@dataclass(slots=True)
class Appended:
    """The latencies of appends in milliseconds, and how long all of them took in seconds."""

    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies_ms) / self.seconds


def append_for(targets: Sequence[LoadTarget], seconds: float) -> Appended:
    """Let each appender append one after the other for ``seconds``. Blocks; run it in a thread.

    Raise ``Unavailable`` if an append fails or takes too long, ``Broken`` and ``OSError`` for a connection.
    """
    result = Appended()
    with Wires() as wires:
        running: dict[tuple[Wire, int], _Running] = {}

        def begin(target: LoadTarget) -> None:
            wire, now = wires.of(target.address), time.perf_counter()
            running[wire, wire.call(target.path, target.messages)] = _Running(target, now)

        began = time.perf_counter()
        for target in targets:
            begin(target)
        while running:
            ready = wires.ready(_TIMEOUT_S)
            if not ready:
                raise Unavailable("an append was not answered", timeout_s=_TIMEOUT_S)
            for wire in ready:
                for kind, flags, stream, payload in wire.frames():
                    call = running.get((wire, stream))
                    if call is None:
                        continue
                    if kind == fr.DATA:
                        call.answered += payload
                    if not flags & fr.END_STREAM and kind != fr.RST_STREAM:
                        continue
                    del running[wire, stream]
                    now = time.perf_counter()
                    check_answer(call.answered, payload)
                    result.latencies_ms.append(1e3 * (now - call.began))
                    if now - began < seconds:
                        begin(call.target)
        result.seconds = time.perf_counter() - began
    return result


def check_answer(answered: bytes, trailers: bytes) -> None:
    """Raise ``Unavailable`` unless a response of Append says that it is in the journal."""
    if len(answered) < PREFIX_BYTES or answered[PREFIX_BYTES : PREFIX_BYTES + 1] == _STATUS_TAG:
        raise Unavailable(f"an append failed: {answered!r} {trailers!r}")


@dataclass(slots=True)
class Tailed:
    """Appends at a rate while readers tail the journal.

    ``seconds``: from the first append until nearly all readers have all of it.
    """

    latencies_ms: list[float]
    seconds: float
    planned_s: float


READERS_PER_WIRE: Final = 50
_NEARLY_ALL: Final = 0.98
"""Part of the readers to wait for: a mark that two frames share is not found."""
PAUSE_S: Final = 0.01
"""Seconds between the beginnings of two appends."""


def tail_for(
    address: tuple[str, int], journal: str, *, readers: int, rate: int, seconds: float
) -> Tailed:
    """Append ``rate`` bytes/s for ``seconds`` while ``readers`` tail the journal. Blocks, and raises as
    ``append_for``.
    """
    content = b"x" * max(0, int(rate * PAUSE_S) - len(MARK)) + MARK
    target = LoadTarget.of(address, journal, content)
    request = broker_pb2.ReadRequest(journal=journal, offset=-1, block=True)
    tails: list[_Tail] = []
    selector = selectors.DefaultSelector()
    wire = Wire(address)
    try:
        for begin in range(0, readers, READERS_PER_WIRE):
            tail = _Tail(Wire(address))
            for _ in range(min(READERS_PER_WIRE, readers - begin)):
                tail.wire.call(_READ, prefixed(request.SerializeToString()))
            tails.append(tail)
        for one in tails:
            selector.register(one.wire.socket, selectors.EVENT_READ, one)
        selector.register(wire.socket, selectors.EVENT_READ, None)
        return _tail(target, wire, tails, selector, readers, seconds)
    finally:
        selector.close()
        wire.close()
        for one in tails:
            one.wire.close()


_SETTLE_S: Final = 1.0


@dataclass(slots=True)
class _Tail:
    """A connection of tailing readers, and the marks that have arrived on it."""

    wire: Wire
    marks: int = 0
    _rest: bytes = b""

    def receive(self) -> None:
        data = self._rest + self.wire.receive()
        self.marks += data.count(MARK)
        self._rest = data[-(len(MARK) - 1) :]


def _tail(
    target: LoadTarget,
    wire: Wire,
    tails: Sequence[_Tail],
    selector: selectors.BaseSelector,
    readers: int,
    seconds: float,
) -> Tailed:
    latencies: list[float] = []
    count = max(1, int(seconds / PAUSE_S))
    # Readers at the head get no answer before the first append, which would show that they are there.
    began = time.perf_counter() + _SETTLE_S
    begun, appending_at = 0, 0.0
    while True:
        now = time.perf_counter()
        due = began + begun * PAUSE_S
        if not appending_at and begun < count and now >= due:
            wire.call(target.path, target.messages)
            begun, appending_at = begun + 1, now
        delivered = sum(one.marks for one in tails)
        done = begun == count and not appending_at
        if done and delivered >= _NEARLY_ALL * readers * count:
            return Tailed(latencies, now - began, count * PAUSE_S)
        if now - began > seconds + _TIMEOUT_S:
            raise Unavailable("tailing readers did not get everything", delivered=delivered)
        wait = _TIMEOUT_S if appending_at or begun == count else max(0.0, due - now)
        for key, _ in selector.select(min(1.0, wait)):
            if key.data is not None:
                key.data.receive()
                continue
            for kind, flags, _stream, payload in wire.frames():
                if kind == fr.DATA:
                    check_answer(payload, b"")
                if flags & fr.END_STREAM and kind == fr.HEADERS:
                    latencies.append(1e3 * (time.perf_counter() - appending_at))
                    appending_at = 0.0
