"""Messages that a sequencer holds: pending ones in its `Ring`, and committed ones in a `Drain`. Pure.

The ring bounds the number of messages in memory. A `PartialSequence` keeps the messages of one producer.

A drain gives out messages with `take`. Its owner reports with `consumed` how many took effect. The state for
a checkpoint advances with each consumed message. So a shard that stops in the middle resumes exactly there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from gazette.errors import Bug, Corrupt
from gazette.message.envelope import Envelope
from gazette.message.uuid import ProducerId
from gazette.protocol.checkpoint import ProducerState
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")


class PartialSequence:
    """State of one producer in one journal, with its messages that are not acknowledged yet.

    Invariants: ``min_clock <= max_clock``. If ``begin`` is None, both clocks are equal, and no message of
    the producer is kept. Kept envelopes have ascending clocks and ring numbers.
    """

    __slots__ = (
        "begin",
        "checked_clock",
        "journal",
        "kept",
        "max_clock",
        "min_clock",
        "numbers",
        "producer",
        "seen_at",
    )

    def __init__(
        self,
        journal: JournalName,
        producer: ProducerId,
        clock: int,
        begin: Offset | None = None,
    ) -> None:
        self.journal = journal
        self.producer = producer
        self.min_clock = clock
        """Clock up to which messages are acknowledged (or, during a drain, consumed)."""
        self.max_clock = clock
        """Clock up to which messages were seen. Checkpoints do not have it."""
        self.seen_at = 0
        """Age of the journal at the first checkpoint after the last message: see `Sequencer.checkpoint`."""
        self.checked_clock = -1
        """``max_clock`` at the last checkpoint; -1 before the first, unless `restored` sets it."""
        self.begin = begin
        """Offset of the first message beyond ``min_clock``. None if there is no such message."""
        self.kept: deque[Any] = deque()
        """The producer's latest messages, from ``begin`` on unless the ring has dropped some. Each is an
        envelope, or a row of an array pass."""
        self.numbers: deque[int] = deque()
        """Ring number of each kept message."""

    @classmethod
    def restored(
        cls, journal: JournalName, producer: ProducerId, state: ProducerState
    ) -> PartialSequence:
        """Return the sequence of a producer in a checkpoint. An open transaction of it counts as new."""
        partial = cls(journal, producer, state.last_ack, state.begin)
        if state.begin is None:
            partial.checked_clock = state.last_ack
        return partial

    @property
    def is_complete(self) -> bool:
        """True if every message from ``begin`` on is kept."""
        return bool(self.kept) and self.kept[0].begin == self.begin

    def forget(self) -> None:
        self.kept.clear()
        self.numbers.clear()

    def reset(self, clock: int) -> None:
        """Forget all messages: those up to ``clock`` have committed or were rolled back."""
        self.min_clock = self.max_clock = clock
        self.begin = None
        self.forget()


class _Run:
    """Consecutive slots of the ring for messages of one producer. ``owner`` is None for messages that are not
    kept."""

    __slots__ = ("count", "owner")

    def __init__(self, owner: PartialSequence | None, count: int) -> None:
        self.owner = owner
        self.count = count


class Ring:
    """Bound on the messages in memory: the last ``capacity`` messages of all producers.

    The ring only counts slots. A `PartialSequence` keeps the messages, and drops the oldest when the ring is
    full. Until then, a slot stays occupied, even if its message was delivered or rolled back.
    """

    __slots__ = ("_low", "_runs", "_size", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._low = 0
        """Ring number of the oldest occupied slot."""
        self._size = 0
        """Number of occupied slots."""
        self._runs: deque[_Run] = deque()

    def make_room(self) -> None:
        """Drop the oldest message if all slots are occupied. Call this for each queued message, even if the
        message is then dropped and not added."""
        if self._size == self.capacity:
            self._drop(1)

    def add(self, owner: PartialSequence, envelope: Envelope[Any]) -> None:
        """Keep a message. Call `make_room` first."""
        owner.kept.append(envelope)
        owner.numbers.append(self._low + self._size)
        self._occupy(owner, 1)

    def add_all(self, owner: PartialSequence, envelopes: Sequence[Envelope[Any]]) -> None:
        """Do what `make_room` and `add` do for each envelope, in one step."""
        count = len(envelopes)
        begin = self._low + self._size
        # Skip envelopes that the ring would drop again at once.
        skip = max(0, count - self.capacity)
        owner.kept.extend(envelopes[skip:] if skip else envelopes)
        owner.numbers.extend(range(begin + skip, begin + count))
        self._occupy(owner, count)
        self._drop(max(0, self._size - self.capacity))

    def pass_through(self, count: int) -> None:
        """Occupy ``count`` slots for messages that are not kept. Drop the oldest messages if necessary."""
        self._occupy(None, count)
        self._drop(max(0, self._size - self.capacity))

    def _occupy(self, owner: PartialSequence | None, count: int) -> None:
        runs = self._runs
        if runs and runs[-1].owner is owner:
            runs[-1].count += count
        else:
            runs.append(_Run(owner, count))
        self._size += count

    def _drop(self, count: int) -> None:
        """Free the oldest ``count`` slots. Make producers forget the messages whose slots are freed."""
        self._size -= count
        while count:
            run = self._runs[0]
            dropped = min(count, run.count)
            run.count -= dropped
            count -= dropped
            self._low += dropped
            if run.owner is not None:
                numbers, kept = run.owner.numbers, run.owner.kept
                while numbers and numbers[0] < self._low:
                    numbers.popleft()
                    kept.popleft()
            if not run.count:
                self._runs.popleft()


class ReplayRange(NamedTuple):
    """Bytes of a journal to read again, because the ring has dropped their messages."""

    journal: JournalName
    begin: Offset
    end: Offset


class Drain(ABC, Generic[M]):
    """Committed messages that remain to be consumed. `take` has given out
    ``_ready[_next:_next + _handed_out]``. All messages before ``_next`` are consumed."""

    partial: PartialSequence | None = None
    """Producer whose state the drain changes. None if it may change several."""

    def __init__(self, ready: list[Envelope[M]]) -> None:
        self._ready = ready
        self._next = 0
        self._handed_out = 0

    def take(self, limit: int) -> list[Envelope[M]]:
        """Return at most ``limit`` more messages, or none if no more are ready."""
        batch = self._ready[self._next : self._next + limit] if self._next else self._ready[:limit]
        self._handed_out = len(batch)
        return batch

    def consumed(self, count: int | None) -> None:
        """Mark the first ``count`` messages that `take` gave out last as consumed; None means all. `take`
        gives out the other messages again."""
        count = self._handed_out if count is None else count
        if not 0 <= count <= self._handed_out:
            raise Bug(
                "cannot consume more than was dequeued", consumed=count, dequeued=self._handed_out
            )
        if count:
            self._advance(self._ready[self._next : self._next + count])
        self._next += count
        self._handed_out = 0

    @abstractmethod
    def _advance(self, consumed: Sequence[Envelope[M]]) -> None:
        """Advance the state for a checkpoint past consumed messages."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if all messages are consumed."""


