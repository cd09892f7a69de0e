"""Reserved keys of a RocksDB store, in the form of the Go original.

These are the checkpoint, and for each source a mark with its offset, which older Go binaries read. The
original ignores keys of timers. All other keys are the application's, even if they begin with zero. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from gazette.errors import Corrupt, Invalid

CHECKPOINT_KEY: Final = b"\x00\x12checkpoint\x00\x01"
MARK_PREFIX: Final = b"\x00\x12mark\x00\x01"
TIMER_AT_PREFIX: Final = b"\x00\x12timer-at\x00\x01"
"""Prefix of keys of timers. After it: the domain (1 byte), the time (8 bytes that sort as numbers do), the
timer's key."""
TIMER_KEY_PREFIX: Final = b"\x00\x12timer-key\x00\x01"
"""Prefix of keys of timers. After it: the domain (1 byte), the timer's key."""
EVENT_TIME_KEY: Final = b"\x00\x12timer-event-time\x00\x01"

_BYTES_MARKER: Final = b"\x12"
_TERMINATOR: Final = b"\x00\x01"
_ZERO: Final = 0x88
"""First byte of offset 0. Add a small offset; for others, add `_SMALL_MAX` and the length in bytes."""
_SMALL_MAX: Final = 109
_LENGTH_BASE: Final = _ZERO + _SMALL_MAX

Span = tuple[bytes, bytes | None]
"""Range of keys, [first, end). None as the end: all later keys."""


def after(prefix: bytes) -> bytes | None:
    """Return the least key that is greater than all keys with a prefix; None if there is no such key."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else None


_RESERVED: Final[Mapping[bytes, str]] = {
    CHECKPOINT_KEY: "the checkpoint",
    MARK_PREFIX: "the offset of a source",
    TIMER_AT_PREFIX: "a timer by its time",
    EVENT_TIME_KEY: "the event time of timers",
    TIMER_KEY_PREFIX: "a timer by its key",
}
"""Meaning of the keys with each prefix, in the order of keys."""
RESERVED_END: Final = b"\x00\x13"
"""Key after all reserved keys, which begin with the bytes 0 and 18."""


def reserved_for(key: bytes) -> str | None:
    """Return the meaning of a reserved key of the default column family; None for an application's key."""
    return next((meaning for prefix, meaning in _RESERVED.items() if key.startswith(prefix)), None)


def application_spans(low: bytes, high: bytes | None) -> Iterator[Span]:
    """Yield the parts of a span of the default column family without reserved keys, in order."""
    for prefix in _RESERVED:
        end = after(prefix)
        assert end is not None
        if end <= low:
            continue
        if high is not None and high <= prefix:
            break
        if low < prefix:
            yield low, prefix
        low = end
    if high is None or low < high:
        yield low, high


def require_bytes(**given: object) -> None:
    """Raise ``Invalid`` that names the first argument that is not bytes."""
    for name, value in given.items():
        if type(value) is not bytes:
            raise Invalid(
                f"a {type(value).__name__} is given, and keys and values are bytes",
                path=name,
                hint="Encode it, such as by text.encode().",
            )


def require_writable(key: bytes, value: bytes, is_default: bool) -> None:
    """Raise ``Invalid`` unless both are bytes, and for a reserved key of the default column family."""
    if type(key) is not bytes or type(value) is not bytes:
        require_bytes(key=key, value=value)
    if key < RESERVED_END and is_default and (meaning := reserved_for(key)) is not None:
        raise Invalid(
            f"the key is reserved for {meaning}",
            key=key.hex(),
            hint="Put a prefix before your keys, or use your own column family.",
        )


def mark_key(journal: str) -> bytes:
    """Return the key of a source's mark."""
    name = journal.encode().replace(b"\x00", b"\x00\xff")
    return MARK_PREFIX + _BYTES_MARKER + name + _TERMINATOR


def journal_of(key: bytes) -> str:
    """Return the source of a mark's key. Raise ``Corrupt`` if ``key`` is no key of a mark."""
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
    """Return the offset of a mark's value. Raise ``Corrupt`` for a value that is no offset."""
    if value and _ZERO <= value[0] <= _LENGTH_BASE and len(value) == 1:
        return value[0] - _ZERO
    length = value[0] - _LENGTH_BASE if value else 0
    if not 1 <= length <= 8 or len(value) != 1 + length:
        raise Corrupt("not the value of an offset mark", value=value.hex())
    return int.from_bytes(value[1:], "big")
