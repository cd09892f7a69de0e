"""Versions of a SQLite store's schema, each applied once, in the transaction that opens the store.

    SQLiteStore(recorder, migrations=[
        "CREATE TABLE counts (word TEXT PRIMARY KEY, n INTEGER)",
        "ALTER TABLE counts ADD COLUMN seen TEXT",
        fill_seen,                                  # or a function of the connection
    ])

All new migrations, and the record of them, are one transaction and one append: a recovery finds all of
them or none. An applied migration is known by its position, and by a digest of its SQL or the name of its
function. To change it later is an error: the change would affect only new shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import apsw

from gazette.errors import Invalid
from gazette.stores.sqlite.definitions import definitions_of, without_definitions

Migration = str | Callable[[apsw.Connection], None]
"""SQL of one or more statements, or a function that runs SQL. Neither may end the transaction."""

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS gazette_migration (version INTEGER PRIMARY KEY, digest TEXT NOT NULL)
"""


def apply_migrations(connection: apsw.Connection, migrations: Sequence[Migration]) -> int:
    """Apply new migrations in the running transaction. Return their number.

    Raise ``Invalid`` when the SQL of a migration fails, and when the state has other migrations than these,
    or more of them (from a later version of the application). Other errors of a function reach the caller.
    After an error, the caller commits nothing.
    """
    applied = _applied(connection)
    if len(applied) > len(migrations):
        raise Invalid(
            "the state's schema is of a later version than this application",
            version=len(applied),
            known=len(migrations),
            hint="Run the later version of the application that wrote it; versions do not go "
            "back. (`gazctl shards recover --at` has the state before.)",
        )
    for version, (digest, migration) in enumerate(zip(applied, migrations, strict=False), 1):
        if digest != _digest(migration):
            raise Invalid(
                "a migration is not the one that was applied to this state",
                version=version,
                hint="Leave migrations as they were, and add others behind them.",
            )
        if isinstance(migration, str):  # Define again: `unchanged_definitions` finds a change.
            connection.execute(definitions_of(migration)).fetchall()
    pending = migrations[len(applied) :]
    if pending:
        connection.execute(_TABLE).fetchall()
    for version, migration in enumerate(pending, len(applied) + 1):
        try:
            if isinstance(migration, str):
                connection.execute(migration).fetchall()
            else:
                migration(connection)
        except apsw.Error as error:
            raise Invalid(
                f"a migration fails: {error}",
                version=version,
                hint="Nothing of it was kept. Correct it, and start the shard again.",
            ) from error
        connection.execute(
            "INSERT INTO gazette_migration VALUES (?, ?)", (version, _digest(migration))
        ).fetchall()
    return len(pending)


def _applied(connection: apsw.Connection) -> list[str]:
    exists = "SELECT 1 FROM main.sqlite_master WHERE name = 'gazette_migration'"
    if not connection.execute(exists).fetchall():
        return []
    rows = connection.execute("SELECT digest FROM gazette_migration ORDER BY version").fetchall()
    return [str(digest) for (digest,) in rows]


def _digest(migration: Migration) -> str:
    """Return the digest of a migration's SQL: without definitions, and with single spaces as white space. For
    a function, return its name: its SQL is not known."""
    if isinstance(migration, str):
        return hashlib.sha256(
            " ".join(without_definitions(migration).split()).encode()
        ).hexdigest()[:16]
    return f"function {migration.__qualname__}"
