"""The databases of one SQLite store, which commit together: the redo mode.

A transaction may change several attached databases. SQLite commits them one after the other, each in its
own WAL. The commit is atomic in the log, because a single append then records all databases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import apsw

from gazette.errors import Broken, Invalid
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.store_files import PRIMARY_DATABASE
from gazette.runtime.tasks import OpFuture
from gazette.stores.sqlite.hand_over import NO_FORMER, NOTE_PATH, Former, record_note
from gazette.stores.sqlite.redo_recording import RedoRecording

REIMAGE_MAX: Final = 4
"""Greatest number of images that one commit records to shorten the horizon. This bounds its time."""
IMAGE_FILES: Final = 1024
"""Approximate number of files of images of a large store: each has 1/1024 of the store."""
FILES_PER_IMAGE_FILE: Final = 2
"""Number of a store's files, as a multiple of `IMAGE_FILES`, above which images are made again, even if the
horizon is short enough."""
MERGE_EVERY: Final = 8
"""Number of commits between two images whose only purpose is fewer files. So such images add few bytes."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED: Final = frozenset({"main", "temp", "primary"})
_DATABASE_FILE: Final = re.compile(r"/([A-Za-z_][A-Za-z0-9_]*)\.db(?:\.(?:redo|image)-[0-9-]+)?")


def no_frames(path: Path) -> Broken:
    """Return the error of a commit that changed the database, but left no frames in the WAL."""
    return Broken(
        "a commit left nothing to record: SQLite did not write it to the shard's database",
        path=str(path),
        hint="Use store.connection for reading and for blobs only; do not change how it keeps its "
        "file.",
    )


def database_names(given: Iterable[str], links: Iterable[str]) -> list[str]:
    """Return the databases of a store beside its primary: the given databases, and the databases in the log.

    A database that only a former version of the application attached stays attached. Otherwise no owner
    would record its files again, and the log could not be pruned. Raise ``Invalid`` for a bad name.
    """
    names = list(dict.fromkeys(given))
    for name in names:
        if not _NAME.fullmatch(name) or name.lower() in _RESERVED:
            raise Invalid(
                f"invalid name of a database ({name!r})",
                hint="Use letters, digits and underscores; not main, temp or primary.",
            )
    recorded = {match[1] for path in links if (match := _DATABASE_FILE.fullmatch(path))}
    return sorted({*names, *recorded} - {PRIMARY_DATABASE.removesuffix(".db")})


