"""What shards count. Names are the original's, so that its dashboards work; the label ``shard`` is the
shard's etcd key (``fqn``), as there."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

TRANSACTIONS: Final = Counter(
    "gazette_shard_transactions_total",
    "Transactions that are committed and acknowledged.",
    ["shard"],
)
READ_MESSAGES: Final = Counter(
    "gazette_shard_read_messages_total", "Messages of finished transactions.", ["shard"]
)
READ_BYTES: Final = Counter(
    "gazette_shard_read_bytes_total", "Bytes of messages of finished transactions.", ["shard"]
)
READ_HEAD: Final = Gauge(
    "gazette_shard_read_head", "Offset that finished transactions have read.", ["shard", "journal"]
)
PHASE_SECONDS: Final = Counter(
    "gazette_shard_phase_seconds_total",
    "Seconds that finished transactions spent in each phase.",
    ["shard", "phase", "type"],
)
HORIZON_BYTES: Final = Gauge(
    "gazette_shard_recovery_horizon_bytes",
    "How much of its log a recovery of the shard reads.",
    ["shard"],
)
STANDBY_LAG_BYTES: Final = Gauge(
    "gazette_shard_standby_lag_bytes", "How far play-back is behind the log's head.", ["shard"]
)

PHASES: Final = (
    ("10-not-running", "sync", "not_running"),
    ("20-consuming", "sync", "consuming"),
    ("30-stalled", "sync", "stalled"),
    ("40-preparing", "sync", "preparing"),
    ("50-committing", "async", "committing"),
    ("60-acknowledging", "async", "acknowledging"),
)
"""(label ``phase``, label ``type``, field of `transaction.Phases`)."""
