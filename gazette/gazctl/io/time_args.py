"""Points in time as users write them."""

from __future__ import annotations

import datetime

from gazette.errors import Invalid
from gazette.protocol.text.duration import SECOND, parse_go_duration
from gazette.runtime.numbers import is_digits


def parse_moment(text: str, now: float, flag: str) -> int:
    """Return Unix seconds, or 0 for an empty text. Raise ``Invalid`` for a text that is no time.

    Accept ``1700000000``, ``2026-01-31T12:00:00Z``, ``2026-01-31`` (UTC), or ``24h`` for that long ago.
    """
    text = text.strip()
    if not text:
        return 0
    if is_digits(text):
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            return max(0, int(now - parse_go_duration(text) / SECOND))
        except Invalid:
            raise Invalid(
                f'invalid time "{text}"',
                path=flag,
                hint="Give Unix seconds, a time such as 2026-01-31T12:00:00Z, or 24h for a day ago.",
            ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return int(moment.timestamp())


def time_text(unix_s: int) -> str:
    """Return a time as ``2026-01-31 12:00:00Z``."""
    moment = datetime.datetime.fromtimestamp(unix_s, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def age_text(seconds: float) -> str:
    """Return an age as ``45s``, ``12m``, ``5h`` or ``3d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
