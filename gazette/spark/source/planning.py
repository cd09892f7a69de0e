"""Reads of a long history with a cluster: in `read`, Spark's executors make both passes.

A data source plans in a process of the driver that has no Spark. So ``format("gazette")`` alone reads
there, with threads, the fragments whose summaries are not kept yet. For terabytes, `read` makes the
first pass a job: its tasks find or make the summaries, and combine those of each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gazette.history.first_pass import resolver, summarise_run
from gazette.history.merge import FoldedSnapshot, fold_snapshot
from gazette.history.snapshot import RUN_BYTES, Run, Snapshot
from gazette.history.snapshot_builder import require_stored, take_snapshot
from gazette.history.source import Access
from gazette.history.summary import Summary
from gazette.spark.error_hints import with_hints
from gazette.spark.progress import OnRead
from gazette.spark.source.options import ReadOptions
from gazette.spark.source.plan import Plan, encode_plan
from gazette.spark.source.schema import table_schema
from gazette.spark.source.table import check_isolation, warn_of_loss
from gazette.spark.tasks import run_tasks
from gazette.spark.worker_process import keep_imports

TASKS_MAX: Final = 4096
"""Greatest number of tasks of the first pass. The driver's share of each is some milliseconds."""


@with_hints()
def read(spark: Any, *, schema: Any = None, **options: Any) -> Any:
    """Return a DataFrame of journals as of now; the executors make the first pass.

    ``options`` are those of ``format("gazette")``; a dot in a name is written as ``__``
    (``broker__address``). This call fixes what is read, whatever is appended later. Raise what
    planning raises.
    """
    given = option_texts(options)
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
            warn_of_loss(snapshot)
            check_isolation(parsed, snapshot)
        folded = fold_by_spark(spark, parsed.access, snapshot, parsed.run_bytes)
        reader = reader.option("plan", encode_plan(Plan(folded.runs)))
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load()


def fold_by_spark(
    spark: Any,
    access: Access,
    snapshot: Snapshot,
    run_bytes: int = RUN_BYTES,
    on_read: OnRead | None = None,
) -> FoldedSnapshot:
    """Run the first pass as a job: tasks summarise the runs, and the driver folds.

    ``on_read`` is called with bytes as tasks end. Raise what reading raises, as on the driver.
    """

    def summarise_all(runs: Sequence[Run]) -> list[Summary]:
        # This function may be called again, with runs that begin elsewhere.
        return summarise_by_spark(spark, access, runs, on_read)

    with access.open() as opened:
        return fold_snapshot(snapshot, summarise_all, resolver(opened), run_bytes)


def summarise_by_spark(
    spark: Any, access: Access, runs: Sequence[Run], on_read: OnRead | None = None
) -> list[Summary]:
    """Return the summaries of runs, which tasks make. Arguments and errors are as of `fold_by_spark`."""
    length = sum(run.length for run in runs)
    work = partial(_summarise, access)
    return run_tasks(spark, runs, work, TASKS_MAX, length=length, on_read=on_read)


def _summarise(access: Access, runs: Iterable[Run]) -> Iterator[Summary]:
    with with_hints(), access.open() as opened:
        for run in runs:
            yield summarise_run(opened, run)
    keep_imports()


def option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options of a call in Python as texts, and with a dot for ``__`` in their names."""
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
