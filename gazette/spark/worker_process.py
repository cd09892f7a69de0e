"""Changes to the process in which a task runs; the next tasks run in it as well."""

from __future__ import annotations

import functools
import gc

from pyspark import TaskContext


def keep_imports() -> None:
    """Exclude the present objects of a Spark worker from its garbage collector. Call it after a task.

    Workers collect garbage after every task, through all objects. Most of these come from imports,
    and are never garbage.
    """
    if TaskContext.get() is not None:
        _freeze()


@functools.cache
def _freeze() -> None:
    gc.collect()
    gc.freeze()
