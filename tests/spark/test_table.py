"""The table reader, in this process: Spark calls nothing else."""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from gazette.auth import KeyedAuth
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Invalid, NotAllowed, NotFound
from gazette.history.ddl import parse_columns
from gazette.history.spark.source.source import GazetteDataSource
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.framing.frames import MalformedMessage
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    build_uuid,
    clock_at,
    uuid_text,
)
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.stored import json_line, write_journal
from tests.facts import raises

STORE = "file:///fragments/"
KEYS = base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
ALPHA = bytes([1, 0, 0, 0, 0, 1])
NOON = clock_at(1_700_000_000 * 10**9)


def struct(text: str) -> Any:
    return from_arrow_schema(parse_columns(text), prefer_timestamp_ntz=False)


def history(first: int = 0) -> list[bytes]:
    """Write three fragments: a committed transaction over two, and an open one."""

    def line(at: int, flags: int, **fields: object) -> bytes:
        return json_line(fields, build_uuid(ALPHA, NOON + at * 160, flags))

    return [
        line(1, CONTINUE_TXN, word="a", n=first) + line(2, CONTINUE_TXN, word="b", n=first + 1),
        line(3, CONTINUE_TXN, word="c", n=first + 2, more={"x": 1.5}) + line(4, ACK_TXN),
        line(5, CONTINUE_TXN, word="open", n=first + 3),
    ]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    write_journal(tmp_path, STORE, "topic/a", history(), Codec.GZIP)
    write_journal(tmp_path, STORE, "topic/b", history(10), Codec.ZSTANDARD)
    return {
        "store": f"file://{tmp_path}/fragments",
        "journal": "topic/a,topic/b",
        "maxPartitionBytes": "1",
    }


def read(options: Any, schema: str | None = None) -> tuple[list[Any], int]:
    """Read as Spark does: from one process to the next."""
    source = GazetteDataSource(options)
    parsed = source.schema() if schema is None else struct(schema)
    reader = pickle.loads(pickle.dumps(source.reader(parsed)))
    partitions = reader.partitions()
    assert isinstance(partitions, list)
    rows = []
    for partition in partitions or [InputPartition(None)]:
        for batch in pickle.loads(pickle.dumps(reader)).read(pickle.loads(pickle.dumps(partition))):
            assert isinstance(batch, pa.RecordBatch)
            rows += batch.to_pylist()
    return rows, len(partitions)


def test_what_has_committed(options: dict[str, str]) -> None:
    rows, count = read(options)
    assert [row["word"] for row in rows] == ["a", "b", "c"] * 2
    assert [row["n"] for row in rows] == [0, 1, 2, 10, 11, 12]
    assert rows[2]["more"] == {"x": 1.5}
    assert {row["journal"] for row in rows} == {"topic/a", "topic/b"}
    assert count == 6
    rows, _ = read({**options, "isolation": "read_uncommitted"}, "word string, offset bigint")
    assert [row["word"] for row in rows] == ["a", "b", "c", "open"] * 2
    assert list(rows[0]) == ["word", "offset"]


def test_columns(options: dict[str, str]) -> None:
    rows, _ = read({**options, "columns": "n,offset"})
    assert list(rows[0]) == ["n", "offset"]
    schema = GazetteDataSource(options).schema()
    assert schema.names == [
        "journal", "offset", "uuid", "producer", "clock", "timestamp", "flags", "word", "n", "more",
    ]  # fmt: skip
    schema = GazetteDataSource({**options, "metaPrefix": "_"}).schema()
    # The message's own UUID is a field like others then.
    assert schema.names[:3] == ["_journal", "_offset", "_uuid"]
    assert "uuid" in schema.names
    schema = GazetteDataSource({**options, "fields": "n INT", "value": "json"}).schema()
    assert schema["n"].dataType.simpleString() == "int"
    for given, option, name in [
        ({"columns": "nope"}, "columns", "nope"),
        ({"fields": "n nothing"}, "fields", "nothing"),
        ({"fields": "timestamp STRING"}, "metaPrefix", "timestamp"),
    ]:
        with raises(Invalid, path=f"option {option}", says=name):
            GazetteDataSource({**options, **given}).schema()
    with raises(Invalid, path="timestamp", says="not string"):
        read(options, "timestamp string")
    required = struct("word string")
    required.fields[0].nullable = False
    with raises(Invalid, path="word", says="NOT NULL"):
        GazetteDataSource(options).reader(required).partitions()


