"""One connection of a gRPC server: its first bytes, its turns, and its client's time limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, cast

from gazette.errors import Closed
from gazette.http2 import frames as fr
from gazette.http2.connection import Http2Connection, Http2Stream, StreamListener
from gazette.http2.headers import RequestHead
from gazette.http2.peer import peer_of
from gazette.http2.socket import CLOSING_S, Http2Socket
from gazette.net.grpc.turns import Turns

log = logging.getLogger(__name__)

_MARK: Final = fr.PREFACE[:4]
"""First bytes of HTTP/2. No request of HTTP/1.1 begins with them."""
FIRST_FRAMES_S: Final = 10.0
"""Seconds from the connection to the peer's settings."""
KEEPALIVE_S: Final = 10.0
"""Seconds of silence after which a client with open calls gets a PING. A silent client is cut off."""
IDLE_S: Final = 600.0
"""Seconds without a call after which a connection is ended."""
FINISH_S: Final = 1.0
"""Seconds for a client to close its side, after all calls have ended and everything was sent."""
STALL_S: Final = 60.0
"""Seconds for which a socket may stay full. Then its connection is cut off."""


class ConnectionOwner(Protocol):
    """The part of a server that its connections use."""

    streams_max: int
    turns: Turns
    connections: dict[ServerConnection, None]
    http1: Callable[[asyncio.Transport, bytes], None] | None

    def accept(self, stream: Http2Stream, request: RequestHead, ended: bool, /) -> StreamListener:
        """Begin a call."""
        ...

    def begin_calls(self) -> None:
        """Serve the calls that the last read has completed."""
        ...

    def changed(self) -> None:
        """Handle that a call or a connection has ended."""
        ...

    def lost(self, connection: ServerConnection) -> None:
        """Handle that the connection has ended."""
        ...


class ServerConnection(Http2Socket):
    """One connection of a server, with the time that its client has for each step.

    If the server has ``http1``, the connection is *undecided* until its first bytes show the protocol. If TLS
    has agreed on HTTP/2, the connection is decided at once.
    """

    def __init__(self, server: ConnectionOwner, made: Callable[[], None]) -> None:
        super().__init__(server.accept, server.streams_max)
        self._server = server
        self._made = made
        self._first: bytes | None = None if server.http1 is None else b""
        """The first bytes while the connection is undecided; then None."""
        self.busy_at = self._heard_at
        """The loop's time at which the last call ended."""

    def give_up(self) -> None:
        """End the connection of a client without calls: the client may connect again."""
        self.drain(last=True)
        self.close()

    @property
    def is_undecided(self) -> bool:
        """True until the first bytes show which protocol the client speaks."""
        return self._first is not None and not self._closing

    @property
    def http2(self) -> Http2Connection:
        """The connection without its socket."""
        return self._connection

    @property
    def is_busy(self) -> bool:
        """True while calls run, or answers are on their way to the socket."""
        return self._connection.running > 0

    @property
    def has_backlog(self) -> bool:
        """True if the client has asked for work that was not done yet."""
        return self._connection.has_backlog and not self._closing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.connections[self] = None
        self._connection.peer = peer_of(transport.get_extra_info)
        self._made()
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._first = None
        if self._first is None:
            super().connection_made(transport)
        else:
            self._transport = cast("asyncio.Transport", transport)
        self._set_timer(FIRST_FRAMES_S, self._check)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._first is None:
            self._server.turns.arrived(self, data)
            return
        first = self._first + data
        if len(first) < len(_MARK) and _MARK.startswith(first):
            self._first = first
            return
        self._first = None
        if first.startswith(_MARK):
            self._connection.begin()
            self._server.turns.arrived(self, first)
        else:
            self._pass_on(first)
        self._server.changed()

    def work(self, data: bytes, units_max: int) -> int:
        """See ``turns.BusyConnection.work``."""
        if self._closing:
            return 0
        self._handle(data, units_max)
        return units_max - self._connection.work

    def keep(self, data: bytes) -> None:
        """See ``turns.BusyConnection.keep``."""
        self._connection.keep(data)

    def pause_reading(self) -> None:
        """See ``turns.BusyConnection.pause_reading``."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See ``turns.BusyConnection.resume_reading``."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pass_on(self, first: bytes) -> None:
        """Pass the connection on to the server of HTTP/1.1."""
        assert self._transport is not None
        assert self._server.http1 is not None
        transport = self._transport
        # For this server, the connection is lost.
        super().connection_lost(None)
        self._server.lost(self)
        self._server.http1(transport, first)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._server.turns.forget(self)
        self._connection.lose(Closed(f"the caller's connection has ended: {error or 'closed'}"))
        self._server.lost(self)

    def drain(self, *, last: bool) -> None:
        """Ask the client to make no more calls here. With ``last``, refuse the calls that it makes."""
        if not self._closing:
            if self._first is None:
                self._connection.drain(last=last)
            if last and not self.is_busy:
                self._finish()

    def _finish(self) -> None:
        """End the connection once the client has taken what was sent. Look each `FINISH_S`, for `CLOSING_S`.

        A socket that is closed with unread bytes resets the connection: the client would lose bytes that it
        has not read yet. So bytes of the client are read and dropped until the client closes its side.
        """
        if self._closing:
            return
        self._flush()
        transport = self._transport
        if transport is None or not transport.can_write_eof():
            self.close()
            return
        try:
            transport.write_eof()
        except OSError:
            self.abort()  # The client has gone.
            return
        self._closing = True
        transport.resume_reading()
        self._set_timer(FINISH_S, partial(self._finished, self._loop.time() + CLOSING_S))

    def _finished(self, until: float) -> None:
        """Close the socket if the client has taken all bytes. Cut it off at the loop's time ``until``."""
        transport = self._transport
        if transport is None:
            return
        if not transport.get_write_buffer_size():
            transport.close()
        elif self._loop.time() < until:
            self._set_timer(FINISH_S, partial(self._finished, until))
        else:
            self.abort()

    def _on_change(self) -> None:
        if not self._connection.running:
            self.busy_at = self._loop.time()
            if self._connection.draining and not self._connection.streams:
                self._loop.call_soon(self._finish)
        self._server.changed()

    def _on_received(self) -> None:
        self._server.begin_calls()

    def _check(self) -> None:
        """Give up a client that is silent, or takes nothing. End an unused connection."""
        now = self._loop.time()
        if not self._connection.settled:  # The first check is after `FIRST_FRAMES_S`.
            self.close()
            return
        if self._stalled_at is not None and now - self._stalled_at >= STALL_S:
            log.debug("a client reads its answers too slowly: its connection is cut off")
            self.abort()
            return
        if self._connection.streams:
            if self._fell_silent(KEEPALIVE_S, KEEPALIVE_S / 2):
                log.debug("a client does not answer: its connection is cut off")
                self.abort()
                return
        elif not self.is_busy and now - self.busy_at >= IDLE_S:
            self.give_up()
            return
        self._set_timer(KEEPALIVE_S, self._check)
