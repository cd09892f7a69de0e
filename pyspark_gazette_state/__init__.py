"""Has Spark find ``format("gazette-state")`` by itself: it looks into packages of such names."""

from __future__ import annotations

from gazette.spark.state.source import GazetteStateDataSource as DefaultSource

__all__ = ["DefaultSource"]
