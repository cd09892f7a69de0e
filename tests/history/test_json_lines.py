"""The compiled pass over lines of JSON, against the framing and the parsers that it stands for."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from gazette.history import json_kernel, json_lines
from gazette.history.columns import ColumnDecoder, Malformed, MessageFormat
from gazette.history.field_arrays import FieldsBuilder, scannable
from gazette.history.json_lines import DEPTH_MAX, FIELDS_MAX, Field, FieldKind, LineScanner
from gazette.history.lenient_json import is_array
from gazette.history.read import Batch
from gazette.history.row_format import RowFormat
from gazette.history.rows import RowMaker
from gazette.history.snapshot import Piece, Run
from gazette.message.framing.frames import MalformedMessage
from gazette.message.uuid import build_uuid, uuid_text
from tests.fuzzing import examples

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("number", pa.int64()),
        ("small", pa.int8()),
        ("real", pa.float64()),
        ("single", pa.float32()),
        ("truth", pa.bool_()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("binary", pa.binary()),
        ("labels", pa.map_(pa.string(), pa.string())),
        ("list", pa.list_(pa.int8())),
        ("deep", pa.list_(pa.list_(pa.float64()))),
        (
            "struct",
            pa.struct(
                [
                    ("text", pa.string()),
                    (
                        "inner",
                        pa.struct([("number", pa.int64()), ("at", pa.timestamp("us", "UTC"))]),
                    ),
                    ("items", pa.list_(pa.struct([("text", pa.string()), ("small", pa.int8())]))),
                ]
            ),
        ),
    ]
)
FORMAT = RowFormat(
    "json",
    pa.schema([("offset", pa.int64()), *SCHEMA, ("corrupt", pa.string())]),
    (("offset", "offset"),),
    corrupt="corrupt",
)
JOURNAL = "a/journal"
UUID = uuid_text(build_uuid(bytes([1, 0, 0, 0, 0, 0xAB]), 0x1EE_1234_5678_9ABC, 2))


def decoder_of(uuid_field: str = "uuid", malformed: Malformed = "null") -> ColumnDecoder:
    shape = MessageFormat(uuid_field=uuid_field, malformed=malformed)
    return ColumnDecoder(JOURNAL, shape, scannable(SCHEMA))


def rows_of(found: Batch, malformed: Malformed = "null") -> pa.Table:
    """Return all messages as rows."""
    shape = MessageFormat(malformed=malformed)
    run = Run(JOURNAL, shape, 0, (Piece(1000, 1 << 30),), 0)
    wanted = np.ones(len(found.columns), np.bool_)
    return pa.Table.from_batches(RowMaker(run, FORMAT).rows(found, wanted), FORMAT.schema)


def scanned(buffer: bytes, uuid_field: str = "uuid", malformed: Malformed = "null") -> Batch | None:
    """Return what one pass finds. Return None if it leaves everything to the specification."""
    decoded = decoder_of(uuid_field, malformed).decode(buffer, 1000)
    if decoded.fields is None:
        return None
    assert decoded.consumed == len(buffer)
    arrays = FieldsBuilder(SCHEMA).arrays(decoded.fields)
    for array in arrays.columns:
        array.validate(full=True)
    return Batch(decoded.columns, buffer, 1000, arrays=arrays)


def is_declined(line: bytes) -> bool:
    """Return True if the pass leaves the fields of this line to the specification."""
    found = scanned(line)
    if found is None:
        return True
    assert found.arrays is not None
    return found.arrays.rest is not None and bool(found.arrays.rest.all())


def specified(buffer: bytes, uuid_field: str = "uuid", malformed: Malformed = "null") -> Batch:
    """Return the same by the framing, and `JsonRow` for each message."""
    decoder = decoder_of(uuid_field, malformed)
    assert decoder._framing is not None
    columns, consumed, _ = decoder._decode_framed(decoder._framing, buffer, 1000)
    assert consumed == len(buffer)
    return Batch(columns, buffer, 1000)


FLOATS = ["real", "single", "deep"]


def assert_equal(one: pa.Table, other: pa.Table) -> None:
    """Compare rows. NaN equals itself, and a negative zero is not a zero."""
    assert one.schema == other.schema
    assert one.drop_columns(FLOATS).equals(other.drop_columns(FLOATS))
    assert repr(one.select(FLOATS).to_pylist()) == repr(other.select(FLOATS).to_pylist())


def assert_same(buffer: bytes, uuid_field: str = "uuid", malformed: Malformed = "null") -> Batch:
    found = scanned(buffer, uuid_field, malformed)
    assert found is not None, "it was declined"
    want = specified(buffer, uuid_field, malformed)
    assert (found.columns.begins == want.columns.begins).all()
    assert (found.columns.ends == want.columns.ends).all()
    for ours, theirs in zip(found.columns.uuids, want.columns.uuids, strict=True):
        assert (ours == theirs).all()
    assert_equal(rows_of(found, malformed), rows_of(want, malformed))
    return found


def assert_accepted(buffer: bytes, uuid_field: str = "uuid") -> None:
    """Assert that the pass finds all fields, and that they are those of the specification."""
    found = assert_same(buffer, uuid_field)
    assert found.arrays is not None
    assert found.arrays.rest is None


texts = st.one_of(
    st.text(max_size=12),
    st.text('a"\\/\b\f\n\r\t\x00\x7fäπ𝄞\u2028', max_size=8),
)


class Literal(float):
    """A number as it is to stand in JSON."""

    def __new__(cls, text: str) -> Self:
        return super().__new__(cls, text)

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def of(cls, text: str) -> Self:
        """Return a literal that Python may not take for a number."""
        found = cls("nan")
        found.text = text
        return found

    def __repr__(self) -> str:
        return self.text


def as_json(value: object, *, ascii_only: bool, separators: tuple[str, str]) -> str:
    """Return a value as JSON, with each `Literal` as it is."""
    comma, colon = separators
    if isinstance(value, Literal):
        return value.text
    if isinstance(value, dict):
        members = (
            as_json(key, ascii_only=ascii_only, separators=separators)
            + colon
            + as_json(one, ascii_only=ascii_only, separators=separators)
            for key, one in value.items()
        )
        return "{" + comma.join(members) + "}"
    if isinstance(value, list):
        items = (as_json(one, ascii_only=ascii_only, separators=separators) for one in value)
        return "[" + comma.join(items) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(10**18) + 1, 10**18 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.decimals(-1000, 1000, places=3).map(float),
        texts,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
times = st.sampled_from(
    [
        "2024-01-02T03:04:05.123456789Z", "2024-02-29 23:59:59+02:30", "2023-02-29T00:00:00Z",
        "0000-03-01T00:00:00", "1969-12-31T23:59:59.9-18:00", "9999-12-31", "2024-01-02T03:04:05.",
        "2024-01-02T24:00:00Z", "2024-1-2", "2024-01-02T03:04:05 UTC", "1900-02-29", "2024-01-02Tx",
        "2024-12-01T03:04:05+18:01", "2024-01-02T03:04:05Z ",
    ]
) | st.datetimes().map(lambda time: time.isoformat()) | st.dates().map(str)  # fmt: skip
numbers = st.sampled_from(
    [
        "-0", "0", "0.0", "-0.0", "1e400", "5e-324", "1e-400", "12.345", "-12.345", "0.005", "99999999.99",
        "99999999.995", "1234567890123456789012", "0.30000000000000004", "1.00000017881393432617187499",
        "9223372036854775807", "-9223372036854775808", "9223372036854775808", "-9223372036854775809", "1E2",
        "1700000000", "999999999999", "1000000000000", "-1", "127", "-129", "0.1234567890123456789",
    ]
).map(Literal)  # fmt: skip
literals = st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "+Infinity", "+INF", "-INF", "INF", "-NaN", '"NaN"', '"-INF"', "N"]
).map(Literal.of)  # fmt: skip
small = st.none() | st.integers(-130, 130)
fitting = {
    "text": st.none() | texts | numbers,
    "number": st.none() | st.integers(-(2**63), 2**63 - 1) | numbers,
    "small": small,
    "real": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9) | numbers,
    "single": st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False) | numbers,
    "truth": st.none() | st.booleans(),
    "price": st.none() | numbers | texts
    | st.decimals(-(10**8), 10**8, places=3).map(lambda price: Literal(f"{price:f}")),
    "at": st.none() | times | numbers,
    "local": st.none() | times,
    "day": st.none() | times,
    "binary": st.none() | st.sampled_from(["", "AQID", "AQI=", "x"]),
    "labels": st.none() | st.dictionaries(texts, texts | numbers, max_size=2),
    "list": st.none() | st.lists(small, max_size=3),
    "deep": st.none() | st.lists(st.none() | st.lists(st.none() | st.floats(-9, 9), max_size=2), max_size=3),
    "struct": st.none() | st.fixed_dictionaries(
        {},
        optional={
            "text": st.none() | texts,
            "inner": st.none()
            | st.fixed_dictionaries({}, optional={"number": small, "at": times, "other": values}),
            "items": st.none() | st.lists(
                st.none() | st.fixed_dictionaries({}, optional={"text": texts, "small": small}), max_size=3
            ),
            "other": values,
            "grün": values,
        },
    ),
    "other": values,
    "grün": values,
    "uuid": st.just(UUID) | st.uuids().map(str) | st.uuids().map(lambda u: str(u).upper()),
}  # fmt: skip
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :\r ")])


@st.composite
def lines(draw: DrawFn) -> bytes:
    """Draw lines as publishers write them, in any order of keys; some of them with what does not fit."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        names = draw(st.lists(st.sampled_from(sorted(fitting)), unique=True))
        strange = draw(st.integers(0, 20)) == 0
        message = {name: draw(values if strange else fitting[name]) for name in names}
        if draw(st.integers(0, 2)) == 0:
            place = draw(
                st.sampled_from(["real", "single", "other", "text", "deep", "labels", "price"])
            )
            found_there = draw(literals)
            message[place] = [[found_there]] if draw(st.booleans()) else found_there
        text = as_json(message, ascii_only=draw(st.booleans()), separators=draw(separators))
        found.append(text.encode("utf-8", "replace") + draw(st.sampled_from([b"\n", b" \n"])))
    return b"".join(found)


