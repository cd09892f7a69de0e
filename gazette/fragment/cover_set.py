"""The fewest spans that together cover a journal."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Generic, Protocol, TypeVar, overload

from gazette.protocol.ids import Offset


class Span(Protocol):
    """Anything with a half-open interval of offsets."""

    @property
    def begin(self) -> Offset: ...

    @property
    def end(self) -> Offset: ...


S = TypeVar("S", bound=Span)
T = TypeVar("T", bound=Span)


class CoverSet(Generic[S]):
    """Spans in strictly ascending order of both ``begin`` and ``end``.

    A span that another span covers is not kept. Of two equal spans, the later span wins. Partial overlaps
    stay. Look-up is O(log n), and so is ``add`` at the end of the set.
    """

    __slots__ = ("_begins", "_ends", "_spans")

    def __init__(self, spans: Iterable[S] = ()) -> None:
        self._spans: list[S] = []
        self._begins: list[Offset] = []
        self._ends: list[Offset] = []
        for span in spans:
            self.add(span)

    def add(self, span: S) -> bool:
        """Add ``span``. Return False if ``span`` is empty, or a larger span covers it."""
        begin, end = span.begin, span.end
        if begin >= end:
            return False
        # Of all spans that end at `end` or later, the first one begins first: if any covers `span`, it does.
        index = bisect_left(self._ends, end)
        if index < len(self._ends) and self._begins[index] <= begin:
            if self._begins[index] < begin or self._ends[index] > end:
                return False
            self._spans[index] = span
            return True
        first, last = bisect_left(self._begins, begin), bisect_right(self._ends, end)
        self._spans[first:last] = [span]
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        return True

    def grow_last(self, span: S) -> bool:
        """Replace the last span if ``span`` has the same begin and is longer. Else return False."""
        if not self._ends or span.begin != self._begins[-1] or span.end <= self._ends[-1]:
            return False
        self._spans[-1], self._ends[-1] = span, span.end
        return True

    def longest_overlapping(self, offset: Offset) -> tuple[int, bool]:
        """Return the index of the span that covers ``offset`` and reaches farthest, and True.

        If no span covers ``offset``, return the index of the next span (``len(self)``: none), and False.
        """
        after = bisect_right(self._begins, offset)
        if after and self._ends[after - 1] > offset:
            return after - 1, True
        return after, False

    def covers(self, begin: Offset, end: Offset) -> bool:
        """Return True if spans without a hole between them cover all of ``[begin, end)``."""
        while begin < end:
            index, covered = self.longest_overlapping(begin)
            if not covered:
                return False
            begin = self._ends[index]
        return True

    def overlaps(self, begin: Offset, end: Offset) -> bool:
        """Return True if a span has any offset of ``[begin, end)``."""
        index, covered = self.longest_overlapping(begin)
        return begin < end and (
            covered or (index < len(self._begins) and self._begins[index] < end)
        )

    def equal(self, begin: Offset, end: Offset) -> S | None:
        """Return the span of exactly these offsets, or None."""
        index = bisect_left(self._begins, begin)
        if index < len(self._begins) and self._begins[index] == begin and self._ends[index] == end:
            return self._spans[index]
        return None

    def index_at(self, begin: Offset) -> int:
        """Return the index of the first span that begins at ``begin`` or later."""
        return bisect_left(self._begins, begin)

    @property
    def begin(self) -> Offset:
        """Begin of the first span; zero if there are no spans."""
        return self._begins[0] if self._begins else 0

    @property
    def end(self) -> Offset:
        """End of the last span; zero if there are no spans."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[S]:
        return iter(self._spans)

    @overload
    def __getitem__(self, index: int) -> S: ...

    @overload
    def __getitem__(self, index: slice) -> list[S]: ...

    def __getitem__(self, index: int | slice) -> S | list[S]:
        return self._spans[index]

    def _check(self) -> None:
        """Raise ``AssertionError`` if the set breaks the rules of its docstring."""
        assert [span.begin for span in self._spans] == self._begins
        assert [span.end for span in self._spans] == self._ends
        assert all(begin < end for begin, end in zip(self._begins, self._ends, strict=True))
        for ordered in (self._begins, self._ends):
            assert all(a < b for a, b in pairwise(ordered))


def uncovered(local: Iterable[T], remote: CoverSet[S]) -> Iterator[T]:
    """Return the spans of ``local`` that have an offset which ``remote`` does not cover."""
    return (span for span in local if not remote.covers(span.begin, span.end))
