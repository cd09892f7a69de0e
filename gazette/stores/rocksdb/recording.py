"""Recording of a RocksDB database's commits in the recovery log, by the changes of its directory.

RocksDB flushes and compacts in its own threads, and reports neither. Recording relies on how RocksDB
treats its files:

- Tables (``.sst``) and blob files are appended to until they are complete, and never change again.
- WALs (``.log``) and ``MANIFEST-…`` are only appended to; ``CURRENT`` is replaced by renaming.
- A file is complete before the manifest refers to it, and is deleted after the manifest no longer does.

So if the manifest is the same at two moments, every file that it refers to was complete between them. A
commit reads the manifest's name and size, gathers what is new, and reads both again. If they did not
change, the gathered files are consistent, and go to the log as one append. Tables go to the log before,
since no file refers to them yet. If the manifest has not changed since the last commit, only the WALs
have new bytes. Sequence numbers prove that these bytes have every write.

Rules that keep this exact, each found by cutting logs:

- No key is written while a commit is recorded. (RocksDB may flush and compact.)
- Open WALs and the manifest *before* the second look at the manifest: they may be gone later.
- The log unlinks a file only after the manifest that makes it obsolete, and in the same append.
- Hold played-back files open until the first commit. Then no new file gets their inodes. So name and inode
  distinguish a recorded file from a new file of the same name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from gazette.errors import Broken
from gazette.recoverylog.disk_errors import check_lengths
from gazette.recoverylog.log.recorder import PROPERTY_PATHS, Group, Recorder
from gazette.recoverylog.private_files import FILE_MODE
from gazette.recoverylog.store_files import StateForm, require_form
from gazette.runtime.tasks import OpFuture
from gazette.stores.rocksdb.wal import continues

TABLE: Final = re.compile(r"\d+\.(sst|blob)")
WAL: Final = re.compile(r"\d+\.log")
MANIFEST: Final = re.compile(r"MANIFEST-\d+")
SMALL: Final = re.compile(r"CURRENT|OPTIONS-\d+|rocksdict-config\.json")

PIECE: Final = 4 << 20
"""Bytes of a table in one append."""
SYNC_ATTEMPTS: Final = 10_000
"""Greatest number of attempts to gather files while the manifest is the same. Under load, some fail."""
HORIZON_SLACK: Final = 32 << 20
"""Files are recorded again once a recovery would read more than 1.5 times the live files plus these bytes.

While a file is recorded again, the log that a recovery reads grows by 5/4 of the file.
"""
COPY_RATIO: Final = 4
COPY_MIN: Final = 256 << 10
"""Greatest number of bytes that a commit records again while a recovery would read too much of the log.

