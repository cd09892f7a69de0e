"""File operations in the thread of an event loop: none of ours may wait for a disk there.

The instrument is the profiler of the interpreter, which reports each call of a function in C. Our code runs
as it is shipped.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import gazette

_OURS: Final = str(Path(gazette.__file__).parent)
_TESTING: Final = str(Path(_OURS, "testing"))
_OF_FILES: Final = frozenset(
    [
        "close",
        "copy_file_range",
        "fdatasync",
        "fstat",
        "fsync",
        "ftruncate",
        "link",
        "listdir",
        "lstat",
        "mkdir",
        "open",
        "posix_fallocate",
        "pread",
        "preadv",
        "pwrite",
        "pwritev",
        "read",
        "readv",
        "rename",
        "replace",
        "rmdir",
        "scandir",
        "sendfile",
        "stat",
        "symlink",
        "truncate",
        "unlink",
        "write",
        "writev",
        "flock",
        "lockf",
    ]
)
_OF_OBJECTS: Final = {
    "FileIO": frozenset(("close", "read", "readall", "readinto", "seek", "truncate", "write")),
    "BufferedReader": frozenset(("close", "read", "readinto", "readline", "seek")),
    "BufferedWriter": frozenset(("close", "flush", "seek", "write")),
    "BufferedRandom": frozenset(("close", "flush", "read", "seek", "truncate", "write")),
    "TextIOWrapper": frozenset(("close", "flush", "read", "readline", "write")),
    "Connection": frozenset(("backup", "close", "execute", "executemany", "pragma")),
    "Cursor": frozenset(("execute", "executemany", "fetchall", "fetchone")),
    "Rdict": frozenset(("close", "delete", "flush", "get", "put", "write")),
}


@contextmanager
def files_on_the_loop() -> Iterator[Counter[str]]:
    """Count the file operations of our code in this thread while its event loop runs, by place."""
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and (name := _operation(called)) and _is_loop():
            place = _place(frame)
            if place is not None:
                found[f"{name} in {place}"] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _operation(called: Any) -> str:
    """Return the name of a file operation; empty for other functions."""
    name: str = called.__name__
    owner = getattr(called, "__self__", None)
    if called.__module__ in ("posix", "fcntl"):
        return f"os.{name}" if name in _OF_FILES else ""
    if called.__module__ in ("io", "_io") and name == "open":
        return name
    kind = type(owner).__name__
    return f"{kind}.{name}" if name in _OF_OBJECTS.get(kind, ()) else ""


def _is_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _place(frame: FrameType | None) -> str | None:
    """Return the innermost function of ours; None if a test, a fixture, the log or an import calls."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS) and not file.startswith(_TESTING):
            return f"{Path(file).relative_to(_OURS)}:{frame.f_code.co_qualname}"
        if "/tests/" in file or "importlib" in file or file.endswith("logging/__init__.py"):
            return None
        frame = frame.f_back
    return None
