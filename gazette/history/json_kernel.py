"""One compiled pass over lines of JSON: finds messages, their UUIDs, and some of their fields.

`scan` takes a buffer of whole lines and fills arrays. It accepts what publishers write: JSON
objects with a canonical UUID and fields of plain types. It does not judge other lines. Examples are
a UUID in braces, a number of 30 digits, a duplicate key, a value of another type, or invalid JSON.
It returns the number of such a line. Its caller then uses the specification, which is `Framing` and
`msgspec`. So `scan` may decline any buffer, but what it accepts equals the specification.

Numba compiles the code at its first call, which takes some seconds. It caches the machine code, per
processor, beside this file or in the user's cache directory. If neither is writable, each process
compiles the code. ``python -m gazette.history.json_kernel`` compiles ahead, for images and before
tests.

The code stays in one file. Numba recompiles a cached function when the file of that function
changes, but not when the file of a callee changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

TEXT: Final = 0
"""Kind of a field: a string."""
INTEGER: Final = 1
"""Kind of a field: a signed integer of 64 bits."""
FLOAT: Final = 2
"""Kind of a field: a double, whose bits are returned as an integer."""
BOOLEAN: Final = 3
"""Kind of a field: zero or one."""

_ABSENT: Final = -1
"""Meaning of a key that is not wanted."""
_UUID: Final = -2
"""Meaning of the key of the UUID. Other meanings are numbers of fields."""
KEYS_MAX: Final = 256
"""Number of keys of a line that are kept for the next line. Lines with more keys are declined."""
_DEPTH_MAX: Final = 60
_TEXT_CHARS: Final = 36
_DIGITS_MAX: Final = 18
"""Number of digits that always fits a signed integer of 64 bits."""
_POWER_DIGITS_MAX: Final = 2
_NUMBER_CHARS_MAX: Final = 200
"""Length of a number, in bytes, that cannot exceed the greatest double."""
_EXACT_DIGITS: Final = 15
_EXACT_POWER: Final = 22
"""Greatest power of ten that is exact as a double. Scaling an exact integer by it rounds only once."""

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
    """The input of `scan`: the keys of fields, then that of the UUID."""

    names: Any
    """The keys, one behind the other."""
    bounds: Any
    """The positions at which ``names`` is cut into keys."""
    kinds: Any
    """Kinds of the fields."""


class Arrays(NamedTuple):
    """The output of `scan`: one element for each line, and for each field one row of such elements."""

    begins: Any
    producers: Any
    """Parts of the UUID, which are zero without one."""
    clocks: Any
    flags: Any
    present: Any
    """By field and line: 1 if the field is there, and not null."""
    numbers: Any
    """By field and line: the value, if it is no string."""
    offsets: Any
    """By field: bounds of the lines' strings in ``texts``."""
    texts: Any


