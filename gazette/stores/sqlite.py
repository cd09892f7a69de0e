"""Stage 14 of the byte path: SQL state of a shard, in SQLite, replicated to its recovery log.

The database is a plain SQLite database in the shard's directory: full SQL, transactions of the shard,
and read connections beside it for queries. Its commit and the checkpoint are one transaction, which
reaches the recovery log as one append.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self, cast

import apsw

from gazette.consumer.application import Shard, StateView, Store
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.local_files import damaged_file, disk_error, full_disk
from gazette.recoverylog.recorder import Recorder
from gazette.stores.sqlite_databases import RedoDatabases, check_log
from gazette.stores.sqlite_migrations import Migration, apply_migrations
from gazette.stores.sqlite_read_pool import ReadPool
from gazette.stores.sqlite_vfs_recording import VfsRecording
from gazette.stores.sqlite_view import FollowedDatabases
from gazette.stores.two_copies import TwoCopies
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

    @property
    def path(self) -> Path: ...

    @property
    def attached(self) -> Mapping[str, Path]: ...

    def open(self) -> apsw.Connection: ...

    def ship(self, wait_for: Collection[OpFuture[Any]] = ()) -> OpFuture[Any]: ...

    @property
    def live_bytes(self) -> int: ...

    def close(self) -> None: ...


_OF_THE_DISK: Final = (
    apsw.FullError,
    apsw.CorruptError,
    apsw.NotADBError,
    apsw.CantOpenError,
    apsw.IOError,
    apsw.ReadOnlyError,
    apsw.PermissionsError,
    OSError,
)
_REFUSED_PRAGMAS: Final = {
    "journal_mode": "recording depends on it",
    "locking_mode": "recording depends on it, and queries could not read",
    "wal_autocheckpoint": "recording depends on it",
    "wal_checkpoint": "only the store makes checkpoints, once they are recorded",
    "page_size": "it is fixed when the database is made; give page_size to SQLiteStore",
    "query_only": "the store could not commit",
    "synchronous": "the recovery log makes commits durable, and a disk is not waited for",
    "temp_store_directory": "it is of the whole process",
    "data_store_directory": "it is of the whole process",
    "writable_schema": "a schema that was written by hand may not open on the next owner",
}
"""By name, why setting it is refused."""


class SQLiteStore(Store):
    """A store whose state is a SQLite database.

    ``schema`` is SQL that runs at every start, so it says ``IF NOT EXISTS``. ``migrations`` are what is done
    once, each a version of the schema: see `sqlite_migrations`.
    ``databases`` names further ones that are attached under these names (``archive``: tables are
    ``archive.…``), and commit together with the main one, ``primary.db``. Those that the log has and that
    are not named any more stay attached.
    ``mode`` is how commits are recorded: ``"redo"`` ships the bytes that changed; ``"vfs"`` records
    every write through a VFS of our own and is the plain specification of the other, slower.

    ``execute`` and ``executemany`` belong to the shard's thread and to its running transaction, which
    the first statement begins and the runtime commits: an application never says BEGIN, COMMIT or
    ROLLBACK (``NotAllowed``), and uses SAVEPOINT for what it may want to undo. ATTACH and DETACH are
    refused as well: what would be attached is not recorded.
    ``query`` may be called from any thread at any time and sees the last local commit.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        schema: str = "",
        *,
        databases: Iterable[str] = (),
        migrations: Sequence[Migration] = (),
        mode: Literal["redo", "vfs"] = "redo",
        page_size: int = 4096,
        cache_bytes: int = 64 << 20,
        readers: int = 4,
    ) -> None:
        """Open the played-back database, or a new one, of which ``page_size`` is then the page size.

        Raises ``Invalid``, among others when the log was recorded in another mode, and ``Corrupt``.
        """
        if recorder is None:
            raise Invalid(
                "SQLiteStore needs a recovery log",
                hint="Set recovery_log_prefix in the shard's specification.",
            )
        if not 512 <= page_size <= 65536 or page_size & (page_size - 1):
            raise Invalid(
                f"invalid page_size ({page_size})", hint="Use a power of two from 512 to 65536."
            )
        _check_readers(readers)
        check_log(recorder)
        self._directory = recorder.directory
        if mode == "redo":
            self._recording: Recording = RedoDatabases(recorder, databases, page_size=page_size)
        elif mode == "vfs":
            self._recording = VfsRecording(recorder, names=databases, page_size=page_size)
        else:
            raise Invalid(f"unknown recording mode {mode!r}", hint="Use 'redo' or 'vfs'.")
        self._ours = False
        self._rolled_back = False
        self._readers = ReadPool(self._recording.path, readers, attached=self._recording.attached)
        try:
            with self._disk_errors("open the database"):
                self.connection = self._recording.open()
            """The writing connection, for what this class does not offer (functions, tracing …)."""
            self.connection.execute(f"PRAGMA cache_size=-{cache_bytes >> 10}").fetchall()
            self.connection.authorizer = self._authorize
            self.connection.set_rollback_hook(self._on_rollback)
            self._begin()
            self.connection.execute(CHECKPOINT_TABLE).fetchall()
            if schema:
                self.connection.execute(schema).fetchall()
            apply_migrations(self.connection, migrations)
            self._commit()
            self._recording.ship()
        except BaseException:
            self.destroy()
            raise

    # -- of a hot standby

    @classmethod
    def view(cls, directory: Path, *, readers: int = 4) -> StateView:
        """What `Application.new_view` returns for shards with this store.

        Queries then get an object of this class on which ``__init__`` was not called: methods that
        rest on ``query`` alone work as on the primary, and what writes raises ``NotAllowed``. All
        databases are there, those as well that the primary has attached.
        Raises ``Invalid``.
        """
        _check_readers(readers)
        copies = [FollowedDatabases(directory / name) for name in ("one", "two")]
        return TwoCopies(copies, lambda copy: cls._reading(copy, readers))

    @classmethod
    def _reading(cls, copy: FollowedDatabases, readers: int) -> Self:
        store = cls.__new__(cls)
        store._readers = ReadPool(copy.path, readers, attached=copy.attached, immutable=True)
        store._directory = copy.path.parent
        store.connection = cast("apsw.Connection", _NoConnection())
        return store

    # -- the running transaction

    def _transaction(self, statement: str) -> None:
        # Not cached: an application's own COMMIT would find the statement, and not be looked at.
        self._ours = True
        try:
            with self._disk_errors(statement):
                self.connection.execute(statement, can_cache=False)
        finally:
            self._ours = False

    @contextlib.contextmanager
    def _disk_errors(self, what: str) -> Iterator[None]:
        """What SQLite says of the disk, as ours."""
        try:
            yield
        except _OF_THE_DISK as error:
            raise self._disk_error(what, error) from error

    def _disk_error(self, what: str, error: apsw.Error | OSError) -> GazetteError:
        if isinstance(error, OSError):
            return disk_error(what, self._directory, error)
        message = f"SQLite could not {what}: {error}"
        match error:
            case apsw.FullError():
                return full_disk(message, self._directory)
            case apsw.CorruptError() | apsw.NotADBError():
                return damaged_file(message, self._directory)
        return Broken(
            message,
            directory=str(self._directory),
            hint="The process must be able to write the directory for recovered files, and nobody else may.",
        )

    def _begin(self) -> None:
        if self._rolled_back:
            raise GazetteError(
                "the transaction was rolled back by an error, and what it did before is lost",
                hint="Do not catch errors of ON CONFLICT ROLLBACK, RAISE(ROLLBACK) or a full disk: let"
                " them end the shard. Use SAVEPOINT for what may fail.",
            )
        self._transaction("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        if self.connection.in_transaction:
            self._transaction("COMMIT")

    def _on_rollback(self) -> None:
        self._rolled_back = self._rolled_back or not self._ours

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        """SQLite asks this of everything that a statement would do, before it does anything."""
        if self._ours:
            return apsw.SQLITE_OK
        if action == apsw.SQLITE_TRANSACTION:
            raise NotAllowed(
                f"a store's transaction is the runtime's: {first} is refused",
                hint="Leave it out; use SAVEPOINT and ROLLBACK TO for what you may want to undo.",
            )
        if action in (apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH):
            raise NotAllowed(
                "ATTACH and DETACH are refused: what is attached so is not recorded",
                hint="Name the database in SQLiteStore(databases=…), or open another connection to read"
                " from. For VACUUM, call vacuum().",
            )
        pragma = (first or "").lower() if action == apsw.SQLITE_PRAGMA else ""
        reason = _REFUSED_PRAGMAS.get(pragma)
        if reason is not None and (second is not None or pragma == "wal_checkpoint"):
            raise NotAllowed(f"PRAGMA {pragma} is refused: {reason}")
        return apsw.SQLITE_OK

    def execute(self, sql: str, bindings: Bindings = ()) -> apsw.Cursor:
        """Run SQL within the running transaction. Rows are read from the returned cursor.

        Several statements separated by semicolons run one after the other as rows are fetched: call
        ``fetchall`` unless the SQL yields none. Raises ``NotAllowed`` for SQL that the class refuses,
        ``Unavailable`` for a full disk, ``Corrupt`` for a damaged file, and ``apsw.Error`` for what SQLite
        says of the SQL.
        """
        connection = self.connection
        if not connection.in_transaction:
            self._begin()
        try:
            return connection.execute(sql, bindings)
        except _OF_THE_DISK as error:
            raise self._disk_error("run a statement", error) from error

    def executemany(self, sql: str, rows: Collection[Bindings] | Iterator[Bindings]) -> apsw.Cursor:
        """Run SQL once for each row of bindings, within the running transaction."""
        connection = self.connection
        if not connection.in_transaction:
            self._begin()
        try:
            return connection.executemany(sql, rows)
        except _OF_THE_DISK as error:
            raise self._disk_error("run a statement", error) from error

    def savepoint(self) -> _Savepoint:
        if not self.connection.in_transaction:
            self._begin()
        self.connection.execute("SAVEPOINT gazette_message")
        return _Savepoint(self)

    def vacuum(self, database: str = "main") -> None:
        """Give free pages of a database back, which rewrites it. Blocks; recorded with the next commit.

        Only before the first statement of a transaction: in ``new_store``, or ``begin_transaction``.
        Raises ``NotAllowed`` later.
        """
        if self.connection.in_transaction:
            raise NotAllowed(
                "VACUUM needs that no transaction runs",
                hint="Call vacuum() in begin_transaction(), before the first execute().",
            )
        if database != "main" and database not in self._recording.attached:
            raise Invalid(f"no database {database!r}", hint="Name it in SQLiteStore(databases=…).")
        self._transaction(f'VACUUM "{database}"')

    # -- queries beside it

    def query(self, sql: str, bindings: Bindings = ()) -> list[tuple[Any, ...]]:
        """All rows of a reading statement, on a connection of its own. Any thread.

        Sees every transaction that was committed here, including one whose append is still on its
        way. Waits while ``readers`` others run. Raises ``NotAllowed`` for SQL that writes, ``Closed``
        when the store is or was destroyed.
        """
        with self._readers.connection() as connection:
            try:
                return connection.execute(sql, bindings).fetchall()
            except (apsw.CorruptError, apsw.NotADBError) as error:
                raise self._disk_error("run a query", error) from error

    @property
    def live_bytes(self) -> int:
        """The size of the databases, in bytes."""
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
        with self._disk_errors("record a commit"):
            return self._recording.ship(wait_for)

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        if self.connection.in_transaction:
            self._transaction("ROLLBACK")
        self._rolled_back = False
        row = self.connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchall()
        return Checkpoint.from_bytes(cast("bytes", row[0][0])) if row else Checkpoint()

    def close_reading(self) -> None:
        """End queries, of a store that a hot standby reads with."""
        self._readers.close()

    def destroy(self) -> None:
        """Ends queries that run (``Closed``); does not wait for them."""
        self._readers.close()
        self._ours = True
        self._recording.close()


def _check_readers(readers: int) -> None:
    if readers < 1:
        raise Invalid(f"invalid readers ({readers}; expected >= 1)")


class _Savepoint:
    """Of `SQLiteStore.savepoint`."""

    __slots__ = ("_store",)

    def __init__(self, store: SQLiteStore) -> None:
        self._store = store

    def release(self) -> None:
        self._end("RELEASE gazette_message")

    def roll_back(self) -> None:
        self._end("ROLLBACK TO gazette_message; RELEASE gazette_message")

    def _end(self, sql: str) -> None:
        connection = self._store.connection
        if not connection.in_transaction:
            self._store._begin()  # Raises: an error rolled back more than was to be undone.
        connection.execute(sql).fetchall()


class _NoConnection:
    """The writing connection of a store that only reads."""

    def __getattr__(self, name: str) -> Any:
        raise NotAllowed(
            "a hot standby's state is only read", hint="Use query(), or ask the shard's primary."
        )
