"""A SQLite database that follows the recovery log of a shard, for queries on a hot standby.

There are two copies of it: queries read one while the other is brought up to date, by the redo that the
log has gained since. A copy that is read is never changed, so that queries need no locks and see one
commit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import apsw

from gazette.consumer.application import StateView
from gazette.errors import Bug, Corrupt, GazetteError
from gazette.recoverylog.sqlite_redo import apply_redo, build, redo_files
from gazette.recoverylog.staged_files import PlayedFiles

DATABASE: Final = "primary.db"


class Reader(Protocol):
    """What queries are served with."""

    def close_reading(self) -> None: ...


class FollowedDatabase:
    """One copy: a plain database file, and how far in the redo it is."""

    def __init__(self, directory: Path, database: str = DATABASE) -> None:
        self._directory = directory
        self._database = database
        self.path = directory / database
        self.rebuilds = 0
        self._pages = 0
        self._redo: tuple[int, int] | None = None
        """(index, offset) of the redo that was not applied yet."""

    def follow(self, files: PlayedFiles) -> None:
        """Bring the copy to the last commit among ``files``. Costs what changed since the last time, and
        the whole database at first, or if redo that was needed is gone.

        Raises ``Corrupt`` and ``GazetteError`` (a full disk); the copy is then built anew next time.
        """
        before, self._redo = self._redo, None
        try:
            if not redo_files(files.paths, self._database):
                self.rebuilds += 1
                files.copy_to(self._directory)
                self._recover()
                return
            after = None if before is None else self._apply(files.paths, *before)
            self._redo = after or self._build(files.paths)
        except (OSError, apsw.Error) as error:
            raise GazetteError(
                f"cannot follow the database: {error}",
                hint="Free space in the directory for recovered files, or choose another.",
                directory=str(self._directory),
            ) from error

    def _recover(self) -> None:
        """It was recorded as it was: with the journal or WAL of its owner."""
        connection = apsw.Connection(str(self.path))
        try:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        finally:
            connection.close()

    def _build(self, paths: Mapping[str, Path]) -> tuple[int, int]:
        self.rebuilds += 1
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        state = build(paths, self._database, self.path)
        self._pages = state.pages
        return state.last_index, state.redo[state.last_index]

    def _apply(self, paths: Mapping[str, Path], index: int, offset: int) -> tuple[int, int] | None:
        """Where the redo ends now; None if it does not go on from where we are."""
        files = [file for file in redo_files(paths, self._database) if file.index >= index]
        if not files or files[0].index != index:
            return None
        end = files[0].end
        if offset > (files[0].path.stat().st_size if end is None else end):
            return None  # Another owner has written over what we took for its end.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            pages = self._pages
            for file in files:
                begin = offset if file.index == index else 0
                pages, at = apply_redo(descriptor, file, begin, pages)
            os.ftruncate(descriptor, pages * files[0].page_size)
        finally:
            os.close(descriptor)
        self._pages = pages
        return files[-1].index, at


class SQLiteView(StateView):
    """Two copies of a shard's database, taking turns."""

    def __init__(self, directory: Path, open_reader: Callable[[Path], Reader]) -> None:
        self._open_reader = open_reader
        self._free = [FollowedDatabase(directory / name) for name in ("one", "two")]
        self._used: dict[int, tuple[Reader, FollowedDatabase]] = {}

    def refresh(self, files: PlayedFiles) -> Any:
        if not self._free:
            raise Bug("both copies of a view are in use")
        # The one that was used last is closest to the present: what it lacks is shorter.
        copy = self._free.pop()
        try:
            try:
                copy.follow(files)
            except Corrupt:
                copy.follow(files)  # From the beginning: ours may be what is damaged.
            reader = self._open_reader(copy.path)
        except BaseException:
            self._free.insert(0, copy)
            raise
        self._used[id(reader)] = (reader, copy)
        return reader

    def release(self, reader: Any) -> None:
        opened, copy = self._used.pop(id(reader))
        opened.close_reading()
        self._free.append(copy)

    def close(self) -> None:
        for reader, _ in self._used.values():
            reader.close_reading()
        self._used.clear()
