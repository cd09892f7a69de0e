"""What fields of messages hold: it reads back equal, or is refused by its path, however many came before."""

from __future__ import annotations

import math
import operator
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pytest

from gazette import Message
from gazette.errors import InvalidValue
from gazette.message.publisher import Publisher
from gazette.message.value_parts import key_step
from tests.facts import raises
from tests.fuzzing import seeds
from tests.meaning.values import Kind, kind_of, odd, same
from tests.message.test_read_back import TO, Kept, Number, Text, publisher_of

SECONDS = timezone(timedelta(seconds=61))
LONDON = ZoneInfo("Europe/London")
FOLDED = datetime(2026, 1, 1, fold=1)  # noqa: DTZ001 - such times are checked.
SUMMER_ENDS = datetime(2026, 10, 25, 1, 30, tzinfo=LONDON)


class Line(msgspec.Struct):
    count: int = 0
    price: float = 0.0
    more: Any = None
    at: datetime | None = None


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Plain:
    names: list[str] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)


class Order(Message):
    numbers: list[int] = msgspec.field(default_factory=list)
    rates: list[float] = msgspec.field(default_factory=list)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    ids: dict[int, str] = msgspec.field(default_factory=dict)
    pair: tuple[int, int] = (1, 2)
    words: tuple[str, ...] = ()
    seen: set[int] = msgspec.field(default_factory=set)
    point: Point = Point(1, 2.0)
    line: Line = msgspec.field(default_factory=Line)
    lines: list[Line] = msgspec.field(default_factory=list)
    by_name: dict[str, list[Line]] = msgspec.field(default_factory=dict)
    plain: Plain = msgspec.field(default_factory=Plain)
    more: Any = None
    times: list[datetime] = msgspec.field(default_factory=list)
    clock: time | None = None
    raw: msgspec.Raw = msgspec.Raw(b"{}")
    amounts: list[Decimal] = msgspec.field(default_factory=list)