def test_a_table_without_columns_has_rows(options: dict[str, str]) -> None:
    source = GazetteDataSource(options)
    reader = source.reader(StructType([]))
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert sum(batch.num_rows for batch in batches) == 6


def test_names_of_columns(tmp_path: Path) -> None:
    """A field may have any name. What Spark or a journal has twice is an error that says so."""
    line = b'{"":1,"a.b":2,"`q`":3,"N":4,"n":5,"s":{"":6,"x":7},"Flags":8}\n'
    write_journal(tmp_path, STORE, "topic/a", [line * 3])
    given = {"store": f"file://{tmp_path}/fragments", "journal": "topic/a"}
    schema = "`` long, `a.b` long, ```q``` long, N long, n long, s struct<``: long, x: long>"
    rows, _ = read(given, schema)
    assert rows == [{"": 1, "a.b": 2, "`q`": 3, "N": 4, "n": 5, "s": {"": 6, "x": 7}}] * 3
    for name, prefix in (("OFFSET", ""), ("Flags", ""), ("_Journal", "_")):
        with raises(Invalid, path=name, advises="metaPrefix"):
            read({**given, "metaPrefix": prefix}, f"n long, {name} long")
    with raises(Invalid, path="Flags", advises="metaPrefix"):
        read(given)
    assert read({**given, "metaPrefix": "_"}, "Flags long, _flags int")[0][0]["Flags"] == 8
    inferred = GazetteDataSource({**given, "metaPrefix": "_"}).schema()
    # As in Spark, a field without a name is not inferred.
    assert inferred.names[7:] == ["a.b", "`q`", "N", "n", "s", "Flags"]
    twice = StructType([StructField("x", LongType()), StructField("x", StringType())])
    for kind, path in ((twice, "x"), (StructType([StructField("s", ArrayType(twice))]), "s.x")):
        with raises(Invalid, path=path):
            GazetteDataSource(given).reader(kind).partitions()


def test_text(options: dict[str, str]) -> None:
    rows, _ = read({**options, "value": "text", "columns": "value"})
    assert rows[0]["value"].startswith('{"uuid":"')


def test_time_bounds(options: dict[str, str]) -> None:
    rows, _ = read({**options, "startingTimestamp": "1700000000.000003"}, "n bigint")
    assert [row["n"] for row in rows] == [2, 12]
    rows, _ = read({**options, "endingTimestamp": "1700000000.000002"}, "n bigint")
    assert [row["n"] for row in rows] == [0, 10]


def test_what_is_not_known_to_be_committed(options: dict[str, str]) -> None:
    with raises(Invalid, path="option.message"):
        read({**options, "contentType": "application/x-protobuf-fixed"}, "value binary")
    with raises(Invalid, path="option.isolation"):
        read({**options, "contentType": "application/octet-stream"}, "value binary")
    rows, _ = read(
        {
            **options,
            "journal": "topic/a",
            "contentType": "application/octet-stream",
            "isolation": "read_uncommitted",
        },
        "value binary",
    )
    assert b"".join(row["value"] for row in rows) == b"".join(history())


def test_columns_are_inferred_outside_of_empty_bounds(options: dict[str, str]) -> None:
    given = {**options, "journal": "topic/a"}
    inferred = GazetteDataSource(given).schema()
    assert "word" in inferred.names
    assert GazetteDataSource({**given, "endingOffsets": "0"}).schema() == inferred


def test_a_journal_that_the_store_does_not_have(options: dict[str, str]) -> None:
    """A name that is mistyped is no empty table."""
    for name in ("topic/none", "topic/a,topic/none"):
        given = {**options, "journal": name}
        with raises(NotFound, "stores", journal="topic/none"):
            GazetteDataSource(given).schema()
        for isolation in ("read_committed", "read_uncommitted"):
            with raises(NotFound, "stores", journal="topic/none"):
                read({**given, "isolation": isolation}, "word string")


