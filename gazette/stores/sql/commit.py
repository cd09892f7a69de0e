"""A transaction in a SQL database that only the store may end, and its commit, which waits for futures."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy

from gazette.errors import Broken, Closed, Corrupt, Fenced, GazetteError, NotAllowed, Unavailable
from gazette.runtime.failpoints import hit
from gazette.runtime.tasks import BlockingPool, OpFuture, begun
from gazette.stores.sql.parameters import require_kept
from gazette.stores.transaction_words import ending_words


class Translating(Protocol):
    """Function that returns a context. The context raises a `GazetteError` for errors of the database."""

    def __call__(
        self, what: str, hint: str | None = None
    ) -> contextlib.AbstractContextManager[None]: ...


class SQLSavepoint:
    """A savepoint of `SQLStore.savepoint`."""

    def __init__(self, translating: Translating, nested: sa.NestedTransaction) -> None:
        self._translating = translating
        self._nested = nested

    def release(self) -> None:
        with self._translating("release a savepoint"):
            self._nested.commit()

    def roll_back(self) -> None:
        with self._translating("return to a savepoint"):
            self._nested.rollback()


_POSTGRES_BEGUN: Final = sa.text(
    "SELECT txid_current(), set_config('application_name',"
    " coalesce(nullif(:name, ''), current_setting('application_name')), true)"
)
_MARK: Final = "gazette_transaction"
"""Name of a savepoint that exists as long as the transaction does."""


class RunningTransaction:
    """A connection with a transaction that only the store may end.

    A statement that would end it is refused by its text. A procedure that commits is noticed only at the
    commit: PostgreSQL's number of the transaction has changed, or in other databases a savepoint is gone.
    """

    def __init__(self, connection: sa.Connection, session_name: str = "") -> None:
        """Begin a transaction. While it runs, PostgreSQL's session has the name ``session_name``."""
        self.connection = connection
        self._ours = False
        """True once the store itself ends the transaction."""
        self._number: int | None = None  # PostgreSQL's number of the transaction.
        self.rolled_back = False  # True if the application rolled back.
        try:
            self.transaction = connection.begin()
            event.listen(connection, "commit", self._on_commit)
            event.listen(connection, "rollback", self._on_rollback)
            event.listen(connection, "before_cursor_execute", self._on_statement)
            event.listen(connection, "before_cursor_execute", require_kept)
            if connection.dialect.name == "postgresql":
                row = connection.execute(_POSTGRES_BEGUN, {"name": session_name}).one()
                self._number = int(row[0])
            else:
                connection.exec_driver_sql(f"SAVEPOINT {_MARK}")
                event.listen(connection, "after_cursor_execute", _keep_rows)
        except BaseException:
            connection.close()
            raise

    def _on_statement(
        self, connection: sa.Connection, _cursor: object, statement: str, *_: object
    ) -> None:
        """Refuse a statement that would end the transaction. Raise ``NotAllowed``."""
        words = ending_words(statement, connection.dialect.name)
        # After a rollback, SQLAlchemy begins a transaction of its own, which the commit refuses.
        if words is not None and not self.rolled_back:
            raise NotAllowed(
                f"only the runtime ends a store's transaction: {words} is refused",
                hint="Leave it out; use begin_nested() for what you may want to undo.",
            )

    def execute_last(self, statement: sa.Update) -> int:
        """Execute the last statement before the commit. Return the number of rows that it changed.

        Raise ``Broken``, and change nothing, if a statement has ended the transaction. Raise ``GazetteError``
        if the application rolled back: its earlier changes are lost.
        """
        self._require_whole()
        if self._number is None:
            try:
                self.connection.exec_driver_sql(f"RELEASE SAVEPOINT {_MARK}")
            except exc.DBAPIError as error:
                if error.connection_invalidated:
                    raise
                raise _ended_by_a_statement() from error
            return self.connection.execute(statement).rowcount
        number = sa.func.txid_current()
        changed = self.connection.execute(statement.where(number == self._number)).rowcount
        if changed == 0 and self.connection.execute(sa.select(number)).scalar() != self._number:
            raise _ended_by_a_statement()
        return changed

    def _on_commit(self, _connection: sa.Connection) -> None:
        if not self._ours:
            raise NotAllowed(
                "only the runtime commits a store's transaction: a commit is refused",
                hint="Leave it out; use begin_nested() for what you may want to undo.",
            )

    def _on_rollback(self, _connection: sa.Connection) -> None:
        self.rolled_back = self.rolled_back or not self._ours

    def commit(self) -> None:
        self._ours = True
        self.transaction.commit()

    def _require_whole(self) -> None:
        """Raise ``GazetteError`` if the application has rolled the transaction back."""
        if self.rolled_back or not self.transaction.is_active:
            raise GazetteError(
                "the application rolled the transaction back, and its earlier changes are lost",
                hint="Use begin_nested() for what may fail, and let other errors end the shard.",
            )

    def give_up(self) -> None:
        """Roll back, and return the connection to the pool. After a refused commit, close the connection."""
        self._ours = True
        # After a refused commit, SQLAlchemy takes the transaction for ended, and would not roll back.
        if self.transaction.is_active:
            self.connection.close()
        else:
            self.drop()

    def drop(self) -> None:
        """Close the connection without a message to the database, which may not answer."""
        self._ours = True
        if not self.connection.closed and not self.connection.invalidated:
            self.connection.invalidate()
        self.connection.close()


