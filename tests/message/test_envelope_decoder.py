"""Chunks of a journal become envelopes, wherever the chunks are cut and whatever is between them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.errors import Bug
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.envelope import EnvelopeDecoder
from gazette.message.framing.framing import MalformedMessage, TruncatedFrame, framing_of
from gazette.message.message import CSVRecord, Message
from gazette.message.uuid import (
    ACK_TXN,
    NIL_PRODUCER,
    OUTSIDE_TXN,
    Clock,
    UuidMint,
    build_uuid,
    clock_at,
    uuid_text,
)

PRODUCER = b"\x01abcde"


class Word(Message):
    word: str


def written(
    content_type: str, count: int = 30
) -> tuple[bytes, list[tuple[int, int, Any]], type[Any]]:
    """Draw bytes of a journal in which some frames are no messages; and what is in it."""
    kind = CSVRecord if content_type == CONTENT_CSV else Word
    framing = framing_of(content_type, kind)
    mint = UuidMint(PRODUCER, Clock(clock_at(10**18)))
    buffer = bytearray()
    found: list[tuple[int, int, Any]] = []
    for number in range(count):
        begin = len(buffer)
        if number % 7 == 3:
            buffer += b"not a message\n"
            found.append((begin, len(buffer), None))
            continue
        text = "x" * (number * 3)
        message = CSVRecord(["", text, "quoted\n"]) if kind is CSVRecord else Word(text)
        framing.codec.stamp(message, mint, ACK_TXN if number % 5 == 4 else OUTSIDE_TXN)
        framing.encode_into(message, buffer)
        found.append((begin, len(buffer), message))
    return bytes(buffer), found, kind


def drain(decoder: EnvelopeDecoder[Any]) -> list[Any]:
    found = []
    while True:
        try:
            batch = decoder.decode()
        except MalformedMessage as error:
            if error.is_whole:
                reported = None if error.journal == "a/journal" else error
                found.append((error.begin, error.end, reported))
            decoder.skip(error)
            continue
        if not batch:
            return found
        found += [(e.begin, e.end, e.message) for e in batch]


@settings(max_examples=150, deadline=None)
@given(
    content_type=st.sampled_from([CONTENT_JSON_LINES, CONTENT_CSV]),
    cuts=st.sets(st.integers(0, 3000), max_size=40),
)
def test_chunks_may_be_cut_anywhere(content_type: str, cuts: set[int]) -> None:
    buffer, expected, kind = written(content_type)
    decoder = EnvelopeDecoder("a/journal", framing_of(content_type, kind), 1000)
    found = []
    bounds = [0, *sorted(cut for cut in cuts if cut < len(buffer)), len(buffer)]
    for begin, end in itertools.pairwise(bounds):
        decoder.feed(buffer[begin:end])
        assert decoder.end == 1000 + end
        found += drain(decoder)
    decoder.finish()
    assert decoder.begin == decoder.end
    assert found == [(begin + 1000, end + 1000, message) for begin, end, message in expected]


def test_envelopes_carry_the_parts_of_their_uuid() -> None:
    buffer, _, _ = written(CONTENT_JSON_LINES, 3)
    decoder = EnvelopeDecoder("a/journal;meta", framing_of(CONTENT_JSON_LINES, Word), 0)
    decoder.feed(buffer + b'{"word":"none"}\n')
    *first, last = decoder.decode()
    assert {e.producer for e in first} == {PRODUCER}
    assert [uuid_text(e.uuid) for e in first] == [e.message.uuid for e in first]
    assert first[0].clock < first[1].clock < first[2].clock
    assert (last.producer, last.clock, last.flags, last.is_ack) == (NIL_PRODUCER, 0, 0, False)
    assert last.journal == "a/journal;meta"


def test_messages_of_several_producers_keep_theirs() -> None:
    framing = framing_of(CONTENT_JSON_LINES, Word)
    producers = [bytes([1, 0, 0, 0, 0, n % 3]) for n in range(20)]
    buffer = b"".join(
        framing.encode(Word("w", uuid=uuid_text(build_uuid(p, 100 + n, n % 3))))
        for n, p in enumerate(producers)
    )
    decoder = EnvelopeDecoder("a/journal", framing, 0)
    decoder.feed(buffer)
    batch = decoder.decode()
    assert [e.producer for e in batch] == producers
    assert [e.clock for e in batch] == list(range(100, 120))
    assert [e.is_ack for e in batch] == [n % 3 == 2 for n in range(20)]


def test_types_without_a_uuid_have_nil_parts() -> None:
    decoder = EnvelopeDecoder("a/journal", framing_of(CONTENT_PROTO_FIXED, bytes), 0)
    decoder.feed(framing_of(CONTENT_PROTO_FIXED, bytes).encode(b"raw") * 10)
    assert {(e.producer, e.clock, e.flags) for e in decoder.decode()} == {(NIL_PRODUCER, 0, 0)}


def test_an_error_repeats_until_it_is_skipped() -> None:
    decoder = EnvelopeDecoder("a/journal", framing_of(CONTENT_JSON_LINES, Word), 0)
    decoder.feed(b'{"word":"a"}\nbad\n{"word":"b"}\n')
    assert [e.message for e in decoder.decode()] == [Word("a")]
    for _ in range(2):
        with pytest.raises(MalformedMessage) as caught:
            decoder.decode()
    decoder.skip(caught.value)
    assert [e.message for e in decoder.decode()] == [Word("b")]
    assert decoder.decode() == []
    with pytest.raises(Bug):
        decoder.skip(caught.value)


class Counting:
    """A framing that notes how many bytes it is asked to decode."""

    def __init__(self, framing: Any) -> None:
        self._framing = framing
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framing, name)

    def decode(self, buffer: bytes, base: int) -> Any:
        self.calls.append(len(buffer))
        return self._framing.decode(buffer, base)


def test_a_frame_in_many_chunks_is_not_decoded_again_with_each() -> None:
    framing: Any = Counting(framing_of(CONTENT_PROTO_FIXED, bytes))
    decoder: EnvelopeDecoder[Any] = EnvelopeDecoder("a/journal", framing, 0)
    frame = framing.encode(b"x" * 10_000)
    for at in range(0, len(frame), 7):
        decoder.feed(frame[at : at + 7])
        if (batch := decoder.decode()) and batch[0].end != 10_008:
            raise AssertionError
    assert framing.calls == [10_008]


def test_a_quoted_field_may_end_before_the_chunk_with_its_newline() -> None:
    uuid = uuid_text(build_uuid(PRODUCER, 5, 0)).encode()
    decoder = EnvelopeDecoder("a/journal", framing_of(CONTENT_CSV, CSVRecord), 0)
    found = []
    for chunk in (uuid + b',"a\nb', b"c\nd", b'"', b"\n"):
        decoder.feed(chunk)
        found += drain(decoder)
    assert [message[1] for _, _, message in found] == ["a\nbc\nd"]


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_line_that_is_too_long_is_malformed_and_passed_over(chunk: int) -> None:
    framing = framing_of(CONTENT_JSON_LINES, Word, frame_bytes_max=50)
    decoder = EnvelopeDecoder("a/journal", framing, 0)
    buffer = b'{"word":"a"}\n{"word":"' + b"x" * 300 + b'"}\n{"word":"b"}\n'
    found = []
    for at in range(0, len(buffer), chunk):
        decoder.feed(buffer[at : at + chunk])
        found += drain(decoder)
        assert decoder.pending <= 50 + chunk
    messages = [message for _, _, message in found if message is not None]
    assert messages == [Word("a"), Word("b")]
    assert [begin for begin, _, message in found if message is None] == [13]
    assert found[-1][1] == len(buffer)


@pytest.mark.parametrize("content_type", [CONTENT_JSON_LINES, CONTENT_CSV, CONTENT_PROTO_FIXED])
@pytest.mark.parametrize("length", range(47, 55))
def test_chunks_do_not_decide_whether_a_frame_is_too_long(content_type: str, length: int) -> None:
    """A shard that begins again reads other chunks, and must skip the same frames."""
    framing = framing_of(content_type, bytes, frame_bytes_max=50)
    first, last = framing.encode(b"first"), framing.encode(b"last")
    envelope_size = len(framing.encode(b""))
    long = framing.encode(b"y" * (length - envelope_size))
    buffer = first + long + long + last
    ends = [len(first), len(first) + length, len(first) + 2 * length, len(buffer)]
    messages = [b"first", *[b"y" * (length - envelope_size) if length <= 50 else None] * 2, b"last"]
    for chunk in (1, 3, 20, 50, 51, 60, 70, 1000):
        decoder = EnvelopeDecoder(
            "a/journal", framing_of(content_type, bytes, frame_bytes_max=50), 0
        )
        found: list[Any] = []
        for at in range(0, len(buffer), chunk):
            decoder.feed(buffer[at : at + chunk])
            assert decoder.end == min(at + chunk, len(buffer))
            found += drain(decoder)
        if content_type == CONTENT_PROTO_FIXED:  # Junk may be reported in parts.
            assert [message for *_, message in found if message] == [m for m in messages if m]
            continue
        assert found == list(zip([0, *ends[:-1]], ends, messages, strict=True))


def test_a_jump_within_a_frame_that_is_too_long_reports_all_of_it() -> None:
    framing = framing_of(CONTENT_JSON_LINES, Word, frame_bytes_max=50)
    decoder = EnvelopeDecoder("a/journal", framing, 0)
    for _ in range(4):
        decoder.feed(b"x" * 40)
        assert drain(decoder) == []
    with pytest.raises(MalformedMessage) as caught:
        decoder.jump(500)
    assert (caught.value.begin, caught.value.end, caught.value.raw) == (0, 160, b"x" * 50)
    decoder.feed(b'{"word":"b"}\n')
    assert drain(decoder) == [(500, 513, Word("b"))]


def test_a_jump_within_a_frame_reports_what_is_lost() -> None:
    decoder = EnvelopeDecoder("a/journal", framing_of(CONTENT_JSON_LINES, Word), 0)
    decoder.feed(b'{"word":"a"}\n{"wo')
    drain(decoder)
    with pytest.raises(MalformedMessage) as caught:
        decoder.jump(500)
    assert (caught.value.begin, caught.value.end, caught.value.raw) == (13, 17, b'{"wo')
    decoder.feed(b'{"word":"b"}\n')
    assert drain(decoder) == [(500, 513, Word("b"))]
    decoder.jump(600)
    assert decoder.end == 600


def test_ending_within_a_frame_is_truncated() -> None:
    decoder = EnvelopeDecoder("a/journal", framing_of(CONTENT_JSON_LINES, Word), 10)
    decoder.finish()
    decoder.feed(b'{"wo')
    with pytest.raises(TruncatedFrame) as caught:
        decoder.finish()
    assert caught.value.facts == {"journal": "a/journal", "begin": 10, "end": 14}
