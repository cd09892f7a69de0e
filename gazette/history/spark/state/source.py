"""``format("gazette-state")``: states of shards as a data source of Spark. Fast to import."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import DataSource

from gazette.history.spark.error_hints import with_hints


class GazetteStateDataSource(DataSource):
    """States of shards. See docs/backfill.md for the options."""

    @classmethod
    def name(cls) -> str:
        return "gazette-state"

    @with_hints()
    def schema(self) -> Any:
        from gazette.history.spark.state.state import state_schema

        return state_schema(self.options)

    @with_hints()
    def reader(self, schema: Any) -> Any:
        from gazette.history.spark.state.state import StateOptions, StateReader

        return StateReader(StateOptions.parse(self.options), schema)
