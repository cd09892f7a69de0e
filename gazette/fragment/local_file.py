"""Stage 6 of the byte path: the bytes of one spool, in a local file without a name.

A broker opens spool files only by a `Disk`. So a simulation or a test can give a disk that is full, slow, or
fails, to `BrokerService` (``disk=``) or to a `Spool`.

The file is unlinked as soon as it is open: it ends with the process, and leaves nothing to clean up. The file
is never synced. Until the fragment is in a blob store, a commit is as durable as the brokers that hold it.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import tempfile
import threading
from pathlib import Path
from typing import Final, NoReturn, Protocol, Self

import msgspec

from gazette.errors import Bug, Corrupt, Unavailable
from gazette.protocol.content import BytesLike
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset

log = logging.getLogger(__name__)

_NO_WAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)
"""Flag of a read that fails if it would wait for the disk; None: the system has no such flag."""
_WOULD_WAIT: Final = (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS)


class SpoolContent(Protocol):
    """Bytes that are read by position. They live as long as this object; any number of threads may use it.

    All methods may raise ``Unavailable``.
    """

    def pread(self, length: int, position: int) -> bytes:
        """Read at most ``length`` bytes; fewer at the end. Block as long as the disk does."""
        ...

    def pread_now(self, length: int, position: int) -> BytesLike | None:
        """Read some of ``length`` bytes; none at the end. Return None if the read might have to wait."""
        ...

    def sibling(self) -> SpoolFile:
        """Create a file on the same disk. Block as long as the disk does."""
        ...


class SpoolFile(SpoolContent, Protocol):
    """A file of a `Disk`. Methods that change the file block as long as the disk does."""

    def pwrite(self, content: bytes, position: int) -> None:
        """Write all of ``content`` at ``position``. After an error, any part of it may be written."""
        ...

    def truncate(self, length: int) -> None:
        """Free the space after the first ``length`` bytes."""
        ...


class Disk(Protocol):
    """The place where a broker keeps spool files."""

    def create(self) -> SpoolFile:
        """Create an empty file. Block as long as the disk does. Raise ``Unavailable`` if that fails."""
        ...


class Closer:
    """Closes files in a thread: to free the space of a file may take the disk seconds.

    Call ``close`` in any thread, where the last reference to a file ends. At the end of the process, the
    system closes the files that are left.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._files: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="spool closer", daemon=True).start()

    def close(self, fd: int) -> None:
        self._files.put(fd)

    def _run(self) -> None:
        while True:
            try:
                os.close(self._files.get())
            except OSError as error:
                log.warning("a spool file was not closed: %(error)s", {"error": error})


