"""Recording of a native SQLite database's commits in the recovery log: the redo mode.

SQLite runs on its own VFS, in WAL mode, and never waits for a disk: the recovery log makes a commit
durable. After each commit, its frames in the WAL are compared with the former content of their pages
(`wal_changes`). Only the differences are recorded, in the form of `gazette.recoverylog.sqlite.redo`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import apsw

from gazette.errors import Bug, Corrupt, Invalid
from gazette.recoverylog.log.recorder import Group, Recorder
from gazette.recoverylog.sqlite.page_db import HEADER_BYTES, page_header
from gazette.recoverylog.sqlite.redo import GroupImage, RedoState, is_recorded, materialize
from gazette.recoverylog.sqlite.redo_format import (
    HEADER_LENGTH,
    ImageFile,
    ImageFrame,
    PageChange,
    encode_commit,
    encode_header,
    encode_image,
    redo_name,
)
from gazette.stores.sqlite.wal_changes import BUSY_MS, WalChanges

GROUP_PAGES: Final = 1024
HORIZON_SLACK: Final = 32 << 20
"""Re-imaging starts at a horizon of 7/4 of the live state plus these bytes. So a recovery reads at most
twice the live state and 64 MiB, except soon after a single commit that changed a large part of the state."""


class RedoRecording:
    """Recorder of one database of a recorder's directory, named ``schema`` in its connection.

    Only for the shard's thread. `RedoDatabases` calls the recorders of all databases of a store.
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
        is_taken_over: bool = False,
    ) -> None:
        """Make a recorder. ``is_taken_over``: the log has the directory's database in another form."""
        self.recorder = recorder
        self.database = database
        self.schema = schema
        self.path: Path = recorder.directory / database
        self.wal = WalChanges(self.path, schema, checkpoint_frames)
        self._is_taken_over = is_taken_over and self.path.stat().st_size > 0
        self._group_pages = group_pages
        self.horizon_slack = horizon_slack
        self._state = RedoState(page_size=page_size, pages=0)
        self._serial = 0  # Number of the last image.
        self._redo_fnode = 0
        self._redo_index = 0
        self._redo_end = 0  # Length of the current redo file.
        self._old_redo: list[int] = []  # Indexes of all redo files in the log, in order.
        self._first_redo: dict[int, int] = {}
        """By group without an image, oldest first: index of the first redo file with changes of the group."""
        self._dropped: range = range(0)
        """Groups that the last collected commits have cut off, since the database shrank."""
        self._image_files: Counter[ImageFile] = Counter()
        """By file of images: the number of groups whose latest image is in this file."""
        self._image_file: ImageFile | None = None
        """The file that gets the next image, if the file has room. None: the next image begins a file."""
        self._image_end = 0

    def open(self) -> apsw.Connection:
        """Open the recorded database, or a new one. Blocks. Raise ``Corrupt`` if its files are damaged, and
        ``Invalid`` for a file that the log lacks."""
        recorded = self._recover()
        connection = apsw.Connection(str(self.path))
        self._begin(connection, recorded=recorded)
        return connection

    def attach(self, connection: apsw.Connection) -> None:
        """Attach the database as ``schema``. Blocks. For the errors see `open`."""
        recorded = self._recover()
        connection.execute(f'ATTACH ? AS "{self.schema}"', (str(self.path),)).fetchall()
        self._begin(connection, recorded=recorded)

    def _recover(self) -> bool:
        """Prepare the database file. Return False for a new database, which must be recorded whole."""
        recorded = is_recorded(self.recorder.directory, self.database)
        is_in_log = recorded or self._is_taken_over
        if recorded:
            self._state = materialize(self.recorder.directory, self.database)
            self._serial = max((image.serial for image in self._state.groups.values()), default=0)
            self._old_redo = sorted(self._state.redo)
            self._image_files.update(image.file for image in self._state.groups.values())
            self._require_groups()
        elif self.path.exists() and not self._is_taken_over:
            raise Invalid(
                "the directory has a database that the recovery log does not have",
                path=str(self.path),
                hint="Remove the file. A state that was made elsewhere is built by a backfill.",
            )
        elif self._is_taken_over:
            with self.path.open("rb") as file:
                size, _ = page_header(file.read(HEADER_BYTES))
            self._state = RedoState(page_size=size, pages=0)
        self.wal.open_file(self._state.page_size)
        return is_in_log

    def _require_groups(self) -> None:
        """Raise ``Corrupt`` for an image whose group has another size than ours."""
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
        """Follow the commits of an opened database. Record a new one whole (an offline log: at its end)."""
        connection.set_busy_timeout(BUSY_MS)
        self._configure(connection)
        # This read makes SQLite create the index of the empty WAL.
        connection.execute(f"PRAGMA {self.schema}.schema_version").fetchall()
        self.wal.follow(connection)
        self._begin_redo()
        self._assume_groups()
        if not recorded and not self.recorder.offline:
            self._record_all()

    def _configure(self, connection: apsw.Connection) -> None:
        """Set WAL mode and what recording needs. Raise ``Corrupt`` unless pages have the recorded size."""

        def pragma(text: str) -> Any:
            # Fetch every row: a pragma that returns rows runs only as its rows are fetched.
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
        """Begin this owner's redo file. Its header says where the former owner's file ends."""
        previous_end = self._state.redo.get(self._state.last_index, 0)
        self._redo_index = self._state.last_index + 1
        with self.recorder.group() as group:
            self._create_redo(group, previous_end)

    def _create_redo(self, group: Group, previous_end: int) -> None:
        """Record a new redo file. Its header names where the previous file ends."""
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
        """Record a new database: the switch to WAL mode has written its first page."""
        pages = self.wal.file_pages
        changes = [
            PageChange(page, ((0, self.wal.read_file(page)),), whole=True)
            for page in range(1, pages + 1)
        ]
        self._resize(pages)
        with self.recorder.group() as group:
            self.record(group, changes)

    def settle(self) -> None:
        """Move the WAL into the database, and note its size, before `record_images`.

        Raise ``Broken`` if the database is still being read.
        """
        self._resize(self.wal.settle())

    def record_images(self, file_bytes: int) -> None:
        """Record images of all groups: of a database that an offline log has built, or that was taken over.
        Call `settle` first."""
        for number in range(self._group_count()):
            self._reimage(number, file_bytes)

    def collect(self) -> Iterator[PageChange] | None:
        """Return the changes since the last call; None without a commit. For the errors see
        `WalChanges.collect`."""
        collected = self.wal.collect(self._state.pages)
        if collected is None:
            return None
        self._resize(collected.pages)
        return collected.changes

    def _resize(self, pages: int) -> None:
        """Note the size of the database. New groups need redo from the current file on. Leave lost groups to
        `record`, which has the append that unlinks their files."""
        former_count, self._state.pages = self._group_count(), pages
        count = self._group_count()
        for number in range(former_count, count):
            self._first_redo[number] = self._redo_index
        self._dropped = range(count, former_count)

    def record(self, group: Group, changes: Iterable[PageChange]) -> None:
        """Record the changes of `collect`."""
        self._append_redo(group, encode_commit(self._state.pages, changes))
        self._drop_groups(group)

    def _append_redo(self, group: Group, frame: bytes | bytearray) -> None:
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
        """Begin a new redo file if the current one is too long for a horizon of ``bound`` bytes."""
        if self._redo_end > max(bound // 32, 64 << 10):
            self._rotate()

    def renew(self, bound: int, file_bytes: int) -> bool:
        """Record an image of the group that needs the oldest redo. Return False for a database without pages.

        ``file_bytes``: add an image to the last file if the file then has at most this many bytes.
        """
        if not self._group_count():
            return False
        redo = self.recorder.fsm.nodes[self._redo_fnode].segments[0]
        if self.recorder.write_head - redo.first_offset > bound // 2:
            # With few writes, the current redo file may begin far back in the log. Begin a new one:
            # otherwise it keeps the horizon long.
            self._rotate()
        self._reimage(self._oldest_group(), file_bytes)
        return True

    def _rotate(self) -> None:
        """Go on in a new redo file."""
        with self.recorder.group() as group:
            previous_end = self._redo_end
            self._redo_index += 1
            self._create_redo(group, previous_end)

    def _oldest_group(self) -> int:
        """Return the group that needs the oldest redo, with or without an image. At least one group must
        exist. Both dicts are in order of age."""
        imaged = next(iter(self._state.groups), None)
        bare = next(iter(self._first_redo), None)
        if imaged is None or bare is None:
            return cast("int", bare if imaged is None else imaged)
        return bare if self._first_redo[bare] <= self._state.groups[imaged].redo_index else imaged

    def _reimage(self, number: int, file_bytes: int) -> None:
        """Record all pages of one group. Then the group needs no earlier redo."""
        first_page = number * self._group_pages + 1
        count = min(self._group_pages, self._state.pages - first_page + 1)
        data = self.wal.read(first_page, count)
        self._serial += 1
        former = self._state.groups.get(number)
        with self.recorder.group() as group:
            file, fnode = self._file_for_image(group, number, file_bytes)
            begin = self._image_end
            group.write(fnode, begin, data)
            self._image_end += len(data)
            self._image_files[file] += 1
            crc, pages = zlib.crc32(data), self._state.pages
            frame = ImageFrame(number, self._serial, first_page, count, crc, pages, file, begin)
            self._append_redo(group, encode_image(frame))
            self._drop_image(group, former)
            self._state.note_image(frame, self._redo_index)
            self._first_redo.pop(number, None)
            self._drop_redo(group)

    def _file_for_image(self, group: Group, number: int, file_bytes: int) -> tuple[ImageFile, int]:
        """Return the file that gets the image of a group, and its fnode. Each owner begins its own files.

        A file that has room for a single group gets one image, and earlier versions can read it. A file
        never gets a second image of a group: else the group would still need the file's oldest bytes.
        """
        group_bytes = self._group_pages * self._state.page_size
        file, former = self._image_file, self._state.groups.get(number)
        has_former = former is not None and former.file == file
        if file is not None and not has_former and self._image_end + group_bytes <= file_bytes:
            fnode = group.fnode_of("/" + file.name(self.database))
            assert fnode is not None
            return file, fnode
        file = self._image_file = ImageFile(number, self._serial)
        self._image_end = 0
        return file, group.create("/" + file.name(self.database))

    def _drop_redo(self, group: Group) -> None:
        """Unlink redo files that are older than the redo of every group."""
        number = self._oldest_group()
        image = self._state.groups.get(number)
        oldest = self._first_redo[number] if image is None else image.redo_index
        while self._old_redo and self._old_redo[0] < oldest:
            group.unlink("/" + redo_name(self.database, self._old_redo.pop(0)))
