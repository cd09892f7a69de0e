"""Recorded operations and their frames, byte for byte as they stand in a recovery log.

A frame is the magic word, the payload's length (little-endian), and the payload, a protobuf message. The raw
bytes of a write follow its frame, and are not part of the checksum.

The checksum of an operation is the CRC-32C of all earlier payloads. So an author can continue a log only if
it has read all of the log. Compute checksums over payloads as they were read or written: another encoding of
the same message may differ.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import google_crc32c
from google.protobuf.message import DecodeError

from gazette.errors import Corrupt
from gazette.protocol.pb import recoverylog_pb2 as pb

MAGIC: Final = b"\x66\x33\x93\x36"
HEADER_LENGTH: Final = 8
_HEADER = struct.Struct("<4sI")

OP_LENGTH_MAX: Final = 1 << 20
"""Greatest length of a payload, in bytes: paths and properties are short. A longer one is not a frame."""

FENCE_LABEL: Final = "author"
_BASE32: Final = "0123456789abcdefghijklmnopqrstuv"


@dataclass(frozen=True, slots=True)
class Create:
    path: str


@dataclass(frozen=True, slots=True)
class Link:
    fnode: int
    path: str


@dataclass(frozen=True, slots=True)
class Unlink:
    fnode: int
    path: str


@dataclass(frozen=True, slots=True)
class Write:
    fnode: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SetProperty:
    path: str
    content: str


Action = Create | Link | Unlink | Write | SetProperty | None
"""Action of an operation. None is a no-op: it only uses its sequence number."""


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One operation. ``log`` and the offsets are not encoded: they say where the operation was read.

    Before an operation is written, ``first_offset`` is a lower bound, and ``last_offset`` is 0.
    """

    seq_no: int
    checksum: int
    author: int
    action: Action
    first_offset: int = 0
    last_offset: int = 0
    log: str = ""
    group_time: int = 0
    """Time of the append in Unix milliseconds, on its first operation; 0 on others, and without a clock."""


def encode_op(op: RecordedOp) -> tuple[bytes, bytes]:
    """Return (frame, payload) of an operation, without the raw bytes that follow a write."""
    message = pb.RecordedOp(seq_no=op.seq_no, checksum=op.checksum, author=op.author)
    match op.action:
        case Create(path=path):
            message.create.path = path
        case Link(fnode=fnode, path=path):
            message.link.fnode, message.link.path = fnode, path
        case Unlink(fnode=fnode, path=path):
            message.unlink.fnode, message.unlink.path = fnode, path
        case Write(fnode=fnode, offset=offset, length=length):
            # Set the field even if all its values are zero: else this would not be a write.
            message.write.SetInParent()
            message.write.fnode, message.write.offset, message.write.length = fnode, offset, length
        case SetProperty(path=path, content=content):
            message.property.path, message.property.content = path, content
        case None:
            pass
    if op.group_time:
        message.group_time = op.group_time
    payload = message.SerializeToString(deterministic=True)
    return _HEADER.pack(MAGIC, len(payload)) + payload, payload


def frame_length(data: bytes | bytearray | memoryview, at: int = 0) -> int | None:
    """Return the payload's length by the frame header of 8 bytes at ``at``; None for an invalid header."""
    magic, length = _HEADER.unpack_from(data, at)
    if magic != MAGIC or length > OP_LENGTH_MAX:
        return None
    return int(length)


def decode_op(payload: bytes, *, log: str, first_offset: int, frame_end: int) -> RecordedOp:
    """Decode a payload that was read from ``log`` at [first_offset, frame_end).

    ``last_offset`` of the result includes the raw bytes of a write. Raise ``Corrupt`` for an invalid payload.
    """
    try:
        message = pb.RecordedOp.FromString(payload)
    except DecodeError as error:
        raise Corrupt(
            "the recovery log holds a frame that is not an operation", log=log, offset=first_offset
        ) from error
    action: Action = None
    last_offset = frame_end
    # If several fields are set, take the first one in this order.
    if message.HasField("create"):
        action = Create(message.create.path)
    elif message.HasField("link"):
        action = Link(message.link.fnode, message.link.path)
    elif message.HasField("unlink"):
        action = Unlink(message.unlink.fnode, message.unlink.path)
    elif message.HasField("write"):
        write = message.write
        if write.length < 0 or write.offset < 0:
            raise Corrupt("the recovery log holds a negative write", log=log, offset=first_offset)
        action = Write(write.fnode, write.offset, write.length)
        last_offset += write.length
    elif message.HasField("property"):
        action = SetProperty(message.property.path, message.property.content)
    return RecordedOp(
        seq_no=message.seq_no,
        checksum=message.checksum,
        author=message.author,
        action=action,
        first_offset=first_offset,
        last_offset=last_offset,
        log=log,
        group_time=message.group_time,
    )


def next_checksum(checksum: int, payload: bytes) -> int:
    """Return the CRC-32C including ``payload``. ``checksum`` is the CRC-32C of all earlier payloads."""
    return int(google_crc32c.extend(checksum, payload))


def fence_value(author: int) -> str:
    """Return an author as the value of the register ``author``: base 32, lower case. Raise ``Corrupt`` unless
    it is a positive number of 32 bits."""
    if not 0 < author < 1 << 32:
        raise Corrupt("an author must be a positive 32-bit number", author=author)
    digits = ""
    while author:
        author, digit = divmod(author, 32)
        digits = _BASE32[digit] + digits
    return digits
