"""Keys of messages: each value has one text, or bytes, that stand for it. Pure.

Publishers, routes, joins, Spark and shards hash the result of `KeyEncoding.encode`. Equal values of a
declared type have the same text. So messages with equal keys are in one partition. A caller may also give a
value as text: in a path, in JSON, on a command line. The declared type decides how the text is read.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID

import msgspec

from gazette.errors import Invalid
from gazette.message.value_parts import shown
from gazette.runtime.decoders import json_decoder

CanonicalKey: TypeAlias = str | bytes
"""The bytes or text of a key, which are hashed. A text is hashed as UTF-8."""

DIGITS_MAX: Final = 1000
"""Greatest number of digits before the point, and after it, of a number that is a key."""
_BITS_MAX: Final = 3300
"""Bits of the greatest integer that is a key. It has less than `DIGITS_MAX` digits."""
_TUPLE: Final = "tuple="
_MORE: Final = ".."
"""Last part of the name of an encoding of tuples of any length."""
_BARE: Final = (bool, int, float, Decimal)
"""Types whose text stands in a tuple without quotes. Values of other types stand there as JSON strings."""


def plain_text(text: str) -> str:
    """Return a text as a plain ``str``: an f-string would show the name of a member of a ``(str, Enum)``."""
    return text if type(text) is str else str.__str__(text)


def no_key(value: object, reason: str, hint: str = "") -> Invalid:
    """Return the error of a value that cannot be a key."""
    return Invalid(
        f"{shown(value)} ({type(value).__name__}) is no key: {reason}",
        path="key",
        hint=hint or "Give a text, bytes, number, date, UUID, enum, or a tuple of these.",
    )


@dataclass(frozen=True, slots=True)
class KeyEncoding:
    """Encoding of the values of one type, and of their texts, as keys."""

    name: str
    """Value of the label `gazette.labels.MESSAGE_KEY_TYPE`."""
    of_value: Callable[[Any], CanonicalKey] = field(compare=False, repr=False)
    """Function from a value to its key. The value is neither an enum nor a text."""
    of_text: Callable[[str], CanonicalKey] = field(compare=False, repr=False)
    """Function from a text of JSON or of a path to its key."""

    def encode(self, value: Any) -> CanonicalKey:
        """Return the key of a value, or of its text. Raise ``Invalid`` if the value cannot be a key."""
        while isinstance(value, Enum):
            value = value.value
        if not isinstance(value, str):
            return self.of_value(value)
        return self.of_text(plain_text(value))


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise no_key(value, "it is no text of Unicode") from error
    return value


def _text_of_value(value: Any) -> str:
    """Return the text of bytes in UTF-8, since requests of gRPC may have bytes in place of text. Raise
    ``Invalid`` for bytes that are no UTF-8."""
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise no_key(value, "the key is a text, and this is no UTF-8") from error


def _refuse(value: Any) -> NoReturn:
    raise no_key(value, "the key is declared as another type")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        _refuse(value)
    return bytes(value)


def _bytes_of_text(text: str) -> bytes:
    try:
        return b64decode(text.translate(_URL_SAFE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise no_key(text, "the key is bytes, and this is no base64") from error


_URL_SAFE: Final = str.maketrans("-_", "+/")


def _boolean(value: Any) -> str:
    if not isinstance(value, int) or value not in (0, 1):
        _refuse(value)
    return "true" if value else "false"


def _boolean_of_text(text: str) -> str:
    if text not in ("true", "false"):
        raise no_key(text, "the key is a boolean", "Write true or false.")
    return text


def _integer(value: Any) -> str:
    if isinstance(value, int):
        if value.bit_length() > _BITS_MAX:
            raise no_key(f"{value.bit_length()} bits", f"it has more than {DIGITS_MAX} digits")
        return str(int(value))
    text = _number(value)
    if "." in text:
        raise no_key(value, "the key is an integer")
    return text


def _integer_of_text(text: str) -> str:
    return _integer(_decimal_of_text(text))


def _float(value: Any) -> str:
    """Return the text of the float nearest to a value, since readers decode each number as a float. Raise
    ``Invalid`` if the float is not finite."""
    if not isinstance(value, int | float | Decimal):
        _refuse(value)
    try:
        number = float(value)
    except OverflowError as error:
        raise no_key(value, "it is too large for a float") from error
    except ValueError as error:
        raise no_key(value, "it equals no number") from error
    if not math.isfinite(number):
        raise no_key(value, "it equals no number")
    # A float may equal an integer: both then have the digits of the integer as their text.
    return str(int(number)) if number.is_integer() else _plain(Decimal(repr(number)))


def _float_of_text(text: str) -> str:
    return _float(_decimal_of_text(text))


def _number(value: Any) -> str:
    if isinstance(value, Decimal):
        return _plain(value)
    return _integer(value) if isinstance(value, int) else _float(value)


def _number_of_text(text: str) -> str:
    return _plain(_decimal_of_text(text))


def _decimal_of_text(text: str) -> Decimal:
    try:
        if not text.isascii() or "_" in text or text != text.strip():
            raise InvalidOperation
        return Decimal(text)
    except InvalidOperation as error:
        raise no_key(text, "the key is a number") from error


def _plain(number: Decimal) -> str:
    """Return the digits of a number, without an exponent and without superfluous zeros. Raise ``Invalid`` if
    the number is not finite, or has more than `DIGITS_MAX` digits."""
    if not number.is_finite():
        raise no_key(number, "it equals no number")
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    if number and (exponent < -DIGITS_MAX or number.adjusted() >= DIGITS_MAX):
        raise no_key(number, f"it has more than {DIGITS_MAX} digits")
    if not number:
        return "0"
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _date(value: Any) -> str:
    if not isinstance(value, date) or isinstance(value, datetime):
        _refuse(value)
    return value.isoformat()


def _date_of_text(text: str) -> str:
    return _date(_converted(text, date, "a date", "Write it as 2026-01-31."))


def _datetime(value: Any) -> str:
    if not isinstance(value, datetime):
        _refuse(value)
    if value.utcoffset() is None:
        raise no_key(value, "it has no zone", "Give it a zone: value.replace(tzinfo=UTC).")
    try:
        utc = value.astimezone(UTC)
    except OverflowError as error:
        raise no_key(value, "its time in UTC is out of range") from error
    return utc.replace(tzinfo=None).isoformat() + "Z"


def _datetime_of_text(text: str) -> str:
    hint = "Write it as 2026-01-31T12:00:00Z. In a query, %2B stands for +."
    return _datetime(_converted(text, datetime, "a time", hint))


def _uuid(value: Any) -> str:
    if not isinstance(value, UUID):
        _refuse(value)
    return str(value)


def _uuid_of_text(text: str) -> str:
    return _uuid(_converted(text, UUID, "a UUID", "Write its 32 hexadecimal digits."))


def _converted(text: str, kind: type, what: str, hint: str) -> Any:
    try:
        # Use the parser of JSON, so that a text has the same meaning as in a message.
        return msgspec.convert(text, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise no_key(text, f"the key is {what}", hint) from error


def _any(value: Any) -> CanonicalKey:
    if isinstance(value, tuple):
        return _tuple_text(value, [ANY] * len(value))
    for types, encoding in _BY_TYPE:
        if isinstance(value, types):
            return encoding.of_value(value)
    raise no_key(value, "only values that are written in one way are keys")


def _tuple_text(values: Sequence[Any], kinds: Sequence[KeyEncoding]) -> str:
    """Return a JSON array of the texts of values. Different tuples of one type have different arrays. Raise
    ``Invalid`` for a tuple within a tuple."""
    parts = []
    for value, encoding in zip(values, kinds, strict=True):
        while isinstance(value, Enum):
            value = value.value
        if isinstance(value, tuple | list):
            raise no_key(value, "it is a tuple within a tuple", "Join them to one tuple.")
        text = encoding.encode(value)
        is_bare = encoding in _BARE_KINDS or (encoding is ANY and isinstance(value, _BARE))
        parts.append(text if is_bare and isinstance(text, str) else _quoted(text))
    return f"[{','.join(parts)}]"


def _quoted(text: CanonicalKey) -> str:
    json_text = b64encode(text).decode() if isinstance(text, bytes) else text
    return msgspec.json.encode(json_text).decode()


ANY: Final = KeyEncoding("any", _any, _text)
"""Keys of functions, and of fields without a type: the class of a value decides. A text is its own key."""
TEXT: Final = KeyEncoding("text", _text_of_value, _text)
BYTES: Final = KeyEncoding("bytes", _bytes, _bytes_of_text)
BOOLEAN: Final = KeyEncoding("boolean", _boolean, _boolean_of_text)
INTEGER: Final = KeyEncoding("integer", _integer, _integer_of_text)
FLOAT: Final = KeyEncoding("float", _float, _float_of_text)
DECIMAL: Final = KeyEncoding("decimal", _number, _number_of_text)
DATE: Final = KeyEncoding("date", _date, _date_of_text)
DATETIME: Final = KeyEncoding("datetime", _datetime, _datetime_of_text)
UUID_KEY: Final = KeyEncoding("uuid", _uuid, _uuid_of_text)

_KINDS: Final = {
    kind.name: kind
    for kind in (ANY, TEXT, BYTES, BOOLEAN, INTEGER, FLOAT, DECIMAL, DATE, DATETIME, UUID_KEY)
}
_BARE_KINDS: Final = (BOOLEAN, INTEGER, FLOAT, DECIMAL)
_BY_TYPE: Final[tuple[tuple[Any, KeyEncoding], ...]] = (
    ((bytes, bytearray, memoryview), BYTES),
    (bool, BOOLEAN),  # Before int: a bool is an int.
    (int, INTEGER),
    (float, FLOAT),
    (Decimal, DECIMAL),
    (datetime, DATETIME),  # Before date: a datetime is a date.
    (date, DATE),
    (UUID, UUID_KEY),
)


_decode_array: Final = json_decoder(list[Any], float_hook=Decimal).decode
"""Decoder of the text of a tuple. It keeps each digit of a number."""


def tuple_encoding(kinds: Sequence[KeyEncoding], *, more: bool = False) -> KeyEncoding:
    """Return the encoding of tuples of these kinds. With ``more``, tuples have any number of ``kinds[0]``."""
    names = [encoding.name for encoding in kinds]

    def of_value(value: Any) -> str:
        if not isinstance(value, tuple | list) or (not more and len(value) != len(kinds)):
            _refuse(value)
        return _tuple_text(value, list(kinds) * len(value) if more else kinds)

    def of_text(text: str) -> str:
        try:
            values = _decode_array(text)
        except (msgspec.MsgspecError, UnicodeError) as error:
            hint = 'Write it as an array of JSON, such as ["a",7].'
            raise no_key(text, "the key is a tuple", hint) from error
        return of_value(values)

    return KeyEncoding(_TUPLE + "+".join([*names, _MORE] if more else names), of_value, of_text)


def encoding_named(name: str) -> KeyEncoding:
    """Return the encoding that a label names. Raise ``Invalid`` for an unknown name."""
    if name in _KINDS:
        return _KINDS[name]
    # A tuple has a name such as ``tuple=text+integer``, or ``tuple=text+..`` for any number of values.
    names = name.removeprefix(_TUPLE).split("+") if name.startswith(_TUPLE) else [name]
    more = names[-1] == _MORE
    names = [part_name for part_name in (names[:-1] if more else names) if part_name]
    if not name.startswith(_TUPLE) or not set(names) <= _KINDS.keys():
        raise Invalid(
            f"keys of type {name!r} are not known here",
            path="key",
            hint="Update this program: a newer one has labelled the journals.",
        )
    return tuple_encoding([_KINDS[part_name] for part_name in names], more=more)


def canonical_key(value: Any) -> CanonicalKey:
    """Return the key of a value of any type, by the encoding for keys of functions. Raise ``Invalid`` if the
    value cannot be a key."""
    return ANY.encode(value)
