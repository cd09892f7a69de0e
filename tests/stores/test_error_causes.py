"""Errors of a store cost no message: the store says which are the message's, before any policy does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette import Envelope, ErrorCause, PoisonPolicy, Publisher
from gazette.consumer.application import Store
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.contract.error_cause import cause_of
from gazette.consumer.contract.poison import DeadLetter
from gazette.errors import Aborted, Invalid, Unavailable
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from tests.consumer.apps import SOURCE, Tally, Word, frame

sa = pytest.importorskip("sqlalchemy")

from gazette.stores.sql.store import SQLStore, create_checkpoint_table, create_engine  # noqa: E402
from tests.facts import is_advised, raises  # noqa: E402
from tests.stores.test_sql import Postgres, postgres  # noqa: E402

__all__ = ["postgres"]

MESSAGE, TRANSIENT, STORE = ErrorCause.MESSAGE, ErrorCause.TRANSIENT, ErrorCause.STORE
ABORTED = ErrorCause.ABORTED
DEAD = "dead/letters"
SETUP = (
    "DROP TABLE IF EXISTS item",
    "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT UNIQUE, n SMALLINT CHECK (n >= 0))",
    "INSERT INTO item VALUES (1, 'one', 1), (2, 'two', 2)",
)


def raising(state: str) -> str:
    """Return SQL that fails with an SQLSTATE that is hard to come by."""
    return f"DO $$ BEGIN RAISE EXCEPTION 'made up' USING ERRCODE = '{state}'; END $$"


@pytest.fixture(scope="module")
def engine(postgres: Postgres) -> Iterator[Any]:
    engine = create_engine(postgres.url)
    create_checkpoint_table(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def item(engine: Any) -> None:
    with engine.begin() as connection:
        for sql in SETUP:
            connection.exec_driver_sql(sql)


def causes(engine: Any, run: Callable[[Any], Any]) -> set[ErrorCause]:
    """Return what becomes of an error, from SQLAlchemy and from the driver."""
    store = SQLStore(engine)
    found: set[ErrorCause] = set()

    def by_driver(connection: Any) -> Any:
        return connection.connection.cursor()

    executors: tuple[Callable[[Any], Any], ...] = (lambda connection: connection, by_driver)
    for executor in executors:
        with engine.connect() as connection:
            with pytest.raises(Exception) as raised:
                run(executor(connection))
            found.add(cause_of(raised.value, store.classify_error))
            connection.invalidate()
    return found


def executing(*statements: str) -> Callable[[Any], None]:
    def run(one: Any) -> None:
        for sql in statements:
            getattr(one, "exec_driver_sql", one.execute)(sql)

    return run


@pytest.mark.parametrize(
    ("statements", "cause"),
    [
        (["INSERT INTO item VALUES (1, 'x', 1)"], MESSAGE),
        (["INSERT INTO item VALUES (3, 'x', -1)"], MESSAGE),
        (["INSERT INTO item VALUES (3, 'x', 99999)"], MESSAGE),
        (["INSERT INTO item VALUES (NULL, 'x', 1)"], MESSAGE),
        (["SELECT 'x'::integer"], MESSAGE),
        (["SELECT '{'::json"], MESSAGE),
        (["SELECT 1 / 0"], MESSAGE),
        (["SELECT '2026-02-30'::date"], MESSAGE),
        (
            [
                "INSERT INTO item SELECT 3, string_agg(md5(i::text), ''), 1 FROM generate_series(1, 1000) i"
            ],
            MESSAGE,
        ),
        ([raising("P0001")], MESSAGE),
        (["SET statement_timeout = '20ms'", "SELECT pg_sleep(10)"], TRANSIENT),
        (["SET TRANSACTION READ ONLY", "INSERT INTO item VALUES (3, 'x', 1)"], TRANSIENT),
        (["SELECT pg_terminate_backend(pg_backend_pid())", "SELECT 1"], TRANSIENT),
        ([raising("53100")], TRANSIENT),
        ([raising("53300")], TRANSIENT),
        ([raising("40001")], ABORTED),
        ([raising("40P01")], ABORTED),
        ([raising("08006")], TRANSIENT),
        ([raising("57P03")], TRANSIENT),
        (["SELECT * FROM missing"], STORE),
        (["SELECT missing FROM item"], STORE),
        (["SELECT nonsense("], STORE),
        ([raising("42501")], STORE),
        ([raising("XX001")], STORE),
        ([raising("58030")], STORE),
    ],
)
@pytest.mark.usefixtures("item")
def test_what_postgresql_says(engine: Any, statements: list[str], cause: ErrorCause) -> None:
    actual = causes(engine, executing(*statements))
    if cause is MESSAGE:
        assert actual == {MESSAGE}
    else:
        assert MESSAGE not in actual
        assert cause is STORE or actual == {cause}


@pytest.mark.usefixtures("item")
def test_locks_deadlocks_and_conflicts(engine: Any) -> None:
    """Of real sessions that are in each other's way."""
    update = "UPDATE item SET n = n + 1 WHERE id = {}"
    with engine.begin() as holder:
        holder.exec_driver_sql(update.format(1))
        assert causes(engine, executing("SET lock_timeout = '20ms'", update.format(1))) == {
            TRANSIENT
        }
        nowait = "SELECT 1 FROM item WHERE id = 1 FOR UPDATE NOWAIT"
        assert causes(engine, executing(nowait)) == {TRANSIENT}

    def conflict(one: Any) -> None:
        executing("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT * FROM item")(one)
        with engine.begin() as other:
            other.exec_driver_sql(update.format(2))
        executing(update.format(2))(one)

    assert causes(engine, conflict) == {ABORTED}

    def deadlock(one: Any) -> None:
        locked = threading.Event()

        def other() -> None:
            # The one that waits longer is not the one that is chosen to fail.
            with engine.connect() as connection:
                executing("SET deadlock_timeout = '10s'", update.format(2))(connection)
                locked.set()
                executing(update.format(1))(connection)
                connection.rollback()

        executing("SET deadlock_timeout = '50ms'", update.format(1))(one)
        thread = threading.Thread(target=other)
        thread.start()
        assert locked.wait(30)
        try:
            executing(update.format(2))(one)
        finally:
            getattr(one, "connection", one).rollback()
            thread.join(30)

    assert causes(engine, deadlock) == {ABORTED}


