"""Backfills on Spark: `SparkRunner`, and what it needs of a `Backfill`.

Both passes are jobs. Without ``fold`` there is one task per shard, which reads the shard's messages
and builds its state. With ``fold``, rows of all journals are folded as a DataFrame, grouped by shard
and put in order. Then one task per shard loads them. Executors fail, are slow, and repeat what
another one has run. So each attempt stages its own objects, and Spark reports one attempt per shard.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pyarrow as pa

from gazette.backfill.build import Attempt, OnRead, ShardTask, build_state, run_task, shard_mapping
from gazette.backfill.definition import Backfill, load_backfill
from gazette.errors import Bug, Conflict, Invalid, not_installed
from gazette.history.combine import Combine
from gazette.history.ddl import parse_columns
from gazette.history.merge import CommittedRun, FoldedSnapshot
from gazette.history.meta_columns import META
from gazette.history.row_format import RowFormat
from gazette.history.snapshot import RUN_BYTES, Snapshot
from gazette.history.source import Access
from gazette.history.table_columns import value_of_all
from gazette.protocol.ids import split_journal_meta
from gazette.spark.cluster_url import CONNECT, require_reachable
from gazette.spark.combined_fold import CombinedFold
from gazette.spark.errors import wrap_spark_errors
from gazette.spark.java import ensure_java
from gazette.spark.progress import reporting
from gazette.spark.source.planning import fold_by_spark, rows_by_spark
from gazette.spark.source.schema import make_format
from gazette.spark.spark_session import session
from gazette.spark.tasks import run_tasks
from gazette.stores.state_builder import BuiltState, StateBuilder

SHARD: Final = "shard"
"""The column with the shard of a row: its index among the run's shards."""
_PREFIX: Final = "_"
"""Prefix of the names of columns that are not fields of messages."""
_JOURNAL: Final = f"{_PREFIX}journal"
_OUTCOME: Final = "shard int, attempt string, built binary"

__all__ = ["Backfill", "SparkRunner"]


