"""SQLite stores of several databases, with migrations, and with what SQLite can do beside tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette.errors import Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog import open_at
from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.sqlite import databases as sqlite_databases
from gazette.stores.sqlite.redo_recording import RedoRecording
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.vfs_recording import VfsRecording
from gazette.testing.recovery import MemoryLog, MemoryLogs, take_over
from gazette.testing.store_tests import RecordedStoreTests
from tests.facts import raises

SHARD: Any = None
SCHEMA = """
CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY, n INTEGER);
CREATE TABLE IF NOT EXISTS archive.word (w TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log.entry (at INTEGER PRIMARY KEY, w TEXT);
"""
NAMES = ("archive", "log")


class SeveralDatabases(RecordedStoreTests):
    mode: Any

    def open(self, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA, databases=NAMES, mode=self.mode, page_size=1024)

    def change(self, store: Any, rng: random.Random) -> None:
        word = f"word {rng.randrange(20)}"
        for table in rng.choice((("word",), ("archive.word",), ("word", "archive.word"))):
            store.execute(
                f"INSERT INTO {table} VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1", (word,)
            )
        store.execute("INSERT INTO log.entry (w) VALUES (?)", (word,))

    def content(self, store: Any) -> Any:
        return [
            store.connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            for table in ("word", "archive.word", "log.entry")
        ]


class TestSeveralDatabasesRedo(SeveralDatabases):
    mode = "redo"


class TestSeveralDatabasesVfs(SeveralDatabases):
    mode = "vfs"


class World:
    """Owners of one log, one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = MemoryLog()
        self.rng = random.Random(directory.name)
        self.count = 0
        self.store: SQLiteStore | None = None
        self.recorder: Recorder

    def open(self, *args: Any, **options: Any) -> SQLiteStore:
        if self.store is not None:
            self.store.destroy()
            self.store = None
        self.count += 1
        self.recorder = take_over(self.log, self.directory / f"owner-{self.count}", self.rng)
        self.store = SQLiteStore(self.recorder, *args, **options)
        return self.store

    def commit(self) -> None:
        assert self.store is not None
        self.store.start_commit(SHARD, Checkpoint(), ()).result()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    if world.store is not None:
        world.store.destroy()


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_all_databases_are_queried_and_travelled_to(world: World, mode: Any) -> None:
    store = world.open(SCHEMA, databases=NAMES, mode=mode)
    store.execute("INSERT INTO archive.word VALUES ('a', 1)")
    store.execute("INSERT INTO word VALUES ('b', 2)")
    assert store.query("SELECT count(*) FROM archive.word") == [(1,)]
    world.commit()
    both = "SELECT w, n FROM archive.word UNION ALL SELECT w, n FROM word"
    assert store.query(both) == [("a", 1), ("b", 2)]
    with pytest.raises(NotAllowed):
        store.query("DELETE FROM archive.word")
    hints = [world.recorder.build_hints()]
    with open_at(MemoryLogs(world.log), hints, world.directory / "past") as state:
        assert state.query(both) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_a_database_that_is_not_named_any_more_stays(world: World, mode: Any) -> None:
    """And is recorded on: a store that names it again finds it."""
    world.open(SCHEMA, databases=NAMES, mode=mode)
    world.store.execute("INSERT INTO archive.word VALUES ('a', 1)")  # type: ignore[union-attr]
    world.commit()
    store = world.open(mode=mode)
    store.execute("UPDATE archive.word SET n = 2")
    world.commit()
    store = world.open(SCHEMA, databases=[*NAMES, "another"], mode=mode)
    assert store.query("SELECT * FROM archive.word") == [("a", 2)]
    assert store.query("SELECT count(*) FROM another.sqlite_master") == [(0,)]


@pytest.mark.parametrize("name", ["", "main", "Temp", "primary", "a b", "a.b", '"', "1a", "a-b"])
def test_names_of_databases(world: World, name: str) -> None:
    with raises(Invalid, says=repr(name)):
        world.open(databases=[name])


def test_too_many_databases(world: World) -> None:
    with raises(Invalid, says="200"):
        world.open(databases=[f"d{number}" for number in range(200)])


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize("written", ["word", "archive.word"])
def test_a_database_that_is_hardly_written_does_not_hold_the_horizon(
    world: World, mode: Any, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are recorded again as well, though nothing of them changes."""
    for kind in (RedoRecording, VfsRecording):
        init = kind.__init__

        def small(self: Any, *args: Any, _init: Any = init, **kwargs: Any) -> None:
            kwargs["horizon_slack"] = 128 << 10
            _init(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", small)
    store = world.open(SCHEMA, databases=NAMES, mode=mode, page_size=1024)
    store.execute("INSERT INTO archive.word VALUES ('a', 1)")
    store.execute("INSERT INTO word VALUES ('a', 1)")
    world.commit()
    for number in range(700):
        filler = world.rng.randbytes(300).hex()
        store.execute(f"INSERT OR REPLACE INTO {written} VALUES (?, ?)", (filler, number))
        store.execute(f"DELETE FROM {written} WHERE n < ?", (number - 20,))
        world.commit()
        assert world.recorder.horizon_bytes <= 2 * store.live_bytes + (512 << 10)
    hints = world.recorder.build_hints()
    begin = min(node.segments[0].first_offset for node in hints.live_nodes)
    assert begin > 128 << 10, "the test wrote too little to show anything"
    source = MemoryLogs(world.log, begin=begin)
    with open_at(source, [hints], world.directory / "pruned") as state:
        other = "word" if written != "word" else "archive.word"
        assert state.query(f"SELECT * FROM {other}") == [("a", 1)]
        assert state.query(f"SELECT count(*) FROM {written} WHERE n > 100") == [(21,)]


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH ':memory:' AS other",
        "DETACH archive",
        "PRAGMA archive.journal_mode=DELETE",
        "PRAGMA archive.wal_checkpoint",
        "PRAGMA query_only=ON",
        "PRAGMA page_size=512",
        "PRAGMA synchronous=FULL",
        "PRAGMA writable_schema=ON",
        "PRAGMA locking_mode=EXCLUSIVE",
    ],
)
def test_what_would_break_recording_is_refused_with_a_reason(world: World, sql: str) -> None:
    store = world.open(SCHEMA, databases=NAMES)
    with pytest.raises(NotAllowed, match="refused"):
        store.execute(sql).fetchall()
    store.execute("INSERT INTO archive.word VALUES ('a', 1)")
    world.commit()
    assert world.open(databases=NAMES).query("SELECT w FROM archive.word") == [("a",)]


def test_pragmas_that_read_are_not(world: World) -> None:
    store = world.open(SCHEMA, databases=NAMES)
    for name in ("journal_mode", "page_size", "synchronous", "query_only"):
        assert store.execute(f"PRAGMA {name}").fetchall()


# --- Migrations


def fill(connection: apsw.Connection) -> None:
    connection.execute("UPDATE word SET seen = 'migrated'").fetchall()


FIRST = "CREATE TABLE word (w TEXT PRIMARY KEY, n INTEGER)"
SECOND = "ALTER TABLE word ADD COLUMN seen TEXT; CREATE INDEX word_seen ON word (seen)"


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_migrations_are_applied_once_and_recorded(world: World, mode: Any) -> None:
    store = world.open(migrations=[FIRST], mode=mode)
    store.execute("INSERT INTO word VALUES ('a', 1)")
    world.commit()
    world.open(migrations=[FIRST, SECOND, fill], mode=mode)
    # Recorded with the opening: the next owner finds them without any commit.
    store = world.open(migrations=[FIRST, f"  {SECOND}\n", fill], mode=mode)
    assert store.query("SELECT * FROM word") == [("a", 1, "migrated")]
    assert store.query("SELECT count(*) FROM gazette_migration") == [(3,)]


def test_migrations_that_fail_leave_the_state_as_it_was(world: World) -> None:
    store = world.open(migrations=[FIRST])
    store.execute("INSERT INTO word VALUES ('a', 1)")
    world.commit()
    with raises(Invalid, version=3, says="missing"):
        world.open(migrations=[FIRST, SECOND, "DELETE FROM missing"])
    with pytest.raises(NotAllowed, match="COMMIT"):
        world.open(migrations=[FIRST, f"{SECOND}; COMMIT"])
    store = world.open(migrations=[FIRST])
    assert store.query("SELECT * FROM word") == [("a", 1)]
    assert store.query("SELECT version FROM gazette_migration") == [(1,)]


def test_migrations_do_not_change_and_do_not_go_back(world: World) -> None:
    world.open(migrations=[FIRST, SECOND])
    with raises(Invalid, version=2, known=1):
        world.open(migrations=[FIRST])
    with raises(Invalid, version=1):
        world.open(migrations=[FIRST + " WITHOUT ROWID", SECOND])
    with raises(Invalid, version=2, known=0):
        world.open()


# --- What SQLite can do beside tables


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_full_text_blobs_and_vacuum_travel_with_the_shard(world: World, mode: Any) -> None:
    """Virtual tables, tables without rowids, blobs of megabytes written in pieces, generated columns,
    triggers, and a database that shrinks."""
    schema = """
    CREATE VIRTUAL TABLE IF NOT EXISTS text USING fts5(body);
    CREATE VIRTUAL TABLE IF NOT EXISTS box USING rtree(id, x0, x1, y0, y1);
    CREATE TABLE IF NOT EXISTS pair (a, b, PRIMARY KEY (b, a)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS file (id INTEGER PRIMARY KEY, data BLOB);
    CREATE TABLE IF NOT EXISTS name (id INTEGER PRIMARY KEY, n, twice AS (n || n) STORED);
    CREATE TRIGGER IF NOT EXISTS on_file AFTER INSERT ON file BEGIN
        INSERT INTO pair VALUES ('file', new.id);
        INSERT INTO name VALUES (new.id, 'n' || new.id);
    END;
    """
    store = world.open(schema, mode=mode)
    blobs = {}
    for number in range(1, 6):
        blobs[number] = world.rng.randbytes(600_000)
        store.execute("INSERT INTO file (id, data) VALUES (?, zeroblob(600000))", (number,))
        with store.connection.blob_open("main", "file", "data", number, True) as blob:
            for begin in range(0, 600_000, 250_000):
                blob.write(blobs[number][begin : begin + 250_000])
        store.execute("INSERT INTO text VALUES (?)", (f"the quick fox number {number}",))
        store.execute("INSERT INTO box VALUES (?, ?, ?, 0, 1)", (number, number, number + 1))
        world.commit()
    store.execute("DELETE FROM file WHERE id < 4")
    store.execute("DELETE FROM text WHERE body MATCH 'number 2'")
    world.commit()
    before = store.live_bytes
    store.vacuum()
    with raises(Invalid, says="'nothing'"):
        store.vacuum("nothing")
    world.commit()
    if mode == "redo":  # The other mode knows the database without its WAL.
        assert store.live_bytes < before / 2
    store = world.open(schema, mode=mode)
    assert store.query("PRAGMA integrity_check") == [("ok",)]
    assert dict(store.query("SELECT id, data FROM file")) == {4: blobs[4], 5: blobs[5]}
    for read in (store.query, lambda sql: store.execute(sql).fetchall()):
        found = read("SELECT body FROM text WHERE text MATCH 'quick NOT 3'")
        assert found == [(f"the quick fox number {number}",) for number in (1, 4, 5)]
        assert read("SELECT id FROM box WHERE x0 > 2.5") == [(3,), (4,), (5,)]
    for sql in ("INSERT INTO text VALUES ('x')", "INSERT INTO text(text) VALUES ('optimize')"):
        with raises(NotAllowed, says="query()"):
            store.query(sql)
    assert len(store.query("SELECT * FROM pair")) == 5
    assert store.query("SELECT twice FROM name WHERE id = 5") == [("n5n5",)]


def test_names_that_are_found_in_a_log() -> None:
    links = [
        "/primary.db.redo-00000001",
        "/archive.db.image-000000-00000001",
        "/log.db",
        "/x.db-wal",
    ]
    assert sqlite_databases.database_names(["more"], links) == ["archive", "log", "more"]
