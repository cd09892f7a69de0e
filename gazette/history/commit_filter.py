"""Filters the committed messages of a run: `CommitFilter`, the second pass. Pure.

The filter is the sequencer for columns. It takes the messages of a run in order, in batches. It returns a
batch once each message of the batch has committed or was rolled back. Pending messages wait for their
acknowledgement, so at worst the filter holds the whole run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gazette.history.batch_split import (
    WHOLE_TXNS,
    BatchSplit,
    Clocks,
    Segment,
    mask_of_new,
    split_batch,
)
from gazette.history.columns import Array64, Columns
from gazette.history.merge import CommittedRun
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Batch(Generic[T]):
    payload: T
    committed: Mask
    pending: int = 0
    """Number of messages that are pending."""


@dataclass(slots=True)
class _Producer(Generic[T]):
    """State of a producer: ``acked`` is its last decided clock, ``newest`` its last clock, pending or not."""

    acked: int
    newest: int
    pending: list[tuple[_Batch[T], Array64, Clocks]] = field(default_factory=list)
    """Pending messages: the batch, their rows there, and their clocks."""

    def settle(self, clock: int | None) -> None:
        """Commit pending messages up to ``clock``, and roll back later ones. None: roll back all."""
        for batch, rows, clocks in self.pending:
            if clock is not None:
                batch.committed[rows] = clocks <= np.uint64(clock)
            batch.pending -= len(rows)
        self.pending.clear()


class PendingProducer(NamedTuple):
    """A producer with pending messages: ``first`` is their least clock, ``newest`` their greatest."""

    producer: int
    first: int
    newest: int


class CommitFilter(Generic[T]):
    """Filter for one run. ``T`` is any value that the caller keeps with a batch.

    With ``acks``, return acknowledgements that commit, too, but no acknowledgements that roll back.
    """

    def __init__(self, run: CommittedRun, *, acks: bool = False) -> None:
        self._run = run
        self._acks = acks
        self._producers: dict[int, _Producer[T]] = {
            number: _Producer(acked, newest) for number, (acked, newest) in run.known.items()
        }
        self._batches: deque[_Batch[T]] = deque()

    def add(self, columns: Columns, payload: T, split: BatchSplit | None = None) -> None:
        """Add the next messages of the run. ``split`` is the result of `split_batch`, if the caller has
        it."""
        batch = _Batch(payload, np.zeros(len(columns), np.bool_))
        self._batches.append(batch)
        segments, unclocked = split_batch(columns, self._run.run) if split is None else split
        batch.committed[unclocked] = True
        if not self._acks and len(unclocked):
            batch.committed[unclocked[columns.uuids.flags[unclocked] == ACK_TXN]] = False
        for segment in segments:
            producer = self._producers.get(segment.producer)
            if producer is None:
                clock = int(segment.clocks[0]) - 1  # So the producer's first message is new.
                producer = self._producers[segment.producer] = _Producer(clock, clock)
            self._step(producer, segment, batch, columns)

    def _step(
        self, producer: _Producer[T], segment: Segment, batch: _Batch[T], columns: Columns
    ) -> None:
        """Do for a segment what the sequencer does for each of its messages."""
        rows, clocks = segment.rows, segment.clocks
        if segment.kind == WHOLE_TXNS:
            batch.committed[rows] = self._acks or columns.uuids.flags[rows] != ACK_TXN
            producer.acked = producer.newest = int(clocks[-1])
        elif segment.kind == CONTINUE_TXN:
            is_new = mask_of_new(clocks, producer.newest)
            if not is_new.all():
                rows, clocks = rows[is_new], clocks[is_new]
            if len(rows):
                producer.pending.append((batch, rows, clocks))
                producer.newest = int(clocks[-1])
                batch.pending += len(rows)
        elif segment.kind == ACK_TXN:
            # A clock up to `acked` rolls back, and becomes the producer's clock all the same.
            clock = int(clocks[0])
            commits = clock > producer.acked
            producer.settle(clock if commits else None)
            producer.acked = producer.newest = clock
            batch.committed[rows] = commits and self._acks
        else:  # OUTSIDE_TXN: new if above `acked`. A new message rolls back pending ones.
            is_new = mask_of_new(clocks, producer.acked)
            batch.committed[rows] = is_new
            if is_new.any():
                producer.settle(None)
                producer.acked = producer.newest = int(clocks.max())

    def pending(self) -> dict[PendingProducer, list[tuple[T, Mask]]]:
        """Return the messages that are pending so far: by producer, the payloads of batches with masks."""
        masks_of: dict[PendingProducer, list[tuple[T, Mask]]] = {}
        for number, producer in self._producers.items():
            masks: list[tuple[T, Mask]] = []
            for batch, rows, _ in producer.pending:
                mask = np.zeros(len(batch.committed), np.bool_)
                mask[rows] = True
                masks.append((batch.payload, mask))
            if masks:
                first = int(producer.pending[0][2][0])  # The least one: pending clocks ascend.
                masks_of[PendingProducer(number, first, producer.newest)] = masks
        return masks_of

    def finish(self) -> None:
        """End the run. Commit or roll back pending messages by their fates, which the fold has computed."""
        for number, producer in self._producers.items():
            producer.settle(self._run.fates.get(number))

    def ready(self) -> Iterator[tuple[T, Mask]]:
        """Yield and forget the batches before the first one with pending messages, in order: the payload, and
        a mask of the committed messages."""
        while self._batches and not self._batches[0].pending:
            batch = self._batches.popleft()
            yield batch.payload, batch.committed
