"""Stage 14 of the byte path: SQL state of a shard, in SQLite, replicated to its recovery log.

The state is a plain SQLite database in the shard's directory, with full SQL, and connections for queries.
The application's changes and the checkpoint commit in one transaction, which is one append of the log.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from sys import getrefcount
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Self, cast

import apsw

from gazette.consumer.application import Shard, StateView, Store
from gazette.consumer.contract.error_cause import ErrorCause
from gazette.consumer.timers.timer import TimerTable
from gazette.errors import Broken, Closed, GazetteError, Invalid, NotAllowed, NotYet
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.log.recorder import Recorder
from gazette.runtime.tasks import OpFuture
from gazette.stores.bound_values import KEPT, REFUSALS
from gazette.stores.double_buffer import DoubleBuffer
from gazette.stores.early_writes import wrote_too_early
from gazette.stores.sqlite.arrow_tables import shown
from gazette.stores.sqlite.bindings import Bindings, ManyBindings, checked, require_storable
from gazette.stores.sqlite.buffered_cursor import BufferedCursor
from gazette.stores.sqlite.connections import (
    ConnectionSetup,
    PragmaValue,
    PrepareConnection,
    check_pragma,
)
from gazette.stores.sqlite.definitions import unchanged_definitions
from gazette.stores.sqlite.errors import OF_THE_DISK, EndsTransaction, cause_of_error, of_the_disk
from gazette.stores.sqlite.migrations import Migration, apply_migrations
from gazette.stores.sqlite.read_pool import ReadPool, authorize_reading, only_reads
from gazette.stores.sqlite.recording import Mode, recording_of
from gazette.stores.sqlite.timers import ANY, CREATE, EXISTS, SQLiteTimers
from gazette.stores.sqlite.vacuum import VACUUM_BYTES_MAX, require_small
from gazette.stores.sqlite.view import FollowedDatabases

CHECKPOINT_TABLE = """
CREATE TABLE IF NOT EXISTS gazette_checkpoint (
    rowid INTEGER PRIMARY KEY CHECK (rowid = 0),
    checkpoint BLOB NOT NULL
)
"""


def _count_unshared() -> int:
    # Hold the object as `SQLiteStore.execute` does.
    holder = SimpleNamespace(held=object())
    cursor = holder.held
    return getrefcount(cursor)


_UNSHARED: Final = _count_unshared()
"""Count of references to an object that one attribute and one local variable hold, in this Python."""
_TEXTS_KEPT: Final = 256
"""Greatest number of texts of SQL whose kind is remembered."""
_NOT_BEGUN: Final[Mapping[str, bool]] = MappingProxyType({})
_HAS_SCHEMA: Final = "SELECT 1 FROM sqlite_master WHERE name = 'gazette_checkpoint'"


class SQLiteStore(Store):
    """A store with its state in a SQLite database.

    ``schema`` is SQL that runs at every start: write ``IF NOT EXISTS``. Each of ``migrations`` runs
    once: see `stores/sqlite/migrations`. ``databases`` names further databases, attached under these
    names (``archive``: tables are ``archive.…``). They commit together with the main one,
    ``primary.db``. A database of the log that is not named any more stays attached. ``mode`` says how
    commits are recorded: ``"redo"`` records the bytes that changed. ``"vfs"`` records every write
    through our own VFS; it is slower, and serves as the specification of ``"redo"``.

    ``execute`` and ``executemany`` belong to the shard's thread and to its running transaction. The first
    statement begins the transaction and the runtime commits it. BEGIN, COMMIT and ROLLBACK raise
    ``NotAllowed``; use SAVEPOINT for changes that you may undo. ATTACH and DETACH raise ``NotAllowed``:
    recording would miss the attached database. So does a PRAGMA that `stores/sqlite/connections` refuses.

    Any thread may call ``query``. On the shard's thread, which opened the store, a query sees the running
    transaction; on other threads, the last local commit.

    ``connection_pragmas`` are settings such as ``{"foreign_keys": True}``. ``prepare_connection``
    gets an ``apsw.Connection``, and adds functions and collations to it. Both apply to each
    connection, for writing and for queries, before the schema. Give the same ones to `view`.
    """

    _destroyed = True  # Until `__init__` opens the databases.

    def __init__(
        self,
        recorder: Recorder | None,
        schema: str = "",
        *,
        databases: Iterable[str] = (),
        migrations: Sequence[Migration] = (),
        mode: Mode = "redo",
        page_size: int = 4096,
        cache_bytes: int = 64 << 20,
        readers: int = 4,
        connection_pragmas: Mapping[str, PragmaValue] | None = None,
        prepare_connection: PrepareConnection | None = None,
    ) -> None:
        """Open the played-back database, or a new one with pages of ``page_size`` bytes.

        ``prepare_connection`` is called on the thread that needs the connection. It must neither
        write nor replace the connection's authorizer. Raise ``Invalid`` for wrong arguments, a migration
        that fails or has changed, a changed definition, and a log of another store or mode. Raise ``Corrupt``
        for damaged files, ``Unavailable`` for a full disk, and ``apsw.Error`` for faults of ``schema``.
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
        self._directory = recorder.directory
        self._recording = recording_of(recorder, mode, databases, page_size)
        self._thread: int | None = threading.get_ident()
        """The shard's thread: its queries see the writes of the running transaction."""
        self._ours = False
        """True while the store itself begins or ends a transaction."""
        self._querying = False
        """True while ``query`` runs on the shard's thread: then only reading is authorized."""
        self._rolled_back = False
        """True if an error has rolled the running transaction back, and not the store itself."""
        self._returns_none: dict[str, bool] = {}
        """By the SQL of one statement: True if it never returns rows, False if it reads."""
        self._begun: Mapping[str, bool] = _NOT_BEGUN
        """`_returns_none` while a transaction runs that `_begin` has begun; else empty."""
        setup = ConnectionSetup(connection_pragmas, prepare_connection)
        self._readers = ReadPool(
            self._recording.path, readers, setup, attached=self._recording.attached
        )
        self._destroyed = False
        try:
            try:
                self.connection = self._recording.open()
                """The writing connection, for features that this class does not offer (tracing, blobs …)."""
            except OF_THE_DISK as error:
                raise of_the_disk("open the database", self._directory, error) from error
            self._cursor = self.connection.cursor()
            """Cursor of the last call of ``execute`` whose SQL never returns rows."""
            self.connection.execute(f"PRAGMA cache_size=-{cache_bytes >> 10}").fetchall()
            setup.set_pragmas(self.connection)
            self.connection.authorizer = self._authorize
            # Give the hook an id of ours: the application may set a hook too.
            self.connection.set_rollback_hook(self._on_rollback, id=self)
            setup.call_prepare(self.connection)
            self._begin()
            self.connection.execute(CHECKPOINT_TABLE).fetchall()
            with unchanged_definitions(self.connection):
                if schema:
                    self.connection.execute(schema).fetchall()
                apply_migrations(self.connection, migrations)
            self._commit()
            self._recording.ship(changed=False)
            self._committed = self._checkpoint_row()
            """The checkpoint of the last commit, encoded; None before the first commit."""
            self._opened_at: tuple[Any, ...] | None = self._changes()
            """`_changes` when the store was opened. None once the checkpoint was restored."""
        except BaseException:
            self.destroy()
            raise

    @classmethod
    def view(
        cls,
        directory: Path,
        *,
        readers: int = 4,
        connection_pragmas: Mapping[str, PragmaValue] | None = None,
        prepare_connection: PrepareConnection | None = None,
    ) -> StateView:
        """Return a view for `Application.new_view`.

        Queries on a standby get an object of this class that was made without ``__init__``. Methods that use
        only ``query`` work as on the primary, and writing raises ``NotAllowed``. The view has all databases,
        even databases that the primary has attached. Raise ``Invalid`` for bad arguments.
        """
        _check_readers(readers)
        setup = ConnectionSetup(connection_pragmas, prepare_connection)
        copies = [FollowedDatabases(directory / name) for name in ("one", "two")]
        return DoubleBuffer(copies, lambda copy: cls._reading(copy, readers, setup))

    @classmethod
    def _reading(cls, copy: FollowedDatabases, readers: int, setup: ConnectionSetup) -> Self:
        """Return a store that only reads ``copy``: queries on a hot standby get it. Raise ``NotYet`` without
        a commit of the schema."""
        store = cls.__new__(cls)
        store._readers = ReadPool(copy.path, readers, setup, attached=copy.attached, immutable=True)
        store._directory = copy.path.parent
        store._thread = None
        store._begun = _NOT_BEGUN
        store.connection = cast("apsw.Connection", _NoConnection())
        if not store.query(_HAS_SCHEMA):
            store.close_reading()
            raise NotYet("the log holds no commit of the database's schema yet")
        return store

    def _transaction(self, statement: str) -> None:
        # Do not cache the statement: an application's COMMIT would find it in the cache, and pass unchecked.
        self._ours = True
        self._begun = _NOT_BEGUN
        try:
            self.connection.execute(statement, can_cache=False)
        except OF_THE_DISK as error:
            raise of_the_disk(statement, self._directory, error) from error
        finally:
            self._ours = False

    def _begin(self) -> None:
        self._require_transaction()
        self._transaction("BEGIN IMMEDIATE")
        self._begun = self._returns_none

    def _require_transaction(self) -> None:
        """Raise ``GazetteError`` if the changes of the running transaction were rolled back."""
        if self._rolled_back:
            raise GazetteError(
                "an error rolled the transaction back, and its earlier changes are lost",
                hint="Do not catch errors of ON CONFLICT ROLLBACK, RAISE(ROLLBACK) or a full "
                "disk: let them end the shard. Use SAVEPOINT for what may fail.",
            )

    def _commit(self) -> None:
        if self.connection.in_transaction:
            self._transaction("COMMIT")

    def _on_rollback(self) -> None:
        self._begun = _NOT_BEGUN
        self._rolled_back = self._rolled_back or not self._ours

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        """Allow or refuse an action of a statement: SQLite's authorizer, before the statement runs."""
        if self._ours:
            return apsw.SQLITE_OK
        if self._querying:
            return authorize_reading(action, first, second)
        if action == apsw.SQLITE_TRANSACTION:
            raise EndsTransaction(first or "")
        if action in (apsw.SQLITE_ATTACH, apsw.SQLITE_DETACH):
            raise NotAllowed(
                "ATTACH and DETACH are refused: a database attached so is not recorded",
                hint="Name the database in SQLiteStore(databases=…), or open another connection "
                "to read from. For VACUUM, call vacuum().",
            )
        if action == apsw.SQLITE_PRAGMA:
            check_pragma(first or "", second)
        return apsw.SQLITE_OK

    def execute(self, sql: str, bindings: Bindings = ()) -> apsw.Cursor:
        """Run SQL in the running transaction. Read rows from the returned cursor.

        SQL that writes runs all its statements to their end before this returns; its rows stay in memory.
        A single statement that only reads runs as its rows are fetched. Raise ``NotAllowed`` for SQL that the
        class refuses, ``InvalidValue`` for a binding that SQLite does not keep exactly, ``Unavailable`` for a
        full disk, ``Corrupt`` for a damaged file, or ``apsw.Error`` for faults of the SQL. Raise
        ``GazetteError`` if an earlier error has rolled the transaction back.
        """
        if type(bindings) is tuple:
            for value in bindings:  # `are_kept` inlined: its call would double the cost.
                value_type = type(value)
                if value_type not in KEPT and (value_type is not float or isnan(value)):
                    bindings = checked(bindings, sql, self.connection)
                    break
        elif bindings:
            bindings = checked(bindings, sql, self.connection)
        try:
            if self._begun.get(sql):
                # A new cursor costs a third of a small statement. So use the cursor of the last call, unless
                # its caller kept it, or a function of SQL within that call makes this call.
                cursor = self._cursor
                if getrefcount(cursor) > _UNSHARED:
                    self._cursor = cursor = self.connection.cursor()
                return cursor.execute(sql, bindings)
            connection = self.connection
            if not connection.in_transaction:
                self._begin()
            if sql not in self._returns_none:
                return self._run_to_end(sql, bindings)
            return connection.execute(sql, bindings)
        except apsw.CursorClosedError:
            if not _is_closed(self._cursor):
                raise
            # The last caller has closed its cursor.
            self._cursor = self.connection.cursor()
            return self.execute(sql, bindings)
        except REFUSALS:
            require_storable(bindings, sql, self.connection)
            raise
        except EndsTransaction as error:
            raise error.as_written(sql) from None
        except OF_THE_DISK as error:
            raise of_the_disk("run a statement", self._directory, error) from error

    def _run_to_end(self, sql: str, bindings: Bindings) -> apsw.Cursor:
        """Run SQL to its end, unless it is one statement that reads.

        Note the text of one statement that reads, or that returns no rows: `execute` runs it faster from then
        on. All other SQL comes here at each call.
        """
        connection = self.connection
        if connection.exec_trace is not None:
            return BufferedCursor.of(connection.execute(sql, bindings))
        simple: list[tuple[str, bool]] = []

        def trace(cursor: apsw.Cursor, statement: str, _: object) -> bool:
            returns_rows = bool(cursor.get_description())
            if cursor.is_readonly or not returns_rows:
                simple.append((statement, not returns_rows))
            return True

        cursor = connection.cursor()
        cursor.exec_trace = trace
        cursor.execute(sql, bindings)
        cursor.exec_trace = None
        if len(simple) != 1 or simple[0][0] != sql:
            return BufferedCursor.of(cursor)
        if len(self._returns_none) >= _TEXTS_KEPT:
            self._returns_none.clear()
        self._returns_none[sql] = simple[0][1]
        return cursor

    def executemany(self, sql: str, rows: Collection[Bindings] | Iterator[Bindings]) -> apsw.Cursor:
        """Run SQL once for each row of bindings, in the running transaction.

        All rows are written before this returns. Returned rows stay in memory. Errors: see ``execute``.
        """
        connection = self.connection
        if not connection.in_transaction:
            self._begin()
        checked_rows = ManyBindings(rows, sql, connection)
        try:
            return BufferedCursor.of(connection.executemany(sql, checked_rows.bound))
        except REFUSALS:
            checked_rows.require_storable()
            raise
        except EndsTransaction as error:
            raise error.as_written(sql) from None
        except OF_THE_DISK as error:
            raise of_the_disk("run a statement", self._directory, error) from error

    def execute_tables(
        self, sql: str, bindings: Bindings = (), **tables: Any
    ) -> list[tuple[Any, ...]]:
        """Run SQL that reads tables of Arrow by their names, in the running transaction. Return its rows.

        A table is a table or batch of ``pyarrow``, or a frame of Polars. A timestamp is an integer of
        microseconds, and a date is a text. SQLite calls Python for each value: aggregate large tables before.
        Raise as `execute`, ``Invalid`` for a name that the database has already, and ``InvalidValue`` for
        NaN, and for types such as lists, structs, and decimals with a scale.
        """
        connection = self.connection
        if not connection.in_transaction:
            self._begin()
        bindings = checked(bindings, sql, connection)
        try:
            with shown(connection, tables):
                return connection.execute(sql, bindings, can_cache=False).fetchall()
        except REFUSALS:
            require_storable(bindings, sql, connection)
            raise
        except EndsTransaction as error:
            raise error.as_written(sql) from None
        except OF_THE_DISK as error:
            raise of_the_disk("run a statement", self._directory, error) from error

    def savepoint(self) -> _Savepoint:
        if not self.connection.in_transaction:
            self._begin()
        self.connection.execute("SAVEPOINT gazette_message")
        return _Savepoint(self)

    def classify_error(self, error: Exception) -> ErrorCause:
        """Return the cause of an error: see `cause_of_error`."""
        return cause_of_error(error)

    def timer_table(self, shard: Shard) -> TimerTable:
        if not self._read(EXISTS):
            self._begin()
            self.connection.execute(CREATE).fetchall()
            self._commit()
            try:
                self._recording.ship(changed=False)
            except OF_THE_DISK as error:
                raise of_the_disk("record the table of timers", self._directory, error) from error
        return SQLiteTimers(self.execute, self._read)

    @property
    def holds_timers(self) -> bool:
        return bool(self._read(EXISTS)) and bool(self._read(ANY))

    def _read(self, sql: str, bindings: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return rows as of the running transaction, or of the last commit. Begin no transaction."""
        try:
            return self.connection.execute(sql, bindings).fetchall()
        except OF_THE_DISK as error:
            raise of_the_disk("read timers", self._directory, error) from error

    def vacuum(self, database: str = "main", *, limit_bytes: int = VACUUM_BYTES_MAX) -> None:
        """Rewrite a database without its free pages. Blocks; the next commit records it.

        SQLite makes the new database in memory. The commit is one append of about the size of the new
        database, and needs twice this memory. Raise ``TooLarge``, with the sizes, if the new database would
        be larger than ``limit_bytes``. Raise ``Invalid`` for a database that the store does not have. Call
        this in ``new_store``, or in ``begin_transaction`` before all statements: else raise ``NotAllowed``.
        """
        if self.connection.in_transaction:
            raise NotAllowed(
                "VACUUM is not possible within a transaction",
                hint="Call vacuum() in begin_transaction(), before the first execute().",
            )
        if database != "main" and database not in self._recording.attached:
            raise Invalid(f"no database {database!r}", hint="Name it in SQLiteStore(databases=…).")
        require_small(self.connection, database, limit_bytes)
        self._transaction(f'VACUUM "{database}"')

    def query(self, sql: str, bindings: Bindings = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a reading statement. Any thread; the rows stay valid.

        On the shard's thread, the query sees the writes of the running transaction. On another thread, it
        sees every transaction that was committed locally, even if its append is not done. On such a thread,
        it waits while all ``readers`` are in use. Raise ``NotAllowed`` for SQL that writes, ``InvalidValue``
        as `execute`, ``Corrupt`` for a damaged file, ``Closed`` when the store is destroyed, even during the
        query. Raise ``apsw.Error`` for faults of the SQL: the transaction continues.
        """
        if threading.get_ident() == self._thread:
            return self._query_transaction(sql, bindings)
        with self._readers.connection() as connection:
            bindings = checked(bindings, sql, connection)
            try:
                return connection.execute(sql, bindings).fetchall()
            except REFUSALS:
                require_storable(bindings, sql, connection)
                raise
            except (apsw.CorruptError, apsw.NotADBError) as error:
                raise of_the_disk("run a query", self._directory, error) from error

    def _query_transaction(self, sql: str, bindings: Bindings) -> list[tuple[Any, ...]]:
        if self._destroyed:
            raise Closed("the store was destroyed", directory=str(self._directory))
        self._require_transaction()
        bindings = checked(bindings, sql, self.connection)
        cursor = self.connection.cursor()
        # Virtual tables prepare statements that write, so the authorizer permits these.
        cursor.exec_trace = _only_if_reading
        # A function of the application within this query may make a query too.
        outer_querying, self._querying = self._querying, True
        try:
            # Do not use the cache: a cached statement of `execute` would pass unchecked.
            return cursor.execute(sql, bindings, can_cache=False).fetchall()
        except REFUSALS:
            require_storable(bindings, sql, self.connection)
            raise
        except OF_THE_DISK as error:
            raise of_the_disk("run a query", self._directory, error) from error
        finally:
            self._querying = outer_querying

    @property
    def live_bytes(self) -> int:
        """Bytes of the databases."""
        return self._recording.live_bytes

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        # Compare by equality: each access makes a new bound method.
        if self.connection.authorizer != self._authorize:
            raise Broken(
                "the authorizer of the store's connection was replaced",
                directory=str(self._directory),
                hint="Leave store.connection.authorizer alone: by it the store keeps its "
                "transactions whole.",
            )
        data = checkpoint.to_bytes()
        self.execute(
            "INSERT INTO gazette_checkpoint VALUES (0, ?)"
            " ON CONFLICT (rowid) DO UPDATE SET checkpoint = excluded.checkpoint",
            (data,),
        )
        self._commit()
        # A commit of an unchanged checkpoint may leave no frame: SQLite writes none for an unchanged row.
        changed, self._committed = data != self._committed, data
        try:
            return self._recording.ship(wait_for, changed=changed)
        except OF_THE_DISK as error:
            raise of_the_disk("record a commit", self._directory, error) from error

    def _changes(self) -> tuple[Any, ...]:
        """Return numbers that differ after a statement has changed rows, or the schema of a database."""
        names = self.connection.db_names()
        rows = [
            self.connection.execute(f'PRAGMA "{name}".schema_version').fetchall() for name in names
        ]
        return (self.connection.total_changes(), *(versions[0][0] for versions in rows))

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        """Restore the checkpoint, and undo the running transaction. Raise ``NotAllowed`` if the first
        transaction has written something before the first call."""
        if self.connection.in_transaction:
            if self._opened_at not in (None, self._changes()):
                hint = "Make tables by schema= or migrations= of the store."
                raise wrote_too_early(self, shard.id, hint)
            self._transaction("ROLLBACK")
        self._opened_at = None
        self._rolled_back = False
        data = self._committed = self._checkpoint_row()
        return Checkpoint.from_bytes(data) if data else Checkpoint()

    def _checkpoint_row(self) -> bytes | None:
        row = self.connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchall()
        # The original writes an empty text before its first commit.
        return cast("bytes", row[0][0]) if row else None

    def close_reading(self) -> None:
        """End the queries of a standby's store."""
        self._readers.close()

    def destroy(self) -> None:
        """Close the databases, and interrupt queries on other threads, which raise ``Closed``. Do not wait
        for these queries. The running transaction is lost."""
        self._destroyed = True
        self._begun = _NOT_BEGUN
        self._readers.close()
        self._ours = True  # Closing rolls an open transaction back, which the hooks must permit.
        self._recording.close()

    def __del__(self) -> None:
        # Closing the connection rolls an open transaction back, and SQLite then calls the hook. Close it now,
        # while the hook is whole: after the collector has cleared the hook, the process would crash.
        if not self._destroyed:
            SQLiteStore.destroy(self)  # Skip the methods of subclasses: they may be broken.


def _is_closed(cursor: apsw.Cursor) -> bool:
    try:
        cursor.get_connection()
    except apsw.CursorClosedError:
        return True
    return False


def _only_if_reading(cursor: apsw.Cursor, _sql: str, _bindings: object) -> bool:
    """Raise ``NotAllowed`` before a statement that writes. This is an ``exec_trace`` of apsw."""
    if not cursor.is_readonly:
        raise only_reads()
    return True


def _check_readers(readers: int) -> None:
    if readers < 1:
        raise Invalid(f"invalid readers ({readers}; expected >= 1)")


class _Savepoint:
    """A savepoint of `SQLiteStore.savepoint`."""

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
            self._store._begin()  # This raises: an error has rolled the whole transaction back.
        connection.execute(sql).fetchall()


class _NoConnection:
    """Takes the place of the writing connection in a store that only reads: its use raises ``NotAllowed``."""

    def __getattr__(self, name: str) -> Any:
        raise NotAllowed(
            "a hot standby's state is read-only", hint="Use query(), or ask the shard's primary."
        )
