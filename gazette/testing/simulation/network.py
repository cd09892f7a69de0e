"""gRPC channels and servers between the nodes of a simulation, and the trouble between them.

The module has the parts of `grpc.aio` that brokers, clients and etcd use, and ends calls in the same ways.
Messages are encoded for real. Messages of one stream keep their order; streams overtake each other. A blocked
link delivers nothing, and loses nothing: messages wait, as with TCP, until the link is free again, or until
the client or the server gives the connection up.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import types
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import grpc
import grpc.aio

from gazette.http2.messages import MessageQueue
from gazette.net.grpc.call_metrics import MeasuredMethod
from gazette.net.grpc.handling import HandleRequest, Handling
from gazette.net.grpc.whole_call import TakeWhole
from gazette.protocol.pb import broker_pb2
from gazette.runtime.clock import Clock
from gazette.testing.simulation.loop import Handle, SimNode, VirtualLoop
from gazette.testing.simulation.whole_calls import Metadata, SimWholeCall, WholeCalls

MESSAGE_BYTES_MAX: Final = 4 << 20
"""Greatest number of bytes of a message that servers accept, as brokers and etcd do by default."""
EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs do not know it
_Code: Final = grpc.StatusCode
_OVERHEAD: Final = 16
_FULL_CHANCE: Final = 0.1
"""Share of writes that a socket refuses, as if its buffer were full."""
_PACKS_CHANCE: Final = 0.7
"""Share of streams whose messages arrive together if they are sent together, as in one packet."""
_SYN_S: Final = 1.0
"""Seconds after which TCP repeats the first packet of a connection. They double with each repetition."""
_CLIENT_SILENCE_S: Final = (10.0, 25.0)
_SERVER_SILENCE_S: Final = (10.0, 20.0)
"""Least and most seconds until one end notices, by its pings, that the other end does not answer."""


@types.coroutine
def _yield() -> Generator[None, None, None]:
    """Let everything run that is ready."""
    yield


class _Waiters:
    """Futures to be woken together, in order."""

    __slots__ = ("_futures", "_loop")

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._futures: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._futures.append(future)
        await future

    def wake(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)


class Network:
    """All links between nodes. ``rng`` decides every delay."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.delay_s = 0.0005
        """Mean delay of a message, where no fault says otherwise."""
        self.window = 1 << 20
        """Number of unread bytes of a stream from which on its writer waits."""
        self._servers: dict[str, SimServer] = {}
        self._slow: dict[tuple[str, str], float] = {}
        self._blocked: dict[tuple[str, str], tuple[int, float]] = {}
        self._held: dict[
            tuple[str, str], list[tuple[SimNode, Callable[..., None], tuple[Any, ...]]]
        ]
        self._held = {}
        self._not_before: dict[tuple[str, str], float] = {}
        """By link that was blocked and is free again: when the last of its waiting messages arrives."""
        self._connections: dict[SimConnection, None] = {}
        self.taken: dict[str, float] = {}
        """By node: a time at which its last message of a Read call was already on its way."""
        self._read: dict[tuple[str, int], tuple[int, float]] = {}
        """By node and offset: hash of the content that was read there last, and its time in `taken`."""
        self.on_error: Callable[[str], None] = lambda message: None
        """Called with a text about an unexpected error of a handler."""
        self.on_call: Callable[[str, str, str, str], None] | None = None
        """Called with caller, server, method and what happened. None: no trace is wanted."""

    # Servers.

    def listen(self, address: str, server: SimServer) -> None:
        self._servers[address] = server

    def server_at(self, address: str) -> SimServer | None:
        return self._servers.get(address)

    def unlisten(self, address: str, server: SimServer) -> None:
        if self._servers.get(address) is server:
            del self._servers[address]

    # Faults.

    def slow(self, source: str, target: str, seconds: float) -> None:
        """Let messages from one node to another take that much longer (0: no longer)."""
        self._slow[source, target] = seconds

    def block(self, source: str, target: str) -> None:
        """Deliver nothing from ``source`` to ``target`` until ``unblock``. Blocks add up."""
        count, since = self._blocked.get((source, target), (0, self.loop.now))
        self._blocked[source, target] = (count + 1, since)
        for connection in list(self._connections):
            if {connection.client.name, connection.server.node.name} == {source, target}:
                connection.suspect()

    def unblock(self, source: str, target: str) -> None:
        count, since = self._blocked.get((source, target), (0, 0.0))
        if count > 1:
            self._blocked[source, target] = (count - 1, since)
            return
        self._blocked.pop((source, target), None)
        due = self.loop.now + self.latency(source, target)
        for node, callback, args in self._held.pop((source, target), ()):
            due += 1e-6
            self.loop.call_at(due, callback, *args, context=node.context)
            self._not_before[source, target] = due

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def held(self, node: SimNode) -> None:
        """Note that a node was held. Its peers may notice the hold by their pings."""
        for connection in list(self._connections):
            if connection.client is node or connection.server.node is node:
                connection.suspect()

    def break_connections(self, node: SimNode, chance: float) -> None:
        """Cut some connections of a node, as a middlebox that forgets them does."""
        for connection in list(self._connections):
            if node in (connection.client, connection.server.node) and self.rng.random() < chance:
                connection.client_lost("SimConnection reset by peer")
                connection.server_lost()

    def crashed(self, node: SimNode, *, silent: bool) -> None:
        """Note that a node is dead. Unless ``silent`` (no power), its kernel closes its connections."""
        for address, server in list(self._servers.items()):
            if server.node is node:
                del self._servers[address]
        for connection in list(self._connections):
            if connection.client is node:
                if silent:
                    connection.suspect()
                else:
                    self.send(node.name, connection.server.node, None, connection.server_lost)
            elif connection.server.node is node:
                if silent:
                    connection.suspect()
                else:
                    self.send(
                        node.name, connection.client, None, connection.client_lost, "Socket closed"
                    )

    # Messages.

    def latency(self, source: str, target: str) -> float:
        delay = self.rng.expovariate(1.0) * self.delay_s
        slow = self._slow.get((source, target))
        return delay if not slow else delay + slow * (0.5 + self.rng.random())

    def send(
        self,
        source: str,
        target: SimNode,
        at: float | None,
        callback: Callable[..., None],
        *args: Any,
    ) -> float:
        """Call ``callback`` at ``target`` after a delay, and not before ``at``. Return the time of that call.

        If the link is blocked, the call takes place after `unblock`.
        """
        link = (source, target.name)
        if link in self._blocked:
            self._held.setdefault(link, []).append((target, callback, args))
            return self.loop.now
        due = self.loop.now + self.latency(source, target.name)
        if at is not None and at > due:
            due = at
        if self._not_before and self._not_before.get(link, 0.0) > due:
            due = self._not_before[link]
        self.loop.call_at(due, callback, *args, context=target.context)
        return due

    def took(self, node: str, server: str, message: bytes, arrived_at: float) -> None:
        """Note that a node has taken a message of a Read call. If a broker passed it on, note the earlier
        time at which that broker took it."""
        response = broker_pb2.ReadResponse.FromString(message)
        content, since = hash(response.content), arrived_at
        former = self._read.get((server, response.offset))
        if former is not None and former[0] == content:
            since = min(since, former[1])
        self._read[node, response.offset] = content, since
        self.taken[node] = since

    def silent_since(self, node: SimNode, peer: SimNode) -> float | None:
        """Return the time since which ``node`` hears nothing of ``peer``; None while it can hear ``peer``."""
        since = [
            self._blocked[link][1]
            for link in ((node.name, peer.name), (peer.name, node.name))
            if link in self._blocked
        ]
        if peer.held_since is not None:
            since.append(peer.held_since)
        return min(since) if since else None


