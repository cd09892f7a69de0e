"""Journals as a stream of Spark: micro-batches of committed messages.

To plan a batch, the driver needs the summaries of its fragments. For the first batch, and for few bytes, the
driver makes the summaries. Otherwise tasks of one batch summarise the fragments of the next batch ("ahead"),
and the driver finds the kept summaries. So an offset also says up to which offsets tasks were asked for
summaries. Some batches have only such tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from gazette.errors import Corrupt
from gazette.history.first_pass import (
    find_message,
    fold_by_threads,
    keep_summaries,
    summarise_messages,
)
from gazette.history.merge import CommittedRun, FoldedSnapshot
from gazette.history.snapshot import JournalSnapshot, Piece, Run, cover
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.source.options import StreamOptions
from gazette.history.spark.source.schema import row_format
from gazette.history.spark.source.stream_admission import BatchAdmission, later_end, next_pieces
from gazette.history.spark.source.stream_journals import Sources, StreamJournals
from gazette.history.spark.source.stream_offset import (
    StreamOffset,
    decode_ahead,
    decode_lives,
    decode_offset,
    decode_since,
    encode_ends,
    encode_offset,
)
from gazette.history.spark.source.table import RunPartition, check_isolation, read_partition
from gazette.message.framing.frames import MalformedMessage
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.runtime.clock import Clock

_DRIVER_BYTES: Final = 1 << 18
"""Greatest number of bytes without a summary that the driver reads for a batch after the first. Bytes whose
summaries tasks were asked for before do not count. A batch that asks tasks takes longer."""
_KEPT_MAX: Final = 10_000
"""Greatest number of pieces with a kept summary that are remembered."""


class AheadPartition(InputPartition):
    """A run of a later batch, for a task that summarises its fragments and returns no rows."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)


class GazetteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of journals as a stream."""

    def __init__(self, options: StreamOptions, schema: Any, clock: Clock | None = None) -> None:
        self._options = options
        self._schema = schema
        self._journals = StreamJournals(options, clock)
        self._admission = BatchAdmission(lambda *args: find_message(self._journals.access, *args))
        self._folded: tuple[StreamOffset, StreamOffset, FoldedSnapshot] | None = None
        """The last planned batch: its two offsets, and its fold. None: nothing was folded yet."""
        self._kept: set[tuple[JournalName, Piece]] = set()
        """Pieces that are known to have a kept summary."""
        self._planned = False
        """True once a batch was planned. The first batch must not wait for summaries: with ``Trigger.Once``
        it is the only batch."""

    # These methods run on the driver:

    @with_hints()
    def initialOffset(self) -> StreamOffset:
        starts = self._journals.starts()
        return encode_offset(
            starts, since=self._options.read.clock_begin, lives=self._journals.lives
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        return ReadAllAvailable()

    @with_hints()
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the ends of journals now, and leave out later journals."""
        self._journals.fix_target()

    @with_hints()
    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        """Return the end of the next batch; ``start`` itself if there is nothing to do."""
        logged, asked = decode_offset(start), decode_ahead(start)
        self._journals.resume(decode_lives(start))
        journals = self._journals.listing(logged)
        known = self._journals.kept(logged)
        begins = {j.journal: self._journals.begin(j, known) for j in journals}
        ends = self._admission.ends(journals, begins, limit)
        if self._summarises_ahead(limit):
            ends = self._ready_ends(journals, begins, ends, asked)
        sources = known
        while not all(
            journal in known and end <= known[journal].read_through for journal, end in ends.items()
        ):
            with _placed(known):
                sources = {**known, **self._read_to(known, ends)}
            # A message may continue after the end of the batch: move the end until a message is complete.
            further = _further(journals, begins, ends, sources)
            if not further:
                break
            ends = {**ends, **further}
        ahead = self._ahead_ends(journals, sources, asked, limit)
        # Nothing was read, no journal begins again, and tasks were asked for all summaries.
        if sources is logged and all(asked.get(name, 0) >= to for name, to in ahead.items()):
            return start
        self._planned = True
        end = encode_offset(sources, {**asked, **ahead}, decode_since(start), self._journals.lives)
        if self._folded is not None:  # `partitions` gets the same offsets, and need not fold again.
            self._folded = (start, end, self._folded[2])
        return end

    def reportLatestOffset(self) -> StreamOffset | None:
        recent = self._journals.recent
        return None if recent is None else encode_ends(recent.journals)

    @with_hints()
    def partitions(self, start: StreamOffset, end: StreamOffset) -> list[InputPartition]:
        """Return the tasks of a batch: for its rows, and for summaries of later batches."""
        self._planned = True
        end_sources, lives, start_lives = decode_offset(end), decode_lives(end), decode_lives(start)
        self._journals.resume(lives)
        # Leave out a journal that has lost its end, or was created again: so it is read from its begin.
        known = {
            journal: source
            for journal, source in decode_offset(start).items()
            if journal not in end_sources
            or (
                source.read_through <= end_sources[journal].read_through
                and start_lives.get(journal, lives.get(journal)) == lives.get(journal)
            )
        }
        ahead_tasks = self._ahead(start, end_sources, decode_ahead(end))
        ends = {
            journal: source.read_through
            for journal, source in end_sources.items()
            if source.read_through > known.get(journal, SourceCheckpoint()).read_through
        }
        if not ends:
            return ahead_tasks
        options = replace(self._options.read, clock_begin=decode_since(end))
        runs: Sequence[CommittedRun | Run]
        if options.committed:
            with _placed(known):
                folded = self._fold(start, end, known, ends)
            snapshot, runs = folded.snapshot, folded.runs
        else:
            snapshot = self._journals.snapshot(known, ends)
            runs = snapshot.runs(options.run_bytes)
        format = row_format(options, self._schema, snapshot.shapes)
        rows = [RunPartition(run, format) for run in runs if format.selects(run)]
        return [*rows, *ahead_tasks]

    def commit(self, end: StreamOffset) -> None:
        """Do nothing: Spark may repeat the same batch."""

    def stop(self) -> None:
        self._journals.close()

    # These methods run on an executor:

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if isinstance(partition, AheadPartition):
            with with_hints(), self._options.read.access.open() as opened:
                keep_summaries(opened, partition.value, self._options.max_bytes)
            return
        yield from read_partition(self._options.read.access, partition)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts to send to an executor: options and schema, without the state of the driver."""
        return type(self), (self._options, self._schema)

    # What tasks summarise, and what the driver does:

    def _summarises_ahead(self, limit: ReadLimit) -> bool:
        """Return True if tasks may summarise fragments instead of the driver.

        With a limit of rows, the driver must read the bytes anyway, to count the rows.
        """
        return self._options.read.committed and not isinstance(limit, ReadMaxRows)

    def _ready_ends(
        self,
        listed: Sequence[JournalSnapshot],
        begins: Mapping[JournalName, Offset],
        ends: Mapping[JournalName, Offset],
        asked: Mapping[JournalName, Offset],
    ) -> dict[JournalName, Offset]:
        """Return ``ends``, or earlier ends if more than `_DRIVER_BYTES` before ``ends`` have no summary yet.

        Do not count bytes whose summaries tasks were asked for before. The driver reads all of these itself,
        rather than wait a second time.
        """
        ready = dict(ends)
        if not (self._planned or self._journals.has_target):
            return ready
        budget = _DRIVER_BYTES
        for journal in listed:
            name = journal.journal
            for piece in cover(journal.pieces, begins[name], ends.get(name, begins[name])):
                if piece.end > asked.get(name, 0) and self._lacks(journal, piece):
                    budget -= piece.end - piece.begin
                    if budget < 0:
                        ready[name] = piece.begin
                        break
        return ready

    def _ahead_ends(
        self,
        listed: Sequence[JournalSnapshot],
        sources: Sources,
        asked: Mapping[JournalName, Offset],
        limit: ReadLimit,
    ) -> dict[JournalName, Offset]:
        """Return, by journal, the offset up to which to ask tasks for summaries of later batches."""
        ahead_ends: dict[JournalName, Offset] = {}
        for journal in listed if self._summarises_ahead(limit) else ():
            name = journal.journal
            pieces = next_pieces(journal, self._journals.begin(journal, sources), limit)
            if any(
                piece.end > asked.get(name, 0) and self._lacks(journal, piece) for piece in pieces
            ):
                ahead_ends[name] = pieces[-1].end
        return ahead_ends

    def _lacks(self, journal: JournalSnapshot, piece: Piece) -> bool:
        """Return True if a piece has no kept summary, and a task could make one."""
        store = self._journals.access.summaries([piece])
        if store is None or (journal.journal, piece) in self._kept:
            return False
        if store.get(journal.journal, journal.shape, [piece]) is not None:
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            self._kept.add((journal.journal, piece))
            return False
        is_cut = piece.fragment is not None and piece.end < piece.fragment.end
        if is_cut and piece.end - piece.begin != self._options.max_bytes:
            return False  # Tasks keep summaries only of whole fragments, and of portions as large as a batch.
        return store.keeps(journal.journal, journal.shape, [piece])

    def _ahead(
        self, start: StreamOffset, until: Sources, ahead: Mapping[JournalName, Offset]
    ) -> list[InputPartition]:
        """Return tasks for the summaries that this batch asks for, and earlier batches did not ask for."""
        asked_ends = decode_ahead(start)
        ends = {name: end for name, end in ahead.items() if end > asked_ends.get(name, 0)}
        if not ends:
            return []
        begins = {name: SourceCheckpoint(until[name].read_through) for name in ends}
        return [
            AheadPartition(replace(run, sure=False))
            for run in self._journals.snapshot(begins, ends).runs(self._options.read.run_bytes)
            if run.end > asked_ends.get(run.journal, 0)
        ]

    # How far a batch reads:

    def _read_to(self, known: Sources, ends: Mapping[JournalName, Offset]) -> Sources:
        """Return the sources after reading from ``known`` to ``ends``, where complete messages end."""
        ends = {
            journal: end
            for journal, end in ends.items()
            if journal not in known or end > known[journal].read_through
        }
        self._folded = None
        if not self._options.read.committed:
            snapshot = self._journals.snapshot(known, ends)
            return {j.journal: SourceCheckpoint(self._whole(j)) for j in snapshot.journals}
        folded = self._fold_to(known, ends)
        self._folded = ({}, {}, folded)
        now_ns = int(self._journals.clock.now() * 1e9)
        return folded.checkpoint(self._options.horizon_ns, now_ns).sources

    def _whole(self, journal: JournalSnapshot) -> Offset:
        """Return the end of the journal's last complete message: usually the end of its last fragment."""
        if not journal.pieces:
            return journal.end
        tail = replace(journal, begin=journal.pieces[-1].begin, pieces=journal.pieces[-1:])
        # Try only the last fragment, which is fast. But it may begin within a message.
        end = self._last_end(tail, sure=False)
        if end is None:
            end = self._last_end(journal, sure=True)
        return journal.begin if end is None else end

    def _last_end(self, journal: JournalSnapshot, *, sure: bool) -> Offset | None:
        """Return the end of the last complete message; None if none is complete. ``sure`` is as in `Run`."""
        run = Run(journal.journal, journal.shape, 0, journal.pieces, journal.begin, sure=sure)
        summary = summarise_messages(self._journals.access, run)
        return summary.end if summary.rows else None

    def _fold(
        self,
        start: StreamOffset,
        end: StreamOffset,
        known: Sources,
        ends: Mapping[JournalName, Offset],
    ) -> FoldedSnapshot:
        """Return the fold of a batch. Do not fold again a batch that `latestOffset` has folded."""
        if self._folded is not None and self._folded[:2] == (start, end):
            return self._folded[2]
        return self._fold_to(known, ends)

    def _fold_to(self, known: Sources, ends: Mapping[JournalName, Offset]) -> FoldedSnapshot:
        snapshot = self._journals.snapshot(known, ends)
        check_isolation(self._options.read, snapshot)
        return fold_by_threads(
            self._journals.access, snapshot, run_bytes=self._options.read.run_bytes
        )


