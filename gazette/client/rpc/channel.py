"""Connections to the processes of a cluster: one gRPC channel per endpoint, closed when unused."""

from __future__ import annotations

import asyncio
import logging
import ssl
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import grpc
import grpc.aio

from gazette.auth import Signer
from gazette.client.rpc.counted_channel import BytePath, CountedChannel, Health
from gazette.client.rpc.credentials import Credentials
from gazette.client.rpc.errors import map_errors
from gazette.errors import Closed, Invalid, Unavailable
from gazette.http2.grpc_client import Http2Transport
from gazette.http2.transport import Transport
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.protocol.route import Route, grpc_target
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.loop_bound import LoopBound, running_loop
from gazette.runtime.tasks import TaskScope
from gazette.runtime.tls import tls_context

log = logging.getLogger(__name__)

_GRACE_S: Final = 5.0
_CLOSE_IT: Final = "Use it as `async with`, or await its close()."
_KEEPALIVE_MAX_S: Final = 7200.0


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM form, used for ``https`` endpoints.

    Without ``ca_file``, trust the root certificates of this machine. ``cert_file`` and ``key_file`` identify
    this process to peers that ask for a certificate.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def of(cls, ca_file: str, cert_file: str, key_file: str) -> TlsSettings | None:
        """Return the settings for these paths; None if all are empty. An empty path means: no file."""
        files = [Path(path) if path else None for path in (ca_file, cert_file, key_file)]
        return cls(*files) if any(files) else None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raise ``Invalid`` for an unreadable file, or a certificate without its key."""
        self._check()
        return grpc.ssl_channel_credentials(
            root_certificates=_contents(self.ca_file, "trusted-ca-file"),
            private_key=_contents(self.key_file, "cert-key-file"),
            certificate_chain=_contents(self.cert_file, "cert-file"),
        )

    def context(self) -> ssl.SSLContext:
        """Return a context for our own HTTP/2. Raise ``Invalid`` for a file that cannot be used, or a
        certificate without its key."""
        self._check()
        try:
            context = tls_context(ca_file=None if self.ca_file is None else str(self.ca_file))
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # Errors of TLS are also of this class.
            names = ", ".join(str(pem) for pem in (self.ca_file, self.cert_file) if pem is not None)
            raise Invalid(f"cannot use {names} for TLS: {error}", path="cert-file") from error
        context.set_alpn_protocols(["h2"])
        return context

    def _check(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise Invalid("a certificate and its key must be given together", path="cert-file")


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Limits of every channel.

    A Go server permits one ping in five minutes. It closes a connection that sends more pings, with all its
    calls. So pings only keep firewalls from closing connections. ``silence_s`` finds silent peers.
    """

    keepalive_s: float = 360.0
    """Seconds between pings while calls run. Doubled if a server refuses so many pings."""
    keepalive_timeout_s: float = 10.0
    """Seconds to wait for the answer to a ping before the connection is closed.

    This time also limits how long the peer's machine may leave content unacknowledged.
    """
    silence_s: float = 20.0
    """Seconds without an answer to any call of a channel, after which its peer is probed. 0 means: never."""
    silence_timeout_s: float = 20.0
    """Seconds to wait for the answer to a probe. After that the peer is silent: its calls end."""
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
            # Without this option, gRPC waits a minute for the answer to a ping and ignores the option above.
            ("grpc.http2.ping_timeout_ms", int(self.keepalive_timeout_s * 1e3)),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", int(self.backoff_min_s * 1e3)),
            ("grpc.min_reconnect_backoff_ms", int(self.connect_timeout_s * 1e3)),
            ("grpc.max_reconnect_backoff_ms", int(self.backoff_max_s * 1e3)),
            # We retry ourselves: retries by gRPC would keep a copy of streamed content.
            ("grpc.enable_retries", 0),
            # Without this option, `Channels` share connections: closing one would not close its connections.
            ("grpc.use_local_subchannel_pool", 1),
        ]


