"""Metrics of blob stores. ``store`` is the URL of a store, as specifications give it."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

ACTIVE: Final = Gauge("gazette_store_active", "Blob stores in use.")
OPERATION_SECONDS: Final = Histogram(
    "gazette_store_operation_duration_seconds",
    "Duration of blob store operations, in seconds.",
    ["store", "operation", "status"],
    buckets=tuple(0.01 * 4**power for power in range(6)),
)
OPERATIONS: Final = Counter(
    "gazette_store_operation_total",
    "Blob store operations.",
    ["store", "operation", "status"],
)
PUT_BYTES: Final = Counter(
    "gazette_store_put_bytes_total", "Bytes stored in blob stores.", ["store", "encoding"]
)
LIST_ITEMS: Final = Histogram(
    "gazette_store_list_items_count",
    "Objects of one blob store listing.",
    ["store"],
    buckets=tuple(10 * 4**power for power in range(6)),
)
HEALTH_CHECKS: Final = Counter(
    "gazette_store_health_check_total", "Health checks of blob stores.", ["store", "status"]
)
CALLS: Final = Gauge(
    "gazette_store_calls", "Calls of a blob store that have begun and not ended.", ["store"]
)
HUNG_CALLS: Final = Gauge(
    "gazette_store_hung_calls",
    "Calls of a blob store that have waited for it for long without any progress.",
    ["store"],
)
