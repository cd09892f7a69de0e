"""Connections to the processes of a cluster: one gRPC channel per endpoint, closed when unused."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio

from gazette.auth import Signer
from gazette.client.rpc.credentials import Credentials
from gazette.client.rpc.dispatch import Health, pick
from gazette.client.rpc.errors import map_errors
from gazette.client.rpc.metrics import call_metrics
from gazette.client.rpc.stream_call import StreamCall, of_ended
from gazette.errors import Closed, Invalid, Unavailable
from gazette.net.http2.grpc_client import Http2Transport
from gazette.net.transport import Transport
from gazette.protocol.content import decode_read, encode_append
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.protocol.route import Route, grpc_target
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.forks import MadeBeforeFork
from gazette.runtime.tasks import TaskScope

log = logging.getLogger(__name__)

_GRACE_S: Final = 5.0
_PROBE: Final = "/grpc.health.v1.Health/Check"
_TOO_MANY_PINGS: Final = "too many pings"
_KEEPALIVE_MAX_S: Final = 7200.0


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM form, used for ``https`` endpoints.

    Without ``ca_file`` the roots of this machine are trusted. ``cert_file`` and ``key_file`` identify
    us to peers that ask for it.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def of(cls, ca_file: str, cert_file: str, key_file: str) -> TlsSettings | None:
        """Return the settings of paths, each empty if there is no such file; None without any path."""
        files = [Path(one) if one else None for one in (ca_file, cert_file, key_file)]
        return cls(*files) if any(files) else None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raise ``Invalid`` for one that cannot be read."""
        self._check()
        return grpc.ssl_channel_credentials(
            root_certificates=_contents(self.ca_file, "trusted-ca-file"),
            private_key=_contents(self.key_file, "cert-key-file"),
            certificate_chain=_contents(self.cert_file, "cert-file"),
        )

    def context(self) -> ssl.SSLContext:
        """Return a context for our own HTTP/2. Raise ``Invalid`` for a file that cannot be used.

        Without ``ca_file`` the roots of this machine are trusted.
        """
        self._check()
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # Also of TLS itself.
            names = ", ".join(str(one) for one in (self.ca_file, self.cert_file) if one is not None)
            raise Invalid(f"cannot use {names} for TLS: {error}", path="cert-file") from error
        context.set_alpn_protocols(["h2"])
        return context

    def _check(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise Invalid("a certificate and its key must be given together", path="cert-file")


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Limits of every channel.

    A Go server permits one ping in five minutes. It closes a connection that sends more, with all its
    calls. So pings only keep connections through firewalls, and ``silence_s`` finds silent peers.
    """

    keepalive_s: float = 360.0
    """Seconds between pings while calls run. Doubled if a server says that these are too many."""
    keepalive_timeout_s: float = 10.0
    """Seconds that a ping may go without an answer. Then the connection is closed.

    It also limits how long content may go without an acknowledgement by the peer's machine.
    """
    silence_s: float = 20.0
    """Seconds without the end of a call of a channel, after which the peer is probed. 0: never."""
    silence_timeout_s: float = 20.0
    """Seconds that a peer may leave the probe unanswered. Then it has fallen silent: its calls end."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 5.0
    connect_timeout_s: float = 5.0
    receive_bytes_max: int = 16 << 20
    idle_s: float = 30.0
    """Seconds after which a channel without use, and without a call in flight, is closed."""

    def options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self.receive_bytes_max),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", int(self.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_s * 1e3)),
            # Without this option gRPC waits a minute for the answer to a ping, in spite of the one above.
            ("grpc.http2.ping_timeout_ms", int(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", int(self.backoff_min_s * 1e3)),
            ("grpc.min_reconnect_backoff_ms", int(self.connect_timeout_s * 1e3)),
            ("grpc.max_reconnect_backoff_ms", int(self.backoff_max_s * 1e3)),
            # We retry ourselves: retries of gRPC would keep a copy of what is streamed.
            ("grpc.enable_retries", 0),
            # Connections of one object are its own, so closing the object closes them.
            ("grpc.use_local_subchannel_pool", 1),
        ]


class Channels:
    """Channels by endpoint (``http://host:port``, ``https://…``, ``unix://host/path``). Loop-bound.

    They speak HTTP/2 of our own, unless there is another ``transport``.

    Stubs count the calls made through them, so no channel is closed during a call. Do not keep a
    stub of ``journal`` or ``shard``: get it again for every use.
    """

    def __init__(
        self,
        zone: str = "",
        tls: TlsSettings | None = None,
        signer: Signer | None = None,
        *,
        clock: Clock | None = None,
        settings: ChannelSettings | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.zone = zone
        self._tls = TlsSettings() if tls is None else tls
        self._transport = Http2Transport(self._tls.context) if transport is None else transport
        self.clock: Clock = SystemClock() if clock is None else clock
        self.credentials = Credentials(signer, self.clock)
        self._settings = ChannelSettings() if settings is None else settings
        self._channels: dict[str, _Channel] = {}
        self._scope = TaskScope("channels")
        self._swept = self.clock.monotonic()
        self._pinned: set[str] = set()
        self._members: dict[str, int] = {}
        self._watching = False
        self._process = MadeBeforeFork("a client")
        self._closed = False

    @property
    def closed(self) -> bool:
        """True if they were closed, or belong to the process from which this one was forked."""
        return self._closed or self._process.is_left

    def __len__(self) -> int:
        return len(self._channels)

    def pin(self, endpoint: str) -> None:
        """Keep the channel of this endpoint open even if unused (the default address)."""
        self._pinned.add(endpoint)

    def journal(self, endpoint: str) -> JournalStub:
        """Return the Journal service at an endpoint. Raise ``Invalid`` for a malformed one, or ``Closed``."""
        return self._channel(endpoint).journal

    def shard(self, endpoint: str) -> ShardStub:
        """Return the Shard service at an endpoint. Raise ``Invalid`` for a malformed one, or ``Closed``."""
        return self._channel(endpoint).shard

    def byte_path(self, endpoint: str) -> BytePath:
        """Return Append and Read at an endpoint, by their fast encodings. Raise as ``journal`` does."""
        return self._channel(endpoint).byte_path

    def grpc_channel(self, endpoint: str) -> grpc.aio.Channel:
        """Return the channel of an endpoint, for services of applications. Its calls are counted too."""
        return cast("grpc.aio.Channel", self._channel(endpoint))

    async def connect(self, endpoint: str) -> bool:
        """Return True if an endpoint is connected, after an attempt to connect if it is not.

        Raise ``Invalid`` for a malformed endpoint, or ``Closed``. After a cancellation the attempt goes on.
        """
        channel = self._channel(endpoint)
        with map_errors("connect", self, endpoint=endpoint):
            return await channel.connect()

    def health(self, endpoint: str) -> Health:
        """Return the state of the connection to an endpoint. Do not connect."""
        channel = self._channels.get(endpoint)
        return Health.IDLE if channel is None else channel.health()

    def pick(
        self, route: Route, *, process_id: ProcessId | None = None, primary: bool = False
    ) -> str | None:
        """Return ``dispatch.pick`` by the state of our channels and our zone."""
        return pick(route, self.zone, self.health, process_id=process_id, primary=primary)

    def member(self, route: Route, process_id: ProcessId) -> JournalStub:
        """Return the Journal service of exactly that member. Raise ``Unavailable`` without an endpoint."""
        endpoint = self.pick(route, process_id=process_id)
        if endpoint is None:
            raise Unavailable("the route has no endpoint of this member", member=process_id)
        return self.journal(endpoint)

    def follow(self, members: Mapping[str, int]) -> None:
        """Learn the present members: the CreateRevision of each one's key, by endpoint.

        A process whose key is gone, or was created again, has lost its lease: calls to it end with
        ``Closed`` at once. The next call connects without the back-off of the old connection.
        """
        before, self._members = self._members, dict(members)
        for endpoint, created in before.items():
            if members.get(endpoint) == created:
                continue
            channel = self._channels.pop(endpoint, None)
            if channel is not None and not self.closed:
                self._scope.spawn(channel.close(None), name=f"close {endpoint}")

    def _channel(self, endpoint: str) -> _Channel:
        if self.closed:
            self._process.require()
            raise Closed("the client's channels were closed")
        now = self.clock.monotonic()
        if now - self._swept >= self._settings.idle_s:
            self._sweep(now)
        channel = self._channels.get(endpoint)
        if channel is None:
            keepalive_s = self._settings.keepalive_s
            channel = self._channels[endpoint] = _Channel(
                self._open(endpoint),
                self.clock,
                self._on_start,
                lambda: self._on_refused_pings(keepalive_s),
            )
        channel.used_at = now
        return channel

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        target, tls = grpc_target(endpoint)
        options = self._settings.options()
        credentials = self._tls.credentials() if tls else None
        return self._transport.channel(target, credentials, options)

    def _on_start(self) -> None:
        if self._watching or self._transport.ends_silent_calls or not self._settings.silence_s:
            return
        self._watching = True
        self._scope.spawn(self._watch(), name="watch for silence")

    def _on_refused_pings(self, keepalive_s: float) -> None:
        """Raise the interval of pings for later channels. gRPC raises it for the channel whose
        pings were refused.
        """
        raised_s = min(2 * keepalive_s, _KEEPALIVE_MAX_S)
        if raised_s > self._settings.keepalive_s:
            self._settings = replace(self._settings, keepalive_s=raised_s)
            log.warning(
                "a server refuses our pings as too many: new connections send one in %(seconds)g s",
                {"seconds": raised_s},
            )

    async def _watch(self) -> None:
        """Probe peers whose calls have not ended for long. End with the calls."""
        silence_s = self._settings.silence_s
        try:
            while True:
                await self.clock.sleep(silence_s / 2)
                busy = [one for one in self._channels.items() if one[1].calls]
                if not busy:
                    return
                since = self.clock.monotonic() - silence_s
                async with TaskScope("silent peers") as scope:
                    for endpoint, channel in busy:
                        if channel.heard_at <= since:
                            scope.spawn(self._ask(endpoint, channel), name=f"ask {endpoint}")
        finally:
            self._watching = False

    async def _ask(self, endpoint: str, channel: _Channel) -> None:
        """End the calls of a channel if its peer does not answer."""
        timeout_s = self._settings.silence_timeout_s
        if await channel.answers(timeout_s) or self._channels.get(endpoint) is not channel:
            return
        log.warning(
            "%(endpoint)s has not answered for %(seconds)g s: its connection is closed, its calls end",
            {"endpoint": endpoint, "seconds": timeout_s},
        )
        del self._channels[endpoint]
        await channel.close(None)

    def _sweep(self, now: float) -> None:
        self._swept = now
        for endpoint, channel in list(self._channels.items()):
            unused = channel.calls == 0 and now - channel.used_at >= self._settings.idle_s
            if unused and endpoint not in self._pinned:
                del self._channels[endpoint]
                self._scope.spawn(channel.close(None), name=f"close {endpoint}")

    async def close(self, grace_s: float | None = None) -> None:
        """Close every channel. Calls in flight get ``grace_s`` seconds to end, then are cancelled.

        After a cancellation the object is closed, and sockets close when the loop next runs.
        May be repeated.
        """
        self._closed = True
        if self._process.is_left:
            # The connections are the parent's: send nothing on them.
            self._channels.clear()
            return
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(grace_s)
        await self._scope.stop(_GRACE_S)


class BytePath:
    """The calls that carry journal bytes.

    Requests of ``append`` are messages or their encoding. Responses of ``read`` are `wire.Content`
    where possible.
    """

    __slots__ = ("append", "read")

    def __init__(self, channel: _Channel) -> None:
        append = channel.stream_unary(
            "/protocol.Journal/Append",
            request_serializer=encode_append,
            response_deserializer=broker_pb2.AppendResponse.FromString,
        )
        self.append: Callable[..., StreamCall] = lambda **call: StreamCall(append(**call))
        self.read: Callable[..., Any] = channel.unary_stream(
            "/protocol.Journal/Read",
            request_serializer=broker_pb2.ReadRequest.SerializeToString,
            response_deserializer=decode_read,
        )


class _Channel:
    """A gRPC channel that counts its calls and remembers whether its connection fails.

    It has the four methods that generated stubs call on a channel.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Clock,
        on_start: Callable[[], None],
        on_refused_pings: Callable[[], None],
    ) -> None:
        self._grpc = channel
        self._clock = clock
        self._on_start = on_start
        self._on_refused_pings = on_refused_pings
        self._failing = False
        self.calls = 0
        self.used_at = 0.0
        self.heard_at = 0.0
        """Time at which the first of the present calls began, a call last
        ended, or the peer last answered.
        """
        self.journal = JournalStub(cast("grpc.aio.Channel", self))
        self.shard = ShardStub(cast("grpc.aio.Channel", self))
        self.byte_path = BytePath(self)

    def health(self) -> Health:
        """Return the connection's state.

        A failure counts until the connection is ready again: a failing channel goes through
        CONNECTING again and again.
        """
        match self._grpc.get_state():
            case grpc.ChannelConnectivity.READY:
                self._failing = False
                return Health.READY
            case grpc.ChannelConnectivity.TRANSIENT_FAILURE | grpc.ChannelConnectivity.SHUTDOWN:
                self._failing = True
            case grpc.ChannelConnectivity.CONNECTING if not self._failing:
                return Health.CONNECTING
            case _:
                pass
        return Health.FAILING if self._failing else Health.IDLE

    async def connect(self) -> bool:
        """Return True if there is a connection, after an attempt to make one."""
        waiting = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
        while (state := self._grpc.get_state(try_to_connect=True)) in waiting:
            await self._grpc.wait_for_state_change(state)
        return self.health() is Health.READY

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._counted("unary", self._grpc.unary_unary, *args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._counted("server_stream", self._grpc.unary_stream, *args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._counted("client_stream", self._grpc.stream_unary, *args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._counted("bidi_stream", self._grpc.stream_stream, *args, **kwargs)

    def _counted(
        self, kind: str, make: Callable[..., Any], path: str, *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Return a method that counts its calls, here and for metrics."""
        measure = call_metrics(kind, path)
        method = make(path, *measure.serializers(args, kwargs))

        def call(*args: Any, **kwargs: Any) -> Any:
            started = measure.start(self._clock, method, args, kwargs, self._ended)
            if not self.calls:
                self.heard_at = self._clock.monotonic()
            self.calls += 1
            self._on_start()
            return started

        return call

    def _ended(self, call: Any, code: grpc.StatusCode) -> None:
        self.calls -= 1
        self.heard_at = self._clock.monotonic()
        if code is grpc.StatusCode.UNAVAILABLE:
            details = of_ended(call.details()) or ""
            if _TOO_MANY_PINGS in details.lower().replace("_", " "):
                self._on_refused_pings()

    async def answers(self, timeout_s: float) -> bool:
        """Probe the peer. Return False if it is connected and gives no answer for ``timeout_s`` seconds.

        Every gRPC server answers a call, even of a method that it does not know.
        """
        if self._grpc.get_state() is not grpc.ChannelConnectivity.READY:
            return True
        try:
            await self._grpc.unary_unary(_PROBE, bytes, bytes)(b"", timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return self._grpc.get_state() is not grpc.ChannelConnectivity.READY
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return True  # The channel was closed meanwhile.
        self.heard_at = self._clock.monotonic()
        return True

    async def close(self, grace_s: float | None) -> None:
        await self._grpc.close(grace_s)


def _contents(path: Path | None, flag: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path=flag) from error
