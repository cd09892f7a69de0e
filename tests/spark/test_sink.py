"""Publishing by tasks and committing on the driver, against a real broker; Spark's part is played here."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import math
import pickle
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_schema
from word_count import ngram_pb2

from gazette.cluster.etcd.client import Etcd
from gazette.errors import GazetteError, Invalid, InvalidValue, NotFound, Unavailable
from gazette.history.columns import MessageFormat
from gazette.history.ddl import parse_columns
from gazette.history.first_pass import fold_by_threads
from gazette.history.read import read_envelopes
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.history.spark.sink import publishing
from gazette.history.spark.source.source import GazetteDataSource
from gazette.labels import (
    CONTENT_CSV,
    CONTENT_JSON_LINES,
    CONTENT_PROTO_FIXED,
    CONTENT_TYPE,
    MESSAGE_TIME,
)
from gazette.message.mapping import Partition, Partitions, modulo_mapping
from gazette.message.message import CSVRecord
from gazette.message.uuid import OUTSIDE_TXN, build_uuid, uuid_text
from gazette.protocol.label_set import LabelSet
from gazette.runtime.failpoints import armed
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import raises

PROTO = "word_count.ngram_pb2:NGramCount"
JSON = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec("topic/a", labels=JSON), journal_spec("topic/b", labels=JSON)
        )
        yield broker


def batch(**columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def writer(
    broker: BrokerFixture, schema: pa.Schema, *, streaming: bool = False, **options: Any
) -> Any:
    source = GazetteDataSource(
        {
            "broker.address": broker.endpoint,
            **({} if "selector" in options else {"journal": "topic/a"}),
            **{name.replace("__", "."): value for name, value in options.items()},
        }
    )
    spark_schema = from_arrow_schema(schema)
    make = source.streamWriter if streaming else source.writer
    # Tasks and commits of streams are each in a process of their own.
    return pickle.loads(pickle.dumps(make(spark_schema, False)))


def committed(
    broker: BrokerFixture, message_type: Any = dict, *journals: str
) -> tuple[list[Any], int]:
    """Return what readers see; and how many producers have something pending."""
    access = Access.of(broker.endpoint, file_root=broker.file_root)
    shape = MessageFormat(message=PROTO if message_type is ngram_pb2.NGramCount else "")
    selection = Selection(journals=journals or ("topic/a", "topic/b"), shape=shape)
    with access.open() as opened:
        folded = fold_by_threads(opened, take_snapshot(opened, selection))
        found = [
            e.message
            for run in folded.runs
            for b in read_envelopes(opened, run, message_type)
            for e in b
        ]
    return found, sum(map(len, folded.open.values()))


def words(broker: BrokerFixture) -> tuple[list[str], int]:
    found, pending = committed(broker)
    return [message["word"] for message in found], pending


async def test_a_table_becomes_visible_when_the_driver_commits(broker: BrokerFixture) -> None:
    old = uuid_text(build_uuid(b"\x01abcde", 7, OUTSIDE_TXN))
    data = batch(word=["x", "y"], n=[1, None], uuid=[old, None])

    def play() -> None:
        one = writer(broker, data.schema)
        first, second = (
            one.write(iter([data])),
            one.write(iter([batch(word=["z"], n=[3], uuid=[""])])),
        )
        loser = one.write(iter([data]))
        assert words(broker) == ([], 3)
        one.commit([pickle.loads(pickle.dumps(first)), second])
        assert words(broker) == (["x", "y", "z"], 1)
        one.abort([loser, None])
        assert words(broker) == (["x", "y", "z"], 0)
        one.commit([first, second])
        assert words(broker) == (["x", "y", "z"], 0)

    await asyncio.to_thread(play)
    found, _ = await asyncio.to_thread(committed, broker)
    assert found[1]["n"] is None
    assert found[0]["uuid"] != old
    assert list(found[0]) == ["uuid", "word", "n"]


async def test_a_task_that_fails_rolls_back(broker: BrokerFixture) -> None:
    def batches() -> Iterator[Any]:
        yield batch(word=["x"])
        raise RuntimeError("the task")

    def play() -> None:
        one = writer(broker, batch(word=["x"]).schema)
        with pytest.raises(RuntimeError, match="the task"):
            one.write(batches())
        assert words(broker) == ([], 0)

    await asyncio.to_thread(play)


async def test_rows_without_the_time_of_their_journal_are_refused(broker: BrokerFixture) -> None:
    """Whichever option names the journal, and before anything of the task becomes visible."""
    await broker.create(
        journal_spec("timed/a", labels=JSON.with_value(MESSAGE_TIME, "at")),
        journal_spec("timed/b", labels=JSON.with_value(MESSAGE_TIME, "sent/ms")),
    )
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    def play() -> None:
        good = batch(at=[at, at], sent=[7, 7.5], to=["timed/a", "timed/b"])
        to_each: dict[str, Any] = {"selector": "prefix=timed/", "journalColumn": "to"}
        one = writer(broker, good.schema, **to_each)
        one.commit([one.write(iter([good]))])
        for journal, name, value in (
            ("timed/a", "at", None), ("timed/b", "sent", None), ("timed/b", "sent", math.nan),
        ):  # fmt: skip
            bad = good.slice(0, 1).to_pylist()[0] | {"to": journal, name: value}
            rows = [good, pa.RecordBatch.from_pylist([bad], good.schema)]
            for options in (to_each, {"journal": journal}):
                with raises(Invalid, path=f"message.{name}", says=journal, advises=name):
                    writer(broker, good.schema, **options).write(iter(rows))
        lacks = batch(other=["x"])
        with raises(Invalid, path="message.at"):
            writer(broker, lacks.schema, journal="timed/a").write(iter([lacks]))
        for journal in ("timed/a", "timed/b"):
            found, pending = committed(broker, dict, journal)
            assert (len(found), pending) == (1, 0)

    await asyncio.to_thread(play)


async def test_keys_go_where_applications_send_them(broker: BrokerFixture) -> None:
    keys = [f"word-{n}" for n in range(20)]
    data = batch(word=keys)

    def play() -> list[list[str]]:
        selector = "prefix=topic/"
        one = writer(broker, data.schema, selector=selector, mapping="modulo", key="word")
        one.commit([one.write(iter([data]))])
        return [
            [message["word"] for message in committed(broker, dict, journal)[0]]
            for journal in ("topic/a", "topic/b")
        ]

    found = await asyncio.to_thread(play)
    partitions = Partitions(
        [Partition(name, CONTENT_JSON_LINES) for name in ("topic/a", "topic/b")]
    )
    mapping = modulo_mapping(lambda: partitions, lambda key: key)
    for journal, held in zip(("topic/a", "topic/b"), found, strict=True):
        assert held == [key for key in keys if mapping(key).journal == journal]


async def test_rows_name_their_journals(broker: BrokerFixture) -> None:
    """Among those of the options, before anything of a batch is appended."""
    given: dict[str, Any] = {"selector": "prefix=topic/", "journalColumn": "to"}

    def play() -> None:
        data = batch(word=["x", "y", "z"], to=["topic/b", "topic/a", "topic/b"])
        one = writer(broker, data.schema, **given)
        attempts = [one.write(iter([data])) for _ in range(2)]
        one.commit(attempts[:1])
        one.abort(attempts[1:])
        assert words(broker) == (["y", "x", "z"], 0)
        assert "to" not in committed(broker)[0][0]
        before = committed(broker, dict, "topic/a"), committed(broker, dict, "topic/b")
        for wrong in ("topic/c", None):
            bad = batch(word=["p", "q"], to=["topic/a", wrong])
            with raises(Invalid, path="option journalColumn", says="topic/a, topic/b") as raised:
                writer(broker, data.schema, **given).write(iter([data, bad]))
            assert str(wrong or "no journal") in str(raised.value)
        assert (committed(broker, dict, "topic/a"), committed(broker, dict, "topic/b")) == before
        with raises(Invalid, path="option journalColumn", says="target"):
            writer(broker, data.schema, **{**given, "journalColumn": "target"})
        numbers = pa.schema([("word", pa.string()), ("to", pa.int64())])
        with raises(Invalid, path="option journalColumn", says="string"):
            writer(broker, numbers, **given)

    await asyncio.to_thread(play)


async def test_a_batch_of_a_stream_is_committed_once(broker: BrokerFixture, tmp_path: Path) -> None:
    """A driver dies between two acknowledgements; the next one runs the batch once more."""
    commits = tmp_path / "commits"
    data = batch(word=["x"])

    def play() -> None:
        options: dict[str, Any] = {
            "streaming": True,
            "selector": "prefix=topic/",
            "commits": str(commits),
        }
        options |= {"mapping": "modulo", "key": "word"}
        schema = data.schema
        other = batch(word=[f"w{n}" for n in range(9)])
        attempt = writer(broker, schema, **options).write(iter([other]))
        assert len(attempt.attempt.commits) == 2, "both journals"
        with armed("sink.acknowledged=error"), pytest.raises(Unavailable, match="failpoint"):
            writer(broker, schema, **options).commit([attempt], 0)
        assert 0 < len(words(broker)[0]) < 9
        # Again, with new producers; but the winner is decided.
        again = writer(broker, schema, **options).write(iter([other]))
        writer(broker, schema, **options).commit([again], 0)
        found, pending = words(broker)
        assert sorted(found) == [f"w{n}" for n in range(9)]
        assert pending == 0
        # And once more, which changes nothing; then the next batch.
        writer(broker, schema, **options).commit([again], 0)
        assert words(broker)[0] == found
        after = writer(broker, schema, **options).write(iter([data]))
        writer(broker, schema, **options).commit([after, None], 1)
        assert sorted(words(broker)[0]) == sorted([*found, "x"])
        assert sorted(path.name for path in commits.iterdir()) == ["query-0.json", "query-1.json"]

    await asyncio.to_thread(play)


async def test_a_table_may_be_written_once_by_name(broker: BrokerFixture, tmp_path: Path) -> None:
    data = batch(word=["x"])

    def play() -> None:
        options: dict[str, Any] = {
            "commits": str(tmp_path / "commits"),
            "commitId": "nightly-2024",
        }
        for _ in range(2):
            one = writer(broker, data.schema, **options)
            one.commit([one.write(iter([data]))])
        assert words(broker) == (["x"], 0)

    await asyncio.to_thread(play)


async def test_a_write_by_name_keeps_the_records_of_other_names(
    broker: BrokerFixture, tmp_path: Path
) -> None:
    data = batch(word=["x"])

    def play() -> None:
        for name in ("nightly-20240101", "nightly-20240601", "nightly-20240101"):
            one = writer(broker, data.schema, commits=str(tmp_path), commitId=name)
            one.commit([one.write(iter([data]))])
        assert words(broker) == (["x", "x"], 0)

    await asyncio.to_thread(play)


async def test_records_of_long_ago_are_removed(tmp_path: Path) -> None:
    for number in (*range(3), 150, "other", "a-1", "²"):
        (tmp_path / f"query-{number}.json").write_text("{}")
    publishing.tidy(str(tmp_path), "query", 151)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "query-150.json",
        "query-a-1.json",
        "query-other.json",
        "query-².json",
    ]
    (tmp_path / "query-7.json").write_text("[")
    with raises(GazetteError, "file"):
        publishing._Record(tmp_path, "query-7").decide({})


async def test_csv_and_protobuf(broker: BrokerFixture) -> None:
    await broker.create(
        journal_spec("topic/csv", labels=LabelSet.of((CONTENT_TYPE, CONTENT_CSV))),
        journal_spec("topic/proto", labels=LabelSet.of((CONTENT_TYPE, CONTENT_PROTO_FIXED))),
    )

    def play() -> None:
        rows = batch(a=["1, 2", None], b=[7, 8])
        one = writer(broker, rows.schema, journal="topic/csv", value="csv")
        one.commit([one.write(iter([rows]))])
        found, _ = committed(broker, CSVRecord, "topic/csv")
        assert [record[1:] for record in found] == [["1, 2", "7"], ["", "8"]]
        rows = batch(n_gram=["a b", None], count=[7, 8])
        one = writer(broker, rows.schema, journal="topic/proto", message=PROTO)
        one.commit([one.write(iter([rows]))])
        found, _ = committed(broker, ngram_pb2.NGramCount, "topic/proto")
        assert [(one.n_gram, one.count) for one in found] == [("a b", 7), ("", 8)]
        with raises(Invalid, path="option message", says="nope"):
            writer(broker, batch(nope=[1]).schema, journal="topic/proto", message=PROTO)

    await asyncio.to_thread(play)


async def test_what_csv_holds_is_read_as_the_same(broker: BrokerFixture) -> None:
    await broker.create(journal_spec("topic/csv", labels=LabelSet.of((CONTENT_TYPE, CONTENT_CSV))))
    noon = datetime.datetime(2024, 1, 31, 12, 0, 0, 123456)  # noqa: DTZ001 - one without a zone
    row = {
        "d": noon.date(),
        "t": noon.replace(tzinfo=datetime.UTC),
        "local": noon,
        "c": decimal.Decimal("100.00"),
        "yes": True,
        "x": 0.1,
        "n": 2**62,
        "s": 'a "quoted", text\nin two lines',
    }
    kinds = (
        "d date, t timestamp, local timestamp_ntz, c decimal(20,2), yes boolean, x double, n long"
    )
    schema = parse_columns(f"{kinds}, s string")
    rows = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema)
    given: dict[str, Any] = {"journal": "topic/csv", "value": "csv"}

    def play() -> None:
        one = writer(broker, schema, **given)
        one.commit([one.write(iter([rows]))])
        source = GazetteDataSource({"broker.address": broker.endpoint, **given})
        reader = source.reader(from_arrow_schema(schema, prefer_timestamp_ntz=True))
        found = [
            row for part in reader.partitions() for b in reader.read(part) for row in b.to_pylist()
        ]
        # CSV has no null that is no text.
        assert found == [row, {**dict.fromkeys(row), "s": ""}]
        for kind in ("array<int>", "binary", "struct<a: int>", "map<string, int>"):
            with raises(Invalid, path="x", says="CSV"):
                writer(broker, parse_columns(f"n long, x {kind}"), **given)

    await asyncio.to_thread(play)


async def test_nested_values(broker: BrokerFixture) -> None:
    rows = pa.RecordBatch.from_pylist(
        [{"m": [("k", 1)], "s": {"l": [1, 2]}, "b": b"hi", "n": [(7, decimal.Decimal("1.50"))]}],
        pa.schema(
            [
                ("n", pa.map_(pa.int64(), pa.decimal128(5, 2))),
                ("m", pa.map_(pa.string(), pa.int64())),
                ("s", pa.struct([("l", pa.list_(pa.int64()))])),
                ("b", pa.binary()),
            ]
        ),
    )

    def play() -> None:
        one = writer(broker, rows.schema)
        one.commit([one.write(iter([rows]))])
        (found,), _ = committed(broker)
        del found["uuid"]
        nested = {"m": {"k": 1}, "s": {"l": [1, 2]}, "b": "aGk=", "n": {"7": "1.50"}}
        assert json.loads(json.dumps(found)) == nested
        numbers = batch(x=[[0.5, math.nan]])
        with raises(InvalidValue, path='message["x"][1]'):
            writer(broker, numbers.schema).write(iter([numbers]))

    await asyncio.to_thread(play)


async def test_rows_are_written_as_they_are_or_named(broker: BrokerFixture) -> None:
    """Columns of every name and time, and what no reader would find equal."""
    utc, west = pa.timestamp("us", "UTC"), datetime.timezone(datetime.timedelta(hours=-8))
    schema = pa.schema(
        [
            ("", pa.int64()),
            ("a.b", pa.string()),
            ("`q`", pa.struct([("", pa.string()), ("x", pa.list_(utc))])),
            ("N", pa.int32()),
            ("n", pa.int32()),
            ("at", utc),
            ("day", pa.date32()),
            ("money", pa.decimal128(38, 9)),
            ("raw", pa.binary()),
        ]
    )
    first = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)
    last = datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, datetime.UTC)
    old = datetime.datetime(1582, 10, 10, tzinfo=datetime.UTC)
    rows = [
        {
            "": number,
            "a.b": None,
            "`q`": {"": "deep", "x": [first, None, last]},
            "N": 1,
            "n": 2,
            "at": at,
            "day": at.date(),
            "money": decimal.Decimal("12345678901234567890123456789.123456789"),
            "raw": b"\x00\xff",
        }
        for number, at in enumerate((first, last, old))
    ]

    def play() -> None:
        one = writer(broker, schema)
        one.commit([one.write(iter([pa.RecordBatch.from_pylist(rows, schema)]))])
        source = GazetteDataSource({"broker.address": broker.endpoint, "journal": "topic/a"})
        reader = source.reader(from_arrow_schema(schema, prefer_timestamp_ntz=True))
        found = [
            row for part in reader.partitions() for b in reader.read(part) for row in b.to_pylist()
        ]
        assert found == rows
        beyond = pa.scalar(253_402_300_800_000_000, pa.int64())  # 9999-12-31T16:00 in the west.
        assert last.astimezone(west).hour == 15
        for name, kind, value in (
            ("at", utc, beyond.cast(utc)),
            (
                "at",
                pa.list_(utc),
                pa.scalar([beyond.as_py()], pa.list_(pa.int64())).cast(pa.list_(utc)),
            ),
            ("day", pa.date32(), pa.scalar(3_000_000, pa.int32()).cast(pa.date32())),
            ("day", pa.date32(), pa.scalar(-800_000, pa.int32()).cast(pa.date32())),
            (
                "map",
                pa.map_(pa.string(), pa.int64()),
                pa.scalar([("k", 1), ("k", 2)], pa.map_(pa.string(), pa.int64())),
            ),
        ):
            columns = [pa.array([1]), pa.array([value], kind)]
            wrong = pa.RecordBatch.from_arrays(columns, names=["n", name])
            for form in ("json", "csv") if not pa.types.is_nested(kind) else ("json",):
                journal = "topic/a" if form == "json" else "topic/csv"
                with raises(Invalid, path=name):
                    writer(broker, wrong.schema, value=form, journal=journal).write(iter([wrong]))

    await broker.create(journal_spec("topic/csv", labels=LabelSet.of((CONTENT_TYPE, CONTENT_CSV))))
    await asyncio.to_thread(play)


def field(name: str, kind: types.DataType) -> types.StructType:
    return types.StructType([types.StructField(name, kind)])


def unopened(schema: types.StructType) -> Any:
    """Return a writer of a schema that connects to nothing yet."""
    options = {"broker.address": "http://localhost:1", "journal": "topic/a"}
    return GazetteDataSource(options).writer(schema, False)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (types.DayTimeIntervalType(), "x"),
        (types.VariantType(), "x"),
        (types.MapType(types.DoubleType(), types.StringType()), "x"),
        (types.ArrayType(field("a", types.MapType(types.DateType(), types.StringType()))), "x.a"),
        (types.MapType(types.StringType(), field("v", types.VariantType())), "x.v"),
    ],
)
def test_types_that_are_read_as_others_are_not_written(kind: types.DataType, path: str) -> None:
    with raises(Invalid, path=path):
        unopened(field("n", types.LongType()).add("x", kind))


def test_columns_of_one_name_are_not_written() -> None:
    """A message would have one of them."""
    twice = field("x", types.LongType()).add("x", types.StringType())
    with raises(Invalid, path="x"):
        unopened(twice)
    with raises(Invalid, path="a.x"):
        unopened(field("a", types.ArrayType(twice)))


async def test_what_cannot_be_written(broker: BrokerFixture) -> None:
    data = batch(word=["x"])
    proto = LabelSet.of((CONTENT_TYPE, CONTENT_PROTO_FIXED))
    await broker.create(journal_spec("topic/plain"), journal_spec("topic/proto", labels=proto))

    def play() -> None:
        with raises(Invalid, path="mode"):
            GazetteDataSource({"journal": "topic/a"}).writer(from_arrow_schema(data.schema), True)
        with raises(Invalid, path="option key", says="nope"):
            writer(broker, data.schema, mapping="modulo", key="nope")
        with raises(Invalid, path="columns"):
            writer(broker, batch(uuid=["x"]).schema)
        with raises(NotFound, journal="topic/none"):
            writer(broker, data.schema, journal="topic/none").write(iter([data]))
        with raises(NotFound, selector="prefix=none/"):
            writer(broker, data.schema, selector="prefix=none/").write(iter([data]))
        with raises(Invalid, path="option value", says="application/x-nd"):
            writer(broker, data.schema, value="csv").write(iter([data]))
        wrong = batch(count=["many"])
        proto_options: dict[str, Any] = {"journal": "topic/proto", "message": PROTO}
        with raises(Invalid, path="option message", says="many"):
            writer(broker, wrong.schema, **proto_options).write(iter([wrong]))
        with raises(Invalid, path="option contentType", says="topic/plain"):
            writer(broker, data.schema, journal="topic/plain").write(iter([data]))
        one = writer(broker, data.schema, journal="topic/plain", value="json")
        assert one.write(iter([data])).attempt.rows == 1

    await asyncio.to_thread(play)
