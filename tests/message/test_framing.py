"""Framings: whole batches, torn and broken frames, and what each content type's rules are."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.errors import Invalid, InvalidValue
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.framing.csv import format_record
from gazette.message.framing.framing import Framing, MalformedMessage, TruncatedFrame, framing_of
from gazette.message.message import CSVRecord, Message
from gazette.message.uuid import ACK_TXN, NIL_UUID, build_uuid, parse_text, uuid_text
from tests.facts import raises

MAGIC = bytes.fromhex("66339336")
UUID = uuid_text(build_uuid(b"\x01abcde", 123 << 30, 1))
RAW_UUID = parse_text(UUID)


class Word(Message):
    word: str = ""
    more: list[int] = msgspec.field(default_factory=list)


def decode_all(framing: Framing[Any], buffer: bytes, base: int = 0) -> tuple[list[Any], bytes]:
    """Return every message with its place, and the malformed frames between them; and what is left."""
    found, at = [], 0
    while True:
        try:
            frames = framing.decode(buffer[at:], base + at)
        except MalformedMessage as error:
            raw = buffer[error.begin - base : error.end - base]
            reason = error.reason.split(":")[0] if error.raw == raw else "other bytes"
            found.append((error.begin, error.end, reason))
            at = error.end - base
            continue
        if not frames.messages:
            return found, buffer[at:]
        found += list(frames)
        at += frames.consumed
        if frames.uuids:
            assert len(frames.uuids) == 16 * len(frames)


# JSON lines.


def json_framing() -> Framing[Any]:
    return framing_of(CONTENT_JSON_LINES, Word)


def test_json_lines_are_decoded_up_to_the_last_newline() -> None:
    buffer = b'{"word":"a"}\n{"uuid":"%s","word":"b"}\n' % UUID.encode()
    size = len(buffer)
    frames = json_framing().decode(buffer + b'{"wor', 1000)
    assert list(frames) == [(1000, 1013, Word("a")), (1013, 1000 + size, Word("b", uuid=UUID))]
    assert frames.uuids == NIL_UUID + RAW_UUID
    assert (frames.consumed, frames.stopped) == (size, False)
    assert json_framing().decode(b'{"wor', 0).messages == []


line = st.sampled_from(
    [
        b'{"word":"a"}',
        b'{"word":"b","more":[1,2]}',
        b'{"uuid":"%s"}' % UUID.encode(),
        b' {"word":"spaces"} ',
        b'{"word":"crlf"}\r',
        b'{"word":"}{"}',
        b'{"word":"x"} {"word":"y"}',
        b'{"word":"x"}{"word":"y"}',
        b'{"word":',
        b'"z"}',
        b'{"more":[1',
        b",2]}",
        b"{",
        b"}",
        b"[1]",
        b"",
        b" ",
        b"null",
        b'{"word":5}',
        b'{"uuid":"not one"}',
        b'{"word":"\xff"}',
        b'{"unknown":{"a":[{"b":null}]}}',
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(line, max_size=12), st.sampled_from([b"", b'{"word"', b"{}"]))
# Each line begins as an object.
@example([b'{"unknown":', b"{}}", b'{"word":"x"}{"word":"y"}'], b"")
# Each line ends as an object.
@example([b'{"unknown":{}', b"}", b'{"word":"x"}{"word":"y"}'], b"")
def test_each_line_is_one_message_whatever_is_on_the_others(
    lines: list[bytes], rest: bytes
) -> None:
    """The batch path never merges, splits or drops lines."""
    expected, at = [], 50
    single = json_framing()
    for one in lines:
        end = at + len(one) + 1
        try:
            message = single.codec.decode(one)
            single.codec.uuids_of([message])
            expected.append((at, end, message))
        except Exception:  # noqa: BLE001 - whatever the parser says
            expected.append((at, end, "line is not a message"))
        at = end
    buffer = b"".join(one + b"\n" for one in lines) + rest
    assert decode_all(json_framing(), buffer, 50) == (expected, rest)


class Strict(Message):
    word: str


ACKNOWLEDGEMENT = (
    b'{"uuid":"%s"}' % uuid_text(build_uuid(b"\x01abcde", 124 << 30, ACK_TXN)).encode()
)
STRICT_LINES = (
    b'{"uuid":"%s","word":"a word of some length"}' % UUID.encode(),
    b'{"word":"b"}',
    ACKNOWLEDGEMENT,
    b'{"uuid":"no UUID"}',
    b'{"word":1}',
    b'{"word":"c"}{"word":"d"}',
    b"",
    b"[",
)


@settings(deadline=None)
@given(st.data())
def test_lines_that_are_no_messages_change_none_of_the_others(data: st.DataObject) -> None:
    """However many there are, and wherever: as if each line was decoded alone."""
    likely = st.sampled_from(STRICT_LINES[:3])
    lines = data.draw(st.lists(likely, max_size=200)) + data.draw(
        st.lists(st.one_of(likely, st.sampled_from(STRICT_LINES)), max_size=30)
    )
    framing = framing_of(CONTENT_JSON_LINES, Strict)
    expected, at = [], 0
    for line in lines:
        found, left = decode_all(framing, line + b"\n", at)
        assert not left
        expected += found
        at += len(line) + 1
    found, left = decode_all(framing, b"".join(line + b"\n" for line in lines))
    assert not left
    assert list(map(repr, found)) == list(map(repr, expected))


def test_an_acknowledgement_does_not_slow_down_its_batch() -> None:
    """A type with required fields still decodes most lines together."""
    framing = framing_of(CONTENT_JSON_LINES, Strict)
    lines = [*[STRICT_LINES[0]] * 500, ACKNOWLEDGEMENT, *[STRICT_LINES[0]] * 500]
    alone, decode = [], framing.codec.decode

    def counted(payload: bytes) -> Any:
        alone.append(payload)
        return decode(payload)

    framing.codec.decode = counted  # type: ignore[method-assign]
    frames = framing.decode(b"".join(line + b"\n" for line in lines), 0)
    assert len(frames) == 1001
    assert len(alone) < 20


def test_json_is_one_line_with_a_newline() -> None:
    framing = json_framing()
    message = Word("line\nbreak\u2028 <&>")
    assert framing.encode(message).count(b"\n") == 1
    assert framing.decode(framing.encode(message), 0).messages == [message]


def test_deeply_nested_json_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        json_framing().decode(b'{"x":' + b"[" * 100_000 + b"\n", 0)


def test_what_cannot_be_encoded_is_refused() -> None:
    with raises(Invalid, says="Word"):
        json_framing().encode(Word(word=object()))  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="newline"):
        framing_of(CONTENT_JSON_LINES, bytes).encode(b"two\nlines")


def test_a_torn_line_is_truncated() -> None:
    framing = json_framing()
    framing.finish(b"", 7)
    with pytest.raises(TruncatedFrame) as caught:
        framing.finish(b'{"wo', 7)
    assert (caught.value.begin, caught.value.end, caught.value.raw) == (7, 11, b'{"wo')


def test_malformed_messages_say_where_and_what() -> None:
    with pytest.raises(MalformedMessage) as caught:
        json_framing().decode(b'{"word":5}\n{}\n', 100)
    error = caught.value.of("a/journal")
    assert (error.journal, error.begin, error.end, error.raw) == (
        "a/journal",
        100,
        111,
        b'{"word":5}\n',
    )
    assert "Expected `str`" in str(error)
    assert "begin=100" in str(error)
    assert error.hint


# Fixed frames.


def fixed_framing(**options: Any) -> Framing[Any]:
    return framing_of(CONTENT_PROTO_FIXED, bytes, **options)


def test_fixed_frames_have_magic_and_little_endian_length() -> None:
    assert fixed_framing().encode(b"hello") == MAGIC + b"\x05\0\0\0hello"
    assert fixed_framing().frame(b"") == MAGIC + bytes(4)


@given(st.lists(st.binary(max_size=9), max_size=4), st.integers(0, 60))
def test_fixed_frames_may_be_cut_anywhere(payloads: list[bytes], cut: int) -> None:
    framing = fixed_framing()
    buffer = b"".join(map(framing.encode, payloads))
    first, rest = decode_all(framing, buffer[:cut], 10)
    second, left = decode_all(framing, rest + buffer[cut:], 10 + len(buffer[:cut]) - len(rest))
    assert left == b""
    assert [message for _, _, message in first + second] == payloads
    if rest not in (b"", b"\n"):
        with pytest.raises(TruncatedFrame):
            framing.finish(rest, 10)


def test_a_lone_newline_at_the_end_is_none_of_a_frame() -> None:
    fixed_framing().finish(b"\n", 5)
    fixed_framing().finish(b"", 5)
    for rest in (b"\n\n", b"f", MAGIC + b"\x05\0\0\0hel"):
        with pytest.raises(TruncatedFrame):
            fixed_framing().finish(rest, 5)


def test_out_of_step_frames_are_found_again() -> None:
    framing = fixed_framing()
    good = framing.encode(b"good")
    # Case: junk before, between and after frames, up to the next magic.
    found, rest = decode_all(framing, good + b"junk junk" + good + b"trailing junk" + MAGIC[:3])
    assert found == [
        (0, 12, b"good"),
        (12, 21, "no frame begins at this offset"),
        (21, 33, b"good"),
        (33, 46, "no frame begins at this offset"),
    ]
    assert rest == MAGIC[:3]
    # Case: less than a header is not judged.
    assert decode_all(framing, b"jun") == ([], b"jun")


def test_lengths_that_are_never_written_are_junk() -> None:
    framing = fixed_framing(frame_bytes_max=1000)
    good = framing.encode(b"good")
    huge = MAGIC + struct.pack("<I", 1001)
    assert decode_all(framing, huge + good)[0] == [
        (0, 8, "no frame begins at this offset"),
        (8, 20, b"good"),
    ]


# CSV.


def csv_framing() -> Framing[Any]:
    return framing_of(CONTENT_CSV, CSVRecord)


def row(text: str) -> bytes:
    return (UUID + "," + text).encode()


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a,b\n", ["a", "b"]),
        ("a,b\r\n", ["a", "b"]),
        (",\n", ["", ""]),
        ('"a","b"\n', ["a", "b"]),
        ('"a","b"\r\n', ["a", "b"]),
        ('"a,b",c\n', ["a,b", "c"]),
        ('"a""b",""""\n', ['a"b', '"']),
        ('"a\nb",c\n', ["a\nb", "c"]),
        ('"a\r\nb",c\n', ["a\nb", "c"]),
        ('"a\rb",c\rd\n', ["a\rb", "c\rd"]),
        (" a, b \n", [" a", " b "]),
        ('"",""\n', ["", ""]),
        ("\u00fc,\udcff\n", ["\u00fc", "\udcff"]),
    ],
)
def test_csv_records_as_go_reads_them(text: str, fields: list[str]) -> None:
    buffer = (UUID + "," + text).encode("utf-8", "surrogateescape")
    framing = csv_framing()
    frames = framing.decode(buffer * 2, 10)
    assert frames.messages == [CSVRecord([UUID, *fields])] * 2
    assert (frames.begins, frames.ends) == (
        [10, 10 + len(buffer)],
        [10 + len(buffer), 10 + 2 * len(buffer)],
    )
    assert frames.uuids == RAW_UUID * 2
    # Case: and what was read is written so that it is read again.
    again = framing.encode(frames.messages[0])
    assert csv_framing().decode(again, 0).messages == frames.messages[:1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('a"b,c\n', 'bare "'),
        ('a"",c\n', 'bare "'),
        ('"a"b,c\n', 'extraneous or missing "'),
        ('"a" ,c\n', 'extraneous or missing "'),
        ("a\n", "wrong number of fields"),
        ("a,b,c\n", "wrong number of fields"),
    ],
)
def test_broken_csv_records_are_skipped_by_the_line(text: str, reason: str) -> None:
    framing = csv_framing()
    good, bad = row("x,y\n"), row(text)
    buffer = good + bad + good
    frames = framing.decode(buffer, 0)
    assert (len(frames), frames.stopped) == (1, True)
    with pytest.raises(MalformedMessage, match=reason) as caught:
        framing.decode(buffer[len(good) :], len(good))
    assert (caught.value.begin, caught.value.end) == (len(good), len(good) + len(bad))
    assert framing.decode(good, 0).messages == [CSVRecord([UUID, "x", "y"])]


