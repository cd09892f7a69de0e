"""The SQLite store as applications use it: transactions, queries beside them, and what is refused."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw
import pytest

from gazette.errors import Closed, Corrupt, GazetteError, Invalid, NotAllowed, TooLarge
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.log.log_file import Branch, LogFile
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.sqlite.redo import materialize
from gazette.recoverylog.sqlite.redo_format import PageChange, encode_commit
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, MemoryLog, replay, take_over
from tests.facts import raises

SHARD: Any = None
T = TypeVar("T")
SCHEMA = "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v)"


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = MemoryLog()
        self.count = 0
        self.opened: list[SQLiteStore] = []

    def open(self, schema: str = SCHEMA, **options: Any) -> SQLiteStore:
        """Open the next owner's store."""
        self.count += 1
        directory = self.directory / f"owner-{self.count}"
        recorder = take_over(self.log, directory, random.Random(self.count))
        store = SQLiteStore(recorder, schema, **options)
        self.opened.append(store)
        return store

    def recovered(self) -> list[tuple[Any, ...]]:
        """Return table ``t`` as stock SQLite finds it in the played-back log."""
        replay(bytes(self.log.data), self.directory / "played")
        if not (self.directory / "played" / "primary.db").exists():
            materialize(self.directory / "played", "primary.db")
        connection = apsw.Connection(str(self.directory / "played" / "primary.db"))
        try:
            return connection.execute("SELECT k, v FROM t ORDER BY k").fetchall()
        finally:
            connection.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for store in world.opened:
        store.destroy()


ROWS = 12_000
"""So many small rows take some 250 pages of 512 bytes. 4,000 frames of the WAL are due for a checkpoint."""


def wal_of(world: World) -> Path:
    """Return the WAL of the last owner."""
    return world.directory / f"owner-{world.count}" / "primary.db-wal"


class Pause:
    """A function of SQL, ``pause()``, in which a query stays until ``end``."""

    def __init__(self) -> None:
        self._begun, self._ended = threading.Event(), threading.Event()

    def register(self, connection: apsw.Connection) -> None:
        connection.create_scalar_function("pause", self._call, 0)

    def _call(self, *_: Any) -> None:
        self._begun.set()
        self._ended.wait(60)

    def wait(self) -> None:
        """Return once a query is in it."""
        assert self._begun.wait(60)

    def end(self) -> None:
        """Let queries go on."""
        self._ended.set()


