"""The RocksDB database of a shard on a hot standby, following its recovery log, for queries.

A copy has two parts:

- The tables, and the manifest that names them. The copy opens them read-only, and again whenever the
  manifest has changed. Opening is cheap, since tables are linked, not copied: a table never changes once
  the manifest refers to it. A link stays while the copy needs the table, even if the log unlinks the file.
- The later writes, in WALs. The copy reads their new bytes, and keeps the writes in memory, over the tables.

RocksDB itself could read both parts, with two faults. Opening reads all WALs again, and holds the
interpreter's lock meanwhile (seconds, for tens of megabytes). A *secondary* instance reads only new bytes,
but answers with overwritten values after flushes (facebook/rocksdb issues 14444 and 15051).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gazette.errors import Corrupt, GazetteError, NotYet
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.recoverylog.private_files import copy_private, make_private, write_private
from gazette.recoverylog.rocksdb.native import DEFAULT, native_errors
from gazette.recoverylog.store_files import StateForm, require_form
from gazette.stores.rocksdb.batch import Layer, WrittenAhead
from gazette.stores.rocksdb.manifest import Manifest
from gazette.stores.rocksdb.options import recorded_options
from gazette.stores.rocksdb.recording import MANIFEST, SMALL, TABLE, WAL
from gazette.stores.rocksdb.wal import records

_CURRENT: Final = "CURRENT"
_OPEN_FILES_MAX: Final = 512
_CANNOT_LINK: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
)


@dataclass(slots=True)
class _FollowedWal:
    """A WAL of the log that was read up to ``offset``."""

    source: Path
    offset: int = 0
    written: WrittenAhead = field(default_factory=WrittenAhead)

    def read(self) -> None:
        """Read the appended bytes. Raise ``Corrupt`` for bad records, ``NotAllowed`` for unknown writes."""
        with self.source.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        for record, end in records(data, self.offset):
            self.written.apply(record)
            self.offset = end


@dataclass(frozen=True, slots=True)
class FollowedFamily:
    """A column family: its tables, and the writes over them, oldest first."""

    tables: Any
    layers: tuple[Layer, ...]


class FollowedRocksDB:
    """One copy of the database."""

    def __init__(self, native: Any, directory: Path, cache: Any) -> None:
        self._native = native
        self._cache = cache
        self._path = directory
        self._database: Any = None
        self._tables: dict[str, Any] = {}
        self._opened: tuple[Path, int] | None = None
        """The open manifest: its played-back file, and how many of its bytes were read."""
        self._manifest = Manifest()
        self._copied: dict[str, tuple[Path, int]] = {}
        """Tables that could not be linked: the played-back file of each, and how many bytes were copied."""
        self._wals: dict[str, _FollowedWal] = {}
        self.families: dict[str, FollowedFamily] = {}
        """The column families by name, as of the last call of ``follow``."""
        self.openings = 0
        """How often tables were opened."""

    @property
    def path(self) -> str:
        return str(self._path)

    def follow(self, files: PlayedFiles) -> None:
        """Bring the copy to the last commit in ``files``.

        This reads the new bytes of WALs, and opens the tables again if the manifest has changed. Raise
        ``NotYet`` before the first commit, ``Invalid`` for the log of another store, ``Corrupt`` for damage,
        ``NotAllowed`` for unknown writes or edits of the manifest, and ``GazetteError`` for errors of the
        disk. After an error of the copy, the next call builds the copy from nothing.
        """
        if require_form(files.paths, "RocksDBStore", StateForm.ROCKSDB) is StateForm.NOTHING:
            raise NotYet("the shard's database has not been made yet")
        self.families = {}
        try:
            self._follow_tables(files)
            self._follow_wals(files.paths)
        except OSError as error:
            self.close()
            raise GazetteError(
                f"cannot follow the database: {error}",
                hint="Free space in the directory for recovered files, or choose another.",
                directory=self.path,
            ) from error
        except BaseException:
            self.close()
            raise
        self.families = {
            name: FollowedFamily(self._tables[name], self._layers_of(number))
            for number, name in self._manifest.families.items()
        }

    def _follow_tables(self, files: PlayedFiles) -> None:
        """Take over and open the tables if the manifest has changed. Raise ``Corrupt`` if the manifest does
        not fit the tables."""
        current = files.paths[_CURRENT].read_text(errors="replace").strip()
        source = files.paths.get(current)
        if source is None:
            raise Corrupt("the log has no manifest of the name in CURRENT", manifest=current)
        manifest_read = (source, source.stat().st_size)
        if manifest_read == self._opened:
            return
        self._close_tables()
        self._take(files)
        self._manifest = Manifest.of(source.read_bytes())
        with native_errors("open the tables of a hot standby", self.path):
            self._open_tables()
        if self._tables.keys() != set(self._manifest.families.values()):
            raise Corrupt(
                "RocksDB finds other column families than its manifest names",
                found=", ".join(sorted(self._tables)),
            )
        self._opened = manifest_read

    def _take(self, files: PlayedFiles) -> None:
        """Link or copy the present tables and manifest into the directory, and remove all other files."""
        make_private(self._path)
        to_take = {name for name in files.paths if _is_taken(name)}
        for path in self._path.iterdir():
            # Keep a linked table. With another inode, it was recorded again, or is not needed: remove it.
            if path.name in to_take and TABLE.fullmatch(path.name):
                source = files.paths[path.name]
                linked = os.path.samestat(path.stat(), source.stat())
                if linked or self._copied.get(path.name) == (source, source.stat().st_size):
                    to_take.discard(path.name)
                    continue
            self._copied.pop(path.name, None)
            path.unlink()
        for name in to_take:
            source = files.paths[name]
            if not TABLE.fullmatch(name):
                copy_private(source, self._path / name)
            elif not _linked(source, self._path / name):
                copied = copy_private(source, self._path / name)
                self._copied[name] = (source, copied.stat().st_size)
        for name, content in files.properties.items():
            write_private(self._path / name, content.encode())

    def _open_tables(self) -> None:
        """Open the tables of all families read-only, with the options of the last opening if known."""
        native, path = self._native, self.path
        self.openings += 1
        recorded = recorded_options(native, path, self._cache)
        database = native.Options(raw_mode=True) if recorded is None else recorded.database
        database.set_max_open_files(_OPEN_FILES_MAX)
        database.set_skip_stats_update_on_db_open(True)
        families = {
            name: native.Options(raw_mode=True) if recorded is None else recorded.families[name]
            for name in native.Rdict.list_cf(path)
        }
        self._database = native.Rdict(
            path, database, families, access_type=native.AccessType.read_only(False)
        )
        self._tables = {name: self._database.get_column_family(name) for name in families}
        self._tables[DEFAULT] = self._database

    def _close_tables(self) -> None:
        # RocksDB stays open until the last of these objects is released.
        self._opened = None
        self._tables.clear()
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _follow_wals(self, paths: Mapping[str, Path]) -> None:
        """Read the new bytes of the present WALs, in order. Read a new or a replaced file whole."""
        former_wals, self._wals = self._wals, {}
        names = [name for name in paths if WAL.fullmatch(name)]
        for name in sorted(names, key=_number):
            wal = former_wals.get(name)
            if wal is None or wal.source != paths[name]:
                wal = _FollowedWal(paths[name])
            wal.read()
            self._wals[name] = wal

    def _layers_of(self, family: int) -> tuple[Layer, ...]:
        """Return the writes to a family that its tables may lack, oldest first."""
        first_wal = self._manifest.first_wals.get(family, 0)
        return tuple(
            layer
            for name, wal in self._wals.items()
            if _number(name) >= first_wal and (layer := wal.written.layers.get(family)) is not None
        )

    def close(self) -> None:
        """Close everything. A later ``follow`` builds the copy from nothing."""
        self.families = {}
        self._wals = {}
        self._copied.clear()
        self._close_tables()
        shutil.rmtree(self._path, ignore_errors=True)


def _is_taken(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (TABLE, MANIFEST, SMALL))


def _linked(source: Path, target: Path) -> bool:
    """Link a file. Return False if this file system or user cannot, so that a copy is needed."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True


def _number(name: str) -> int:
    return int(name.partition(".")[0])
