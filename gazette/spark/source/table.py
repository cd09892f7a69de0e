"""Journals as a table of Spark: its runs are the partitions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat, require_uuids
from gazette.history.combine import Combine, Combiner
from gazette.history.first_pass import fold_by_threads
from gazette.history.merge import CommittedRun, FoldedSnapshot
from gazette.history.row_format import RowFormat
from gazette.history.rows import read_rows
from gazette.history.snapshot import Run, Snapshot
from gazette.history.snapshot_builder import require_stored, take_snapshot
from gazette.history.source import Access, OpenAccess
from gazette.protocol.ids import JournalName, Offset
from gazette.spark.error_hints import with_hints
from gazette.spark.source.options import ReadOptions
from gazette.spark.source.plan import decode_plan
from gazette.spark.source.schema import common_value, row_format
from gazette.spark.worker_process import keep_imports

LOGGER: Final = logging.getLogger(__name__)

_THREADS: Final = min(8, os.cpu_count() or 1)
"""Number of runs that the driver reads at the same time."""


class RunPartition(InputPartition):
    """A run for a task. ``combine`` combines its rows, if it is given."""

    def __init__(
        self, run: CommittedRun | Run, format: RowFormat, combine: Combine | None = None
    ) -> None:
        super().__init__(run)
        self.format = format
        self.combine = combine


def read_partition(access: Access, partition: InputPartition | None) -> Iterator[Any]:
    """Yield the rows of one task."""
    # Without partitions, Spark makes one of nothing.
    if not isinstance(partition, RunPartition):
        return
    combiner = Combiner(partition.combine, partition.format.schema)
    with with_hints(), access.open() as opened:
        for batch in read_rows(opened, partition.value, partition.format):
            yield from combiner.add(batch)
        yield from combiner.finish()
    keep_imports()


def fold_on_driver(access: OpenAccess, snapshot: Snapshot, options: ReadOptions) -> FoldedSnapshot:
    """Make the first pass by threads of this process."""
    return fold_by_threads(access, snapshot, run_bytes=options.run_bytes, threads=_THREADS)


def check_isolation(options: ReadOptions, snapshot: Snapshot) -> None:
    """Raise `Invalid` if messages cannot be read committed, since their UUID is not visible to us."""
    for journal in snapshot.journals if options.isolation == "read_committed" else ():
        try:
            require_uuids(journal.journal, journal.shape)
        except Invalid as error:
            raise error.within("option") from error


def warn_of_loss(snapshot: Snapshot, warned: set[tuple[JournalName, Offset]] | None = None) -> None:
    """Log the bytes that journals have lost, except those of which ``warned`` has the end."""
    known = set() if warned is None else warned
    for journal in snapshot.journals:
        for begin, end in journal.missed:
            if (journal.journal, end) in known:
                continue
            known.add((journal.journal, end))
            LOGGER.warning(
                "journal %(journal)s has lost its bytes from %(begin)s to %(end)s: reading continues "
                "behind them (failOnDataLoss is false)",
                {"journal": journal.journal, "begin": begin, "end": end},
            )


class GazetteReader(DataSourceReader):
    """Reader of journals as a table."""

    def __init__(self, options: ReadOptions, schema: Any, combine: Combine | None = None) -> None:
        self._options = options
        self._schema = schema
        self._combine = combine

    @with_hints()
    def partitions(self) -> list[InputPartition]:
        options = self._options
        if options.plan:
            plan = decode_plan(options.plan)
            shapes = [run.run.shape for run in plan.runs]
            return self._partitions(shapes, plan.runs)
        with options.access.open() as access:
            snapshot = take_snapshot(access, options.selection)
            require_stored(snapshot, options.selection)
            warn_of_loss(snapshot)
            check_isolation(options, snapshot)
            if options.isolation == "read_uncommitted":
                return self._partitions(snapshot.shapes, snapshot.runs(options.run_bytes))
            folded = fold_on_driver(access, snapshot, options)
            return self._partitions(snapshot.shapes, folded.runs)

    def _partitions(
        self,
        shapes: Iterable[MessageFormat],
        runs: Sequence[CommittedRun | Run],
    ) -> list[InputPartition]:
        format = row_format(self._options, self._schema, common_value(self._options, shapes))
        return [RunPartition(run, format, self._combine) for run in runs if format.selects(run)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(self._options.access, partition)