def elsewhere(call: Callable[..., T], *args: Any) -> T:
    """Call on another thread, which sees what is committed."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def commit(store: SQLiteStore) -> None:
    store.start_commit(SHARD, Checkpoint({"s": SourceCheckpoint(1)}), ()).result()


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT",
        "END",
        "ROLLBACK",
        "BEGIN",
        "INSERT INTO t VALUES (2, 'b'); COMMIT; INSERT INTO t VALUES (3, 'c')",
        "ATTACH 'other.db' AS other",
        "ATTACH '' AS other",
        "PRAGMA journal_mode=DELETE",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "PRAGMA wal_autocheckpoint=1",
        "PRAGMA main.locking_mode=EXCLUSIVE",
    ],
)
def test_what_would_break_recording_is_refused(world: World, mode: Any, sql: str) -> None:
    """Before it does anything: what the transaction did before is still there, and is committed."""
    store = world.open(mode=mode)
    commit(store)
    store.execute("INSERT INTO t VALUES (1, 'a')")
    for execute in (store.execute, store.connection.execute):
        with pytest.raises(NotAllowed):
            execute(sql).fetchall()
        assert store.connection.in_transaction
        assert elsewhere(store.query, "SELECT * FROM t") == []
        store.execute("DELETE FROM t WHERE k = 2")
    commit(store)
    with pytest.raises(NotAllowed):
        store.connection.execute(sql).fetchall()
    assert world.recovered() == [(1, "a")]


def test_a_schema_with_a_transaction_is_refused(world: World) -> None:
    """And nothing stays open of the store that was not made."""
    with pytest.raises(NotAllowed, match="runtime"):
        world.open(f"BEGIN; {SCHEMA}; COMMIT")
    with pytest.raises(apsw.SQLError):
        world.open("CREATE TABLE broken (")
    assert not [name for name in open_files() if name.startswith(str(world.directory))], (
        "descriptors were left"
    )


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def test_savepoints_are_the_applications(world: World) -> None:
    store = world.open()
    store.execute("SAVEPOINT s")
    store.execute("INSERT INTO t VALUES (1, 'undone')")
    store.execute("ROLLBACK TO s")
    store.execute("RELEASE s")
    with store.connection:
        store.execute("INSERT INTO t VALUES (2, 'kept')")
    commit(store)
    assert world.recovered() == [(2, "kept")]


def test_sql_that_was_seen_before_begins_a_transaction(world: World) -> None:
    """Also behind a savepoint of the connection, whose end commits if it is the outermost."""
    store = world.open()
    insert = "INSERT INTO t VALUES (?, 'a')"
    for key in range(0, 30, 10):
        store.execute(insert, (key,))
        assert store.connection.in_transaction
        commit(store)
        store.connection.execute("SAVEPOINT s")
        store.execute(insert, (key + 1,))
        store.connection.execute("RELEASE s")
        store.execute(insert, (key + 2,))
        assert store.connection.in_transaction
        commit(store)
    assert [key for key, _ in world.recovered()] == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_a_rollback_by_an_error_is_not_passed_over(world: World) -> None:
    """An application that catches it would go on with half a transaction."""
    store = world.open()
    insert = "INSERT INTO t VALUES (?, 'lost')"
    for key in (1, 2):
        store.execute(insert, (key,))
    with pytest.raises(apsw.ConstraintError):
        store.execute("INSERT OR ROLLBACK INTO t VALUES (1, 'again')")
    end = len(world.log.data)
    for sql in ("INSERT INTO t VALUES (3, 'next')", insert):
        with raises(GazetteError, advises="SAVEPOINT"):
            store.execute(sql, (3,) if sql == insert else ())
        with raises(GazetteError, advises="SAVEPOINT"):
            commit(store)
    assert len(world.log.data) == end


def test_a_rollback_by_an_interrupt_is_not_passed_over(world: World) -> None:
    """SQLite then rolls the whole transaction back, not only the statement."""
    store = world.open()
    insert = "INSERT INTO t VALUES (?, 'lost')"
    for key in (1, 2):
        store.execute(insert, (key,))
    store.connection.set_progress_handler(lambda: True, 1)
    with pytest.raises(apsw.InterruptError):
        store.execute(insert, (3,))
    store.connection.set_progress_handler(None)
    with raises(GazetteError, advises="SAVEPOINT"):
        store.execute(insert, (4,))


def test_vacuum(world: World) -> None:
    """Between transactions, and recorded with the next."""
    store = world.open()
    store.executemany("INSERT INTO t VALUES (?, ?)", [(k, bytes(2000)) for k in range(500)])
    commit(store)
    store.execute("DELETE FROM t WHERE k > 3")
    with raises(NotAllowed, says="VACUUM"):
        store.vacuum()
    commit(store)
    before = store.live_bytes
    store.vacuum()
    commit(store)
    assert store.live_bytes < before / 4
    assert [k for k, _ in world.recovered()] == [0, 1, 2, 3]
    assert world.open().query("SELECT count(*) FROM t") == [(4,)]


def size_of(store: SQLiteStore, database: str) -> int:
    ((pages,),) = store.query(f"PRAGMA {database}.page_count")
    return int(pages) * 4096


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize("database", ["main", "other"])
def test_vacuum_says_its_cost_before_it_begins(world: World, mode: Any, database: str) -> None:
    """The size counts the pages in use. A refusal changes nothing, and the limit itself is fine."""
    store = world.open(mode=mode, databases=["other"])
    store.execute("CREATE TABLE IF NOT EXISTS other.u (k INTEGER PRIMARY KEY, v)")
    table = "t" if database == "main" else "other.u"
    rows = [(k, bytes(2000)) for k in range(500)]
    store.executemany(f"INSERT INTO {table} VALUES (?, ?)", rows)
    commit(store)
    store.execute(f"DELETE FROM {table} WHERE k >= 250")
    commit(store)
    before = size_of(store, database)
    with raises(TooLarge, path="limit_bytes", database=database, limit_bytes=4096) as raised:
        store.vacuum(database, limit_bytes=4096)
    size = raised.value.facts["bytes"]
    assert 250 * 2000 < size < before * 3 / 4
    assert raised.value.facts["memory_bytes"] == 2 * size
    assert size_of(store, database) == before
    with raises(TooLarge, "bytes"):
        store.vacuum(database, limit_bytes=size - 1)
    store.vacuum(database, limit_bytes=size)
    commit(store)
    assert size_of(store, database) <= size
    assert world.open(mode=mode).query(f"SELECT count(*) FROM {table}") == [(250,)]


def test_a_commit_that_no_frame_holds_is_refused_by_name() -> None:
    changes = [PageChange(page, ((0, b"x" * 4096),), whole=True) for page in range(1, 9)]
    whole = encode_commit(8, iter(changes))
    assert encode_commit(8, iter(changes), bytes_max=len(whole)) == whole
    with raises(TooLarge, path="commit", bytes_max=8192):
        encode_commit(8, iter(changes), bytes_max=8192)


def test_a_commit_of_each_page_is_in_memory_once(tmp_path: Path) -> None:
    """VACUUM makes one. The file of the log holds another copy of its frame until the append ends."""
    branch, log = Branch.new(random.Random(1)), LogFile(tmp_path / "log")
    (tmp_path / "owner").mkdir()
    recorder = Recorder(branch.fsm(LOG), branch.author, tmp_path / "owner", log, LOG, 0)
    store = SQLiteStore(recorder, SCHEMA)
    rows = random.Random(2)
    try:
        store.executemany(
            "INSERT INTO t VALUES (?, ?)", ((k, rows.randbytes(2000)) for k in range(4000))
        )
        commit(store)
        store.execute("DELETE FROM t WHERE k % 2 = 0")
        commit(store)
        store.vacuum()
        begin = log.end
        tracemalloc.start()
        commit(store)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert log.end - begin > 4_000_000
        assert peak < 2.8 * (log.end - begin)
    finally:
        store.destroy()
        log.close()


@pytest.mark.parametrize("size", [0, 100, 1000, 4097, 131072, -4096])
def test_page_sizes_that_are_none(world: World, size: int) -> None:
    with pytest.raises(Invalid, match="page_size"):
        world.open(page_size=size)


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize("size", [512, 65536])
def test_a_database_keeps_its_page_size(world: World, mode: Any, size: int) -> None:
    """What a later owner asks for does not matter."""
    store = world.open(mode=mode, page_size=size)
    store.executemany("INSERT INTO t VALUES (?, ?)", [(k, os.urandom(300)) for k in range(300)])
    commit(store)
    expected = store.query("SELECT * FROM t")
    store.destroy()
    again = world.open(mode=mode, page_size=4096)
    assert again.query("PRAGMA page_size") == [(size,)]
    again.execute("INSERT INTO t VALUES (1000, 'x')")
    commit(again)
    assert world.recovered() == [*expected, (1000, "x")]


def test_another_mode_is_refused(world: World) -> None:
    """The log has this database in a form that the other mode cannot go on with."""
    with raises(Invalid, says="'wal'"):
        world.open(mode="wal")
    commit(world.open(mode="redo"))
    with raises(Invalid, advises="'redo'"):
        world.open(mode="vfs")
    world.log = MemoryLog()
    commit(world.open(mode="vfs"))
    with raises(Invalid, advises="'vfs'"):
        world.open(mode="redo")


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO t VALUES (1, 2)",
        "DELETE FROM t",
        "CREATE TABLE u (a)",
        "BEGIN",
        "ATTACH 'x' AS y",
        "PRAGMA query_only=OFF",
        "PRAGMA wal_checkpoint",
        "PRAGMA user_version=3",
        "VACUUM",
    ],
)
def test_queries_only_read(world: World, sql: str) -> None:
    store = world.open()
    commit(store)
    with raises(NotAllowed, says="query()"):
        store.query(sql)
    assert store.query("SELECT count(*) FROM t WHERE k < abs(-5)") == [(0,)]
    assert store.query("PRAGMA user_version") == [(0,)]
    with pytest.raises(apsw.SQLError):
        store.query("SELECT nonsense")
    assert store.query(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 3)"
        " SELECT max(i) FROM n"
    ) == [(3,)]


def test_queries_see_whole_transactions_while_the_writer_works(world: World) -> None:
    """From many threads, through checkpoints, which they hold up at times; nothing of it is lost."""
    store = world.open(readers=3, page_size=512)
    store.executemany("INSERT INTO t VALUES (?, 0)", [(k,) for k in range(ROWS)])
    commit(store)
    stop = threading.Event()

    def read() -> int:
        last = 0
        while not stop.is_set():
            rows = store.query("SELECT min(v), max(v), count(*) FROM t")
            low, high, count = rows[0]
            assert low == high
            assert count == ROWS
            assert low >= last
            last = low
        return last

    with ThreadPoolExecutor(5) as pool:
        readers = [pool.submit(read) for _ in range(5)]
        for _ in range(150):
            store.execute("UPDATE t SET v = v + 1")
            commit(store)
        stop.set()
        assert max(reader.result(timeout=30) for reader in readers) <= 150
    assert world.recovered() == [(k, 150) for k in range(ROWS)]


def test_a_reader_that_stays_holds_up_a_checkpoint_and_no_commit(world: World) -> None:
    """The WAL is emptied once it has gone."""
    pause = Pause()
    store = world.open(page_size=512, prepare_connection=pause.register)
    store.execute("INSERT INTO t VALUES (-1, 'first')")
    commit(store)
    large = "x" * 50_000  # A hundred pages: 4,000 are due for a checkpoint.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.query, "SELECT pause() FROM t")
        pause.wait()
        for k in range(60):
            store.execute("INSERT INTO t VALUES (?, ?)", (k, large))
            commit(store)
        held = wal_of(world).stat().st_size
        assert held > 60 * 50_000
        pause.end()
        reading.result(timeout=30)
    store.execute("INSERT INTO t VALUES (100, 'last')")
    commit(store)
    assert wal_of(world).stat().st_size < held / 10
    assert len(world.recovered()) == 62

    # A cursor of the writer itself, which was not read to its end, is such a reader as well.
    unread = store.execute("SELECT * FROM t")
    next(unread)
    for k in range(200, 260):
        store.execute("INSERT INTO t VALUES (?, ?)", (k, large))
        commit(store)
    unread.close()
    assert len(world.recovered()) == 122


def test_destroying_ends_queries(world: World) -> None:
    """Those that run, those that wait for their turn, and those that come later."""
    running = threading.Event()

    def runs(*_: Any) -> int:
        running.set()
        return 1

    def register(connection: apsw.Connection) -> None:
        connection.create_scalar_function("runs", runs, 0)

    store = world.open(readers=1, prepare_connection=register)
    store.executemany("INSERT INTO t VALUES (?, 0)", [(k,) for k in range(2000)])
    commit(store)
    endless = "SELECT count(*) FROM (SELECT 1 WHERE runs()), t a, t b, t c, t d"
    with ThreadPoolExecutor(2) as pool:
        queries = [pool.submit(store.query, endless) for _ in range(2)]
        assert running.wait(30)
        store.destroy()
        for query in queries:
            with pytest.raises(Closed, match="destroyed"):
                query.result(timeout=20)
    with pytest.raises(Closed, match="destroyed"):
        store.query("SELECT 1")
    assert not [name for name in open_files() if name.startswith(str(world.directory))]


def test_a_foreign_checkpoint_is_noticed(world: World) -> None:
    """It moves changes to where the recording does not look for them."""
    store = world.open()
    commit(store)
    store.execute("INSERT INTO t VALUES (1, 'a')")
    store._commit()
    store.connection.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
    with pytest.raises(Corrupt):
        commit(store)


def test_redo_that_contradicts_itself_is_refused(world: World) -> None:
    """A frame that is not what was written, a file or an image that is missing."""
    store = world.open()
    for k in range(20):
        store.execute("INSERT INTO t VALUES (?, ?)", (k, os.urandom(100)))
        commit(store)
    played = world.directory / "played"

    def attempt(damage: Any) -> None:
        replay(bytes(world.log.data), played)
        damage()
        before = sorted(path.name for path in played.iterdir())
        with pytest.raises(Corrupt):
            materialize(played, "primary.db")
        assert sorted(path.name for path in played.iterdir()) == before

    def flip() -> None:
        path = played / "primary.db.redo-00000001"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    attempt(flip)
    for _ in range(2):
        store.destroy()
        store = world.open()
        commit(store)
    attempt(lambda: (played / "primary.db.redo-00000002").unlink())
    attempt(lambda: os.truncate(played / "primary.db.redo-00000001", 200))


def test_a_cursor_that_its_caller_keeps_is_not_used_again(world: World) -> None:
    store = world.open()
    insert = "INSERT INTO t VALUES (?, ?)"
    store.execute(insert, (1, "a"))
    kept = store.execute(insert, (2, "b"))
    other = store.execute(insert, (3, "c"))
    assert kept is not other
    rows = store.execute("SELECT k FROM t ORDER BY k")
    assert next(rows) == (1,)
    for key in range(4, 8):
        store.execute(insert, (key, "d"))
    assert store.execute("SELECT count(*) FROM t").fetchall() == [(7,)]
    assert next(rows) == (2,)
    assert kept.fetchall() == other.fetchall() == []
    commit(store)
    assert [key for key, _ in world.recovered()] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_sql_is_executed_alike_whether_or_not_it_was_seen_before(world: World, times: int) -> None:
    store = world.open()
    for number in range(times):
        key = 10 * number
        store.execute("INSERT INTO t VALUES (?, 'a')", (key,))
        returned = store.execute("INSERT INTO t VALUES (?, 'b') RETURNING k, v", (key + 1,))
        assert returned.fetchall() == [(key + 1, "b")]
        two = "INSERT INTO t VALUES (?, 'c'); INSERT INTO t VALUES (?, 'd')"
        store.execute(two, (key + 2, key + 3)).fetchall()
        selected = "UPDATE t SET v = 'e' WHERE k = ?; SELECT v FROM t WHERE k = ?"
        assert store.execute(selected, (key, key)).fetchall() == [("e",)]
        assert store.execute("SELECT v FROM t WHERE k < 0").fetchall() == []
        with pytest.raises(apsw.ConstraintError):
            store.execute("INSERT INTO t VALUES (?, 'a')", (key,))
        with raises(NotAllowed):
            store.execute("COMMIT")
    commit(store)
    assert len(world.recovered()) == 4 * times


def test_a_function_of_sql_may_execute_sql_itself(world: World) -> None:
    def register(connection: apsw.Connection) -> None:
        connection.create_scalar_function("also", also, 1)

    def also(*keys: Any) -> Any:
        if keys[0] < 100:
            stores[0].execute(insert, (keys[0] + 100,))
        return keys[0]

    insert = "INSERT INTO t VALUES (?, 'a')"
    stores: list[SQLiteStore] = []
    stores.append(world.open(prepare_connection=register))
    for key in range(5):
        stores[0].execute("INSERT INTO t VALUES (also(?), 'b')", (key,))
    commit(stores[0])
    assert [key for key, _ in world.recovered()] == [*range(5), *range(100, 105)]


def test_a_caller_may_close_what_execute_returns(world: World) -> None:
    store = world.open()
    for key in range(4):
        store.execute("INSERT INTO t VALUES (?, 'a')", (key,)).close()
    commit(store)
    assert [key for key, _ in world.recovered()] == [0, 1, 2, 3]


def test_an_error_of_a_function_about_another_cursor_is_the_callers(world: World) -> None:
    def register(connection: apsw.Connection) -> None:
        connection.create_scalar_function("fail", fail, 1)

    def fail(*keys: Any) -> Any:
        called.append(keys[0])
        if keys[0]:
            closed.execute("SELECT 1")
        return keys[0]

    called: list[Any] = []
    closed = apsw.Connection(":memory:").cursor()
    closed.close()
    store = world.open(prepare_connection=register)
    insert = "INSERT INTO t VALUES (fail(?), 'a')"
    store.execute(insert, (0,))
    with pytest.raises(apsw.CursorClosedError):
        store.execute(insert, (1,))
    assert called == [0, 1]
    commit(store)
    assert [key for key, _ in world.recovered()] == [0]


def test_the_tracer_of_a_connection_sees_each_statement(world: World) -> None:
    store = world.open()
    seen: list[str] = []

    def trace(_cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
        seen.append(sql)
        return True

    insert = "INSERT INTO t VALUES (?, 'a')"
    store.execute(insert, (1,))
    store.connection.exec_trace = trace
    for key in (2, 3):
        store.execute(insert, (key,))
        store.execute(f"INSERT INTO t VALUES ({key + 10}, 'b')")
    assert len(seen) == 4


def test_many_different_statements_do_not_fill_the_memory(world: World) -> None:
    store = world.open()
    long = "a" * 100_000
    tracemalloc.start()
    try:
        for key in range(600):
            store.execute(f"INSERT INTO t VALUES ({key}, '{long}')")
        assert tracemalloc.get_traced_memory()[0] < 300 * len(long)
    finally:
        tracemalloc.stop()
    commit(store)
    assert len(world.recovered()) == 600


_DROPPED = """
import gc, random, sys, threading
from pathlib import Path
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import MemoryLog, take_over

