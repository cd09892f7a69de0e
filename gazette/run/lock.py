"""The lock of a directory: one `gazette run` at a time holds it. The file of the lock names that run."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Self

import msgspec

from gazette.errors import Conflict, Invalid
from gazette.runtime.decoders import json_decoder
from gazette.runtime.private_paths import make_private_directory

FILE = "run.lock"


class LockOwner(msgspec.Struct, frozen=True):
    """The process that has the lock, as the file of the lock names it."""

    pid: int
    target: str
    since: str


class RunLock:
    """The lock of ``directory``. Use as ``with``. The kernel releases the lock when the process ends.

    ``after_crash`` is True if the former owner ended without releasing the lock.
    """

    def __init__(self, directory: Path, target: str) -> None:
        self.after_crash = False
        self._path = directory / FILE
        self._target = target
        self._fd = -1

    def __enter__(self) -> Self:
        """Take the lock. Raise ``Conflict`` with its owner, or ``Invalid`` if the file cannot be written."""
        try:
            make_private_directory(self._path.parent)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock()
        except OSError as error:
            self._close()
            raise Invalid(
                f"cannot write to {self._path.parent}: {error.strerror}",
                path="--dir",
                hint="Give a directory that this user may write to, on a disk with free space.",
            ) from error
        return self

    def _lock(self) -> None:
        """Lock the open file, and write this process's entry. The former entry stays if that fails."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._owner()
            self._close()
            raise _lock_conflict(self._path.parent, owner) from None
        self.after_crash = os.fstat(self._fd).st_size > 0  # A release empties the file.
        own_entry = LockOwner(os.getpid(), self._target, time.strftime("%Y-%m-%d %H:%M:%S"))
        content = msgspec.json.encode(own_entry)
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))

    def is_lost(self) -> bool:
        """Return True if the lock's file is gone or replaced, because the directory was removed."""
        try:
            path_stat = os.stat(self._path)
        except OSError:
            return True
        lock_stat = os.fstat(self._fd)
        return (path_stat.st_dev, path_stat.st_ino) != (lock_stat.st_dev, lock_stat.st_ino)

    def __exit__(self, *exc_info: object) -> None:
        os.ftruncate(self._fd, 0)
        self._close()

    def _owner(self) -> LockOwner | None:
        try:
            return json_decoder(LockOwner).decode(os.pread(self._fd, 4096, 0))
        except msgspec.MsgspecError:
            return None  # The owner has not written its name yet.

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _lock_conflict(directory: Path, owner: LockOwner | None) -> Conflict:
    """Return the error for a lock that another process has. ``owner`` None: the process is unknown."""
    if owner is None:
        return Conflict(
            f"another process uses {directory}", hint="Stop it, or give another directory: --dir."
        )
    return Conflict(
        f"process {owner.pid} uses {directory}: it runs {owner.target} since {owner.since}",
        hint=f"Stop it (Ctrl-C there, or `kill {owner.pid}`), or give another directory: --dir.",
    )
