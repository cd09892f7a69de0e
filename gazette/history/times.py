"""Parses times that bound the messages to read: `unix_ns`. Pure."""

from __future__ import annotations

import datetime
import decimal
from typing import Final

from gazette.errors import Invalid
from gazette.runtime.numbers import parse_number

_MILLISECONDS: Final = 1e11
"""Least amount that is taken for milliseconds, as in Kafka's source. As seconds, it is in the year 5138."""
_UNIX_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def unix_ns(time: str | float | datetime.datetime) -> int:
    """Return a time as Unix nanoseconds: ISO 8601, Unix seconds, or a ``datetime``.

    A time without a zone is UTC. Raise `Invalid` for any other value.
    """
    if isinstance(time, int | float):
        time = repr(time)
    if isinstance(time, str):
        try:
            # Do not use floats: for times of today, a float is exact only to a quarter of a microsecond.
            if abs(parse_number(time)) >= _MILLISECONDS:
                raise Invalid("must be Unix seconds: these seem to be milliseconds")
            return int(decimal.Decimal(time) * 10**9)
        except (ArithmeticError, ValueError):
            # The text is not a number, or is infinity: it may be ISO 8601.
            pass
        try:
            time = datetime.datetime.fromisoformat(time)
        except ValueError as error:
            raise _no_time() from error
    if not isinstance(time, datetime.datetime):
        raise _no_time()
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return (time - _UNIX_EPOCH) // datetime.timedelta(microseconds=1) * 1000


def _no_time() -> Invalid:
    return Invalid(
        "must be a time",
        hint="Give ISO 8601, as 2024-01-31T12:00:00Z, Unix seconds, or a datetime.",
    )
