"""Backfills that fold a DataFrame."""

from __future__ import annotations

from typing import Any

from gazette.spark.backfill import Backfill
from tests.backfill.apps import MappedBackfill, Words


class FoldedBackfill(Backfill):
    application = Words
    fields = "word string"
    order = ("word",)

    def fold(self, frame: Any) -> Any:
        return frame.groupBy("shard", "word").count()

    def load(self, shard: Any, store: Any, batches: Any) -> None:
        for batch in batches:
            rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            store.executemany("INSERT INTO counts VALUES (?, ?)", rows)


class CombinedBackfill(FoldedBackfill):
    """The same, with what a task has read put together before Spark gets it."""

    fields = "word string, count long"

    def combine(self, rows: Any) -> Any:
        import pyarrow.compute as pc

        assert rows.schema.names == ["word", "count"]
        counts = pc.coalesce(rows.column("count"), 1)
        made = rows.set_column(1, rows.schema.field(1), counts).group_by("word")
        return made.aggregate([("count", "sum")]).rename_columns(["word", "count"])

    def fold(self, frame: Any) -> Any:
        # What was pending at the end of a run comes as it was written.
        counts = frame.selectExpr("shard", "word", "coalesce(count, 1) AS count")
        return counts.groupBy("shard", "word").sum("count")


class MappedFoldedBackfill(FoldedBackfill):
    history = MappedBackfill.history
    partitions = MappedBackfill.partitions

    def mapping(self, partitions: Any) -> Any:
        return MappedBackfill().mapping(partitions)
