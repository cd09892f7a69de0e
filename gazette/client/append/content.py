"""Stage 1 of the byte path: content that waits to be appended, in memory and, past a bound, in a file."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Final

from gazette.protocol.content import CHUNK_BYTES, BytesLike

SEGMENT_BYTES: Final = CHUNK_BYTES
SPILL_FILE_BYTES: Final = 64 << 20
"""Bytes after which a spill file takes no more content. It is deleted when all its content was appended."""


class MemoryBudget:
    """The bytes of waiting content that may be in memory. Thread-safe.

    One budget may be shared by all append services of a process, which then bound their sum.
    """

    __slots__ = ("_lock", "bytes_max", "used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._lock = threading.Lock()

    def add(self, length: int) -> None:
        with self._lock:
            self.used += length


class SpillFile:
    """An unlinked temporary file. Spans of it are reserved under the service's mutex, and written and read
    without the mutex. It is closed when it is retired and holds no segment any more."""

    __slots__ = ("_descriptor", "_end", "_live", "_retired")

    def __init__(self, directory: Path | None) -> None:
        descriptor, path = tempfile.mkstemp(prefix="gazette-append", dir=directory)
        os.unlink(path)
        self._descriptor = descriptor
        self._end = 0
        self._live = 0
        self._retired = False

    @property
    def full(self) -> bool:
        return self._end >= SPILL_FILE_BYTES

    def reserve(self, length: int) -> int:
        """Reserve a span of ``length`` bytes for the caller. Return its offset."""
        if self._live == 0:
            self._end = 0
        offset = self._end
        self._end += length
        self._live += 1
        return offset

    def give_back(self) -> None:
        """Free a reserved span."""
        self._live -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Reserve nothing more from now on. May be repeated."""
        self._retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._live == 0 and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, offset: int, data: BytesLike) -> None:
        """Write ``data`` at ``offset``. Raise ``OSError``, such as for a full disk; the span may then be
        written again."""
        view = memoryview(data)
        while view.nbytes:
            written = os.pwrite(self._descriptor, view, offset)
            offset += written
            view = view[written:]

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes at ``offset``. Raise ``OSError``."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise OSError(f"short read of a spill file ({len(data)} of {length} bytes)")
        return data


class Segment:
    """A run of content, of about a chunk: in memory (``data``), or at ``offset`` of ``file``.

    It moves from memory to the file at most once, under the service's mutex. A reader takes ``data`` first,
    and needs the file only if that is None.
    """

    __slots__ = ("data", "dropped", "file", "length", "offset")

    def __init__(self, data: BytesLike) -> None:
        self.data: BytesLike | None = data
        self.length = len(data)
        self.file: SpillFile | None = None
        self.offset = 0
        self.dropped = False

    def move(self, file: SpillFile, offset: int) -> None:
        self.file, self.offset, self.data = file, offset, None

    def drop(self) -> int:
        """Forget the content; return the bytes of memory that this freed. May be repeated."""
        self.dropped = True
        freed = self.length if self.data is not None else 0
        self.data = None
        if self.file is not None:
            self.file.give_back()
            self.file = None
        return freed

    def load(self) -> BytesLike:
        """Return the content. Blocks as long as the file does. Raise ``OSError``."""
        data = self.data
        if data is not None:
            return data
        assert self.file is not None, "a dropped segment is not read"
        return self.file.read(self.offset, self.length)


def segments_of(content: BytesLike) -> list[Segment]:
    """Copy content into segments. The caller may change ``content`` afterwards."""
    view = memoryview(content).cast("B")
    return [
        Segment(bytes(view[begin : begin + SEGMENT_BYTES]))
        for begin in range(0, view.nbytes, SEGMENT_BYTES)
    ]
