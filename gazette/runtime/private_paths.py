"""Directories and files of state on a local disk: only their owner may read them, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def make_private_directory(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700. Leave the modes of existing ones.

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
