"""Stage 14 of the byte path: SQL state of a shard, in SQLite, replicated to its recovery log.

The database is a plain SQLite database in the shard's directory: full SQL, transactions of the shard,
and read connections beside it for queries. Its commit and the checkpoint are one transaction, which
reaches the recovery log as one append.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import apsw

from gazette.consumer.application import Shard, Store
from gazette.errors import Closed, Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.recorder import Recorder
from gazette.stores.sqlite_redo_recording import RedoRecording
from gazette.stores.sqlite_vfs_recording import VfsRecording
from gazette.tasks import OpFuture

Bindings = Sequence[Any] | dict[str, Any]

CHECKPOINT_TABLE = """
CREATE TABLE IF NOT EXISTS gazette_checkpoint (
    rowid INTEGER PRIMARY KEY CHECK (rowid = 0),
    checkpoint BLOB NOT NULL
)
"""


class Recording(Protocol):
    """How commits of the database reach the log."""

    path: Path

    def open(self) -> apsw.Connection: ...

    def ship(self, wait_for: Collection[OpFuture[Any]] = ()) -> OpFuture[Any]: ...

    @property
    def live_bytes(self) -> int: ...

    def close(self) -> None: ...


class SQLiteStore(Store):
    """A store whose state is a SQLite database.

    ``schema`` is SQL that runs at every start, so it says ``IF NOT EXISTS`` and may carry migrations.
    ``mode`` is how commits are recorded: ``"redo"`` ships the bytes that changed; ``"vfs"`` records
    every write through a VFS of our own and is the plain specification of the other, slower.

    ``execute`` and ``executemany`` belong to the shard's thread and to its running transaction, which
    the first statement begins and the runtime commits: an application never says BEGIN or COMMIT.
    ``query`` may be called from any thread at any time and sees the last local commit.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        schema: str = "",
        *,
        mode: Literal["redo", "vfs"] = "redo",
        page_size: int = 4096,
        cache_bytes: int = 64 << 20,
        readers: int = 4,
    ) -> None:
        """Open the played-back database, or a new one. Raises ``Invalid`` and ``Corrupt``."""
        if recorder is None:
            raise Invalid(
                "SQLiteStore needs a recovery log",
                hint="Set recovery_log_prefix in the shard's specification.",
            )
        if mode == "redo":
            self._recording: Recording = RedoRecording(recorder, page_size=page_size)
        elif mode == "vfs":
            self._recording = VfsRecording(recorder, page_size=page_size)
        else:
            raise Invalid(f"unknown recording mode {mode!r}", hint="Use 'redo' or 'vfs'.")
        self._readers = _ReadPool(self._recording.path, readers)
        self.connection = self._recording.open()
        """The writing connection, for what this class does not offer (functions, tracing …)."""
        self.connection.execute(f"PRAGMA cache_size=-{cache_bytes >> 10}").fetchall()
        self._begin()
        self.connection.execute(CHECKPOINT_TABLE).fetchall()
        if schema:
            self.connection.execute(schema).fetchall()
        self._commit()
        self._recording.ship()

    # -- the running transaction

    def _begin(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("COMMIT")

    def execute(self, sql: str, bindings: Bindings = ()) -> apsw.Cursor:
        """Run SQL within the running transaction. Rows are read from the returned cursor.

        Several statements separated by semicolons run one after the other as rows are fetched: call
        ``fetchall`` unless the SQL yields none.
        """
        connection = self.connection
        if not connection.in_transaction:
            self._begin()
        return connection.execute(sql, bindings)

    def executemany(self, sql: str, rows: Collection[Bindings] | Iterator[Bindings]) -> apsw.Cursor:
        """Run SQL once for each row of bindings, within the running transaction."""
        connection = self.connection
        if not connection.in_transaction:
            self._begin()
        return connection.executemany(sql, rows)

    # -- queries beside it

    def query(self, sql: str, bindings: Bindings = ()) -> list[tuple[Any, ...]]:
        """All rows of a reading statement, on a connection of its own. Any thread.

        Sees every transaction that was committed here, including one whose append is still on its
        way. Raises ``NotAllowed`` for SQL that writes, ``Closed`` when the store was destroyed.
        """
        with self._readers.connection() as connection:
            try:
                return connection.execute(sql, bindings).fetchall()
            except apsw.ReadOnlyError as error:
                raise NotAllowed(
                    "query() only reads",
                    hint="Write from consume_message(), with execute().",
                ) from error

    @property
    def live_bytes(self) -> int:
        """The size of the database, in bytes."""
        return self._recording.live_bytes

    # -- the store's contract

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        self.execute(
            "INSERT INTO gazette_checkpoint VALUES (0, ?)"
            " ON CONFLICT (rowid) DO UPDATE SET checkpoint = excluded.checkpoint",
            (checkpoint.to_bytes(),),
        )
        self._commit()
        return self._recording.ship(wait_for)

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")
        row = self.connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchall()
        return Checkpoint.from_bytes(cast("bytes", row[0][0])) if row else Checkpoint()

    def destroy(self) -> None:
        self._readers.close()
        self._recording.close()


class _ReadPool:
    """Read-only connections, at most ``limit`` at once, made when needed."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._slots = threading.BoundedSemaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[apsw.Connection] = []
        self._closed = False

    @contextlib.contextmanager
    def connection(self) -> Iterator[apsw.Connection]:
        with self._slots:
            with self._lock:
                if self._closed:
                    raise Closed("the store was destroyed", path=str(self._path))
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._connect()
            try:
                yield connection
            finally:
                with self._lock:
                    if self._closed:
                        connection.close()
                    else:
                        self._idle.append(connection)

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(5_000)
        connection.execute("PRAGMA query_only=ON").fetchall()
        connection.execute("PRAGMA wal_autocheckpoint=0").fetchall()
        return connection

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
