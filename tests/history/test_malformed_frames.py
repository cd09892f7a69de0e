"""Frames that do not decode: within their transaction if they show a UUID, in each content type and mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from word_count import ngram_pb2

import gazette
from gazette.history.visible_uuids import find_bytes
from gazette.labels import CONTENT_PROTO_FIXED
from gazette.message.framing.frames import MalformedMessage
from gazette.message.framing.framing import FIXED_MAGIC, framing_of
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, uuid_text
from gazette.protocol.pb import broker_pb2
from gazette.testing.stored import write_journal
from tests.facts import raises
from tests.fuzzing import examples

JOURNAL, STORE = "a/journal", "file:///fragments/"
ALPHA, BETA, GAMMA = (bytes([1, 0, 0, 0, 0, number]) for number in (1, 2, 3))
JSON, CSV, PROTOBUF = "json", "csv", "protobuf"
frame_of = framing_of(CONTENT_PROTO_FIXED, bytes).frame


def text(uuid: bytes) -> bytes:
    return uuid_text(uuid).encode()


GOOD: dict[str, Callable[[bytes], bytes]] = {
    JSON: lambda uuid: b'{"uuid":"%b","count":7}\n' % text(uuid),
    CSV: lambda uuid: b"%b,7\n" % text(uuid),
    PROTOBUF: lambda uuid: frame_of(b"\x0a\x10" + uuid + b"\x18\x07"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    JSON: {"fields": "count long"},
    CSV: {"value": "csv", "fields": "count long"},
    PROTOBUF: {"message": ngram_pb2.NGramCount, "fields": "count long"},
}
SHOWN: list[tuple[str, Callable[[bytes], bytes]]] = [
    (JSON, lambda uuid: b'{"uuid":"%b","count":7' % text(uuid) + b"\n"),
    (CSV, lambda uuid: b'%b,bare"quote\n' % text(uuid)),
    # Text that is not UTF-8, a field without its value, one that is cut, and a tag of no field.
    (PROTOBUF, lambda uuid: frame_of(b"\x0a\x10" + uuid + b"\x12\x01\xff")),
    (PROTOBUF, lambda uuid: frame_of(b"\x0a\x10" + uuid + b"\x18")),
    (PROTOBUF, lambda uuid: frame_of(b"\x18\x05\x0a\x10" + uuid + b"\x12\x7fabc")),
    (PROTOBUF, lambda uuid: frame_of(b"\x0a\x10" + uuid + b"\x00")),
    (PROTOBUF, lambda uuid: frame_of(b"\x0a\x00\x0a\x10" + uuid + b"\x1f")),
    (PROTOBUF, lambda uuid: frame_of(b"\x23\x0a\x01x\x24\x0a\x10" + uuid + b"\x1f")),
]
"""Malformed frames that show their UUID."""
NOT_SHOWN: list[tuple[str, Callable[[bytes], bytes]]] = [
    (JSON, lambda uuid: b'{"uuid":"%b' % text(uuid) + b"\n"),
    (JSON, lambda _: b"\x00\n"),
    (CSV, lambda uuid: b'%b"x,7\n' % text(uuid)),
    (PROTOBUF, lambda uuid: frame_of(b"\x12\x7f\x0a\x10" + uuid)),
    (PROTOBUF, lambda uuid: frame_of(b"\x0a\x10" + uuid[:-1])),
    (PROTOBUF, lambda uuid: frame_of(b"\x23\x0a\x10" + uuid + b"\x1f")),
    # No frame begins there: a length beyond the limit, and bytes that would be a message.
    (PROTOBUF, lambda uuid: FIXED_MAGIC + b"\xff" * 4 + b"\x0a\x10" + uuid),
    (PROTOBUF, lambda uuid: b"\x0a\x10" + uuid + b"\x18\x07"),
    (PROTOBUF, lambda _: b"\x18\x07\x18\x07\x18\x07\x18\x07"),
    (PROTOBUF, lambda _: b"\x18\x07"),
]
"""Malformed frames of which nothing says whether they are in a transaction."""


def read(root: Path, kind: str, misfits: Any) -> list[tuple[int, int | None]]:
    table = gazette.read_table(JOURNAL, store=f"{root}/fragments", misfits=misfits, **OPTIONS[kind])
    return [(row["offset"], row["count"]) for row in table.to_pylist()]


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize(("kind", "malformed"), SHOWN)
def test_a_frame_that_shows_its_uuid(
    tmp_path: Path, kind: str, malformed: Callable[[bytes], bytes], many: int
) -> None:
    """It is a row once it is committed, and none while it is pending."""
    good = GOOD[kind]
    first = good(build_uuid(GAMMA, 1, OUTSIDE_TXN))

    def batch(producer: bytes) -> list[bytes]:
        return [malformed(build_uuid(producer, at, CONTINUE_TXN)) for at in range(1, many + 1)]

    frames = [first, *batch(ALPHA), *batch(BETA), good(build_uuid(BETA, many + 1, ACK_TXN))]
    write_journal(tmp_path, STORE, JOURNAL, [b"".join(frames)])
    begins = [sum(map(len, frames[:at])) for at in range(len(frames))]
    committed = begins[1 + many : 1 + 2 * many]
    assert read(tmp_path, kind, "null") == [(0, 7), *((begin, None) for begin in committed)]
    assert read(tmp_path, kind, "skip") == [(0, 7)]
    with raises(MalformedMessage, journal=JOURNAL, begin=len(first)):
        read(tmp_path, kind, "fail")


@pytest.mark.parametrize(("kind", "malformed"), NOT_SHOWN)
def test_a_frame_that_shows_no_uuid(
    tmp_path: Path, kind: str, malformed: Callable[[bytes], bytes]
) -> None:
    """It is a row of nulls, outside of transactions."""
    first, last = (GOOD[kind](build_uuid(GAMMA, at, OUTSIDE_TXN)) for at in (1, 2))
    found = malformed(build_uuid(ALPHA, 1, CONTINUE_TXN))
    write_journal(tmp_path, STORE, JOURNAL, [first + found + last])
    begin = len(first)
    rows = [(0, 7), (begin, None), (begin + len(found), 7)]
    assert read(tmp_path, kind, "null") == rows
    assert read(tmp_path, kind, "skip") == [rows[0], rows[2]]
    with raises(MalformedMessage, journal=JOURNAL, begin=begin):
        read(tmp_path, kind, "fail")


def test_a_nested_place(tmp_path: Path) -> None:
    """The UUID of a malformed frame is found in the place that is declared."""
    uuid = build_uuid(ALPHA, 1, CONTINUE_TXN)
    inner = b"\x0a\x10" + uuid
    assert find_bytes(b"\x08\x01\x12\x12" + inner, [2, 1]) == uuid
    assert find_bytes(b"\x12\x00\x12\x12" + inner + b"\x12", [2, 1]) == uuid
    assert find_bytes(b"\x12\x7f" + inner, [2, 1]) == uuid
    assert find_bytes(b"\x12\x12" + inner, [1]) is None


@settings(max_examples=examples(300), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.tuples(st.integers(0, 80), st.binary(max_size=3)), max_size=2),
)
def test_bytes_are_found_as_the_parser_finds_them(seed: int, cuts: list[tuple[int, bytes]]) -> None:
    """For each message that decodes, whatever else it holds. Damage is no error."""
    rng = random.Random(seed)
    message = broker_pb2.Fragment(journal="a" * rng.choice([0, 3, 200]), begin=rng.choice([0, -1]))
    message.sum.part1 = rng.getrandbits(64)
    message.backing_store = "b" * rng.randrange(3)
    payload = bytearray(message.SerializeToString())
    for at, data in cuts:
        payload[at : at + 1] = data
    content = bytes(payload)
    field = broker_pb2.Fragment.DESCRIPTOR.fields_by_name["backing_store"].number
    found = find_bytes(content, [field])
    try:
        read_back = broker_pb2.Fragment.FromString(content)
    except DecodeError:
        return
    assert (found or b"") == read_back.backing_store.encode()
