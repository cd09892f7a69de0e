"""Stage 12 of the byte path: takes envelopes as they were read, gives those that have committed.

Pure. Producers write messages that are pending until an acknowledgement. Producers repeat messages after
an append with an unknown outcome, and roll back. The `Sequencer` delivers each committed message once, in
the order of its producer. It keeps the latest messages in memory, and asks for a replay of longer
transactions. A checkpoint of its state is always enough to resume elsewhere.

`Sequencer.queue`, with one envelope at a time, is the specification. `Sequencer.queue_batch` takes
whole runs of messages in one step, with the same result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

from gazette.errors import Bug
from gazette.message.envelope import Envelope, EnvelopeBatch
from gazette.message.sequencer.held_messages import (
    Drain,
    PartialSequence,
    ReplayRange,
    Ring,
    RunDrain,
    SpanDrain,
)
from gazette.message.uuid import (
    ACK_TXN,
    AGE_STEPS,
    CONTINUE_TXN,
    FOREIGN_UUID,
    OUTSIDE_TXN,
    ProducerId,
    checkpoint_clock,
    clock_at,
    clock_span,
)
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset

__all__ = ["QueueOutcome", "ReplayRange", "Sequencer"]

M = TypeVar("M")


PRUNE_HORIZON_NS: Final = 24 * 3600 * 10**9
"""Nanoseconds for which shards and readers remember a silent producer: see `Sequencer.checkpoint`. If the
producer repeats a message after this time, the message is delivered again."""


class QueueOutcome(IntEnum):
    """Outcome of queueing a message. After an outcome that `commits`, dequeue until nothing is left."""

    OUTSIDE_ALREADY_ACKED = 0
    """A duplicate of a message outside of transactions. It is dropped."""
    OUTSIDE_COMMIT = 1
    """The message commits at once. It rolls back pending messages of its producer."""
    CONTINUE_ALREADY_ACKED = 2
    """A duplicate of a committed message. It is dropped."""
    CONTINUE_TXN_CLOCK_LARGER = 3
    """A duplicate of a pending message. It is dropped."""
    CONTINUE_BEGIN_SPAN = 4
    """The first pending message of its producer."""
    CONTINUE_EXTEND_SPAN = 5
    """A further pending message of its producer."""
    ACK_ROLLBACK = 6
    """The pending messages are rolled back: the producer has committed only up to this clock."""
    ACK_EMPTY = 7
    """An acknowledgement while no messages are pending. The acknowledgement itself is delivered."""
    ACK_COMMIT_RING = 8
    """The pending messages have committed, and are in the ring."""
    ACK_COMMIT_REPLAY = 9
    """The pending messages have committed, and must be read again: see `Sequencer.replay_range`."""

    @property
    def commits(self) -> bool:
        return self in _COMMITS

    @property
    def label(self) -> str:
        """Value of the label ``outcome`` of metrics: the original's name for the outcome."""
        first_word, *other_words = self.name.lower().replace("_txn_clock", "_ring_clock").split("_")
        return first_word + "".join(map(str.capitalize, other_words))


_COMMITS = frozenset(
    {
        QueueOutcome.OUTSIDE_COMMIT,
        QueueOutcome.ACK_EMPTY,
        QueueOutcome.ACK_COMMIT_RING,
        QueueOutcome.ACK_COMMIT_REPLAY,
    }
)
_COMMITS_AT_ONCE = (OUTSIDE_TXN, FOREIGN_UUID)
"""Flags of messages that commit at once, and so may be part of a run."""


