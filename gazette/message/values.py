"""Values of an application as JSON: states, aggregates, rows of joins. Pure.

A value reads back equal, with the same types all the way down, or it is refused before it is written. A
declared type says what a JSON value reads back as. Without one, only what JSON has is accepted.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, Final, Generic, TypeVar, get_origin

import msgspec

from gazette.errors import Corrupt, Invalid, InvalidValue
from gazette.message.value_fingerprint import Fingerprint
from gazette.message.value_parts import Misfit, difference, non_finite
from gazette.message.value_types import all_parts, json_misfit, misfit, type_of, type_text

T = TypeVar("T")

STACK_RESERVE: Final = 100
"""Frames of Python by which a reader may stand deeper than the writer of a deeply nested value."""
_REFUSALS: Final = (
    AttributeError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
)
_PLAIN: Final = frozenset({str, int, bool, type(None)})
_encode: Final = msgspec.json.Encoder().encode


class ValueEncoding(Generic[T]):
    """JSON of the values of one declared type, on a single line. Any thread may use it."""

    __slots__ = ("_decode", "_fingerprint", "_holds_raw", "_info", "identity")

    def __init__(self, declared: Any = Any, path: str = "") -> None:
        """Create the encoding of a type. Raise ``Invalid``, with ``path``, if JSON cannot be read as it."""
        try:
            self._info = msgspec.inspect.type_info(declared)
            self._decode = msgspec.json.Decoder(declared).decode
        except (TypeError, NameError) as error:
            raise Invalid(
                f"values of type {_written(declared)} cannot be kept: {error}",
                path=path,
                hint="Declare a type that msgspec knows: dict[int, int], a Struct, a dataclass.",
            ) from error
        self._fingerprint = Fingerprint(self._info)
        raw = msgspec.inspect.RawType
        self._holds_raw = any(isinstance(part, raw) for part in all_parts(self._info))
        self.identity = type_text(self._info)
        """Text of the declared type, which is the same in each process. A class has its name only."""

    def encode(self, value: T, name: str = "value", **facts: Any) -> bytes:
        """Return a value as JSON. Raise ``InvalidValue`` for a part that would not read back equal.

        The path to the part begins with ``name``. ``facts`` become those of the error.
        """
        try:
            data = _encode(value)
            # Most states are short: then each call here counts.
            is_short = len(data) <= STACK_RESERVE and not self._holds_raw
            back = self._decode(data) if is_short else self._read_back(data)
            found = None if self._fingerprint.are_same(value, back) else difference(value, back)
        except _REFUSALS as error:
            raise self._refused(value, error, name, facts) from None
        if found is not None:
            # A type explains better what is wrong than the value that would come of it.
            raise _invalid(self._explained(value) or found, value, name, facts)
        return data

    def decode(self, data: bytes | str, name: str = "value", **facts: Any) -> T:
        """Return the value of JSON that `encode` wrote. Raise ``Corrupt`` if the type cannot read it."""
        try:
            value: T = self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt(
                f"{name} does not read as {self.identity}: {error}",
                hint="The declared type changed: keep it able to read older values.",
                **facts,
            ) from error
        return value

    def _read_back(self, data: bytes) -> T:
        if b"\n" in data:
            raise ValueError("a msgspec.Raw holds a newline")
        # Each level of nesting has an opening bracket.
        is_deep = data.count(b"[") + data.count(b"{") > STACK_RESERVE
        value: T = self._deeper(data, STACK_RESERVE) if is_deep else self._decode(data)
        return value

    def _deeper(self, data: bytes, frames: int) -> T:
        """Decode below a number of frames: a value may not be readable at the top of a stack only."""
        value: T = self._deeper(data, frames - 1) if frames else self._decode(data)
        return value

    def _explained(self, value: T) -> Misfit | None:
        try:
            return misfit(value, self._info)
        except RecursionError:
            return Misfit(
                [], "is nested too deeply, or holds itself", "Keep values flat, or by keys."
            )
        except (AttributeError, TypeError, ValueError):
            return None  # Code of a class of the application, such as its `__eq__`.

    def _refused(
        self, value: T, error: Exception, name: str, facts: dict[str, Any]
    ) -> InvalidValue:
        text = f"cannot be kept as {self.identity}: {error}"
        found = self._explained(value) or Misfit([], text, "Convert it, or declare another type.")
        return _invalid(found, value, name, facts)


def _written(declared: Any) -> str:
    """Return a type with its parameters, as the application has written it."""
    is_plain = get_origin(declared) is None and hasattr(declared, "__name__")
    return declared.__name__ if is_plain else repr(declared).replace("typing.", "")


def _invalid(found: Misfit, value: Any, name: str, facts: dict[str, Any]) -> InvalidValue:
    return InvalidValue(
        found.reason,
        path=found.path(name),
        hint=found.advice or f"Declare its type: {type_of(value)}.",
        **facts,
    )


def finite(value: T, name: str = "value") -> T:
    """Return a value. Raise ``InvalidValue``, with a path, if it is or holds NaN or an infinity."""
    if (found := non_finite(value)) is not None:
        raise _invalid(found, value, name, {})
    return value


def require_json(value: Any, name: str = "message") -> None:
    """Raise ``InvalidValue``, with a path, if a value without a declared type would not read back equal."""
    if type(value) is dict:
        for key, part in value.items():
            kind = type(part)
            is_plain = kind in _PLAIN or (kind is float and isfinite(part))
            if not is_plain or type(key) is not str:
                break
        else:
            return
    if (found := json_misfit(value)) is not None:
        raise _invalid(found, value, name, {})
