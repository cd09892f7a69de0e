"""Recording of a SQLite database's commits in the recovery log: the VFS mode.

A VFS performs and notes every write of SQLite to the database, its journal or its WAL. At the
commit, all noted writes become one append. This is the plain specification of recording: the log has
exactly the files that SQLite wrote. After play-back, stock SQLite opens them as after a crash: it rolls a hot
journal back, or reads a WAL. The cost is whole pages per transaction, and each page that SQLite reads or
writes passes through Python. So shards use `stores/sqlite/redo_recording` by default.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import apsw

from gazette.errors import Broken
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.sqlite.wal import require_whole_wal
from gazette.recoverylog.store_files import PRIMARY_DATABASE
from gazette.runtime.tasks import OpFuture
from gazette.stores.sqlite.databases import database_names, no_frames
from gazette.stores.sqlite.hand_over import NO_FORMER, Former
from gazette.stores.sqlite.open_locks import OpenLocks
from gazette.stores.sqlite.wal_changes import (
    BUSY_MS,
    WalIndex,
    check_file,
    checkpoint,
    used_elsewhere,
)

RECORDED_KINDS: Final = (
    apsw.SQLITE_OPEN_MAIN_DB
    | apsw.SQLITE_OPEN_MAIN_JOURNAL
    | apsw.SQLITE_OPEN_SUPER_JOURNAL
    | apsw.SQLITE_OPEN_WAL
)
"""Kinds of files that are recorded. Files of other kinds are temporary: a later owner does not need them."""

_RESTART_MAGICS: Final = (b"\0\0\0\0", b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
"""First bytes of a write at offset 0 that invalidates a journal, or restarts a WAL.

The former content is then obsolete: the file becomes a new fnode, so that the old one can be pruned.
"""

COALESCE_BYTES: Final = 1 << 20
HORIZON_SLACK: Final = 32 << 20

_serial = itertools.count(1)


@dataclass(slots=True)
class _Opened:
    path: str


@dataclass(slots=True)
class _Emptied:
    path: str


@dataclass(slots=True)
class _Deleted:
    path: str


@dataclass(slots=True)
class _Written:
    path: str
    offset: int
    data: bytearray


_Noted = _Opened | _Emptied | _Deleted | _Written
"""A call of SQLite on a file that has this path in the log."""


class _WriteNotes:
    """The writes of SQLite that are not recorded yet.

    This object must not refer to the store or a connection. SQLite keeps the VFS and its files alive, and
    these refer to this object: a dropped store would never be freed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.events: list[_Noted] = []
        self.is_closed = False

    def log_path(self, name: str) -> str:
        """Return the path in the log of a file of the directory."""
        return "/" + os.path.relpath(name, self._directory)

    def take(self) -> list[_Noted]:
        events, self.events = self.events, []
        return events

    def note(self, event: _Noted) -> None:
        if not self.is_closed:
            self.events.append(event)

    def note_write(self, path: str, offset: int, data: bytes) -> None:
        """Note a write. Join it with the last event if that is a write that ends at ``offset``."""
        if self.is_closed:
            return
        last_event = self.events[-1] if self.events else None
        if (
            isinstance(last_event, _Written)
            and last_event.path == path
            and last_event.offset + len(last_event.data) == offset
            and len(last_event.data) < COALESCE_BYTES
        ):
            last_event.data += data
            return
        self.events.append(_Written(path, offset, bytearray(data)))


