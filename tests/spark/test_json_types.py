# ruff: noqa: E501
"""JSON as columns: the same value that ``spark.read.json`` gives for the same line, or null where it gives null.

Spark itself is the oracle. Every type is read from a line of every value, once through each path of ours:
the compiled scanner, and the specification that reads message by message.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType, _parse_datatype_string

from gazette.history.infer import infer_json
from gazette.history.json_values import JsonRow
from gazette.history.spark.source.schema import _encode_variant
from gazette.testing.stored import write_journal
from tests.history.decimal_lines import DIGITS_MAX, columns, samples, units_found

pytestmark = [pytest.mark.spark, pytest.mark.long]

STORE = "file:///fragments/"

NUMBERS = [
    "0",
    "-0",
    "1",
    "-1",
    "127",
    "128",
    "-128",
    "-129",
    "32767",
    "32768",
    "2147483647",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "123456789012345678",
    "1234567890123456789",
    "123456789012345678901234567890",
    "16777217",
    "20240102",
    "1700000000",
    "1700000000123",
    "253402300800",
    "-62135596801",
    "9223372036854",
    "1.0",
    "1.5",
    "12.75",
    "-2.5",
    "0.1",
    "1.10",
    "-0.0",
    "0.5",
    "2.5",
    "0.30000000000000004",
    "1.00000017881393432617187499",
    "1700000000.5",
    "1700000000.123456789",
    "0.005",
    "0.015",
    "-0.005",
    "12.345",
    "123456.7",
    "99999999.99",
    "99999999.994",
    "99999999.995",
    "-99999999.995",
    "999999999.99",
    "1e2",
    "1E2",
    "1.0E+2",
    "1e-2",
    "1e5",
    "1e0",
    "0.1e1",
    "1e10",
    "1e18",
    "1e300",
    "1e-50",
    "1e400",
    "-1e400",
    "1E+400",
    "1e-400",
    "3.4028235e38",
    "3.5e38",
    "5e-324",
    "1.7976931348623157e308",
    "1.7976931348623159e308",
    "100000000000000000000",
]
TEXTS = [
    "", "1", "1.5", " 1", "x", "true", "NaN", "Infinity", "-Infinity", "+Infinity", "INF", "+INF", "-INF", "nan",
    "1e2", "12.345", "1,234.5", "1,,2", ",", "-", "+1.5", ".5", "5.", " 1.5", "1_0", "1e400", "0x1", "é😀", "a\\nb",
    "AQID", "AQI", "AQI=", "AQ==", "AQ==AQ==", "AQID\\n", "____", "!!",
    "2024-01-02", "2024-1-2", " 2024-01-02 ", "2024-01-02 x", "2024-01-02x", "2024-01", "2024-01-", "2024", "202-01-01",
    "12024-01-02", "+12345-01-01", "1234567-01-01", "12345678-01-01", "-0001-01-01", "0000-01-01", "0001-01-01",
    "2024-02-30", "2024-13-01", "2024-01-002", "2024/01/02", "20240102", "+5", "-5", "99999999999", "1700000000",
    "2024-01-02T03:04:05", "2024-01-02 03:04:05", "2024-01-02T03:04:05Z", "2024-01-02T03:04:05.1",
    "2024-01-02T03:04:05.123456", "2024-01-02T03:04:05.123456789Z", "2024-01-02T03:04:05.", "2024-01-02T03:04:05.Z",
    "2024-01-02T03:04:05 Z", "2024-01-02T03:04:05UTC", "2024-01-02T03:04:05 UTC", "2024-01-02T03:04:05GMT+1",
    "2024-01-02T03:04:05 GMT+01:00", "2024-01-02T03:04:05+1", "2024-01-02T03:04:05+01", "2024-01-02T03:04:05+1:30",
    "2024-01-02T03:04:05+02:00", "2024-01-02T03:04:05+0200", "2024-01-02T03:04:05+18:00", "2024-01-02T03:04:05+18:01",
    "2024-01-02T03:04:05+01:02:03", "2024-01-02T03:04:05+010203", "2024-01-02T03:04:05-00:00",
    "2024-01-02T03:04:05+01:60", "2024-01-02T03:04:05 +01:00", "2024-01-02T03:04Z", "2024-01-02T03Z", "2024-01-02Z",
    "2024-01-02T03:04", "2024-01-02T03", "2024-01-02T3:4:5", "2024-01-02T", "2024-01-02  03:04:05",
    "2024-01-02T24:00:00", "2024-01-02T03:60:00", "2024-01-02T03:04:60Z", "2024-01-02T03:04:05,123Z",
    "2024-01-02T03:04:05z", "2024-01-02t03:04:05Z", "2024-01-02T03:04:05 Europe/Berlin",
    "2024-01-02T03:04:05America/New_York", "2024-01-02T03:04:05 EST", "2024-01-02T03:04:05 CET",
    "2024-01-02T03:04:05 PST", "2024-01-02T03:04:05[Europe/Paris]", "2024-01-02T03:04:05 Nowhere/City",
    "2024-03-31T02:30:00 Europe/Berlin", "2024-10-27T02:30:00 Europe/Berlin", "2024-01-02T03:04:05utc",
    "9999-12-31T23:59:59.999999Z", "-0001-01-01T00:00:00Z", "294247-01-10T04:00:54.775807Z",
    "294248-01-10T04:00:54.775807Z", "20240102T030405Z",
]  # fmt: skip
NESTED = [
    "{}", '{"x":1}', '{"x":1.5}', '{"x":"1"}', '{"x":null}', '{"y":2}', '{"x":1,"y":2.5}', '{"x":true}',
    '{"x":{"y":1}}', '{"x":{"y":1.5}}', '{"x":[1,2.5]}', '{"x":[1]}', '{"x":1.50,"y":{"z" : 1}}', "[]", "[1]",
    "[1,2.5]", "[1,null]", '["a"]', "[[1]]", "[[1],[2.5]]", '[{"x":1},{"x":1.5}]', "[null]", "[{}]",
    '[{"x":1},2]', '[1.50,{"a" : 1},"x",null,true]', '{"x" :  1 , "y":[1, 2]}', '{"x":"\\u0041"}',
]  # fmt: skip
VALUES = [
    "null", "true", "false", *NUMBERS, *(f'"{text}"' for text in TEXTS), '"\\u0041\\/\\ud83d\\ude00"', *NESTED,
]  # fmt: skip

SCALARS = [
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "decimal(10,2)", "decimal(38,18)",
    "decimal(5,0)", "decimal(3,3)", "string", "binary", "date", "timestamp", "timestamp_ntz",
]  # fmt: skip
TYPES = [
    *SCALARS, "variant", "array<bigint>", "array<double>", "array<string>", "array<array<bigint>>",
    "array<struct<x:bigint>>", "array<timestamp>", "map<string,string>", "map<string,bigint>",
    "map<string,struct<x:bigint>>", "struct<x:bigint>", "struct<x:double>", "struct<x:string>",
    "struct<x:struct<y:bigint>,y:bigint>", "struct<x:array<bigint>>", "struct<x:decimal(10,2)>",
]  # fmt: skip

WRAPPED = {
    ("tinyint", "128"), ("timestamp", "9223372036854775807"), ("timestamp", "-9223372036854775808"),
    ("timestamp", "123456789012345678"), ("timestamp", "1234567890123456789"),
}  # fmt: skip
"""Where Spark wraps around and gives another number: ours is null."""


@pytest.fixture(autouse=True)
def utc(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set UTC: times without a zone are UTC in journals, and in Spark those of the session."""
    if "spark" not in request.fixturenames:
        yield
        return
    conf, key = request.getfixturevalue("spark").conf, "spark.sql.session.timeZone"
    before = conf.get(key)
    conf.set(key, "UTC")
    yield
    conf.set(key, before)


