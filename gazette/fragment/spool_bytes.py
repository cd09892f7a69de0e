"""Stage 6 of the byte path: the bytes of one spool, the newest in memory, all others in a local file.

The loop puts content into memory, and reads it there. Threads move content to the file, which is created by
then.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from gazette.errors import Unavailable
from gazette.fragment.local_file import Disk, SpoolFile
from gazette.fragment.spool_memory import SpoolMemory
from gazette.protocol.content import BytesLike

_PART_BYTES: Final = 1 << 18
"""Bytes of a part in memory. A thread writes one part at a time, and the loop may wait for its copy."""


class SpoolBytes:
    """The bytes of a spool. They live as long as this object; any number of threads may read.

    One owner puts or writes bytes, never both at a time. Content that is put at a position replaces all
    bytes from there on. ``memory`` may have bytes written to the file at any time.
    """

    __slots__ = (
        "__weakref__",
        "_begin",
        "_disk",
        "_disk_lock",
        "_file",
        "_length",
        "_lock",
        "_memory",
        "_parts",
        "_valid",
    )

    def __init__(self, disk: Disk, memory: SpoolMemory) -> None:
        self._disk = disk
        self._memory = memory
        # The thread that writes holds it; the loop never takes it.
        self._disk_lock = memory.pool.lock()
        # It guards the attributes below, and is never held during an operation of the disk.
        self._lock = threading.Lock()
        self._file: SpoolFile | None = None
        self._begin = 0
        """Position of the first byte in memory. Those before it are in the file."""
        self._parts: deque[bytes | bytearray] = deque()
        """The bytes in memory. Short content extends the last part, so that parts are few."""
        self._length = 0
        """Bytes in ``_parts``."""
        self._valid = 0
        """The end of the bytes that a thread writes now, or a lower end after a replacement."""

    @property
    def unwritten(self) -> int:
        """Number of bytes that are in memory only."""
        return self._length

    def put(self, content: bytes, position: int) -> None:
        """Put ``content`` at ``position`` into memory. On the loop."""
        with self._lock:
            before = self._length
            self._cut(position)
            self._extend(content)
            length = self._length - before
        self._memory.grew(self, length, first=not before)

    def write(self, content: bytes = b"", position: int | None = None) -> None:
        """Write what is in memory to the file, then ``content`` at ``position``. Blocks.

        Raise ``Unavailable``, for example if the disk is full. Then memory keeps its bytes, and any part of
        ``content`` may be written.
        """
        with self._disk_lock:
            if position is not None:
                self._forget(position)
            while self._move():
                pass
            if position is not None:
                self._write(content, position)
                with self._lock:
                    self._begin = position + len(content)

    def pread(self, length: int, position: int) -> bytes:
        """Read at most ``length`` bytes; fewer at the end. Blocks if they are in the file."""
        with self._lock:
            begin = self._begin
            kept = self._kept(length, position)
        if position >= begin:
            return kept
        assert self._file is not None
        return self._file.pread(min(length, begin - position), position) + kept

    def pread_now(self, length: int, position: int) -> BytesLike | None:
        """Read some of ``length`` bytes; none at the end. Return None if the read might have to wait."""
        with self._lock:
            begin = self._begin
            if position >= begin:
                return self._kept(length, position)
        assert self._file is not None
        return self._file.pread_now(min(length, begin - position), position)

    def truncate(self, length: int) -> None:
        """Free memory and space after the first ``length`` bytes. Blocks."""
        with self._disk_lock:
            self._forget(length)
            if self._file is not None:
                self._file.truncate(min(length, self._begin))

    def sibling(self) -> SpoolFile:
        """Create another file on the same disk. Blocks."""
        return self._disk.create()

    def __del__(self) -> None:
        self._memory.free(self._length)

    def _kept(self, length: int, position: int) -> bytes:
        """Return the part of ``length`` bytes that is in memory. The lock is held."""
        begin, end = max(0, position - self._begin), position + length - self._begin
        kept, at = [], 0
        for part in self._parts:
            after = at + len(part)
            if begin < after and at < end:
                with memoryview(part) as view:
                    kept.append(bytes(view[max(0, begin - at) : end - at]))
            at = after
        return b"".join(kept)

    def _extend(self, content: bytes) -> None:
        """Add ``content`` at the end. The lock is held."""
        last = self._parts[-1] if self._parts else b""
        if isinstance(last, bytearray) and len(last) + len(content) <= _PART_BYTES:
            last += content
        else:
            is_short = len(content) < _PART_BYTES // 8
            self._parts.append(bytearray(content) if is_short else content)
        self._length += len(content)

    def _cut(self, position: int) -> None:
        """Give up what is at ``position`` and beyond. The lock is held."""
        self._valid = min(self._valid, position)
        while self._parts and position < self._begin + self._length:
            last = self._parts.pop()
            self._length -= len(last)
            left = position - self._begin - self._length
            if left > 0:
                self._parts.append(last[:left])
                self._length += left
        self._begin = min(self._begin, position)

    def _forget(self, position: int) -> None:
        """Give up what is at ``position`` and beyond, in a thread."""
        with self._lock:
            before = self._length
            self._cut(position)
            self._memory.free(before - self._length)

    def _move(self) -> bool:
        """Move one part from memory to the file. Return False if there was none."""
        with self._lock:
            part, begin = bytes(self._parts[0]) if self._parts else b"", self._begin
            self._valid = begin + len(part)
        if not part:
            return False
        self._write(part, begin)
        with self._lock:
            written = self._valid - self._begin
            if written > 0:
                first = self._parts.popleft()
                if written < len(first):
                    self._parts.appendleft(first[written:])
                self._begin += written
                self._length -= written
                self._memory.free(written)
        return True

    def _write(self, content: bytes, position: int) -> None:
        try:
            if self._file is None:
                self._file = self._disk.create()
            self._file.pwrite(content, position)
        except Unavailable as error:
            self._memory.failed(error)
            raise
        self._memory.failing = False
