"""Sets of segments, against sets of sequence numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.protocol.hints import Segment
from gazette.recoverylog.log.segment import SegmentSet, fold_hinted_segments
from tests.facts import raises

LOG = "a/log"


def seg(
    author: int,
    first: int,
    last: int,
    *,
    at: int | None = None,
    end: int = 0,
    log: str = LOG,
    checksum: int | None = None,
) -> Segment:
    return Segment(
        author,
        first,
        first * 10 if at is None else at,
        first * 7 if checksum is None else checksum,
        last,
        end,
        log,
    )


def exact(author: int, first: int, last: int) -> Segment:
    """Return a segment of a history in which operation n stands at [10 n, 10 n + 10)."""
    return seg(author, first, last, end=last * 10 + 10)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[Segment]]:
    """Draw the author of each operation of a history, and segments cut from it at random.

    The last author wrote its segments without help, and knows no ends.
    """
    runs = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    authors = [author for author, length in enumerate(runs, 1) for _ in range(length)]
    segments = []
    for _ in range(draw(st.integers(0, 12))):
        first = draw(st.integers(1, len(authors)))
        last = first
        while last < len(authors) and authors[last] == authors[first - 1] and draw(st.booleans()):
            last += 1
        author = authors[first - 1]
        segments.append(
            seg(author, first, last) if author == len(runs) else exact(author, first, last)
        )
    return authors, draw(st.permutations(segments))


@given(histories())
def test_a_set_covers_what_was_added_and_nothing_else(
    history: tuple[list[int], list[Segment]],
) -> None:
    """Ordered, disjoint, merged where they touch, whatever the order of adding."""
    authors, segments = history
    added = SegmentSet()
    for segment in segments:
        added.add(segment)
    assert list(added) == list(SegmentSet(segments))

    covered = {n for s in segments for n in range(s.first_seq_no, s.last_seq_no + 1)}
    result = [n for s in added for n in range(s.first_seq_no, s.last_seq_no + 1)]
    assert result == sorted(covered)
    for segment in added:
        assert segment.first_offset == segment.first_seq_no * 10
        assert segment.first_checksum == segment.first_seq_no * 7
        assert segment.author == authors[segment.first_seq_no - 1]
        last = segment.author == authors[-1]
        assert segment.last_offset == (0 if last else segment.last_seq_no * 10 + 10)
    for before, after in zip(added, list(added)[1:], strict=False):
        assert before.last_seq_no + 1 < after.first_seq_no or before.author != after.author


@pytest.mark.parametrize(
    ("reason", "segments"),
    [
        ("authors", [exact(1, 1, 5), exact(2, 5, 6)]),
        ("logs", [exact(1, 1, 5), replace(exact(1, 5, 6), log="b/log")]),
        ("checksums", [exact(1, 1, 5), replace(exact(1, 1, 3), first_checksum=99)]),
        ("offsets", [seg(1, 1, 5, at=70), seg(1, 6, 7, at=60)]),
        ("end offsets", [seg(1, 1, 5, end=100), seg(1, 3, 7, end=90)]),
        ("log", [seg(1, 1, 5), replace(seg(2, 7, 9), log="b/log")]),
        ("end offset", [seg(1, 1, 5), exact(2, 7, 9)]),
    ],
)
def test_what_cannot_be_of_one_history(reason: str, segments: list[Segment]) -> None:
    """Refused in any order, and the set stays as it was."""
    for ordered in (segments, segments[::-1]):
        folded = SegmentSet(ordered[:1])
        with raises(Invalid, "first", "second", says=reason):
            folded.add(ordered[1])
        assert list(folded) == ordered[:1]


def test_the_tighter_bound_wins() -> None:
    """A recorder knows a lower bound of an offset only; an end that one of two knows is known."""
    folded = SegmentSet([seg(1, 4, 6, at=30), seg(1, 4, 6, at=40, end=70)])
    assert list(folded) == [seg(1, 4, 6, at=40, end=70)]


def test_hinted_segments_are_of_the_hints_log_by_default() -> None:
    nodes = [[replace(exact(1, 1, 2), log="old/log"), replace(exact(2, 5, 6), log="")]]
    assert [s.log for s in fold_hinted_segments(nodes, "new/log")] == ["old/log", "new/log"]


def test_many_nodes_are_folded_in_no_time() -> None:
    """A large database has thousands of files."""
    count = 20_000
    nodes = [[exact(1, n, n)] for n in range(1, 2 * count, 2)]
    assert len(fold_hinted_segments(reversed(nodes), LOG)) == count