def schema_of(kind: str) -> StructType:
    found = _parse_datatype_string(f"a {kind}, z bigint, _corrupt_record string")
    assert isinstance(found, StructType)
    return found


def lines_of(values: list[str]) -> bytes:
    return b"".join(b'{"a":%s,"z":%d}\n' % (v.encode(), z) for z, v in enumerate(values))


def by_spark(spark: Any, schema: StructType, path: Path) -> list[tuple[str | None, bool]]:
    """Return the value of each line as text, and whether the line is corrupt."""
    frame = spark.read.schema(schema).json(str(path))
    return shown(frame)


def shown(frame: Any) -> list[tuple[str | None, bool]]:
    kind = frame.schema["a"].dataType.typeName()
    match kind:
        case "variant":
            text = "to_json(a)"
        case "binary":
            text = "hex(a)"
        case "map" | "struct" | "array":
            text = "if(a is null, null, to_json(struct(a), map('ignoreNullFields', 'false')))"
        case _:
            text = "cast(a as string)"
    rows = frame.selectExpr(f"{text} as s", "z", "_corrupt_record is not null as c").collect()
    return [(row.s, row.c) for row in rows]


@pytest.mark.parametrize("kind", TYPES)
def test_every_value_as_every_type(spark: Any, tmp_path: Path, kind: str) -> None:
    (tmp_path / "lines.json").write_bytes(lines_of(VALUES))
    write_journal(tmp_path, STORE, "topic/one", [lines_of(VALUES)])
    want = by_spark(spark, schema_of(kind), tmp_path / "lines.json")
    options = {"store": f"file://{tmp_path}/fragments", "journal": "topic/one"}
    frame = spark.read.format("gazette").options(**options).schema(schema_of(kind)).load()
    found = shown(frame)
    assert len(found) == len(want) == len(VALUES)
    wrong = [
        (value, ours, spark_s)
        for value, ours, spark_s in zip(VALUES, found, want, strict=True)
        if ours != spark_s and not _is_excused(kind, value, ours, spark_s)
    ]
    assert not wrong


