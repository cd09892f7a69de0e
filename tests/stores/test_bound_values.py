"""What becomes of values of each type in SQL: equal, equal as another type, or refused by name."""

from __future__ import annotations

import enum
import math
import random
import sqlite3
import uuid
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import apsw
import pytest

from gazette import PoisonPolicy
from gazette.errors import InvalidValue, NotAllowed
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.recovery import MemoryLog, take_over
from tests.consumer.apps import SOURCE, Tally, Word
from tests.facts import raises
from tests.stores.test_sql import Postgres, postgres

sa = pytest.importorskip("sqlalchemy")
numpy = pytest.importorskip("numpy")

from gazette.stores.sql.store import SQLStore, create_checkpoint_table, create_engine  # noqa: E402

__all__ = ["postgres"]


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(float):
    pass


class Colour(enum.StrEnum):
    RED = "r"


class Plain(enum.Enum):
    ONE = 1


NAN: Final = math.nan
NAIVE: Final = datetime.fromisoformat("2026-01-01")
SAME: Final[list[Any]] = [
    0,
    -(2**63),
    2**63 - 1,
    1.5,
    -0.0,
    math.inf,
    -math.inf,
    5e-324,
    "",
    "a",
    "a\0b",
    "\U0001f600",
    b"",
    b"\0\xff",
    None,
]
CONVERTED: Final[list[tuple[Any, Any]]] = [
    (True, 1),
    (bytearray(b"ab"), b"ab"),
    (memoryview(b"ab"), b"ab"),
    (Text("t"), "t"),
    (Whole(7), 7),
    (Real(2.5), 2.5),
    (Colour.RED, "r"),
    (numpy.float64(1.5), 1.5),
    (numpy.str_("n"), "n"),
]
REFUSED: Final[list[Any]] = [
    NAN,
    -NAN,
    Real("nan"),
    numpy.float64("nan"),
    2**63,
    -(2**63) - 1,
    2**70,
    "\ud800",
    "a\udfff",
    Text("\ud800"),
    memoryview(b"abcd")[::2],
    memoryview(array("i", [1])),
    array("i", [1]),
    numpy.int64(3),
    numpy.array([1.5]),
    Plain.ONE,
    NAIVE,
    datetime(2026, 1, 1, tzinfo=UTC),
    date(2026, 1, 1),
    time(1),
    timedelta(1),
    Decimal("1.10"),
    uuid.UUID(int=1),
    (1, 2),
    [1],
    {"a": 1},
    {1},
    1j,
    object(),
]


class Place(NamedTuple):
    """A way to give a value to SQL, and what reads it back."""

    write: Callable[[Any], Any]
    path: str
    read: Callable[[], list[Any]]


def sqlite_places(store: Any) -> Iterator[Place]:
    def read() -> list[Any]:
        return [value for (value,) in store.query("SELECT v FROM t WHERE k = 1")]

    insert = "INSERT INTO t VALUES (1, ?)"
    named = "INSERT INTO t VALUES (1, :v)"
    yield Place(lambda v: store.execute(insert, (v,)), "bindings[0]", read)
    yield Place(lambda v: store.execute(insert, [v]), "bindings[0]", read)
    yield Place(lambda v: store.execute(insert, iter([v])), "bindings[0]", read)
    yield Place(lambda v: store.execute(named, {"v": v, "unused": [NAN]}), 'bindings["v"]', read)
    yield Place(lambda v: store.execute(named, MappingProxyType({"v": v})), 'bindings["v"]', read)
    rows = "INSERT INTO t VALUES (?, ?)"
    yield Place(lambda v: store.executemany(rows, [(0, 0), (1, v)]), "rows[1][1]", read)
    yield Place(lambda v: store.executemany(rows, iter([(0, 0), (1, v)])), "rows[1][1]", read)
    each = "INSERT INTO t VALUES (1, :v)"
    yield Place(lambda v: store.executemany(each, [{"v": v}]), 'rows[0]["v"]', read)


def check(place: Place, clear: Callable[[], Any]) -> None:
    """Write values of all types at a place."""
    for value, wanted in [(one, one) for one in SAME] + CONVERTED:
        clear()
        place.write(value)
        (found,) = place.read()
        assert type(found) is type(wanted), f"{value!r} is read as {found!r}"
        assert repr(found) == repr(wanted)
    for value in REFUSED:
        clear()
        with raises(InvalidValue, "sql", path=place.path):
            place.write(value)
        assert place.read() == [], f"{value!r} is refused, and written"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    recorder = take_over(MemoryLog(), tmp_path / "log", random.Random(1))
    store = SQLiteStore(recorder, "CREATE TABLE t (k INTEGER PRIMARY KEY, v)")
    yield store
    store.destroy()


def test_values_in_a_sqlite_store(store: SQLiteStore) -> None:
    for place in sqlite_places(store):
        check(place, lambda: store.execute("DELETE FROM t"))


