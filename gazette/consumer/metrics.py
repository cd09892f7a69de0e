"""Metrics of shards.

The metrics have the names of the original, so that its dashboards work. As in the original, the label
``shard`` is the shard's key in etcd (``fqn``).
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

from gazette.runtime.metrics import PlainCounter

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
TIMERS: Final = Counter(
    "gazette_shard_timers_total", "Timers that fired in finished transactions.", ["shard"]
)
READ_HEAD: Final = Gauge(
    "gazette_shard_read_head", "Offset that finished transactions have read.", ["shard", "journal"]
)
PHASE_SECONDS: Final = Counter(
    "gazette_shard_phase_seconds_total",
    "Seconds that finished transactions spent in each phase.",
    ["shard", "phase", "type"],
)
POISON_MESSAGES: Final = Counter(
    "gazette_shard_poison_messages_total",
    "Messages and timers that were skipped and published as dead letters; reason: malformed, application, "
    "misplaced, time or timer.",
    ["shard", "journal", "reason"],
)
MISPLACED_MESSAGES: Final = Counter(
    "gazette_shard_misplaced_messages_total",
    "Messages whose key belongs to another partition; policy: count, fail or republish.",
    ["shard", "journal", "policy"],
)
STANDBY_LAG_BYTES: Final = Gauge(
    "gazette_shard_standby_lag_bytes",
    "Bytes by which play-back is behind the log's head.",
    ["shard"],
)
STANDBY_LAG_SECONDS: Final = Gauge(
    "gazette_shard_standby_lag_seconds",
    "Age of the oldest log head that play-back has not reached.",
    ["shard"],
)
PLAYBACK_RATE: Final = Gauge(
    "gazette_shard_playback_bytes_per_second",
    "Speed at which a standby reads the shard's recovery log, since the last look.",
    ["shard"],
)
RESTARTS: Final = Counter(
    "gazette_shard_restarts_total", "Failed replicas that were started again.", ["shard"]
)

PHASES: Final = (
    ("10-not-running", "sync", "not_running"),
    ("20-consuming", "sync", "consuming"),
    ("30-stalled", "sync", "stalled"),
    ("40-preparing", "sync", "preparing"),
    ("50-committing", "async", "committing"),
    ("60-acknowledging", "async", "acknowledging"),
)
"""For each phase: label ``phase``, label ``type``, and field of `transaction.Phases`."""

SEQUENCER_QUEUED: Final = PlainCounter(
    "gazette_sequencer_queued",
    "Messages that were sequenced, by their flag and their outcome.",
    ("journal", "flag", "outcome"),
)
SEQUENCER_REPLAY: Final = PlainCounter(
    "gazette_sequencer_replay", "Messages that were read again for delivery.", ("journal",)
)

# Sums over all shards, under names that the original has deprecated and that dashboards still use.
TX_COUNT: Final = Counter("gazette_consumer_tx_count_total", "Finished transactions.")
TX_MESSAGES: Final = Counter(
    "gazette_consumer_tx_messages_total", "Messages of finished transactions."
)
TX_SECONDS: Final = Counter(
    "gazette_consumer_tx_seconds_total", "Seconds of finished transactions."
)
CONSUMED_BYTES: Final = Counter(
    "gazette_consumer_consumed_bytes_total", "Bytes of finished transactions."
)
TX_PHASES: Final = {
    "consuming": Counter("gazette_consumer_tx_consume_seconds_total", "Seconds of consuming."),
    "stalled": Counter("gazette_consumer_tx_stalled_seconds_total", "Seconds of stalling."),
    "preparing": Counter("gazette_consumer_tx_flush_seconds_total", "Seconds of preparing."),
    "committing": Counter("gazette_consumer_tx_sync_seconds_total", "Seconds of committing."),
}
CONSUMER_READ_HEAD: Final = Gauge(
    "gazette_consumer_read_head", "Offset that finished transactions have read.", ["journal"]
)
