"""SQLite databases of the Go original, whose pages are values of a RocksDB: `take_out`.

The original's SQLite writes through a VFS of the original. So a log has these files:

    /pageDB/…                         a RocksDB, with a column family for each database
    /primary.db-wal, …-journal        the WALs and journals that go with these databases

The name of a family is a slash and the name of its database. A key is the offset of a page (8 bytes,
big-endian), and the value is the page. A journal of a transaction over several databases has their names
relative to the directory. So recovery needs a VFS with the same names.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import apsw

from gazette.errors import Corrupt
from gazette.recoverylog.private_files import write_at
from gazette.recoverylog.rocksdb.native import DEFAULT, load_rocksdict, native_errors
from gazette.recoverylog.store_files import PAGE_DB

_KEY: Final = struct.Struct(">Q")
_HEADER: Final = struct.Struct(">16xH10xI")
"""Fields of a database's first bytes: its page size (1 means 65536), and its number of pages."""
HEADER_BYTES: Final = _HEADER.size
_JOURNAL: Final = re.compile(r".+-(wal|shm|journal|mj[0-9A-F]+)")
_LEFT_BEHIND: Final = re.compile(r".+\.(redo|image)-[0-9-]+")
"""Images and redo that an interrupted hand-over has left."""
_LOCK_BYTE: Final = 1 << 30
"""Offset of a byte whose page SQLite never writes."""
_serial = itertools.count(1)


def take_out(directory: Path) -> tuple[str, ...]:
    """Turn the original's files into databases that stock SQLite opens. Return their names. Blocks.

    Apply the commits of WALs, and roll unfinished transactions back, as the original does. Remove the
    original's files from ``directory``. Raise ``Corrupt`` for pages that are no database, or that SQLite
    refuses, and ``Invalid`` without rocksdict. Errors of RocksDB's iterators reach the caller.
    """
    has_gap = {name: _write_pages(directory / name, pages) for name, pages in _databases(directory)}
    vfs = _RootedVFS(directory)
    try:
        for name in has_gap:
            _recover(directory / name, vfs, check=has_gap[name])
    finally:
        vfs.unregister()
    shutil.rmtree(directory / PAGE_DB)
    for path in directory.iterdir():
        if _JOURNAL.fullmatch(path.name) or _LEFT_BEHIND.fullmatch(path.name):
            path.unlink()
    return tuple(sorted(has_gap))


def _databases(directory: Path) -> Iterator[tuple[str, Iterator[tuple[bytes, bytes]]]]:
    """Yield each database's name and its pages, as pairs of key and page. Read the pages before the next
    database."""
    native = load_rocksdict("A SQLite database of the Go original")
    path = str(directory / PAGE_DB)
    with native_errors("open the pages of a SQLite database", path):
        names = [name for name in native.Rdict.list_cf(path) if name != DEFAULT]
        options = {name: native.Options(raw_mode=True) for name in names}
        database = native.Rdict(
            path,
            native.Options(raw_mode=True),
            options,
            access_type=native.AccessType.read_only(),
        )
        try:
            for name in names:
                pages = database.get_column_family(name).iter(native.ReadOptions())
                yield _database_name(name), _items(pages)
        finally:
            database.close()


def _database_name(family: str) -> str:
    name = family.removeprefix("/")
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        raise Corrupt("the pages of a SQLite database have an invalid name", name=family)
    return name


def _items(iterator: Any) -> Iterator[tuple[bytes, bytes]]:
    iterator.seek_to_first()
    while iterator.valid():
        yield iterator.key(), iterator.value()
        iterator.next()
    iterator.status()  # Without this check, a damaged file would look like the end.


def _write_pages(path: Path, pages: Iterator[tuple[bytes, bytes]]) -> bool:
    """Write a database's pages to its file. Return True if pages are missing. Only free pages may be missing:
    the caller then has SQLite check the database."""
    written = end = size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for key, page in pages:
            (offset,) = _KEY.unpack(key) if len(key) == _KEY.size else (-1,)
            if not size:
                size, end = _shape(path, offset, page)
            if offset < 0 or offset % size or len(page) != size:
                raise _no_page(path, key, page)
            write_at(descriptor, page, offset)
            written += 1
            end = max(end, offset + size)
        os.ftruncate(descriptor, end)
    finally:
        os.close(descriptor)
    return bool(size) and written < end // size - (end > _LOCK_BYTE)


def _shape(path: Path, offset: int, first: bytes) -> tuple[int, int]:
    """Return the sizes of a page and of the database, in bytes, by its first page. Raise ``Corrupt`` if
    ``first`` is no page, or not at offset 0."""
    size, count = page_header(first) if len(first) >= _HEADER.size else (0, 0)
    if offset or not size or size != len(first):
        raise _no_page(path, _KEY.pack(max(0, offset)), first)
    return size, size * count


def page_header(first: bytes) -> tuple[int, int]:
    """Return the size of a database's pages in bytes, and their number, by its first bytes."""
    size, count = _HEADER.unpack_from(first)
    return (65536 if size == 1 else size), count


def _no_page(path: Path, key: bytes, page: bytes) -> Corrupt:
    return Corrupt(
        "a RocksDB that the Go original keeps a SQLite database in has something else than its pages",
        path=str(path),
        key=key.hex(),
        length=len(page),
    )


def _recover(path: Path, vfs: _RootedVFS, *, check: bool) -> None:
    """Let SQLite roll a hot journal back, or move a WAL into the database, as after a crash. Raise
    ``Corrupt`` if it fails, or a page is missing."""
    try:
        connection = apsw.Connection(path.name, vfs=vfs.name)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            rows = connection.execute("PRAGMA integrity_check(1)").fetchall() if check else _WHOLE
        finally:
            connection.close()
    except apsw.Error as error:
        raise Corrupt(f"cannot open a recovered database: {error}", path=str(path)) from error
    if rows != _WHOLE:
        raise Corrupt(f"pages of a recovered database are missing: {rows[0][0]}", path=str(path))


_WHOLE: Final = [("ok",)]


class _RootedVFS(apsw.VFS):
    """A VFS for names that are relative to a directory."""

    def __init__(self, directory: Path) -> None:
        self.name = f"gazette-rooted-{os.getpid()}-{next(_serial)}"
        self._directory = directory
        super().__init__(self.name, "")

    def _path(self, name: str) -> str:
        return str(self._directory / name)

    def xFullPathname(self, name: str) -> str:
        return name

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        text = name.filename() if isinstance(name, apsw.URIFilename) else name
        return apsw.VFSFile("", None if text is None else self._path(text), flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(self._path(filename), syncdir)

    def xAccess(self, pathname: str, flags: int) -> bool:
        return super().xAccess(self._path(pathname), flags)