@settings(max_examples=examples(100), deadline=None)
@given(buffer=lines())
def test_what_is_accepted_is_what_the_specification_gives(buffer: bytes) -> None:
    if scanned(buffer) is not None:
        assert_same(buffer)


@settings(max_examples=examples(150), deadline=None)
@given(
    buffer=lines(),
    edits=st.lists(
        st.tuples(
            st.integers(0, 400),
            st.sampled_from([b"", b"\n", b'"', b"\\", b"{", b"}", b",", b":", b"1", b"\xff", b" "]),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=2,
    ),
)
@example(buffer=b'{"text":"a"}\n', edits=[(9, b"\xff", 1)])
@example(buffer=b'{"text":"a"}\n', edits=[(2, b"\\u0074", 1)])
def test_damaged_bytes_are_declined_or_read_alike(
    buffer: bytes, edits: list[tuple[int, bytes, int]]
) -> None:
    """It never accepts what would have been an error, nor reads beyond the buffer."""
    for at, new, drop in edits:
        at = min(at, len(buffer))
        buffer = buffer[:at] + new + buffer[at + drop :]
    buffer = buffer[: buffer.rfind(b"\n") + 1]
    assume(not any(map(is_array, buffer.splitlines())))
    if buffer and scanned(buffer) is not None:
        assert_same(buffer)


@pytest.mark.parametrize(
    "line",
    [
        '{"uuid":"%s","text":"a","number":1,"small":-3,"real":1.5,"truth":true}',
        '{"text":"a","uuid":"%s"}',
        '{"number":-0,"real":-0,"uuid":"%s"}',
        '{"real":-0.0}',
        '{"real":1e22}',
        '{"real":123456789012345e-22}',
        '{"real":0.000}',
        '{"real":0.1}',
        "{}",
        ' { "uuid" : "%s" , "other" : [ 1 , { "a" : [ ] , "b" : { } } , "x" ] } ',
        '{"other":{"text":"inner","uuid":"no"},"text":"outer"}',
        r'{"text":"\"\\\/\b\f\n\r\t\u0041\u00e4\u20ac\ud834\udd1e"}',
        '{"text":"πä𝄞"}',
        '{"text":null,"number":null,"truth":null,"real":null}',
        '{"number":999999999999999999,"small":-128}',
        '{"other":-1.5e+10,"truth":false}',
        '{"textual":1,"tex":2,"text":"3"}',
        '{"text":1}',
        '{"text":-1.50E+400}',
        '{"text":{"a" : [1, true]}}',
        '{"text":true,"number":-9223372036854775808}',
        '{"number":9223372036854775807}',
        '{"number":1000000000000000000}',
        '{"real":1e23}',
        '{"real":0.1234567890123456}',
        '{"real":0.30000000000000004,"single":1.00000017881393432617187499}',
        '{"real":1.7976931348623157e308,"single":3.4028235e38}',
        '{"single":-0}',
        '{"te\\u0078t":"a","te\\"xt":"b"}',
        '{"straße":1,"text":"a","\\ud834\\udd1e":2}',
        '{"other":5e324}',
        '{"other":1' + "0" * 400 + "}",
        '{"uuid":null}',
        '{"price":12.5}',
        '{"price":-0.005}',
        '{"price":"12345678.99"}',
        '{"price":0.00000000000000000000001}',
        '{"at":"2024-01-02T03:04:05.123456789Z","local":"2024-01-02 03:04:05","day":"2024-01-02"}',
        '{"at":"2024-02-29T00:00:00-02:30","day":"2024-02-29T nonsense"}',
        '{"at":1700000000,"local":"0000-02-29"}',
        '{"at":-1}',
        '{"binary":"AQID","labels":{"a":1.50,"b":null}}',
        '{"list":[],"deep":[[],[1,null],null]}',
        '{"list":[1,null,-128],"deep":[[0.1],[-0]]}',
        '{"struct":{}}',
        '{"struct":{"text":"a","inner":{"number":1,"at":0},"items":[{"text":"b"},null,{"other":[{}],"small":2}]}}',
        '{"struct":{"inner":null,"items":null,"text":null}}',
        '{ "struct" : { "items" : [ { } , { "small" : 1 } ] , "inner" : { } } , "list" : [ ] }',
        '{"real":NaN,"single":-Infinity,"other":+INF}',
        '{"real":"Infinity","single":"-INF","other":[{"a":Infinity}, NaN ]}',
        '{"text":[ NaN, 1],"deep":[[NaN,-Infinity,"NaN"]],"labels":{"a":NaN}}',
        '{"real" : +Infinity , "text":-INF}',
        '{"uuid":"%s","real":"NaN"}',
    ],
)
def test_accepted(line: str) -> None:
    """Each alone, and behind a line of other keys."""
    line = line.replace("%s", UUID) + "\n"
    assert_accepted(line.encode())
    first = f'{{"uuid":"{UUID}","text":"x","other":2}}\n'
    assert_accepted((first + line + line).encode())


@pytest.mark.parametrize(
    "line",
    [
        f'{{"uuid":"{{{UUID}}}"}}',
        '{"uuid":"01234567012345670123456701234567"}',
        '{"uuid":"0123456g-0123-4567-0123-456701234567"}',
        f'{{"uuid":"{UUID}","uuid":"{UUID}"}}',
        '{"text":"a","text":"b"}',
        '{"number":1.0}',
        '{"number":1e3}',
        '{"number":"1"}',
        '{"number":01}',
        '{"small":128}',
        '{"number":9223372036854775808}',
        '{"number":-9223372036854775809}',
        '{"real":"1.5"}',
        '{"real":"inf"}',
        '{"real":"NaN}',
        '{"single":INF}',
        '{"single":-NaN}',
        '{"price":NaN}',
        '{"other":[Infinit]}',
        f'{{"real":NaN,"uuid":"{UUID}"}}',
        f'{{"uuid":"{UUID}","other":{{"a":[-INF]}}}}',
        f'{{"uuid":"{UUID}","text":[NaN]}}',
        '{"price":100000000}',
        '{"price":99999999.995}',
        '{"price":1e2}',
        '{"price":"1,234"}',
        '{"at":"2023-02-29T00:00:00Z"}',
        '{"at":"2024-01-02T03:04:60Z"}',
        '{"at":"2024-01-02T03:04:05+18:01"}',
        '{"at":"2024-01-02T03:04:05 UTC"}',
        '{"at":"2024-01-02x03:04:05Z"}',
        '{"at":1.5}',
        '{"at":1000000000000}',
        '{"local":"2024-01-02T03:04:05Z"}',
        '{"local":1}',
        '{"day":"2024-1-2"}',
        '{"day":19000}',
        '{"binary":"x"}',
        '{"labels":[1]}',
        '{"list":{}}',
        '{"list":[1,]}',
        '{"list":[128]}',
        '{"list":[1 2]}',
        '{"deep":[1]}',
        '{"struct":[]}',
        '{"struct":{"text":"a","text":"b"}}',
        '{"struct":{"inner":{"number":1.5}}}',
        '{"struct":{"items":[{"small":1},{"small":128}]}}',
        '{"struct":{"items":[{}}}',
        '{"struct":{,}}',
        '{"truth":1}',
        '{"truth":tru}',
        '{"text":"\\x"}',
        '{"other":nul}',
        '{"other":[1,]}',
        '{"other":[1 2]}',
        '{"other":{"a"}}',
        '{"other":' + "[" * 100 + "]" * 100 + "}",
        '{"a":1,}',
        '{"a" 1}',
        '{"a":1}}',
        '{"a":1',
        "1",
        "{,}",
        "{'text':'a'}",
        '{"number":NaN}',
        '{"text":"\\ud800"}',
        '{"text":"a"} {"text":"b"}',
        '\ufeff{"text":"a"}',
        '{"text":"\x01"}',
    ],
)
def test_left_to_the_specification(line: str) -> None:
    """Alone, or between lines that are not."""
    assert is_declined(line.encode() + b"\n")
    good = b'{"text":"a","struct":{"items":[{"text":"b"}]},"list":[1]}\n'
    found = assert_same(good + line.encode() + b"\n" + good)
    assert found.arrays is not None
    assert found.arrays.rest is not None
    assert found.arrays.rest.tolist() == [False, True, False]


@pytest.mark.parametrize("malformed", ["null", "skip"])
def test_lines_that_are_no_json_are_as_the_specification_wants(malformed: Malformed) -> None:
    buffer = b'{"text":"a","list":[1]}\n' + b'no json\n{"text":"b"}\n{"text":\n' * 3
    found = assert_same(buffer, malformed=malformed)
    assert len(found.columns) == (10 if malformed == "null" else 4)
    with pytest.raises(MalformedMessage) as raised:
        scanned(buffer, malformed="fail")
    assert raised.value.begin == 1024


def test_many_lines_that_are_declined_make_it_decline_the_buffer() -> None:
    """Their parsing takes less together."""
    good, bad = b'{"text":"a"}\n', b'{"number":1.5}\n'
    assert scanned((good * 9 + bad) * 20) is not None
    assert scanned((good * 6 + bad) * 20) is None


@pytest.mark.parametrize("uuid_field", ["struct.text", "_meta.uuid", "_meta.inner.uuid"])
def test_a_nested_uuid(uuid_field: str) -> None:
    """Also if a column is the object that holds it."""
    first, *path = uuid_field.split(".")
    for value in (f'"{UUID}"', "null"):
        for name in path[::-1]:
            value = f'{{"other":{{"{name}":"no"}},"{name}" : {value},"inn":[1]}}'
        assert_accepted(f'{{"{first}":{value},"text":"a"}}\n'.encode() * 2, uuid_field)
    assert_accepted(b'{"text":"a"}\n{"%s":{}}\n' % first.encode(), uuid_field)
    for value in ("[]", f'{{"{path[0]}":1,"{path[0]}":2}}', '{"a":1,}', f'{{"{path[0]}":7}}'):
        assert_same(f'{{"text":"a"}}\n{{"{first}":{value}}}\n'.encode(), uuid_field)


def test_a_uuid_that_is_a_column() -> None:
    schema = pa.schema([("uuid", pa.string())])
    decoded = ColumnDecoder(JOURNAL, MessageFormat(), scannable(schema)).decode(
        f'{{"uuid":"{UUID}"}}\n'.encode(), 0
    )
    assert decoded.fields is not None
    assert FieldsBuilder(schema).arrays(decoded.fields).columns[0].to_pylist() == [UUID]
    assert decoded.columns.uuids.flags.tolist() == [2]


@pytest.mark.parametrize("key", ["text", "other"])
def test_what_is_not_unicode_is_left_to_the_specification(key: str) -> None:
    """In strings that are asked for, and in others: as UTF-8, and as escapes."""
    for code in (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        for text in (chr(code), json.dumps(chr(code))[1:-1]):
            assert_accepted(f'{{"{key}":"a{text}b"}}\n'.encode())
    for octets in (
        b"\xff", b"\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xf0\x9d\x84", b"\xc3",
        b"\\ud834", b"\\udd1e\\ud834", b"\\ud834\\ud834", b"\\ud834\\n", b"\\u12g4", b"\\u12",
    ):  # fmt: skip
        assert is_declined(b'{"%s":"a%sb"}\n' % (key.encode(), octets))
        assert is_declined(b'{"%s":"%s"}\n' % (key.encode(), octets))


def test_more_keys_than_are_remembered() -> None:
    many = json.dumps({f"k{at}": at for at in range(400)} | {"text": "a"}).encode() + b"\n"
    assert_accepted(many * 2)


def test_buffers_of_all_sizes() -> None:
    """Room is made for larger ones, and what was in it is not seen again."""
    for count in (1, 3000, 2, 200_000, 1):
        buffer = b"".join(b'{"text":"%d","number":%d}\n' % (at, at) for at in range(count))
        decoder = ColumnDecoder(JOURNAL, MessageFormat(), scannable(SCHEMA))
        for _ in range(2):
            decoded = decoder.decode(buffer, 5)
            assert decoded.fields is not None
            texts, numbers, *_ = FieldsBuilder(SCHEMA).arrays(decoded.fields).columns
            assert numbers.to_pylist() == list(range(count))
            assert texts[count - 1].as_py() == str(count - 1)


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_room_for_lines_that_are_shorter_than_messages(size: int) -> None:
    """Blank lines have one byte. As few of them as here make the scanner not decline the buffer."""
    content = (b"{}\n" * 200 + (b"{}\n" * 8 + b"\n") * (size // 25))[:size]
    stop = content.rfind(b"\n") + 1
    scanned = LineScanner("uuid").scan(content, stop)
    assert scanned is not None
    assert len(scanned.begins) == content.count(b"\n")
    assert int(scanned.begins[-1]) == content.rfind(b"\n", 0, stop - 1) + 1


@pytest.mark.parametrize("kind", ["integer", "list"])
def test_wide_columns_take_no_memory_for_lines_that_are_not_there(kind: FieldKind) -> None:
    """Here one line of 32 MiB, of which columns have some bytes."""
    children = (Field("", "integer"),) if kind == "list" else ()
    fields = [Field(f"f{number}", kind, children=children) for number in range(100)]
    value = [1, 2] if kind == "list" else 1
    line: dict[str, Any] = {field.name: value for field in fields}
    content = json.dumps(line | {"text": "x" * (32 << 20)}).encode() + b"\n"
    scanner = LineScanner("uuid", fields)
    tracemalloc.start()
    try:
        scanned = scanner.scan(content, len(content))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert scanned is not None
    assert len(scanned.begins) == 1
    assert peak < 4 * len(content)


def test_a_scanner_that_is_always_declined_stops_trying() -> None:
    scanner = LineScanner("uuid", [Field("truth", "boolean")])
    bad, good = b'{"truth":1}\n' * 20, b'{"truth":true}\n'
    for _ in range(3):
        assert scanner.scan(bad, len(bad)) is None
    assert scanner.scan(good, len(good)) is not None
    for _ in range(4):
        assert scanner.scan(bad, len(bad)) is None
    assert scanner.scan(good, len(good)) is None


def test_too_many_fields_are_left_to_the_specification() -> None:
    wide = pa.schema([(f"f{at}", pa.int64()) for at in range(FIELDS_MAX + 1)])
    assert scannable(wide) == ()
    assert scannable(pa.schema([("a", pa.struct(list(wide)))])) == ()
    assert len(scannable(pa.schema(list(wide)[:FIELDS_MAX]))) == FIELDS_MAX
    with pytest.raises(ValueError, match="too many"):
        LineScanner("uuid", [Field(f"f{at}", "integer") for at in range(FIELDS_MAX + 1)])


def test_fields_that_are_nested_too_deeply_are_cut_as_text() -> None:
    kind, value = pa.int64(), "1"
    for _ in range(DEPTH_MAX):
        kind, value = pa.list_(kind), f"[{value}]"
    (field,) = scannable(pa.schema([("deep", kind)]))
    while field.children:
        (field,) = field.children
    assert field.kind == "value"
    schema = pa.schema([("deep", kind)])
    decoded = ColumnDecoder(JOURNAL, MessageFormat(), scannable(schema)).decode(
        f'{{"deep":{value}}}\n'.encode(), 0
    )
    assert decoded.fields is not None
    (found,) = FieldsBuilder(schema).arrays(decoded.fields).columns
    assert found.to_pylist() == [json.loads(value)]


class Kernel:
    """A pass that compiles, or loads what is kept, until its log has said so or it is let go."""

    def __init__(self, kept: int, waits_for: threading.Event | None) -> None:
        self.stats = SimpleNamespace(
            cache_misses=Counter(scan=1 - kept) + Counter(), cache_path="/kept"
        )
        self.scan = self
        self._waits_for = waits_for

    def compile_ahead(self) -> None:
        if self._waits_for is not None:
            assert self._waits_for.wait(60)


class Said(logging.Handler):
    """The lines of the scanner's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.heard.set()


@pytest.fixture
def said() -> Iterator[Said]:
    said = Said()
    json_lines.LOGGER.addHandler(said)
    yield said
    json_lines.LOGGER.removeHandler(said)


def test_the_log_says_that_the_pass_is_compiled_while_it_is(said: Said) -> None:
    json_lines.compile_aloud(Kernel(kept=0, waits_for=said.heard), after_s=0.01)
    (line,) = said.lines
    assert "/kept" in line
    assert "python -m gazette.history.json_kernel" in line


def test_the_log_says_nothing_of_a_pass_that_is_kept_or_compiles_soon(said: Said) -> None:
    loading = threading.Event()
    threading.Timer(0.05, loading.set).start()  # The log has had its time to speak.
    json_lines.compile_aloud(Kernel(kept=1, waits_for=loading), after_s=0.01)
    json_lines.compile_aloud(Kernel(kept=0, waits_for=None), after_s=600.0)
    assert said.lines == []


def test_a_first_table_in_a_fresh_environment_says_what_it_waits_for(tmp_path: Path) -> None:
    """In a process of its own that keeps no code yet. It ends as soon as it has said so."""
    code = "from gazette.history.json_lines import LineScanner; LineScanner('uuid')"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stderr is not None
        line = first.stderr.readline()
        first.kill()
    assert f"The code is kept in {tmp_path}" in line
    assert line.endswith("To compile ahead: python -m gazette.history.json_kernel\n")


def test_a_kernel_that_cannot_be_compiled_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json_kernel, "compile_ahead", full)
    json_lines.kernel.cache_clear()
    try:
        assert LineScanner("uuid").scan(b"{}\n", 3) is None
        assert ColumnDecoder(JOURNAL, MessageFormat()).decode(b"{}\n", 0).columns.ends.tolist() == [
            3
        ]
    finally:
        json_lines.kernel.cache_clear()
    assert "No space left" in vars(caplog.records[0])["reason"]


DAMAGED = """
import sys
from pathlib import Path
from gazette.history import json_kernel
from gazette.history.json_lines import LineScanner

directory = Path(json_kernel.scan.stats.cache_path)
directory.mkdir(parents=True, exist_ok=True)
(directory / sys.argv[1]).write_bytes(bytes(int(sys.argv[2])))
assert LineScanner("uuid").scan(b"{}\\n", 3) is None
"""


@pytest.mark.parametrize("size", [0, 1000])
def test_a_damaged_file_of_numba_is_named_and_not_needed(tmp_path: Path, size: int) -> None:
    """A file that a loss of power left empty, or full of zeros."""
    assert json_lines.kernel() is not None
    scan: Any = json_kernel.scan
    kept = Path(scan.stats.cache_path)
    name = next(kept.glob("json_kernel.scan-*.nbi")).name
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, name, str(size)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}" in done.stderr
    assert "Remove the files *.nbi there." in done.stderr


FORK = """
import os, threading
from gazette.history.json_lines import compile_aloud

begun, forking, ended = threading.Event(), threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)

class Kernel:
    scan = None

    def compile_ahead(self):
        begun.set()
        assert forking.wait(20)
        ended.set()

thread = threading.Thread(target=compile_aloud, args=(Kernel(), 600.0))
thread.start()
assert begun.wait(20)
child = os.fork()
if child == 0:
    os._exit(0 if ended.is_set() else 1)
thread.join()
assert os.waitpid(child, 0)[1] == 0, "numba held its lock as the process was forked"
"""


def test_no_process_forks_while_numba_compiles() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True)


WITHOUT_NUMBA = """
import sys
import pyarrow as pa
from gazette.history.columns import ColumnDecoder, MessageFormat
from gazette.history.field_arrays import scannable
from tests.support.missing import missing
with missing("numba"):
    fields = scannable(pa.schema([("text", pa.string())]))
    found = ColumnDecoder("a/journal", MessageFormat(), fields).decode(sys.argv[1].encode(), 0)
print(found.fields, found.columns.uuids)
"""


def test_without_the_kernel_the_rest_reads_alike() -> None:
    """Where Numba is not installed: a process of its own has not compiled it yet."""
    line = f'{{"uuid":"{UUID}","text":"a"}}\n'
    with_it = ColumnDecoder(JOURNAL, MessageFormat()).decode(line.encode(), 0)
    command = [sys.executable, "-c", WITHOUT_NUMBA, line]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == f"None {with_it.columns.uuids}\n"


LONG_LINE = """
import resource
import pyarrow as pa
from gazette.history.field_arrays import scannable
from gazette.history.json_lines import LineScanner

schema = pa.schema([(f"c{n}", pa.string()) for n in range(250)])
scanner = LineScanner("uuid", tuple(scannable(schema)))
assert scanner.scan(b"{}\\n", 3) is not None
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
line = b'{"c1":"' + b"x" * (60 << 20) + b'"}\\n'
print(scanner.scan(line, len(line)), scanner.scan(b"{}\\n", 3) is not None)
"""


def test_a_line_for_whose_columns_the_memory_does_not_suffice_is_left_to_the_specification() -> (
    None
):
    run = subprocess.run(
        [sys.executable, "-c", LONG_LINE], capture_output=True, text=True, check=True
    )
    assert run.stdout == "None True\n"