class SparkRunner:
    """Runs on a session of Spark: a given one, or one of ``master`` that is created when needed."""

    def __init__(
        self, master: str = "local[*]", *, spark: Any = None, run_bytes: int = RUN_BYTES
    ) -> None:
        """Check that Spark can run, before anything is done.

        Raise ``Invalid`` if Spark is not installed, or ``master`` is malformed. Raise
        ``Unavailable`` without a Java, or if a standalone master does not answer.
        """
        if importlib.util.find_spec("pyspark") is None:
            raise not_installed("Spark", "pyspark", "spark", path="--master")
        if spark is None:
            require_reachable(master)
            if not master.startswith(CONNECT):
                ensure_java(os.environ)
        self._master = master
        self._spark = spark
        self._own = spark is None
        self._run_bytes = run_bytes
        self._first_pass: _FirstPass | None = None
        self._combined: CombinedFold | None = None

    @property
    def description(self) -> str:
        return f"Spark, {self._master}" if self._own else "Spark"

    @property
    def spark(self) -> Any:
        """The session of Spark. Raises ``Unavailable`` if there is no Java to run it."""
        if self._spark is None:
            self._spark = session(self._master, app_name="gazette backfill")
        return self._spark

    def fold(
        self,
        access: Access,
        snapshot: Snapshot,
        on_read: OnRead,
        backfill: str | Backfill | None = None,
    ) -> FoldedSnapshot:
        """Make the first pass as a job: a task per run. With ``combine`` it makes the rows of a fold, too.

        Raise ``Invalid`` if ``fold`` of the backfill needs fields that do not exist, ``Broken`` for
        Spark's errors, and what reading raises.
        """
        fold = None if backfill is None else _fold_of(backfill, snapshot)
        self._release()
        with wrap_spark_errors():
            if fold is None or fold.combine is None:
                folded = fold_by_spark(self.spark, access, snapshot, self._run_bytes, on_read)
                self._first_pass = _FirstPass(fold, folded.runs)
                return folded
            self._combined = CombinedFold(self.spark, access, fold.format, fold.combine)
            folded = self._combined.fold(snapshot, self._run_bytes, on_read)
            rows, again = self._combined.rows(folded.runs)
            self._first_pass = _FirstPass(fold, again, rows)
        return folded

    def build(self, tasks: Sequence[ShardTask], on_read: OnRead) -> list[Attempt]:
        """Make the second pass: return one attempt of each shard, in the order of tasks.

        A fold that combines reads only the runs that `CombinedFold.rows` lacks.
        """
        if not tasks:
            return []
        backfill = tasks[0].load()
        length = sum(run.run.length for task in tasks for run in task.runs)
        work = partial(map, run_task)
        with wrap_spark_errors():
            if type(backfill).fold is not Backfill.fold:
                with reporting(self.spark, self._reads, length, on_read):
                    return self._build_folded(backfill, tasks)
            return run_tasks(self.spark, tasks, work, len(tasks), length=length, on_read=on_read)

    @property
    def _reads(self) -> int:
        """Number of tasks that read the history of a fold."""
        runs = () if self._first_pass is None else self._first_pass.runs
        return sum(not run.empty for run in runs)

    def _build_folded(self, backfill: Backfill, tasks: Sequence[ShardTask]) -> list[Attempt]:
        frame = backfill.fold(self._with_shards(backfill, tasks))
        if SHARD not in frame.columns:
            raise Invalid(
                f"fold() of {type(backfill).__name__} dropped the column {SHARD}",
                hint=f"Group by it as well: frame.groupBy({SHARD!r}, …).",
            )
        gathered = frame.repartitionById(len(tasks), SHARD)
        order = [name for name in (backfill.order or frame.columns) if name != SHARD]
        ordered = gathered.sortWithinPartitions(*order) if order else gathered
        rows = ordered.mapInArrow(_loader(list(tasks)), _OUTCOME).collect()
        if sorted(row[SHARD] for row in rows) != list(range(len(tasks))):
            raise Bug("Spark did not report one attempt per shard", shards=len(tasks))
        return [
            Attempt(tasks[row[SHARD]].spec.id, row["attempt"], BuiltState.from_json(row["built"]))
            for row in sorted(rows, key=lambda row: row[SHARD])
        ]

    def _with_shards(self, backfill: Backfill, tasks: Sequence[ShardTask]) -> Any:
        """Return the committed rows of the history, each with the shard that it belongs to."""
        rows = self._read(tasks[0].access)
        if backfill.history:
            return self._mapped(backfill, rows, tasks)
        pairs = [
            {_JOURNAL: split_journal_meta(source.journal)[0], SHARD: number}
            for number, task in enumerate(tasks)
            for source in task.spec.sources
        ]
        schema = pa.schema([(_JOURNAL, pa.string()), (SHARD, pa.int32())])
        shards = self.spark.createDataFrame(pa.Table.from_pylist(pairs, schema)).coalesce(1)
        joined = rows.join(shards.hint("broadcast"), _JOURNAL)
        return joined.drop(_JOURNAL) if _adds_journal(backfill) else joined

    def _read(self, access: Access) -> Any:
        first = self._first_pass
        if first is None or first.fold is None:
            raise Conflict("the second pass needs the first of the same runner")
        if first.rows is not None and not first.runs:
            return first.rows
        schema, format, combine = first.fold
        read = rows_by_spark(self.spark, access, first.runs, schema, format, combine)
        return read if first.rows is None else first.rows.union(read)

    def _mapped(self, backfill: Backfill, rows: Any, tasks: Sequence[ShardTask]) -> Any:
        from pyspark.sql.types import IntegerType, StructField, StructType

        schema = StructType([*rows.schema.fields, StructField(SHARD, IntegerType())])
        return rows.mapInArrow(_mapper(list(tasks)), schema)

    def stop(self) -> None:
        """End a session of our own, and with it what it runs. In another one, remove kept rows."""
        self._release()
        if self._own and self._spark is not None:
            spark, self._spark = self._spark, None
            spark.stop()

    def _release(self) -> None:
        combined, self._combined = self._combined, None
        if combined is not None:
            combined.close()


class _Fold(NamedTuple):
    """How rows of a fold are made: their columns, for Spark and for us, and what combines them."""

    schema: Any
    format: RowFormat
    combine: Combine | None


@dataclass(frozen=True, slots=True)
class _FirstPass:
    """Results of the first pass that the second pass needs."""

    fold: _Fold | None
    runs: tuple[CommittedRun, ...]
    """The runs that the second pass reads."""
    rows: Any = None
    """A DataFrame of the rows of all other runs. None if no run was read."""


