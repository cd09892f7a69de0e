"""Measures of processes from outside: the CPU they use, and the metrics they export."""

from __future__ import annotations

import http.client
import re
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from gazette.errors import NotFound, Unavailable

_SAMPLE: Final = re.compile(r"^(\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_TIMEOUT_S: Final = 10.0

Metrics: TypeAlias = Mapping[tuple[str, str], float]
"""(name, labels as exported) → value."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of the present threads of processes. Linux only: ``NotFound`` elsewhere."""
    total = 0
    for pid in pids:
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        except OSError as error:
            raise NotFound(
                f"no CPU times of process {pid}: {error}", hint="Measure on Linux."
            ) from error
    return total / 1e9


def resident_bytes(pid: int) -> int:
    """Return the bytes that a process holds, with mapped files. Linux only: ``NotFound`` elsewhere."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError as error:
        raise NotFound(
            f"no memory figures of process {pid}: {error}", hint="Measure on Linux."
        ) from error
    return pages * resource.getpagesize()


def exported(url: str) -> Metrics:
    """Return the metrics that a process exports at ``/metrics``. Blocks. Raise ``Unavailable``."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no metrics of {url}: {error!r}") from error
    finally:
        connection.close()
    return parse(text)


def parse(text: str) -> Metrics:
    """Parse the text format of Prometheus."""
    return {(match[1], match[2] or ""): float(match[3]) for match in _SAMPLE.finditer(text)}


def total(metrics: Metrics, name: str) -> float:
    """Return the sum over all labels."""
    return sum(value for (one, _), value in metrics.items() if one == name)


def by_method(metrics: Metrics, name: str) -> dict[str, float]:
    """Return a metric of gRPC, by method."""
    found: dict[str, float] = {}
    for (one, labels), value in metrics.items():
        method = re.search(r'grpc_method="(\w+)"', labels)
        if one == name and method is not None:
            found[method[1]] = found.get(method[1], 0.0) + value
    return found
