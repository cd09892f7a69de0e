"""Changes that commits make to a SQLite database, read from its WAL: `WalChanges`.

Rules that keep this exact, each found by cutting logs at every byte:

- Frames are read only up to the end in SQLite's own index of the WAL. After this end may stand frames that
  were never committed: a transaction spilled its cache, and was rolled back.
- The index counts the committed transactions. The new frames must have exactly as many commits. No checkpoint
  may have moved these frames. SQLite must have called the WAL hook for the last transaction. So every commit
  is recorded whole, or refused, whatever the application does to the connection.
- The old content of a page is its newest frame that was collected before, or else the database file. The old
  content is unknown beyond the recorded size of the database: a shrunk database may have left bytes there.
- Only we checkpoint the database, when all its frames are recorded. An offline log records pages at its end.
- Do not open and close the database file while a connection is open: POSIX would drop SQLite's locks at
  the close. The one descriptor for reading is opened before the connection, and closed after it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import apsw

from gazette.errors import Broken, Corrupt
from gazette.recoverylog.sqlite.redo_format import PageChange, diff_page
from gazette.recoverylog.sqlite.wal import INDEX
from gazette.stores.sqlite.open_locks import OpenLocks

WAL_HEADER: Final = 32
FRAME_HEADER: Final = 24
READ_BYTES: Final = 8 << 20

_COMMITS_MAX: Final = 1 << 31
"""Greatest number of commits between two calls: a larger difference means that the count went back."""
BUSY_MS: Final = 10_000
"""Milliseconds that a statement of the writer waits for a reader that opens or recovers the WAL."""
CHECKPOINT_OVERDUE: Final = 4
CHECKPOINT_WAIT_MS: Final = 100
"""Bounds of the time for which a checkpoint yields to readers.