class RunDrain(Drain[M]):
    """Drain of messages of one journal, of any producers, that each commit at once. The state does not change
    until they are consumed."""

    def __init__(
        self,
        ready: list[Envelope[M]],
        partials: dict[ProducerId, PartialSequence],
        offsets: dict[JournalName, Offset],
        *,
        one_producer: bool,
    ) -> None:
        super().__init__(ready)
        self._partials = partials
        self._offsets = offsets
        self._one_producer = one_producer

    def _advance(self, consumed: Sequence[Envelope[M]]) -> None:
        last = consumed[-1]
        if self._one_producer and last.clock:  # A message without a UUID has the clock 0.
            newest = {last.producer: last.clock}
        else:
            newest = {envelope.producer: envelope.clock for envelope in consumed if envelope.clock}
        for producer, clock in newest.items():
            partial = self._partials.get(producer)
            if partial is None:
                self._partials[producer] = PartialSequence(last.journal, producer, clock)
            else:
                partial.reset(clock)
        self._offsets[last.journal] = last.end

    @property
    def done(self) -> bool:
        return self._next == len(self._ready)


class SpanDrain(Drain[M]):
    """Drain of the messages that one message committed: its producer's span, if any, then the message itself.

    If a replay is needed, its messages come first, then the messages that are still in memory.
    """

    def __init__(
        self,
        partial: PartialSequence,
        last: Envelope[M],
        offsets: dict[JournalName, Offset],
        *,
        needs_replay: bool,
    ) -> None:
        super().__init__([])
        self.partial: PartialSequence = partial
        self._last_message = last
        self._offsets = offsets
        self._replay: Iterator[Sequence[Envelope[M]]] | None = None
        """Batches of `start_replay` that are not used yet. None for a replay by `feed_replay`."""
        self.needs_replay = needs_replay
        """True if a replay is needed and has not begun."""
        self._replaying = needs_replay
        """True until the replay has ended."""
        self._replayed = False
        """True once a message of the replay was accepted."""
        self._ring_ready = False
        """True once the messages in memory are ready: they are the last of the span."""
        # Greatest clock so far of all messages of the span, and of its delivered messages.
        self._seen_clock = self._delivered_clock = partial.min_clock
        assert partial.begin is not None
        first = partial.kept[0]
        self.replay_range = ReplayRange(partial.journal, partial.begin, first.begin)

    def start_replay(self, batches: Iterator[Sequence[Envelope[M]]]) -> None:
        if not self.needs_replay:
            raise Bug("no replay was requested")
        self.needs_replay = False
        self._replay = batches

    def feed_replay(self, envelopes: Sequence[Envelope[M]]) -> None:
        if not self._replaying or self._replay is not None:
            raise Bug("no replay was requested, or it was started with an iterator")
        self.needs_replay = False
        self._accept(envelopes)

    def end_replay(self) -> None:
        self.needs_replay = self._replaying = False

    def take(self, limit: int) -> list[Envelope[M]]:
        if self.needs_replay:
            raise Bug("cannot dequeue before the replay is started", **self.replay_range._asdict())
        if self._next == len(self._ready):
            self._ready = []
            self._next = 0
            self._refill()
        batch = super().take(limit)
        if batch:
            self.partial.begin = batch[0].begin
        elif self._ring_ready:
            self._finish()
        return batch

    def _refill(self) -> None:
        """Make some messages ready: from the replay while it lasts, then from memory."""
        while self._replay is not None and not self._ready:
            batch = next(self._replay, None)
            if batch is None:
                self._replay = None
                self._replaying = False
            else:
                self._accept(batch)
        if not self._replaying and not self._ready and not self._ring_ready:
            self._ready.extend(self._committed(self.partial.kept))
            self.partial.forget()
            self._ring_ready = True

    def _accept(self, envelopes: Sequence[Envelope[M]]) -> None:
        """Check replayed messages, and make the messages of the span ready. Raise ``Corrupt`` for messages of
        another journal or range, and if the first message of the span is missing."""
        journal, begin, end = self.replay_range
        for envelope in envelopes:
            if envelope.journal != journal:
                reason = f"replay of wrong journal ({envelope.journal}; expected {journal})"
            elif envelope.begin < begin or (not self._replayed and envelope.begin > begin):
                # The replay must begin with the first message of the span. Otherwise the journal has
                # lost that message, and the transaction would be delivered without it.
                reason = f"replay has wrong Begin ({envelope.begin}; expected {begin})"
            elif envelope.end > end:
                reason = f"replay has wrong End ({envelope.end}; expected at most {end})"
            else:
                self._replayed = True
                continue
            raise Corrupt(
                reason,
                hint="The journal has lost messages of an open transaction: raise its retention, "
                "or move the shard's min_offset after it.",
                journal=journal,
                begin=begin,
                end=end,
            )
        producer = self.partial.producer
        self._ready.extend(self._committed([env for env in envelopes if env.producer == producer]))

    def _committed(self, envelopes: Iterable[Envelope[M]]) -> Iterator[Envelope[M]]:
        """Yield messages, but no duplicates, and no message beyond the clock of the acknowledgement.

        As in `Sequencer.queue`, a message is a duplicate unless its clock exceeds all clocks before it. For
        this, clocks beyond the acknowledgement count, too. Leave out a message with clock zero: it took
        effect when it was first read.
        """
        acknowledged = self.partial.max_clock
        seen, delivered = self._seen_clock, self._delivered_clock
        for envelope in envelopes:
            clock = envelope.clock
            if envelope is self._last_message:
                if clock > delivered or not clock:
                    yield envelope
            elif clock > seen:
                seen = clock
                if clock <= acknowledged:
                    delivered = clock
                    yield envelope
        self._seen_clock, self._delivered_clock = seen, delivered

    def _advance(self, consumed: Sequence[Envelope[M]]) -> None:
        self.partial.min_clock = consumed[-1].clock
        after = self._next + len(consumed)
        if after < len(self._ready):
            self.partial.begin = self._ready[after].begin
        elif self._ring_ready:
            self._finish()

    def _finish(self) -> None:
        """End the span: its last message was consumed, or no message is left to deliver."""
        self._offsets[self._last_message.journal] = self._last_message.end
        self.partial.reset(self._last_message.clock)

    @property
    def done(self) -> bool:
        return self.partial.begin is None
