"""Fields of messages behind many others of their type. See `tests.meaning.places`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import make_dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from gazette.testing.app_driver import AppDriver
from tests.meaning.places import SOURCE, StateWriter, require_named
from tests.meaning.values import Case, Kind, json_value, kind_of, odd, same

_NAMES: Final = ("first", "second", "third")
_EACH: Final = 20
"""Cases of a type."""
_GOOD: Final = 150
"""Messages of a type before its first odd one."""
_JSON: Final = Kind(Any, json_value)


class _Type:
    """A type of messages with a few fields. Its codec is the same for all messages."""

    def __init__(self, rng: random.Random) -> None:
        self.kinds = [kind_of(rng, 2) for _ in _NAMES]
        self.new: Any = dict
        self.values_of: Any = itemgetter(*_NAMES)
        if not rng.randrange(4):
            self.kinds = [_JSON for _ in _NAMES]
            return
        types = [kind.type for kind in self.kinds]
        fields: Any = [*zip(_NAMES, types, strict=True), ("uuid", str, "")]
        make: Any = rng.choice((msgspec.defstruct, make_dataclass))
        self.new = make("Row", fields)
        self.values_of = attrgetter(*_NAMES)

    def good(self, rng: random.Random) -> list[Any]:
        return [kind.make(rng) for kind in self.kinds]

    def message(self, values: Sequence[Any]) -> Any:
        return self.new(**dict(zip(_NAMES, values, strict=True)))

    def case_of(self, case: Case) -> Case:
        """Return a case whose value is those of the fields, of which one may be odd."""
        rng = random.Random(case.seed)
        values, fits = self.good(rng), bool(rng.randrange(2))
        if not fits:
            values[rng.randrange(len(values))] = odd(rng)
        types = tuple(kind.type for kind in self.kinds)
        return Case(case.seed, types, values, fits and self.new is not dict)


def check_fields(cases: Sequence[Case], directory: Path) -> int:
    """Publish right messages of a type, and then those of the cases."""
    return sum(
        _check_type(cases[begin : begin + _EACH], directory / str(begin))
        for begin in range(0, len(cases), _EACH)
    )


def _check_type(cases: Sequence[Case], directory: Path) -> int:
    rng = random.Random(cases[0].seed)
    row = _Type(rng)
    written: list[Case] = []
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        driver.publish("rows", *[row.message(row.good(rng)) for _ in range(_GOOD)])
        for case in map(row.case_of, cases):
            try:
                driver.publish("rows", row.message(case.value))
            except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
                require_named(case, error, "message", *_NAMES)
                continue
            written.append(case)
        found = driver.committed("rows", row.new)[_GOOD:]
    for case, message in zip(written, found, strict=True):
        back = [*row.values_of(message)]
        # A field takes an int for a float, and a member of an enum for its value.
        is_equal = same(back, case.value) or (not case.fits and back == case.value)
        assert is_equal, f"{case}: reads back as {back!r:.300}"
    return len(written)


__all__: Final = ["check_fields"]
