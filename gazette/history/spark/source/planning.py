"""Reads of a long history on a cluster: `read` makes both passes on Spark's executors.

A data source plans in a process of the driver that cannot run jobs. So ``format("gazette")`` reads the
fragments without a kept summary there, with threads. For terabytes, `read` makes the first pass a job: tasks
find or make the summaries of fragments, and combine the summaries of each run. Then they make the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gazette.history.backfill.build import OnRead
from gazette.history.first_pass import resolver, summarise_run
from gazette.history.merge import CommittedRun, FoldedSnapshot, fold_snapshot
from gazette.history.rows import read_rows
from gazette.history.snapshot import RUN_BYTES, Run, Snapshot
from gazette.history.source import Access, OpenAccess
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.source.options import ReadOptions
from gazette.history.spark.source.schema import row_format, table_schema
from gazette.history.spark.source.table import checked_snapshot
from gazette.history.spark.tasks import run_tasks, task_frame
from gazette.history.spark.worker_process import run_each
from gazette.history.summary import Summary

TASKS_MAX: Final = 4096
"""Greatest number of tasks of the first pass. Each task costs the driver some milliseconds."""


@with_hints()
def read(spark: Any, *, schema: Any = None, **options: Any) -> Any:
    """Return a DataFrame of journals as of now. The executors make both passes.

    ``options`` are the options of ``format("gazette")``, with ``__`` for a dot in names
    (``broker__address``). Messages that are appended after this call are not read. Raise ``Invalid`` for
    wrong options or columns, and the errors of `take_snapshot` and of reading.
    """
    parsed = ReadOptions.parse(option_texts(options))
    if schema is None:
        schema, inferred = table_schema(parsed)
        if inferred:
            parsed = parsed.inferred()
    elif isinstance(schema, str):
        schema = spark.createDataFrame([], schema).schema
    with parsed.access.open() as opened:
        snapshot = checked_snapshot(opened, parsed)
    format = row_format(parsed, schema, snapshot.shapes)
    runs: Sequence[CommittedRun | Run]
    if parsed.committed:
        runs = fold_by_spark(spark, parsed.access, snapshot, parsed.run_bytes).runs
    else:
        runs = snapshot.runs(parsed.run_bytes)
    selected = [run for run in runs if format.selects(run)]
    work = partial(run_each, parsed.access, partial(read_rows, format=format))
    return task_frame(spark, selected, len(selected), work, schema)


def fold_by_spark(
    spark: Any,
    access: Access,
    snapshot: Snapshot,
    run_bytes: int = RUN_BYTES,
    on_read: OnRead | None = None,
) -> FoldedSnapshot:
    """Run the first pass as a job: tasks summarise the runs, and the driver folds.

    Call ``on_read`` with numbers of bytes, when tasks end. Spark's exceptions have a task's error as text.
    """

    def summarise_all(runs: Sequence[Run]) -> list[Summary]:
        # The fold may call this function again, with runs that begin at other offsets.
        return summarise_by_spark(spark, access, runs, on_read)

    with access.open() as opened:
        return fold_snapshot(snapshot, summarise_all, resolver(opened), run_bytes)


def summarise_by_spark(
    spark: Any, access: Access, runs: Sequence[Run], on_read: OnRead | None = None
) -> list[Summary]:
    """Return the summaries of runs, made by tasks. See `fold_by_spark` for arguments and errors."""
    length = sum(run.length for run in runs)
    work = partial(run_each, access, _summaries)
    return run_tasks(spark, runs, work, TASKS_MAX, length=length, on_read=on_read)


def _summaries(access: OpenAccess, run: Run) -> Iterator[Summary]:
    yield summarise_run(access, run)


def option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a call in Python as texts, with a dot for ``__`` in names."""
    return {name.replace("__", "."): _text(value) for name, value in options.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
