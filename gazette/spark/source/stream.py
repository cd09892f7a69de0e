"""Journals as a stream of Spark: micro-batches of committed messages.

Spark keeps an offset of a stream. It has, for each journal, how far it was read *and* what was
known of its producers there: the sources of a checkpoint, in JSON. So the messages of a batch
follow from its two offsets and the journals alone. It does not matter how often, or in which
process, the batch is planned.

To plan a batch takes the summaries of its fragments. The driver could make them from the bytes, and
does so for few bytes, and for the first batch. Otherwise tasks of one batch summarise the fragments
of the next one ("ahead"), and the driver finds the summaries. So an offset also says up to where
that was asked. A batch may do nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)

from gazette.errors import Corrupt, Invalid, NotFound
from gazette.history.first_pass import summarise_messages, summarise_run
from gazette.history.merge import FoldedSnapshot
from gazette.history.snapshot import JournalSnapshot, Piece, Run, Snapshot
from gazette.history.snapshot_builder import FragmentPlaces, require_stored, take_snapshot
from gazette.history.source import OpenAccess
from gazette.message.framing.frames import MalformedMessage
from gazette.message.uuid import PRODUCER_BYTES
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.runtime.clock import Clock, SystemClock
from gazette.spark.error_hints import with_hints
from gazette.spark.source.options import StreamOptions
from gazette.spark.source.schema import common_value, row_format
from gazette.spark.source.table import RunPartition, check_isolation, fold_on_driver, read_partition

StreamOffset: TypeAlias = dict[str, Any]
"""``{journal: {"at": offset, "producers": {hex: "clock" or "clock@begin"}}}``, clocks in hex.

With ``"ahead": offset``, tasks were asked for summaries up to there."""

_AT, _PRODUCERS, _AHEAD = "at", "producers", "ahead"
_DRIVER_BYTES: Final = 1 << 18
"""Bytes without a summary that the driver reads itself for a batch. A batch only for them takes longer."""
_LISTED_MAX: Final = 1000
_PER_FRAGMENT_S: Final = 0.0005
"""Back-off of listings: seconds for each fragment of one beyond `_LISTED_MAX`. A fragment takes a tenth
of that to list."""
_LAG_S: Final = 30.0
_LAG_POLL_S: Final = 0.5
_DIGITS: Final = 2 * PRODUCER_BYTES


def encode_offset(
    sources: Mapping[JournalName, SourceCheckpoint], ahead: Mapping[JournalName, Offset] = {}
) -> StreamOffset:
    """Encode sources, and up to where summaries were asked for behind them.

    Keys ascend, since Spark compares offsets as texts.
    """
    offset: StreamOffset = {}
    for journal, source in sorted(sources.items()):
        producers = {}
        for producer, state in sorted(source.producers.items()):
            begin = "" if state.begin is None else f"@{state.begin}"
            producers[producer.hex()] = f"{state.last_ack:x}{begin}"
        offset[journal] = {_AT: source.read_through, _PRODUCERS: producers}
        if ahead.get(journal, 0) > source.read_through:
            offset[journal] = {_AHEAD: ahead[journal], **offset[journal]}
    return offset


def decode_ahead(offset: StreamOffset) -> dict[JournalName, Offset]:
    """Return up to where summaries were asked for. Raise `Corrupt`."""
    try:
        return {name: int(one[_AHEAD]) for name, one in offset.items() if _AHEAD in one}
    except (TypeError, ValueError) as error:
        raise _unreadable(error) from error


def decode_offset(offset: StreamOffset) -> dict[JournalName, SourceCheckpoint]:
    """Undo `encode_offset`. Raise `Corrupt`."""
    sources = {}
    try:
        for journal, value in offset.items():
            producers = {}
            for digits, text in value[_PRODUCERS].items():
                clock, at, begin = text.partition("@")
                if len(digits) != _DIGITS:
                    raise ValueError(digits)
                state = ProducerState(int(clock, 16), int(begin) if at else None)
                producers[bytes.fromhex(digits)] = state
            sources[journal] = SourceCheckpoint(int(value[_AT]), producers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(error) from error
    return sources


def _unreadable(error: Exception) -> Corrupt:
    return Corrupt(
        f"the offset of the stream cannot be read: {error!r}",
        hint="The query's checkpoint is of another source: give it another checkpointLocation.",
    )


class AheadPartition(InputPartition):
    """A run of a later batch, for a task that summarises its fragments and returns no rows."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A listing of the journals."""

    again_s: float
    """Time of the machine's clock from which on to list again."""
    snapshot: Snapshot
    known: frozenset[JournalName]
    """Journals of which something had been read when they were listed."""


class GazetteStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of journals as a stream."""

    def __init__(self, options: StreamOptions, schema: Any, clock: Clock | None = None) -> None:
        self._options = options
        self._schema = schema
        self._clock = clock
        self._access: OpenAccess | None = None
        self._listed: _Listed | None = None
        self._target: dict[JournalName, Offset] | None = None
        self._folded: tuple[StreamOffset, StreamOffset, FoldedSnapshot] | None = None
        """The batch that was planned last: its offsets, and its fold."""
        self._served: JournalName = ""
        """The last journal in the last batch of limited size."""
        self._places = FragmentPlaces()
        self._kept: set[tuple[JournalName, Piece]] = set()
        """Pieces of the listing that are known to have a summary."""
        self._planned = False
        """True once a batch was planned. Only then may one wait for summaries, since ``Trigger.Once``
        has a single batch."""

    # These methods run on the driver:

    @with_hints()
    def initialOffset(self) -> StreamOffset:
        selection = self._options.read.selection
        sources = {}
        for journal in self._list({}).journals:
            name = journal.journal
            begin = selection.begin.get(name, selection.begin_all)
            if self._options.starting == "latest" and name not in selection.begin:
                begin = journal.end
            sources[name] = SourceCheckpoint(begin)
        return encode_offset(sources)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.max_fragments is not None:
            return ReadMaxFiles(self._options.max_fragments)
        return ReadAllAvailable()

    @with_hints()
    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the ends of journals now, and leave out later journals."""
        self._target = {one.journal: one.end for one in self._list({}).journals}

    @with_hints()
    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        known, asked = decode_offset(start), decode_ahead(start)
        ends, ahead = self._prepared(known, self._ends(known, limit), asked, limit)
        sources = known
        while not all(
            journal in known and end <= known[journal].read_through for journal, end in ends.items()
        ):
            sources = {**known, **self._read_to(known, ends)}
            further = self._further(known, ends, sources)
            if not further:
                break
            ends = {**ends, **further}
        if sources is known and all(asked.get(name, 0) >= at for name, at in ahead.items()):
            return start
        self._planned = True
        end = encode_offset(sources, {**asked, **ahead})
        if self._folded is not None:
            self._folded = (start, end, self._folded[2])
        return end

    def _prepared(
        self,
        known: Mapping[JournalName, SourceCheckpoint],
        ends: dict[JournalName, Offset],
        asked: Mapping[JournalName, Offset],
        limit: ReadLimit,
    ) -> tuple[dict[JournalName, Offset], dict[JournalName, Offset]]:
        """Return earlier ends if many bytes before them have no summary yet, and up to where to ask
        tasks for summaries.

        What was asked for once is not waited for again: the driver reads what is missing.
        """
        ahead: dict[JournalName, Offset] = {}
        if self._options.read.isolation == "read_uncommitted":
            return ends, ahead
        budget = _DRIVER_BYTES
        waits = self._planned or self._target is not None
        ends = dict(ends)
        for journal in self._listed_to_target(known):
            name = journal.journal
            at = known[name].read_through if name in known else self._first(journal)
            pieces = [
                replace(piece, begin=max(piece.begin, at))
                for piece in journal.pieces
                if piece.end > at
            ]
            stop = at
            for piece in pieces:
                if piece.end > ends.get(name, at):
                    break
                if waits and piece.end > asked.get(name, 0) and self._lacks(journal, piece):
                    budget -= piece.end - piece.begin
                    if budget < 0:
                        ends[name] = stop
                        break
                stop = piece.end
            behind = _within([piece for piece in pieces if piece.begin >= stop], limit)
            if any(
                piece.end > asked.get(name, 0) and self._lacks(journal, piece) for piece in behind
            ):
                ahead[name] = behind[-1].end
        return ends, ahead

    def _lacks(self, journal: JournalSnapshot, piece: Piece) -> bool:
        """Return True if a piece has no summary, and a task could make it."""
        store = self._opened().summaries([piece])
        if store is None or (journal.journal, piece) in self._kept:
            return False
        if store.get(journal.journal, journal.shape, [piece]) is not None:
            self._kept.add((journal.journal, piece))
            return False
        return store.keeps(journal.journal, journal.shape, [piece])

    def reportLatestOffset(self) -> StreamOffset | None:
        if self._listed is None:
            return None
        return {one.journal: {_AT: one.end} for one in self._listed.snapshot.journals}

    @with_hints()
    def partitions(self, start: StreamOffset, end: StreamOffset) -> list[InputPartition]:
        self._planned = True
        known, until = decode_offset(start), decode_offset(end)
        ahead = self._ahead(start, until, decode_ahead(end))
        ends = {
            journal: source.read_through
            for journal, source in until.items()
            if source.read_through > known.get(journal, SourceCheckpoint()).read_through
        }
        if not ends:
            return ahead
        read = self._options.read
        if read.isolation == "read_uncommitted":
            snapshot = self._snapshot(known, ends)
            runs: Sequence[Any] = snapshot.runs(read.run_bytes)
        else:
            folded = self._fold(start, end, known, ends)
            snapshot, runs = folded.snapshot, folded.runs
        format = row_format(read, self._schema, common_value(read, snapshot.shapes))
        rows = [RunPartition(run, format) for run in runs if format.selects(run)]
        return [*rows, *ahead]

    def _ahead(
        self,
        start: StreamOffset,
        until: Mapping[JournalName, SourceCheckpoint],
        ahead: Mapping[JournalName, Offset],
    ) -> list[InputPartition]:
        """Return tasks for the summaries that a batch asks for, and the one before did not."""
        asked = decode_ahead(start)
        ends = {name: end for name, end in ahead.items() if end > asked.get(name, 0)}
        if not ends:
            return []
        begins = {name: SourceCheckpoint(until[name].read_through) for name in ends}
        return [
            AheadPartition(replace(run, sure=False))
            for run in self._snapshot(begins, ends).runs(self._options.read.run_bytes)
            if run.end > asked.get(run.journal, 0)
        ]

    def commit(self, end: StreamOffset) -> None:
        """Keep nothing: Spark may ask for the same batch again."""

    def stop(self) -> None:
        if self._access is not None:
            self._access.close()
            self._access = None

    # These methods run on an executor:

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if isinstance(partition, AheadPartition):
            with with_hints(), self._options.read.access.open() as opened:
                summarise_run(opened, partition.value)
            return
        yield from read_partition(self._options.read.access, partition)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_access": None,
            "_listed": None,
            "_folded": None,
            "_places": FragmentPlaces(),
            "_kept": set(),
        }

    def _opened(self) -> OpenAccess:
        if self._access is None:
            self._access = self._options.read.access.open(self._clock)
        return self._access

    def _list(self, known: Mapping[JournalName, SourceCheckpoint]) -> Snapshot:
        """Return a recent listing: Spark may ask hundreds of times a second."""
        now = (self._clock or SystemClock()).monotonic()
        if (
            self._listed is None
            or now >= self._listed.again_s
            # The recent listing was not checked for journals that lost what was read of them.
            or not known.keys() <= self._listed.known
        ):
            snapshot = self._take(known)
            count = sum(len(journal.pieces) for journal in snapshot.journals)
            pause_s = max(count - _LISTED_MAX, 0) * _PER_FRAGMENT_S
            again_s = now + max(self._options.refresh_s, pause_s)
            self._listed = _Listed(again_s, snapshot, frozenset(known))
            self._kept.clear()
        return self._listed.snapshot

    def _take(self, known: Mapping[JournalName, SourceCheckpoint]) -> Snapshot:
        """Return a new listing.

        Raise ``Corrupt`` for a journal that ends before what was read of it. Repeat first for as
        long as a broker that lags behind its peers may answer.
        """
        access, selection = self._opened(), self._options.read.selection
        # Begin where each journal was read to. Its bytes from there on may have been pruned.
        begin = {journal: source.read_through for journal, source in known.items()}
        given = replace(selection, begin={**selection.begin, **begin})
        began = access.clock.monotonic()
        while True:
            snapshot = take_snapshot(access, given, self._places)
            require_stored(snapshot, given, known)
            # A snapshot begins at the journal's end if that is before the offset that was asked
            # for. A store without fragments of a journal does not know the journal's end.
            short = [
                one
                for one in snapshot.journals
                if one.begin < begin.get(one.journal, 0) and (one.begin or not selection.stores)
            ]
            if not short:
                return snapshot
            if access.clock.monotonic() - began >= _LAG_S:
                raise Corrupt(
                    "a journal of the stream ends before what was read of it",
                    hint="It was deleted and created again, or has lost its end: give the query "
                    "another checkpointLocation to read it from its begin.",
                    journal=short[0].journal,
                    end=short[0].begin,
                    read=begin[short[0].journal],
                )
            access.run(access.clock.sleep(_LAG_POLL_S))

    def _ends(
        self, known: Mapping[JournalName, SourceCheckpoint], limit: ReadLimit
    ) -> dict[JournalName, Offset]:
        """Return where to end the next batch: at ends of fragments, taken from all journals in turn."""
        listed = self._listed_to_target(known)
        begins = {
            one.journal: known[one.journal].read_through
            if one.journal in known
            else self._first(one)
            for one in listed
        }
        if isinstance(limit, ReadMaxBytes):
            budget, by_bytes = limit.max_bytes, True
        elif isinstance(limit, ReadMaxFiles):
            budget, by_bytes = limit.max_files, False
        else:
            return {one.journal: max(one.end, begins[one.journal]) for one in listed}
        ends: dict[JournalName, Offset] = {}
        # Begin after the journal that was served last. Otherwise journals that always have more
        # would take every batch.
        waiting = [
            (journal.journal, iter([p for p in journal.pieces if p.end > begins[journal.journal]]))
            for journal in sorted(
                listed, key=lambda one: (one.journal <= self._served, one.journal)
            )
        ]
        while waiting and budget > 0:
            journal, pieces = waiting.pop(0)
            piece = next(pieces, None)
            if piece is None:
                continue
            begin = max(piece.begin, begins[journal])
            budget -= piece.end - begin if by_bytes else 1
            ends[journal] = piece.end
            self._served = journal
            waiting.append((journal, pieces))
        return ends

    def _listed_to_target(
        self, known: Mapping[JournalName, SourceCheckpoint]
    ) -> list[JournalSnapshot]:
        """Return the present listing; for a query that is to end, only up to its target."""
        listed = self._list(known).journals
        if self._target is None:
            return list(listed)
        return [
            _until(one, self._target[one.journal]) for one in listed if one.journal in self._target
        ]

    def _further(
        self,
        known: Mapping[JournalName, SourceCheckpoint],
        ends: Mapping[JournalName, Offset],
        sources: Mapping[JournalName, SourceCheckpoint],
    ) -> dict[JournalName, Offset]:
        """Return later ends for journals whose next message continues behind its fragment."""
        further = {}
        for journal in self._listed_to_target(known):
            name = journal.journal
            begin = known[name].read_through if name in known else self._first(journal)
            end = ends.get(name, begin)
            behind = [piece.end for piece in journal.pieces if piece.end > end]
            if behind and end > begin and sources[name].read_through <= begin:
                further[name] = behind[0]
        return further

    def _first(self, journal: JournalSnapshot) -> Offset:
        """Return where to begin to read a journal that was created since the query began."""
        selection = self._options.read.selection
        return selection.begin.get(journal.journal, selection.begin_all)

    def _read_to(
        self, known: Mapping[JournalName, SourceCheckpoint], ends: Mapping[JournalName, Offset]
    ) -> dict[JournalName, SourceCheckpoint]:
        ends = {
            journal: end
            for journal, end in ends.items()
            if journal not in known or end > known[journal].read_through
        }
        self._folded = None
        if self._options.read.isolation == "read_uncommitted":
            snapshot = self._snapshot(known, ends)
            return {one.journal: SourceCheckpoint(self._whole(one)) for one in snapshot.journals}
        folded = self._fold_to(known, ends)
        self._folded = ({}, {}, folded)
        sources: Checkpoint = folded.checkpoint(self._options.horizon_ns)
        return sources.sources

    def _whole(self, journal: JournalSnapshot) -> Offset:
        """Return the end of its last complete message: usually that of its last fragment."""
        if not journal.pieces:
            return journal.end
        last = replace(journal, begin=journal.pieces[-1].begin, pieces=journal.pieces[-1:])
        try:
            found = self._last_end(last)
        except MalformedMessage:
            # The fragment begins within a message.
            found = None
        if found is None:
            found = self._last_end(journal)
        return journal.begin if found is None else found

    def _last_end(self, journal: JournalSnapshot) -> Offset | None:
        run = Run(journal.journal, journal.shape, 0, journal.pieces, journal.begin)
        summary = summarise_messages(self._opened(), run)
        return summary.end if summary.rows else None

    def _fold(
        self,
        start: StreamOffset,
        end: StreamOffset,
        known: Mapping[JournalName, SourceCheckpoint],
        ends: Mapping[JournalName, Offset],
    ) -> FoldedSnapshot:
        if self._folded is not None and self._folded[:2] == (start, end):
            return self._folded[2]
        return self._fold_to(known, ends)

    def _fold_to(
        self, known: Mapping[JournalName, SourceCheckpoint], ends: Mapping[JournalName, Offset]
    ) -> FoldedSnapshot:
        snapshot = self._snapshot(known, ends)
        check_isolation(self._options.read, snapshot)
        return fold_on_driver(self._opened(), snapshot, self._options.read)

    def _snapshot(
        self, known: Mapping[JournalName, SourceCheckpoint], ends: Mapping[JournalName, Offset]
    ) -> Snapshot:
        """Return what a batch reads. List again, since fragments may have been joined or pruned."""
        selection = replace(
            self._options.read.selection,
            journals=tuple(sorted(ends)),
            selector=None,
            end=dict(ends),
            sources={journal: known[journal] for journal in ends if journal in known},
        )
        try:
            return take_snapshot(self._opened(), selection, self._places)
        except (Invalid, NotFound) as error:
            raise Corrupt(
                f"a batch of the stream cannot be read again: {error}",
                hint="A journal was deleted or created again: give the query another "
                "checkpointLocation.",
            ) from error


def _within(pieces: Sequence[Piece], limit: ReadLimit) -> Sequence[Piece]:
    """Return as many of the next pieces as a batch may have."""
    if isinstance(limit, ReadMaxFiles):
        return pieces[: limit.max_files]
    if not isinstance(limit, ReadMaxBytes):
        return pieces
    size = 0
    for count, piece in enumerate(pieces):
        if size >= limit.max_bytes:
            return pieces[:count]
        size += piece.end - piece.begin
    return pieces


def _until(journal: JournalSnapshot, end: Offset) -> JournalSnapshot:
    """Return a journal cut at an earlier end."""
    if journal.end <= end:
        return journal
    pieces = [replace(p, end=min(p.end, end)) for p in journal.pieces if p.begin < end]
    return replace(journal, begin=min(journal.begin, end), end=end, pieces=tuple(pieces))
