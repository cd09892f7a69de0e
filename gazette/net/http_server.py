"""One listening socket that serves one ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from gazette.errors import Broken, Invalid, Unavailable
from gazette.net.graceful_http import Connection, GracefulServer
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

UNIX_PREFIX: Final = "unix://"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server. With ``ca_file``, callers must present a certificate of that CA."""

    cert_file: str
    key_file: str
    ca_file: str = ""

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return certificate, key and CA. Raise ``Invalid`` that names the file."""
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
    """Return a listening unix socket. A socket file without a listener is replaced."""
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
    """Return a listening socket for ``--debug.port``, on the host of the other ports.

    Raise ``Invalid``, and ``Unavailable`` (the port is in use).
    """
    if port.startswith(UNIX_PREFIX):
        return bind_unix(port.removeprefix(UNIX_PREFIX))
    return bind_tcp(host, port_number(port, "--debug.port"))


def port_number(text: str, setting: str) -> int:
    """Return the number of a port, 0 for no text. Raise ``Invalid`` that names the setting."""
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65_535:
        raise Invalid(f'invalid port "{text}" (expected a number, or unix:///path)', path=setting)
    return int(text)


def clear_stale_socket(path: str) -> None:
    """Remove the socket file of a process that is gone. Raise ``Unavailable`` if a process listens there."""
    if not os.path.lexists(path):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return
    raise cannot_listen(f"{UNIX_PREFIX}{path}", OSError(errno.EADDRINUSE, "Address already in use"))


def cannot_listen(address: str, error: OSError) -> Unavailable:
    hint = "Choose another port, or stop the process that uses this one."
    if error.errno != errno.EADDRINUSE:
        hint = "Choose another address: this one cannot be used on this machine."
    return Unavailable(
        f"cannot listen on {address}: {error.strerror or error}", hint=hint, address=address
    )


class ReloadedTls:
    """The files of ``TlsFiles``, read again at each connection. Any thread.

    If new files cannot be read or used, the former ones stay in use.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raise ``Invalid`` for one that cannot be read."""
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
        """Return a context that replaces itself once there are new files.

        Clients get the first of ``protocols`` (of ALPN; without any, HTTP/1.1) that they offer. Raise
        ``Invalid`` for files that do not fit together.
        """
        files = self._files
        try:
            current = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
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
            connection.context = current

        current.sni_callback = on_hello
        return current


class HttpServer:
    """Serves ``app`` on ``sock`` to at most ``limit`` connections. It owns ``sock`` from now on."""

    def __init__(
        self, sock: socket.socket, app: ASGIApp, *, tls: TlsFiles | None, limit: int
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
        )
        if tls is not None:
            config.load()
            config.ssl = ReloadedTls(tls).context()
        self._config = config
        self._server: GracefulServer | None = None
        self._sock = sock
        self._limit = limit
        self._task: asyncio.Task[None] | None = None

    def start(self, scope: TaskScope) -> None:
        """Serve in a task of ``scope``. If the server ends without ``stop``, the scope fails."""
        self._server = GracefulServer(self._config, scope=scope, limit=self._limit)
        self._task = scope.spawn(self._serve(self._server), name="http")

    async def _serve(self, server: GracefulServer) -> None:
        try:
            await server.serve(sockets=[self._sock])
        finally:
            server.close()
        if not server.stopping.is_set():
            raise Broken("the HTTP server ended without a stop")

    def take(self, transport: asyncio.Transport, first: bytes) -> None:
        """Serve a connection that another listener accepted, and that began with ``first``."""
        assert self._server is not None, "start() comes first"
        self._server.take(transport, first)

    async def stop(self, grace_s: float) -> None:
        """Refuse new connections, answer present ones, and cut off those that take longer than ``grace_s``.

        See `gazette.net.graceful_http` for the steps.
        """
        if self._server is not None and self._task is not None:
            self._server.grace_s = grace_s
            self._server.stopping.set()
            await asyncio.wait({self._task})
        self._sock.close()
