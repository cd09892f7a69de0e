"""Values of an application as JSON: states, aggregates, rows of joins. Pure.

A value must read back equal, with the same types of all its parts: otherwise it is refused before it is
written. A declared type says how JSON is read. Without it, only values that JSON has are accepted.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final, Generic, TypeVar, get_origin

import msgspec

from gazette.errors import Corrupt, Invalid, InvalidValue
from gazette.message.value_fingerprint import Fingerprint
from gazette.message.value_parts import Misfit, attributes_of, difference, non_finite
from gazette.message.value_types import (
    all_parts,
    decoder_of,
    info_of,
    is_customized,
    misfit,
    type_text,
)

T = TypeVar("T")

STACK_RESERVE: Final = 100
"""Number of frames by which a reader's stack may be deeper than the writer's. A nested value that the writer
can just decode must be readable there, too."""
REFUSALS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
)
"""Errors of values that cannot be written, or read back."""
_TIMES: Final = (msgspec.inspect.DateTimeType, msgspec.inspect.TimeType)
NO_ZONE: Final = re.compile(rb':\d\d:\d\d(\.\d+)?"')
"""Matches a time without a zone in JSON. Two times without a zone are equal even if their `fold` differs."""
_encode: Final = msgspec.json.Encoder().encode


class ValueEncoding(Generic[T]):
    """JSON of the values of one declared type, on a single line. Any thread may use it."""

    __slots__ = (
        *("_at_once", "_by_parts", "_decode", "_fingerprint"),
        *("_holds_times", "_info", "_is_plain", "identity"),
    )

    def __init__(self, declared: Any = Any, path: str = "") -> None:
        """Create the encoding of a type. Raise ``Invalid``, with ``path``, if JSON cannot be decoded to the
        type."""
        try:
            self._info = info_of(declared)
            self._decode = decoder_of(declared, [self._info]).decode
        except (TypeError, NameError) as error:
            raise Invalid(
                f"values of type {_written(declared)} cannot be kept: {error}",
                path=path,
                hint="Declare a type that msgspec knows: dict[int, int], a Struct, a dataclass.",
            ) from error
        self._fingerprint = Fingerprint(self._info)
        parts = {type(part) for part in all_parts(self._info)}
        self._holds_times = not parts.isdisjoint(_TIMES)
        # If `==` does not show that two values are the same, compare them part by part.
        self._by_parts = is_customized(self._info) or msgspec.inspect.AnyType in parts
        self._is_plain = not self._by_parts and not (parts & {*_TIMES, msgspec.inspect.DecimalType})
        # `_read_back` decodes longer JSON, in bytes. A type that holds itself may be nested deeply.
        may_be_deep = msgspec.inspect.AnyType in parts or "..." in repr(self._info)
        self._at_once = STACK_RESERVE if may_be_deep else sys.maxsize
        if msgspec.inspect.RawType in parts:
            self._at_once = -1  # Always call `_read_back`, which refuses a newline in a Raw.
        self.identity = type_text(self._info)
        """Text of the declared type, the same in each process. It has only the name of a class."""

    def encode(self, value: T, name: str = "value", **facts: Any) -> bytes:
        """Return a value as JSON. Raise ``InvalidValue`` for a part that would not read back equal.

        The path to the part begins with ``name``. ``facts`` become facts of the error.
        """
        try:
            data = _encode(value)
            back = self._read_back(data)
            mismatch = None if self._fingerprint.are_same(value, back) else difference(value, back)
        except REFUSALS as error:
            raise self.refused(value, error, name, **facts) from None
        if mismatch is not None:
            raise self._unequal(value, mismatch, name, facts)
        return data

    def require_equal(self, value: T, data: bytes, name: str) -> None:
        """Raise ``InvalidValue`` for a part of a value that does not read back equal from its JSON, ``data``.

        Unlike `encode`, accept an equal part of another type, such as an int for a float. Paths begin with
        ``name``, or with a field of the value if ``name`` is empty.
        """
        try:
            # Publishers call this hundreds of thousands of times a second.
            back = self._decode(data) if len(data) <= self._at_once else self._read_back(data)
            if value == back if self._is_plain else self._are_equal(value, back, data):
                return
            mismatch = difference(value, back, by_type=False)
            if mismatch is None and self._by_parts:
                mismatch = misfit(value, self._info)
        except REFUSALS as error:
            raise self.refused(value, error, name) from None
        if mismatch is not None:
            raise self._unequal(value, mismatch, name, {})

    def _are_equal(self, value: T, back: T, data: bytes) -> bool:
        """Return True if two values are surely equal. For some types, `==` is not enough."""
        if self._by_parts:
            return self._fingerprint.are_same(value, back)
        try:
            is_equal = bool(value == back)
        except ArithmeticError:  # A decimal that is a signaling NaN.
            return False
        return is_equal and not (self._holds_times and NO_ZONE.search(data))

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
        """Decode JSON as a reader would. Raise one of `REFUSALS` for JSON that a reader could not decode."""
        # Most values are short, so the cost of each call here matters.
        if len(data) <= self._at_once:
            return self._decode(data)  # type: ignore[no-any-return]
        if b"\n" in data:
            raise ValueError("a msgspec.Raw holds a newline")
        if self._at_once < 0:
            data.decode()  # msgspec does not check that a Raw is UTF-8. All other readers do.
        # Each level of nesting has an opening bracket.
        is_deep = data.count(b"[") + data.count(b"{") > STACK_RESERVE
        value: T = self._deeper(data, STACK_RESERVE) if is_deep else self._decode(data)
        return value

    def _deeper(self, data: bytes, frames: int) -> T:
        """Decode with ``frames`` more frames on the stack, since a reader's stack may be deeper than ours."""
        value: T = self._deeper(data, frames - 1) if frames else self._decode(data)
        return value

    def refused(self, value: T, error: BaseException, name: str, **facts: Any) -> InvalidValue:
        """Return the error, with a path, of a value that JSON cannot hold, or the type cannot read back."""
        reason = f"is not {self.identity} as JSON: {error}"
        mismatch = (
            _too_deep(value) if isinstance(error, RecursionError) else self._explained(value)
        ) or Misfit([], reason)
        return _invalid(mismatch, name, facts)

    def _unequal(self, value: T, found: Misfit, name: str, facts: dict[str, Any]) -> InvalidValue:
        # A misfit within the different part says more, if a part there does not fit its declared type.
        typed = self._explained(value)
        within = typed is not None and typed.steps[::-1][: len(found.steps)] == found.steps[::-1]
        return _invalid(typed if typed and within else found, name, facts)

    def _explained(self, value: T) -> Misfit | None:
        try:
            return misfit(value, self._info)
        except RecursionError:
            return _too_deep(value)
        except REFUSALS:
            return None  # Code of the application raised, such as the `__eq__` of a class.


