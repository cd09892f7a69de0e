"""Joins of a stream and a table: each message with the row that its key had at the time of the message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Generic

from gazette.consumer.application import Shard
from gazette.consumer.timers.timer import Timer, duration_us, time_at, unix_us
from gazette.message.values import ValueEncoding
from gazette.stores.sqlite.definitions import define
from gazette.stores.sqlite.store import SQLiteStore
from gazette.windows.tables import (
    Sweep,
    check_keeps,
    check_key,
    check_name,
    duration,
    watermark_us,
)

if TYPE_CHECKING:
    # This TypeVar has defaults, so that a join without types needs no annotation.
    from typing_extensions import TypeVar

    V = TypeVar("V", default=Any)
    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    V = TypeVar("V")
    R = TypeVar("R")

_AT_ONCE: Final = timedelta(0)


@dataclass(frozen=True, slots=True)
class TableJoinResult(Generic[V, R]):
    """A message and its row, with times in UTC."""

    key: str
    value: V
    at: datetime
    row: R | None
    """Row of the key; None if the key had no row."""
    row_at: datetime | None
    """Time from which the row holds: later than ``at`` if the message waited for the row. None if the key had
    no row."""


class TableJoin(Generic[V, R]):
    """Joins the messages of a stream with rows of a table, by key, at the time of the message.

        class Priced(Application[SQLiteStore]):
            event_time = EventTime(lateness=timedelta(seconds=10), idle_after=timedelta(minutes=1))
            orders = Source("orders", Order, key="item")
            prices = Source("prices", Price, key="item")
            priced = TableJoin(
                "priced", wait=timedelta(minutes=5), value_type=Order, row_type=float
            )

            def new_store(self, shard, recorder):
                return SQLiteStore(recorder, self.priced.schema)

            def consume_message(self, shard, store, envelope, publisher):
                message, at = envelope.message, envelope.time
                if isinstance(message, Price):
                    self.priced.put(shard, store, message.item, at, message.price)
                else:
                    self.priced.add(shard, store, message.item, at, message)

            def on_timer(self, shard, store, timer, publisher):
                for one in self.priced.on_timer(shard, store, timer):
                    publisher.publish_uncommitted(...)

    A row holds from the time of its message until the time of the next row of its key. A message has one
    result, once the watermark has passed its time, since the row at that time is known then. If its key had
    no row, the message waits for the first row that begins within ``wait`` after its time. If no such row
    comes, the row of the result is None.

    Rows are kept as JSON, in the table ``name``: the rows that hold at the watermark, and later rows. The
    types of values and rows are ``value_type`` and ``row_type``. Without a type, there are only values of
    JSON. Type checkers check calls and results by these types. If a type is no class, such as a union, write
    both types: ``TableJoin[Sale, int | str](…)``.
    """

    def __init__(
        self,
        name: str,
        *,
        wait: timedelta = _AT_ONCE,
        value_type: type[V] | UnionType | None = None,
        row_type: type[R] | UnionType | None = None,
    ) -> None:
        """Create a join. Raise ``Invalid`` for a bad name or bound."""
        self.name = check_name(name, "a join")
        self._wait = duration_us("wait", wait)
        self._table, self._waiting = f'"{name}"', f'"{name}.waiting"'
        self._sweep = Sweep(name, self._table, self._waiting)
        self._values: ValueEncoding[V] = ValueEncoding(
            Any if value_type is None else value_type, "value_type"
        )
        self._rows: ValueEncoding[R] = ValueEncoding(
            Any if row_type is None else row_type, "row_type"
        )

    @property
    def schema(self) -> str:
        """SQL that creates the tables if they are absent, and stores the definition of the join."""
        return define(
            self.name,
            kind="join with a table",
            key="text",
            wait=duration(self._wait),
            value=self._values.identity,
            row=self._rows.identity,
        ) + (
            f"CREATE TABLE IF NOT EXISTS {self._table} (key TEXT NOT NULL, at INTEGER NOT NULL,"
            " due INTEGER, value TEXT, PRIMARY KEY (key, at)) WITHOUT ROWID;\n"
            f'CREATE INDEX IF NOT EXISTS "{self.name}.due" ON {self._table} (due)'
            " WHERE due IS NOT NULL;\n"
            f"CREATE TABLE IF NOT EXISTS {self._waiting} (key TEXT NOT NULL, at INTEGER NOT NULL,"
            " number INTEGER NOT NULL, due INTEGER NOT NULL, value TEXT NOT NULL,"
            " PRIMARY KEY (key, at, number)) WITHOUT ROWID;\n"
            f'CREATE INDEX IF NOT EXISTS "{self.name}.waiting.due" ON {self._waiting} (due);\n'
        )

    def put(self, shard: Shard, store: SQLiteStore, key: str, at: datetime, row: R | None) -> bool:
        """Write the row of a key, which holds from ``at`` on. None deletes the row.

        Return False, and change nothing, if the watermark has reached a later row of the key. Raise
        ``Invalid`` for another kind of store. Raise ``InvalidValue`` for a bad key or time, or for a row that
        would not read back equal. Raise ``NotAllowed`` if the application has no ``event_time``.
        """
        key = check_keeps(store, key, "a join")
        text = None
        if row is not None:
            text = self._rows.encode(row, "row", join=self.name, key=key).decode()
        at_us, watermark = unix_us(at), watermark_us(shard)
        rows: list[Any] = store.execute(
            f"SELECT min(at) FROM {self._table} WHERE key = ? AND at > ?",  # noqa: S608
            (key, at_us),
        ).fetchall()
        ((next_at,),) = rows
        if next_at is not None and watermark is not None and next_at <= watermark:
            return False
        # A row is due when the watermark reaches the next row; a deletion, when it reaches its own time.
        due = at_us if row is None else next_at
        store.execute(
            f"UPDATE {self._table} SET due = ?2 WHERE key = ?1 AND value IS NOT NULL"  # noqa: S608
            f" AND at = (SELECT max(at) FROM {self._table} WHERE key = ?1 AND at < ?2)",
            (key, at_us),
        )
        store.execute(
            f"INSERT INTO {self._table} VALUES (?, ?, ?, ?) ON CONFLICT (key, at)"  # noqa: S608
            " DO UPDATE SET due = excluded.due, value = excluded.value",
            (key, at_us, due, text),
        )
        if row is not None:
            # A waiting message is due once the watermark has passed the message's time and the row's time.
            store.execute(
                f"UPDATE {self._waiting} SET due = max(at, ?2) + 1"  # noqa: S608
                " WHERE key = ?1 AND at >= ?2 - ?3 AND due > max(at, ?2) + 1",
                (key, at_us, self._wait),
            )
        self._sweep.set(shard, store)
        return True

    def add(self, shard: Shard, store: SQLiteStore, key: str, at: datetime, value: V) -> bool:
        """Add a message of the stream. `on_timer` returns its result.

        Return False, and change nothing, if the message is late. For the errors see `put`.
        """
        key = check_keeps(store, key, "a join")
        text = self._values.encode(value, "value", join=self.name, key=key).decode()
        at_us, watermark = unix_us(at), watermark_us(shard)
        if watermark is not None and at_us < watermark:
            return False
        self._sweep.add(shard, store, at_us + 1)
        store.execute(
            f"INSERT INTO {self._waiting} SELECT ?1, ?2, ifnull(max(number) + 1, 0), ?3, ?4"  # noqa: S608
            f" FROM {self._waiting} WHERE key = ?1 AND at = ?2",
            (key, at_us, at_us + 1, text),
        )
        return True

    def latest(self, store: SQLiteStore, key: str) -> R | None:
        """Return the newest row of a key, for a query or a late message; None if the key has no row. Raise
        ``InvalidValue`` for a bad key."""
        key = check_key(key, "a join")
        rows = store.query(
            f"SELECT value FROM {self._table} WHERE key = ? ORDER BY at DESC LIMIT 1",  # noqa: S608
            (key,),
        )
        return self._decode_row(key, rows[0][0]) if rows and rows[0][0] is not None else None

    def on_timer(
        self, shard: Shard, store: SQLiteStore, timer: Timer
    ) -> Sequence[TableJoinResult[V, R]]:
        """Return the results of messages for which it is now known whether they have a row, some at a time.
        Remove rows that no message needs.

        Call this for each timer: it returns nothing for timers of other objects.
        """
        if timer.key != self._sweep.key:
            return ()
        watermark = watermark_us(shard)
        assert watermark is not None
        until = self._sweep.until(store, watermark)
        results: list[TableJoinResult[V, R]] = []
        waiting: list[Any] = store.execute(
            f"SELECT key, at, number, value FROM {self._waiting} WHERE due <= ?"  # noqa: S608
            " ORDER BY due, key, at, number",
            (until,),
        ).fetchall()
        for key, at_us, number, text in waiting:
            row_at, row = self._row(store, key, at_us)
            due = (at_us + self._wait if row_at is None else max(at_us, row_at)) + 1
            if due > until:  # The row has changed, or is not known yet. The result is due later.
                store.execute(
                    f"UPDATE {self._waiting} SET due = ?"  # noqa: S608
                    " WHERE key = ? AND at = ? AND number = ?",
                    (due, key, at_us, number),
                )
                continue
            value = self._values.decode(text, "value", join=self.name, key=key)
            row_time = None if row_at is None else time_at(row_at)
            results.append(TableJoinResult(key, value, time_at(at_us), row, row_time))
        store.execute(f"DELETE FROM {self._waiting} WHERE due <= ?", (until,))  # noqa: S608
        store.execute(f"DELETE FROM {self._table} WHERE due <= ?", (until,))  # noqa: S608
        self._sweep.set(shard, store)
        return results

    def _row(self, store: SQLiteStore, key: str, at: int) -> tuple[int | None, R | None]:
        """Return a row and the time from which it holds: the row at ``at``, or else the first row within
        ``wait`` after ``at``. If there is no such row, both are None."""
        current: list[Any] = store.execute(
            f"SELECT at, value FROM {self._table} WHERE key = ? AND at <= ?"  # noqa: S608
            " ORDER BY at DESC LIMIT 1",
            (key, at),
        ).fetchall()
        if current and current[0][1] is not None:  # (at, value); the value None is a deletion.
            return current[0][0], self._decode_row(key, current[0][1])
        upcoming: list[Any] = store.execute(
            f"SELECT at, value FROM {self._table} WHERE key = ? AND at > ? AND at <= ?"  # noqa: S608
            " AND value IS NOT NULL ORDER BY at LIMIT 1",
            (key, at, at + self._wait),
        ).fetchall()
        return (upcoming[0][0], self._decode_row(key, upcoming[0][1])) if upcoming else (None, None)

    def _decode_row(self, key: str, text: str) -> R:
        return self._rows.decode(text, "row", join=self.name, key=key)
