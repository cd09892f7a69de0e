"""Fields of published messages: what is written reads back equal, or is refused by the name of its field."""

from __future__ import annotations

import enum
import math
import random
import uuid
from collections import defaultdict
from dataclasses import make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, cast
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import Message
from gazette.client.append.appender import AppendParams
from gazette.errors import Invalid, InvalidValue
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import fixed_mapping
from gazette.message.publisher import Appends, Publisher
from gazette.message.values import ValueEncoding
from gazette.runtime.tasks import resolved
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.fuzzing import examples

GOOD_FIRST = 16
"""Messages of a type that are right, before one that may not be."""
TO = fixed_mapping("a/journal", CONTENT_JSON_LINES)


class Kept:
    """Appends that are kept in memory."""

    must_wait = False

    def __init__(self) -> None:
        self.journals: defaultdict[str, bytearray] = defaultdict(bytearray)

    def journal(self, params: AppendParams) -> Any:
        return _KeptJournal(self.journals[params.journal])


class _KeptJournal:
    must_wait = False

    def __init__(self, content: bytearray) -> None:
        self.content = content

    def enqueue(self, content: bytearray) -> Any:
        self.content += content
        return resolved(None)

    def in_place(self, write: Any, item: Any, flags: int, length_max: int) -> Any:
        begin = len(self.content)
        try:
            write(item, flags, self.content)
        except BaseException:
            del self.content[begin:]
            raise
        return resolved(None)

    def await_room(self) -> None:
        pass


class Color(enum.Enum):
    RED = "red"


