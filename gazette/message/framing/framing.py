"""Stage 11 of the byte path: takes bytes of a journal, gives messages and their offsets.

Pure. Decoding a whole batch in one step is several times faster than message by message. The
fallback decodes frame by frame. The fallback is the specification, and both give the same result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gazette.errors import Invalid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.lazy_numpy import numpy as np
from gazette.message.codec import CODEC_ERRORS, json_codec, protobuf_codec
from gazette.message.framing.csv import CSVFraming, csv_codec
from gazette.message.framing.frames import (
    FRAME_BYTES_MAX,
    Frames,
    Framing,
    MalformedMessage,
    Stamper,
    TruncatedFrame,
    hint_of,
)
from gazette.message.uuid import UuidMint, match_published
from gazette.message.uuid_place import declared_place, name_of_type
from gazette.protocol.ids import Offset

__all__ = [
    "FRAME_BYTES_MAX",
    "FixedFraming",
    "Frames",
    "Framing",
    "JSONLinesFraming",
    "MalformedMessage",
    "TruncatedFrame",
    "framing_of",
]

M = TypeVar("M")

FIXED_MAGIC: Final = bytes.fromhex("66339336")
FIXED_HEADER_BYTES: Final = 8
_FIXED_HEADER: Final = struct.Struct("<4sI")
_NEWLINE: Final = 0x0A
_EACH_BYTES: Final = 1 << 10
"""A part of at most this many bytes is decoded line by line, if it cannot be decoded in one step."""
_TAILS_MAX: Final = 1 << 12
_CLOSING: Final = {ord("{"): ord("}"), ord("["): ord("]")}


class _PublishedTails(set[str]):
    """The tails of UUIDs that publishers wrote: flags and producer, from character 18 on. There are few
    tails. A look-up of the tail recognizes the UUID of a message that is published again three times as
    fast. A producer is 48 random bits, so no other text has the same tail.
    """

    def __init__(self, require_free: Callable[[Any], None]) -> None:
        self._require_free = require_free

    def check(self, former: str) -> None:
        """Call ``require_free``, which may raise. Then remember the tail of a UUID that a publisher wrote."""
        self._require_free(former)
        if match_published(former):
            if len(self) >= _TAILS_MAX:
                self.clear()
            self.add(former[18:])


class JSONLinesFraming(Framing[M]):
    """One JSON object or array on each line, or raw bytes for the type bytes. A line ends with a newline. A
    blank line is malformed, except as raw bytes."""

    content_type = CONTENT_JSON_LINES

    def decode(self, buffer: bytes, base_offset: Offset) -> Frames[M]:
        stop = buffer.rfind(b"\n") + 1
        if not stop:
            return Frames()
        lines = buffer if stop == len(buffer) else buffer[:stop]
        frames = self._decode_batch(lines, base_offset)
        return self._decode_parts(lines, base_offset) if frames is None else frames

    def _decode_parts(self, lines: bytes, base_offset: Offset) -> Frames[M]:
        """Decode lines if some do not decode as the type, such as acknowledgements without content.

        Halve each part that cannot be decoded in one step. So a few unusual lines do not slow down all other
        lines.
        """
        if self.codec.decode_lines is None:
            return self._decode_each(lines, base_offset)
        frames: Frames[M] = Frames()
        uuids: list[bytes] = []
        parts = [lines]
        while parts and not frames.stopped:
            part, begin = parts.pop(), base_offset + frames.consumed
            middle = part.find(b"\n", len(part) // 2) + 1
            can_halve = len(part) > _EACH_BYTES and middle < len(part)
            # `decode` has already tried all lines together.
            decoded = None if part is lines else self._decode_batch(part, begin)
            if decoded is None and can_halve:
                parts += (part[middle:], part[:middle])
                continue
            try:
                decoded = decoded or self._decode_each(part, begin)
            except MalformedMessage:
                if not frames.messages:
                    raise
                frames.stopped = True
                break
            frames.begins += decoded.begins
            frames.ends += decoded.ends
            frames.messages += decoded.messages
            uuids.append(decoded.uuids)
            frames.consumed += decoded.consumed
            frames.stopped = decoded.stopped
        frames.uuids = b"".join(uuids)
        return frames

    def _decode_batch(self, lines: bytes, base_offset: Offset) -> Frames[M] | None:
        """Decode all lines in one step. Return None unless each line holds exactly one message."""
        decode_lines = self.codec.decode_lines
        if decode_lines is None:
            return None
        try:
            messages = decode_lines(lines)
            uuids = self.codec.uuids_of(messages)
        except CODEC_ERRORS:
            return None
        count = len(messages)
        symbols = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(symbols == _NEWLINE)
        if len(ends) != count:
            return None
        if not self.codec.exact_lines and not _one_on_each_line(symbols, ends):
            return None
        ends += base_offset + 1
        end_list: list[int] = ends.tolist()
        return Frames([base_offset, *end_list[:-1]], end_list, messages, uuids, len(lines))

    def _decode_each(self, lines: bytes, base_offset: Offset) -> Frames[M]:
        """Decode line by line, as `decode` does: stop before a malformed line."""
        frames: Frames[M] = Frames()
        uuids: list[bytes] = []
        while (begin := frames.consumed) < len(lines):
            end = lines.index(b"\n", begin) + 1
            payload = lines[begin : end - 1]
            try:
                message, uuid = self._decode_one(payload)
            except CODEC_ERRORS as error:
                frames.stopped = True
                if not frames.messages:
                    raise MalformedMessage(
                        f"line is not a message: {error}",
                        begin=base_offset + begin,
                        end=base_offset + end,
                        raw=lines[begin:end],
                        hint=hint_of(error),
                    ) from error
                break
            frames.begins.append(base_offset + begin)
            frames.ends.append(base_offset + end)
            frames.messages.append(message)
            uuids.append(uuid)
            frames.consumed = end
        frames.uuids = b"".join(uuids)
        return frames

    def _decode_one(self, payload: bytes) -> tuple[M, bytes]:
        """Return a message and its UUID. An acknowledgement need not decode as a message of the type."""
        try:
            message = self.codec.decode(payload)
        except CODEC_ERRORS:
            acknowledgement: Any = self.codec.acknowledgement_of(payload)
            if acknowledgement is None:
                raise
            message = acknowledgement
        return message, self.codec.uuids_of([message])

    def may_complete(self, pending: bytes, size: int, data: bytes) -> bool:
        return b"\n" in data

    def encode_into(self, message: M, buffer: bytearray) -> None:
        begin = len(buffer)
        try:
            self.codec.encode_into(message, buffer)
        except CODEC_ERRORS as error:
            raise self._unencodable(error, message) from error
        if not self.codec.single_line and buffer.find(b"\n", begin) >= 0:
            raise Invalid("a message of a line-based journal cannot contain a newline")
        buffer.append(_NEWLINE)

    def stamper(self, mint: UuidMint) -> Stamper[M]:
        encode_into = self.codec.plain_encode_into
        if encode_into is None:
            return super().stamper(mint)
        text, require_free = mint.text, self.codec.require_free
        tails = _PublishedTails(require_free)
        fits, encode = self.codec.fits, self.codec.encode

        def stamp(message: M, flags: int, buffer: bytearray) -> None:
            # A fast path: publishers call this hundreds of thousands of times a second.
            former = message.uuid  # type: ignore[attr-defined]
            try:
                if former and former[18:] not in tails:
                    tails.check(former)
            except (TypeError, KeyError):  # The value is no text, although the type says so.
                require_free(former)
            message.uuid = text(flags)  # type: ignore[attr-defined]
            try:
                if fits(message):
                    encode_into(message, buffer, -1)
                else:
                    buffer += encode(message)
            except CODEC_ERRORS as error:
                raise self._unencodable(error, message) from error
            buffer.append(_NEWLINE)

        return stamp

    def frame(self, payload: bytes) -> bytes:
        return payload + b"\n"


def _one_on_each_line(symbols: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> bool:
    """Return True if each line holds exactly one JSON object or array.

    The caller has found as many values as lines. If each newline is between a closing and an opening brace,
    it is between two values: these three cannot follow each other within a JSON value. So no value spans two
    lines, and no line has two values. ``ends`` are the positions of newlines in ``symbols``.
    """
    opening, inner = symbols[0], ends[:-1]
    closing = _CLOSING.get(int(opening))
    if closing is None:
        return False
    return bool((symbols[inner - 1] == closing).all() and (symbols[inner + 1] == opening).all())


class FixedFraming(Framing[M]):
    """A header of four magic bytes and the payload's length in bytes, then the payload."""

    content_type = CONTENT_PROTO_FIXED

    def decode(self, buffer: bytes, base_offset: Offset) -> Frames[M]:
        frames: Frames[M] = Frames()
        decode = self.codec.decode
        unpack_header = _FIXED_HEADER.unpack_from
        begin, size = 0, len(buffer)
        error: Exception | None = None
        while begin + FIXED_HEADER_BYTES <= size:
            magic, length = unpack_header(buffer, begin)
            if magic != FIXED_MAGIC or FIXED_HEADER_BYTES + length > self.frame_bytes_max:
                frames.stopped = True
                break
            end = begin + FIXED_HEADER_BYTES + length
            if end > size:
                break
            try:
                message = decode(buffer[begin + FIXED_HEADER_BYTES : end])
            except CODEC_ERRORS as caught:
                frames.stopped, error = True, caught
                break
            frames.begins.append(base_offset + begin)
            frames.ends.append(base_offset + end)
            frames.messages.append(message)
            begin = end
        frames.consumed = begin
        try:
            frames.uuids = self.codec.uuids_of(frames.messages)
        except CODEC_ERRORS as caught:
            error = self._cut(frames, base_offset, caught)
        if frames.stopped and not frames.messages:
            raise self._malformed(buffer, base_offset, error)
        return frames

    def _cut(self, frames: Frames[M], base_offset: Offset, error: Exception) -> Exception:
        """Keep the messages before the first malformed UUID. Return the error of that UUID, or ``error`` if
        no UUID is malformed."""
        uuids: list[bytes] = []
        for message in frames.messages:
            try:
                uuids.append(self.codec.uuids_of([message]))
            except CODEC_ERRORS as caught:
                error = caught
                break
        keep = len(uuids)
        del frames.begins[keep:], frames.ends[keep:], frames.messages[keep:]
        frames.uuids = b"".join(uuids)
        frames.consumed = frames.ends[-1] - base_offset if keep else 0
        frames.stopped = True
        return error

    def _malformed(
        self, buffer: bytes, base_offset: Offset, error: Exception | None
    ) -> MalformedMessage:
        """Return the error of the malformed frame at the start of the buffer."""
        if error is not None:
            length = _FIXED_HEADER.unpack_from(buffer)[1]
            end = FIXED_HEADER_BYTES + length
            reason = f"frame is not a message: {error}"
        else:
            # Bytes up to the next magic are junk. If the buffer has no magic, keep its last three bytes: a
            # magic may begin there.
            end = buffer.find(FIXED_MAGIC, 1)
            end = len(buffer) - (len(FIXED_MAGIC) - 1) if end < 0 else end
            reason = "no frame begins at this offset: wrong magic, or a length beyond the limit"
        malformed = MalformedMessage(
            reason,
            begin=base_offset,
            end=base_offset + end,
            raw=buffer[:end],
            hint=hint_of(error),
        )
        malformed.__cause__ = error
        return malformed

    def may_complete(self, pending: bytes, size: int, data: bytes) -> bool:
        head = pending[:FIXED_HEADER_BYTES]
        head += data[: FIXED_HEADER_BYTES - len(head)]
        if len(head) < FIXED_HEADER_BYTES:
            return False
        magic, length = _FIXED_HEADER.unpack(head)
        return bool(  # True also for a malformed frame: `decode` raises its error.
            magic != FIXED_MAGIC
            or FIXED_HEADER_BYTES + length > self.frame_bytes_max
            or size + len(data) >= FIXED_HEADER_BYTES + length
        )

    def encode_into(self, message: M, buffer: bytearray) -> None:
        try:
            payload = self.codec.encode(message)
        except CODEC_ERRORS as error:
            raise self._unencodable(error, message) from error
        buffer += _FIXED_HEADER.pack(FIXED_MAGIC, len(payload))
        buffer += payload

    def frame(self, payload: bytes) -> bytes:
        return _FIXED_HEADER.pack(FIXED_MAGIC, len(payload)) + payload

    def finish(self, rest: bytes, offset: Offset) -> None:
        # A text tool that appends a file may leave a lone newline at its end.
        if rest != b"\n":
            super().finish(rest, offset)


