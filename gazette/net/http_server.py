"""An HTTP/1.1 server that bounds its connections, and answers all requests before it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp

from gazette.errors import Invalid, Unavailable
from gazette.net.http_accept import REFUSAL, STOPPED, Acceptor
from gazette.net.http_connection import HttpConnection, Serving
from gazette.runtime.metrics import HTTP_CONNECTIONS_REFUSED
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from gazette.runtime.tls import tls_context

log = logging.getLogger(__name__)

UNIX_PREFIX: Final = "unix://"
FIRST_REQUEST_S: Final = 2.0
NEXT_REQUEST_S: Final = 0.25
_CUT_OFF_S: Final = 1.0
"""Seconds that cancelled requests may take to end."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server. With ``ca_file``, callers must present a certificate of that CA."""

    cert_file: str
    key_file: str
    ca_file: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return certificate, key and CA (None: no CA). Raise ``Invalid``, which names the file, for a file
        that cannot be read."""
        return (
            read_pem(self.cert_file, "server-cert-file"),
            read_pem(self.key_file, "server-cert-key-file"),
            read_pem(self.ca_file, "server-ca-file") if self.ca_file else None,
        )


def read_pem(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Invalid(
            f"cannot read {path}: {error.strerror}",
            path=setting,
            hint="Check the path of the file.",
        ) from error


def bind_tcp(host: str, port: int) -> socket.socket:
    """Return a listening socket; ``host`` empty: all interfaces. Raise ``Unavailable`` with the reason."""
    try:
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=2048)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048
            )
        return socket.create_server(("0.0.0.0", port), backlog=2048)
    except OSError as error:
        raise cannot_listen(f"{host or '*'}:{port}", error) from error


def bind_unix(path: str) -> socket.socket:
    """Return a listening unix socket, or raise ``Unavailable``. Replace the file of an unserved socket."""
    clear_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise cannot_listen(f"{UNIX_PREFIX}{path}", error) from error
    return sock


def bind_debug(port: str, host: str) -> socket.socket:
    """Return a listening socket for ``--debug.port``, on the host of the other ports. Raise ``Invalid`` for a
    wrong port, ``Unavailable`` for a port in use.
    """
    if port.startswith(UNIX_PREFIX):
        return bind_unix(port.removeprefix(UNIX_PREFIX))
    return bind_tcp(host, port_number(port, "--debug.port"))


def port_number(text: str, setting: str) -> int:
    """Return the number of a port; 0 for an empty text. Raise ``Invalid``, which names the setting, for a
    text that is no port."""
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65_535:
        raise Invalid(f'invalid port "{text}" (expected a number, or unix:///path)', path=setting)
    return int(text)


def clear_stale_socket(path: str) -> None:
    """Remove the socket of a process that is gone. Raise ``Unavailable`` if a process listens there, or if
    the path names no socket."""
    address = f"{UNIX_PREFIX}{path}"
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return  # There is no such file, or no socket can be made: the next error then says why.
    if not is_socket:
        raise cannot_listen(address, OSError(errno.EEXIST, "it exists, and is no socket"))
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # A process listens there, and accepts nothing: its queue is full.
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return
        except OSError as error:
            raise cannot_listen(address, error) from error
    raise cannot_listen(address, OSError(errno.EADDRINUSE, "Address already in use"))


def cannot_listen(address: str, error: OSError) -> Unavailable:
    hint = "Choose another port, or stop the process that uses this one."
    if error.errno != errno.EADDRINUSE:
        hint = "Choose another address: this one cannot be used on this machine."
    return Unavailable(
        f"cannot listen on {address}: {error.strerror or error}", hint=hint, address=address
    )


class ReloadedTls:
    """The files of ``TlsFiles``, read again at each connection. Any thread.

    If new files cannot be read or used, the former files stay in use.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raise ``Invalid`` for a file that cannot be read."""
        self._files = files
        self.contents = files.read()

    def changed(self) -> bool:
        """Read the files again. Return True if ``contents`` changed."""
        try:
            contents = self._files.read()
        except Invalid as error:
            log.warning("the former certificates stay in use: %(error)s", {"error": error})
            return False
        if contents == self.contents:
            return False
        self.contents = contents
        log.info("certificates were replaced: %(file)s", {"file": self._files.cert_file})
        return True

    def context(self, *protocols: str) -> ssl.SSLContext:
        """Return a TLS context that replaces itself once there are new files.

        Clients get the first of ``protocols`` (ALPN; default: HTTP/1.1) that they offer. Raise
        ``Invalid`` for files that do not fit together.
        """
        files = self._files
        try:
            current = tls_context(ssl.Purpose.CLIENT_AUTH)
            current.load_cert_chain(files.cert_file, files.key_file)
            if files.ca_file:
                current.load_verify_locations(files.ca_file)
                current.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(filter(None, (files.cert_file, files.key_file, files.ca_file)))
            raise Invalid(
                f"cannot serve TLS with {names}: {error}",
                path="server-cert-file",
                hint="Use PEM files that this user can read: a certificate or a chain, its key, and "
                "optionally certificates of a CA.",
            ) from error
        current.set_alpn_protocols(protocols or ("http/1.1",))

        def on_hello(
            connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
        ) -> None:
            nonlocal current
            if self.changed():
                try:
                    current = self.context(*protocols)
                except Invalid as error:
                    log.warning("the former certificates stay in use: %(error)s", {"error": error})
            connection.context = current  # The handshake goes on with the newest files.

        current.sni_callback = on_hello
        return current


class HttpServer:
    """Serves ``app`` on ``sock``, which it owns, to at most ``limit`` connections. A client that could
    connect expects an answer. If its connection is closed without an answer, the client cannot know whether
    its request took effect. So ``stop`` takes these steps:

    1. Accept the connections that the kernel has established. Only then close the listener, which refuses
       later connections. (A connection that is established in the microseconds between both is reset.)
    2. From now on, answers carry ``Connection: close``: no further request is served.
    3. Give a connection that was never used `FIRST_REQUEST_S` for its request. Give a used, idle connection
       `NEXT_REQUEST_S`: HTTP/1.1 lets a server close it at any time, which clients know (RFC 9112, 9.3.1 and
       9.5).
    4. After the grace, cut off all connections and running answers.
    """

    def __init__(
        self, sock: socket.socket, app: ASGIApp, *, tls: TlsFiles | None, limit: int
    ) -> None:
        self._sock = sock
        self._app = app
        self._tls = None if tls is None else ReloadedTls(tls).context()
        self._limit = limit
        self._serving: Serving | None = None
        self._acceptor: Acceptor | None = None

    def start(self, scope: TaskScope) -> None:
        """Serve in tasks of ``scope``."""
        self._serving = serving = Serving(self._app, scope)
        self._acceptor = Acceptor(
            self._sock,
            scope,
            lambda made: HttpConnection(serving, made),
            limit=self._limit,
            count=lambda: len(serving.connections),
            make_room=self._make_room,
            tls=self._tls,
        )
        self._acceptor.start()

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Serve a connection that another listener accepted, and that began with ``first``.

        The connection counts like all others. Answer 503 at the limit, or if this server does not run.
        """
        serving = self._serving
        if serving is None or self._has_no_room(serving):
            HTTP_CONNECTIONS_REFUSED.labels("stopped" if serving is None else "limit").inc()
            transport.write(STOPPED if serving is None else REFUSAL)
            transport.close()
            return
        connection = HttpConnection(serving)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.data_received(first)

    def _has_no_room(self, serving: Serving) -> bool:
        return len(serving.connections) >= self._limit and not self._make_room()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request. Unused connections go first, those that
        close already go last. Return False if all are busy."""
        assert self._serving is not None
        waiting = [connection for connection in self._serving.connections if not connection.busy]
        if not waiting:
            return False
        oldest = min(
            waiting, key=lambda client: (client.transport.is_closing(), client.heard, client.since)
        )
        if oldest.transport.is_closing():
            oldest.cut_off()  # Its client does not take the rest of an answer.
        else:
            oldest.close()
        return True

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections, and answer present requests. Cut all connections off after ``grace_s``."""
        if self._serving is not None and self._acceptor is not None:
            try:
                async with timeout(grace_s):
                    await self._acceptor.stop()
                    await _let_end(self._serving)
            except TimeoutError:
                await _cut_off(self._serving)
            finally:
                self._serving = None
                self._acceptor.close()
        self._sock.close()


