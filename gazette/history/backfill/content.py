"""Yields the content of stores in a fixed order, and compares the content of two stores row by row."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from gazette.consumer.timers.timer import BEFORE_ALL, TimeDomain
from gazette.errors import Invalid, NotAllowed
from gazette.message.message_time import LAST_US
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import DEFAULT, RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.state_builder import OfflineShard

_CHECKPOINT_TABLE: Final = "gazette_checkpoint"
_TIMERS_MAX: Final = 1 << 10
"""Greatest number of timers that are taken from a store at once."""


def content_of(store: Any) -> Iterator[Any]:
    """Yield the rows and definitions of all databases of SQLite, the pairs of all column families, or the
    entries of the JSON document.

    Leave out the checkpoint, and timers except SQLite's: see `timers_of`. Raise ``Invalid`` for an unknown
    store.
    """
    if isinstance(store, SQLiteStore):
        return sqlite_rows(store.connection)
    if isinstance(store, RocksDBStore):
        return _pairs(store)
    if isinstance(store, JSONFileStore):
        return _entries(store)
    raise Invalid(
        f"the content of a {type(store).__name__} cannot be compared",
        hint="Implement content() of the Backfill.",
    )


def sqlite_rows(connection: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (table, row) of a connection's databases: by table, and ordered by all columns.

    The definitions of each database come last, as rows of ``sqlite_master``. Names of tables of an attached
    database begin with the database's name.
    """
    databases = [name for _, name, _ in connection.execute("PRAGMA database_list").fetchall()]
    for database in sorted(databases, key=lambda name: (name != "main", name)):
        if database != "temp":
            yield from _database_rows(connection, database)


def _database_rows(connection: Any, database: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    prefix = "" if database == "main" else f"{database}."
    schema = _quoted(database)
    definitions = connection.execute(
        f"SELECT type, name, tbl_name, sql FROM {schema}.sqlite_master"  # noqa: S608
        " WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type, name"
    ).fetchall()
    for sort, name, *_ in definitions:
        if sort != "table" or name == _CHECKPOINT_TABLE:
            continue
        table = f"{schema}.{_quoted(name)}"
        columns = len(connection.execute(f"PRAGMA {schema}.table_info({_quoted(name)})").fetchall())
        order = ", ".join(str(number) for number in range(1, columns + 1))
        for row in connection.execute(f"SELECT * FROM {table} ORDER BY {order}"):  # noqa: S608
            yield f"{prefix}{name}", tuple(row)
    for definition in definitions:
        yield f"{prefix}sqlite_master", tuple(definition)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _pairs(store: RocksDBStore) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield family, key and value of each pair: the default family's first, then by the families' names."""
    for family in sorted(store.column_families, key=lambda name: (name != DEFAULT, name)):
        for key, value in store.iterate(column_family=family):
            yield family, key, value


def _entries(store: JSONFileStore[Any]) -> Iterator[Any]:
    value = store.plain()
    if isinstance(value, dict):
        yield from sorted(value.items())
    else:
        yield value


def timers_of(shard: OfflineShard, store: Any) -> Iterator[tuple[Any, ...]]:
    """Take and yield the timers of a store, and then the state of the watermark. Yield nothing for an
    application without timers."""
    if shard.timers is None:
        return
    table = store.timer_table(shard)
    for domain in TimeDomain:
        while rows := table.take(domain, BEFORE_ALL, LAST_US, _TIMERS_MAX):
            for row in rows:
                yield "timer", domain.name, row.key, row.at_us, row.payload
    yield "watermark", table.event_time()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first two rows that differ. A row is None if its content has ended before."""

    place: int
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"at row {self.place}: {_shown(self.first)} and {_shown(self.second)}"


_SHOWN_MAX: Final = 200
_END: Final = object()


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:_SHOWN_MAX]


def first_difference(first: Iterable[Any], second: Iterable[Any]) -> Difference | None:
    """Return the first difference of two contents; None if they are equal."""
    for place, (row, other) in enumerate(itertools.zip_longest(first, second, fillvalue=_END)):
        if not _is_same(row, other):
            return Difference(place, None if row is _END else row, None if other is _END else other)
    return None


def _is_same(value: Any, other: Any) -> bool:
    """Return True for equal values of the same types: 1, 1.0 and True differ, NaN equals NaN."""
    if isinstance(value, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            _is_same(each, other[key]) for key, each in value.items()
        )
    if isinstance(value, float) and isinstance(other, float) and value != value:
        return other != other
    return type(value) is type(other) and bool(value == other)


class Spooled:
    """Rows in a file, kept for a comparison. Rows are pickled, since ``content`` may yield any values. No
    other process can write the nameless file."""

    def __init__(self, directory: Path | None) -> None:
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - it is closed with this object
            prefix="gazette-verify-", dir=directory
        )

    def write(self, rows: Iterable[Any]) -> None:
        for row in rows:
            pickle.dump(_plain(row), self._file)

    def read(self) -> Iterator[Any]:
        """Yield all rows. Unpickling is safe: only this process has written them."""
        self._file.seek(0)
        while True:
            try:
                yield pickle.load(self._file)  # noqa: S301
            except EOFError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._file.close()


def _plain(row: Any) -> Any:
    """Return a row of SQLAlchemy as a tuple: the row itself is not valid after its statement."""
    return tuple(row) if isinstance(row, tuple) else row


def in_transaction(store: Any) -> Any:
    """Return a database's store, without ``query``, for `Backfill.content` before the commit."""
    return _InTransaction(store)


class _InTransaction:
    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def query(self, *_arguments: Any, **_parameters: Any) -> Any:
        raise NotAllowed(
            "query() sees only committed rows, and not the state that is compared",
            hint="Read it with store.execute() in content() of the Backfill.",
        )
