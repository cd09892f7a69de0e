"""The compiled pass over lines of JSON, against the framing and the parsers that it stands for."""

from __future__ import annotations

import errno
import json
import math
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from gazette.history import json_kernel, json_lines
from gazette.history.columns import ColumnDecoder, MessageFormat
from gazette.history.field_arrays import arrow_arrays, scannable
from gazette.history.json_lines import FIELDS_MAX, Field, LineScanner
from gazette.history.read import Batch
from gazette.history.row_format import RowFormat
from gazette.history.rows import RowMaker
from gazette.history.scanned_batches import ScannedBatch
from gazette.history.snapshot import Piece, Run
from gazette.message.uuid import build_uuid, uuid_text

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("number", pa.int64()),
        ("small", pa.int8()),
        ("real", pa.float64()),
        ("truth", pa.bool_()),
    ]
)
FORMAT = RowFormat("json", SCHEMA)
JOURNAL = "a/journal"
UUID = uuid_text(build_uuid(bytes([1, 0, 0, 0, 0, 0xAB]), 0x1EE_1234_5678_9ABC, 2))


def scanned(buffer: bytes, uuid_field: str = "uuid") -> ScannedBatch | None:
    """Return what one pass finds, if it does not decline."""
    decoder = ColumnDecoder(JOURNAL, MessageFormat(uuid_field=uuid_field), scannable(SCHEMA))
    decoded = decoder._scan(decoder._scanner, buffer, 1000) if decoder._scanner else None
    if decoded is None or decoded.fields is None:
        return None
    assert decoded.consumed == len(buffer)
    arrays = arrow_arrays(decoded.fields, SCHEMA)
    return None if arrays is None else ScannedBatch(decoded.columns, arrays, None)


def specified(buffer: bytes, uuid_field: str = "uuid") -> ScannedBatch:
    """Return the same by the framing, message by message. Raise what these do."""
    shape = MessageFormat(uuid_field=uuid_field)
    decoder = ColumnDecoder(JOURNAL, shape)
    assert decoder._framing is not None
    columns, consumed, _ = decoder._decode_framed(decoder._framing, buffer, 1000)
    assert consumed == len(buffer)
    run = Run(JOURNAL, shape, 0, (Piece(1000, 1000 + len(buffer)),), 0)
    maker = RowMaker(run, FORMAT)
    batch = Batch(columns, buffer, 1000)
    arrays = maker.arrays(ScannedBatch(columns, None, batch), np.ones(len(columns), np.bool_))[1]
    messages = [json.loads(line) for line in buffer.split(b"\n")[:-1]]
    for name, array in zip(SCHEMA.names, arrays, strict=True):
        assert array.to_pylist() == [message.get(name) for message in messages]
    return ScannedBatch(columns, arrays, batch)


def assert_equal(one: pa.Array, other: pa.Array) -> None:
    """Compare values and nulls; a negative zero is not a zero."""
    assert one.type == other.type
    ones, others = one.to_pylist(), other.to_pylist()
    assert ones == others
    if pa.types.is_floating(one.type):
        assert [math.copysign(1, x) for x in ones if x is not None] == [
            math.copysign(1, x) for x in others if x is not None
        ]


def assert_same(buffer: bytes, uuid_field: str = "uuid") -> ScannedBatch:
    found = scanned(buffer, uuid_field)
    assert found is not None, "it was declined"
    want = specified(buffer, uuid_field)
    assert (found.columns.begins == want.columns.begins).all()
    assert (found.columns.ends == want.columns.ends).all()
    for ours, theirs in zip(found.columns.uuids, want.columns.uuids, strict=True):
        assert (ours == theirs).all()
    assert found.arrays is not None
    assert want.arrays is not None
    for ours, theirs in zip(found.arrays, want.arrays, strict=True):
        assert_equal(ours, theirs)
    return found


texts = st.one_of(
    st.text(max_size=12),
    st.text('a"\\/\b\f\n\r\t\x00\x7fäπ𝄞\u2028', max_size=8),
)
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
fitting = {
    "text": st.none() | texts,
    "number": st.none() | st.integers(-(2**63), 2**63 - 1),
    "small": st.none() | st.integers(-128, 127),
    "real": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
    "truth": st.none() | st.booleans(),
    "other": values,
    "uuid": st.just(UUID) | st.uuids().map(str) | st.uuids().map(lambda u: str(u).upper()),
}
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :\r ")])


