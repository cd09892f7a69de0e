"""Sequences the rows of a shard in arrays: `TableSequencer`, with the result of `Sequencer`. Needs pyarrow.

The state of a producer depends on its own messages alone. So a chunk is sequenced producer by producer, in
segments of one kind. Each committed row gets a key: the position of the message that commits it. Sorted by
these keys, the rows are in the order of the sequencer, which is the specification.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gazette.errors import Corrupt
from gazette.history.batch_split import WHOLE_TXNS, Clocks, Segment, mask_of_new, segments_of
from gazette.history.columns import Array64
from gazette.history.shard_tables.rows import CommittedRows, DecodedRows, Picked
from gazette.message.envelope import Envelope
from gazette.message.sequencer.held_messages import Drain, PartialSequence, ReplayRange
from gazette.message.sequencer.sequencer import QueueOutcome, Sequencer
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, PRODUCER_BYTES, ProducerId
from gazette.protocol.checkpoint import SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset

RING_MESSAGE_BYTES: Final = 4096
"""Bytes of pending chunks that are kept for each message of the ring of a sequencer."""
_MANY_PRODUCERS: Final = 8
"""Number of producers in a chunk from which on it takes less time to sequence them together."""
_LOOKED_AT: Final = 64
"""Number of messages at the begin of a chunk whose producers are counted first."""
_OUTSIDES: Final = QueueOutcome.OUTSIDE_COMMIT, QueueOutcome.OUTSIDE_ALREADY_ACKED
_REPEATS: Final = QueueOutcome.CONTINUE_ALREADY_ACKED, QueueOutcome.CONTINUE_TXN_CLOCK_LARGER
_CONTINUES: Final = QueueOutcome.CONTINUE_BEGIN_SPAN, QueueOutcome.CONTINUE_EXTEND_SPAN
_ACKS: Final = QueueOutcome.ACK_EMPTY, QueueOutcome.ACK_COMMIT_RING


class _Pending(NamedTuple):
    """Pending messages of one producer in one chunk."""

    source: DecodedRows
    rows: Array64
    clocks: Clocks

    @property
    def begin(self) -> Offset:
        """Offset of the first message."""
        return int(self.source.columns.begins[self.rows[0]])

    def within(self, after: int, through: int) -> _Pending:
        """Return the messages whose clocks are above ``after``, and not above ``through``."""
        first = int(np.searchsorted(self.clocks, np.uint64(after), side="right"))
        last = int(np.searchsorted(self.clocks, np.uint64(through), side="right"))
        return _Pending(self.source, self.rows[first:last], self.clocks[first:last])


class _State(NamedTuple):
    """The state of a producer before a chunk. ``partial`` is None for a new producer."""

    partial: PartialSequence | None
    min_clock: int = 0
    max_clock: int = 0
    begin: Offset | None = None
    kept: Sequence[Any] = ()
    is_pending: bool = False


class _Sequenced(NamedTuple):
    """A chunk that was sequenced."""

    rows: DecodedRows
    outcomes: Array64
    """The outcome of each message."""
    picked: list[Picked]
    """The committed rows."""
    former: list[tuple[ProducerId, _State]]
    """The states of producers before the chunk."""

    @property
    def committed(self) -> CommittedRows | None:
        """The committed rows, in the order in which they take effect. None: no row has committed."""
        picked = [part for part in self.picked if len(part.rows)]
        return CommittedRows.of(picked) if picked else None


class TableSequencer(Sequencer[Any]):
    """A sequencer whose batches are rows. It keeps pending chunks of at most ``ring_bytes``."""

    def __init__(self, sources: Mapping[JournalName, SourceCheckpoint], ring_bytes: int) -> None:
        super().__init__(sources, 1)
        self._ring_bytes = ring_bytes
        self._chunks = 0

    def queue_batch(self, envelopes: Sequence[Envelope[Any]], start: int = 0) -> int:
        """Make the drain of rows from ``start`` on. Return the position after these rows. A row that may
        commit messages which are not kept gets a drain of its own."""
        assert isinstance(envelopes, DecodedRows)
        rows = envelopes.part(start, len(envelopes))
        stop = self._replaying_row(rows)
        if stop == 0 and self._needs_replay(rows):
            producer = _producer(rows.columns.uuids.producers[0])
            partial = self._partials[rows.form.journal][producer]
            self.drain = _ReplayDrain(partial, rows.part(0, 1), self._offsets)
            self._count(rows.part(0, 1), np.array([QueueOutcome.ACK_COMMIT_REPLAY]))
            return start + 1
        # If the first row commits messages that are not kept, but needs no replay, sequence it alone.
        stop = max(1, stop)
        self.drain = _ChunkDrain(self, rows.part(0, stop))
        return start + stop

    @property
    def replay_range(self) -> ReplayRange | None:
        drain = self.drain
        if isinstance(drain, _ReplayDrain) and drain.needs_replay:
            return drain.replay_range
        return None

    def start_replay(self, batches: Iterator[Sequence[Envelope[Any]]]) -> None:
        assert isinstance(self.drain, _ReplayDrain)
        self.drain.start_replay(batches)

    def _replaying_row(self, rows: DecodedRows) -> int:
        """Return the position of the first row that may commit messages which are not kept, or the end."""
        incomplete = [
            int.from_bytes(producer, "big")
            for producer, partial in self._partials[rows.form.journal].items()
            if partial.begin is not None and not partial.is_complete
        ]
        if not incomplete:
            return len(rows)
        uuids = rows.columns.uuids
        ends_span = (uuids.flags != CONTINUE_TXN) & np.isin(
            uuids.producers, np.array(incomplete, np.uint64)
        )
        ends_span &= uuids.clocks != 0
        return int(np.argmax(ends_span)) if ends_span.any() else len(rows)

    def _needs_replay(self, rows: DecodedRows) -> bool:
        """Return True if the first row commits messages that are not kept, so that they must be read again.

        Call it for a row of `_replaying_row`: the messages of its producer are not all kept.
        """
        uuids = rows.columns.uuids
        partial = self._partials[rows.form.journal][_producer(uuids.producers[0])]
        return bool(uuids.flags[0] == ACK_TXN and int(uuids.clocks[0]) > partial.min_clock)

    def sequence(self, rows: DecodedRows) -> _Sequenced:
        """Sequence the rows of a chunk."""
        uuids = rows.columns.uuids
        chunk = _Sequenced(rows, np.full(len(rows), QueueOutcome.OUTSIDE_COMMIT, np.int64), [], [])
        clocked = uuids.clocks != 0
        if not clocked.all():  # Messages without a clock commit at once.
            plain = np.flatnonzero(~clocked & (uuids.flags != ACK_TXN))
            chunk.picked.append(Picked(rows, plain, plain))
        at = np.flatnonzero(clocked)
        if not self._sequence_run(chunk, at):
            self._sequence_segments(chunk, at)
        self._offsets[rows.form.journal] = rows.end
        self._chunks = rows.number = self._chunks + 1
        self._count(rows, chunk.outcomes)
        return chunk

    def _sequence_run(self, chunk: _Sequenced, at: Array64) -> bool:
        """Sequence messages of many producers that commit at once and in order. For other messages, return
        False and change nothing."""
        uuids, partials = chunk.rows.columns.uuids, self._partials[chunk.rows.form.journal]
        # Look at a few producers first: to sort the producers of all rows takes much longer.
        if len(np.unique(uuids.producers[at[:_LOOKED_AT]])) < _MANY_PRODUCERS:
            return False
        if np.isin(uuids.flags[at], (CONTINUE_TXN, ACK_TXN)).any():
            return False
        numbers, inverse = np.unique(uuids.producers[at], return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        clocks, is_first = uuids.clocks[at][order], np.diff(inverse[order], prepend=-1) != 0
        producers = [_producer(number) for number in numbers.tolist()]
        former = [(producer, self._state(partials.get(producer))) for producer in producers]
        firsts = clocks[is_first].tolist()
        bounds = np.append(np.uint64(0), clocks[:-1])
        bounds[is_first] = [
            clock - 1 if state.partial is None else state.min_clock
            for clock, (_, state) in zip(firsts, former, strict=True)
        ]
        if not (clocks > bounds).all():
            return False
        newest = clocks[np.append(is_first[1:], True)].tolist()
        for clock, (producer, state) in zip(newest, former, strict=True):
            partial = state.partial or PartialSequence(chunk.rows.form.journal, producer, clock)
            self.clobbers += state.begin is not None
            partial.reset(clock)
            self._pending.discard(partial)
            partials[producer] = partial
        chunk.former.extend(former)
        chunk.picked.append(Picked(chunk.rows, at, at))
        return True

    def _sequence_segments(self, chunk: _Sequenced, at: Array64) -> None:
        """Sequence messages producer by producer. Note each producer's state before its first segment."""
        journal, last = chunk.rows.form.journal, -1
        partials = self._partials[journal]
        for segment in segments_of(chunk.rows.columns, at):
            producer = _producer(segment.producer)
            partial = partials.get(producer)
            if segment.producer != last:
                last = segment.producer
                chunk.former.append((producer, self._state(partial)))
            if partial is None:  # So the producer's first message is new.
                partial = PartialSequence(journal, producer, int(segment.clocks[0]) - 1)
                partials[producer] = partial
            chunk.outcomes[segment.rows] = self._step(partial, segment, chunk)

    def _step(self, partial: PartialSequence, segment: Segment, chunk: _Sequenced) -> Any:
        """Do for a segment what the sequencer does for each of its messages. Return their outcomes."""
        at, clocks = segment.rows, segment.clocks
        if segment.kind == CONTINUE_TXN:
            return self._continue(partial, segment, chunk.rows)
        if segment.kind == ACK_TXN:
            return self._acknowledge(partial, int(clocks[0]), int(at[0]), chunk)
        if segment.kind == WHOLE_TXNS:
            is_ack = chunk.rows.columns.uuids.flags[at] == ACK_TXN
            acks, messages = at[is_ack], at[~is_ack]
            chunk.picked.append(Picked(chunk.rows, messages, acks[np.searchsorted(acks, messages)]))
            partial.reset(int(clocks[-1]))
            # Right after an acknowledgement, a message begins a span, and a second acknowledgement is empty.
            behind_ack = np.append(True, is_ack[:-1])
            of_acks = np.where(behind_ack, *_ACKS)
            return np.where(is_ack, of_acks, np.where(behind_ack, *_CONTINUES))
        is_new = mask_of_new(clocks, partial.min_clock)
        if is_new.any():
            self.clobbers += partial.begin is not None
            partial.reset(int(clocks.max()))
            self._pending.discard(partial)
            chunk.picked.append(Picked(chunk.rows, at[is_new], at[is_new]))
        return np.where(is_new, *_OUTSIDES)

    def _continue(self, partial: PartialSequence, segment: Segment, rows: DecodedRows) -> Any:
        """Add the new messages of a segment to the pending ones. Return the outcomes of all."""
        at, clocks = segment.rows, segment.clocks
        is_new = mask_of_new(clocks, partial.max_clock)
        outcomes = np.where(clocks <= np.uint64(partial.min_clock), *_REPEATS)
        outcomes[is_new] = _CONTINUES[1]
        if is_new.any():
            pending = _Pending(rows, at[is_new], clocks[is_new])
            if partial.begin is None:
                partial.begin = pending.begin
                self._pending.add(partial)
                outcomes[np.argmax(is_new)] = _CONTINUES[0]
            partial.max_clock = int(pending.clocks[-1])
            partial.kept.append(pending)
        return outcomes

    def _acknowledge(
        self, partial: PartialSequence, clock: int, row: int, chunk: _Sequenced
    ) -> QueueOutcome:
        """Commit the producer's pending messages up to ``clock``, or roll all back. Return the outcome."""
        if clock <= partial.min_clock:
            self.rewinds += clock < partial.min_clock
            outcome = QueueOutcome.ACK_ROLLBACK
        elif partial.begin is None:
            outcome = QueueOutcome.ACK_EMPTY
        else:
            outcome = QueueOutcome.ACK_COMMIT_RING
            chunk.picked.extend(committed_parts(partial, clock, row))
        partial.reset(clock)
        self._pending.discard(partial)
        return outcome

    def _state(self, partial: PartialSequence | None) -> _State:
        """Return a copy of a producer's state, for `restore`."""
        if partial is None:
            return _State(None)
        clocks = partial.min_clock, partial.max_clock
        is_pending = partial in self._pending
        return _State(partial, *clocks, partial.begin, tuple(partial.kept), is_pending)

    def restore(
        self, journal: JournalName, begin: Offset, former: Sequence[tuple[ProducerId, _State]]
    ) -> None:
        """Give producers the states that they had before a chunk."""
        self._offsets[journal] = begin
        for producer, state in former:
            changed = self._partials[journal].pop(producer)
            self._pending.discard(changed)
            partial = state.partial
            if partial is None:
                continue
            partial.reset(state.min_clock)
            partial.max_clock, partial.begin = state.max_clock, state.begin
            partial.kept.extend(state.kept)
            self._partials[journal][producer] = partial
            if state.is_pending:
                self._pending.add(partial)

    def consume_first(self, rows: DecodedRows, committed: CommittedRows, count: int) -> None:
        """Sequence a chunk again after `restore`, as if only the first ``count`` committed rows were in it.

        The last of these rows may be in the middle of a transaction. Its later rows then stay pending.
        """
        end = int(committed.commit_positions[count])
        if end:
            self.sequence(rows.part(0, end))
        if count and committed.commit_positions[count - 1] == end:
            producer = _producer(rows.columns.uuids.producers[end])
            partial = self._partials[rows.form.journal][producer]
            partial.min_clock = committed.clock_of(count - 1)
            partial.begin = committed.begin_of(count)
            parts = [part.within(partial.min_clock, partial.max_clock) for part in partial.kept]
            partial.kept = deque(part for part in parts if len(part.rows))

    def drop_oldest(self) -> None:
        """Keep no more pending chunks than permitted: forget the rows of the oldest chunks."""
        partials = [p for of in self._partials.values() for p in of.values() if p.kept]
        chunks = {id(part.source): part.source for p in partials for part in p.kept}
        size = sum(chunk.end - chunk.begin for chunk in chunks.values())
        for chunk in sorted(chunks.values(), key=lambda chunk: chunk.number):
            if size <= self._ring_bytes:
                return
            size -= chunk.end - chunk.begin
            for partial in partials:
                while partial.kept and partial.kept[0].source is chunk:
                    partial.kept.popleft()

    def _count(self, rows: DecodedRows, outcomes: Any) -> None:
        """Count the outcomes of messages, for metrics."""
        flags = rows.columns.uuids.flags.astype(np.int64)
        counts = np.bincount(flags * len(QueueOutcome) + outcomes)
        for number in np.flatnonzero(counts).tolist():
            value, outcome = divmod(number, len(QueueOutcome))
            self.outcomes[rows.form.journal, value, QueueOutcome(outcome)] += int(counts[number])


