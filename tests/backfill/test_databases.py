"""Backfills of shards whose state is in a database that they share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gazette.backfill.local import LocalRunner
from gazette.errors import Invalid, NotAllowed, Unavailable
from gazette.failpoints import armed
from gazette.stores.sql import create_checkpoint_table, create_engine, create_tables
from tests.backfill.apps import METADATA, Rows, RowsBackfill
from tests.backfill.cluster import Cluster, history, line, shard_settings, source
from tests.backfill.test_drive import GAMMA, expected

PREFIX = "/gazette/consumers/test"
SOURCES = {"shard-one": "words/part-000", "shard-two": "words/part-001"}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    url = f"sqlite:///{tmp_path}/state.db"
    engine = create_engine(url)
    create_checkpoint_table(engine)
    create_tables(engine, METADATA)
    monkeypatch.setattr(Rows, "url", url)
    yield engine
    engine.dispose()


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
    """The live shards consume more, and stop again."""
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
    with pytest.raises(NotAllowed, match="has a state of it already"):
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
