"""The word count's backfill: the counts of a shard, from the history of its partition.

::

    gazctl shards backfill word_count.backfill:WordCountBackfill -l id:prefix=shard- \\
        --staging /mnt/staging --verify --enable
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gazette.backfill import Backfill, Batches
from word_count.app import WordCount
from word_count.counts import Counts


class WordCountBackfill(Backfill):
    """Sums counts by n-gram, and inserts each n-gram once, in order."""

    application = WordCount

    def build(self, shard: Any, store: Counts, messages: Batches) -> None:
        counts: Counter[str] = Counter()
        for batch in messages:
            for envelope in batch:
                message = envelope.message
                counts[message.n_gram] += message.count
        store.add(counts)

    # On Spark the same, in columns.

    fields = "n_gram string, count long"
    order = ("n_gram",)

    def combine(self, rows: Any) -> Any:
        summed = rows.group_by("n_gram").aggregate([("count", "sum")])
        return summed.rename_columns(rows.schema.names)

    def fold(self, frame: Any) -> Any:
        return frame.groupBy("shard", "n_gram").agg({"count": "sum"})

    def load(self, shard: Any, store: Counts, batches: Any) -> None:
        for batch in batches:
            ngrams, sums = (column.to_pylist() for column in batch.columns)
            store.add(Counter(dict(zip(ngrams, sums, strict=True))))
