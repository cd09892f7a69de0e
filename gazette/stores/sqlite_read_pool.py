"""Connections that only read a SQLite database: what queries run on, beside the shard's transactions."""

from __future__ import annotations

import contextlib
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import apsw

from gazette.errors import Closed, NotAllowed

_READING: Final = frozenset(
    {apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}
)
_PREPARED_BY_VIRTUAL_TABLES: Final = frozenset(
    {apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE}
)
"""Statements that some virtual tables make ready when they are first looked at. ``query_only`` is what
keeps any such statement from taking effect."""
_READING_PRAGMAS: Final = frozenset(
    {
        "application_id",
        "collation_list",
        "compile_options",
        "data_version",
        "database_list",
        "encoding",
        "foreign_key_check",
        "foreign_key_list",
        "freelist_count",
        "function_list",
        "index_info",
        "index_list",
        "index_xinfo",
        "integrity_check",
        "page_count",
        "page_size",
        "quick_check",
        "schema_version",
        "table_info",
        "table_list",
        "table_xinfo",
        "user_version",
    }
)
_SETTINGS: Final = frozenset({"application_id", "encoding", "page_size", "user_version"})
"""Pragmas that read without an argument, and write with one."""
_PROGRESS_STEPS = 100_000
"""Of SQLite's virtual machine between two looks at whether the store was destroyed: milliseconds."""


class ReadPool:
    """Read-only connections, at most ``limit`` at once, made when needed.

    ``immutable``: nothing changes the database for as long, so that no lock and no WAL is looked at.
    """

    def __init__(
        self,
        path: Path,
        limit: int,
        *,
        attached: Mapping[str, Path] | None = None,
        immutable: bool = False,
    ) -> None:
        """``attached`` are further databases, by name."""
        self._path = path
        self._attached = attached or {}
        self._immutable = immutable
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[apsw.Connection] = []
        self._busy: set[apsw.Connection] = set()
        self._closed = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        with self._slots:
            connection = self._take()
            try:
                yield connection
            except apsw.InterruptError as error:
                raise self._closed_error() from error
            except apsw.ReadOnlyError as error:
                raise _only_reads() from error
            finally:
                with self._lock:
                    self._busy.discard(connection)
                    if self._closed:
                        connection.close()
                    else:
                        self._idle.append(connection)

    def _take(self) -> apsw.Connection:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
        connection = self._connect()
        with self._lock:
            if self._closed:
                connection.close()
                raise self._closed_error()
            self._busy.add(connection)
        return connection

    def _closed_error(self) -> Closed:
        return Closed("the store was destroyed", path=str(self._path))

    def _connect(self) -> apsw.Connection:
        try:
            connection = self._open()
        except apsw.CantOpenError as error:
            raise self._closed_error() from error
        connection.set_busy_timeout(5_000)
        connection.execute("PRAGMA query_only=ON").fetchall()
        connection.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        connection.authorizer = _authorize_reading
        # An interrupt ends what runs, and nothing that is about to: a query that begins at the moment
        # of `close` would go on for as long as it likes.
        connection.set_progress_handler(lambda: self._closed, _PROGRESS_STEPS)
        return connection

    def _open(self) -> apsw.Connection:
        flags = apsw.SQLITE_OPEN_READWRITE if not self._immutable else apsw.SQLITE_OPEN_READONLY
        connection = apsw.Connection(self._uri(self._path), flags=flags | apsw.SQLITE_OPEN_URI)
        for name, path in self._attached.items():
            connection.execute(f'ATTACH ? AS "{name}"', (self._uri(path),)).fetchall()
        return connection

    def _uri(self, path: Path) -> str:
        suffix = "?immutable=1" if self._immutable else ""
        return f"file:{urllib.parse.quote(str(path))}{suffix}"

    def close(self) -> None:
        """Close what is idle, and interrupt what is not: its users close it."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            for connection in self._busy:
                connection.interrupt()


def _authorize_reading(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action in _READING or action in _PREPARED_BY_VIRTUAL_TABLES:
        return apsw.SQLITE_OK
    if action == apsw.SQLITE_PRAGMA:
        pragma = (first or "").lower()
        if pragma in _READING_PRAGMAS and not (second is not None and pragma in _SETTINGS):
            return apsw.SQLITE_OK
    raise _only_reads()


def _only_reads() -> NotAllowed:
    return NotAllowed("query() only reads", hint="Write from consume_message(), with execute().")