def test_csv_rows_and_a_header(tmp_path: Path) -> None:
    """The first column is the UUID, whatever a first line calls it: CSV of journals has no header."""
    uuids = [uuid_text(build_uuid(ALPHA, NOON + at * 160, OUTSIDE_TXN)) for at in (1, 2)]
    rows = [f'{uuids[0]},"a, ""b""",1\n'.encode(), f"{uuids[1]},,\n".encode()]
    write_journal(tmp_path, STORE, "topic/csv", rows)
    write_journal(tmp_path, STORE, "topic/head", [b"uuid,word,n\n", *rows])
    given = {"store": f"file://{tmp_path}/fragments", "value": "csv"}
    found, _ = read({**given, "journal": "topic/csv"}, "word string, n long, uuid string")
    assert [tuple(row.values()) for row in found] == [('a, "b"', 1, uuids[0]), ("", None, uuids[1])]
    assert GazetteDataSource({**given, "journal": "topic/csv"}).schema().names[-2:] == ["c1", "c2"]
    found, _ = read({**given, "journal": "topic/head"}, "word string, n long")
    assert [tuple(row.values()) for row in found] == [("word", None), ('a, "b"', 1), ("", None)]
    failing = {**given, "journal": "topic/head", "mode": "FAILFAST"}
    with raises(MalformedMessage, journal="topic/head", begin=0) as raised:
        read(failing, "word string, n long")
    assert "mode=DROPMALFORMED" in raised.value.__notes__[0]
    skipped = {**given, "journal": "topic/head", "mode": "DROPMALFORMED"}
    assert [row["n"] for row in read(skipped, "word string, n long")[0]] == [1, None]
    # Fields have no names: read as what it is not, a field would be another one.
    named = {**given, "journal": "topic/csv", "fields": "word string, n long"}
    assert [row["word"] for row in read({**named, "columns": "offset,word"})[0]] == ['a, "b"', ""]
    for wrong in ({**named, "columns": "n"}, {**named, "columns": "n,word"}):
        with raises(Invalid, path="option columns", says="n"):
            read(wrong)
    inferred = {**given, "journal": "topic/csv", "columns": "c2"}
    with raises(Invalid, path="option columns", says="c2"):
        read(inferred)
    assert [row["c1"] for row in read({**inferred, "columns": "c1"})[0]] == ['a, "b"', ""]


async def test_journals_of_brokers(etcd: Etcd, tmp_path: Path) -> None:
    """By selectors of labels: of several content types, empty ones, and ones that nothing is stored of."""
    auth = KeyedAuth.parse(SystemClock(), KEYS)
    json_type, csv_type = (
        LabelSet.of((CONTENT_TYPE, kind), ("team", team))
        for kind, team in ((CONTENT_JSON_LINES, "one"), (CONTENT_CSV, "two"))
    )
    async with await BrokerFixture.start(etcd, tmp_path, auth=auth, lease_ttl_s=60.0) as broker:
        await broker.create(
            journal_spec("topic/a", labels=json_type),
            journal_spec("topic/b", labels=json_type),
            journal_spec("topic/csv", labels=csv_type),
            journal_spec("topic/none"),
        )
        given = {"broker.address": broker.endpoint}

        def play() -> dict[str, str]:
            with pytest.raises(NotAllowed) as raised:
                read({**given, "selector": "team=one"}, "n long")
            assert "Set the option broker.authKeys" in raised.value.__notes__[0]
            keyed = {**given, "broker.authKeys": KEYS}
            with raises(Invalid, path="option fields", says="infer"):
                read({**keyed, "selector": "team=one"})
            assert read({**keyed, "selector": "team=one"}, "n long, word string")[0] == []
            return keyed

        keyed = await asyncio.to_thread(play)
        lines = [
            json_line({"n": n, "nested": {"x": [n]}}, build_uuid(ALPHA, NOON + n, OUTSIDE_TXN))
            for n in (1, 2)
        ]
        await broker.client.append(AppendParams("topic/a"), lines[0])
        await broker.client.append(AppendParams("topic/b"), lines[1])

        def play_on() -> None:
            rows, _ = read({**keyed, "selector": "team in (one)"})
            assert [(row["journal"], row["n"], row["nested"]) for row in rows] == [
                ("topic/a", 1, {"x": [1]}),
                ("topic/b", 2, {"x": [2]}),
            ]
            with raises(Invalid, path="option value", says="csv, json"):
                read({**keyed, "selector": "team"}, "n long")
            texts, _ = read({**keyed, "selector": "team", "value": "text"}, "value string")
            assert len(texts) == 2
            # Without a label it is taken for JSON lines.
            assert read({**keyed, "journal": "topic/none"}, "n long")[0] == []

        await asyncio.to_thread(play_on)
