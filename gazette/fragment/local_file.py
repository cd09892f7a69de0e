"""Stage 6 of the byte path: the bytes of one spool, in a local file without a name.

`Disk` is the seam between a broker and its local disk. A simulation or a test passes its own
to `BrokerService` (``disk=``), or to a `Spool`: one that is full, slow, or fails. Nothing else
in a broker opens spool files.

The file is unlinked as soon as it is open: it ends with the process, and leaves nothing to clean up. It is
not synced either: a commit is as durable as the brokers that hold it, until the fragment is in a blob store.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import resource
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec

from gazette.errors import Bug, Corrupt, Unavailable
from gazette.fragment.disk_pace import Pace, Switches
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset
from gazette.runtime.clock import SystemClock

log = logging.getLogger(__name__)


def thread_switches() -> Switches | None:
    """Return the context switches of the calling thread. Return None where the system does not count them."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return None
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw, usage.ru_nivcsw


class SpoolFile(Protocol):
    """A file of a `Disk`. It lives as long as this object; any number of threads may use it.

    All methods block as long as the disk does, and may raise ``Unavailable``.
    """

    def pwrite(self, content: bytes, position: int) -> None:
        """Write all of ``content`` at ``position``. After an error, any part of it may be written."""
        ...

    def pread(self, length: int, position: int) -> bytes:
        """Read at most ``length`` bytes; fewer at the end of the file."""
        ...

    def truncate(self, length: int) -> None:
        """Free the space after the first ``length`` bytes."""
        ...

    def sibling(self) -> SpoolFile:
        """Create another file on the same disk."""
        ...


class Disk(Protocol):
    """The place where a broker keeps spool files."""

    def create(self) -> SpoolFile:
        """Create an empty file. Blocks. Raise ``Unavailable`` if that is not possible."""
        ...


_LARGE_BYTES: Final = 1 << 22


class Closer:
    """Closes files: to free the space of a large one may take the disk seconds.

    Large files are closed on a thread of their own; so are all files once a small one was slow.
    Call ``close`` in any thread, where the last reference to a file ends. The system closes the
    rest at the end of the process.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.process = os.getpid()
        self._pace = Pace(monotonic)
        self._files: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="spool closer", daemon=True).start()

    def close(self, fd: int, length: int) -> None:
        if length <= _LARGE_BYTES and self._pace.is_fast:
            self._close(fd)
        else:
            self._files.put(fd)

    def _close(self, fd: int) -> None:
        began = self._pace.begin()
        try:
            os.close(fd)
        except OSError as error:
            log.warning("a spool file was not closed: %(error)s", {"error": error})
        self._pace.note(began, _LARGE_BYTES)

    def _run(self) -> None:
        while True:
            self._close(self._files.get())


class _Closers:
    """The closer of this process: threads do not survive a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: Closer | None = None

    def present(self) -> Closer:
        with self._lock:
            if self._present is None or self._present.process != os.getpid():
                self._present = Closer(SystemClock().monotonic)
            return self._present


_closers: Final = _Closers()


class LocalDisk:
    """Keeps spool files in ``directory`` (default: that of temporary files)."""

    __slots__ = ("directory",)

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory if directory is not None else Path(tempfile.gettempdir())

    def create(self) -> LocalFile:
        return LocalFile(self.directory)


class LocalFile:
    """A file that several owners share: the spool, its readers, the persister.

    References to this object are the reference count. When the last one ends, or soon after, the descriptor
    is closed and the disk space freed. Writes and reads name their position. So readers and the one writer do
    not disturb each other, in any thread.
    """

    __slots__ = ("_closer", "_end", "_fd", "directory")

    def __init__(self, directory: Path) -> None:
        """Create a file in ``directory``. Raise ``Unavailable`` if that is not possible."""
        self._fd = -1
        self._end = 0
        self._closer = _closers.present()
        self.directory = directory
        try:
            self._fd, path = tempfile.mkstemp(prefix="spool", dir=directory)
            os.unlink(path)
        except OSError as error:
            raise disk_error("create a spool file", directory, error) from error

    def pwrite(self, content: bytes, position: int) -> None:
        """Write all of ``content`` at ``position``.

        Raise ``Unavailable``, as when the disk is full; then any part of it may be written.
        """
        self._end = max(self._end, position + len(content))
        view = memoryview(content)
        try:
            while view:
                written = os.pwrite(self._fd, view, position)
                position += written
                view = view[written:]
        except OSError as error:
            raise disk_error("write to a spool file", self.directory, error) from error

    def pread(self, length: int, position: int) -> bytes:
        """Read at most ``length`` bytes; fewer at the end of the file."""
        try:
            return os.pread(self._fd, length, position)
        except OSError as error:
            raise disk_error("read a spool file", self.directory, error) from error

    def truncate(self, length: int) -> None:
        """Free the space after the first ``length`` bytes."""
        try:
            os.ftruncate(self._fd, length)
            self._end = length
        except OSError as error:
            raise disk_error("truncate a spool file", self.directory, error) from error

    def sibling(self) -> Self:
        """Create another file in the same directory."""
        return type(self)(self.directory)

    def __del__(self) -> None:
        if self._fd >= 0:
            self._closer.close(self._fd, self._end)


class LocalFragment(msgspec.Struct, frozen=True):
    """A committed fragment whose bytes are in a local file, which may grow beyond it."""

    fragment: Fragment
    file: SpoolFile

    @property
    def begin(self) -> Offset:
        return self.fragment.begin

    @property
    def end(self) -> Offset:
        return self.fragment.end

    def pread(self, offset: Offset, length: int) -> bytes:
        """Return at most ``length`` bytes from journal offset ``offset`` on; none at the end.

        They usually come from the page cache. Raise ``Bug`` for an offset before the fragment, and
        ``Corrupt`` if the file is shorter than the fragment.
        """
        fragment = self.fragment
        if offset < fragment.begin:
            raise Bug("read before the fragment", journal=fragment.journal, offset=offset)
        wanted = min(length, fragment.end - offset)
        if wanted <= 0:
            return b""
        content = self.file.pread(wanted, offset - fragment.begin)
        if not content:
            raise Corrupt(
                "spool file is shorter than its fragment",
                journal=fragment.journal,
                offset=offset,
                end=fragment.end,
            )
        return content


def disk_error(doing: str, directory: Path, error: OSError) -> Unavailable:
    """Return the error with which an append or upload fails for an error of the local disk."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    return Unavailable(
        f"cannot {doing}: {error.strerror or error} ({code})",
        hint=f"Free space in {directory}, or repair its disk. The operation may then be repeated.",
        directory=directory,
        errno=code,
    )