def good(number: int) -> Order:
    return Order(
        numbers=[number, 2],
        rates=[0.5, float(number)],
        counts={"a": number, "b": 2},
        ids={number: "a"},
        words=("a", "b"),
        seen={number},
        line=Line(number, 2.5, {"a": [None, True, 1.5]}, datetime(2026, 1, 1, tzinfo=UTC)),
        lines=[Line(), Line(number)],
        by_name={"a": [Line(number)]},
        plain=Plain(["a"], {number: 1.5}),
        more=[{"a": number}],
        times=[datetime(2026, 1, 1, tzinfo=UTC), FOLDED.replace(fold=0)],
        amounts=[Decimal("1.10")],
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"numbers": ["x"]}, "numbers[0]"),
    ({"numbers": [1, 2, 3.0]}, "numbers[2]"),
    ({"numbers": [1, True]}, "numbers[1]"),
    ({"numbers": [1, None]}, "numbers[1]"),
    ({"numbers": (1, 2)}, "numbers"),
    ({"numbers": [1, 10**5_000]}, "numbers[1]"),
    ({"rates": [3, (1 << 60) + 1]}, "rates[1]"),
    ({"rates": [1.0, math.nan]}, "rates[1]"),
    ({"rates": [3, "x"]}, "rates[1]"),
    ({"counts": {1: 1}}, "counts[1]"),
    ({"counts": {"a": 1, "b": "2"}}, 'counts["b"]'),
    ({"counts": {"a": 1, "\ud800": 2}}, 'counts["\\ud800"]'),
    ({"ids": {"a": "b"}}, 'ids["a"]'),
    ({"ids": {7: "a", 8: None}}, "ids[8]"),
    ({"pair": (1, 2, 3)}, "pair"),
    ({"pair": (1, "2")}, "pair[1]"),
    ({"words": ("a", b"b")}, "words[1]"),
    ({"seen": {1, "a"}}, "seen"),
    ({"seen": [1]}, "seen"),
    ({"point": Point("x", 1.0)}, "point[0]"),  # type: ignore[arg-type]
    ({"line": Line(count="x")}, "line.count"),  # type: ignore[arg-type]
    ({"line": Line(price=-math.inf)}, "line.price"),
    ({"line": Line(more={7: 1})}, "line.more[7]"),
    ({"line": Line(more=(1, 2))}, "line.more"),
    ({"line": Line(more=[b"x"])}, "line.more[0]"),
    ({"line": Line(more={"a": {1}})}, 'line.more["a"]'),
    ({"line": Line(more=FOLDED.replace(fold=0))}, "line.more"),
    ({"line": Line(more=math.nan)}, "line.more"),
    ({"line": Line(at=datetime(2026, 1, 1, tzinfo=SECONDS))}, "line.at"),
    ({"line": Line(at=FOLDED)}, "line.at"),
    ({"line": {"count": 1}}, "line"),
    ({"lines": [Line(), Line(count=None)]}, "lines[1].count"),  # type: ignore[arg-type]
    ({"lines": [Line(), Line(more=[{"a": (1,)}])]}, 'lines[1].more[0]["a"]'),
    ({"by_name": {"a": [Line(), Line(price="x")]}}, 'by_name["a"][1].price'),  # type: ignore[arg-type]
    ({"plain": Plain(["a", 1])}, "plain.names[1]"),  # type: ignore[list-item]
    ({"plain": Plain([], {"a": 1.0})}, 'plain.rates["a"]'),  # type: ignore[dict-item]
    ({"more": {"a": [{7: 1}]}}, 'more["a"][0][7]'),
    ({"more": [1, Number.ONE]}, "more[1]"),
    ({"line": Line(more={"a": Text.A})}, 'line.more["a"]'),
    ({"line": Line(more={Text.A: 1})}, "line.more[<Text.A: 'a'>]"),
    ({"lines": [Line(more=OrderedDict(a=1))]}, "lines[0].more"),
    ({"times": [datetime(2026, 1, 1, tzinfo=UTC), SUMMER_ENDS.replace(fold=1)]}, "times[1]"),
    ({"times": [datetime(2026, 1, 1, tzinfo=LONDON), FOLDED]}, "times[1]"),
    ({"clock": time(1, tzinfo=SECONDS)}, "clock"),
    ({"clock": time(1, fold=1)}, "clock"),
    ({"raw": msgspec.Raw(b"{\n}")}, "raw"),
    ({"raw": msgspec.Raw(b"{")}, "raw"),
    ({"raw": msgspec.Raw(b'1,"pair":[3,4]')}, "pair[0]"),
    ({"amounts": [Decimal(1), "1.0"]}, "amounts[1]"),
]  # fmt: skip


class Writer:
    """A publisher, and what is in its journal."""

    def __init__(self) -> None:
        self.publisher: Publisher
        self.kept: Kept
        self.publisher, self.kept = publisher_of()

    @property
    def content(self) -> bytes:
        return bytes(self.kept.journals["a/journal"])

    def write(self, message: Any) -> bytes:
        """Publish a message. Return its line."""
        before = len(self.content)
        self.publisher.publish_committed(TO, message)
        return self.content[before:]

    def require_refused(self, message: Any, path: str) -> None:
        """Require that each way to publish a message names its part, and writes nothing."""
        publisher, before = self.publisher, self.content
        ways: list[Callable[[], Any]] = [
            lambda: publisher.publish_committed(TO, message),
            lambda: publisher.publish_uncommitted(TO, message),
            lambda: publisher.publish_committed_batch(TO, [message]),
        ]
        for way in ways:
            with raises(InvalidValue, path=path):
                way()
        assert publisher.build_ack_intents() == {}
        assert self.content == before


def test_a_wrong_part_is_refused_behind_a_thousand_messages() -> None:
    writer = Writer()
    for values, path in WRONG:
        writer.require_refused(Order(**values), path)
    for number in range(1_000):
        message = good(number)
        found = msgspec.json.decode(writer.write(message), type=Order)
        assert found == message
    for values, path in WRONG:
        writer.require_refused(Order(**values), path)


class At(Message):
    """A message whose fields hold no others."""

    day: datetime | None = None
    clock: time | None = None
    price: float = 0.0


