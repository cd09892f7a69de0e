"""Directories for state on a local disk, and detection of abandoned ones.

Each directory is locked while its process lives. The system releases the lock however the process ends.
A directory that another process can lock is abandoned.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.errors import Invalid
from gazette.runtime.tasks import Pool, await_future

SHARDS: Final = "gazette-shard-"
BUILDS: Final = "gazette-backfill-"
REPLAYS: Final = "gazette-replay-"
OPENED: Final = "gazette-verify-"
FORMER: Final = "gazette-former-"
OF_BACKFILLS: Final = (BUILDS, REPLAYS, OPENED, FORMER)
_NEW: Final = ".new-"
_RANDOM: Final = "[a-z0-9_]{8}"
"""End of the names that `tempfile.mkdtemp` makes: no other directory of a user matches."""
_NEW_S: Final = 60.0
"""Seconds after which a directory with a temporary name is abandoned. Locking takes much less."""
_NAME_MAX: Final = 100
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A directory whose process has died. ``size`` is in bytes, ``mod_time`` in Unix seconds."""

    path: Path
    size: int
    mod_time: float


class Scratch:
    """A new directory that only this user may enter, locked until it is removed or the process ends."""

    def __init__(self, prefix: str, parent: Path | None) -> None:
        """Make the directory in ``parent``, by default in TMPDIR. Raise ``Invalid`` if that fails."""
        try:
            temporary = Path(tempfile.mkdtemp(prefix=_NEW + prefix, dir=parent))
            # Rename only when locked: to `abandoned`, an unlocked directory is one of a dead process.
            self.path = temporary.with_name(temporary.name.removeprefix(_NEW))
            self._descriptor = os.open(temporary, _OPEN)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.rename(self.path)
            except BaseException:
                os.close(self._descriptor)
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        except OSError as error:
            raise _unusable(error, parent) from error

    @classmethod
    async def make(cls, pool: Pool, prefix: str, parent: Path | None) -> Scratch:
        """Make a directory on a thread of ``pool``. Raise ``Invalid`` if that fails. After a cancellation,
        the directory that the thread makes is removed."""
        making = pool.submit(cls, prefix, parent)
        try:
            return await await_future(making)
        except asyncio.CancelledError:
            making.add_done_callback(_give_up)
            raise

    def remove(self) -> None:
        """Remove the directory, and release the lock. Blocks. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(descriptor)


def _give_up(making: concurrent.futures.Future[Scratch]) -> None:
    """Remove the directory of a cancelled `Scratch.make`, if its thread has made one."""
    if not making.cancelled() and making.exception() is None:
        making.result().remove()


@contextmanager
def scratch_directory(prefix: str, parent: Path | None) -> Iterator[Path]:
    """Make a `Scratch` for the block. Raise ``Invalid`` if it cannot be made."""
    scratch = Scratch(prefix, parent)
    try:
        yield scratch.path
    finally:
        scratch.remove()


def shard_prefix(shard_id: str) -> str:
    """Return the prefix of the names of a shard's directories. It has the shard's id, or the end of a long
    id."""
    return f"{SHARDS}{shard_id.replace('/', '_')[-_NAME_MAX:]}-"


def abandoned(
    parent: Path | None, before_s: float, prefixes: Collection[str] = OF_BACKFILLS
) -> Iterator[Abandoned]:
    """Yield this user's abandoned directories that have not changed since ``before_s`` (Unix seconds).

    Blocks. Raise ``Invalid`` if the parent does not exist.
    """
    top = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        paths = sorted(top.iterdir())
    except OSError as error:
        raise _unusable(error, parent) from error
    for path in paths:
        name = path.name.removeprefix(_NEW)
        if not any(_is_scratch_name(name, prefix) for prefix in prefixes):
            continue
        with suppress(OSError):  # The directory is gone by now, or belongs to another user.
            mod_time = path.lstat().st_mtime
            changed_before_s = before_s - _NEW_S if path.name.startswith(_NEW) else before_s
            if mod_time <= changed_before_s and _is_abandoned(path):
                size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
                yield Abandoned(path, size, mod_time)


def _is_scratch_name(name: str, prefix: str) -> bool:
    """Return True for a name that `Scratch` gives to directories with this prefix."""
    between = ".+-" if prefix == SHARDS else ""
    return re.fullmatch(f"{re.escape(prefix)}{between}{_RANDOM}", name, re.DOTALL) is not None


def sweep(
    parent: Path | None, before_s: float, prefixes: Collection[str] = OF_BACKFILLS
) -> list[Abandoned]:
    """Remove and return the directories that are `abandoned`. Blocks. Leave others in place."""
    directories = list(abandoned(parent, before_s, prefixes))
    for directory in directories:
        shutil.rmtree(directory.path, ignore_errors=True)
    return directories


def _unusable(error: OSError, parent: Path | None) -> Invalid:
    return Invalid(
        f"cannot make a temporary directory: {error.strerror or error}",
        path="--scratch-dir",
        hint="Name an existing local directory that can be written and locked, with enough free space"
        " for a state. The default is TMPDIR.",
        directory=str(parent or tempfile.gettempdir()),
    )


def _is_abandoned(path: Path) -> bool:
    """Return True if a directory is this user's, and no process holds its lock."""
    descriptor = os.open(path, _OPEN)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
