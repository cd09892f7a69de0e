"""Spans of OpenTelemetry, where a program has set its SDK up; nothing where it has not.

Contexts go from process to process as W3C ``traceparent``, in the metadata of calls. Spans are those of
calls (named by their method, of kind client and server) and what ``span`` is given within: ``replicate``,
``persist``. Only the API is imported here: exporters are the program's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, Any], ...]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_INERT: Final = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
_SCOPE: Final = "gazette"


def active() -> bool:
    """Whether somebody set up an SDK. Everything else here is to be asked for only then."""
    return not isinstance(trace.get_tracer_provider(), _INERT)


@contextmanager
def span(name: str, **attributes: str | int) -> Iterator[None]:
    """A span around what is done within, with attributes ``gazette.<name>``. An error marks it."""
    if not active():
        yield
        return
    named = {f"{_SCOPE}.{key}": value for key, value in attributes.items()}
    with trace.get_tracer(_SCOPE).start_as_current_span(name, attributes=named):
        yield


def annotate(**attributes: str | int) -> None:
    """Attributes of the span that we are in, if it is recorded."""
    current = trace.get_current_span()
    if current.is_recording():
        for key, value in attributes.items():
            current.set_attribute(f"{_SCOPE}.{key}", value)


@contextmanager
def serving(method: str, metadata: Iterable[tuple[str, Any]] | None) -> Iterator[None]:
    """The span of a call that we answer, as a child of the caller's."""
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
    """A span for a call that is about to be made, and the metadata that tells its server of it.

    The caller ends the span (``ended``).
    """
    started = trace.get_tracer(_SCOPE).start_span(
        method.lstrip("/"), kind=trace.SpanKind.CLIENT, attributes={"rpc.system": "grpc"}
    )
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(started, contexts.get_current()))
    return started, tuple(carrier.items())


def ended(started: trace.Span, code: str) -> None:
    """End the span of a call that ended with a gRPC code, by its name."""
    started.set_attribute("rpc.grpc.status_code", code)
    if code not in ("OK", "CANCELLED"):
        started.set_status(trace.StatusCode.ERROR, code)
    started.end()
