"""Reserved keys of a RocksDB store, in the form of the Go original.

Keys that begin with a zero byte are ours. They are the checkpoint, and a mark per source with its
offset, which older Go binaries read. Timers are not a part of the original's form: it ignores them.
Pure.
"""

from __future__ import annotations

from typing import Final

from gazette.errors import Corrupt

CHECKPOINT_KEY: Final = b"\x00\x12checkpoint\x00\x01"
MARK_PREFIX: Final = b"\x00\x12mark\x00\x01"
TIMER_AT_PREFIX: Final = b"\x00\x12timer-at\x00\x01"
"""Before the domain of a timer (a byte), its time (8 bytes that sort as numbers do), and its key."""
TIMER_KEY_PREFIX: Final = b"\x00\x12timer-key\x00\x01"
"""Before the domain of a timer (a byte), and its key."""
EVENT_TIME_KEY: Final = b"\x00\x12timer-event-time\x00\x01"
FIRST_USER_KEY: Final = b"\x01"

_BYTES_MARKER: Final = b"\x12"
_TERMINATOR: Final = b"\x00\x01"
_ZERO: Final = 0x88
"""First byte of zero. Small numbers add their value to it, and larger ones `_SMALL_MAX` and their
length in bytes.
"""
_SMALL_MAX: Final = 109
_LENGTH_BASE: Final = _ZERO + _SMALL_MAX


def mark_key(journal: str) -> bytes:
    """Return the key of a source's mark."""
    name = journal.encode().replace(b"\x00", b"\x00\xff")
    return MARK_PREFIX + _BYTES_MARKER + name + _TERMINATOR


def journal_of(key: bytes) -> str:
    """Return the source of a mark's key. Raise ``Corrupt`` if it is not such a key."""
    begin = MARK_PREFIX + _BYTES_MARKER
    if not key.startswith(begin) or not key.endswith(_TERMINATOR):
        raise Corrupt("not the key of an offset mark", key=key.hex())
    return key[len(begin) : -len(_TERMINATOR)].replace(b"\x00\xff", b"\x00").decode()


def encode_offset(offset: int) -> bytes:
    """Return an offset as a varint whose bytes sort as numbers do."""
    if offset <= _SMALL_MAX:
        return bytes((_ZERO + offset,))
    length = (offset.bit_length() + 7) // 8
    return bytes((_LENGTH_BASE + length,)) + offset.to_bytes(length, "big")


def decode_offset(value: bytes) -> int:
    """Return the offset of a mark's value. Raise ``Corrupt`` if it is not an offset."""
    if value and _ZERO <= value[0] <= _LENGTH_BASE and len(value) == 1:
        return value[0] - _ZERO
    length = value[0] - _LENGTH_BASE if value else 0
    if not 1 <= length <= 8 or len(value) != 1 + length:
        raise Corrupt("not the value of an offset mark", value=value.hex())
    return int.from_bytes(value[1:], "big")
