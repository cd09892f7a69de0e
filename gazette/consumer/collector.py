"""Metrics of this member's shards, computed at each collection."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gazette.client.append.service import AppendService, MemoryBudget
from gazette.consumer.resolver import Resolver


class ShardCollector(Collector):
    """For each shard of this member: ``gazette_shard_up`` by status, recovery horizons, and bytes that wait
    for brokers."""

    def __init__(self, resolver: Resolver, appends: AppendService, budget: MemoryBudget) -> None:
        self._resolver = resolver
        self._appends = appends
        self._budget = budget

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # The collector's thread runs this, while other threads replace whole values: read each value once.
        shards = list(self._resolver.local_shards.items())
        up = GaugeMetricFamily(
            "gazette_shard_up", "Shards of this member.", labels=["shard", "status"]
        )
        horizon = GaugeMetricFamily(
            "gazette_shard_recovery_horizon_bytes",
            "Bytes of its log that a recovery of the shard reads.",
            labels=["shard"],
        )
        backlog = self._appends.backlog_bytes
        for shard_id, shard in shards:
            up.add_metric([shard_id, shard.assignment.decoded.value.code.name], 1.0)
            backlog += shard.append_backlog_bytes
            if (horizon_bytes := shard.horizon_bytes) is not None:
                horizon.add_metric([shard.fqn], float(horizon_bytes))
        yield up
        yield horizon
        yield GaugeMetricFamily(
            "gazette_consumer_append_backlog_bytes",
            "Bytes that shards and APIs have released and brokers have not taken yet.",
            value=float(backlog),
        )
        yield GaugeMetricFamily(
            "gazette_consumer_append_memory_bytes",
            "Bytes of those in memory: the rest is in files.",
            value=float(self._budget.used),
        )