@contextmanager
def _placed(known: Sources) -> Iterator[None]:
    """Raise ``Corrupt`` if no message begins where the stream continues."""
    try:
        yield
    except MalformedMessage as error:
        source = known.get(error.journal)
        if source is None or not source.read_through or error.begin != source.read_through:
            raise
        raise Corrupt(
            f"no message begins at the offset where the stream continues ({error.reason})",
            hint="If the journal was deleted and created again, give the query another "
            "checkpointLocation. If startingOffsets named the offset, name one where a message "
            "begins. If its producer wrote a malformed message, `mode=PERMISSIVE` reads that as null, "
            "and `mode=DROPMALFORMED` leaves it out.",
            journal=error.journal,
            begin=error.begin,
        ) from error


def _further(
    listed: Sequence[JournalSnapshot],
    begins: Mapping[JournalName, Offset],
    ends: Mapping[JournalName, Offset],
    sources: Sources,
) -> dict[JournalName, Offset]:
    """Return later ends for journals of which nothing was read: the next message is longer than the batch."""
    further = {}
    for journal in listed:
        begin = begins[journal.journal]
        end = ends.get(journal.journal, begin)
        if end > begin and sources[journal.journal].read_through <= begin:
            later = later_end(journal, begin, end)
            if later is not None:
                further[journal.journal] = later
    return further
