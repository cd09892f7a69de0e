"""Nothing that an application does to SQLite makes recording stop without a word."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette.errors import Broken, Corrupt, GazetteError, Invalid, NotAllowed, Unavailable
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.log.log_file import Branch, LogFile, offline_recorder
from gazette.recoverylog.sqlite.redo import build, files_of
from gazette.recoverylog.sqlite.redo_format import HEADER_LENGTH
from gazette.runtime.tasks import OpFuture, resolved
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.wal_changes import WalIndex
from gazette.testing.recovery import MemoryLog, replay, take_over
from tests.facts import raises

SHARD: Any = None
SCHEMA = "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v)"
COMMITS = 5


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = MemoryLog()
        self.stores: list[SQLiteStore] = []

    def open(self, **options: Any) -> SQLiteStore:
        directory = self.directory / f"owner-{len(self.stores)}"
        recorder = take_over(self.log, directory, random.Random(len(self.stores)))
        self.stores.append(SQLiteStore(recorder, SCHEMA, **options))
        return self.stores[-1]

    def recovered(self) -> int:
        """Return how many rows the next owner finds."""
        (row,) = self.open().query("SELECT count(*) FROM t")
        return int(row[0])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for store in world.stores:
        store.destroy()


def commit(store: SQLiteStore, number: int) -> None:
    store.start_commit(SHARD, Checkpoint({"s": SourceCheckpoint(number)}), ()).result()


def detach_file(connection: apsw.Connection) -> None:
    other = apsw.Connection(":memory:")
    other.execute(
        f"{SCHEMA}; CREATE TABLE gazette_checkpoint (rowid INTEGER PRIMARY KEY, checkpoint)"
    )
    before, connection.authorizer = connection.authorizer, None
    connection.deserialize("main", other.serialize("main"))
    connection.authorizer = before


def change_journal(connection: apsw.Connection) -> None:
    before, connection.authorizer = connection.authorizer, None
    try:
        connection.execute("PRAGMA journal_mode=DELETE").fetchall()
    finally:
        connection.authorizer = before


def no_authorizer(connection: apsw.Connection) -> None:
    connection.authorizer = None


@pytest.mark.parametrize(
    ("sabotage", "match"),
    [
        (lambda one: one.set_wal_hook(None), "WAL hook"),
        (lambda one: one.set_wal_hook(lambda *_: apsw.SQLITE_OK), "WAL hook"),
        (lambda one: one.wal_autocheckpoint(1), "checkpoint was made"),
        (lambda one: one.wal_autocheckpoint(1000), "WAL hook"),
        (lambda one: one.wal_autocheckpoint(0), "WAL hook"),
        (no_authorizer, "authorizer"),
        (detach_file, "another database"),
    ],
)
def test_recording_does_not_stop_without_a_word(
    world: World, sabotage: Callable[[apsw.Connection], Any], match: str
) -> None:
    """Commits that succeed are in the log; the first that is not fails, and says why."""
    store = world.open()
    store.execute("INSERT INTO t VALUES (0, 'before')")
    commit(store, 0)
    sabotage(store.connection)
    committed = 1
    with pytest.raises(GazetteError, match=match):
        for number in range(1, COMMITS + 1):
            store.execute("INSERT INTO t VALUES (?, 'after')", (number,))
            commit(store, number)
            committed += 1
    assert world.recovered() == committed


def test_the_journal_mode_cannot_be_changed(world: World) -> None:
    """SQLite needs the database for itself, and the store's own locks are in its way."""
    store = world.open()
    commit(store, 0)
    with pytest.raises(apsw.BusyError):
        change_journal(store.connection)
    store.execute("INSERT INTO t VALUES (1, 'after')")
    commit(store, 1)
    assert world.recovered() == 1


@pytest.mark.parametrize("when", ["prepare", "migration"])
def test_recording_that_is_stopped_while_the_store_opens(world: World, when: str) -> None:
    def sabotage(connection: apsw.Connection) -> None:
        connection.wal_autocheckpoint(1)

    prepare: dict[str, dict[str, Any]] = {
        "prepare": {"prepare_connection": sabotage},
        "migration": {"migrations": [sabotage]},
    }
    with pytest.raises((Broken, Corrupt), match=r"hook|checkpoint"):
        commit(world.open(**prepare[when]), 1)


