"""Journals as a table of Spark: the runs of a snapshot are the partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from gazette.history.columns import require_uuids
from gazette.history.first_pass import fold_by_threads
from gazette.history.loss_warnings import warn_of_loss
from gazette.history.merge import CommittedRun
from gazette.history.row_format import RowFormat
from gazette.history.rows import read_rows
from gazette.history.snapshot import Run, Snapshot
from gazette.history.source import Access, OpenAccess
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.source.options import ReadOptions
from gazette.history.spark.source.schema import row_format
from gazette.history.spark.worker_process import run_each
from gazette.protocol.text.validation import within


class RunPartition(InputPartition):
    """A run for a task."""

    def __init__(self, run: CommittedRun | Run, format: RowFormat) -> None:
        super().__init__(run)
        self.format = format


def read_partition(access: Access, partition: InputPartition | None) -> Iterator[Any]:
    """Yield the rows of a task's run."""
    # Without partitions, Spark runs one task with an empty partition.
    if not isinstance(partition, RunPartition):
        return iter(())
    return run_each(access, partial(read_rows, format=partition.format), [partition.value])


def checked_snapshot(access: OpenAccess, options: ReadOptions) -> Snapshot:
    """Return a snapshot of the journals, and log lost bytes. Errors: `take_snapshot`, `check_isolation`."""
    snapshot = options.snapshot(access)
    warn_of_loss(snapshot)
    check_isolation(options, snapshot)
    return snapshot


def check_isolation(options: ReadOptions, snapshot: Snapshot) -> None:
    """Raise `Invalid` if messages cannot be read committed, because their UUIDs are unknown."""
    with within("option"):
        for journal in snapshot.journals if options.committed else ():
            require_uuids(journal.journal, journal.shape)


class GazetteReader(DataSourceReader):
    """Reader of journals as a table."""

    def __init__(self, options: ReadOptions, schema: Any) -> None:
        self._options = options
        self._schema = schema

    @with_hints()
    def partitions(self) -> list[InputPartition]:
        options = self._options
        with options.access.open() as access:
            runs: Sequence[CommittedRun | Run]
            snapshot = checked_snapshot(access, options)
            if options.committed:
                runs = fold_by_threads(access, snapshot, run_bytes=options.run_bytes).runs
            else:
                runs = snapshot.runs(options.run_bytes)
        format = row_format(options, self._schema, snapshot.shapes)
        return [RunPartition(run, format) for run in runs if format.selects(run)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(self._options.access, partition)
