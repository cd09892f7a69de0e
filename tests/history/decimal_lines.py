"""Lines with decimals of every number of digits and every scale, and what columns of these types hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

DIGITS_MAX = 38


class Sample(NamedTuple):
    """A number, and what a column makes of it."""

    scale: int
    """Digits behind the point of the column, which also says its name."""
    text: str
    """Its text in JSON."""
    units: int | None
    """Number of units of the column. None: the number does not fit."""

    @property
    def line(self) -> bytes:
        return f'{{"c{self.scale}":{self.text}}}\n'.encode()


def columns(precision: int) -> str:
    """Return a column for each scale of a precision."""
    return ", ".join(f"c{scale} decimal({precision},{scale})" for scale in range(precision + 1))


def samples(precision: int, rng: random.Random) -> list[Sample]:
    """Return numbers at the bounds of each column, beyond them, and within, also in quotes.

    Whole numbers of units are the reference. They know no context that would round them.
    """
    largest = 10**precision - 1
    inside = rng.randrange(10 ** (precision - 1), 10**precision)
    found = []
    for scale in range(precision + 1):
        for units in (largest, inside, -largest, -inside):
            text = plain(units, scale)
            up = units + (1 if units > 0 else -1)
            texts = {
                text: units,
                f'"{text}"': units,
                f"{units}e{-scale}": units,
                # Rounded half up, by the digits behind the last one.
                f"{text}{'' if scale else '.'}4{'9' * 60}": units,
                f"{text}{'' if scale else '.'}5": up if abs(up) <= largest else None,
                plain(units * 10, scale): None,
            }
            found += [Sample(scale, *item) for item in texts.items()]
    return found


def plain(units: int, scale: int) -> str:
    """Return a number of units as a number of JSON, without an exponent."""
    digits = str(abs(units)).rjust(scale + 1, "0")
    text = f"{digits[:-scale]}.{digits[-scale:]}" if scale else digits
    return f"-{text}" if units < 0 else text


def units_found(given: Sequence[Sample], rows: Sequence[dict[str, Decimal | None]]) -> list[Sample]:
    """Return the samples with the units that were read of each."""
    return [
        sample._replace(units=_units(row[f"c{sample.scale}"], sample.scale))
        for sample, row in zip(given, rows, strict=True)
    ]


def _units(value: Decimal | None, scale: int) -> int | None:
    if value is None:
        return None
    sign, digits, exponent = value.as_tuple()
    assert exponent == -scale
    units = int("".join(map(str, digits)))
    return -units if sign else units