class _RecordedFile(apsw.VFSFile):
    """A file that notes its writes. The base class performs writes and all other operations."""

    def __init__(
        self, notes: _WriteNotes, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        super().__init__("", name, flags)
        text = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._notes = notes
        self._path: str | None = None
        self._is_log = bool(flags[0] & ~apsw.SQLITE_OPEN_MAIN_DB & RECORDED_KINDS)
        """True for a journal or a WAL."""
        if text is not None and flags[0] & RECORDED_KINDS:
            self._path = notes.log_path(text)
            notes.note(_Opened(self._path))

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        if self._path is None:
            return
        if self._is_log and offset == 0 and bytes(data[:4]) in _RESTART_MAGICS:
            self._notes.note(_Emptied(self._path))
        self._notes.note_write(self._path, offset, data)

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        # A log cannot record that a file became shorter. Record a file of length 0 as a new file. For a
        # database that became shorter, the size in its header counts.
        if self._path is not None and newsize == 0:
            self._notes.note(_Emptied(self._path))


class _RecordedVFS(apsw.VFS):
    def __init__(self, name: str, notes: _WriteNotes) -> None:
        self._notes = notes
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _RecordedFile(self._notes, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self._notes.note(_Deleted(self._notes.log_path(filename)))


class VfsRecording:
    """Recorder of the databases of a recorder's directory. Only for the shard's thread."""

    def __init__(
        self,
        recorder: Recorder,
        database: str = PRIMARY_DATABASE,
        names: Iterable[str] = (),
        *,
        page_size: int = 4096,
        journal_mode: str = "WAL",
        horizon_slack: int = HORIZON_SLACK,
        former: Former = NO_FORMER,
    ) -> None:
        self._former = former
        self.recorder = recorder
        self.database = database
        self.path: Path = recorder.directory / database
        self._page_size = page_size
        self._journal_mode = journal_mode
        self._horizon_slack = horizon_slack
        self._notes = _WriteNotes(recorder.directory)
        self._connection: apsw.Connection | None = None
        self._vfs: _RecordedVFS | None = None
        self.attached: Mapping[str, Path] = {
            name: recorder.directory / f"{name}.db"
            for name in database_names(names, (*recorder.fsm.links, *former.links))
        }
        """The other databases, by name."""
        self._fds: dict[Path, int] = {}
        self._indexes: dict[str, WalIndex] = {}
        self._locks: list[OpenLocks] = []
        self._versions: dict[str, int] = {}
        """By schema: SQLite's ``data_version``, which changes with each commit of another connection."""

    def open(self) -> apsw.Connection:
        """Open the databases, recorded or new. Blocks. Raise ``Corrupt`` for a damaged WAL. Raise ``Broken``
        if databases of the original are to be taken over, and another program reads them."""
        paths = (self.path, *self.attached.values())
        name = f"gazette-{os.getpid()}-{next(_serial)}"
        self._vfs = _RecordedVFS(name, self._notes)
        for path in paths:
            # Open the descriptor before the connection, and close it after: `wal_changes` says why.
            self._fds[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        connection = apsw.Connection(str(self.path), vfs=name)
        self._connection = connection
        connection.set_busy_timeout(BUSY_MS)
        for name, path in self.attached.items():
            connection.execute(f'ATTACH ? AS "{name}"', (str(path),)).fetchall()
        for schema, path in zip(("main", *self.attached), paths, strict=True):
            require_whole_wal(connection, path, schema)
        for schema in ("main", *self.attached):
            for pragma in (
                f"page_size={self._page_size}",
                f"journal_mode={self._journal_mode}",
                "synchronous=OFF",
            ):
                connection.execute(f"PRAGMA {schema}.{pragma}").fetchall()
        connection.execute("PRAGMA temp_store=MEMORY").fetchall()
        self._guard(connection)
        if not self._former.databases:
            self._former.leave(self.recorder)
        elif not self._rebase():
            raise Broken(
                "the databases of the original are being read, so they cannot be recorded",
                directory=str(self.recorder.directory),
                hint="No other program may open the files of this shard.",
            )
        return connection

    def _guard(self, connection: apsw.Connection) -> None:
        """Note the versions of the databases. In WAL mode, take locks by which other copies of SQLite see
        that the databases are open."""
        for schema, path in {"main": self.path, **self.attached}.items():
            self._versions[schema] = _data_version(connection, schema)
            if self._journal_mode.upper() == "WAL":
                index = self._indexes[schema] = WalIndex(path)
                self._locks.append(OpenLocks(self._fds[path], index.fd))

    def _require_own(self, connection: apsw.Connection) -> None:
        """Raise ``Broken`` if another connection has changed a database or deleted its WAL, or if the
        connection has another database under its name."""
        for schema, file in {"main": self.path, **self.attached}.items():
            check_file(connection, schema, file)
            if (index := self._indexes.get(schema)) is not None:
                index.read()
            if _data_version(connection, schema) != self._versions[schema]:
                raise used_elsewhere(file, "it wrote to it")

    def ship(
        self, wait_for: Collection[OpFuture[Any]] = (), *, changed: bool = True
    ) -> OpFuture[Any]:
        """Record SQLite's writes since the last call, as one append after ``wait_for``. Return its future.

        Then record the whole databases again if the horizon is too long. ``changed``: the commit changed the
        primary database. Raise ``Broken`` if SQLite then wrote nothing, and as `_require_own`.
        """
        events = self._notes.take()
        assert self._connection is not None
        self._require_own(self._connection)
        if changed and not events:
            raise no_frames(self.path)
        with self.recorder.group(wait_for) as group:
            for event in events:
                match event:
                    case _Opened(path=path):
                        if group.fnode_of(path) is None:
                            group.create(path)
                    case _Emptied(path=path):
                        group.create(path)
                    case _Deleted(path=path):
                        group.unlink(path, missing_ok=True)
                    case _Written(path=path, offset=offset, data=data):
                        fnode = group.fnode_of(path)
                        if fnode is None:
                            fnode = group.create(path)
                        group.write(fnode, offset, data)
        if self.recorder.horizon_bytes > self.live_bytes * 7 // 4 + self._horizon_slack:
            self._rebase()
        return group.future

    @property
    def live_bytes(self) -> int:
        return sum(os.fstat(fd).st_size for fd in self._fds.values())

    def _rebase(self) -> bool:
        """Record the whole databases as new fnodes. The shard stalls meanwhile. Return False, and record
        nothing, while a reader uses a WAL."""
        assert self._connection is not None
        if self._journal_mode.upper() == "WAL" and not all(
            checkpoint(self._connection, 0, schema) for schema in ("main", *self.attached)
        ):
            return False  # A reader uses a WAL: a later commit tries again.
        mains = {self._notes.log_path(str(path)): fd for path, fd in self._fds.items()}
        with self.recorder.group() as group:
            # Unlink in the same append: our files may have the names of the original's files.
            self._former.end(group)
            # Of the noted events, only new journals and WALs count: the databases are recorded whole below.
            for event in self._notes.take():
                if isinstance(event, _Emptied | _Opened) and event.path not in mains:
                    group.create(event.path)
            for path, fd in mains.items():
                fnode = group.create(path)
                for offset in range(0, os.fstat(fd).st_size, COALESCE_BYTES):
                    group.write(fnode, offset, os.pread(fd, COALESCE_BYTES, offset))
        self._former = NO_FORMER
        return True

    def close(self) -> None:
        """Close the connection. Do not record writes of SQLite meanwhile."""
        self._notes.is_closed = True
        if self._connection is not None:
            # Closing would move the WAL into the database, and the disk may be full.
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            for lock in self._locks:
                lock.release()
            self._connection.close()
            self._connection = None
        if self._vfs is not None:
            self._vfs.unregister()
            self._vfs = None
        while self._indexes:
            self._indexes.popitem()[1].close()
        while self._fds:
            os.close(self._fds.popitem()[1])


def _data_version(connection: apsw.Connection, schema: str) -> int:
    ((version,),) = connection.execute(f'PRAGMA "{schema}".data_version').fetchall()
    assert isinstance(version, int)
    return version
