"""Keys: one text for equal values of a type, at every door, and a refusal by name for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NewType
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette import CSVRecord, Message, Source
from gazette.errors import Invalid
from gazette.message.key_hash import fnv32a
from gazette.message.keys import (
    ANY,
    DECIMAL,
    TEXT,
    KeyEncoding,
    canonical_key,
    encoding_named,
    tuple_encoding,
)
from gazette.message.mapping import Partition, Partitions, modulo_mapping
from gazette.protocol.pb import broker_pb2, consumer_pb2
from tests.facts import raises

A_UUID = UUID("12345678-9abc-4def-8123-456789abcdef")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
COUNT = 1000


class Color(StrEnum):
    RED = "r"


class Plain(Enum):
    RED = "r"
    BLUE = "b"


class Level(IntEnum):
    HIGH = 7


Id = NewType("Id", int)


def source_of(kind: Any, name: str = "id") -> Any:
    """Return a source whose key is a field of that type."""
    message = msgspec.defstruct("Keyed", [(name, kind), ("uuid", str, "")], module=__name__)
    return Source("orders", message, partitions=COUNT, key=name)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (str, "x", "x"),
        (str, "1.0", "1.0"),
        (str, "", ""),
        (str, "ü".encode(), "ü"),
        (bytes, b"\xff\0", b"\xff\0"),
        (bytearray, bytearray(b"a"), b"a"),
        (bool, True, "true"),
        (bool, 0, "false"),
        (int, 7, "7"),
        (int, -7, "-7"),
        (int, True, "1"),
        (int, 7.0, "7"),
        (Id, 7, "7"),
        (Annotated[int, msgspec.Meta(ge=1)], 7, "7"),
        (int | None, 7, "7"),
        (float, 1, "1"),
        (float, -0.0, "0"),
        (float, 0.1, "0.1"),
        (float, 1e-7, "0.0000001"),
        (float, 1e23, "99999999999999991611392"),
        (float, 2**53 + 1, "9007199254740992"),
        (int | float, 1.0, "1"),
        (Decimal, Decimal("1.00"), "1"),
        (Decimal, Decimal("-0"), "0"),
        (Decimal, Decimal("1E+2"), "100"),
        (date, date(2026, 1, 31), "2026-01-31"),
        (datetime, NOON, "2026-01-31T12:00:00Z"),
        (datetime, NOON.astimezone(timezone(timedelta(hours=2))), "2026-01-31T12:00:00Z"),
        (UUID, A_UUID, str(A_UUID)),
        (Color, Color.RED, "r"),
        (Plain, Plain.RED, "r"),
        (Level, Level.HIGH, "7"),
        (Literal["a", "b"], "a", "a"),
        (tuple[str, int], ("a", 7), '["a",7]'),
        (tuple[float, ...], (1.0, 2), "[1,2]"),
        (tuple[str, bytes], ('"', b"hi"), '["\\"","aGk="]'),
        (tuple[Plain, Level], (Plain.RED, Level.HIGH), '["r",7]'),
        (Any, True, "true"),
        (Any, 1.0, "1"),
        (Any, (1, "1", True), '[1,"1",true]'),
    ],
)  # fmt: skip
def test_a_typed_value_has_one_text(kind: Any, value: Any, text: Any) -> None:
    source = source_of(kind)
    message = source.message_type(id=value)
    assert source.key_of(message) == text
    expected = fnv32a(text.encode() if isinstance(text, str) else text) % COUNT
    assert source.mapping()(message).journal == source.journals[expected]


VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    bytes: st.binary(),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    Decimal: st.decimals(allow_nan=False, allow_infinity=False, places=3),
    date: st.dates(),
    datetime: st.datetimes(
        datetime(2, 1, 1),  # noqa: DTZ001 - Hypothesis adds the zone.
        timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7))]),
    ),
    UUID: st.uuids(),
    Plain: st.sampled_from(Plain),
    tuple[str, int]: st.tuples(st.text(max_size=3), st.integers(-9, 9)),
    tuple[str, ...]: st.lists(st.text('",\\a', max_size=3), max_size=3).map(tuple),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@given(data=st.data())
def test_equal_values_have_equal_keys_and_different_ones_have_not(kind: Any, data: Any) -> None:
    """And what JSON says of a value, or a text in a path, has the key of the value."""
    source = source_of(kind)
    one, other = data.draw(VALUES[kind]), data.draw(VALUES[kind])
    keys = [source.key_of(source.message_type(id=value)) for value in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)
    encoded = json.loads(msgspec.json.encode(source.message_type(id=one)))["id"]
    assert source.key_encoding.encode(encoded) == keys[0]
    if kind is not bytes:
        assert source.key_encoding.encode(str(keys[0])) == keys[0]
    assert encoding_named(source.key_encoding.name).encode(encoded) == keys[0]


@pytest.mark.parametrize(
    ("kind", "text", "key"),
    [
        (int, "007", "7"),
        (int, "7.0", "7"),
        (int, "+7", "7"),
        (float, "1.0", "1"),
        (float, "1e0", "1"),
        (float, "0.1000000000000000055", "0.1"),
        (Decimal, "1.10", "1.1"),
        (UUID, str(A_UUID).upper(), str(A_UUID)),
        (UUID, A_UUID.hex, str(A_UUID)),
        (datetime, "2026-01-31T14:00:00+02:00", "2026-01-31T12:00:00Z"),
        (bytes, "aGk=", b"hi"),
        (bytes, "_-8=", b"\xff\xef"),
        (tuple[float, UUID], f'[ 1.0, "{A_UUID.hex}" ]', f'[1,"{A_UUID}"]'),
    ],
)
def test_texts_that_mean_one_value_have_one_key(kind: Any, text: str, key: Any) -> None:
    assert source_of(kind).key_encoding.encode(text) == key


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (str, 7),
        (str, "\ud800"),
        (bytes, "no base64!"),
        (bool, 2),
        (bool, "True"),
        (int, 1.5),
        (int, "x"),
        (int, "1_0"),
        (int, 10**1000),
        (float, float("nan")),
        (float, float("-inf")),
        (float, "NaN"),
        (float, 10**400),
        (Decimal, Decimal("sNaN")),
        (Decimal, Decimal("1E+1000000")),
        (Decimal, "1e9999999"),
        (date, NOON),
        (date, "31.1.2026"),
        (datetime, NOON.replace(tzinfo=None)),
        (datetime, "2026-01-01T00:00:00"),
        (datetime, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=2)))),
        (UUID, "x"),
        (tuple[str, int], ("a",)),
        (tuple[str, int], ("a", None)),
        (tuple[str, int], '["a"]'),
        (Any, None),
        (Any, []),
        (Any, {}),
        (Any, object()),
        (Any, ((1,),)),
        (Any, timedelta(1)),
    ],
)
def test_what_cannot_be_a_key_is_refused_by_name(kind: Any, value: Any) -> None:
    source = source_of(kind)
    message = source.message_type(id=value)
    with raises(Invalid, path="key id", says="is no key"):
        source.key_of(message)
    with raises(Invalid, says="is no key"):
        source.mapping()(message)


@pytest.mark.parametrize(
    "kind",
    [dict, list[int], set[str], None, timedelta, str | int, tuple[tuple[int], str], Message],
)
def test_a_type_without_one_text_is_refused_at_start(kind: Any) -> None:
    with raises(Invalid, path="Source('orders').key"):
        source_of(kind)


def test_keys_of_functions_say_what_they_are() -> None:
    """Values that Python takes for equal are not mistaken for each other, in any order."""
    current = Partitions(Partition(f"a/part-{n:03d}", "") for n in range(COUNT))
    mapping = modulo_mapping(lambda: current, lambda value: value)

    def number(value: Any) -> int:
        return int(mapping(value).journal[-3:])

    for value, text in ((True, "true"), (1, "1"), (1.0, "1"), (True, "true"), ("true", "true")):
        assert number(value) == fnv32a(text.encode()) % COUNT
    assert number(bytearray(b"a")) == number(b"a") == number("a") == number(memoryview(b"a"))
    with raises(Invalid, path="key"):
        mapping([1])
    assert canonical_key((1.0, "a")) == '[1,"a"]'


@dataclass
class Row:
    id: float
    uuid: str = ""


class Model(pydantic.BaseModel):
    uuid: str = ""
    id: float = pydantic.Field(alias="ID")


def test_every_kind_of_message_has_keys() -> None:
    numbers: list[tuple[Any, Callable[[float], Any]]] = [
        (Row, lambda n: Row(n)),
        (Model, lambda n: Model(ID=n)),
    ]
    for message_type, make in numbers:
        source: Source[Any] = Source("rows", message_type, key="id")
        assert source.key_of(make(-0.0)) == source.key_of(make(0.0)) == "0"
    csv = Source("rows", CSVRecord, key="1")
    assert csv.key_of(CSVRecord(["", "x"])) == "x"
    with raises(Invalid, path="message"):
        csv.key_of(CSVRecord([""]))
    with raises(Invalid, path="Source('rows').key"):
        Source("rows", CSVRecord, key="word")
    label = Source("rows", broker_pb2.Label, key="prefix")
    assert label.key_of(broker_pb2.Label(prefix=True)) == "true"
    stat = Source("rows", consumer_pb2.StatRequest, key="extension")
    assert stat.key_of(consumer_pb2.StatRequest(extension=b"\xff")) == b"\xff"
    with raises(Invalid, path="Source('rows').key"):
        Source("rows", consumer_pb2.StatRequest, key="header")


def test_types_of_a_union_share_the_key() -> None:
    first: Any = msgspec.defstruct("First", [("id", int)], tag=True)
    same = msgspec.defstruct("Same", [("id", int)], tag=True)
    other = msgspec.defstruct("Other", [("id", str)], tag=True)
    assert Source("both", first | same, key="id").key_encoding.name == "integer"
    for unfit in (first | other, first | msgspec.defstruct("Without", [("n", int)], tag=True)):
        with raises(Invalid, path="Source('both').key"):
            Source("both", unfit, key="id")


def test_names_of_kinds_are_those_of_labels() -> None:
    for name in ("any", "text", "tuple=text+integer", "tuple=float+.."):
        assert encoding_named(name).name == name
    for name in ("", "tuple=x", "complex"):
        with raises(Invalid, path="key"):
            encoding_named(name)


@pytest.mark.parametrize("kind", [DECIMAL, ANY])
@pytest.mark.parametrize("digits", ["0.10000000000000000001", "1e-30", "12345678901234567890.5"])
def test_the_text_of_a_tuple_keeps_each_digit(kind: KeyEncoding, digits: str) -> None:
    """So that a path, ``--key`` and a message with the value agree."""
    pairs = tuple_encoding([kind, TEXT])
    text = pairs.encode((Decimal(digits), "a"))
    assert pairs.encode(text) == text == pairs.encode(f'[{digits},"a"]')
