"""SQL databases for `fold_app`: a real PostgreSQL, and a file of SQLite."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import sqlalchemy as sa

from gazette.stores.sql.store import (
    create_checkpoint_table,
    create_engine,
    create_timer_table,
)
from tests.faults.fold_app import SQL_TABLE, SQL_URL_ENV
from tools.soak.postgres import PostgresServer


def prepare(url: str) -> None:
    """Create the tables that `fold_app` needs."""
    engine = create_engine(url)
    create_checkpoint_table(engine)
    create_timer_table(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(SQL_TABLE))
    engine.dispose()


@contextlib.contextmanager
def sql_environ(directory: Path, kinds: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield what `fold_app` needs in its environment for stores of these kinds."""
    environ: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if "postgres" in kinds:
            environ[SQL_URL_ENV.format("POSTGRES")] = stack.enter_context(PostgresServer()).url
        if "sqlfile" in kinds:
            environ[SQL_URL_ENV.format("SQLFILE")] = f"sqlite:///{directory}/folds.db"
        for url in environ.values():
            prepare(url)
        yield environ
