"""The application of ``original/tally.go``, with the same messages and the same form of its state."""

from __future__ import annotations

from typing import Any, Final

from gazette import Application, Envelope, Message, Publisher, Recorder, Shard
from gazette.consumer.application import Store
from gazette.errors import Invalid
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb import RocksDBStore
from gazette.stores.sqlite import SQLiteStore

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY NOT NULL, n INTEGER NOT NULL, filler BLOB);
CREATE INDEX IF NOT EXISTS word_by_n ON word (n);
"""
SEEN: Final = "CREATE TABLE IF NOT EXISTS {0}.seen (w TEXT, n INTEGER);"


class Count(Message):
    """A word. ``total`` is its count, in messages of the output."""

    word: str = ""
    total: int = 0


class Tally(Application[Store]):
    """Counts words, and publishes each new count."""

    message_type = Count

    def new_store(self, shard: Shard, recorder: Recorder | None) -> Store:
        match shard.spec.labels.value_of("store"):
            case "sqlite":
                attached = shard.spec.labels.value_of("attached")
                schema = SCHEMA + (SEEN.format(attached) if attached else "")
                mode: Any = shard.spec.labels.value_of("mode") or "redo"
                databases = [attached] if attached else []
                return SQLiteStore(recorder, schema, databases=databases, mode=mode)
            case "rocksdb":
                return RocksDBStore(recorder)
            case "json":
                return JSONFileStore(recorder, dict[str, int], dict)
            case other:
                raise Invalid(f"unknown store {other!r}")

    def consume_message(
        self, shard: Shard, store: Store, envelope: Envelope[Count], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        total = _add(shard, store, word)
        output = fixed_mapping(shard.spec.labels.value_of("output") or "", CONTENT_JSON_LINES)
        publisher.publish_uncommitted(output, Count(word=word, total=total))


def _add(shard: Shard, store: Any, word: str) -> int:
    if isinstance(store, SQLiteStore):
        upsert = (
            "INSERT INTO word VALUES (?, 1, randomblob(500)) ON CONFLICT DO UPDATE SET n = n + 1"
        )
        store.execute(upsert, (word,))
        total = int(store.query("SELECT n FROM word WHERE w = ?", (word,))[0][0])
        if attached := shard.spec.labels.value_of("attached"):
            insert = f"INSERT INTO {attached}.seen VALUES (?, ?)"  # noqa: S608
            store.execute(insert, (word, total))
        return total
    if isinstance(store, RocksDBStore):
        total = int(store.get(word.encode()) or b"0") + 1
        store.put(word.encode(), b"%d" % total)
        return total
    store.state[word] = store.state.get(word, 0) + 1
    return int(store.state[word])