class _Pipe:
    """Messages of a stream in one direction. Its ends are at different nodes."""

    __slots__ = (
        "_at",
        "_network",
        "_packs",
        "_readers",
        "_sent_at",
        "_unread",
        "_writers",
        "arrivals",
        "arrived",
        "arrived_at",
        "ended",
        "on_arrival",
        "target",
    )

    def __init__(self, network: Network, target: SimNode) -> None:
        self._network = network
        self.target = target
        self._at = 0.0
        self._sent_at = -1.0
        self._packs = network.rng.random() < _PACKS_CHANCE
        self._unread = 0
        self.arrived: deque[bytes] = deque()
        """Messages that were not taken yet."""
        self.arrivals: deque[float] | None = None
        """When each message in `arrived` has arrived; None unless these times are wanted."""
        self.arrived_at = 0.0
        """Arrival time of the message that was taken last."""
        self.ended = False
        self.on_arrival: Callable[[], None] | None = None
        """Called when a message, or the end, has arrived."""
        self._readers = _Waiters(network.loop)
        self._writers = _Waiters(network.loop)

    def send(self, source: SimNode, callback: Callable[..., None], *args: Any) -> None:
        """Deliver something after all that was sent before, or together with what was sent just now."""
        network = self._network
        if not source.alive:
            return
        now, sent_at = network.loop.now, self._sent_at
        self._sent_at = now
        if self._packs and sent_at == now and not network.is_blocked(source.name, self.target.name):
            network.loop.call_at(self._at, callback, *args, context=self.target.context)
        else:
            self._at = network.send(source.name, self.target, self._at, callback, *args)

    def put(self, source: SimNode, message: bytes) -> None:
        self._unread += len(message) + _OVERHEAD
        self.send(source, self._arrive, message)

    @property
    def full(self) -> bool:
        return self._unread >= self._network.window

    async def room(self) -> None:
        """Return when the reader has taken something, or the call has ended."""
        await self._writers.wait()

    def _arrive(self, message: bytes) -> None:
        if not self.ended:
            self.arrived.append(message)
            if self.arrivals is not None:
                self.arrivals.append(self._network.loop.now)
            self._wake_reader()

    def end(self) -> None:
        """Mark the end: nothing else comes."""
        self.ended = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self.on_arrival is not None:
            self.on_arrival()
        self._readers.wake()

    @property
    def held(self) -> int:
        """Bytes of the messages that were not taken yet."""
        return sum(map(len, self.arrived))

    def waiting(self) -> list[bytes]:
        """Return the messages that were not taken yet."""
        return list(self.arrived)

    def clear(self) -> None:
        self.arrived.clear()
        if self.arrivals is not None:
            self.arrivals.clear()

    @property
    def empty(self) -> bool:
        return not self.arrived

    def wake(self) -> None:
        """Wake readers and writers: the call has ended, or begun."""
        self._readers.wake()
        self._writers.wake()

    async def get(self) -> bytes | None:
        """Return the next message; None at the end."""
        while not self.arrived:
            if self.ended:
                return None
            await self._readers.wait()
        return self.take()

    def take(self) -> bytes:
        """Return the next message, which has arrived."""
        message = self.arrived.popleft()
        if self.arrivals is not None:
            self.arrived_at = self.arrivals.popleft()
        self._unread -= len(message) + _OVERHEAD
        if self._unread < self._network.window:
            self._writers.wake()
        return message


