"""Decodes messages of a journal to columns: their offsets, and the parts of their UUIDs. Pure.

Reading is fast if no message becomes an object. A `ColumnDecoder` finds frames and UUIDs in whole buffers.
For a buffer that it does not understand, it uses the `Framing`: the specification, with the same result.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gazette import labels
from gazette.errors import Invalid
from gazette.history import lenient_json
from gazette.history.json_lines import Field, FoundFields, LineScanner
from gazette.history.uuid_codec import UuidCodec
from gazette.history.visible_uuids import visible_uuid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.codec import CODEC_ERRORS
from gazette.message.foreign_uuids import warn_of_foreign_uuids
from gazette.message.framing.frames import Frames, Framing, MalformedMessage, hint_of
from gazette.message.framing.framing import JSONLinesFraming, framing_of
from gazette.message.message import CSVRecord
from gazette.message.uuid import (
    ACK_TXN,
    FOREIGN_UUID,
    NIL_UUID,
    UUID_BYTES,
    UuidArrays,
    parse_arrays,
    parse_uuid,
    uuid_text,
)
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol.ids import JournalName, Offset

CONTENT_BYTES: Final = "application/octet-stream"
"""Content type for the raw bytes of a journal, in chunks, without messages."""

_ANY_FOREIGN: Final = b"\xff" * UUID_BYTES

Array64 = npt.NDArray[np.int64]
Malformed = Literal["fail", "skip", "null"]
"""Treatment of a malformed frame: raise an error, skip it, or return a row of nulls."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Encoding of the messages of a journal, and the field that holds their UUID.

    ``uuid_field`` is the place of the UUID, with dots for nested fields (``_meta.uuid``). In a request it may
    be empty: then the label of a journal says the place, or else it is ``uuid``. ``message`` names the class
    of protobuf messages as ``module:Class``. Without a class, the messages are read as if they had no UUIDs.
    ``malformed`` is the treatment of malformed frames, and of messages that do not fit their columns. With
    ``null``, a malformed frame is a message with the UUID that the frame shows. The message has no UUID if
    the frame shows no UUID, or the UUID of an acknowledgement.
    """

    content_type: str = CONTENT_JSON_LINES
    uuid_field: str = "uuid"
    message: str = ""
    malformed: Malformed = "fail"

    @property
    def place(self) -> str:
        """Place of the UUID for a framing; empty for ``uuid``, which types may have under another name."""
        return "" if self.uuid_field == DEFAULT_PLACE else self.uuid_field

    def message_type(self) -> Any:
        """Import the class of ``message``. Raise `Invalid` if it cannot be imported."""
        module, colon, name = self.message.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for attribute in name.split("."):
                value = getattr(value, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise Invalid(
                f"cannot import the message class {self.message!r}: {error}",
                path="message",
                hint="Give module:Class of a generated protobuf class that every worker can import"
                + ("." if colon else "; the colon is missing."),
            ) from error
        return value


def require_uuids(journal: JournalName, shape: MessageFormat) -> None:
    """Raise `Invalid` if messages of that format cannot be read committed: their UUIDs are unknown."""
    if shape.content_type == CONTENT_PROTO_FIXED and not shape.message:
        raise Invalid(
            f"the UUIDs of protobuf messages cannot be read without their class ({journal})",
            path="message",
            hint="Give the class as module:Class. Or read uncommitted, which returns every "
            "message as it was written.",
        )
    if shape.content_type == CONTENT_BYTES:
        raise Invalid(
            f"raw bytes cannot be read committed: they hold no UUIDs ({journal})",
            path="isolation",
            hint="Read uncommitted, which returns all bytes as they were written.",
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Messages of one journal, in its order: their offsets and UUIDs. All arrays have the same length."""

    begins: Array64
    ends: Array64
    uuids: UuidArrays

    def __len__(self) -> int:
        return len(self.begins)

    def part(self, first: int, last: int) -> Columns:
        """Return the messages from position ``first`` to before ``last``."""
        return self.at(slice(first, last))

    def at(self, rows: Any) -> Columns:
        """Return the messages at some positions, or those for which a mask is true."""
        uuids = UuidArrays(*(array[rows] for array in self.uuids))
        return Columns(self.begins[rows], self.ends[rows], uuids)


class Decoded(NamedTuple):
    """Complete frames of a buffer. ``consumed`` is the length of these frames and of skipped frames.

    ``fields`` has the wanted fields. If it is None, the caller parses the fields.
    """

    columns: Columns
    consumed: int
    fields: FoundFields | None = None