def _is_excused(kind: str, value: str, ours: Any, of_spark: Any) -> bool:
    if (kind, value) in WRAPPED:
        return bool(ours == (None, True))
    # Two zeros, which are equal.
    return {ours[0], of_spark[0]} == {"0.0", "-0.0"} and ours[1] == of_spark[1]


def read_alone(kind: str, value: str) -> tuple[Any, bool]:
    """Return what the specification demands."""
    fields = to_arrow_schema(StructType(schema_of(kind).fields[:1]), timezone="UTC")
    values, misfits = JsonRow(fields, _encode_variant).read(b'{"a":%s}' % value.encode())
    return pa.array(values, fields.field(0).type).to_pylist()[0], bool(misfits)


@pytest.mark.parametrize(
    "kind", ["bigint", "double", "float", "string", "boolean", "struct<x:double>"]
)
def test_neighbours_of_a_line_change_nothing(tmp_path: Path, kind: str) -> None:
    """The scanner or the specification may read a line: its neighbours decide. Its values are the same."""
    from tests.spark.test_table import read

    for number, value in enumerate(VALUES):
        if value.startswith('"-0001') or "294247" in value:
            continue
        for name, other in (("alone", None), ("fits", "null"), ("fits-not", '"\\u0041", "a": [')):
            lines = [lines_of([value])]
            if other == "null":
                lines.append(b'{"a":null,"z":1}\n')
            elif other is not None:
                lines.append(b'{"a": no json\n')
            journal = f"topic/{number}-{name}"
            write_journal(tmp_path, STORE, journal, [b"".join(lines)])
            given = {"store": f"file://{tmp_path}/fragments", "journal": journal}
            rows, _ = read(given, f"a {kind}, _corrupt_record string")
            want, bad = read_alone(kind, value)
            assert _same(rows[0]["a"], want), (value, name)
            assert (rows[0]["_corrupt_record"] is not None) == bad, (value, name)
            assert len(rows) == len(lines)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)


