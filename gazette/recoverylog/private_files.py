"""Files and directories of a shard's state on a local disk: only their owner may read them.

Modes do not depend on the process's umask. A directory of a state is never a symbolic link.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from pathlib import Path
from typing import Final

from gazette.errors import Invalid

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_ROOT: Final = 0
_OWNER_ONLY: Final = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, permissions, 0xFFFFFFFF)
    for tag, permissions in ((0x01, 7), (0x04, 0), (0x20, 0))
)
"""A POSIX ACL of version 2 as Linux stores it: all rights for the owner, none for others."""


def make_private(directory: Path) -> None:
    """Create a directory that only this user may enter, and its parents. Make an existing directory private.

    Raise ``Invalid`` if the directory is a file, a symbolic link, or another user's. Raise it, too, if the
    nearest parent that exists belongs neither to this user nor to root.
    """
    os.close(_open_private(directory))


def empty_private(directory: Path) -> None:
    """Call `make_private`, and remove the content of the directory. The directory stays the same."""
    descriptor = _open_private(directory)
    try:
        with os.scandir(descriptor) as entries:
            children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_directory in children:
            if is_directory:
                shutil.rmtree(name, dir_fd=descriptor)
            else:
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _open_private(directory: Path) -> int:
    """Make a private directory as `make_private` does, with the same errors. Return its descriptor."""
    missing = [directory]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    # A parent of another user would let that user replace the directory.
    _require_owner(missing[-1].parent, os.stat(missing[-1].parent), (os.geteuid(), _ROOT))
    for path in reversed(missing):
        try:
            path.mkdir(DIRECTORY_MODE)
        except FileExistsError:  # Another process has made it meanwhile.
            continue
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(directory, flags)
    except NotADirectoryError as error:
        raise Invalid(
            "the directory for recovered files is a file or a symbolic link",
            directory=str(directory),
            hint="Remove it, or choose another directory.",
        ) from error
    try:
        _require_owner(directory, os.fstat(descriptor), (os.geteuid(),))
        os.fchmod(descriptor, DIRECTORY_MODE)
        _make_content_private(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make_content_private(directory: int) -> None:
    """Make every file private that any code creates in a directory from now on, by a default ACL.

    RocksDB's files get the mode that the umask permits, and a umask applies to the whole process. On a
    file system without ACLs, the directory's mode still keeps other users out.
    """
    if not hasattr(os, "setxattr"):
        return
    with contextlib.suppress(OSError):
        os.setxattr(directory, "system.posix_acl_default", _OWNER_ONLY)


def _require_owner(directory: Path, status: os.stat_result, owners: tuple[int, ...]) -> None:
    if status.st_uid not in owners:
        raise Invalid(
            "the directory for recovered files belongs to another user, which could replace them",
            directory=str(directory),
            owner=status.st_uid,
            hint="Choose a directory that belongs to this user or to root.",
        )


def write_private(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write a file that only this user may read. With ``new``, raise ``FileExistsError`` if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else os.O_TRUNC)
    with open(os.open(path, flags, FILE_MODE), "wb") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write(data)


def copy_private(source: Path, target: Path) -> Path:
    """Copy a file. Only this user may read the copy. Raise ``FileExistsError`` if ``target`` exists."""
    write_private(target, b"", new=True)
    shutil.copyfile(source, target)
    return target


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset of a file. A system call may write less."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
