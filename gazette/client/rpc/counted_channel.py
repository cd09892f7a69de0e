"""The calls that carry journal bytes (`BytePath`), and gRPC channels that count calls (`CountedChannel`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache, partial
from typing import Any, Final, cast

import grpc
import grpc.aio

from gazette.client.rpc.stream_call import StreamCall
from gazette.http2.grpc_client import Http2Channel
from gazette.protocol.content import decode_read, encode_append
from gazette.protocol.pb import broker_pb2
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.runtime import tracing
from gazette.runtime.clock import Clock
from gazette.runtime.metrics import (
    GRPC_CLIENT_HANDLED,
    GRPC_CLIENT_RECEIVED,
    GRPC_CLIENT_SECONDS,
    GRPC_CLIENT_SENT,
    GRPC_CLIENT_STARTED,
    Tally,
    grpc_code_name,
)

_PROBE: Final = "/grpc.health.v1.Health/Check"
_REPLICATE: Final = "/protocol.Journal/Replicate"
_TOO_MANY_PINGS: Final = "too many pings"
_GIVEN_UP: Final = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Codes of calls that this process has ended itself. They do not show that the peer answers."""


class BytePath:
    """The calls that carry journal bytes. Each channel makes these stubs once.

    ``append`` takes requests one by one, as messages or encoded. ``append_whole`` takes a tuple of all
    requests, and sends them at once. ``replicate`` takes encoded requests. ``read`` returns `Content` for a
    message with content, and a ``ReadResponse`` for any other message.
    """

    __slots__ = ("append", "append_whole", "read", "replicate")

    def __init__(self, channel: CountedChannel) -> None:
        append: Callable[..., Any] = channel.stream_unary(
            "/protocol.Journal/Append",
            request_serializer=encode_append,
            response_deserializer=broker_pb2.AppendResponse.FromString,
        )
        self.append_whole = append
        self.append: Callable[..., StreamCall] = lambda **call: StreamCall(append(**call))
        self.read: Callable[..., Any] = channel.unary_stream(
            "/protocol.Journal/Read",
            request_serializer=broker_pb2.ReadRequest.SerializeToString,
            response_deserializer=decode_read,
        )
        replicate = channel.stream_stream(
            _REPLICATE,
            request_serializer=None,
            response_deserializer=broker_pb2.ReplicateResponse.FromString,
        )
        sent = call_metrics("bidi_stream", _REPLICATE).sent.inc
        self.replicate: Callable[..., StreamCall] = lambda **call: StreamCall(
            replicate(**call), sent
        )


class Health(IntEnum):
    """State of the connection to an endpoint; greater is better."""

    FAILING = 0
    """The last attempt to connect failed, and no later attempt succeeded."""
    IDLE = 1
    """The state is unknown: not connected, or never tried."""
    CONNECTING = 2
    READY = 3


