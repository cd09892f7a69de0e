"""The application of these tests: it counts words in SQLite, publishes the counts, and skips poison."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gazette import Application, Envelope, Message, PoisonPolicy, Publisher
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.sqlite.store import SQLiteStore
from tests.consumer.apps import Word

SOURCE, OUTPUT, LETTERS, SHARD = "a/source", "a/counts", "a/letters", "shard-one"
HOSTILE = "<img src=x onerror=alert(1)>"


class Count(Message):
    word: str = ""
    n: int = 0


class Shop(Application[SQLiteStore]):
    message_type = Word

    def poison_policy(self, shard: Any) -> PoisonPolicy:
        return PoisonPolicy(LETTERS, errors=(ValueError,))

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(
            recorder, "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
        )

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        if word == "poison":
            raise ValueError(f"{HOSTILE} is no word")
        upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        store.execute(upsert, (word,)).fetchall()
        n = store.query("SELECT n FROM counts WHERE word = ?", (word,))[0][0]
        publisher.publish_uncommitted(
            fixed_mapping(OUTPUT, CONTENT_JSON_LINES), Count(word=word, n=n)
        )
        shard.schedule(word, shard.now + timedelta(hours=1))

    def on_timer(self, *_: Any) -> None:
        raise AssertionError("no timer is due within an hour")
