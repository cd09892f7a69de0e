"""Numbers in texts from outside: only ASCII digits, without ``_``, and of bounded length.

Python's ``int`` and ``float`` accept ``1_0`` and digits of all scripts. For very many digits, ``int`` raises
another error.
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
    """Return the integer of ``[+-]digits``. Raise ``ValueError`` for any other text."""
    if _INTEGER.fullmatch(text) is None:
        raise ValueError("expected an integer")
    return int(text)


def parse_number(text: str) -> float:
    """Return a decimal number, perhaps with fraction and exponent. Raise ``ValueError`` for other text."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError("expected a number")
    return float(text)


def is_digits(text: str) -> bool:
    """Return True for 1 to 40 ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX


def counted(number: int, noun: str) -> str:
    """Return a number of things as text: ``1 shard``, ``2 shards``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bytes_text(count: int) -> str:
    """Return a number of bytes as text: ``0 B``, ``640 B``, ``1.5 MiB``."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} EiB"