@st.composite
def lines(draw: DrawFn) -> bytes:
    """Draw lines as publishers write them, in any order of keys; some of them with what does not fit."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        names = draw(st.lists(st.sampled_from(sorted(fitting)), unique=True))
        strange = draw(st.integers(0, 20)) == 0
        message = {name: draw(values if strange else fitting[name]) for name in names}
        text = json.dumps(message, ensure_ascii=draw(st.booleans()), separators=draw(separators))
        found.append(text.encode("utf-8", "replace") + draw(st.sampled_from([b"\n", b" \n"])))
    return b"".join(found)


@settings(max_examples=200, deadline=None)
@given(buffer=lines())
def test_what_is_accepted_is_what_the_specification_gives(buffer: bytes) -> None:
    if scanned(buffer) is not None:
        assert_same(buffer)


@settings(max_examples=400, deadline=None)
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
    ],
)
def test_accepted(line: str) -> None:
    """Each alone, and behind a line of other keys."""
    line = line.replace("%s", UUID) + "\n"
    assert_same(line.encode())
    first = f'{{"uuid":"{UUID}","text":"x","other":2}}\n'
    assert_same((first + line + line).encode())


@pytest.mark.parametrize(
    "line",
    [
        f'{{"uuid":"{{{UUID}}}"}}',
        '{"uuid":"01234567012345670123456701234567"}',
        '{"uuid":"0123456g-0123-4567-0123-456701234567"}',
        '{"uuid":null}',
        f'{{"uuid":"{UUID}","uuid":"{UUID}"}}',
        '{"text":"a","text":"b"}',
        '{"text":1}',
        '{"text":{}}',
        '{"number":1.0}',
        '{"number":1e3}',
        '{"number":"1"}',
        '{"number":1000000000000000000}',
        '{"number":01}',
        '{"small":128}',
        '{"real":1e23}',
        '{"real":0.1234567890123456}',
        '{"truth":1}',
        '{"truth":tru}',
        '{"te\\u0078t":"a"}',
        '{"text":"\\x"}',
        '{"other":5e324}',
        '{"other":1' + "0" * 400 + "}",
        '{"other":nul}',
        '{"other":[1,]}',
        '{"other":[1 2]}',
        '{"other":{"a"}}',
        '{"other":' + "[" * 100 + "]" * 100 + "}",
        '{"a":1,}',
        '{"a" 1}',
        '{"a":1}}',
        '{"a":1',
        "[]",
        "1",
        "",
        "{,}",
        '{"text":"\x01"}',
    ],
)
def test_left_to_the_specification(line: str) -> None:
    assert scanned(line.encode() + b"\n") is None
    assert scanned(b'{"text":"a"}\n' + line.encode() + b"\n") is None


@pytest.mark.parametrize("key", ["text", "other"])
def test_what_is_not_unicode_is_left_to_the_specification(key: str) -> None:
    """In strings that are asked for, and in others: as UTF-8, and as escapes."""
    for code in (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        for text in (chr(code), json.dumps(chr(code))[1:-1]):
            assert_same(f'{{"{key}":"a{text}b"}}\n'.encode())
    for octets in (
        b"\xff", b"\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf",
        b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xf0\x9d\x84", b"\xc3",
        b"\\ud834", b"\\udd1e\\ud834", b"\\ud834\\ud834", b"\\ud834\\n", b"\\u12g4", b"\\u12",
    ):  # fmt: skip
        assert scanned(b'{"%s":"a%sb"}\n' % (key.encode(), octets)) is None
        assert scanned(b'{"%s":"%s"}\n' % (key.encode(), octets)) is None


def test_more_keys_than_are_remembered() -> None:
    many = json.dumps({f"k{at}": at for at in range(256)} | {"text": "a"}).encode() + b"\n"
    assert scanned(many) is None
    few = json.dumps({f"k{at}": at for at in range(200)} | {"text": "a"}).encode() + b"\n"
    assert_same(few * 2)


def test_buffers_of_all_sizes() -> None:
    """Room is made for larger ones, and what was in it is not seen again."""
    for count in (1, 3000, 2, 200_000, 1):
        buffer = b"".join(b'{"text":"%d","number":%d}\n' % (at, at) for at in range(count))
        decoder = ColumnDecoder(JOURNAL, MessageFormat(), scannable(SCHEMA))
        for _ in range(2):
            decoded = decoder.decode(buffer, 5)
            assert decoded.fields is not None
            arrays = arrow_arrays(decoded.fields, SCHEMA)
            assert arrays is not None
            texts, numbers, *_ = arrays
            assert numbers.to_pylist() == list(range(count))
            assert texts[count - 1].as_py() == str(count - 1)


def test_a_scanner_that_is_always_declined_stops_trying() -> None:
    scanner = LineScanner("uuid", [Field("text", "text")])
    for _ in range(3):
        assert scanner.scan(b'{"text":1}\n', 11) is None
    assert scanner.scan(b'{"text":"a"}\n', 13) is not None
    for _ in range(4):
        assert scanner.scan(b'{"text":1}\n', 11) is None
    assert scanner.scan(b'{"text":"a"}\n', 13) is None


def test_too_many_fields_are_left_to_the_specification() -> None:
    wide = pa.schema([(f"f{at}", pa.int64()) for at in range(FIELDS_MAX + 1)])
    assert scannable(wide) == ()
    assert len(scannable(pa.schema(list(wide)[:FIELDS_MAX]))) == FIELDS_MAX
    with pytest.raises(ValueError, match="too many"):
        LineScanner("uuid", [Field(f"f{at}", "integer") for at in range(FIELDS_MAX + 1)])


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


def test_without_the_kernel_the_rest_reads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Numba is not installed."""
    line = f'{{"uuid":"{UUID}","text":"a"}}\n'.encode()
    with_it = ColumnDecoder(JOURNAL, MessageFormat()).decode(line, 0)
    monkeypatch.setattr(json_lines, "kernel", lambda: None)
    without = ColumnDecoder(JOURNAL, MessageFormat(), scannable(SCHEMA)).decode(line, 0)
    assert without.fields is None
    assert without.columns.uuids == with_it.columns.uuids
