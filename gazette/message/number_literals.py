"""Literals of numbers that JSON does not have, such as ``NaN``. Pure.

Lines of other programs may hold such literals. For a field of type float, they are read as Spark reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

from gazette.message.value_parts import attributes_of
from gazette.message.value_types import all_parts

NON_FINITE: Final = {
    b"NaN": math.nan,
    b"Infinity": math.inf,
    b"+Infinity": math.inf,
    b"+INF": math.inf,
    b"-Infinity": -math.inf,
    b"-INF": -math.inf,
}
"""Literals that Spark reads as floats."""
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|([+-]?(?:NaN|Infinity|INF)\b)', re.DOTALL)
_MAY_BE_FLOAT: Final = (inspect.FloatType, inspect.AnyType, inspect.CustomType)


def holds_floats(info: inspect.Type) -> bool:
    """Return True if values of a type may hold a float."""
    return any(isinstance(part, _MAY_BE_FLOAT) for part in all_parts(info))


def decoded(decode: Callable[[bytes], Any], payload: bytes) -> Any | None:
    """Return the message of a payload in which literals such as ``NaN`` stand in place of floats.

    Return None for any other payload. ``decode`` is the strict decoder of the type; its errors are raised.
    """
    literals = [match[1] for match in _TOKEN.finditer(payload) if match[1] is not None]
    if not literals or not NON_FINITE.keys() >= set(literals):
        return None
    marks = _Marks(payload, literals)
    message = marks.restored(decode(marks.payload))
    return message if marks.left == 0 else None


class _Marks:
    """A payload in which finite numbers stand for the literals, so that it can be decoded."""

    def __init__(self, payload: bytes, literals: Sequence[bytes]) -> None:
        # For each literal, take a number that the payload does not have.
        texts = (f"0.{number:012}1".encode() for number in range(1 << 30, 1 << 31))
        unused = (text for text in texts if text not in payload)
        by_literal = {literal: next(unused) for literal in dict.fromkeys(literals)}
        self._numbers = {float(text): NON_FINITE[literal] for literal, text in by_literal.items()}
        self.payload = _TOKEN.sub(
            lambda match: match[0] if match[1] is None else by_literal[match[1]], payload
        )
        self.left = len(literals)
        """Number of literals that `restored` has not found as floats of the message yet."""

    def restored(self, value: Any) -> Any:
        """Return ``value`` with the floats of the literals in place of their numbers. Change ``value`` itself
        if its class permits that."""
        value_class = type(value)
        if value_class is float:
            if value not in self._numbers:
                return value
            self.left -= 1
            return self._numbers[value]
        if value_class is dict:
            value.update({key: self.restored(part) for key, part in value.items()})
        elif value_class is list:
            value[:] = map(self.restored, value)
        elif value_class in (tuple, set, frozenset):
            return value_class(map(self.restored, value))
        elif isinstance(value, tuple):  # A NamedTuple.
            return value_class(*map(self.restored, value))
        else:
            self._restore_attributes(value)
        return value

    def _restore_attributes(self, value: Any) -> None:
        assign = (
            msgspec.structs.force_setattr
            if isinstance(value, msgspec.Struct)
            else object.__setattr__
        )
        for name, part in zip(*(attributes_of(value) or ((), ())), strict=True):
            if (restored := self.restored(part)) is not part:
                assign(value, name, restored)