def test_checkpoints_of_what_is_recorded_do_no_harm(world: World) -> None:
    store = world.open()
    for number in range(COMMITS):
        store.execute("INSERT INTO t VALUES (?, 'x')", (number,))
        commit(store, number)
        mode = (apsw.SQLITE_CHECKPOINT_PASSIVE, apsw.SQLITE_CHECKPOINT_TRUNCATE)[number % 2]
        store.connection.wal_checkpoint("main", mode)
    assert world.recovered() == COMMITS


def test_an_attached_database_that_is_replaced(world: World) -> None:
    store = world.open(databases=["archive"])
    other = apsw.Connection(":memory:")
    other.execute("CREATE TABLE a (b)")
    with pytest.raises(NotAllowed, match="ATTACH"):
        store.connection.deserialize("archive", other.serialize("main"))
    before, store.connection.authorizer = store.connection.authorizer, None
    store.connection.deserialize("archive", other.serialize("main"))
    store.connection.authorizer = before
    store.execute("INSERT INTO archive.a VALUES (1)")
    with raises(Broken, "path", actual="", says="archive"):
        commit(store, 1)


def test_a_database_that_is_replaced_in_the_vfs_mode(world: World) -> None:
    store = world.open(mode="vfs")
    detach_file(store.connection)
    store.execute("INSERT INTO t VALUES (1, 'lost')")
    with raises(Broken, "path", actual="", says="main"):
        commit(store, 1)


def test_an_index_of_the_wal_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    Path(f"{path}-shm").write_bytes(bytes(200))
    index = WalIndex(path)
    with raises(Broken, version=0):
        index.read()
    Path(f"{path}-shm").write_bytes(b"\1" + bytes(200))
    with pytest.raises(Broken, match="inconsistent"):
        index.read()
    index.close()


def redo_of(world: World, directory: Path) -> tuple[Path, list[int]]:
    """Return the only redo file with commits, played back, and where its frames begin."""
    store = world.open()
    for number in range(20):
        store.execute("INSERT INTO t VALUES (?, ?)", (number, "x" * 30))
        commit(store, number)
    replay(bytes(world.log.data), directory)
    path = directory / "primary.db.redo-00000001"
    data = path.read_bytes()
    begins = [HEADER_LENGTH]
    while begins[-1] < len(data):
        begins.append(begins[-1] + 9 + struct.unpack_from("<I", data, begins[-1])[0])
    assert begins.pop() == len(data)
    return path, begins


def test_a_redo_file_that_is_torn_inside(world: World, tmp_path: Path) -> None:
    """A length that was damaged is no end: commits follow it. Nor is a frame that ends early."""
    path, begins = redo_of(world, tmp_path / "played")
    data = path.read_bytes()
    assert len(begins) >= 20
    target = tmp_path / "built.db"

    def refused(content: bytes | bytearray) -> None:
        path.write_bytes(content)
        with pytest.raises(Corrupt, match="redo"):
            build(files_of(path.parent), "primary.db", target)
        assert not target.exists()

    for begin in begins:
        damaged = bytearray(data)
        struct.pack_into("<I", damaged, begin, len(data))
        refused(damaged)
        for place in (begin, begin + 4, begin + 8, begin + 9):
            damaged = bytearray(data)
            damaged[place] ^= 0x55
            refused(damaged)
        for cut in (begin + 1, begin + 9):
            refused(data[:cut])
    for cut in (1, HEADER_LENGTH - 1):
        refused(data[:cut])
    path.write_bytes(data)
    assert build(files_of(path.parent), "primary.db", target).pages > 0


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_a_played_back_file_that_lost_whole_commits_at_its_end(world: World, mode: Any) -> None:
    """What is left is whole in itself, and would be an older state of the shard."""
    store = world.open(mode=mode)
    sizes = []
    file = {"redo": "primary.db.redo-00000001", "vfs": "primary.db-wal"}[mode]
    for number in range(20):
        store.execute("INSERT INTO t VALUES (?, ?)", (number, "x" * 30))
        commit(store, number)
        sizes.append(len(replayed_file(world, file)))
    for lost in (1, 5):
        recorder = take_over(world.log, world.directory / f"next-{lost}", random.Random(lost))
        path = recorder.directory / file
        os.truncate(path, sizes[-1 - lost])
        with raises(
            Corrupt, "directory", says=f"{sizes[-1 - lost]} bytes, and its log has {sizes[-1]}"
        ):
            SQLiteStore(recorder, mode=mode)
        path.unlink()
        with raises(Corrupt, "directory", says=file):
            SQLiteStore(recorder, mode=mode)
    assert world.open(mode=mode).query("SELECT count(*) FROM t") == [(20,)]


