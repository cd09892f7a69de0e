"""A gRPC channel over our own HTTP/2, with the methods and states of `grpc.aio.Channel`.

A channel connects for the first call. If a connection is lost, or its server drains it, the next call makes
another one. After a failed attempt the channel waits before the next attempt, and calls fail meanwhile. If
connections in a row soon end without an answered call, each but the first counts as a failed attempt. For
each connection, the channel resolves the host and reads the files of TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, cast

import grpc
import grpc.aio

from gazette.errors import GazetteError, Unavailable
from gazette.http2.client_call import ClientCall, Method
from gazette.http2.frames import ConnectionFault, FaultCode
from gazette.http2.headers import encode_fields, fits
from gazette.http2.messages import ENCODINGS
from gazette.http2.metadata import CONTENT_TYPE, block_of, timeout_field
from gazette.http2.resolve import HostResolver
from gazette.http2.socket import Http2Socket, Waiters
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from gazette.runtime.tls import tls_context
from gazette.version import __version__

log = logging.getLogger(__name__)

State = grpc.ChannelConnectivity

_UNIX: Final = "unix:"
_PORT_MAX: Final = 65_535
_GROWTH: Final = 1.6
"""Factor by which the wait grows from one failed attempt to the next, as in gRPC."""
_JITTER: Final = 0.2
_GOODBYE_S: Final = 1.0
"""Seconds for a server to take the last bytes of a channel that is closed."""
_ADDRESSES_AT_ONCE: Final = 4
"""Greatest number of addresses of a host that share the time of one attempt."""
_SOON_S: Final = 10.0
"""A connection counts as useful if its server answers a call, or if it lasts this many seconds."""
_CONNECTIONS_MAX: Final = 16
"""Greatest number of connections of a channel. If all are full, the channel opens another one."""
_KEEPALIVE_MAX_S: Final = 7200.0
_REFUSED_PINGS: Final = "too_many_pings"
"""The reason that a gRPC server gives when it refuses pings as too many."""
_CLOSED: Final = "the server closed the connection"
_DRAINED: Final = "the server takes no calls by a connection that it has just accepted"
_NO_TLS: Final = "WRONG_VERSION_NUMBER"
"""The reason that OpenSSL gives for an answer that is not TLS."""
_NOT_HTTP2: Final = "the server at this address does not speak HTTP/2, or speaks it only over TLS"
_AGENT: Final = f"gazette-python/{__version__}".encode()


class _Options:
    """The options of `grpc.aio` that have an effect here. All other options are ignored."""

    def __init__(self, options: Sequence[tuple[str, Any]]) -> None:
        values: Mapping[str, Any] = dict(options)

        def seconds(name: str, default_s: float) -> float:
            return float(values.get(f"grpc.{name}_ms", default_s * 1e3)) / 1e3

        self.receive_bytes_max = int(values.get("grpc.max_receive_message_length", 4 << 20))
        if self.receive_bytes_max < 0:  # No limit.
            self.receive_bytes_max = 1 << 32
        self.connect_timeout_s = seconds("min_reconnect_backoff", 20.0)
        self.backoff_min_s = seconds("initial_reconnect_backoff", 1.0)
        self.backoff_max_s = seconds("max_reconnect_backoff", 120.0)
        self.keepalive_s = seconds("keepalive_time", 7200.0)
        self.keepalive_timeout_s = seconds("keepalive_timeout", 20.0)


class Http2Channel:
    """A channel to one target, ``host:port`` or ``unix:/path``. Loop-bound. Close it at the end.

    ``tls`` makes the TLS context of a connection, with ALPN ``h2``; None for no TLS. ``options`` are those
    of `grpc.aio`: times of connecting and pings, and the largest message.
    """

    def __init__(
        self,
        target: str,
        tls: Callable[[], ssl.SSLContext] | None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.target = target
        self._tls = tls
        self._options = _Options(options)
        host, _, self._port = target.rpartition(":")
        self._host = host.removeprefix("[").removesuffix("]")
        self._addresses = HostResolver(self._host)
        self._tried = 0
        """Number of addresses that were tried since the last connection."""
        self._scope = TaskScope(f"channel to {target}")
        self._connection: ClientConnection | None = None  # Gets new calls; None: connect first.
        self._connections: dict[ClientConnection, None] = {}
        """All connections, including those that take no more calls and wait for the end of their calls."""
        self._connecting = False  # True while an attempt to connect runs.
        self._useless = 0
        """Number of connections in a row that were of no use (`ClientConnection.was_of_use`)."""
        self._retry: asyncio.TimerHandle | None = None  # Set during a wait after a failure.
        self._backoff_s = self._options.backoff_min_s
        self._reason = ""  # Why the last attempt has failed.
        self._calls: dict[ClientCall, None] = {}
        self._waiting: dict[ClientCall, None] = {}  # Calls without a stream, in order.
        self._changed = Waiters()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- calls

    def unary_unary(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        """Return a method of one request and one response."""
        return self._method(path, False, False, *args, **kwargs)

    def unary_stream(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        """Return a method of one request and many responses."""
        return self._method(path, False, True, *args, **kwargs)

    def stream_unary(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        """Return a method of many requests, which are written or given as a tuple, and one response."""
        return self._method(path, True, False, *args, **kwargs)

    def stream_stream(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., ClientCall]:
        """Return a method of many requests, which are written or given as a tuple, and many responses."""
        return self._method(path, True, True, *args, **kwargs)

    def _method(  # The flags say whether requests, and whether responses, are streams.
        self,
        path: str,
        streams_requests: bool,
        streams_responses: bool,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., ClientCall]:
        head = self._head_of(path)
        method = Method(
            head, streams_requests, streams_responses, request_serializer, response_deserializer
        )

        def call(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Any = None,
            wait_for_ready: bool | None = None,
        ) -> ClientCall:
            if self._closed:
                raise grpc.aio.UsageError("Channel is closed.")
            content = None
            if request is not None or not streams_requests:
                content = method.content(request)
            block = head + block_of(tuple(metadata)) if metadata else head
            if timeout is not None:
                block += encode_fields([timeout_field(timeout)])
            return ClientCall(
                self,
                method,
                block,
                content,
                timeout_s=timeout,
                wait_for_ready=bool(wait_for_ready),
                receive_bytes_max=self._options.receive_bytes_max,
            )

        return call

    def _head_of(self, path: str) -> bytes:
        """Return the part of the header block that all calls of a method have."""
        authority = "localhost" if self.target.startswith(_UNIX) else self.target
        return encode_fields(
            [
                (b":method", b"POST"),
                (b":scheme", b"http" if self._tls is None else b"https"),
                (b":path", path.encode()),
                (b":authority", authority.encode()),
                (b"te", b"trailers"),
                (b"content-type", CONTENT_TYPE),
                (b"user-agent", _AGENT),
                (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
            ]
        )

    def start(self, call: ClientCall) -> None:
        """Open the stream of a call, now or once there is room. During the wait after a failed attempt to
        connect, fail the call, unless it has ``wait_for_ready``."""
        self._calls[call] = None
        connection = self._connection
        if connection is not None and connection.has_room and not self._waiting:
            connection.open(call)
        elif connection is None and self._retry is not None and not call.wait_for_ready:
            asyncio.get_running_loop().call_soon(
                call.finish, grpc.StatusCode.UNAVAILABLE, self._failure()
            )
        else:
            self._waiting[call] = None
            self._find_room()

    def _find_room(self) -> None:
        """Give waiting calls to a connection with room. If no connection has room, make one, unless there are
        too many, or the channel waits after a failed attempt."""
        for connection in self._connections:
            if connection.has_room:
                self._connection = connection
                self.room(connection)
                return
        current = self._connection
        is_wanted = current is None or (
            current.is_full and len(self._connections) < _CONNECTIONS_MAX
        )
        if is_wanted and self._retry is None:
            self._connect()

    def ended(self, call: ClientCall) -> None:
        """Forget a call."""
        self._calls.pop(call, None)
        self._waiting.pop(call, None)
        self._changed.wake()

    # -- the connection

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection. With ``try_to_connect``, an idle channel begins to connect."""
        if self._closed:
            return State.SHUTDOWN
        if self._connection is not None:
            return State.READY
        if self._connecting:
            return State.CONNECTING
        if self._retry is not None:
            return State.TRANSIENT_FAILURE
        if try_to_connect:
            self._connect()
        return State.IDLE

    @property
    def received_bytes(self) -> int:
        """Bytes of content that have arrived on the present connections."""
        return sum(connection.received_bytes for connection in self._connections)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return once the state differs from the given one."""
        while self.get_state() is last_observed_state:
            await self._changed.wait()

    async def channel_ready(self) -> None:
        """Return once there is a connection. Raise ``UsageError`` if the channel is closed."""
        while (state := self.get_state(try_to_connect=True)) is not State.READY:
            if state is State.SHUTDOWN:
                raise grpc.aio.UsageError("Channel is closed.")
            await self.wait_for_state_change(state)

    def _connect(self) -> None:
        self._retry = None
        if not self._closed and not self._connecting:
            self._connecting = True
            self._scope.spawn(self._attempt(), name="connect")
            self._changed.wake()

    async def _attempt(self) -> None:
        """Connect once. Then calls get the connection, or the channel waits before the next attempt."""
        connections: list[ClientConnection] = []  # One for each address that was tried.

        def make() -> ClientConnection:
            connections.append(ClientConnection(self, self._options))
            return connections[-1]

        try:
            async with timeout(self._options.connect_timeout_s):
                await self._open_socket(make)
                await connections[-1].until_settled()
        except BaseException as error:
            for connection in connections:
                connection.abort()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, (OSError, ValueError, GazetteError)):
                # Such an error is a defect of the package. Let calls fail, so that they do not wait for ever.
                log.exception("cannot connect to %(address)s", {"address": self.target})
            self._not_connected(_why(error))
        else:
            self._connected(connections[-1])

    async def _open_socket(self, make: Callable[[], ClientConnection]) -> None:
        """Connect to the socket of the target, or to the first address of its host that accepts.

        Raise ``OSError`` if no address accepts, ``ValueError`` for a bad port, ``Unavailable`` for a server
        of TLS without HTTP/2.
        """
        loop = asyncio.get_running_loop()
        if self.target.startswith(_UNIX):
            path = self.target.removeprefix(_UNIX)
            await loop.create_unix_connection(make, "/" + path.lstrip("/"))
            return
        port = self._port
        if not port.isdecimal() or int(port) > _PORT_MAX:
            raise ValueError(f"the port must be a number up to {_PORT_MAX}: got {port!r}")
        tls = None if self._tls is None else self._tls()
        name = None if tls is None else self._host
        addresses = await self._addresses.find()
        # Each address gets a share of the time. The next attempt begins after the last address tried.
        share_s = self._options.connect_timeout_s / min(len(addresses), _ADDRESSES_AT_ONCE)
        first = self._tried % len(addresses)
        for count, address in enumerate(addresses[first:] + addresses[:first], 1):
            self._tried += 1
            try:
                async with timeout(share_s):
                    transport, _ = await loop.create_connection(
                        make, address, int(port), ssl=tls, server_hostname=name
                    )
                break
            except OSError:
                if count == len(addresses):
                    raise
        self._tried = 0
        tls_object = transport.get_extra_info("ssl_object")
        if tls_object is not None and tls_object.selected_alpn_protocol() != "h2":
            raise Unavailable("the server does not speak HTTP/2 over TLS")
        _end_when_unheard(transport.get_extra_info("socket"), self._options.keepalive_timeout_s)

    def _connected(self, connection: ClientConnection) -> None:
        """Give calls to a connection whose settings have arrived, unless the connection is closing."""
        self._connecting = False
        self._connection = connection
        connection.is_ready = True
        if connection.is_closing:
            self.drained(connection)
            return
        self._changed.wake()
        self.room(connection)

    def _not_connected(self, reason: str) -> None:
        """Try again after a pause, which grows with each failure. If there is no other connection, fail the
        calls that do not wait for a connection."""
        self._connecting = False
        if self._closed:
            return
        self._reason = reason
        delay_s = self._backoff_s * random.uniform(1 - _JITTER, 1 + _JITTER)
        self._backoff_s = min(self._backoff_s * _GROWTH, self._options.backoff_max_s)
        self._retry = asyncio.get_running_loop().call_later(delay_s, self._connect)
        self._changed.wake()
        if self._connection is not None:
            return  # Calls that wait for room on a connection continue to wait.
        for call in list(self._waiting):
            if not call.wait_for_ready:
                call.finish(grpc.StatusCode.UNAVAILABLE, self._failure())

    def _failure(self) -> str:
        return f"failed to connect to {self.target}: {self._reason}"

    def room(self, connection: ClientConnection) -> None:
        """Open the streams of waiting calls, as far as the server takes them."""
        while self._waiting and connection.has_room:
            call = next(iter(self._waiting))
            del self._waiting[call]
            connection.open(call)
        if self._waiting and connection is self._connection:
            self._find_room()

    def is_spare(self, connection: ClientConnection) -> bool:
        """Return True if new calls go to another connection than ``connection``."""
        return not self._connecting and self._connection not in (None, connection)

    @property
    def keepalive_s(self) -> float:
        """Seconds between two pings of a new connection, while calls run."""
        return self._options.keepalive_s

    def ping_less(self) -> None:
        """Make ``keepalive_s`` twice as long: the server has refused pings as too many."""
        self._options.keepalive_s = min(2 * self._options.keepalive_s, _KEEPALIVE_MAX_S)

    def made(self, connection: ClientConnection) -> None:
        """Note a connection whose socket is open."""
        self._connections[connection] = None

    def drained(self, connection: ClientConnection) -> None:
        """Give later calls to another connection: ``connection`` takes no more calls."""
        if self._connection is not connection:
            return
        others = (other for other in self._connections if other is not connection and other.is_live)
        self._connection = next(others, None)
        if connection.was_of_use:
            self._useless, self._backoff_s = 0, self._options.backoff_min_s
        elif self._connection is None:  # Otherwise calls go to another connection already.
            self._useless += 1
        if self._useless > 1 and self._connection is None:
            self._not_connected(f"{connection.reason or _DRAINED}, as it did before")
            return
        self._changed.wake()
        if self._waiting:
            self._find_room()

    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection whose socket is closed."""
        self._connections.pop(connection, None)
        self.drained(connection)
        self._changed.wake()
        if self._waiting:  # Also if the lost connection was one of many that are full.
            self._find_room()

    async def close(self, grace: float | None = None) -> None:
        """Take no more calls. Cancel calls that have not ended after ``grace`` seconds, then disconnect.

        Cancellation: calls are cancelled, and sockets cut off. May be repeated.
        """
        self._closed = True
        self._changed.wake()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        try:
            with contextlib.suppress(TimeoutError):
                async with timeout(grace or 0.0):
                    while self._calls:
                        await self._changed.wait()
            for call in list(self._calls):
                call.cancel()
            for connection in list(self._connections):
                connection.close()
            with contextlib.suppress(TimeoutError):
                async with timeout(_GOODBYE_S):
                    while self._connections:
                        await self._changed.wait()
        finally:
            self.abort()
            await self._scope.stop()

    def abort(self) -> None:
        """Take no more calls, cancel running calls, and cut off the connections, at once."""
        self._closed = True
        self._changed.wake()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for call in list(self._calls):
            call.cancel()
        for connection in list(self._connections):
            connection.abort()
        self._scope.cancel()