class _Closers:
    """The closer of this process. A forked child needs its own: threads do not survive a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: Closer | None = None

    def present(self) -> Closer:
        with self._lock:
            if self._present is None or self._present.process != os.getpid():
                self._present = Closer()
            return self._present


_closers: Final = _Closers()


class LocalDisk:
    """Keeps spool files in ``directory`` (default: the directory of temporary files)."""

    __slots__ = ("directory",)

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory if directory is not None else Path(tempfile.gettempdir())

    def create(self) -> LocalFile:
        return LocalFile(self.directory)


class LocalFile:
    """A file that several owners share: the spool, its readers, the persister.

    The file lives as long as references to this object. Soon after the last reference ends, the descriptor is
    closed and the disk space freed. Writes and reads name their position. So readers and the one writer do
    not disturb each other, in any thread.
    """

    __slots__ = ("_closer", "_fd", "directory")

    def __init__(self, directory: Path) -> None:
        """Create a file in ``directory``. Raise ``Unavailable`` if that is not possible."""
        self._fd = -1
        self._closer = _closers.present()
        self.directory = directory
        try:
            self._fd, path = tempfile.mkstemp(prefix="spool", dir=directory)
            os.unlink(path)
        except OSError as error:
            raise disk_error("create a spool file", directory, error) from error

    def pwrite(self, content: bytes, position: int) -> None:
        """Write all of ``content`` at ``position``.

        Raise ``Unavailable``, as when the disk is full. Then any part of ``content`` may be written.
        """
        view = memoryview(content)
        try:
            while view:
                written = os.pwrite(self._fd, view, position)
                position += written
                view = view[written:]
        except OSError as error:
            raise disk_error("write to a spool file", self.directory, error) from error

    def pread(self, length: int, position: int) -> bytes:
        """Read at most ``length`` bytes; fewer at the file's end. Raise ``Unavailable`` if the disk fails."""
        try:
            return os.pread(self._fd, length, position)
        except OSError as error:
            raise disk_error("read a spool file", self.directory, error) from error

    def pread_now(self, length: int, position: int) -> BytesLike | None:
        """Read as many of ``length`` bytes as the page cache has. Return None if the cache may lack the first
        byte: always outside of Linux, and on some file systems. Raise ``Unavailable`` if the disk fails."""
        if _NO_WAIT is None:
            return None
        content = bytearray(length)
        try:
            del content[os.preadv(self._fd, [content], position, _NO_WAIT) :]
        except OSError as error:
            if error.errno in _WOULD_WAIT:
                return None
            raise disk_error("read a spool file", self.directory, error) from error
        return content

    def truncate(self, length: int) -> None:
        """Free the space after the first ``length`` bytes. Raise ``Unavailable`` if the disk fails."""
        try:
            os.ftruncate(self._fd, length)
        except OSError as error:
            raise disk_error("truncate a spool file", self.directory, error) from error

    def sibling(self) -> Self:
        """Create another file in the same directory."""
        return type(self)(self.directory)

    def __del__(self) -> None:
        if self._fd >= 0:
            self._closer.close(self._fd)


class LocalFragment(msgspec.Struct, frozen=True):
    """A committed fragment whose bytes are local, in memory or a file. Its spool may grow beyond it.

    ``begin`` and ``end`` are copies of the fragment's.
    """

    fragment: Fragment
    file: SpoolContent
    begin: Offset
    end: Offset

    @classmethod
    def of(cls, fragment: Fragment, file: SpoolContent) -> Self:
        return cls(fragment, file, fragment.begin, fragment.end)

    def pread(self, offset: Offset, length: int) -> bytes:
        """Return at most ``length`` bytes from journal offset ``offset`` on; none at the end.

        Block as long as the disk does. Raise ``Bug`` for an offset before the fragment, and ``Corrupt`` if
        the file is shorter than the fragment.
        """
        position, read_length = self._place(offset, length)
        if not read_length:
            return b""
        content = self.file.pread(read_length, position)
        return content or self._shorter(offset)

    def pread_now(self, offset: Offset, length: int) -> BytesLike | None:
        """Return some bytes as ``pread`` does, without waiting. Return None if a read might have to wait."""
        position, read_length = self._place(offset, length)
        if not read_length:
            return b""
        content = self.file.pread_now(read_length, position)
        return content if content or content is None else self._shorter(offset)

    def _place(self, offset: Offset, length: int) -> tuple[int, int]:
        """Return position and length of the bytes to read from the file."""
        fragment = self.fragment
        if offset < fragment.begin:
            raise Bug("read before the fragment", journal=fragment.journal, offset=offset)
        return offset - fragment.begin, max(0, min(length, fragment.end - offset))

    def _shorter(self, offset: Offset) -> NoReturn:
        raise Corrupt(
            "spool file is shorter than its fragment",
            journal=self.fragment.journal,
            offset=offset,
            end=self.fragment.end,
        )


def disk_error(doing: str, directory: Path, error: OSError) -> Unavailable:
    """Return the error with which an append or upload fails for an error of the local disk."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    return Unavailable(
        f"cannot {doing}: {error.strerror or error} ({code})",
        hint=f"Free space in {directory}, or repair its disk. The operation may then be repeated.",
        directory=directory,
        errno=code,
    )
