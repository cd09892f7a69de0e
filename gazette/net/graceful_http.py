"""HTTP servers that bound their connections, and answer all requests before they end.

A client that could connect expects an answer. If its connection is closed without one, it cannot know if its
request took effect. So:

1. Connections that the kernel has established are accepted. Only then the listener is closed, and later ones
   are refused. (The two steps are not one: a connection that is established between them, within some
   microseconds, is reset.)
2. From now on, answers carry ``Connection: close``: no further request is served.
3. A connection that was never used gets `FIRST_REQUEST_S` for its request. A connection that was used and is
   idle gets `NEXT_REQUEST_S`. By the rules of HTTP/1.1 it may be closed at any time, which clients know (RFC
   9112, 9.3.1 and 9.5).
4. After the grace, all connections and running answers are cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gazette.net.http_accept import REFUSAL, STOPPED, Acceptor
from gazette.net.strict_lines import refuse_bare_lf
from gazette.runtime.metrics import HTTP_CONNECTIONS_REFUSED
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

FIRST_REQUEST_S: Final = 2.0
NEXT_REQUEST_S: Final = 0.25
HEAD_S: Final = 10.0
"""Seconds for the head of a request, from the connection, or from the first byte of a later request."""
BODY_S: Final = 30.0
"""Seconds without a byte of a request's body. Then the connection is closed."""
LINGER_S: Final = 2.0
"""Seconds for the rest of a body after the answer. Then the connection is closed."""
STALL_S: Final = 60.0
"""Seconds in which a client must take at least 48 KiB of an answer; otherwise it is cut off."""
_TOO_LATE: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_CUT_OFF_S: Final = 1.0
"""Seconds that cancelled requests may take to end."""


class _State(ServerState):
    def __init__(self) -> None:
        super().__init__()
        self.moved = asyncio.Event()
        """Set when a connection was used, or lost."""


class Connection(H11Protocol):
    """uvicorn's connection with time limits. It signals its server when it was used, or lost.

    ``since`` is the time of the loop at which it began to wait for a request. It is meaningless while
    ``busy``.
    """

    server_state: _State

    def __init__(self, *args: Any, made: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_bare_lf(self.conn)
        self._made = made
        self.heard = False
        """True once the whole head of a request has arrived."""
        self.since = self.loop.time()
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._body: asyncio.TimerHandle | None = None
        self._heard_at = self.since

    @property
    def idle(self) -> bool:
        """True if the connection was used before, and waits for the next request."""
        return self.heard and self.cycle.response_complete

    @property
    def busy(self) -> bool:
        """True while a request is being answered."""
        return self.heard and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)
        if self.cycle is not None:
            self._moved()
        self._watch_body()
        if self.busy:
            self._unset_head()
        elif self.timeout_keep_alive_task is None:
            self._expect_head()  # A part of the next request has arrived: the connection is not idle.

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        self._unset_body()
        super().on_response_complete()
        self._moved()
        self._watch_body()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_S, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_head()
        self._unset_stall()
        self._unset_body()
        self._moved()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP. Within an answer just close the connection: a second answer has no
        place."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # Drop what the application still sends.
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # Serve such a request as HTTP/1.1, without uvicorn's warning each time.

    def close_idle(self) -> None:
        """Close the connection without an answer: no request was taken."""
        if not self.transport.is_closing():
            self.transport.close()

    def _expect_head(self) -> None:
        if self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_S, self._too_late)

    def _unset_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _unset_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch_body(self) -> None:
        """Limit the time in which the rest of a request's body must arrive.

        Before the end of the answer, that is `BODY_S` without a byte. After it, it is `LINGER_S` in total.
        """
        if self.conn.their_state is not h11.SEND_BODY or self.transport.is_closing():
            self._unset_body()
        elif self._body is None and self.cycle.response_complete:
            self._body = self.loop.call_later(LINGER_S, self.transport.close)
        elif self._body is None:
            self._body = self.loop.call_later(BODY_S, self._body_late)

    def _unset_body(self) -> None:
        if self._body is not None:
            self._body.cancel()
            self._body = None

    def _body_late(self) -> None:
        self._body = None
        late_s = self.loop.time() - self._heard_at
        if late_s < BODY_S or self.flow.read_paused or self.cycle.waiting_for_100_continue:
            wait_s = BODY_S - late_s if late_s < BODY_S else BODY_S
            self._body = self.loop.call_later(wait_s, self._body_late)
            return
        if not self.cycle.response_started:
            self.transport.write(_TOO_LATE)
        self.transport.close()

    def _too_late(self) -> None:
        self._head = None
        if self.transport.is_closing() or self.busy:
            return
        if self.conn.trailing_data[0]:
            self.transport.write(_TOO_LATE)
        self.transport.close()

    def _stalled(self) -> None:
        log.debug("a client reads nothing of its answer: its connection is cut off")
        self.transport.abort()

    def _moved(self) -> None:
        self.heard = self.cycle is not None
        self.server_state.moved.set()


