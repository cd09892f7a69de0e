from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gazette.fragment.cover_set import CoverSet, uncovered


@dataclass(frozen=True)
class Piece:
    begin: int
    end: int
    tag: int = 0


pieces = st.builds(
    lambda begin, length, tag: Piece(begin, begin + length, tag),
    st.integers(0, 30),
    st.integers(0, 12),
    st.integers(0, 3),
)


def brute_force(added: list[Piece]) -> list[Piece]:
    """Return, of all pieces ever added, those that no other covers, and of equal ones the last."""
    kept: dict[tuple[int, int], Piece] = {}
    for piece in added:
        if piece.begin < piece.end:
            kept[piece.begin, piece.end] = piece
    return sorted(
        (
            one
            for one in kept.values()
            if not any(
                other.begin <= one.begin and one.end <= other.end
                for other in kept.values()
                if other is not one
            )
        ),
        key=lambda piece: piece.begin,
    )


def spans(*bounds: tuple[int, int]) -> CoverSet[Piece]:
    return CoverSet(Piece(begin, end) for begin, end in bounds)


def bounds(cover: CoverSet[Piece]) -> list[tuple[int, int]]:
    return [(piece.begin, piece.end) for piece in cover]


@given(st.lists(pieces, max_size=10), st.integers(0, 40), st.integers(0, 12))
def test_an_overlap_is_any_offset_in_common(added: list[Piece], begin: int, length: int) -> None:
    cover = CoverSet(added)
    offsets = {at for piece in cover for at in range(piece.begin, piece.end)}
    assert cover.overlaps(begin, begin + length) == any(
        at in offsets for at in range(begin, begin + length)
    )


@given(st.lists(pieces, max_size=10), pieces)
def test_a_last_span_that_grows_is_as_added(added: list[Piece], piece: Piece) -> None:
    cover, other = CoverSet(added), CoverSet(added)
    is_longer_last = len(cover) and cover[-1].begin == piece.begin and cover.end < piece.end
    assert cover.grow_last(piece) == bool(is_longer_last)
    if is_longer_last:
        other.add(piece)
    assert list(cover) == list(other)


@given(st.lists(pieces, max_size=25))
def test_any_order_of_adding_gives_the_brute_force_cover(added: list[Piece]) -> None:
    """The set is the same as if all pieces were compared with each other."""
    cover: CoverSet[Piece] = CoverSet()
    for count, piece in enumerate(added, 1):
        was = bounds(cover)
        kept = cover.add(piece)
        assert kept == any(one is piece for one in cover)
        assert kept or bounds(cover) == was
        expected = brute_force(added[:count])
        assert list(cover) == expected
        # Look-ups, which go by sorted offsets, agree with the spans.
        assert len(cover) == len(expected)
        for at, one in enumerate(expected):
            assert cover.index_at(one.begin) == at
            assert cover.equal(one.begin, one.end) is one
            last = max(i for i, other in enumerate(expected) if other.begin < one.end)
            assert cover.longest_overlapping(one.end - 1) == (last, True)


@given(st.lists(pieces, max_size=25), st.integers(0, 45))
def test_look_up_agrees_with_a_scan(added: list[Piece], offset: int) -> None:
    """The covering piece that reaches farthest, or else the next one."""
    cover = CoverSet(added)
    at, found = cover.longest_overlapping(offset)
    covering = [piece for piece in cover if piece.begin <= offset < piece.end]
    if found:
        assert cover[at] == max(covering, key=lambda piece: piece.end)
    else:
        assert not covering
        assert all(piece.begin > offset for piece in cover[at:])
        assert all(piece.end <= offset for piece in cover[:at])
    assert cover.index_at(offset) == sum(piece.begin < offset for piece in cover)


@given(st.lists(pieces, max_size=20), st.lists(pieces, max_size=20))
def test_uncovered_agrees_with_single_offsets(local: list[Piece], remote: list[Piece]) -> None:
    """A local piece goes only if every one of its offsets is in some remote piece."""
    remote_offsets = {offset for piece in remote for offset in range(piece.begin, piece.end)}
    local_set, remote_set = CoverSet(local), CoverSet(remote)
    left = list(uncovered(local_set, remote_set))
    assert left == [
        piece for piece in local_set if not set(range(piece.begin, piece.end)) <= remote_offsets
    ]


def test_stories() -> None:
    """The shapes that a journal's fragments take."""
    # Case: a spool grows at the end.
    cover = spans((0, 10), (10, 12))
    assert cover.add(Piece(10, 15))
    assert bounds(cover) == [(0, 10), (10, 15)]
    # Case: one large fragment replaces many, and stays when they come again.
    assert cover.add(Piece(0, 20))
    assert not cover.add(Piece(10, 15))
    assert bounds(cover) == [(0, 20)]
    # Case: partial overlaps stay; of an equal span the later is taken.
    cover = spans((0, 10), (5, 15), (12, 30))
    assert bounds(cover) == [(0, 10), (5, 15), (12, 30)]
    assert cover.add(Piece(5, 15, tag=2))
    assert cover[1].tag == 2
    # Case: at an overlap the one that reaches farthest serves.
    assert cover.longest_overlapping(7) == (1, True)
    assert cover.longest_overlapping(12) == (2, True)
    assert cover.longest_overlapping(30) == (3, False)
    # Case: nothing at all.
    empty = spans()
    assert (empty.begin, empty.end, len(empty)) == (0, 0, 0)
    assert empty.longest_overlapping(5) == (0, False)
    assert empty.covers(3, 3)
    assert not empty.covers(3, 4)
    assert (cover.begin, cover.end) == (0, 30)
