"""The fragments of recovery logs that may be removed: rules, and an oracle that counts bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.client.shards import ShardHints
from gazette.errors import Corrupt
from gazette.gazctl.journals.fragment_removal import Spans
from gazette.gazctl.shards.prune_plan import Needs, references, unpersisted
from gazette.protocol.fragment import Fragment
from gazette.protocol.hints import FnodeSegments, FSMHints, Segment
from gazette.protocol.shard import ShardSpec
from tests.facts import raises

LOG = "recovery/a-shard"
SPEC = ShardSpec("a-shard", recovery_log_prefix="recovery", hint_prefix="/hints", hint_backups=1)
HEADER: Any = None


def fragment(begin: int, end: int, *, log: str = LOG, persisted: bool = True) -> Fragment:
    stored: dict[str, Any] = {"backing_store": "file:///", "mod_time": 1} if persisted else {}
    return Fragment(log, begin, end, **stored)


def fragments(*ends: int, log: str = LOG) -> list[Fragment]:
    begins = [0, *ends[:-1]]
    return [fragment(begin, end, log=log) for begin, end in zip(begins, ends, strict=True)]


def segment(author: int, seqs: tuple[int, int], offsets: tuple[int, int], log: str = "") -> Segment:
    return Segment(author, seqs[0], offsets[0], 0, seqs[1], offsets[1], log)


def hints(*segments: Segment, log: str = LOG) -> FSMHints:
    """Return hints with one live file that spans all of the segments."""
    return FSMHints(log, (FnodeSegments(segments[0].first_seq_no, segments),) if segments else ())


def stored(primary: FSMHints | None, *backups: FSMHints | None) -> ShardHints:
    return ShardHints(HEADER, primary, backups)


def spans(found: list[Fragment]) -> list[tuple[int, int]]:
    return [(one.begin, one.end) for one in found]


def test_what_no_hints_need_may_go_but_nothing_behind_the_last_segment() -> None:
    needs = Needs()
    needs.add_hints(hints(segment(1, (5, 6), (120, 180)), segment(2, (10, 12), (410, 450))))
    found = needs.unneeded(LOG, fragments(100, 200, 300, 400, 500, 600, 700))
    assert spans(found) == [(0, 100), (200, 300), (300, 400)]


def test_hints_of_every_slot_count() -> None:
    """The oldest backup bounds how much may go."""
    needs = Needs()
    newest = hints(segment(2, (20, 21), (450, 460)))
    needs.add_shard(SPEC, stored(newest, hints(segment(1, (5, 6), (210, 220)))))
    assert not needs.blocked
    assert spans(needs.unneeded(LOG, fragments(100, 200, 300, 400, 500))) == [(0, 100), (100, 200)]


def test_hints_of_other_shards_count() -> None:
    """A shard that was forked needs parts of the log it came from."""
    needs = Needs()
    needs.add_hints(hints(segment(2, (20, 21), (450, 460))))
    forked = hints(
        segment(1, (3, 3), (110, 120), log=LOG), segment(9, (30, 31), (10, 0)), log="recovery/fork"
    )
    needs.add_hints(forked)
    assert spans(needs.unneeded(LOG, fragments(100, 200, 300, 400, 500))) == [
        (0, 100),
        (200, 300),
        (300, 400),
    ]


def test_a_fork_that_wrote_no_file_keeps_the_whole_of_its_own_log() -> None:
    needs = Needs()
    needs.add_hints(hints(segment(1, (3, 3), (110, 120), log=LOG), log="recovery/fork"))
    assert needs.unneeded("recovery/fork", fragments(100, 200, log="recovery/fork")) == []
    assert spans(needs.unneeded(LOG, fragments(100, 200, 300))) == [(0, 100)]


def test_an_end_that_is_not_known_keeps_all_that_follows() -> None:
    needs = Needs()
    needs.add_hints(hints(segment(1, (3, 4), (110, 0)), segment(1, (9, 9), (410, 0))))
    assert spans(needs.unneeded(LOG, fragments(100, 200, 300, 400, 500))) == [(0, 100)]


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        (stored(None, hints(segment(1, (1, 1), (0, 1)))), "has no hints yet in slot primary"),
        (stored(hints(segment(1, (1, 1), (0, 1))), None), "has no hints yet in slot backup 0"),
        (stored(hints(segment(1, (1, 1), (0, 1)))), "has no hints yet in slot backup 0"),
        (stored(hints(), hints(segment(1, (1, 1), (0, 1)))), "hints without files in slot primary"),
        (
            stored(hints(segment(1, (1, 1), (0, 1))), hints()),
            "hints without files in slot backup 0",
        ),
    ],
)
def test_a_log_is_left_alone_until_all_slots_have_hints(slots: ShardHints, reason: str) -> None:
    needs = Needs()
    needs.add_shard(SPEC, slots)
    assert reason in needs.blocked[LOG]


def test_hints_that_need_what_the_log_does_not_have_are_an_error() -> None:
    """The log was deleted and created again, or the listing is not complete."""
    needs = Needs()
    needs.add_hints(hints(segment(1, (3, 4), (110, 120)), segment(1, (9, 9), (500, 510))))
    with raises(Corrupt, log="recovery/a-shard", end=500, needed=500):
        needs.unneeded(LOG, fragments(100, 200, 300, 400, 500))


def test_fragments_that_are_not_persisted_are_reported() -> None:
    kept = fragment(100, 200, persisted=False)
    assert unpersisted([fragment(0, 100), kept, replace(kept, mod_time=1)]) == [
        kept,
        replace(kept, mod_time=1),
    ]


def test_all_logs_that_hints_name_are_known() -> None:
    forked = hints(segment(1, (3, 3), (1, 2), log="recovery/source"), log="recovery/fork")
    assert references(stored(forked, None, hints())) == {"recovery/source", "recovery/fork", LOG}


@st.composite
def histories(draw: st.DrawFn) -> list[Segment]:
    """Draw segments of one author's history, in order, some with ends that are not known at the end."""
    count = draw(st.integers(1, 5))
    segments, seq, offset = [], 1, 0
    for index in range(count):
        offset += draw(st.integers(1 if index else 0, 30))
        seq += draw(st.integers(2, 5))
        length = draw(st.integers(1, 30))
        segments.append(Segment(1, seq, offset, 0, seq, offset + length))
        offset += length
    if draw(st.booleans()):
        segments[-1] = replace(segments[-1], last_offset=0)
    return segments


