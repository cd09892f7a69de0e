"""A process's two servers: gRPC on one port, HTTP on another.

A member advertises its gRPC endpoint. The HTTP port is the next one, unless it is given. With `HTTP2`, which
is the default of brokers, the gRPC port serves HTTP/1.1 as well. With `GRPCIO` it cannot: gRPC's core owns
its listening socket.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from starlette.types import ASGIApp

from gazette.net.grpc_metrics import MetricsInterceptor
from gazette.net.http2.connection import STREAMS_MAX
from gazette.net.http2.grpc_server import Admit, GrpcServer
from gazette.net.http2.whole_call import TakeWhole
from gazette.net.http_guard import is_loopback
from gazette.net.http_server import (
    UNIX_PREFIX,
    HttpServer,
    ReloadedTls,
    TlsFiles,
    bind_tcp,
    bind_unix,
    cannot_listen,
    clear_stale_socket,
    port_number,
)
from gazette.runtime.clock import Clock
from gazette.runtime.file_limit import ConnectionLimits
from gazette.runtime.ports import bracketed
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

GRPCIO: Final = "grpcio"
"""The transport of the package `grpcio`."""
HTTP2: Final = "http2"
"""Our own transport: `gazette.net.http2`."""
KEEPALIVE_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 10.0
_HANDSHAKE_S: Final = 10.0
_IDLE_S: Final = 600.0
_ARRIVING_S: Final = 0.1
"""Seconds after the last call in which one that had arrived before the stop may begin."""
STREAM_WINDOW_BYTES: Final = 1 << 22
"""Bytes that a client may send ahead of an acknowledgement. A round trip of 1 ms then permits 4
GB/s, one of 100 ms 40 MB/s.
"""


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
    transport: str = GRPCIO
    """`GRPCIO` or `HTTP2`: what serves gRPC."""
    streams_max: int = STREAMS_MAX
    """Calls that a connection of `HTTP2` may have open at a time."""
    limits: ConnectionLimits | None = None
    """Connections of each port; None: as many as the limit of open files permits."""


def advertised_host(bind_host: str, default_host: str) -> str:
    """Return the host to advertise if none is given: a loopback address is reachable only as itself."""
    return bind_host if is_loopback(bind_host) else default_host


def warn_of_open_server(settings: ServerSettings, group: str, what: str) -> None:
    """Log a warning if other machines may call a server that has no keys.

    ``group`` is the group of flags of this server. ``what`` says what callers can do.
    """
    sockets = settings.port.startswith(UNIX_PREFIX) and (
        not settings.http_port or settings.http_port.startswith(UNIX_PREFIX)
    )
    private = sockets or is_loopback(settings.bind_host)
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


def _credentials(tls: ReloadedTls) -> grpc.ServerCredentials:
    """Return credentials that are read again when the files change.

    gRPC asks for them at each connection, in a thread of its own. Whether callers must have certificates
    cannot change while it serves.
    """

    def configuration() -> Any:
        certificate, key, authority = tls.contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def fetch() -> Any:
        return configuration() if tls.changed() else None  # None: as before

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,
        require_client_authentication=tls.contents[2] is not None,
    )


def grpc_options(max_recv_bytes: int, connections: int) -> list[tuple[str, Any]]:
    """Return options of the gRPC server: pings find peers that are silently gone.

    Beyond ``connections``, new ones are closed at once. One that does not speak HTTP/2 within
    ``_HANDSHAKE_S``, or has no call for ``_IDLE_S``, is closed as well.
    """
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
        ("grpc.max_connection_idle_ms", int(_IDLE_S * 1000)),
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_recv_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping as often as they like: ours do, to notice a dead broker early.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        # Bounds what a stream holds: bytes on their way to this server, or here and not taken yet.
        # gRPC would let that grow with what a connection could carry. That is some hundred
        # megabytes for an append that arrives faster than its bytes are replicated.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ]


class Server:
    """A gRPC and an HTTP server. Bind both first, so that the endpoint is known; then start them."""

    def __init__(self, clock: Clock, settings: ServerSettings) -> None:
        self.settings = settings
        self._clock = clock
        self._limits = settings.limits or ConnectionLimits.of_process()
        self._http2: GrpcServer | None = None
        self._interceptor = MetricsInterceptor(clock)
        self.grpc: Any = None
        """The server of the transport. It takes handlers until ``start_grpc``."""
        if settings.transport == HTTP2:
            self.grpc = self._http2 = GrpcServer(
                clock,
                max_recv_bytes=settings.max_recv_bytes,
                limit=self._limits.grpc,
                streams_max=settings.streams_max,
            )
        else:
            self.grpc = grpc.aio.server(
                options=grpc_options(settings.max_recv_bytes, self._limits.grpc),
                interceptors=[self._interceptor],
            )
        self.endpoint = ""
        """``http(s)://host:port`` or ``unix://host/path`` of the gRPC server."""
        self.http_endpoint = ""
        self._http_socket: socket.socket | None = None
        self._http: HttpServer | None = None

    def bind(self) -> None:
        """Bind both ports. Raise ``Unavailable`` (in use) or ``Invalid``; ``stop`` frees them."""
        if self.settings.tls is not None:
            ReloadedTls(
                self.settings.tls
            ).context()  # gRPC's core would only say that it cannot listen.
        scheme = "http" if self.settings.tls is None else "https"
        self._bind_http(scheme, self._bind_grpc(scheme))

    def _bind_grpc(self, scheme: str) -> int:
        """Bind the gRPC server. Return its port, or -1 for a unix socket."""
        settings = self.settings
        if settings.port.startswith(UNIX_PREFIX):
            path = settings.port.removeprefix(UNIX_PREFIX)
            if self._http2 is not None:
                self._http2.listen(bind_unix(path), None)
            else:
                clear_stale_socket(path)
                self._add_port(f"unix:{path}", settings.port, None)
            self.endpoint = f"{UNIX_PREFIX}{settings.host}{path}"
            return -1
        wanted = port_number(settings.port, "port")
        if self._http2 is not None:
            listener = bind_tcp(settings.bind_host, wanted)
            self._http2.listen(
                listener, None if settings.tls is None else ReloadedTls(settings.tls)
            )
            port = int(listener.getsockname()[1])
            self.endpoint = f"{scheme}://{bracketed(settings.host)}:{port}"
            return port
        if wanted:
            # gRPC's core reports a port in use on stderr and by an unspecific error: ask the kernel first.
            bind_tcp(settings.bind_host, wanted).close()
        host = settings.bind_host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
        address = f"[{host}]:{wanted}" if ":" in host else f"{host}:{wanted}"
        port = self._add_port(address, address, settings.tls)
        self.endpoint = f"{scheme}://{bracketed(settings.host)}:{port}"
        return port

    def _add_port(self, address: str, name: str, tls: TlsFiles | None) -> int:
        try:
            if tls is None:
                return int(self.grpc.add_insecure_port(address))
            return int(self.grpc.add_secure_port(address, _credentials(ReloadedTls(tls))))
        except RuntimeError as error:
            raise cannot_listen(name, OSError(0, str(error).partition(";")[0])) from error

    def _bind_http(self, scheme: str, grpc_port: int) -> None:
        settings, wanted = self.settings, self.settings.http_port
        if not wanted and settings.port.startswith(UNIX_PREFIX):
            wanted = f"{settings.port}.http"
        if wanted.startswith(UNIX_PREFIX):
            path = wanted.removeprefix(UNIX_PREFIX)
            self._http_socket = bind_unix(path)
            self.http_endpoint = f"{UNIX_PREFIX}{settings.host}{path}"
            return
        number = port_number(wanted, "http-port")
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
        if self._http2 is not None:
            self._http2.http1 = self._http.take

    def add_handlers(
        self, handler: Any, whole: Mapping[str, TakeWhole], admit: Admit | None = None
    ) -> None:
        """Serve the methods of a generic handler.

        Our own transport offers calls that arrive as a whole to the functions of ``whole``, by path. It
        shows the heads of others to ``admit``.
        """
        if self._http2 is None:
            self.grpc.add_generic_rpc_handlers((handler,))
        else:
            self._http2.add_generic_rpc_handlers((handler,), admit)
            for path, take in whole.items():
                self._http2.take_whole_calls(path, take)

    async def start_grpc(self) -> None:
        """Serve the servicers that were added to ``grpc``. Before, connections wait."""
        await self.grpc.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, let accepted ones end within ``grace_s``, then cut them off."""
        grace = self.settings.graceful_stop_s if grace_s is None else grace_s
        scope = TaskScope("server-stop")
        async with scope:
            stopping = self.grpc.stop(grace)
            if self._http2 is None:
                stopping = self._stop_grpcio(stopping)
            scope.spawn(stopping, name="grpc")
            if self._http is not None:
                scope.spawn(self._stop_http(self._http, grace), name="http")
            elif self._http_socket is not None:
                self._http_socket.close()

    async def _stop_grpcio(self, stopping: Coroutine[Any, Any, None]) -> None:
        """Wait for ``stopping``. End calls early that were never served, when no others are left.

        Of calls that come just when it stops, the package grpcio neither serves nor ends some. Their
        callers, and the stop, would wait for all of the grace.
        """

        async def end_unserved() -> None:
            await self._interceptor.wait_idle()
            await self._clock.sleep(_ARRIVING_S)
            await self._interceptor.wait_idle()
            await self.grpc.stop(None)

        async with TaskScope("grpcio-stop") as scope:
            scope.spawn(end_unserved(), name="unserved")
            try:
                await stopping
            finally:
                scope.cancel()

    async def _stop_http(self, http: HttpServer, grace_s: float) -> None:
        if self._http2 is not None:
            # Before that, connections of the gRPC port may turn out to be of HTTP/1.1.
            await self._http2.decided.wait()
        await http.stop(grace_s)
