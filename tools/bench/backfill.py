"""Backfills of `tools.bench.app` that benchmarks/bench_spark.py measures: by rows, by columns."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from gazette.backfill import Backfill, Batches
from gazette.message.message import Message
from tools.bench.app import BenchApplication, BenchStore

INSERT: Final = "INSERT INTO counts VALUES (?, ?)"


class BenchCount(Message):
    """The fields of a message that the fold reads."""

    word: str = ""
    count: int = 0


class BenchRows(Backfill):
    """Counts words message by message."""

    application = BenchApplication

    def message_type_of(self, application: Any, journal: Any) -> type[Any]:
        return BenchCount

    def build(self, shard: Any, store: BenchStore, messages: Batches) -> None:
        counts: Counter[str] = Counter()
        for batch in messages:
            for envelope in batch:
                counts[envelope.message.word] += envelope.message.count
        store.executemany(INSERT, sorted(counts.items()))


class BenchColumns(BenchRows):
    """Counts words in a DataFrame."""

    fields = "word string, count long"
    order = ("word",)

    def fold(self, frame: Any) -> Any:
        return frame.groupBy("shard", "word").agg({"count": "sum"})

    def load(self, shard: Any, store: BenchStore, batches: Any) -> None:
        for batch in batches:
            words, sums = (column.to_pylist() for column in batch.columns)
            store.executemany(INSERT, list(zip(words, sums, strict=True)))


class BenchCombined(BenchColumns):
    """Counts words in a DataFrame. Each task counts its own words before Spark gets them."""

    def combine(self, rows: Any) -> Any:
        counted = rows.group_by("word").aggregate([("count", "sum")])
        return counted.rename_columns(rows.schema.names)
