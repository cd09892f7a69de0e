"""Settings, functions and collations: on every connection to a SQLite state, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette.errors import Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.shard import ShardSpec
from gazette.protocol.text import duration
from gazette.recoverylog import open_at
from gazette.stores.sqlite import connections as sqlite_connections
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.state_builder import StateBuilder
from gazette.testing.recovery import MemoryLog, MemoryLogs, Replayer, take_over
from tests.facts import raises
from tests.stores.test_state_builder import App

SHARD: Any = None
FAMILY = """
CREATE TABLE IF NOT EXISTS parent (id INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS child (parent INTEGER REFERENCES parent);
"""
INDEXED = """
CREATE TABLE IF NOT EXISTS word (w TEXT COLLATE backwards, turned TEXT AS (turn(w)));
CREATE INDEX IF NOT EXISTS by_turned ON word (turn(w));
CREATE INDEX IF NOT EXISTS by_word ON word (w);
"""
BY_FUNCTION = "SELECT w FROM word INDEXED BY by_turned WHERE turn(w) = 'cba'"
BY_COLLATION = "SELECT w, turned FROM word ORDER BY w"


def prepare(connection: apsw.Connection) -> None:
    def turn(*texts: Any) -> Any:
        (text,) = texts
        return text[::-1]

    connection.create_scalar_function("turn", turn, deterministic=True)
    connection.create_collation("backwards", lambda a, b: (a < b) - (a > b))


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = MemoryLog()
        self.rng = random.Random(3)
        self.stores: list[SQLiteStore] = []

    def open(self, schema: str = "", **options: Any) -> SQLiteStore:
        directory = self.directory / f"owner-{len(self.stores)}"
        self.recorder = take_over(self.log, directory, self.rng)
        self.stores.append(SQLiteStore(self.recorder, schema, **options))
        return self.stores[-1]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for store in world.stores:
        store.destroy()


def commit(store: SQLiteStore) -> None:
    store.start_commit(SHARD, Checkpoint(), ()).result()


def elsewhere(store: SQLiteStore, sql: str) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(store.query, sql).result()


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_foreign_keys_are_refused_where_sqlite_would_ignore_them(world: World, mode: Any) -> None:
    """It would commit orphans: within a transaction, that PRAGMA does nothing."""
    pragma = "PRAGMA foreign_keys=ON"
    with raises(NotAllowed, says="foreign_keys") as raised:
        world.open(f"{pragma}; {FAMILY}", mode=mode)
    assert "connection_pragmas={'foreign_keys': 'ON'}" in raised.value.hint
    store = world.open(FAMILY, mode=mode)
    for execute in (store.execute, store.connection.execute):
        with pytest.raises(NotAllowed, match="foreign_keys"):
            execute(pragma)


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_settings_are_made_on_every_connection(world: World, mode: Any, tmp_path: Path) -> None:
    pragmas: dict[str, Any] = {"foreign_keys": True, "Recursive_Triggers": "on", "cache_size": -500}
    store = world.open(FAMILY, mode=mode, connection_pragmas=pragmas)
    with pytest.raises(apsw.ConstraintError, match="FOREIGN KEY"):
        store.execute("INSERT INTO child VALUES (1)")
    store.execute("PRAGMA defer_foreign_keys=ON")
    store.execute("INSERT INTO child VALUES (1)")
    store.execute("INSERT INTO parent VALUES (1)")
    commit(store)
    replayer = Replayer(tmp_path / "standby")
    replayer.advance(bytes(world.log.data), world.log.end)
    view = SQLiteStore.view(tmp_path / "view", connection_pragmas=pragmas)
    standby = replayer.view(view.refresh)
    for name, value in (("foreign_keys", 1), ("recursive_triggers", 1), ("cache_size", -500)):
        for query in (store.query, lambda sql: elsewhere(store, sql), standby.query):
            assert query(f"PRAGMA {name}") == [(value,)]
    view.close()
    replayer.abandon()


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_functions_and_collations_of_the_schema(world: World, mode: Any, tmp_path: Path) -> None:
    """An index on them works for the writer, its next owner, queries, standbys and the past."""
    options: dict[str, Any] = {"mode": mode, "prepare_connection": prepare}
    former = world.open(INDEXED, **options)
    former.execute("INSERT INTO word (w) VALUES ('abc'), ('xyz')")
    commit(former)
    store = world.open(INDEXED, **options)
    store.execute("INSERT INTO word (w) VALUES ('mno')")
    commit(store)
    replayer = Replayer(tmp_path / "standby")
    replayer.advance(bytes(world.log.data), world.log.end)
    view = SQLiteStore.view(tmp_path / "view", prepare_connection=prepare)
    standby = replayer.view(view.refresh)
    hints = [world.recorder.build_hints()]
    with open_at(
        MemoryLogs(world.log), hints, tmp_path / "past", prepare_connection=prepare
    ) as past:
        for query in (store.query, lambda sql: elsewhere(store, sql), standby.query, past.query):
            assert query(BY_FUNCTION) == [("abc",)]
            assert query(BY_COLLATION) == [("xyz", "zyx"), ("mno", "onm"), ("abc", "cba")]
            assert query("PRAGMA integrity_check") == [("ok",)]
    view.close()
    replayer.abandon()


def test_functions_where_a_state_is_built(tmp_path: Path) -> None:
    """A backfill opens the application's own store, and so do the owners that recover what it built."""
    spec = ShardSpec(
        "test",
        recovery_log_prefix="recovery",
        hint_prefix="/hints",
        max_txn_duration_ns=duration.SECOND,
    )
    app = App(lambda recorder: SQLiteStore(recorder, INDEXED, prepare_connection=prepare))
    with StateBuilder(app, spec, tmp_path / "built", random.Random(1)) as builder:
        builder.store.execute("INSERT INTO word (w) VALUES ('abc')")
        builder.finish(Checkpoint())
        assert builder.store.query(BY_FUNCTION) == [("abc",)]


def test_every_pragma_of_sqlite_has_one_place() -> None:
    """One that a later SQLite brings, or that is misspelt, is refused until it has."""
    known = {str(name) for (name,) in apsw.Connection(":memory:").execute("PRAGMA pragma_list")}
    ours = sqlite_connections
    places = [ours.READING, ours.TRANSACTIONAL, ours.CONNECTION, ours.REFUSED.keys()]
    for name in known:
        assert any(name in place for place in places), name
    assert not ours.CONNECTION & ours.REFUSED.keys()
    assert not ours.TRANSACTIONAL & (ours.CONNECTION | ours.REFUSED.keys())
    with pytest.raises(NotAllowed, match="foreing_keys"):
        ours.check_pragma("foreing_keys", "on")


@pytest.mark.parametrize(
    ("pragmas", "match"),
    [
        ({"journal_mode": "DELETE"}, "recording depends on it"),
        ({"synchronous": 2}, "nothing waits for a disk"),
        ({"user_version": 3}, "not a setting of a connection"),
        ({"foreing_keys": True}, "unknown PRAGMA"),
        ({"foreign_keys": "yess"}, "invalid value"),
        ({"cache_size": "1; DROP TABLE t"}, "invalid value"),
    ],
)
def test_settings_that_are_none(world: World, pragmas: Any, match: str) -> None:
    with pytest.raises(Invalid, match=match):
        world.open(connection_pragmas=pragmas)
    with pytest.raises(Invalid, match=match):
        SQLiteStore.view(world.directory, connection_pragmas=pragmas)


def test_preparations_of_the_wrong_kind(world: World) -> None:
    async def never_awaited(_connection: apsw.Connection) -> None:
        raise AssertionError

    def fails(_connection: apsw.Connection) -> None:
        raise ValueError("of the application")

    def ends_transactions(connection: apsw.Connection) -> None:
        connection.execute("PRAGMA journal_mode=DELETE")

    wrong: list[tuple[Any, type[Exception]]] = [
        (never_awaited, Invalid),
        (fails, ValueError),
        (ends_transactions, NotAllowed),
    ]
    for preparing, error in wrong:
        with pytest.raises(error):
            world.open(prepare_connection=preparing)