A checkpoint does not wait for readers until the WAL has `CHECKPOINT_OVERDUE` times its intended length. From
then on each commit waits for readers, at most `CHECKPOINT_WAIT_MS`. So the WAL grows less while queries never
pause.
"""
_INDEX_VERSION: Final = 3_007_000
_BACKFILLED: Final = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class WalPosition:
    """End of a WAL according to SQLite."""

    commits: int
    """Number of all transactions committed to the WAL, modulo 2**32. Checkpoints do not change it."""
    frames: int
    """Number of valid frames of this generation of the WAL."""
    backfilled: int
    """Number of these frames that checkpoints have moved into the database."""
    salt: bytes
    """Salt of this generation of the WAL, as in the headers of its frames."""


class WalIndex:
    """Index of a WAL, read beside the connection that writes it."""

    def __init__(self, database: Path) -> None:
        """Open the index. Raise ``OSError`` unless a connection has read ``database`` before.

        Close it after the connection: POSIX drops SQLite's locks when any descriptor of the file is closed.
        """
        self._path = database.with_name(database.name + "-shm")
        self.fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> WalPosition:
        """Return the end of the WAL. Call this while no statement runs. Raise ``Broken`` if another program
        or copy of SQLite has used the database, or for an index in an unknown form."""
        if not os.fstat(self.fd).st_nlink:
            raise used_elsewhere(self._path, "it deleted the WAL and its index")
        data = os.pread(self.fd, 2 * INDEX.size + _BACKFILLED.size, 0)
        header = data[: INDEX.size]
        if len(data) < 2 * INDEX.size + _BACKFILLED.size or header != data[INDEX.size : -4]:
            raise Broken(
                "the index of a WAL is inconsistent",
                path=str(self._path),
                hint="Another program changes the files of this shard. Give it a directory of its own.",
            )
        version, _, commits, frames, _, salt = INDEX.unpack(header)
        if version != _INDEX_VERSION:
            raise Broken(
                "SQLite writes the index of the WAL in an unknown form",
                version=version,
                hint="Use the version of apsw that this release of Gazette requires.",
            )
        return WalPosition(commits, frames, _BACKFILLED.unpack_from(data, len(data) - 4)[0], salt)

    def close(self) -> None:
        os.close(self.fd)


def used_elsewhere(path: Path, what: str) -> Broken:
    """Return the error of a store whose database another copy of SQLite has used. ``what`` says how."""
    return Broken(
        f"another copy of SQLite has used the shard's database: {what}",
        path=str(path),
        hint="Python's module sqlite3, and what builds on it, has a copy of SQLite of its own, which does not"
        " see the locks of the shard's. Read by store.query() or by a query of the shard. Code in the shard's"
        " process may open apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY). No other program may write"
        " these files. The recovery log is whole, and the shard recovers from it.",
    )


class Collected(NamedTuple):
    """Changes of commits, and the size of the database in pages after them."""

    changes: Iterator[PageChange]
    """The changes. Read all of them before the next commit."""
    pages: int


class WalChanges:
    """Changes of one database, which its connection names ``schema``. On the shard's thread."""

    def __init__(self, path: Path, schema: str, checkpoint_frames: int) -> None:
        self._path = path
        self._schema = schema
        self._checkpoint_frames = checkpoint_frames
        self._page_size = 0
        self._connection: apsw.Connection | None = None
        self._main_fd = -1
        self._wal_fd = -1
        self._index: WalIndex | None = None
        self._locks: OpenLocks | None = None
        self._hooks = 0
        """Number of calls of the hook since the last `collect`."""
        self._hook_frames = -1
        """Frames in the WAL when SQLite last called the hook; -1 without a call since the last `collect`."""
        self._commits = 0
        """Number of commits in SQLite's index at the last `collect` or `shorten`."""
        self._collected_frames = 0
        """Number of frames of the WAL that were collected."""
        self._salt = b""
        self._wal_pages: dict[int, int] = {}
        """By page: the offset in the WAL of its newest collected frame."""

    def open_file(self, page_size: int) -> None:
        """Open the database file, or make it. Call before the connection is opened."""
        self._page_size = page_size
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._main_fd = os.open(self._path, flags, 0o600)

    def follow(self, connection: apsw.Connection) -> None:
        """Begin to collect commits. ``connection`` is in WAL mode, and has read the database."""
        self._connection = connection
        self._index = WalIndex(self._path)
        self._commits = self._index.read().commits
        self._locks = OpenLocks(self._main_fd, self._index.fd)

    @property
    def file_pages(self) -> int:
        """Size of the database file, in pages."""
        return os.fstat(self._main_fd).st_size // self._page_size

    def read(self, first: int, count: int) -> bytearray:
        """Return ``count`` pages from ``first`` on, as of the last `collect`."""
        size = self._page_size
        data = bytearray(self.read_file(first, count))
        for page in range(first, first + count):
            offset = self._wal_pages.get(page)
            if offset is not None:
                begin = (page - first) * size
                data[begin : begin + size] = os.pread(self._wal_fd, size, offset)
        return data

    def settle(self) -> int:
        """Move the WAL into the database, before all of it is recorded as images.

        Return the size of the database in pages. Raise ``Broken`` if the database is still being read.
        """
        assert self._connection is not None
        if not checkpoint(self._connection, BUSY_MS, self._schema):
            raise Broken(
                "the database is still being read, so it cannot be recorded",
                path=str(self._path),
                hint="Read cursors to their end, and close connections, before the build returns.",
            )
        return self.file_pages

    def note_commit(self, frames: int) -> None:
        """Note that SQLite committed, and has ``frames`` in the WAL now."""
        self._hook_frames = frames
        self._hooks += 1

    def shorten(self) -> bool:
        """Keep the WAL short while an offline log (see `Recorder.offline`) is made.

        Return True if there was a commit since the last call. Raise ``Broken`` if the connection has another
        database under its name, or another program has used the files.
        """
        assert self._connection is not None
        assert self._index is not None
        check_file(self._connection, self._schema, self._path)
        position = self._index.read()
        changed = position.commits != self._commits
        self._commits = position.commits
        if position.frames >= self._checkpoint_frames:
            self._checkpoint(position.frames)
        return changed

    def collect(self, recorded: int) -> Collected | None:
        """Return the changes that were committed since the last call; None without a commit.

        The log has ``recorded`` pages of the database: the former content of later pages is unknown.
        Raise ``Broken`` when the application keeps SQLite from reporting commits, or has put another database
        in place of this one, or another copy of SQLite has used the database. Raise ``Corrupt`` when the WAL
        contradicts SQLite's index, or a checkpoint has moved changes that were not recorded.
        """
        assert self._connection is not None
        assert self._index is not None
        check_file(self._connection, self._schema, self._path)
        position = self._index.read()
        commits = (position.commits - self._commits) & 0xFFFFFFFF  # The index counts in 32 bits.
        if not commits:
            return None
        if commits > _COMMITS_MAX:
            raise used_elsewhere(self._path, "it made the index of the WAL again")
        if position.salt != self._salt:
            # SQLite has restarted the WAL, which it does only when the database file has all frames of the
            # former WAL.
            self._salt = position.salt
            self._collected_frames = 0
            self._wal_pages.clear()
        if position.backfilled > self._collected_frames:
            raise self._moved(f"{position.backfilled - self._collected_frames} frames")
        if self._wal_fd < 0:
            self._wal_fd = os.open(f"{self._path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        newest, pages, scanned_commits = self._scan_frames(self._collected_frames, position.frames)
        if scanned_commits < commits:
            raise self._moved(f"{commits - scanned_commits} of {commits} transactions")
        if scanned_commits > commits:
            raise used_elsewhere(self._path, "it made the index of the WAL again")
        hook_frames, self._hook_frames = self._hook_frames, -1
        hook_calls, self._hooks = self._hooks, 0
        if hook_calls and (hook_calls, hook_frames) != (scanned_commits, position.frames):
            raise used_elsewhere(self._path, "it wrote to it")
        if not hook_calls:
            raise Broken(
                "the WAL hook of the store's connection was replaced",
                path=str(self._path),
                hint="Do not call set_wal_hook() or wal_autocheckpoint() on store.connection.",
            )
        self._collected_frames = position.frames
        self._commits = position.commits
        return Collected(self._changes(newest, min(recorded, pages), pages), pages)

    def _changes(self, newest: dict[int, int], known: int, pages: int) -> Iterator[PageChange]:
        """Yield the changes of pages up to ``pages``. The former content is known up to page ``known``.

        Hold one page in memory at a time, since VACUUM changes each page of a database. Note the newest
        frames of pages only at the end: until then, `_old_page` needs the frames from before.
        """
        for page in sorted(newest):
            if page > pages:
                break
            new_page = os.pread(self._wal_fd, self._page_size, newest[page])
            change = diff_page(page, self._old_page(page) if page <= known else None, new_page)
            if change is not None:
                yield change
        self._wal_pages.update(newest)

    def _moved(self, what: str) -> Corrupt:
        return Corrupt(
            f"a checkpoint was made that the recording did not make: {what} are missing in the log",
            path=str(self._path),
            hint="Do not call wal_checkpoint() nor wal_autocheckpoint() on the store's connections.",
        )

    def _scan_frames(self, begin: int, end: int) -> tuple[dict[int, int], int, int]:
        """Return the offsets of pages' newest frames, the size in pages after them, and the number of
        commits. Raise ``Corrupt`` for frames that contradict the index."""
        stride = self._page_size + FRAME_HEADER
        newest: dict[int, int] = {}
        pages = commits = 0
        per_read = max(1, READ_BYTES // stride)
        for first_frame in range(begin, end, per_read):
            count = min(per_read, end - first_frame)
            data = os.pread(self._wal_fd, count * stride, WAL_HEADER + first_frame * stride)
            if len(data) != count * stride:
                raise Corrupt("the WAL is shorter than its commits", path=str(self._path))
            for number in range(count):
                page, pages = struct.unpack_from(">II", data, number * stride)
                commits += pages > 0  # The last frame of a commit has the size.
                if data[number * stride + 8 : number * stride + 16] != self._salt:
                    raise Corrupt("a WAL frame is of another generation", path=str(self._path))
                newest[page] = WAL_HEADER + (first_frame + number) * stride + FRAME_HEADER
        if newest and pages == 0:
            raise Corrupt("the WAL does not end in a commit", path=str(self._path))
        return newest, pages, commits

    def read_file(self, page: int, count: int = 1) -> bytes:
        """Return pages of the database file. Pages after its end are zeros."""
        size = self._page_size
        data = os.pread(self._main_fd, count * size, (page - 1) * size)
        return data.ljust(count * size, b"\0")

    def _old_page(self, page: int) -> bytes:
        """Return a page as it was before the commits that are being collected."""
        offset = self._wal_pages.get(page)
        if offset is not None:
            return os.pread(self._wal_fd, self._page_size, offset)
        return self.read_file(page)

    def checkpoint_if_due(self) -> None:
        """Keep the WAL short. Call after a commit was recorded."""
        if self._collected_frames >= self._checkpoint_frames:
            self._checkpoint(self._collected_frames)

    def _checkpoint(self, frames: int) -> None:
        """Move the WAL's ``frames`` into the database. If readers prevent it, a later commit tries again."""
        assert self._connection is not None
        overdue = frames >= CHECKPOINT_OVERDUE * self._checkpoint_frames
        if not checkpoint(self._connection, CHECKPOINT_WAIT_MS if overdue else 0, self._schema):
            return
        self._collected_frames = 0
        self._salt = b""
        self._wal_pages.clear()

    def release(self) -> None:
        """Release the locks, before the connection is closed."""
        if self._locks is not None:
            self._locks.release()
            self._locks = None

    def close(self) -> None:
        """Close descriptors, after the connection was closed."""
        self._connection = None
        if self._index is not None:
            self._index.close()
            self._index = None
        for descriptor in (self._wal_fd, self._main_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._wal_fd = self._main_fd = -1


def check_file(connection: apsw.Connection, schema: str, path: Path) -> None:
    """Raise ``Broken`` unless ``connection`` still has the recorded database as ``schema``."""
    actual = connection.db_filename(schema)
    if actual != str(path):
        raise Broken(
            f"the connection has another database as {schema} than the recorded one",
            path=str(path),
            actual=actual,
            hint="Do not call deserialize() on store.connection, nor attach over a database.",
        )


def checkpoint(connection: apsw.Connection, wait_ms: int, schema: str = "main") -> bool:
    """Move the WAL into the database. Return True if all of it was moved.

    Wait at most ``wait_ms`` for readers. An open cursor of ``connection`` is a reader too.
    """
    connection.set_busy_timeout(wait_ms)
    try:
        connection.wal_checkpoint(schema, apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except (apsw.BusyError, apsw.LockedError):
        return False
    finally:
        connection.set_busy_timeout(BUSY_MS)
    return True
