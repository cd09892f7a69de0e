"""Where messages end, in pieces of any length, against a parse of the whole."""

from __future__ import annotations

import csv
import io
import itertools
import struct

from hypothesis import given
from hypothesis import strategies as st

from gazette.gazctl.io.message_boundaries import (
    CSVEdges,
    EdgeFinder,
    FixedEdges,
    LineEdges,
    edges_of,
)
from gazette.labels import (
    CONTENT_CSV,
    CONTENT_JSON_LINES,
    CONTENT_PROTO_FIXED,
    CONTENT_RECOVERY_LOG,
)

MAGIC = bytes.fromhex("66339336")


@st.composite
def cut(
    draw: st.DrawFn, messages: st.SearchStrategy[list[bytes]]
) -> tuple[list[bytes], list[bytes]]:
    """Draw messages, and pieces that they were cut into."""
    drawn = draw(messages)
    whole = b"".join(drawn)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    bounds = [0, *cuts, len(whole)]
    return drawn, [whole[a:b] for a, b in itertools.pairwise(bounds)]


def edges_found(finder: EdgeFinder, pieces: list[bytes]) -> list[int]:
    """Return the ends that a finder reports, as offsets of the whole."""
    found, offset = [], 0
    for piece in pieces:
        if length := finder.feed(piece):
            found.append(offset + length)
        offset += len(piece)
    return found


def last_ends(messages: list[bytes], pieces: list[bytes]) -> list[int]:
    """Return, of each piece in which messages end, the end of the last: the oracle."""
    ends, at = [], 0
    for message in messages:
        at += len(message)
        ends.append(at)
    found, offset = [], 0
    for piece in pieces:
        inside = [end for end in ends if offset < end <= offset + len(piece)]
        if inside:
            found.append(inside[-1])
        offset += len(piece)
    return found


@given(cut(st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"\n", b".") + b"\n"))))
def test_lines_end_at_newlines(drawn: tuple[list[bytes], list[bytes]]) -> None:
    messages, pieces = drawn
    assert edges_found(LineEdges(), pieces) == last_ends(messages, pieces)


def as_frame(payload: bytes) -> bytes:
    return struct.pack("<4sI", MAGIC, len(payload)) + payload


@given(cut(st.lists(st.binary(max_size=5).map(as_frame))))
def test_fixed_frames_end_where_their_header_says(drawn: tuple[list[bytes], list[bytes]]) -> None:
    messages, pieces = drawn
    assert edges_found(FixedEdges(), pieces) == last_ends(messages, pieces)


def as_row(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


@given(cut(st.lists(st.lists(st.text('a"\n,', max_size=4), min_size=1, max_size=3).map(as_row))))
def test_rows_do_not_end_within_quotes(drawn: tuple[list[bytes], list[bytes]]) -> None:
    messages, pieces = drawn
    assert edges_found(CSVEdges(), pieces) == last_ends(messages, pieces)


def test_what_is_no_frame_does_not_hold_the_stream_back() -> None:
    finder = FixedEdges()
    assert finder.feed(b"not a frame") == len(b"not a frame")
    assert finder.feed(as_frame(b"x")) == 9


def test_a_stream_that_goes_on_elsewhere_begins_with_a_message() -> None:
    for finder, begun, whole in (
        (FixedEdges(), as_frame(b"abc")[:9], as_frame(b"x")),
        (CSVEdges(), b'"open', b"a,b\n"),
    ):
        assert finder.feed(begun) == 0
        finder.reset()
        assert finder.feed(whole) == len(whole)


def test_the_content_type_decides() -> None:
    assert isinstance(edges_of(CONTENT_JSON_LINES), LineEdges)
    assert isinstance(edges_of(CONTENT_CSV), CSVEdges)
    assert isinstance(edges_of(CONTENT_PROTO_FIXED), FixedEdges)
    assert edges_of(CONTENT_RECOVERY_LOG) is None
    assert edges_of("") is None
