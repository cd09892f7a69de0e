"""Reads of a long history with a cluster: in `read`, Spark's executors make both passes.

A data source plans in a process of the driver that has no Spark. So ``format("gazette")`` alone makes
the first pass there, with threads, which suits gigabytes. For terabytes, `read` makes it a job. Its
tasks keep the rows that they find on the disks of their executors. Spark keeps shuffles there too,
and removes all at its end. The second pass has little left to do where it finds those rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gazette.history.merge import FoldedSnapshot, fold_snapshot
from gazette.history.read import resolver, summarise_run
from gazette.history.row_cache import KeptRows, summarise_and_keep
from gazette.history.snapshot import RUN_BYTES, Run, Snapshot
from gazette.history.snapshot_builder import require_stored, take_snapshot
from gazette.history.source import Access
from gazette.history.summary import RunSummary
from gazette.spark.error_hints import with_hints
from gazette.spark.source.options import ReadOptions
from gazette.spark.source.plan import DIRECTORY, Plan, encode_plan
from gazette.spark.source.schema import common_value, row_format, table_schema
from gazette.spark.source.table import check_isolation
from gazette.spark.worker_process import keep_imports

_LOCAL_DIRECTORIES: Final = "SPARK_LOCAL_DIRS"
"""Variable that tells Python workers the executor's directories. Spark removes them at its end."""


@with_hints()
def read(spark: Any, *, schema: Any = None, **options: Any) -> Any:
    """Return a DataFrame of journals as of now; the executors make the first pass.

    ``options`` are those of ``format("gazette")``; a dot in a name is written as ``__``
    (``broker__address``). This call fixes what is read, whatever is appended later. Raise what
    planning raises.
    """
    given = {
        name.replace("__", "."): value if isinstance(value, str) else _text(value)
        for name, value in options.items()
    }
    parsed = ReadOptions.parse(given)
    if parsed.isolation == "read_committed":
        if schema is None:
            schema, inferred = table_schema(parsed)
            if inferred and not parsed.has_mode:
                parsed, given = parsed.inferred(), {**given, "mode": "FAILFAST"}
        elif isinstance(schema, str):
            schema = spark.createDataFrame([], schema).schema
    reader = spark.read.format("gazette").options(**given)
    if parsed.isolation == "read_committed":
        with parsed.access.open() as opened:
            snapshot = take_snapshot(opened, parsed.selection)
            require_stored(snapshot, parsed.selection)
            check_isolation(parsed, snapshot)
        format = row_format(parsed, schema, common_value(parsed, snapshot.shapes))
        kept_rows = KeptRows(format) if parsed.keep else None
        _, plan = plan_by_spark(spark, parsed.access, snapshot, parsed.run_bytes, kept_rows)
        reader = reader.option("plan", encode_plan(plan))
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load()


def plan_by_spark(
    spark: Any,
    access: Access,
    snapshot: Snapshot,
    run_bytes: int = RUN_BYTES,
    kept_rows: KeptRows | None = None,
) -> tuple[FoldedSnapshot, Plan]:
    """Run the first pass as a job: each run is summarised by a task, and the driver folds.

    ``kept_rows``: what the tasks keep for the second pass. Raise what reading raises, as on the driver.
    """
    context = spark.sparkContext
    kept: dict[int, str] = {}

    def summarise_all(runs: Sequence[Run]) -> list[RunSummary]:
        # This function may be called a second time, with runs that begin earlier.
        kept.clear()
        if not runs:
            return []
        tasks = context.parallelize([(access, run, kept_rows) for run in runs], len(runs))
        found: list[tuple[RunSummary, str]] = tasks.map(_summarise).collect()
        kept.update((summary.number, path) for summary, path in found if path)
        return [summary for summary, _ in found]

    with access.open() as opened:
        folded = fold_snapshot(snapshot, summarise_all, resolver(opened), run_bytes)
    return folded, Plan(folded.runs, kept)


@with_hints()
def _summarise(task: tuple[Access, Run, KeptRows | None]) -> tuple[RunSummary, str]:
    access, run, kept_rows = task
    local = os.environ.get(_LOCAL_DIRECTORIES, "").split(",")[0]
    with access.open() as opened:
        if kept_rows is None or not local:
            found = summarise_run(opened, run), ""
        else:
            found = summarise_and_keep(
                opened, run, kept_rows, Path(os.path.abspath(local)) / DIRECTORY
            )
    keep_imports()
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
