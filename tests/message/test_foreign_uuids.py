"""UUIDs that other software made: their messages count like messages without a UUID."""

from __future__ import annotations

import random
import uuid as stdlib_uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_count import ngram_pb2

from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.envelope import Envelope, EnvelopeDecoder
from gazette.message.framing.frames import MalformedMessage
from gazette.message.framing.framing import framing_of
from gazette.message.message import CSVRecord, Message
from gazette.message.message_time import UnusableTime
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    FOREIGN_UUID,
    NIL_PRODUCER,
    NIL_UUID,
    OUTSIDE_TXN,
    build_uuid,
    parse_arrays,
    parse_columns,
    parse_uuid,
    uuid_text,
)
from tests.facts import raises

PRODUCER = bytes.fromhex("0102030405ff")
LINES = 20_000


class Order(Message):
    number: int = 0


def random_uuids(seed: int, count: int) -> list[stdlib_uuid.UUID]:
    rng = random.Random(seed)
    return [stdlib_uuid.UUID(int=rng.getrandbits(128), version=4) for _ in range(count)]


def delivered(envelopes: list[Envelope[Any]], *, by_batch: bool) -> Iterator[Envelope[Any]]:
    sequencer: Sequencer[Any] = Sequencer({}, 64)
    index = 0
    while index < len(envelopes):
        if by_batch:
            index = sequencer.queue_batch(envelopes, index)
        else:
            sequencer.queue(envelopes[index])
            index += 1
        assert sequencer.replay_range is None
        while batch := sequencer.dequeue(100):
            yield from batch


@given(st.binary(min_size=16, max_size=16))
def test_only_uuids_of_our_version_and_variant_have_parts(raw: bytes) -> None:
    standard = stdlib_uuid.UUID(bytes=raw)
    ours = standard.version == 1 and standard.variant == stdlib_uuid.RFC_4122
    parsed = parse_uuid(raw)
    if ours:
        assert build_uuid(*parsed) == raw
    else:
        assert parsed == (NIL_PRODUCER, 0, FOREIGN_UUID if any(raw) else OUTSIDE_TXN)


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=16, max_size=16),
            st.uuids().map(lambda one: one.bytes),
            st.just(NIL_UUID),
            st.builds(build_uuid, st.just(PRODUCER), st.integers(0, 99), st.integers(0, 0x3FF)),
        )
    )
)
def test_many_uuids_are_parsed_as_each_alone(raws: list[bytes]) -> None:
    each = [parse_uuid(raw) for raw in raws]
    columns = parse_columns(b"".join(raws))
    assert list(zip(*columns[:3], strict=True)) == each
    assert columns.has_foreign == any(one.flags == FOREIGN_UUID for one in each)
    producers, clocks, flags = parse_arrays(b"".join(raws))
    assert [
        (int(p).to_bytes(6, "big"), c, f)
        for p, c, f in zip(producers.tolist(), clocks.tolist(), flags.tolist(), strict=True)
    ] == each


@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize("message_type", [Order, dict])
def test_lines_with_random_uuids_are_delivered_once_each(
    message_type: Any, by_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    journal = f"lines/{message_type.__name__}/{by_batch}"
    uuids = random_uuids(7, LINES)
    content = b"".join(
        b'{"uuid":"%s","number":%d}\n' % (str(u).encode(), n) for n, u in enumerate(uuids)
    )
    decoder = EnvelopeDecoder(journal, framing_of(CONTENT_JSON_LINES, message_type), 0)
    decoder.feed(content)
    envelopes: list[Envelope[Any]] = []
    while batch := decoder.decode():
        envelopes += batch
    found = list(delivered(envelopes, by_batch=by_batch))
    assert [msgspec.to_builtins(one.message) for one in found] == [
        {"uuid": str(u), "number": n} for n, u in enumerate(uuids)
    ]
    assert {(one.producer, one.clock, one.flags) for one in found} == {
        (NIL_PRODUCER, 0, FOREIGN_UUID)
    }
    for one in found[:3]:
        assert one.uuid == NIL_UUID
        with raises(UnusableTime, journal=journal):
            _ = one.time
    assert sum(journal in record.getMessage() for record in caplog.records) == 1


def test_they_change_nothing_for_the_messages_around_them() -> None:
    """An open transaction stays open, and a duplicate stays one."""
    foreign = random_uuids(3, 40)
    ours = [
        build_uuid(PRODUCER, clock, flags)
        for clock, flags in [
            (10, OUTSIDE_TXN),
            (10, OUTSIDE_TXN),
            (20, CONTINUE_TXN),
            (30, CONTINUE_TXN),
            (20, CONTINUE_TXN),
            (40, ACK_TXN),
        ]
    ]
    mixed: list[str] = []
    for at, one in enumerate(foreign):
        mixed.append(str(one))
        if at % 7 == 0 and at // 7 < len(ours):
            mixed.append(uuid_text(ours[at // 7]))
    content = b"".join(b'{"uuid":"%s"}\n' % text.encode() for text in mixed)
    for by_batch in (False, True):
        decoder = EnvelopeDecoder("mixed", framing_of(CONTENT_JSON_LINES, dict), 0)
        decoder.feed(content)
        found = [one.message["uuid"] for one in delivered(decoder.decode(), by_batch=by_batch)]
        assert sorted(found) == sorted(
            [*map(str, foreign), *(uuid_text(ours[at]) for at in (0, 2, 3, 5))]
        )


def test_metrics_count_them_by_journal() -> None:
    decoder = EnvelopeDecoder("counted", framing_of(CONTENT_JSON_LINES, dict), 0)
    decoder.feed(b"".join(b'{"uuid":"%s"}\n' % str(one).encode() for one in random_uuids(1, 9)))
    sequencer: Sequencer[Any] = Sequencer({}, 8)
    batch, index = decoder.decode(), 0
    while index < len(batch):
        index = sequencer.queue_batch(batch, index)
        while sequencer.dequeue(8):
            pass
    assert {key[:2]: count for key, count in sequencer.outcomes.items()} == {
        ("counted", FOREIGN_UUID): 9
    }


def test_of_csv_and_protobuf() -> None:
    one = random_uuids(5, 1)[0]
    framing = framing_of(CONTENT_CSV, CSVRecord)
    frames = framing.decode(f"{one},a\n".encode(), 0)
    assert parse_uuid(frames.uuids).flags == FOREIGN_UUID
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    frames = framing.decode(framing.encode(ngram_pb2.NGramCount(uuid=one.bytes)), 0)
    assert parse_uuid(frames.uuids).flags == FOREIGN_UUID


@pytest.mark.parametrize("text", [b'"hello"', b"7", b"0", b"false", b"[]", b'{"a":1}', b'"null"'])
def test_what_is_no_uuid_is_malformed_and_the_hint_names_the_remedy(text: bytes) -> None:
    for message_type in (dict, Order) if text.startswith(b'"') else (dict,):
        framing = framing_of(CONTENT_JSON_LINES, message_type)
        with raises(MalformedMessage, begin=0, advises="_meta.uuid"):
            framing.decode(b'{"uuid":%s}\n' % text, 0)


@pytest.mark.parametrize("text", [b'""', b"null"])
def test_an_empty_place_is_no_uuid(text: bytes) -> None:
    frames = framing_of(CONTENT_JSON_LINES, dict).decode(b'{"uuid":%s}\n' % text, 0)
    assert parse_uuid(frames.uuids) == (NIL_PRODUCER, 0, OUTSIDE_TXN)
