"""The application of the README and of docs/first-application.md."""

from gazette import Application, Envelope, Message, Publisher, Recorder, Shard, Source, runconsumer
from gazette.stores.sqlite import SQLiteStore


class Word(Message):
    word: str


class WordCount(Application[SQLiteStore]):
    words = Source("words", Word, key="word")

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        schema = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
        return SQLiteStore(recorder, schema)

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        store.execute(upsert, (envelope.message.word,))


if __name__ == "__main__":
    runconsumer.main(WordCount(), bind_host="127.0.0.1")
