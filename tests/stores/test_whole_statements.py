"""SQL that is executed writes all that it says, whether or not its rows are read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette.errors import NotAllowed
from tests.facts import raises
from tests.stores.test_sqlite import World, commit, elsewhere

_STORIES = 60
_STEPS = 12


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    world = World(tmp_path)
    yield world
    for store in world.opened:
        store.destroy()


@pytest.mark.parametrize("mode", ["redo", "vfs"])
def test_rows_of_bindings_are_all_written(opened: World, mode: Any) -> None:
    store = opened.open(mode=mode)
    sql = "INSERT INTO t VALUES (?, 'a') RETURNING k"
    kept = store.executemany(sql, [(1,), (2,), (3,)])
    store.executemany(sql, iter([(4,), (5,)]))
    commit(store)
    assert [key for key, _ in opened.recovered()] == [1, 2, 3, 4, 5]
    assert next(kept) == (1,)
    assert kept.description[0][0] == "k"
    assert (kept.fetchone(), kept.fetchall(), kept.fetchall()) == ((2,), [(3,)], [])


def test_all_statements_of_one_text_are_executed(opened: World) -> None:
    store = opened.open()
    two = "INSERT INTO t VALUES (?, 'a') RETURNING k; INSERT INTO t VALUES (?, 'b')"
    for keys in ((1, 2), (3, 4)):
        store.execute(two, keys)
    read_first = "SELECT k FROM t; DELETE FROM t WHERE k = 4; SELECT 7"
    assert store.execute(read_first).get == [1, 2, 3, 4, 7]
    store.execute("SELECT k FROM t WHERE k < 0; INSERT INTO t VALUES (5, 'c')")
    commit(store)
    assert [key for key, _ in opened.recovered()] == [1, 2, 3, 5]


def test_a_statement_among_others_cannot_end_the_transaction(opened: World) -> None:
    store = opened.open()
    store.execute("INSERT INTO t VALUES (1, 'a')")
    with raises(NotAllowed):
        store.execute("INSERT INTO t VALUES (2, 'a') RETURNING k; COMMIT; DELETE FROM t")
    assert elsewhere(store.query, "SELECT k FROM t") == []
    assert store.query("SELECT k FROM t") == [(1,), (2,)]


def test_rows_that_were_not_read_do_not_keep_a_commit_from_happening(opened: World) -> None:
    store = opened.open()
    kept = store.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b') RETURNING k")
    commit(store)
    assert [key for key, _ in opened.recovered()] == [1, 2]
    assert kept.fetchall() == [(1,), (2,)]


def test_random_sql_writes_what_it_writes_with_its_rows_read(opened: World) -> None:
    """Statements in any number and order, read or not, kept or not, beside a plain database."""
    rng = random.Random(7)
    store, plain = opened.open(), apsw.Connection("")
    plain.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v)")
    kept: list[Any] = []
    for _ in range(_STORIES):
        for _ in range(rng.randrange(1, _STEPS)):
            sql = _random_sql(rng)
            wanted = plain.execute(sql).fetchall()
            cursor = store.execute(sql)
            match rng.randrange(4):
                case 0:
                    kept.append((cursor, wanted))
                case 1:
                    assert cursor.fetchall() == wanted
                case 2 if wanted:
                    assert next(iter(cursor)) == wanted[0]
        many = "INSERT OR REPLACE INTO t VALUES (?, ?)" + rng.choice([" RETURNING v", ""])
        rows = [(rng.randrange(50), "m") for _ in range(rng.randrange(5))]
        plain.executemany(many, rows).fetchall()
        store.executemany(many, rows)
        commit(store)
        table = plain.execute("SELECT k, v FROM t ORDER BY k").fetchall()
        assert elsewhere(store.query, "SELECT k, v FROM t ORDER BY k") == table
    assert opened.recovered() == table


def _random_sql(rng: random.Random) -> str:
    def statement() -> str:
        key = rng.randrange(50)
        return rng.choice(
            [
                f"INSERT OR REPLACE INTO t VALUES ({key}, 'x'), ({key + 1}, 'y') RETURNING k, v",
                f"INSERT OR IGNORE INTO t VALUES ({key}, 'z')",
                f"UPDATE t SET v = v || 'u' WHERE k > {key} AND length(v) < 5 RETURNING v",
                f"DELETE FROM t WHERE k = {key}",
                "SELECT count(*) FROM t /* a; b */",
                "SELECT k FROM t ORDER BY k -- c; d\n",
            ]
        )

    separators = ["; ", ";\n", " ;; "]
    text = rng.choice(separators).join(statement() for _ in range(rng.choice([1, 1, 1, 2, 3])))
    return text + rng.choice(["", ";", "; \n", " -- end"])
