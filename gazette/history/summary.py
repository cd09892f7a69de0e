"""Summarises the changes that a run makes to the states of its producers: `Summariser`. Pure.

A summary is valid for any states before the run. The state of a producer in a journal is what the sequencer
knows of the producer: the clock up to which messages have committed (``acked``), the greatest clock so far
(``newest``), and the offset of the first pending message, if any. A few numbers describe the change, because:

- After an acknowledgement, the state does not depend on what was before it. So all changes after the first
  acknowledgement of a run are known.
- Before that acknowledgement, a message outside of transactions is new if its clock is above ``acked``. If
  any message is new, the one with the greatest clock is the last new one. All changes after it are known.
- Without a new message, the pending messages of the run join the messages that were pending before.

So the summaries of consecutive parts of a journal combine to the summary of both (`combine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import NamedTuple, Self

import numpy as np

from gazette.errors import Bug
from gazette.history.batch_split import (
    WHOLE_TXNS,
    BatchSplit,
    Segment,
    mask_of_new,
    split_batch,
)
from gazette.history.columns import Columns
from gazette.history.snapshot import Run
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette.protocol.ids import Offset


class State(NamedTuple):
    """State of a producer in one journal. ``acked <= newest``. ``begin`` None: no message is pending."""

    acked: int
    newest: int
    begin: Offset | None


class Undecided(Enum):
    """Fates of earlier pending messages that a run does not commit."""

    PENDING = "pending"
    ROLLED_BACK = "rolled back"


Fate = int | Undecided
"""Fate of pending messages: committed up to a clock (the number), rolled back, or still pending."""

FirstBeyond = Callable[[int], Offset]
"""Function from a clock to the offset of the first pending message of a run above that clock."""
FindBeyond = Callable[[int, int], Offset]
"""The same function for any producer, whose number is the first argument."""


@dataclass(frozen=True, slots=True)
class ProducerSummary:
    """Summary of one producer in a run. ``outside`` and ``pending…`` cover the part before its first ACK."""

    first_clock: int
    first_begin: Offset
    """Offset of the first message that counts."""
    outside: int | None = None
    """Greatest clock of messages outside of transactions; None without such messages."""
    after_outside: State | None = None
    """State before the first acknowledgement, if the message with the clock ``outside`` is new."""
    pending: int = 0
    """Clock of the first pending message; zero if no message is pending."""
    pending_begin: Offset = 0
    """Offset of the first pending message."""
    pending_newest: int = 0
    """Greatest clock of the pending messages."""
    acknowledged: int | None = None
    """Clock of the first acknowledgement. None: the run has no acknowledgement."""
    after: State | None = None
    """State at the end of the run. None: the run has no acknowledgement."""

    def apply(self, before: State, first_beyond: FirstBeyond) -> tuple[State, Fate]:
        """Return the state at the end of the run, and the fate of messages that were pending at its begin.

        Call ``first_beyond`` in one rare case: the producer has repeated acknowledged messages, so that
        a part of the run's pending messages had committed before the run.
        """
        if self.outside is not None and self.outside > before.acked:
            assert self.after_outside is not None
            state, fate = self.after_outside, Undecided.ROLLED_BACK
            return (state if self.after is None else self.after), fate
        if self.acknowledged is not None:
            assert self.after is not None
            commits = self.acknowledged > before.acked
            return self.after, self.acknowledged if commits else Undecided.ROLLED_BACK
        newest, begin = before.newest, before.begin
        if self.pending_newest > newest:
            newest = self.pending_newest
            if begin is None:
                is_new = self.pending > before.acked
                begin = self.pending_begin if is_new else first_beyond(before.acked)
        return State(before.acked, newest, begin), Undecided.PENDING


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of all producers in a run, or in a part of it."""

    producers: dict[int, ProducerSummary]
    end: Offset
    """End offset of the last complete message; the begin of the run if there is no such message."""
    reached: Offset
    """End of the last complete, perhaps malformed message. A later run ends a message that begins there."""
    rows: int
    """Number of all messages, even acknowledgements and messages that do not count."""
    clock_min: int
    """Least clock of all messages; zero if some have no clock, and without messages."""
    clock_max: int
    clean: bool = True
    """True if no message was malformed. Then the summary does not depend on their treatment."""
    torn: bool = False
    """True if the first bytes seem to continue an earlier message. Then all other fields are unknown."""

    @classmethod
    def of_torn(cls, begin: Offset) -> Self:
        """Return the summary of a run that seems to begin inside a message: no producers, rows and clocks."""
        return cls({}, begin, begin, 0, 0, 0, clean=False, torn=True)


def combine(first: Summary, second: Summary, first_beyond: FindBeyond) -> Summary:
    """Return the summary of two consecutive parts. The second one begins with a message.

    ``first_beyond`` reads the second part again, in the rare case that `ProducerSummary.apply` describes.
    """
    producers = dict(first.producers)
    for number, summary in second.producers.items():
        earlier = producers.get(number)
        producers[number] = (
            summary if earlier is None else _joined(earlier, summary, partial(first_beyond, number))
        )
    # A part without messages has no clocks.
    return Summary(
        producers,
        second.end if second.rows else first.end,
        second.reached,
        first.rows + second.rows,
        min(one.clock_min for one in (first, second) if one.rows or not first.rows + second.rows),
        max(first.clock_max, second.clock_max),
        first.clean and second.clean,
    )


