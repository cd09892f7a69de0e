"""Checks of SQL's bindings: a value that SQLite would store as another one is refused with its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan
from typing import Any, TypeAlias

import apsw

from gazette.stores.bound_values import KEPT, are_rows_kept, has_memory, require, sqlite_objection

Bindings: TypeAlias = Sequence[Any] | dict[str, Any]


def checked(bindings: Any, sql: str, connection: apsw.Connection) -> Bindings:
    """Return bindings as a tuple, list or dict; read an iterator to its end. Raise ``InvalidValue`` for a
    binding that SQLite would change."""
    listed = _listed(bindings)
    if not are_kept(listed.values() if isinstance(listed, dict) else listed):
        require_storable(listed, sql, connection)
    return listed


def _listed(bindings: Any) -> Bindings:
    if isinstance(bindings, tuple | list | dict):
        return bindings
    return dict(bindings) if isinstance(bindings, Mapping) else tuple(bindings)


def are_kept(values: Iterable[Any]) -> bool:
    """Return True if SQLite keeps all of these values exactly; False if it may change a value."""
    for value in values:
        value_type = type(value)
        if value_type not in KEPT and (value_type is not float or isnan(value)):
            return False
    return True


class ManyBindings:
    """Rows of bindings for SQLite. Raises ``InvalidValue`` at a row with a value that SQLite would change."""

    def __init__(self, rows: Iterable[Any], sql: str, connection: apsw.Connection) -> None:
        self._rows = rows
        self._sql = sql
        self._connection = connection
        self._number = 0
        self._row: Bindings = ()
        """The row that was bound last. ``_number`` is its position."""
        self.bound: Iterable[Any] = rows if are_rows_kept(rows) else self._each()
        """The bindings that SQLite gets."""

    def _each(self) -> Iterator[Bindings]:
        for number, row in enumerate(self._rows):
            self._number, self._row = number, _listed(row)
            values = self._row.values() if isinstance(self._row, dict) else self._row
            if not are_kept(values):
                self._require_row()
            yield self._row

    def _require_row(self) -> None:
        require_storable(self._row, self._sql, self._connection, f"rows[{self._number}]")

    def require_storable(self) -> None:
        """Raise ``InvalidValue`` for the value that SQLite has refused. Return if no value is the reason."""
        if self.bound is self._rows:
            for number, row in enumerate(self._rows):
                self._number, self._row = number, row
                self._require_row()
        self._require_row()


def require_storable(
    bindings: Bindings, sql: str, connection: apsw.Connection, path: str = "bindings"
) -> None:
    """Raise ``InvalidValue`` for the first binding that SQLite does not keep exactly."""
    converts_others = connection.convert_binding is not None

    def converts(value: Any) -> bool:
        # SQLite binds an object's memory before any conversion.
        return type(value).__module__ == "apsw" or (converts_others and not has_memory(value))

    if isinstance(bindings, Mapping):
        bindings = {name: value for name, value in bindings.items() if _is_named(name, sql)}
    require(bindings, lambda value: sqlite_objection(value, converts), sql, path)


def _is_named(name: object, sql: str) -> bool:
    """Return True if SQL may have a parameter of this name. Other keys of a dict are not bound."""
    return any(f"{sign}{name}" in sql for sign in ":@$")