class SimConnection:
    """A connection of one channel to one server. Only one of its ends may know that it is cut."""

    def __init__(self, network: Network, channel: SimChannel, server: SimServer) -> None:
        self.network = network
        self.channel = channel
        self.client = channel.node
        self.server = server
        self.client_open = True
        self.server_open = True
        self.calls: dict[SimCall, None] = {}
        self.served: dict[SimContext, None] = {}
        network._connections[self] = None

    def client_lost(self, reason: str) -> None:
        """Fail the client's end: its calls end. If the client lives, the server gets to know of it."""
        if not self.client_open:
            return
        self.client_open = False
        self._forget()
        if self.client.alive:
            self.network.send(self.client.name, self.server.node, None, self.server_lost)
        self.channel.lost(self)
        for call in list(self.calls):
            call.finish(_Code.UNAVAILABLE, reason)

    def server_lost(self) -> None:
        """Fail the server's end: its handlers are cancelled. If the server lives, the client gets to know."""
        if not self.server_open:
            return
        self.server_open = False
        self._forget()
        if self.server.node.alive:
            self.network.send(
                self.server.node.name, self.client, None, self.client_lost, "Socket closed"
            )
        for context in list(self.served):
            context.caller_gone()

    def _forget(self) -> None:
        if not self.client_open and not self.server_open:
            self.network._connections.pop(self, None)

    def suspect(self) -> None:
        """Let each end check its pings some seconds from now. An end that has no answer fails."""
        rng, now = self.network.rng, self.network.loop.now
        if self.client_open:
            wait = rng.uniform(*_CLIENT_SILENCE_S)
            self.network.loop.call_at(
                now + wait, self._client_pinged, now, context=self.client.context
            )
        if self.server_open:
            wait = rng.uniform(*_SERVER_SILENCE_S)
            self.network.loop.call_at(
                now + wait, self._server_pinged, now, context=self.server.node.context
            )

    def _client_pinged(self, begun: float) -> None:
        since = self.network.silent_since(self.client, self.server.node)
        if since is not None and since <= begun and self.calls:
            self.client_lost("keepalive watchdog timeout")

    def _server_pinged(self, begun: float) -> None:
        since = self.network.silent_since(self.server.node, self.client)
        if since is not None and since <= begun and self.served:
            self.server_lost()


