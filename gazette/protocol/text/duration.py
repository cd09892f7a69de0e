"""Durations as integer nanoseconds, with their text and wire forms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gazette.errors import Invalid

if TYPE_CHECKING:
    from google.protobuf import duration_pb2

NANOSECOND: Final = 1
MICROSECOND: Final = 1_000
MILLISECOND: Final = 1_000_000
SECOND: Final = 1_000_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE

_UNITS: Final = {
    "ns": NANOSECOND,
    "us": MICROSECOND,
    "\u00b5s": MICROSECOND,  # MICRO SIGN
    "\u03bcs": MICROSECOND,  # GREEK SMALL LETTER MU
    "ms": MILLISECOND,
    "s": SECOND,
    "m": MINUTE,
    "h": HOUR,
}
_TERM = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]*)")
_MAX: Final = (1 << 63) - 1


def parse_go_duration(text: str) -> int:
    """Return the nanoseconds of a text such as ``1m0s``, ``1.5h``, ``-250ms`` or ``0``.

    Drop digits past the nanosecond. Raise ``Invalid`` for other texts, and beyond
    the range of a 64-bit integer.
    """
    sign, body = (text[0], text[1:]) if text[:1] in ("-", "+") else ("", text)
    if body == "0":
        return 0
    if not body:
        raise Invalid(f'time: invalid duration "{text}"')
    total, position = 0, 0
    while position < len(body):
        term = _TERM.match(body, position)
        assert term is not None
        integer, fraction, unit = term.group(1), term.group(2) or "", term.group(3)
        if not integer and not fraction:
            raise Invalid(f'time: invalid duration "{text}"')
        if not unit:
            raise Invalid(
                f'time: missing unit in duration "{text}"', hint=f"Write {text}s for seconds."
            )
        if unit not in _UNITS:
            raise Invalid(f'time: unknown unit "{unit}" in duration "{text}"')
        if len(integer) + len(fraction) > 64:
            raise Invalid(f'time: invalid duration "{text}"')
        total += int(integer or "0") * _UNITS[unit]
        total += int(fraction or "0") * _UNITS[unit] // 10 ** len(fraction)
        position = term.end()
    if total > _MAX + (sign == "-"):  # The least 64-bit integer is -(2**63).
        raise Invalid(f'time: invalid duration "{text}"')
    return -total if sign == "-" else total


def format_go_duration(ns: int) -> str:
    """Return the shortest exact text: ``0s``, ``250ms``, ``1m0s``, ``24h0m0s``."""
    sign, magnitude = ("-", -ns) if ns < 0 else ("", ns)
    if magnitude < SECOND:
        for unit, scale in (("ms", MILLISECOND), ("\u00b5s", MICROSECOND), ("ns", NANOSECOND)):
            if magnitude >= scale:
                return f"{sign}{_decimal(magnitude, scale)}{unit}"
        return "0s"
    minutes, seconds_ns = divmod(magnitude, MINUTE)
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(seconds_ns, SECOND)}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    if hours:
        text = f"{hours}h{text}"
    return sign + text


def to_pb(ns: int) -> duration_pb2.Duration:
    """Return the wire form, in which seconds and nanoseconds have the same sign."""
    from google.protobuf import (
        duration_pb2,  # Not at the top: settings of programs have durations, but no messages.
    )

    seconds, nanos = divmod(abs(ns), SECOND)
    return duration_pb2.Duration(
        seconds=seconds if ns >= 0 else -seconds, nanos=nanos if ns >= 0 else -nanos
    )


def from_pb(pb: duration_pb2.Duration) -> int:
    """Return nanoseconds. Raise ``Invalid`` beyond the range of a 64-bit integer."""
    ns = pb.seconds * SECOND + pb.nanos
    if not -_MAX - 1 <= ns <= _MAX:
        raise Invalid(f"duration is out of range ({pb.seconds}s)")
    return ns


def clamp_pb(*pbs: duration_pb2.Duration) -> None:
    """Replace each duration beyond 64 bits of nanoseconds by the nearest one that `from_pb` can return."""
    for pb in pbs:
        ns = pb.seconds * SECOND + pb.nanos
        nearest_ns = max(-_MAX - 1, min(ns, _MAX))
        if ns != nearest_ns:
            pb.CopyFrom(to_pb(nearest_ns))


def _decimal(value: int, scale: int) -> str:
    """Return ``value / scale`` as a decimal number without trailing zeros. ``scale`` is a power of ten."""
    integer, fraction = divmod(value, scale)
    if not fraction:
        return str(integer)
    return f"{integer}.{str(fraction).rjust(len(str(scale)) - 1, '0').rstrip('0')}"
