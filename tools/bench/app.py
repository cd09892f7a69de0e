"""The application that `gazette bench` runs: ``python -m tools.bench.app serve …``.

A label of a shard says what it does with messages, so one process serves all measurements.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import pyarrow as pa

from gazette.consumer.application import Application, Shard
from gazette.consumer.contract.array_pass import ArrayPass
from gazette.consumer.query.shard_route import ShardRequest, shard_route
from gazette.history.shard_tables.application import TableApplication
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import Envelope
from gazette.message.mapping import Partition
from gazette.message.message import Message
from gazette.message.publisher import Publisher
from gazette.protocol.ids import JournalName
from gazette.recoverylog.log.recorder import Recorder
from gazette.runconsumer.process import main
from gazette.stores.sqlite.store import SQLiteStore

MODE: Final = "bench.gazette.dev/mode"
SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID"
)
UPSERT: Final = "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"
MESSAGE_BYTES: Final = 100
WORDS: Final = 5_000
TABLES_MAX: Final = 64
"""Tables of a transaction that are kept before they are folded."""


class BenchMessage(Message):
    """A message of a hundred bytes, as a line of JSON with its UUID."""

    word: str
    count: int
    sent: int = 0
    """Time of its publication, in nanoseconds of the machine's monotonic clock."""


_GOLDEN: Final = 0x9E3779B97F4A7C15
"""An odd factor, whose multiples are spread evenly and do not repeat. The words that they select
compress like text.
"""


def message_of(index: int) -> BenchMessage:
    spread = index * _GOLDEN & 0xFFFFFFFFFFFFFFFF
    return BenchMessage(
        word=f"word-{(spread >> 40) % WORDS:05d}", count=1, sent=10**13 + (spread >> 24)
    )


class Mode(enum.StrEnum):
    FOLD = "fold"
    FOLD_BATCH = "fold-batch"
    FOLD_TABLE = "fold-table"
    UPSERT = "upsert"
    UPSERT_BATCH = "upsert-batch"
    ECHO = "echo"


# Attributes of an enumeration take time, and there is a comparison for each message.
_UPSERT: Final = Mode.UPSERT
_ECHO: Final = Mode.ECHO


def counts_of(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the sum of the counts of each word, sorted by words."""
    words = pa.concat_tables(tables).group_by("word", use_threads=False)
    sums = words.aggregate([("count", "sum")]).rename_columns(["word", "count"])
    return sums.sort_by("word")


class BenchStore(SQLiteStore):
    """Counts of words. Counts of the running transaction are gathered before they are written."""

    def __init__(self, recorder: Recorder | None, mode: Mode) -> None:
        super().__init__(recorder, SCHEMA)
        self.mode = mode
        self.gathered: Counter[str] = Counter()
        self.tables: list[pa.Table] = []
        """Tables of the running transaction, and their counts."""


def out_of(source: JournalName) -> JournalName:
    """Return the journal to which messages of another one are echoed.

    Each has its own: a journal that is created again finds the fragments of the first.
    """
    return f"{source.removesuffix('/in')}/out"


@cache
def _to_out_of(source: JournalName) -> Callable[[BenchMessage], Partition]:
    partition = Partition(out_of(source), CONTENT_JSON_LINES)
    return lambda _message: partition


class BenchApplication(TableApplication[BenchStore]):
    """Application that folds words in memory, upserts each one, or publishes its messages, by a
    label of the shard. Only shards that fold tables get tables.
    """

    message_type = BenchMessage

    def new_store(self, shard: Shard, recorder: Recorder | None) -> BenchStore:
        return BenchStore(recorder, Mode(shard.spec.labels.value_of(MODE) or Mode.FOLD))

    def array_pass(self, shard: Shard) -> ArrayPass | None:
        is_folded = shard.spec.labels.value_of(MODE) == Mode.FOLD_TABLE
        return super().array_pass(shard) if is_folded else None

    def consume_table(
        self, shard: Shard, store: BenchStore, table: pa.RecordBatch, publisher: Publisher
    ) -> None:
        store.tables.append(pa.Table.from_batches([table.select(["word", "count"])]))
        if len(store.tables) == TABLES_MAX:
            store.tables = [counts_of(store.tables)]

    def consume_messages(
        self,
        shard: Shard,
        store: BenchStore,
        batch: Sequence[Envelope[BenchMessage]],
        publisher: Publisher,
    ) -> None:
        match store.mode:
            case Mode.FOLD_BATCH:
                gathered = store.gathered
                for envelope in batch:
                    message = envelope.message
                    gathered[message.word] += message.count
            case Mode.UPSERT_BATCH:
                messages = [envelope.message for envelope in batch]
                store.executemany(UPSERT, [(one.word, one.count) for one in messages])
            case Mode.FOLD_TABLE:
                super().consume_messages(shard, store, batch, publisher)
            case _:
                Application.consume_messages(self, shard, store, batch, publisher)

    def consume_message(
        self,
        shard: Shard,
        store: BenchStore,
        envelope: Envelope[BenchMessage],
        publisher: Publisher,
    ) -> None:
        message, mode = envelope.message, store.mode
        if mode is _UPSERT:
            store.execute(UPSERT, (message.word, message.count))
        elif mode is _ECHO:
            copy = BenchMessage(word=message.word, count=message.count, sent=message.sent)
            publisher.publish_uncommitted(_to_out_of(envelope.journal), copy)
        else:
            store.gathered[message.word] += message.count

    def finalize_transaction(self, shard: Shard, store: BenchStore, publisher: Any) -> None:
        if store.tables:
            word, count = counts_of(store.tables).columns
            store.executemany(UPSERT, list(zip(word.to_pylist(), count.to_pylist(), strict=True)))
            store.tables = []
        if store.gathered:
            store.executemany(UPSERT, sorted(store.gathered.items()))
            store.gathered.clear()

    @shard_route("/shards/{shard:path}/counts")
    def counts(self, store: BenchStore, request: ShardRequest) -> dict[str, int]:
        return dict(store.query("SELECT word, n FROM counts"))


if __name__ == "__main__":
    main(BenchApplication())