def _joined(
    first: ProducerSummary, second: ProducerSummary, first_beyond: FirstBeyond
) -> ProducerSummary:
    """Return the summary of one producer in two consecutive parts: see `combine`."""
    if first.acknowledged is not None:
        assert first.after is not None
        return replace(first, after=second.apply(first.after, first_beyond)[0])
    outside, after_outside = first.outside, first.after_outside
    if second.outside is not None and (outside is None or second.outside > outside):
        outside, after_outside = second.outside, second.after_outside
    elif after_outside is not None:
        # Only the messages before the first acknowledgement of the second part change this state.
        before_ack = replace(second, outside=None, acknowledged=None, after=None)
        after_outside, _ = before_ack.apply(after_outside, first_beyond)
    first_pending = first if first.pending else second
    return ProducerSummary(
        first.first_clock,
        first.first_begin,
        outside,
        after_outside,
        first_pending.pending,
        first_pending.pending_begin,
        max(first.pending_newest, second.pending_newest),
        second.acknowledged,
        second.after,
    )


def _of_segment(segment: Segment, columns: Columns) -> ProducerSummary:
    """Return the summary of a segment. ``WHOLE_TXNS`` come after an acknowledgement, so only the state at
    their end counts."""
    clocks = segment.clocks
    first, begin = int(clocks[0]), int(columns.begins[segment.rows[0]])
    if segment.kind in (ACK_TXN, WHOLE_TXNS):
        last = int(clocks[-1])
        return ProducerSummary(first, begin, acknowledged=last, after=State(last, last, None))
    newest = int(clocks.max())
    if segment.kind == CONTINUE_TXN:
        return ProducerSummary(
            first, begin, pending=first, pending_begin=begin, pending_newest=newest
        )
    return ProducerSummary(first, begin, newest, State(newest, newest, None))  # OUTSIDE_TXN


def _first_above(segment: Segment, columns: Columns, clock: int) -> Offset:
    """Return the offset of the first message of a segment whose clock is above ``clock``."""
    position = int(np.argmax(segment.clocks > np.uint64(clock)))
    return int(columns.begins[segment.rows[position]])


@dataclass(slots=True)
class Summariser:
    """Summariser of a run. Add the columns of the run piece by piece, in order."""

    run: Run
    _producers: dict[int, ProducerSummary] = field(default_factory=dict)
    _after: dict[int, State] = field(default_factory=dict)
    """States of producers after an acknowledgement: from then on, only this part of a summary changes."""
    _end: Offset = -1
    """End of the last message; -1 before the first one."""
    _rows: int = 0
    _clock_min: int | None = None
    _clock_max: int = 0

    def add(self, columns: Columns) -> BatchSplit:
        """Add the next messages, and return their split."""
        split = split_batch(columns, self.run)
        if not len(columns):
            return split
        self._end = int(columns.ends[-1])
        self._rows += len(columns)
        least = int(columns.uuids.clocks.min())
        self._clock_min = least if self._clock_min is None else min(self._clock_min, least)
        self._clock_max = max(self._clock_max, int(columns.uuids.clocks.max()))
        for segment in split.segments:
            number, producer_summary = segment.producer, _of_segment(segment, columns)
            beyond = partial(_first_above, segment, columns)
            if (state := self._after.get(number)) is not None:
                self._after[number], _ = producer_summary.apply(state, beyond)
                continue
            if (earlier := self._producers.get(number)) is not None:
                producer_summary = _joined(earlier, producer_summary, beyond)
            self._producers[number] = producer_summary
            if producer_summary.after is not None:
                self._after[number] = producer_summary.after
        return split

    def summary(self, reached: Offset | None = None, *, clean: bool = True) -> Summary:
        """Return the summary. ``reached`` defaults to the end of the last message."""
        end = self.run.pieces[0].begin if self._end < 0 else self._end
        return Summary(
            {
                number: replace(producer_summary, after=self._after.get(number))
                for number, producer_summary in self._producers.items()
            },
            end,
            end if reached is None else reached,
            self._rows,
            self._clock_min or 0,
            self._clock_max,
            clean,
        )


def first_beyond(run: Run, columns: Iterable[Columns], producer: int, clock: int) -> Offset:
    """Return the offset of the producer's first pending message above ``clock``. Raise `Bug` if there is no
    such message."""
    for batch_columns in columns:
        for segment in split_batch(batch_columns, run).segments:
            # The wanted message comes before any acknowledgement.
            if segment.producer == producer and segment.kind == CONTINUE_TXN:
                above = mask_of_new(segment.clocks, clock)
                if above.any():
                    return int(batch_columns.begins[segment.rows[int(np.argmax(above))]])
    raise Bug("a run differs from its first read", journal=run.journal, number=run.number)
