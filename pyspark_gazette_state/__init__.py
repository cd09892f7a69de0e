"""Found by Spark, which looks into packages of such a name for ``format("gazette-state")``."""

from __future__ import annotations

from gazette.history.spark.state.source import GazetteStateDataSource as DefaultSource

__all__ = ["DefaultSource"]
