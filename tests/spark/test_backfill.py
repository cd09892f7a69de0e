"""What executors run for backfills, without Spark's own processes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from tests.backfill.cluster import shard_settings
from tests.spark.backfills import MappedFoldedBackfill

SOURCES = ("words/part-000", "words/part-001")


def test_rows_of_a_history_elsewhere_are_mapped_as_the_publisher_maps(tmp_path: Any) -> None:
    """By the function that an executor runs, without a session."""
    import pyarrow as pa

    from gazette.history.backfill.build import ShardTask
    from gazette.history.source import Access
    from gazette.history.spark.backfill import _map_rows, _shards_by_journal
    from gazette.message.key_hash import fnv32a
    from gazette.message.mapping import Partition
    from gazette.protocol.checkpoint import Checkpoint

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
    columns = pa.schema([("word", pa.string()), ("shard", pa.int32())])
    batches = [
        pa.RecordBatch.from_pydict({"word": some, "shard": [0] * len(some)}, columns)
        for some in (words, [])
    ]
    mapped = _map_rows(tasks[0], _shards_by_journal(tasks), iter(batches))
    rows = [row for batch in mapped for row in batch.to_pylist()]
    assert rows == [{"word": word, "shard": fnv32a(word.encode()) % 2} for word in words]