def test_values_of_queries_of_a_sqlite_store(store: SQLiteStore) -> None:
    """NaN would find nothing, and a number of NumPy a blob."""
    from tests.stores.test_sqlite import elsewhere

    for query in (store.query, lambda *call: elsewhere(store.query, *call)):
        for value in REFUSED:
            with raises(InvalidValue, "sql", path="bindings[0]"):
                query("SELECT ?", (value,))
        assert query("SELECT :a", {"a": 2}) == [(2,)]


def test_an_error_of_a_function_of_the_application_stays_its_own(tmp_path: Path) -> None:
    def fail(*values: Any) -> Any:
        raise OverflowError(*values)

    def prepare(connection: apsw.Connection) -> None:
        connection.create_scalar_function("fail", fail, 1)

    recorder = take_over(MemoryLog(), tmp_path, random.Random(1))
    store = SQLiteStore(recorder, prepare_connection=prepare)
    with pytest.raises(OverflowError, match="7"):
        store.execute("SELECT fail(?)", (7,)).fetchall()
    with pytest.raises(OverflowError, match="7"):
        store.executemany("SELECT fail(?)", iter([(7,)]))
    store.destroy()


def test_what_an_application_converts_is_not_refused(store: SQLiteStore) -> None:
    store.connection.convert_binding = lambda _cursor, _number, value: str(value)
    store.execute("INSERT INTO t VALUES (?, ?)", (1, Decimal("1.10")))
    store.executemany("INSERT INTO t VALUES (?, ?)", [(2, date(2026, 1, 2))])
    assert store.query("SELECT v FROM t ORDER BY k") == [("1.10",), ("2026-01-02",)]
    with raises(InvalidValue, path="bindings[0]"):
        store.execute("SELECT ?", (numpy.int64(3),))
    store.execute("INSERT INTO t VALUES (3, ?)", (apsw.zeroblob(2),))
    assert store.query("SELECT v FROM t WHERE k = 3") == [(b"\0\0",)]


def test_a_policy_skips_the_message_of_a_value_that_sqlite_would_change(tmp_path: Path) -> None:
    class Prices(Tally):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS t (v)")

        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            store.execute("INSERT INTO t VALUES (?)", (float(envelope.message.word),))

        def poison_policy(self, shard: Any) -> PoisonPolicy:
            return PoisonPolicy("dead")

    with AppDriver(Prices(), tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, Word(word="nan"), Word(word="2"))
        driver.run()
        assert [reason for _, reason in driver.skipped] == ["application"]
        assert driver.store.query("SELECT v FROM t") == [(2.0,)]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("END", "END"),
        ("COMMIT", "COMMIT"),
        ("SELECT 1; /* so */ end transaction", "END TRANSACTION"),
        ("ROLLBACK", "ROLLBACK"),
        ("BEGIN IMMEDIATE", "BEGIN IMMEDIATE"),
    ],
)
def test_a_statement_that_ends_the_transaction_is_named_as_it_is_written(
    store: SQLiteStore, sql: str, words: str
) -> None:
    with raises(NotAllowed, says=f"{words} is refused"):
        store.execute(sql)
    with raises(NotAllowed, says=f"{words} is refused"):
        store.executemany(sql, [()])


# -- Databases of SQLAlchemy.


@pytest.fixture
def sql_store(tmp_path: Path) -> Iterator[SQLStore]:
    engine = create_engine(f"sqlite:///{tmp_path}/state.db")
    create_checkpoint_table(engine)
    store = SQLStore(engine)
    store.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v)")
    yield store
    store.destroy()
    engine.dispose()


def test_values_in_a_sqlstore_on_sqlite(sql_store: SQLStore) -> None:
    store = sql_store
    connection = store.transaction()

    def read() -> list[Any]:
        return [row.v for row in store.query("SELECT v FROM t WHERE k = 1")]

    named = "INSERT INTO t VALUES (1, :v)"
    rows = "INSERT INTO t VALUES (:k, :v)"
    places = [
        Place(lambda v: store.execute(named, {"v": v}), 'parameters["v"]', read),
        Place(
            lambda v: store.execute(rows, [{"k": 0, "v": 0}, {"k": 1, "v": v}]),
            'parameters[1]["v"]',
            read,
        ),
        Place(lambda v: connection.execute(sa.text(named), {"v": v}), 'parameters["v"]', read),
        Place(
            lambda v: connection.exec_driver_sql("INSERT INTO t VALUES (1, ?)", (v,)),
            "parameters[0]",
            read,
        ),
    ]
    for place in places:
        check(place, lambda: store.execute("DELETE FROM t"))
    for value in REFUSED:
        with raises(InvalidValue, "sql"):
            store.query("SELECT :v", {"v": value})


