"""Work on objects by tasks of Spark: `run_tasks`. Needs a session of either kind, Spark Connect included."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark import cloudpickle

from gazette.backfill.build import OnRead
from gazette.errors import Bug
from gazette.spark.progress import reporting

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Iterator[T]], Iterable[R]]
"""Function that a task calls with its items. It yields the result of each before it takes the next."""

RESULTS: Final = "number int, result binary"
"""Columns of results, as `result_batch` has them."""


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

    There is a task for each item, but at most ``tasks_max`` tasks. Neighbours share a task.
    ``on_read`` is called as tasks end, with bytes of ``length`` (see `reporting`). Raise Spark's
    errors.
    """
    if not items:
        return []
    found = task_frame(spark, items, tasks_max, work, RESULTS, result_batch)
    tasks = min(len(items), tasks_max)
    with nullcontext() if on_read is None else reporting(spark, tasks, length, on_read):
        return results_in(found.collect(), len(items))


def results_in(rows: Iterable[Any], count: int) -> list[Any]:
    """Return the results of rows of `RESULTS`, by number.

    Raise `Bug` unless there is one of each number below ``count``.
    """
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
    """Return a DataFrame of the batches that ``work`` yields, or of what ``batch`` makes of its results.

    ``batch`` gets the number of the item that was taken last. Neighbours share a task, if there are
    more than ``tasks_max`` items.
    """
    tasks = max(1, min(len(items), tasks_max))
    bounds = [-(-task * len(items) // tasks) for task in range(tasks + 1)]
    shares = [cloudpickle.dumps(list(items[a:b])) for a, b in pairwise(bounds)]
    # A list of rows would take Spark 40 ms more of a core than a table of Arrow.
    table = pa.table(
        {
            "task": pa.array(range(tasks), pa.int32()),
            "first": pa.array(bounds[:-1], pa.int32()),
            "items": pa.array(shares, pa.binary()),
            # Spark takes equal plans for the same. What one call has cached must not stand for another.
            "call": pa.repeat(uuid.uuid4().hex, tasks),
        }
    )
    # One task distributes them. So it is not taken for a stage that works on them.
    frame = spark.createDataFrame(table).coalesce(1).repartitionById(tasks, "task")
    return frame.mapInArrow(partial(_run, work, batch), schema)


def _run(
    work: Work[T, R],
    batch: Callable[[int, R], pa.RecordBatch] | None,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    number = 0

    def items() -> Iterator[T]:
        nonlocal number
        for given in batches:
            for row in given.to_pylist():
                number = row["first"] - 1
                for item in cloudpickle.loads(row["items"]):
                    number += 1
                    yield item

    for result in work(items()):
        yield result if batch is None else batch(number, result)


def result_batch(number: int, result: Any) -> pa.RecordBatch:
    """Return a row of `RESULTS`."""
    arrays = [pa.array([number], pa.int32()), pa.array([cloudpickle.dumps(result)], pa.binary())]
    return pa.RecordBatch.from_arrays(arrays, names=["number", "result"])
