"""Journals as tables and streams of Spark: ``spark.read.format("gazette")``. Needs ``pygazette[spark]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.spark.backfill import Backfill as Backfill
    from gazette.spark.lag import JournalLag as JournalLag
    from gazette.spark.lag import LagListener as LagListener
    from gazette.spark.lag import stream_lag as stream_lag
    from gazette.spark.source.planning import read as read
    from gazette.spark.source.source import GazetteDataSource as GazetteDataSource
    from gazette.spark.spark_session import session as session
    from gazette.spark.view import create_view as create_view

_HOMES = {
    "Backfill": "gazette.spark.backfill",
    "GazetteDataSource": "gazette.spark.source.source",
    "JournalLag": "gazette.spark.lag",
    "LagListener": "gazette.spark.lag",
    "create_view": "gazette.spark.view",
    "read": "gazette.spark.source.planning",
    "session": "gazette.spark.spark_session",
    "stream_lag": "gazette.spark.lag",
}

__all__ = [
    "Backfill",
    "GazetteDataSource",
    "JournalLag",
    "LagListener",
    "create_view",
    "read",
    "session",
    "stream_lag",
]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES, extra="spark")
