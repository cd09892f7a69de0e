"""Readers of stored history stop and go on where the index of a broker does."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gazette.fragment.cover_set import CoverSet
from gazette.fragment.index import JUMP_AGE_S, SETTLED_S, Index
from gazette.history.columns import MessageFormat
from gazette.history.gaps import ConfirmedLosses, find_gaps
from gazette.history.snapshot import JournalSnapshot, Piece, cover
from gazette.protocol.fragment import Fragment
from gazette.testing.clock import ManualClock

JOURNAL = "a/journal"
AGES = (0, 1, SETTLED_S, SETTLED_S + 1, JUMP_AGE_S, JUMP_AGE_S + 1)
SPANS = st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda one: (one[0], sum(one)))
FRAGMENTS = st.lists(st.tuples(SPANS, st.sampled_from(AGES)), min_size=1, max_size=8)


def fragments_of(given: Sequence[tuple[tuple[int, int], int]], now: int) -> CoverSet[Fragment]:
    return CoverSet(
        Fragment(JOURNAL, begin, end, backing_store="s3://b/", mod_time=now - age)
        for (begin, end), age in given
    )


def read_by_index(index: Index, begin: int) -> tuple[list[int], int]:
    """Return the offsets that a reader of a broker gets now, and where it then waits."""
    got: list[int] = []
    while (found := index.find(begin)).fragment is not None:
        got.extend(range(found.offset, found.fragment.end))
        begin = found.fragment.end
    return got, begin


def read_by_pieces(
    pieces: Sequence[Piece], losses: ConfirmedLosses, begin: int, now: float
) -> tuple[list[int], int]:
    """Return the same for a reader that lists the fragments itself."""
    end = max(begin, pieces[-1].end)
    held = cover(pieces, begin, end)
    journal = JournalSnapshot(JOURNAL, MessageFormat(), begin, end, held)
    waits = (gap.begin for gap in find_gaps(journal, pieces, losses, now) if not gap.is_final)
    end = next(waits, end)
    return [at for one in held for at in range(one.begin, min(one.end, end))], end


@given(FRAGMENTS, st.lists(SPANS, max_size=4), st.integers(0, 50))
def test_readers_of_stores_go_on_where_readers_of_brokers_do(
    given: list[tuple[tuple[int, int], int]], lost: list[tuple[int, int]], begin: int
) -> None:
    """Whatever fragments there are, of any age, and whatever an operator has confirmed."""
    clock = ManualClock()
    now = int(clock.now())
    fragments = fragments_of(given, now)
    index = Index(JOURNAL, clock)
    index.replace_remote(fragments)
    index.adopt_head(0, tuple(lost))
    pieces = [Piece(one.begin, one.end, one) for one in fragments]
    losses = ConfirmedLosses(tuple(lost))
    assert read_by_pieces(pieces, losses, begin, now) == read_by_index(index, begin)


@given(st.integers(0, 40), st.integers(0, 40), st.lists(SPANS, max_size=5))
def test_bytes_behind_the_listed_are_those_that_are_not_lost(
    begin: int, end: int, lost: list[tuple[int, int]]
) -> None:
    pieces = list(ConfirmedLosses(tuple(lost)).outside(begin, end))
    gone = {at for one in lost for at in range(*one)}
    assert [at for one in pieces for at in range(one.begin, one.end)] == [
        at for at in range(begin, end) if at not in gone
    ]
