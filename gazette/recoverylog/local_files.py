"""What can be wrong with the directory of recovered files: it is another store's, or the disk fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gazette.errors import Broken, Corrupt, GazetteError, Invalid, Unavailable
from gazette.recoverylog.recorder import Recorder

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def check_kind(recorder: Recorder, what: str, is_ours: Callable[[str], bool]) -> None:
    """Refuse the log of another kind of store: nobody would find its state there, and begin anew.

    ``is_ours`` tells it by the path of a file. Raises ``Invalid``.
    """
    paths = sorted(recorder.fsm.links)
    if paths and not any(is_ours(path) for path in paths):
        raise Invalid(
            f"the recovery log holds no {what}",
            files=", ".join(paths[:5]),
            hint="Open the store with the class that recorded it, or begin a new log.",
        )


def check_lengths(recorder: Recorder) -> None:
    """Require that played-back files are as long as the log says. Call it before a store changes any.

    A file that lost its end may be whole in itself, and the store would go on from an older state. Raises
    ``Corrupt``, and ``OSError``.
    """
    fsm = recorder.fsm
    for path, fnode in fsm.links.items():
        expected = fsm.nodes[fnode].length
        local = recorder.directory / path[1:]
        try:
            length = local.stat().st_size
        except FileNotFoundError:
            length = -1
        if length != expected:
            raise damaged_file(
                f"a played-back file is gone: {local.name}"
                if length < 0
                else f"a played-back file has {length} bytes, and its log has {expected}: {local.name}",
                recorder.directory,
            )


def disk_error(what: str, directory: Path | str, error: OSError) -> GazetteError:
    """An error of the disk; ``what`` could not be done. ``Unavailable`` for a full one, else ``Broken``."""
    message = f"cannot {what}: {error.strerror or error}"
    if error.errno in _FULL:
        return full_disk(message, directory)
    hint = "See the cause; the recovery log has every commit that was acknowledged."
    if error.errno in _REFUSED or isinstance(error, FileNotFoundError | NotADirectoryError):
        hint = "The process must be able to write the directory for recovered files, and nobody else may."
    return Broken(message, directory=str(directory), hint=hint)


def full_disk(message: str, directory: Path | str) -> Unavailable:
    return Unavailable(
        message,
        directory=str(directory),
        hint="Free space in the directory for recovered files, or choose another. The recovery log has"
        " every commit that was acknowledged.",
    )


def damaged_file(message: str, directory: Path | str) -> Corrupt:
    return Corrupt(
        message,
        directory=str(directory),
        hint="A local file is damaged, or a disk fails; the recovery log is not. Let the shard start anew,"
        " which plays it back into another directory; on another host, if it happens again.",
    )
