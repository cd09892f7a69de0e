"""Work of tasks in a process of Spark: `run_each`. The next tasks run in the same process."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from pyspark import TaskContext

from gazette.history.source import Access, OpenAccess
from gazette.spark.error_hints import with_hints

T = TypeVar("T")
R = TypeVar("R")


def run_each(
    access: Access, work: Callable[[OpenAccess, T], Iterable[R]], items: Iterable[T]
) -> Iterator[R]:
    """Yield what ``work`` makes of each item. Show hints of errors, as tasks of Spark need it.

    At the end, exclude the present objects from the garbage collector. Workers collect garbage after
    every task, through all objects. Most of these come from imports, and are never garbage.
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