class _ChunkDrain(Drain[Any]):
    """Drain of the rows that a chunk commits. Rows are sequenced when they are taken."""

    def __init__(self, sequencer: TableSequencer, rows: DecodedRows) -> None:
        super().__init__([])
        self._sequencer = sequencer
        self._rows: DecodedRows | None = rows
        self._former: list[tuple[ProducerId, _State]] = []
        self._outcomes: dict[Any, int] = {}
        """Counts of outcomes before the chunk was sequenced."""

    def take(self, limit: int) -> Any:
        """Return all committed rows. Ignore ``limit``: the chunk and the kept chunks bound them."""
        assert self._rows is not None
        self._outcomes = dict(self._sequencer.outcomes)
        chunk = self._sequencer.sequence(self._rows)
        committed, self._former = chunk.committed, chunk.former
        self._sequencer.drop_oldest()
        if committed is None:
            self._rows = None
            return []
        self._ready: Any = committed
        return super().take(len(committed))

    def consumed(self, count: int | None) -> None:
        """Note that the first ``count`` taken rows were consumed; None: all. If some were not, undo the
        chunk, and sequence it again up to the first of these."""
        taken = self._handed_out
        rows, committed, self._handed_out = self._rows, self._ready, 0
        if not taken or rows is None:
            return
        if count is None or count == taken:
            self._rows = None
            return
        self._sequencer.restore(rows.form.journal, rows.begin, self._former)
        self._sequencer.outcomes.clear()
        self._sequencer.outcomes.update(self._outcomes)
        self._sequencer.consume_first(rows, committed, count)
        self._rows = rows.part(int(committed.commit_positions[count]), len(rows))

    def _advance(self, consumed: Sequence[Any]) -> None:
        raise AssertionError("the states of producers advance as their rows are taken")

    @property
    def done(self) -> bool:
        return self._rows is None


