"""Backfills on Spark: the same states as of the local runner, by tasks and by a DataFrame."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from tests.backfill.apps import Words, WordsBackfill
from tests.backfill.cluster import history, shard_settings, source
from tests.backfill.conftest import start as start
from tests.spark.backfills import FoldedBackfill, MappedFoldedBackfill

SOURCES = ("words/part-000", "words/part-001")
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("spark")]


async def test_states_are_those_of_the_local_runner(start: Any, shared_spark: Any) -> None:
    from gazette.spark.backfill import SparkRunner

    cluster = await start(Words())
    await cluster.broker.create(*map(source, SOURCES))
    for name in SOURCES:
        await cluster.append(name, history(random.Random(name), 100))
    kinds: list[tuple[str, Any, Any]] = [
        ("local", WordsBackfill(), None),
        ("tasks", WordsBackfill(), SparkRunner(spark=shared_spark)),
        ("folded", FoldedBackfill(), SparkRunner(spark=shared_spark)),
    ]
    states: list[Any] = []
    for kind, backfill, runner in kinds:
        # The second shard has all of it, and the third nothing: its source is empty.
        await cluster.broker.create(source(f"empty/{kind}"))
        await cluster.create(
            shard_settings(f"{kind}-1", SOURCES[1]),
            shard_settings(f"{kind}-2", *SOURCES),
            shard_settings(f"{kind}-3", f"empty/{kind}"),
        )
        names = [f"{kind}-{number}" for number in (1, 2, 3)]
        await cluster.backfill(
            backfill, shards=f"id in ({', '.join(names)})", run_id=kind, runner=runner, enable=True
        )
        for name in names:
            await cluster.consumer.await_primary(name)
        found = [await cluster.state(name, WordsBackfill()) for name in names[:2]]
        states.append(found)
        assert (await cluster.state(names[2], WordsBackfill()))[0] == []
    assert states[1] == states[0]
    assert states[2] == states[0]
    assert len(states[0][1][0]) > 20


def test_rows_of_a_history_elsewhere_are_mapped_as_the_publisher_maps(tmp_path: Any) -> None:
    """By the function that an executor runs, without a session."""
    import pyarrow as pa

    from gazette.backfill.build import ShardTask
    from gazette.history.access import Access
    from gazette.message.mapping import Partition, fnv32a
    from gazette.protocol.checkpoint import Checkpoint
    from gazette.spark.backfill import _mapper

    tasks = [
        ShardTask(
            MappedFoldedBackfill(),
            shard_settings(f"shard-{number}", SOURCES[number]),
            Access.of("http://broker"),
            (),
            Checkpoint(),
            str(tmp_path),
            "run",
            tuple(Partition(name, "") for name in SOURCES),
        )
        for number in range(2)
    ]
    words = [f"word {number}" for number in range(50)]
    batches = [
        pa.RecordBatch.from_pydict({"word": words}),
        pa.RecordBatch.from_pydict({"word": []}),
    ]
    rows = [row for batch in _mapper(tasks)(iter(batches)) for row in batch.to_pylist()]
    assert rows == [{"word": word, "shard": fnv32a(word.encode()) % 2} for word in words]