class GracefulServer(uvicorn.Server):
    """uvicorn without its signal handlers and its ten wake-ups a second. It ends as the module describes.

    Its ``config`` has `Connection` for ``http``, and ``serve`` gets exactly one socket. It holds at most
    ``limit`` connections. To stop it, set ``grace_s``, then ``stopping``.
    """

    def __init__(self, config: uvicorn.Config, *, scope: TaskScope, limit: int) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.grace_s = 0.0
        self.server_state: _State = _State()
        self._scope = scope
        self._limit = limit
        self._acceptor: Acceptor | None = None
        self._ended = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        (listener,) = sockets
        await self.lifespan.startup()
        self._acceptor = Acceptor(
            listener,
            self._scope,
            self._connect,
            limit=self._limit,
            count=lambda: len(self.server_state.connections),
            make_room=self._make_room,
            tls=self.config.ssl,
        )
        self._acceptor.start()
        self.started = True

    def _connect(self, made: Callable[[], None]) -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            made=made,
        )

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Serve a connection that another listener accepted, and that began with ``first``.

        It counts like all others. Answer 503 if there is no room for it, or if this server does not serve
        now.
        """
        serves = self.started and not self._ended
        if not serves or (
            len(self.server_state.connections) >= self._limit and not self._make_room()
        ):
            HTTP_CONNECTIONS_REFUSED.labels("limit" if serves else "stopped").inc()
            transport.write(REFUSAL if serves else STOPPED)
            transport.close()
            return
        connection = self._connect(lambda: None)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.data_received(first)

    def close(self) -> None:
        """Stop listening. May be repeated."""
        if self._acceptor is not None:
            self._acceptor.close()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        assert self._acceptor is not None
        try:
            async with timeout(self.grace_s):
                await self._acceptor.stop()
                await self._let_end()
        except TimeoutError:
            await self._cut_off()
        finally:
            self._ended = True
            self._acceptor.close()
        assert not self.server_state.connections

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request; unused connections first."""
        waiting = [
            one for one in self._connections() if not one.busy and not one.transport.is_closing()
        ]
        if not waiting:
            return False
        min(waiting, key=lambda one: (one.heard, one.since)).close_idle()
        return True

    async def _let_end(self) -> None:
        state = self.server_state
        # Running requests use this same list.
        state.default_headers.append((b"connection", b"close"))
        for connection in self._connections():
            if connection.busy:
                connection.shutdown()
        # An idle connection may be about to send its next request.
        await self._wait(NEXT_REQUEST_S, lambda: not self._unheard() and not self._idle())
        for connection in self._idle():
            connection.shutdown()
        # A new connection has more time for its first request.
        await self._wait(FIRST_REQUEST_S - NEXT_REQUEST_S, lambda: not self._unheard())
        for connection in self._connections():
            connection.shutdown()
        await self._wait(None, lambda: not state.connections)
        if state.tasks:  # Requests whose client is gone.
            await asyncio.wait(set(state.tasks))

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    def _idle(self) -> list[Connection]:
        return [one for one in self._connections() if one.idle]

    def _unheard(self) -> list[Connection]:
        return [one for one in self._connections() if not one.heard]

    async def _wait(self, timeout_s: float | None, done: Callable[[], bool]) -> None:
        moved = self.server_state.moved
        # The caller closes connections without a request in time.
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                while not done():
                    moved.clear()
                    await moved.wait()

    async def _cut_off(self) -> None:
        state = self.server_state
        if state.tasks:
            log.error("%(count)d HTTP requests did not end in time", {"count": len(state.tasks)})
        for task in state.tasks:
            task.cancel("the HTTP server has stopped")
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=_CUT_OFF_S)
        for connection in self._connections():
            connection.transport.abort()
        await self._wait(None, lambda: not state.connections)
