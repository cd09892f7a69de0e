"""The example word_count with its counts in PostgreSQL, in the database of the simulation."""

from __future__ import annotations

from typing import Any

from word_count.app import WordCount
from word_count.counts import Counts, new_counts

from gazette import Shard


class SQLWordCount(WordCount):
    def new_store(self, shard: Shard, recorder: Any) -> Counts:
        return new_counts("sql", shard, recorder, "postgresql+psycopg://nowhere/production")
