"""A process's two servers: gRPC and HTTP on one port, HTTP on another.

A member advertises the first port as its gRPC endpoint. By default, the HTTP port is the next port.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from gazette.http2.connection import STREAMS_MAX
from gazette.net.grpc.grpc_server import Admit, GrpcServer
from gazette.net.grpc.whole_call import TakeWhole
from gazette.net.http_guard import is_loopback
from gazette.net.http_server import (
    UNIX_PREFIX,
    HttpServer,
    ReloadedTls,
    TlsFiles,
    bind_tcp,
    bind_unix,
    port_number,
)
from gazette.runtime.clock import Clock
from gazette.runtime.file_limit import ConnectionLimits
from gazette.runtime.ports import bracketed
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The addresses to listen on and to advertise.

    A port is ``""`` (a free one), a number, or ``unix:///path``. ``host`` is advertised; the servers listen
    on ``bind_host`` (empty: all interfaces).
    """

    host: str
    port: str = ""
    http_port: str = ""
    bind_host: str = ""
    tls: TlsFiles | None = None
    max_recv_bytes: int = 4_194_304
    graceful_stop_s: float = 15.0
    streams_max: int = STREAMS_MAX
    """Calls that one connection may have open at a time."""
    limits: ConnectionLimits | None = None
    """Connections of each port; None: as many as the limit of open files permits."""


def advertised_host(bind_host: str, default_host: str) -> str:
    """Return the host to advertise if no host is given. A loopback address is reachable only as itself."""
    return bind_host if is_loopback(bind_host) else default_host


def warn_of_open_server(settings: ServerSettings, group: str, what: str) -> None:
    """Log a warning if other machines may call a server that has no keys.

    ``group`` is the group of flags of this server. ``what`` says what callers can do.
    """
    only_unix = settings.port.startswith(UNIX_PREFIX) and (
        not settings.http_port or settings.http_port.startswith(UNIX_PREFIX)
    )
    private = only_unix or is_loopback(settings.bind_host)
    certified = settings.tls is not None and settings.tls.ca_file
    if private or certified:
        return
    log.warning(
        "without keys, every caller that can connect to %(address)s can %(what)s: set --%(group)s.auth-keys,"
        " or listen on loopback only with --%(group)s.bind-host=127.0.0.1",
        {
            "address": settings.bind_host or "any address of this machine",
            "what": what,
            "group": group,
        },
    )


class Server:
    """A gRPC and an HTTP server. Bind both first, so that the endpoint is known. Then start them."""

    def __init__(self, clock: Clock, settings: ServerSettings) -> None:
        self.settings = settings
        self._clock = clock
        self._limits = settings.limits or ConnectionLimits.of_process()
        self.grpc = GrpcServer(
            clock,
            max_recv_bytes=settings.max_recv_bytes,
            limit=self._limits.grpc,
            streams_max=settings.streams_max,
        )
        """The gRPC server, which takes handlers until ``start_grpc``."""
        self.endpoint = ""
        """``http(s)://host:port`` or ``unix://host/path`` of the gRPC server."""
        self.http_endpoint = ""
        self._http_socket: socket.socket | None = None
        self._http: HttpServer | None = None

    def bind(self) -> None:
        """Bind both ports. Raise ``Unavailable`` (in use) or ``Invalid``; ``stop`` frees them."""
        if self.settings.tls is not None:
            # Find files that do not fit together before ports are bound.
            ReloadedTls(self.settings.tls).context()
        scheme = "http" if self.settings.tls is None else "https"
        self._bind_http(scheme, self._bind_grpc(scheme))

    def _bind_grpc(self, scheme: str) -> int:
        """Bind the gRPC server. Return its port, or -1 for a unix socket."""
        settings = self.settings
        if settings.port.startswith(UNIX_PREFIX):
            path = settings.port.removeprefix(UNIX_PREFIX)
            self.grpc.listen(bind_unix(path), None)
            self.endpoint = f"{UNIX_PREFIX}{settings.host}{path}"
            return -1
        listener = bind_tcp(settings.bind_host, port_number(settings.port, "port"))
        self.grpc.listen(listener, None if settings.tls is None else ReloadedTls(settings.tls))
        port = int(listener.getsockname()[1])
        self.endpoint = f"{scheme}://{bracketed(settings.host)}:{port}"
        return port

    def _bind_http(self, scheme: str, grpc_port: int) -> None:
        """Bind the HTTP server to its own port if one is given, or to the port after ``grpc_port``.

        If no port is given at all, any free port will do. ``grpc_port`` is -1 for a unix socket.
        """
        settings, http_port = self.settings, self.settings.http_port
        if not http_port and settings.port.startswith(UNIX_PREFIX):
            http_port = f"{settings.port}.http"
        if http_port.startswith(UNIX_PREFIX):
            path = http_port.removeprefix(UNIX_PREFIX)
            self._http_socket = bind_unix(path)
            self.http_endpoint = f"{UNIX_PREFIX}{settings.host}{path}"
            return
        number = port_number(http_port, "http-port")
        if not number and port_number(settings.port, "port"):
            number = grpc_port + 1
        self._http_socket = bind_tcp(settings.bind_host, number)
        port = self._http_socket.getsockname()[1]
        self.http_endpoint = f"{scheme}://{bracketed(settings.host)}:{port}"

    def start_http(self, scope: TaskScope, app: ASGIApp) -> None:
        """Serve ``app``. If the HTTP server dies, ``scope`` fails."""
        assert self._http_socket is not None, "bind() comes first"
        unix = self._http_socket.family == socket.AF_UNIX
        self._http = HttpServer(
            self._http_socket,
            app,
            tls=None if unix else self.settings.tls,
            limit=self._limits.http,
        )
        self._http.start(scope)
        self.grpc.http1 = self._http.take

    def add_handlers(
        self, handler: Any, whole: Mapping[str, TakeWhole], admit: Admit | None = None
    ) -> None:
        """Serve the methods of a generic handler.

        The functions of ``whole``, by path, get calls that arrive as a whole. ``admit`` checks the heads of
        all other calls.
        """
        self.grpc.add_generic_rpc_handlers((handler,), admit)
        for path, take in whole.items():
            self.grpc.take_whole_calls(path, take)

    async def start_grpc(self) -> None:
        """Serve the handlers that were added to ``grpc``. Until then, connections wait."""
        await self.grpc.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls. Cut accepted calls off that do not end in ``grace_s`` (None: as in settings)."""
        grace = self.settings.graceful_stop_s if grace_s is None else grace_s
        scope = TaskScope("server-stop")
        async with scope:
            scope.spawn(self.grpc.stop(grace), name="grpc")
            if self._http is not None:
                scope.spawn(self._stop_http(self._http, grace), name="http")
            elif self._http_socket is not None:
                self._http_socket.close()

    async def _stop_http(self, http: HttpServer, grace_s: float) -> None:
        # Until `decided` is set, connections of the gRPC port may turn out to be HTTP/1.1.
        await self.grpc.decided.wait()
        await http.stop(grace_s)
