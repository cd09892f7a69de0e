"""Sets of segments: the parts of logs that must be read to rebuild the live files.

A `Segment` is a run of operations of one author in one log. A player knows its offsets. A recorder knows
only a lower bound of the first offset, and sets ``last_offset`` to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gazette.errors import Invalid
from gazette.protocol.hints import Segment


def _refuse(reason: str, first: Segment, second: Segment) -> Invalid:
    return Invalid(
        f"segments contradict each other: {reason}",
        hint="These hints do not come from one history. Use an older backup of the hints.",
        first=first,
        second=second,
    )


def _require_one_history(first: Segment, second: Segment) -> None:
    """Raise ``Invalid`` if two segments, in order of ``first_seq_no``, cannot belong to one history."""
    same_log = first.log == second.log
    overlap = second.first_seq_no <= first.last_seq_no
    if overlap and first.author != second.author:
        raise _refuse("one sequence number has two authors", first, second)
    if overlap and not same_log:
        raise _refuse("one sequence number stands in two logs", first, second)
    if first.first_seq_no == second.first_seq_no:
        if first.first_checksum != second.first_checksum:
            raise _refuse("one sequence number has two checksums", first, second)
    elif same_log and first.first_offset > second.first_offset:
        raise _refuse("offsets do not grow with sequence numbers", first, second)
    # The offsets of both ends must be in the same order as their sequence numbers.
    if same_log and first.last_offset and second.last_offset:
        ordered = (first.last_offset <= second.last_offset) == (
            first.last_seq_no <= second.last_seq_no
        )
        if not ordered and first.last_offset != second.last_offset:
            raise _refuse("end offsets do not grow with sequence numbers", first, second)
    if not overlap:
        if not same_log and first.last_offset == 0:
            raise _refuse(
                "the log changes, but the end of the earlier log is unknown", first, second
            )
        if first.last_offset == 0 and second.last_offset != 0 and not _adjacent(first, second):
            raise _refuse("an end offset is missing before one that is known", first, second)


def _adjacent(first: Segment, second: Segment) -> bool:
    """Return True if ``second`` overlaps or continues ``first``, in the same log and by the same author."""
    return (
        second.first_seq_no <= first.last_seq_no + 1
        and first.author == second.author
        and first.log == second.log
    )


def _merge(first: Segment, second: Segment) -> Segment:
    """Return the union of two segments that overlap or touch."""
    merged = first
    if first.first_seq_no == second.first_seq_no and second.first_offset > first.first_offset:
        # Both first offsets are lower bounds for the same operation: keep the greater one.
        merged = replace(merged, first_offset=second.first_offset)
    if second.last_seq_no > first.last_seq_no:
        merged = replace(merged, last_seq_no=second.last_seq_no, last_offset=second.last_offset)
    elif second.last_seq_no == first.last_seq_no and first.last_offset == 0:
        merged = replace(merged, last_offset=second.last_offset)
    return merged


def _fold(segments: Iterable[Segment]) -> list[Segment]:
    """Return segments in order, merged if they touch. Raise ``Invalid`` if they contradict each other."""
    ordered = sorted(segments, key=lambda segment: (segment.first_seq_no, segment.last_seq_no))
    folded: list[Segment] = []
    for segment in ordered:
        segment.validate()
        if folded:
            _require_one_history(folded[-1], segment)
            if _adjacent(folded[-1], segment):
                folded[-1] = _merge(folded[-1], segment)
                continue
        folded.append(segment)
    return folded


class SegmentSet:
    """Segments of one history: ordered, disjoint, and merged if they touch."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        """Make a set of ``segments``, in any order. Raise ``Invalid`` if they contradict each other."""
        self._segments = _fold(segments)

    def add(self, segment: Segment) -> None:
        """Add a segment. If it contradicts other segments, raise ``Invalid`` and change nothing."""
        self._segments = _fold([*self._segments, segment])

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, index: int) -> Segment:
        return self._segments[index]


def fold_hinted_segments(nodes: Iterable[Iterable[Segment]], default_log: str) -> SegmentSet:
    """Return all segments of all nodes as one set. Segments without a log belong to ``default_log``."""
    return SegmentSet(
        segment if segment.log else replace(segment, log=default_log)
        for segments in nodes
        for segment in segments
    )