def _fold_of(backfill: str | Backfill, snapshot: Snapshot) -> _Fold | None:
    """Return how rows of a fold are made. Return None without a fold. Raise ``Invalid`` for a fold
    whose fields do not exist.
    """
    loaded = load_backfill(backfill) if isinstance(backfill, str) else backfill
    if type(loaded).fold is Backfill.fold:
        return None
    if not loaded.fields:
        raise Invalid(
            f"{type(loaded).__name__} has a fold(), but does not say which fields it reads",
            hint='Set the class attribute fields, as in "word string, n long".',
        )
    schema = _schema(loaded)
    has_class = any(one.message for one in snapshot.shapes)
    value = value_of_all("protobuf" if has_class else "", snapshot.shapes)
    combines = type(loaded).combine is not Backfill.combine
    return _Fold(
        schema, make_format(schema, value, _PREFIX), _Combine(backfill) if combines else None
    )


@dataclass(frozen=True, slots=True)
class _Combine:
    """``combine`` of a backfill, loaded where it runs. It does not get the columns that `_schema` adds."""

    backfill: str | Backfill

    def __call__(self, rows: pa.Table) -> pa.Table:
        backfill = load_backfill(self.backfill) if isinstance(self.backfill, str) else self.backfill
        if not _adds_journal(backfill):
            return backfill.combine(rows)
        # The journal is the same in all rows of a run.
        at = rows.schema.get_field_index(_JOURNAL)
        journal = rows.column(at)[0]
        made = backfill.combine(rows.remove_column(at))
        column = pa.repeat(journal, made.num_rows)
        return made.add_column(at, rows.schema.field(at), column)


def _adds_journal(backfill: Backfill) -> bool:
    """Return True if rows have their journal, and so their shard, though ``fold`` does not use it."""
    return not backfill.history and "journal" not in backfill.meta


def _schema(backfill: Backfill) -> Any:
    """Return the columns to read, and no others: each costs time. Raise ``Invalid``."""
    from pyspark.sql.pandas.types import from_arrow_schema

    if unknown := sorted(set(backfill.meta) - META.keys()):
        raise Invalid(
            f"{type(backfill).__name__} asks for columns that messages do not have: "
            f"{', '.join(unknown)}",
            path="meta",
            hint=f"There are {', '.join(META)}.",
        )
    needed = {*backfill.meta, *(["journal"] if _adds_journal(backfill) else [])}
    names = [name for name in META if name in needed]
    fields = [pa.field(f"{_PREFIX}{name}", META[name]) for name in names]
    fields += parse_columns(backfill.fields)
    if SHARD in (taken := [field.name for field in fields]) or len(set(taken)) < len(taken):
        raise Invalid(
            f"{type(backfill).__name__} reads two columns of the same name, or one named {SHARD}",
            path="fields",
        )
    return from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=False)


def _loader(tasks: list[ShardTask]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function by which an executor loads the rows of one shard."""

    def load(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context: Any = TaskContext.get()
        number = context.partitionId()
        task = tasks[number]
        backfill = task.load()
        rows = 0

        def own() -> Iterator[Any]:
            nonlocal rows
            for batch in batches:
                if not batch.num_rows:
                    continue
                rows += batch.num_rows
                names = [name for name in batch.schema.names if name != SHARD]
                yield batch.select(names)

        def fill(builder: StateBuilder) -> int:
            backfill.load(builder.shard, builder.store, own())
            return rows

        attempt = build_state(task, backfill, fill)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array([number], pa.int32()),
                pa.array([attempt.attempt]),
                pa.array([attempt.built.to_json()], pa.binary()),
            ],
            names=["shard", "attempt", "built"],
        )

    return load


def _mapper(tasks: list[ShardTask]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the function by which an executor finds the shards of rows."""

    def add_shards(batches: Iterator[Any]) -> Iterator[Any]:
        import numpy as np

        mapping = shard_mapping(tasks[0].load(), tasks[0].partitions)
        shards: dict[str, list[int]] = {}
        for number, task in enumerate(tasks):
            for source in task.spec.sources:
                shards.setdefault(split_journal_meta(source.journal)[0], []).append(number)
        for batch in batches:
            rows, numbers = [], []
            for at, row in enumerate(batch.to_pylist()):
                for number in shards.get(mapping(SimpleNamespace(**row)).journal, ()):
                    rows.append(at)
                    numbers.append(number)
            taken = batch.take(pa.array(np.array(rows, np.int64)))
            yield pa.RecordBatch.from_arrays(
                [*taken.columns, pa.array(numbers, pa.int32())],
                names=[*batch.schema.names, SHARD],
            )

    return add_shards
