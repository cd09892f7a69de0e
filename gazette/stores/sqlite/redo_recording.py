"""Recording of a native SQLite database's commits in the recovery log: the redo mode.

SQLite runs on its own VFS, in WAL mode, and never waits for a disk: the recovery log makes a commit
durable. After each commit, the frames that it added to the WAL are compared with the former content
of their pages. Only the difference is recorded (the form is `recoverylog/sqlite/redo`'s).

Rules that keep this exact, each found by cutting logs at every byte:

- Frames are read only up to the end in SQLite's own index of the WAL. A transaction that spilled its
  cache and was rolled back leaves frames behind that were never committed.
- Nothing is assumed. The index counts the committed transactions. Each commit must find as many among
  the new frames, none of them moved by a checkpoint, and the WAL hook called for the last one. So
  no commit passes without being recorded whole, whatever the application does to the connection.
- The old content of a page is the newest frame recorded before, else the database file. Beyond the
  recorded size of the database it is unknown: a shrunk database may have left bytes there.
- Only we checkpoint the database, and only when all its frames are recorded.
- Nothing opens and closes the database file while a connection is open: POSIX would drop SQLite's
  locks with it. The one descriptor for reading it is opened before and closed after the connection.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, Final, cast

import apsw

from gazette.errors import Broken, Bug, Corrupt, Invalid
from gazette.recoverylog.log.recorder import Group, Recorder
from gazette.recoverylog.sqlite.redo import GroupImage, RedoState, is_recorded, materialize
from gazette.recoverylog.sqlite.redo_format import (
    HEADER_LENGTH,
    ImageFile,
    ImageFrame,
    PageChange,
    diff_page,
    encode_commit,
    encode_header,
    encode_image,
    redo_name,
)
from gazette.recoverylog.sqlite.wal import WalIndex, WalPosition

log = logging.getLogger(__name__)

WAL_HEADER: Final = 32
FRAME_HEADER: Final = 24
READ_BYTES: Final = 8 << 20

GROUP_PAGES: Final = 1024
HORIZON_SLACK: Final = 32 << 20
"""A recovery reads at most the live state twice and 64 MiB; re-imaging starts well before that."""
BUSY_MS: Final = 10_000
"""Milliseconds that a statement of the writer waits for a reader that opens or recovers the WAL."""
CHECKPOINT_PATIENCE: Final = 4
CHECKPOINT_PATIENCE_MS: Final = 100
"""Bounds of the time for which checkpoints yield to readers that hold them up.

