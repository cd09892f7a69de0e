"""NaN and infinities in messages: refused when they are published, and read where a type says float."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.errors import InvalidValue
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.framing.framing import MalformedMessage, framing_of
from gazette.message.message import Message
from gazette.message.uuid import CONTINUE_TXN, Clock, UuidMint, new_producer_id
from tests.facts import raises
from tests.fuzzing import examples


class Sale(Message):
    item: str = ""
    amount: float = 0.0


class Pair(Message):
    low: float = 0.0
    high: int | float = 0
    note: str | None = None


class Maybe(Message):
    amount: float | None = None
    count: int = 0


class Line(msgspec.Struct, frozen=True):
    price: float
    count: int = 1


class Basket(Message):
    lines: list[Line] = msgspec.field(default_factory=list)
    rates: dict[str, float] = msgspec.field(default_factory=dict)
    more: Any = None
    note: str | None = None


class Row(Message, array_like=True):
    amount: float = 0.0
    others: tuple[float, ...] = ()


class Renamed(Message, rename="camel"):
    net_price: float = 0.0


@dataclasses.dataclass
class Plain:
    amount: float = 0.0
    uuid: str = ""


class Model(pydantic.BaseModel):
    amount: float = 0.0
    limit: float | None = None
    rates: dict[str, float] = {}
    uuid: str = ""


class Strict(Model):
    model_config = pydantic.ConfigDict(ser_json_inf_nan="constants")


class Texts(Model):
    model_config = pydantic.ConfigDict(ser_json_inf_nan="strings")


class Point(NamedTuple):
    x: float
    y: float


class Counted(Message):
    count: int = 0
    name: str = "null"
    note: str | None = None


def stamped(message: Any, content_type: str = CONTENT_JSON_LINES) -> bytes:
    """Return the frame of a message as publishers write it, behind what a shared buffer holds."""
    framing = framing_of(content_type, type(message))
    stamp = framing.stamper(UuidMint(new_producer_id(random.Random(1)), Clock(1 << 30)))
    buffer = bytearray(b'{"null":null}\n')
    length = len(buffer)
    stamp(message, CONTINUE_TXN, buffer)
    assert framing.codec.encode(message) == bytes(buffer[length:-1])
    return bytes(buffer[length:])


def read(message_type: Any, frame: bytes) -> Any:
    (found,) = framing_of(CONTENT_JSON_LINES, message_type).decode(frame, 0).messages
    return found


NUMBERS = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda one: Sale(amount=one), "amount"),
        (lambda one: Pair(low=1.5, high=one), "high"),
        (lambda one: Pair(low=one, high=-one), "low"),
        (lambda one: Maybe(amount=one), "amount"),
        (lambda one: Basket(lines=[Line(1.5), Line(one)]), "lines[1].price"),
        (lambda one: Basket(rates={"a": one}), 'rates["a"]'),
        (lambda one: Basket(more={"x": [0, (one,)]}), 'more["x"][1][0]'),
        (lambda one: Row(others=(0.5, one)), "others[1]"),
        (lambda one: Renamed(net_price=one), "net_price"),
        (lambda one: Plain(amount=one), "amount"),
        (lambda one: Model(amount=one), "amount"),
        (lambda one: Model(rates={"a": one}), 'rates["a"]'),
        (lambda one: Strict(amount=one), "amount"),
        (lambda one: {"items": [1, {"price": one}]}, 'message["items"][1]["price"]'),
        (lambda one: {"price": one}, 'message["price"]'),
    ],
)
def test_a_number_that_json_does_not_have_is_not_published(
    make: Any, path: str, number: float
) -> None:
    """It would be published as null: a stamper and an encoder refuse it, and name the part."""
    message = make(number)
    framing = framing_of(CONTENT_JSON_LINES, type(message))
    stamp = framing.stamper(UuidMint(new_producer_id(random.Random(1)), Clock(1 << 30)))
    with raises(InvalidValue, path=path, says=type(message).__name__):
        stamp(message, CONTINUE_TXN, bytearray())
    with raises(InvalidValue, path=path):
        framing.encode(message)


@pytest.mark.parametrize(
    "message",
    [
        Sale(amount=1.7976931348623157e308),
        Pair(low=1.7e308, high=1.7e308, note=None),
        Pair(low=-0.0, high=2**63),
        Maybe(),
        Maybe(amount=0.5),
        Basket(note="null", more=None, rates={"null": 1.5}, lines=[Line(0.5)]),
        Row(1.5, (0.5,)),
        Renamed(net_price=2.5),
        Plain(amount=1.5),
        Model(amount=1.5),
        Model(rates={"NaN": 1.0}),
        Texts(amount=math.inf, rates={"a": -math.inf}),
        Counted(),
        {"a": None, "b": [1.5, "NaN"], "c": {"d": "null"}},
    ],
    ids=lambda one: repr(one)[:40],
)
def test_other_messages_are_published_as_before(message: Any) -> None:
    assert read(type(message), stamped(message)) == message


@settings(max_examples=examples(300))
@given(
    st.builds(
        Basket,
        lines=st.lists(st.builds(Line, st.floats()), max_size=3),
        rates=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=2), st.floats()),
        more=st.recursive(st.none() | st.floats(), lambda below: st.lists(below, max_size=3)),
        note=st.none() | st.sampled_from(["null", "NaN"]),
    )
    | st.builds(Pair, low=st.floats(), high=st.floats() | st.integers(-(2**63), 2**63))
    | st.builds(Maybe, amount=st.none() | st.floats())
)
def test_what_is_published_reads_back_equal(message: Any) -> None:
    """Any floats, anywhere: equal when it is read, or refused."""
    frame = None
    try:
        frame = stamped(message)
    except InvalidValue as error:
        refused = error
    if frame is None:
        assert refused.path
        assert any(text in repr(message) for text in ("nan", "inf"))
        return
    assert read(type(message), frame) == message


class Open(Message):
    more: Any = None
    facts: dict[str, Any] | None = None
    parts: list[Any] = msgspec.field(default_factory=list)
    count: int = 0


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (Open(more={7: 1}), "more[7]"),
        (Open(more=(1, 2)), "more"),
        (Open(facts={"at": datetime.now(UTC)}), 'facts["at"]'),
        (Open(facts={"a": [0.5, math.nan]}), 'facts["a"][1]'),
        (Open(parts=[{"a": {1}}]), 'parts[0]["a"]'),
    ],
)
def test_a_field_that_declares_nothing_holds_what_json_has(message: Open, path: str) -> None:
    framing = framing_of(CONTENT_JSON_LINES, Open)
    with raises(InvalidValue, path=path, says="Open"):
        framing.encode(message)
    with raises(InvalidValue, path=path):
        framing.stamper(UuidMint(new_producer_id(random.Random(1)), Clock(1 << 30)))(
            message, CONTINUE_TXN, bytearray()
        )
    kept = Open(more=[{"a": None}], facts={"x": 1.5}, parts=[True, "b"])
    assert read(Open, framing.encode(kept)) == kept


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"a": {7: 1}}, 'message["a"][7]'),
        ({"a": [(1, 2)]}, 'message["a"][0]'),
        ({7: 1}, "message[7]"),
        ({"a": b"x"}, 'message["a"]'),
        ({"a": Point(1.0, 2.0)}, 'message["a"]'),
    ],
)
def test_a_dict_holds_what_json_has(message: dict[Any, Any], path: str) -> None:
    """No type says what it reads back as."""
    with raises(InvalidValue, path=path):
        framing_of(CONTENT_JSON_LINES, dict).encode(message)


LITERALS = {
    "NaN": math.nan,
    "Infinity": math.inf,
    "+Infinity": math.inf,
    "+INF": math.inf,
    "-Infinity": -math.inf,
    "-INF": -math.inf,
}


@pytest.mark.parametrize("literal", LITERALS)
@pytest.mark.parametrize(
    ("message_type", "line", "get"),
    [
        (Sale, '{"item":"NaN \\" NaN","amount":%s}', lambda one: one.amount),
        (Pair, '{"low":1.5,"high": %s }', lambda one: one.high),
        (Maybe, '{"amount":%s}', lambda one: one.amount),
        (Basket, '{"lines":[{"price":%s,"count":2}]}', lambda one: one.lines[0].price),
        (Basket, '{"rates":{"NaN":%s}}', lambda one: one.rates["NaN"]),
        (Basket, '{"more":[{"a":%s}]}', lambda one: one.more[0]["a"]),
        (Row, '[1.0,[2.0,%s],""]', lambda one: one.others[1]),
        (Plain, '{"amount":%s}', lambda one: one.amount),
    ],
)
def test_literals_are_read_where_the_type_says_float(
    message_type: Any, line: str, get: Any, literal: str
) -> None:
    """Lines of other programs may hold them, such as those of Python's own ``json``."""
    good = framing_of(CONTENT_JSON_LINES, message_type).encode(message_type())
    lines = good + (line % literal).encode() + b"\n" + good
    found = framing_of(CONTENT_JSON_LINES, message_type).decode(lines, 0)
    assert found.consumed == len(lines)
    number = get(found.messages[1])
    assert struct.pack(">d", number) == struct.pack(">d", LITERALS[literal])


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_literals_are_read_by_models(literal: str) -> None:
    number = read(Model, f'{{"amount":{literal}}}\n'.encode()).amount
    assert struct.pack(">d", number) == struct.pack(">d", LITERALS[literal])


@pytest.mark.parametrize(
    ("message_type", "line"),
    [
        (Counted, b'{"count":NaN}'),
        (Counted, b'{"name":NaN}'),
        (Sale, b'{"item":NaN,"amount":1.5}'),
        (Sale, b'{"amount":nan}'),
        (Sale, b'{"amount":INF}'),
        (Sale, b'{"amount":-NaN}'),
        (Sale, b'{"amount":NaNo}'),
        (Sale, b'{"other":NaN,"amount":1.5}'),
        (Sale, b'{"amount":NaN'),
        (Sale, b"NaN"),
        (dict, b'{"amount":NaN}'),
    ],
)
def test_other_literals_are_malformed(message_type: Any, line: bytes) -> None:
    with raises(MalformedMessage, begin=0, end=len(line) + 1):
        framing_of(CONTENT_JSON_LINES, message_type).decode(line + b"\n", 0)
