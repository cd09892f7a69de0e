"""The SQLite databases of a shard on a hot standby, following its recovery log, for queries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import apsw

from gazette.errors import GazetteError
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.recoverylog.private_files import make_private
from gazette.recoverylog.sqlite.page_db import take_out
from gazette.recoverylog.sqlite.redo import apply_redo, build, redo_files
from gazette.recoverylog.store_files import PRIMARY_DATABASE, StateForm, require_form
from gazette.stores.sqlite.databases import database_names


class FollowedDatabase:
    """One database: a plain file, and the position up to which redo was applied to it."""

    def __init__(self, directory: Path, database: str = PRIMARY_DATABASE) -> None:
        self._directory = directory
        self._database = database
        self.path = directory / database
        self.rebuilds = 0
        self._pages = 0
        self._redo: tuple[int, int] | None = None
        """The (index, offset) of the first redo that is not applied. None: build the copy from nothing."""

    def follow(self, files: PlayedFiles) -> None:
        """Bring this copy to the last commit in ``files``.

        The work is in proportion to the changes since the last call. The first call builds the whole
        database, and so does a call whose files do not continue the redo that was applied. After an error
        (``Corrupt``, ``apsw.Error``, ``OSError``) the next call builds the copy from nothing.
        """
        position, self._redo = self._redo, None
        new_position = None if position is None else self._apply(files.paths, *position)
        self._redo = new_position or self._build(files.paths)

    def _build(self, paths: Mapping[str, Path]) -> tuple[int, int]:
        self.rebuilds += 1
        make_private(self._directory)
        state = build(paths, self._database, self.path)
        self._pages = state.pages
        return state.last_index, state.redo[state.last_index]

    def _apply(self, paths: Mapping[str, Path], index: int, offset: int) -> tuple[int, int] | None:
        """Apply the redo from (``index``, ``offset``) on. Return its end. Return None if the redo in
        ``paths`` does not continue there."""
        files = [file for file in redo_files(paths, self._database) if file.index >= index]
        if not files or files[0].index != index:
            return None
        end = files[0].end
        if offset > (files[0].path.stat().st_size if end is None else end):
            return None  # A later owner has cut the file before this position.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            pages = self._pages
            for file in files:
                begin = offset if file.index == index else 0
                pages, applied = apply_redo(descriptor, file, begin, pages)
            os.ftruncate(descriptor, pages * files[0].page_size)
        finally:
            os.close(descriptor)
        self._pages = pages
        return files[-1].index, applied


class FollowedDatabases:
    """One copy of all databases of a store, as of one commit."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._followed: dict[str, FollowedDatabase] = {}
        self.rebuilds = 0
        """How often the copy was built from nothing: all databases at once, or one of them again."""

    @property
    def path(self) -> Path:
        """File of the primary database."""
        return self._directory / PRIMARY_DATABASE

    @property
    def attached(self) -> dict[str, Path]:
        """All databases but the main one, by the names under which they are attached."""
        return {
            name.removesuffix(".db"): self._directory / name
            for name in self._followed
            if name != PRIMARY_DATABASE
        }

    def follow(self, files: PlayedFiles) -> None:
        """Bring all databases to the last commit: see `FollowedDatabase.follow`.

        Raise ``Invalid`` for the log of another store, ``Corrupt`` for damaged files, and ``GazetteError``
        for errors of the disk or of SQLite.
        """
        form = require_form(
            files.paths, "SQLiteStore", StateForm.REDO, StateForm.PLAIN, StateForm.PAGES
        )
        former, self._followed = self._followed, {}
        names = [f"{name}.db" for name in database_names((), (f"/{path}" for path in files.paths))]
        try:
            if form is StateForm.REDO:
                if not former:
                    self.rebuilds += 1
                    shutil.rmtree(self._directory, ignore_errors=True)
                recorded = [name for name in names if redo_files(files.paths, name)]
                followed = self._follow([PRIMARY_DATABASE, *recorded], former, files)
            else:
                followed = self._recover(names, files, form)
        except (OSError, apsw.Error) as error:
            raise GazetteError(
                f"cannot follow the database: {error}",
                hint="Free space in the directory for recovered files, or choose another.",
                directory=str(self._directory),
            ) from error
        self._followed = followed

    def _follow(
        self, names: list[str], before: Mapping[str, FollowedDatabase], files: PlayedFiles
    ) -> dict[str, FollowedDatabase]:
        """Follow these databases, each with its copy of ``before`` or a new one. Count the rebuilds."""
        followed: dict[str, FollowedDatabase] = {}
        for name in names:
            database = followed[name] = before.get(name) or FollowedDatabase(self._directory, name)
            rebuilds = database.rebuilds
            database.follow(files)
            if rebuilds and database.rebuilds > rebuilds:  # `follow` has counted the first build.
                self.rebuilds += 1
        return followed

    def _recover(
        self, names: list[str], files: PlayedFiles, form: StateForm
    ) -> dict[str, FollowedDatabase]:
        """Copy databases that were recorded as files, and let SQLite apply their journals or WALs."""
        self.rebuilds += 1
        files.copy_to(self._directory)
        if form is StateForm.PAGES:
            paths = [f"/{name}" for name in take_out(self._directory)]
            names = [f"{name}.db" for name in database_names((), paths)]
        for name in (PRIMARY_DATABASE, *names):
            connection = apsw.Connection(str(self._directory / name))
            try:
                connection.execute("PRAGMA journal_mode=DELETE").fetchall()
            finally:
                connection.close()
        return {name: FollowedDatabase(self._directory, name) for name in names}

    def close(self) -> None:
        """Do nothing: no file is held open."""
