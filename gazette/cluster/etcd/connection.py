"""One client's connection to an etcd cluster: channels, fail-over, deadlines and credentials."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import grpc

from gazette.cluster.etcd.failures import AUTH_NOT_ENABLED, Failure, StreamEnded, classify
from gazette.cluster.etcd.pb import rpc_pb2, rpc_pb2_grpc
from gazette.errors import Closed, Conflict, GazetteError, Invalid, Unavailable
from gazette.http2.grpc_client import Http2Transport
from gazette.http2.transport import Transport
from gazette.runtime.clock import Clock
from gazette.runtime.mutex import Mutex
from gazette.runtime.timeouts import timeout
from gazette.runtime.tls import tls_context

R = TypeVar("R")
Metadata: TypeAlias = tuple[tuple[str, str], ...]

log = logging.getLogger(__name__)

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs do not know it
_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 1.0

# With this header, an etcd member without a leader refuses a request at once. Otherwise the member would hold
# the request until a timeout, although the next endpoint may have a leader.
_REQUIRE_LEADER: Metadata = (("hasleader", "true"),)


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """The settings of a connection to etcd.

    ``endpoints`` are ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///path``. The first endpoint that
    answers is used until it fails. ``ca_file``, ``cert_file`` and ``key_file`` are PEM files for https, read
    for each connection. A dead connection is noticed within twice ``keepalive_s``, which must exceed etcd's
    ``--grpc-keepalive-min-time`` (5 s by default).
    """

    endpoints: tuple[str, ...] = ("http://localhost:2379",)
    cert_file: str = ""
    key_file: str = ""
    ca_file: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    dial_timeout_s: float = 5.0
    request_timeout_s: float = 10.0
    keepalive_s: float = 6.0
    receive_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise Invalid("no etcd endpoint was given", path="endpoints")
        for endpoint in self.endpoints:
            grpc_target(endpoint)
        if bool(self.cert_file) != bool(self.key_file):
            raise Invalid(
                "a client certificate needs its key, and a key its certificate", path="cert_file"
            )
        if self.password and not self.user:
            raise Invalid("a password was given without a user", path="user")


def grpc_target(endpoint: str) -> tuple[str, bool]:
    """Return ``(target, tls)`` of an endpoint URL. Raise ``Invalid`` for another form."""
    if re.fullmatch(r"unix:///.+", endpoint):
        return f"unix:{endpoint.removeprefix('unix://')}", False
    url = urlsplit(endpoint)
    try:
        port = url.port if url.port is not None else 2379
    except ValueError:
        port = 0
    if url.scheme not in ("http", "https") or not url.hostname or not port or url.path.strip("/"):
        raise Invalid(
            "not an etcd endpoint (expected http://HOST:PORT, https://HOST:PORT or unix:///path)",
            path="endpoints",
            endpoint=endpoint,
        )
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port}", url.scheme == "https"


class Member:
    """The channel to one endpoint, and the stubs over it."""

    __slots__ = ("auth", "channel", "endpoint", "kv", "lease", "maintenance", "watch")

    def __init__(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        stubs: Any = rpc_pb2_grpc
        self.endpoint = endpoint
        self.channel = channel
        self.kv = stubs.KVStub(channel)
        self.watch = stubs.WatchStub(channel)
        self.lease = stubs.LeaseStub(channel)
        self.maintenance = stubs.MaintenanceStub(channel)
        self.auth = stubs.AuthStub(channel)


Attempt: TypeAlias = Callable[[Member, Metadata, float], Awaitable[R]]
"""One RPC: takes the member, the metadata, and the time limit in seconds."""


class Connection:
    """Channels to all endpoints. Calls prefer one endpoint until it fails. Loop-bound. The first call makes
    the first connection."""

    def __init__(
        self, settings: EtcdSettings, clock: Clock, transport: Transport | None = None
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.on_network = transport is None
        """False if a test or a simulation replaces the network."""
        if transport is None:
            transport = Http2Transport(partial(_tls_context, settings))
        self._members = [
            Member(endpoint, _channel(endpoint, settings, transport))
            for endpoint in settings.endpoints
        ]
        self._preferred = 0  # Index of the preferred endpoint.
        self._failing = False
        self._closed = False
        self._token: str | None = None  # None: not asked for yet.
        self._login: Mutex[None] = Mutex("etcd login", None)

    @property
    def endpoints(self) -> str:
        return ", ".join(self.settings.endpoints)

    @property
    def preferred(self) -> Member:
        return self._members[self._preferred]

    async def close(self) -> None:
        """Close the channels. Calls in flight, and all later calls, fail with ``Closed``."""
        self._closed = True
        for member in self._members:
            await member.channel.close(None)

    async def call(
        self,
        operation: str,
        attempt: Attempt[R],
        *,
        repeatable: bool,
        timeout_s: float | None = None,
        attempt_timeout_s: float | None = None,
        authenticated: bool = True,
    ) -> R:
        """Run ``attempt`` until it succeeds, over all endpoints, for at most ``timeout_s``.

        A call that is not ``repeatable`` (a write) is attempted again only after a failure that proves that
        it had no effect. Raise ``Unavailable`` with the fact ``outcome``: ``"unknown"`` if the write may have
        happened, ``"not applied"`` if it surely did not. Raise other refusals as `etcd/failures` maps them.

        Cancellation: a write may have happened.
        """
        timeout_s = timeout_s if timeout_s is not None else self.settings.request_timeout_s
        deadline = self.clock.monotonic() + timeout_s
        if attempt_timeout_s is None:
            # The first attempt of a write gets all the time, because no other attempt may follow a timeout.
            attempt_timeout_s = timeout_s / len(self._members) if repeatable else timeout_s
        failures, stale = 0, None
        while True:
            remaining_s = max(deadline - self.clock.monotonic(), 0.0)
            token = ""
            if authenticated:
                token = await self.token(stale=stale, timeout_s=remaining_s)
            member = self.preferred
            remaining_s = max(deadline - self.clock.monotonic(), 0.0)
            result, failure = await self._try(
                member, attempt, _metadata(token), min(attempt_timeout_s, remaining_s)
            )
            if failure is None:
                return cast("R", result)
            if failure.stale_token and stale is None:
                stale = token
                continue
            if not failure.transient:
                failure.error.facts.update(operation=operation, endpoint=member.endpoint)
                raise failure.error
            self.move_on(member, failure.error)
            failures += 1
            if repeatable or not failure.maybe_applied:
                await self._pause(failures, deadline)
                if self.clock.monotonic() < deadline:
                    continue
            raise self._unavailable(operation, failure, repeatable) from failure.error.__cause__

    async def token(self, *, stale: str | None = None, timeout_s: float | None = None) -> str:
        """Return the token to send; ``""`` if the settings have no user, or etcd needs no token.

        ``stale`` is a token that was refused. Raise ``NotAllowed`` if etcd refuses the user or the password,
        ``Unavailable`` if no token has come after ``timeout_s`` (None: the time in the settings).
        """
        if not self.settings.user:
            return ""
        if self._token is not None and self._token != stale:
            return self._token
        timeout_s = timeout_s if timeout_s is not None else self.settings.request_timeout_s
        deadline = self.clock.monotonic() + timeout_s
        try:
            async with timeout(timeout_s):
                await self._login.take()
        except TimeoutError:
            raise Unavailable(
                "etcd gives no token",
                hint="Another call has asked for it. Check that etcd runs and has a leader.",
                endpoints=self.endpoints,
            ) from None
        try:
            if self._token is None or self._token == stale:
                self._token = await self._authenticate(deadline - self.clock.monotonic())
            return self._token
        finally:
            self._login.give(None)

    def move_on(self, member: Member, error: GazetteError) -> None:
        """Prefer the endpoint after ``member`` from now on, unless another call has moved on already."""
        if not self._failing:
            self._failing = True
            log.warning(
                "etcd at %(endpoint)s fails, trying the next endpoint: %(error)s",
                {"endpoint": member.endpoint, "error": error},
            )
        if member is self.preferred:
            self._preferred = (self._preferred + 1) % len(self._members)

    def succeeded(self, member: Member) -> None:
        if self._failing:
            self._failing = False
            log.info("etcd answers again at %(endpoint)s", {"endpoint": member.endpoint})

    def check_open(self) -> None:
        if self._closed:
            raise Closed("the etcd client was closed")

    def closed_by_us(self) -> bool:
        """Return True if ``close`` caused a ``CancelledError``, and not the cancellation of a task."""
        task = asyncio.current_task()
        return self._closed and (task is None or task.cancelling() == 0)

    async def _try(
        self, member: Member, attempt: Attempt[R], metadata: Metadata, timeout_s: float
    ) -> tuple[Any, Failure | None]:
        """Make one attempt. Return its result and None, or None and its failure. Raise ``Closed`` after
        ``close``."""
        self.check_open()
        try:
            result = await attempt(member, metadata, timeout_s)
        except (grpc.aio.AioRpcError, StreamEnded) as cause:
            failure = classify(cause, has_user=bool(self.settings.user))
            failure.error.__cause__ = cause
            return None, failure
        except asyncio.CancelledError:
            if self.closed_by_us():
                raise Closed("the etcd client was closed") from None
            raise
        self.succeeded(member)
        return result, None

    async def _pause(self, failures: int, deadline: float) -> None:
        """Wait after a round over all endpoints has failed, but not beyond ``deadline``."""
        rounds, others_untried = divmod(failures, len(self._members))
        if not others_untried:
            backoff = min(_BACKOFF_MIN_S * 2 ** min(rounds - 1, 10), _BACKOFF_MAX_S)
            await self.clock.sleep(max(min(backoff, deadline - self.clock.monotonic()), 0.0))

    async def _authenticate(self, timeout_s: float) -> str:
        """Return a new token, or ``""`` if this etcd needs none."""
        request = rpc_pb2.AuthenticateRequest(
            name=self.settings.user, password=self.settings.password
        )
        try:
            response = await self.call(
                "Authenticate",
                lambda m, metadata, t: m.auth.Authenticate(request, metadata=metadata, timeout=t),
                repeatable=True,
                timeout_s=timeout_s,
                authenticated=False,
            )
        except Conflict as error:
            if AUTH_NOT_ENABLED in str(error.facts.get("reason")):
                return ""
            raise
        token: str = response.token
        return token

    def _unavailable(self, operation: str, failure: Failure, repeatable: bool) -> Unavailable:
        facts: dict[str, Any] = {"operation": operation, "endpoints": self.endpoints}
        hint = "Check that etcd runs at the endpoints and has a leader. This call has given up."
        if "handshake" in failure.error.message.lower():
            hint = (
                "TLS was not agreed upon. Is it https:// on one side and http:// on the other? "
                + hint
            )
        if not repeatable:
            facts["outcome"] = "unknown" if failure.maybe_applied else "not applied"
            if failure.maybe_applied:
                hint = "The write may have happened or not: read before writing again. " + hint
        return Unavailable(
            "etcd is unavailable", hint=hint, **facts, retrying=False, reason=failure.error.message
        )


def _metadata(token: str) -> Metadata:
    return (*_REQUIRE_LEADER, ("token", token)) if token else _REQUIRE_LEADER


async def exchange(call: Any, request: Any) -> Any:
    """Send one request on a fresh stream and return the first response.

    Raise ``grpc.aio.AioRpcError`` if the call fails, ``StreamEnded`` if it ends without a response.
    """
    with contextlib.suppress(asyncio.InvalidStateError):
        # If the call has failed, `write` raises this error, and `read` raises the reason.
        await call.write(request)
    return await read(call)


async def read(call: Any) -> Any:
    """Return the next response of a stream. Raise ``StreamEnded`` at its end.

    Raise ``grpc.aio.AioRpcError`` if the call fails. Cancellation: the stream is cancelled, too.
    """
    response = await call.read()
    if response is _EOF:
        raise StreamEnded
    return response


def _tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """Return the TLS context for a new connection. Read the PEM files each time: they may have been renewed.
    Raise ``Invalid`` for a file that cannot be used."""
    for name in ("ca_file", "cert_file", "key_file"):
        if path := getattr(settings, name):
            _require_readable(path, name)
    try:
        context = tls_context(ca_file=settings.ca_file or None)
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except ssl.SSLError as error:
        files = ", ".join(filter(None, (settings.ca_file, settings.cert_file, settings.key_file)))
        raise Invalid(
            f"the PEM files for etcd cannot be used: {error}",
            hint="Check that each file holds what its setting says, and that certificate and key belong"
            " together.",
            files=files,
        ) from error
    context.set_alpn_protocols(["h2"])
    return context


def _require_readable(path: str, name: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise Invalid(
            "the PEM file cannot be read", path=name, file=path, reason=error.strerror
        ) from error


def _channel(endpoint: str, settings: EtcdSettings, transport: Transport) -> grpc.aio.Channel:
    target, tls = grpc_target(endpoint)
    keepalive_ms = int(settings.keepalive_s * 1000)
    options = (
        # A channel sends no pings while it has no streams: etcd forbids such pings. A watch is a stream.
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Despite its name, this option limits the time of one attempt to connect.
        ("grpc.min_reconnect_backoff_ms", int(settings.dial_timeout_s * 1000)),
        ("grpc.max_receive_message_length", settings.receive_bytes_max),
    )
    credentials = grpc.ssl_channel_credentials() if tls else None
    return transport.channel(target, credentials, options)
