"""Frames, checksums and fences, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.errors import Corrupt
from gazette.protocol.pb import recoverylog_pb2 as pb
from gazette.recoverylog.log.ops import (
    HEADER_LENGTH,
    Create,
    Link,
    RecordedOp,
    SetProperty,
    Unlink,
    Write,
    decode_op,
    encode_op,
    fence_value,
    frame_length,
    next_checksum,
)
from tests.facts import raises


def decode(frame: bytes, payload: bytes) -> RecordedOp:
    assert frame_length(frame) == len(payload)
    assert frame[HEADER_LENGTH:] == payload
    return decode_op(payload, log="", first_offset=0, frame_end=0)


def test_frames_and_checksums_are_those_of_the_protocol() -> None:
    """Vectors that were computed independently of this code."""
    create = RecordedOp(1, 0, 1234, Create("/path/to/file"))
    frame, payload = encode_op(create)
    assert payload.hex() == "08011dd2040000220f0a0d2f706174682f746f2f66696c65"
    assert frame == bytes.fromhex("66339336") + (24).to_bytes(4, "little") + payload
    assert len(frame) == 32
    checksum = next_checksum(0, payload)
    assert checksum == 0x568E8E4E

    unlink = RecordedOp(2, checksum, 1234, Unlink(1, "/path/to/file"))
    assert next_checksum(checksum, encode_op(unlink)[1]) == 0x8EE45505

    frame, payload = encode_op(RecordedOp(1, 0, 1234, Create("/target/path")))
    assert len(frame) == 31
    assert next_checksum(0, payload) == 0x5CCBEEAA


def test_a_no_op_of_the_protocol() -> None:
    """What hands a log over is an operation of no action."""
    checksum = next_checksum(0, encode_op(RecordedOp(1, 0, 1234, Create("/file1")))[1])
    frame, payload = encode_op(RecordedOp(2, checksum, 5678, None))
    assert frame.hex() == "663393360c00000008021557bf191f1d2e160000"
    assert next_checksum(checksum, payload) == 0x61669370
    assert decode(frame, payload).action is None


@pytest.mark.parametrize(
    ("author", "value"), [(1337, "19p"), (1234, "16i"), (5678, "5he"), (4294967295, "3vvvvvv")]
)
def test_fences(author: int, value: str) -> None:
    assert fence_value(author) == value


@pytest.mark.parametrize("author", [0, -1, 1 << 32])
def test_what_is_no_author_has_no_fence(author: int) -> None:
    """Author 0 means that no owner takes the log over."""
    with pytest.raises(Corrupt):
        fence_value(author)


paths = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
positive = st.integers(0, (1 << 63) - 1)
actions = st.one_of(
    st.none(),
    st.builds(Create, paths),
    st.builds(Link, positive, paths),
    st.builds(Unlink, positive, paths),
    st.builds(Write, positive, positive, st.just(0)),
    st.builds(SetProperty, paths, paths),
)


@given(actions, positive, st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1))
def test_operations_survive_a_round_trip(
    action: object, seq_no: int, checksum: int, author: int
) -> None:
    """Every action, whatever is zero or empty in it."""
    op = RecordedOp(seq_no, checksum, author, action)  # type: ignore[arg-type]
    assert decode(*encode_op(op)) == op


def test_a_writes_end_is_behind_its_bytes() -> None:
    """Raw bytes follow the frame of a write; offsets of where it was read are never encoded."""
    _, payload = encode_op(RecordedOp(3, 0, 1, Write(1, 10, 500), 7, 9, "a/log"))
    assert payload == encode_op(RecordedOp(3, 0, 1, Write(1, 10, 500)))[1]
    op = decode_op(payload, log="b/log", first_offset=100, frame_end=140)
    assert (op.first_offset, op.last_offset, op.log) == (100, 640, "b/log")


def test_the_first_action_counts() -> None:
    """Actions are optional fields, not alternatives: another writer may set two."""
    message = pb.RecordedOp(seq_no=1, author=1)
    message.link.path = "/linked"
    message.create.path = "/created"
    op = decode_op(message.SerializeToString(), log="", first_offset=0, frame_end=0)
    assert op.action == Create("/created")


def test_what_is_no_operation_is_refused() -> None:
    """Headers of junk, payloads that do not parse, negative writes."""
    assert frame_length(b"\x66\x33\x93\x37\x01\x00\x00\x00") is None
    assert frame_length(b"\x66\x33\x93\x36\xff\xff\xff\xff") is None
    with raises(Corrupt, "log", offset=0):
        decode_op(b"\xff", log="", first_offset=0, frame_end=0)
    message = pb.RecordedOp(seq_no=1, author=1, write=pb.RecordedOp.Write(fnode=1, length=-1))
    with pytest.raises(Corrupt, match="negative"):
        decode_op(message.SerializeToString(), log="", first_offset=0, frame_end=0)