class CountedChannel:
    """A gRPC channel that counts its calls and remembers whether its connection fails. It has the four
    methods that generated stubs call on a channel."""

    def __init__(
        self,
        channel: grpc.aio.Channel | Http2Channel,
        clock: Clock,
        on_start: Callable[[], None],
        on_refused_pings: Callable[[], None],
    ) -> None:
        self._grpc = channel
        self._clock = clock
        self._on_start = on_start
        self._on_refused_pings = on_refused_pings
        self._failing = False
        self.calls = 0  # Calls that have not ended.
        self.used_at = 0.0  # Set by the owner, whenever it gives this channel to a caller.
        self.heard_at = 0.0
        """The latest time at which a call began while no other ran, or the peer ended a call or a probe."""
        self.journal = JournalStub(cast("grpc.aio.Channel", self))
        self.shard = ShardStub(cast("grpc.aio.Channel", self))
        self.byte_path = BytePath(self)

    def health(self) -> Health:
        """Return the connection's state.

        After a failure, return FAILING until the connection is ready again: a failing channel goes
        through CONNECTING again and again.
        """
        match self._grpc.get_state():
            case grpc.ChannelConnectivity.READY:
                self._failing = False
                return Health.READY
            case grpc.ChannelConnectivity.TRANSIENT_FAILURE | grpc.ChannelConnectivity.SHUTDOWN:
                self._failing = True
            case grpc.ChannelConnectivity.CONNECTING if not self._failing:
                return Health.CONNECTING
            case _:  # IDLE, or CONNECTING after a failure.
                pass
        return Health.FAILING if self._failing else Health.IDLE

    async def connect(self) -> bool:
        """Try to connect if there is no connection. Return True if there is a connection now."""
        unsettled = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
        while (state := self._grpc.get_state(try_to_connect=True)) in unsettled:
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
        """Return a method that counts its calls, for this channel and for metrics."""
        metrics = call_metrics(kind, path)
        method = make(path, *metrics.serializers(args, kwargs))

        def call(*args: Any, **kwargs: Any) -> Any:
            span = None
            if tracing.active():
                span, context = tracing.calling(path)
                kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *context)
            rpc = method(*args, **kwargs)
            began = self._clock.monotonic()
            if not self.calls:
                self.heard_at = began
                self._on_start()
            self.calls += 1
            rpc.add_done_callback(partial(self._ended, metrics, began, span))
            metrics.started.count += 1
            return rpc

        return call

    def _ended(self, metrics: CallMetrics, began: float, span: Any, call: Any) -> None:
        now = self._clock.monotonic()
        self.calls -= 1
        code, details = call.status
        if code not in _GIVEN_UP:
            self.heard_at = now
        metrics.count(code, now - began)
        if span is not None:
            tracing.ended(span, code.name)
        refused = code is grpc.StatusCode.UNAVAILABLE
        if refused and _TOO_MANY_PINGS in details.lower().replace("_", " "):
            self._on_refused_pings()

    async def answers(self, timeout_s: float) -> bool:
        """Probe the peer. Return False if it is connected and sends nothing for ``timeout_s`` seconds.

        Every gRPC server answers a call, even of an unknown method. On a slow link, content on its way delays
        the answer, so content counts as well. Answers to pings do not count: a proxy may send them.
        """
        if self._grpc.get_state() is not grpc.ChannelConnectivity.READY:
            return True
        received = self._received_bytes()
        try:
            await self._grpc.unary_unary(_PROBE, bytes, bytes)(b"", timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                is_lost = self._grpc.get_state() is not grpc.ChannelConnectivity.READY
                return is_lost or self._received_bytes() != received
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return True  # The channel was closed meanwhile.
        self.heard_at = self._clock.monotonic()
        return True

    def _received_bytes(self) -> int:
        return self._grpc.received_bytes if isinstance(self._grpc, Http2Channel) else 0

    async def close(self, grace_s: float | None) -> None:
        await self._grpc.close(grace_s)

    def abort(self) -> None:
        """Cut the connections, on the loop, after the owner was dropped. In a simulation do nothing."""
        if isinstance(self._grpc, Http2Channel):
            self._grpc.abort()


@cache
def call_metrics(kind: str, path: str) -> CallMetrics:
    """Return the `CallMetrics` of a method. All channels share the object."""
    return CallMetrics(kind, path)


class CallMetrics:
    """Metrics of the method ``path``. ``kind`` is the label ``grpc_type``, such as ``unary``."""

    def __init__(self, kind: str, path: str) -> None:
        service, _, method = path.lstrip("/").partition("/")
        labels = (kind, service, method)
        self._labels = labels
        self.started = GRPC_CLIENT_STARTED.labels(*labels)
        self.sent = GRPC_CLIENT_SENT.labels(*labels)
        self._received = GRPC_CLIENT_RECEIVED.labels(*labels)
        self._seconds = GRPC_CLIENT_SECONDS.labels(*labels)

    def serializers(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return the request serializer and response deserializer of a stub, which also count messages."""
        named_args = dict(zip(("request_serializer", "response_deserializer"), args, strict=False))
        named_args |= kwargs
        serialize = named_args.get("request_serializer")
        deserialize = named_args.get("response_deserializer")
        sent, received = self.sent, self._received

        def request(message: Any) -> Any:
            sent.count += 1
            return message if serialize is None else serialize(message)

        def response(data: Any) -> Any:
            received.count += 1
            return data if deserialize is None else deserialize(data)

        return request, response

    def count(self, code: grpc.StatusCode, seconds: float) -> None:
        """Count a call that has ended."""
        self._seconds.observe(seconds)
        _handled(self._labels, code).count += 1


@cache
def _handled(labels: tuple[str, str, str], code: grpc.StatusCode) -> Tally:
    return GRPC_CLIENT_HANDLED.labels(*labels, grpc_code_name(code))
