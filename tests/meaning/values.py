"""Values and declared types by a seed: what fits a type, what does not, and what no declaration has.

`same` is the slow and plain comparison of what was written with what is read.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import random
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec

Make = Callable[[random.Random], Any]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 7


class Word(enum.StrEnum):
    A = "a"


class Name(str):
    __slots__ = ()


class Whole(int):
    pass


class Table(dict[Any, Any]):
    pass


class Point(NamedTuple):
    x: int
    y: float


class Row(TypedDict, total=False):
    count: int
    seen: set[int]


class Sale(msgspec.Struct, rename="camel"):
    item_id: int = 0
    price: float = 0.0
    tags: tuple[str, ...] = ()


class Tree(msgspec.Struct, array_like=True, frozen=True):
    name: str
    below: tuple[Tree, ...] = ()


class Tagged(msgspec.Struct, tag=True):
    n: int = 0


@dataclasses.dataclass
class Plain:
    amounts: dict[int, Decimal] = dataclasses.field(default_factory=dict)
    color: Color = Color.RED
    raw: bytes = b""


class Kind(NamedTuple):
    """A declared type, and a function that makes values of it."""

    type: Any
    make: Make
    is_key: bool = False
    """Values may be keys of a dict, and elements of a set."""


class Case(NamedTuple):
    """A value that is to be written as a declared type. ``fits`` says that it is one of the type."""

    seed: int
    type: Any
    value: Any
    fits: bool

    def __repr__(self) -> str:
        shown = _shown(self.value)
        return f"seed {self.seed}: {self.type} <- {shown[:300]} (fits={self.fits})"


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except (RecursionError, ValueError):
        return f"<deep or huge {type(value).__name__}>"


INTS: Final = (0, 1, -1, 7, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)
HUGE_INTS: Final = (2**64, -(2**63) - 1, 2**200, 10**5000)
FLOATS: Final = (0.0, -0.0, 0.1, -1.5, 5e-324, 2.2e-308, 1e16, 1e308, 2.0**53, 1e-7, 1e22)
TEXTS: Final = (
    *("", "a", "1", "true", "null", "NaN", "\0", "a\nb", "\r\n", '"quoted"', "\\", "/", "%2F", "🙂", "שלום"),
    *("e\u0301", "é", "\u2028\u2029", "\ufeff", "\x7f\x80", "\ufffe", ",", "a,b", "'", " ", "uuid", "#", "?"),
)  # fmt: skip
BYTES: Final = (b"", b"\0", b"\xff\xfe", b"a\nb", bytes(range(256)))
NUMBERS: Final = (
    "0",
    "-0",
    "1.10",
    "1E+5",
    "1e-30",
    "123456789012345678901234567890.123456789",
    "7",
)
ZONES: Final = (UTC, timezone(timedelta(hours=2)), timezone(timedelta(minutes=-90)))
SURROGATES: Final = ("\ud800", "a\udfff", "\udc80x")


def whole(rng: random.Random) -> int:
    return rng.choice(INTS) if rng.randrange(3) else rng.randrange(-(2**40), 2**40)


def real(rng: random.Random) -> float:
    return rng.choice(FLOATS) if rng.randrange(3) else rng.uniform(-1e6, 1e6)


def text(rng: random.Random) -> str:
    if not rng.randrange(1500):
        return "m" * (1 << 20)
    if rng.randrange(3):
        return rng.choice(TEXTS)
    return "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(6)))


def raw(rng: random.Random) -> bytes:
    return rng.choice(BYTES) if rng.randrange(2) else rng.randbytes(rng.randrange(8))


def number(rng: random.Random) -> Decimal:
    if rng.randrange(2):
        return Decimal(rng.choice(NUMBERS))
    return Decimal(rng.randrange(-(10**38), 10**38)).scaleb(-rng.randrange(40))


def day(rng: random.Random) -> date:
    ends = (date(1, 1, 1), date(9999, 12, 31), date(2024, 2, 29))
    return (
        rng.choice(ends) if not rng.randrange(3) else date.fromordinal(rng.randrange(1, 3_000_000))
    )


def moment(rng: random.Random) -> datetime:
    """Return a time whose zone JSON has: none, UTC, or whole minutes."""
    at = datetime.combine(day(rng), clock_time(rng))
    zone = rng.choice((None, *ZONES))
    return at if zone is None or at.year in (1, 9999) else at.replace(tzinfo=zone)


def clock_time(rng: random.Random) -> time:
    return time(rng.randrange(24), rng.randrange(60), 59, rng.choice((0, 1, 999_999, 500_000)))


def span(rng: random.Random) -> timedelta:
    return timedelta(rng.randrange(-900, 900), rng.randrange(86_400), rng.randrange(10**6))


def identity(rng: random.Random) -> UUID:
    known = (UUID(int=0), UUID(int=2**128 - 1), UUID("9f2a81c4-7b1e-11ee-8000-0100000000a1"))
    return rng.choice(known) if rng.randrange(2) else UUID(int=rng.getrandbits(128), version=4)


def json_value(rng: random.Random, depth: int = 3) -> Any:
    """Return a value of JSON."""
    leaves: tuple[Make, ...] = (whole, real, text, lambda _: None, lambda _: True, lambda _: False)
    if not depth or rng.randrange(2):
        return rng.choice(leaves)(rng)
    if rng.randrange(2):
        return [json_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {text(rng): json_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def tree(rng: random.Random, depth: int = 3) -> Tree:
    below = rng.randrange(3) if depth else 0
    return Tree(text(rng), tuple(tree(rng, depth - 1) for _ in range(below)))


def sale(rng: random.Random) -> Sale:
    return Sale(whole(rng), real(rng), tuple(text(rng) for _ in range(rng.randrange(3))))


def plain(rng: random.Random) -> Plain:
    amounts = {whole(rng): number(rng) for _ in range(rng.randrange(3))}
    return Plain(amounts, rng.choice([*Color]), raw(rng))


def some(make: Make, most: int = 4) -> Callable[[random.Random], list[Any]]:
    return lambda rng: [make(rng) for _ in range(rng.randrange(most))]


LEAVES: Final = (
    Kind(bool, lambda rng: bool(rng.randrange(2))),
    Kind(int, whole, is_key=True),
    Kind(float, real),
    Kind(str, text, is_key=True),
    Kind(bytes, raw),
    Kind(Decimal, number),
    Kind(date, day, is_key=True),
    Kind(datetime, moment),
    Kind(time, clock_time),
    Kind(timedelta, span),
    Kind(UUID, identity, is_key=True),
    Kind(Color, lambda rng: rng.choice([*Color]), is_key=True),
    Kind(Level, lambda rng: rng.choice([*Level]), is_key=True),
    Kind(Word, lambda _: Word.A, is_key=True),
    Kind(Literal["a", 3], lambda rng: rng.choice(("a", 3))),
    Kind(Any, json_value),
    Kind(dict, lambda rng: {text(rng): json_value(rng) for _ in range(rng.randrange(3))}),
    Kind(list, some(json_value)),
    Kind(Point, lambda rng: Point(whole(rng), real(rng))),
    Kind(Row, lambda rng: {"count": whole(rng), "seen": {whole(rng)}} if rng.randrange(2) else {}),
    Kind(Sale, sale),
    Kind(Tree, tree),
    Kind(Plain, plain),
    Kind(Tagged | int | str | None, lambda rng: rng.choice((Tagged(whole(rng)), whole(rng), None))),
    Kind(int | float, lambda rng: rng.choice((whole, real))(rng)),
)
_KEYS: Final = [kind for kind in LEAVES if kind.is_key]


def kind_of(rng: random.Random, depth: int = 4) -> Kind:
    """Return a declared type, nested up to a depth."""
    if not depth or rng.randrange(2):
        return rng.choice(LEAVES)
    part, key = kind_of(rng, depth - 1), rng.choice(_KEYS)
    each, keys = some(part.make), some(key.make)
    made: list[Kind] = [
        Kind(list[part.type], each),  # type: ignore[name-defined]
        Kind(tuple[part.type, ...], lambda rng: tuple(each(rng))),  # type: ignore[name-defined]
        Kind(
            tuple[part.type, key.type],  # type: ignore[name-defined]
            lambda rng: (part.make(rng), key.make(rng)),
        ),
        Kind(
            dict[key.type, part.type],  # type: ignore[name-defined]
            lambda rng: {one: part.make(rng) for one in keys(rng)},
        ),
        Kind(set[key.type], lambda rng: set(keys(rng))),  # type: ignore[name-defined]
        Kind(frozenset[key.type], lambda rng: frozenset(keys(rng))),  # type: ignore[name-defined]
        Kind(part.type | None if part.type is not Any else Any, part.make),
    ]
    return rng.choice(made)


def deep(rng: random.Random) -> Any:
    value: Any = None
    as_list = rng.randrange(2)
    for _ in range(rng.choice((100, 900, 2_000))):
        value = [value] if as_list else {"a": value}
    return value


def cyclic(rng: random.Random) -> Any:
    if rng.randrange(2):
        items: list[Any] = [1]
        items.append(items)
        return items
    pairs: dict[Any, Any] = {}
    pairs["self"] = [pairs]
    return pairs


_LONDON: Final = ZoneInfo("Europe/London")
_NEAR: Final[dict[type, tuple[Make, ...]]] = {
    int: (lambda rng: rng.choice(HUGE_INTS),),
    float: (lambda rng: rng.choice((math.nan, math.inf, -math.inf)),),
    str: (lambda rng: rng.choice(SURROGATES),),
    Decimal: (lambda rng: Decimal(rng.choice(("NaN", "sNaN", "Infinity", "-Infinity"))),),
    datetime: (
        lambda rng: datetime(2026, 10, 25, 1, 30, tzinfo=_LONDON, fold=rng.randrange(2)),
        lambda rng: datetime(2026, 1, 1, fold=1, tzinfo=rng.choice((None, UTC))),
        lambda _: datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=2))),
        lambda _: datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-7))),
        lambda _: datetime(2026, 1, 1, tzinfo=timezone(timedelta(seconds=61))),
    ),
    timedelta: (lambda rng: rng.choice((timedelta.max, timedelta.min, timedelta(microseconds=1))),),
}
"""Values at which types of Python and their forms in JSON part."""
_ODD: Final[tuple[Make, ...]] = (
    *(whole, real, text, raw, number, day, moment, clock_time, span, identity, json_value),
    *(sale, plain, tree, deep, cyclic),
    *(make for makes in _NEAR.values() for make in makes),
    lambda rng: rng.choice([*Color, *Level, *Word]),
    lambda rng: rng.choice((Name("a"), Whole(7), Table(a=1), Table({7: 1}))),
    lambda rng: rng.choice((object(), 1j, range(3), msgspec.UNSET, len, bytearray(b"a"), memoryview(b"a"))),
    lambda rng: rng.choice((msgspec.Raw(b"[1,\n2]"), msgspec.Raw(b"1"), msgspec.Raw(b"{"))),
    lambda rng: {rng.choice(KEYS): json_value(rng)},
    lambda rng: rng.choice(({"7": 1, 7: 2}, {Color.RED: 1, "red": 2})),  # One key twice, in JSON.
)  # fmt: skip
KEYS: Final[tuple[Any, ...]] = (
    *(1, True, 2.5, None, b"a", (1, 2), Color.RED, Level.LOW, Word.A, Name("a"), math.nan, "\ud800"),
    *(date(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC), UUID(int=1), Decimal("1.0"), frozenset({1})),
)  # fmt: skip


def odd(rng: random.Random, depth: int = 4) -> Any:
    """Return a value of any kind, also such as no declaration has."""
    if not depth or rng.randrange(3):
        return rng.choice(_ODD)(rng)
    parts = [odd(rng, depth - 1) for _ in range(rng.randrange(4))]
    match rng.randrange(5):
        case 0:
            return tuple(parts)
        case 1:
            return {rng.choice(KEYS): one for one in parts}
        case 2:
            return {f"k{n}": one for n, one in enumerate(parts)}
        case 3:
            return rng.choice((set, frozenset))(rng.sample(KEYS, rng.randrange(4)))
    return parts


def case_of(seed: int) -> Case:
    """Return the case of a seed: half of the values fit their types."""
    rng = random.Random(seed)
    kind = kind_of(rng)
    match rng.randrange(6):
        case 0 | 1 | 2:
            return Case(seed, kind.type, kind.make(rng), fits=True)
        case 3:
            return Case(seed, kind.type, kind_of(rng).make(rng), fits=False)
        case 4:
            return Case(seed, kind.type, _with_odd_part(rng, kind.make(rng)), fits=False)
    return Case(seed, kind.type, odd(rng), fits=False)


def _with_odd_part(rng: random.Random, value: Any) -> Any:
    """Return a value of which one part is odd."""
    if isinstance(value, list):
        return [*value, _odd_for(rng, value[-1] if value else None)]
    if type(value) is tuple and value:
        return (*value[:-1], _odd_for(rng, value[-1]))
    if isinstance(value, dict):
        key = rng.choice((*value, "a"))
        return {**value, key: _odd_for(rng, value.get(key))}
    if isinstance(value, Sale):
        return msgspec.structs.replace(value, price=_odd_for(rng, value.price))
    return _odd_for(rng, value)


def _odd_for(rng: random.Random, value: Any) -> Any:
    """Return a value of any kind, mostly one of the same type that JSON cannot have."""
    near: Any = _NEAR.get(type(value))
    return rng.choice(near)(rng) if near and rng.randrange(3) else odd(rng, 1)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal, with the same types all the way down. It needs no stack."""
    pairs = [(one, other)]
    while pairs:
        one, other = pairs.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, dict):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
            pairs += zip(one.values(), other.values(), strict=True)
        elif isinstance(one, list | tuple):
            if len(one) != len(other):
                return False
            pairs += zip(one, other, strict=True)
        elif isinstance(one, set | frozenset):
            by_value = {each: each for each in other}
            if one != other:
                return False
            pairs += [(each, by_value[each]) for each in one]
        elif isinstance(one, msgspec.Struct):
            pairs += [(getattr(one, f), getattr(other, f)) for f in one.__struct_fields__]
        elif dataclasses.is_dataclass(one):
            pairs.append((vars(one), vars(other)))
        elif not _same_leaf(one, other):
            return False
    return True


def _same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, float):
        return bool(one == other and math.copysign(1, one) == math.copysign(1, other))
    if isinstance(one, datetime | time):
        zones = one.utcoffset() == other.utcoffset() and type(one.tzinfo) is type(other.tzinfo)
        return bool(one == other and zones and one.fold == other.fold)
    if isinstance(one, Decimal):
        return bool(one.as_tuple() == other.as_tuple())
    if isinstance(one, msgspec.Raw):
        return bytes(one) == bytes(other)
    return bool(one == other)