def _keep_rows(
    _connection: sa.Connection,
    cursor: Any,
    _statement: str,
    _parameters: object,
    context: Any,
    _executemany: bool,
) -> None:
    """Fetch all rows of a statement, as PostgreSQL's driver does, so that they are readable after the commit.

    SQLite cannot end a savepoint while a statement has rows that were not fetched.
    """
    # Leave an INSERT of many rows alone: SQLAlchemy fetches its rows in several parts.
    if cursor.description is not None and context.execute_style.name != "INSERTMANYVALUES":
        rows = cursor.fetchall()
        context.cursor_fetch_strategy = FullyBufferedCursorFetchStrategy(cursor, None, rows)


def _ended_by_a_statement() -> Broken:
    return Broken(
        "a statement of the application ended the store's transaction before its commit",
        hint="Leave commits to the runtime, in procedures too. Statements before it may have been"
        " committed without the checkpoint, and are applied again: check the rows of the last messages.",
    )


class _Step(enum.Enum):
    WAITING = "for what the commit depends on"
    RUNNING = "on a thread"
    ENDED = "committed, failed or abandoned"


class SQLCommit:
    """One commit: it waits for futures without a thread, and then commits on a thread of the pool.

    The thread that moves ``_step`` away from WAITING owns the connection.
    """

    def __init__(
        self, running: RunningTransaction, statement: sa.Update, fqn: str, translating: Translating
    ) -> None:
        self.future: OpFuture[None] = begun()
        self._running = running
        self._statement = statement
        self._fqn = fqn
        self._translating = translating
        self._lock = threading.Lock()
        self._step = _Step.WAITING
        self._remaining = 1  # One for `start` itself, which is done when it has seen all futures.
        self._submitted = False

    def start(self, wait_for: Collection[OpFuture[Any]], pool: BlockingPool) -> None:
        futures = set(wait_for)
        self._remaining += len(futures)
        for future in futures:
            future.add_done_callback(lambda done: self._on_done(_error_of(done), pool))
        self._on_done(None, pool)

    def _on_done(self, error: BaseException | None, pool: BlockingPool) -> None:
        """Count a future, or `start` itself, as done. After the last one, or a failure, submit the commit."""
        with self._lock:
            self._remaining -= 1
            if self._submitted or self._step is not _Step.WAITING:
                return
            if error is None and self._remaining:
                return
            self._submitted = True
            try:
                # Hold the lock here: the pool is closed after `abandon`, which takes the same lock.
                pool.submit(self._run, error)
                return
            except Unavailable as refused:  # The system starts no thread.
                self._step = _Step.RUNNING
                reason = refused
        self._running.drop()
        self.future.set_exception(reason)

    def _take(self, step: _Step) -> bool:
        """Move from WAITING to ``step``. Return False if another thread has left WAITING before."""
        with self._lock:
            waiting = self._step is _Step.WAITING
            if waiting:
                self._step = step
            return waiting

    def _run(self, dependency: BaseException | None) -> None:
        """Commit, on a thread of the pool, or roll back. Then set the future."""
        if not self._take(_Step.RUNNING):
            return
        error: BaseException | None = None
        try:
            self._perform(dependency)
        except BaseException as raised:  # noqa: BLE001 - it belongs to the caller that waits for the commit
            error = raised
            # Roll back now: the locks of an abandoned transaction would block others.
            is_lost = isinstance(raised, Unavailable)
            self._end(self._running.drop if is_lost else self._running.give_up)
        else:
            self._end(self._running.connection.close)
        # Set the future last: tasks that wait for it may need this connection, or its locks.
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def _end(self, end: Callable[[], None]) -> None:
        """Call ``end`` to release the connection. Ignore errors: the connection is not used any more."""
        try:
            end()
        except exc.SQLAlchemyError:
            self._running.drop()

    def _perform(self, dependency: BaseException | None) -> None:
        """Commit. Raise ``Broken`` for a failed dependency. If the shard's row is gone or has another fence,
        raise the error of `_why_none`."""
        if dependency is not None:
            raise Broken(
                f"a dependency of the commit failed: {dependency}", shard=self._fqn
            ) from dependency
        hint = (
            "The commit may have taken place: the shard's next owner learns it from its "
            "checkpoint, and applies messages once either way. Check that the database is "
            "running and reachable."
        )
        with self._translating("commit", hint):
            if self._running.execute_last(self._statement) == 0:
                raise self._why_none()
            hit("sql.committing", self._fqn)
            self._running.commit()
        hit("sql.committed", self._fqn)

    def _why_none(self) -> GazetteError:
        """Return the error for a row without this owner's fence.

        A deleted row has another error than a newer fence: without a row, a shard starts from nothing.
        """
        table = self._statement.table
        row = self._running.connection.execute(
            sa.select(table.c.fence).where(table.c.shard_fqn == self._fqn)
        ).one_or_none()
        if row is not None:
            return Fenced(
                "a new owner incremented the checkpoint's fence", shard=self._fqn, fence=row.fence
            )
        return Corrupt(
            "the row of the shard's checkpoint was deleted",
            shard=self._fqn,
            hint="Restore the row, or delete the shard's own rows too: without it the shard reads "
            "its sources from their beginning. Then: gazctl shards unassign --failed.",
        )

    def abandon(self) -> None:
        """End the commit if it still waits for futures. Do not wait for a commit that has begun."""
        if self._take(_Step.ENDED):
            self._running.drop()
            self.future.set_exception(Closed("the store was destroyed", shard=self._fqn))


def _error_of(future: OpFuture[Any]) -> BaseException | None:
    if future.cancelled():
        return Closed("it was cancelled")
    return future.exception()
