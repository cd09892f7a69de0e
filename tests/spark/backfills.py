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


class MappedFoldedBackfill(FoldedBackfill):
    history = MappedBackfill.history
    partitions = MappedBackfill.partitions

    def mapping(self, partitions: Any) -> Any:
        return MappedBackfill().mapping(partitions)
