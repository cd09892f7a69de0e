"""Spans of OpenTelemetry, if a program has set up its SDK; otherwise nothing.

Contexts go from process to process as W3C ``traceparent``, in the metadata of calls. Calls have spans of kind
client and server, named by their method. ``span`` traces other blocks, such as ``replicate`` and ``persist``.
``ended_now`` traces work that is no block, such as ``transaction``. Only the API is imported here: the
program chooses exporters.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry import trace

Metadata = tuple[tuple[str, Any], ...]

_API: Final = "opentelemetry.trace"
_SCOPE: Final = "gazette"
_GRPC: Final = {"rpc.system": "grpc"}
_NO_SPAN: Final = nullcontext()


def active() -> bool:
    """Return True if the program has set up an SDK. Call the other functions only then, except `span` and
    `annotate`, which otherwise do nothing.

    A program that sets up an SDK has imported the API, or names the SDK in the environment. So in other
    programs this function imports nothing.
    """
    if _API not in sys.modules and "OTEL_PYTHON_TRACER_PROVIDER" not in os.environ:
        return False
    api = _api()
    inert = (api.ProxyTracerProvider, api.NoOpTracerProvider)
    return not isinstance(api.get_tracer_provider(), inert)


def _api() -> Any:
    """Import the API. Few programs trace: all others start sooner without this import."""
    from opentelemetry import trace

    return trace


@cache
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def span(name: str, **attributes: str | int) -> AbstractContextManager[None]:
    """Trace a block as a span with attributes ``gazette.<name>``. An error marks the span."""
    return _span(name, attributes) if active() else _NO_SPAN


@contextmanager
def _span(name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
    with _api().get_tracer(_SCOPE).start_as_current_span(name, attributes=_prefixed(attributes)):
        yield


def annotate(**attributes: str | int) -> None:
    """Add attributes to the present span, if it is recorded."""
    if _API not in sys.modules:
        return
    current = _api().get_current_span()
    if current.is_recording():
        for key, value in attributes.items():
            current.set_attribute(f"{_SCOPE}.{key}", value)


def ended_now(name: str, phases: Mapping[str, float], **attributes: str | int | list[str]) -> None:
    """Record a span of work that ends now, and its phases within it, one after the other.

    ``phases``: seconds by name, in their order.
    """
    tracer, prefixed = _api().get_tracer(_SCOPE), _prefixed(attributes)
    end = time.time_ns()
    begin = end - sum(map(_nanos, phases.values()))
    whole = tracer.start_span(name, attributes=prefixed, start_time=begin)
    context = _api().set_span_in_context(whole)
    for phase, seconds in phases.items():
        part = tracer.start_span(phase, context, start_time=begin)
        begin += _nanos(seconds)
        part.end(begin)
    whole.end(end)


def _nanos(seconds: float) -> int:
    return int(seconds * 1e9)


def _prefixed(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{_SCOPE}.{key}": value for key, value in attributes.items()}


@contextmanager
def serving(
    method: str,
    metadata: Iterable[tuple[str, Any]] | None,
    attributes: Mapping[str, str] = _GRPC,
) -> Iterator[None]:
    """Trace a call that this process answers, as a child of the caller's span."""
    carrier = {
        name: value
        for name, value in metadata or ()
        if name in ("traceparent", "tracestate") and isinstance(value, str)
    }
    with (
        _api()
        .get_tracer(_SCOPE)
        .start_as_current_span(
            method.lstrip("/"),
            context=_propagator().extract(carrier),
            kind=_api().SpanKind.SERVER,
            attributes=attributes,
        )
    ):
        yield


def calling(method: str) -> tuple[trace.Span, Metadata]:
    """Return a span for a call that is about to be made, and the metadata that names it to the server.

    The caller ends the span (``ended``).
    """
    api = _api()
    call_span = api.get_tracer(_SCOPE).start_span(
        method.lstrip("/"), kind=api.SpanKind.CLIENT, attributes=_GRPC
    )
    carrier: dict[str, str] = {}
    # Without another context, the span is set in the present one.
    _propagator().inject(carrier, api.set_span_in_context(call_span))
    return call_span, tuple(carrier.items())


def ended(started: trace.Span, code: str) -> None:
    """End the span of a call. ``code`` is the name of the gRPC code with which the call ended."""
    started.set_attribute("rpc.grpc.status_code", code)
    if code not in ("OK", "CANCELLED"):
        started.set_status(_api().StatusCode.ERROR, code)
    started.end()
