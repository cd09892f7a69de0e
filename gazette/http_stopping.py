"""How an HTTP server ends without leaving a request unanswered.

A client that could connect expects an answer, and one whose connection is closed without a word cannot
know whether its request took effect. So:

1. Connections that the kernel has established are accepted, and only then the listener is closed: what
   comes later is refused. (The two steps are not one: a connection that is established between them, some
   microseconds, is reset.)
2. Answers from now on tell the client, by ``Connection: close``, that there is no next one.
3. A connection that was never used gets `FIRST_REQUEST_S` for its request. One that was used and is idle
   gets `NEXT_REQUEST_S`: that it may be closed at any time is a rule of HTTP/1.1 that clients know
   (RFC 9112, 9.3.1 and 9.5).
4. All this, and what is being answered, ends after the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final
from weakref import WeakSet

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)

FIRST_REQUEST_S: Final = 2.0
NEXT_REQUEST_S: Final = 0.25
_ACCEPT_TURNS: Final = 16
"""Each accepts as many as there are. More are of no use: without a file descriptor, none is accepted."""
_CUT_OFF_S: Final = 1.0
"""How long requests that are cancelled may take to end."""


class _State(ServerState):
    def __init__(self) -> None:
        super().__init__()
        self.moved = asyncio.Event()
        """Set whenever a connection was used, or lost."""
        self.unheard: WeakSet[Connection] = WeakSet()
        """Accepted, and nothing was asked yet. Weak: one whose TLS handshake fails never says so."""


class Connection(H11Protocol):
    """uvicorn's connection, which tells its server when it was used, or lost."""

    server_state: _State

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_state.unheard.add(self)

    @property
    def idle(self) -> bool:
        """Whether it was used before, and awaits the next request."""
        return self not in self.server_state.unheard and self.cycle.response_complete

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self not in self.server_state.unheard and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._moved()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._moved()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._moved()

    def _moved(self) -> None:
        self.server_state.unheard.discard(self)
        self.server_state.moved.set()


class PatientServer(uvicorn.Server):
    """uvicorn that leaves signals to us, does not wake up ten times a second, and ends as described.

    Its ``config`` has `Connection` for ``http``. Set ``grace_s``, then ``stopping``.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()
        self.grace_s = 0.0
        self.server_state: _State = _State()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        try:
            async with asyncio.timeout(self.grace_s):
                for listener in sockets or []:
                    await _stop_listening(listener)
                self._close_servers()
                await self._let_end()
        except TimeoutError:
            self._close_servers()
            await self._cut_off()
        assert not state.connections
        for server in self.servers:
            await server.wait_closed()

    def _close_servers(self) -> None:
        for server in self.servers:
            server.close()

    async def _let_end(self) -> None:
        state = self.server_state
        # Requests that are being answered have the very same list.
        state.default_headers.append((b"connection", b"close"))
        for connection in self._connections():
            if connection.busy:
                connection.shutdown()
        await self._wait(NEXT_REQUEST_S, lambda: not state.unheard and not self._idle())
        for connection in self._idle():
            connection.shutdown()
        await self._wait(FIRST_REQUEST_S - NEXT_REQUEST_S, lambda: not state.unheard)
        for connection in self._connections():
            connection.shutdown()
        await self._wait(None, lambda: not state.connections)
        if state.tasks:  # Those whose client is gone.
            await asyncio.wait(set(state.tasks))

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]

    def _idle(self) -> list[Connection]:
        return [one for one in self._connections() if one.idle]

    async def _wait(self, timeout_s: float | None, done: Callable[[], bool]) -> None:
        moved = self.server_state.moved
        # What nobody asks for in time is closed.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
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


async def _stop_listening(listener: socket.socket) -> None:
    """Have asyncio's server accept what is there; then refuse the rest."""
    loop = asyncio.get_running_loop()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    for _ in range(_ACCEPT_TURNS):
        if not poll.poll(0):
            break
        await _next_turn(loop)
    loop.remove_reader(listener)
    with contextlib.suppress(
        OSError
    ):  # Some systems refuse; closing it does the same, a bit later.
        listener.shutdown(socket.SHUT_RDWR)
    # Its transports are made a turn after connections were accepted, and not by a closed server.
    await _next_turn(loop)


async def _next_turn(loop: asyncio.AbstractEventLoop) -> None:
    """Return when all callbacks that are due now were called."""
    turned = asyncio.Event()  # Unlike a future, it may be set when the wait was cancelled.
    loop.call_soon(turned.set)
    await turned.wait()