class RedoDatabases:
    """Recorder of all databases of a store. Only for the shard's thread."""

    def __init__(
        self,
        recorder: Recorder,
        names: Iterable[str] = (),
        *,
        page_size: int = 4096,
        image_files: int = IMAGE_FILES,
        former: Former = NO_FORMER,
    ) -> None:
        self._recorder = recorder
        self._former = former
        self._image_files = image_files
        self._until_merge = 0
        attached = database_names(names, (*recorder.fsm.links, *former.links))
        schemas = {PRIMARY_DATABASE: "main", **{f"{name}.db": name for name in attached}}
        self._all = [
            RedoRecording(
                recorder,
                name,
                schema=schema,
                page_size=page_size,
                is_taken_over=name in former.databases,
            )
            for name, schema in schemas.items()
        ]
        self._primary = self._all[0]
        self._by_schema = {database.schema: database for database in self._all}
        self._connection: apsw.Connection | None = None

    @property
    def path(self) -> Path:
        """File of the primary database."""
        return self._primary.path

    @property
    def attached(self) -> Mapping[str, Path]:
        """The other databases, by name."""
        return {database.schema: database.path for database in self._all[1:]}

    def open(self) -> apsw.Connection:
        """Open the databases. Blocks. Raise ``Corrupt`` for damaged files. Raise ``Invalid`` for too many
        databases, and for a file that the log lacks."""
        connection = self._connection = self._primary.open()
        limit = connection.limit(apsw.SQLITE_LIMIT_ATTACHED)
        if len(self._all) - 1 > limit:
            raise Invalid(
                f"too many databases ({len(self._all) - 1} beside the primary; SQLite attaches {limit})"
            )
        for database in self._all[1:]:
            database.attach(connection)
        connection.set_wal_hook(self._on_commit)
        if self._recorder.offline:
            self._recorder.at_end(self._record_images)
        elif self._former.databases:
            self._record_images()
        self._former.leave(self._recorder)
        return connection

    def _record_images(self) -> None:
        """Record images of all databases. Settle all first. Raise ``Broken`` if one is in use."""
        for database in self._all:
            database.settle()
        for database in self._all:
            database.record_images(self._file_bytes)

    def _on_commit(self, _connection: object, schema: str, frames: int) -> int:
        if (database := self._by_schema.get(schema)) is not None:
            database.wal.note_commit(frames)
        return apsw.SQLITE_OK

    def ship(
        self, wait_for: Collection[OpFuture[Any]] = (), *, changed: bool = True
    ) -> OpFuture[Any]:
        """Record the commits since the last call as one append, after ``wait_for``. Return its future.

        Then record images again if the horizon is too long, or the files are too many. Without a commit, only
        merge files. ``changed``: the commit changed the primary database. In an offline log (see
        `Recorder.offline`), record nothing now, and everything at its end. Raise ``Broken`` for a change that
        left no frame. For other errors see `WalChanges.collect`.
        """
        if self._recorder.offline:
            shortened = [database.wal.shorten() for database in self._all]  # The primary is first.
            if changed and not shortened[0]:
                raise no_frames(self.path)
            return self._recorder.barrier(wait_for)
        collected = [(database, database.collect()) for database in self._all]  # The primary first.
        if changed and collected[0][1] is None:
            raise no_frames(self.path)
        if all(changes is None for _, changes in collected):
            # No commit: the store was just opened, or its checkpoint did not change. Merge files: owners
            # that never commit would only add redo files.
            for _ in range(REIMAGE_MAX):
                if self._many_files:
                    self._merge_files()
            return self._recorder.barrier(wait_for)
        with self._recorder.group(wait_for) as group:
            for database, changes in collected:
                if changes is not None:
                    database.record(group, changes)
        self._bound_horizon()
        self._bound_files()
        for database in self._all:
            database.wal.checkpoint_if_due()
        return group.future

    @property
    def live_bytes(self) -> int:
        return sum(database.live_bytes for database in self._all)

    @property
    def _bound(self) -> int:
        """Limit of the horizon, in bytes."""
        return self.live_bytes * 7 // 4 + self._primary.horizon_slack

    @property
    def _file_bytes(self) -> int:
        """Size at which a file of images is full, in bytes."""
        return self.live_bytes // self._image_files

    def _bound_horizon(self) -> None:
        # A cycle of images records the live state once; the rest of the horizon is redo. The more redo the
        # horizon has, the fewer bytes of images are recorded for each byte of redo: here at most 4/3.
        recorder = self._recorder
        bound = self._bound
        for database in self._all:
            database.rotate_if_long(bound)
        for _ in range(REIMAGE_MAX):
            if recorder.horizon_bytes <= bound:
                return
            oldest = self._of_oldest_file()
            if oldest is None and self._renew_note():  # The note was the oldest file.
                continue
            if oldest is None or not oldest.renew(bound, self._file_bytes):
                return

    def _bound_files(self) -> None:
        """Merge files if an older version, or many short-lived owners, left too many files.

        Images are made again in the order of their age. So the oldest files vanish first, and a whole cycle
        of images replaces each file.
        """
        if not self._many_files:
            self._until_merge = 0
            return
        self._until_merge -= 1
        if self._until_merge < 0:
            self._until_merge = MERGE_EVERY - 1
            self._merge_files()

    @property
    def _many_files(self) -> bool:
        return sum(db.files for db in self._all) > FILES_PER_IMAGE_FILE * self._image_files

    def _merge_files(self) -> None:
        """Make the oldest image again, of the database with the most files."""
        max(self._all, key=lambda database: database.files).renew(self._bound, self._file_bytes)

    def _of_oldest_file(self) -> RedoRecording | None:
        """Return the recorder of the log's oldest file; None if that file belongs to no database."""
        nodes = self._recorder.fsm.nodes
        for path in nodes[next(iter(nodes))].links:
            if match := _DATABASE_FILE.fullmatch(path):
                name = match[1]
                return self._by_schema.get("main" if f"{name}.db" == PRIMARY_DATABASE else name)
        return None

    def _renew_note(self) -> bool:
        """Record the note file again if it is the log's oldest file. Return True if so."""
        nodes = self._recorder.fsm.nodes
        if NOTE_PATH not in nodes[next(iter(nodes))].links:
            return False
        with self._recorder.group() as group:
            record_note(group)
        return True

    def close(self) -> None:
        """Close the connection, and then descriptors. Record nothing."""
        if self._connection is not None:
            self._connection.set_wal_hook(None)
            for database in self._all:
                database.wal.release()
            self._connection.close()
            self._connection = None
        for database in self._all:
            database.wal.close()


__all__ = ["RedoDatabases", "database_names", "no_frames"]
