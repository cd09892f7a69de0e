"""The package by which Spark finds ``spark.read.format("gazette-state")``: see `pyspark_gazette`."""

from __future__ import annotations

from gazette.history.spark.state.source import GazetteStateDataSource as DefaultSource

__all__ = ["DefaultSource"]
