"""Found by Spark, which imports all packages of such a name for their ``DefaultSource``.

It makes ``spark.read.format("gazette")`` known without registering anything.
"""

from __future__ import annotations

from gazette.history.spark.source.source import GazetteDataSource as DefaultSource

__all__ = ["DefaultSource"]
