"""Records of an input, in pieces of any length, against a split of the whole."""

from __future__ import annotations

import itertools
import struct

from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import Invalid
from gazette.gazctl.io.record_splitter import (
    RECORD_BYTES_MAX,
    FixedSplitter,
    LineSplitter,
    Splitter,
)
from tests.facts import raises

MAGIC = bytes.fromhex("66339336")


def as_frame(payload: bytes) -> bytes:
    return struct.pack("<4sI", MAGIC, len(payload)) + payload


def split(splitter: Splitter, whole: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(min(at, len(whole)) for at in cuts), len(whole)]
    records = []
    for begin, end in itertools.pairwise(bounds):
        records += splitter.feed(whole[begin:end])
    return records + splitter.finish()


@given(st.binary(max_size=40).map(lambda b: b.replace(b"x", b"\n")), st.lists(st.integers(0, 40)))
def test_lines_keep_their_newline_and_the_last_is_given_one(whole: bytes, cuts: list[int]) -> None:
    expected = [line + b"\n" for line in whole.split(b"\n")]
    if expected[-1] == b"\n":
        expected.pop()
    assert split(LineSplitter(), whole, cuts) == expected


@given(st.lists(st.binary(max_size=6).map(as_frame)), st.lists(st.integers(0, 80)))
def test_frames_keep_their_header(frames: list[bytes], cuts: list[int]) -> None:
    assert split(FixedSplitter(), b"".join(frames), cuts) == frames


def test_what_is_no_frame_is_refused_with_its_offset() -> None:
    splitter = FixedSplitter()
    splitter.feed(as_frame(b"abc"))
    with raises(Invalid, path="--input", says="offset 11 of the input (67617262)"):
        splitter.feed(b"garbage!")


def test_an_input_that_ends_within_a_frame_is_refused() -> None:
    splitter = FixedSplitter()
    splitter.feed(as_frame(b"abc") + as_frame(b"def")[:-1])
    with raises(Invalid, path="--input", says="offset 11"):
        splitter.finish()


def test_a_length_that_cannot_be_is_refused_before_it_is_waited_for() -> None:
    with raises(Invalid, path="--input", says="268435456"):
        FixedSplitter().feed(struct.pack("<4sI", MAGIC, RECORD_BYTES_MAX + 1))


def test_keys_are_without_their_framing() -> None:
    assert LineSplitter().key_of(b"a key\r\n") == b"a key"
    assert LineSplitter(base64_keys=True).key_of(b"AAEC\n") == b"\x00\x01\x02"
    with raises(Invalid, path="--base64", says="not base64!"):
        LineSplitter(base64_keys=True).key_of(b"not base64!\n")
    assert FixedSplitter().key_of(as_frame(b"a key")) == b"a key"
