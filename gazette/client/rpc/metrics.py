"""Metrics and spans of the calls that a client makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import grpc

from gazette.client.rpc.stream_call import of_ended
from gazette.runtime import tracing
from gazette.runtime.clock import Clock
from gazette.runtime.metrics import (
    GRPC_CLIENT_HANDLED,
    GRPC_CLIENT_RECEIVED,
    GRPC_CLIENT_SECONDS,
    GRPC_CLIENT_SENT,
    GRPC_CLIENT_STARTED,
    grpc_code_name,
)


@cache
def call_metrics(kind: str, path: str) -> CallMetrics:
    """Return the `CallMetrics` of a method. It has no state: all channels share it."""
    return CallMetrics(kind, path)


class CallMetrics:
    """Metrics of the method ``path``. The other argument is the label ``grpc_type``, such as ``unary``."""

    def __init__(self, kind: str, path: str) -> None:
        service, _, method = path.lstrip("/").partition("/")
        labels = (kind, service, method)
        self._path = path
        self._labels = labels
        self._started = GRPC_CLIENT_STARTED.labels(*labels)
        self._sent = GRPC_CLIENT_SENT.labels(*labels)
        self._received = GRPC_CLIENT_RECEIVED.labels(*labels)
        self._seconds = GRPC_CLIENT_SECONDS.labels(*labels)

    def serializers(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return the request serializer and response deserializer of a stub, which also count messages."""
        given = dict(zip(("request_serializer", "response_deserializer"), args, strict=False))
        given |= kwargs
        serialize = given.get("request_serializer")
        deserialize = given.get("response_deserializer")
        sent, received = self._sent.inc, self._received.inc

        def request(message: Any) -> Any:
            sent()
            return message if serialize is None else serialize(message)

        def response(data: Any) -> Any:
            received()
            return data if deserialize is None else deserialize(data)

        return request, response

    def start(
        self,
        clock: Clock,
        method: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        ended: Callable[[Any, grpc.StatusCode], None],
    ) -> Any:
        """Make the call. Count it once it has ended, and pass it to ``ended`` with its code."""
        span = None
        if tracing.active():
            span, context = tracing.calling(self._path)
            kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *context)
        call = method(*args, **kwargs)
        self._started.inc()
        begin = clock.monotonic()

        def on_done(done: Any) -> None:
            code = _code_of(done)
            self._seconds.observe(clock.monotonic() - begin)
            _handled(self._labels, grpc_code_name(code)).inc()
            if span is not None:
                tracing.ended(span, code.name)
            ended(done, code)

        call.add_done_callback(on_done)
        return call


@cache
def _handled(labels: tuple[str, str, str], code: str) -> Any:
    return GRPC_CLIENT_HANDLED.labels(*labels, code)


def _code_of(call: Any) -> grpc.StatusCode:
    """Return the code of a call that has ended."""
    try:
        code = of_ended(call.code())
    except BaseException:  # noqa: BLE001 - whatever it is, the call has not gone well
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.UNKNOWN if code is None else code
