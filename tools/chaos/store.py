"""A blob store that is broken, and brokers whose disk is full."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.protocol.codecs.codec import new_decompressor
from gazette.protocol.fragment import Fragment
from tools.chaos.payload import digest, ops_of

_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_IMMUTABLE: Final = 0x10
_DECODE_BYTES: Final = 1 << 30


class BreakableStore:
    """A directory of fragments. Each fault lasts until it is undone: `mend` undoes all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._hidden = directory.with_name(directory.name + ".hidden")

    def hide(self) -> None:
        """Move the directory away, with all that is in it."""
        self.directory.rename(self._hidden)

    def show(self) -> None:
        if not self._hidden.exists():
            return
        with contextlib.suppress(OSError):  # A broker made it again, and has nothing in it yet.
            self.directory.rmdir()
        self._hidden.rename(self.directory)

    def can_protect(self) -> bool:
        """Return True if ``protect`` works here: not for root on a file system without such a flag."""
        self.protect()
        try:
            (self.directory / ".probe").mkdir()
        except OSError:
            return True
        else:
            (self.directory / ".probe").rmdir()
            return False
        finally:
            self.unprotect()

    def protect(self) -> None:
        """Forbid to write anything new below the directory."""
        for directory in self._directories():
            _set_writable(directory, writable=False)

    def unprotect(self) -> None:
        for directory in self._directories():
            _set_writable(directory, writable=True)

    def mend(self) -> None:
        """Undo all faults."""
        self.show()
        self.unprotect()

    def _directories(self) -> Iterator[Path]:
        # From the top: brokers may create directories meanwhile, but not below a protected one.
        for path, _, _ in os.walk(self.directory):
            yield Path(path)


def _set_writable(directory: Path, *, writable: bool) -> None:
    if os.geteuid() != 0:
        directory.chmod(0o755 if writable else 0o555)
        return
    # Root may write whatever the mode is, but not with this flag.
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # Not every file system has it: `can_protect` finds out.
            (flags,) = struct.unpack("l", fcntl.ioctl(opened, _GET_FLAGS, struct.pack("l", 0)))
            flags = flags & ~_IMMUTABLE if writable else flags | _IMMUTABLE
            fcntl.ioctl(opened, _SET_FLAGS, struct.pack("l", flags))
    finally:
        os.close(opened)


def fill_disk(pid: int) -> None:
    """Let writes to files fail in a process, as on a full disk."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))


def empty_disk(pid: int) -> None:
    """Let files of the process grow again. Has no effect if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of a journal in a store: bytes from offset 0 on, zeros in ``holes``, and problems."""

    content: bytes
    holes: tuple[tuple[int, int], ...] = ()
    wrong: tuple[str, ...] = ()


def stored_spans(directory: Path, journal: str) -> list[tuple[int, int]]:
    """Return the offsets of a journal's fragments by the names of its files; none without a directory."""
    try:
        names = os.listdir(directory / journal)
    except FileNotFoundError:
        return []
    fragments = [Fragment.parse(journal, name) for name in names if _is_fragment(name)]
    return sorted((one.begin, one.end) for one in fragments)


def read_store(directory: Path, journal: str) -> Stored:
    """Read a journal by names and codecs of its files only. Wrong are files that differ from their
    names, and files that differ from each other."""
    content = bytearray()
    holes: list[tuple[int, int]] = []
    wrong: list[str] = []
    files = sorted((directory / journal).iterdir()) if (directory / journal).is_dir() else []
    for path in files:
        if not path.is_file() or not _is_fragment(path.name):
            continue
        fragment = Fragment.parse(journal, path.name)
        decoded = _decoded(fragment, path)
        if len(decoded) != fragment.length or digest(decoded) != fragment.sum.hex():
            wrong.append(f"{path.name} does not hold what its name says")
            continue
        if fragment.begin > len(content):
            holes.append((len(content), fragment.begin))
            content += bytes(fragment.begin - len(content))
        overlap = min(len(content), fragment.end) - fragment.begin
        if content[fragment.begin : fragment.begin + overlap] != decoded[:overlap]:
            wrong.append(f"{path.name} differs from the files before it")
        content += decoded[overlap:]
    return Stored(bytes(content), tuple(holes), tuple(wrong))


def stored_ops(directory: Path, journal: str) -> tuple[int, ...]:
    """Return the operations that have bytes in any fragment of a journal, also in one that another hides."""
    ops: set[int] = set()
    files = (directory / journal).iterdir() if (directory / journal).is_dir() else ()
    for path in files:
        if path.is_file() and _is_fragment(path.name):
            ops.update(ops_of(_decoded(Fragment.parse(journal, path.name), path)))
    return tuple(sorted(ops))


def _is_fragment(name: str) -> bool:
    """Return False for a file that is being written, and for what brokers leave at an end without etcd."""
    return not name.startswith((".", "closed-")) and ".unconfirmed-" not in name


def _decoded(fragment: Fragment, path: Path) -> bytes:
    decompressor = new_decompressor(fragment.codec)
    pieces = [decompressor.decompress(path.read_bytes(), _DECODE_BYTES)]
    while not decompressor.needs_input:
        pieces.append(decompressor.decompress(b"", _DECODE_BYTES))
    return b"".join(pieces) + decompressor.finish()
