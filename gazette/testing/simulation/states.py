"""States of stores as plain rows, and the first difference between two of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from gazette.consumer.application import Store
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore

Rows: TypeAlias = dict[str, dict[str, Any]]
"""By table, a value for each row. The key of a row is the text that shows it."""

_OWN: tuple[str, ...] = (
    "gazette_checkpoint",
    "gazette_event_time",
    "gazette_definition",
    "sqlite_",
)
"""Tables whose content is not the application's. ``gazette_timer`` is."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One row or message that is not as it should be."""

    place: str
    """The table, document or journal."""
    actual: str
    """What the run has; empty if it has nothing."""
    expected: str
    """What a run without faults has; empty if it has nothing."""

    def __str__(self) -> str:
        return (
            f"{self.place}\n  in this run        {self.actual or '(nothing)'}\n"
            f"  without any fault  {self.expected or '(nothing)'}"
        )


def state_of(store: Store, ignore: Collection[str] = ()) -> Rows | None:
    """Return the committed state of a store; None for a store of another kind.

    ``ignore`` names tables, ``table.column``, paths of a JSON document, or prefixes of RocksDB keys.
    """
    if isinstance(store, SQLiteStore):
        return _sqlite_rows(store, ignore)
    if isinstance(store, JSONFileStore):
        document = msgspec.json.decode(store._encoding.encode(store.read(), "state"))
        return {"state": dict(_leaves(document, "", ignore))}
    if type(store).__module__.startswith("gazette.stores.rocksdb") or any(
        base.__module__ == "gazette.stores.rocksdb.store" for base in type(store).__mro__
    ):
        return _rocksdb_pairs(store, ignore)
    return None


def deviation_of(actual: Rows, expected: Rows) -> Deviation | None:
    """Return the first difference of two states."""
    for table in sorted(actual.keys() | expected.keys()):
        ours, theirs = actual.get(table, {}), expected.get(table, {})
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return Deviation(table, _shown(key, ours), _shown(key, theirs))
    return None


def _shown(key: str, rows: Mapping[str, Any]) -> str:
    if key not in rows:
        return ""
    value = rows[key]
    return f"{key}: {value if isinstance(value, str) else repr(value)}"


def _sqlite_rows(store: SQLiteStore, ignore: Collection[str]) -> Rows:
    names = store.query("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    tables: Rows = {}
    for (name,) in names:
        if name.startswith(_OWN) or name in ignore:
            continue
        info = store.query(f"SELECT name, pk FROM pragma_table_info('{name}') ORDER BY cid")
        columns = [column for column, _ in info if f"{name}.{column}" not in ignore]
        keys = [column for column, pk in info if pk and column in columns]
        listed = ", ".join(f'"{column}"' for column in columns)
        rows: dict[str, Any] = {}
        for row in store.query(f'SELECT {listed} FROM "{name}"'):
            named = dict(zip(columns, row, strict=True))
            key = ", ".join(f"{column} = {named.pop(column)!r}" for column in keys)
            if key:
                rows[key] = ", ".join(f"{column} = {value!r}" for column, value in named.items())
            else:
                shown = ", ".join(f"{column} = {value!r}" for column, value in named.items())
                rows[shown] = rows.get(shown, 0) + 1
        tables[name] = rows
    return tables


def _leaves(value: Any, path: str, ignore: Collection[str]) -> list[tuple[str, Any]]:
    """Return the values of a JSON document by their paths."""
    if path in ignore:
        return []
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict) and value:
        for key in value:
            items += _leaves(value[key], f"{path}.{key}" if path else str(key), ignore)
        return items
    if isinstance(value, list) and value:
        for index, element in enumerate(value):
            items += _leaves(element, f"{path}[{index}]", ignore)
        return items
    return [(path or "state", value)]


def _rocksdb_pairs(store: Any, ignore: Collection[str]) -> Rows:
    tables: Rows = {}
    with store.view() as view:
        for family in store.column_families:
            pairs = {repr(key): value for key, value in view.iterate(column_family=family)}
            tables[family] = {
                key: value
                for key, value in pairs.items()
                if not any(key[2:].startswith(prefix) for prefix in ignore)
            }
    return tables
