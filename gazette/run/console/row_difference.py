"""The rows that differ between two states of a shard: `differences`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import apsw

from gazette.errors import Invalid

ROWS_MAX: Final = 300
TABLES_MAX: Final = 50
_STEPS: Final = 10_000
_OWN: Final = frozenset({"gazette_checkpoint", "document"})
"""Tables that change with each transaction, and say nothing of the application."""


@dataclass(slots=True)
class TableDifference:
    """Differences of a table. ``changed`` has pairs of rows with the same key, before and after."""

    name: str
    columns: Sequence[str]
    key: Sequence[str] = ()
    added: list[Sequence[Any]] = field(default_factory=list)
    removed: list[Sequence[Any]] = field(default_factory=list)
    changed: list[tuple[Sequence[Any], Sequence[Any]]] = field(default_factory=list)
    truncated: bool = False


def paired(difference: TableDifference) -> TableDifference:
    """Move rows of one key, which one side lacks and the other has, to ``changed``. No IO."""
    places = [difference.columns.index(name) for name in difference.key]
    if not places:
        return difference

    def key_of(row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(row[place] for place in places)

    added = {key_of(row): row for row in difference.added}
    removed = {key_of(row): row for row in difference.removed}
    both = [key for key in removed if key in added]
    difference.changed = [(removed[key], added[key]) for key in both]
    difference.added = [row for key, row in added.items() if key not in removed]
    difference.removed = [row for key, row in removed.items() if key not in added]
    return difference


def differences(before: Any, after: Any, is_over: Callable[[], bool]) -> list[TableDifference]:
    """Return the tables that differ. Blocks, until ``is_over`` returns True.

    A state is the URI of a database, or a function that fills a schema of a connection.
    """
    connection = apsw.Connection(
        ":memory:",
        flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI,
    )
    connection.set_progress_handler(is_over, _STEPS)
    try:
        for schema, state in (("a", before), ("b", after)):
            connection.execute(
                f"ATTACH ? AS {schema}", (state if isinstance(state, str) else ":memory:",)
            )
            if not isinstance(state, str):
                state(connection, schema)
        listing = "SELECT name FROM {}.sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
        names = {
            name: None
            for schema in ("b", "a")
            for (name,) in connection.execute(listing.format(schema))
            if name not in _OWN and not name.startswith("sqlite_")
        }
        tables = [_table(connection, name) for name in list(names)[:TABLES_MAX]]
    except apsw.InterruptError as error:
        raise Invalid("the comparison was interrupted") from error
    except apsw.Error as error:
        raise Invalid(
            f"the states cannot be compared: {error}",
            hint="Compare what you need by two queries, at both moments.",
        ) from error
    finally:
        connection.close()
    return [table for table in tables if table.added or table.removed or table.changed]


def _table(connection: apsw.Connection, name: str) -> TableDifference:
    quoted = '"' + name.replace('"', '""') + '"'
    columns: dict[str, list[str]] = {}
    keys: list[str] = []
    for schema in ("a", "b"):
        listing = "SELECT name, pk FROM pragma_table_info(?, ?)"
        described: list[Any] = connection.execute(listing, (name, schema)).fetchall()
        columns[schema] = [column for column, _ in described]
        keys = [
            column for column, place in sorted(described, key=lambda row: row[1]) if place
        ] or keys
    if name == "state" and not keys:
        keys = ["path"]
    if columns["a"] and columns["b"] and columns["a"] != columns["b"]:
        raise Invalid(
            f"table {name} has other columns at these moments", hint="Query both moments."
        )
    difference = TableDifference(name, columns["b"] or columns["a"], keys)
    sides = {
        schema: f"SELECT * FROM {schema}.{quoted}" if columns[schema] else ""  # noqa: S608 - quoted
        for schema in columns
    }
    for first, second, target in (("a", "b", difference.removed), ("b", "a", difference.added)):
        if not sides[first]:
            continue
        other = f" EXCEPT {sides[second]}" if sides[second] else ""
        target += connection.execute(f"{sides[first]}{other} LIMIT {ROWS_MAX + 1}").fetchall()
        difference.truncated |= len(target) > ROWS_MAX
        del target[ROWS_MAX:]
    return paired(difference)
