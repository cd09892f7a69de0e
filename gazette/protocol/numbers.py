"""Numbers in texts that others wrote: ASCII digits only, without ``_``, and of a bounded length.

``int`` and ``float`` of Python take ``1_0`` and digits of every script, and an ``int`` of very many
digits fails by another error.
"""

from __future__ import annotations

import re
from typing import Final

_DIGITS_MAX: Final = 40
_INTEGER: Final = re.compile(rf"[+-]?[0-9]{{1,{_DIGITS_MAX}}}")
_NUMBER: Final = re.compile(
    rf"[+-]?(?:[0-9]{{1,{_DIGITS_MAX}}}(?:\.[0-9]{{0,{_DIGITS_MAX}}})?|\.[0-9]{{1,{_DIGITS_MAX}}})"
    r"(?:[eE][+-]?[0-9]{1,3})?"
)


def parse_integer(text: str) -> int:
    """Return the integer of ``[+-]digits``. Raises ``ValueError``."""
    if _INTEGER.fullmatch(text) is None:
        raise ValueError("expected an integer")
    return int(text)


def parse_number(text: str) -> float:
    """Return the number of decimal digits with an optional fraction and exponent. Raises ``ValueError``."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError("expected a number")
    return float(text)


def is_digits(text: str) -> bool:
    """Return True for 1 to 40 ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