@given(st.lists(histories(), min_size=1, max_size=3), st.lists(st.integers(1, 40), min_size=1))
def test_a_fragment_goes_exactly_if_none_of_its_bytes_is_needed(
    all_hints: list[list[Segment]], lengths: list[int]
) -> None:
    """The oracle: the set of bytes that some hints need, and all from the last segment on."""
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    listed = fragments(*ends)
    needs, needed, tails = Needs(), set(), []
    for segments in all_hints:
        needs.add_hints(hints(*segments))
        for one in segments[:-1]:
            needed |= set(range(one.first_offset, one.last_offset))
        tails.append(segments[-1].first_offset)
        needed |= set(range(segments[-1].first_offset, ends[-1]))
    if any(tail >= ends[-1] and tail for tail in tails):
        with pytest.raises(Corrupt):
            needs.unneeded(LOG, listed)
        return
    expected = [one for one in listed if not needed & set(range(one.begin, one.end))]
    assert needs.unneeded(LOG, listed) == expected


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20))), st.integers(0, 20))
def test_a_fragment_is_covered_by_one_fragment_that_has_all_of_it(
    places: list[tuple[int, int]], begin: int
) -> None:
    removed = [fragment(at, at + length) for at, length in places]
    spans = Spans(removed)
    for length in range(1, 20):
        duplicate = fragment(begin, begin + length)
        is_within = any(
            one.begin <= duplicate.begin and duplicate.end <= one.end for one in removed
        )
        assert spans.cover(duplicate) == is_within


def test_duplicates_among_many_fragments_are_found_soon() -> None:
    """Looking at each pair of fragments would take hours."""
    spans = Spans([fragment(at, at + 10) for at in range(0, 1_000_000, 10)])
    assert not any(spans.cover(fragment(at, at + 11)) for at in range(0, 1_000_000, 10))
