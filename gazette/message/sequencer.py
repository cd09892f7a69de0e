"""Stage 12 of the byte path: takes envelopes as they were read, gives those that have committed.

Pure. Producers write messages that are pending until they acknowledge them, repeat what they are
not sure to have written, and roll back; the `Sequencer` delivers each message once, when and if it
commits, in the order of its producer. It keeps the last messages in a ring; of longer transactions
it asks for a replay. At every moment its state, as a checkpoint, is enough to go on elsewhere.

`Sequencer.queue` with one envelope at a time is the specification. `Sequencer.queue_batch` takes
the runs that are most of every journal at once, with the same result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Generic, TypeVar

from gazette.errors import Bug
from gazette.message.envelope import Envelope
from gazette.message.message_uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    ProducerId,
    clock_span,
)
from gazette.message.sequencer_drain import Drain, ReplayRange, RunDrain, SpanDrain
from gazette.message.sequencer_ring import PartialSequence, Ring
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset

__all__ = ["QueueOutcome", "ReplayRange", "Sequencer"]

M = TypeVar("M")


class QueueOutcome(IntEnum):
    """What queueing a message did. After those that `commits`, dequeue until nothing is left."""

    OUTSIDE_ALREADY_ACKED = 0
    """A duplicate, dropped."""
    OUTSIDE_COMMIT = 1
    """The message has committed by itself; whatever its producer had pending is rolled back."""
    CONTINUE_ALREADY_ACKED = 2
    """A duplicate of a committed message, dropped."""
    CONTINUE_TXN_CLOCK_LARGER = 3
    """A duplicate of a pending message, dropped."""
    CONTINUE_BEGIN_SPAN = 4
    """The first pending message of its producer."""
    CONTINUE_EXTEND_SPAN = 5
    """One more pending message."""
    ACK_ROLLBACK = 6
    """What was pending is rolled back: the producer is known to have committed no more than this."""
    ACK_EMPTY = 7
    """An acknowledgement of nothing. It is delivered itself."""
    ACK_COMMIT_RING = 8
    """What was pending has committed, and is in the ring."""
    ACK_COMMIT_REPLAY = 9
    """What was pending has committed, and must be read again: see `Sequencer.replay_range`."""

    @property
    def commits(self) -> bool:
        return self in _COMMITS

    @property
    def label(self) -> str:
        """The value of the label ``outcome`` of metrics."""
        first, *others = self.name.lower().replace("_txn_clock", "_ring_clock").split("_")
        return first + "".join(map(str.capitalize, others))


_COMMITS = frozenset(
    {
        QueueOutcome.OUTSIDE_COMMIT,
        QueueOutcome.ACK_EMPTY,
        QueueOutcome.ACK_COMMIT_RING,
        QueueOutcome.ACK_COMMIT_REPLAY,
    }
)


class Sequencer(Generic[M]):
    """From messages as read to messages as committed, for any number of journals.

    ``sources`` is where a former sequencer stopped (its `checkpoint`); messages must be queued from
    each journal's ``read_through`` on, in order. ``ring_size`` is how many messages are kept.

    ::

        index = 0
        while index < len(batch):
            index = sequencer.queue_batch(batch, index)
            if sequencer.replay_range is not None:
                sequencer.start_replay(read_again(sequencer.replay_range))
            while committed := sequencer.dequeue(limit):
                ...  # have them take effect
    """

    def __init__(self, sources: Mapping[JournalName, SourceCheckpoint], ring_size: int) -> None:
        self._offsets: dict[JournalName, Offset] = {}
        self._partials: defaultdict[JournalName, dict[ProducerId, PartialSequence]]
        self._partials = defaultdict(dict)
        for journal, source in sources.items():
            self._offsets[journal] = source.read_through
            self._partials[journal] = {
                producer: PartialSequence(journal, producer, state.last_ack, state.begin)
                for producer, state in source.producers.items()
            }
        self._ring = Ring(ring_size)
        self._pending: set[PartialSequence] = set()
        self._drain: Drain[M] | None = None
        self.outcomes: Counter[tuple[JournalName, int, QueueOutcome]] = Counter()
        """How often queueing messages of a journal, with those flags, had that outcome. For metrics;
        may be cleared."""
        self.rewinds = 0
        """How often a producer acknowledged less than it had before: it lost its state, and readers
        may see messages twice."""
        self.clobbers = 0
        """How often a message outside of transactions rolled back its producer's pending ones."""

    @property
    def offsets(self) -> Mapping[JournalName, Offset]:
        """By journal, up to where messages have been queued and, if they commit, taken effect."""
        return self._offsets

    @property
    def draining(self) -> bool:
        """Whether committed messages are still to be dequeued."""
        return self._drain is not None

    @property
    def has_pending(self) -> bool:
        """Whether a span has begun since the last checkpoint, and has not ended. Extending one that
        is older does not count: its producer may be long in ending it."""
        return bool(self._pending)

    # Queueing.

    def queue(self, envelope: Envelope[M]) -> QueueOutcome:
        """Take the next message of its journal. Raises `Bug` during a drain.

        If the outcome `commits`, the message and what it commits are there to be dequeued, and the
        journal's offset has not passed it until they took effect.
        """
        if self._drain is not None:
            raise Bug("queueing before committed messages are drained", journal=envelope.journal)
        self._ring.make_room()
        journal, clock, flags = envelope.journal, envelope.clock, envelope.flags
        if clock == 0:
            # Takes no part in exactly-once: a producer of its own, that nobody remembers.
            partial = PartialSequence(journal, envelope.producer, 0)
            outcome = self._queue_outside(partial, envelope, 1)
        else:
            partials = self._partials[journal]
            found = partials.get(envelope.producer)
            if found is None:
                partial = PartialSequence(journal, envelope.producer, clock - 1)
                partials[envelope.producer] = partial
            else:
                partial = found
            if flags == CONTINUE_TXN:
                outcome = self._queue_continue(partial, envelope)
            elif flags == ACK_TXN:
                outcome = self._queue_ack(partial, envelope)
            else:
                # Flags that we do not know are of messages outside of transactions, as ever.
                outcome = self._queue_outside(partial, envelope, clock)
        if outcome in _COMMITS:
            self._drain = SpanDrain(
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
        if envelope.clock <= partial.min_clock:
            # If less, its producer has recovered an older state. Whatever it acknowledged beyond
            # that it will send again, as new messages: they must not be taken for duplicates.
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
        """Take messages from ``envelopes[start]`` on, until some have committed.

        Returns the index of the first that was not taken. The result is that of `queue` for each of
        those taken, with this liberty: messages that commit by themselves may become ready as one
        run, of which each takes effect when it is `consumed`. Raises `Bug` during a drain.
        """
        if self._drain is not None:
            raise Bug("queueing before committed messages are drained")
        index, count = start, len(envelopes)
        while index < count and self._drain is None:
            flags = envelopes[index].flags
            if flags == CONTINUE_TXN:
                taken = self._queue_span(envelopes, index)
            elif flags == OUTSIDE_TXN:
                taken = self._queue_run(envelopes, index)
            else:
                taken = index
            if taken == index:
                self.queue(envelopes[index])
                taken += 1
            index = taken
        return index

    def _queue_span(self, envelopes: Sequence[Envelope[M]], start: int) -> int:
        """Take pending messages of one producer that are in order. Returns where they end."""
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
        begins = partial.begin is None
        if begins:
            partial.begin = first.begin
            self._pending.add(partial)
            self.outcomes[journal, CONTINUE_TXN, QueueOutcome.CONTINUE_BEGIN_SPAN] += 1
        if extends := stop - start - begins:
            self.outcomes[journal, CONTINUE_TXN, QueueOutcome.CONTINUE_EXTEND_SPAN] += extends
        partial.max_clock = clock
        self._ring.add_all(partial, envelopes[start:stop])
        self._offsets[journal] = envelopes[stop - 1].end
        return stop

    def _queue_run(self, envelopes: Sequence[Envelope[M]], start: int) -> int:
        """Take messages that commit by themselves, of producers with nothing pending.

        Returns where they end.
        """
        journal, producer = envelopes[start].journal, envelopes[start].producer
        partials = self._partials[journal]
        newest: dict[ProducerId, int] = {}
        clock, stop = self._run_clock(partials, newest, envelopes[start]), start
        for index in range(start, len(envelopes)):
            envelope = envelopes[index]
            if envelope.flags or envelope.journal != journal:
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
        self.outcomes[journal, OUTSIDE_TXN, QueueOutcome.OUTSIDE_COMMIT] += stop - start
        self._drain = RunDrain(
            list(envelopes[start:stop]), partials, self._offsets, one_producer=not newest
        )
        return stop

    @staticmethod
    def _run_clock(
        partials: dict[ProducerId, PartialSequence],
        newest: dict[ProducerId, int],
        envelope: Envelope[Any],
    ) -> int:
        """What the clock of ``envelope`` must exceed for it to be part of a run."""
        clock = newest.get(envelope.producer)
        if clock is not None:
            return clock
        partial = partials.get(envelope.producer)
        if partial is None:
            return envelope.clock - 1
        # With something pending it rolls that back, which is not for a batch.
        return partial.min_clock if partial.begin is None else (1 << 64)

    def skip(self, journal: JournalName, end: Offset) -> None:
        """Pass over bytes up to ``end`` that were no message. Raises `Bug` during a drain."""
        if self._drain is not None:
            raise Bug("skipping before committed messages are drained", journal=journal)
        self._offsets[journal] = end

    # Draining.

    @property
    def replay_range(self) -> ReplayRange | None:
        """What must be read again, and fed as a replay, before anything can be dequeued."""
        drain = self._drain
        if isinstance(drain, SpanDrain) and drain.needs_replay:
            return drain.replay_range
        return None

    def start_replay(self, batches: Iterator[Sequence[Envelope[M]]]) -> None:
        """Have `dequeue` take the messages of `replay_range` from an iterator.

        What that raises `dequeue` does. The range may be empty, and so may the iterator be.
        """
        self._span().start_replay(batches)

    def feed_replay(self, envelopes: Sequence[Envelope[M]]) -> None:
        """Give some messages of `replay_range`, in order, instead of an iterator of all.

        Then dequeue until nothing comes, and after the last call `end_replay`. Raises `Corrupt` if
        they cannot be what was there.
        """
        self._span().feed_replay(envelopes)

    def end_replay(self) -> None:
        self._span().end_replay()

    def _span(self) -> SpanDrain[M]:
        if not isinstance(self._drain, SpanDrain):
            raise Bug("no replay is needed")
        return self._drain

    def dequeue(self, limit: int) -> list[Envelope[M]]:
        """At most ``limit`` committed messages; empty when there are no more.

        Messages dequeued before are `consumed` by this. Acknowledgements are among them. Raises
        `Corrupt` if a replay is not what was there, `Bug` if one is needed.
        """
        self.consumed()
        if self._drain is None:
            return []
        batch = self._drain.take(limit)
        if not batch:
            self._end_if_done()
        return batch

    def step(self) -> Envelope[M] | None:
        """`dequeue` of one message."""
        batch = self.dequeue(1)
        return batch[0] if batch else None

    def consumed(self, count: int | None = None) -> None:
        """The first ``count`` (None: all) of the messages dequeued last have taken effect.

        The others are dequeued again. Call this before `checkpoint` if no `dequeue` follows.
        """
        if self._drain is None:
            return
        self._drain.consumed(count)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._drain is not None and self._drain.done:
            if self._drain.partial is not None:
                self._pending.discard(self._drain.partial)
            self._drain = None

    # Checkpoints.

    def checkpoint(self, prune_horizon_ns: int = 0) -> dict[JournalName, SourceCheckpoint]:
        """The state up to the last message consumed, by journal. What is pending is so no more.

        Forgets producers whose newest message is older than the horizon (zero: none), by the newest
        acknowledgement in their journal: what they may still repeat would be delivered twice.
        """
        self._pending.clear()
        span = clock_span(prune_horizon_ns)
        moving = None if self._drain is None else self._drain.partial
        sources = {}
        for journal, partials in self._partials.items():
            if span and partials:
                newest = max(partial.min_clock for partial in partials.values())
                # Not below zero, where the original wraps around and forgets every producer.
                bound = max(0, newest - span)
                for producer, partial in list(partials.items()):
                    if partial.max_clock < bound and partial is not moving:
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
