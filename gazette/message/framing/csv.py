"""CSV framing, by the rules of Go's encoding/csv. Stage 11 of the byte path. Pure.

These rules differ from those of other readers of CSV:

  * A quote is legal only around a whole field, and is doubled within it.
  * A line break within quotes belongs to the field, and loses its carriage return.
  * Empty lines are skipped, and count as part of the record that follows.
  * Every record has as many fields as the first record of the reader.

A last line without a newline is incomplete: in a journal, later bytes continue its record.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

from gazette.errors import Invalid, InvalidValue
from gazette.labels import CONTENT_CSV
from gazette.lazy_numpy import numpy as np
from gazette.message.codec import CODEC_ERRORS, AckEncoder, BytesCodec, MessageCodec
from gazette.message.framing.frames import FRAME_BYTES_MAX, Frames, Framing, MalformedMessage
from gazette.message.uuid import TextForm, parse_text, uuid_text
from gazette.message.value_parts import shown
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")

_NEWLINE: Final = 0x0A
# The quantifier is possessive: so the first quote of a doubled quote never counts as the closing quote.
_QUOTED = re.compile(rb'"((?:[^"]++|"")*+)"')
_PLAIN = re.compile(rb"[^,\n]*")
_BLANK_LINES = re.compile(rb"(?:\r?\n)*")
_NEEDS_QUOTES = re.compile(r'[,"\r\n]|^\s|^\\\.$')


class Record(NamedTuple):
    """A record, and its end in the buffer. ``error`` is empty, or says why the record is malformed."""

    fields: list[str]
    end: int
    error: str = ""


def parse_record(buffer: bytes, begin: int) -> Record | None:
    """Return the record at ``begin``, with the blank lines before it. Return None for an incomplete
    record."""
    blank = _BLANK_LINES.match(buffer, begin)
    assert blank is not None
    pos = blank.end()
    fields: list[str] = []
    while True:
        if buffer[pos : pos + 1] == b'"':
            match = _QUOTED.match(buffer, pos)
            if match is None:
                return None
            text, pos = match[1].replace(b'""', b'"').replace(b"\r\n", b"\n"), match.end()
            if buffer[pos : pos + 1] not in (b",", b"\n") and buffer[pos : pos + 2] != b"\r\n":
                if pos == len(buffer) or buffer[pos:] == b"\r":
                    return None
                return _broken(buffer, pos, 'extraneous or missing " in quoted field')
        else:
            match = _PLAIN.match(buffer, pos)
            assert match is not None
            text, pos = match[0], match.end()
            if pos == len(buffer):
                return None
            if b'"' in text:
                return _broken(buffer, pos, 'bare " in non-quoted field')
            if buffer[pos] == _NEWLINE and text[-1:] == b"\r":
                text = text[:-1]
        fields.append(text.decode("utf-8", "surrogateescape"))
        if buffer[pos] != ord(","):
            return Record(fields, buffer.index(b"\n", pos) + 1)
        pos += 1


def _broken(buffer: bytes, at: int, reason: str) -> Record | None:
    """Return a malformed record, which ends at the next newline. Return None if no newline has come yet."""
    newline = buffer.find(b"\n", at)
    return None if newline < 0 else Record([], newline + 1, reason)


def format_record(fields: Sequence[str]) -> str:
    """Return the line of a record, with its newline."""
    return (
        ",".join(
            [
                '"' + text.replace('"', '""') + '"' if _NEEDS_QUOTES.search(text) else text
                for text in fields
            ]
        )
        + "\n"
    )


class CSVCodec(MessageCodec[M]):
    """Codec for rows of types with ``from_csv(fields)`` and ``to_csv()``, such as `CSVRecord`."""

    not_free_hint = (
        "The first field of a row is for its UUID. Leave it empty, and put your own behind it."
    )

    def __init__(self, message_type: Any) -> None:
        super().__init__(message_type, TextForm())

    def decode_fields(self, fields: list[str]) -> M:
        return self.message_type.from_csv(fields)  # type: ignore[no-any-return]

    def encode_fields(self, message: M) -> list[str]:
        fields: list[str] = message.to_csv()  # type: ignore[attr-defined]
        if not fields:
            raise Invalid("a CSV record must have at least one field, the UUID")
        return fields

    def decode(self, payload: bytes) -> M:
        record = parse_record(payload + b"\n", 0)
        if record is None or record.error or record.end != len(payload) + 1:
            raise Invalid("not one record" if record is None else record.error or "not one record")
        return self.decode_fields(record.fields)

    def encode(self, message: M) -> bytes:
        fields = self.encode_fields(message)
        try:
            line = format_record(fields)[:-1]
            return _encoded(line)
        except (TypeError, ValueError) as error:
            raise _unwritable(fields, error) from error

    def acknowledgement(self, message: M, journal: JournalName) -> AckEncoder:
        if hasattr(message, "new_acknowledgement"):
            return super().acknowledgement(message, journal)
        # Readers refuse a record whose number of fields differs from the records around it.
        commas = "," * (len(self.encode_fields(message)) - 1)
        return lambda uuid: (uuid_text(uuid) + commas).encode()

    def _new_acknowledgement(self, message: M) -> M:
        raise AssertionError("acknowledgement is overridden")


def _encoded(text: str) -> bytes:
    """Return a text as UTF-8. Raise ``ValueError`` if it would not read back equal."""
    if "\r\n" in text:
        raise ValueError("has a line break of two characters, which would read back as one")
    try:
        return text.encode()
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogateescape")  # Decoding keeps bytes that are not UTF-8.
        if data.decode("utf-8", "surrogateescape") != text:
            raise ValueError("would read back as another text") from None
        return data


def _unwritable(fields: Sequence[Any], error: Exception) -> InvalidValue:
    """Return the error of a row that would not read back equal, with the path of the field at fault."""
    for number, field in enumerate(fields):
        path = f"message[{number}]"
        if not isinstance(field, str):
            reason = f"is of type {type(field).__name__}, and a field of CSV is text"
            return InvalidValue(reason, path=path, hint="Write it as text.")
        try:
            _encoded(field)
        except ValueError as cause:
            return InvalidValue(f"{shown(field)} {cause}", path=path, hint="Correct the text.")
    return InvalidValue(f"cannot be written: {error}", path="message", hint="Correct its to_csv().")


class CSVFraming(Framing[M]):
    """Records of comma-separated values. The first value is the UUID."""

    content_type = CONTENT_CSV

    def __init__(self, codec: MessageCodec[M], frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        super().__init__(codec, frame_bytes_max)
        self._width: int | None = None
        """Number of fields of each record; None before the first record."""
        self._inside_quotes = False
        """True if the pending record ends inside quotes: only bytes with a quote can complete it."""

    def decode(self, buffer: bytes, base_offset: Offset) -> Frames[M]:
        stop = buffer.rfind(b"\n") + 1
        if not stop:
            return Frames()
        lines = buffer if stop == len(buffer) else buffer[:stop]
        frames = self._decode_plain(lines, base_offset) or self._decode_each(lines, base_offset)
        # Left-over lines belong to a quoted field whose closing quote has not been read yet.
        left_over = not frames.stopped and frames.consumed < stop
        self._inside_quotes = left_over and buffer.find(b'"', stop) < 0
        return frames

    def _decode_plain(self, lines: bytes, base_offset: Offset) -> Frames[M] | None:
        """Decode all lines in one step. Return None if a record has quotes, carriage returns or another
        width, or does not decode."""
        codec = self.codec
        if not isinstance(codec, CSVCodec) or b'"' in lines or b"\r" in lines:
            return None
        text = lines.decode("utf-8", "surrogateescape")
        rows = [line.split(",") for line in text[:-1].split("\n")]
        width = self._width or len(rows[0])
        if set(map(len, rows)) != {width}:
            return None
        try:
            messages = list(map(codec.decode_fields, rows))
            uuids = b"".join(map(parse_text, [row[0] for row in rows]))
        except CODEC_ERRORS:
            return None
        self._width = width
        ends: list[int] = (
            np.flatnonzero(np.frombuffer(lines, np.uint8) == _NEWLINE) + (base_offset + 1)
        ).tolist()
        return Frames([base_offset, *ends[:-1]], ends, messages, uuids, len(lines))

    def _decode_each(self, lines: bytes, base_offset: Offset) -> Frames[M]:
        """Decode record by record, as `decode` does. Stop before an incomplete or malformed record."""
        frames: Frames[M] = Frames()
        uuids: list[bytes] = []
        while (record := parse_record(lines, begin := frames.consumed)) is not None:
            try:
                message, uuid = self._decode_one(record, lines[begin : record.end])
            except CODEC_ERRORS as error:
                frames.stopped = True
                if not frames.messages:
                    raise MalformedMessage(
                        f"record is not a message: {error}",
                        begin=base_offset + begin,
                        end=base_offset + record.end,
                        raw=lines[begin : record.end],
                    ) from error
                break
            frames.begins.append(base_offset + begin)
            frames.ends.append(base_offset + record.end)
            frames.messages.append(message)
            uuids.append(uuid)
            frames.consumed = record.end
        frames.uuids = b"".join(uuids)
        return frames

    def _decode_one(self, record: Record, raw: bytes) -> tuple[M, bytes]:
        """Return the message of a record, and its UUID. Raise one of `CODEC_ERRORS` if it is malformed."""
        if record.error:
            raise Invalid(record.error)
        codec = self.codec
        if not isinstance(codec, CSVCodec):  # The type is bytes, or supplies its own codec.
            return codec.decode(raw.removesuffix(b"\n")), b""
        width = self._width or len(record.fields)
        if len(record.fields) != width:
            raise Invalid(f"wrong number of fields ({len(record.fields)}; expected {width})")
        uuid = parse_text(record.fields[0])
        message: M = codec.decode_fields(record.fields)
        self._width = width  # Set it only now: a record that does not decode must not set it.
        return message, uuid

    def may_complete(self, pending: bytes, size: int, data: bytes) -> bool:
        return b'"' in data if self._inside_quotes else b"\n" in data

    def finish(self, rest: bytes, offset: Offset) -> None:
        if rest.strip(b"\r\n"):
            super().finish(rest, offset)

    def encode_into(self, message: M, buffer: bytearray) -> None:
        try:
            payload = self.codec.encode(message)
        except CODEC_ERRORS as error:
            raise self._unencodable(error, message) from error
        buffer += payload
        buffer.append(_NEWLINE)

    def frame(self, payload: bytes) -> bytes:
        return payload + b"\n"


def csv_codec(message_type: Any, place: str | None = "") -> MessageCodec[Any]:
    """Return the CSV codec of a type. Raise `Invalid` if the type has no CSV methods, or if a place of the
    UUID is given."""
    if message_type is bytes:
        return BytesCodec()
    if place:
        raise Invalid(
            f"rows of CSV have their UUID in the first field, and not in {place}",
            path="uuid",
            hint="Leave it out.",
        )
    if hasattr(message_type, "from_csv") and hasattr(message_type, "to_csv"):
        return CSVCodec(message_type)
    raise Invalid(
        f"{getattr(message_type, '__name__', message_type)} cannot be read from CSV",
        hint="Use gazette.CSVRecord, or give the type from_csv(fields) and to_csv().",
    )