The bound is `COPY_RATIO` times the bytes of the commit, at least `COPY_MIN`. With this ratio the
horizon shrinks faster than commits extend it.
"""

_COPY_SUFFIX: Final = ".rebase"


@dataclass(slots=True)
class _Tracked:
    """A file in the log. ``recorded``: its bytes in the log. ``fd``: an open descriptor, or negative."""

    name: str
    inode: int
    fnode: int
    recorded: int
    fd: int = -1

    @property
    def path(self) -> str:
        return "/" + self.name


@dataclass(slots=True)
class _Copy:
    """A new copy of a file in the log, which has another path until it is complete."""

    source: _Tracked
    fnode: int
    fd: int
    copied: int = 0

    @property
    def path(self) -> str:
        return self.source.path + _COPY_SUFFIX


_Sample = tuple[bytes, int]
"""The content of CURRENT, and the size in bytes of the manifest that it names."""


class RocksDBRecording:
    """Recorder of the database in a recorder's directory. Only for the shard's thread."""

    def __init__(self, recorder: Recorder, *, horizon_slack: int = HORIZON_SLACK) -> None:
        self._recorder = recorder
        self._directory = str(recorder.directory)
        self._horizon_slack = horizon_slack
        self._latest: Callable[[], int] = lambda: 0
        self._live: Callable[[], Iterable[str]] = list
        self._tracked: dict[str, _Tracked] = {}
        self._small: dict[str, bytes] = {}  # Recorded content of small files, by name.
        self._wals: list[_Tracked] = []  # Held WALs, in the order of their numbers.
        self._sample: _Sample | None = None  # At the last sync; None before the first sync.
        self._sequence = 0  # Number of the last write in the log.
        self._logged = 0  # Bytes that the present commit has recorded.
        self._copy: _Copy | None = None
        self._is_gone = False
        """True if RocksDB has removed a file that the log still has."""
        self._private: set[str] = set()
        """Files of the directory that were made private."""
        self.syncs = 0
        """How often all files had to be looked at: at the opening, and in commits."""

    def adopt(self) -> None:
        """Take the played-back files over. Delete unfinished copies. Call it before the database is opened.

        Raise ``Invalid`` when the log has another kind of store. Raise ``Corrupt`` for files of
        another length than in the log.
        """
        links = self._recorder.fsm.links
        # A log without the file CURRENT ends before the first commit of its first owner.
        require_form(links, "RocksDBStore", StateForm.ROCKSDB)
        check_lengths(self._recorder)
        for path, fnode in sorted(links.items()):
            name = path[1:]
            if SMALL.fullmatch(name):
                with open(self._local(name), "rb") as file:
                    self._small[name] = file.read()
            elif _is_recorded(name):
                fd = os.open(self._local(name), os.O_RDONLY | os.O_CLOEXEC)
                status = os.fstat(fd)
                self._tracked[name] = _Tracked(name, status.st_ino, fnode, status.st_size, fd)
            elif name.endswith(_COPY_SUFFIX):
                os.unlink(self._local(name))

    def start(self, latest: Callable[[], int], live: Callable[[], Iterable[str]]) -> None:
        """Record the database as it was opened. For the errors see `ship`.

        ``latest`` returns the database's latest sequence number, ``live`` the names of its tables.
        """
        self._latest = latest
        self._live = live
        self._sync((), everything=True)
        for tracked in self._tracked.values():
            if TABLE.fullmatch(tracked.name):
                self._release(tracked)

    @property
    def is_recorded(self) -> bool:
        """True if the log had a database, or has one since the first sync."""
        return "CURRENT" in self._small or self._sample is not None

    def options_text(self) -> str:
        """Return the options of the opened database, as RocksDB wrote them."""
        names = [name for name in os.listdir(self._directory) if name.startswith("OPTIONS-")]
        newest = max(names, key=lambda name: int(name.partition("-")[2]))
        with open(self._local(newest), encoding="utf-8") as file:
            return file.read()

    def has_wal(self) -> bool:
        return any(WAL.fullmatch(name) for name in os.listdir(self._directory))

    def _local(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def ship(self, wait_for: Collection[OpFuture[Any]] = ()) -> OpFuture[Any]:
        """Record the writes since the last call, as one append after ``wait_for``. Return its future, and do
        not wait for the log. New tables are recorded before, in appends of their own.

        Raise ``Broken`` if RocksDB keeps changing its files, or has tables outside the directory. Errors of
        the recorder reach the caller.
        """
        self._logged = 0
        if self._sample is not None and not self._is_gone and self._look() == self._sample:
            tails = self._tails()  # The manifest is the same: only WALs may have grown.
            future = None if tails is None else self._record_tails(tails, wait_for)
        else:
            future = None
        if future is None:
            future = self._sync(wait_for)
        self._bound_horizon()
        return future

    def _look(self) -> _Sample | None:
        """Return the current sample; None while RocksDB replaces the manifest."""
        try:
            with open(self._local("CURRENT"), "rb") as file:
                current = file.read()
            return current, os.stat(self._local(current.decode().strip())).st_size
        except FileNotFoundError:
            return None

    def _tails(self) -> list[tuple[_Tracked, bytes]] | None:
        """Return the new bytes of the WALs; None if WALs do not have all writes up to now."""
        latest = self._latest()
        for listed in (False, True):
            if listed:
                # List the files only if held WALs lack a write: the directory may have many files.
                with contextlib.suppress(FileNotFoundError):
                    self._hold_wals(os.listdir(self._directory))
            tails = [(wal, _unrecorded(wal)) for wal in self._wals]
            placed_tails = [(data, wal.recorded) for wal, data in tails]
            if continues(placed_tails, self._sequence, latest):
                self._sequence = latest
                return tails
        return None

    def _record_tails(
        self, tails: list[tuple[_Tracked, bytes]], wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        with self._recorder.group(wait_for) as group:
            for wal, data in tails:
                self._append(group, wal, data)
        self._logged += group.bytes
        return group.future

    def _append(self, group: Group, tracked: _Tracked, data: bytes) -> None:
        """Record bytes at a file's end. Record the creation of a new file first."""
        if tracked.fnode == 0:
            tracked.fnode = group.create(tracked.path)
        group.write(tracked.fnode, tracked.recorded, data)
        tracked.recorded += len(data)

    def _sync(
        self, wait_for: Collection[OpFuture[Any]], *, everything: bool = False
    ) -> OpFuture[Any]:
        """Record all files as of one moment. Raise ``Broken`` if files keep changing, or are elsewhere."""
        self.syncs += 1
        self._is_gone = False
        for _ in range(SYNC_ATTEMPTS):
            sample = self._look()
            if sample is None:
                continue
            manifest_name = sample[0].decode().strip()
            try:
                self._record_tables()
                names = os.listdir(self._directory)
                manifest = self._hold(manifest_name)
                self._hold_wals(names)
                small = self._read_small(names)
                elsewhere = sorted(set(self._live()).difference(names))
            except FileNotFoundError:
                continue
            if self._look() == sample:
                break
        else:
            raise Broken("RocksDB keeps changing its files", attempts=SYNC_ATTEMPTS)
        self._make_private(names)
        if elsewhere:
            raise Broken(
                f"RocksDB keeps {len(elsewhere)} of its tables outside of the recorded directory",
                directory=self._directory,
                tables=", ".join(elsewhere[:5]),
                hint="Do not set other paths for files in RocksDBOptions.tune. If none is set, "
                "another process removes files of this directory: give the shard its own "
                "directory.",
            )
        latest = self._latest()
        keep = {name for name in names if not MANIFEST.fullmatch(name)} | {manifest_name}
        with self._recorder.group(wait_for) as group:
            for wal in self._wals:
                if wal.name in keep:
                    self._append(group, wal, _unrecorded(wal))
            self._append(group, manifest, _unrecorded(manifest, sample[1]))
            self._record_small(group, small)
            for tracked in [file for file in self._tracked.values() if file.name not in keep]:
                self._forget(group, tracked)
            if everything:
                self._unlink_unknown(group)
        self._wals = [wal for wal in self._wals if wal.name in keep]
        self._logged += group.bytes
        self._sample = sample
        self._sequence = latest
        return group.future

    def _make_private(self, names: Collection[str]) -> None:
        """Restrict new files to their owner: RocksDB creates them with the process's umask."""
        for name in names:
            # RocksDB replaces small files by new files of the same name.
            if name not in self._private or SMALL.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(self._local(name), FILE_MODE)
        self._private = set(names)

    def _hold(self, name: str) -> _Tracked:
        """Hold a table, WAL or manifest open. Raise ``FileNotFoundError`` if RocksDB has removed it."""
        tracked = self._tracked.get(name)
        # Before the first sync, a played-back file may have been replaced: compare inodes then.
        if tracked is not None and tracked.fd >= 0 and self._sample is not None:
            return tracked
        fd = os.open(self._local(name), os.O_RDONLY | os.O_CLOEXEC)
        inode = os.fstat(fd).st_ino
        if tracked is not None and tracked.inode == inode:
            if tracked.fd >= 0:
                os.close(fd)
            else:
                tracked.fd = fd
            return tracked
        if tracked is not None:
            self._release(tracked)
        # `create` unlinks a former file that was recorded under this name.
        tracked = self._tracked[name] = _Tracked(name, inode, 0, 0, fd)
        return tracked

    def _hold_wals(self, names: Collection[str]) -> None:
        """Hold the WALs among ``names``, too. Raise ``FileNotFoundError`` if RocksDB has removed a WAL."""
        wals = {wal.name: wal for wal in self._wals}
        wals |= {name: self._hold(name) for name in names if WAL.fullmatch(name)}
        self._wals = sorted(wals.values(), key=lambda wal: int(wal.name.partition(".")[0]))

    def _record_tables(self) -> None:
        """Record the new bytes of tables. Safe at any time: no recorded file refers to these bytes yet."""
        names = [name for name in os.listdir(self._directory) if TABLE.fullmatch(name)]
        for name in names:
            tracked = self._tracked.get(name)
            status = os.stat(self._local(name))
            is_same_file = tracked is not None and tracked.inode == status.st_ino
            if tracked is None or not is_same_file or tracked.recorded < status.st_size:
                self._record_table(name)

    def _record_table(self, name: str) -> None:
        """Record the bytes of a table that the log lacks, piece by piece."""
        tracked = self._hold(name)
        try:
            while data := os.pread(tracked.fd, PIECE, tracked.recorded):
                with self._recorder.group() as group:
                    self._append(group, tracked, data)
                self._logged += group.bytes
        finally:
            if self._sample is not None:  # Before the first sync, hold all files: see `start`.
                self._release(tracked)

    def _read_small(self, names: Collection[str]) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for name in names:
            if SMALL.fullmatch(name) or "/" + name in PROPERTY_PATHS:
                with open(self._local(name), "rb") as file:
                    contents[name] = file.read()
        return contents

    def _record_small(self, group: Group, small: dict[str, bytes]) -> None:
        """Record small files that have changed, and unlink small files that RocksDB has removed."""
        for name, content in sorted(small.items()):
            path = "/" + name
            if path in PROPERTY_PATHS:
                text = content.decode()
                if self._recorder.fsm.properties.get(path) != text:
                    group.unlink(path, missing_ok=True)
                    group.property(path, text)
            elif self._small.get(name) != content:
                group.write(group.create(path), 0, content)
                self._small[name] = content
        for name in self._small.keys() - small.keys():
            group.unlink("/" + name)
            del self._small[name]

    def _forget(self, group: Group, tracked: _Tracked) -> None:
        """Unlink a file that RocksDB does not need any more, and its unfinished copy, if any."""
        copy = self._copy
        if copy is not None and copy.source is tracked:
            group.unlink(copy.path)
            os.close(copy.fd)
            self._copy = None
        group.unlink(tracked.path, missing_ok=True)
        self._release(tracked)
        del self._tracked[tracked.name]

    def _unlink_unknown(self, group: Group) -> None:
        """Unlink files of former owners that the database does not need: unfinished copies, text logs."""
        known = self._tracked.keys() | self._small.keys()
        for path in self._recorder.live_paths():
            if path.removeprefix("/") not in known:
                group.unlink(path)

    def _release(self, tracked: _Tracked) -> None:
        if tracked.fd >= 0:
            os.close(tracked.fd)
            tracked.fd = -1

    @property
    def live_bytes(self) -> int:
        """Bytes of the recorded files."""
        return sum(tracked.recorded for tracked in self._tracked.values())

    def _bound_horizon(self) -> None:
        """Record the oldest file again, in pieces, while a recovery would read too much of the log.

        RocksDB may keep a table for years, and the log could not be pruned. The local file does not change.
        """
        recorder = self._recorder
        if recorder.horizon_bytes <= self._horizon_slack:
            return
        bound = self.live_bytes * 3 // 2 + self._horizon_slack
        room = max(COPY_MIN, COPY_RATIO * self._logged)
        while room > 0 and recorder.horizon_bytes > bound:
            copied = self._copy_some(room)
            if copied == 0:
                return
            room -= max(copied, 4096)  # Bound the number of appends, too.

    def _copy_some(self, limit: int) -> int:
        """Record a part of the oldest file again. Return the size of the part in bytes; 0 to try later. Raise
        ``Broken`` if the file shrank."""
        copy = self._copy
        if copy is None:
            nodes = self._recorder.fsm.nodes
            (path,) = nodes[next(iter(nodes))].links  # The oldest: nodes are in order of creation.
            name = path[1:]
            if name in self._small:
                with self._recorder.group() as group:
                    group.write(group.create(path), 0, self._small[name])
                return len(self._small[name])
            copy = self._begin_copy(self._tracked[name])
            if copy is None:
                return 0
        source = copy.source
        size = min(limit, PIECE, source.recorded - copy.copied)
        data = os.pread(copy.fd, size, copy.copied)
        if len(data) != size:
            raise Broken("a file of RocksDB shrank", path=self._local(source.name))
        with self._recorder.group() as group:
            if copy.fnode == 0:  # The copy begins with this piece.
                copy.fnode = group.create(copy.path)
            group.write(copy.fnode, copy.copied, data)
            copy.copied += size
            if copy.copied == source.recorded:
                group.rename(copy.path, source.path)
                source.fnode = copy.fnode
        if source.fnode == copy.fnode:  # The copy has replaced its source.
            os.close(copy.fd)
            self._copy = None
        return max(size, 1)

    def _begin_copy(self, source: _Tracked) -> _Copy | None:
        """Begin to record a file again. Return None if RocksDB has removed or replaced the file."""
        try:
            fd = os.open(self._local(source.name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # RocksDB removed the file, after a recorded manifest had made the file obsolete.
            self._is_gone = True
            return None
        if os.fstat(fd).st_ino != source.inode:
            os.close(fd)
            return None
        self._copy = _Copy(source, 0, fd)
        return self._copy

    def close(self) -> None:
        """Close held files, and release the database. Record nothing."""
        self._latest = lambda: 0
        self._live = list
        for tracked in self._tracked.values():
            self._release(tracked)
        if self._copy is not None:
            os.close(self._copy.fd)
            self._copy = None


def _is_recorded(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (TABLE, WAL, MANIFEST))


def _unrecorded(tracked: _Tracked, size: int | None = None) -> bytes:
    """Return the file's bytes up to ``size`` that are not in the log. Raise ``Broken`` if the file is
    shorter."""
    end = os.fstat(tracked.fd).st_size if size is None else size
    data = os.pread(tracked.fd, max(0, end - tracked.recorded), tracked.recorded)
    if len(data) != max(0, end - tracked.recorded):
        raise Broken("a file of RocksDB is shorter than RocksDB reported", path=tracked.path)
    return data