class MalformedArray(MalformedMessage):
    """A line is a JSON array. Spark would make a row of each item. The array is an error even if malformed
    messages become null."""

    default_hint = (
        "Publish each item as a message. Or read `value=text`, and take the items from the text. "
        "`mode=DROPMALFORMED` leaves such lines out."
    )

    def __init__(self, journal: JournalName, error: MalformedMessage) -> None:
        super().__init__(
            "line is an array of JSON, and not one message",
            begin=error.begin,
            end=error.end,
            raw=error.raw,
            journal=journal,
        )


class ColumnDecoder:
    """Decoder of one journal's bytes. For one thread."""

    def __init__(
        self, journal: JournalName, shape: MessageFormat, fields: Sequence[Field] = ()
    ) -> None:
        """Make a decoder that also looks for the JSON fields ``fields``. Raise `Invalid` for an unknown
        content type or message class."""
        self.journal = journal
        self.shape = shape
        self.clean = True
        """False once a malformed frame was skipped, or counted as a message."""
        self._framing: Framing[Any] | None = None
        if shape.content_type != CONTENT_BYTES:
            self._framing = _framing_of(shape)
        self._scanner: LineScanner | None = None
        if shape.content_type == CONTENT_JSON_LINES:
            self._scanner = LineScanner(shape.uuid_field, fields)

    def decode(self, buffer: bytes, base: Offset) -> Decoded:
        """Decode the complete frames of ``buffer``, whose first byte is at offset ``base``.

        Raise `MalformedMessage` at a malformed frame, if ``shape.malformed`` is ``fail``. Raise
        `MalformedArray` at an array of JSON, unless malformed frames are skipped.
        """
        decoded = self._decode(buffer, base)
        if FOREIGN_UUID in decoded.columns.uuids.flags:
            warn_of_foreign_uuids(self.journal)
        return decoded

    def _decode(self, buffer: bytes, base: Offset) -> Decoded:
        if self._framing is None:
            return _whole(buffer, base)
        if self._scanner is not None:
            decoded = self._scan(self._scanner, self._framing, buffer, base)
            if decoded is not None:
                return decoded
        return self._decode_framed(self._framing, buffer, base)

    def finish(self, rest: bytes, offset: Offset) -> None:
        """Raise `TruncatedFrame` if the bytes after the last frame (``rest``) are a part of a message."""
        if self._framing is not None:
            self._framing.finish(rest, offset)

    def _scan(
        self, scanner: LineScanner, framing: Framing[Any], buffer: bytes, base: Offset
    ) -> Decoded | None:
        """Decode a buffer by the scanner. Return None if it declines the buffer."""
        stop = buffer.rfind(b"\n") + 1
        scanned = scanner.scan(buffer, stop) if stop else None
        if scanned is None:
            return None
        begins = scanned.begins + base
        columns = Columns(begins, np.append(begins[1:], base + stop), scanned.uuids)
        fields, is_kept = scanned.fields, np.ones(len(columns), np.bool_)
        # Decode each declined line by the specification: it has one message, or is skipped.
        for row in fields.declined.tolist():
            begin, end = int(columns.begins[row]), int(columns.ends[row])
            line = self._decode_framed(framing, buffer[begin - base : end - base], begin).columns
            is_kept[row] = len(line) == 1
            for array, values in zip(columns.uuids, line.uuids, strict=True):
                array[row] = values[0] if is_kept[row] else 0
        if not is_kept.all():
            columns, fields = columns.at(is_kept), fields._replace(kept=is_kept)
        return Decoded(columns, stop, fields)

    def _decode_framed(self, framing: Framing[Any], buffer: bytes, base: Offset) -> Decoded:
        """Decode a buffer by its `Framing`. ``shape.malformed`` decides the fate of a malformed frame."""
        begins: list[int] = []
        ends: list[int] = []
        uuids: list[bytes] = []
        position = 0
        while position < len(buffer):
            remaining = buffer[position:] if position else buffer
            try:
                frames = framing.decode(remaining, base + position)
            except MalformedMessage as error:
                uuid = self._uuid_of_malformed(framing, error)
                self.clean = False
                if self.shape.malformed == "null":
                    begins.append(error.begin)
                    ends.append(error.end)
                    uuids.append(uuid)
                position = error.end - base
                continue
            position += frames.consumed
            if None in frames.messages:
                frames = _without_blanks(frames)
            begins += frames.begins
            ends += frames.ends
            uuids.append(frames.uuids or NIL_UUID * len(frames))
            if not frames.stopped:
                break  # An incomplete frame remains. (After a stop, decode the malformed frame.)
        return Decoded(_columns(begins, ends, b"".join(uuids)), position)

    def _uuid_of_malformed(self, framing: Framing[Any], error: MalformedMessage) -> bytes:
        """Return the UUID that a malformed frame shows; the nil UUID if it shows none, or is skipped.

        Raise ``error``, with the journal, if malformed frames fail. Raise `MalformedArray` for an array that
        is not skipped.
        """
        if self.shape.malformed == "skip":
            return NIL_UUID
        codec = framing.codec
        if isinstance(codec, UuidCodec) and lenient_json.is_array(error.raw):
            raise MalformedArray(self.journal, error) from error.__cause__
        if self.shape.malformed == "fail":
            raise error.of(self.journal) from error.__cause__
        # If the value in the place of the UUID is no UUID, a foreign UUID keeps it for the column ``uuid``.
        # `hint_of` returns a hint only for errors about the UUID.
        about_uuid = hint_of(error.__cause__) is not None
        uuid = _ANY_FOREIGN if about_uuid else visible_uuid(codec, error.raw)
        # A malformed frame acknowledges nothing: readers do not commit transactions by such a frame.
        return NIL_UUID if parse_uuid(uuid).flags == ACK_TXN else uuid


