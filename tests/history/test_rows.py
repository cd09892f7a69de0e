"""Rows of runs, in every format, against the messages that were written."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from word_count import ngram_pb2

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.history.first_pass import fold_by_threads
from gazette.history.meta_columns import META
from gazette.history.protobuf_rows import protobuf_schema
from gazette.history.row_format import RowFormat
from gazette.history.rows import Unfit, read_rows
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_CSV, CONTENT_PROTO_FIXED
from gazette.message.framing.framing import framing_of
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    build_uuid,
    clock_at,
    uuid_text,
)
from gazette.protocol.fragment import Codec
from gazette.testing.stored import json_line, write_journal
from tests.facts import raises

STORE, JOURNAL = "file:///fragments/", "topic/one"
ALPHA = bytes([1, 0, 0, 0, 0, 0xAB])
NOON = clock_at(1_700_000_000_123_456_000)
NGRAM = "word_count.ngram_pb2:NGramCount"
ALL_META = tuple((name, name) for name in META)


def rows(
    root: Path,
    format: RowFormat,
    shape: MessageFormat = MessageFormat(),
    *,
    uncommitted: bool = False,
) -> list[dict[str, Any]]:
    access = Access.of(file_root=root, direct=True)
    selection = Selection(journals=(JOURNAL,), stores=(STORE,), shape=shape)
    format.validate()
    with access.open() as opened:
        snapshot = take_snapshot(opened, selection)
        runs = (
            snapshot.runs(1) if uncommitted else fold_by_threads(opened, snapshot, run_bytes=1).runs
        )
        found = [b for run in runs if format.selects(run) for b in read_rows(opened, run, format)]
    rows: list[dict[str, Any]] = pa.Table.from_batches(found, format.schema).to_pylist()
    return rows


def json_format(
    *fields: tuple[str, pa.DataType], meta: tuple[tuple[str, str], ...] = (), **options: Any
) -> RowFormat:
    schema = pa.schema([*((name, META[key]) for name, key in meta), *fields])
    return RowFormat("json", schema, meta, **options)


def test_meta_columns(tmp_path: Path) -> None:
    write_journal(
        tmp_path,
        STORE,
        JOURNAL,
        [
            json_line({"word": "a"}, build_uuid(ALPHA, NOON + 7, OUTSIDE_TXN)) + b'{"word":"b"}\n',
        ],
        Codec.ZSTANDARD,
    )
    first, second = rows(tmp_path, json_format(("word", pa.string()), meta=ALL_META))
    assert first == {
        "journal": JOURNAL,
        "offset": 0,
        "uuid": uuid_text(build_uuid(ALPHA, NOON + 7, OUTSIDE_TXN)),
        "producer": "0100000000ab",
        "clock": NOON + 7,
        "timestamp": datetime.datetime(2023, 11, 14, 22, 13, 20, 123456, datetime.UTC),
        "flags": 0,
        "word": "a",
    }
    # A message without a UUID has been committed, and has no time.
    assert second["uuid"] is second["timestamp"] is None
    assert (second["word"], second["clock"]) == ("b", 0)


def test_committed_and_uncommitted(tmp_path: Path) -> None:
    lines = [
        json_line({"n": 1}, build_uuid(ALPHA, 10, CONTINUE_TXN)),
        json_line({"n": 1}, build_uuid(ALPHA, 10, CONTINUE_TXN)),
        json_line({}, build_uuid(ALPHA, 11, ACK_TXN)),
        json_line({"n": 2}, build_uuid(ALPHA, 12, CONTINUE_TXN)),
    ]
    write_journal(tmp_path, STORE, JOURNAL, lines)
    format = json_format(("n", pa.int64()))
    assert rows(tmp_path, format) == [{"n": 1}]
    assert rows(tmp_path, format, uncommitted=True) == [{"n": 1}, {"n": 1}, {"n": 2}]
    format = json_format(("n", pa.int64()), acks=True)
    assert rows(tmp_path, format) == [{"n": 1}, {"n": None}]
    assert len(rows(tmp_path, format, uncommitted=True)) == 4


def test_json_of_any_type(tmp_path: Path) -> None:
    """Plain types, and those of which JSON has only texts."""
    document = {
        "text": "ü", "deep": {"list": [1, 2]}, "time": "2024-01-02T03:04:05Z", "day": "2024-01-02",
        "money": "1.50", "raw": "aGk=", "map": {"a": 1}, "number": 3, "else": True,
    }  # fmt: skip
    write_journal(tmp_path, STORE, JOURNAL, [json_line(document) + b'{"number":null}\n'])
    plain = [
        ("text", pa.string()),
        ("deep", pa.struct([("list", pa.list_(pa.int64())), ("gone", pa.string())])),
        ("number", pa.float64()),
        ("absent", pa.bool_()),
    ]
    want = {
        "text": "ü", "deep": {"list": [1, 2], "gone": None}, "number": 3.0, "absent": None,
    }  # fmt: skip
    found = rows(tmp_path, json_format(*plain))
    assert found[0] == want
    assert found[1]["number"] is None
    special = [
        ("time", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("money", pa.decimal128(10, 2)),
        ("raw", pa.binary()),
        ("number", pa.string()),
    ]
    assert rows(tmp_path, json_format(*special))[0] == {
        "time": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "day": datetime.date(2024, 1, 2),
        "money": decimal.Decimal("1.50"),
        "raw": b"hi",
        "number": "3",
    }
    (mapped, _) = rows(tmp_path, json_format(("map", pa.map_(pa.string(), pa.int64()))))
    assert mapped == {"map": [("a", 1)]}


def test_a_message_that_does_not_fit(tmp_path: Path) -> None:
    lines = [json_line({"n": n}, build_uuid(ALPHA, 10 + i, 0)) for i, n in enumerate([1, "x", 3])]
    write_journal(tmp_path, STORE, JOURNAL, [b"".join(lines)])
    format = json_format(("n", pa.int64()))
    with raises(Unfit, "begin", journal="topic/one", says='n: "x"') as raised:
        rows(tmp_path, format)
    assert raised.value.facts["begin"] == len(lines[0])
    assert rows(tmp_path, format, MessageFormat(malformed="skip")) == [{"n": 1}, {"n": 3}]


def test_bounds(tmp_path: Path) -> None:
    lines = [json_line({"n": n}, build_uuid(ALPHA, 10 + n, 0)) for n in range(6)]
    write_journal(tmp_path, STORE, JOURNAL, [b"".join(lines[:3]), b"".join(lines[3:])])
    n = ("n", pa.int64())
    assert [r["n"] for r in rows(tmp_path, json_format(n, clock_begin=12, clock_end=14))] == [2, 3]
    format = json_format(n, clock_begin=13)
    access = Access.of(file_root=tmp_path, direct=True)
    with access.open() as opened:
        snapshot = take_snapshot(opened, Selection(journals=(JOURNAL,), stores=(STORE,)))
        runs = fold_by_threads(opened, snapshot, run_bytes=1).runs
    assert [format.selects(run) for run in runs] == [False, True]


def test_csv(tmp_path: Path) -> None:
    uuid = uuid_text(build_uuid(ALPHA, 10, 0))
    text = f'{uuid},"a, b",7,\n{uuid[:7]}f{uuid[8:]},c,,2024-01-01\n'
    write_journal(tmp_path, STORE, JOURNAL, [text.encode()])
    schema = pa.schema([("word", pa.string()), ("n", pa.int32()), ("day", pa.date32())])
    found = rows(tmp_path, RowFormat("csv", schema), MessageFormat(CONTENT_CSV))
    assert found == [
        {"word": "a, b", "n": 7, "day": None},
        {"word": "c", "n": None, "day": datetime.date(2024, 1, 1)},
    ]


@pytest.mark.parametrize("type_", [pa.int8(), pa.int32(), pa.int64()], ids=str)
def test_an_integer_of_csv_has_only_decimal_digits(tmp_path: Path, type_: pa.DataType) -> None:
    texts = ["-7", "007", "0x1F", "0XFF", "0xFFFFFFFF", "7"]
    lines = [
        f"{uuid_text(build_uuid(ALPHA, 10 + n, 0))},{text}\n".encode()
        for n, text in enumerate(texts)
    ]
    write_journal(tmp_path, STORE, JOURNAL, lines)
    format = RowFormat("csv", pa.schema([("n", type_)]))
    found = rows(tmp_path, format, MessageFormat(CONTENT_CSV, malformed="null"))
    assert [row["n"] for row in found] == [-7, 7, None, None, None, 7]


def test_the_uuid_of_csv_may_be_a_field(tmp_path: Path) -> None:
    """With another prefix of metadata, ``uuid`` is a field as any other."""
    uuid = uuid_text(build_uuid(ALPHA, 10, 0))
    write_journal(tmp_path, STORE, JOURNAL, [f"{uuid},a,b\n".encode()])
    schema = pa.schema([(name, pa.string()) for name in ("_uuid", "uuid", "one", "two")])
    format = RowFormat.of("csv", schema, "_")
    (row,) = rows(tmp_path, format, MessageFormat(CONTENT_CSV))
    assert row == {"_uuid": uuid, "uuid": uuid, "one": "a", "two": "b"}


def test_protobuf(tmp_path: Path) -> None:
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    message = ngram_pb2.NGramCount(uuid=build_uuid(ALPHA, 10, 0), n_gram="a b", count=7)
    write_journal(tmp_path, STORE, JOURNAL, [framing.encode(message)])
    shape = MessageFormat(CONTENT_PROTO_FIXED, message=NGRAM)
    schema = protobuf_schema(ngram_pb2.NGramCount)
    fields = pa.schema([field for field in schema if field.name != "uuid"])
    (row,) = rows(tmp_path, RowFormat("protobuf", fields), shape)
    assert row["n_gram"] == "a b"
    assert row["count"] == 7
    with raises(Invalid, path="nope"):
        rows(tmp_path, RowFormat("protobuf", pa.schema([("nope", pa.string())])), shape)
    with raises(Invalid, path="message", says="'nope'"):
        rows(
            tmp_path,
            RowFormat("protobuf", fields),
            MessageFormat(CONTENT_PROTO_FIXED, message="nope"),
        )


TEXTS = (
    "2024-01-31T12:00:00.1234567+02:00",
    "2024-01-31 12:00:00",
    "2024-1-31",
    "2024",
    "-12",
    "1,234.565",
    "-1e2",
    "YWJj",
    "yes",
)


@pytest.mark.parametrize(
    "type_",
    [
        pa.timestamp("us", "UTC"),
        pa.timestamp("us"),
        pa.date32(),
        pa.decimal128(9, 2),
        pa.binary(),
        pa.string(),
    ],
    ids=str,
)
def test_a_text_becomes_the_same_value_from_every_encoding(
    tmp_path: Path, type_: pa.DataType
) -> None:
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    uuids = [build_uuid(ALPHA, 10 + n, 0) for n in range(len(TEXTS))]
    contents = {
        "json": [json_line({"n_gram": t}, uuid) for t, uuid in zip(TEXTS, uuids, strict=True)],
        "csv": [
            f'{uuid_text(uuid)},"{t}"\n'.encode() for t, uuid in zip(TEXTS, uuids, strict=True)
        ],
        "protobuf": [
            framing.encode(ngram_pb2.NGramCount(uuid=uuid, n_gram=t))
            for t, uuid in zip(TEXTS, uuids, strict=True)
        ],
    }
    shapes = {
        "json": MessageFormat(malformed="null"),
        "csv": MessageFormat(CONTENT_CSV, malformed="null"),
        "protobuf": MessageFormat(CONTENT_PROTO_FIXED, message=NGRAM, malformed="null"),
    }
    found = {}
    for value, lines in contents.items():
        write_journal(tmp_path / value, STORE, JOURNAL, lines)
        format = RowFormat(value, pa.schema([("n_gram", type_)]))  # type: ignore[arg-type]
        found[value] = rows(tmp_path / value, format, shapes[value])
    assert found["csv"] == found["json"]
    assert found["protobuf"] == found["json"]
    assert any(row["n_gram"] is not None for row in found["json"])


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (pa.timestamp("us", "UTC"), datetime.datetime.fromtimestamp(1700000000, datetime.UTC)),
        (pa.timestamp("us"), None),
        (pa.date32(), None),
        (pa.string(), "1700000000"),
        (pa.decimal128(12, 2), decimal.Decimal("1700000000.00")),
    ],
    ids=str,
)
def test_a_number_of_protobuf_becomes_what_that_of_json_becomes(
    tmp_path: Path, type_: pa.DataType, expected: Any
) -> None:
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    uuid = build_uuid(ALPHA, 10, 0)
    schema = pa.schema([("count", type_)])
    number = 1700000000
    message = ngram_pb2.NGramCount(uuid=uuid, count=number)
    write_journal(tmp_path / "protobuf", STORE, JOURNAL, [framing.encode(message)])
    write_journal(tmp_path / "json", STORE, JOURNAL, [json_line({"count": number}, uuid)])
    shape = MessageFormat(CONTENT_PROTO_FIXED, message=NGRAM, malformed="null")
    found = rows(tmp_path / "protobuf", RowFormat("protobuf", schema), shape)
    json = MessageFormat(malformed="null")
    assert (
        found == rows(tmp_path / "json", RowFormat("json", schema), json) == [{"count": expected}]
    )


def test_payloads(tmp_path: Path) -> None:
    line = json_line({"n": 1}, build_uuid(ALPHA, 10, 0))
    write_journal(tmp_path, STORE, JOURNAL, [line])
    text = RowFormat("text", pa.schema([("value", pa.string())]))
    assert rows(tmp_path, text) == [{"value": line[:-1].decode()}]
    raw = RowFormat("binary", pa.schema([("value", pa.binary())]))
    assert rows(tmp_path, raw) == [{"value": line[:-1]}]
    with raises(Invalid, says="value=text"):
        rows(tmp_path, RowFormat("text", pa.schema([("value", pa.int64())])))
    with raises(Invalid, path="offset", says="int64"):
        wrong = RowFormat("text", pa.schema([("offset", pa.string())]), (("offset", "offset"),))
        rows(tmp_path, wrong)
