"""Values in messages that JSON does not have, such as NaN, which would stand there as null. Pure.

Published messages are checked for them. The check costs nothing for types without floats, and little for
those whose floats are their own fields. For all others, only a payload that has a null is looked at. Lines
of other programs may hold them as literals, such as ``NaN``, and are read as Spark reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import inspect

from gazette.errors import InvalidValue
from gazette.message.value_parts import attributes_of
from gazette.message.value_types import all_parts
from gazette.message.values import finite, require_json
from gazette.message.zero_value import ObjectType, alternatives

NULL: Final = b"null"
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
_OF_JSON: Final = (
    inspect.AnyType,
    inspect.DictType,
    inspect.ListType,
    inspect.Metadata,
    inspect.NoneType,
    inspect.StrType,
    inspect.UnionType,
)
_NUMBERS: Final = {inspect.FloatType, inspect.IntType, inspect.NoneType, inspect.BoolType}


class FiniteCheck:
    """The check of messages of one type, which may be a union of ``objects``.

    It refuses numbers that are not finite. In fields that declare nothing, such as ``dict``, it refuses
    whatever JSON does not have.
    """

    __slots__ = ("_fields", "_undeclared", "holds_floats", "number_of")

    def __init__(self, objects: Sequence[ObjectType]) -> None:
        fields = [field for part in objects for field in part.fields if _holds_floats(field.type)]
        self.holds_floats = bool(fields)
        """True if a message may hold a float."""
        is_flat = len(objects) == 1 and all(_is_number(field.type) for field in fields)
        self._fields = {field.name: _is_optional(field.type) for field in fields} if is_flat else {}
        self.number_of = _number_of(self._fields)
        """Function from a message to a number, which is finite if all of its floats are. It may raise
        ``TypeError``. None if the floats are not all fields of the message.
        """

        self._undeclared = {
            field.name for part in objects for field in part.fields if _is_undeclared(field.type)
        }

    def require(self, message: Any) -> None:
        """Raise ``InvalidValue``, with a path, for a message that holds NaN or an infinity."""
        for name, is_optional in self._fields.items():
            value = getattr(message, name)
            if not isinstance(value, float | int) and not (is_optional and value is None):
                raise InvalidValue(
                    f"is of type {type(value).__name__}, and float is declared", path=name
                )
        for name, value in zip(*(attributes_of(message) or ((), ())), strict=True):
            finite(value, name)

    def require_payload(self, message: Any, payload: bytes | bytearray, begin: int = 0) -> None:
        """Raise ``InvalidValue``, with a path, for a message whose payload at ``begin`` has other values.

        Look for NaN and infinities only if the payload has a null: it may be one of the program's. Look
        through fields that declare nothing in any case.
        """
        if self.holds_floats and payload.find(NULL, begin) >= 0:
            self.require(message)
        for name in self._undeclared:
            require_json(getattr(message, name, None), name)

    def decoded(self, decode: Callable[[bytes], Any], payload: bytes) -> Any | None:
        """Decode a payload with literals such as ``NaN``, of which each is a float of the message.

        Return None for any other payload. ``decode`` is the strict decoder of the type. Raise what it raises.
        """
        found = [match[1] for match in _TOKEN.finditer(payload) if match[1] is not None]
        if not self.holds_floats or not found or not NON_FINITE.keys() >= set(found):
            return None
        marks = _Marks(payload, found)
        message = marks.restored(decode(marks.payload))
        return message if marks.left == 0 else None


def _holds_floats(info: inspect.Type) -> bool:
    return any(isinstance(part, _MAY_BE_FLOAT) for part in all_parts(info))


def _is_undeclared(info: inspect.Type) -> bool:
    """Return True for ``Any``, ``dict``, ``list[Any]`` and the like: types of whatever JSON has."""
    parts = list(all_parts(info))
    keys = {type(part.key_type) for part in parts if isinstance(part, inspect.DictType)}
    return (
        any(isinstance(part, inspect.AnyType) for part in parts)
        and all(isinstance(part, _OF_JSON) for part in parts)
        and keys <= {inspect.AnyType, inspect.StrType}
    )


def _is_number(info: inspect.Type) -> bool:
    return {type(part) for part in alternatives(info)} <= _NUMBERS


def _is_optional(info: inspect.Type) -> bool:
    return any(isinstance(part, inspect.NoneType) for part in alternatives(info))


def _number_of(fields: dict[str, bool]) -> Callable[[Any], float] | None:
    if not fields:
        return None
    get: Callable[[Any], Any] = attrgetter(*fields)
    if len(fields) > 1:
        return lambda message: sum(filter(None, get(message)))
    # A function of C is the fastest: publishers call it hundreds of thousands of times a second.
    return (lambda message: get(message) or 0.0) if any(fields.values()) else get


class _Marks:
    """A payload in which finite numbers stand for literals, until it is decoded."""

    def __init__(self, payload: bytes, literals: Sequence[bytes]) -> None:
        texts = (f"0.{n:012}1".encode() for n in range(1 << 30, 1 << 31))
        unused = (text for text in texts if text not in payload)
        by_literal = {literal: next(unused) for literal in dict.fromkeys(literals)}
        self._numbers = {float(text): NON_FINITE[one] for one, text in by_literal.items()}
        self.payload = _TOKEN.sub(
            lambda match: match[0] if match[1] is None else by_literal[match[1]], payload
        )
        self.left = len(literals)
        """Literals that no float of the message stood for so far."""

    def restored(self, value: Any) -> Any:
        """Return a decoded value with the floats that the literals are. Change it in place where possible."""
        kind = type(value)
        if kind is float:
            if value not in self._numbers:
                return value
            self.left -= 1
            return self._numbers[value]
        if kind is dict:
            value.update({key: self.restored(part) for key, part in value.items()})
        elif kind is list:
            value[:] = map(self.restored, value)
        elif kind in (tuple, set, frozenset):
            return kind(map(self.restored, value))
        elif isinstance(value, tuple):
            return kind(*map(self.restored, value))
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
