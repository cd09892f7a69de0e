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

from gazette.errors import Invalid, NotAllowed
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import DEFAULT, RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore

_CHECKPOINT_TABLE: Final = "gazette_checkpoint"


def content_of(store: Any) -> Iterator[Any]:
    """Yield the rows of SQLite's main database, the pairs of all column families, or the entries of the JSON
    document.

    Leave out the checkpoint, attached databases, and timers except SQLite's. Raise ``Invalid`` for an unknown
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
    """Yield (table, row) of a connection's main database: by table, and ordered by all columns."""
    tables = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        " ORDER BY name"
    ).fetchall()
    for (name,) in tables:
        if name == _CHECKPOINT_TABLE:
            continue
        quoted = '"' + name.replace('"', '""') + '"'
        columns = len(connection.execute(f"PRAGMA table_info({quoted})").fetchall())
        order = ", ".join(str(number) for number in range(1, columns + 1))
        for row in connection.execute(f"SELECT * FROM {quoted} ORDER BY {order}"):  # noqa: S608
            yield name, tuple(row)


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
        if row is _END or other is _END or row != other:
            return Difference(place, None if row is _END else row, None if other is _END else other)
    return None


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
