"""Fields of messages that are not of their declared types: readers could not decode them. Pure.

A Struct or a dataclass takes any value for a field. The check of each message looks at the classes of its
fields, and not into containers: that takes 40 to 110 ns. A message of doubt is decoded again. So are the
first messages of a type, and all of a type with constraints, such as a greatest length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, Final

import msgspec
from msgspec import inspect

from gazette.errors import InvalidValue
from gazette.message.value_parts import difference
from gazette.message.value_types import all_parts, class_of, misfit
from gazette.message.values import finite
from gazette.message.zero_value import ObjectType, alternatives

READ_BACK_FIRST: Final = 16
"""Messages of a type that are decoded again, before only those of doubt are."""
_EXACT: Final = 1 << 53
"""Integers up to it are floats without a change."""
_CONSTRAINTS: Final = ("ge", "gt", "le", "lt", "multiple_of", "pattern", "min_length", "max_length")
_ERRORS: Final = (
    msgspec.MsgspecError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ReadBack:
    """The check of messages of one class, of which ``decode`` and ``encode`` are those of its codec."""

    __slots__ = ("_decode", "_encode", "_fields", "_left", "fits")

    def __init__(
        self,
        part: ObjectType,
        decode: Callable[[bytes], Any],
        encode: Callable[[Any], bytes],
    ) -> None:
        self._decode = decode
        self._encode = encode
        self._fields = {one.name: one.type for one in part.fields if one.name != "uuid"}
        self._left = READ_BACK_FIRST
        self.fits: Callable[[Any], bool] = _doubtful
        """Function that returns True for a message whose fields are of their classes."""

    def require(self, message: Any) -> None:
        """Raise ``InvalidValue``, with a path, for a message that does not read back.

        Call it for each message that does not pass `fits`.
        """
        try:
            back = self._decode(self._encode(message))
        except _ERRORS as error:
            raise self.unreadable(message, error) from error
        for name in self._fields:
            value, other = getattr(message, name), getattr(back, name)
            # Classes of applications need not define when their objects are equal.
            if value != other and (found := difference(value, other)) is not None:
                finite(value, name)
                advice = found.advice or "Convert it, or declare its type."
                raise InvalidValue(found.reason, path=found.path(name), hint=advice)
        self._left -= 1
        if self._left == 0 and not any(map(_is_constrained, self._fields.values())):
            self.fits = _compiled(self._fields)

    def unreadable(self, message: Any, error: BaseException) -> InvalidValue:
        """Return the error of a message that cannot be encoded, or read back: with the path of a part."""
        for name, info in self._fields.items():
            value = getattr(message, name, None)
            if type(value) is int and _takes_integers(info):
                continue
            try:
                found = misfit(value, info)
            except RecursionError:
                return InvalidValue(
                    "is nested too deeply, or holds itself",
                    path=name,
                    hint="Keep values flat, or by keys.",
                )
            except _ERRORS:
                continue
            if found is not None:
                return InvalidValue(found.reason, path=found.path(name), hint=found.advice)
        return InvalidValue(
            f"does not read back: {error}",
            path="message",
            hint="Correct the value, or the type that is declared for it.",
        )


def _doubtful(_message: Any) -> bool:
    return False


def _classes(info: inspect.Type) -> tuple[type, ...]:
    """Return the classes whose values read back equal as a type. Empty: any."""
    found = tuple(_classes_of_parts(info))
    return () if object in found else found


def _takes_integers(info: inspect.Type) -> bool:
    """Return True if integers are read back as floats."""
    kinds = {type(part) for part in alternatives(info)}
    return inspect.FloatType in kinds and inspect.IntType not in kinds


def _classes_of_parts(info: inspect.Type) -> Iterator[type]:
    for part in alternatives(info):
        match part:
            case inspect.NoneType():
                yield NoneType
            case inspect.LiteralType(values=values):
                yield from map(type, values)
            case inspect.TypedDictType():
                yield dict
            case _:
                yield class_of(part)


def _is_constrained(info: inspect.Type) -> bool:
    """Return True if only decoding shows whether a value fits, since more than its class counts."""
    return any(
        getattr(part, name, None) is not None
        for part in all_parts(info)
        for name in (*_CONSTRAINTS, "tz")
    ) or any(isinstance(part, inspect.LiteralType) for part in all_parts(info))


def _compiled(fields: dict[str, inspect.Type]) -> Callable[[Any], bool]:
    """Return the check as one expression: a loop over fields takes several times as long."""
    names: dict[str, Any] = {"type": type, "int": int}
    tests = []
    for number, (name, info) in enumerate(fields.items()):
        classes = _classes(info)
        if not classes or not name.isidentifier():
            continue
        names_of = [(f"k{number}_{n}", kind) for n, kind in enumerate(classes)]
        names |= names_of
        # NaN and infinities are of the class, too.
        finite = f" and m.{name} - m.{name} == 0.0"
        each = [f"k is {one}" + (finite if kind is float else "") for one, kind in names_of]
        if _takes_integers(info):
            each.append(f"k is int and {-_EXACT} <= m.{name} <= {_EXACT}")
        each[0] = each[0].replace("k is", f"(k := type(m.{name})) is", 1)
        tests.append(f"({' or '.join(each)})")
    code = f"lambda m: {' and '.join(tests) or 'True'}"
    made: Callable[[Any], bool] = eval(code, names)  # noqa: S307 - names of fields are identifiers
    return made
