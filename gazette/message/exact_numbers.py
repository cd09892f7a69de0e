"""Refuse numbers of JSON that a float of Python cannot hold, or keep their digits. Pure.

A text of up to 17 digits may stand for its nearest float, since other programs write floats in that way.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final

import msgspec

_SHORT: Final = 17
"""Number of digits that is enough to name any float."""
_NORMAL_MIN: Final = 2.2250738585072014e-308
"""The least float with full precision."""


class ExactDocument(dict[str, Any]):
    """Type for readers that want a JSON object as a dict, with each digit of its numbers.

    A number that a float cannot hold is a `msgspec.Raw`, which is written as it was read.
    """

    __slots__ = ()


def exact_float(text: str) -> float:
    """Return the float of a text. Raise ``ValueError`` if the float is not the number in the text."""
    value = float(text)
    if len(text) <= _SHORT and _NORMAL_MIN <= abs(value) < math.inf:
        return value
    if math.isfinite(value) and _stands_for(text, value):
        return value
    raise ValueError(f"a float cannot hold the number {text[:64]}: write it as a text")


def _stands_for(text: str, value: float) -> bool:
    """Return True if a text has at most `_SHORT` digits, or is exactly the number of the float."""
    try:
        number = Decimal(text)
    except ArithmeticError:  # Its exponent has too many digits.
        return False
    is_short = len(number.as_tuple().digits) <= _SHORT and abs(value) >= _NORMAL_MIN
    return is_short or number in (Decimal(value), Decimal(repr(value)))


def float_or_text(text: str) -> Any:
    """Return the float of a text, or a `msgspec.Raw` of it if a float cannot hold the number."""
    try:
        return exact_float(text)
    except ValueError:
        return msgspec.Raw(text.encode())
