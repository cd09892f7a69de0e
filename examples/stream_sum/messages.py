"""The messages of stream-sum. Names in JSON are those of the Go original, so that its chunkers
and summers understand ours; what is new here is left out of its messages, and ignored by it."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import field

ID_BYTES: Final = 16

_POLYNOMIAL: Final = 0xC96C5795D7870F42  # of ECMA-182, bits reversed
_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE: Final = _crc_table()


def crc64(data: bytes, value: int = 0) -> int:
    """Return the CRC-64 by ECMA-182, continued from the ``value`` of the bytes before."""
    value ^= _MASK
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ _MASK


class _OfStream(msgspec.Struct, kw_only=True):
    uuid: str = field(default="", name="UUID")
    id: tuple[int, ...] = field(default=(0,) * ID_BYTES, name="ID")
    """Key of the stream: 16 bytes, as numbers."""

    @property
    def key(self) -> bytes:
        return bytes(self.id)


class Chunk(_OfStream):
    """A piece of a stream. An empty one ends it."""

    seq_no: int = field(default=0, name="SeqNo")
    """Counts from 1 within the stream."""
    data: bytes | None = field(default=b"", name="Data")


class Sum(_OfStream):
    """The sum of a whole stream."""

    seq_no: int = field(default=0, name="SeqNo")
    """Number of its last chunk."""
    value: int = field(default=0, name="Value")
    shard: str = field(default="", name="Shard")
    transaction: int = field(default=0, name="Transaction")
    """Number of the shard's receipt that covers it. Zero if the Go original wrote it."""


class Receipt(msgspec.Struct, kw_only=True):
    """A receipt of what a transaction of a shard published, in the same transaction, to another journal."""

    uuid: str = field(default="", name="UUID")
    shard: str = field(default="", name="Shard")
    transaction: int = field(default=0, name="Transaction")
    """Counts the shard's transactions that published, from 1; part of its state."""
    sums: dict[str, int] = field(default_factory=dict, name="Sums")
    """Number of sums that it published, by journal."""
    digest: int = field(default=0, name="Digest")
    """The exclusive or of their values."""
