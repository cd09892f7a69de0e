"""The socket of one HTTP/2 connection, of a server or of a client, and the tasks that wait for its bytes.

Bytes that are sent within a turn of the loop go out together: once the bytes that have arrived are handled,
or else in the next turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, cast

from gazette.http2.connection import (
    ALL_WORK,
    STREAMS_MAX,
    Accept,
    BytesLike,
    Http2Connection,
)
from gazette.http2.frames import ConnectionFault

log = logging.getLogger(__name__)

CLOSING_S: Final = 5.0
"""Seconds that a peer gets to take the last bytes of a connection."""
UNREAD_BYTES_MAX: Final = 1 << 24
"""Upper bound of bytes that wait for the socket. A peer that causes answers and reads none is cut off.

Content does not count: it waits in its streams. The bytes here are heads, trailers and answers to pings.
"""
_FLUSH_BYTES: Final = 1 << 16
_PING: Final = b"gazette\x01"


class Http2Socket(asyncio.Protocol):
    """Protocol of asyncio that moves bytes between its transport and an `Http2Connection`."""

    def __init__(self, accept: Accept | None, streams_max: int = STREAMS_MAX) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connection = Http2Connection(self._write, self._loop.time, accept, streams_max)
        self._connection.on_change = self._on_change
        self._out: list[BytesLike] = []
        self._out_bytes = 0
        self._flushing = False  # True if something will call `_flush` soon.
        self._heard_at = self._loop.time()
        self._stalled_at: float | None = None  # Time at which the socket became full.
        self._pinged_at: float | None = None  # Time of a PING that has no answer yet.
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_closing(self) -> bool:
        """True once the connection takes nothing more."""
        return self._closing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._connection.begin()

    def data_received(self, data: bytes) -> None:
        self._handle(data, ALL_WORK)

    def _handle(self, data: bytes, units_max: int) -> None:
        """Take bytes that have arrived, and handle at most ``units_max`` units of work."""
        self._heard_at, self._pinged_at = self._loop.time(), None
        if self._closing:
            return
        self._flushing = True  # This function calls `_flush` at its end.
        try:
            self._connection.receive(data, units_max)
            self._on_received()
        except ConnectionFault as fault:
            self._on_fault(fault)
            self._on_received()
        finally:
            self._flush()

    def _on_received(self) -> None:
        """Act after a call of ``receive``. A subclass may override this."""

    def eof_received(self) -> bool:
        # False closes the transport. A peer that has ended its side gets no further answers.
        return False

    def connection_lost(self, error: Exception | None) -> None:
        del error
        if self._timer is not None:
            self._timer.cancel()
        self._transport, self._closing = None, True

    def pause_writing(self) -> None:
        self._stalled_at = self._loop.time()
        self._connection.pause()

    def resume_writing(self) -> None:
        self._stalled_at = None
        self._connection.resume()

    def close(self) -> None:
        """End the connection once the peer has taken all sent bytes, or after `CLOSING_S`."""
        if self._closing:
            return
        self._flush()
        self._closing = True
        if self._transport is not None:
            self._transport.close()
            self._set_timer(CLOSING_S, self.abort)

    def abort(self) -> None:
        """Cut the connection off."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def _on_change(self) -> None:
        """Let a subclass act after streams have ended, or after the peer's settings have changed."""

    def _on_fault(self, fault: ConnectionFault) -> None:
        """Close the connection: the peer broke a rule of HTTP/2."""
        log.debug("a connection is ended: %(error)s", {"error": fault})
        self.close()

    def _fell_silent(self, silence_s: float, answer_s: float) -> bool:
        """Send a PING if the peer has sent nothing for ``silence_s``. Return True if the peer has sent
        nothing for ``answer_s`` since a PING."""
        now = self._loop.time()
        if self._pinged_at is not None:
            return now - self._pinged_at >= answer_s
        if now - self._heard_at >= silence_s:
            self._pinged_at = now
            self._connection.ping(_PING)
        return False

    def _write(self, content: BytesLike) -> None:
        self._out.append(content)
        self._out_bytes += len(content)
        if self._out_bytes >= _FLUSH_BYTES:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write all bytes that wait to the socket. Cut off a peer that reads too little."""
        self._flushing = False
        if not self._out:
            return
        content = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out, self._out_bytes = [], 0
        if self._transport is not None and not self._closing:
            self._transport.write(content)
            if (
                self._stalled_at is not None
                and self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX
            ):
                log.debug("a connection is closed: the peer does not read what it asked for")
                self.abort()

    def _set_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, callback)


class Waiters:
    """The tasks that wait for an event. Loop-bound."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Return after the next ``wake``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def wake(self) -> None:
        """Wake the tasks that wait now."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