@pytest.mark.parametrize(
    "lines",
    [
        ['{"a":1}', '{"a":1.5}'],
        ['{"a":123456789012345678901}', '{"a":1}'],
        ['{"a":123456789012345678901}', '{"a":1.5}'],
        ['{"a":1234567890123456789012345678901234567890123}'],
        ['{"a":9223372036854775808}'],
        ['{"a":1}', '{"a":"x"}'],
        ['{"a":true}', '{"a":1}'],
        ['{"a":null}'],
        ['{"a":[]}'],
        ['{"a":[1,2.5]}'],
        ['{"a":[1,"x"]}'],
        ['{"a":[null]}'],
        ['{"a":[[]]}', '{"a":[[1]]}'],
        ['{"a":[{"x":1},{"x":1.5,"y":1}]}'],
        ['{"a":{"x":1}}', '{"a":{"y":"q"}}'],
        ['{"a":{}}', '{"b":1}'],
        ['{"a":{"x":1}}', '{"a":1}'],
        ['{"a":[1]}', '{"a":{"x":1}}'],
        ['{"a":"2024-01-02T03:04:05Z"}'],
        ['{"a":1e2}'],
        ['{"a":1e400}'],
        ['{"a":null,"b":1}', '{"a":{"c":null}}'],
    ],
)
def test_what_is_inferred(spark: Any, tmp_path: Path, lines: list[str]) -> None:
    path = tmp_path / "lines.json"
    path.write_text("\n".join(lines) + "\n")
    want = to_arrow_schema(spark.read.json(str(path)).schema, timezone="UTC")
    assert infer_json(line.encode() for line in lines) == want


def test_modes(spark: Any, tmp_path: Path) -> None:
    lines = [b'{"a":1,"z":0}\n', b'{"a":"x","z":1}\n', b"no json\n", b'{"a":2,"z":3}\n']
    write_journal(tmp_path, STORE, "topic/one", [b"".join(lines)])
    (tmp_path / "lines.json").write_bytes(b"".join(lines))
    options = {"store": f"file://{tmp_path}/fragments", "journal": "topic/one"}
    for mode in ("PERMISSIVE", "DROPMALFORMED"):
        for corrupt in ("_corrupt_record", "broken"):
            schema = f"a bigint, z bigint, {corrupt} string"
            given = {"mode": mode, "columnNameOfCorruptRecord": corrupt}
            want = spark.read.options(**given).schema(schema).json(str(tmp_path / "lines.json"))
            found = spark.read.format("gazette").options(**options, **given).schema(schema).load()
            assert [tuple(row) for row in found.collect()] == [tuple(row) for row in want.collect()]
    failing = spark.read.format("gazette").options(**options, mode="failfast")
    with pytest.raises(Exception, match="mode=PERMISSIVE"):
        failing.schema("a bigint").load().collect()


def test_inferred_columns_do_not_lose_values(spark: Any, tmp_path: Path) -> None:
    """A value that no sampled message had is an error, unless a mode says otherwise."""
    late = b'{"a":12.75}\n'
    for name, lines in (("topic/long", 60_000), ("topic/short", 20)):
        early = b'{"a":1}\n' * lines
        write_journal(tmp_path, STORE, name, [early, early + late + early, early])
    reader = spark.read.format("gazette").option("store", f"file://{tmp_path}/fragments")
    sampled = reader.load("topic/long")
    assert sampled.schema["a"].dataType.simpleString() == "bigint"
    with pytest.raises(Exception, match=r"12\.75"):
        sampled.collect()
    whole = reader.load("topic/short")
    assert whole.schema["a"].dataType.simpleString() == "double"
    assert whole.where("a = 12.75").count() == 1


def test_decimals_of_all_digits_and_scales(spark: Any, tmp_path: Path) -> None:
    """The numbers that `tests/history` expects are those of Spark."""
    rng = random.Random(0)
    for precision in range(1, DIGITS_MAX + 1):
        given = samples(precision, rng)
        path = tmp_path / f"{precision}.json"
        path.write_bytes(b"".join(sample.line for sample in given))
        rows = spark.read.schema(columns(precision)).json(str(path)).collect()
        assert units_found(given, [row.asDict() for row in rows]) == given


def test_days_agree_with_the_calendar() -> None:
    for text in ("2000-02-29", "1970-01-01", "0001-01-01", "9999-12-31", "1600-03-01"):
        want = datetime.date.fromisoformat(text)
        assert read_alone("date", f'"{text}"') == (want, False)