def test_a_transaction_that_was_rolled_back_is_an_error_of_its_own(engine: Any) -> None:
    store = SQLStore(engine)
    for state in ("40001", "40P01"):
        with pytest.raises(Aborted, match="made up") as raised:
            store.execute(raising(state))
        assert cause_of(raised.value, store.classify_error) is ABORTED
        store.destroy()
        store = SQLStore(engine)
    store.destroy()


def test_errors_of_the_client_side(engine: Any) -> None:
    store = SQLStore(engine)
    pool = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.01)
    with pool.connect(), pytest.raises(sa.exc.TimeoutError) as raised:
        pool.connect()
    assert cause_of(raised.value, store.classify_error) is TRANSIENT
    pool.dispose()
    closed = create_engine("postgresql+psycopg://unknown@127.0.0.1:1/none")
    with pytest.raises(sa.exc.OperationalError) as refused:
        closed.connect()
    assert cause_of(refused.value, store.classify_error) is TRANSIENT
    with engine.connect() as connection:
        with pytest.raises(sa.exc.StatementError) as missing:
            connection.execute(sa.text("SELECT :a"), {})
        assert cause_of(missing.value, store.classify_error) is STORE
        with pytest.raises(sa.exc.NoResultFound) as none:
            connection.execute(sa.text("SELECT 1 WHERE false")).one()
        assert cause_of(none.value, store.classify_error) is MESSAGE
    assert cause_of(sa.exc.ResourceClosedError("closed"), store.classify_error) is STORE


