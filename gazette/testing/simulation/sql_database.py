"""The database of one run or one fold, and its sessions.

Each simulated process has pools of its own, and its sessions end with it. A wait for a lock takes virtual
time: the server fails the statement at once, and the statement is tried again later.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import exc

from gazette.consumer.contract.error_cause import ErrorCause
from gazette.errors import Bug, Invalid
from gazette.runtime.tasks import OpFuture
from gazette.stores.sql.errors import classify
from gazette.testing.simulation.loop import SimNode, current_node
from gazette.testing.simulation.states import Rows, rows_of
from gazette.testing.simulation.storage import SIMULATED

_SETTINGS: Final = "SET lock_timeout = '10ms'; SET synchronous_commit = off"
"""While a statement waits in the server, nothing else runs: a longer wait could not get the lock. The server
does not crash, so no commit needs to wait for its disk."""
_LOCKED: Final = "55P03"
_WAIT_S: Final = (0.05, 1.0)
"""First and longest time between two attempts of a statement that waits for a lock."""
_WAITS_MAX_S: Final = 10.0
"""Virtual seconds after which a wait for a lock fails, as by a lock timeout."""
_SAVEPOINT: Final = "gazette_simulation"
_CONTROLS: Final = frozenset(
    {"SAVEPOINT", "RELEASE", "ROLLBACK", "COMMIT", "BEGIN", "START", "END", "ABORT", "PREPARE"}
    | {"SET", "SHOW"}
)
"""First words of statements that wait for no lock. A savepoint around them would change what they do."""
_ENDS: Final = "pg_terminate_backend(pid)"
_IDLE: Final = "state_change < clock_timestamp() - interval '1 second'"
"""Parts of the statement by which a store ends sessions of former owners that stand still."""
_IDLE_S: Final = 1.0
TABLES: Final = """SELECT c.oid, n.nspname, c.relname FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname !~ '^(pg_|information_schema)'
    ORDER BY 2, 3"""
_COLUMNS: Final = """SELECT a.attname, EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid
    AND i.indisprimary AND a.attnum = ANY (i.indkey)) FROM pg_attribute a
    WHERE a.attrelid = {} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
_EVENT_TIME: Final = 2
"""Domain of the rows in tables of timers that are no timers."""


def sqlstate(error: BaseException) -> str:
    """Return the SQLSTATE of a driver's error; empty if it has none."""
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")


@dataclass(slots=True)
class _Session:
    """One connection of an engine."""

    connection: Any
    node: SimNode | None
    """The simulated process of the session; None outside of all processes."""
    pid: int
    used_at: float
    """Virtual time at which its last statement ended."""
    waits: bool = False
    """True while a statement waits for a lock."""

    @property
    def is_idle(self) -> bool:
        """True if no transaction is open, as far as the driver tells."""
        status = getattr(getattr(self.connection, "info", None), "transaction_status", None)
        return status == 0

    def command(self, text: str) -> None:
        cursor = self.connection.cursor()
        cursor.execute(text)
        cursor.close()


