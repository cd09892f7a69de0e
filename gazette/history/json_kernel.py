"""One compiled pass over lines of JSON: finds messages, their UUIDs, and some of their fields.

`scan` takes a buffer of whole lines and fills arrays. It accepts what publishers write: JSON objects with a
canonical UUID, and values that fit their fields. Of a value that it does not convert it returns the text,
which Arrow casts. It declines other lines, for example a UUID in braces, a duplicate key, a value of another
type, or invalid JSON. The caller reads a declined line by the specification: `Framing` and `JsonRow`. So
`scan` may decline any line. But if it accepts a line, its result equals the result of the specification. It
accepts numbers that JSON does not have, such as NaN, since some columns of floats have many of them. The mark
`LENIENT` is for lines with such a number, and with a text or number that a declared type may refuse.

Numba compiles the code at its first call, which takes up to a minute. It caches the machine code, per
processor, beside this file or in the user's cache directory. If neither is writable, each process compiles
the code. ``python -m gazette.history.json_kernel`` compiles ahead, for images and before tests.

Keep the code in one file: Numba recompiles a cached function when its own file changes, but not when the
file of a callee changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numba
import numpy as np

from gazette.message.uuid import ACK_TXN, FOREIGN_UUID

F = TypeVar("F", bound=Callable[..., Any])

TEXT: Final = 0
"""Kind of a field: the characters of a string, or the JSON of any other value."""
INTEGER: Final = 1
"""Kind of a field: a signed integer of 64 bits."""
BOOLEAN: Final = 2
"""Kind of a field: zero or one."""
NUMBER: Final = 3
"""Kind of a field: the text of a number."""
DECIMAL: Final = 4
"""Kind of a field: an integer that counts units. A unit is 10 to the power of minus the field's scale."""
INSTANT: Final = 5
"""Kind of a field: microseconds since 1970. A time without an offset is in UTC."""
LOCAL: Final = 6
"""Kind of a field: microseconds since 1970 of a time without a zone."""
DATE: Final = 7
"""Kind of a field: days since 1970."""
VALUE: Final = 8
"""Kind of a field: the JSON of any value."""
STRUCT: Final = 9
"""Kind of a field: an object. Its fields are nodes too."""
LIST: Final = 10
"""Kind of a field: a list. Its item is a node too."""

DECLINED: Final = 1
"""Mark of a line that the caller must read by the specification."""
LENIENT: Final = 2
"""Mark of a line that was read, but that a decoder of declared types may read differently or refuse."""

_NUMBERED: Final = (INTEGER, BOOLEAN, DECIMAL, INSTANT, LOCAL, DATE)
_TEXTUAL: Final = (TEXT, NUMBER, VALUE)

_ABSENT: Final = -1
"""Number that stands for a key that is not wanted, and for the node of a key without a field."""
KEYS_MAX: Final = 256
"""Greatest number of keys of a line that are remembered for the next line."""
DEPTH_MAX: Final = 32
"""Greatest depth of a tree of nodes."""
_DEPTH_MAX: Final = 60
"""Greatest depth of a value without nodes: `_nested_end` has one bit for each level."""
_TEXT_CHARS: Final = 36
_FOREIGN_UUID: Final = np.uint64(FOREIGN_UUID)
_ACK_TXN: Final = np.uint64(ACK_TXN)
_DIGITS_MAX: Final = 19
"""Greatest number of digits that always fit an unsigned integer of 64 bits."""
_UNITS_DIGITS_MAX: Final = 18
"""Greatest number of digits that always fit a signed integer of 64 bits."""
_SECONDS_DIGITS_MAX: Final = 12
"""Greatest number of digits of seconds whose microseconds always fit a signed integer of 64 bits."""
_MICROS: Final = 1_000_000
_DAY_MICROS: Final = 86_400 * _MICROS
_OFFSET_MAX_MINUTES: Final = 18 * 60
"""Greatest offset of a zone from UTC, in minutes."""
_MICROS_DIGITS: Final = 6
_DATE_CHARS: Final = 10
_TIME_CHARS: Final = 19
"""Length of a date and a time to the second."""
_NO_VALUE: Final = np.int64(-(1 << 63))
"""Result for a text that is no time of RFC 3339, or for a number that does not fit as units."""
_LINES_BETWEEN: Final = 8
"""A buffer is declined if more than one line in this number of its lines is declined."""
_DECLINED_FREE: Final = 16
"""Declined lines that a buffer may have before their share counts."""

_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C
_SPACE: Final = 0x20
_NEWLINE: Final = 0x0A
_COLON: Final = 0x3A
_COMMA: Final = 0x2C
_OPEN: Final = 0x7B
_CLOSE: Final = 0x7D
_OPEN_LIST: Final = 0x5B
_CLOSE_LIST: Final = 0x5D
_MINUS: Final = 0x2D
_PLUS: Final = 0x2B
_DOT: Final = 0x2E
_ZERO: Final = 0x30
_NINE: Final = 0x39

_NO_DIGIT: Final = 0xFF


class Wanted(NamedTuple):
    """The input of `scan`: a tree of nodes, whose root is the line. Parents come before children."""

    names: Any
    """The keys, concatenated, object by object. Keys that lead to a nested UUID come last."""
    bounds: Any
    """The positions at which ``names`` is cut into keys."""
    key_nodes: Any
    """By key: its node, or `_ABSENT` for the key of the UUID if that key is no field."""
    key_bounds: Any
    """By node: the number of its first key; at the end, the number of all keys. Only nodes of objects have
    keys."""
    kinds: Any
    """By node: its kind."""
    scales: Any
    """By node of a decimal: digits after the point, and greatest number of digits."""
    rows: Any
    """By node: its rows in ``Arrays.numbers`` and ``Arrays.texts``. `_ABSENT`: the node has no row there."""
    parents: Any
    """By node: its parent."""
    items: Any
    """By node of a list: the node of its items."""
    null_bounds: Any
    """By node: the bounds of its part of ``nulls``."""
    nulls: Any
    """By node: the node itself, and all nodes below it that have one slot for each slot of the node."""
    uuid: Any
    """Number of the key of the UUID, or of the first key that leads to it."""