def test_the_first_field_must_be_a_uuid() -> None:
    for text in ("not one,x\n", ",x\n", UUID[:-1] + ",x\n"):
        with raises(MalformedMessage, "begin", says="uuid: "):
            csv_framing().decode(text.encode(), 0)


def test_blank_lines_belong_to_the_record_behind_them() -> None:
    good = row("x\n")
    buffer = b"\n\r\n" + good + b"\n" + good + b"\n\n"
    frames = csv_framing().decode(buffer, 0)
    assert frames.begins == [0, 3 + len(good)]
    assert frames.ends == [3 + len(good), 4 + 2 * len(good)]
    csv_framing().finish(b"\n\r\n", 0)


def test_the_first_record_of_a_reader_fixes_the_width() -> None:
    framing = csv_framing()
    assert len(framing.decode(row("a,b\n"), 0)) == 1
    with raises(MalformedMessage, "begin", says="(2; expected 3)"):
        framing.decode(row("a\n"), 0)
    assert len(csv_framing().decode(row("a\n"), 0)) == 1


field_text = st.text(st.sampled_from('ab,"\n\r \u00fc\\.'), max_size=5)


@settings(max_examples=250)
@given(st.lists(st.lists(field_text, min_size=2, max_size=2), min_size=1, max_size=5), st.data())
def test_csv_records_may_be_cut_anywhere(rows: list[list[str]], data: st.DataObject) -> None:
    records = [CSVRecord([UUID, *fields]) for fields in rows]
    # A carriage return before a newline is lost in Go's reader: we refuse what it writes.
    buffer = "".join(map(format_record, records)).encode()
    cut = data.draw(st.integers(0, len(buffer)))
    framing = csv_framing()
    first, rest = decode_all(framing, buffer[:cut])
    second, left = decode_all(framing, rest + buffer[cut:], len(buffer[:cut]) - len(rest))
    assert left == b""
    assert [message for _, _, message in first + second] == [
        CSVRecord(text.replace("\r\n", "\n") for text in record) for record in records
    ]


