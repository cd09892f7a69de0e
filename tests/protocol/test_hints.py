"""Recovery-log hints: their rules, and the JSON form in which they are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Corrupt, Invalid
from gazette.protocol.hints import FnodeSegments, FSMHints, Property, Segment, decode_hints

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SEGMENT = Segment(
    author=0xDEADBEEF,
    first_seq_no=10,
    first_offset=100,
    first_checksum=0xFFFFFFFF,
    last_seq_no=20,
    last_offset=200,
)
HINTS = FSMHints(
    log="a/log",
    live_nodes=(
        FnodeSegments(10, (SEGMENT, replace(SEGMENT, log="other/log", last_offset=0))),
        FnodeSegments(20, ()),
    ),
    properties=(Property("/IDENTITY", "<x> & \u2028"),),
)

uint32 = st.sampled_from([1, (1 << 32) - 1]) | st.integers(1, (1 << 32) - 1)
positive = st.sampled_from([1, (1 << 63) - 1]) | st.integers(1, (1 << 63) - 1)
segments = st.builds(
    Segment,
    author=uint32,
    first_seq_no=positive,
    first_offset=positive,
    first_checksum=uint32,
    last_seq_no=positive,
    last_offset=st.just(0) | positive,
    log=st.sampled_from(["", "other/log"]),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
hints = st.builds(
    FSMHints,
    log=st.sampled_from(["", "a/log"]),
    live_nodes=st.lists(
        st.builds(FnodeSegments, positive, st.lists(segments, max_size=3).map(tuple)), max_size=3
    ).map(tuple),
    properties=st.lists(st.builds(Property, texts, texts), max_size=2).map(tuple),
)


def test_the_json_form() -> None:
    assert HINTS.to_json() == (
        b'{"log":"a/log","live_nodes":[{"fnode":10,"segments":['
        b'{"author":3735928559,"first_seq_no":10,"first_offset":100,"first_checksum":4294967295,'
        b'"last_seq_no":20,"last_offset":200},'
        b'{"author":3735928559,"first_seq_no":10,"first_offset":100,"first_checksum":4294967295,'
        b'"last_seq_no":20,"log":"other/log"}]},'
        b'{"fnode":20,"segments":null}],'
        b'"properties":[{"path":"/IDENTITY","content":"\\u003cx\\u003e \\u0026 \\u2028"}]}'
    )
    assert FSMHints("a/log").to_json() == b'{"log":"a/log","live_nodes":null,"properties":null}'


@PROPERTY
@given(hints)
def test_every_form_round_trips(value: FSMHints) -> None:
    assert decode_hints(value.to_json()) == value
    assert FSMHints.from_pb(value.to_pb()) == value
    wire = value.to_pb().SerializeToString()
    if wire:
        assert decode_hints(wire) == value


def test_an_empty_value_is_invalid() -> None:
    with pytest.raises(Invalid, match="hints are empty"):
        decode_hints(b"")


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"log":5}',
        b'{"live_nodes":{}}',
        b'{"live_nodes":[5]}',
        b'{"live_nodes":[{"segments":[{"author":-1}]}]}',
        b'{"live_nodes":[{"segments":[{"author":4294967296}]}]}',
        b'{"live_nodes":[{"fnode":9223372036854775808}]}',
        b'{"live_nodes":[{"fnode":-9223372036854775809}]}',
        b'{"live_nodes":[{"segments":[{"first_seq_no":1.5}]}]}',
        b'{"properties":[{"path":"\\ud800"}]}',
        b"[]",
        b"\xff\xff",
    ],
)
def test_other_values_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_hints(data)


def test_unknown_members_are_ignored() -> None:
    assert decode_hints(b'{"log":"a/log","more":[1]}') == FSMHints("a/log")


def with_segment(**fields: object) -> FSMHints:
    segment = replace(SEGMENT, **fields)  # type: ignore[arg-type]
    return FSMHints("a/log", (FnodeSegments(10, (segment,)),))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (with_segment(author=0), "Segment: Author is zero"),
        (with_segment(first_seq_no=0), "Segment: FirstSeqNo <= 0"),
        (with_segment(first_offset=-1), "Segment: FirstOffset < 0"),
        (with_segment(last_seq_no=9), "Segment: LastSeqNo < segment.FirstSeqNo"),
        (with_segment(last_offset=100), "Segment: LastOffset <= segment.FirstOffset"),
        (with_segment(log="a/log"), "contained segment.Log duplicates FSMHints.Log"),
        (
            with_segment(log="x"),
            "Segment.Log: invalid length (1; expected 4 <= length <= 512)",
        ),
        (
            replace(with_segment(), log=""),
            "Segment.Log: invalid length (0; expected 4 <= length <= 512)",
        ),
    ],
)
def test_hints_that_are_refused(value: FSMHints, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        value.validate()
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    "value",
    [
        HINTS,
        FSMHints("a/log"),
        with_segment(last_offset=0),
        with_segment(last_seq_no=10, first_offset=0, last_offset=1),
        with_segment(log="other/log"),
    ],
)
def test_hints_that_are_valid(value: FSMHints) -> None:
    value.validate()
