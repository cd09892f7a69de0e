"""A cursor of SQL that has run to its end: `BufferedCursor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apsw


class BufferedCursor(apsw.Cursor):
    """A cursor of SQL that has run to its end, with the rows that it returned.

    SQLite runs the next statement, or the next row of bindings, only when all rows of the previous statement
    are fetched. If the caller did not read the cursor, later statements would not run.
    """

    _columns: tuple[tuple[str, str], ...] = ()
    _rows: Iterator[Any] = iter(())

    @classmethod
    def of(cls, cursor: apsw.Cursor) -> apsw.Cursor:
        """Run the SQL of a cursor to its end. Return a cursor with the remaining rows."""
        try:
            columns = cursor.get_description()
        except apsw.ExecutionCompleteError:
            return cursor
        buffered = cls(cursor.get_connection())
        buffered._columns, buffered._rows = columns, iter(cursor.fetchall())
        return buffered

    def __iter__(self) -> BufferedCursor:
        return self

    def __next__(self) -> Any:
        return next(self._rows)

    def fetchone(self) -> Any | None:
        return next(self._rows, None)

    def fetchall(self) -> list[Any]:
        return list(self._rows)

    @property
    def get(self) -> Any:
        """The remaining rows as in apsw: None for no row, one row without a list, one column as a value."""
        rows = [row[0] if len(row) == 1 else row for row in self._rows]
        return None if not rows else rows[0] if len(rows) == 1 else rows

    def get_description(self) -> tuple[tuple[str, str], ...]:
        return self._columns

    @property
    def description(self) -> Any:  # type: ignore[override]
        return tuple((*column, None, None, None, None, None) for column in self._columns)
