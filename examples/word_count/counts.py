"""Counts of n-grams, in each of the stores. What another store would take is all here."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any, Final

from gazette import Shard, StateView
from gazette.consumer.application import Store
from gazette.errors import Invalid
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore

STORES: Final = ("sqlite", "rocksdb", "json", "sql")
SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS counts (ngram TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID"
)
UPSERT: Final = "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
SELECT: Final = "SELECT ngram, n FROM counts WHERE ngram >= ? AND ngram < ? ORDER BY ngram LIMIT ?"
ROWS_MAX: Final = 1_000_000
END: Final = "\U0010ffff"
"""Above every n-gram that begins with what it is put behind."""


class Counts(Store):
    """Counts, with those of the running transaction gathered before they are written."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.gathered: Counter[str] = Counter()
        super().__init__(*arguments, **named)

    @abstractmethod
    def add(self, counts: Counter[str]) -> None:
        """Add to what there is, in the running transaction."""

    @abstractmethod
    def counts(self, prefix: str, begin: str = "", limit: int = ROWS_MAX) -> list[tuple[str, int]]:
        """Return n-grams with a prefix, from ``begin`` on, and their counts. In order, of the last commit.

        Any thread.
        """

    def flush(self) -> None:
        self.add(self.gathered)
        self.gathered = Counter()


def new_counts(kind: str, shard: Shard, recorder: Any, database: str) -> Counts:
    """Create a store by the name of its kind. Packages are imported on demand. Raise ``Invalid``."""
    if kind == "sqlite":
        return SQLiteCounts(recorder, SCHEMA)
    if kind == "json":
        return JSONCounts(recorder, dict[str, int], dict)
    if kind == "rocksdb":
        from word_count.rocksdb_counts import RocksDBCounts

        return RocksDBCounts(recorder)
    if kind == "sql":
        if not database:
            raise Invalid(
                "the store sql needs a database",
                path="--wordcount.database",
                hint="Give its SQLAlchemy URL, such as postgresql+psycopg://user@host/name.",
            )
        from word_count.sql_counts import SQLCounts

        return SQLCounts(shard, database)
    raise Invalid(
        f"unknown store {kind!r}", path="--wordcount.store", hint=f"Known are {', '.join(STORES)}."
    )


def new_view(kind: str, directory: Path) -> StateView | None:
    """Return how hot standbys answer, if the store lets them."""
    if kind == "sqlite":
        return SQLiteCounts.view(directory)
    if kind == "rocksdb":
        from word_count.rocksdb_counts import RocksDBCounts

        return RocksDBCounts.standby_view(directory)
    if kind == "json":
        return JSONCounts.view(dict[str, int], dict)
    return None


class SQLiteCounts(Counts, SQLiteStore):
    def add(self, counts: Counter[str]) -> None:
        self.executemany(UPSERT, sorted(counts.items()))

    def counts(self, prefix: str, begin: str = "", limit: int = ROWS_MAX) -> list[tuple[str, int]]:
        rows = self.query(SELECT, (max(prefix, begin), prefix + END, limit))
        return [(ngram, n) for ngram, n in rows]


class JSONCounts(Counts, JSONFileStore[dict[str, int]]):
    def add(self, counts: Counter[str]) -> None:
        for ngram, n in counts.items():
            self.state[ngram] = self.state.get(ngram, 0) + n

    def counts(self, prefix: str, begin: str = "", limit: int = ROWS_MAX) -> list[tuple[str, int]]:
        items = self.read().items()
        return sorted(
            (ngram, n) for ngram, n in items if begin <= ngram and ngram.startswith(prefix)
        )[:limit]
