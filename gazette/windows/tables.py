"""Tables of windows and joins: names, keys, and the timer for rows that are due."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Final

from gazette.consumer.application import Shard
from gazette.consumer.timers.timer import (
    PAYLOAD_BYTES_MAX,
    TimeDomain,
    time_at,
    unix_us,
)
from gazette.errors import Invalid, InvalidValue
from gazette.message.keys import plain_text
from gazette.message.message_time import LAST_US
from gazette.stores.sqlite.store import SQLiteStore

SWEPT_MAX: Final = 1_000
"""Greatest number of rows of a table that one timer removes, unless more rows are due at the same time."""
KEY_CHARACTERS_MAX: Final = PAYLOAD_BYTES_MAX // 4
"""Greatest length of a key, in characters of up to 4 bytes, so that it fits into a timer's payload."""
MICROSECOND: Final = timedelta(microseconds=1)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_NAME: Final = re.compile(r"(?!gazette_|sqlite_)[a-z][a-z0-9_]{0,40}", re.ASCII)


def check_name(name: object, what: str) -> str:
    """Return ``name``, the name of windows or of a join. Raise ``Invalid`` if it cannot be a table's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            f"invalid name of {what} ({name!r})",
            path="name",
            hint="It becomes the name of a table: use a-z, 0-9 and _, begin with a letter, and not with"
            " gazette_ or sqlite_.",
        )
    return name


def check_keeps(store: SQLiteStore, key: object, what: str) -> str:
    """Return the key as a plain text, as `check_key` does. Raise ``Invalid`` unless the store is a
    `SQLiteStore`, and ``InvalidValue`` for a key that no row can have."""
    if not isinstance(store, SQLiteStore):
        raise Invalid(
            f"{what} cannot be kept in a {type(store).__name__}", hint="Use a SQLiteStore."
        )
    return check_key(key, what)


def check_key(key: object, what: str) -> str:
    """Return the key of a message as a plain text. Raise ``InvalidValue`` for a key that no row can have."""
    if not isinstance(key, str):
        raise InvalidValue(
            f"the key of {what} is of type {type(key).__name__}",
            path="key",
            hint="Use a str, such as gazette.message.keys.canonical_key((user, day)).",
        )
    if not key.isascii() and _SURROGATE.search(key):
        raise InvalidValue(
            f"the key of {what} is no Unicode text",
            path="key",
            hint="Leave halves of surrogate pairs out, and keep the text in the value as bytes.",
        )
    if len(key) > KEY_CHARACTERS_MAX:
        raise InvalidValue(
            f"the key of {what} has {len(key)} characters (at most {KEY_CHARACTERS_MAX})",
            path="key",
            hint="Use a digest of long texts, and keep the text in the value.",
        )
    return plain_text(key)


def duration(us: int) -> str:
    """Return microseconds as the text of a duration, for a definition."""
    return str(us * MICROSECOND)


def watermark_us(shard: Shard) -> int | None:
    """Return the watermark in Unix microseconds; None while it is unknown."""
    watermark = shard.watermark
    return None if watermark is None else unix_us(watermark)


class Sweep:
    """One timer of event time for all rows of some tables, which is cheaper than a timer for each row.

    The timer is set for the row that is due first. ``tables`` are quoted names of tables with an index of
    their column ``due``.
    """

    def __init__(self, name: str, *tables: str) -> None:
        self.key = f"{name}:due"
        self._first = " UNION ALL ".join(
            f"SELECT min(due) AS due FROM {table} WHERE due IS NOT NULL"  # noqa: S608
            for table in tables
        )
        self._nth = [
            f"SELECT due FROM {table} WHERE due <= ? ORDER BY due LIMIT 1 OFFSET {SWEPT_MAX - 1}"  # noqa: S608
            for table in tables
        ]

    def set(self, shard: Shard, store: SQLiteStore) -> None:
        """Set the timer for the row that is due first, if there is a row."""
        first = self._first_due(store)
        if first is not None:
            self._schedule(shard, first)

    def add(self, shard: Shard, store: SQLiteStore, due: int) -> None:
        """Set the timer if a new row is due before all others. Call this before you write the row.

        Set the timer again if another row is overdue, since a poison policy may have skipped its timer.
        """
        first = self._first_due(store)
        if first is None or due < first:
            self._schedule(shard, due)
        elif (watermark := watermark_us(shard)) is not None and first <= watermark:
            self._schedule(shard, first)

    def until(self, store: SQLiteStore, watermark: int) -> int:
        """Return the time up to which to remove rows now: the watermark, or earlier if many rows are due."""
        until = watermark
        # If `SWEPT_MAX` or more rows of a table are due, the statement returns the time of row `SWEPT_MAX`.
        for sql in self._nth:
            rows: list[Any] = store.execute(sql, (until,)).fetchall()
            until = rows[0][0] if rows else until
        return until

    def _first_due(self, store: SQLiteStore) -> int | None:
        rows: list[Any] = store.execute(self._first).fetchall()
        return min((due for (due,) in rows if due is not None), default=None)

    def _schedule(self, shard: Shard, due: int) -> None:
        # The watermark never passes the year 9999, so later rows stay for ever.
        if due <= LAST_US:
            shard.schedule(self.key, time_at(due), domain=TimeDomain.EVENT)
