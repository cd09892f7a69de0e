"""Columns of cases: what is published is what tables show. See `tests.meaning.places`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pyarrow as pa

import gazette
from gazette.testing.app_driver import AppDriver
from gazette.testing.stored import write_journal
from tests.meaning import values as made
from tests.meaning.places import SOURCE, StateWriter
from tests.meaning.values import Case, same

V = TypeVar("V")


class ColumnKind(NamedTuple):
    """A declared type, the type of its column, its values, and what the column shows of one."""

    type: Any
    column: pa.DataType
    make: made.Make
    shown: Callable[[Any], Any] = lambda value: value


class _Misfit(Exception):
    """A value does not fit its column, nor does a list or a map with it. A field of an object is null."""


def _require(value: V, *, fits: bool) -> V:
    if not fits:
        raise _Misfit
    return value


def _or_null(kind: ColumnKind, value: Any) -> Any:
    try:
        return kind.shown(value)
    except _Misfit:
        return None


def _int_of(bits: int) -> ColumnKind:
    ends = (-(1 << bits - 1), (1 << bits - 1) - 1)

    def shown(value: int) -> int:
        return _require(value, fits=ends[0] <= value <= ends[1])

    def make(rng: random.Random) -> int:
        # One beyond an end fits no such column.
        return rng.choice((*ends, 0, ends[0] - (bits < 64), ends[1] + 1, rng.randrange(*ends)))

    return ColumnKind(int, getattr(pa, f"int{bits}")(), make, shown)


_UTC: Final = ZoneInfo("UTC")
_EXACT: Final = Context(prec=200, rounding=ROUND_HALF_UP)


def _decimal_of(rng: random.Random) -> ColumnKind:
    precision = rng.randrange(1, 39)
    scale = rng.randrange(precision + 1)

    def shown(value: Decimal) -> Decimal:
        rounded = value.quantize(Decimal((0, (1,), -scale)), context=_EXACT)
        rounded = rounded or abs(rounded)
        return _require(rounded, fits=abs(rounded) < Decimal(10) ** (precision - scale))

    def make(rng: random.Random) -> Decimal:
        if not rng.randrange(4):
            return made.number(rng)
        return Decimal(rng.randrange(-(10**precision), 10**precision)).scaleb(-scale, _EXACT)

    return ColumnKind(Decimal, pa.decimal128(precision, scale), make, shown)


def _aware(rng: random.Random) -> datetime:
    at = made.moment(rng)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _single(value: float) -> float:
    found: float = pa.scalar(value, pa.float32()).as_py()
    return found


_LEAVES: Final[tuple[Callable[[random.Random], ColumnKind], ...]] = (
    *(lambda _, b=bits: _int_of(b) for bits in (8, 16, 32, 64)),
    _decimal_of,
    *(
        lambda _, kind=kind: kind
        for kind in (
            ColumnKind(bool, pa.bool_(), lambda rng: bool(rng.randrange(2))),
            ColumnKind(float, pa.float64(), made.real),
            ColumnKind(float, pa.float32(), lambda rng: rng.uniform(-1e6, 1e6), _single),
            ColumnKind(str, pa.string(), made.text),
            ColumnKind(bytes, pa.binary(), made.raw),
            ColumnKind(date, pa.date32(), made.day),
            ColumnKind(datetime, pa.timestamp("us", tz="UTC"), _aware, lambda v: v.astimezone(_UTC)),
            ColumnKind(datetime, pa.timestamp("us"), lambda rng: made.moment(rng).replace(tzinfo=None)),
            ColumnKind(UUID, pa.string(), made.identity, str),
            ColumnKind(made.Color, pa.string(), lambda rng: rng.choice([*made.Color]), lambda v: v.value),
            ColumnKind(made.Level, pa.int8(), lambda rng: rng.choice([*made.Level]), int),
        )
    ),
)  # fmt: skip


def _kind_of(rng: random.Random, depth: int = 2) -> ColumnKind:
    """Return the kind of a column, nested up to a depth."""
    leaf = rng.choice(_LEAVES)(rng)
    if not depth or rng.randrange(2):
        return leaf
    part = _kind_of(rng, depth - 1)
    match rng.randrange(4):
        case 0:
            return ColumnKind(
                list[part.type],  # type: ignore[name-defined]
                pa.list_(part.column),
                made.some(part.make),
                lambda value: [part.shown(one) for one in value],
            )
        case 1:
            return ColumnKind(
                dict[str, part.type],  # type: ignore[name-defined]
                pa.map_(pa.string(), part.column),
                lambda rng: {made.text(rng): part.make(rng) for _ in range(rng.randrange(4))},
                lambda value: [(key, part.shown(one)) for key, one in value.items()],
            )
        case 2:
            return _struct_of([part, leaf])
    return ColumnKind(
        part.type | None,
        part.column,
        lambda rng: part.make(rng) if rng.randrange(3) else None,
        lambda value: None if value is None else part.shown(value),
    )


def _struct_of(parts: Sequence[ColumnKind]) -> ColumnKind:
    names = [f"f {n}" for n in range(len(parts))]
    fields: Any = [(f"f{n}", part.type) for n, part in enumerate(parts)]
    rename = {f"f{n}": name for n, name in enumerate(names)}
    kind: Any = msgspec.defstruct("Part", fields, rename=rename, frozen=True)
    return ColumnKind(
        kind,
        pa.struct([(name, part.column) for name, part in zip(names, parts, strict=True)]),
        lambda rng: kind(*[part.make(rng) for part in parts]),
        lambda value: {
            name: _or_null(part, getattr(value, field))
            for (field, name), part in zip(rename.items(), parts, strict=True)
        },
    )


def check_columns(cases: Sequence[Case], directory: Path) -> int:
    """Publish rows of types that a seed draws, and read them as a table. Return how many fit."""
    return sum(
        _check_rows(cases[begin : begin + 25], directory / str(begin))
        for begin in range(0, len(cases), 25)
    )


def _check_rows(cases: Sequence[Case], directory: Path) -> int:
    rng = random.Random(cases[0].seed)
    kinds = [_kind_of(rng) for _ in range(6)]
    names = [f"c{n}" for n in range(len(kinds))]
    fields: Any = [(name, kind.type) for name, kind in zip(names, kinds, strict=True)]
    row: Any = msgspec.defstruct("Row", [*fields, ("uuid", str, "")])
    rows = [_values(case, kinds) for case in cases]
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        driver.publish("rows", *[row(*values) for values in rows])
        content = driver.journals.content("rows")
    (directory / "fragments").mkdir(parents=True)
    write_journal(directory, "file:///fragments/", "rows", [content])
    schema = pa.schema([(name, kind.column) for name, kind in zip(names, kinds, strict=True)])
    store = f"{directory}/fragments"
    table = gazette.read_table("rows", store=store, fields=schema, columns=names, misfits="null")
    for case, values, found in zip(cases, rows, table.to_pylist(), strict=True):
        for name, kind, value in zip(names, kinds, values, strict=True):
            case = case._replace(type=(kind.type, kind.column), value=value)
            wanted, shown = _or_null(kind, value), found[name]
            assert same(shown, wanted), f"{case}: column {shown!r:.300}, and not {wanted!r:.300}"
    return len(cases)


def _values(case: Case, kinds: Sequence[ColumnKind]) -> list[Any]:
    rng = random.Random(case.seed)
    return [kind.make(rng) for kind in kinds]


__all__: Final = ["check_columns"]
