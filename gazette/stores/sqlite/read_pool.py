"""Read-only connections to a SQLite database, for queries while the shard's transactions run."""

from __future__ import annotations

import contextlib
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import apsw

from gazette.errors import Closed, NotAllowed
from gazette.stores.sqlite.connections import ConnectionSetup, is_reading_pragma

_READING: Final = frozenset(
    {apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE}
)
_PREPARED_BY_VIRTUAL_TABLES: Final = frozenset(
    {apsw.SQLITE_INSERT, apsw.SQLITE_UPDATE, apsw.SQLITE_DELETE}
)
"""Statements that some virtual tables prepare at their first use. ``query_only`` makes them fail."""
_PROGRESS_STEPS = 100_000
"""Steps of SQLite's virtual machine between two checks whether the store is destroyed: milliseconds."""


class ReadPool:
    """Read-only connections, at most ``limit`` at once, made when needed.

    ``immutable``: the database does not change while the pool exists. SQLite needs neither locks nor a WAL.
    """

    def __init__(
        self,
        path: Path,
        limit: int,
        setup: ConnectionSetup,
        *,
        attached: Mapping[str, Path] | None = None,
        immutable: bool = False,
    ) -> None:
        """Create a pool without connections; ``attached`` are further databases, by name."""
        self._path = path
        self._setup = setup
        self._attached = attached or {}
        self._immutable = immutable
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[apsw.Connection] = []
        self._busy: set[apsw.Connection] = set()
        self._closed = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        """Wait for a connection, and hold it for the block. Raise ``Closed`` when the pool is closed, even
        while the block runs. Raise ``NotAllowed`` if the block writes."""
        with self._slots:
            connection = self._take()
            try:
                yield connection
            except apsw.InterruptError as error:
                raise self._closed_error() from error
            except apsw.ReadOnlyError as error:
                raise only_reads() from error
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
        """Open a connection. Raise ``Closed`` if SQLite cannot open the file: mostly because the store was
        destroyed, and its file with it."""
        try:
            connection = self._open()
        except apsw.CantOpenError as error:
            raise self._closed_error() from error
        try:
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: apsw.Connection) -> None:
        connection.set_busy_timeout(5_000)
        connection.execute("PRAGMA query_only=ON").fetchall()
        connection.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        self._setup.set_pragmas(connection)
        connection.authorizer = authorize_reading
        self._setup.call_prepare(connection)
        connection.authorizer = authorize_reading  # Again, if the application has replaced it.
        # An interrupt ends only a running statement. This handler ends a query that begins during `close`.
        connection.set_progress_handler(lambda: self._closed, _PROGRESS_STEPS)

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
        """Close idle connections, and interrupt connections in use: their users close them."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            for connection in self._busy:
                connection.interrupt()


def authorize_reading(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow actions that only read, or that virtual tables prepare: SQLite's authorizer. Raise ``NotAllowed``
    for others."""
    if action in _READING or action in _PREPARED_BY_VIRTUAL_TABLES:
        return apsw.SQLITE_OK
    if action == apsw.SQLITE_PRAGMA and is_reading_pragma(first or "", second):
        return apsw.SQLITE_OK
    raise only_reads()


def only_reads() -> NotAllowed:
    return NotAllowed("query() only reads", hint="Write from consume_message(), with execute().")