@pytest.mark.parametrize("warm", [0, 20])
@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"day": datetime(2026, 1, 1, tzinfo=SECONDS)}, "day"),
        ({"day": FOLDED}, "day"),
        ({"day": SUMMER_ENDS.replace(fold=1)}, "day"),
        ({"clock": time(1, tzinfo=SECONDS)}, "clock"),
        ({"price": (1 << 60) + 1}, "price"),
    ],
)
def test_a_time_or_number_that_changes_is_refused(
    warm: int, values: dict[str, Any], path: str
) -> None:
    writer = Writer()
    for _ in range(warm):
        writer.write(At(datetime(2026, 1, 1, tzinfo=UTC), time(1), 0.5))
    writer.require_refused(At(**values), path)
    others = (datetime(2026, 1, 1, tzinfo=LONDON), FOLDED.replace(fold=0), SUMMER_ENDS)
    for day in others[:2]:
        assert msgspec.json.decode(writer.write(At(day)), type=At).day == day


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"a": [{7: 1}]}, 'message["a"][0][7]'),
        ({"a": [1, (2,)]}, 'message["a"][1]'),
        ({"a": {"b": math.inf}}, 'message["a"]["b"]'),
        ({"a": msgspec.Raw(b"1")}, 'message["a"]'),
        ({"a": Point(1, 2.0)}, 'message["a"]'),
        ({"a": 1, "b": Number.ONE}, 'message["b"]'),
    ],
)
def test_a_dict_is_refused_behind_others(message: dict[str, Any], path: str) -> None:
    writer = Writer()
    for number in range(20):
        writer.write({"a": [{"b": number, "c": [None, 0.5, {}]}]})
    writer.require_refused(message, path)


@pytest.mark.parametrize(
    "values",
    [
        {"rates": [3, 2.5, 1 << 53, 1 << 60]},
        {"numbers": [Number.ONE, 2]},
        {"words": (Text.A,)},
        {"counts": defaultdict(int, a=1)},
        {"counts": OrderedDict(b=1, a=2)},
        {"seen": frozenset({1})},
        {"line": Line(price=3)},
        {"point": Point(1, 2)},
        {"times": [datetime(2026, 7, 1, tzinfo=LONDON), FOLDED.replace(fold=0)]},
        {"more": [{"a": 1 << 70}]},
        {"amounts": [1, 0.5]},
        {"plain": Plain(["a"], {1: 2})},
        {"clock": time(1, tzinfo=timezone(timedelta(hours=2)))},
    ],
)
def test_an_equal_value_is_taken(values: dict[str, Any]) -> None:
    """As type checkers do, which take an int for a float, and a member of an enum for its value."""
    writer, message = Writer(), Order(**values)
    for _ in range(3):
        assert msgspec.json.decode(writer.write(message), type=Order) == message


class Loose(msgspec.Struct):
    """All of these are equal."""

    rates: list[float]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loose)


@dataclass
class Partly:
    rates: list[float] = field(compare=False)


class Rounded(msgspec.Struct):
    """Each that is read has rounded numbers."""

    rates: list[float]

    def __post_init__(self) -> None:
        self.rates = [*map(round, self.rates)]


@pytest.mark.parametrize(
    ("kind", "rates", "path"),
    [
        (Loose, [0.5, (1 << 60) + 1], "held.rates[1]"),
        (Partly, [0.5, (1 << 60) + 1], "held.rates[1]"),
        (Rounded, [1.0, 0.5], "held.rates[1]"),
    ],
)
def test_the_application_does_not_decide_what_is_equal(
    kind: Any, rates: list[float], path: str
) -> None:
    made: Any = msgspec.defstruct("Made", [("held", kind), ("uuid", str, "")])
    writer = Writer()
    writer.write(made(kind([2.0, 3])))
    held = kind([])
    held.rates = rates
    writer.require_refused(made(held), path)


class Stranger(msgspec.Struct):
    """Fits no type, and has JSON."""

    strange: int = 1


def holder(kinds: list[Kind], rng: random.Random) -> Callable[[list[Any]], Any]:
    """Return a function from values to a message that holds them in its fields, or one level further in."""
    names = [f"f{number}" for number in range(len(kinds))]
    fields: Any = [(name, one.type) for name, one in zip(names, kinds, strict=True)]
    if rng.randrange(2):
        made: Any = msgspec.defstruct("Made", [*fields, ("uuid", str, "")])
    else:
        made = make_dataclass("Made", [*fields, ("uuid", str, "")])
    return lambda values: made(*values)


