"""Accepts connections of one listening socket, up to a limit.

asyncio's own server accepts without a limit. Without free file descriptors, it retries once per backlog
entry, with a traceback each time. The acceptor of this module waits a second and logs one line a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from gazette.runtime.metrics import HTTP_CONNECTIONS_REFUSED
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

_ACCEPTS_PER_TURN: Final = 64
"""Greatest number of connections accepted in one turn of the loop: other work is done between turns."""
_RETRY_S: Final = 1.0
_HANDSHAKE_S: Final = 10.0
"""Seconds from the connection to the end of its TLS handshake."""
_SHUTDOWN_S: Final = 60.0
"""Seconds that a client has, at the end of a TLS connection, to take the bytes that were written."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OPTIONS: Final = (
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
)
"""Options of each accepted TCP connection.

Small answers are sent at once. asyncio sets TCP_NODELAY only on sockets whose ``proto`` is TCP, and sockets
of ``socket.create_server`` have 0. Without the option, an answer waits until the client has acknowledged the
previous answer. A client may delay its acknowledgement by 40 ms.

A client whose machine is gone is noticed within two minutes, even while it waits for bytes.
"""


def _unavailable(text: bytes) -> bytes:
    """Return an answer that asks the client to try again later."""
    return (
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
        b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s"
        % (len(text), text)
    )


REFUSAL: Final = _unavailable(b"too many connections\n")
STOPPED: Final = _unavailable(b"this server starts or stops just now\n")


class Acceptor:
    """Hands accepted connections of ``listener`` to protocols that ``connect`` makes. Loop-bound.

    ``connect`` gets a function that the protocol calls once the connection is made. From then on, ``count``
    includes the connection. At ``limit`` connections, ``make_room`` is called to close an idle one. If no
    connection can be closed, the new one is closed; without TLS, it first gets ``refusal``.
    """

    def __init__(
        self,
        listener: socket.socket,
        scope: TaskScope,
        connect: Callable[[Callable[[], None]], asyncio.Protocol],
        *,
        limit: int,
        count: Callable[[], int],
        make_room: Callable[[], bool],
        tls: ssl.SSLContext | None,
        refusal: bytes = REFUSAL,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._scope = scope
        self._connect = connect
        self._limit = limit
        self._count = count
        self._make_room = make_room
        self._tls = tls
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self._starting: dict[asyncio.Task[None], None] = {}
        """Tasks of the connections that have not begun yet, in order."""
        self._uncounted = 0
        """Number of connections in ``_starting`` that are not made yet."""
        self._retry: asyncio.TimerHandle | None = None  # Begins to accept again.
        self._name = str(listener.getsockname())

    def start(self) -> None:
        """Accept from now on."""
        self._loop.add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Accept the connections that the kernel has established. Refuse later connections.

        Return when the protocols of accepted connections have begun. If cancelled, accept no more.
        """
        try:
            while self._accept():
                await next_turn(self._loop)
        finally:
            self._pause()
        # Some systems refuse to shut down a listening socket. There, its owner's close has the same effect.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._starting:
            await asyncio.wait(set(self._starting))

    def close(self) -> None:
        """Stop listening, and cut off connections that have not begun. May be repeated."""
        self._pause()
        for task in self._starting:
            task.cancel()

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._loop.remove_reader(self._listener)

    def _accept(self) -> bool:
        """Accept the connections that wait. Return True if there may be more."""
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._wait_for_resources(error)
                else:
                    self._pause()
                    self._scope.fail(error)
                return False
            self._admit(connection)
        return True

    def _wait_for_resources(self, error: OSError) -> None:
        """Accept again after `_RETRY_S`: the process or the system has no free files or memory now."""
        HTTP_CONNECTIONS_REFUSED.labels("descriptors").inc()
        log.error(
            "cannot accept connections to %(endpoint)s: %(error)s",
            {"endpoint": self._name, "error": error},
            extra={"cause": f"accept {self._name} {error.errno}"},
        )
        self._pause()
        self._retry = self._loop.call_later(_RETRY_S, self.start)

    def _admit(self, connection: socket.socket) -> None:
        """Begin a connection in a task. At the limit, close another connection first, or refuse this one."""
        if self._count() + self._uncounted >= self._limit and not self._evict():
            self._refuse(connection)
            return
        counted = False

        def made() -> None:
            nonlocal counted
            if not counted:
                counted = True
                self._uncounted -= 1

        def started(_: asyncio.Task[None]) -> None:
            made()  # The connection may have failed before its protocol called `made`.
            del self._starting[task]
            if task.cancelled():
                connection.close()  # The task may have been cancelled before it made a transport.

        self._uncounted += 1
        task = self._scope.spawn(self._begin(connection, made), name="http connection")
        self._starting[task] = None
        task.add_done_callback(started)

    def _evict(self) -> bool:
        """Close a connection without a request in progress: an idle one, or one in its TLS handshake. Return
        False if there is no such connection."""
        if not self._make_room() and not self._cancel_starting():
            return False
        HTTP_CONNECTIONS_REFUSED.labels("idle").inc()
        log.warning(
            "%(endpoint)s has reached its limit of %(count)d connections: idle ones are closed for new ones",
            {"endpoint": self._name, "count": self._limit},
            extra={"cause": f"idle {self._name}"},
        )
        return True

    def _cancel_starting(self) -> bool:
        """Close the first connection that is in its TLS handshake. Return False if no connection is."""
        for task in self._starting:
            if not task.cancelling():
                task.cancel()
                return True
        return False

    def _refuse(self, connection: socket.socket) -> None:
        HTTP_CONNECTIONS_REFUSED.labels("limit").inc()
        log.warning(
            "%(endpoint)s refuses new connections: its limit of %(count)d are busy",
            {"endpoint": self._name, "count": self._limit},
            extra={"cause": f"limit {self._name}"},
        )
        with contextlib.suppress(OSError), connection:
            connection.setblocking(False)
            if self._tls is None:
                connection.send(self._refusal)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)  # A close with unread bytes would reset the connection.

    async def _begin(self, connection: socket.socket, made: Callable[[], None]) -> None:
        """Make the transport and the protocol of a connection. An error ends only this connection."""
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # The client is gone; the transport will notice it.
                for level, name, value in _OPTIONS:
                    if hasattr(socket, name):
                        connection.setsockopt(level, getattr(socket, name), value)
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._connect(made),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
                ssl_shutdown_timeout=None if self._tls is None else _SHUTDOWN_S,
            )
        except OSError as error:  # A reset, or a handshake that failed or took too long.
            log.debug("a connection did not begin: %(error)s", {"error": error})
        except Exception as error:  # One connection must not end the server.
            log.exception(
                "a connection to %(endpoint)s could not begin",
                {"endpoint": self._name},
                extra={"cause": f"begin {self._name} {type(error).__name__}"},
            )
            connection.close()


async def next_turn(loop: asyncio.AbstractEventLoop) -> None:
    """Return when all callbacks that are due now were called."""
    turned = asyncio.Event()  # Unlike a future, an event may be set after the wait was cancelled.
    loop.call_soon(turned.set)
    await turned.wait()
