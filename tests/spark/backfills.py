"""Backfills that fold a DataFrame."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gazette.history.backfill.build import Attempt, ShardTask
from gazette.history.backfill.plan import tasks_of
from gazette.history.backfill.settings import RunSettings
from gazette.history.columns import MessageFormat
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.history.spark.backfill import Backfill
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.shard import ShardSource, ShardSpec
from tests.backfill.apps import MappedBackfill, Words


class FoldedBackfill(Backfill):
    application = Words
    fields = "word string"
    order = ("word",)

    def fold(self, frame: Any) -> Any:
        return frame.groupBy("shard", "word").count()

    def load(self, shard: Any, store: Any, batches: Any) -> None:
        for batch in batches:
            rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            store.executemany("INSERT INTO counts VALUES (?, ?)", rows)


class CombinedBackfill(FoldedBackfill):
    """The same, with what a task has read put together before Spark gets it."""

    fields = "word string, count long"

    def combine(self, rows: Any) -> Any:
        import pyarrow.compute as pc

        assert rows.schema.names == ["word", "count"]
        counts = pc.coalesce(rows.column("count"), 1)
        made = rows.set_column(1, rows.schema.field(1), counts).group_by("word")
        return made.aggregate([("count", "sum")]).rename_columns(["word", "count"])

    def fold(self, frame: Any) -> Any:
        # What was pending at the end of a run comes as it was written.
        counts = frame.selectExpr("shard", "word", "coalesce(count, 1) AS count")
        return counts.groupBy("shard", "word").sum("count")


class MappedFoldedBackfill(FoldedBackfill):
    history = MappedBackfill.history
    partitions = MappedBackfill.partitions

    def mapping(self, partitions: Any) -> Any:
        return MappedBackfill().mapping(partitions)


class ListedBackfill(CombinedBackfill):
    """Backfill that keeps what its fold has found. It combines no "alpha" once ``gate`` exists."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate
        self.found: list[Any] = []

    def combine(self, rows: Any) -> Any:
        if "alpha" in rows.column("word").to_pylist() and self.gate.exists():
            raise OSError("this host lacks a file")
        return super().combine(rows)

    def fold(self, frame: Any) -> Any:
        made = super().fold(frame)
        self.found = sorted(map(tuple, made.select("shard", "word", "sum(count)").collect()))
        return made


class NoRows(FoldedBackfill):
    def fold(self, frame: Any) -> Any:
        return super().fold(frame.where("word = 'none'"))


class NoFrame(FoldedBackfill):
    def fold(self, frame: Any) -> Any:
        return None


class OtherShards(FoldedBackfill):
    """Loses the shards of rows, as an outer join may."""

    def fold(self, frame: Any) -> Any:
        return super().fold(frame).selectExpr("nullif(shard, 1) AS shard", "word", "count")


class NoTable(CombinedBackfill):
    def combine(self, rows: Any) -> Any:
        return rows.to_pandas()


def build_stored(
    root: Path,
    journals: Sequence[str],
    backfill: Backfill,
    runner: Any,
    *,
    between: Callable[[], None] = lambda: None,
) -> list[Attempt]:
    """Build the state of a shard for each of the journals below a directory, a run for each fragment.

    ``between`` is called between the two passes.
    """
    access = Access.of(file_root=root, direct=True)
    selection = Selection(
        journals=tuple(journals), stores=("file:///fragments/",), shape=MessageFormat()
    )
    with access.open() as opened:
        snapshot = take_snapshot(opened, selection)
    specs = [
        ShardSpec(
            f"shard-{number}",
            sources=(ShardSource(journal),),
            recovery_log_prefix="logs",
            hint_prefix="/hints",
        )
        for number, journal in enumerate(journals)
    ]
    with tempfile.TemporaryDirectory(dir=root) as directory:
        settings = RunSettings(EVERYTHING, f"{directory}/staging", "run", scratch=Path(directory))
        folded = runner.fold(access, snapshot, lambda _: None, backfill)
        tasks: list[ShardTask] = tasks_of(backfill, "", specs, folded, access, settings)
        between()
        return list(runner.build(tasks, lambda _: None))
