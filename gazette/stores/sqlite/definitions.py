"""Definitions of declared parts of a SQLite state, such as windows and joins, stored beside their tables.

The SQL of a schema writes definitions, in the transaction that opens the store. A state without a definition
adopts the declared one. A state with another definition is refused: it has rows that another rule wrote.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import apsw
import msgspec

from gazette.errors import Invalid

_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS gazette_definition (name TEXT NOT NULL, definition TEXT NOT NULL,"
    " UNIQUE (name, definition));\n"
)
_INSERT: Final = "INSERT OR IGNORE INTO gazette_definition VALUES "
_STATEMENTS: Final = re.compile(f"{re.escape(_CREATE)}{re.escape(_INSERT)}[^\n]*\n")
_EXISTS: Final = "SELECT 1 FROM main.sqlite_master WHERE name = 'gazette_definition'"
_ALL: Final = "SELECT name, definition FROM gazette_definition ORDER BY rowid"


def define(name: str, **parts: Any) -> str:
    """Return SQL that writes a definition, for a schema or a migration. ``parts`` are stored as JSON."""
    definition = msgspec.json.encode(parts).decode()
    return f"{_CREATE}{_INSERT}({_quoted(name)}, {_quoted(definition)});\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def definitions_of(sql: str) -> str:
    """Return the parts of SQL that `define` has made."""
    return "".join(_STATEMENTS.findall(sql))


def without_definitions(sql: str) -> str:
    """Return SQL without the parts that `define` has made."""
    return _STATEMENTS.sub("", sql)


@contextlib.contextmanager
def unchanged_definitions(connection: apsw.Connection) -> Iterator[None]:
    """Run SQL of schemas in the block. Raise ``Invalid`` if the SQL has changed a definition."""
    try:
        yield
    except apsw.Error:
        # A changed definition may be the cause: an index may need a column that the old table lacks.
        _check(connection)
        raise
    _check(connection)


def _check(connection: apsw.Connection) -> None:
    """Raise ``Invalid`` if a name has two definitions: mostly one in the state, and a changed one in the
    schema."""
    if not connection.execute(_EXISTS).fetchall():
        return
    definitions: dict[str, str] = {}
    rows: list[Any] = connection.execute(_ALL).fetchall()
    for name, definition in rows:
        if name in definitions:
            raise _changed(name, definitions[name], definition)
        definitions[name] = definition


def _changed(name: str, before: str, declared: str) -> Invalid:
    return Invalid(
        "this state was written under another definition",
        path=name,
        before=before,
        declared=declared,
        hint="Declare it as it was, or give the new one another name: it begins with nothing. To have the"
        " history in it, build the state again with a backfill (docs/backfill.md).",
    )
