"""Metrics of the calls that a client makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import grpc

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
        self._labels = labels
        self.started = GRPC_CLIENT_STARTED.labels(*labels)
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

    def count(self, code: grpc.StatusCode, seconds: float) -> None:
        """Count a call that has ended."""
        self._seconds.observe(seconds)
        _handled(self._labels, code).inc()


@cache
def _handled(labels: tuple[str, str, str], code: grpc.StatusCode) -> Any:
    return GRPC_CLIENT_HANDLED.labels(*labels, grpc_code_name(code))
