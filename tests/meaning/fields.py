"""Fields of messages behind others of their type. See `tests.meaning.places`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from gazette.testing.app_driver import AppDriver
from tests.meaning import values as made
from tests.meaning.places import SOURCE, StateWriter, require_named
from tests.meaning.values import LEAVES, Case, Kind, odd, same

_TYPES: Final = (
    *(bool, int, float, str, bytes, Decimal, date, datetime, time, timedelta, UUID),
    *(made.Color, made.Level, made.Word),
)
_KINDS: Final = [kind for kind in LEAVES if kind.type in _TYPES]
"""Types whose values have no parts."""


def check_fields(cases: Sequence[Case], directory: Path) -> int:
    """Publish right messages of a type, and then one with the value of each case."""
    accepted = 0
    for begin in range(0, len(cases), 20):
        rng = random.Random(cases[begin].seed)
        kinds = [rng.choice(_KINDS) for _ in range(3)]
        accepted += _check_type(rng, kinds, cases[begin : begin + 20], directory / str(begin))
    return accepted


def _check_type(
    rng: random.Random, kinds: Sequence[Kind], cases: Sequence[Case], directory: Path
) -> int:
    names = [f"f{n}" for n in range(len(kinds))]
    fields: Any = [(name, kind.type) for name, kind in zip(names, kinds, strict=True)]
    row: Any = msgspec.defstruct("Row", [*fields, ("uuid", str, "")])
    written: list[tuple[Case, list[Any]]] = []
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        for _ in range(17):
            driver.publish("right", row(*[kind.make(rng) for kind in kinds]))
        for case in cases:
            values = _values(random.Random(case.seed), kinds)
            case = case._replace(type=tuple(kind.type for kind in kinds), value=values, fits=False)
            try:
                driver.publish("rows", row(*values))
            except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
                require_named(case, error, "message", *names)
                continue
            written.append((case, values))
        rows = driver.committed("rows", row)
    for (case, values), found in zip(written, rows, strict=True):
        for name, value in zip(names, values, strict=True):
            back = getattr(found, name)
            # A field takes an int for a float, and a member of an enum for its value.
            is_equal = same(back, value) or back == value
            assert is_equal or _is_nan(back, value), f"{case}: {name} reads back as {back!r:.300}"
    return len(written)


def _values(rng: random.Random, kinds: Sequence[Kind]) -> list[Any]:
    """Return values that fit, of which one may be odd."""
    found = [kind.make(rng) for kind in kinds]
    if rng.randrange(2):
        found[rng.randrange(len(found))] = odd(rng)
    return found


def _is_nan(one: Any, other: Any) -> bool:
    return type(one) is type(other) is Decimal and one.is_qnan() and other.is_qnan()


__all__: Final = ["check_fields"]
