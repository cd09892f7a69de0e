"""Folds of a history whose rows are combined, in one pass over its bytes: `CombinedFold`.

Tasks read each run once (`read_once`). Their summaries go to the driver, and their combined rows stay
on the executors, as Spark's own cached partitions. Spark makes a partition that is lost again, by
reading its run once more. When the summaries are folded, the driver knows which rows count. Only runs
that have to be read again are read by the second pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark import cloudpickle

from gazette.errors import Bug
from gazette.history.combine import Combine
from gazette.history.first_pass import resolver
from gazette.history.merge import CommittedRun, FoldedSnapshot, fold_snapshot
from gazette.history.one_pass import OnePass, Part, read_once, select_parts
from gazette.history.row_format import RowFormat
from gazette.history.snapshot import Run, Snapshot
from gazette.history.source import Access
from gazette.history.summary import Summary
from gazette.spark.error_hints import with_hints
from gazette.spark.progress import OnRead, reporting
from gazette.spark.source.planning import TASKS_MAX, summarise_by_spark
from gazette.spark.tasks import task_frame
from gazette.spark.worker_process import keep_imports

_RUN: Final = pa.field("run", pa.int32())
_PART: Final = pa.field("part", pa.int64())
_RESULT: Final = pa.field("result", pa.binary())
_ROW: Final = "row"


class CombinedFold:
    """The combined rows of a history, of which some count. For one fold."""

    def __init__(self, spark: Any, access: Access, format: RowFormat, combine: Combine) -> None:
        self._spark = spark
        self._access = access
        self._format = format
        self._combine = combine
        self._frame: Any = None
        self._read: list[tuple[Run, OnePass]] = []
        """The runs that were read once, by their values of the column ``run``, and the results."""

    def fold(self, snapshot: Snapshot, run_bytes: int, on_read: OnRead) -> FoldedSnapshot:
        """Read all runs once, and fold their summaries. Raise what reading raises."""

        def summarise_all(runs: Sequence[Run]) -> list[Summary]:
            if self._frame is None and runs:
                return self._read_all(runs, on_read)
            # Some runs begin elsewhere than was assumed. Their rows are read again.
            return summarise_by_spark(self._spark, self._access, runs, on_read)

        with self._access.open() as opened:
            return fold_snapshot(snapshot, summarise_all, resolver(opened), run_bytes)

    def _read_all(self, runs: Sequence[Run], on_read: OnRead) -> list[Summary]:
        work = partial(_read_runs, self._access, self._format, self._combine)
        tasks = min(len(runs), TASKS_MAX)
        row = pa.struct(list(self._format.schema))
        frame = task_frame(
            self._spark, runs, tasks, work, _schema(row), partial(_batch, row)
        ).persist()
        self._frame = frame
        length = sum(run.length for run in runs)
        results = frame.where("result IS NOT NULL").select("run", "result")
        with reporting(self._spark, tasks, length, on_read):
            found = {one.run: cloudpickle.loads(bytes(one.result)) for one in results.collect()}
        if len(found) != len(runs):
            raise Bug("Spark did not report one result per run", runs=len(runs))
        self._read = [(run, found[at]) for at, run in enumerate(runs)]
        return [result.summary for _, result in self._read]

    def rows(self, runs: Iterable[CommittedRun]) -> tuple[Any, tuple[CommittedRun, ...]]:
        """Return a DataFrame of the rows that count, and the runs that it lacks: they are to be read again.

        The DataFrame is None if no run was read.
        """
        if self._frame is None:
            return None, ()
        wanted, again = select_parts(self._read, runs)
        keys = pa.Table.from_pylist(
            [dict(zip((_RUN.name, _PART.name), one, strict=True)) for one in wanted],
            pa.schema([_RUN, _PART]),
        )
        counting = self._spark.createDataFrame(keys).coalesce(1).hint("broadcast")
        rows = self._frame.join(counting, [_RUN.name, _PART.name], "left_semi")
        return rows.select(f"{_ROW}.*"), tuple(again)

    def close(self) -> None:
        """Remove the rows from the executors."""
        frame, self._frame = self._frame, None
        if frame is not None:
            frame.unpersist()


def _schema(row: pa.DataType) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    fields = pa.schema([_RUN, _PART, _RESULT, pa.field(_ROW, row)])
    return from_arrow_schema(fields, prefer_timestamp_ntz=False)


def _read_runs(
    access: Access, format: RowFormat, combine: Combine, runs: Iterable[Run]
) -> Iterator[Part | OnePass]:
    with with_hints(), access.open() as opened:
        for run in runs:
            yield (yield from read_once(opened, run, format, combine))
    keep_imports()


def _batch(row: pa.DataType, number: int, found: Part | OnePass) -> pa.RecordBatch:
    """Return rows of a run, or its result."""
    if isinstance(found, Part):
        count = found.rows.num_rows
        parts, results = pa.repeat(pa.scalar(found.number, _PART.type), count), None
        rows = pa.StructArray.from_arrays(found.rows.columns, fields=list(row))
    else:
        count, parts = 1, pa.nulls(1, _PART.type)
        results, rows = pa.array([cloudpickle.dumps(found)], _RESULT.type), pa.nulls(1, row)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(number, _RUN.type), count),
            parts,
            pa.nulls(count, _RESULT.type) if results is None else results,
            rows,
        ],
        schema=pa.schema([_RUN, _PART, _RESULT, pa.field(_ROW, row)]),
    )
