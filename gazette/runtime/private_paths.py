"""Directories and files of state on a local disk: only their owner may read them, whatever the umask."""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

_LOCK_POLL_S: Final = 0.05


def make_private_directory(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700. Leave the modes of existing directories.

    Raise ``OSError`` if that fails. (`Path.mkdir` gives parents the mode that the umask permits.)
    """
    missing = [directory]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        path.mkdir(0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """Open a file, with mode 0600 if it is new. Give this function to `open` as its ``opener``."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def append_private(path: Path) -> BinaryIO:
    """Open a file to append to it, with mode 0600 if it is new."""
    return open(path, "ab", opener=open_private)


@contextmanager
def locked_file(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file, which is created with mode 0600, during the block. Blocking.

    Raise ``BlockingIOError`` if another process keeps the lock for ``wait_s`` seconds, and ``OSError`` if the
    file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "r+b", 0) as lock:
        for attempt in itertools.count(1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt * _LOCK_POLL_S > wait_s:
                    raise
            threading.Event().wait(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A child of a fork may have the file open, too.
