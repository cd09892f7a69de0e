"""Files of a directory during play-back: their names are fnodes until they get their paths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from gazette.errors import Closed, Corrupt, GazetteError
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.playback.playback import (
    DropNode,
    FileAction,
    OpenNode,
    WriteNode,
    local_path,
)
from gazette.recoverylog.private_files import (
    DIRECTORY_MODE,
    FILE_MODE,
    copy_private,
    empty_private,
    write_at,
    write_private,
)
from gazette.runtime.tasks import as_plain_error

T = TypeVar("T")

STAGING: Final = ".fnodes"
DESCRIPTORS_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class PlayedFiles:
    """Files of a log as of one moment, readable until the function that got them returns.

    ``paths`` has the files by their paths relative to the shard's directory. Do not change these files.
    """

    paths: Mapping[str, Path]
    properties: Mapping[str, str]

    def copy_to(self, directory: Path) -> None:
        """Copy the files to their paths below ``directory``, which is wiped first.

        The result equals a recovery up to this moment. Raise ``Corrupt`` if a path is a file and a directory.
        """
        empty_private(directory)
        for path, source in self.paths.items():
            copy_private(source, target_of(directory, path))
        for path, content in self.properties.items():
            write_private(target_of(directory, path), content.encode(), new=True)


class WaitingView(Generic[T]):
    """A request to call a function with the files."""

    def __init__(self, call: Callable[[PlayedFiles], T], result: asyncio.Future[T]) -> None:
        self.call = call
        self.result = result

    def succeed(self, value: T) -> None:
        if not self.result.done():
            self.result.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(as_plain_error(error))


def target_of(directory: Path, path: str) -> Path:
    """Return the location of a path of a log, and make its parents. Raise ``Corrupt`` if another file has the
    location."""
    target = directory / path
    try:
        for parent in reversed(target.relative_to(directory).parents):
            (directory / parent).mkdir(DIRECTORY_MODE, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise Corrupt(
            "the recovery log has a file and a directory with one path", path=path
        ) from error
    if os.path.lexists(target):
        raise Corrupt("the recovery log has two files with one path", path=path)
    return target


class StagedFiles:
    """Files of a directory during play-back. Blocking. A lock admits one thread at a time.

    A cancelled play may leave a running call behind, and `abandon` must wait for this call. Otherwise
    a descriptor could be closed, and reused for another file, while the call writes to it. A call that
    begins after `abandon` raises ``Closed``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[int, int] = {}
        """Descriptors of open files, by fnode. The file that was used last is the last one."""
        self._lengths: dict[int, int] = {}
        """By fnode, the greatest end of a write, in bytes."""
        self._lock = threading.Lock()
        self._abandoned = False

    @contextlib.contextmanager
    def _locked(self, what: str) -> Iterator[None]:
        """Hold the lock for the block, whose action is ``what``. Raise ``Closed`` after `abandon`, and
        ``GazetteError`` for an ``OSError`` of the block."""
        with self._lock:
            if self._abandoned:
                raise Closed("play-back was cancelled", directory=str(self.directory))
            try:
                yield
            except OSError as error:
                raise GazetteError(
                    f"cannot {what}: {error.strerror or error}",
                    hint="Free space in the directory for recovered files, or choose another.",
                    directory=str(self.directory),
                    errno=error.errno,
                ) from error

    def prepare(self) -> None:
        """Begin with an empty directory that only this user may enter. Errors: see `empty_private`.

        An existing directory is emptied, and not replaced: this process holds a lock on it (see `scratch`).
        """
        with self._locked("prepare the directory of a play-back"):
            self._close()
            self._lengths.clear()
            empty_private(self.directory)
            (self.directory / STAGING).mkdir(DIRECTORY_MODE)

    def _staged(self, fnode: int) -> Path:
        return self.directory / STAGING / str(fnode)

    def perform(self, actions: list[FileAction]) -> None:
        """Perform actions of the log. Raise ``GazetteError`` if the disk is full or fails."""
        with self._locked("write a played-back file"):
            for action in actions:
                match action:
                    case WriteNode(fnode=fnode, offset=offset, data=data):
                        write_at(self._open(fnode), data, offset)
                        end = offset + len(data)
                        self._lengths[fnode] = max(self._lengths.get(fnode, 0), end)
                    case OpenNode(fnode=fnode):
                        self._open(fnode, os.O_CREAT | os.O_EXCL)
                    case DropNode(fnode=fnode):
                        if (descriptor := self._files.pop(fnode, None)) is not None:
                            os.close(descriptor)
                        self._lengths.pop(fnode, None)
                        self._staged(fnode).unlink()

    def _open(self, fnode: int, flags: int = 0) -> int:
        """Return the descriptor of a staged file.

        Only recently written files stay open: a database of 100 GB has more files than a process may open.
        """
        descriptor = self._files.pop(fnode, None)
        if descriptor is None:
            if len(self._files) >= DESCRIPTORS_MAX:
                os.close(self._files.pop(next(iter(self._files))))
            flags |= os.O_RDWR | os.O_CLOEXEC
            descriptor = os.open(self._staged(fnode), flags, FILE_MODE)
        self._files[fnode] = descriptor  # Keep the dict in order of use.
        return descriptor

    def _require_whole(self, fsm: RecoveryFSM) -> None:
        """Raise ``Corrupt`` for a file with another length than was written to it.

        A standby keeps files for days. A file that was cut meanwhile may look valid, with an older state.
        """
        for fnode, node in fsm.nodes.items():
            expected, length = self._lengths.get(fnode, 0), self._staged(fnode).stat().st_size
            if length != expected:
                raise Corrupt(
                    "a played-back file has another length than was written to it",
                    path=", ".join(sorted(node.links)),
                    length=length,
                    expected=expected,
                    hint="The disk, or a program on this machine, changed it. The recovery log is intact."
                    " `gazctl shards unassign --failed` plays the log into another directory.",
                )

    def make_live(self, fsm: RecoveryFSM) -> None:
        """Give every file its paths. Raise ``Corrupt`` for a path that leaves the directory or is used twice,
        and for a changed file."""
        with self._locked("put played-back files in place"):
            self._close()
            self._require_whole(fsm)
            for fnode, node in fsm.nodes.items():
                first_path, *other_paths = sorted(node.links)
                target = self._target(first_path)
                self._staged(fnode).rename(target)
                for path in other_paths:
                    os.link(target, self._target(path))
            for path, content in fsm.properties.items():
                write_private(self._target(path), content.encode(), new=True)
            shutil.rmtree(self.directory / STAGING)

    def view(self, fsm: RecoveryFSM, call: Callable[[PlayedFiles], T]) -> T:
        """Call ``call`` with the files as they are now. The files do not change during the call.

        Raise ``Corrupt`` if another program has changed the files. An ``OSError`` of ``call`` becomes a
        ``GazetteError``.
        """
        with self._locked("read played-back files"):
            self._require_whole(fsm)
            paths = {
                local_path(path): self._staged(fnode)
                for fnode, node in fsm.nodes.items()
                for path in sorted(node.links)
            }
            properties = {local_path(path): text for path, text in fsm.properties.items()}
            return call(PlayedFiles(paths, properties))

    def copy_live(self, fsm: RecoveryFSM, directory: Path) -> None:
        """Copy the present files to their paths below ``directory``, which is wiped first."""
        self.view(fsm, lambda files: files.copy_to(directory))

    def _target(self, path: str) -> Path:
        return target_of(self.directory, local_path(path))

    def _close(self) -> None:
        while self._files:
            _, descriptor = self._files.popitem()
            os.close(descriptor)

    def abandon(self) -> None:
        """Remove all files, for good."""
        with self._lock:
            self._abandoned = True
            self._close()
            shutil.rmtree(self.directory, ignore_errors=True)
