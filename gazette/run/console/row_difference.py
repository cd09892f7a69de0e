"""Rows of states as pages show them, and the rows that differ between two states: `cells`, `differences`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import apsw

from gazette.errors import Invalid
from gazette.gazctl.shards.select_rows import json_value

ROWS_MAX: Final = 300
TABLES_MAX: Final = 200
BYTES_MAX: Final = 4 << 20
"""Characters of all rows that are shown."""
CHARACTERS_MAX: Final = 1000
"""Characters of one value that are shown."""


@dataclass(slots=True)
class TableDifference:
    """Differences of a table. ``truncated`` is True if more rows differ."""

    name: str
    columns: Sequence[str]
    key: Sequence[str] = ()
    added: list[list[Any]] = field(default_factory=list)
    removed: list[list[Any]] = field(default_factory=list)
    changed: list[tuple[list[Any], list[Any], list[int]]] = field(default_factory=list)
    """Rows of the same key, before and after, and the places of the values that differ. Cut texts that differ
    may look equal."""
    truncated: bool = False


@dataclass(slots=True)
class _Comparison:
    """Compares the tables of the schemas ``a`` and ``b`` of a connection. Blocks."""

    connection: apsw.Connection
    characters: int = 0

    def names(self, own: Collection[str]) -> list[str]:
        listing = "SELECT name FROM {}.sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
        rows = [row for schema in "ba" for row in self.connection.execute(listing.format(schema))]
        names = [name for (name,) in rows if name not in own and not name.startswith("sqlite_")]
        if len(names := list(dict.fromkeys(names))) > TABLES_MAX:
            raise Invalid(
                f"the states have more than {TABLES_MAX} tables", hint="Query both moments."
            )
        return names

    def table(self, name: str) -> TableDifference:
        described = {schema: self._described(schema, name) for schema in "ab"}
        (before, before_key), (after, after_key) = described["a"], described["b"]
        if before and after and before != after:
            raise Invalid(
                f"table {name} has other columns at these moments", hint="Query both moments."
            )
        difference = TableDifference(name, after or before)
        if not before or not after:
            schema, rows = ("a", difference.removed) if before else ("b", difference.added)
            sql = f"SELECT {_list(difference.columns)} FROM {schema}.{_quoted(name)}"  # noqa: S608
            self._take(difference, sql, lambda row: rows.append(cells(row)))
        elif after_key and before_key == after_key and not self._has_null(name, after_key):
            difference.key = after_key
            self._compare_by_key(difference)
        else:
            self._compare_by_number(difference)
        return difference

    def _described(self, schema: str, name: str) -> tuple[list[str], list[str]]:
        """Return the columns of a table, and the columns of its key."""
        listing = "SELECT name, pk FROM pragma_table_xinfo(?, ?) WHERE hidden != 1"
        rows: list[Any] = self.connection.execute(listing, (name, schema)).fetchall()
        key = sorted((place, column) for column, place in rows if place)
        return [column for column, _ in rows], [column for _, column in key]

    def _has_null(self, name: str, key: Sequence[str]) -> bool:
        """Return True if a key has a NULL: such keys may be repeated."""
        test = " OR ".join(f"{_quoted(column)} IS NULL" for column in key)
        tables = [f"SELECT 1 FROM {schema}.{_quoted(name)} WHERE {test}" for schema in "ab"]  # noqa: S608
        return bool(self.connection.execute(" UNION ALL ".join(tables) + " LIMIT 1").fetchall())

    def _compare_by_key(self, difference: TableDifference) -> None:
        """Compare rows by their keys. Keys are equal by the table's rules; values, if no bit differs."""
        table, columns = _quoted(difference.name), difference.columns
        width = len(columns)
        keys = " AND ".join(f"x.{_quoted(name)} = y.{_quoted(name)}" for name in difference.key)
        sides = [
            ", ".join(
                f"{name} COLLATE BINARY, typeof({name})"
                for name in (f"{side}.{_quoted(column)}" for column in columns)
            )
            for side in "xy"
        ]

        def change(row: Sequence[Any]) -> None:
            before, after = row[:width], row[width:]
            places = [
                at
                for at in range(width)
                if (type(before[at]), before[at]) != (type(after[at]), after[at])
            ]
            difference.changed.append((cells(before), cells(after), places))

        self._take(
            difference,
            f"SELECT {_list(columns, 'x.')}, {_list(columns, 'y.')} FROM a.{table} x JOIN b.{table} y"  # noqa: S608
            f" ON {keys} WHERE ({sides[0]}) IS NOT ({sides[1]})",
            change,
        )
        for first, second, rows in (("a", "b", difference.removed), ("b", "a", difference.added)):
            self._take(
                difference,
                f"SELECT {_list(columns, 'x.')} FROM {first}.{table} x WHERE NOT EXISTS"  # noqa: S608
                f" (SELECT 1 FROM {second}.{table} y WHERE {keys})",
                lambda row, rows=rows: rows.append(cells(row)),  # type: ignore[misc]
            )

    def _compare_by_number(self, difference: TableDifference) -> None:
        """Compare how often each row of a table without a key occurs."""
        numbered = [f"c{place}" for place in range(len(difference.columns))]
        named = ", ".join(
            f"{_quoted(column)} AS {name}"
            for column, name in zip(difference.columns, numbered, strict=True)
        )
        table = _quoted(difference.name)
        groups = ", ".join(f"{name} COLLATE BINARY, typeof({name})" for name in numbered)

        def add(row: Sequence[Any]) -> None:
            *values, more = row
            rows = difference.added if more > 0 else difference.removed
            copies = min(abs(more), ROWS_MAX + 1 - len(rows))
            rows += [cells(values)] * copies

        self._take(
            difference,
            f"SELECT {', '.join(numbered)}, sum(n) FROM (SELECT {named}, -1 AS n FROM a.{table}"  # noqa: S608
            f" UNION ALL SELECT {named}, 1 FROM b.{table}) GROUP BY {groups} HAVING sum(n) != 0",
            add,
        )
        for rows in (difference.added, difference.removed):
            difference.truncated |= len(rows) > ROWS_MAX
            del rows[ROWS_MAX:]

    def _take(
        self, difference: TableDifference, sql: str, take: Callable[[Sequence[Any]], None]
    ) -> None:
        """Pass rows to ``take``, up to the limits."""
        for number, row in enumerate(self.connection.execute(sql)):
            self.characters += sum(len(str(cell)) for cell in cells(row))
            if number == ROWS_MAX or self.characters > BYTES_MAX:
                difference.truncated = True
                return
            take(row)


def differences(connection: apsw.Connection, own: Collection[str]) -> list[TableDifference]:
    """Return the tables that differ between the schemas ``a`` and ``b``, except ``own`` ones. Blocks."""
    comparison = _Comparison(connection)
    try:
        tables = [comparison.table(name) for name in comparison.names(own)[:TABLES_MAX]]
    except (apsw.Error, UnicodeDecodeError) as error:
        raise Invalid(
            f"the states cannot be compared: {error}",
            hint="Compare what you need by two queries, at both moments.",
        ) from error
    return [
        table
        for table in tables
        if table.added or table.removed or table.changed or table.truncated
    ]


def cells(row: Sequence[Any]) -> list[Any]:
    """Return the values of a row for a page. Long ones are cut."""
    return list(map(_cell, row))


def _cell(value: Any) -> Any:
    value = json_value(value)
    if isinstance(value, dict):
        value = f"x'{value['hex']}'"
    if isinstance(value, str) and len(value) > CHARACTERS_MAX:
        return f"{value[:CHARACTERS_MAX]}… ({len(value)} characters)"
    return value


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _list(columns: Sequence[str], side: str = "") -> str:
    return ", ".join(f"{side}{_quoted(column)}" for column in columns)
