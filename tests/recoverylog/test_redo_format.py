"""What a commit changed in a page, as ranges of bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.recoverylog.sqlite.redo_format import (
    RANGE_GAP,
    changes_of,
    diff_page,
    encode_commit,
)

PAGE_SIZE = 512
FRAME_HEAD = 9

edits = st.lists(
    st.tuples(st.integers(0, PAGE_SIZE - 1), st.binary(min_size=1, max_size=40)), max_size=12
)


@given(st.integers(0, 3), edits)
def test_a_change_turns_the_old_page_into_the_new_one(
    seed: int, edits: list[tuple[int, bytes]]
) -> None:
    """A page of zeros, too: ranges begin and end at bytes that differ, and are a gap apart."""
    old = random.Random(seed).randbytes(PAGE_SIZE) if seed else bytes(PAGE_SIZE)
    edited = bytearray(old)
    for position, edit in edits:
        edited[position : position + len(edit)] = edit[: PAGE_SIZE - position]
    new = bytes(edited)
    change = diff_page(7, old, memoryview(new))
    if change is None:
        assert old == new
        return
    payload = memoryview(encode_commit(9, [change]))[FRAME_HEAD:]
    played = bytearray(old)
    for page, offset, data in changes_of(payload, PAGE_SIZE):
        assert page == 7
        played[offset : offset + len(data)] = data
    assert played == new
    if not change.whole:
        end = -RANGE_GAP
        for offset, content in change.ranges:
            assert offset - end >= RANGE_GAP
            end = offset + len(content)
            assert old[offset] != new[offset]
            assert old[end - 1] != new[end - 1]


@pytest.mark.parametrize("old", [None, bytes(PAGE_SIZE // 2)])
def test_a_page_without_a_former_one_of_its_size_is_whole(old: bytes | None) -> None:
    change = diff_page(1, old, bytes(PAGE_SIZE))
    assert change is not None
    assert change.whole
