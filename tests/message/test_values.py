"""Values as JSON: what is written reads back equal, or is refused with the path of the part."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
import threading
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID, uuid1
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.errors import Corrupt, Invalid
from gazette.message.values import ValueEncoding, finite
from tests.facts import raises
from tests.fuzzing import examples

CASES = examples(400)


class Color(enum.IntEnum):
    RED = 1
    BLUE = 2


class Name(str):
    """A subclass of text."""

    __slots__ = ()


class Whole(int):
    """A subclass of integers."""


class Point(NamedTuple):
    x: int
    y: float


class Row(TypedDict, total=False):
    count: int
    seen: set[int]


class Sale(msgspec.Struct, rename="camel"):
    item_id: int = 0
    price: float = 0.0
    at: datetime | None = None
    tags: tuple[str, ...] = ()


class Tree(msgspec.Struct, array_like=True, frozen=True):
    name: str
    below: tuple[Tree, ...] = ()


@dataclasses.dataclass
class Plain:
    amounts: dict[int, Decimal] = dataclasses.field(default_factory=dict)
    color: Color = Color.RED
    raw: bytes = b""


@dataclasses.dataclass
class Computed:
    size: int = 0

    @cached_property
    def double(self) -> int:
        return 2 * self.size


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal, with the same types all the way down: the slow and plain way."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return bool(one == other) and all(any(same(a, b) for b in other) for a in one)
    if isinstance(one, float):
        return bool(one == other) and math.copysign(1, one) == math.copysign(1, other)
    if isinstance(one, datetime | time):
        zones = one.utcoffset() == other.utcoffset() and type(one.tzinfo) is type(other.tzinfo)
        return bool(one == other and zones and one.fold == other.fold)
    if isinstance(one, Decimal):
        return bool(one.as_tuple() == other.as_tuple())
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, f), getattr(other, f)) for f in one.__struct_fields__)
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    return bool(one == other)


ints = st.integers(-(2**70), 2**70) | st.integers(-10, 10)
zones = st.sampled_from(
    [
        None,
        UTC,
        timezone(timedelta(hours=2)),
        timezone(timedelta(seconds=61)),
        ZoneInfo("Asia/Tokyo"),
    ]
)
leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    ints,
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.binary(max_size=3).map(bytearray),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(timezones=st.sampled_from([None, UTC])),
    st.timedeltas(),
    st.decimals(),
    st.uuids(),
    st.sampled_from([*Color, Name("a"), Whole(7), object(), 1j, range(3), msgspec.UNSET]),
    st.builds(Sale, item_id=ints, price=st.floats(), at=st.none() | st.datetimes(timezones=zones)),
    st.builds(Plain, raw=st.binary(max_size=3)),
    st.builds(Point, x=ints, y=st.floats()),
)
keys = st.one_of(ints, st.text(max_size=3), st.booleans(), st.floats(), st.none(), st.dates())
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda below: st.one_of(
        st.lists(below, max_size=4),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(keys, below, max_size=4),
        st.sets(ints | st.text(max_size=2) | st.booleans() | st.floats(), max_size=4),
        st.builds(Tree, st.text(max_size=2)),
    ),
    max_leaves=12,
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), below, max_size=4)
    ),
    max_leaves=20,
)

whole = st.integers(-(2**63), 2**64 - 1)
real = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec="utf-8"), max_size=5)
offsets = st.sampled_from([None, UTC, timezone(timedelta(minutes=-90))])
utc = st.datetimes(timezones=offsets).map(lambda at: at.replace(fold=0))
times = st.times(timezones=offsets).map(lambda at: at.replace(fold=0))
durations = st.timedeltas(timedelta(days=-999), timedelta(days=999))
trees: st.SearchStrategy[Tree] = st.recursive(
    st.builds(Tree, text),
    lambda below: st.builds(Tree, text, st.lists(below, max_size=2).map(tuple)),
    max_leaves=4,
)
sales = st.builds(Sale, whole, real, st.none() | utc, st.lists(text, max_size=2).map(tuple))
amounts = st.decimals(allow_nan=False, allow_infinity=False)
DECLARED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (Any, json_values),
    (dict, st.dictionaries(text, json_values, max_size=3)),
    (list, st.lists(json_values, max_size=3)),
    (dict[int, int], st.dictionaries(whole, whole, max_size=3)),
    (
        dict[str, dict[int, list[float]]],
        st.dictionaries(text, st.dictionaries(whole, st.lists(real))),
    ),
    (int | float, whole | real),
    (str | None, text | st.none()),
    (tuple[int | float, int], st.tuples(whole | real, whole)),
    (set[int], st.sets(whole, max_size=5)),
    (frozenset[tuple[int, str]], st.frozensets(st.tuples(whole, text), max_size=3)),
    (
        dict[date, set[UUID]],
        st.dictionaries(st.dates(), st.sets(st.uuids(), max_size=2), max_size=2),
    ),
    (list[datetime], st.lists(utc, max_size=3)),
    (dict[str, timedelta], st.dictionaries(text, durations, max_size=3)),
    (list[bytes | int], st.lists(st.binary(max_size=5) | whole, max_size=3)),
    (dict[Color, Decimal], st.dictionaries(st.sampled_from(Color), amounts, max_size=2)),
    (Literal["a", 3], st.sampled_from(["a", 3])),
    (Point, st.builds(Point, whole, real)),
    (Row, st.fixed_dictionaries({}, optional={"count": whole, "seen": st.sets(whole, max_size=3)})),
    (Sale, sales),
    (dict[str, Sale], st.dictionaries(text, sales, max_size=3)),
    (Tree, trees),
    (
        list[Plain],
        st.lists(
            st.builds(
                Plain,
                st.dictionaries(whole, amounts, max_size=2),
                st.sampled_from(Color),
                st.binary(max_size=4),
            ),
            max_size=2,
        ),
    ),
    (Sale | int | None, sales | whole | st.none()),
    (dict[str, Any], st.dictionaries(text, json_values, max_size=3)),
    (time, times),
]
ENCODINGS = [ValueEncoding[Any](declared) for declared, _ in DECLARED]


@settings(max_examples=CASES)
@given(st.integers(0, len(DECLARED) - 1), values)
def test_what_is_accepted_reads_back_equal(index: int, value: Any) -> None:
    """Any value, as any type: it comes back with the same types, or an error names its part."""
    encoding = ENCODINGS[index]
    data = refused = None
    try:
        data = encoding.encode(value, "state")
    except Invalid as error:
        refused = error
    if data is None:
        assert refused is not None
        assert refused.path.startswith("state")
        assert refused.hint
        return
    assert same(encoding.decode(data), value)
    assert b"\n" not in data


@pytest.mark.parametrize("index", range(len(DECLARED)))
def test_values_of_a_type_are_kept(index: int) -> None:
    """A declared type is lossless: no value of it is refused."""
    encoding = ENCODINGS[index]

    @settings(max_examples=examples(60))
    @given(DECLARED[index][1])
    def check(value: Any) -> None:
        assert same(encoding.decode(encoding.encode(value)), value)

    check()


@st.composite
def planted(draw: st.DrawFn) -> tuple[Any, str]:
    """Return a value of JSON with one part that JSON does not have, and the path of that part."""
    value: Any = draw(
        st.sampled_from(
            [
                (1, 2),
                {1},
                b"x",
                math.nan,
                -math.inf,
                Decimal(1),
                Color.RED,
                Name("x"),
                "\ud800",
                UUID(int=1),
            ]
        )
    )
    path = ""
    for _ in range(draw(st.integers(0, 6))):
        around = draw(st.lists(json_values, max_size=3))
        if draw(st.booleans()):
            at = draw(st.integers(0, len(around)))
            value, path = [*around[:at], value, *around[at:]], f"[{at}]{path}"
        else:
            value = {**{f"k{n}": one for n, one in enumerate(around)}, "bad": value}
            path = f'["bad"]{path}'
    return value, f"state{path}"


@settings(max_examples=examples(150))
@given(planted())
def test_the_path_leads_to_the_part(case: tuple[Any, str]) -> None:
    value, path = case
    with raises(Invalid, path=path):
        ValueEncoding[Any]().encode(value, "state")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: Any = None
for _ in range(5_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("declared", "value", "path", "advises"),
    [
        (dict, {"sales": {7: 2}}, 'state["sales"][7]', "dict[int, int]"),
        (dict, {"at": datetime(2026, 1, 1, tzinfo=UTC)}, 'state["at"]', "datetime"),
        (dict, {"seen": {1}}, 'state["seen"]', "set[int]"),
        (dict, {"pair": (1, "a")}, 'state["pair"]', "tuple[int, str]"),
        (Any, [0.5, math.nan], "state[1]", ""),
        (list[float | None], [0.5, math.nan], "state[1]", ""),
        (dict[int, int], {True: 1}, "state[True]", ""),
        (dict[int, int], {7: 2.0}, "state[7]", ""),
        (dict[str, float], {"a": 2}, 'state["a"]', "2.0"),
        (dict[str, Any], {"a": {"b": (1,)}}, 'state["a"]["b"]', "tuple[int]"),
        (dict[str, Sale], {"a": Sale(price=math.inf)}, 'state["a"].price', ""),
        (
            dict[str, Sale],
            {"a": Sale(at=datetime.now(ZoneInfo("Asia/Tokyo")))},
            'state["a"].at',
            "UTC",
        ),
        (Sale, Sale(tags=("a", 1)), "state.tags[1]", ""),  # type: ignore[arg-type]
        (Tree, Tree("a", (Tree("\ud800"),)), "state.below[0].name", ""),
        (Plain, Plain({1: 2}), "state.amounts[1]", "Decimal"),  # type: ignore[dict-item]
        (Plain, Plain(color=1), "state.color", ""),  # type: ignore[arg-type]
        (Row, {"count": 1, "other": 2}, 'state["other"]', ""),
        (datetime, datetime(2026, 1, 1, fold=1, tzinfo=UTC), "state", ""),
        (list[bytes], [bytearray(b"a")], "state[0]", ""),
        (Any, CYCLE, "state", ""),
        (Any, DEEP, "state", ""),
        (list, [10**5_000], "state[0]", ""),
        (msgspec.Raw, msgspec.Raw(b"[1,\n2]"), "state", ""),
    ],
)
def test_refusals_name_the_part(declared: Any, value: Any, path: str, advises: str) -> None:
    with raises(Invalid, "key", path=path, advises=advises):
        ValueEncoding[Any](declared).encode(value, "state", key="a")


def test_an_attribute_that_is_no_field_is_not_lost() -> None:
    encoding = ValueEncoding[Computed](Computed)
    value = Computed(3)
    assert value.double == 6
    assert encoding.decode(encoding.encode(value)) == value
    value.more = 1  # type: ignore[attr-defined]
    with raises(Invalid, path="value.more"):
        encoding.encode(value)


def test_what_is_nested_deeply_can_be_read_lower_on_the_stack() -> None:
    """A reader has less of the stack left than the writer had, and reads what was accepted."""
    encoding = ValueEncoding[Any]()

    def at_depth(frames: int, data: bytes) -> Any:
        return at_depth(frames - 1, data) if frames else encoding.decode(data)

    accepted = 0
    for depth in range(50, sys.getrecursionlimit(), 25):
        value: Any = None
        for _ in range(depth):
            value = [value]
        try:
            data = encoding.encode(value)
        except Invalid:
            continue
        at_depth(60, data)
        accepted = depth
    assert accepted >= 200


def test_a_type_that_json_cannot_be_read_as() -> None:
    with raises(Invalid, path="state_type"):
        ValueEncoding(Sale | Plain, "state_type")


def test_a_value_of_another_type_is_corrupt() -> None:
    """It was written with another declaration: no message is to blame."""
    with raises(Corrupt, "windows"):
        ValueEncoding[dict[int, int]](dict[int, int]).decode(b'{"a":1}', windows="clicks")


def test_any_thread_may_use_an_encoding() -> None:
    encoding = ValueEncoding[Any](dict[str, Sale])
    found: list[bool] = []

    def run(number: int) -> None:
        value = {str(n): Sale(n, float(number)) for n in range(200)}
        found.extend(encoding.decode(encoding.encode(value)) == value for _ in range(20))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [True] * 80


def test_the_identity_of_a_type_is_its_text() -> None:
    """It is kept beside a table: it must not depend on the process, or on the order of a union."""
    texts = {
        ValueEncoding[Any](declared).identity
        for declared in (dict[int, float | int], dict[int, int | float])
    }
    assert texts == {"dict[int, float | int]"}
    assert ValueEncoding[Any](dict[str, Sale]).identity == "dict[str, Sale]"
    assert ValueEncoding[Any](tuple[int, ...]).identity == "tuple[int, ...]"
    assert ValueEncoding[Any]().identity == "Any"
    assert ValueEncoding[Any](uuid1().__class__ | None).identity == "None | UUID"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (math.nan, "value"),
        ((1, -math.inf), "value[1]"),
        ({"a": Sale(price=math.inf)}, 'value["a"].price'),
    ],
)
def test_numbers_that_are_not_finite(value: Any, path: str) -> None:
    with raises(Invalid, path=path):
        finite(value)
    assert finite((1.5, None, "nan")) == (1.5, None, "nan")


@pytest.mark.parametrize("declared", [dict, Any])
def test_a_number_of_too_many_digits_has_a_path(declared: Any) -> None:
    with raises(Invalid, path='state["a"][1]'):
        encoding: ValueEncoding[Any] = ValueEncoding(declared)
        encoding.encode({"a": [1, 10**5000]}, "state")


@pytest.mark.parametrize(
    ("declared", "written"),
    [
        (dict[int, "Nowhere"], "dict[int, "),  # type: ignore[name-defined]  # noqa: F821
        (list[dict[str, int | complex]], "list[dict[str, int | complex]]"),
        (int | complex | str, "int | complex | str"),
    ],
)
def test_a_type_that_is_refused_is_shown_as_it_is_written(declared: Any, written: str) -> None:
    with raises(Invalid, path="state_type", says=f"values of type {written}"):
        ValueEncoding(declared, "state_type")