class Sequencer(Generic[M]):
    """Delivers the committed messages of any number of journals.

    ``sources`` is the `checkpoint` at which an earlier sequencer stopped. Queue the messages of each journal
    from its ``read_through`` on, in order. ``ring_size`` is the number of messages to keep in memory.

        index = 0
        while index < len(batch):
            index = sequencer.queue_batch(batch, index)
            if sequencer.replay_range is not None:
                sequencer.start_replay(read_again(sequencer.replay_range))
            while committed := sequencer.dequeue(limit):
                ...  # process them
    """

    def __init__(self, sources: Mapping[JournalName, SourceCheckpoint], ring_size: int) -> None:
        self._offsets: dict[JournalName, Offset] = {}
        self._partials: defaultdict[JournalName, dict[ProducerId, PartialSequence]]
        self._partials = defaultdict(dict)
        for journal, source in sources.items():
            self._offsets[journal] = source.read_through
            self._partials[journal] = {
                producer: PartialSequence.restored(journal, producer, state)
                for producer, state in source.producers.items()
            }
        self._ages: dict[JournalName, tuple[int, int]] = {}
        """By journal, the `checkpoint_clock` and the age at the last checkpoint: see `_age`."""
        self._ring = Ring(ring_size)
        self._pending: set[PartialSequence] = set()
        self.drain: Drain[M] | None = None
        """Committed messages that remain to be dequeued; None if there are none."""
        self.outcomes: Counter[tuple[JournalName, int, QueueOutcome]] = Counter()
        """Number of queued messages by journal, flags and outcome, for metrics. The owner may clear it."""
        self.rewinds = 0
        """Number of times that a producer acknowledged an earlier clock than before. Such a producer lost its
        state, and readers may see messages twice."""
        self.clobbers = 0
        """Number of times that a message outside of transactions rolled back its producer's transaction."""

    @property
    def offsets(self) -> Mapping[JournalName, Offset]:
        """By journal, the offset up to which messages are queued, and all committed messages consumed."""
        return self._offsets

    @property
    def has_pending(self) -> bool:
        """True if a producer's pending messages have begun since the last checkpoint, and have not ended.

        Older pending messages do not count, since their producer may acknowledge them late.
        """
        return bool(self._pending)

    # Queueing.

    def queue(self, envelope: Envelope[M]) -> QueueOutcome:
        """Queue the next message of its journal. Raise `Bug` during a drain.

        If the outcome `commits`, dequeue the message and the messages that it commits. Only when all
        of them are consumed, the journal's offset passes the message.
        """
        if self.drain is not None:
            raise Bug(
                "cannot queue before committed messages are drained", journal=envelope.journal
            )
        self._ring.make_room()
        journal, clock, flags = envelope.journal, envelope.clock, envelope.flags
        if clock == 0:
            # A message without a UUID is never deduplicated: give it its own state, and do not keep that.
            partial = PartialSequence(journal, envelope.producer, 0)
            outcome = self._queue_outside(partial, envelope, 1)
        else:
            partials = self._partials[journal]
            existing = partials.get(envelope.producer)
            if existing is None:
                partial = PartialSequence(journal, envelope.producer, clock - 1)
                partials[envelope.producer] = partial
            else:
                partial = existing
            if flags == CONTINUE_TXN:
                outcome = self._queue_continue(partial, envelope)
            elif flags == ACK_TXN:
                outcome = self._queue_ack(partial, envelope)
            else:
                # As in the original, unknown flags mean a message outside of transactions.
                outcome = self._queue_outside(partial, envelope, clock)
        if outcome in _COMMITS:
            self.drain = SpanDrain(
                partial,
                envelope,
                self._offsets,
                needs_replay=outcome == QueueOutcome.ACK_COMMIT_REPLAY,
            )
        else:
            self._offsets[journal] = envelope.end
        self.outcomes[journal, flags, outcome] += 1
        return outcome

    def _queue_outside(
        self, partial: PartialSequence, envelope: Envelope[M], clock: int
    ) -> QueueOutcome:
        """Queue a message that commits at once. Roll back its producer's pending messages.

        ``clock`` is 1 for a message without a UUID. `_end_if_done` later removes ``partial`` from `_pending`.
        """
        if clock <= partial.min_clock:
            return QueueOutcome.OUTSIDE_ALREADY_ACKED
        if partial.begin is not None:
            self.clobbers += 1
            partial.forget()
        partial.begin = envelope.begin
        partial.max_clock = clock
        self._ring.add(partial, envelope)
        return QueueOutcome.OUTSIDE_COMMIT

    def _queue_continue(self, partial: PartialSequence, envelope: Envelope[M]) -> QueueOutcome:
        """Queue a message that is pending until its producer acknowledges it."""
        if envelope.clock <= partial.min_clock:
            return QueueOutcome.CONTINUE_ALREADY_ACKED
        if envelope.clock <= partial.max_clock:
            return QueueOutcome.CONTINUE_TXN_CLOCK_LARGER
        outcome = QueueOutcome.CONTINUE_EXTEND_SPAN
        if partial.begin is None:
            partial.begin = envelope.begin
            self._pending.add(partial)
            outcome = QueueOutcome.CONTINUE_BEGIN_SPAN
        partial.max_clock = envelope.clock
        self._ring.add(partial, envelope)
        return outcome

    def _queue_ack(self, partial: PartialSequence, envelope: Envelope[M]) -> QueueOutcome:
        """Queue an acknowledgement, which commits or rolls back its producer's pending messages."""
        if envelope.clock <= partial.min_clock:
            # A smaller clock means that the producer has recovered an older state. The producer sends
            # later messages again, as new ones: the sequencer must not drop them as duplicates.
            self.rewinds += envelope.clock < partial.min_clock
            partial.reset(envelope.clock)
            self._pending.discard(partial)
            return QueueOutcome.ACK_ROLLBACK
        if partial.begin is None:
            partial.begin = envelope.begin
            outcome = QueueOutcome.ACK_EMPTY
        elif partial.is_complete:
            outcome = QueueOutcome.ACK_COMMIT_RING
        else:
            outcome = QueueOutcome.ACK_COMMIT_REPLAY
        partial.max_clock = envelope.clock
        self._ring.add(partial, envelope)
        return outcome

    def queue_batch(self, envelopes: Sequence[Envelope[M]], start: int = 0) -> int:
        """Queue messages from ``envelopes[start]`` on, until some have committed.

        Return the index of the first message that was not queued. The result equals that of `queue` for
        each message, except that messages that commit at once may become ready together, as one run. Each
        message of a run takes effect when it is `consumed`. Raise `Bug` during a drain.
        """
        if self.drain is not None:
            raise Bug("cannot queue before committed messages are drained")
        index, count = start, len(envelopes)
        while index < count and self.drain is None:
            flags = envelopes[index].flags
            if flags == CONTINUE_TXN:
                next_index = self._queue_span(envelopes, index)
            elif flags in _COMMITS_AT_ONCE:
                next_index = self._queue_run(envelopes, index)
            else:
                next_index = index
            if next_index == index:
                self.queue(envelopes[index])
                next_index += 1
            index = next_index
        return index

    def _queue_span(self, envelopes: Sequence[Envelope[M]], start: int) -> int:
        """Queue messages of one producer's transaction that are in order. Return the index after them."""
        first = envelopes[start]
        journal, producer = first.journal, first.producer
        if not first.clock:
            return start
        partials = self._partials[journal]
        partial = partials.get(producer)
        clock = first.clock - 1 if partial is None else partial.max_clock
        stop = start
        for index in range(start, len(envelopes)):
            envelope = envelopes[index]
            if (
                envelope.flags != CONTINUE_TXN
                or envelope.clock <= clock
                or envelope.producer != producer
                or envelope.journal != journal
            ):
                break
            clock = envelope.clock
            stop += 1
        if stop == start:
            return start
        if partial is None:
            partial = PartialSequence(journal, producer, first.clock - 1)
            partials[producer] = partial
        begins_span = partial.begin is None
        if begins_span:
            partial.begin = first.begin
            self._pending.add(partial)
            self.outcomes[journal, CONTINUE_TXN, QueueOutcome.CONTINUE_BEGIN_SPAN] += 1
        if extend_count := stop - start - begins_span:
            self.outcomes[journal, CONTINUE_TXN, QueueOutcome.CONTINUE_EXTEND_SPAN] += extend_count
        partial.max_clock = clock
        self._ring.add_all(partial, envelopes[start:stop])
        self._offsets[journal] = envelopes[stop - 1].end
        return stop

    def _queue_run(self, envelopes: Sequence[Envelope[M]], start: int) -> int:
        """Queue messages with the same flags that commit at once, of producers without pending messages.
        Return the index after them."""
        journal, producer = envelopes[start].journal, envelopes[start].producer
        flags = envelopes[start].flags
        partials = self._partials[journal]
        newest: dict[ProducerId, int] = {}
        clock, stop = self._run_clock(partials, newest, envelopes[start]), start
        if (
            isinstance(envelopes, EnvelopeBatch)
            and envelopes.is_run
            and envelopes[start].clock > clock
        ):
            stop = len(envelopes)  # The batch is known to be a run: do not look at each message.
        for index in range(stop, len(envelopes)):
            envelope = envelopes[index]
            if envelope.flags != flags or envelope.journal != journal:
                break
            if envelope.producer != producer:
                newest[producer] = clock
                producer = envelope.producer
                clock = self._run_clock(partials, newest, envelope)
            if envelope.clock > clock:
                clock = envelope.clock
            elif envelope.clock:
                break
            stop += 1
        if stop == start:
            return start
        self._ring.pass_through(stop - start)
        self.outcomes[journal, flags, QueueOutcome.OUTSIDE_COMMIT] += stop - start
        self.drain = RunDrain(
            list(envelopes[start:stop]), partials, self._offsets, one_producer=not newest
        )
        return stop

    @staticmethod
    def _run_clock(
        partials: dict[ProducerId, PartialSequence],
        newest: dict[ProducerId, int],
        envelope: Envelope[Any],
    ) -> int:
        """Return the clock that ``envelope`` must exceed to be part of a run."""
        clock = newest.get(envelope.producer)
        if clock is not None:
            return clock
        partial = partials.get(envelope.producer)
        if partial is None:
            return envelope.clock - 1
        # The message would roll back pending messages of its producer, which a run cannot do.
        return partial.min_clock if partial.begin is None else (1 << 64)

    def skip(self, journal: JournalName, end: Offset) -> None:
        """Skip bytes up to ``end`` that hold no message, or were deleted. Raise `Bug` during a drain."""
        if self.drain is not None:
            raise Bug("cannot skip before committed messages are drained", journal=journal)
        self._offsets[journal] = end

    # Draining.

    @property
    def replay_range(self) -> ReplayRange | None:
        """Range to read again, and to feed as a replay, before the next `dequeue`. None if no replay is
        needed."""
        drain = self.drain
        if isinstance(drain, SpanDrain) and drain.needs_replay:
            return drain.replay_range
        return None

    def start_replay(self, batches: Iterator[Sequence[Envelope[M]]]) -> None:
        """Make `dequeue` read the messages of `replay_range` from an iterator.

        `dequeue` raises an error of the iterator. The iterator may yield nothing.
        """
        self._span().start_replay(batches)

    def feed_replay(self, envelopes: Sequence[Envelope[M]]) -> None:
        """Feed some messages of `replay_range`, in order, in place of an iterator.

        After each call, dequeue until no message comes. Call `end_replay` after the last messages. Raise
        `Corrupt` if these messages differ from the messages that were queued.
        """
        self._span().feed_replay(envelopes)

    def end_replay(self) -> None:
        self._span().end_replay()

    def _span(self) -> SpanDrain[M]:
        if not isinstance(self.drain, SpanDrain):
            raise Bug("no replay was requested")
        return self.drain

    def dequeue(self, limit: int) -> list[Envelope[M]]:
        """Return at most ``limit`` committed messages, or none if there are no more.

        The messages dequeued before become `consumed`. Acknowledgements are among the messages. Raise
        `Corrupt` if a replay differs from the queued messages, and `Bug` if a needed replay has not begun.
        """
        self.consumed()
        if self.drain is None:
            return []
        batch = self.drain.take(limit)
        if not batch:
            self._end_if_done()
        return batch

    def step(self) -> Envelope[M] | None:
        """Dequeue one message. Return None if there are no more."""
        batch = self.dequeue(1)
        return batch[0] if batch else None

    def consumed(self, count: int | None = None) -> None:
        """Mark the first ``count`` of the messages dequeued last as consumed; None means all.

        `dequeue` returns the other messages again. Call this before `checkpoint` if no `dequeue` follows.
        """
        if self.drain is None:
            return
        self.drain.consumed(count)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.drain is not None and self.drain.done:
            if self.drain.partial is not None:
                self._pending.discard(self.drain.partial)
            self.drain = None

    # Checkpoints.

    def checkpoint(
        self, prune_horizon_ns: int = 0, now_ns: int = 0
    ) -> dict[JournalName, SourceCheckpoint]:
        """Return the state up to the last consumed message, by journal. Reset `has_pending`.

        Forget producers that were silent for ``prune_horizon_ns`` (0: forget none). Clocks of publishers may
        differ by more than this horizon. So silence counts from the first checkpoint after a producer's last
        message. For a producer restored with an open transaction, it counts from the first checkpoint. For
        any other restored producer, it counts from its clock, but the producer is kept for one step at
        least. `_age` measures the time between checkpoints. ``now_ns`` is the present Unix time. A message
        that a forgotten producer repeats is delivered twice.
        """
        self._pending.clear()
        span = clock_span(prune_horizon_ns)
        draining = None if self.drain is None else self.drain.partial
        sources = {}
        for journal, partials in self._partials.items():
            if span and partials:
                age = self._age(journal, now_ns, span)
                for producer, partial in list(partials.items()):
                    if partial.max_clock != partial.checked_clock:
                        partial.checked_clock, partial.seen_at = partial.max_clock, age
                    elif partial.seen_at < age - span and partial is not draining:
                        del partials[producer]
            sources[journal] = SourceCheckpoint(
                self._offsets.get(journal, 0),
                {
                    producer: ProducerState(partial.min_clock, partial.begin)
                    for producer, partial in partials.items()
                },
            )
        for journal, offset in self._offsets.items():
            sources.setdefault(journal, SourceCheckpoint(offset))
        return sources

    def _age(self, journal: JournalName, now_ns: int, span: int) -> int:
        """Return the time that has passed in a journal up to this checkpoint, as a difference of clocks.

        Time passes with `checkpoint_clock`, by at most 1/`AGE_STEPS` of ``span`` for each checkpoint. So
        neither a clock that is ahead nor a day without acknowledgements makes other producers look old.
        """
        acks = [partial.min_clock for partial in self._partials[journal].values()]
        newest = checkpoint_clock(acks, now_ns, span)
        if journal not in self._ages:
            # A checkpoint does not say when a producer wrote: use its clock.
            for partial in self._partials[journal].values():
                if partial.checked_clock >= 0:
                    old = abs(newest - partial.checked_clock)
                    partial.seen_at = -min(old, span - span // AGE_STEPS)
        former, age = self._ages.get(journal, (newest, 0))
        if former <= clock_at(now_ns) + span:  # Else ``now_ns`` was wrong at the last checkpoint.
            newest = max(newest, former)
        age += min(max(0, newest - former), span // AGE_STEPS)
        self._ages[journal] = newest, age
        return age
