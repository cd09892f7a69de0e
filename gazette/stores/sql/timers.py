"""Timers of shards as rows of a table in their SQL database, in the shard's running transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

# Import this module before SQLAlchemy: the module's error says what to install.
from gazette.stores.sql.engine import create_tables  # isort: skip

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from gazette.consumer.timers.timer import BEFORE_ALL, Position, TimeDomain, TimerRow, TimerTable

TIMERS: Final = "gazette_timers"
_EVENT_TIME: Final = 2
"""Domain of the row with the state of the watermark. Its key is empty."""

Execute: TypeAlias = Callable[[sa.Executable], Any]
Query: TypeAlias = Callable[[sa.Executable], list[Any]]


def timer_table(metadata: sa.MetaData, name: str = TIMERS) -> sa.Table:
    """Return the table of timers, for the application's metadata and its migrations.

    Keys are bytes, so that their order does not depend on the database's collation.
    """
    table = sa.Table(
        name,
        metadata,
        sa.Column("shard_fqn", sa.Text, primary_key=True),
        sa.Column("domain", sa.SmallInteger, primary_key=True, autoincrement=False),
        sa.Column("key", sa.LargeBinary, primary_key=True),
        sa.Column("at_us", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    sa.Index(f"{name}_due", table.c.shard_fqn, table.c.domain, table.c.at_us, table.c.key)
    return table


def create_timer_table(engine: sa.Engine, name: str = TIMERS) -> None:
    """Create the table of timers if it is absent."""
    metadata = sa.MetaData()
    timer_table(metadata, name)
    create_tables(engine, metadata)


class SQLTimers(TimerTable):
    """Timers of one shard. ``execute`` runs in the running transaction. ``query`` sees that transaction, but
    never begins a transaction."""

    def __init__(
        self, table: sa.Table, fqn: str, dialect: str, execute: Execute, query: Query
    ) -> None:
        self._table = table
        self._fqn = fqn
        self._dialect = dialect
        self._execute = execute
        self._query = query

    def put(self, domain: TimeDomain, row: TimerRow) -> None:
        self._write(domain.value, row.key.encode(), row.at_us, row.payload)

    def _write(self, domain: int, key: bytes, at_us: int, payload: bytes) -> None:
        """Insert a row, or replace the row with its key."""
        row = {"shard_fqn": self._fqn, "domain": domain, "key": key}
        value = {"at_us": at_us, "payload": payload}
        if self._dialect in ("postgresql", "sqlite"):
            insert = postgresql.insert if self._dialect == "postgresql" else sqlite.insert
            statement = insert(self._table).values(**row, **value)
            self._execute(statement.on_conflict_do_update(index_elements=list(row), set_=value))
            return
        self._execute(sa.delete(self._table).where(*self._one(domain, key)))
        self._execute(sa.insert(self._table).values(**row, **value))

    def _of(self, domain: int) -> tuple[Any, ...]:
        """Return the conditions that select a shard's rows of a domain. `_one` and `_behind` add more."""
        return self._table.c.shard_fqn == self._fqn, self._table.c.domain == domain

    def _one(self, domain: int, key: bytes) -> tuple[Any, ...]:
        return *self._of(domain), self._table.c.key == key

    def remove(self, domain: TimeDomain, key: str) -> None:
        self._execute(sa.delete(self._table).where(*self._one(domain.value, key.encode())))

    def _behind(self, domain: TimeDomain, after: Position) -> tuple[Any, ...]:
        columns = self._table.c
        return *self._of(domain.value), _position(columns) > _literal(after)

    def take(
        self, domain: TimeDomain, after: Position, until_us: int, limit: int
    ) -> Sequence[TimerRow]:
        columns = self._table.c
        due = self._query(
            sa.select(columns.at_us, columns.key, columns.payload)
            .where(*self._behind(domain, after), columns.at_us <= until_us)
            .order_by(columns.at_us, columns.key)
            .limit(limit)
        )
        rows = [TimerRow(row.at_us, bytes(row.key).decode(), bytes(row.payload)) for row in due]
        if rows:
            until = _position(columns) <= _literal(rows[-1].position)
            self._execute(sa.delete(self._table).where(*self._behind(domain, after), until))
        return rows

    def first(self, domain: TimeDomain, after: Position = BEFORE_ALL) -> int | None:
        columns = self._table.c
        rows = self._query(
            sa.select(columns.at_us)
            .where(*self._behind(domain, after))
            .order_by(columns.at_us, columns.key)
            .limit(1)
        )
        return int(rows[0].at_us) if rows else None

    def event_time(self) -> bytes | None:
        statement = sa.select(self._table.c.payload).where(*self._one(_EVENT_TIME, b""))
        rows = self._query(statement)
        return bytes(rows[0].payload) if rows else None

    def set_event_time(self, value: bytes) -> None:
        self._write(_EVENT_TIME, b"", 0, value)

    def clear(self) -> None:
        self._execute(sa.delete(self._table).where(self._table.c.shard_fqn == self._fqn))


def _position(columns: Any) -> Any:
    return sa.tuple_(columns.at_us, columns.key)


def _literal(position: Position) -> Any:
    at_us, key = position
    return sa.tuple_(sa.literal(at_us, sa.BigInteger), sa.literal(key.encode(), sa.LargeBinary))
