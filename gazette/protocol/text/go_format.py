"""Values in the text of Go's package fmt: `go_text`, `sprint`, and `sprintf` with the usual verbs."""

from __future__ import annotations

import math
import re
from typing import Any, Final, Self

_VERB: Final = re.compile(r"%([-+# 0]*)(\d*)(?:\.(\d*))?(.)", re.DOTALL | re.ASCII)
_WIDTH_MAX: Final = 1000
_LARGE_EXPONENT: Final = 6


class NamedInt(int):
    """An integer of a Go type that is written as a name, such as a month, a codec, or a duration."""

    name: str

    def __new__(cls, value: int, name: str) -> Self:
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __str__(self) -> str:
        return self.name


def go_text(value: Any) -> str:
    """Return a value as ``%v`` writes it. Raise ``Invalid`` for a struct without a text form."""
    match value:
        case None:
            return "<nil>"
        case bool():
            return "true" if value else "false"
        case float():
            return _general(value)
        case list():
            return f"[{' '.join(map(go_text, value))}]"
    return str(value)


def sprint(*values: Any) -> str:
    """Return values one after the other, with a blank between two neighbours that are not strings."""
    parts: list[str] = []
    for at, value in enumerate(values):
        if at and not isinstance(value, str) and not isinstance(values[at - 1], str):
            parts.append(" ")
        parts.append(go_text(value))
    return "".join(parts)


def sprintf(layout: Any, *values: Any) -> str:
    """Return values in a layout. Raise ``ValueError`` for a verb that does not fit its value."""
    if not isinstance(layout, str):
        raise TypeError("the layout of printf must be a string")
    left = list(values)

    def write(found: re.Match[str]) -> str:
        flags, width, precision, verb = found.groups()
        if verb == "%":
            return "%"
        if not left:
            raise ValueError(f"%{verb} lacks its value")
        if int(width or 0) > _WIDTH_MAX or int(precision or 0) > _WIDTH_MAX:
            raise ValueError(f"a width beyond {_WIDTH_MAX}")
        digits = None if precision is None else int(precision or 0)
        text, is_number = _formatted(verb, flags, digits, left.pop(0))
        return _padded(text, flags, int(width or 0), is_number=is_number)

    if re.search(r"%[-+# 0]*\d*(?:\.\d*)?$", layout.replace("%%", "")):
        raise ValueError("an incomplete verb")
    written = _VERB.sub(write, layout)
    if left:
        raise ValueError(f"{len(left)} values too many")
    return written


def _formatted(verb: str, flags: str, digits: int | None, value: Any) -> tuple[str, bool]:
    """Return the text of one value, and True if it is padded as a number."""
    if verb == "v" and digits is None and "+" not in flags and "#" not in flags:
        return go_text(value), isinstance(value, int | float) and not isinstance(
            value, bool | NamedInt
        )
    if verb in ("s", "q") and (isinstance(value, str) or not isinstance(value, int | float | None)):
        text = go_text(value)
        return _quoted(text) if verb == "q" else text if digits is None else text[:digits], False
    if verb == "s" and isinstance(value, NamedInt):
        return str(value), False
    if verb == "t" and isinstance(value, bool):
        return go_text(value), False
    if isinstance(value, int) and not isinstance(value, bool):
        written = _integer(verb, flags, digits, int(value))
        if written is not None:
            return written, True
    elif isinstance(value, float) and verb in "eEfFgGv":
        return _float(verb, flags, digits, value), True
    elif isinstance(value, str) and verb in "xX":
        text = value.encode().hex()
        return text.upper() if verb == "X" else text, False
    raise ValueError(f"%{verb} of {type(value).__name__}")


def _integer(verb: str, flags: str, digits: int | None, value: int) -> str | None:
    if verb in "cqU":
        if not 0 <= value <= 0x10FFFF or 0xD800 <= value <= 0xDFFF:
            return None
        return {"c": chr(value), "q": f"'{chr(value)}'", "U": f"U+{value:04X}"}[verb]
    base = {"d": "d", "v": "d", "b": "b", "o": "o", "x": "x", "X": "X"}.get(verb)
    if base is None:
        return None
    text = format(abs(value), base).rjust(digits or 0, "0")
    prefix = {"b": "0b", "o": "0", "x": "0x", "X": "0X"}.get(base, "") if "#" in flags else ""
    return _sign(value < 0, flags) + prefix + text


def _float(verb: str, flags: str, digits: int | None, value: float) -> str:
    if verb in "gGv" and digits is None:
        text = _general(abs(value))
        text = text.upper() if verb == "G" else text
    else:
        text = format(
            abs(value), f".{6 if digits is None else digits}{'g' if verb == 'v' else verb}"
        )
    return _sign(math.copysign(1, value) < 0, flags) + text


def _general(value: float) -> str:
    """Return the shortest digits that parse to the same double, with an exponent if that is short."""
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    sign = "-" if math.copysign(1, value) < 0 else ""
    digits, _, power = format(abs(value), ".17e").partition("e")
    for precision in range(17):
        digits, _, power = format(abs(value), f".{precision}e").partition("e")
        if float(f"{digits}e{power}") == abs(value):
            break
    exponent = int(power)
    if exponent < -4 or exponent >= _LARGE_EXPONENT:
        return f"{sign}{digits}e{exponent:+03d}"
    places = max(len(digits.replace(".", "")) - 1 - exponent, 0)
    return f"{sign}{abs(value):.{places}f}"


def _sign(negative: bool, flags: str) -> str:
    return "-" if negative else "+" if "+" in flags else " " if " " in flags else ""


def _padded(text: str, flags: str, width: int, *, is_number: bool) -> str:
    if "-" in flags:
        return text.ljust(width)
    if "0" in flags and is_number:
        sign = text[:1] if text[:1] in "+- " and text else ""
        return sign + text[len(sign) :].rjust(width - len(sign), "0")
    return text.rjust(width, "0" if "0" in flags else " ")


def _quoted(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    )
    return f'"{escaped}"'