def fixed_payload(frame: bytes) -> bytes | None:
    """Return the payload of a fixed frame. Return None if the bytes are not one whole frame."""
    if len(frame) < FIXED_HEADER_BYTES:
        return None
    magic, length = _FIXED_HEADER.unpack_from(frame)
    is_whole = magic == FIXED_MAGIC and length == len(frame) - FIXED_HEADER_BYTES
    return frame[FIXED_HEADER_BYTES:] if is_whole else None


_FRAMINGS: Final[dict[str, tuple[type[Framing[Any]], Any]]] = {
    CONTENT_JSON_LINES: (JSONLinesFraming, json_codec),
    CONTENT_PROTO_FIXED: (FixedFraming, protobuf_codec),
    CONTENT_CSV: (CSVFraming, csv_codec),
}


def framing_of(
    content_type: str,
    message_type: Any,
    *,
    place: str | None = "",
    frame_bytes_max: int = FRAME_BYTES_MAX,
) -> Framing[Any]:
    """Return a new framing for one reader or publisher.

    ``place`` is the place of the UUID in messages: a path of names in JSON, such as ``_meta.uuid``. If it is
    empty, the place is that in the class attribute ``gazette_uuid``, or else the field ``uuid``. If it is
    None, UUIDs are not decoded. A type with a class method ``gazette_codec(content_type)`` supplies its own
    codec, which knows the place.

    Raise `Invalid` if the content type is unknown or cannot hold the type, and if the type lacks the place.
    """
    entry = _FRAMINGS.get(content_type)
    if entry is None:
        raise Invalid(
            f"unrecognized content-type ({content_type})",
            hint=f"Label the journal content-type with one of {', '.join(_FRAMINGS)}.",
        )
    framing_class, codec_of = entry
    own_codec_of = getattr(message_type, "gazette_codec", None)
    place = declared_place(message_type, place)
    if place and own_codec_of is not None:
        raise Invalid(
            f"the codec of {name_of_type(message_type)} finds the UUID, and not the place {place}",
            path="uuid",
            hint="Leave the place out, or remove gazette_codec().",
        )
    codec = codec_of(message_type, place) if own_codec_of is None else own_codec_of(content_type)
    return framing_class(codec, frame_bytes_max)