def replayed_file(world: World, name: str) -> bytes:
    replay(bytes(world.log.data), world.directory / "replayed")
    return (world.directory / "replayed" / name).read_bytes()


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize("change", [True, False])
def test_a_commit_waits_for_what_it_depends_on(world: World, mode: Any, change: bool) -> None:
    """Also one that changes nothing, whose barrier has nothing to record."""
    store = world.open(mode=mode)
    commit(store, 1)
    dependency: OpFuture[Any] = resolved(None)
    if change:
        store.execute("INSERT INTO t VALUES (1, 'a')")
    store.start_commit(SHARD, Checkpoint({"s": SourceCheckpoint(1)}), [dependency]).result()
    assert dependency in world.log.dependencies


def test_settings_of_a_recording_are_checked(world: World) -> None:
    with pytest.raises(Invalid, match="connection_pragmas"):
        world.open(connection_pragmas={"wal_autocheckpoint": 1})


def test_tables_outside_of_the_recorded_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused where they are asked for; should RocksDB be led there all the same, the commit fails."""
    rocksdict = pytest.importorskip("rocksdict")
    from gazette.stores.rocksdb import options as rocksdb_options
    from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore

    def tune(options: Any) -> None:
        options.set_db_paths([rocksdict.DBPath(str(tmp_path / "elsewhere"), 1 << 40)])

    def open_store(name: str, **options: Any) -> RocksDBStore:
        recorder = take_over(MemoryLog(), tmp_path / name, random.Random(1))
        return RocksDBStore(recorder, **options)

    for options in (
        {"options": RocksDBOptions(tune=tune)},
        {"column_families": {"f": RocksDBOptions(tune=tune)}},
    ):
        with raises(Invalid, says="set_db_paths"):
            open_store("refused", **options)
    monkeypatch.setattr(rocksdb_options, "_UNRECORDABLE", frozenset())
    store = open_store("led", options=RocksDBOptions(write_buffer_bytes=64 << 10, tune=tune))
    with raises(Broken, "directory", "tables"):
        while True:  # Sooner or later RocksDB makes a table, and records that.
            store.put(b"k", random.randbytes(20_000))
            store.start_commit(SHARD, Checkpoint(), ()).result()
    store.destroy()


def test_a_build_whose_database_is_replaced(tmp_path: Path) -> None:
    """A state that is built away from its shard records its database at the end, whatever that is."""
    (tmp_path / "files").mkdir()
    log = LogFile(tmp_path / "log")
    recorder = offline_recorder("a/log", Branch.new(random.Random(1)), tmp_path / "files", log)
    store = SQLiteStore(recorder, SCHEMA)
    commit(store, 1)
    detach_file(store.connection)
    store.execute("INSERT INTO t VALUES (1, 'lost')")
    with raises(Broken, "path", actual="", says="main"):
        commit(store, 2)
    store.destroy()
    log.close()


@pytest.mark.parametrize("change", [True, False])
def test_a_commit_of_a_build_fails_with_what_it_depends_on(tmp_path: Path, change: bool) -> None:
    """Nothing of it is recorded before the end, so that its barrier is all that knows of that."""
    (tmp_path / "files").mkdir()
    log = LogFile(tmp_path / "log")
    recorder = offline_recorder("a/log", Branch.new(random.Random(1)), tmp_path / "files", log)
    store = SQLiteStore(recorder, SCHEMA)
    dependency: OpFuture[Any] = OpFuture()
    dependency.set_exception(Unavailable("another system is away"))
    if change:
        store.execute("INSERT INTO t VALUES (1, 'a')")
    with pytest.raises(Unavailable, match="another system"):
        store.start_commit(SHARD, Checkpoint({"s": SourceCheckpoint(1)}), [dependency]).result()
    store.destroy()
    log.close()
