"""What a query sees: the running transaction on the shard's thread, what is committed on every other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw
import pytest

from gazette.errors import Closed, GazetteError, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sql.store import SQLStore, create_checkpoint_table, create_engine
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.recovery import MemoryLog, take_over
from tests.consumer.apps import SOURCE, Tally, frame
from tests.facts import raises

SCHEMA = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
READ = "SELECT n FROM counts WHERE word = 'a'"
ADD = "INSERT INTO counts VALUES ('a', %d) ON CONFLICT (word) DO UPDATE SET n = excluded.n"
T = TypeVar("T")


class FakeShard:
    fqn = "/gazette/items/shard-1"


SHARD: Any = FakeShard()


def elsewhere(call: Callable[..., T], *args: Any) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


def commit(store: Any) -> None:
    store.start_commit(SHARD, Checkpoint(), ()).result()


def new_recorder(directory: Path) -> Recorder:
    return take_over(MemoryLog(), directory / "files", random.Random(1))


def new_sql(directory: Path) -> SQLStore:
    engine = create_engine(f"sqlite:///{directory}/shared.db")
    create_checkpoint_table(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(SCHEMA)
    store = SQLStore(engine)
    store.restore_checkpoint(SHARD)
    return store


NEW: dict[str, Callable[[Path], Any]] = {
    "redo": lambda directory: SQLiteStore(new_recorder(directory), SCHEMA),
    "vfs": lambda directory: SQLiteStore(new_recorder(directory), SCHEMA, mode="vfs"),
    "sql": new_sql,
}


@pytest.fixture(params=NEW)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    store = NEW[request.param](tmp_path)
    yield store
    store.destroy()


def test_reading_adding_and_writing_back(store: Any) -> None:
    """As an application does for each message: five times in one transaction, and again in the next."""
    for transaction in range(2):
        for _ in range(5):
            (n,) = store.query(READ)[0] if store.query(READ) else (0,)
            store.execute(ADD % (n + 1))
            committed = [(5,)] if transaction else []
            assert [tuple(row) for row in elsewhere(store.query, READ)] == committed
        commit(store)
        assert [tuple(row) for row in store.query(READ)] == [(5 * (transaction + 1),)]


def test_rows_outlive_the_transaction(store: Any) -> None:
    store.execute(ADD % 1)
    rows = store.query("SELECT word, n FROM counts")
    store.execute("DELETE FROM counts")
    commit(store)
    store.execute(ADD % 7)
    assert [tuple(row) for row in rows] == [("a", 1)]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM counts",
        "INSERT INTO counts VALUES ('b', 1) RETURNING n",
        "SELECT 1; DELETE FROM counts",
        "CREATE TABLE other (a)",
        "SAVEPOINT mine",
        "COMMIT",
        "PRAGMA user_version=7",
        "PRAGMA query_only=OFF",
        "VACUUM",
    ],
)
def test_queries_within_a_transaction_only_read(tmp_path: Path, sql: str) -> None:
    """Also SQL that ``execute`` has prepared before, which SQLite would not look at again."""
    store = SQLiteStore(new_recorder(tmp_path), SCHEMA)
    store.execute(ADD % 1)
    if sql.startswith(("DELETE", "INSERT", "SAVEPOINT")):
        store.execute("SAVEPOINT before")
        store.execute(sql).fetchall()
        store.execute("ROLLBACK TO before")
    with raises(NotAllowed, says="query()"):
        store.query(sql)
    assert store.query("SELECT * FROM counts") == [("a", 1)]
    store.execute("DELETE FROM counts")
    store.destroy()


def test_virtual_tables_are_read_within_a_transaction(tmp_path: Path) -> None:
    """They prepare statements that write, when they are first looked at."""
    store = SQLiteStore(
        new_recorder(tmp_path), "CREATE VIRTUAL TABLE IF NOT EXISTS f USING fts5(t)"
    )
    store.execute("INSERT INTO f VALUES ('one two')")
    assert store.query("SELECT t FROM f WHERE f MATCH 'two'") == [("one two",)]
    commit(store)
    assert store.query("SELECT t FROM f WHERE f MATCH 'one'") == [("one two",)]
    store.destroy()


def test_errors_of_a_query_leave_the_transaction(tmp_path: Path) -> None:
    store = SQLiteStore(new_recorder(tmp_path), SCHEMA)
    store.execute(ADD % 1)
    for sql in ("SELECT nonsense", "SELECT abs(-9223372036854775808)", "SELECT json('{')"):
        with pytest.raises(apsw.SQLError):
            store.query(sql)
    commit(store)
    assert elsewhere(store.query, READ) == [(1,)]
    store.execute(ADD % 2)
    with pytest.raises(apsw.ConstraintError):
        store.execute("INSERT OR ROLLBACK INTO counts VALUES ('a', 9)")
    with raises(GazetteError, advises="SAVEPOINT"):
        store.query(READ)
    store.destroy()
    for call in (store.query, lambda sql: elsewhere(store.query, sql)):
        with pytest.raises(Closed, match="destroyed"):
            call(READ)


def test_a_query_waits_for_the_commit_before_it(tmp_path: Path) -> None:
    """A SQL store commits on another thread: its own thread never reads what was before."""
    store = new_sql(tmp_path)
    for n in range(20):
        store.execute(ADD % n)
        done = store.start_commit(SHARD, Checkpoint(), ())
        assert [tuple(row) for row in store.query(READ)] == [(n,)]
        done.result()
    store.destroy()


def test_what_a_json_store_reads(tmp_path: Path) -> None:
    store = JSONFileStore(new_recorder(tmp_path), dict[str, int], dict)
    for _ in range(5):
        store.state["a"] = store.read().get("a", 0) + 1
    assert store.read() == {"a": 5}
    assert elsewhere(store.read) == {}
    commit(store)
    assert elsewhere(store.read) == {"a": 5}


def test_views_of_the_running_transaction(tmp_path: Path) -> None:
    """A view that the shard's thread opens has the transaction so far; random writes against a dict."""
    pytest.importorskip("rocksdict")
    rng = random.Random(7)
    store = RocksDBStore(new_recorder(tmp_path), column_families=["f"])
    committed: dict[bytes, bytes] = {}
    model: dict[bytes, bytes] = {}
    for _ in range(400):
        key = b"k%d" % rng.randrange(30)
        match rng.randrange(8):
            case 0:
                store.delete(key, column_family="f")
                model.pop(key, None)
            case 1:
                end = key + b"5"
                store.delete_range(key, end, column_family="f")
                model = {k: v for k, v in model.items() if not key <= k < end}
            case 2:
                commit(store)
                committed = dict(model)
            case _:
                value = b"%d" % rng.randrange(1000)
                store.put(key, value, column_family="f")
                model[key] = value
        with store.view() as ours, elsewhere(store.view) as theirs:
            store.put(b"later", b"", column_family="f")
            assert dict(ours.iterate(column_family="f")) == model
            down = list(ours.iterate(b"k", reverse=True, column_family="f"))
            assert down == sorted(model.items(), reverse=True)
            assert ours.get(key, column_family="f") == model.get(key)
            assert dict(theirs.iterate(column_family="f")) == committed
            store.delete(b"later", column_family="f")
    store.destroy()