class Text(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class Name(str):
    __slots__ = ()


class Inner(msgspec.Struct):
    n: int = 0


AT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
SCALARS: dict[Any, Any] = {
    str: "text",
    int: 7,
    float: 1.5,
    bool: True,
    bytes: b"\x00\xff",
    datetime: AT,
    date: AT.date(),
    time: time(1, 2, 3),
    timedelta: timedelta(seconds=5),
    Decimal: Decimal("1.10"),
    uuid.UUID: uuid.UUID(int=5),
    Color: Color.RED,
    Text: Text.A,
    str | None: None,
    float | None: 2.5,
    int | str: "either",
    int | float: 3,
    Literal["a", "b"]: "a",
    Annotated[int, msgspec.Meta(ge=3, le=9)]: 5,
    Annotated[str, msgspec.Meta(max_length=4)]: "four",
    Inner: Inner(1),
    list[int]: [1],
    dict[str, int]: {"a": 1},
    tuple[int, ...]: (1, 2),
    set[int]: {1},
}
"""Types of fields, each with a value of it."""
OTHERS: list[Any] = [
    *SCALARS.values(),
    Number.ONE,
    Name("name"),
    -1,
    1 << 53,
    (1 << 53) + 1,
    10,
    "longer than four",
    0.0,
    1e300,
    math.nan,
    math.inf,
    False,
    {},
    [],
    object(),
    "2026-01-02T03:04:05Z",
    "1.10",
    frozenset({1}),
    AT.replace(tzinfo=None),
    AT.replace(tzinfo=ZoneInfo("Asia/Tokyo")),
    AT.replace(tzinfo=timezone(timedelta(seconds=61))),
    time(1, tzinfo=timezone(timedelta(seconds=61))),
    timedelta.min,
]
KINDS = list(SCALARS)


def publisher_of() -> tuple[Publisher, Kept]:
    kept = Kept()
    clock = ManualClock(1_700_000_000.0)
    return Publisher.standalone(cast(Appends, kept), clock, random.Random(1)), kept


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_what_is_published_reads_back_equal_or_is_refused_by_its_field(data: Any) -> None:
    """Any types of fields with any values: as first messages of a type, and behind many that were right."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    names = [f"f{number}" for number in range(len(kinds))]
    fields: Any = [*zip(names, kinds, strict=True)]
    as_struct = data.draw(st.booleans())
    kind: Any = (
        msgspec.defstruct("Made", [*fields, ("uuid", str, "")])
        if as_struct
        else make_dataclass("Made", [*fields, ("uuid", str, "")])
    )
    right = [SCALARS[one] for one in kinds]
    publisher, kept = publisher_of()
    for _ in range(data.draw(st.sampled_from((0, GOOD_FIRST, GOOD_FIRST + 3)))):
        publisher.publish_committed(TO, kind(*right))
    values = list(right)
    at = data.draw(st.integers(0, len(kinds) - 1))
    values[at] = data.draw(st.sampled_from(OTHERS))
    before = bytes(kept.journals["a/journal"])
    refused: InvalidValue | None = None
    try:
        publisher.publish_committed(TO, kind(*values))
    except InvalidValue as error:
        refused = error
    if refused is not None:
        assert kept.journals["a/journal"] == before
        assert (refused.path or "message").startswith((names[at], "message"))
        return
    line = bytes(kept.journals["a/journal"][len(before) :])
    back = msgspec.json.decode(line, type=kind)
    assert [getattr(back, name) for name in names] == values


class Order(Message):
    word: str
    n: int
    price: float = 1.0
    tags: list[str] = msgspec.field(default_factory=list)
    limit: Annotated[int, msgspec.Meta(ge=3)] = 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"word": 1}, "word"),
    ({"n": "7"}, "n"),
    ({"n": None}, "n"),
    ({"n": True}, "n"),
    ({"price": (1 << 53) + 1}, "price"),
    ({"tags": ("a",)}, "tags"),
    ({"tags": None}, "tags"),
]


@pytest.mark.parametrize("warm", [0, GOOD_FIRST + 1])
@pytest.mark.parametrize(("values", "path"), WRONG)
def test_a_field_of_another_type_is_named(warm: int, values: dict[str, Any], path: str) -> None:
    """Check all ways to publish, and that nothing is written."""
    publisher, kept = publisher_of()
    for _ in range(warm):
        publisher.publish_committed(TO, Order(word="a", n=1))
    before = bytes(kept.journals["a/journal"])
    wrong: Any = Order(**{"word": "a", "n": 1, **values})
    with raises(InvalidValue, path=path):
        publisher.publish_committed(TO, wrong)
    with raises(InvalidValue, path=path):
        publisher.publish_uncommitted(TO, wrong)
    with raises(InvalidValue, path=path):
        publisher.publish_committed_batch(TO, [wrong])
    assert publisher.build_ack_intents() == {}
    assert kept.journals["a/journal"] == before


def test_a_constraint_is_checked_in_each_message() -> None:
    publisher, _ = publisher_of()
    for _ in range(GOOD_FIRST + 3):
        publisher.publish_committed(TO, Order(word="a", n=1, limit=3))
    with raises(InvalidValue, says="3"):
        publisher.publish_committed(TO, Order(word="a", n=1, limit=2))


def test_values_that_read_back_equal_are_taken() -> None:
    """An int for a float, and members of enums whose values are of the declared type."""
    publisher, kept = publisher_of()
    sent: Any = [
        Order(word=Text.A, n=Number.ONE, price=3),
        Order(word="x", n=1, price=1 << 53),
    ]
    for message in sent * GOOD_FIRST:
        publisher.publish_committed(TO, message)
    lines = bytes(kept.journals["a/journal"]).splitlines()
    found = [msgspec.json.decode(line, type=Order) for line in lines[-2:]]
    assert [(one.word, one.n, one.price) for one in found] == [("a", 1, 3.0), ("x", 1, 2.0**53)]


class Renamed(enum.Enum):
    """An enum whose members are not found by their values."""

    OPEN = "open"

    def __init__(self, value: str) -> None:
        self._value_ = value.upper()


class Ticket(Message):
    state: Renamed


def test_a_member_is_refused_that_is_not_found_by_its_value() -> None:
    publisher, kept = publisher_of()
    with raises(InvalidValue, says="OPEN"):
        publisher.publish_committed(TO, Ticket(state=Renamed.OPEN))
    assert not kept.journals["a/journal"]


class Meeting(pydantic.BaseModel):
    uuid: str = ""
    begin: datetime
    breaks: list[time] = []


@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_of_a_model_keeps_its_fold_or_is_refused(fold: int) -> None:
    """A time without a zone that comes twice, as summer time ends."""
    publisher, kept = publisher_of()
    first = datetime(2026, 10, 25, 1, 30, tzinfo=UTC)
    summer_ends = datetime(2026, 10, 25, 1, 30, fold=fold)  # noqa: DTZ001
    clock = time(1, 30, fold=fold)
    publisher.publish_committed(TO, Meeting(begin=first))
    for meeting, path in [
        (Meeting(begin=summer_ends), "begin"),
        (Meeting(begin=first, breaks=[clock]), "breaks[0]"),
    ]:
        before = bytes(kept.journals["a/journal"])
        if fold:
            with raises(InvalidValue, path=path):
                publisher.publish_committed(TO, meeting)
            assert kept.journals["a/journal"] == before
        else:
            publisher.publish_committed(TO, meeting)
            line = bytes(kept.journals["a/journal"])[len(before) :]
            assert Meeting.model_validate_json(line) == meeting


class Sealed(Message):
    content: msgspec.Raw


def test_a_raw_text_is_refused_that_is_no_unicode() -> None:
    publisher, kept = publisher_of()
    with raises(InvalidValue, path="content"):
        publisher.publish_committed(TO, Sealed(content=msgspec.Raw(b'["\xff"]')))
    assert not kept.journals["a/journal"]
    publisher.publish_committed(TO, Sealed(content=msgspec.Raw('["é"]'.encode())))


@pydantic.dataclasses.dataclass
class Checked:
    uuid: str = ""
    n: int = pydantic.Field(default=5, gt=0)
    tags: list[str] = pydantic.Field(default_factory=list)


class Around(Message):
    checked: Checked | None = None


@pytest.mark.parametrize("message_type", [Checked, Around])
def test_a_dataclass_of_pydantic_is_refused(message_type: Any) -> None:
    """Readers would pass over its constraints, and give an object of pydantic as a default."""
    with raises(Invalid, says="Checked is a dataclass of pydantic"):
        framing_of(CONTENT_JSON_LINES, message_type)
    with raises(Invalid, says="Checked is a dataclass of pydantic"):
        ValueEncoding(dict[str, message_type])
