"""Runs work on objects in tasks of Spark: `run_tasks`. Any session will do, even one of Spark Connect."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark import cloudpickle

from gazette.errors import Bug
from gazette.history.backfill.build import OnRead
from gazette.history.spark.progress import reporting

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Iterator[T]], Iterable[R]]
"""Function that a task calls with its items. It yields the result of an item before it takes the next."""

RESULTS: Final = "number int, result binary"
"""Columns of the results of `result_batch`."""


def run_tasks(
    spark: Any,
    items: Sequence[T],
    work: Work[T, R],
    tasks_max: int,
    *,
    length: int = 0,
    on_read: OnRead | None = None,
) -> list[R]:
    """Return the result of ``work`` for each item, in the order of items. Blocks.

    There is a task for each item. With more than ``tasks_max`` items, neighbouring items share a task.
    Call ``on_read`` with parts of ``length`` as tasks end (see `reporting`). Raise Spark's own exceptions.
    """
    if not items:
        return []
    frame = task_frame(spark, items, tasks_max, work, RESULTS, result_batch)
    tasks = min(len(items), tasks_max)
    with nullcontext() if on_read is None else reporting(spark, tasks, length, on_read):
        return results_in(frame.collect(), len(items))


def results_in(rows: Iterable[Any], count: int) -> list[Any]:
    """Return the results in rows of `RESULTS`, in order of number. Raise `Bug` unless there is exactly one
    result for each number below ``count``."""
    results = {row.number: cloudpickle.loads(bytes(row.result)) for row in rows}
    if sorted(results) != list(range(count)):
        raise Bug("Spark did not report one result of each task", results=count)
    return [results[number] for number in range(count)]


def task_frame(
    spark: Any,
    items: Sequence[T],
    tasks_max: int,
    work: Work[T, R],
    schema: Any,
    batch: Callable[[int, R], pa.RecordBatch] | None = None,
) -> Any:
    """Return a DataFrame of the batches that ``work`` yields, or that ``batch`` makes of each result.

    ``batch`` also gets the number of the item. Beyond ``tasks_max`` items, neighbouring items share a task.
    """
    tasks = max(1, min(len(items), tasks_max))
    bounds = [-(-task * len(items) // tasks) for task in range(tasks + 1)]
    shares = [cloudpickle.dumps(list(items[a:b])) for a, b in pairwise(bounds)]
    # A table of Arrow takes 40 ms less time of a core than a list of rows.
    table = pa.table(
        {
            "task": pa.array(range(tasks), pa.int32()),
            "first": pa.array(bounds[:-1], pa.int32()),
            "items": pa.array(shares, pa.binary()),
            # Make the plan unique: otherwise Spark would use the cached result of another call.
            "call": pa.repeat(uuid.uuid4().hex, tasks),
        }
    )
    # Let one task distribute the items. Progress is read from the stage with ``tasks`` tasks, so this stage
    # must have another number.
    frame = spark.createDataFrame(table).coalesce(1).repartitionById(tasks, "task")
    return frame.mapInArrow(partial(_run, work, batch), schema)


def _run(
    work: Work[T, R],
    batch: Callable[[int, R], pa.RecordBatch] | None,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Do the work of one task. ``number`` is of the item that ``work`` took last, whose results come next."""
    number = 0

    def items() -> Iterator[T]:
        nonlocal number
        for item_batch in batches:
            for row in item_batch.to_pylist():
                number = row["first"] - 1
                for item in cloudpickle.loads(row["items"]):
                    number += 1
                    yield item

    for result in work(items()):
        yield result if batch is None else batch(number, result)


def result_batch(number: int, result: Any) -> pa.RecordBatch:
    """Return a batch with one row of `RESULTS`."""
    arrays = [pa.array([number], pa.int32()), pa.array([cloudpickle.dumps(result)], pa.binary())]
    return pa.RecordBatch.from_arrays(arrays, names=["number", "result"])