@pytest.mark.parametrize(
    ("sql", "cause"),
    [
        ("INSERT INTO t VALUES (1, 1)", MESSAGE),
        ("INSERT INTO t VALUES ('x', 1)", MESSAGE),
        ("SELECT json('{')", MESSAGE),
        ("SELECT zeroblob(3000000000)", MESSAGE),
        ("SELECT abs(-9223372036854775808)", MESSAGE),
        ("SELECT * FROM missing", STORE),
        ("SELECT missing FROM t", STORE),
        ("SELECT missing(1)", STORE),
        ("SELEC 1", STORE),
    ],
)
def test_what_sqlite_says(sql: str, cause: ErrorCause) -> None:
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v); INSERT INTO t VALUES (1, 1)")
    store = SQLiteStore.__new__(SQLiteStore)
    with pytest.raises(apsw.Error) as raised:
        connection.execute(sql).fetchall()
    assert cause_of(raised.value, store.classify_error) is cause
    assert cause_of(apsw.BusyError("locked"), store.classify_error) is TRANSIENT
    assert cause_of(apsw.IOError("disk"), store.classify_error) is STORE
    assert cause_of(ValueError("of the application"), store.classify_error) is MESSAGE


def test_an_error_says_no_more_than_the_one_it_was_raised_for() -> None:
    """An application that puts an error of its own in the place of a lost lock hides nothing."""
    classify = SQLiteStore.__new__(SQLiteStore).classify_error

    def wrapped(inner: Exception, *, explicit: bool) -> BaseException:
        with pytest.raises(ValueError, match="mine") as raised:
            try:
                raise inner
            except Exception as error:
                if explicit:
                    raise ValueError("mine") from error
                raise ValueError("mine")  # noqa: B904 - as applications do
        return raised.value

    for explicit in (True, False):
        assert cause_of(wrapped(KeyError("k"), explicit=explicit), classify) is MESSAGE
        assert cause_of(wrapped(Invalid("text"), explicit=explicit), classify) is MESSAGE
        assert cause_of(wrapped(apsw.BusyError("b"), explicit=explicit), classify) is TRANSIENT
        assert cause_of(wrapped(Unavailable("db"), explicit=explicit), classify) is STORE
        assert cause_of(wrapped(TimeoutError(), explicit=explicit), classify) is TRANSIENT
    assert cause_of(MemoryError(), classify) is STORE


class Ledger(Tally):
    """Writes by the connection of the transaction, as users of SQLAlchemy do."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return PoisonPolicy(DEAD)

    def new_store(self, shard: Any, recorder: Any) -> Store:
        return SQLStore(self.engine)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        connection = store.transaction()
        connection.exec_driver_sql("SET LOCAL lock_timeout = '20ms'")
        statement = sa.text("UPDATE item SET n = n + 1 WHERE name = :name")
        connection.execute(statement, {"name": envelope.message.word})
        if envelope.message.word == "poison":
            connection.exec_driver_sql("INSERT INTO item VALUES (1, 'again', 0)")


@pytest.mark.usefixtures("item")
def test_a_lock_that_is_held_costs_no_message(engine: Any, tmp_path: Path) -> None:
    """The shard fails and says what to do; what it consumes later is everything but the poison."""
    with AppDriver(Ledger(engine), tmp_path, [SOURCE], log=False) as driver:
        driver.feed(SOURCE, frame("one", 1))
        driver.run()
        with engine.begin() as holder:
            holder.exec_driver_sql("UPDATE item SET n = 10 WHERE name = 'two'")
            driver.feed(SOURCE, frame("poison", 2) + frame("two", 3) + frame("one", 4))
            with raises(ApplicationFailed, journal="a/source", begin=131) as raised:
                driver.run()
            assert is_advised(raised.value)
        assert driver.committed(DEAD, DeadLetter) == []
        driver.crash()
        driver.run()
        letters = driver.committed(DEAD, DeadLetter)
        assert [one.error.partition(":")[0] for one in letters] == ["IntegrityError"]
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT name, n FROM item ORDER BY id").all()
    assert [tuple(row) for row in rows] == [("one", 3), ("two", 11)]


def test_a_store_that_says_nothing_of_its_errors_skips_none(tmp_path: Path) -> None:
    """It is refused at the start, by name; malformed messages it may skip."""

    class Silent(Tally):
        malformed_only = False

        def poison_policy(self, shard: Any) -> PoisonPolicy | None:
            return PoisonPolicy(DEAD, malformed_only=self.malformed_only)

        def new_store(self, shard: Any, recorder: Any) -> Store:
            class Own(SQLiteStore):
                classify_error = Store.classify_error

            return Own(recorder)

    application = Silent()
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        with raises(Invalid, says="Own"):
            driver.run()
        application.malformed_only = True
        driver.run()
