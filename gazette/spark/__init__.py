"""Journals as tables and streams of Spark: ``spark.read.format("gazette")``. Needs ``pygazette[spark]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.history.spark.backfill import Backfill as Backfill
    from gazette.history.spark.lag import JournalLag as JournalLag
    from gazette.history.spark.lag import LagListener as LagListener
    from gazette.history.spark.lag import stream_lag as stream_lag
    from gazette.history.spark.source.planning import read as read
    from gazette.history.spark.source.source import GazetteDataSource as GazetteDataSource
    from gazette.history.spark.spark_session import session as session
    from gazette.history.spark.view import create_view as create_view

_HOMES = {
    "Backfill": "gazette.history.spark.backfill",
    "GazetteDataSource": "gazette.history.spark.source.source",
    "JournalLag": "gazette.history.spark.lag",
    "LagListener": "gazette.history.spark.lag",
    "create_view": "gazette.history.spark.view",
    "read": "gazette.history.spark.source.planning",
    "session": "gazette.history.spark.spark_session",
    "stream_lag": "gazette.history.spark.lag",
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