recorder = take_over(MemoryLog(), Path(sys.argv[1]), random.Random(1))
store = SQLiteStore(recorder, "CREATE TABLE t (k)", mode=sys.argv[2])
store.execute("INSERT INTO t VALUES (1)")
if sys.argv[3] == "collected":
    del store
    gc.collect()
if sys.argv[3] == "collected elsewhere":
    del store
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize("when", ["at exit", "collected", "collected elsewhere"])
def test_a_store_that_is_dropped_in_a_transaction(tmp_path: Path, mode: str, when: str) -> None:
    """Its transaction is rolled back, and the process goes on."""
    done = subprocess.run(
        [sys.executable, "-c", _DROPPED, tmp_path / "owner", mode, when],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _in_transaction(store: SQLiteStore) -> object:
    return store.execute("INSERT INTO t VALUES (1, 'a')")


def _with_rows_to_read(store: SQLiteStore) -> object:
    store.executemany("INSERT INTO t VALUES (?, 'a')", ((key,) for key in range(9)))
    return store.execute("SELECT * FROM t").fetchone()


def _after_a_commit(store: SQLiteStore) -> None:
    _in_transaction(store)
    commit(store)


def _after_a_query(store: SQLiteStore) -> object:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(store.query, "SELECT * FROM t").result()


def _after_an_error(store: SQLiteStore) -> None:
    with pytest.raises(apsw.SQLError):
        store.execute("INSERT INTO nothing VALUES (1)")


@pytest.mark.parametrize("mode", ["redo", "vfs"])
@pytest.mark.parametrize("databases", [[], ["other"]])
@pytest.mark.parametrize(
    "use",
    [id, _in_transaction, _with_rows_to_read, _after_a_commit, _after_a_query, _after_an_error],
)
def test_a_store_that_is_dropped_leaves_nothing(
    tmp_path: Path, mode: Any, databases: list[str], use: Callable[[SQLiteStore], object]
) -> None:
    """No object, no descriptor, no file system of SQLite."""
    gc.collect()  # What other tests have left.
    before = (len(os.listdir("/proc/self/fd")), apsw.vfs_names())
    dropped = []
    for number in range(3):
        recorder = take_over(MemoryLog(), tmp_path / str(number), random.Random(number))
        store = SQLiteStore(recorder, SCHEMA, mode=mode, databases=databases)
        use(store)
        dropped.append(weakref.ref(store))
        del store, recorder
    gc.collect()
    assert [one() for one in dropped] == [None] * 3
    assert (len(os.listdir("/proc/self/fd")), apsw.vfs_names()) == before
