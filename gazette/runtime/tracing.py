"""Spans of OpenTelemetry, if a program has set up its SDK; otherwise nothing.

Contexts go from process to process as W3C ``traceparent``, in the metadata of calls. Calls have spans of kind
client and server, named by their method. ``span`` traces other blocks, such as ``replicate`` and ``persist``.
Only the API is imported here: the program chooses exporters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, Any], ...]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_INERT: Final = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
_SCOPE: Final = "gazette"
_NO_SPAN: Final = nullcontext()


def active() -> bool:
    """Return True if the program has set up an SDK. Call the other functions only then."""
    return not isinstance(trace.get_tracer_provider(), _INERT)


def span(name: str, **attributes: str | int) -> AbstractContextManager[None]:
    """Trace a block as a span with attributes ``gazette.<name>``. An error marks the span."""
    return _span(name, attributes) if active() else _NO_SPAN


@contextmanager
def _span(name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
    prefixed = {f"{_SCOPE}.{key}": value for key, value in attributes.items()}
    with trace.get_tracer(_SCOPE).start_as_current_span(name, attributes=prefixed):
        yield


def annotate(**attributes: str | int) -> None:
    """Add attributes to the present span, if it is recorded."""
    current = trace.get_current_span()
    if current.is_recording():
        for key, value in attributes.items():
            current.set_attribute(f"{_SCOPE}.{key}", value)


@contextmanager
def serving(method: str, metadata: Iterable[tuple[str, Any]] | None) -> Iterator[None]:
    """Trace a call that this process answers, as a child of the caller's span."""
    carrier = {
        name: value
        for name, value in metadata or ()
        if name in ("traceparent", "tracestate") and isinstance(value, str)
    }
    with trace.get_tracer(_SCOPE).start_as_current_span(
        method.lstrip("/"),
        context=_PROPAGATOR.extract(carrier),
        kind=trace.SpanKind.SERVER,
        attributes={"rpc.system": "grpc"},
    ):
        yield


def calling(method: str) -> tuple[trace.Span, Metadata]:
    """Return a span for a call that is about to be made, and the metadata that names it to the server.

    The caller ends the span (``ended``).
    """
    call_span = trace.get_tracer(_SCOPE).start_span(
        method.lstrip("/"), kind=trace.SpanKind.CLIENT, attributes={"rpc.system": "grpc"}
    )
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(call_span, contexts.get_current()))
    return call_span, tuple(carrier.items())


def ended(started: trace.Span, code: str) -> None:
    """End the span of a call. ``code`` is the name of the gRPC code with which the call ended."""
    started.set_attribute("rpc.grpc.status_code", code)
    if code not in ("OK", "CANCELLED"):
        started.set_status(trace.StatusCode.ERROR, code)
    started.end()
