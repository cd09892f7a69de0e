"""Stage 6 of the byte path: the bytes of one spool, in a local file that has no name.

`Disk` is the seam between a broker and its local disk. A simulation or a test passes its own to
`BrokerService` (``disk=``), or to a `Spool`: one that is full, slow, or fails. Nothing else in a broker
opens spool files.

The file is unlinked as soon as it is open: it ends with the process, and nothing is ever left to
clean up. It is not synced either: a commit is as durable as the brokers that hold it, until the
fragment is in a blob store.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from gazette.errors import Bug, Corrupt, Unavailable
from gazette.protocol.fragment import Fragment
from gazette.protocol.ids import Offset


class SpoolFile(Protocol):
    """A file of a `Disk`. It lives as long as this object; any number of threads may use it.

    Every method blocks for as long as the disk does, and may raise ``Unavailable``.
    """

    def pwrite(self, content: bytes, position: int) -> None:
        """Write all of ``content`` at ``position``. After an error, any part of it may be written."""
        ...

    def pread(self, length: int, position: int) -> bytes:
        """Read at most ``length`` bytes; fewer at the end of the file."""
        ...

    def truncate(self, length: int) -> None:
        """Free what is behind the first ``length`` bytes."""
        ...

    def sibling(self) -> SpoolFile:
        """Create another file on the same disk."""
        ...


class Disk(Protocol):
    """Where a broker keeps spool files."""

    def create(self) -> SpoolFile:
        """Create an empty file. Blocks. Raises ``Unavailable`` if that is not possible."""
        ...


class LocalDisk:
    """Spool files in ``directory`` (default: that of temporary files)."""

    __slots__ = ("directory",)

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory if directory is not None else Path(tempfile.gettempdir())

    def create(self) -> LocalFile:
        return LocalFile(self.directory)


class LocalFile:
    """A file for whoever holds this object: the spool, its readers, the persister.

    The descriptor is closed, and the disk space freed, when the last of them lets go: references
    to this object are the reference count. Writes and reads name their position, so that readers
    and the one writer do not disturb each other, in whatever thread they are.
    """

    __slots__ = ("_fd", "directory")

    def __init__(self, directory: Path) -> None:
        """Create a file in ``directory``. Raises ``Unavailable`` if that is not possible."""
        self._fd = -1
        self.directory = directory
        try:
            self._fd, path = tempfile.mkstemp(prefix="spool", dir=directory)
            os.unlink(path)
        except OSError as error:
            raise disk_error("create a spool file", directory, error) from error

    def pwrite(self, content: bytes, position: int) -> None:
        """Write all of ``content`` at ``position``.

        Raises ``Unavailable``, as when the disk is full; then any part of it may be written.
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
        """Read at most ``length`` bytes; fewer at the end of the file."""
        try:
            return os.pread(self._fd, length, position)
        except OSError as error:
            raise disk_error("read a spool file", self.directory, error) from error

    def truncate(self, length: int) -> None:
        """Free what is behind the first ``length`` bytes."""
        try:
            os.ftruncate(self._fd, length)
        except OSError as error:
            raise disk_error("truncate a spool file", self.directory, error) from error

    def sibling(self) -> Self:
        """Create another file in the same directory."""
        return type(self)(self.directory)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


@dataclass(frozen=True, slots=True)
class LocalFragment:
    """A committed fragment whose bytes are in a local file, which may still grow behind it."""

    fragment: Fragment
    file: SpoolFile

    @property
    def begin(self) -> Offset:
        return self.fragment.begin

    @property
    def end(self) -> Offset:
        return self.fragment.end

    def pread(self, offset: Offset, length: int) -> bytes:
        """At most ``length`` bytes from journal offset ``offset`` on; none at the end.

        From the page cache, as a rule. Raises ``Bug`` for an offset before the fragment, and
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
    """What an error of the local disk means to whoever appends or persists."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    return Unavailable(
        f"cannot {doing}: {error.strerror or error} ({code})",
        hint=f"Free space in, or repair, {directory}; the operation may then be repeated.",
        directory=directory,
        errno=code,
    )
