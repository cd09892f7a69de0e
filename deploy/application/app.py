"""Counts words, exactly once, and answers how often each was seen."""

from gazette import (
    Application,
    Envelope,
    ListPage,
    Message,
    Publisher,
    Recorder,
    Shard,
    ShardRequest,
    Source,
    list_route,
    runconsumer,
    shard_route,
)
from gazette.stores.sqlite import SQLiteStore

SCHEMA = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
UPSERT = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
COUNT = "SELECT n FROM counts WHERE word = ?"
COUNTS = "SELECT word, n FROM counts WHERE word > ? ORDER BY word LIMIT ?"


class Word(Message):
    word: str


class WordCount(Application[SQLiteStore]):
    application_name = "word-count"
    words = Source("word-count/words", Word, key="word")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        store.execute(UPSERT, (envelope.message.word,))

    @shard_route("/counts/{word}", key="word")
    def count(self, store: SQLiteStore, request: ShardRequest) -> dict[str, int]:
        """Answer GET /counts/WORD: how often a word was seen. Its shard is asked."""
        rows = store.query(COUNT, (request.path["word"],))
        return {"n": rows[0][0] if rows else 0}

    @list_route("/counts")
    def counts(self, store: SQLiteStore, page: ListPage) -> list[tuple[str, int]]:
        """Answer GET /counts: how often each word was seen, in pages. All shards are asked."""
        return store.query(COUNTS, (page.after or "", page.limit))  # No word is empty.


if __name__ == "__main__":
    runconsumer.main(WordCount(), bind_host="127.0.0.1")
