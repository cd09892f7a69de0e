"""Values of JSON as values of columns. Expected is what Spark gave in `tests/spark/test_json_types.py`."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from gazette.errors import Invalid
from gazette.history.json_values import JsonRow, value_reader
from tests.facts import raises

UTC = datetime.UTC
INSTANT = pa.timestamp("us", "UTC")
MISFIT = object()


def convert(kind: pa.DataType, value: str) -> object:
    (found,), misfits = JsonRow(pa.schema([("a", kind)])).read(b'{"b":1,"a":%s}' % value.encode())
    made = pa.array([found], kind).to_pylist()[0]
    assert made is None or not misfits or pa.types.is_nested(kind)
    return MISFIT if misfits and made is None else made


@pytest.mark.parametrize(
    ("kind", "value", "want"),
    [
        (pa.int64(), "12.75", MISFIT),
        (pa.int64(), "1.0", MISFIT),
        (pa.int64(), "1e2", MISFIT),
        (pa.int64(), "9223372036854775807", (1 << 63) - 1),
        (pa.int64(), "9223372036854775808", MISFIT),
        (pa.int64(), "1" * 5000, MISFIT),
        (pa.int64(), "null", None),
        (pa.int8(), "128", MISFIT),
        (pa.float64(), "0.30000000000000004", 0.30000000000000004),
        (pa.float64(), "1e400", float("inf")),
        (pa.float64(), '"NaN "', MISFIT),
        (pa.float32(), "1e300", float("inf")),
        (pa.float32(), "1.00000017881393432617187499", 1.0000001192092896),
        (pa.string(), "1234567890123456789012345678901234567890", "1234567890123456789012345678901234567890"),
        (pa.string(), "1.50E+02", "1.50E+02"),
        (pa.string(), '{"x" :  [1, 2]}', '{"x" :  [1, 2]}'),
        (pa.string(), '"\\u0041\\/"', "A/"),
        (pa.decimal128(10, 2), "12.345", Decimal("12.35")),
        (pa.decimal128(10, 2), "-0.005", Decimal("-0.01")),
        (pa.decimal128(10, 2), '"1,234.5"', Decimal("1234.50")),
        (pa.decimal128(10, 2), "99999999.995", MISFIT),
        (pa.decimal128(10, 2), "1e999999999", MISFIT),
        (pa.decimal128(10, 2), "1e" + "9" * 30, MISFIT),
        (pa.decimal128(10, 2), "-1e-" + "9" * 30, MISFIT),
        (pa.decimal128(10, 2), "1e-999999999", Decimal("0.00")),
        (INSTANT, "1700000000", datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (INSTANT, "1700000000.5", MISFIT),
        (INSTANT, "9223372036854775807", MISFIT),
        (INSTANT, '"2024-01-02T03:04:05.123456789Z"', datetime.datetime(2024, 1, 2, 3, 4, 5, 123456, UTC)),
        (INSTANT, '"2024-01-02 03:04:05"', datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (INSTANT, '"2024-01-02T03:04:05+02:00"', datetime.datetime(2024, 1, 2, 1, 4, 5, tzinfo=UTC)),
        (INSTANT, '"2024-01-02T25:00:00Z"', MISFIT),
        (INSTANT, '"03:04:05"', MISFIT),
        (INSTANT, '"2024-01-02T03:04:05 ../../etc/passwd"', MISFIT),
        (INSTANT, '"2024-01-02T03:04:05 America"', MISFIT),
        (INSTANT, '"2024-01-02T03:04:05' + "A" * 300 + '"', MISFIT),
        (pa.timestamp("us"), '"2024-01-02T03:04:05Z"', MISFIT),
        (pa.date32(), '"2024-01-02T03:04:05Z"', datetime.date(2024, 1, 2)),
        (pa.date32(), '"2024-02-30"', MISFIT),
        (pa.date32(), "19000", MISFIT),
        (pa.binary(), '"AQID"', b"\x01\x02\x03"),
        (pa.binary(), '"AQI"', MISFIT),
        (pa.bool_(), "1", MISFIT),
        (pa.list_(pa.int64()), "[1,2.5]", MISFIT),
        (pa.list_(pa.struct([("x", pa.int64())])), '[{"x":1},{"x":1.5}]', [{"x": 1}, {"x": None}]),
        (pa.map_(pa.string(), pa.string()), '{"x":1.50,"y":null}', [("x", "1.50"), ("y", None)]),
        (pa.map_(pa.string(), pa.int64()), '{"x":1.5}', MISFIT),
        (pa.struct([("x", pa.int64()), ("y", pa.int64())]), '{"x":1.5,"y":2}', {"x": None, "y": 2}),
        (pa.struct([("x", pa.int64())]), "[1]", MISFIT),
    ],
)  # fmt: skip
def test_a_value_is_what_it_is_to_spark(kind: pa.DataType, value: str, want: Any) -> None:
    assert convert(kind, value) == want


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_a_number_without_json_is_the_text_that_spark_writes(text: str) -> None:
    """Such as a number of protobuf in a column of strings."""
    assert value_reader(pa.string())(float(text)) == convert(pa.string(), text) == text


def test_what_did_not_fit_is_named() -> None:
    fields = pa.schema(
        [("a", pa.struct([("x", pa.int64())])), ("b", pa.int64()), ("c", pa.int64())]
    )
    values, misfits = JsonRow(fields).read(b'{"a":{"x":"no"},"b":2.5,"c":3}')
    assert values == [{"x": None}, None, 3]
    assert misfits == [
        'x: "no" is not an integer of 64 bits',
        "b: 2.5 is not an integer of 64 bits",
    ]


@pytest.mark.parametrize("line", [b"[1]", b"nonsense", b'{"a":1', b'{"a":"\xff"}', b""])
def test_a_line_that_is_no_object_has_no_values(line: bytes) -> None:
    values, misfits = JsonRow(pa.schema([("a", pa.int64()), ("b", pa.string())])).read(line)
    assert values == [None, None]
    assert len(misfits) == 1


def test_types_that_nothing_is_read_as() -> None:
    for kind in (pa.duration("s"), pa.list_(pa.time64("us")), pa.map_(pa.int64(), pa.int64())):
        with raises(Invalid, path="a") as raised:
            JsonRow(pa.schema([("a", kind)]))
        assert raised.value.path == "a"