class Channels:
    """Channels by endpoint (``http://host:port``, ``https://…``, ``unix://host/path``). Loop-bound. The
    channels speak our own HTTP/2, unless ``transport`` is given.

    Stubs count their calls, so that a channel with a call in flight is not closed as unused. Do not keep a
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
        owner: str = "Channels",
    ) -> None:
        """Create channels, connect nothing yet. Errors and logs name ``owner``, the class of the client."""
        self.zone = zone
        self._tls = TlsSettings() if tls is None else tls
        self._transport = Http2Transport(self._tls.context) if transport is None else transport
        self.clock: Clock = SystemClock() if clock is None else clock
        self.credentials = Credentials(signer, self.clock)
        self._settings = ChannelSettings() if settings is None else settings
        self._channels: dict[str, CountedChannel] = {}
        self._scope = TaskScope("channels")
        self._swept = self.clock.monotonic()
        self._pinned: set[str] = set()
        self._members: dict[str, int] = {}
        needs_watch = not self._transport.ends_silent_calls
        self._watch = _SilenceWatch(self, self._scope, self._settings.silence_s * needs_watch)
        self._bound = LoopBound(owner)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True if the channels were closed, or belong to the parent of this forked process."""
        return self._closed or self._bound.was_forked

    def __len__(self) -> int:
        return len(self._channels)

    def require_loop(self) -> None:
        """Raise ``Invalid`` on another event loop than at the first use, ``Closed`` in a forked process."""
        if running_loop() is not self._bound.loop:
            self._bound.require()

    def pin(self, endpoint: str) -> None:
        """Keep the channel of this endpoint open even if unused, as for the default address."""
        self._pinned.add(endpoint)

    def journal(self, endpoint: str) -> JournalStub:
        """Return the Journal service at an endpoint. Raise ``Invalid`` if malformed, ``Closed`` if closed."""
        return self._channel(endpoint).journal

    def shard(self, endpoint: str) -> ShardStub:
        """Return the Shard service at an endpoint. Errors are those of ``journal``."""
        return self._channel(endpoint).shard

    def byte_path(self, endpoint: str) -> BytePath:
        """Return Append and Read at an endpoint, in their fast encodings. Errors are those of ``journal``."""
        return self._channel(endpoint).byte_path

    def grpc_channel(self, endpoint: str) -> grpc.aio.Channel:
        """Return the channel of an endpoint, for services of applications. Its calls are counted too."""
        return cast("grpc.aio.Channel", self._channel(endpoint))

    async def connect(self, endpoint: str) -> bool:
        """Connect to an endpoint. Return True once it is connected, False if that fails. Raise the errors of
        ``journal``. After a cancellation the attempt goes on.
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
        """Return the endpoint that the function `pick` chooses, by the state of our channels and our zone."""
        return pick(route, self.zone, self.health, process_id=process_id, primary=primary)

    def member(self, route: Route, process_id: ProcessId) -> JournalStub:
        """Return the Journal service of exactly that member. Raise ``Unavailable`` if it has no endpoint."""
        endpoint = self.pick(route, process_id=process_id)
        if endpoint is None:
            raise Unavailable("the route has no endpoint of this member", member=process_id)
        return self.journal(endpoint)

    def follow(self, members: Mapping[str, int]) -> None:
        """Learn the present members: by endpoint, the CreateRevision of the member's key.

        A process whose key is gone, or was created again, has lost its lease. Cancel calls to that process:
        they fail as in `raise_mapped` or `open_channel`. The next call connects without the back-off of the
        old connection.
        """
        former, self._members = self._members, dict(members)
        for endpoint, revision in former.items():
            if members.get(endpoint) == revision:
                continue
            channel = None if self.closed else self._channels.pop(endpoint, None)
            if channel is not None:
                self._scope.spawn(channel.close(None), name=f"close {endpoint}")

    def _channel(self, endpoint: str) -> CountedChannel:
        """Return the channel of an endpoint; open it at its first use. Close unused channels now and then.

        Raise ``Invalid`` for a malformed endpoint, bad files of TLS or another event loop, and ``Closed``
        after `close`.
        """
        if self._closed and not self._bound.was_forked:
            raise Closed("the client's channels were closed")
        if running_loop() is not self._bound.loop:
            self._bound.require()
        now = self.clock.monotonic()
        if now - self._swept >= self._settings.idle_s:
            self._sweep(now)
        channel = self._channels.get(endpoint)
        if channel is None:
            keepalive_s = self._settings.keepalive_s
            channel = self._channels[endpoint] = CountedChannel(
                self._open(endpoint),
                self.clock,
                self._watch.begin,
                _weakly(self._on_refused_pings, keepalive_s),
            )
        channel.used_at = now
        return channel

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        target, tls = grpc_target(endpoint)
        options = self._settings.options()
        credentials = self._tls.credentials() if tls else None
        return self._transport.channel(target, credentials, options)

    def _on_refused_pings(self, keepalive_s: float) -> None:
        """Increase the interval of pings for later channels by a factor of 2. gRPC itself doubles the
        interval of the channel whose pings were refused."""
        raised_s = min(2 * keepalive_s, _KEEPALIVE_MAX_S)
        if raised_s > self._settings.keepalive_s:
            self._settings = replace(self._settings, keepalive_s=raised_s)
            log.warning(
                "a server refuses our pings as too many: new connections send one in %(seconds)g s",
                {"seconds": raised_s},
            )

    async def _ask_silent(self) -> bool:
        """Probe peers that have answered no call for ``silence_s`` seconds. Return False if no calls run."""
        busy = [entry for entry in self._channels.items() if entry[1].calls]
        silent_since = self.clock.monotonic() - self._settings.silence_s
        async with TaskScope("silent peers") as scope:
            for endpoint, channel in busy:
                if channel.heard_at <= silent_since:
                    scope.spawn(self._ask(endpoint, channel), name=f"ask {endpoint}")
        return bool(busy)

    async def _ask(self, endpoint: str, channel: CountedChannel) -> None:
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

        If this call is cancelled, cancel calls at once and cut connections; only connections of grpcio may
        stay open. May be repeated.
        """
        if not self._bound.was_forked:
            self._bound.require()
        self._closed = True
        if self._bound.was_forked:
            # In a forked child the connections belong to the parent: send nothing on them.
            self._channels.clear()
            return
        try:
            while self._channels:
                endpoint, channel = next(iter(self._channels.items()))
                await channel.close(grace_s)
                self._channels.pop(endpoint, None)
            await self._scope.stop(_GRACE_S)
        except asyncio.CancelledError:
            _abort(self._channels.values(), self._scope)
            raise

    def __del__(self) -> None:
        # The loop owns the transports of the channels, and would keep the connections open for good.
        channels = getattr(self, "_channels", None)
        if channels:
            scope = self._scope
            self._bound.dropped(lambda: _abort(channels.values(), scope), _CLOSE_IT)


