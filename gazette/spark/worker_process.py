"""What tasks do to the process that they run in, which the next tasks run in as well."""

from __future__ import annotations

import functools
import gc

from pyspark import TaskContext


def keep_imports() -> None:
    """In a worker of Spark: have the collector leave alone what is there now. Call it when a task ends.

    Workers collect garbage behind every task, through all objects. What was imported is most of them, and
    never garbage.
    """
    if TaskContext.get() is not None:
        _freeze()


@functools.cache
def _freeze() -> None:
    gc.collect()
    gc.freeze()
