"""Reading a long history with a cluster: `read` has both passes run by Spark's executors.

A data source plans in a process of the driver that has no Spark. So ``format("gazette")`` by itself makes
the first pass there, with threads, which is well for gigabytes. For terabytes, `read` makes it a job.
"""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

from gazette.errors import Invalid
from gazette.history.access import Access
from gazette.history.fold import Folded, fold_snapshot
from gazette.history.read import resolver, summarise_run
from gazette.history.snapshot import Run, Snapshot
from gazette.history.summary import RunSummary
from gazette.history.take import take_snapshot
from gazette.spark.options import ReadOptions
from gazette.spark.table import check_isolation


def read(spark: Any, *, schema: Any = None, **options: Any) -> Any:
    """A DataFrame of journals, as of now, with the first pass made by the executors.

    ``options`` are those of ``format("gazette")``; a dot in a name is written as ``__``
    (``broker__address``). What is read is fixed by this call, whatever is appended later.
    Raises what planning does.
    """
    given = {
        name.replace("__", "."): value if isinstance(value, str) else _text(value)
        for name, value in options.items()
    }
    parsed = ReadOptions.parse(given)
    reader = spark.read.format("gazette").options(**given)
    if schema is not None:
        reader = reader.schema(schema)
    if parsed.isolation == "read_committed":
        reader = reader.option("plan", encode_plan(fold_by_spark(spark, parsed)))
    return reader.load()


def fold_by_spark(spark: Any, options: ReadOptions, snapshot: Snapshot | None = None) -> Folded:
    """The first pass as a job: each run is summarised by a task, and the driver folds.

    ``snapshot``: of that, instead of what there is now.
    """
    context = spark.sparkContext
    access = options.access
    with access.open() as opened:
        if snapshot is None:
            snapshot = take_snapshot(opened, options.selection)
        check_isolation(options, snapshot)

        def summarise_all(runs: Sequence[Run]) -> list[RunSummary]:
            if not runs:
                return []
            tasks = context.parallelize([(access, run) for run in runs], len(runs))
            found: list[RunSummary] = tasks.map(_summarise).collect()
            return found

        return fold_snapshot(snapshot, summarise_all, resolver(opened), options.run_bytes)


def _summarise(task: tuple[Access, Run]) -> RunSummary:
    access, run = task
    with access.open() as opened:
        return summarise_run(opened, run)


def encode_plan(folded: Folded) -> str:
    """A fold as the value of an option."""
    return base64.b64encode(zlib.compress(pickle.dumps(folded), 1)).decode()


def decode_plan(text: str) -> Folded:
    """Undo `encode_plan`. Raises `Invalid`."""
    try:
        folded = pickle.loads(zlib.decompress(base64.b64decode(text, validate=True)))  # noqa: S301
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise Invalid(
            f"not a plan: {error}",
            path="option plan",
            hint="Use gazette.spark.read(), which sets it.",
        ) from error
    if not isinstance(folded, Folded):
        raise Invalid("not a plan", path="option plan")
    return folded


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