@given(st.lists(field_text | st.sampled_from(["\r", "a\r", "\r\n"]), min_size=1, max_size=4))
def test_csv_records_read_back_or_are_refused(fields: list[str]) -> None:
    record = CSVRecord([UUID, *fields])
    lost = [n for n, field in enumerate(fields, 1) if "\r\n" in field]
    if lost:
        with raises(InvalidValue, path=f"message[{lost[0]}]"):
            csv_framing().encode(record)
        return
    found, rest = decode_all(csv_framing(), csv_framing().encode(record))
    assert ([message for _, _, message in found], rest) == ([record], b"")


def test_a_quote_at_the_end_of_what_was_read_may_be_half_of_a_doubled_one() -> None:
    record = (UUID + ',"""\n"\n').encode()
    for cut in range(len(UUID) + 1, len(record)):
        assert decode_all(csv_framing(), record[:cut]) == ([], record[:cut])
    assert csv_framing().decode(record, 0).messages == [CSVRecord([UUID, '"\n'])]


def test_fields_are_quoted_as_go_quotes_them() -> None:
    assert format_record(["", "a b", " a", "a,b", 'a"b', "a\nb", "a\rb", "\\.", "\\.x"]) == (
        ',a b," a","a,b","a""b","a\nb","a\rb","\\.",\\.x\n'
    )


def test_acknowledgements_of_rows_have_their_width() -> None:
    framing = csv_framing()
    ack = framing.frame(framing.codec.acknowledgement(CSVRecord(["", "x", "y"]), "j")(RAW_UUID))
    assert ack == UUID.encode() + b",,\n"
    assert framing.decode(ack + row("x,y\n"), 0).messages[0] == CSVRecord([UUID, "", ""])


class Ride(CSVRecord):
    """A type over rows."""

    @property
    def bike(self) -> int:
        return int(self[1])

    @classmethod
    def from_csv(cls, fields: Any) -> Any:
        if not fields[1].isdigit():
            raise ValueError("bike must be a number")
        return cls(fields)


def test_types_may_read_rows_their_way() -> None:
    framing = framing_of(CONTENT_CSV, Ride)
    frames = framing.decode(row("17\n") + row("x\n"), 0)
    assert [ride.bike for ride in frames.messages] == [17]
    with pytest.raises(MalformedMessage, match="bike must be a number"):
        framing.decode(row("x\n"), 0)
    with raises(Invalid, says="Ride"):
        framing.encode(Ride())
