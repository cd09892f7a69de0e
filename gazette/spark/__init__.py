"""Journals as tables and streams of Spark: ``spark.read.format("gazette")``. Needs ``pygazette[spark]``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gazette.errors import not_installed

if TYPE_CHECKING:
    from gazette.spark.backfill import Backfill as Backfill
    from gazette.spark.lag import JournalLag as JournalLag
    from gazette.spark.lag import LagListener as LagListener
    from gazette.spark.lag import stream_lag as stream_lag
    from gazette.spark.source.planning import read as read
    from gazette.spark.source.source import GazetteDataSource as GazetteDataSource
    from gazette.spark.spark_session import session as session
    from gazette.spark.view import create_view as create_view

_MODULES = {
    "Backfill": "backfill",
    "GazetteDataSource": "source.source",
    "JournalLag": "lag",
    "LagListener": "lag",
    "create_view": "view",
    "read": "source.planning",
    "session": "spark_session",
    "stream_lag": "lag",
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

    def __getattr__(name: str) -> Any:
        # Import lazily: workers of Spark import this package without ever starting a session.
        if (module := _MODULES.get(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{__name__}.{module}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "gazette").partition(".")[0] == "gazette":
                raise
            raise not_installed("gazette.spark", str(error.name), "spark") from error
