"""Metrics of spools and of the persister."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

from gazette.runtime.metrics import PlainCounter

COMMITS: Final = PlainCounter("gazette_spool_commits_total", "Commits of spools.").labels()
COMMIT_BYTES: Final = PlainCounter(
    "gazette_spool_commit_bytes_total", "Bytes committed to spools."
).labels()
ROLLBACKS: Final = Counter("gazette_spool_rollbacks_total", "Roll-backs of spools.")
ROLLBACK_BYTES: Final = Counter(
    "gazette_spool_rollback_bytes_total", "Bytes that were spooled and rolled back."
)
DISK_WAITS: Final = Counter(
    "gazette_spool_disk_waits_total",
    "Short parts of appends that waited for the spool disk, which was far behind or had failed.",
)
COMPLETED: Final = Counter("gazette_spool_completed_total", "Spools completed by a roll.")
PERSISTED: Final = Counter(
    "gazette_spool_persisted_total",
    "Completed spools that are done with: in a blob store, cut off by a later primary, or of a journal that "
    "is gone or has no store.",
)
UNPERSISTED: Final = Gauge(
    "gazette_spool_unpersisted", "Completed spools that wait to be persisted."
)
PERSIST_FAILURES: Final = Counter(
    "gazette_spool_persist_failures_total", "Attempts to persist a spool that failed."
)
COMPRESSION_FAILURES: Final = Counter(
    "gazette_spool_compression_failures_total",
    "Spools whose compressed file was given up (as of a full disk), to be compressed while uploaded.",
)
CONFLICTS: Final = Counter(
    "gazette_fragment_conflicts_total",
    "Pairs of fragments of the same offsets whose SHA-1 differ, as listings found them.",
)