async def _let_end(serving: Serving) -> None:
    """Close used idle connections after `NEXT_REQUEST_S`, and unused ones after `FIRST_REQUEST_S`.

    Return once all connections and requests have ended.
    """
    serving.ends = True
    # An idle connection may be about to send its next request, and a new one its first.
    for wait_s, used in ((NEXT_REQUEST_S, True), (FIRST_REQUEST_S - NEXT_REQUEST_S, False)):
        await _wait(serving, wait_s, lambda: all(client.busy for client in serving.connections))
        for connection in serving.connections:
            if not connection.busy and (connection.heard or not used):
                connection.close()
    await _wait(serving, None, lambda: not serving.connections)
    if serving.requests:  # Their clients are gone.
        await asyncio.wait(set(serving.requests))


async def _wait(serving: Serving, timeout_s: float | None, done: Callable[[], bool]) -> None:
    """Return once ``done`` returns True, or after ``timeout_s`` (None: no limit)."""
    # A timeout is no error here: the caller closes the connections that are left.
    with contextlib.suppress(TimeoutError):
        async with timeout(timeout_s):
            while not done():
                serving.moved.clear()
                await serving.moved.wait()


async def _cut_off(serving: Serving) -> None:
    """Cancel the running requests, give them `_CUT_OFF_S` to end, and cut off all connections."""
    if serving.requests:
        log.error("%(count)d HTTP requests did not end in time", {"count": len(serving.requests)})
    for task in serving.requests:
        task.cancel("the HTTP server has stopped")
    if serving.requests:
        await asyncio.wait(set(serving.requests), timeout=_CUT_OFF_S)
    for connection in serving.connections:
        connection.cut_off()
    await _wait(serving, None, lambda: not serving.connections)
