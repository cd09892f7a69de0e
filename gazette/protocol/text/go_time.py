"""Times in the layouts of Go. A layout shows how it writes the time Monday, January 2 2006 15:04:05."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ZERO: Final = datetime(1, 1, 1, tzinfo=UTC)

# fmt: off
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# fmt: on

# Among alternatives with a common start, the longest comes first.
_ELEMENT = re.compile(
    r"January|Jan(?![a-z])|Monday|Mon(?![a-z])|MST|2006|002|0[1-6]|15|__2|_2006|_2|[1-5]|PM|pm"
    r"|[Z-]07:00:00|[Z-]070000|[Z-]07:00|[Z-]0700|[Z-]07|[.,](?:0+|9+)(?!\d)"
)


def utc(seconds: float | None) -> datetime:
    """Return the UTC time of Unix seconds. ``None`` is Go's zero time."""
    return _ZERO if seconds is None else _EPOCH + timedelta(seconds=seconds)


def format_go_time(layout: str, seconds: float | None) -> str:
    """Format a time of Unix seconds by ``layout``, in UTC, to the microsecond."""
    time = utc(seconds)
    return _ELEMENT.sub(lambda element: _format(element.group(), time), layout)


def elements(layout: str) -> Iterator[tuple[bool, str]]:
    """Yield the pieces of a layout in order: True with an element of the time, False with literal text."""
    position = 0
    for element in _ELEMENT.finditer(layout):
        if element.start() > position:
            yield False, layout[position : element.start()]
        yield True, element.group()
        position = element.end()
    if position < len(layout):
        yield False, layout[position:]


def words_of(element: str) -> Sequence[str]:
    """Return all texts that an element can become; empty if it becomes digits."""
    match element:
        case "January":
            return MONTHS
        case "Jan":
            return [name[:3] for name in MONTHS]
        case "Monday":
            return _DAYS
        case "Mon":
            return [name[:3] for name in _DAYS]
        case "PM" | "pm":
            return ["AM", "PM"] if element == "PM" else ["am", "pm"]
    # All other elements with text ("Z…", "-…", "MST") are zones. Each has one text: all times are in UTC.
    return [_format(element, _ZERO)] if element[0] in ("Z", "-", "M") else ()


def _format(element: str, time: datetime) -> str:
    if element[0] in ".,":
        return _fraction(element, time)
    if element[0] == "Z" or element == "MST":
        return "Z" if element[0] == "Z" else "UTC"
    if element[0] == "-":  # The offset of UTC is +00:00, in the form of the layout.
        return "+" + re.sub(r"\d", "0", element[1:])
    return _NAMED[element](time)


def _fraction(element: str, time: datetime) -> str:
    """Return a fraction of a second: all digits for zeros in the layout, no trailing zeros for nines."""
    digits = f"{time.microsecond:06d}000"[: len(element) - 1].ljust(len(element) - 1, "0")
    if element[1] == "9":
        digits = digits.rstrip("0")
        return element[0] + digits if digits else ""
    return element[0] + digits


def _hour12(time: datetime) -> int:
    return time.hour % 12 or 12


def _year_day(time: datetime) -> int:
    return time.timetuple().tm_yday


_NAMED: Final[dict[str, Callable[[datetime], str]]] = {
    "January": lambda t: MONTHS[t.month - 1],
    "Jan": lambda t: MONTHS[t.month - 1][:3],
    "Monday": lambda t: _DAYS[t.weekday()],
    "Mon": lambda t: _DAYS[t.weekday()][:3],
    "2006": lambda t: f"{t.year:04d}",
    "_2006": lambda t: f"_{t.year:04d}",
    "06": lambda t: f"{t.year % 100:02d}",
    "01": lambda t: f"{t.month:02d}",
    "1": lambda t: str(t.month),
    "02": lambda t: f"{t.day:02d}",
    "_2": lambda t: f"{t.day:2d}",
    "2": lambda t: str(t.day),
    "002": lambda t: f"{_year_day(t):03d}",
    "__2": lambda t: f"{_year_day(t):3d}",
    "15": lambda t: f"{t.hour:02d}",
    "03": lambda t: f"{_hour12(t):02d}",
    "3": lambda t: str(_hour12(t)),
    "04": lambda t: f"{t.minute:02d}",
    "4": lambda t: str(t.minute),
    "05": lambda t: f"{t.second:02d}",
    "5": lambda t: str(t.second),
    "PM": lambda t: "PM" if t.hour >= 12 else "AM",
    "pm": lambda t: "pm" if t.hour >= 12 else "am",
}
