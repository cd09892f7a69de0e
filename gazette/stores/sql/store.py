"""Stage 14 of the byte path: state of shards in a shared SQL database.

Needs the extra ``pygazette[postgres]`` (SQLAlchemy, and a driver). There is no recovery log: the
shard's checkpoint is a row of the same database, and commits together with the application's
changes. Every new owner increments a *fence* in that row, so that former owners cannot commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

# Import this module before SQLAlchemy: the module's error says what to install.
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
from sqlalchemy import event

from gazette.consumer.application import Shard, Store
from gazette.consumer.contract.error_cause import ErrorCause
from gazette.consumer.timers.timer import TimerTable
from gazette.errors import Aborted, Bug, Closed, Invalid
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import BlockingPool, OpFuture
from gazette.stores.claims import BackfillClaim, HeldState
from gazette.stores.early_writes import wrote_too_early
from gazette.stores.sql.claims import ClaimedRow, held_in, taken_over
from gazette.stores.sql.commit import RunningTransaction, SQLCommit, SQLSavepoint
from gazette.stores.sql.errors import classify, translating
from gazette.stores.sql.parameters import require_kept
from gazette.stores.sql.timers import TIMERS, SQLTimers, create_timer_table, timer_table

_RESTORE_ATTEMPTS: Final = 10

# End sessions of former owners that wait within a transaction: they may hold locks.
_END_FORMER: Final = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
    " AND usename = current_user AND datname = current_database()"
    " AND state LIKE 'idle in transaction%'"
    " AND state_change < clock_timestamp() - interval '1 second'"
)

Statement = str | sa.Executable
Parameters = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class SQLStore(Store):
    """A store with its state in a database that SQLAlchemy supports, mainly PostgreSQL.

    The specifications of shards name no recovery log (``recovery_log_prefix`` is empty). The table of
    checkpoints must exist: call `create_checkpoint_table`, or create it by hand:

        CREATE TABLE gazette_checkpoints (shard_fqn TEXT PRIMARY KEY, fence INTEGER NOT NULL,
            checkpoint BYTEA NOT NULL)

    **Exactness.** Only statements by ``execute`` or on ``transaction()`` commit with checkpoint and fence.

    **Isolation.** ``transaction()`` waits until the previous commit is done. Then the next transaction
    begins, on any connection of the pool. So an application reads its own writes, at every isolation
    level. Two transactions that change a row in turn do not conflict.

    With ``overlap``, the next transaction begins at once, on a second connection. The previous one may still
    wait for its messages to be published. The next one does **not** see the changes of the previous one.
    Results are exact only if each statement finds and changes its row in one step. Examples are ``UPDATE …
    SET n = n + 1`` and ``INSERT … ON CONFLICT``, which wait for a row's lock under READ COMMITTED. To read a
    value and write it back is never exact. Under REPEATABLE READ or above, such transactions fail. SQLite,
    which has one writer, waits.
    """

    def __init__(
        self,
        engine: sa.Engine | str,
        *,
        overlap: bool = False,
        table: str = TABLE,
        timers: str = TIMERS,
    ) -> None:
        """Create a store; it opens no connection yet. ``table`` and ``timers`` are names of tables.

        An ``engine`` is shared with other stores, and stays open. For a URL, the store makes its own engine,
        and closes it in `destroy`. Raise ``Invalid`` for a URL of no known database.
        """
        self._owns_engine = isinstance(engine, str)
        self.engine = create_engine(engine) if isinstance(engine, str) else engine
        self._overlap = overlap
        self._table = checkpoint_table(sa.MetaData(), table)
        self._timers = timer_table(sa.MetaData(), timers)
        self._pool = BlockingPool("sql commit", 1)
        self._fence: int | None = None
        """The fence that a commit requires. None: no checkpoint was restored or claimed."""
        self._fqn = ""
        """Key of the shard whose checkpoint was restored."""
        self._claimed: ClaimedRow | None = None
        """The row that a backfill has claimed. None if no backfill writes the store."""
        self._session_name = ""
        self._running: RunningTransaction | None = None
        self._commit: SQLCommit | None = None
        self._closed = False
        self._thread = threading.get_ident()
        """The shard's thread: its queries see the writes of the running transaction."""

    def transaction(self) -> sa.Connection:
        """Return the connection of the running transaction. The first call begins the transaction.

        Only the runtime may commit it: a commit by the application raises ``NotAllowed``, and the
        transaction is lost. ``begin_nested`` is a savepoint. Wait for the previous commit (see the
        class), and raise its failure. Raise ``Unavailable`` if the database does not answer, and ``Closed``
        after `destroy`. In a backfill, lock the shard's row: raise ``Fenced`` if the claim is not in force.
        """
        if self._running is None:
            if self._closed:
                raise Closed("the store was destroyed")
            self._await_commit()
            with self._translating("begin a transaction"):
                self._running = RunningTransaction(self.engine.connect(), self._session_name)
            if self._claimed is not None:
                self._require_claimed(self._claimed)
        return self._running.connection

    def _await_commit(self) -> None:
        """Wait for the previous commit, and raise its failure. With ``overlap``, do not wait: the next
        transaction does not see the changes of the previous one."""
        if self._commit is not None and not self._overlap:
            self._commit.future.result()

    def _require_claimed(self, claimed: ClaimedRow) -> None:
        """Lock the shard's row, before all statements of a backfill. End the transaction if this fails."""
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

        Raise ``NotAllowed`` for a statement that ends the transaction, such as COMMIT. Raise
        ``InvalidValue`` for a parameter that the database would change, such as NaN in SQLite. Raise
        ``Unavailable`` when the database is lost, and SQLAlchemy's errors for faults of the statement. Raise
        ``Fenced`` if a new owner has ended the session. For more errors see `transaction`.
        """
        connection = self.transaction()
        if isinstance(statement, str):
            statement = sa.text(statement)
        with self._translating("run a statement"):
            return connection.execute(statement, parameters)

    def savepoint(self) -> SQLSavepoint:
        with self._translating("set a savepoint"):
            return SQLSavepoint(self._translating, self.transaction().begin_nested())

    def classify_error(self, error: Exception) -> ErrorCause:
        return classify(error)

    def _translating(
        self, what: str, hint: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context that raises a `GazetteError` for errors of the shard's transactions."""
        return translating(self.engine, what, hint=hint, is_fenced=self._is_fenced)

    def _is_fenced(self) -> bool:
        """Return True if another owner has restored the checkpoint. Blocks, on a connection of its own.

        Return False before a restore, and for a backfill: its statements require the fence.
        """
        if self._fence is None or self._claimed is not None:
            return False
        with self.engine.connect().execution_options(**{READING: True}) as connection:
            return held_in(connection, self._table, self._fqn).fence != self._fence

    def query(self, statement: Statement, parameters: Parameters | None = None) -> list[Any]:
        """Return all rows of a reading statement. Any thread; the rows stay valid.

        On the shard's thread, the query sees the writes of the running transaction. Before the first
        statement of a transaction, the query waits for the previous commit and sees it (not with
        ``overlap``). On another thread, the query sees everything committed, by this shard and others.
        For the errors see ``execute``. In PostgreSQL, a failed statement ends the transaction.
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
            event.listen(connection, "before_cursor_execute", require_kept)
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
        self._commit = SQLCommit(running, statement, shard.fqn, self._translating)
        self._commit.start(wait_for, self._pool)
        return self._commit.future

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        """Restore the checkpoint, and increment the fence. Blocks.

        Commits of former owners then fail with ``Fenced``. In PostgreSQL, also end their sessions that wait
        within a transaction. Raise ``NotAllowed`` for a transaction that began before the first call. Raise
        ``Invalid`` if the table is missing, ``Unavailable`` if the database is lost, and ``Aborted`` if other
        transactions are faster time after time.
        """
        if self._fence is None and self._running is not None:
            # The transaction may hold locks, for which the restore would wait for ever.
            hint = "Make tables on a connection of the engine, before the store. Read by query()."
            raise wrote_too_early(self, shard.id, hint)
        for attempt in range(_RESTORE_ATTEMPTS):
            try:
                with translating(self.engine, "restore the checkpoint", table=self._table.name):
                    self._fence, data = self._take_over(shard.fqn)
                    self._fqn = shard.fqn
            except Aborted:
                if attempt == _RESTORE_ATTEMPTS - 1:
                    raise
            else:
                return Checkpoint.from_bytes(data)
        raise Bug("unreachable")

    def timer_table(self, shard: Shard) -> TimerTable:
        """Return the table of the shard's timers, which must exist: see `create_timer_table`. Blocks.

        Raise ``Invalid`` if the table does not exist, or for a store with ``overlap``.
        """
        if self._overlap:
            raise Invalid(
                "a SQLStore with overlap keeps no timers: a transaction does not see those of the former one",
                shard=shard.id,
                hint="Leave overlap out.",
            )
        with (
            translating(self.engine, "look for the table of timers"),
            self.engine.connect().execution_options(**{READING: True}) as connection,
        ):
            exists = sa.inspect(connection).has_table(self._timers.name)
        if not exists:
            raise Invalid(
                f"the database has no table {self._timers.name}",
                shard=shard.id,
                hint="Create it: gazette.stores.sql.create_timer_table(engine).",
            )
        dialect = self.engine.dialect.name
        return SQLTimers(self._timers, shard.fqn, dialect, self.execute, self.query)

    def held(self, shard: Shard) -> HeldState:
        """Return the shard's rows in the database: see `Claimable`. Leave the fence unchanged. Blocks."""
        with (
            translating(self.engine, "look at the checkpoint", table=self._table.name),
            self.engine.connect().execution_options(**{READING: True}) as connection,
        ):
            return held_in(connection, self._table, shard.fqn)

    def claim(self, shard: Shard, claim: BackfillClaim) -> HeldState:
        """Claim the state for a backfill, instead of ``restore_checkpoint``: see `Claimable`. Blocks."""
        state = self.held(shard)
        if not state.is_of(claim.token):
            if state.fence != claim.fence or state.is_followed(claim.token):
                raise taken_over(shard.fqn)
            self._fence = claim.fence
            self._claimed = ClaimedRow(self._table, shard.fqn, claim)
            if self.engine.dialect.name == "postgresql":
                # By this name the shard's next owner ends the session of an attempt that hangs.
                self._session_name = _session_name(self._table.name, shard.fqn)
        return state

    def _take_over(self, fqn: str) -> tuple[int, bytes]:
        """Increment the fence in a transaction of its own. Return the new fence and the checkpoint. Without a
        row, insert one with fence 1 and an empty checkpoint."""
        table = self._table
        if self.engine.dialect.name == "postgresql":
            self._session_name = _session_name(table.name, fqn)
            # End the session of a former owner, which holds locks if it is stopped (SIGSTOP) or cut off.
            with self.engine.begin() as connection:
                connection.execute(_END_FORMER, {"name": self._session_name})
        with self.engine.begin() as connection:
            own_row = table.c.shard_fqn == fqn
            # Lock the row before reading it: this waits for a running commit, and then sees its result.
            updated = connection.execute(
                table.update().where(own_row).values(fence=table.c.fence + 1)
            ).rowcount
            if updated == 0:
                empty = Checkpoint().to_bytes()
                connection.execute(table.insert().values(shard_fqn=fqn, fence=1, checkpoint=empty))
            row = connection.execute(
                sa.select(table.c.fence, table.c.checkpoint).where(own_row)
            ).one()
            return int(row.fence), bytes(row.checkpoint)

    def destroy(self) -> None:
        """Drop the connections of transactions whose commit has not begun: the database rolls them back."""
        self._closed = True
        running, self._running = self._running, None
        if running is not None:
            running.drop()
        if self._commit is not None:
            self._commit.abandon()
        self._pool.close()
        if self._owns_engine:
            self.engine.dispose()


def _session_name(table: str, fqn: str) -> str:
    """Return the ``application_name`` of a shard's sessions, by which its next owner finds them."""
    digest = hashlib.sha256(f"{table} {fqn}".encode()).hexdigest()[:12]
    return f"gazette {digest} {fqn[-40:].encode('ascii', 'replace').decode()}"


__all__ = [
    "SQLStore",
    "checkpoint_table",
    "create_checkpoint_table",
    "create_engine",
    "create_tables",
    "create_timer_table",
    "shared_engine",
    "timer_table",
]