class ClientConnection(Http2Socket):
    """One connection of a channel."""

    def __init__(self, channel: Http2Channel, options: _Options) -> None:
        super().__init__(None)
        self._channel = channel
        self._keepalive_s = options.keepalive_s
        self._keepalive_timeout_s = options.keepalive_timeout_s
        self.is_ready = False
        """True once the channel may give calls to this connection."""
        self._settled = Waiters()
        self._began_at = self._loop.time()
        self.reason = ""
        """Why the connection ends; empty while this is not known."""
        self.answered = False
        """See `Carrier`."""

    @property
    def was_of_use(self) -> bool:
        """True if the server has answered a call, or has kept the connection for some time."""
        return self.answered or self._loop.time() - self._began_at >= _SOON_S

    @property
    def received_bytes(self) -> int:
        """Bytes of content that have arrived."""
        return self._connection.received_bytes

    @property
    def has_room(self) -> bool:
        """True if the server takes one more call now."""
        connection = self._connection
        is_live = self.is_ready and not self._closing and not connection.draining
        return is_live and connection.streams < connection.peer_streams_max

    @property
    def is_full(self) -> bool:
        """True if the server takes a further call only after another call has ended."""
        return self.is_live and not self.has_room

    @property
    def is_live(self) -> bool:
        """True while the channel gives calls to the connection."""
        return self.is_ready and not self._closing and not self._connection.draining

    async def until_settled(self) -> None:
        """Return once the server's settings have arrived. Raise ``Unavailable`` if the connection ends."""
        while not self._connection.settled:
            if self._closing:
                raise Unavailable(self.reason or _CLOSED)
            await self._settled.wait()

    def open(self, call: ClientCall) -> None:
        """Open the stream of a call. Fail a call with metadata that would end the connection."""
        connection = self._connection
        if fits(call.head, connection.peer_list_bytes_max):
            call.opened(connection.open(call.head, call, ended=False), self)
        else:
            text = f"the server takes at most {connection.peer_list_bytes_max} bytes of metadata"
            call.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._channel.made(self)
        self._set_timer(self._keepalive_s, self._check)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self.reason:
            self.reason = _CLOSED if error is None else _why(error)
            if not self._connection.settled:  # The server may require TLS.
                self.reason += " before it spoke HTTP/2"
        self._connection.lose(Unavailable(self.reason))
        self._settled.wake()
        self._channel.lost(self)

    def _on_fault(self, fault: ConnectionFault) -> None:
        # The code is from our GOAWAY. With NO_ERROR, the text names the code of the server.
        reason = fault.message if fault.code is FaultCode.NO_ERROR else str(fault)
        self.reason = reason if self._connection.settled else _NOT_HTTP2
        if _REFUSED_PINGS in self.reason:
            self._channel.ping_less()
        self._channel.drained(self)
        super()._on_fault(fault)

    def _on_change(self) -> None:
        """Let waiting calls begin. Close a connection that has no calls, and gets no more."""
        connection = self._connection
        self._settled.wake()
        if connection.draining:
            self._channel.drained(self)
            if not connection.streams:
                self._loop.call_soon(self._close_unused)
            return
        self._channel.room(self)
        if not connection.streams and self._channel.is_spare(self):
            self._loop.call_soon(self._close_unused)

    def _close_unused(self) -> None:
        """Close the connection, unless a call has begun on it meanwhile, or calls begin on it again."""
        connection = self._connection
        if not connection.streams and (connection.draining or self._channel.is_spare(self)):
            self.close()

    def _check(self) -> None:
        """Give up the server if it is silent while calls wait for an answer."""
        if not self._connection.streams:
            self._pinged_at = None
        elif self._fell_silent(self._keepalive_s / 2, self._keepalive_timeout_s / 2):
            self.reason = "keepalive watchdog timeout"
            self.abort()
            return
        is_pinged = self._pinged_at is not None
        self._set_timer(self._keepalive_timeout_s if is_pinged else self._keepalive_s, self._check)


