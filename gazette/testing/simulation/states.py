"""States of stores as plain rows, and the first difference between two of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
from google.protobuf import text_format

from gazette.consumer.application import Store
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.shard_state import ShardState, StateKind
from gazette.recoverylog.store_files import STATE_FILE
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore

Rows: TypeAlias = dict[str, dict[str, str]]
"""By table, the text of each row's value. The key of a row is the text that shows it."""

_Query: TypeAlias = Callable[..., list[tuple[Any, ...]]]
_OWN: tuple[str, ...] = (
    "gazette_checkpoint",
    "gazette_event_time",
    "gazette_definition",
    "sqlite_",
)
"""Prefixes of tables whose content is not the application's. But ``gazette_timer`` has its timers."""
CHECKPOINT: Final = "gazette_checkpoint"
"""Table of a state that queries saw: its only row has the checkpoint."""
_NO_STEP: Final = frozenset(".[]()'")
"""Characters with a meaning in paths: a path has a key with such a character in quotes."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One row or message that is not as it should be."""

    place: str
    """The table, document or journal."""
    actual: str
    """The row or message of the run; empty if it has none."""
    expected: str
    """The row or message of a run without faults; empty if it has none."""

    def __str__(self) -> str:
        return (
            f"{self.place}\n  in this run        {self.actual or '(nothing)'}\n"
            f"  without any fault  {self.expected or '(nothing)'}"
        )


class Query:
    """Function by which an invariant reads the committed states of all shards."""

    def __init__(self, stores: Mapping[str, Any]) -> None:
        self.stores = stores
        """The store of each shard, by its id."""

    def __call__(self, sql: str, bindings: Any = ()) -> list[tuple[Any, ...]]:
        """Query the stores of all shards, and return all rows. One SQLStore has the rows of all shards."""
        stores = list(self.stores.values())
        if stores and all(map(_shares_rows, stores)):
            return [tuple(row) for row in stores[0].query(sql, bindings or None)]
        return [row for store in stores for row in store.query(sql, bindings)]


def _shares_rows(store: Any) -> bool:
    return any(base.__module__ == "gazette.stores.sql.store" for base in type(store).__mro__)


def state_of(store: Store, ignore: Collection[str] = ()) -> Rows | None:
    """Return the committed state of a store; None for a store of another kind.

    ``ignore`` names tables, ``table.column``, paths of a JSON document, or prefixes of RocksDB keys.
    """
    if isinstance(store, SQLiteStore):
        return _sqlite_rows(store.query, ignore)
    if isinstance(store, JSONFileStore):
        return {"state": dict(_leaves(store.read(), "", ignore))}
    if type(store).__module__.startswith("gazette.stores.rocksdb") or any(
        base.__module__ == "gazette.stores.rocksdb.store" for base in type(store).__mro__
    ):
        return _rocksdb_pairs(store, ignore)
    return None


def seen_state(store: Store, ignore: Collection[str] = ()) -> Rows | None:
    """Return the committed state as the store shows it to queries. SQLite adds the checkpoint."""
    rows = state_of(store, ignore)
    return _with_checkpoint(rows, store.query) if isinstance(store, SQLiteStore) else rows


def left_state(store: Store, ignore: Collection[str] = ()) -> Rows | None:
    """Return the rows for `seen_state` from now on. The shard's thread calls this after a commit.

    This calls no methods of the user's subclass.
    """
    if not isinstance(store, SQLiteStore):
        return state_of(store, ignore)
    query = partial(SQLiteStore.query, store)
    return _with_checkpoint(_sqlite_rows(query, ignore), query)


def state_of_files(state: ShardState, store: Store, ignore: Collection[str] = ()) -> Rows | None:
    """Return the rows that `seen_state` returns of a store with these files. ``store`` is of the same class.

    None: the files are from before the first commit.
    """
    match state.kind:
        case StateKind.SQLITE:
            return _with_checkpoint(_sqlite_rows(state.query, ignore), state.query)
        case StateKind.ROCKSDB:
            return _pairs(state, ignore)
        case StateKind.JSON:
            assert isinstance(store, JSONFileStore)
            line = (state.directory / STATE_FILE).read_bytes().split(b"\n")[1]
            return {"state": dict(_leaves(store._encoding.decode(line, "state"), "", ignore))}
    return None


def _with_checkpoint(rows: Rows | None, query: _Query) -> Rows | None:
    data = query(f"SELECT checkpoint FROM {CHECKPOINT}")
    if rows is None or not data:
        return rows
    return {**rows, CHECKPOINT: {"checkpoint": data[0][0].hex()}}


def sources_of_state(rows: Rows | None) -> dict[str, int]:
    """Return the offsets of sources in a state's checkpoint; empty if the state has no checkpoint."""
    text = (rows or {}).get(CHECKPOINT, {}).get("checkpoint", "")
    checkpoint = Checkpoint.from_bytes(bytes.fromhex(text))
    return {name: source.read_through for name, source in checkpoint.sources.items()}


