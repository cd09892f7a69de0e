"""Stage 14 of the byte path: state of shards in a SQL database that they share.

Needs the extra ``pygazette[postgres]`` (SQLAlchemy, and a driver). There is no recovery log: the
shard's checkpoint is a row of the same database. It commits in the transaction of the application's
changes. Every new owner increments a *fence* in that row, which keeps former owners from committing.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

# Import it before SQLAlchemy: its error says what to install.
from gazette.stores.sql.engine import (  # isort: skip
    READING,
    TABLE,
    checkpoint_table,
    create_checkpoint_table,
    create_engine,
    create_tables,
    shared_engine,
)

import sqlalchemy as sa
from sqlalchemy import event, exc

from gazette.consumer.application import Shard, Store
from gazette.consumer.transaction.error_cause import ErrorCause
from gazette.errors import (
    Broken,
    Bug,
    Closed,
    Corrupt,
    Fenced,
    GazetteError,
    NotAllowed,
    Unavailable,
)
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.failpoints import hit
from gazette.runtime.tasks import BlockingPool, OpFuture
from gazette.stores.claims import BackfillClaim, Held
from gazette.stores.sql.claims import ClaimedRow, held_in, taken_over
from gazette.stores.sql.errors import TryAgain, classify, translating

_RESTORE_ATTEMPTS: Final = 10

_NAME_SESSION: Final = sa.text("SELECT set_config('application_name', :name, true)")
_END_FORMER: Final = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
    " AND usename = current_user AND datname = current_database()"
    " AND state LIKE 'idle in transaction%'"
    " AND state_change < clock_timestamp() - interval '1 second'"
)

Statement = str | sa.Executable
Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Translating(Protocol):
    """Function that returns the context in which errors of a shard's transactions become ours."""

    def __call__(
        self, what: str, hint: str | None = None
    ) -> contextlib.AbstractContextManager[None]: ...


