"""A shard's recovered files, opened read-only: SQL, keys and values, or a JSON document.

Only `to_standalone` turns a log's files into files that stock tools open. Promotion, ``gazctl shards
recover``, time travel and views of standbys use `to_standalone`, or the `materialize` that it calls.
"""

from __future__ import annotations

import enum
import json
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import apsw

from gazette.errors import Corrupt, Invalid, NotFound
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset
from gazette.recoverylog.rocksdb.keys import (
    CHECKPOINT_KEY,
    MARK_PREFIX,
    after,
    decode_offset,
    journal_of,
)
from gazette.recoverylog.rocksdb.native import DEFAULT, load_rocksdict, native_errors
from gazette.recoverylog.rocksdb.scan import Pinned, Scan, joined, spans
from gazette.recoverylog.sqlite.page_db import take_out
from gazette.recoverylog.sqlite.redo import materialize
from gazette.recoverylog.sqlite.wal import require_whole_wal
from gazette.recoverylog.store_files import (
    PAGE_DB,
    PRIMARY_DATABASE,
    STATE_FILE,
    StateForm,
    form_of,
    require_whole,
)

_REDO: Final = re.compile(r"(.+)\.redo-\d{8,}")
_LEFTOVER: Final = re.compile(r"\d+\.(sst|blob|log)(\..*)?|MANIFEST-\d+(\..*)?|IDENTITY|next\.json")
"""Files that a store may have before its first commit."""
_SQLITE_MAGIC: Final = b"SQLite format 3\0"


class StateKind(enum.Enum):
    """Kind of the recovered files in a directory."""

    SQLITE = "sqlite"
    ROCKSDB = "rocksdb"
    JSON = "json"
    FILES = "files"
    """Files of a store that is not Gazette's, or no files."""


def recorded_databases(names: Iterable[str]) -> set[str]:
    """Return the names of the databases that have redo files among ``names``."""
    return {match[1] for name in names if (match := _REDO.fullmatch(name))}


def to_standalone(directory: Path) -> tuple[str, ...]:
    """Turn played-back files into databases that stock SQLite opens. Return their names. Blocks.

    Turn files of a SQLite store of the Go original into databases too. Files of other kinds stay as they are.
    The call may be repeated. Raise ``Corrupt`` if a database's files contradict each other, or if one of its
    images is missing. Raise ``Invalid`` for parts of a database without the rest. Raise ``GazetteError`` if
    the disk is full.
    """
    files = relative_files(directory)
    require_whole(files)
    if form_of(files) is StateForm.PAGES:
        return take_out(directory)
    _remove_page_db(directory / PAGE_DB)
    databases = recorded_databases(path.name for path in directory.iterdir() if path.is_file())
    for name in databases:
        materialize(directory, name)
    databases |= {
        path.name for path in directory.iterdir() if path.is_file() and _is_database(path)
    }
    for name in databases:
        if any((directory / f"{name}{suffix}").exists() for suffix in ("-wal", "-journal")):
            _settle(directory / name)
    return tuple(sorted(databases))


def _remove_page_db(path: Path) -> None:
    """Remove the original's RocksDB, which has no commit, or the file that `hand_over` puts in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def relative_files(directory: Path) -> set[str]:
    """Return the paths of all files below a directory, relative to it."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def _is_database(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC


def _settle(path: Path) -> None:
    """Let SQLite roll a hot journal back, or move a WAL into the database, as after a crash. Raise
    ``Corrupt`` if it fails."""
    try:
        connection = apsw.Connection(str(path))
        try:
            require_whole_wal(connection, path)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.close()
    except apsw.Error as error:
        raise Corrupt(f"cannot open a recovered database: {error}", path=str(path)) from error