class _Connecting:
    """One attempt of a channel to connect."""

    def __init__(self, channel: SimChannel) -> None:
        self._channel = channel
        network, node = channel.network, channel.node
        self.over = False
        self._timer = network.loop.call_later(
            channel.connect_timeout_s, self._failed, "connect timed out", context=node.context
        )
        server = network.server_at(channel.address)
        if server is None:
            network.loop.call_later(
                2 * network.latency(node.name, "nowhere"),
                self._failed,
                "SimConnection refused",
                context=node.context,
            )
        else:
            self._ask(server, _SYN_S)

    def _ask(self, server: SimServer, again_s: float) -> None:
        """Send the first packet of a connection. Send it again while the packet or its answer is lost."""
        network, node = self._channel.network, self._channel.node
        links = (node.name, server.node.name), (server.node.name, node.name)
        if self.over:
            return
        if not network.is_blocked(*links[0]):
            network.send(node.name, server.node, None, self._accepted, server)
        if any(network.is_blocked(*link) for link in links):
            network.loop.call_later(again_s, self._ask, server, 2 * again_s, context=node.context)

    def _accepted(self, server: SimServer) -> None:
        """Accept the connection, at the server."""
        network, node = self._channel.network, self._channel.node
        if not server.listening:
            network.send(server.node.name, node, None, self._failed, "SimConnection refused")
        elif not network.is_blocked(server.node.name, node.name):
            network.send(server.node.name, node, None, self._connected, server)

    def _connected(self, server: SimServer) -> None:
        if self.over:
            return
        self.over = True
        self._timer.cancel()
        if not server.listening:
            self._channel.not_connected("SimConnection reset by peer")
        else:
            self._channel.connected(server)

    def _failed(self, reason: str) -> None:
        if not self.over:
            self.over = True
            self._timer.cancel()
            self._channel.not_connected(reason)


class SimChannel:
    """A channel of one node to one address, with gRPC's back-off between attempts to connect."""

    def __init__(
        self, network: Network, node: SimNode, address: str, options: dict[str, Any]
    ) -> None:
        self.network = network
        self.node = node
        self.address = address
        self.connect_timeout_s = options.get("grpc.min_reconnect_backoff_ms", 20_000) / 1000
        self._backoff_min_s = options.get("grpc.initial_reconnect_backoff_ms", 1_000) / 1000
        self._backoff_max_s = options.get("grpc.max_reconnect_backoff_ms", 120_000) / 1000
        self._backoff_s = self._backoff_min_s
        self._connection: SimConnection | None = None
        self._connecting: _Connecting | None = None
        self._retry: Handle | None = None
        self._reason = ""
        self._waiting: dict[SimCall, None] = {}
        self._closed = False
        self._changed = _Waiters(network.loop)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while self.get_state() is last_observed_state:
            await self._changed.wait()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if self._closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self._connection is not None:
            return grpc.ChannelConnectivity.READY
        if self._connecting is not None:
            return grpc.ChannelConnectivity.CONNECTING
        if self._retry is not None:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        if try_to_connect:
            self._connect()
        return grpc.ChannelConnectivity.IDLE

    def start(self, call: SimCall) -> None:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if self._connection is not None:
            call.attach(self._connection)
        elif self._retry is not None and not call.wait_for_ready:
            self.network.loop.call_soon(
                call.finish,
                _Code.UNAVAILABLE,
                f"failed to connect to all addresses; last error: {self._reason}",
                context=self.node.context,
            )
        else:
            self._waiting[call] = None
            if self._connecting is None and self._retry is None:
                self._connect()

    def forget(self, call: SimCall) -> None:
        self._waiting.pop(call, None)

    def _connect(self) -> None:
        self._retry = None
        if not self._closed:
            self._connecting = _Connecting(self)
            self._changed.wake()

    def connected(self, server: SimServer) -> None:
        self._connecting = None
        self._backoff_s = self._backoff_min_s
        if self._closed:
            return
        self._connection = SimConnection(self.network, self, server)
        self._changed.wake()
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            call.attach(self._connection)

    def not_connected(self, reason: str) -> None:
        self._connecting = None
        if self._closed:
            return
        self._reason = reason
        delay = self._backoff_s * self.network.rng.uniform(0.8, 1.2)
        self._backoff_s = min(self._backoff_s * 1.6, self._backoff_max_s)
        self._retry = self.network.loop.call_later(delay, self._connect, context=self.node.context)
        self._changed.wake()
        for call in list(self._waiting):
            if not call.wait_for_ready:
                del self._waiting[call]
                call.finish(
                    _Code.UNAVAILABLE, f"failed to connect to all addresses; last error: {reason}"
                )

    def lost(self, connection: SimConnection) -> None:
        if self._connection is connection:
            self._connection = None
            self._changed.wake()

    async def close(self, grace: float | None = None) -> None:
        del grace
        self._closed = True
        self._changed.wake()
        if self._retry is not None:
            self._retry.cancel()
        calls = list(self._waiting)
        if self._connection is not None:
            calls += self._connection.calls
        for call in calls:
            call.cancel()
        if self._connection is not None:
            self._connection.client_lost("Channel closed")
        await _yield()

    def unary_unary(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., SimCall]:
        return self._method(path, False, False, *args, **kwargs)

    def unary_stream(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., SimCall]:
        return self._method(path, False, True, *args, **kwargs)

    def stream_unary(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., SimCall]:
        return self._method(path, True, False, *args, **kwargs)

    def stream_stream(self, path: str, *args: Any, **kwargs: Any) -> Callable[..., SimCall]:
        return self._method(path, True, True, *args, **kwargs)

    def _method(
        self,
        path: str,
        streams_up: bool,
        streams_down: bool,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., SimCall]:
        def call(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str]] | None = None,
            wait_for_ready: bool | None = None,
        ) -> SimCall:
            started = SimCall(
                self,
                path,
                (streams_up, streams_down),
                request_serializer,
                response_deserializer,
                tuple(metadata or ()),
                wait_for_ready=bool(wait_for_ready),
            )
            requests = request if streams_up else (request,)
            assert requests is None or isinstance(requests, tuple), "streams are not iterated"
            started.begin(timeout, requests)
            return started

        return call