A checkpoint is postponed until the WAL is this many times as long as it should be. From then on
each commit waits this long for readers. Otherwise readers that follow one another without a pause
would let the WAL grow for ever.
"""


class RedoRecording:
    """Recorder of one database of a recorder's directory, named ``schema`` in its connection.

    Used from the shard's thread only. `stores/sqlite/databases` has all of a store, and
    calls these in turn.
    """

    def __init__(
        self,
        recorder: Recorder,
        database: str = "primary.db",
        *,
        schema: str = "main",
        page_size: int = 4096,
        checkpoint_frames: int = 4000,
        group_pages: int = GROUP_PAGES,
        horizon_slack: int = HORIZON_SLACK,
    ) -> None:
        self.recorder = recorder
        self.database = database
        self.schema = schema
        self.path: Path = recorder.directory / database
        self._checkpoint_frames = checkpoint_frames
        self._group_pages = group_pages
        self.horizon_slack = horizon_slack
        self._state = RedoState(page_size=page_size, pages=0)
        self._serial = 0
        self._redo_fnode = 0
        self._redo_index = 0
        self._redo_end = 0
        self._old_redo: list[int] = []
        self._connection: apsw.Connection | None = None
        self._main_fd = -1
        self._wal_fd = -1
        self._index: WalIndex | None = None
        self._hooked = -1
        """Frames of the last call of the WAL hook, since the last commit was recorded."""
        self._commits = 0
        self._shipped = 0
        self._salt = b""
        self._wal_pages: dict[int, int] = {}
        self._first_redo: dict[int, int] = {}
        """Groups without an image, oldest first: the index of the first redo that has all of each."""
        self._dropped: range = range(0)
        """Groups that the database lost by what was collected last."""
        self._image_files: Counter[ImageFile] = Counter()
        """Number of groups that start from an image in each file."""
        self._image_file: ImageFile | None = None
        """The file that gets the next image, if it has room."""
        self._image_end = 0

    def open(self) -> apsw.Connection:
        """Open the database as it was recorded, or a new one. Blocks. Raise ``Corrupt``."""
        recorded = self._recover()
        connection = apsw.Connection(str(self.path))
        self._begin(connection, recorded=recorded)
        return connection

    def attach(self, connection: apsw.Connection) -> None:
        """Attach the database to a connection under its name. Blocks. Raise as ``open`` does."""
        recorded = self._recover()
        connection.execute(f'ATTACH ? AS "{self.schema}"', (str(self.path),)).fetchall()
        self._begin(connection, recorded=recorded)

    def _recover(self) -> bool:
        recorded = is_recorded(self.recorder.directory, self.database)
        if recorded:
            self._state = materialize(self.recorder.directory, self.database)
            self._serial = max((image.serial for image in self._state.groups.values()), default=0)
            self._old_redo = sorted(self._state.redo)
            self._image_files.update(image.file for image in self._state.groups.values())
            self._require_groups()
        elif self.path.exists():
            raise Invalid(
                "the recovery log holds this database in another form",
                path=str(self.path),
                hint="Open the store with the mode that recorded it ('vfs'), or begin a new log.",
            )
        self._open_files()
        return recorded

    def _require_groups(self) -> None:
        for number, image in self._state.groups.items():
            if image.first != number * self._group_pages + 1 or image.count > self._group_pages:
                raise Corrupt(
                    "an image holds a group of another size than this version makes",
                    path=str(self.path),
                    group=number,
                    first=image.first,
                    count=image.count,
                    group_pages=self._group_pages,
                )

    def _begin(self, connection: apsw.Connection, *, recorded: bool) -> None:
        self._connection = connection
        connection.set_busy_timeout(BUSY_MS)
        self._configure(connection)
        # This read makes SQLite create the index of the WAL, which is empty.
        connection.execute(f"PRAGMA {self.schema}.schema_version").fetchall()
        self._index = WalIndex(self.path)
        self._commits = self._index.read().commits
        self._begin_redo()
        self._assume_groups()
        if not recorded and not self.recorder.offline:
            self._record_all()

    def _open_files(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._main_fd = os.open(self.path, flags, 0o600)

    def _configure(self, connection: apsw.Connection) -> None:
        def pragma(text: str) -> Any:
            # Fetch every row: a pragma that returns rows does nothing until it is stepped through.
            return connection.execute(f"PRAGMA {self.schema}.{text}").fetchall()

        pragma(f"page_size={self._state.page_size}")
        if pragma("journal_mode=WAL") != [("wal",)]:
            raise Bug("SQLite refused WAL mode", path=str(self.path))
        pragma("synchronous=OFF")
        connection.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        connection.execute("PRAGMA temp_store=MEMORY").fetchall()
        (actual,) = pragma("page_size")[0]
        if actual != self._state.page_size:
            raise Corrupt("page size differs from the recorded one", actual=actual)

    def _begin_redo(self) -> None:
        """Begin the owner's own redo file. Its header says where the former owner's file ends."""
        previous_end = self._state.redo.get(self._state.last_index, 0)
        self._redo_index = self._state.last_index + 1
        with self.recorder.group() as group:
            self._create_redo(group, previous_end)

    def _create_redo(self, group: Group, previous_end: int) -> None:
        self._redo_fnode = group.create("/" + redo_name(self.database, self._redo_index))
        header = encode_header(self._state.page_size, self._redo_index, previous_end)
        group.write(self._redo_fnode, 0, header)
        self._redo_end = HEADER_LENGTH
        self._old_redo.append(self._redo_index)

    def _assume_groups(self) -> None:
        """Assume that groups without an image need redo from the oldest file on."""
        oldest = self._old_redo[0]
        for number in range(self._group_count()):
            if number not in self._state.groups:
                self._first_redo[number] = oldest

    def _record_all(self) -> None:
        """Record the first commit of a new database: the switch to WAL mode writes it."""
        size = os.fstat(self._main_fd).st_size
        page_size = self._state.page_size
        pages = size // page_size
        changes = [
            PageChange(page, ((0, self._read_main(page)),), whole=True)
            for page in range(1, pages + 1)
        ]
        self._resize(pages)
        with self.recorder.group() as group:
            self.record(group, changes)

    def note_commit(self, frames: int) -> None:
        """Note that SQLite committed, and has ``frames`` in the WAL now."""
        self._hooked = frames

    def shorten(self) -> bool:
        """Keep the WAL of an offline log short. Nothing is recorded before the log's end.

        Return True if anything was committed since the last call. Raise ``Broken`` as `collect` does.
        """
        assert self._connection is not None
        check_file(self._connection, self.schema, self.path)
        position = self._position()
        changed = position.commits != self._commits
        self._commits = position.commits
        if position.frames >= self._checkpoint_frames:
            self._checkpoint()
        return changed

    def settle(self) -> None:
        """Move the WAL into the database, and take its size: at the end of an offline log.

        Raise ``Broken``.
        """
        assert self._connection is not None
        if not checkpoint(self._connection, BUSY_MS, self.schema):
            raise Broken(
                "the database is still being read, so it cannot be recorded",
                path=str(self.path),
                hint="Read cursors to their end, and close connections, before the build returns.",
            )
        self._resize(os.fstat(self._main_fd).st_size // self._state.page_size)

    def record_images(self, file_bytes: int) -> None:
        """Record the database as images of all its groups. Call after `settle`."""
        for number in range(self._group_count()):
            self._reimage(number, file_bytes)

    def collect(self) -> list[PageChange] | None:
        """Return what was committed since the last call, or None if nothing was.

        Raise ``Broken`` when the application keeps SQLite from reporting commits. Raise ``Corrupt`` when
        the WAL contradicts SQLite's index, or a checkpoint has moved changes that were not recorded.
        """
        assert self._connection is not None
        check_file(self._connection, self.schema, self.path)
        position = self._position()
        commits = (position.commits - self._commits) & 0xFFFFFFFF
        if not commits:
            return None
        if position.salt != self._salt:
            # The WAL began again. SQLite does that only when all of it is in the database file.
            self._salt = position.salt
            self._shipped = 0
            self._wal_pages.clear()
        if position.backfilled > self._shipped:
            raise self._moved(f"{position.backfilled - self._shipped} frames")
        self._open_wal()
        newest, pages, found = self._scan_frames(self._shipped, position.frames)
        if found != commits:
            raise self._moved(f"{commits - found} of {commits} transactions")
        hooked, self._hooked = self._hooked, -1
        if hooked != position.frames:
            raise Broken(
                "the WAL hook of the store's connection was replaced",
                path=str(self.path),
                hint="Do not call set_wal_hook() or wal_autocheckpoint() on store.connection.",
            )
        changes: list[PageChange] = []
        for page in sorted(newest):
            if page > pages:
                continue
            new = os.pread(self._wal_fd, self._state.page_size, newest[page])
            change = diff_page(page, self._old_page(page), new)
            if change is not None:
                changes.append(change)
        self._wal_pages.update(newest)
        self._shipped = position.frames
        self._commits = position.commits
        self._resize(pages)
        return changes

    def _position(self) -> WalPosition:
        assert self._index is not None
        return self._index.read()

    def _moved(self, what: str) -> Corrupt:
        return Corrupt(
            f"a checkpoint was made that the recording did not make: {what} are missing in the log",
            path=str(self.path),
            hint="Do not call wal_checkpoint() nor wal_autocheckpoint() on the store's connections.",
        )

    def _open_wal(self) -> None:
        path = f"{self.path}-wal"
        if self._wal_fd < 0:
            self._wal_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def _scan_frames(self, begin: int, end: int) -> tuple[dict[int, int], int, int]:
        """Return each page's newest frame (its offset in the WAL), the pages after them, and the commits."""
        stride = self._state.page_size + FRAME_HEADER
        newest: dict[int, int] = {}
        pages = commits = 0
        per_read = max(1, READ_BYTES // stride)
        for first in range(begin, end, per_read):
            count = min(per_read, end - first)
            data = os.pread(self._wal_fd, count * stride, WAL_HEADER + first * stride)
            if len(data) != count * stride:
                raise Corrupt("the WAL is shorter than its commits", path=str(self.path))
            for number in range(count):
                page, pages = struct.unpack_from(">II", data, number * stride)
                commits += pages > 0
                if data[number * stride + 8 : number * stride + 16] != self._salt:
                    raise Corrupt("a WAL frame is of another generation", path=str(self.path))
                newest[page] = WAL_HEADER + (first + number) * stride + FRAME_HEADER
        if newest and pages == 0:
            raise Corrupt("the WAL does not end in a commit", path=str(self.path))
        return newest, pages, commits

    def _read_main(self, page: int, count: int = 1) -> bytes:
        size = self._state.page_size
        data = os.pread(self._main_fd, count * size, (page - 1) * size)
        return data.ljust(count * size, b"\0")

    def _old_page(self, page: int) -> bytes | None:
        """Return a page as it was recorded last; None if the log has none."""
        if page > self._state.pages:
            return None
        offset = self._wal_pages.get(page)
        if offset is not None:
            return os.pread(self._wal_fd, self._state.page_size, offset)
        return self._read_main(page)

    def _resize(self, pages: int) -> None:
        before, self._state.pages = self._group_count(), pages
        after = self._group_count()
        for number in range(before, after):
            self._first_redo[number] = self._redo_index
        self._dropped = range(after, before)

    def record(self, group: Group, changes: list[PageChange]) -> None:
        """Record what `collect` returned."""
        self._append_redo(group, encode_commit(self._state.pages, changes))
        self._drop_groups(group)

    def _append_redo(self, group: Group, frame: bytes) -> None:
        group.write(self._redo_fnode, self._redo_end, frame)
        self._redo_end += len(frame)

    def _drop_groups(self, group: Group) -> None:
        """Drop the images of groups that a shrunk database has lost."""
        for number in self._dropped:
            self._first_redo.pop(number, None)
            self._drop_image(group, self._state.groups.pop(number, None))
        self._dropped = range(0)

    def _drop_image(self, group: Group, image: GroupImage | None) -> None:
        """Drop an image that is not needed any more. Unlink its file if no image in it is needed."""
        if image is None:
            return
        self._image_files[image.file] -= 1
        if self._image_files[image.file]:
            return
        del self._image_files[image.file]
        group.unlink("/" + image.file.name(self.database))
        if image.file == self._image_file:
            self._image_file = None

    def _group_count(self) -> int:
        return -(-self._state.pages // self._group_pages)

    @property
    def live_bytes(self) -> int:
        return self._state.pages * self._state.page_size

    @property
    def files(self) -> int:
        """Number of files of this database in the log."""
        return len(self._image_files) + len(self._old_redo)

    def rotate_if_long(self, bound: int) -> None:
        """Begin a new redo file when the present one is long, for a horizon of at most ``bound`` bytes."""
        if self._redo_end > max(bound // 32, 64 << 10):
            self._rotate()

    def renew(self, bound: int, file_bytes: int) -> bool:
        """Record again the oldest part that a recovery needs. Return False if there is nothing to do.

        ``file_bytes``: add an image to the last file if the file then has at most this many bytes.
        """
        if not self._group_count():
            return False
        redo = self.recorder.fsm.nodes[self._redo_fnode].segments[0]
        if self.recorder.write_head - redo.first_offset > bound // 2:
            # In a database with few writes, the redo file itself is old.
            self._rotate()
        self._reimage(self._oldest_group(), file_bytes)
        return True

    def _rotate(self) -> None:
        with self.recorder.group() as group:
            previous_end = self._redo_end
            self._redo_index += 1
            self._create_redo(group, previous_end)

    def _oldest_group(self) -> int:
        """Return the oldest group. Both kinds are ordered by age, so a large database costs no more."""
        imaged = next(iter(self._state.groups), None)
        bare = next(iter(self._first_redo), None)
        if imaged is None or bare is None:
            return cast("int", bare if imaged is None else imaged)
        return bare if self._first_redo[bare] <= self._state.groups[imaged].redo_index else imaged

    def _reimage(self, number: int, file_bytes: int) -> None:
        """Record all pages of one group, so that the group needs no redo before this point."""
        first = number * self._group_pages + 1
        count = min(self._group_pages, self._state.pages - first + 1)
        data = bytearray(self._read_main(first, count))
        size = self._state.page_size
        for page in range(first, first + count):
            offset = self._wal_pages.get(page)
            if offset is not None:
                at = (page - first) * size
                data[at : at + size] = os.pread(self._wal_fd, size, offset)
        self._serial += 1
        former = self._state.groups.get(number)
        with self.recorder.group() as group:
            file, fnode = self._file_for_image(group, number, file_bytes)
            begin = self._image_end
            group.write(fnode, begin, data)
            self._image_end += len(data)
            self._image_files[file] += 1
            crc, pages = zlib.crc32(data), self._state.pages
            frame = ImageFrame(number, self._serial, first, count, crc, pages, file, begin)
            self._append_redo(group, encode_image(frame))
            self._drop_image(group, former)
            self._state.note_image(frame, self._redo_index)
            self._first_redo.pop(number, None)
            self._drop_redo(group)

    def _file_for_image(self, group: Group, number: int, file_bytes: int) -> tuple[ImageFile, int]:
        """Return the file to add an image of a group to, and its fnode. Each owner begins its own files.

        If one whole group is the most that a file holds, it gets one image, as earlier versions can
        read. A file never gets a second image of a group: it would not lose its first bytes, which
        are the oldest.
        """
        whole = self._group_pages * self._state.page_size
        file, former = self._image_file, self._state.groups.get(number)
        has_former = former is not None and former.file == file
        if file is not None and not has_former and self._image_end + whole <= file_bytes:
            fnode = group.fnode_of("/" + file.name(self.database))
            assert fnode is not None
            return file, fnode
        file = self._image_file = ImageFile(number, self._serial)
        self._image_end = 0
        return file, group.create("/" + file.name(self.database))

    def _drop_redo(self, group: Group) -> None:
        number = self._oldest_group()
        image = self._state.groups.get(number)
        oldest = self._first_redo[number] if image is None else image.redo_index
        while self._old_redo and self._old_redo[0] < oldest:
            group.unlink("/" + redo_name(self.database, self._old_redo.pop(0)))

    def checkpoint_if_due(self) -> None:
        """Keep the WAL short. Call after a commit was recorded."""
        if self._shipped >= self._checkpoint_frames:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Move recorded frames into the database file. If readers hold it up, a later commit tries again."""
        assert self._connection is not None
        patient = self._shipped >= CHECKPOINT_PATIENCE * self._checkpoint_frames
        if not checkpoint(self._connection, CHECKPOINT_PATIENCE_MS if patient else 0, self.schema):
            return
        self._shipped = 0
        self._salt = b""
        self._wal_pages.clear()

    def close(self) -> None:
        """Close descriptors, after the connection was closed. Record nothing."""
        self._connection = None
        if self._index is not None:
            self._index.close()
            self._index = None
        for descriptor in (self._wal_fd, self._main_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._wal_fd = self._main_fd = -1


def check_file(connection: apsw.Connection, schema: str, path: Path) -> None:
    """Require that ``connection`` still has the recorded database as ``schema``. Raise ``Broken``."""
    actual = connection.db_filename(schema)
    if actual != str(path):
        raise Broken(
            f"the connection has another database as {schema} than the recorded one",
            path=str(path),
            actual=actual,
            hint="Do not call deserialize() on store.connection, nor attach over a database.",
        )


def checkpoint(connection: apsw.Connection, patience_ms: int, schema: str = "main") -> bool:
    """Move the WAL into the database. Return True if all of it was moved.

    Wait at most ``patience_ms`` for readers. An open cursor of ``connection`` itself holds it up
    like any reader.
    """
    connection.set_busy_timeout(patience_ms)
    try:
        connection.wal_checkpoint(schema, apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except (apsw.BusyError, apsw.LockedError):
        return False
    finally:
        connection.set_busy_timeout(BUSY_MS)
    return True
