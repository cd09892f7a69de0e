"""The table reader, in this process: Spark calls nothing else."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.pandas.types import from_arrow_schema

from gazette.errors import Invalid
from gazette.message.message_uuid import ACK_TXN, CONTINUE_TXN, build_uuid, clock_at
from gazette.protocol.fragment import Codec
from gazette.spark.ddl import parse_columns
from gazette.spark.planning import decode_plan
from gazette.spark.source import GazetteDataSource
from gazette.testing.stored import json_line, write_journal

STORE = "file:///fragments/"
ALPHA = bytes([1, 0, 0, 0, 0, 1])
NOON = clock_at(1_700_000_000 * 10**9)


def struct(text: str):
    return from_arrow_schema(parse_columns(text), prefer_timestamp_ntz=False)


def history(first: int = 0) -> list[bytes]:
    """Three fragments: a committed transaction over two, and an open one."""

    def line(at: int, flags: int, **fields: object) -> bytes:
        return json_line(fields, build_uuid(ALPHA, NOON + at * 160, flags))

    return [
        line(1, CONTINUE_TXN, word="a", n=first) + line(2, CONTINUE_TXN, word="b", n=first + 1),
        line(3, CONTINUE_TXN, word="c", n=first + 2, more={"x": 1.5}) + line(4, ACK_TXN),
        line(5, CONTINUE_TXN, word="open", n=first + 3),
    ]


@pytest.fixture
def options(tmp_path) -> dict[str, str]:
    write_journal(tmp_path, STORE, "topic/a", history(), Codec.GZIP)
    write_journal(tmp_path, STORE, "topic/b", history(10), Codec.ZSTANDARD)
    return {
        "store": f"file://{tmp_path}/fragments",
        "journal": "topic/a,topic/b",
        "run_bytes": "1",
        "pushdown": "false",
    }


def read(options, schema: str | None = None, filters=()):
    """As Spark does: from one process to the next."""
    source = GazetteDataSource(options)
    parsed = source.schema() if schema is None else struct(schema)
    reader = pickle.loads(pickle.dumps(source.reader(parsed)))
    if filters:
        assert list(reader.pushFilters(filters)) == list(filters), "Spark applies them once more"
    partitions = reader.partitions()
    assert isinstance(partitions, list)
    rows = []
    for partition in partitions or [InputPartition(None)]:
        for batch in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(partition))):
            assert isinstance(batch, pa.RecordBatch)
            rows += batch.to_pylist()
    return rows, len(partitions)


def test_what_has_committed(options):
    rows, count = read(options)
    assert [row["word"] for row in rows] == ["a", "b", "c"] * 2
    assert [row["n"] for row in rows] == [0, 1, 2, 10, 11, 12]
    assert rows[2]["more"] == {"x": 1.5}
    assert {row["journal"] for row in rows} == {"topic/a", "topic/b"}
    assert count == 6
    rows, _ = read({**options, "isolation": "read_uncommitted"}, "word string, offset bigint")
    assert [row["word"] for row in rows] == ["a", "b", "c", "open"] * 2
    assert list(rows[0]) == ["word", "offset"]


def test_columns(options):
    rows, _ = read({**options, "columns": "n,offset"})
    assert list(rows[0]) == ["n", "offset"]
    schema = GazetteDataSource(options).schema()
    assert schema.names == [
        "journal", "offset", "uuid", "producer", "clock", "timestamp", "flags", "word", "n", "more",
    ]  # fmt: skip
    schema = GazetteDataSource({**options, "meta_prefix": "_"}).schema()
    # The message's own UUID is a field like others then.
    assert schema.names[:3] == ["_journal", "_offset", "_uuid"]
    assert "uuid" in schema.names
    schema = GazetteDataSource({**options, "fields": "n INT", "value": "json"}).schema()
    assert schema["n"].dataType.simpleString() == "int"
    for given, message in [
        ({"columns": "nope"}, "option columns: there are no such columns: nope"),
        ({"fields": "n nothing"}, "option fields: not columns"),
        ({"fields": "timestamp STRING"}, "option meta_prefix: messages have fields of the same"),
    ]:
        with pytest.raises(Invalid, match=message):
            GazetteDataSource({**options, **given}).schema()
    with pytest.raises(Invalid, match="column timestamp is of type"):
        read(options, "timestamp string")
    required = struct("word string")
    required.fields[0].nullable = False
    with pytest.raises(Invalid, match="may be null"):
        GazetteDataSource(options).reader(required).partitions()


def test_text(options):
    rows, _ = read({**options, "value": "text", "columns": "value"})
    assert rows[0]["value"].startswith('{"uuid":"')


@pytest.mark.parametrize(
    ("filters", "words", "partitions"),
    [
        ([EqualTo(("journal",), "topic/b")], [10, 11, 12], 3),
        ([In(("journal",), ("topic/b", "x"))], [10, 11, 12], 3),
        ([StringStartsWith(("journal",), "topic/a")], [0, 1, 2], 3),
        ([EqualTo(("journal",), "nope")], [], 0),
        ([IsNotNull(("n",)), GreaterThan(("n",), 5)], [0, 1, 2, 10, 11, 12], 6),
        ([LessThan(("offset",), 1)], [0, 10], 2),
        ([GreaterThan(("offset",), 0), LessThanOrEqual(("offset",), 71)], [1, 11], 2),
        ([GreaterThanOrEqual(("clock",), NOON + 480)], [2, 12], 4),
        ([LessThan(("clock",), NOON + 320)], [0, 10], 2),
    ],
)
def test_filters_leave_out_runs_and_rows(options, filters, words, partitions):
    """And never what commits the rest: an acknowledgement may be behind the last offset asked for."""
    filters = [*filters]
    rows, count = read({**options, "pushdown": "true"}, "n bigint, offset bigint", filters)
    assert [row["n"] for row in rows] == words
    assert count == partitions


def test_time_filters(options):
    import datetime

    time = datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC)
    micros = datetime.timedelta(microseconds=1)
    pushed = {**options, "pushdown": "true"}
    for filters, want in [
        ([EqualTo(("timestamp",), time + 2 * micros)], [1, 11]),
        ([GreaterThan(("timestamp",), time + 2 * micros)], [2, 12]),
        ([LessThanOrEqual(("timestamp",), time + 2 * micros)], [0, 1, 10, 11]),
    ]:
        rows, _ = read(pushed, "n bigint", filters)
        assert [row["n"] for row in rows] == want
    rows, _ = read({**options, "begin_time": "1700000000.000003"}, "n bigint")
    assert [row["n"] for row in rows] == [2, 12]


def test_a_reader_offers_filters_only_where_spark_takes_them(options):
    """Spark refuses a reader that does while the setting is off, and it is by default."""
    schema = struct("n int")
    from pyspark.sql.datasource import DataSourceReader

    plain = GazetteDataSource(options).reader(schema)
    assert type(plain).pushFilters is DataSourceReader.pushFilters
    pushing = GazetteDataSource({**options, "pushdown": "true"}).reader(schema)
    assert type(pushing).pushFilters is not DataSourceReader.pushFilters


def test_what_cannot_be_told_committed(options):
    with pytest.raises(Invalid, match="UUIDs of protobuf messages cannot be told"):
        read({**options, "content_type": "application/x-protobuf-fixed"}, "value binary")
    with pytest.raises(Invalid, match="bytes that are no messages do not commit"):
        read({**options, "content_type": "application/octet-stream"}, "value binary")
    rows, _ = read(
        {
            **options,
            "journal": "topic/a",
            "content_type": "application/octet-stream",
            "isolation": "read_uncommitted",
        },
        "value binary",
    )
    assert b"".join(row["value"] for row in rows) == b"".join(history())


def test_nothing_to_infer_from(options):
    with pytest.raises(Invalid, match="option fields: there is no message to tell the fields from"):
        GazetteDataSource({**options, "journal": "topic/none"}).schema()


def test_not_a_plan():
    with pytest.raises(Invalid, match="option plan: not a plan"):
        decode_plan("nonsense")
