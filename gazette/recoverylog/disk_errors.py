"""Errors of the directory of recovered files: a file changed, or the disk fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from gazette.errors import Broken, Corrupt, GazetteError, Unavailable
from gazette.recoverylog.log.recorder import Recorder

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def check_lengths(recorder: Recorder) -> None:
    """Check the lengths of played-back files against the log, before a store changes the files.

    A file that lost its end may look valid, with an older state. Raise ``Corrupt`` for a file that is gone,
    or has another length.
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
    """Return ``Unavailable`` for a full disk, else ``Broken``. ``what`` is the action that failed."""
    message = f"cannot {what}: {error.strerror or error}"
    if error.errno in _FULL:
        return full_disk(message, directory)
    hint = "See the cause. The recovery log has every acknowledged commit."
    if error.errno in _REFUSED or isinstance(error, FileNotFoundError | NotADirectoryError):
        hint = "Let this process, and no other user, write to the directory for recovered files."
    return Broken(message, directory=str(directory), hint=hint)


def full_disk(message: str, directory: Path | str) -> Unavailable:
    return Unavailable(
        message,
        directory=str(directory),
        hint="Free space in the directory for recovered files, or choose another. The recovery log has"
        " every acknowledged commit.",
    )


def damaged_file(message: str, directory: Path | str) -> Corrupt:
    return Corrupt(
        message,
        directory=str(directory),
        hint="A local file is damaged, or the disk fails. The recovery log is intact. Restart the shard,"
        " which plays the log into another directory. If this happens again, use another host.",
    )