def _hex_table() -> Any:
    table = np.full(256, _NO_DIGIT, np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        table[digit] = value
    for value, digit in enumerate(b"ABCDEF"):
        table[digit] = 10 + value
    return table


def _plain_table() -> Any:
    """Return a table of the plain bytes of a string: not ASCII quotes, backslashes or control
    characters.
    """
    table = np.ones(256, np.uint8)
    table[:_SPACE] = table[0x80:] = 0
    table[_QUOTE] = table[_BACKSLASH] = 0
    return table


def _escaped_table() -> Any:
    """Return a table from the byte behind a backslash to its meaning. Zero marks an invalid
    escape.
    """
    table = np.zeros(256, np.uint8)
    for letter, meant in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
        table[letter] = meant
    return table


_HEX = _hex_table()
_ESCAPED = _escaped_table()
_PLAIN = _plain_table()
_POWERS = np.array([10.0**power for power in range(_EXACT_POWER + 1)])


_NJIT: Any = numba.njit


def _compiled(inline: str = "never") -> Callable[[F], F]:
    options = {"nogil": True, "inline": inline, "error_model": "numpy"}

    def compile_(function: F) -> F:
        try:
            made: F = _NJIT(cache=True, **options)(function)
        except RuntimeError:  # Numba found no writable directory for the machine code.
            made = _NJIT(**options)(function)
        return made

    return compile_


@_compiled("always")
def _byte(buffer: Any, at: int) -> int:
    """Return a byte of the buffer.

    The unsigned index avoids Numba's check for a negative index, which costs time at every byte.
    """
    return buffer[np.uintp(at)]  # type: ignore[no-any-return]


@_compiled()
def _blanks(buffer: Any, at: int) -> int:
    """Return the end of the blanks that begin at ``at``. Blanks never pass the end of a line."""
    while _byte(buffer, at) <= _SPACE and _byte(buffer, at) != _NEWLINE:
        if _byte(buffer, at) != _SPACE and _byte(buffer, at) != 0x09 and _byte(buffer, at) != 0x0D:
            return at
        at += 1
    return at


@_compiled()
def _digits(buffer: Any, at: int, count: int) -> Any:
    """Return ``count`` hexadecimal digits as a number. The result exceeds 48 bits if one of them is
    invalid.
    """
    value = np.uint64(0)
    bad = np.uint8(0)
    for place in range(at, at + count):
        digit = _HEX[_byte(buffer, place)]
        bad |= digit
        value = (value << np.uint64(4)) | np.uint64(digit)
    if bad > 15:
        return np.uint64(1) << np.uint64(63)
    return value


@_compiled()
def _character_end(buffer: Any, at: int) -> int:
    """Return the end of the non-ASCII character at ``at``, or -1 if it is not valid UTF-8."""
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
    for place in range(at + 2, end):
        if not 0x80 <= _byte(buffer, place) <= 0xBF:
            return -1
    return end


@_compiled()
def _escape_end(buffer: Any, at: int) -> int:
    """Return the end of the escape whose backslash is at ``at``, or of a surrogate pair. Return -1
    if it is invalid.
    """
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
    """Return four hexadecimal digits as a number, or -1.

    Stop at the first invalid digit, since the buffer may end there.
    """
    code = 0
    for place in range(at, at + 4):
        digit = _HEX[_byte(buffer, place)]
        if digit == _NO_DIGIT:
            return -1
        code = code * 16 + digit
    return code


@_compiled("always")
def _text_end(buffer: Any, at: int) -> int:
    """Return the end of a string, behind its quote, whose first byte inside is at ``at``. Return -1
    if it is invalid.
    """
    while True:
        while _PLAIN[_byte(buffer, at)]:
            at += 1
        found = _byte(buffer, at)
        if found == _QUOTE:
            return at + 1
        if found == _BACKSLASH:
            at = _escape_end(buffer, at)
        elif found >= 0x80:
            at = _character_end(buffer, at)
        else:
            return -1
        if at < 0:
            return -1


@_compiled("always")
def _number_end(buffer: Any, at: int) -> int:
    """Return the end of the number at ``at``. Return -1 if it is invalid, or may exceed the
    greatest double.
    """
    begin = at
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
        power = at
        while _ZERO <= _byte(buffer, at) <= _NINE:
            at += 1
        if at - power > _POWER_DIGITS_MAX:
            return -1
    return at if at - begin <= _NUMBER_CHARS_MAX else -1


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
def _nested_end(buffer: Any, at: int) -> int:
    """Return the end of the object or list at ``at``, or -1.

    ``objects`` has a bit for each level, the lowest for the innermost. The bit is set for an
    object.
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
            at = _plain_end(buffer, at)
            if at < 0:
                return -1
            at = _blanks(buffer, at)
        # A value has ended, or what just began is empty.
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
    """Return the end of any value, or -1."""
    first = _byte(buffer, at)
    if first == _OPEN:
        return _nested_end(buffer, at)
    if first == _OPEN_LIST:
        return _nested_end(buffer, at)
    return _plain_end(buffer, at)


@_compiled()
def _member(buffer: Any, at: int) -> int:
    """Return the start of the value of the member whose key begins at ``at``, or -1."""
    if _byte(buffer, at) != _QUOTE:
        return -1
    at = _text_end(buffer, at + 1)
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
def _double(buffer: Any, begin: int, end: int) -> float:
    """Return the double nearest to a well-formed number. Return NaN if this simple method cannot
    find it.
    """
    at = begin
    negative = _byte(buffer, at) == _MINUS
    if negative:
        at += 1
    value = np.int64(0)
    digits = 0
    power = 0
    while at < end and _ZERO <= _byte(buffer, at) <= _NINE:
        value = value * 10 + (np.int64(_byte(buffer, at)) - _ZERO)
        digits += value != 0
        if digits > _EXACT_DIGITS:
            return np.nan
        at += 1
    if at < end and _byte(buffer, at) == _DOT:
        at += 1
        while at < end and _ZERO <= _byte(buffer, at) <= _NINE:
            value = value * 10 + (np.int64(_byte(buffer, at)) - _ZERO)
            digits += value != 0
            if digits > _EXACT_DIGITS:
                return np.nan
            power -= 1
            at += 1
    if at < end:
        at += 1
        shrinks = _byte(buffer, at) == _MINUS
        if shrinks or _byte(buffer, at) == _PLUS:
            at += 1
        exponent: Any = 0
        while at < end:
            exponent = exponent * 10 + (np.int64(_byte(buffer, at)) - _ZERO)
            at += 1
        power += -exponent if shrinks else exponent
    if not -_EXACT_POWER <= power <= _EXACT_POWER:
        return np.nan
    found: float = float(value)
    if power < 0:
        found /= _POWERS[-power]
    else:
        found *= _POWERS[power]
    return -found if negative else found


@_compiled()
def _meaning(buffer: Any, begin: int, end: int, names: Any, bounds: Any, uuid: int) -> int:
    """Return the meaning of the key between two quotes."""
    for number in range(len(bounds) - 1):
        first = bounds[number]
        if bounds[number + 1] - first != end - begin:
            continue
        same = True
        for place in range(end - begin):
            if _byte(buffer, begin + place) != names[first + place]:
                same = False
                break
        if same:
            return _UUID if number == uuid else number
    return _ABSENT


@_compiled()
def scan(buffer: Any, stop: int, wanted: Any, into: Any) -> int:
    """Read the lines of ``buffer`` before ``stop``, which is the end of a line.

    Fill the arrays of ``into`` (`Arrays`) with what is ``wanted`` (`Wanted`). Return the number of
    lines. If a line is left to the specification, return minus its number, counted from 1.

    This is one function because parts of it, even inlined by Numba, made it 7 to 18 % slower.
    """
    # Unpack them once: every access of a field of a tuple counts a reference to its array.
    names, bounds, kinds = wanted
    begins, producers, clocks, flags, present, numbers, offsets, texts = into
    fields = len(kinds)
    at = 0
    row = 0
    # Keys of the previous line, with their positions and meanings. The next line mostly has the same keys.
    key_begins = np.zeros(KEYS_MAX, np.int64)
    key_ends = np.zeros(KEYS_MAX, np.int64)
    meanings = np.zeros(KEYS_MAX, np.int64)
    known = 0
    written = np.zeros(fields, np.int64)
    for number in range(fields):
        offsets[number, 0] = 0
    while at < stop:
        begins[row] = at
        clocks[row] = producers[row] = flags[row] = 0
        for number in range(fields):
            present[number, row] = 0
        seen = np.int64(0)
        has_uuid = False
        at = _blanks(buffer, at)
        if _byte(buffer, at) != _OPEN:
            return -row - 1
        at = _blanks(buffer, at + 1)
        ordinal = 0
        empty = _byte(buffer, at) == _CLOSE
        while not empty:
            if _byte(buffer, at) != _QUOTE or ordinal == KEYS_MAX:
                return -row - 1
            at += 1
            same = False
            if ordinal < known:
                first = key_begins[ordinal]
                size = key_ends[ordinal] - first
                # The size includes the closing quote.
                same = at + size < stop
                if same:
                    for place in range(size + 1):
                        if _byte(buffer, at + place) != _byte(buffer, first + place):
                            same = False
                            break
            if same:
                end = at + size
            else:
                end = at
                while _PLAIN[_byte(buffer, end)]:
                    end += 1
                if _byte(buffer, end) != _QUOTE:
                    return -row - 1
                key_begins[ordinal] = at
                key_ends[ordinal] = end
                meanings[ordinal] = _meaning(buffer, at, end, names, bounds, fields)
                known = ordinal + 1
            meaning = meanings[ordinal]
            ordinal += 1
            at = _blanks(buffer, end + 1)
            if _byte(buffer, at) != _COLON:
                return -row - 1
            at = _blanks(buffer, at + 1)
            first_byte = _byte(buffer, at)
            if meaning == _ABSENT:
                at = _value_end(buffer, at)
                if at < 0:
                    return -row - 1
            elif meaning == _UUID:
                if has_uuid or first_byte != _QUOTE or at + _TEXT_CHARS + 2 > stop:
                    return -row - 1
                has_uuid = True
                at += 1
                if (
                    _byte(buffer, at + 8) != _MINUS
                    or _byte(buffer, at + 13) != _MINUS
                    or _byte(buffer, at + 18) != _MINUS
                    or _byte(buffer, at + 23) != _MINUS
                    or _byte(buffer, at + _TEXT_CHARS) != _QUOTE
                ):
                    return -row - 1
                low = _digits(buffer, at, 8)
                middle = _digits(buffer, at + 9, 4)
                high = _digits(buffer, at + 14, 4)
                sequence = _digits(buffer, at + 19, 4)
                node = _digits(buffer, at + 24, 12)
                if (low | middle | high | sequence | node) >> np.uint64(63):
                    return -row - 1
                clocks[row] = (
                    ((high & np.uint64(0xFFF)) << np.uint64(52))
                    | (middle << np.uint64(36))
                    | (low << np.uint64(4))
                    | ((sequence >> np.uint64(10)) & np.uint64(0xF))
                )
                flags[row] = sequence & np.uint64(0x3FF)
                producers[row] = node
                at += _TEXT_CHARS + 1
            else:
                if (seen >> meaning) & 1:
                    return -row - 1
                seen |= np.int64(1) << meaning
                kind = kinds[meaning]
                if first_byte == 0x6E:
                    at = _word_end(buffer, at)
                    if at < 0:
                        return -row - 1
                elif kind == TEXT:
                    if first_byte != _QUOTE:
                        return -row - 1
                    begin = at + 1
                    at = begin
                    to = written[meaning]
                    while _PLAIN[_byte(buffer, at)]:
                        texts[meaning, to] = _byte(buffer, at)
                        at += 1
                        to += 1
                    if _byte(buffer, at) == _QUOTE:
                        at += 1
                    else:
                        at = _text_end(buffer, at)
                        if at < 0:
                            return -row - 1
                        to = _unescaped(buffer, begin, at - 1, texts[meaning], written[meaning])
                    written[meaning] = to
                    present[meaning, row] = 1
                elif kind == BOOLEAN:
                    if first_byte != 0x74 and first_byte != 0x66:
                        return -row - 1
                    at = _word_end(buffer, at)
                    if at < 0:
                        return -row - 1
                    numbers[meaning, row] = first_byte == 0x74
                    present[meaning, row] = 1
                else:
                    begin = at
                    at = _number_end(buffer, at)
                    if at < 0:
                        return -row - 1
                    if kind == INTEGER:
                        place = begin + (first_byte == _MINUS)
                        if at - place > _DIGITS_MAX:
                            return -row - 1
                        value = np.int64(0)
                        while place < at:
                            digit = np.int64(_byte(buffer, place)) - _ZERO
                            if not 0 <= digit <= 9:
                                return -row - 1
                            value = value * 10 + digit
                            place += 1
                        numbers[meaning, row] = -value if first_byte == _MINUS else value
                    else:
                        double = _double(buffer, begin, at)
                        if np.isnan(double):
                            return -row - 1
                        numbers[meaning, row] = np.float64(double).view(np.int64)
                    present[meaning, row] = 1
            at = _blanks(buffer, at)
            if _byte(buffer, at) == _CLOSE:
                break
            if _byte(buffer, at) != _COMMA:
                return -row - 1
            at = _blanks(buffer, at + 1)
        at = _blanks(buffer, at + 1)
        if _byte(buffer, at) != _NEWLINE:
            return -row - 1
        at += 1
        row += 1
        for number in range(fields):
            offsets[number, row] = written[number]
    return row


def arrays(fields: int, rows: int, size: int) -> Arrays:
    """Allocate arrays for ``size`` bytes of at most ``rows`` lines, less one. They are not filled."""
    return Arrays(
        np.empty(rows, np.int64),
        np.empty(rows, np.uint64),
        np.empty(rows, np.uint64),
        np.empty(rows, np.uint64),
        np.empty((fields, rows), np.uint8),
        np.empty((fields, rows), np.int64),
        np.empty((fields, rows + 1), np.int32),
        np.empty((fields, size), np.uint8),
    )


def compile_ahead() -> None:
    """Compile all functions that are not compiled yet, with a buffer of one empty line."""
    wanted = Wanted(
        np.frombuffer(b"uuid", np.uint8), np.array([0, 4], np.int64), np.zeros(0, np.int64)
    )
    scan(np.frombuffer(b"{}\n", np.uint8), 3, wanted, arrays(0, 2, 3))


if __name__ == "__main__":
    # Numba caches by the types of arguments: the classes of this module must not be those of `__main__`.
    from gazette.history import json_kernel

    json_kernel.compile_ahead()
