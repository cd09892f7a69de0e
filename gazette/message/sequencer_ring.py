"""The bounded memory of a sequencer: `Ring`, and the `PartialSequence` of each producer. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gazette.message.envelope import Envelope
from gazette.message.message_uuid import ProducerId
from gazette.protocol.ids import JournalName, Offset


class PartialSequence:
    """One producer in one journal, and what it has not acknowledged yet.

    Invariants: ``min_clock <= max_clock``; without a ``begin`` they are equal, and nothing of the
    producer is kept. Kept envelopes have ascending clocks, and ring numbers.
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
        """Up to here, messages have been acknowledged (or, during a drain, consumed)."""
        self.max_clock = clock
        """Up to here, messages have been seen. Not part of checkpoints."""
        self.begin = begin
        """Where the first message begins that is beyond ``min_clock``; None if there is none."""
        self.kept: deque[Envelope[Any]] = deque()
        """The last of its messages, from ``begin`` on unless the ring has dropped some."""
        self.numbers: deque[int] = deque()
        """The place of each kept one in the ring."""

    @property
    def is_complete(self) -> bool:
        """Whether every message from ``begin`` on is kept."""
        return bool(self.kept) and self.kept[0].begin == self.begin

    def forget(self) -> None:
        self.kept.clear()
        self.numbers.clear()

    def reset(self, clock: int) -> None:
        """Everything up to ``clock`` has committed, or was rolled back; nothing is open."""
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
    """Which of the messages that were queued last are kept: at most ``capacity``, of all producers.

    It counts slots and tells producers what they have lost; messages are kept by them. A slot stays
    taken until it is overwritten, also when its message was delivered or rolled back before.
    """

    __slots__ = ("_low", "_runs", "_size", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._low = 0
        self._size = 0
        self._runs: deque[_Run] = deque()

    def make_room(self) -> None:
        """Drop the oldest if all slots are taken. Every queued message does, added or not."""
        if self._size == self.capacity:
            self._drop(1)

    def add(self, owner: PartialSequence, envelope: Envelope[Any]) -> None:
        """Keep a message. There must be room."""
        owner.kept.append(envelope)
        owner.numbers.append(self._low + self._size)
        self._take(owner, 1)

    def add_all(self, owner: PartialSequence, envelopes: Sequence[Envelope[Any]]) -> None:
        """`make_room` and `add` for each."""
        count = len(envelopes)
        begin = self._low + self._size
        # More than fit would be dropped again at once.
        skip = max(0, count - self.capacity)
        owner.kept.extend(envelopes[skip:] if skip else envelopes)
        owner.numbers.extend(range(begin + skip, begin + count))
        self._take(owner, count)
        self._drop(max(0, self._size - self.capacity))

    def pass_through(self, count: int) -> None:
        """`make_room` and `add` for ``count`` messages that nobody needs to be kept."""
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
