"""The export of all metrics, and the metrics of journal clients, journal servers and gRPC.

Other packages define their own metrics. All metrics are in the one registry of the process. If a test runs
several brokers in one process, each metric is the sum of all brokers.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any, Final

from prometheus_client import (
    REGISTRY,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gazette.version import __version__

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # type: ignore[no-untyped-call]


def render() -> bytes:
    """Return the registry in the text format of Prometheus."""
    return generate_latest(REGISTRY)


class Tally:
    """One number of a `PlainCounter`. Any thread may add a constant or a variable to ``count``, by ``+=``.

    An interpreter with a lock changes threads only at calls and jumps. Such a ``+=`` has neither, so no
    addition is lost.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.count += by


class PlainCounter(Collector):
    """A counter without the locks and checks of the library's counters, for the events of each append.

    An append of three replicas counts about thirty times, for which the library makes 120 calls. Exported as
    untyped if its name does not end in ``_total``: dashboards read only the samples and their names.
    """

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._help = help_text
        self._labels = tuple(labels)
        self._tallies: dict[tuple[str, ...], Tally] = {}
        if not labels:
            self.labels()  # Without labels, a counter shows zero before the first event.
        REGISTRY.register(self)

    def labels(self, *labels: str) -> Tally:
        """Return the tally of these labels."""
        tally = self._tallies.get(labels)
        if tally is None:
            assert len(labels) == len(self._labels)
            tally = self._tallies.setdefault(labels, Tally())
        return tally

    def inc(self, *labels: str, by: float = 1.0) -> None:
        self.labels(*labels).count += by

    def value(self, *labels: str) -> float:
        tally = self._tallies.get(labels)
        return 0.0 if tally is None else tally.count

    def describe(self) -> list[Metric]:
        family = self._name.removesuffix("_total")
        return [Metric(family, self._help, "untyped" if family == self._name else "counter")]

    def collect(self) -> Iterator[Metric]:
        (metric,) = self.describe()
        for labels, tally in list(self._tallies.items()):
            named_labels = dict(zip(self._labels, labels, strict=True))
            metric.add_sample(self._name, named_labels, tally.count)
        yield metric


_BUILD: Final = Gauge("gazette_build_info", "1, of the version that runs.", ["version", "python"])
_BUILD.labels(__version__, platform.python_version()).set(1)

# The journal server.
JOURNAL_SERVER_STARTED: Final = PlainCounter(
    "gazette_journal_server_started_totals", "Started journal server operations.", ("operation",)
)
JOURNAL_SERVER_COMPLETED: Final = PlainCounter(
    "gazette_journal_server_completed_totals",
    "Completed journal server operations, by their status.",
    ("operation", "status"),
)


def count_completed(operation: str, status: str | None) -> None:
    """Count one operation that has ended. ``status`` is the name of its status; None: it raised an error."""
    label = "<error>" if status is None else "ok" if status == "OK" else status
    JOURNAL_SERVER_COMPLETED.inc(operation, label)


WRITE_HEAD: Final = Gauge(
    "gazette_write_head", "Write head of the journal, as of its last append here.", ["journal"]
)

# HTTP servers.
HTTP_CONNECTIONS_REFUSED: Final = Counter(
    "gazette_http_connections_refused_total",
    "HTTP connections that a limit cost: refused (limit), not accepted (descriptors), or idle ones closed.",
    ["reason"],
)

# gRPC servers.
_GRPC: Final = ("grpc_type", "grpc_service", "grpc_method")
GRPC_SERVER_STARTED: Final = PlainCounter(
    "grpc_server_started_total", "RPCs started on the server.", _GRPC
)
GRPC_SERVER_HANDLED: Final = PlainCounter(
    "grpc_server_handled_total", "RPCs completed on the server.", [*_GRPC, "grpc_code"]
)
GRPC_SERVER_RECEIVED: Final = PlainCounter(
    "grpc_server_msg_received_total", "Messages received on the server.", _GRPC
)
GRPC_SERVER_SENT: Final = PlainCounter(
    "grpc_server_msg_sent_total", "Messages sent by the server.", _GRPC
)
GRPC_SERVER_SECONDS: Final = Histogram(
    "grpc_server_handling_seconds", "Duration of RPCs on the server, until completed.", _GRPC
)

# gRPC clients.
GRPC_CLIENT_STARTED: Final = PlainCounter(
    "grpc_client_started_total", "RPCs started by the client.", _GRPC
)
GRPC_CLIENT_HANDLED: Final = PlainCounter(
    "grpc_client_handled_total", "RPCs completed by the client.", [*_GRPC, "grpc_code"]
)
GRPC_CLIENT_RECEIVED: Final = PlainCounter(
    "grpc_client_msg_received_total", "Messages received by the client.", _GRPC
)
GRPC_CLIENT_SENT: Final = PlainCounter(
    "grpc_client_msg_sent_total", "Messages sent by the client.", _GRPC
)
GRPC_CLIENT_SECONDS: Final = Histogram(
    "grpc_client_handling_seconds", "Duration of RPCs of the client, until completed.", _GRPC
)

# The client.
APPEND_BYTES: Final = PlainCounter("gazette_append_bytes_total", "Bytes appended.", ["journal"])
READ_BYTES: Final = Counter("gazette_read_bytes_total", "Bytes read.", ["journal"])
_FRAGMENT: Final = ("journal", "codec")
FRAGMENT_OPEN: Final = Counter(
    "gazette_fragment_open_total", "Fragments opened in blob stores.", _FRAGMENT
)
FRAGMENT_OPEN_BYTES: Final = Counter(
    "gazette_fragment_open_bytes_total", "Journal bytes of opened fragments.", _FRAGMENT
)
FRAGMENT_OPEN_CONTENT_LENGTH: Final = Counter(
    "gazette_fragment_open_content_length_total", "Stored bytes of opened fragments.", _FRAGMENT
)
READ_FRAGMENT_BYTES: Final = Counter(
    "gazette_read_fragment_bytes_total", "Bytes read of opened fragments.", _FRAGMENT
)
DISCARD_FRAGMENT_BYTES: Final = Counter(
    "gazette_discard_fragment_bytes_total",
    "Bytes skipped to reach an offset of an opened fragment.",
    _FRAGMENT,
)

# Recovery logs.
RECOVERED_BYTES: Final = Counter(
    "gazette_recoverylog_recovered_bytes_total", "Bytes of recovery logs that were played back."
)


def grpc_code_name(code: Any) -> str:
    """Return a code as the Go interceptors spell it, such as ``DeadlineExceeded``."""
    name = getattr(code, "name", str(code))
    return "OK" if name == "OK" else "".join(word.capitalize() for word in name.split("_"))
