"""Counts in a SQL database that all shards share, which is an extra of the package."""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from gazette import Shard
from gazette.stores.sql.store import SQLStore, checkpoint_table, shared_engine
from word_count.counts import END, ROWS_MAX, Counts

METADATA = sa.MetaData()
checkpoint_table(METADATA)
COUNTS = sa.Table(
    "word_count_counts",
    METADATA,
    sa.Column("shard", sa.String(512), primary_key=True),
    # Compared by bytes everywhere, so that a prefix is a range.
    sa.Column("ngram", sa.LargeBinary, primary_key=True),
    sa.Column("n", sa.BigInteger, nullable=False),
)


class SQLCounts(Counts, SQLStore):
    def __init__(self, shard: Shard, database: str) -> None:
        self.shard = shard.fqn
        super().__init__(shared_engine(database, METADATA))

    def add(self, counts: Counter[str]) -> None:
        if not counts:
            return
        self.execute(
            "INSERT INTO word_count_counts (shard, ngram, n) VALUES (:shard, :ngram, :n)"
            " ON CONFLICT (shard, ngram) DO UPDATE SET n = word_count_counts.n + excluded.n",
            [
                {"shard": self.shard, "ngram": ngram.encode(), "n": n}
                for ngram, n in sorted(counts.items())
            ],
        )

    def counts(self, prefix: str, begin: str = "", limit: int = ROWS_MAX) -> list[tuple[str, int]]:
        low, high = max(prefix, begin).encode(), (prefix + END).encode()
        wanted = (
            sa.select(COUNTS.c.ngram, COUNTS.c.n)
            .where(COUNTS.c.shard == self.shard)
            .where(COUNTS.c.ngram >= low, COUNTS.c.ngram < high)
            .order_by(COUNTS.c.ngram)
            .limit(limit)
        )
        return [(bytes(ngram).decode(), int(n)) for ngram, n in self.query(wanted)]
