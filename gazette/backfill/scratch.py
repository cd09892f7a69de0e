"""Directories for what a backfill builds on a local disk, and how those are found whose process has died.

Each is locked for as long as its process lives: the system lets go of a lock whenever a process ends, in
whatever way. One that can be locked by somebody else is abandoned.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.errors import Invalid

BUILDS: Final = "gazette-backfill-"
REPLAYS: Final = "gazette-replay-"
OPENED: Final = "gazette-verify-"
FORMER: Final = "gazette-former-"
_NEW: Final = ".new-"
_OURS: Final = re.compile(
    rf"({re.escape(_NEW)})?({'|'.join((BUILDS, REPLAYS, OPENED, FORMER))})[a-z0-9_]{{8}}"
)
"""Names that `tempfile.mkdtemp` makes of prefixes. Whatever else is called like that is somebody's own."""
_NEW_S: Final = 60.0
"""A directory has another name until it is locked, which takes no time: after as long, nobody does it."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A directory whose process has died. ``size`` in bytes, ``mod_time`` in Unix seconds."""

    path: Path
    size: int
    mod_time: float


@contextmanager
def scratch_directory(prefix: str, parent: Path | None) -> Iterator[Path]:
    """A new directory, below ``parent`` or where the system has temporary files; removed at the end.

    Raises ``Invalid`` if none can be made there.
    """
    try:
        new = Path(tempfile.mkdtemp(prefix=_NEW + prefix, dir=parent))
    except OSError as error:
        raise _unusable(error, parent) from error
    path = new.with_name(new.name.removeprefix(_NEW))
    descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def abandoned(parent: Path | None, before_s: float) -> Iterator[Abandoned]:
    """Those of this machine that have not changed since ``before_s``, Unix seconds. Blocks.

    Raises ``Invalid`` if there is no such parent.
    """
    top = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        paths = sorted(top.iterdir())
    except OSError as error:
        raise _unusable(error, parent) from error
    for path in paths:
        if not _OURS.fullmatch(path.name):
            continue
        with suppress(OSError):  # Somebody else has removed it meanwhile, or owns it.
            mod_time = path.stat().st_mtime
            before = before_s - _NEW_S if path.name.startswith(_NEW) else before_s
            if mod_time <= before and _is_abandoned(path):
                size = sum(one.lstat().st_size for one in path.rglob("*") if one.is_file())
                yield Abandoned(path, size, mod_time)


def sweep(parent: Path | None, before_s: float) -> int:
    """Remove them; how many there were. Blocks. What cannot be removed stays."""
    found = list(abandoned(parent, before_s))
    for one in found:
        shutil.rmtree(one.path, ignore_errors=True)
    return len(found)


def _unusable(error: OSError, parent: Path | None) -> Invalid:
    return Invalid(
        f"cannot make a directory for temporary files: {error.strerror or error}",
        path="--scratch-dir",
        hint="Name a local directory that exists, can be written, and has room for a state. Without the flag"
        " it is that of TMPDIR.",
        directory=str(parent or tempfile.gettempdir()),
    )


def _is_abandoned(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