def parts_of(value: Any) -> list[tuple[str, Any, Any]]:
    """Return the parts of a value, one level down, each with its step and its place."""
    if type(value) in (list, tuple):
        return [(f"[{index}]", index, part) for index, part in enumerate(value)]
    if type(value) is dict:
        return [(key_step(key), key, part) for key, part in value.items()]
    names = getattr(value, "__struct_fields__", ())
    return [(f".{name}", name, getattr(value, name)) for name in names]


def with_part(value: Any, place: Any, part: Any) -> Any:
    """Return a value with another part."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{place: part})
    changed = dict(value) if isinstance(value, dict) else [*value]
    changed[place] = part
    return type(value)(changed)


def planted(rng: random.Random, value: Any) -> tuple[Any, str]:
    """Return a value of which one part, anywhere, is a stranger, and the path of that part."""
    parts = parts_of(value)
    if not parts or not rng.randrange(4):
        return rng.choice((Stranger(), object())), ""
    step, place, part = rng.choice(parts)
    changed, path = planted(rng, part)
    return with_part(value, place, changed), step + path


@pytest.mark.parametrize("begin", range(6))
def test_a_stranger_in_any_part_is_refused_by_its_path(begin: int) -> None:
    """Types nested at random: 20 messages of each that are right, and then one that is not."""
    for seed in list(seeds(300))[begin::6]:
        rng = random.Random(seed)
        kinds = [kind_of(rng) for _ in range(rng.randrange(1, 4))]
        make, writer = holder(kinds, rng), Writer()
        for _ in range(20):
            message = make([one.make(rng) for one in kinds])
            found = msgspec.json.decode(writer.write(message), type=type(message))
            assert same(found, message), f"seed {seed}: {message!r:.300}"
        values = [one.make(rng) for one in kinds]
        at = rng.randrange(len(kinds))
        values[at], path = planted(rng, values[at])
        try:
            writer.require_refused(make(values), f"f{at}{path}")
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {kinds[at].type}: {values[at]!r:.300}") from error


@pytest.mark.parametrize("begin", range(6))
def test_an_odd_value_reads_back_equal_or_is_refused(begin: int) -> None:
    """Any value behind 20 that are right: it is refused exactly if it would not read back equal."""
    accepted = refused = 0
    for seed in list(seeds(600))[begin::6]:
        rng = random.Random(seed)
        kind = kind_of(rng)
        # What no type tells has to be the same: a member of an enum would read back as a text.
        equal = same if "AnyType" in repr(msgspec.inspect.type_info(kind.type)) else operator.eq
        make, writer = holder([kind], rng), Writer()
        for _ in range(20):
            writer.write(make([kind.make(rng)]))
        message, before = make([odd(rng)]), writer.content
        line, error = None, None
        try:
            line = writer.write(message)
        except InvalidValue as caught:
            error = caught
        if line is not None:
            back = msgspec.json.decode(line, type=type(message))
            assert back == message or same(back, message), f"seed {seed}: {message!r:.300}"
            accepted += 1
            continue
        assert error is not None
        assert writer.content == before
        assert error.path.startswith(("f0", "message")), f"seed {seed}: {error}"
        assert error.hint, f"seed {seed}: {error}"
        assert not reads_back(message, equal), f"seed {seed}: {error}"
        refused += 1
    assert accepted
    assert refused


def reads_back(message: Any, equal: Callable[[Any, Any], bool]) -> bool:
    """Return True if a message reads back equal, and has nothing that equality does not see."""
    try:
        line = msgspec.json.encode(message)
        back = msgspec.json.decode(line, type=type(message))
    except (msgspec.MsgspecError, ArithmeticError, RecursionError, TypeError, ValueError):
        return False
    if line.count(b"[") + line.count(b"{") > 100 or b"\n" in line:
        return False
    return equal(back, message) and "fold=1" not in repr(message)
