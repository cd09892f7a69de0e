"""Boundaries of the blocks of a zstd stream, so that a decompressor can be fed some blocks at a time. Pure.

A few bytes may decode to 128 KiB of content, but no block decodes to more (RFC 8878, section 3.1.1.2.4). So
the content of whole blocks is bounded. Without boundaries, slices must be small enough for the worst case.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Final

BLOCK_BYTES_MAX: Final = 128 << 10
"""Greatest content of a block, in bytes."""
_BLOCKS: Final = 7
"""Greatest number of whole blocks to feed at once, after the rest of a block: at most 1 MiB of content."""
_LOST_BYTES: Final = 1 << 10
"""Bytes to feed at once if boundaries are unknown: at most 256 RLE blocks, which decode to 32 MiB."""

_MAGIC: Final = 0xFD2FB528
_SKIPPABLE: Final = 0x184D2A50
_MAGIC_BYTES: Final = 4
_BLOCK_HEADER_BYTES: Final = 3
_CHECKSUM_BYTES: Final = 4
_RLE: Final = 1
_RESERVED: Final = 3
_ID_BYTES: Final = (0, 1, 2, 4)
_SIZE_BYTES: Final = (0, 2, 4, 8)


class _Next(Enum):
    """The element that begins where the last element has ended."""

    FRAME = "frame"
    SKIPPABLE = "size of a skippable frame"
    DESCRIPTOR = "frame header descriptor"
    BLOCK = "block"
    LOST = "unknown"


class ZstdBlocks:
    """Follows one stream of consecutive frames.

    A stream that is not understood has no known boundaries any more. The decompressor will report the error.
    """

    __slots__ = ("_checksum", "_header", "_next", "_skip", "_wanted")

    def __init__(self) -> None:
        self._next = _Next.FRAME
        self._wanted = _MAGIC_BYTES
        self._header = b""
        """The first bytes of the next header, which has ``_wanted`` bytes."""
        self._skip = 0
        """Bytes of the current element that are still to come and are not inspected."""
        self._checksum = 0  # Bytes of checksum after the frame.

    def take(self, data: memoryview) -> int:
        """Return how many of the next bytes to feed at once. The result is zero only for empty ``data``."""
        position, blocks, size = 0, 0, len(data)
        while position < size:
            if self._next is _Next.LOST:
                return min(size, position + _LOST_BYTES)
            if self._skip:
                count = min(self._skip, size - position)
                self._skip -= count
                position += count
                continue
            if self._next is _Next.BLOCK and not self._header:
                if blocks == _BLOCKS:
                    break
                blocks += 1
            count = min(self._wanted - len(self._header), size - position)
            self._header += data[position : position + count]
            position += count
            if len(self._header) == self._wanted:
                header, self._header = self._header, b""
                self._step(header)
        return position

    def _step(self, header: bytes) -> None:
        """Read a header. Decide which header comes next, and how many bytes come before that header."""
        number = int.from_bytes(header, "little")
        match self._next:
            case _Next.FRAME if number == _MAGIC:
                self._expect(_Next.DESCRIPTOR, 1)
            case _Next.FRAME if number & ~0xF == _SKIPPABLE:
                self._expect(_Next.SKIPPABLE, struct.calcsize("<I"))
            case _Next.SKIPPABLE:
                self._expect(_Next.FRAME, _MAGIC_BYTES, number)
            case _Next.DESCRIPTOR:
                # Skip the rest of the frame header: window (unless `single`), dictionary, content size.
                single = number >> 5 & 1  # 1 for a frame of a single segment.
                self._checksum = _CHECKSUM_BYTES if number & 4 else 0
                skip = _ID_BYTES[number & 3] + (_SIZE_BYTES[number >> 6] or single) + 1 - single
                self._expect(_Next.BLOCK, _BLOCK_HEADER_BYTES, skip)
            case _Next.BLOCK if number >> 1 & 3 != _RESERVED:
                content = 1 if number >> 1 & 3 == _RLE else number >> 3  # RLE repeats one byte.
                if number & 1:  # The last block of its frame.
                    self._expect(_Next.FRAME, _MAGIC_BYTES, content + self._checksum)
                else:
                    self._expect(_Next.BLOCK, _BLOCK_HEADER_BYTES, content)
            case _:
                self._expect(_Next.LOST, 1)

    def _expect(self, what: _Next, size: int, skip: int = 0) -> None:
        self._next, self._wanted, self._skip = what, size, skip
