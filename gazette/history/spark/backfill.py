"""Backfills on Spark: `SparkRunner`, and the parts of a `Backfill` that Spark calls.

Both passes are jobs. Without ``fold`` there is one task per shard, which reads the shard's messages and
builds its state. With ``fold``, the rows of all journals are folded as a DataFrame, grouped by shard and
sorted. Then one task per shard loads the rows of its shard. Executors fail, are slow, and repeat tasks. So
each attempt stages its own objects, and Spark reports one attempt per shard.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute

from gazette.errors import Conflict, Invalid, not_installed
from gazette.history.backfill.build import (
    Attempt,
    OnRead,
    ShardTask,
    build_state,
    run_task,
    shard_mapping,
)
from gazette.history.backfill.definition import Backfill, load_backfill
from gazette.history.combine import Combine
from gazette.history.ddl import parse_columns
from gazette.history.merge import FoldedSnapshot
from gazette.history.meta_columns import META
from gazette.history.row_format import RowFormat
from gazette.history.snapshot import RUN_BYTES, Snapshot
from gazette.history.source import Access
from gazette.history.spark.cluster_url import CONNECT, require_reachable
from gazette.history.spark.errors import wrap_spark_errors
from gazette.history.spark.fold_rows import SHARD, FoldRows
from gazette.history.spark.java import ensure_java
from gazette.history.spark.progress import reporting
from gazette.history.spark.source.planning import fold_by_spark
from gazette.history.spark.source.schema import make_format
from gazette.history.spark.spark_session import session
from gazette.history.spark.tasks import RESULTS, result_batch, results_in, run_tasks
from gazette.history.table_columns import value_of_all
from gazette.protocol.ids import JournalName, split_journal_meta
from gazette.stores.state_builder import StateBuilder

_PREFIX: Final = "_"
"""Prefix of the names of metadata columns."""

__all__ = ["Backfill", "SparkRunner"]


class SparkRunner:
    """Runner on the session ``spark``, or on a session with ``master`` that it creates when needed."""

    def __init__(
        self, master: str = "local[*]", *, spark: Any = None, run_bytes: int = RUN_BYTES
    ) -> None:
        """Check that Spark can run.

        Raise ``Invalid`` if Spark is not installed, or ``master`` is malformed. Raise ``Unavailable`` if no
        Java is found, or a standalone master does not answer.
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
        self._rows: FoldRows | None = None
        """The rows of the last fold of rows. None: no rows were folded yet, or they were removed."""

    @property
    def description(self) -> str:
        return f"Spark, {self._master}" if self._own else "Spark"

    @property
    def spark(self) -> Any:
        """The session of Spark. Raises ``Unavailable`` if no Java is found."""
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
        """Make the first pass as a job: a task per run. If the backfill has ``combine``, also make its rows.

        Raise ``Invalid`` if the backfill's ``fold`` needs fields that do not exist, or would count messages
        that shards do not consume. Raise ``Broken`` for errors of Spark and its tasks, and of reading.
        """
        self._release()
        fold_arguments = None if backfill is None else _fold_of(backfill, snapshot)
        with wrap_spark_errors():
            if fold_arguments is None:
                return fold_by_spark(self.spark, access, snapshot, self._run_bytes, on_read)
            self._rows = FoldRows(self.spark, access, *fold_arguments)
            return self._rows.fold(snapshot, self._run_bytes, on_read)

    def build(self, tasks: Sequence[ShardTask], on_read: OnRead) -> list[Attempt]:
        """Make the second pass. Return one attempt of each shard, in the order of tasks. With a ``fold``,
        read only `FoldRows.runs`."""
        if not tasks:
            return []
        backfill = tasks[0].load()
        with wrap_spark_errors():
            if type(backfill).fold is not Backfill.fold:
                return self._build_folded(backfill, tasks, on_read)
            return self._run_tasks(run_task, tasks, on_read)

    def _run_tasks(
        self, build: Callable[[ShardTask], Attempt], tasks: Sequence[ShardTask], on_read: OnRead
    ) -> list[Attempt]:
        length = sum(run.run.length for task in tasks for run in task.runs)
        work = partial(map, build)
        return run_tasks(self.spark, tasks, work, len(tasks), length=length, on_read=on_read)

    def _build_folded(
        self, backfill: Backfill, tasks: Sequence[ShardTask], on_read: OnRead
    ) -> list[Attempt]:
        """Fold the rows of all journals as a DataFrame, and load the rows of each shard by one task."""
        fold_rows = self._rows
        if fold_rows is None:
            raise Conflict("the second pass needs the first of the same runner")
        frame = backfill.fold(self._with_shards(backfill, fold_rows, tasks))
        if SHARD not in getattr(frame, "columns", ()):
            raise Invalid(
                f"fold() of {type(backfill).__name__} must return a DataFrame with the column {SHARD}",
                hint=f"Group by it as well: frame.groupBy({SHARD!r}, …).",
            )
        by_shard = frame.repartitionById(len(tasks), SHARD)
        order = [name for name in (backfill.order or frame.columns) if name != SHARD]
        sorted_rows = by_shard.sortWithinPartitions(*order) if order else by_shard
        results = sorted_rows.mapInArrow(partial(_load_each, list(tasks)), RESULTS)
        length = sum(run.run.length for task in tasks for run in task.runs)
        with reporting(self.spark, len(fold_rows.runs), length, on_read):
            rows = results.collect()
        if not rows:  # Spark runs no task for an empty DataFrame.
            return self._run_tasks(partial(_load, batches=()), tasks, lambda _: None)
        return results_in(rows, len(tasks))

    def _with_shards(self, backfill: Backfill, given: FoldRows, tasks: Sequence[ShardTask]) -> Any:
        """Return the committed rows of the history, each with its shard."""
        shards = _shards_by_journal(tasks)
        if not backfill.history:
            return given.rows(lambda journal: shards.get(journal, ()))
        rows = given.rows(lambda _: (0,))
        mapping = partial(_map_rows, tasks[0], shards)
        return rows.mapInArrow(mapping, rows.schema)

    def stop(self) -> None:
        """End the session and its jobs if this object has made it. Otherwise only remove kept rows."""
        self._release()
        if self._own and self._spark is not None:
            spark, self._spark = self._spark, None
            spark.stop()

    def _release(self) -> None:
        """Remove the rows that the last fold has kept, if there are any."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()


def _fold_of(
    backfill: str | Backfill, snapshot: Snapshot
) -> tuple[Any, RowFormat, Combine | None] | None:
    """Return a fold's columns, the format of its rows, and its ``combine``; None without a fold.

    Raise ``Invalid`` for a fold without fields, and for fields that do not exist.
    """
    definition = load_backfill(backfill)
    if type(definition).fold is Backfill.fold:
        return None
    if not definition.fields:
        raise Invalid(
            f"{type(definition).__name__} has a fold(), but does not say which fields it reads",
            hint='Set the class attribute fields, as in "word string, n long".',
        )
    _require_counted(definition, snapshot)
    schema = _schema(definition)
    has_class = any(shape.message for shape in snapshot.shapes)
    value = value_of_all("protobuf" if has_class else "", snapshot.shapes)
    combines = type(definition).combine is not Backfill.combine
    combine = partial(_combine, backfill) if combines else None
    return schema, make_format(schema, value, _PREFIX), combine


def _require_counted(backfill: Backfill, snapshot: Snapshot) -> None:
    """Raise ``Invalid`` if a fold would count misplaced messages, which shards do not consume."""
    application = backfill.new_application()
    for journal in snapshot.journals:
        key_place = application.key_place(journal.journal)
        if key_place is not None and key_place.policy != "count":
            raise Invalid(
                f"a fold takes all rows, and shards do not consume misplaced messages of {journal.journal} "
                f"(misplaced={key_place.policy!r}): those that were republished would count twice",
                path=f"{type(backfill).__name__}.fold",
                hint="Implement build() instead, which gets the messages that shards consume.",
            )


def _combine(backfill: str | Backfill, rows: pa.Table) -> pa.Table:
    """Call ``combine`` of a backfill. An executor loads the backfill by name."""
    return load_backfill(backfill).combine(rows)


def _schema(backfill: Backfill) -> Any:
    """Return only the columns that the fold needs: each costs time. Raise ``Invalid`` for wrong names."""
    from pyspark.sql.pandas.types import from_arrow_schema

    if unknown := sorted(set(backfill.meta) - META.keys()):
        raise Invalid(
            f"{type(backfill).__name__} asks for columns that messages do not have: "
            f"{', '.join(unknown)}",
            path="meta",
            hint=f"There are {', '.join(META)}.",
        )
    names = [name for name in META if name in backfill.meta]
    fields = [pa.field(f"{_PREFIX}{name}", META[name]) for name in names]
    fields += parse_columns(backfill.fields)
    if SHARD in (taken := [field.name for field in fields]) or len(set(taken)) < len(taken):
        raise Invalid(
            f"{type(backfill).__name__} reads two columns of the same name, or one named {SHARD}",
            path="fields",
        )
    return from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=False)


def _load_each(
    tasks: Sequence[ShardTask], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Load the rows of one shard. The number of the shard is the number of this task of Spark."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    number = context.partitionId()
    yield result_batch(number, _load(tasks[number], _of_shard(number, batches)))


def _of_shard(number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same batches. Raise ``Invalid`` for a row that names no shard: Spark gives it to any task."""
    for batch in batches:
        others = {*pa.compute.unique(batch.column(SHARD)).to_pylist()} - {number}
        if others:
            raise Invalid(
                f"fold() has returned rows of other shards than there are: {others.pop()}",
                hint=f"Keep the column {SHARD} as it was, and group by it: an outer join may lose it.",
            )
        yield batch