class _ReplayDrain(Drain[Any]):
    """Drain of a span whose first messages must be read again, since they are not kept."""

    def __init__(
        self, partial: PartialSequence, ack: DecodedRows, offsets: dict[JournalName, Offset]
    ) -> None:
        super().__init__([])
        self._ack = ack
        self.partial: PartialSequence = partial
        self._offsets = offsets
        self._clock = int(ack.columns.uuids.clocks[0])
        self._replay: Iterator[Sequence[Envelope[Any]]] | None = None
        self._seen_clock = partial.min_clock
        self._is_first = True
        self.needs_replay = True
        assert partial.begin is not None
        end = partial.kept[0].begin if partial.kept else ack.begin
        self.replay_range = ReplayRange(partial.journal, partial.begin, end)

    def start_replay(self, batches: Iterator[Sequence[Envelope[Any]]]) -> None:
        """Take the rows of the range from an iterator."""
        self.needs_replay = False
        self._replay = batches

    def take(self, limit: int) -> Any:
        """Return the committed rows of the next chunk. Ignore ``limit``: the size of a chunk bounds them."""
        if self._next == len(self._ready):
            self._next, self._ready = 0, []
            self._refill()
        batch = super().take(len(self._ready))
        if isinstance(batch, CommittedRows) and len(batch):
            self.partial.begin = batch.begin_of(0)
        elif self._replay is None:
            self._finish()
        return batch

    def _refill(self) -> None:
        """Get the next chunk with rows of the span; after the last chunk, get the rows that are kept."""
        while self._replay is not None and not self._ready:
            rows = next(self._replay, None)
            if rows is None:
                self._replay = None
                picked = committed_parts(self.partial, self._clock, 0)
                self.partial.kept.clear()
            else:
                assert isinstance(rows, DecodedRows)
                picked = self._accept(rows)
            if picked:
                self._ready: Any = CommittedRows.of(picked)

    def _accept(self, rows: DecodedRows) -> list[Picked]:
        """Return the rows of a chunk that the acknowledgement commits. Raise `Corrupt` if the first chunk
        does not begin where the range does."""
        wanted = self.replay_range
        if self._is_first and rows.begin != wanted.begin:
            raise Corrupt(
                f"replay has wrong Begin ({rows.begin}; expected {wanted.begin})",
                hint="The journal has lost messages of an open transaction: raise its retention, "
                "or move the shard's min_offset after it.",
                **wanted._asdict(),
            )
        self._is_first = False
        uuids = rows.columns.uuids
        at = np.flatnonzero(
            uuids.producers == np.uint64(int.from_bytes(self.partial.producer, "big"))
        )
        clocks = uuids.clocks[at]
        if len(at):
            is_new = mask_of_new(clocks, self._seen_clock)
            at, clocks = at[is_new], clocks[is_new]
        if not len(at):
            return []
        self._seen_clock = int(clocks[-1])
        at = at[clocks <= np.uint64(self._clock)]
        return [Picked(rows, at, np.zeros(len(at), np.int64))] if len(at) else []

    def _advance(self, consumed: Sequence[Any]) -> None:
        """Move the producer's state past the consumed rows; after the last row, past the acknowledgement."""
        assert isinstance(consumed, CommittedRows)
        self.partial.min_clock = consumed.clock_of(len(consumed) - 1)
        after = self._next + len(consumed)
        if after < len(self._ready):
            self.partial.begin = self._ready.begin_of(after)
        elif self._replay is None:
            self._finish()

    def _finish(self) -> None:
        """Go on after the acknowledgement: the producer has nothing pending then."""
        self._offsets[self.partial.journal] = self._ack.end
        self.partial.reset(self._clock)

    @property
    def done(self) -> bool:
        return self.partial.begin is None


def committed_parts(partial: PartialSequence, clock: int, row: int) -> list[Picked]:
    """Return the kept rows of a producer that its acknowledgement at ``row`` commits."""
    parts = [part.within(partial.min_clock, clock) for part in partial.kept]
    return [
        Picked(part.source, part.rows, np.full(len(part.rows), row))
        for part in parts
        if len(part.rows)
    ]


def _producer(number: Any) -> ProducerId:
    return int(number).to_bytes(PRODUCER_BYTES, "big")
