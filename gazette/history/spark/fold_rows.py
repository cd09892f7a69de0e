"""The rows of a history, as the DataFrame that a backfill folds: `FoldRows`.

The first pass finds which messages have committed, and the second pass makes the rows. With ``combine``, the
tasks of the first pass make the rows, too: each task reads its runs once (`read_once`). The summaries go to
the driver. The combined rows stay on the executors, as cached partitions. If Spark loses a partition, it
makes the partition again from its runs. When the summaries are folded, the driver knows which rows count. The
second pass reads only runs whose rows the first pass could not decide: see `select_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from gazette.history.backfill.build import OnRead
from gazette.history.combine import Combine, Combiner
from gazette.history.first_pass import resolver
from gazette.history.merge import CommittedRun, FoldedSnapshot, fold_snapshot
from gazette.history.one_pass import OnePass, Part, read_once, select_parts
from gazette.history.row_format import RowFormat
from gazette.history.rows import read_rows
from gazette.history.snapshot import Run, Snapshot
from gazette.history.source import Access, OpenAccess
from gazette.history.spark.progress import reporting
from gazette.history.spark.source.planning import TASKS_MAX, fold_by_spark, summarise_by_spark
from gazette.history.spark.tasks import result_batch, results_in, task_frame
from gazette.history.spark.worker_process import run_each
from gazette.history.summary import Summary
from gazette.protocol.ids import JournalName

SHARD: Final = "shard"
"""Column with the shard of a row: its index among the shards of the backfill."""
ShardsOf = Callable[[JournalName], Sequence[int]]
"""Function from a journal to the shards that get its messages."""

_RUN: Final = pa.field("number", pa.int32())
_PART: Final = pa.field("part", pa.int64())
_RESULT: Final = pa.field("result", pa.binary())
_ROW: Final = "row"
_LOST: Final = pa.field("lost", pa.bool_())
_SHARD: Final = pa.field(SHARD, pa.int32())
_AGAIN: Final = -2
"""Number of the part in the row of a result that says: the run must be read again."""
_REFUSED: Final = (
    "combine() has raised for rows that it had combined before, when rows that Spark had lost were "
    "made again"
)


class FoldRows:
    """The rows of one history, for one fold."""

    def __init__(
        self, spark: Any, access: Access, schema: Any, format: RowFormat, combine: Combine | None
    ) -> None:
        """Prepare the rows, and read nothing yet. ``schema`` is that of ``format``, as a ``StructType``."""
        self._spark = spark
        self._access = access
        self._schema = schema
        self._format = format
        self._combine = combine
        self._frame: Any = None
        self._read: list[tuple[Run, OnePass]] = []
        """Runs that were read once, with their results. The column ``number`` is the index here."""
        self._wanted: list[tuple[int, int]] = []
        """Rows that count, by the values of the columns ``number`` and ``part``."""
        self.runs: tuple[CommittedRun, ...] = ()
        """The runs for the second pass, set by `fold`."""

    def fold(self, snapshot: Snapshot, run_bytes: int, on_read: OnRead) -> FoldedSnapshot:
        """Make the first pass. Spark raises its own exceptions, with the errors of tasks as text."""

        def summarise_all(runs: Sequence[Run]) -> list[Summary]:
            if self._frame is None and runs:
                return self._read_all(runs, on_read)
            # In a later call, the runs begin at other offsets: the second pass reads these runs again.
            return summarise_by_spark(self._spark, self._access, runs, on_read)

        if self._combine is None:
            folded = fold_by_spark(self._spark, self._access, snapshot, run_bytes, on_read)
        else:
            with self._access.open() as opened:
                folded = fold_snapshot(snapshot, summarise_all, resolver(opened), run_bytes)
        self._wanted, to_reread = select_parts(self._read, folded.runs)
        self.runs = tuple(run for run in to_reread if self._format.selects(run))
        return folded

    def _read_all(self, runs: Sequence[Run], on_read: OnRead) -> list[Summary]:
        """Read each run once, by tasks, and cache the rows. Return the summaries."""
        assert self._combine is not None
        work = partial(run_each, self._access, partial(_read_run, self._format, self._combine))
        row = pa.struct(list(self._format.schema))
        schema, batch = _once_schema(row), partial(_once_batch, row)
        frame = task_frame(self._spark, runs, TASKS_MAX, work, schema, batch).persist()
        self._frame = frame
        length = sum(run.length for run in runs)
        results = frame.where("result IS NOT NULL").select(_RUN.name, _RESULT.name)
        with reporting(self._spark, min(len(runs), TASKS_MAX), length, on_read):
            passes = results_in(results.collect(), len(runs))
        self._read = list(zip(runs, passes, strict=True))
        return [result.summary for result in passes]

    def rows(self, shards_of: ShardsOf) -> Any:
        """Return a DataFrame of the committed rows, once for each shard that gets them."""
        from pyspark.sql.types import IntegerType, StructField, StructType

        schema = StructType([*self._schema.fields, StructField(SHARD, IntegerType())])
        work = partial(run_each, self._access, partial(_shard_rows, self._format, self._combine))
        items = [(run, shards_of(run.run.journal)) for run in self.runs]
        if self._frame is None:
            return task_frame(self._spark, items, len(items), work, schema)
        kept_rows = self._rows_made(shards_of)
        if not items:
            return kept_rows
        return kept_rows.union(task_frame(self._spark, items, len(items), work, schema))

    def _rows_made(self, shards_of: ShardsOf) -> Any:
        """Return the rows of the first pass that count, with their shards."""
        keys: list[tuple[int, int, int | None, bool]] = []
        for n, part in self._wanted:
            keys += [(n, part, shard, False) for shard in shards_of(self._read[n][0].journal)]
        # When Spark makes lost rows of a run again, `combine` may raise. The result `_AGAIN` must not look
        # like a run without rows: join it as "lost", which raises an error below.
        keys += [(n, _AGAIN, None, True) for n in {n for n, _ in self._wanted}]
        fields = pa.schema([_RUN, _PART, _SHARD, _LOST])
        table = pa.Table.from_pylist(
            [dict(zip(fields.names, key, strict=True)) for key in keys], fields
        )
        keys_frame = self._spark.createDataFrame(table).coalesce(1).hint("broadcast")
        rows = self._frame.join(keys_frame, [_RUN.name, _PART.name])
        # Test columns of both sides of the join: Spark would test `lost` alone already before the join.
        refused = f"lost AND result IS NOT NULL THEN assert_true(false, '{_REFUSED}') IS NULL"
        return rows.where(f"CASE WHEN {refused} ELSE true END").select(f"{_ROW}.*", SHARD)

    def close(self) -> None:
        """Remove the rows from the executors."""
        frame, self._frame = self._frame, None
        if frame is not None:
            frame.unpersist()


def _once_schema(row: pa.DataType) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    fields = pa.schema([_RUN, _PART, _RESULT, pa.field(_ROW, row)])
    return from_arrow_schema(fields, prefer_timestamp_ntz=False)


def _read_run(
    format: RowFormat, combine: Combine, access: OpenAccess, run: Run
) -> Iterator[Part | OnePass]:
    """Yield the parts of a run, and then its result."""
    yield (yield from read_once(access, run, format, combine))


def _once_batch(row: pa.DataType, number: int, found: Part | OnePass) -> pa.RecordBatch:
    """Return rows of a run, or the run's result, as a batch. A result is one row, whose part is null, or
    `_AGAIN` if the run must be read again. A join by parts leaves out a null."""
    part: int | None
    if isinstance(found, Part):
        count, part, result = found.rows.num_rows, found.number, None
        rows = pa.StructArray.from_arrays(found.rows.columns, fields=list(row))
    else:
        count, part = 1, _AGAIN if found.pending is None else None
        result, rows = result_batch(number, found).column(_RESULT.name)[0], pa.nulls(1, row)
    scalars = ((number, _RUN), (part, _PART), (result, _RESULT))
    return pa.RecordBatch.from_arrays(
        [*(pa.repeat(pa.scalar(value, field.type), count) for value, field in scalars), rows],
        schema=pa.schema([_RUN, _PART, _RESULT, pa.field(_ROW, row)]),
    )


def _shard_rows(
    format: RowFormat,
    combine: Combine | None,
    access: OpenAccess,
    item: tuple[CommittedRun, Sequence[int]],
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a run in the second pass, once for each shard that gets them."""
    run, shards = item
    combiner = Combiner(combine, format.schema)
    combined = chain.from_iterable(map(combiner.add, read_rows(access, run, format)))
    for batch in chain(combined, combiner.finish()):
        for shard in shards:
            yield batch.append_column(
                _SHARD, pa.repeat(pa.scalar(shard, _SHARD.type), batch.num_rows)
            )
