"""Timers of a shard as rows of a table in its SQLite database, in the running transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, cast

from gazette.consumer.timers.timer import BEFORE_ALL, Position, TimeDomain, TimerRow, TimerTable

Rows: TypeAlias = list[tuple[Any, ...]]

CREATE: Final = """
CREATE TABLE IF NOT EXISTS gazette_timer (
    domain INTEGER NOT NULL,
    key TEXT NOT NULL,
    at INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (domain, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS gazette_timer_due ON gazette_timer (domain, at, key);
CREATE TABLE IF NOT EXISTS gazette_event_time (
    rowid INTEGER PRIMARY KEY CHECK (rowid = 0),
    state BLOB NOT NULL
);
"""
EXISTS: Final = "SELECT 1 FROM main.sqlite_master WHERE name = 'gazette_timer'"
ANY: Final = "SELECT 1 FROM gazette_timer LIMIT 1"

_PUT: Final = (
    "INSERT INTO gazette_timer VALUES (?, ?, ?, ?)"
    " ON CONFLICT (domain, key) DO UPDATE SET at = excluded.at, payload = excluded.payload"
)
_REMOVE: Final = "DELETE FROM gazette_timer WHERE domain = ? AND key = ?"
TAKE: Final = (
    "SELECT at, key, payload FROM gazette_timer"
    " WHERE domain = ? AND (at, key) > (?, ?) AND at <= ? ORDER BY at, key LIMIT ?"
)
_REMOVE_TAKEN: Final = (
    "DELETE FROM gazette_timer WHERE domain = ? AND (at, key) > (?, ?) AND (at, key) <= (?, ?)"
)
_FIRST: Final = (
    "SELECT at FROM gazette_timer WHERE domain = ? AND (at, key) > (?, ?) ORDER BY at, key LIMIT 1"
)
_EVENT_TIME: Final = "SELECT state FROM gazette_event_time"
_SET_EVENT_TIME: Final = (
    "INSERT INTO gazette_event_time VALUES (0, ?)"
    " ON CONFLICT (rowid) DO UPDATE SET state = excluded.state"
)


class SQLiteTimers(TimerTable):
    """Table of timers. ``execute`` runs SQL in the running transaction, ``query`` reads."""

    def __init__(
        self,
        execute: Callable[[str, Sequence[Any]], Any],
        query: Callable[[str, Sequence[Any]], Rows],
    ) -> None:
        self._execute = execute
        self._query = query

    def put(self, domain: TimeDomain, row: TimerRow) -> None:
        self._execute(_PUT, (domain.value, row.key, row.at_us, row.payload))

    def remove(self, domain: TimeDomain, key: str) -> None:
        self._execute(_REMOVE, (domain.value, key))

    def take(
        self, domain: TimeDomain, after: Position, until_us: int, limit: int
    ) -> Sequence[TimerRow]:
        due = self._query(TAKE, (domain.value, *after, until_us, limit))
        rows = [TimerRow(*row) for row in due]
        if rows:
            self._execute(_REMOVE_TAKEN, (domain.value, *after, *rows[-1].position))
        return rows

    def first(self, domain: TimeDomain, after: Position = BEFORE_ALL) -> int | None:
        rows = self._query(_FIRST, (domain.value, *after))
        return cast("int", rows[0][0]) if rows else None

    def event_time(self) -> bytes | None:
        rows = self._query(_EVENT_TIME, ())
        return cast("bytes", rows[0][0]) if rows else None

    def set_event_time(self, value: bytes) -> None:
        self._execute(_SET_EVENT_TIME, (value,))

    def clear(self) -> None:
        self._execute("DELETE FROM gazette_timer", ())
        self._execute("DELETE FROM gazette_event_time", ())