def _without_blanks(frames: Frames[Any]) -> Frames[Any]:
    """Return the frames without the frames of blank lines, which are no messages."""
    kept = [n for n, message in enumerate(frames.messages) if message is not None]
    uuids = [frames.uuids[n * UUID_BYTES : (n + 1) * UUID_BYTES] for n in kept]
    return replace(
        frames,
        begins=[frames.begins[n] for n in kept],
        ends=[frames.ends[n] for n in kept],
        messages=[frames.messages[n] for n in kept],
        uuids=b"".join(uuids),
    )


def _columns(begins: list[int], ends: list[int], uuids: bytes) -> Columns:
    return Columns(
        np.array(begins, np.int64),
        np.array(ends, np.int64),
        parse_arrays(uuids),
    )


def _whole(buffer: bytes, base: Offset) -> Decoded:
    """Return a buffer of raw bytes as one message without a UUID."""
    if not buffer:
        return Decoded(_columns([], [], b""), 0)
    return Decoded(_columns([base], [base + len(buffer)], bytes(UUID_BYTES)), len(buffer))


def _framing_of(shape: MessageFormat) -> Framing[Any]:
    """Return the framing of a format. Raise `Invalid` for an unknown content type or message class."""
    match shape.content_type:
        case labels.CONTENT_CSV:
            return framing_of(CONTENT_CSV, CSVRecord)
        case labels.CONTENT_PROTO_FIXED:
            message_type = shape.message_type() if shape.message else bytes
            return framing_of(CONTENT_PROTO_FIXED, message_type, place=shape.place)
        case labels.CONTENT_JSON_LINES:
            return JSONLinesFraming(UuidCodec(shape.uuid_field))
    # For an unknown content type, this call raises the error.
    return framing_of(shape.content_type, bytes)


def uuid_text_reader(shape: MessageFormat) -> Callable[[bytes], str | None]:
    """Return a function from a payload to the exact text in the place of its UUID.

    The function returns None if there is no text, or if the payload cannot be read.
    """
    codec = _framing_of(shape).codec

    def read(payload: bytes) -> str | None:
        try:
            message = codec.decode(payload)
            if not isinstance(codec, UuidCodec):  # CSV, or protobuf.
                return message[0] if isinstance(message, CSVRecord) else _bytes_text(message.uuid)
            value = codec.value_of(message)
            return value if isinstance(value, str | None) else msgspec.json.encode(value).decode()
        except CODEC_ERRORS:
            return None

    return read


def _bytes_text(uuid: bytes) -> str:
    return uuid_text(uuid) if len(uuid) == UUID_BYTES else uuid.hex()


def uuid_bytes(uuids: UuidArrays) -> bytes:
    """Return the bytes of all UUIDs in one piece: the inverse of `parse_arrays`.

    For nil and foreign UUIDs, the result differs from the original bytes, but has the same parts.
    """
    u64 = np.uint64
    clocks = uuids.clocks
    words = np.empty(2 * len(clocks), np.uint64)
    words[0::2] = (
        (((clocks >> u64(4)) & u64(0xFFFFFFFF)) << u64(32))
        | (((clocks >> u64(36)) & u64(0xFFFF)) << u64(16))
        | u64(0x1000)
        | (clocks >> u64(52))
    )
    words[1::2] = (
        (u64(0x8000) << u64(48))
        | ((clocks & u64(0xF)) << u64(58))
        | (uuids.flags << u64(48))
        | uuids.producers
    )
    foreign = np.repeat(uuids.flags == u64(FOREIGN_UUID), 2)
    if foreign.any():
        words[foreign] = ~u64(0)
    return words.astype(">u8").tobytes()