class _SilenceWatch:
    """Probes peers while calls run, unless ``silence_s`` is 0. Does not keep its `Channels` alive."""

    def __init__(self, channels: Channels, scope: TaskScope, silence_s: float) -> None:
        self._channels = weakref.ref(channels)
        self._scope = scope
        self._clock = channels.clock
        self._silence_s = silence_s
        self._is_on = not silence_s  # Without probes it stays True, so that `begin` does nothing.

    def begin(self) -> None:
        """Begin to probe, because a call began. Do nothing if probes are under way already."""
        if not self._is_on:
            self._is_on = True
            self._scope.spawn(self._run(), name="watch for silence")

    async def _run(self) -> None:
        try:
            while await self._ask():
                pass
        finally:
            self._is_on = False

    async def _ask(self) -> bool:
        await self._clock.sleep(self._silence_s / 2)
        channels = self._channels()
        return channels is not None and await channels._ask_silent()


def _abort(channels: Iterable[CountedChannel], scope: TaskScope) -> None:
    for channel in channels:
        channel.abort()
    scope.cancel()


def _weakly(method: Callable[[float], None], argument: float) -> Callable[[], None]:
    """Return a function that calls a method with an argument, or does nothing once the method's object is
    gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (bound_method := reference()) is not None:
            bound_method(argument)

    return call


def _contents(path: Path | None, flag: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path=flag) from error


def pick(
    route: Route,
    zone: str,
    health: Callable[[str], Health],
    *,
    process_id: ProcessId | None = None,
    primary: bool = False,
) -> str | None:
    """Return the endpoint to call. None means: call the default address, whose process forwards the call.

    - With ``process_id``: exactly that member, in any state of its connection. None if the route lacks the
      member or its endpoint.
    - With ``primary`` (appends): the primary, unless its connection is failing.
    - Otherwise the best member: first one whose connection does not fail, then one of our ``zone``, then one
      with a better connection, then the order of the route. If all connections fail, return None: the
      default address may still reach the members.

    Never pick a member without an endpoint: its key is gone from etcd.
    """
    if process_id is not None:
        is_member = process_id in route.members
        return _endpoint(route, route.members.index(process_id) if is_member else None)
    if primary:
        endpoint = _endpoint(route, route.primary)
        if endpoint is None or health(endpoint) is Health.FAILING:
            return None
        return endpoint
    best_rank: tuple[bool, Health] | None = None
    best_endpoint: str | None = None
    for index, member in enumerate(route.members):
        endpoint = _endpoint(route, index)
        if endpoint is None or (state := health(endpoint)) is Health.FAILING:
            continue
        rank = (member.zone == zone, state)
        if best_rank is None or rank > best_rank:
            best_rank, best_endpoint = rank, endpoint
    return best_endpoint


def _endpoint(route: Route, index: int | None) -> str | None:
    if index is None or index >= len(route.endpoints):
        return None
    return route.endpoints[index] or None
