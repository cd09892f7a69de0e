"""Shows tables of Arrow to SQLite, as read-only virtual tables: `shown`. Needs pyarrow at the first table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import apsw

from gazette.errors import Invalid, InvalidValue, not_installed

_IS_TAKEN = (
    "SELECT 1 FROM pragma_table_list WHERE name = ?1 COLLATE NOCASE"
    " UNION ALL SELECT 1 FROM pragma_module_list WHERE name = ?1 COLLATE NOCASE"
)


@contextmanager
def shown(connection: apsw.Connection, tables: Mapping[str, Any]) -> Iterator[None]:
    """Let statements read tables by their names within the block. Run them without a cache of statements.

    Raise `Invalid` for a name that the database has already, and for columns whose names SQLite does not tell
    apart. Raise `InvalidValue` for values that SQLite does not keep: NaN, integers beyond 64 bits, fractions
    of microseconds, and types such as decimals with a scale, lists and structs.
    """
    registered: list[str] = []
    try:
        for name, table in tables.items():
            is_taken = connection.execute(_IS_TAKEN, (name,), can_cache=False).fetchall()
            if is_taken or name.casefold().startswith("sqlite_"):
                raise Invalid(
                    f"the database has a table or a module {name!r} already",
                    hint="Give the table of Arrow another name.",
                )
            module: Any = _Table(name, table)
            connection.create_module(name, module, eponymous_only=True, read_only=True)
            registered.append(name)
        yield
    finally:
        for name in registered:
            connection.create_module(name, None)


class _Table:
    """One table, as a module of SQLite and as its only virtual table."""

    def __init__(self, name: str, table: Any) -> None:
        try:
            import pyarrow as pa
        except ImportError as error:
            raise not_installed("a table in SQL", "pyarrow", "tables") from error
        arrow = pa.table(table) if not isinstance(table, pa.RecordBatch) else table
        if not 0 < len(arrow.schema) == len({field.casefold() for field in arrow.schema.names}):
            raise Invalid(
                f"the table {name!r} has no columns, or two whose names differ in case alone",
                hint="SQLite does not tell such names apart. Rename the columns.",
            )
        names = ", ".join('"{}"'.format(field.replace('"', '""')) for field in arrow.schema.names)
        self._schema = f"CREATE TABLE shown ({names})"
        self.count: int = arrow.num_rows
        self.columns = [
            _values(f"{name}.{field.name}", column)
            for field, column in zip(arrow.schema, arrow.columns, strict=True)
        ]

    def Connect(self, *_: Any) -> tuple[str, _Table]:
        return self._schema, self

    def BestIndex(self, *_: Any) -> None:
        return None  # A table has no index: each read goes through all rows.

    def Open(self) -> _Rows:
        return _Rows(self)

    def Disconnect(self) -> None:
        pass


class _Rows:
    """A cursor over the rows of a table."""

    def __init__(self, table: _Table) -> None:
        self._columns = table.columns
        self._count = table.count
        self._row = 0

    def Filter(self, *_: Any) -> None:
        self._row = 0

    def Eof(self) -> bool:
        return self._row >= self._count

    def Next(self) -> None:
        self._row += 1

    def Rowid(self) -> int:
        return self._row

    def Column(self, number: int) -> Any:
        return self._row if number < 0 else self._columns[number][self._row]

    def Close(self) -> None:
        pass


def _values(path: str, column: Any) -> Sequence[Any]:
    """Return the values of a column for SQLite: timestamps as microseconds, dates as text. Raise
    ``InvalidValue`` for values and types that SQLite does not keep."""
    import pyarrow as pa
    import pyarrow.compute

    kept = column.type
    if pa.types.is_dictionary(kept):
        column = column.cast(kept.value_type)
        kept = kept.value_type
    try:
        if pa.types.is_timestamp(kept):
            column = column.cast(pa.timestamp("us", kept.tz)).cast(pa.int64())
        elif pa.types.is_uint64(kept) or (pa.types.is_decimal(kept) and kept.scale == 0):
            column = column.cast(pa.int64())
        elif pa.types.is_date(kept):
            column = column.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise InvalidValue(
            f"has a value that SQLite does not keep: {error}",
            path=path,
            hint="Integers have 64 bits with a sign, and times whole microseconds. Cast the column.",
        ) from error
    kept = column.type
    if pa.types.is_floating(kept):
        if pa.compute.any(pa.compute.is_nan(column)).as_py():
            raise InvalidValue("is nan, which SQLite does not keep", path=path)
    elif not any(is_kept(kept) for is_kept in _kept_types(pa)):
        raise InvalidValue(
            f"has the type {kept}, which SQLite does not keep",
            path=path,
            hint="Cast the column, or leave it out.",
        )
    values: Sequence[Any] = column.to_pylist()
    return values


def _kept_types(pa: Any) -> Sequence[Any]:
    types = pa.types
    return (
        *(types.is_integer, types.is_boolean, types.is_null, types.is_string),
        *(types.is_large_string, types.is_binary, types.is_large_binary),
    )
