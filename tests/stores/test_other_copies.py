"""Another copy of SQLite on the files of a store, such as Python's ``sqlite3`` in the same process."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import apsw
import pytest

from gazette.errors import Broken
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.wal_changes import WalChanges
from tests.facts import raises
from tests.fuzzing import seeds
from tests.stores.test_sqlite import SHARD, World

Mode = Literal["redo", "vfs"]
MODES: Final[list[Mode]] = ["redo", "vfs"]
COUNT: Final = "SELECT count(*) FROM t"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    for store in found.opened:
        store.destroy()


def open_store(world: World, mode: Mode, **options: Any) -> tuple[SQLiteStore, Path]:
    store = world.open(mode=mode, **options)
    return store, world.directory / f"owner-{world.count}" / "primary.db"


def commit(store: SQLiteStore, key: int) -> None:
    store.execute("INSERT INTO t VALUES (?, ?)", (key, "x" * 100))
    checkpoint = Checkpoint({"a/journal": SourceCheckpoint(read_through=key)})
    store.start_commit(SHARD, checkpoint, ()).result()


def keys(world: World) -> list[int]:
    return [key for key, _ in world.recovered()]


# What other copies do. Each returns the number of rows that it saw, or None.


def connect_and_close(path: Path) -> None:
    sqlite3.connect(path).close()


def read(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(COUNT).fetchone()[0])


def read_only(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return int(connection.execute(COUNT).fetchone()[0])


def copy_the_files(path: Path) -> None:
    """Drop the locks of this process: any close of a file does."""
    for one in path.parent.iterdir():
        one.read_bytes()


def read_in_another_process(path: Path) -> int:
    code = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone()[0])"
    command = [sys.executable, "-c", code, str(path), COUNT]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


READS: Final[list[Callable[[Path], int | None]]] = [
    connect_and_close,
    read,
    read_only,
    copy_the_files,
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", seeds(12))
def test_reads_of_another_copy_change_nothing(world: World, mode: Mode, seed: int) -> None:
    """At each moment: before the first commit, in a transaction, while another connection stays open."""
    rng = random.Random(seed)
    store, path = open_store(world, mode)
    committed = 0
    opened: list[sqlite3.Connection] = []
    with ThreadPoolExecutor(1) as thread:
        for _ in range(rng.randrange(5, 30)):
            match rng.choice(["commit", "commit", "commit", "read", "within", "open", "close"]):
                case "commit":
                    committed += 1
                    commit(store, committed)
                case "read":
                    assert rng.choice(READS)(path) in (None, committed)
                case "within":
                    committed += 1
                    store.execute("INSERT INTO t VALUES (?, 'within')", (committed,))
                    assert rng.choice(READS)(path) in (None, committed - 1)
                    store.start_commit(SHARD, Checkpoint(), ()).result()
                case "open":
                    opened.append(sqlite3.connect(path))
                    assert opened[-1].execute(COUNT).fetchall() == [(committed,)]
                case _ if opened:
                    opened.pop(rng.randrange(len(opened))).close()
            assert thread.submit(store.query, COUNT).result() == [(committed,)]
    assert keys(world) == [*range(1, committed + 1)]
    for one in opened:
        one.close()
    assert os.path.exists(f"{path}-wal")


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_reads_after_the_locks_were_dropped_changes_nothing(
    world: World, mode: Mode
) -> None:
    store, path = open_store(world, mode)
    commit(store, 1)
    copy_the_files(path)
    assert read_in_another_process(path) == 1
    commit(store, 2)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(store.query, COUNT).result() == [(2,)]
    assert keys(world) == [1, 2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("database", ["primary", "other"])
def test_a_write_of_another_copy_fails_the_store_by_name(
    world: World, mode: Mode, database: str
) -> None:
    store, path = open_store(world, mode, databases=["other"])
    store.execute("CREATE TABLE other.u (v)")
    commit(store, 1)
    commit(store, 2)
    path = path.with_name(f"{database}.db")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE foreign_table (v)")
    store.execute("INSERT INTO other.u VALUES (3)")
    with raises(Broken, path=str(path), advises="sqlite3"):
        commit(store, 3)
    assert keys(world) == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_a_deleted_wal_fails_the_store_by_name(world: World, mode: Mode) -> None:
    store, path = open_store(world, mode)
    commit(store, 1)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()
    with raises(Broken, path=f"{path}-shm", advises="sqlite3"):
        commit(store, 2)
    assert keys(world) == [1]


def test_without_locks_a_commit_finds_that_another_copy_closed_the_database(tmp_path: Path) -> None:
    """On systems that lack such locks."""
    path = tmp_path / "primary.db"
    changes = WalChanges(path, "main", 1000)
    changes.open_file(4096)
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0").fetchall()
    connection.execute("SELECT * FROM sqlite_schema").fetchall()

    def hook(_connection: object, _schema: str, frames: int) -> int:
        changes.note_commit(frames)
        return apsw.SQLITE_OK

    connection.set_wal_hook(hook)
    changes.follow(connection)
    connection.execute("CREATE TABLE t (k)")
    for key in range(3):
        connection.execute("INSERT INTO t VALUES (?)", (key,))
        found = changes.collect(0)
        assert found is not None
        assert list(found.changes)
    changes.release()
    held = sqlite3.connect(path)
    assert held.execute(COUNT).fetchall() == [(3,)]
    connection.execute("INSERT INTO t VALUES (4)")
    with raises(Broken, path=str(path), advises="sqlite3"):
        changes.collect(2)
    held.close()
    connection.close()
    changes.close()


def test_other_connections_of_apsw_may_read(world: World) -> None:
    store, path = open_store(world, "redo")
    commit(store, 1)
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    assert reader.execute(COUNT).fetchall() == [(1,)]
    reader.close()
    commit(store, 2)
    assert keys(world) == [1, 2]


def test_a_python_that_lacks_the_name_of_the_lock_takes_it_too() -> None:
    """Pythons of ``uv`` were built with old headers: their ``fcntl`` has no ``F_OFD_SETLK``."""
    code = (
        "import fcntl, sys, pytest; vars(fcntl).pop('F_OFD_SETLK', None); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    chosen = (
        f"{Path(__file__)}::test_a_process_that_reads_after_the_locks_were_dropped_changes_nothing"
    )
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", "-k", "redo", chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
