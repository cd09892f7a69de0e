"""Applications that consume tables, against applications that consume the same messages one by one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
import pydantic
import pytest
from prometheus_client import REGISTRY
from word_count.ngram_pb2 import NGramCount

from gazette import (
    Application,
    CSVRecord,
    DeadLetter,
    DeferToNextTransaction,
    Envelope,
    Message,
    MessageProducer,
    PoisonPolicy,
    Source,
    TableApplication,
    TimeDomain,
)
from gazette.client.append.appender import AppendParams
from gazette.client.shards import ShardChange
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.errors import Invalid, InvalidValue
from gazette.history.backfill.definition import replay
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.uuid import build_uuid, uuid_text
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.shard import ShardSpec
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite import SQLiteStore
from gazette.stores.state_builder import StateBuilder
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start
from tests.facts import raises
from tests.fuzzing import seeds
from tests.history.test_histories import published
from tests.history.test_shard_tables import BEYOND, ODD_FIELDS, Word, line_of

SCHEMA = "CREATE TABLE IF NOT EXISTS words (word TEXT PRIMARY KEY, n INTEGER, chain INTEGER)"
OUT = "out/words"
LETTERS = "dead/letters"


class Folding:
    """A fold that depends on the order of messages: each word has a chain of what it got."""

    message_type: type[Any] | None = Word
    policy: PoisonPolicy | None = None
    deferred = 7
    """Messages with a ``count`` that this number divides begin a transaction."""

    def __init__(self) -> None:
        self.consumed = 0
        self.to_out = fixed_mapping(OUT, CONTENT_JSON_LINES)

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return self.policy

    def begin_transaction(self, shard: Any, store: Any) -> None:
        self.consumed = 0

    def fold(self, store: SQLiteStore, publisher: Any, rows: Iterable[Word]) -> None:
        consumed = self.consumed
        for row in rows:
            if consumed and not row.count % self.deferred:
                raise DeferToNextTransaction("begins a transaction")
            found = store.query("SELECT n, chain FROM words WHERE word = ?", (row.word[-1],))
            n, chain = found[0] if found else (0, 0)
            chain = (chain * 31 + row.count + len(row.note or "") + int(8 * row.weight)) % 10007
            values = row.word[-1], n + 1, chain
            store.execute("INSERT OR REPLACE INTO words VALUES (?, ?, ?)", values)
            publisher.publish_uncommitted(self.to_out, Word(word=row.word, count=row.count))
            if row.word == "w3":
                raise ValueError("this word is poison")
            consumed += 1
        self.consumed = consumed


class ByMessage(Folding, Application[SQLiteStore]):
    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Any
    ) -> None:
        self.fold(store, publisher, [envelope.message])


class ByTable(Folding, TableApplication[SQLiteStore]):
    table_meta: ClassVar[Sequence[str]] = ()

    def consume_table(
        self, shard: Any, store: SQLiteStore, table: pa.RecordBatch, publisher: Any
    ) -> None:
        self.fold(store, publisher, [Word(**row) for row in table.to_pylist()])


@pytest.mark.parametrize("seed", seeds(60))
def test_the_state_is_that_of_single_messages(seed: int, tmp_path: Path) -> None:
    """Also the output and the dead letters: over duplicates, rollbacks, poison, deferrals and crashes."""
    rng = random.Random(seed)
    items = published(rng)
    odd_fields = [field for field in ODD_FIELDS if field != BEYOND]
    odd = rng.choice([0, 0.1])
    lines = [line_of(item, n, rng, odd, odd_fields) for n, item in enumerate(items)]
    content = b"".join(lines)
    content += rng.choice([b"", b'{"word":'])
    cuts = sorted(rng.randint(0, len(content)) for _ in range(rng.randint(0, 3)))
    results = []
    for application in (ByMessage(), ByTable()):
        application.policy = PoisonPolicy(LETTERS, limit=1000, errors=(ValueError,))
        labels = {OUT: {CONTENT_TYPE: CONTENT_JSON_LINES}}
        directory = tmp_path / type(application).__name__
        directory.mkdir()
        with AppDriver(
            application,
            directory,
            sources=["words"],
            journal_labels=labels,
            chunk_bytes=rng.choice([90, 1 << 20]),
            ring_buffer_size=rng.choice([1, 8192]),
        ) as driver:
            for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
                driver.feed("words", content[begin:end])
                driver.run()
                if rng.random() < 0.5:
                    driver.crash()
                    driver.run()
            letters = driver.committed(LETTERS, DeadLetter)
            results.append(
                (
                    driver.store.query("SELECT * FROM words ORDER BY word"),
                    [(word.word, word.count) for word in driver.committed(OUT, Word)],
                    [(each.begin, each.end, each.reason, bytes(each.raw)) for each in letters],
                    driver.read_through,
                )
            )
    assert results[1] == results[0]


def test_a_table_has_the_columns_of_its_type(tmp_path: Path) -> None:
    tables: list[pa.RecordBatch] = []

    class Kept(ByTable):
        table_meta = ("journal", "offset", "clock")
        meta_prefix = "_"

        def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None:
            tables.append(table)

    with AppDriver(Kept(), tmp_path, sources=["words"]) as driver:
        driver.publish("words", Word(word="a"), Word(word="b", note="é"))
        driver.run()
    (table,) = tables
    assert table.schema.field("_journal").type == pa.string()
    assert table.schema.field("_clock").type == pa.int64()
    assert table["_offset"].to_pylist()[0] == 0
    rows = table.select(["_journal", "word", "count", "weight", "note"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("words", "a", 1, 0.5, None),
        ("words", "b", 1, 0.5, "é"),
    ]


class Counting(TableApplication[SQLiteStore]):
    """Counts rows of any type by a column, with SQL over the table."""

    table_meta: ClassVar[Sequence[str]] = ()

    def __init__(self, message_type: Any = Word, column: str = "word") -> None:
        self.message_type = message_type
        self.column = column
        self.rows: list[int] = []

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (k PRIMARY KEY, n INTEGER)")

    def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None:
        self.rows.append(len(table))
        table = table.select([self.column])
        store.execute_tables(
            f"INSERT INTO counts SELECT {self.column}, count(*) FROM rows WHERE true GROUP BY 1 "
            "ON CONFLICT DO UPDATE SET n = n + excluded.n",
            rows=table,
        )


def test_a_transaction_longer_than_the_ring_is_read_again(tmp_path: Path) -> None:
    """Also after a crash."""
    rows: list[int] = []

    class Sized(Counting):
        def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None:
            rows.append(len(table))
            super().consume_table(shard, store, table, publisher)

    with AppDriver(
        Sized(), tmp_path, sources=["words"], ring_buffer_size=1, chunk_bytes=1 << 14
    ) as driver:
        driver.publish_pending("words", *[Word(word=f"w{number % 7}") for number in range(1000)])
        driver.run()
        assert rows == []
        driver.crash()
        driver.run()
        driver.publish_pending("words", Word(word="last"))
        driver.acknowledge()
        driver.run()
        counts = dict(driver.store.query("SELECT * FROM counts"))
        driver.crash()
        driver.run()
        assert dict(driver.store.query("SELECT * FROM counts")) == counts
    assert counts.pop("last") == 1
    assert sum(counts.values()) == 1000
    assert rows == [1000, 1]  # First the rows that were read again, then the row that was kept.


def test_a_replay_of_a_backfill_makes_tables_of_messages(tmp_path: Path) -> None:
    """With the state of the shard, whose messages were rows."""
    batches: list[list[Envelope[Any]]] = []

    class Remembers(ByMessage):
        def consume_message(
            self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Any
        ) -> None:
            batches.append([envelope])

    for name in ("shard", "read"):
        (tmp_path / name).mkdir()
    with (
        AppDriver(Counting(), tmp_path / "shard", sources=["words"]) as driver,
        AppDriver(Remembers(), tmp_path / "read", sources=["words"]) as reader,
    ):
        for number in range(20):
            driver.publish("words", Word(word=f"w{number % 3}"))
            reader.publish("words", Word(word=f"w{number % 3}"))
        reader.run()
        driver.run()
        want = driver.store.query("SELECT * FROM counts ORDER BY k")
    spec = ShardSpec("shard-one", recovery_log_prefix="logs", hint_prefix="/hints")
    application = Counting()
    with StateBuilder(application, spec, tmp_path / "built", random.Random(1)) as built:
        store: Any = built.store
        replay(application, built.shard, store, iter(batches))
        assert store.query("SELECT * FROM counts ORDER BY k") == want
        built.finish(Checkpoint())
    assert len(want) == 3


class Renamed(msgspec.Struct, rename="camel"):
    """Names in JSON differ from those of attributes, also that of the UUID."""

    gazette_uuid: ClassVar[str] = "UUID"
    best_word: str
    identity: str = msgspec.field(default="", name="UUID")
    how_many: int = 1


class Inner(msgspec.Struct):
    uuid: str = ""
    best: str = ""


class Placed(msgspec.Struct):
    """The UUID is nested, so that it stays a part of a column."""

    gazette_uuid: ClassVar[str] = "meta.uuid"
    bestWord: str
    meta: Inner | None = None


class Model(pydantic.BaseModel):
    uuid: str = ""
    bestWord: str


@pytest.mark.parametrize("message_type", [Renamed, Placed, Model])
def test_columns_have_the_names_of_json(message_type: Any, tmp_path: Path) -> None:
    key = "best_word" if message_type is Renamed else "bestWord"
    application = Counting(message_type, "bestWord")
    with AppDriver(application, tmp_path, sources=["words"]) as driver:
        driver.publish("words", *[message_type(**{key: word}) for word in "aab"])
        driver.run()
        assert driver.store.query("SELECT * FROM counts ORDER BY k") == [("a", 2), ("b", 1)]
        driver.publish_pending("words", message_type(**{key: "c"}))
        driver.acknowledge()
        driver.run()
        assert driver.store.query("SELECT n FROM counts WHERE k = 'c'") == [(1,)]


def test_protobuf_has_columns_too(tmp_path: Path) -> None:
    types = {"ngrams": CONTENT_PROTO_FIXED}
    application = Counting(NGramCount, "n_gram")
    with AppDriver(application, tmp_path, sources=["ngrams"], content_types=types) as driver:
        driver.publish(
            "ngrams", NGramCount(n_gram="a"), NGramCount(n_gram="b"), NGramCount(n_gram="a")
        )
        driver.run()
        assert driver.store.query("SELECT * FROM counts ORDER BY k") == [("a", 2), ("b", 1)]


def test_a_json_store_needs_no_savepoints(tmp_path: Path) -> None:
    class Totals(TableApplication[JSONFileStore[dict[str, int]]]):
        message_type = Word

        def new_store(self, shard: Any, recorder: Any) -> JSONFileStore[dict[str, int]]:
            return JSONFileStore(recorder, dict[str, int], dict)

        def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None:
            words = pa.Table.from_batches([table]).group_by("word")
            for row in words.aggregate([("count", "sum")]).to_pylist():
                word = row["word"]
                store.state[word] = store.state.get(word, 0) + row["count_sum"]

    with AppDriver(Totals(), tmp_path, sources=["words"]) as driver:
        driver.publish("words", Word(word="a", count=2), Word(word="b"), Word(word="a"))
        driver.run()
        driver.crash()
        driver.publish("words", Word(word="a"))
        driver.run()
        assert driver.store.state == {"a": 4, "b": 1}


@pytest.mark.parametrize("policy", ["count", "fail", "republish"])
@pytest.mark.parametrize("by_function", [False, True])
def test_misplaced_keys_are_found_in_columns(
    policy: Any, by_function: bool, tmp_path: Path
) -> None:
    """With the result of single messages: state, output, dead letters and counts."""
    key: Any = (lambda message: message.word) if by_function else "word"
    results = []
    words = [f"word-{number:02d}" for number in range(40)]
    for base in (ByMessage, ByTable):

        class Declared(base):  # type: ignore[misc, valid-type]
            words = Source("words", Word, partitions=2, key=key, misplaced=policy)
            message_type = None
            application_name = "declared"

        directory = tmp_path / base.__name__
        directory.mkdir()
        parts = ["words/part-000", "words/part-001"]
        before = misplaced_counts(parts[0])
        application: Any = Declared()
        application.policy = PoisonPolicy(LETTERS, limit=1000, errors=(ValueError,))
        with AppDriver(application, directory, sources=parts[:1]) as driver:
            publish(driver, parts[0], [Word(word=word, count=1) for word in words])
            driver.run()
            letters = driver.committed(LETTERS, DeadLetter)
            results.append(
                (
                    driver.store.query("SELECT * FROM words ORDER BY word"),
                    [word.word for word in driver.committed(parts[1], Word)],
                    [(letter.begin, letter.reason) for letter in letters],
                    misplaced_counts(parts[0]) - before,
                )
            )
    assert results[1] == results[0]
    assert results[0][3] > 10


def noted_time(message: Word) -> datetime | None:
    return None if message.note is None else datetime.fromisoformat(message.note)


def test_messages_without_their_declared_time_are_poison(tmp_path: Path) -> None:
    """As they are when consumed one by one."""
    results = []
    for base in (ByMessage, ByTable):

        class Timed(base):  # type: ignore[misc, valid-type]
            words = Source("words", Word, time=noted_time)
            message_type = None
            application_name = "timed"

        directory = tmp_path / base.__name__
        directory.mkdir()
        application: Any = Timed()
        application.policy = PoisonPolicy(LETTERS, malformed_only=True)
        with AppDriver(application, directory, sources=["words/part-000"]) as driver:
            times = [None, "2001-01-01T00:00:00+00:00", "never"]
            driver.publish("words/part-000", *[Word(word="a", note=time) for time in times])
            driver.run()
            letters = driver.committed(LETTERS, DeadLetter)
            state = driver.store.query("SELECT * FROM words")
            results.append((state, [(letter.begin, letter.reason) for letter in letters]))
    assert results[1] == results[0]
    assert [reason for _, reason in results[0][1]] == ["time", "time"]


def publish(driver: AppDriver[Any], journal: str, messages: Iterable[Word]) -> None:
    """Append messages as other programs do, whatever their key."""
    lines = []
    for number, message in enumerate(messages):
        uuid = uuid_text(build_uuid(b"\x03\0\0\0\0\1", 1 + number, 0))
        lines.append(json.dumps({"uuid": uuid, "word": message.word, "count": message.count}))
    driver.feed(journal, "".join(f"{line}\n" for line in lines).encode())


def misplaced_counts(journal: str) -> float:
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "gazette_shard_misplaced_messages_total"
        and sample.labels["journal"] == journal
    )


def test_an_error_names_the_callback(tmp_path: Path) -> None:
    with AppDriver(ByTable(), tmp_path, sources=["words"]) as driver:
        driver.publish("words", Word(word="a"), Word(word="w3"))
        with raises(ApplicationFailed, journal="words", begin=0):
            driver.run()
        assert "consume_table raised ValueError" in str(driver.failure)


def test_poison_is_found_by_halves(tmp_path: Path) -> None:
    """A row of a large table costs some twenty attempts, and not one for each row."""
    calls: list[int] = []

    class Counted(ByTable):
        def fold(self, store: SQLiteStore, publisher: Any, rows: Iterable[Word]) -> None:
            calls.append(1)
            super().fold(store, publisher, rows)

    application = Counted()
    application.policy = PoisonPolicy(LETTERS, errors=(ValueError,))
    application.deferred = 10**9
    with AppDriver(application, tmp_path, sources=["words"]) as driver:
        messages = [Word(word=f"x{number % 10}") for number in range(1000)]
        messages[613] = Word(word="w3")
        driver.publish("words", *messages)
        driver.run()
        assert driver.store.query("SELECT sum(n) FROM words") == [(999,)]
        (letter,) = driver.committed(LETTERS, DeadLetter)
    assert b"w3" in letter.raw
    assert len(calls) < 60


class Late(TableApplication[SQLiteStore]):
    """Sets a timer for each word."""

    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)

    def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None:
        for word in table["word"].to_pylist():
            store.execute("INSERT OR IGNORE INTO words VALUES (?, 0, 0)", (word,))
            shard.schedule(word, shard.now + timedelta(seconds=5), domain=TimeDomain.PROCESSING)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        store.execute("UPDATE words SET n = n + 1 WHERE word = ?", (timer.key,))


def test_timers_get_tables_of_single_messages(tmp_path: Path) -> None:
    with AppDriver(Late(), tmp_path, sources=["words"]) as driver:
        driver.publish("words", Word(word="a"), Word(word="b"))
        driver.run()
        driver.advance(6)
        assert driver.store.query("SELECT word, n FROM words") == [("a", 1), ("b", 1)]


class Brought(Counting, MessageProducer):
    def start_reading(self, shard: Any, store: Any, checkpoint: Any, feed: Any) -> None:
        if "queue" not in checkpoint.sources:
            rows = [
                Envelope("queue", n, n + 1, Word(word=f"w{n % 2}"), b"\1" * 6, 0, 0)
                for n in range(5)
            ]
            feed.put(rows)

    def replay(self, shard: Any, store: Any, journal: str, begin: int, end: int) -> Any:
        raise AssertionError("nothing is replayed")


def test_messages_that_an_application_brings_become_tables(tmp_path: Path) -> None:
    with AppDriver(Brought(), tmp_path, sources=["words"]) as driver:
        driver.run()
        assert driver.store.query("SELECT * FROM counts ORDER BY k") == [("w0", 3), ("w1", 2)]


class Part(Message):
    n: int = 0


class Whole(Message):
    word: str = ""
    n: int = 0
    x: float = 0.0
    at: datetime | None = None
    day: date | None = None
    numbers: tuple[int, ...] = ()
    part: Part | None = None
    parts: tuple[Part, ...] = ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"word": b"a"},
        {"n": 1.5},
        {"n": Decimal("1.5")},
        {"n": True},
        {"x": True},
        {"part": 7},
        {"at": 7},
        {"day": datetime(2026, 1, 2, 3, tzinfo=UTC)},
        {"numbers": [1, 1.5]},
        {"numbers": b"ab"},
        {"part": Part(n=1.5)},  # type: ignore[arg-type]
        {"parts": [Part(), Part(n=2.5)]},  # type: ignore[arg-type]
    ],
)
def test_a_value_that_its_column_would_change_is_refused(wrong: Any, tmp_path: Path) -> None:
    """Messages that an application brings need not have the types that their class declares."""

    class Wrong(Brought):
        def start_reading(self, shard: Any, store: Any, checkpoint: Any, feed: Any) -> None:
            rows = [Whole(word="w0"), Whole(**wrong)]
            feed.put(
                [Envelope("queue", n, n + 1, row, b"\1" * 6, 0, 0) for n, row in enumerate(rows)]
            )

    application = Wrong(Whole)
    with (
        AppDriver(application, tmp_path, sources=["words"]) as driver,
        pytest.raises(ApplicationFailed, match="a value of type"),
    ):
        driver.run()


@pytest.mark.parametrize("message_type", [dict, CSVRecord, bytes])
def test_a_type_without_columns_is_refused(message_type: Any, tmp_path: Path) -> None:
    types = {"words": CONTENT_CSV if message_type is CSVRecord else CONTENT_JSON_LINES}
    driver = AppDriver(Counting(message_type), tmp_path, sources=["words"], content_types=types)
    with driver, raises(Invalid):
        driver.run()


def test_columns_of_the_same_name_are_refused(tmp_path: Path) -> None:
    class Placed(Message):
        offset: int

    class Offsets(Counting):
        table_meta = ("offset",)

    application = Offsets(Placed)
    with (
        AppDriver(application, tmp_path, sources=["words"]) as driver,
        raises(Invalid, path="offset"),
    ):
        driver.run()


def test_a_callback_that_nothing_would_call_is_refused(tmp_path: Path) -> None:
    class Plain(ByMessage):
        def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None: ...

    with raises(Invalid):
        AppDriver(Plain(), tmp_path, sources=["words"])


def test_acknowledgements_are_no_rows(tmp_path: Path) -> None:
    application = Counting()
    application.deliver_acks = True
    with (
        AppDriver(application, tmp_path, sources=["words"]) as driver,
        raises(Invalid, path="deliver_acks"),
    ):
        driver.run()


WITHOUT_PYARROW = """
from tests.support.missing import missing
with missing("pyarrow"):
    from gazette.errors import Invalid
    try:
        from gazette import TableApplication
    except Invalid as error:
        print(error)
