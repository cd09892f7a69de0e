"""Bounded memory of a sequencer: `Ring`, and the `PartialSequence` of each producer. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gazette.message.envelope import Envelope
from gazette.message.uuid import ProducerId
from gazette.protocol.ids import JournalName, Offset


class PartialSequence:
    """State of one producer in one journal, with its messages that are not acknowledged yet.

    Invariants: ``min_clock <= max_clock``. Without a ``begin`` they are equal, and no message of
    the producer is kept. Kept envelopes have ascending clocks and ring numbers.
    """

    __slots__ = ("begin", "journal", "kept", "max_clock", "min_clock", "numbers", "producer")

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
        """Clock up to which messages were seen. Not part of checkpoints."""
        self.begin = begin
        """Offset of the first message beyond ``min_clock``. None without such a message."""
        self.kept: deque[Envelope[Any]] = deque()
        """The producer's latest messages, from ``begin`` on unless the ring has dropped some."""
        self.numbers: deque[int] = deque()
        """Ring number of each kept message."""

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
    """Consecutive slots of the ring that hold messages of one producer."""

    __slots__ = ("count", "owner")

    def __init__(self, owner: PartialSequence | None, count: int) -> None:
        self.owner = owner
        self.count = count


class Ring:
    """Bounded record of the messages queued last: at most ``capacity``, of all producers.

    The ring counts slots. Messages are kept by their producers, from which the ring drops them. A slot stays
    occupied until it is overwritten, even if its message was delivered or rolled back.
    """

    __slots__ = ("_low", "_runs", "_size", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._low = 0
        self._size = 0
        self._runs: deque[_Run] = deque()

    def make_room(self) -> None:
        """Drop the oldest message if all slots are taken. Call this for every queued
        message, added or not."""
        if self._size == self.capacity:
            self._drop(1)

    def add(self, owner: PartialSequence, envelope: Envelope[Any]) -> None:
        """Keep a message. Call `make_room` first."""
        owner.kept.append(envelope)
        owner.numbers.append(self._low + self._size)
        self._take(owner, 1)

    def add_all(self, owner: PartialSequence, envelopes: Sequence[Envelope[Any]]) -> None:
        """Call `make_room` and `add` for each envelope, in one step."""
        count = len(envelopes)
        begin = self._low + self._size
        # Skip those that the ring would drop again at once.
        skip = max(0, count - self.capacity)
        owner.kept.extend(envelopes[skip:] if skip else envelopes)
        owner.numbers.extend(range(begin + skip, begin + count))
        self._take(owner, count)
        self._drop(max(0, self._size - self.capacity))

    def pass_through(self, count: int) -> None:
        """Take slots for ``count`` messages that need not be kept, with `make_room` for each."""
        self._take(None, count)
        self._drop(max(0, self._size - self.capacity))

    def _take(self, owner: PartialSequence | None, count: int) -> None:
        runs = self._runs
        if runs and runs[-1].owner is owner:
            runs[-1].count += count
        else:
            runs.append(_Run(owner, count))
        self._size += count

    def _drop(self, count: int) -> None:
        self._size -= count
        while count:
            run = self._runs[0]
            some = min(count, run.count)
            run.count -= some
            count -= some
            self._low += some
            if run.owner is not None:
                numbers, kept = run.owner.numbers, run.owner.kept
                while numbers and numbers[0] < self._low:
                    numbers.popleft()
                    kept.popleft()
            if not run.count:
                self._runs.popleft()