class SimCall:
    """The client's end of a call."""

    def __init__(
        self,
        channel: SimChannel,
        path: str,
        streams: tuple[bool, bool],
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
        metadata: Metadata,
        *,
        wait_for_ready: bool,
    ) -> None:
        network = channel.network
        self.path = path
        self.streams = streams
        self.metadata = metadata
        self.wait_for_ready = wait_for_ready
        self._channel = channel
        self._network = network
        self._node = channel.node
        self._serialize = serialize
        self._deserialize = deserialize
        self._connection: SimConnection | None = None
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._trailing: Metadata = ()
        self._cancelled = False
        self._half_closed = False
        self._callbacks: list[Callable[[Any], None]] = []
        self._requests: list[bytes] | None = None
        """All requests, encoded; None if the caller writes them one by one."""
        self._deadline: Handle | None = None
        self._attached = _Waiters(network.loop)
        self._ended = _Waiters(network.loop)
        self._trailers: tuple[grpc.StatusCode, str] | None = None
        self.up: _Pipe | None = None
        self.down = _Pipe(network, channel.node)
        if path.endswith("/Read"):
            self.down.arrivals = deque()
        self.context: SimContext | None = None

    def begin(self, timeout: float | None, requests: tuple[Any, ...] | None) -> None:
        if requests is not None:
            self._requests = [self._encoded(request) for request in requests]
            self._half_closed = True
        if timeout is not None:
            self._deadline = self._network.loop.call_later(
                max(timeout, 0.0), self._expired, context=self._node.context
            )
        self._channel.start(self)

    def attach(self, connection: SimConnection) -> None:
        """Begin the call at the server, since the channel is connected now."""
        if self._status is not None:
            return
        self._connection = connection
        connection.calls[self] = None
        server = connection.server
        self.up = _Pipe(self._network, server.node)
        self.context = SimContext(self, connection)
        self.up.send(self._node, server.accept, self.context)
        if self._network.silent_since(self._node, server.node) is not None:
            connection.suspect()
        if self._requests is not None:
            for request in self._requests:
                self._put(request)
            self._end_writing()
        if self._network.on_call is not None:
            self._network.on_call(self._node.name, server.node.name, self.path, "begins")
        self._attached.wake()

    def _put(self, message: bytes) -> None:
        assert self.up is not None
        if len(message) <= MESSAGE_BYTES_MAX:
            self.up.put(self._node, message)
        elif self.context is not None:
            self.up.send(self._node, self.context.refuse, len(message))

    def _encoded(self, message: Any) -> bytes:
        return message if self._serialize is None else self._serialize(message)

    def _note_taken(self, message: bytes | None) -> None:
        if message is not None and self.down.arrivals is not None and self._connection is not None:
            server = self._connection.server.node.name
            self._network.took(self._node.name, server, message, self.down.arrived_at)

    def _expired(self) -> None:
        self._reset()
        self.finish(_Code.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _reset(self) -> None:
        """Send to the server that the caller is gone."""
        if self.context is not None and self.up is not None and self._status is None:
            self.up.send(self._node, self.context.caller_gone)

    def trailers(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        """Take the server's status, which arrived after all its messages."""
        self._trailing = trailing
        if self._status is not None:
            return
        if code is _Code.OK:
            # The caller can still read messages that it has not read yet.
            self._trailers = (code, details)
            self.down.end()
            if self.down.empty or not self.streams[1]:
                self.finish(code, details)
        else:
            if self._network.rng.random() < 0.5:
                self.down.clear()
            self.finish(code, details)

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """End the call, as far as this end knows."""
        if self._status is not None:
            return
        self._status = (code, details)
        if self._network.on_call is not None:
            server = "-" if self._connection is None else self._connection.server.node.name
            self._network.on_call(self._node.name, server, self.path, f"{code.name} {details}")
        if self._deadline is not None:
            self._deadline.cancel()
        self._channel.forget(self)
        if self._connection is not None:
            self._connection.calls.pop(self, None)
        self.down.end()
        self._attached.wake()
        self._ended.wake()
        if self.up is not None:
            self.up.wake()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    # What calls of our HTTP/2 offer, and grpc.aio.

    @property
    def status(self) -> tuple[grpc.StatusCode, str] | None:
        return self._status

    @property
    def error(self) -> grpc.aio.AioRpcError | None:
        if self._status is None or self._status[0] is _Code.OK:
            return None
        code, details = self._status
        return grpc.aio.AioRpcError(
            code,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(*self._trailing),
            details=details,
            debug_error_string=details,
        )

    def cancel(self) -> bool:
        if self._status is not None:
            return False
        self._cancelled = True
        self._reset()
        self.finish(_Code.CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        return self._status is not None and self._status[0] is _Code.CANCELLED

    def done(self) -> bool:
        return self._status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        await self._until_ended()
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        await self._until_ended()
        assert self._status is not None
        return self._status[1]

    async def initial_metadata(self) -> Metadata:
        return ()

    async def trailing_metadata(self) -> Metadata:
        await self._until_ended()
        return self._trailing

    async def wait_for_connection(self) -> None:
        while self._connection is None and self._status is None:
            await self._attached.wait()
        self._raise_for_status()

    async def _until_ended(self) -> None:
        while self._status is None:
            await self._ended.wait()

    def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self.error is not None:
            raise self.error

    async def write(self, request: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        message = self._encoded(request)
        try:
            while self.up is None and self._status is None:
                await self._attached.wait()
            if self._status is None:
                assert self.up is not None
                self._put(message)
                while self.up.full and self._status is None:
                    await self.up.room()
            await _yield()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()

    def send_now(self, content: bytes) -> bool:
        """Send requests as a call of our HTTP/2 does. Sometimes refuse them, as a full socket does."""
        up = self.up
        if up is None or self._status is not None or self._half_closed:
            return False
        if up.full or self._network.rng.random() < _FULL_CHANCE:
            return False
        queue = MessageQueue(len(content))
        queue.feed(memoryview(content))
        while queue:
            self._put(queue.take()[0])
        return True

    def listen(self, sink: Callable[[Any], None]) -> None:
        """Give each response to ``sink`` as it arrives, as a call of our HTTP/2 does."""

        def give() -> None:
            while not self.down.empty:
                message = self.down.take()
                self._note_taken(message)
                sink(message if self._deserialize is None else self._deserialize(message))

        self.down.on_arrival = give
        give()

    async def done_writing(self) -> None:
        if self._status is not None or self._half_closed:
            return
        try:
            while self.up is None and not self.done():
                await self._attached.wait()
            if not self.done():
                self._end_writing()
            await _yield()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()

    def _end_writing(self) -> None:
        self._half_closed = True
        assert self.up is not None
        self.up.send(self._node, self.up.end)

    async def read(self) -> Any:
        if self._status is not None and self.down.empty:
            self._raise_for_status()
            return EOF
        try:
            message = await self.down.get()
            self._note_taken(message)
            await _yield()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is not None:
            return message if self._deserialize is None else self._deserialize(message)
        if self._trailers is not None:
            self.finish(*self._trailers)
        await self._until_ended()
        self._raise_for_status()
        return EOF

    async def _response(self) -> Any:
        try:
            message = await self.down.get()
            self._note_taken(message)
            await self._until_ended()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_for_status()
        assert message is not None, f"{self.path} was answered without a response"
        return message if self._deserialize is None else self._deserialize(message)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message


class SimContext:
    """The server's end of a call: handlers get it as their context."""

    def __init__(self, call: SimCall, connection: SimConnection) -> None:
        self.call = call
        self.connection = connection
        self._network = connection.network
        self._node = connection.server.node
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()
        self._serialize: Callable[[Any], bytes] | None = None
        self._deserialize: Callable[[bytes], Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._gone = False
        self._finished = False
        self.whole: SimWholeCall | None = None
        """Set while the call has no task: it is not whole yet, or a function has taken it as a whole."""

    def use(self, handler: Any, task: asyncio.Task[None]) -> None:
        self._serialize, self._deserialize = (
            handler.response_serializer,
            handler.request_deserializer,
        )
        self._task = task

    def caller_gone(self) -> None:
        """Cancel the handler: the caller has cancelled, or its connection is lost."""
        if self._gone:
            return
        self._gone = True
        if self.whole is not None:
            self.whole.gone()
        assert self.call.up is not None
        self.call.up.end()
        self.call.down.wake()
        task = self._task
        if task is None or task.done():
            return
        if self._network.rng.random() < 0.5:
            task.cancel()  # Otherwise, the handler may see the end of the stream first.
        else:
            loop = self._network.loop
            delay = self._network.rng.random() * 0.001
            loop.call_later(delay, task.cancel, context=self._node.context)

    def refuse(self, length: int) -> None:
        """Refuse a message that is too large to be received."""
        code = _Code.RESOURCE_EXHAUSTED
        self.finish(code, f"Received message larger than max ({length} vs. {MESSAGE_BYTES_MAX})")
        self.caller_gone()

    # What grpc.aio offers.

    def invocation_metadata(self) -> Metadata:
        return self.call.metadata

    def set_trailing_metadata(self, trailing: Sequence[tuple[str, str]]) -> None:
        self._trailing = tuple(trailing)

    async def send_initial_metadata(self, _metadata: Any) -> None:
        await _yield()

    def peer(self) -> str:
        return f"sim:{self.connection.client.name}"

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def cancelled(self) -> bool:
        return self._gone

    def done(self) -> bool:
        return self._finished

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        await _yield()
        raise grpc.aio.AbortError

    async def write(self, response: Any) -> None:
        message = response if self._serialize is None else self._serialize(response)
        if self._gone:
            await _yield()
            raise asyncio.CancelledError("the caller is gone")
        down = self.call.down
        self.put(message)
        while down.full and not self._gone:
            await down.room()
        await _yield()

    def put(self, message: bytes) -> None:
        """Send an encoded response."""
        self.call.down.put(self._node, message)

    async def each(
        self,
        handle: HandleRequest,
        bound: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        """Handle the requests that follow as `GrpcCall.each` does."""
        up = self.call.up
        assert up is not None
        handling = Handling(self, up.arrived, handle)
        up.on_arrival = handling.arrived
        try:
            while await handling.turn():
                await bound(handling.wait())
        finally:
            up.on_arrival = None
            handling.close()

    @property
    def fault(self) -> None:
        return None

    @property
    def has_ended(self) -> bool:
        assert self.call.up is not None
        return self.call.up.ended

    def take(self) -> Any:
        assert self.call.up is not None
        message = self.call.up.take()
        return message if self._deserialize is None else self._deserialize(message)

    def send_now(self, content: bytes) -> bool:
        """Send responses as a call of our HTTP/2 does. Sometimes refuse them, as a full socket does."""
        down, messages = self.call.down, MessageQueue(MESSAGE_BYTES_MAX)
        if self._gone or self._finished or down.full:
            return False
        if self._network.rng.random() < _FULL_CHANCE:
            return False
        messages.feed(memoryview(content))
        while messages:
            down.put(self._node, messages.take()[0])
        return True

    async def read(self) -> Any:
        assert self.call.up is not None
        message = await self.call.up.get()
        if message is None:
            return EOF
        return message if self._deserialize is None else self._deserialize(message)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not EOF:
            yield message

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        if self._finished:
            return
        self._finished = True
        self.connection.served.pop(self, None)
        if not self._gone:
            assert self.call.up is not None
            self.call.down.send(self._node, self.call.trailers, code, details, self._trailing)


class SimServer:
    """A gRPC server of one node, at one address, as `grpc.aio.server` makes them."""

    def __init__(
        self,
        network: Network,
        node: SimNode,
        address: str,
        clock: Clock | None = None,
    ) -> None:
        """Make a server. With a ``clock`` its calls are counted, as a `GrpcServer` counts them."""
        self.network = network
        self.node = node
        self.address = address
        self.listening = False
        self._stopped = False
        self._clock = clock
        self._handlers: list[Any] = []
        self._methods: dict[str, Any] = {}
        self._serving: dict[SimContext, asyncio.Task[None]] = {}
        self._idle = _Waiters(network.loop)
        self._whole = WholeCalls(self, self._idle.wake)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any], admit: Any = None) -> None:
        """Serve the methods of ``handlers``, too. Ignore ``admit``: the handlers also check their callers."""
        del admit
        self._handlers += handlers

    def take_whole_calls(self, path: str, take: TakeWhole) -> None:
        """Offer calls of a method to ``take`` that arrive as a whole."""
        self._whole.add(path, take)

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """Ignore the handlers that generated code adds a second time; the generic ones suffice."""

    async def start(self) -> None:
        self.listening = True
        self.network.listen(self.address, self)
        await _yield()

    async def stop(self, grace: float | None) -> None:
        """Refuse new calls. Let running calls end within ``grace`` seconds, then cancel them."""
        self._stopped = True
        self.listening = False
        self.network.unlisten(self.address, self)
        if grace and self._is_busy:
            try:
                async with asyncio.timeout(grace):
                    while self._is_busy:
                        await self._idle.wait()
            except TimeoutError:
                pass
        self._whole.give_up()
        for context, task in list(self._serving.items()):
            context.set_code(_Code.CANCELLED)
            task.cancel()
        while self._serving:
            await self._idle.wait()
        for connection in list(self.network._connections):
            if connection.server is self:
                connection.server_lost()

    @property
    def _is_busy(self) -> bool:
        return bool(self._serving) or len(self._whole) > 0

    def accept(self, context: SimContext) -> None:
        """Begin to serve a call that has arrived."""
        if context._gone or not context.connection.server_open:
            return
        if self._stopped:
            context.finish(_Code.UNAVAILABLE, "the server is stopping (GOAWAY)")
            return
        context.connection.served[context] = None
        if not self._whole.begin(context):
            self.serve(context)

    def serve(self, context: SimContext) -> None:
        """Serve a call by a task."""
        task = self.network.loop.create_task(
            self._serve(context),
            name=f"serve {context.call.path}",
            context=self.node.context.copy(),
        )
        self._serving[context] = task
        task.add_done_callback(lambda _: self._served(context))

    def _served(self, context: SimContext) -> None:
        del self._serving[context]
        context.finish(_Code.CANCELLED, "Cancelled on the server side")
        self._idle.wake()

    def _handler(self, path: str, metadata: Metadata) -> Any:
        details: Any = _Details(path, metadata)
        for generic in self._handlers:
            handler = generic.service(details)
            if handler is not None:
                clock = self._clock
                return handler if clock is None else MeasuredMethod(path, handler, clock).handler
        return None

    async def _serve(self, context: SimContext) -> None:
        call = context.call
        handler = self._methods.get(call.path)
        if handler is None:
            handler = self._methods[call.path] = self._handler(call.path, call.metadata)
        if handler is None:
            context.finish(_Code.UNIMPLEMENTED, "Method not found!")
            return
        task = asyncio.current_task()
        assert task is not None
        context.use(handler, task)
        try:
            await self._run(handler, context)
        except grpc.aio.AbortError:
            context.finish(context.code() or _Code.UNKNOWN, context.details())
        except asyncio.CancelledError:
            context.finish(_Code.CANCELLED, "Cancelled on the server side")
            raise
        except Exception as error:  # noqa: BLE001 - as gRPC: it is the caller's status, and logged
            self.network.on_error(f"handler of {call.path} at {self.node.name} raised {error!r}")
            context.finish(_Code.UNKNOWN, f"Unexpected {type(error)}: {error}")
        else:
            context.finish(context.code() or _Code.OK, context.details())

    async def _run(self, handler: Any, context: SimContext) -> None:
        request: Any = context
        if not handler.request_streaming:
            request = await context.read()
            if request is EOF:
                raise asyncio.CancelledError
        behavior = {
            (False, False): handler.unary_unary,
            (False, True): handler.unary_stream,
            (True, False): handler.stream_unary,
            (True, True): handler.stream_stream,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        result = behavior(request, context)
        if inspect.isasyncgen(result):
            async for response in result:
                await context.write(response)
            return
        response = await result
        if not handler.response_streaming:
            await context.write(response)


class _Details:
    """The argument by which a server asks a generic handler for a method."""

    __slots__ = ("invocation_metadata", "method")

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class SimTransport:
    """`gazette.http2.transport.Transport` of one node."""

    def __init__(self, network: Network, node: SimNode) -> None:
        self._network = network
        self._node = node

    @property
    def ends_silent_calls(self) -> bool:
        return True  # See `_CLIENT_SILENCE_S`.

    def channel(
        self, target: str, credentials: object, options: Sequence[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        assert credentials is None
        channel: Any = SimChannel(self._network, self._node, address_of(target), dict(options))
        return channel  # type: ignore[no-any-return]


def address_of(target: str) -> str:
    """Return the ``host:port`` of an endpoint or a gRPC target."""
    if target.startswith("dns:///"):
        return target.removeprefix("dns:///")
    return urlsplit(target).netloc or target