class ShardState:
    """State of a shard at one commit, read-only. Blocking. For one thread at a time.

    ``offset`` is the offset in ``log`` at which the state ends. ``time`` is the time at which its
    last transaction was recorded, if the log has times. Use this as a context manager, or ``close``
    it. ``close`` removes the files only with ``owns_directory``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        log: JournalName = "",
        offset: Offset = 0,
        time: datetime | None = None,
        owns_directory: bool = False,
        prepare_connection: Callable[[apsw.Connection], None] | None = None,
    ) -> None:
        """Call `to_standalone`, and open the files. For the errors see `to_standalone`.

        ``prepare_connection`` adds the functions and collations that a SQLite schema needs.
        """
        self.directory = directory
        self.log = log
        self.offset = offset
        self.time = time
        self.databases = to_standalone(directory)
        """Names of the SQLite databases."""
        self.kind = self._find_kind()
        """Kind of the store, by its files."""
        self._owns_directory = owns_directory
        self._prepare_connection = prepare_connection
        self._connection: apsw.Connection | None = None
        self._native: Any = None
        self._rocksdb: Any = None
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()
        self._families: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything that was opened. A second call does nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        # RocksDB stays open until its last iterator is closed.
        for scan in list(self._scans):
            scan.close()
        self._families.clear()
        database, self._rocksdb = self._rocksdb, None
        if database is not None:
            database.close()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _find_kind(self) -> StateKind:
        if PRIMARY_DATABASE in self.databases:
            return StateKind.SQLITE
        if (self.directory / "CURRENT").exists():
            return StateKind.ROCKSDB
        if (self.directory / STATE_FILE).exists():
            return StateKind.JSON
        return StateKind.FILES

    def _require(self, kind: StateKind, what: str) -> None:
        if self.kind is not kind:
            raise Invalid(
                f"a state of kind {self.kind.value!r} does not have {what}",
                directory=str(self.directory),
                hint="SQLite states have query(), RocksDB states get() and iterate(), JSON states"
                " document(). Other states are files in the directory.",
            )

    @property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint of the state, empty before the first commit. Raises ``Invalid`` for a state of a store
        that is not Gazette's."""
        match self.kind:
            case StateKind.SQLITE:
                if not self.query("SELECT 1 FROM sqlite_master WHERE name = 'gazette_checkpoint'"):
                    return Checkpoint()
                rows = self.query("SELECT checkpoint FROM gazette_checkpoint")
                # The original writes an empty text before its first commit.
                return Checkpoint.from_bytes(rows[0][0]) if rows and rows[0][0] else Checkpoint()
            case StateKind.ROCKSDB:
                return self._rocksdb_checkpoint()
            case StateKind.JSON:
                return decode_state_file((self.directory / STATE_FILE).read_bytes())[1]
            case StateKind.FILES:
                if all(_LEFTOVER.fullmatch(path.name) for path in self.directory.iterdir()):
                    return Checkpoint()  # The log ends here before the first commit.
                raise Invalid(
                    "cannot read the checkpoint of this state: its store is not one of Gazette's",
                    directory=str(self.directory),
                    hint="Give a time or an offset of the log instead.",
                )

    # -- SQLite

    def connection(self) -> apsw.Connection:
        """Return a read-only connection to ``primary.db``. `close` of the state closes it.

        Other databases are attached by their names without ``.db``. Raise ``Invalid`` for another kind.
        """
        self._require(StateKind.SQLITE, "SQL")
        if self._connection is None:
            connection = apsw.Connection(
                _read_only(self.directory / PRIMARY_DATABASE),
                flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI,
            )
            for name in self.databases:
                if name != PRIMARY_DATABASE:
                    schema = name.removesuffix(".db").replace('"', '""')
                    connection.execute(
                        f'ATTACH ? AS "{schema}"', (_read_only(self.directory / name),)
                    ).fetchall()
            if self._prepare_connection is not None:
                self._prepare_connection(connection)
            self._connection = connection
        return self._connection

    def query(
        self, sql: str, bindings: Sequence[Any] | dict[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Return all rows of a SQL statement. Raise ``apsw.ReadOnlyError`` if it would write."""
        return self.connection().execute(sql, bindings).fetchall()

    # -- RocksDB

    def _family(self, name: str) -> Any:
        """Return a column family. The first call opens the RocksDB, read-only. Raise ``NotFound`` for an
        unknown name, and ``Invalid`` for a state of another kind."""
        self._require(StateKind.ROCKSDB, "keys and values")
        if self._rocksdb is None:
            native = self._native = load_rocksdict("a RocksDB state")
            path = str(self.directory)
            with native_errors("open the state", path):
                options = native.Options(raw_mode=True)
                families = {
                    family: native.Options(raw_mode=True)
                    for family in native.Rdict.list_cf(path)
                    if family != DEFAULT
                }
                self._rocksdb = native.Rdict(
                    path, options, families, access_type=native.AccessType.read_only()
                )
            self._families = {
                family: self._rocksdb.get_column_family(family) for family in families
            }
            self._families[DEFAULT] = self._rocksdb
        column_family = self._families.get(name)
        if column_family is None:
            raise NotFound(f"no column family {name!r}", families=", ".join(sorted(self._families)))
        return column_family

    def get(self, key: bytes, *, column_family: str = DEFAULT) -> bytes | None:
        """Return the value of a key of a RocksDB state, or None for an absent key. Raise ``NotFound`` for an
        unknown column family, and ``Invalid`` for a state of another kind."""
        family = self._family(column_family)
        with native_errors("read a key", str(self.directory)):
            value: bytes | None = family.get(key)
        return value

    def iterate(
        self, prefix: bytes = b"", *, column_family: str = DEFAULT
    ) -> Iterator[tuple[bytes, bytes]]:
        """Return an iterator of (key, value) of a RocksDB state with ``prefix``, in the order of keys.

        Leave out Gazette's own keys in the default family. Raise ``Corrupt`` for a damaged file.
        """
        key_spans = spans(prefix, None, None, column_family)
        return joined(key_spans, partial(self._scan, column_family), reverse=False)

    def _scan(
        self, column_family: str, low: bytes, high: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        family = self._family(column_family)
        scan = Scan(Pinned(self._native, family, str(self.directory)), low, high, reverse=False)
        self._scans.add(scan)
        return scan

    @property
    def column_families(self) -> tuple[str, ...]:
        """Names of the column families of a RocksDB state."""
        self._family(DEFAULT)  # Opens the database.
        return tuple(sorted(self._families))

    def _rocksdb_checkpoint(self) -> Checkpoint:
        """Return the checkpoint. If it is missing, return the offsets in the marks of sources."""
        data = self.get(CHECKPOINT_KEY)
        if data is not None:
            return Checkpoint.from_bytes(data)
        marks = self._scan(DEFAULT, MARK_PREFIX, after(MARK_PREFIX))
        return Checkpoint(
            {journal_of(key): SourceCheckpoint(decode_offset(value)) for key, value in marks}
        )

    # -- JSON

    def document(self) -> Any:
        """Return the state of a JSON store, as plain dicts, lists, strings and numbers. Raise ``Invalid`` for
        a state of another kind, and ``Corrupt`` for a damaged file."""
        self._require(StateKind.JSON, "a document")
        state, _ = decode_state_file((self.directory / STATE_FILE).read_bytes())
        return state


def decode_state_file(data: bytes) -> tuple[Any, Checkpoint]:
    """Return the state and the checkpoint of a ``state.json``. Raise ``Corrupt`` for a damaged file."""
    lines = data.split(b"\n")[:-1]
    if len(lines) < 2:
        raise Corrupt("state.json does not hold offsets and state", lines=len(lines))
    try:
        offsets = json.loads(lines[0])
        state = json.loads(lines[1])
    except ValueError as error:
        raise Corrupt(f"state.json is not JSON: {error}") from error
    checkpoint = Checkpoint.from_json(lines[2]) if len(lines) > 2 else Checkpoint()
    return state, with_offsets(checkpoint, offsets)


def with_offsets(checkpoint: Checkpoint, offsets: dict[str, int]) -> Checkpoint:
    """Return a checkpoint with the offsets in the first line of a ``state.json``, which take precedence."""
    sources = dict(checkpoint.sources)
    for journal, offset in offsets.items():
        source = sources.get(journal, SourceCheckpoint())
        sources[journal] = SourceCheckpoint(offset, source.producers)
    return replace(checkpoint, sources=sources)


def _read_only(path: Path) -> str:
    return f"file:{quote(str(path))}?mode=ro"