"""


WITHOUT_NUMBA = """
from tests.support.missing import missing
with missing("numba"):
    import pathlib, sys
    from gazette.testing.app_driver import AppDriver
    from tests.consumer.test_consume_table import Counting, Word
    with AppDriver(Counting(), pathlib.Path(sys.argv[1]), sources=["words"]) as driver:
        driver.publish("words", Word(word="a"), Word(word="a"))
        driver.run()
        print(driver.store.query("SELECT * FROM counts"))
"""


def test_without_numba_tables_have_the_same_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environ
    ).stdout
    assert printed.splitlines()[-1] == "[('a', 2)]"


def test_without_pyarrow_the_class_is_refused_by_the_name_of_the_extra() -> None:
    command = [sys.executable, "-c", WITHOUT_PYARROW]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "pygazette[tables]" in printed


def test_sql_refuses_values_that_it_does_not_keep(tmp_path: Path) -> None:
    """And names of tables that the database has; the transaction goes on."""
    with AppDriver(Counting(), tmp_path, sources=["words"]) as driver:
        driver.publish("words", Word(word="a"))
        driver.run()
        refusals: list[type[BaseException]] = []

    class Refused(Counting):
        def consume_table(self, shard: Any, store: Any, table: Any, publisher: Any) -> None:
            for name, shown in (
                ("rows", pa.table({"x": [float("nan")]})),
                ("rows", pa.table({"x": [[1]]})),
                ("rows", pa.table({"x": pa.array([1 << 63], pa.uint64())})),
                ("rows", pa.table({"x": pa.array([1], pa.timestamp("ns"))})),
                ("rows", pa.table({"x": [1], "X": [2]})),
                ("rows", pa.table({})),
                ("sqlite_master", table),
                ("FTS5", table),
                ("Counts", table),
            ):
                try:
                    store.execute_tables(f"SELECT * FROM {name}", **{name: shown})
                except Invalid as error:
                    refusals.append(type(error))
            super().consume_table(shard, store, table, publisher)
            rows = store.execute_tables(
                "SELECT a.x, b.y FROM a JOIN b ON a.x = b.x ORDER BY 1",
                a=pa.table({"x": [1, 2, None]}),
                b=pa.table({"x": [2, 1], "y": [b"two", b"one"]}),
            )
            assert [row[0] for row in rows] == [1, 2]

    directory = tmp_path / "refused"
    directory.mkdir()
    with AppDriver(Refused(), directory, sources=["words"]) as driver:
        driver.publish("words", Word(word="a"))
        driver.run()
        assert driver.store.query("SELECT * FROM counts") == [("a", 1)]
    assert refusals == [InvalidValue] * 4 + [Invalid] * 5


async def test_a_shard_of_a_cluster_consumes_tables(broker: BrokerFixture, start: Start) -> None:
    content = "".join(f'{{"word":"w{number % 3}"}}\n' for number in range(3000)).encode()
    result = await broker.client.append(AppendParams(SOURCE), content)
    application = Counting()
    consumer = await start(application)
    await consumer.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
    await consumer.await_primary(SHARD)
    stat = await consumer.shards.stat(SHARD, {SOURCE: result.commit.end})
    assert stat.read_through[SOURCE] == len(content)
    assert sum(application.rows) == 3000
