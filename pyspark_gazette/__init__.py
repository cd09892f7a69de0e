"""The package by which Spark finds ``spark.read.format("gazette")``, without any registration.

Spark imports every package with a name of this form (``pyspark_*``), and takes its ``DefaultSource``.
"""

from __future__ import annotations

from gazette.history.spark.source.source import GazetteDataSource as DefaultSource

__all__ = ["DefaultSource"]
