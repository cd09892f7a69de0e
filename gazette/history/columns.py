"""The messages of a journal as columns: where each is, and the parts of its UUID. Pure.

Reading many messages costs little if none of them becomes an object. A `ColumnDecoder` finds frames and
UUIDs in whole buffers; what it does not understand at once it leaves to the `Framing`, which is the
specification, and gives the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gazette import labels
from gazette.errors import Bug, Invalid
from gazette.history.json_lines import Field, FieldColumn, LineScanner
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.frames import Framing, MalformedMessage
from gazette.message.framing import framing_of
from gazette.message.message import CSVRecord
from gazette.message.message_codec import MessageCodec
from gazette.message.message_uuid import (
    NIL_UUID,
    UUID_BYTES,
    UuidArrays,
    parse_arrays,
    texts_to_bytes,
    uuid_text,
)
from gazette.protocol.ids import JournalName, Offset

CONTENT_BYTES: Final = "application/octet-stream"
"""Not a content type of messages: the bytes of a journal as they come, in pieces."""

Array64 = npt.NDArray[np.int64]
Malformed = Literal["fail", "skip", "null"]
"""What becomes of a frame that is no message: an error, nothing, or a row of nulls."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the messages of a journal lie in it, and where they keep their UUID.

    ``uuid_field`` is the name of a JSON field, with dots where it is within others (``_meta.uuid``).
    ``message`` names the class of protobuf messages as ``module:Class``; without one they are read
    as having no UUID. ``malformed`` says what becomes of frames that are no messages, or do not fit their
    columns. With ``null`` a frame that is no message counts as one without a UUID.
    """

    content_type: str = CONTENT_JSON_LINES
    uuid_field: str = "uuid"
    message: str = ""
    malformed: Malformed = "fail"

    def message_type(self) -> Any:
        """The class of ``message``. Raises `Invalid` if it cannot be imported."""
        module, colon, name = self.message.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise Invalid(
                f"cannot import the message class {self.message!r}: {error}",
                path="message",
                hint="Give module:Class of a generated protobuf class that every worker can import"
                + ("." if colon else "; the colon is missing."),
            ) from error
        return found


def require_uuids(journal: JournalName, shape: Shape) -> None:
    """Raise `Invalid` if messages of that shape cannot be read committed: their UUIDs are not seen."""
    if shape.content_type == CONTENT_PROTO_FIXED and not shape.message:
        raise Invalid(
            f"the UUIDs of protobuf messages cannot be told without their class ({journal})",
            path="message",
            hint="Say which class it is, as module:Class; or read uncommitted, which gives every "
            "message as it was written.",
        )
    if shape.content_type == CONTENT_BYTES:
        raise Invalid(
            f"bytes that are no messages do not commit ({journal})",
            path="isolation",
            hint="Read uncommitted, which gives everything as it was written.",
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Messages of one journal, in its order. All arrays have the same length."""

    begins: Array64
    ends: Array64
    uuids: UuidArrays

    def __len__(self) -> int:
        return len(self.begins)


class Decoded(NamedTuple):
    """The complete frames of a buffer. ``consumed`` is how much of it they, and what was skipped, are.

    ``fields`` are those of the decoder, where they were found on the way; else they are to be parsed.
    """

    columns: Columns
    consumed: int
    fields: tuple[FieldColumn, ...] | None = None