class Reader(Tally):
    """Counts words by what a query says, for stores of any kind."""

    def __init__(self, kind: str, directory: Path) -> None:
        super().__init__()
        self.kind = kind
        self.engine: Any = None
        if kind == "sql":
            new_sql(directory).destroy()
            self.engine = create_engine(f"sqlite:///{directory}/shared.db")

    def new_store(self, shard: Any, recorder: Any) -> Any:
        if self.kind == "sql":
            return SQLStore(self.engine)
        return SQLiteStore(recorder, SCHEMA)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        (n,) = store.query(READ)[0] if store.query(READ) else (0,)
        store.execute(ADD % (n + 1))


@pytest.mark.parametrize("kind", ["sqlite", "sql"])
def test_an_application_that_reads_adds_and_writes_back(kind: str, tmp_path: Path) -> None:
    """On the thread that the runtime gives a shard; through transactions and a crash."""
    with AppDriver(Reader(kind, tmp_path), tmp_path, [SOURCE], log=kind != "sql") as driver:
        for round_ in range(3):
            driver.feed(SOURCE, b"".join(frame("a", round_ * 5 + n + 1) for n in range(5)))
            driver.run()
            assert [tuple(row) for row in driver.store.query(READ)] == [(5 * (round_ + 1),)]
            if round_ == 1:
                driver.crash()
                driver.run()


class WritesEarly(Tally):
    """Changes its state in ``new_store``, where no transaction commits it."""

    def __init__(self, directory: Path, kind: str) -> None:
        super().__init__()
        self.directory = directory
        self.kind = kind
        self.engine = create_engine(f"sqlite:///{directory}/shared.db")
        create_checkpoint_table(self.engine)
        with self.engine.begin() as connection:
            connection.exec_driver_sql(SCHEMA)

    def new_store(self, shard: Any, recorder: Any) -> Any:
        match self.kind:
            case "rows":
                store: Any = SQLiteStore(recorder, SCHEMA)
                store.execute(ADD % 1)
            case "table":
                store = SQLiteStore(recorder, databases=["archive"])
                store.execute("CREATE TABLE archive.counts (word TEXT)")
            case "rocksdb":
                store = RocksDBStore(recorder)
                store.put(b"a", b"1")
            case "sql":
                store = SQLStore(self.engine)
                store.execute(ADD % 1)
            case _:
                # Reads are permitted, and SQL that changes nothing.
                store = SQLiteStore(recorder, SCHEMA)
                assert store.execute(READ).fetchall() == []
                store.execute("UPDATE counts SET n = 7")
        return store

    def consume_message(self, *arguments: Any) -> None:
        return None


@pytest.mark.parametrize("kind", ["rows", "table", "rocksdb", "sql"])
def test_writes_in_new_store_are_refused(tmp_path: Path, kind: str) -> None:
    """No transaction would commit them, and locks of a database would make the shard wait for ever."""
    with (
        AppDriver(WritesEarly(tmp_path, kind), tmp_path, [SOURCE], log=kind != "sql") as driver,
        raises(NotAllowed, shard="driven-shard", says="new_store"),
    ):
        driver.run()


def test_a_store_may_be_read_in_new_store(tmp_path: Path) -> None:
    with AppDriver(WritesEarly(tmp_path, "reads"), tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, frame("a", 1))
        for _ in range(2):
            driver.run()
            driver.crash()