class Arrays(NamedTuple):
    """The output of `scan`: one element for each line, and for each node a row of slots.

    A field of a line has one slot for each line. A node of list items has one slot for each item.
    """

    begins: Any
    producers: Any
    """Parts of the UUID; zeros for a line without a UUID. A foreign UUID has the flags `FOREIGN_UUID`."""
    clocks: Any
    flags: Any
    declined: Any
    """By line: `DECLINED`, `LENIENT`, or zero."""
    counts: Any
    """By node: the number of its slots that are filled."""
    present: Any
    """By node and slot: 1 for a value, zero for a value that is absent or null."""
    numbers: Any
    """By row of ``Wanted.rows`` and slot: the value, if it has no text."""
    offsets: Any
    """By node: the bounds in ``texts`` of each slot. For a list: the bounds of its items' slots."""
    texts: Any
    """By row of ``Wanted.rows``: the texts of all slots."""


def _hex_table() -> Any:
    table = np.full(256, _NO_DIGIT, np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        table[digit] = value
    for value, digit in enumerate(b"ABCDEF"):
        table[digit] = 10 + value
    return table


def _plain_table() -> Any:
    """Return a table of bytes: True for ASCII, except quotes, backslashes and control characters."""
    table = np.ones(256, np.uint8)
    table[:_SPACE] = table[0x80:] = 0
    table[_QUOTE] = table[_BACKSLASH] = 0
    return table


def _escaped_table() -> Any:
    """Return a table from the byte after a backslash to its meaning; zero for an invalid escape."""
    table = np.zeros(256, np.uint8)
    for letter, meaning in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
        table[letter] = meaning
    return table


_HEX = _hex_table()
_ESCAPED = _escaped_table()
_NAN = np.frombuffer(b"NaN", np.uint8)
_INF = np.frombuffer(b"INF", np.uint8)
_INFINITY = np.frombuffer(b"Infinity", np.uint8)
_PLAIN = _plain_table()
_UNITS = np.array([10**power for power in range(_UNITS_DIGITS_MAX + 1)], np.int64)
_MONTH_DAYS = np.array([31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.int64)


_NJIT: Any = numba.njit


def _compiled(inline: str = "never") -> Callable[[F], F]:
    """Return a decorator that compiles a function by Numba, and caches the machine code if it can."""
    options = {"nogil": True, "inline": inline, "error_model": "numpy"}

    def compile_(function: F) -> F:
        try:
            compiled: F = _NJIT(cache=True, **options)(function)
        except RuntimeError:  # Numba found no writable directory for the machine code.
            compiled = _NJIT(**options)(function)
        return compiled

    return compile_


@_compiled("always")
def _byte(buffer: Any, at: int) -> int:
    """Return a byte of the buffer. The unsigned index avoids Numba's check for a negative index, which costs
    time at every byte."""
    return buffer[np.uintp(at)]  # type: ignore[no-any-return]


@_compiled()
def _blanks(buffer: Any, at: int) -> int:
    """Return the end of the blanks at position ``at``. A newline is no blank."""
    while _byte(buffer, at) <= _SPACE and _byte(buffer, at) != _NEWLINE:
        if _byte(buffer, at) != _SPACE and _byte(buffer, at) != 0x09 and _byte(buffer, at) != 0x0D:
            return at
        at += 1
    return at


@_compiled()
def _digits(buffer: Any, at: int, count: int) -> Any:
    """Return ``count`` hexadecimal digits as a number; more than 48 bits if a digit is invalid."""
    value = np.uint64(0)
    bad = np.uint8(0)
    for index in range(at, at + count):
        digit = _HEX[_byte(buffer, index)]
        bad |= digit
        value = (value << np.uint64(4)) | np.uint64(digit)
    if bad > 15:
        return np.uint64(1) << np.uint64(63)
    return value


@_compiled()
def _character_end(buffer: Any, at: int) -> int:
    """Return the end of the non-ASCII character at ``at``; -1 if it is not valid UTF-8."""
    first = _byte(buffer, at)
    if first < 0xC2 or first > 0xF4:
        return -1
    second = _byte(buffer, at + 1)
    # Refuse overlong forms, halves of surrogates, and code points beyond Unicode.
    if first == 0xE0:
        fits = 0xA0 <= second <= 0xBF
    elif first == 0xED:
        fits = 0x80 <= second <= 0x9F
    elif first == 0xF0:
        fits = 0x90 <= second <= 0xBF
    elif first == 0xF4:
        fits = 0x80 <= second <= 0x8F
    else:
        fits = 0x80 <= second <= 0xBF
    if not fits:
        return -1
    end = at + 2 + (first >= 0xE0) + (first >= 0xF0)
    for index in range(at + 2, end):
        if not 0x80 <= _byte(buffer, index) <= 0xBF:
            return -1
    return end


@_compiled()
def _escape_end(buffer: Any, at: int) -> int:
    """Return the end of the escape, or of the pair of surrogates, at ``at``; -1 if it is invalid."""
    escaped = _byte(buffer, at + 1)
    if escaped != 0x75:
        return at + 2 if _ESCAPED[escaped] else -1
    code = _escaped_code(buffer, at + 2)
    if code < 0xD800 or code > 0xDFFF:
        return at + 6 if code >= 0 else -1
    if code > 0xDBFF or _byte(buffer, at + 6) != _BACKSLASH or _byte(buffer, at + 7) != 0x75:
        return -1
    return at + 12 if 0xDC00 <= _escaped_code(buffer, at + 8) <= 0xDFFF else -1


@_compiled()
def _escaped_code(buffer: Any, at: int) -> int:
    """Return four hexadecimal digits as a number, or -1. Stop at an invalid digit: the buffer may end."""
    code = 0
    for index in range(at, at + 4):
        digit = _HEX[_byte(buffer, index)]
        if digit == _NO_DIGIT:
            return -1
        code = code * 16 + digit
    return code


@_compiled("always")
def _text_end(buffer: Any, at: int) -> int:
    """Return the position after the closing quote of a string whose content begins at ``at``, or -1."""
    while True:
        while _PLAIN[_byte(buffer, at)]:
            at += 1
        byte = _byte(buffer, at)
        if byte == _QUOTE:
            return at + 1
        if byte == _BACKSLASH:
            at = _escape_end(buffer, at)
        elif byte >= 0x80:
            at = _character_end(buffer, at)
        else:
            return -1
        if at < 0:
            return -1


@_compiled("always")
def _number_end(buffer: Any, at: int) -> int:
    """Return the end of the number at ``at``, or -1 if it is invalid."""
    if _byte(buffer, at) == _MINUS:
        at += 1
    if _byte(buffer, at) == _ZERO:
        at += 1
    else:
        if not _ZERO < _byte(buffer, at) <= _NINE:
            return -1
        while _ZERO <= _byte(buffer, at) <= _NINE:
            at += 1
    if _byte(buffer, at) == _DOT:
        at += 1
        if not _ZERO <= _byte(buffer, at) <= _NINE:
            return -1
        while _ZERO <= _byte(buffer, at) <= _NINE:
            at += 1
    if _byte(buffer, at) == 0x65 or _byte(buffer, at) == 0x45:
        at += 1
        if _byte(buffer, at) == _PLUS or _byte(buffer, at) == _MINUS:
            at += 1
        if not _ZERO <= _byte(buffer, at) <= _NINE:
            return -1
        while _ZERO <= _byte(buffer, at) <= _NINE:
            at += 1
    return at


@_compiled()
def _word_end(buffer: Any, at: int) -> int:
    """Return the end of ``true``, ``false`` or ``null``, or -1."""
    if _byte(buffer, at) == 0x74:
        if (
            _byte(buffer, at + 1) == 0x72
            and _byte(buffer, at + 2) == 0x75
            and _byte(buffer, at + 3) == 0x65
        ):
            return at + 4
    elif _byte(buffer, at) == 0x6E:
        if (
            _byte(buffer, at + 1) == 0x75
            and _byte(buffer, at + 2) == 0x6C
            and _byte(buffer, at + 3) == 0x6C
        ):
            return at + 4
    elif (
        _byte(buffer, at) == 0x66
        and _byte(buffer, at + 1) == 0x61
        and _byte(buffer, at + 2) == 0x6C
        and _byte(buffer, at + 3) == 0x73
        and _byte(buffer, at + 4) == 0x65
    ):
        return at + 5
    return -1


@_compiled()
def _text_of_end(buffer: Any, at: int, text: Any) -> int:
    """Return the end of ``text`` at ``at``, or -1 if another text is there."""
    for index in range(len(text)):
        if _byte(buffer, at + index) != text[index]:
            return -1
    return at + len(text)


@_compiled()
def _literal_end(buffer: Any, at: int) -> int:
    """Return the end of a number that JSON does not have, such as ``NaN`` or ``-Infinity``, or -1."""
    if _byte(buffer, at) == 0x4E:
        return _text_of_end(buffer, at, _NAN)
    if _byte(buffer, at) != _PLUS and _byte(buffer, at) != _MINUS:
        return _text_of_end(buffer, at, _INFINITY)
    end = _text_of_end(buffer, at + 1, _INFINITY)
    return end if end >= 0 else _text_of_end(buffer, at + 1, _INF)


@_compiled("always")
def _plain_end(buffer: Any, at: int) -> int:
    """Return the end of a value that is neither an object nor a list, or -1."""
    first = _byte(buffer, at)
    if first == _QUOTE:
        return _text_end(buffer, at + 1)
    if first == _MINUS or _ZERO <= first <= _NINE:
        return _number_end(buffer, at)
    return _word_end(buffer, at)


@_compiled()
def _nested_end(buffer: Any, at: int, lenient: bool) -> int:
    """Return the end of the object or list at ``at``, or -1. If ``lenient``, accept NaN and infinities.

    ``objects`` has a bit for each level, the lowest for the innermost. The bit is set for an object.
    """
    objects = np.int64(0)
    depth = 0
    while True:
        # A value begins here.
        if _byte(buffer, at) == _OPEN or _byte(buffer, at) == _OPEN_LIST:
            is_object = _byte(buffer, at) == _OPEN
            if depth == _DEPTH_MAX:
                return -1
            depth += 1
            objects = (objects << 1) | np.int64(is_object)
            at = _blanks(buffer, at + 1)
            if _byte(buffer, at) != (_CLOSE if is_object else _CLOSE_LIST):
                if is_object:
                    at = _member(buffer, at)
                    if at < 0:
                        return -1
                continue
        else:
            end = _plain_end(buffer, at)
            if end < 0 and lenient:
                end = _literal_end(buffer, at)
            if end < 0:
                return -1
            at = _blanks(buffer, end)
        # A value has ended, or an object or list has begun that is empty.
        while True:
            is_object = objects & 1 == 1
            if _byte(buffer, at) == _COMMA:
                at = _blanks(buffer, at + 1)
                if is_object:
                    at = _member(buffer, at)
                    if at < 0:
                        return -1
                break
            if _byte(buffer, at) != (_CLOSE if is_object else _CLOSE_LIST):
                return -1
            at += 1
            depth -= 1
            objects >>= 1
            if depth == 0:
                return at
            at = _blanks(buffer, at)


@_compiled("always")
def _value_end(buffer: Any, at: int) -> int:
    """Return the end of the value at ``at``; -1 if no valid JSON stands there."""
    if _byte(buffer, at) == _OPEN or _byte(buffer, at) == _OPEN_LIST:
        return _nested_end(buffer, at, False)  # Not lenient.
    return _plain_end(buffer, at)


@_compiled()
def _any_end(buffer: Any, at: int) -> int:
    """Do the same as `_value_end`, without inlining: callers compile faster."""
    return _value_end(buffer, at)


@_compiled()
def _lenient_end(buffer: Any, at: int) -> int:
    """Return the end of a value that may have numbers which JSON does not have, or -1.

    Call it only after `_value_end` has declined the value: so strict values cost no time here.
    """
    if _byte(buffer, at) == _OPEN or _byte(buffer, at) == _OPEN_LIST:
        return _nested_end(buffer, at, True)  # Lenient.
    return _literal_end(buffer, at)


@_compiled()
def _string_end(buffer: Any, at: int) -> int:
    """Do the same as `_text_end`, without inlining."""
    return _text_end(buffer, at)


@_compiled()
def _member(buffer: Any, at: int) -> int:
    """Return the begin of the value of the member whose key begins at ``at``; -1 if no member is there."""
    if _byte(buffer, at) != _QUOTE:
        return -1
    at = _string_end(buffer, at + 1)
    if at < 0:
        return -1
    at = _blanks(buffer, at)
    if _byte(buffer, at) != _COLON:
        return -1
    return _blanks(buffer, at + 1)


@_compiled()
def _unescaped(buffer: Any, begin: int, end: int, target: Any, to: int) -> int:
    """Write a well-formed string to ``target`` with its escapes resolved. Return its end there."""
    at = begin
    while at < end:
        byte = _byte(buffer, at)
        if byte != _BACKSLASH:
            target[to] = byte
            at += 1
            to += 1
            continue
        escaped = _byte(buffer, at + 1)
        at += 2
        if escaped == 0x75:
            code = np.int64(_digits(buffer, at, 4))
            at += 4
            if 0xD800 <= code <= 0xDBFF:
                low = np.int64(_digits(buffer, at + 2, 4))
                at += 6
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            if code < 0x80:
                target[to] = code
                to += 1
            elif code < 0x800:
                target[to] = 0xC0 | (code >> 6)
                target[to + 1] = 0x80 | (code & 0x3F)
                to += 2
            elif code < 0x10000:
                target[to] = 0xE0 | (code >> 12)
                target[to + 1] = 0x80 | ((code >> 6) & 0x3F)
                target[to + 2] = 0x80 | (code & 0x3F)
                to += 3
            else:
                target[to] = 0xF0 | (code >> 18)
                target[to + 1] = 0x80 | ((code >> 12) & 0x3F)
                target[to + 2] = 0x80 | ((code >> 6) & 0x3F)
                target[to + 3] = 0x80 | (code & 0x3F)
                to += 4
            continue
        target[to] = _ESCAPED[escaped]
        to += 1
    return to


@_compiled()
def _integer(buffer: Any, begin: int, end: int) -> Any:
    """Return at most `_DIGITS_MAX` digits as a number. Any other text gives a greater number."""
    too_large = ~np.uint64(0)
    if end - begin > _DIGITS_MAX:
        return too_large
    value = np.uint64(0)
    for index in range(begin, end):
        digit = np.uint64(_byte(buffer, index)) - np.uint64(_ZERO)
        if digit > np.uint64(9):
            return too_large
        value = value * np.uint64(10) + digit
    return value


@_compiled()
def _units(buffer: Any, begin: int, end: int, scale: int, precision: int) -> Any:
    """Return the units of a number, rounded half up. `_NO_VALUE`: it has an exponent, or too many digits."""
    at: Any = begin + (_byte(buffer, begin) == _MINUS)
    value = np.int64(0)
    digits = 0
    decimals = -1  # No point was read yet.
    rounds_up = False
    while at < end:
        byte = _byte(buffer, at)
        at += 1
        if byte == _DOT:
            decimals = 0
            continue
        if not _ZERO <= byte <= _NINE:
            return _NO_VALUE
        if decimals == scale:
            rounds_up = byte >= _ZERO + 5
            # Later digits do not change the rounding. Only check that no exponent follows.
            while at < end:
                if not _ZERO <= _byte(buffer, at) <= _NINE:
                    return _NO_VALUE
                at += 1
            break
        value = value * 10 + (np.int64(byte) - _ZERO)
        digits += value != 0
        decimals += decimals >= 0
        if digits > _UNITS_DIGITS_MAX:
            return _NO_VALUE
    missing_decimals = scale - max(decimals, 0)
    if digits + missing_decimals > _UNITS_DIGITS_MAX:
        return _NO_VALUE
    value = value * _UNITS[missing_decimals] + np.int64(rounds_up)
    if precision <= _UNITS_DIGITS_MAX and value >= _UNITS[precision]:
        return _NO_VALUE
    return -value if _byte(buffer, begin) == _MINUS else value


@_compiled()
def _two_digits(buffer: Any, at: int) -> Any:
    """Return two digits as a number; a number above 99 if they are no digits."""
    tens: Any = np.int64(_byte(buffer, at)) - _ZERO
    ones: Any = np.int64(_byte(buffer, at + 1)) - _ZERO
    if tens < 0 or tens > 9 or ones < 0 or ones > 9:
        return 100
    return tens * 10 + ones


@_compiled()
def _days(buffer: Any, at: int) -> Any:
    """Return the days since 1970 of ``YYYY-MM-DD``, or `_NO_VALUE`."""
    high, low = _two_digits(buffer, at), _two_digits(buffer, at + 2)
    month, day = _two_digits(buffer, at + 5), _two_digits(buffer, at + 8)
    if high > 99 or low > 99 or not 1 <= month <= 12 or not 1 <= day <= _MONTH_DAYS[month - 1]:
        return _NO_VALUE
    if _byte(buffer, at + 4) != _MINUS or _byte(buffer, at + 7) != _MINUS:
        return _NO_VALUE
    year = high * 100 + low
    if month == 2 and day == 29 and (year % 4 or (year % 100 == 0 and year % 400)):
        return _NO_VALUE
    # Let years begin in March: so a leap day is the last day of its year. An era is 400 years.
    year -= month < 3
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return np.int64(era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468)


@_compiled()
def _micros(buffer: Any, begin: int, end: int, zoned: bool) -> Any:
    """Return the microseconds since 1970 of the time between two quotes, or `_NO_VALUE`.

    Ignore digits beyond microseconds. A time without an offset is in UTC.
    """
    if end - begin < _DATE_CHARS:
        return _NO_VALUE
    days = _days(buffer, begin)
    if days == _NO_VALUE or end - begin == _DATE_CHARS:
        return days if days == _NO_VALUE else days * _DAY_MICROS
    if end - begin < _TIME_CHARS:
        return _NO_VALUE
    at = begin + _DATE_CHARS
    hour, minute = _two_digits(buffer, at + 1), _two_digits(buffer, at + 4)
    second = _two_digits(buffer, at + 7)
    if (
        (_byte(buffer, at) != 0x54 and _byte(buffer, at) != _SPACE)
        or _byte(buffer, at + 3) != _COLON
        or _byte(buffer, at + 6) != _COLON
        or hour > 23
        or minute > 59
        or second > 59
    ):
        return _NO_VALUE
    at += 9
    fraction = np.int64(0)
    if at < end and _byte(buffer, at) == _DOT:
        at += 1
        digits = 0
        while at < end and _ZERO <= _byte(buffer, at) <= _NINE:
            if digits < _MICROS_DIGITS:
                fraction = fraction * 10 + (np.int64(_byte(buffer, at)) - _ZERO)
                digits += 1
            at += 1
        fraction *= _UNITS[_MICROS_DIGITS - digits]
    offset = np.int64(0)
    if at < end:
        if not zoned:
            return _NO_VALUE
        if _byte(buffer, at) == 0x5A:
            if at + 1 != end:
                return _NO_VALUE
        else:
            sign = _byte(buffer, at)
            if (
                (sign != _PLUS and sign != _MINUS)
                or at + 6 != end
                or _byte(buffer, at + 3) != _COLON
                or _two_digits(buffer, at + 4) > 59
            ):
                return _NO_VALUE
            offset = np.int64(_two_digits(buffer, at + 1) * 60 + _two_digits(buffer, at + 4))
            if offset > _OFFSET_MAX_MINUTES:
                return _NO_VALUE
            if sign == _MINUS:
                offset = -offset
    seconds = np.int64(hour * 3600 + minute * 60 + second) - offset * 60
    return days * _DAY_MICROS + seconds * _MICROS + fraction


@_compiled()
def _is_key(buffer: Any, begin: int, end: int, names: Any, bounds: Any, number: int) -> bool:
    """Return True if the bytes from ``begin`` to ``end`` are the key ``number`` of ``names``."""
    first = bounds[number]
    if bounds[number + 1] - first != end - begin:
        return False
    for index in range(end - begin):  # noqa: SIM110 - Numba has no generators.
        if _byte(buffer, begin + index) != names[first + index]:
            return False
    return True


@_compiled()
def _key_number(
    buffer: Any, begin: int, end: int, names: Any, bounds: Any, lowest: int, highest: int
) -> int:
    """Return the number of the key between two quotes, in ``[lowest, highest)``, or `_ABSENT`."""
    for number in range(lowest, highest):
        if _is_key(buffer, begin, end, names, bounds, number):
            return number
    return _ABSENT


@_compiled()
def _escaped_key_number(
    buffer: Any, begin: int, end: int, names: Any, bounds: Any, lowest: int, highest: int
) -> int:
    """Return the number of a key with escapes, or `_ABSENT`."""
    target = np.empty(end - begin, np.uint8)
    size = _unescaped(buffer, begin, end, target, 0)
    return _key_number(target, 0, size, names, bounds, lowest, highest)


@_compiled()
def _nested(buffer: Any, at: int, names: Any, bounds: Any, first: int) -> int:
    """Follow the keys from number ``first`` on into the object at ``at``. Return the begin of the value.

    Return 0 if the value is absent, or -1 if the line is declined.
    """
    for number in range(first, len(bounds) - 1):
        if _byte(buffer, at) != _OPEN:
            return -1
        at = _blanks(buffer, at + 1)
        value_begin = 0
        while _byte(buffer, at) != _CLOSE:
            begin = at + 1
            end = begin
            if _byte(buffer, at) != _QUOTE:
                return -1
            while _PLAIN[_byte(buffer, end)]:
                end += 1
            if _byte(buffer, end) != _QUOTE:
                return -1
            at = _blanks(buffer, end + 1)
            if _byte(buffer, at) != _COLON:
                return -1
            at = _blanks(buffer, at + 1)
            if _is_key(buffer, begin, end, names, bounds, number):
                if value_begin:
                    return -1
                value_begin = at
            at = _any_end(buffer, at)
            if at < 0:
                return -1
            at = _blanks(buffer, at)
            if _byte(buffer, at) == _CLOSE:
                break
            if _byte(buffer, at) != _COMMA:
                return -1
            at = _blanks(buffer, at + 1)
            if _byte(buffer, at) != _QUOTE:
                return -1
        if not value_begin:
            return 0
        at = value_begin
    return at


@_compiled()
def _append_null(node: int, tree: Any, into: Any, counts: Any, written: Any) -> None:
    """Append a null to a node, and to all nodes below it that have one slot for each slot of the node."""
    for index in range(tree.null_bounds[node], tree.null_bounds[node + 1]):
        null_node = tree.nulls[index]
        slot = counts[null_node]
        into.present[null_node, slot] = 0
        into.offsets[null_node, slot + 1] = written[null_node]
        counts[null_node] = slot + 1


@_compiled()
def scan(buffer: Any, stop: int, wanted: Any, into: Any) -> int:
    """Read the lines of ``buffer`` before ``stop``, which is the end of a line.

    Fill the arrays of ``into`` (`Arrays`) with the fields of ``wanted`` (`Wanted`). Return the number
    of lines, or -1 if too many of them are declined. A declined line has neither a UUID nor fields.
    """
    offsets, counts = into.offsets, into.counts
    memory = np.zeros((4, KEYS_MAX), np.int64)
    nodes = len(wanted.kinds)
    written = np.zeros(nodes, np.int64)
    for node in range(nodes):
        counts[node] = offsets[node, 0] = 0
    at = 0
    declined_lines = 0
    while True:
        if _scan_lines(buffer, at, stop, wanted, into, memory, counts, written):
            return int(counts[0])
        row = counts[0]
        declined_lines += 1
        if declined_lines > _DECLINED_FREE and declined_lines * _LINES_BETWEEN > row:
            return -1
        # Remove what the declined line has appended to nodes. Parents come before their children.
        for node in range(1, nodes):
            parent = wanted.parents[node]
            count = counts[parent]
            counts[node] = offsets[parent, count] if wanted.kinds[parent] == LIST else count
        for node in range(nodes):
            written[node] = offsets[node, counts[node]]
        at = into.begins[row]
        while _byte(buffer, at) != _NEWLINE:
            at += 1
        at += 1
        into.declined[row] = 1
        into.clocks[row] = into.producers[row] = into.flags[row] = 0
        _append_null(0, wanted, into, counts, written)


@_compiled()
def _scan_lines(
    buffer: Any,
    at: int,
    stop: int,
    tree: Any,
    into: Any,
    memory: Any,
    counts: Any,
    written: Any,
) -> bool:
    """Read lines from ``at`` on. Return False at a line that is declined.

    ``counts``: by node, the number of slots so far. Node 0 is the line. ``written``: by node, the number of
    bytes of its texts, or of slots of its items. ``memory`` has the keys of the previous line. Keep all this
    in one function: with parts in functions, even inlined by Numba, it was 7 to 18 % slower. ``is_lenient``:
    the line has a number that JSON lacks. ``is_loose``: a text or number that declared types may refuse.
    """
    # Unpack the tuples once: each access to an element counts references to its array, which costs time.
    names, bounds, kinds, scales, rows = tree.names, tree.bounds, tree.kinds, tree.scales, tree.rows
    key_bounds, key_nodes, items, uuid = tree.key_bounds, tree.key_nodes, tree.items, tree.uuid
    begins, declined = into.begins, into.declined
    producers, clocks, flags = into.producers, into.clocks, into.flags
    present, numbers, offsets, texts = into.present, into.numbers, into.offsets, into.texts
    # Keys of the previous line: positions, number, object. The next line usually has the same keys.
    key_begins, key_ends, key_numbers, key_objects = memory[0], memory[1], memory[2], memory[3]
    remembered = 0
    is_deep = len(bounds) - 1 > len(key_nodes)
    stack = np.empty(DEPTH_MAX, np.int64)
    first_ordinals = np.empty(DEPTH_MAX, np.int64)
    while at < stop:
        row = counts[0]
        begins[row] = at
        declined[row] = clocks[row] = producers[row] = flags[row] = 0
        has_uuid = is_lenient = is_loose = False
        at = _blanks(buffer, at)
        if _byte(buffer, at) != _OPEN:
            return False
        at = _blanks(buffer, at + 1)
        container = np.int64(0)
        depth = 0
        ordinal = 0
        in_list = False
        ends = _byte(buffer, at) == _CLOSE
        while True:
            # Here the object or list has its next value, or ends.
            if not ends:
                if in_list:
                    ordinal = first_ordinals[depth]
                    node = items[container]
                else:
                    if _byte(buffer, at) != _QUOTE:
                        return False
                    at += 1
                    same_key = False
                    if ordinal < remembered and key_objects[ordinal] == container:
                        first = key_begins[ordinal]
                        size = key_ends[ordinal] - first
                        # The size includes the closing quote.
                        same_key = at + size < stop
                        if same_key:
                            for index in range(size + 1):
                                if _byte(buffer, at + index) != _byte(buffer, first + index):
                                    same_key = False
                                    break
                    if same_key:
                        end = at + size
                    else:
                        end = at
                        while _PLAIN[_byte(buffer, end)]:
                            end += 1
                        escaped = False
                        if _byte(buffer, end) != _QUOTE:
                            end = _string_end(buffer, at) - 1
                            if end < 0:
                                return False
                            for index in range(at, end):
                                escaped |= _byte(buffer, index) == _BACKSLASH
                        lowest, highest = key_bounds[container], key_bounds[container + 1]
                        if escaped:
                            key = _escaped_key_number(
                                buffer, at, end, names, bounds, lowest, highest
                            )
                        else:
                            key = _key_number(buffer, at, end, names, bounds, lowest, highest)
                        key_begins[ordinal] = at
                        key_ends[ordinal] = end
                        key_numbers[ordinal] = key
                        key_objects[ordinal] = container
                        remembered = max(remembered, ordinal + 1)
                    key = key_numbers[ordinal]
                    # All keys beyond the first `KEYS_MAX` share the last place of the memory.
                    ordinal += ordinal < KEYS_MAX - 1
                    at = _blanks(buffer, end + 1)
                    if _byte(buffer, at) != _COLON:
                        return False
                    at = _blanks(buffer, at + 1)
                    node = np.int64(_ABSENT)
                    uuid_at: Any = np.int64(0)
                    if key != _ABSENT:
                        node = key_nodes[key]
                        if key == uuid:
                            if has_uuid:
                                return False
                            has_uuid = True
                            uuid_at = at
                            if is_deep:
                                uuid_at = _nested(buffer, at, names, bounds, len(key_nodes))
                                if uuid_at < 0:
                                    return False
                            if uuid_at and _byte(buffer, uuid_at) == 0x6E:
                                uuid_at = 0  # The value is null.
                        if node != _ABSENT and counts[node] != counts[container]:
                            return False  # The object has this key twice.
                    if uuid_at:
                        if _byte(buffer, uuid_at) != _QUOTE or uuid_at + _TEXT_CHARS + 2 > stop:
                            return False
                        uuid_at += 1
                        if (
                            _byte(buffer, uuid_at + 8) != _MINUS
                            or _byte(buffer, uuid_at + 13) != _MINUS
                            or _byte(buffer, uuid_at + 18) != _MINUS
                            or _byte(buffer, uuid_at + 23) != _MINUS
                            or _byte(buffer, uuid_at + _TEXT_CHARS) != _QUOTE
                        ):
                            return False
                        low = _digits(buffer, uuid_at, 8)
                        middle = _digits(buffer, uuid_at + 9, 4)
                        high = _digits(buffer, uuid_at + 14, 4)
                        sequence = _digits(buffer, uuid_at + 19, 4)
                        last = _digits(buffer, uuid_at + 24, 12)
                        if (low | middle | high | sequence | last) >> np.uint64(63):
                            return False
                        if (high >> np.uint64(12)) == 1 and (sequence >> np.uint64(14)) == 2:
                            clocks[row] = (
                                ((high & np.uint64(0xFFF)) << np.uint64(52))
                                | (middle << np.uint64(36))
                                | (low << np.uint64(4))
                                | ((sequence >> np.uint64(10)) & np.uint64(0xF))
                            )
                            flags[row] = sequence & np.uint64(0x3FF)
                            producers[row] = last
                        elif low | middle | high | sequence | last:
                            flags[row] = _FOREIGN_UUID
                    if node == _ABSENT:
                        if uuid_at == at + 1:
                            at += _TEXT_CHARS + 2
                        else:
                            skipped = at
                            at = _value_end(buffer, at)
                            if at < 0:
                                at = _lenient_end(buffer, skipped)
                                is_lenient = True
                                if at < 0:
                                    return False
                if node != _ABSENT:
                    first_byte = _byte(buffer, at)
                    kind = kinds[node]
                    begin = at
                    slot = counts[node]
                    number_row, text_row = rows[node, 0], rows[node, 1]
                    is_present = 1
                    copied = quoted = False
                    if first_byte == 0x6E and kind != VALUE:
                        at = _word_end(buffer, at)
                        if at < 0:
                            return False
                        if kind >= STRUCT:
                            _append_null(node, tree, into, counts, written)
                            kind = _ABSENT  # The slot is filled.
                        is_present = 0
                    elif kind >= STRUCT:
                        if first_byte != (_OPEN if kind == STRUCT else _OPEN_LIST):
                            return False
                        stack[depth] = container
                        depth += 1
                        container = node
                        in_list = kind == LIST
                        first_ordinals[depth] = ordinal
                        at = _blanks(buffer, at + 1)
                        ends = _byte(buffer, at) == (_CLOSE_LIST if in_list else _CLOSE)
                        continue
                    elif kind == TEXT and first_byte == _QUOTE:
                        begin = at = at + 1
                        to = written[node]
                        while _PLAIN[_byte(buffer, at)]:
                            texts[text_row, to] = _byte(buffer, at)
                            at += 1
                            to += 1
                        if _byte(buffer, at) == _QUOTE:
                            at += 1
                        else:
                            at = _string_end(buffer, at)
                            if at < 0:
                                return False
                            to = _unescaped(buffer, begin, at - 1, texts[text_row], written[node])
                        written[node] = to
                    elif kind in (TEXT, VALUE):
                        at = _any_end(buffer, at)
                        if at < 0:
                            at = _lenient_end(buffer, begin)
                            is_lenient = True
                        is_loose |= kind == TEXT
                        copied = True
                    elif kind == BOOLEAN:
                        at = _word_end(buffer, at)
                        numbers[number_row, slot] = first_byte == 0x74
                    elif kind >= INSTANT and first_byte == _QUOTE:
                        at = _string_end(buffer, at + 1)
                        if at < 0:
                            return False
                        if kind != DATE:
                            time_value = _micros(buffer, begin + 1, at - 1, kind == INSTANT)
                        elif at - begin - 2 == _DATE_CHARS or (
                            at - begin - 2 > _DATE_CHARS
                            and (
                                _byte(buffer, begin + 1 + _DATE_CHARS) == 0x54
                                or _byte(buffer, begin + 1 + _DATE_CHARS) == _SPACE
                            )
                        ):
                            time_value = _days(buffer, begin + 1)
                        else:
                            time_value = _NO_VALUE
                        if time_value == _NO_VALUE:
                            return False
                        numbers[number_row, slot] = time_value
                    elif kind in (LOCAL, DATE):
                        return False
                    else:
                        quoted = first_byte == _QUOTE and kind in (DECIMAL, NUMBER)
                        begin += quoted
                        at = _number_end(buffer, begin)
                        if kind == NUMBER and (quoted or at < 0):
                            # In quotes, only NaN and infinities are numbers.
                            at = _literal_end(buffer, begin)
                            is_lenient |= not quoted
                            is_loose |= quoted
                        if at < 0 or (quoted and _byte(buffer, at) != _QUOTE):
                            return False
                        negative = _byte(buffer, begin) == _MINUS
                        if kind in (INTEGER, INSTANT):
                            size_max = _DIGITS_MAX if kind == INTEGER else _SECONDS_DIGITS_MAX
                            value = _integer(buffer, begin + negative, at)
                            if at - begin - negative > size_max or value > np.uint64(
                                (1 << 63) - 1
                            ) + np.uint64(negative):
                                return False
                            signed = np.int64(~value + np.uint64(1) if negative else value)
                            numbers[number_row, slot] = signed * (_MICROS if kind == INSTANT else 1)
                        elif kind == DECIMAL:
                            units = _units(buffer, begin, at, scales[node, 0], scales[node, 1])
                            if units == _NO_VALUE:
                                return False
                            numbers[number_row, slot] = units
                        else:
                            # Skip the sign of -0: an integer zero has no sign.
                            is_zero = (
                                negative and at - begin == 2 and _byte(buffer, begin + 1) == _ZERO
                            )
                            begin += is_zero
                            is_loose |= is_zero
                            copied = True
                    if at < 0:
                        return False
                    if copied:
                        to = written[node]
                        for index in range(begin, at):
                            texts[text_row, to] = _byte(buffer, index)
                            to += 1
                        written[node] = to
                    at += quoted
                    if kind != _ABSENT:
                        present[node, slot] = is_present
                        offsets[node, slot + 1] = written[node]
                        counts[node] = slot + 1
                at = _blanks(buffer, at)
                if _byte(buffer, at) == _COMMA:
                    at = _blanks(buffer, at + 1)
                    continue
                if _byte(buffer, at) != (_CLOSE_LIST if in_list else _CLOSE):
                    return False
            # The object or list ends.
            at += 1
            slot = counts[container]
            if in_list:
                written[container] = counts[items[container]]
            else:
                for key in range(key_bounds[container], key_bounds[container + 1]):
                    node = key_nodes[key]
                    if node != _ABSENT and counts[node] == slot:
                        _append_null(node, tree, into, counts, written)
            present[container, slot] = 1
            offsets[container, slot + 1] = written[container]
            counts[container] = slot + 1
            if depth == 0:
                break
            depth -= 1
            container = stack[depth]
            in_list = kinds[container] == LIST
            at = _blanks(buffer, at)
            ends = _byte(buffer, at) != _COMMA
            if not ends:
                at = _blanks(buffer, at + 1)
            elif _byte(buffer, at) != (_CLOSE_LIST if in_list else _CLOSE):
                return False
        at = _blanks(buffer, at)
        # An acknowledgement must be strict JSON.
        if _byte(buffer, at) != _NEWLINE or (is_lenient and flags[row] == _ACK_TXN):
            counts[0] = row
            return False
        if is_lenient or is_loose:
            declined[row] = LENIENT
        at += 1
    return True


@_compiled()
def slots(buffer: Any, has_lists: bool) -> int:
    """Return the number of slots that `arrays` needs: that of lines, or a bound on the items of lists."""
    lines = items = 0
    for byte in buffer:
        lines += byte == _NEWLINE
    if has_lists:
        # Each item follows one of these two signs.
        for byte in buffer:
            items += (byte == _COMMA) | (byte == _OPEN_LIST)
    return max(lines, items)


def arrays(tree: Wanted, size: int, slots: int) -> Arrays:
    """Allocate arrays for lines of ``size`` bytes, without initial values. `scan` checks no bounds: for
    ``slots`` see `slots`."""
    nodes = len(tree.kinds)
    number_rows, text_rows = (tree.rows.max(axis=0) + 1).tolist()
    return Arrays(
        np.empty(slots, np.int64),
        np.empty(slots, np.uint64),
        np.empty(slots, np.uint64),
        np.empty(slots, np.uint64),
        np.empty(slots, np.uint8),
        np.empty(nodes, np.int64),
        np.empty((nodes, slots), np.uint8),
        np.empty((number_rows, slots), np.int64),
        np.empty((nodes, slots + 1), np.int32),
        np.empty((text_rows, size), np.uint8),
    )


class Node(NamedTuple):
    """A node of the tree of `Wanted`."""

    name: bytes
    """Key of the node, if its parent is an object."""
    kind: int
    scale: int = 0
    precision: int = 0
    children: tuple[Node, ...] = ()
    """Fields of an object, or the only item node of a list."""


def wanted(fields: Sequence[Node], uuid: Sequence[bytes]) -> Wanted:
    """Return the input of `scan` for these fields. ``uuid`` is the path of keys to the UUID."""
    nodes = [Node(b"", STRUCT, children=tuple(fields))]
    parents, children = [0], []
    parent = 0
    while parent < len(nodes):  # Breadth first: so the keys of an object are neighbours.
        children.append(range(len(nodes), len(nodes) + len(nodes[parent].children)))
        parents += [parent] * len(nodes[parent].children)
        nodes += nodes[parent].children
        parent += 1
    keys: list[bytes] = []
    key_nodes: list[int] = []
    key_bounds, uuid_key = [0], _ABSENT
    for number, node in enumerate(nodes):
        if node.kind == STRUCT:
            keys += [child.name for child in node.children]
            key_nodes += children[number]
        if number == 0:
            if uuid[0] not in keys:
                keys.append(uuid[0])
                key_nodes.append(_ABSENT)
            uuid_key = keys.index(uuid[0])
        key_bounds.append(len(keys))
    keys += uuid[1:]
    nulls: list[list[int]] = [[number] for number in range(len(nodes))]
    for number in reversed(range(1, len(nodes))):
        if nodes[parents[number]].kind == STRUCT:
            nulls[parents[number]] += nulls[number]
    kinds = np.array([node.kind for node in nodes], np.int64)
    uses = np.stack((np.isin(kinds, _NUMBERED), np.isin(kinds, _TEXTUAL)), axis=1)
    return Wanted(
        np.frombuffer(b"".join(keys), np.uint8),
        _bounds(map(len, keys)),
        np.array(key_nodes, np.int64),
        np.array(key_bounds, np.int64),
        kinds,
        np.array([(node.scale, node.precision) for node in nodes], np.int64),
        np.where(uses, np.cumsum(uses, axis=0) - 1, _ABSENT),
        np.array(parents, np.int64),
        np.array([numbers[0] if numbers else _ABSENT for numbers in children], np.int64),
        _bounds(map(len, nulls)),
        np.array([number for of_node in nulls for number in of_node], np.int64),
        np.int64(uuid_key),
    )


def _bounds(sizes: Iterable[int]) -> Any:
    return np.cumsum([0, *sizes]).astype(np.int64)


def compile_ahead() -> None:
    """Compile all functions that are not compiled yet, by a call with one line that is an empty object."""
    tree = wanted((), [b"uuid"])
    line = np.frombuffer(b"{}\n", np.uint8)
    scan(line, 3, tree, arrays(tree, 3, slots(line, False)))


if __name__ == "__main__":
    # The keys of Numba's cache are types of arguments: the classes of `__main__` would be other types.
    from gazette.history import json_kernel

    json_kernel.compile_ahead()
