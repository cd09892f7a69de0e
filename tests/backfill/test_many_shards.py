"""Runs of more shards than one transaction of etcd publishes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gazette.errors import Unavailable
from gazette.history.backfill import publish
from gazette.runtime.failpoints import armed
from tests.backfill.apps import Words, WordsBackfill
from tests.backfill.cluster import history, shard_settings, source
from tests.backfill.test_drive import expected

SOURCES = ("words/part-000", "words/part-001")


async def test_a_resumed_run_publishes_the_rest_while_the_first_shards_are_live(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver ends between two transactions. The first one has enabled its shard."""
    monkeypatch.setattr(publish, "SHARDS_MAX", 1)
    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES))
    shards = {name: f"shard-{name[-3:]}" for name in SOURCES}
    await cluster.create(*(shard_settings(shard, name) for name, shard in shards.items()))
    lines = {name: history(random.Random(name), 50) for name in SOURCES}
    for name in SOURCES:
        await cluster.append(name, lines[name])
    first, last = shards.values()
    with armed(f"backfill.publishing({last})=error"), pytest.raises(Unavailable):
        await cluster.backfill(WordsBackfill(), enable=True)
    await cluster.consumer.await_primary(first)

    report = await cluster.backfill(WordsBackfill(), enable=True)
    assert (report.published, report.resumed) == (True, True)
    await cluster.consumer.await_primary(last)
    for name, shard in shards.items():
        assert not (await cluster.spec(shard)).disable
        assert (await cluster.state(shard, WordsBackfill()))[0] == expected(lines[name])
