"""Applications whose state is built: one for each kind of store, that count words."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, ClassVar

import sqlalchemy as sa

from gazette import Application, Envelope, Message
from gazette.consumer.application import DeferToNextTransaction
from gazette.history.backfill.definition import Backfill
from gazette.message.mapping import modulo_mapping
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sql.store import SQLStore
from gazette.stores.sqlite.store import SQLiteStore

WINDOW = 7
UPSERT = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
SCHEMA = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID"


class Word(Message):
    word: str = ""


class Words(Application[SQLiteStore]):
    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Any
    ) -> None:
        store.execute(UPSERT, (envelope.message.word,))


class Windows(Words):
    """Consumes batches, and at most so many words in a transaction: a batch that has more is deferred."""

    def begin_transaction(self, shard: Any, store: SQLiteStore) -> None:
        self.words = 0

    def consume_messages(self, shard: Any, store: SQLiteStore, batch: Any, publisher: Any) -> None:
        words = self.words
        for envelope in batch:
            store.execute(UPSERT, (envelope.message.word,))
            words += 1
            if words > WINDOW:
                raise DeferToNextTransaction("the window is full")
        self.words = words


class WindowsBackfill(Backfill):
    application = Windows


class SingleWindows(Words):
    """The same, message by message."""

    def begin_transaction(self, shard: Any, store: SQLiteStore) -> None:
        self.words = 0

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Any
    ) -> None:
        if self.words == WINDOW:
            raise DeferToNextTransaction("the window is full")
        self.words += 1
        super().consume_message(shard, store, envelope, publisher)


class SingleWindowsBackfill(Backfill):
    application = SingleWindows


class StuckBackfill(Backfill):
    class application(Words):
        def consume_message(self, *_: Any) -> None:
            raise DeferToNextTransaction("never")


def counted(messages: Any) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for batch in messages:
        counts.update(envelope.message.word for envelope in batch)
    return sorted(counts.items())


class WordsBackfill(Backfill):
    application = Words

    def build(self, shard: Any, store: SQLiteStore, messages: Any) -> None:
        store.executemany("INSERT INTO counts VALUES (?, ?)", counted(messages))


class WrongBackfill(WordsBackfill):
    def build(self, shard: Any, store: SQLiteStore, messages: Any) -> None:
        rows = [(word, n + (word == "w1")) for word, n in counted(messages)]
        store.executemany("INSERT INTO counts VALUES (?, ?)", rows)


class FailingBackfill(WordsBackfill):
    def build(self, shard: Any, store: SQLiteStore, messages: Any) -> None:
        print("on its way to fail")  # noqa: T201
        raise LookupError("the fold does not work")


class MappedBackfill(WordsBackfill):
    """Of a history that is in other journals than the shards' sources."""

    history = "name:prefix=history/"
    partitions = "name:prefix=words/"

    def mapping(self, partitions: Any) -> Any:
        return modulo_mapping(partitions, lambda message: message.word)


class Pairs(Application[RocksDBStore]):
    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> RocksDBStore:
        return RocksDBStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        key = envelope.message.word.encode()
        store.put(key, b"%d" % (int(store.get(key) or b"0") + 1))


class PairsBackfill(Backfill):
    application = Pairs

    def build(self, shard: Any, store: RocksDBStore, messages: Any) -> None:
        store.ingest((word.encode(), b"%d" % n) for word, n in counted(messages))


class Documents(Application[JSONFileStore[dict[str, int]]]):
    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> JSONFileStore[dict[str, int]]:
        return JSONFileStore(recorder, dict[str, int], dict)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        word = envelope.message.word
        store.state[word] = store.state.get(word, 0) + 1


class DocumentsBackfill(Backfill):
    application = Documents


class Archives(Words):
    """Writes to an attached database."""

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        schema = "CREATE TABLE IF NOT EXISTS archive.words (word TEXT)"
        return SQLiteStore(recorder, schema, databases=["archive"])

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.execute("INSERT INTO archive.words VALUES (?)", (envelope.message.word,))


class ArchivesBackfill(Backfill):
    application = Archives

    def build(self, shard: Any, store: SQLiteStore, messages: Any) -> None:
        """Write nothing."""


class IndexedBackfill(WordsBackfill):
    """Makes an index that the application does not have."""

    def build(self, shard: Any, store: SQLiteStore, messages: Any) -> None:
        super().build(shard, store, messages)
        store.execute("CREATE INDEX by_n ON counts (n)")


class FractionsBackfill(WordsBackfill):
    """Writes numbers of another type, as bytes of a column without a type would be."""

    class application(Words):
        def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
            return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word PRIMARY KEY, n)")

    def build(self, shard: Any, store: SQLiteStore, messages: Any) -> None:
        rows = [(word, float(n)) for word, n in counted(messages)]
        store.executemany("INSERT INTO counts VALUES (?, ?)", rows)


class TimedPairs(Pairs):
    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        shard.schedule(envelope.message.word, envelope.time + timedelta(days=1))

    def on_timer(self, *_: Any) -> None:
        """Do nothing."""


class TimedPairsBackfill(Backfill):
    """Forgets the timers."""

    application: ClassVar[Any] = TimedPairs

    def build(self, shard: Any, store: Any, messages: Any) -> None:
        """Write nothing."""


class TimedDocuments(Documents):
    consume_message = TimedPairs.consume_message
    on_timer = TimedPairs.on_timer  # type: ignore[assignment]


class TimedDocumentsBackfill(TimedPairsBackfill):
    application = TimedDocuments


class Rows(Application[SQLStore]):
    """In a database that all shards share, at a URL that tests set."""

    message_type = Word
    url = ""

    def new_store(self, shard: Any, recorder: Any) -> SQLStore:
        return SQLStore(self.url)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.execute(
            "INSERT INTO words VALUES (:shard, :word, 1)"
            " ON CONFLICT (shard, word) DO UPDATE SET n = words.n + 1",
            {"shard": shard.id, "word": envelope.message.word},
        )


class RowsBackfill(Backfill):
    application = Rows

    def clear(self, shard: Any, store: SQLStore) -> None:
        store.execute("DELETE FROM words WHERE shard = :shard", {"shard": shard.id})

    def content(self, shard: Any, store: SQLStore) -> Any:
        return store.execute(
            "SELECT word, n FROM words WHERE shard = :shard ORDER BY word", {"shard": shard.id}
        )


class WrongRowsBackfill(RowsBackfill):
    def build(self, shard: Any, store: SQLStore, messages: Any) -> None:
        super().build(shard, store, messages)
        store.execute("UPDATE words SET n = n + 1 WHERE shard = :shard", {"shard": shard.id})


class UnseenRowsBackfill(RowsBackfill):
    """Compares what has been committed, which is not what it builds."""

    def content(self, shard: Any, store: SQLStore) -> Any:
        return store.query("SELECT word, n FROM words ORDER BY word")


METADATA = sa.MetaData()
WORDS = sa.Table(
    "words",
    METADATA,
    sa.Column("shard", sa.Text, primary_key=True),
    sa.Column("word", sa.Text, primary_key=True),
    sa.Column("n", sa.Integer, nullable=False),
)
