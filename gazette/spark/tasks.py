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
"""Function that a task calls with its items. It returns a result for each, in their order."""

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
    rows = [
        (number, number * tasks // len(items), cloudpickle.dumps(item))
        for number, item in enumerate(items)
    ]
    # One task distributes them. So it is not taken for a stage that works on them.
    frame = spark.createDataFrame(rows, _ITEMS).coalesce(1).repartitionById(tasks, "task")
    # A shuffle does not promise an order.
    found = frame.sortWithinPartitions("number").mapInArrow(partial(_run, work), _RESULTS)
    with nullcontext() if on_read is None else reporting(spark, tasks, length, on_read):
        results = {row.number: cloudpickle.loads(bytes(row.result)) for row in found.collect()}
    if len(results) != len(items):
        raise Bug("Spark did not report one result per item", items=len(items))
    return [results[number] for number in range(len(items))]


def _run(work: Work[T, R], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    numbers: list[int] = []

    def items() -> Iterator[T]:
        for batch in batches:
            for row in batch.to_pylist():
                numbers.append(row["number"])
                yield cloudpickle.loads(row["item"])

    for at, result in enumerate(work(items())):
        arrays = [
            pa.array([numbers[at]], pa.int32()),
            pa.array([cloudpickle.dumps(result)], pa.binary()),
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=["number", "result"])
