"""Cuts the messages of each producer into segments of one kind: both passes work on segments. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gazette.history.columns import Array64, Columns
from gazette.history.snapshot import Run
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette.protocol.ids import Offset

Clocks = npt.NDArray[np.uint64]

WHOLE_TXNS: Final = -1
"""Kind of a segment of whole transactions: it begins after an acknowledgement, and ends with another one.

Its clocks ascend, and each of its acknowledgements commits.
"""


class Segment(NamedTuple):
    """Consecutive messages of one producer and one kind. ``rows`` are their positions in the columns.

    An acknowledgement is a segment of its own, unless it is a part of ``WHOLE_TXNS``. Messages with unknown
    flags are of kind ``OUTSIDE_TXN``, as in the sequencer.
    """

    producer: int
    kind: int
    rows: Array64
    clocks: Clocks


_WHOLE_MIN: Final = 2
"""Least number of messages of ``WHOLE_TXNS``."""


class BatchSplit(NamedTuple):
    """Some consecutive messages of a run, cut into segments."""

    segments: tuple[Segment, ...]
    """Segments of the messages that count, producer by producer: see `split_batch`."""
    unclocked: Array64
    """Rows of messages without a clock. They are always committed, and never duplicates."""


def split_batch(columns: Columns, run: Run) -> BatchSplit:
    """Cut the next messages of a run into segments.

    Leave out messages before ``run.begin``. Of a producer in ``run.since``, leave out only messages before
    the offset there.
    """
    counts = columns.begins >= run.begin
    clocked = columns.uuids.clocks != 0
    unclocked = np.flatnonzero(counts & ~clocked)
    if run.since and not counts.all():
        for producer, offset in since_of(run).items():
            counts |= (columns.uuids.producers == np.uint64(producer)) & (columns.begins >= offset)
    return BatchSplit(tuple(segments_of(columns, np.flatnonzero(counts & clocked))), unclocked)


def since_of(run: Run) -> dict[int, Offset]:
    """Return ``Run.since`` with producers as numbers."""
    return {int.from_bytes(producer, "big"): offset for producer, offset in run.since.items()}


def segments_of(columns: Columns, rows: Array64) -> Iterator[Segment]:
    """Yield the segments of messages with clocks, producer by producer, and in order for each producer."""
    if not len(rows):
        return
    is_whole_batch = len(rows) == len(columns)
    producers = columns.uuids.producers if is_whole_batch else columns.uuids.producers[rows]
    if bool((producers == producers[0]).all()):
        yield from _of_producer(columns, int(producers[0]), rows)
        return
    order = np.argsort(producers, kind="stable")
    ordered = producers[order]
    bounds = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for group in np.split(order, bounds):
        yield from _of_producer(columns, int(producers[group[0]]), rows[group])


def _of_producer(columns: Columns, producer: int, rows: Array64) -> Iterator[Segment]:
    """Yield the segments of the messages at ``rows``, which are all of one producer.

    ``cuts[n]`` says whether a segment ends with message ``n``. If ``first == last``, no segment is of kind
    `WHOLE_TXNS`.
    """
    flags = columns.uuids.flags[rows]
    clocks = columns.uuids.clocks[rows]
    acknowledges = flags == ACK_TXN
    acks = np.flatnonzero(acknowledges)
    # Whole transactions together, after the first acknowledgement, are one segment: this saves time.
    first, last = (int(acks[0]) + 1, int(acks[-1]) + 1) if len(acks) else (0, 0)
    if last - first < _WHOLE_MIN or not _are_whole(flags[first:last], clocks[first - 1 : last]):
        first = last
    kinds = np.where(flags == CONTINUE_TXN, CONTINUE_TXN, OUTSIDE_TXN)
    kinds[acknowledges] = ACK_TXN
    cuts = (kinds[1:] != kinds[:-1]) | acknowledges[1:]  # A new kind begins, or an ack follows.
    if first < last:
        cuts[first - 1 : last - 1] = False  # Rows [first, last) are one segment:
        cuts[first - 1] = True  # cut before it,
        kinds[first] = WHOLE_TXNS
        if last < len(rows):
            cuts[last - 1] = True  # and after it.
    begin = 0
    for end in [*(np.flatnonzero(cuts) + 1).tolist(), len(rows)]:
        yield Segment(producer, int(kinds[begin]), rows[begin:end], clocks[begin:end])
        begin = end


def _are_whole(flags: Clocks, clocks: Clocks) -> bool:
    """Return True for whole transactions with ascending clocks. ``clocks[0]`` comes before them."""
    return bool(((flags == CONTINUE_TXN) | (flags == ACK_TXN)).all()) and bool(
        (clocks[1:] > clocks[:-1]).all()
    )


def mask_of_new(clocks: Clocks, newest: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the new clocks: above ``newest`` and above all clocks before them. All other clocks
    are of duplicates."""
    bound = np.uint64(newest)
    if len(clocks) == 1:
        return clocks > bound
    if clocks[0] > bound and bool((clocks[1:] > clocks[:-1]).all()):
        return np.ones(len(clocks), np.bool_)
    greatest_before = np.empty_like(clocks)
    greatest_before[0] = bound
    np.maximum(np.maximum.accumulate(clocks[:-1]), bound, out=greatest_before[1:])
    return clocks > greatest_before