def _too_deep(value: Any) -> Misfit:
    """Return the misfit of a value that is nested too deeply, in the attribute at fault if there is one."""
    mismatch = Misfit([], "is nested too deeply, or holds itself", "Keep values flat, or by keys.")
    # If the attributes are not known, try none.
    for name, part in zip(*(attributes_of(value) or ((), ())), strict=True):
        try:
            difference(part, part)  # This call walks through the whole part.
        except RecursionError:
            return mismatch.below(f".{name}")
    return mismatch


def _written(declared: Any) -> str:
    """Return the text of a type with its parameters, as the application has written it."""
    is_plain = get_origin(declared) is None and hasattr(declared, "__name__")
    return declared.__name__ if is_plain else repr(declared).replace("typing.", "")


def _invalid(found: Misfit, name: str, facts: dict[str, Any]) -> InvalidValue:
    return InvalidValue(
        found.reason,
        path=found.path(name) or "message",
        hint=found.advice or "Convert it, or declare another type.",
        **facts,
    )


def finite(value: T, name: str = "value") -> T:
    """Return a value. Raise ``InvalidValue``, with a path, for NaN, infinities and values that hold such a
    number."""
    if (mismatch := non_finite(value)) is not None:
        raise _invalid(mismatch, name, {})
    return value
