"""Counts in RocksDB, which is an extra of the package."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from gazette.stores.rocksdb.store import RocksDBStore
from word_count.counts import ROWS_MAX, Counts


class RocksDBCounts(Counts, RocksDBStore):
    def add(self, counts: Counter[str]) -> None:
        for ngram, n in sorted(counts.items()):
            key = ngram.encode()
            before = int.from_bytes(self.get(key) or b"")
            self.put(key, (before + n).to_bytes(8))

    def counts(self, prefix: str, begin: str = "", limit: int = ROWS_MAX) -> list[tuple[str, int]]:
        with self.view() as view:
            found = islice(view.iterate(prefix.encode(), begin=begin.encode()), limit)
            return [(key.decode(), int.from_bytes(value)) for key, value in found]
