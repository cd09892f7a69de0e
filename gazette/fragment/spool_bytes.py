"""Stage 6 of the byte path: the bytes of one spool, the newest in memory, all others in a local file.

The event loop puts content into memory, and reads it there. Threads create the file, and move content to it.

A spool file ends with its process, as memory does. So bytes in memory are as durable as bytes in the file. A
short append need not wait for the disk. It waits only once the disk is too far behind, or has failed:
`SpoolMemory` bounds the bytes of a broker's spools that are not yet in a file. Long content always waits
until a thread has written it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import weakref
from collections import deque
from collections.abc import Collection
from typing import Final

from gazette.errors import Closed, Unavailable
from gazette.fragment.local_file import Disk, SpoolFile
from gazette.protocol.content import BytesLike
from gazette.runtime.tasks import Pool, submitted

log = logging.getLogger(__name__)

LIMIT_BYTES: Final = 1 << 26
_WRITTEN_FROM: Final = 16
"""Threads begin to write once the limit divided by this number, in bytes, is in memory."""
_PART_BYTES: Final = 1 << 18
"""Bytes up to which content is joined into one part in memory. A thread copies a part under the lock, for
which the loop may wait, and then writes the copy."""


class SpoolBytes:
    """The bytes of a spool, which live as long as this object. Any number of threads may read.

    One owner puts or writes bytes, never both at a time. Content that is put at a position replaces all
    bytes from there on. ``memory`` may write bytes to the file at any time, in a thread.
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
        # The thread that writes holds this lock; the event loop never takes it.
        self._disk_lock = memory.pool.lock()
        # This lock guards the attributes below. No thread holds it during an operation of the disk.
        self._lock = threading.Lock()
        self._file: SpoolFile | None = None  # None: all bytes are in memory.
        self._begin = 0
        """Position of the first byte in memory. All bytes before it are in the file."""
        self._parts: deque[bytes | bytearray] = deque()
        """The bytes in memory. Short content extends the last part, so that parts are few."""
        self._length = 0
        """Bytes in ``_parts``."""
        self._valid = 0
        """End of the bytes that a thread writes now. If the loop replaces some of them, the end is lower."""

    @property
    def unwritten(self) -> int:
        """Number of bytes that are in memory only."""
        return self._length

    def put(self, content: bytes, position: int) -> None:
        """Put ``content`` at ``position`` into memory. Call it on the event loop."""
        with self._lock:
            former_length = self._length
            self._cut(position)
            self._extend(content)
            length = self._length - former_length
        self._memory.grew(self, length, first=not former_length)

    def write(self, content: bytes = b"", position: int | None = None) -> None:
        """Write the bytes in memory to the file, then ``content`` at ``position``. Call it in a thread.

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
        """Read at most ``length`` bytes; fewer at the end. Block if the bytes are in the file."""
        with self._lock:
            begin = self._begin
            from_memory = self._kept(length, position)
        if position >= begin:
            return from_memory
        assert self._file is not None
        return self._file.pread(min(length, begin - position), position) + from_memory

    def pread_now(self, length: int, position: int) -> BytesLike | None:
        """Read some of ``length`` bytes; none at the end. Return None if the read might have to wait."""
        with self._lock:
            begin = self._begin
            if position >= begin:
                return self._kept(length, position)
        assert self._file is not None
        return self._file.pread_now(min(length, begin - position), position)

    def truncate(self, length: int) -> None:
        """Free memory and disk space after the first ``length`` bytes. Call it in a thread."""
        with self._disk_lock:
            self._forget(length)
            if self._file is not None:
                self._file.truncate(min(length, self._begin))

    def sibling(self) -> SpoolFile:
        """Create another file on the same disk. Call it in a thread."""
        return self._disk.create()

    def __del__(self) -> None:
        self._memory.free(self._length)

    def _kept(self, length: int, position: int) -> bytes:
        """Return the part of ``length`` bytes that is in memory. The lock is held."""
        begin, end = max(0, position - self._begin), position + length - self._begin
        chunks, part_begin = [], 0
        for part in self._parts:
            part_end = part_begin + len(part)
            if begin < part_end and part_begin < end:
                with memoryview(part) as view:
                    chunks.append(bytes(view[max(0, begin - part_begin) : end - part_begin]))
            part_begin = part_end
        return b"".join(chunks)

    def _extend(self, content: bytes) -> None:
        """Add ``content`` at the end. The lock is held."""
        last_part = self._parts[-1] if self._parts else b""
        if isinstance(last_part, bytearray) and len(last_part) + len(content) <= _PART_BYTES:
            last_part += content
        else:
            is_short = len(content) < _PART_BYTES // 8
            self._parts.append(bytearray(content) if is_short else content)
        self._length += len(content)

    def _cut(self, position: int) -> None:
        """Give up the bytes at ``position`` and beyond. The lock is held."""
        self._valid = min(self._valid, position)
        while self._parts and position < self._begin + self._length:
            part = self._parts.pop()
            self._length -= len(part)
            kept_length = position - self._begin - self._length
            if kept_length > 0:
                self._parts.append(part[:kept_length])
                self._length += kept_length
        self._begin = min(self._begin, position)

    def _forget(self, position: int) -> None:
        """Give up the bytes at ``position`` and beyond, in a thread."""
        with self._lock:
            former_length = self._length
            self._cut(position)
            self._memory.free(former_length - self._length)

    def _move(self) -> bool:
        """Move one part from memory to the file. Return False if memory has no part."""
        with self._lock:
            part, begin = bytes(self._parts[0]) if self._parts else b"", self._begin
            self._valid = begin + len(part)
        if not part:
            return False
        self._write(part, begin)
        with self._lock:
            # The loop may have cut this part during the write, or added to it: bytes from `_valid` on stay.
            written = self._valid - self._begin
            if written > 0:
                first_part = self._parts.popleft()
                if written < len(first_part):
                    self._parts.appendleft(first_part[written:])
                self._begin += written
                self._length -= written
                self._memory.free(written)
        return True

    def _write(self, content: bytes, position: int) -> None:
        """Write to the file, which is made by the first write. Report success or failure to ``memory``."""
        try:
            if self._file is None:
                self._file = self._disk.create()
            self._file.pwrite(content, position)
        except Unavailable as error:
            self._memory.failed(error)
            raise
        self._memory.failing = False


class SpoolMemory:
    """Counts bytes that are in memory only: at most ``limit``. Loop-bound, except where stated.

    ``pool`` runs the writes to the disk, one call at a time for all spools.
    """

    def __init__(self, pool: Pool, limit: int = LIMIT_BYTES) -> None:
        self.pool = pool
        self.limit = limit
        self.failing = False
        """True after a failed write, until another write succeeds. Threads set it."""
        self._unwritten = 0
        self._freed: deque[int] = deque()
        """Lengths that any thread has freed, and the event loop has not subtracted yet."""
        self._holders: weakref.WeakKeyDictionary[SpoolBytes, None] = weakref.WeakKeyDictionary()
        """All spools with bytes in memory, and some that had them."""
        self._writing: concurrent.futures.Future[None] | None = None  # The last call of `_write`.

    @property
    def unwritten(self) -> int:
        """Number of bytes that are in memory only."""
        freed = self._freed
        while freed:
            self._unwritten -= freed.popleft()
        return self._unwritten

    @property
    def room(self) -> int:
        """Bytes that may be put into memory now, to be written later."""
        return 0 if self.failing else max(self.limit - self.unwritten, 0)

    def takes(self, length: int) -> bool:
        """Return True if ``length`` more bytes may be put into memory, to be written later."""
        return not self.failing and self.unwritten + length <= self.limit

    def grew(self, holder: SpoolBytes, length: int, *, first: bool) -> None:
        """Count ``length`` more bytes of ``holder`` (negative: fewer). ``first``: ``holder`` was empty.

        Have a thread write to files once a part of the limit is in memory (`_WRITTEN_FROM`).
        """
        if first:
            self._holders[holder] = None
        self._unwritten += length
        if self.unwritten * _WRITTEN_FROM >= self.limit and not self._is_writing:
            holders = [spool for spool in self._holders if spool.unwritten]
            self._holders = weakref.WeakKeyDictionary(dict.fromkeys(holders))
            try:
                self._writing = submitted(self.pool, "the broker ends", _write, holders)
            except Unavailable as error:  # The next append waits for a thread, or fails.
                self.failed(error)
            except Closed:
                pass  # The broker ends, and memory keeps the bytes until then.

    def free(self, length: int) -> None:
        """Count ``length`` fewer bytes. Call it in any thread, also while the garbage collector runs."""
        self._freed.append(length)

    def failed(self, error: Unavailable) -> None:
        """Take nothing into memory until a write succeeds. Log the first failure. Call it in any thread."""
        if not self.failing:
            log.warning(
                "appended bytes stay in memory, and appends are refused until one can be written: %(error)s",
                # Log the text only: a record with the error would keep a spool's bytes, by the traceback.
                {"error": str(error)},
            )
        self.failing = True

    @property
    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()


def _write(holders: Collection[SpoolBytes]) -> None:
    """Write whole spools, the longest first, until half of all bytes are written. Call it in a thread."""
    remaining = sum(spool.unwritten for spool in holders) // 2
    for holder in sorted(holders, key=lambda spool: spool.unwritten, reverse=True):
        if remaining <= 0:
            break
        remaining -= holder.unwritten
        try:
            holder.write()
        except Unavailable:
            break  # The spool has reported the failure. The next append tries again.