def test_columns_of_sqlalchemy_convert_by_their_types(sql_store: SQLStore) -> None:
    """Times in a table of SQLAlchemy's types read back equal."""
    table = sa.Table(
        "times",
        sa.MetaData(),
        sa.Column("at", sa.DateTime),
        sa.Column("day", sa.Date),
        sa.Column("id", sa.Uuid),
    )
    sql_store.execute("CREATE TABLE times (at DATETIME, day DATE, id CHAR(32))")
    row = (datetime.fromisoformat("2026-01-01T02:03:04.000005"), date(2026, 1, 1), uuid.UUID(int=7))
    sql_store.execute(sa.insert(table).values(row))
    assert [tuple(one) for one in sql_store.query(sa.select(table))] == [row]


class Adapted:
    """A class that the application gives an adapter."""


def test_a_registered_adapter_is_used(sql_store: SQLStore) -> None:
    sqlite3.register_adapter(Adapted, lambda _: "adapted")
    sql_store.execute("INSERT INTO t VALUES (1, :v)", {"v": Adapted()})
    assert [row.v for row in sql_store.query("SELECT v FROM t")] == ["adapted"]


POSTGRESQL: Final[list[tuple[str, Any]]] = [
    ("bigint", 2**63 - 1),
    ("float8", NAN),
    ("float8", -math.inf),
    ("float8", 5e-324),
    ("boolean", True),
    ("text", "\U0001f600"),
    ("bytea", b"\0\xff"),
    ("numeric", Decimal("1.10")),
    ("numeric", Decimal(2**70)),
    ("timestamptz", datetime(2026, 1, 1, tzinfo=UTC)),
    ("timestamp", NAIVE),
    ("date", date(2026, 1, 1)),
    ("uuid", uuid.UUID(int=1)),
    ("int[]", [1, 2]),
]


def test_values_in_postgresql(postgres: Postgres) -> None:
    engine = create_engine(postgres.url)
    create_checkpoint_table(engine)
    store = SQLStore(engine)
    store.execute("SET TIME ZONE 'UTC'")
    for number, (kind, value) in enumerate(POSTGRESQL):
        kept = f"kept_{number}"
        store.execute(f"CREATE TEMPORARY TABLE {kept} (v {kind})")
        store.execute(f"INSERT INTO {kept} VALUES (:v)", {"v": value})
        (found,) = (row.v for row in store.query(f"SELECT v FROM {kept}"))
        assert type(found) is type(value)
        assert found == value or math.isnan(value)
    for text in ("\ud800", "a\0b"):
        with raises(InvalidValue, "sql", path='parameters["v"]'):
            store.execute("SELECT CAST(:v AS text)", {"v": text})
    assert store.query("SELECT 1 AS n")[0].n == 1, "the transaction goes on"
    store.destroy()
    engine.dispose()


class Money:
    """A class that no driver knows."""


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"v": Money()}, 'parameters["v"]'),
        ({"v": [1, Money()]}, 'parameters["v"][1]'),
        ({"v": [[1], [Money()]]}, 'parameters["v"][1][0]'),
        ({"v": {1, 2}}, 'parameters["v"]'),
        ({"v": {"a": 1}}, 'parameters["v"]'),
        ([{"v": "x"}, {"v": Money()}], 'parameters[1]["v"]'),
    ],
)
def test_a_class_that_the_driver_does_not_know_is_refused_by_its_place(
    postgres: Postgres, parameters: Any, path: str
) -> None:
    """In the transaction, which goes on, and in a query of another thread."""
    engine = create_engine(postgres.url)
    create_checkpoint_table(engine)
    store = SQLStore(engine)
    sql = "SELECT CAST(:v AS text)"
    with raises(InvalidValue, "sql", path=path):
        store.execute(sql, parameters)
    assert store.query("SELECT 1 AS n")[0].n == 1
    if isinstance(parameters, dict):
        with (
            ThreadPoolExecutor(1) as pool,
            raises(InvalidValue, "sql", path=path),
        ):
            pool.submit(store.query, sql, parameters).result()
    store.destroy()
    engine.dispose()


def test_a_policy_skips_the_message_of_a_class_that_the_driver_does_not_know(
    postgres: Postgres, tmp_path: Path
) -> None:
    engine = create_engine(postgres.url)
    create_checkpoint_table(engine)

    class Prices(Tally):
        recovery_logs = False

        def new_store(self, shard: Any, recorder: Any) -> Any:
            return SQLStore(engine)

        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            word = envelope.message.word
            store.execute("SELECT CAST(:v AS text)", {"v": Money() if word == "odd" else word})

        def poison_policy(self, shard: Any) -> PoisonPolicy:
            return PoisonPolicy("dead")

    with AppDriver(Prices(), tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, Word(word="odd"), Word(word="2"))
        driver.run()
        assert [reason for _, reason in driver.skipped] == ["application"]
    engine.dispose()