def _why(error: BaseException) -> str:
    """Return in words why an attempt to connect has failed, or a connection has ended."""
    if isinstance(error, TimeoutError):
        return "connect timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the server is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason == _NO_TLS:
        return "what listens there does not speak TLS"
    if isinstance(error, ssl.SSLError) or not isinstance(error, OSError) or not error.errno:
        return str(error)
    return os.strerror(error.errno)  # Not str(error): asyncio replaces the text of the system.


def _end_when_unheard(connection: Any, seconds: float) -> None:
    """Let the kernel close the connection once sent bytes stay unacknowledged for ``seconds``."""
    if connection is None or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    milliseconds = int(seconds * 1e3)
    with contextlib.suppress(OSError):  # A kernel without this option waits longer.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class Http2Transport:
    """Makes channels of our own HTTP/2. ``tls`` gives their TLS context; credentials only ask for TLS."""

    def __init__(self, tls: Callable[[], ssl.SSLContext] = tls_context) -> None:
        self._tls = tls

    @property
    def ends_silent_calls(self) -> bool:
        """Return False: servers permit pings only minutes apart."""
        return False

    def channel(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Sequence[tuple[str, Any]],
    ) -> grpc.aio.Channel:
        """Make a channel, with TLS unless ``credentials`` is None. Raise ``Invalid`` for bad files of TLS."""
        tls = None if credentials is None else self._tls
        if tls is not None:
            tls()  # Raise here, at the caller, if files of TLS are unusable.
        return cast("grpc.aio.Channel", Http2Channel(target, tls, options))