def without_checkpoint(rows: Rows) -> Rows:
    """Return the application's part of a state that queries saw."""
    return {table: values for table, values in rows.items() if table != CHECKPOINT}


def deviation_of(actual: Rows, expected: Rows) -> Deviation | None:
    """Return the first difference of two states."""
    for table in sorted(actual.keys() | expected.keys()):
        ours, theirs = actual.get(table, {}), expected.get(table, {})
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return Deviation(table, _shown(key, ours), _shown(key, theirs))
    return None


def compared(label: str, rows: Rows, other: str, expected: Rows) -> str:
    """Return the first difference of two states, with a label for each."""
    deviation = deviation_of(rows, expected) or Deviation("(no row differs)", "", "")
    width = max(len(label), len(other))
    return (
        f"{deviation.place}\n  {label:{width}}  {deviation.actual or '(nothing)'}\n"
        f"  {other:{width}}  {deviation.expected or '(nothing)'}"
    )


def text_of(value: Any) -> str:
    """Return a text that is the same for equal values of the same types: sets and dicts are sorted."""
    name = type(value).__name__
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{text_of(k)}: {text_of(v)}' for k, v in value.items()))}}}"
    if fields := _fields_of(value):
        return f"{name}({', '.join(f'{field}={text_of(each)}' for field, each in fields)})"
    if isinstance(value, (list, tuple)):
        texts = ", ".join(map(text_of, value))
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    if hasattr(value, "DESCRIPTOR"):
        return f"{name}({text_format.MessageToString(value, as_one_line=True)})"
    return repr(bytes(value) if isinstance(value, msgspec.Raw) else value)


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of an object's fields, with the names of JSON; empty without fields."""
    names = getattr(value, "__struct_fields__", ()) or getattr(value, "__dataclass_fields__", ())
    names = tuple(names or getattr(value, "_fields", ()))
    shown = getattr(value, "__struct_encode_fields__", names)
    return [(show, getattr(value, name)) for show, name in zip(shown, names, strict=True)]


def _shown(key: str, rows: Mapping[str, str]) -> str:
    return f"{key}: {rows[key]}" if key in rows else ""


def _sqlite_rows(query: _Query, ignore: Collection[str]) -> Rows:
    names = query("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    tables: Rows = {}
    for (name,) in names:
        if name.startswith(_OWN) or name in ignore:
            continue
        info = query("SELECT name, pk FROM pragma_table_info(?) ORDER BY cid", (name,))
        columns = [column for column, _ in info if f"{name}.{column}" not in ignore]
        chosen = ", ".join(map(_quoted, columns)) or "1"
        keyed = [(column, bool(pk)) for column, pk in info if column in columns]
        tables[name] = rows_of(keyed, query(f"SELECT {chosen} FROM {_quoted(name)}"))
    return tables


def rows_of(
    columns: Sequence[tuple[str, bool]], content: Iterable[tuple[Any, ...]]
) -> dict[str, str]:
    """Return the texts of a table's rows. Each column says whether it is a part of the key."""
    keys = [column for column, is_key in columns if is_key]
    # Rows may have the same key: a key may be NULL, or lack an ignored column.
    values: dict[str, list[str]] = {}
    for row in content:
        named = dict(zip((column for column, _ in columns), row, strict=False))
        key = ", ".join(f"{column} = {named.pop(column)!r}" for column in keys)
        shown = ", ".join(f"{column} = {value!r}" for column, value in named.items())
        values.setdefault(key or shown, []).append(shown)
    return {
        key: " and ".join(sorted(shown)) if keys else str(len(shown))
        for key, shown in values.items()
    }


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _leaves(value: Any, path: str, ignore: Collection[str]) -> list[tuple[str, str]]:
    """Return the texts of the values of a document by their paths."""
    if path in ignore:
        return []
    fields = value.items() if isinstance(value, dict) else _fields_of(value)
    parts = [(_step(key, path), each) for key, each in fields]
    if not parts and isinstance(value, (list, tuple)):
        parts = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    if not parts:
        return [(path or "(document)", text_of(value))]
    return [leaf for name, each in parts for leaf in _leaves(each, name, ignore)]


def _step(key: Any, path: str) -> str:
    """Return the path of a key below another path. The key 1 has another path than the text "1"."""
    if not isinstance(key, str) or not key or _NO_STEP & set(key):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _rocksdb_pairs(store: Any, ignore: Collection[str]) -> Rows:
    with store.view() as view:
        return _pairs(view, ignore, store.column_families)


def _pairs(view: Any, ignore: Collection[str], families: Collection[str] = ()) -> Rows:
    tables: Rows = {}
    for family in families or view.column_families:
        pairs = {repr(key): repr(value) for key, value in view.iterate(column_family=family)}
        tables[family] = {
            key: value
            for key, value in pairs.items()
            if not any(key[2:].startswith(prefix) for prefix in ignore)
        }
    return tables
