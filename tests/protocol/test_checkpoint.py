"""Checkpoints: equal ones have equal bytes, and bytes of the original are read."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.errors import Corrupt
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint

# The machine that tests run on may be busy: time is no reason to fail.
PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Written by the original when it still kept producers in a map. Its entries happen to be sorted.
FIXTURE = bytes.fromhex(
    "0a210a03626172121a08de0112150a06aabbccddeeff120b0915030000000000001065"
    "0a210a03666f6f121a086f12160a06010203040506120c09c801000000000000109506"
    "120d0a0362617a1206696e74656e7412140a0462696e67120c6f746865722d696e74656e74"
)
CHECKPOINT = Checkpoint(
    sources={
        "foo": SourceCheckpoint(111, {bytes([1, 2, 3, 4, 5, 6]): ProducerState(456, 789)}),
        "bar": SourceCheckpoint(222, {bytes.fromhex("aabbccddeeff"): ProducerState(789, 101)}),
    },
    ack_intents={"bing": b"other-intent", "baz": b"intent"},
)

journals = st.text(st.sampled_from("ab/;é"), min_size=1, max_size=6)
states = st.builds(
    ProducerState,
    last_ack=st.sampled_from([0, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1),
    begin=st.none() | st.sampled_from([0, (1 << 63) - 1]) | st.integers(0, (1 << 63) - 1),
)
checkpoints = st.builds(
    Checkpoint,
    sources=st.dictionaries(
        journals,
        st.builds(
            SourceCheckpoint,
            read_through=st.integers(0, (1 << 63) - 1),
            producers=st.dictionaries(st.binary(min_size=6, max_size=6), states, max_size=4),
        ),
        max_size=4,
    ),
    ack_intents=st.dictionaries(journals, st.binary(max_size=8), max_size=3),
)


def test_bytes_of_the_original_are_read_and_written() -> None:
    assert Checkpoint.from_bytes(FIXTURE) == CHECKPOINT
    assert CHECKPOINT.to_bytes() == FIXTURE


@PROPERTY
@given(checkpoints)
def test_every_form_round_trips(checkpoint: Checkpoint) -> None:
    assert Checkpoint.from_pb(checkpoint.to_pb()) == checkpoint
    assert Checkpoint.from_bytes(checkpoint.to_bytes()) == checkpoint
    assert Checkpoint.from_json(checkpoint.to_json()) == checkpoint


@PROPERTY
@given(checkpoints)
def test_encodings_do_not_depend_on_the_order_of_dictionaries(checkpoint: Checkpoint) -> None:
    reordered = Checkpoint(
        sources={
            journal: SourceCheckpoint(source.read_through, dict(reversed(source.producers.items())))
            for journal, source in reversed(checkpoint.sources.items())
        },
        ack_intents=dict(reversed(checkpoint.ack_intents.items())),
    )
    assert reordered.to_bytes() == checkpoint.to_bytes()
    assert reordered.to_json() == checkpoint.to_json()


def test_what_is_read_is_in_ascending_order() -> None:
    """Recovered acknowledgements are appended in this order. Maps of protobuf have one in each process."""
    names = [f"journal-{number}" for number in range(20)]
    pb = Checkpoint(
        sources={name: SourceCheckpoint(1) for name in names},
        ack_intents=dict.fromkeys(names, b"ack"),
    ).to_pb()
    read = Checkpoint.from_pb(pb)
    assert list(read.sources) == list(read.ack_intents) == sorted(names)


def test_journals_and_producers_are_in_ascending_order() -> None:
    producers = {bytes([k] * 6): ProducerState(k, None) for k in (9, 200, 3)}
    pb = Checkpoint({"j": SourceCheckpoint(0, producers)}).to_pb()
    assert [entry.id[0] for entry in pb.sources["j"].producers] == [3, 9, 200]
    many = Checkpoint({f"j{k:03}": SourceCheckpoint(k) for k in range(99, 0, -1)}).to_bytes()
    positions = [many.index(f"j{k:03}".encode()) for k in range(1, 100)]
    assert positions == sorted(positions)


def test_no_open_span_is_minus_one_and_an_absent_one_is_offset_zero() -> None:
    source = SourceCheckpoint(0, {b"prodid": ProducerState(5, None)})
    wire = Checkpoint({"j": source}).to_bytes()
    assert wire.endswith(bytes.fromhex("09 0500000000000000 10 ffffffffffffffffff01"))
    # Case: the same state without its field `begin`.
    at_zero = Checkpoint({"j": SourceCheckpoint(0, {b"prodid": ProducerState(5, 0)})})
    assert bytes.fromhex("09 0500000000000000") == at_zero.to_bytes()[-9:]
    assert Checkpoint.from_bytes(at_zero.to_bytes()) == at_zero


def test_the_state_of_a_producer_is_on_the_wire_even_when_empty() -> None:
    checkpoint = Checkpoint({"j": SourceCheckpoint(0, {b"prodid": ProducerState(0, 0)})})
    assert checkpoint.to_bytes() == bytes.fromhex("0a11 0a016a 120c 120a 0a06") + b"prodid\x12\x00"


def test_the_json_form() -> None:
    checkpoint = Checkpoint(
        sources={
            "b/journal": SourceCheckpoint(0, {}),
            "a/journal": SourceCheckpoint(
                5,
                {
                    b"\xff\x00\x00\x00\x00\x00": ProducerState(1 << 60, None),
                    b"\x01\x00\x00\x00\x00\x00": ProducerState(0, 0),
                },
            ),
        },
        ack_intents={"c/journal": b"intent"},
    )
    assert checkpoint.to_json() == (
        b'{"sources":{"a/journal":{"read_through":5,"producers":['
        b'{"id":"AQAAAAAA","state":{}},'
        b'{"id":"/wAAAAAA","state":{"last_ack":1152921504606846976,"begin":-1}}]},'
        b'"b/journal":{"producers":null}},'
        b'"ack_intents":{"c/journal":"aW50ZW50"}}'
    )
    assert Checkpoint().to_json() == b'{"sources":{}}'


@pytest.mark.parametrize("data", [b'{"sources":null}', b"{}", b'{"ack_intents":null}', b"null"])
def test_json_without_anything_is_an_empty_checkpoint(data: bytes) -> None:
    assert Checkpoint.from_json(data) == Checkpoint() == Checkpoint.from_bytes(b"")


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"sources": []},
        {"sources": {"a": {"read_through": "5"}}},
        {"sources": {"a": {"read_through": 1.5}}},
        {"sources": {"a": {"read_through": 1 << 63}}},
        {"sources": {"a": {"producers": {}}}},
        {"sources": {"a": {"producers": [{"id": 5}]}}},
        {"sources": {"a": {"producers": [{"id": "!"}]}}},
        {"sources": {"a": {"producers": [{"state": {"last_ack": -1}}]}}},
        {"sources": {"a": {"producers": [{"state": {"last_ack": True}}]}}},
        {"sources": {"a": {"producers": [{"state": {"last_ack": 1 << 64}}]}}},
        {"sources": {"a": {"producers": [{"state": {"begin": -(1 << 63) - 1}}]}}},
        {"sources": {"\ud800": {}}},
        {"ack_intents": {"a": []}},
    ],
)
def test_json_of_another_shape_is_corrupt(value: object) -> None:
    with pytest.raises(Corrupt):
        Checkpoint.from_json(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Checkpoint.from_json(data)


@pytest.mark.parametrize("data", [FIXTURE[:-1], b"\x0a\x05\x0a\x03\xff\xff\xff", b"\xff\xff"])
def test_bytes_of_something_else_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        Checkpoint.from_bytes(data)
