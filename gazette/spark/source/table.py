"""Journals as a table of Spark: its runs are the partitions, and filters leave some of them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

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
from gazette.message.uuid import clock_at
from gazette.spark.error_hints import with_hints
from gazette.spark.source.options import ReadOptions
from gazette.spark.source.plan import decode_plan
from gazette.spark.source.schema import common_value, row_format
from gazette.spark.worker_process import keep_imports


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
    return fold_by_threads(access, snapshot, run_bytes=options.run_bytes, threads=options.threads)


def check_isolation(options: ReadOptions, snapshot: Snapshot) -> None:
    """Raise `Invalid` if messages cannot be read committed, since their UUID is not visible to us."""
    for journal in snapshot.journals if options.isolation == "read_committed" else ():
        try:
            require_uuids(journal.journal, journal.shape)
        except Invalid as error:
            raise error.within("option") from error


class GazetteReader(DataSourceReader):
    """Reader of journals as a table."""

    def __init__(self, options: ReadOptions, schema: Any, combine: Combine | None = None) -> None:
        self._options = options
        self._schema = schema
        self._combine = combine
        self._bounds = Bounds()

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
            snapshot = self._bounds.selected(snapshot)
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
        format = self._bounds.applied(format)
        return [RunPartition(run, format, self._combine) for run in runs if format.selects(run)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(self._options.access, partition)


class GazettePushdownReader(GazetteReader):
    """The same reader, for a Spark that offers filters: it refuses ``pushFilters`` otherwise.

    Filters leave out runs and rows before these are parsed. Spark applies them again.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        prefix = self._options.meta_prefix
        for one in filters:
            self._bounds = self._bounds.narrowed(one, prefix)
            yield one


class Bounds:
    """Bounds of journals, offsets and times that filters give."""

    def __init__(self) -> None:
        self.journals: frozenset[str] | None = None
        self.journal_prefix = ""
        self.offset_begin = 0
        self.offset_end: int | None = None
        self.clock_begin = 0
        self.clock_end: int | None = None

    def selected(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot without journals that cannot have a wanted row."""
        kept = [
            journal
            for journal in snapshot.journals
            if (self.journals is None or journal.journal in self.journals)
            and journal.journal.startswith(self.journal_prefix)
        ]
        return Snapshot(tuple(kept))

    def applied(self, format: RowFormat) -> RowFormat:
        return replace(
            format,
            offset_begin=max(format.offset_begin, self.offset_begin),
            offset_end=_least(format.offset_end, self.offset_end),
            clock_begin=max(format.clock_begin, self.clock_begin),
            clock_end=_least(format.clock_end, self.clock_end),
            # Spark leaves out rows without a time, and keeps those with the clock 0.
            unclocked=format.clock_end is None,
        )

    def narrowed(self, filter: Filter, prefix: str) -> Bounds:
        """Return the bounds with one more filter applied; unchanged for a filter of another kind."""
        bounds = Bounds()
        bounds.__dict__.update(self.__dict__)
        attribute: tuple[str, ...] = getattr(filter, "attribute", ())
        name = attribute[0] if len(attribute) == 1 else ""
        value = getattr(filter, "value", None)
        match name.removeprefix(prefix) if name.startswith(prefix) else "":
            case "journal":
                bounds._narrow_journal(filter, value)
            case "offset" if isinstance(value, int):
                bounds._narrow_number(filter, value, "offset")
            case "clock" if isinstance(value, int) and value > 0:
                bounds._narrow_number(filter, value, "clock")
            case "timestamp" if hasattr(value, "timestamp"):
                assert value is not None
                micros = round(value.timestamp() * 1e6)
                if micros > 0:
                    # One timestamp stands for all clocks of its microsecond.
                    bounds._narrow_number(filter, clock_at(micros * 1000), "clock", 160)
        return bounds

    def _narrow_journal(self, filter: Filter, value: Any) -> None:
        names: frozenset[str] | None = None
        if isinstance(filter, EqualTo):
            names = frozenset([value])
        elif isinstance(filter, In):
            names = frozenset(value)
        elif isinstance(filter, StringStartsWith) and len(value) > len(self.journal_prefix):
            self.journal_prefix = value
        if names is not None:
            self.journals = names if self.journals is None else self.journals & names

    def _narrow_number(self, filter: Filter, value: int, what: str, width: int = 1) -> None:
        begin: int | None = None
        end: int | None = None
        if isinstance(filter, EqualTo):
            begin, end = value, value + width
        elif isinstance(filter, GreaterThan):
            begin = value + width
        elif isinstance(filter, GreaterThanOrEqual):
            begin = value
        elif isinstance(filter, LessThan):
            end = value
        elif isinstance(filter, LessThanOrEqual):
            end = value + width
        if begin is not None:
            key = f"{what}_begin"
            setattr(self, key, max(getattr(self, key), begin))
        if end is not None:
            key = f"{what}_end"
            setattr(self, key, _least(getattr(self, key), end))


def _least(one: int | None, other: int | None) -> int | None:
    given = [value for value in (one, other) if value is not None]
    return min(given) if given else None