class ColumnDecoder:
    """Decodes one journal's bytes. For one thread."""

    def __init__(self, journal: JournalName, shape: Shape, fields: Sequence[Field] = ()) -> None:
        """``fields`` are wished for, of JSON. Raises `Invalid` for a content type or message class that
        is none."""
        self.journal = journal
        self.shape = shape
        self._framing: Framing[Any] | None = None
        if shape.content_type != CONTENT_BYTES:
            self._framing = _framing_of(shape)
        self._scanner: LineScanner | None = None
        if shape.content_type == CONTENT_JSON_LINES and "." not in shape.uuid_field:
            self._scanner = LineScanner(shape.uuid_field, fields)

    def decode(self, buffer: bytes, base: Offset) -> Decoded:
        """The complete frames of ``buffer``, whose first byte is at offset ``base``.

        Raises `MalformedMessage` at a frame that is no message, if ``shape.malformed`` is ``fail``.
        """
        if self._framing is None:
            return _whole(buffer, base)
        if self._scanner is not None and (found := self._scan(self._scanner, buffer, base)):
            return found
        return self._decode_framed(self._framing, buffer, base)

    def finish(self, rest: bytes, offset: Offset) -> None:
        """Check what is left at the end of the bytes. Raises `TruncatedFrame`."""
        if self._framing is not None:
            self._framing.finish(rest, offset)

    @staticmethod
    def _scan(scanner: LineScanner, buffer: bytes, base: Offset) -> Decoded | None:
        stop = buffer.rfind(b"\n") + 1
        scanned = scanner.scan(buffer, stop) if stop else None
        if scanned is None:
            return None
        begins = scanned.begins + base
        columns = Columns(begins, np.append(begins[1:], base + stop), scanned.uuids)
        return Decoded(columns, stop, scanned.fields)

    def _decode_framed(self, framing: Framing[Any], buffer: bytes, base: Offset) -> Decoded:
        begins: list[int] = []
        ends: list[int] = []
        uuids: list[bytes] = []
        at = 0
        while at < len(buffer):
            rest = buffer[at:] if at else buffer
            try:
                frames = framing.decode(rest, base + at)
            except MalformedMessage as error:
                if self.shape.malformed == "fail":
                    raise error.of(self.journal) from error.__cause__
                if self.shape.malformed == "null":
                    begins.append(error.begin)
                    ends.append(error.end)
                    uuids.append(NIL_UUID)
                at = error.end - base
                continue
            begins += frames.begins
            ends += frames.ends
            uuids.append(frames.uuids or NIL_UUID * len(frames))
            at += frames.consumed
            if not frames.stopped:
                break
        return Decoded(_columns(begins, ends, b"".join(uuids)), at)


def _columns(begins: list[int], ends: list[int], uuids: bytes) -> Columns:
    return Columns(
        np.array(begins, np.int64),
        np.array(ends, np.int64),
        parse_arrays(uuids),
    )


def _whole(buffer: bytes, base: Offset) -> Decoded:
    if not buffer:
        return Decoded(_columns([], [], b""), 0)
    return Decoded(_columns([base], [base + len(buffer)], bytes(UUID_BYTES)), len(buffer))


def _framing_of(shape: Shape) -> Framing[Any]:
    match shape.content_type:
        case labels.CONTENT_CSV:
            return framing_of(CONTENT_CSV, CSVRecord)
        case labels.CONTENT_PROTO_FIXED:
            return framing_of(CONTENT_PROTO_FIXED, shape.message_type() if shape.message else bytes)
    return framing_of(shape.content_type, _peek_type(shape.uuid_field))


def _peek_type(field: str) -> Any:
    """A type of JSON objects of which only the UUID is looked at."""
    names = field.split(".")
    if not all(names):
        raise Invalid(f"not the name of a field ({field!r})", path="uuid_field")

    class Peek:
        """Brings its own codec."""

        @classmethod
        def gazette_codec(cls, content_type: str) -> PeekCodec:
            if content_type != CONTENT_JSON_LINES:
                raise Invalid(f"unrecognized content-type ({content_type})")
            return PeekCodec(names)

    return Peek


class PeekCodec(MessageCodec[Any]):
    """JSON objects, of which only the UUID is kept: by the names of the fields that lead to it."""

    single_line = True

    def __init__(self, names: list[str]) -> None:
        kind: Any = str
        for name in reversed(names):
            field = msgspec.field(default=None, name=name)
            kind = msgspec.defstruct("Peek", [("value", kind | None, field)])
        super().__init__(kind, None)
        self._depth = len(names)
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, payload: bytes) -> Any:
        return self._decoder.decode(payload)

    def decode_lines(self, lines: bytes) -> list[Any] | None:
        return self._decoder.decode_lines(lines)

    def uuids_of(self, messages: Sequence[Any]) -> bytes:
        values = list(messages)
        for _ in range(self._depth):
            values = [None if value is None else value.value for value in values]
        return texts_to_bytes([value or "" for value in values])

    def encode(self, message: Any) -> bytes:
        raise Bug("what was only looked at is not written")

    def _new_acknowledgement(self, message: Any) -> Any:
        raise Bug("what was only looked at is not written")


def uuid_texts(uuids: UuidArrays) -> list[str]:
    """The canonical texts of UUIDs."""
    return [uuid_text(raw) for raw in _split(uuid_bytes(uuids))]


def uuid_bytes(uuids: UuidArrays) -> bytes:
    """The bytes of UUIDs, concatenated: `parse_arrays` undone, with the version and variant set."""
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
    return words.astype(">u8").tobytes()


def _split(raw: bytes) -> list[bytes]:
    return [raw[at : at + UUID_BYTES] for at in range(0, len(raw), UUID_BYTES)]