class SimDatabase:
    """A copy of the user's database, for one run or one fold."""

    def __init__(self, server: Any, name: str) -> None:
        self.name = name
        self.is_connecting = False
        """True while a driver connects: callbacks may use the network for this purpose only."""
        self.now: Callable[[], float] = lambda: 0.0
        self.pause: Callable[[float], bool] = lambda seconds: False
        """Lets virtual time pass for the caller. Returns False if the caller cannot wait."""
        self.wait: Callable[[OpFuture[Any]], object] = lambda future: None
        """Waits for a future in virtual time, on the thread of a shard."""
        self.new_pool: Callable[[], Any] = _FoldPool
        """Makes the pool of a store, in which it commits."""
        self._server = server
        self._sessions: dict[int, _Session] = {}
        """By the identity of the driver's connection."""
        self._pools: dict[tuple[int, SimNode | None], tuple[Any, Any]] = {}
        """By engine and process: the engine, and its pool there."""
        self._reader: Any = None

    def adopt(self, store: Any) -> None:
        """Let a new store commit in virtual time. Raise ``Invalid`` for another database than PostgreSQL."""
        if store.engine.dialect.name != "postgresql":
            raise Invalid(
                f"a SQLStore in {store.engine.dialect.name} is not simulated",
                path="new_store",
                hint="Give it the URL of any database of PostgreSQL: the simulation connects it to its own.",
            )
        self._server.checkpoints.add(store._table.name)
        self._server.timers.add(store._timers.name)
        store._pool.close()
        store._pool = self.new_pool()

    # Sessions.

    def connect(self, connect: Callable[[], Any]) -> Any:
        """Open a session for the process that runs."""
        self.is_connecting = True
        try:
            connection = connect()
        finally:
            self.is_connecting = False
        cursor = connection.cursor()
        cursor.execute(_SETTINGS)
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
        cursor.close()
        connection.commit()
        session = _Session(connection, current_node(), pid, self.now())
        self._sessions[id(connection)] = session
        return connection

    @staticmethod
    def is_harmless(error: BaseException | None) -> bool:
        """Return True if the shard was ended by a lock or a lost session, as in a fail-over."""
        while error is not None:
            of_database = isinstance(error, (exc.DBAPIError, exc.TimeoutError))
            if of_database and classify(error) in (ErrorCause.TRANSIENT, ErrorCause.ABORTED):  # type: ignore[arg-type]
                return True
            error = error.__cause__
        return False

    def pool_of(self, engine: Any) -> Any:
        """Return the pool of an engine in the process that runs."""
        engine = getattr(engine, "_proxied", engine)
        key = id(engine), current_node()
        if key not in self._pools:
            self._pools[key] = engine, engine.pool.recreate()
        return self._pools[key][1]

    def dispose(self, engine: Any) -> None:
        """Close the sessions that wait in the pools of an engine."""
        for key in [key for key in self._pools if key[0] == id(engine)]:
            self._pools.pop(key)[1].dispose()

    def forget(self, connection: Any) -> None:
        """Roll back a closed session now: the server would roll it back at some later time."""
        session = self._sessions.pop(id(connection), None)
        if session is not None:
            with contextlib.suppress(Exception):  # The server may have ended it.
                connection.rollback()

    def end_process(self, node: SimNode) -> None:
        """End all sessions of a simulated process, as the system does for an ended process."""
        for session in [each for each in self._sessions.values() if each.node is node]:
            self._end(session)
        self._pools = {key: each for key, each in self._pools.items() if key[1] is not node}

    def _end(self, session: _Session) -> None:
        self.forget(session.connection)
        with contextlib.suppress(Exception):
            session.connection.close()

    def close(self) -> None:
        """End all sessions."""
        for session in list(self._sessions.values()):
            self._end(session)
        self._pools.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # Statements.

    def run(self, connection: Any, statement: str, run: Callable[[str], object]) -> bool:
        """Run a statement, and wait in virtual time for locks. Return False if it is for another database."""
        session = self._sessions.get(id(connection))
        if session is None:
            return False
        statement = self._ending_idle(statement)
        word = statement.split(None, 1)[0].upper() if statement.strip() else ""
        waits = word not in _CONTROLS and "NOWAIT" not in statement.upper()
        step_s, waited_s = _WAIT_S[0], 0.0
        while True:
            # Without another open transaction, there is no lock to wait for.
            others = waits and any(
                not each.is_idle for each in self._sessions.values() if each is not session
            )
            nested = others and not getattr(connection, "autocommit", False)
            if nested:
                session.command(f"SAVEPOINT {_SAVEPOINT}")
            try:
                run(statement)
            except Exception as error:
                if not others or sqlstate(error) != _LOCKED or waited_s >= _WAITS_MAX_S:
                    raise
                if nested:
                    session.command(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                    session.command(f"RELEASE SAVEPOINT {_SAVEPOINT}")
                session.waits = True
                try:
                    if not self.pause(step_s):
                        raise
                finally:
                    session.waits = False
                waited_s += step_s
                step_s = min(step_s * 2, _WAIT_S[1])
            else:
                if nested:
                    session.command(f"RELEASE SAVEPOINT {_SAVEPOINT}")
                session.used_at = self.now()
                return True

    def _ending_idle(self, statement: str) -> str:
        """Return a statement. If it ends idle sessions, it judges by virtual time, and awaits their end."""
        if _ENDS not in statement:
            return statement
        if _IDLE not in statement:
            raise Bug("a store ends sessions by another statement than before")
        pids = [
            str(each.pid)
            for each in self._sessions.values()
            if not each.waits and self.now() - each.used_at > _IDLE_S
        ]
        return statement.replace(_ENDS, "pg_terminate_backend(pid, 60000)").replace(
            _IDLE, f"pid IN ({', '.join(pids) or 0})"
        )

    # States.

    def rows(self, ignore: Collection[str]) -> Rows:
        """Return the committed rows of all tables, except those of checkpoints."""
        if self._reader is None:
            self._reader = self._server.connect(self.name)
        tables: Rows = {}
        for oid, schema, name in self._read(TABLES):
            shown = name if schema == "public" else f"{schema}.{name}"
            if name in self._server.checkpoints or {name, shown} & {*ignore}:
                continue
            columns = [
                (column, bool(is_key))
                for column, is_key in self._read(_COLUMNS.format(oid))
                if not {f"{name}.{column}", f"{shown}.{column}"} & {*ignore}
            ]
            names = ", ".join(quoted(column) for column, _ in columns) or "1"
            where = f" WHERE domain <> {_EVENT_TIME}" if name in self._server.timers else ""
            content = self._read(f"SELECT {names} FROM {quoted(schema)}.{quoted(name)}{where}")
            tables[shown] = rows_of(columns, content)
        return tables

    def _read(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self._reader.cursor()
        cursor.execute(statement)
        return [
            tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)
            for row in cursor.fetchall()
        ]


def quoted(name: str) -> str:
    """Return a name as a quoted identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


class _FoldPool:
    """A `Pool` with one thread. A fold waits for each commit, so that nothing runs beside it."""

    def __init__(self) -> None:
        self.name = "sql commit"
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_started = False

    def submit(self, call: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def perform() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller that waits
                future.set_exception(error)

        self._calls.put(perform)
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._work, name=SIMULATED, daemon=True).start()
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def close(self) -> None:
        self._calls.put(None)
