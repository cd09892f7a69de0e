"""Cuts bytes of a journal into frames, and finds their UUIDs without their types. No IO.

A frame is a line, or a message of protobuf after its length. Only the begin of a long frame is kept, so that
a line of any length takes little memory.
"""

from __future__ import annotations

import json
import re
import struct
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from gazette.errors import Invalid
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    UUID_BYTES,
    clock_unix_ns,
    is_ours,
    parse_text,
    parse_uuid,
    uuid_text,
)
from gazette.protocol.ids import Offset

SHOWN_BYTES: Final = 4096
"""Bytes of a message that a page shows."""
_MAGIC: Final = b"\x66\x33\x93\x36"
_HEADER: Final = struct.Struct("<4sI")
_LENGTH_MAX: Final = 256 << 20
_UUID_TEXT: Final = r'"\s*:\s*"([0-9a-fA-F-]{36})"'


@dataclass(frozen=True, slots=True)
class CutMessage:
    """A frame at ``[begin, end)``. ``head`` is its begin, at most `SHOWN_BYTES`."""

    begin: Offset
    end: Offset
    head: bytes
    length: int
    """Bytes of the message, without its newline or header."""


class FrameCutter:
    """Cuts bytes from ``offset`` on. ``content_type`` says how; unknown types are lines."""

    def __init__(self, content_type: str, offset: Offset) -> None:
        self._is_fixed = content_type == CONTENT_PROTO_FIXED
        self._begin = self._at = offset
        self._head = bytearray()
        self._left = 0
        """Bytes of a fixed frame that are still to come; 0: the header is to come."""

    @property
    def begin(self) -> Offset:
        """Offset of the frame that is not whole yet."""
        return self._begin

    def jump(self, offset: Offset) -> None:
        """Go on at another offset. Drop a frame that is not whole."""
        self._begin = self._at = offset
        self._head.clear()
        self._left = 0

    def feed(self, data: bytes) -> Iterator[CutMessage]:
        """Yield the frames that are complete with these bytes."""
        if self._is_fixed:
            yield from self._fixed(data)
            return
        at = 0
        while (newline := data.find(b"\n", at)) >= 0:
            self._take(data, at, newline)
            at = newline + 1
            self._at += 1
            yield self._frame(self._at - self._begin - 1)
        self._take(data, at, len(data))

    def _take(self, data: bytes, begin: int, end: int) -> None:
        self._head += data[begin : min(end, begin + SHOWN_BYTES + _HEADER.size - len(self._head))]
        self._at += end - begin

    def _frame(self, length: int, skip: int = 0) -> CutMessage:
        head = bytes(self._head[skip : skip + SHOWN_BYTES])
        frame = CutMessage(self._begin, self._at, head, length)
        self.jump(self._at)
        return frame

    def _fixed(self, data: bytes) -> Iterator[CutMessage]:
        at = 0
        while at < len(data):
            if not self._left:
                end = min(len(data), at + _HEADER.size - len(self._head))
                self._take(data, at, end)
                at = end
                if len(self._head) < _HEADER.size:
                    return
                magic, length = _HEADER.unpack_from(self._head)
                if magic != _MAGIC or length > _LENGTH_MAX:
                    # No frame begins here: look for the next one, byte by byte.
                    del self._head[0]
                    self._begin += 1
                    continue
                self._left = length
                if not length:
                    yield self._frame(0, _HEADER.size)
                continue
            end = min(len(data), at + self._left)
            self._take(data, at, end)
            self._left -= end - at
            at = end
            if not self._left:
                yield self._frame(self._at - self._begin - _HEADER.size, _HEADER.size)


def message_of(frame: CutMessage, content_type: str, place: str) -> dict[str, Any]:
    """Return a frame for a page, which shows the fields of protobuf by their numbers.

    ``place`` is the place of the UUID in JSON: names joined by dots.
    """
    text, fields = "", ""
    if content_type == CONTENT_PROTO_FIXED:
        fields, raw = b64encode(frame.head).decode(), _uuid_in_fields(frame.head)
    else:
        text = frame.head.decode("utf-8", "backslashreplace")
        raw = _uuid_in(text, content_type, place)
    message: dict[str, Any] = {
        "begin": frame.begin,
        "end": frame.end,
        "text": text,
        "fields": fields,
        "more_bytes": frame.length - len(frame.head),
    }
    if raw and is_ours(raw):
        producer, clock, flags = parse_uuid(raw)
        message |= {
            "uuid": uuid_text(raw),
            "producer": producer.hex(),
            "clock": str(clock),
            "time_ms": clock_unix_ns(clock) // 1_000_000,
            "role": {CONTINUE_TXN: "pending", ACK_TXN: "acknowledgement"}.get(flags, "alone"),
        }
    return message


def _uuid_in(text: str, content_type: str, place: str) -> bytes:
    """Return the UUID of a line; empty if it has none. Search a cut line for it, too."""
    value: Any = text.partition(",")[0].strip('"') if content_type == CONTENT_CSV else ""
    if content_type == CONTENT_JSON_LINES:
        try:
            value = json.loads(text)
            for name in place.split("."):
                value = value[name]
        except (ValueError, LookupError, TypeError, RecursionError):
            match = re.search(rf'"{re.escape(place.rpartition(".")[2])}{_UUID_TEXT}', text)
            value = "" if match is None else match[1]
    try:
        return parse_text(value) if isinstance(value, str) else b""
    except Invalid:
        return b""


def _uuid_in_fields(data: bytes) -> bytes:
    """Return the UUID of a protobuf message: its first field of 16 bytes that has the form of ours."""
    at = 0
    while (at := data.find(bytes([UUID_BYTES]), at + 1)) > 0:
        value = data[at + 1 : at + 1 + UUID_BYTES]
        if data[at - 1] & 7 == 2 and len(value) == UUID_BYTES and is_ours(value):
            return value
    return b""
