"""Work on objects by tasks of Spark: `run_tasks`. Needs a session of either kind, Spark Connect included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark import cloudpickle

from gazette.errors import Bug
from gazette.spark.progress import OnRead, reporting

T = TypeVar("T")
R = TypeVar("R")

Work = Callable[[Iterator[T]], Iterable[R]]
"""Function that a task calls with its items. It yields the result of each before it takes the next."""

_ITEMS: Final = "number int, task int, item binary"
_RESULTS: Final = "number int, result binary"


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
    tasks = min(len(items), tasks_max)
    found = task_frame(spark, items, tasks, work, _RESULTS, _result)
    with nullcontext() if on_read is None else reporting(spark, tasks, length, on_read):
        results = {row.number: cloudpickle.loads(bytes(row.result)) for row in found.collect()}
    if len(results) != len(items):
        raise Bug("Spark did not report one result per item", items=len(items))
    return [results[number] for number in range(len(items))]


def task_frame(
    spark: Any,
    items: Sequence[T],
    tasks: int,
    work: Work[T, R],
    schema: Any,
    batch: Callable[[int, R], pa.RecordBatch],
) -> Any:
    """Return a DataFrame of what ``work`` yields, in the form that ``batch`` gives it.

    ``batch`` gets the number of the item that was taken last. Neighbours share a task.
    """
    rows = [
        (number, number * tasks // len(items), cloudpickle.dumps(item))
        for number, item in enumerate(items)
    ]
    # One task distributes them. So it is not taken for a stage that works on them.
    frame = spark.createDataFrame(rows, _ITEMS).coalesce(1).repartitionById(tasks, "task")
    # A shuffle does not promise an order.
    return frame.sortWithinPartitions("number").mapInArrow(partial(_run, work, batch), schema)


def _run(
    work: Work[T, R],
    batch: Callable[[int, R], pa.RecordBatch],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    number = 0

    def items() -> Iterator[T]:
        nonlocal number
        for given in batches:
            for row in given.to_pylist():
                number = row["number"]
                yield cloudpickle.loads(row["item"])

    for result in work(items()):
        yield batch(number, result)


def _result(number: int, result: Any) -> pa.RecordBatch:
    arrays = [pa.array([number], pa.int32()), pa.array([cloudpickle.dumps(result)], pa.binary())]
    return pa.RecordBatch.from_arrays(arrays, names=["number", "result"])
