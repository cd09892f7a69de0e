"""Runs the work of a task in a worker process of Spark: `run_each`. Later tasks run in the same process."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pyspark import TaskContext

from gazette.history.source import Access, OpenAccess
from gazette.history.spark.error_hints import with_hints

T = TypeVar("T")
R = TypeVar("R")


def run_each(
    access: Access, work: Callable[[OpenAccess, T], Iterable[R]], items: Iterable[T]
) -> Iterator[R]:
    """Yield the results of ``work`` for each item. Show hints of errors in tracebacks.

    At the end of the first task, exclude the present objects from the garbage collector. Otherwise a worker
    would go through all objects after every task. Most of them come from imports, and are never garbage.
    """
    with with_hints(), access.open() as opened:
        for item in items:
            yield from work(opened, item)
    if TaskContext.get() is not None:
        _freeze()


@functools.cache
def _freeze() -> None:
    gc.collect()
    gc.freeze()