def _load(task: ShardTask, batches: Iterable[pa.RecordBatch]) -> Attempt:
    """Build a shard's state by ``load`` from its rows, and stage it. The rows count as its messages."""
    backfill = task.load()
    rows = 0

    def own() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in batches:
            if batch.num_rows:
                rows += batch.num_rows
                yield batch.drop_columns(SHARD)

    def fill(builder: StateBuilder) -> int:
        backfill.load(builder.shard, builder.store, own())
        return rows

    return build_state(task, backfill, fill)


def _shards_by_journal(tasks: Sequence[ShardTask]) -> dict[JournalName, list[int]]:
    """Return, by journal, the numbers of the shards with this source."""
    shards: dict[JournalName, list[int]] = {}
    for number, task in enumerate(tasks):
        for source in task.spec.sources:
            shards.setdefault(split_journal_meta(source.journal)[0], []).append(number)
    return shards


def _map_rows(
    task: ShardTask,
    shards: Mapping[JournalName, Sequence[int]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Yield each row once for each shard that has the partition of the message as a source."""
    mapping = shard_mapping(task.load(), task.partitions)
    for batch in batches:
        messages = batch.drop_columns(SHARD)
        rows, numbers = [], []
        for index, row in enumerate(messages.to_pylist()):
            for number in shards.get(mapping(SimpleNamespace(**row)).journal, ()):
                rows.append(index)
                numbers.append(number)
        mapped = messages.take(pa.array(rows, pa.int64()))
        yield mapped.append_column(batch.schema.field(SHARD), pa.array(numbers, pa.int32()))
