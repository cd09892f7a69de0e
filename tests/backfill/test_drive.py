"""Runs of a backfill: what is built and published is what the live shard would have come to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.backfill.apps import (
    Documents,
    DocumentsBackfill,
    Pairs,
    PairsBackfill,
    Words,
    WordsBackfill,
)
from tests.backfill.cluster import history, shard_settings, source

SOURCES = ("words/part-000", "words/part-001")
LIVE, BUILT = "live", "built"


@pytest.mark.parametrize(
    ("application", "backfill"),
    [(Words, WordsBackfill), (Pairs, PairsBackfill), (Documents, DocumentsBackfill)],
)
async def test_a_backfilled_state_and_the_live_tail_are_a_full_replay(
    start: Any, application: Any, backfill: Any
) -> None:
    """Row for row, the checkpoint included, with transactions that are open at the snapshot's end."""
    if application is Pairs:
        pytest.importorskip("rocksdict")
    rng = random.Random(application.__name__)
    cluster = await start(application())
    await cluster.broker.create(*map(source, SOURCES))
    await cluster.create(shard_settings(LIVE, *SOURCES), shard_settings(BUILT, *SOURCES))
    lines = {name: history(rng, 400) for name in SOURCES}
    for name in SOURCES:
        await cluster.append(name, lines[name][:250])
    report = await cluster.backfill(backfill(), shards=f"id = {BUILT}", verify=3, enable=True)
    assert report.published
    assert report.verified == (BUILT,)
    assert report.shards[0].open_producers, "no transaction is open: the test shows nothing"
    await cluster.consumer.await_primary(BUILT)
    for name in SOURCES:
        await cluster.append(name, lines[name][250:])
    await cluster.enable(LIVE)
    built, live = [await cluster.state(one, backfill()) for one in (BUILT, LIVE)]
    assert built[0] == live[0]
    assert len(built[0]) > 20
    assert built[1] == live[1]
    # Nothing is left in the staging area but the run's records.
    names = sorted(path.name for path in cluster.staging.rglob("*") if path.is_file())
    assert len(names) == 5, names
    assert {"PLAN.json", "MANIFEST.json", "PUBLISHED.json"} < set(names)