class SQLStore(Store):
    """A store with its state in a database that SQLAlchemy supports, PostgreSQL above all.

    The shards' specification names no recovery log (``recovery_log_prefix`` is empty). The table of
    checkpoints must exist: call `create_checkpoint_table`, or create it by hand:

        CREATE TABLE gazette_checkpoints (shard_fqn TEXT PRIMARY KEY, fence INTEGER NOT NULL,
            checkpoint BYTEA NOT NULL)

    **Exactness.** Only statements by ``execute`` or on ``transaction()`` commit with the checkpoint
    and obey its fence.

    **Isolation.** The next transaction begins, on any connection of the pool, when the previous
    commit is done; until then ``transaction()`` waits. So an application reads its own writes, at
    every isolation level. Two transactions that change a row in turn do not conflict.

    With ``overlap`` it does not wait. The next transaction begins on a second connection, while the
    former one waits for its messages to be published. It then does **not** see the former one's
    changes. That is exact only if each statement itself finds the row that it changes. Examples are
    ``UPDATE … SET n = n + 1`` and ``INSERT … ON CONFLICT``, which wait for a row's lock under READ
    COMMITTED. It is never exact if a value that was read is written back. Under REPEATABLE READ or
    above such transactions fail. SQLite, which has one writer, just waits.
    """

    def __init__(
        self, engine: sa.Engine | str, *, overlap: bool = False, table: str = TABLE
    ) -> None:
        """Create a store; it opens no connection yet.

        ``engine`` is shared with other stores, and stays open. For a URL, the store makes its own.
        """
        self._owns_engine = isinstance(engine, str)
        self.engine = create_engine(engine) if isinstance(engine, str) else engine
        self._overlap = overlap
        self._table = checkpoint_table(sa.MetaData(), table)
        self._pool = BlockingPool("sql commit", 1)
        self._fence: int | None = None
        self._fqn = ""
        """Key of the shard whose checkpoint was restored."""
        self._claimed: ClaimedRow | None = None
        self._session_name = ""
        self._running: _Running | None = None
        self._commit: _Commit | None = None
        self._closed = False
        self._thread = threading.get_ident()
        """The shard's thread: its queries see the writes of the running transaction."""

    def transaction(self) -> sa.Connection:
        """Return the connection of the running transaction; the first call begins it.

        Only the runtime may commit it: a commit raises ``NotAllowed``, and the transaction is lost.
        ``begin_nested`` is a savepoint. Wait for the previous commit (see the class), and raise its
        failure. Raise ``Unavailable``.
        """
        if self._running is None:
            if self._closed:
                raise Closed("the store was destroyed")
            self._await_commit()
            with self._translating("begin a transaction"):
                self._running = _Running(self.engine.connect())
                if self._session_name:
                    self._running.connection.execute(_NAME_SESSION, {"name": self._session_name})
            if self._claimed is not None:
                self._require_claimed(self._claimed)
        return self._running.connection

    def _await_commit(self) -> None:
        """Wait until the changes of the previous transaction can be read. Raise its failure."""
        if self._commit is not None and not self._overlap:
            self._commit.future.result()

    def _require_claimed(self, claimed: ClaimedRow) -> None:
        """Lock the shard's row before all else in a backfill's transaction.

        Raise ``Fenced``; the transaction is then over.
        """
        assert self._running is not None
        try:
            with self._translating("lock the shard's row"):
                claimed.lock(self._running.connection)
        except BaseException:
            running, self._running = self._running, None
            running.give_up()
            raise

    def execute(
        self, statement: Statement, parameters: Parameters | None = None
    ) -> sa.CursorResult[Any]:
        """Run a statement in the running transaction; a string is SQL with ``:name`` parameters.

        Raise ``Unavailable`` when the database is lost, and SQLAlchemy's errors for faults
        of the statement.
        """
        connection = self.transaction()
        if isinstance(statement, str):
            statement = sa.text(statement)
        with self._translating("run a statement"):
            return connection.execute(statement, parameters)

    def savepoint(self) -> _Savepoint:
        with self._translating("set a savepoint"):
            return _Savepoint(self._translating, self.transaction().begin_nested())

    def classify_error(self, error: Exception) -> ErrorCause:
        return classify(error)

    def _translating(
        self, what: str, hint: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context that turns errors of the shard's own transactions into ours."""
        return translating(self.engine, what, hint=hint, is_fenced=self._is_fenced)

    def _is_fenced(self) -> bool:
        """Return True if another owner has restored the checkpoint since. Blocks, on its own connection."""
        if self._fence is None or self._claimed is not None:
            return False
        with self.engine.connect().execution_options(**{READING: True}) as connection:
            return held_in(connection, self._table, self._fqn).fence != self._fence

    def query(self, statement: Statement, parameters: Parameters | None = None) -> list[Any]:
        """Return all rows of a reading statement. Any thread; the rows stay valid for ever.

        On the shard's thread the query sees the writes of the running transaction. Before its first
        statement, the query waits for the previous commit and sees it (not with ``overlap``). On
        another thread it sees everything committed, by this shard and others. Raise as ``execute``
        does. A failed statement ends a transaction of PostgreSQL.
        """
        if isinstance(statement, str):
            statement = sa.text(statement)
        if threading.get_ident() == self._thread:
            if self._running is not None:
                return list(self.execute(statement, parameters).all())
            self._await_commit()
        with (
            translating(self.engine, "run a query"),
            self.engine.connect().execution_options(**{READING: True}) as connection,
        ):
            return list(connection.execute(statement, parameters).all())

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[Any]:
        if self._fence is None:
            raise Bug("a commit before restore_checkpoint", shard=shard.fqn)
        if self._commit is not None and not self._commit.future.done():
            raise Bug("a commit while the previous one is pending", shard=shard.fqn)
        self.transaction()
        running, self._running = self._running, None
        assert running is not None
        table = self._table
        if self._claimed is not None:
            checkpoint = self._claimed.carrying(checkpoint)
        statement = (
            table.update()
            .where(table.c.shard_fqn == shard.fqn, table.c.fence == self._fence)
            .values(checkpoint=checkpoint.to_bytes())
        )
        if self._claimed is not None:
            statement = statement.values(fence=self._claimed.next_fence)
        self._commit = _Commit(running, statement, shard.fqn, self._translating)
        self._commit.start(wait_for, self._pool)
        return self._commit.future

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        """Restore the checkpoint, and increment the fence. Blocks.

        Commits of former owners then fail with ``Fenced``. Raise ``Invalid`` when the table is
        missing, or ``Unavailable``.
        """
        for attempt in range(_RESTORE_ATTEMPTS):
            try:
                with translating(self.engine, "restore the checkpoint", table=self._table.name):
                    self._fence, data = self._take_over(shard.fqn)
                    self._fqn = shard.fqn
            except TryAgain:
                if attempt == _RESTORE_ATTEMPTS - 1:
                    raise
            else:
                return Checkpoint.from_bytes(data)
        raise Bug("unreachable")

    def held(self, shard: Shard) -> Held:
        """Return what the database holds of the shard. Leave the fence unchanged. Blocks. See `Claimable`."""
        with (
            translating(self.engine, "look at the checkpoint", table=self._table.name),
            self.engine.connect().execution_options(**{READING: True}) as connection,
        ):
            return held_in(connection, self._table, shard.fqn)

    def claim(self, shard: Shard, claim: BackfillClaim) -> Held:
        """Claim the state for a backfill, instead of ``restore_checkpoint``. Blocks. See `Claimable`."""
        held = self.held(shard)
        if not held.is_of(claim.token):
            if held.fence != claim.fence or held.is_followed(claim.token):
                raise taken_over(shard.fqn)
            self._fence = claim.fence
            self._claimed = ClaimedRow(self._table, shard.fqn, claim)
            if self.engine.dialect.name == "postgresql":
                # The shard's next owner must not wait for an attempt that has stopped.
                self._session_name = _session_name(self._table.name, shard.fqn)
        return held

    def _take_over(self, fqn: str) -> tuple[int, bytes]:
        """Increment the fence in its own transaction. Return our new fence and the checkpoint."""
        table = self._table
        if self.engine.dialect.name == "postgresql":
            self._session_name = _session_name(table.name, fqn)
            # A former owner that is stopped (SIGSTOP) or cut off would hold its locks for that time.
            with self.engine.begin() as connection:
                connection.execute(_END_FORMER, {"name": self._session_name})
        with self.engine.begin() as connection:
            mine = table.c.shard_fqn == fqn
            # Lock the row first: a commit under way is then waited for, and seen.
            counted = connection.execute(
                table.update().where(mine).values(fence=table.c.fence + 1)
            ).rowcount
            if counted == 0:
                empty = Checkpoint().to_bytes()
                connection.execute(table.insert().values(shard_fqn=fqn, fence=1, checkpoint=empty))
            row = connection.execute(sa.select(table.c.fence, table.c.checkpoint).where(mine)).one()
            return int(row.fence), bytes(row.checkpoint)

    def destroy(self) -> None:
        """Drop the connections of what is not committed; the database rolls it back."""
        self._closed = True
        running, self._running = self._running, None
        if running is not None:
            running.drop()
        if self._commit is not None:
            self._commit.abandon()
        self._pool.close()
        if self._owns_engine:
            self.engine.dispose()


class _Savepoint:
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


class _Running:
    """A connection with a transaction that only the store may end."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self._ours = False
        self.rolled_back = False
        try:
            self.transaction = connection.begin()
            event.listen(connection, "commit", self._on_commit)
            event.listen(connection, "rollback", self._on_rollback)
        except BaseException:
            connection.close()
            raise

    def _on_commit(self, _connection: sa.Connection) -> None:
        if not self._ours:
            raise NotAllowed(
                "only the runtime commits a store's transaction: a commit is refused",
                hint="Leave it out; use begin_nested() for what you may want to undo.",
            )

    def _on_rollback(self, _connection: sa.Connection) -> None:
        self.rolled_back = self.rolled_back or not self._ours

    def commit(self) -> None:
        """Commit. Raise ``GazetteError`` if the application rolled back: its earlier changes are lost."""
        self._ours = True
        if self.rolled_back or not self.transaction.is_active:
            raise GazetteError(
                "the application rolled the transaction back, and its earlier changes are lost",
                hint="Use begin_nested() for what may fail, and let other errors end the shard.",
            )
        self.transaction.commit()

    def give_up(self) -> None:
        """Roll back, and give the connection back."""
        self._ours = True
        # After a refused commit SQLAlchemy takes it for ended, and would not roll back.
        if self.transaction.is_active:
            self.connection.close()
        else:
            self.drop()

    def drop(self) -> None:
        """Close the connection without a message to the database, which may not answer any more."""
        self._ours = True
        if not self.connection.closed and not self.connection.invalidated:
            self.connection.invalidate()
        self.connection.close()


class _Step(enum.Enum):
    WAITING = "for what the commit depends on"
    RUNNING = "on a thread"
    ENDED = "committed, failed or abandoned"


class _Commit:
    """One commit: it waits for futures without a thread, and then commits on one.

    The thread that moves ``_step`` away from WAITING owns the connection.
    """

    def __init__(
        self, running: _Running, statement: sa.Update, fqn: str, translating: Translating
    ) -> None:
        self.future: OpFuture[None] = OpFuture()
        self._running = running
        self._statement = statement
        self._fqn = fqn
        self._translating = translating
        self._lock = threading.Lock()
        self._step = _Step.WAITING
        self._remaining = 1
        self._submitted = False

    def start(self, wait_for: Collection[OpFuture[Any]], pool: BlockingPool) -> None:
        futures = set(wait_for)
        self._remaining += len(futures)
        for future in futures:
            future.add_done_callback(lambda done: self._on_done(_error_of(done), pool))
        self._on_done(None, pool)

    def _on_done(self, error: BaseException | None, pool: BlockingPool) -> None:
        """Count one future as done, on the thread that set it. A failure ends the wait."""
        with self._lock:
            self._remaining -= 1
            if self._submitted or self._step is not _Step.WAITING:
                return
            if error is None and self._remaining:
                return
            self._submitted = True
            # Hold the lock: the pool is closed after `abandon`, which takes it too.
            pool.submit(self._run, error)

    def _take(self, step: _Step) -> bool:
        with self._lock:
            waiting = self._step is _Step.WAITING
            if waiting:
                self._step = step
            return waiting

    def _run(self, dependency: BaseException | None) -> None:
        if not self._take(_Step.RUNNING):
            return
        error: BaseException | None = None
        try:
            self._perform(dependency)
        except BaseException as raised:  # noqa: BLE001 - it belongs to the caller that waits for the commit
            error = raised
            # Roll back at once, in the database: locks of an abandoned transaction block others.
            lost = isinstance(raised, Unavailable)
            self._end(self._running.drop if lost else self._running.give_up)
        else:
            self._end(self._running.connection.close)
        # Set the future only now: its waiters may need this connection, or its locks.
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def _end(self, end: Callable[[], None]) -> None:
        """Give the connection back. Ignore errors: the connection is not used any more."""
        try:
            end()
        except exc.SQLAlchemyError:
            self._running.drop()

    def _perform(self, dependency: BaseException | None) -> None:
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
            if self._running.connection.execute(self._statement).rowcount == 0:
                raise self._why_none()
            hit("sql.committing", self._fqn)
            self._running.commit()
        hit("sql.committed", self._fqn)

    def _why_none(self) -> GazetteError:
        """Return the error for a row that does not have our fence.

        A deleted row differs from a newer fence: an owner that starts without a row starts from nothing.
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
        """End the commit if it still waits. Do not wait for one that is being made."""
        if self._take(_Step.ENDED):
            self._running.drop()
            self.future.set_exception(Closed("the store was destroyed", shard=self._fqn))


def _session_name(table: str, fqn: str) -> str:
    """Return the ``application_name`` of a shard's transactions, by which its next owner finds them."""
    digest = hashlib.sha256(f"{table} {fqn}".encode()).hexdigest()[:12]
    return f"gazette {digest} {fqn[-40:].encode('ascii', 'replace').decode()}"


def _error_of(future: OpFuture[Any]) -> BaseException | None:
    if future.cancelled():
        return Closed("it was cancelled")
    return future.exception()


__all__ = [
    "SQLStore",
    "checkpoint_table",
    "create_checkpoint_table",
    "create_engine",
    "create_tables",
    "shared_engine",
]
