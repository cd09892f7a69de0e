"""The frames of HTTP/2: their layout, their bounds, and the faults of a peer that breaks a rule.

RFC 9113, sections 4 and 6. Pure: bytes in, values out. A frame is a head of nine bytes and a payload.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from gazette.errors import GazetteError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

FRAME_BYTES_MIN: Final = 1 << 14
"""Largest payload that every peer accepts. A peer that accepts more says so in its settings."""
FRAME_BYTES_MAX: Final = (1 << 24) - 1
WINDOW_MAX: Final = (1 << 31) - 1
WINDOW_DEFAULT: Final = 65_535
"""Window of a connection at its begin, and of a stream until settings change it."""

GOAWAY_TEXT_BYTES: Final = 64
"""Upper bound in bytes of a reason in GOAWAY: of ours that we send, and of a peer's that we show."""

_HEAD: Final = struct.Struct(">HBBBL")
_LONG: Final = struct.Struct(">L")
_GOAWAY: Final = struct.Struct(">LL")
_SETTING: Final = struct.Struct(">HL")


class FaultCode(IntEnum):
    """The codes of RST_STREAM and GOAWAY, which give the reason (RFC 9113, 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(GazetteError):
    """The peer broke a rule of the connection, which ends with GOAWAY and ``code``."""

    def __init__(self, code: FaultCode, text: str) -> None:
        super().__init__(text, code=code.name)
        self.code = code


class StreamFault(GazetteError):
    """The peer broke a rule of one stream, which ends with RST_STREAM and ``code``."""

    def __init__(self, stream: int, code: FaultCode, text: str) -> None:
        super().__init__(text, code=code.name, stream=stream)
        self.stream = stream
        self.code = code


def read_head(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int, int, int]:
    """Return length, type, flags and stream of the frame whose nine bytes begin at ``at``."""
    high, low, frame_type, flags, stream = _HEAD.unpack_from(data, at)
    return high << 8 | low, frame_type, flags, stream & WINDOW_MAX


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the head of a frame with ``length`` bytes of payload."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a whole frame."""
    return head(len(payload), kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(key, value) for key, value in values.items())
    return frame(SETTINGS, 0, 0, payload)


def window_update(stream: int, increment: int) -> bytes:
    """Return the frame that permits the peer to send ``increment`` more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, _LONG.pack(increment))


def rst_stream(stream: int, code: FaultCode) -> bytes:
    """Return the frame that ends a stream at once."""
    return frame(RST_STREAM, 0, stream, _LONG.pack(code))


def goaway(last_stream: int, code: FaultCode, text: str = "") -> bytes:
    """Return the frame that ends a connection. The peer may repeat streams numbered above ``last_stream``."""
    return frame(GOAWAY, 0, 0, _GOAWAY.pack(last_stream, code) + text.encode()[:GOAWAY_TEXT_BYTES])


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    """Return a PING frame, or the answer to a PING. ``payload`` has eight bytes."""
    return frame(PING, ACK if ack else 0, 0, payload)


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the checked settings of a payload: the last value of each. Leave out unknown settings. Raise
    ``ConnectionFault`` for a payload or value that HTTP/2 forbids."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "SETTINGS has a part of a setting")
    checked = {}
    for key, value in _SETTING.iter_unpack(payload):
        if key == ENABLE_PUSH and value > 1:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if key == INITIAL_WINDOW_SIZE and value > WINDOW_MAX:
            raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, "the initial window is too large")
        if key == MAX_FRAME_SIZE and not FRAME_BYTES_MIN <= value <= FRAME_BYTES_MAX:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "the frame size is out of bounds")
        if HEADER_TABLE_SIZE <= key <= MAX_HEADER_LIST_SIZE:
            checked[key] = value
    return checked


def read_long(payload: bytes, name: str) -> int:
    """Return the number in a payload of four bytes. Raise ``ConnectionFault`` for another length."""
    if len(payload) != _LONG.size:
        raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, f"{name} does not have 4 bytes")
    return int(_LONG.unpack(payload)[0])


def without_padding(payload: bytes, flags: int) -> bytes:
    """Return the payload of DATA or HEADERS without padding. Raise ``ConnectionFault`` for a wrong length."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "a padded frame has no length of padding")
    end = len(payload) - payload[0]
    if end < 1:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a frame has more padding than payload")
    return payload[1:end]
