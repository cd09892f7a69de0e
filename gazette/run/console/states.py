"""States of shards at moments, recovered from their recovery logs into a scratch directory: `States`.

Members do not answer SQL. So a state is recovered from its log, and a member only gives the hints.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import apsw

from gazette.client.client import Client
from gazette.client.shards import ListedShard
from gazette.errors import Closed, GazetteError, Invalid, NotYet
from gazette.gazctl.context import Context
from gazette.gazctl.shards.query import require_sql
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset, Revision, ShardId
from gazette.protocol.journal_life import JournalLife
from gazette.recoverylog.log.broker_logs import BrokerLogs
from gazette.recoverylog.shard_state import StateKind
from gazette.recoverylog.store_files import PRIMARY_DATABASE
from gazette.recoverylog.time_travel import Moment, open_at
from gazette.run.console.journal_reads import bounds_of
from gazette.run.console.sql_process import SqlProcesses
from gazette.runtime.numbers import bytes_text
from gazette.runtime.tasks import BlockingPool, TaskScope

T = TypeVar("T")
_Life: TypeAlias = tuple[ShardId, Revision, JournalLife | None]
"""A shard, its life, and the life of its log. A shard or log that is created again has other states."""
_Key: TypeAlias = tuple[_Life, str]
"""A life, and a moment of it."""

log = logging.getLogger(__name__)

STATES_MAX: Final = 8
RECOVERIES_MAX: Final = 2
"""Recoveries at once."""
LOG_BYTES_MAX: Final = 2 << 30
"""Bytes of a log that are read for one state."""
WAIT_S: Final = 8.0
"""Longest wait of an answer for a state. The page asks again, and shows the progress."""
CHECKPOINTS_MAX: Final = 1000
_CLOSE_S: Final = 2.0
_JSON_TABLES: Final = "tables.db"


class StillRecovering(NotYet):
    """A state that is asked for is still being recovered."""


class ReadLogs(BrokerLogs):
    """Logs whose ends are found by reads, since an append may not be permitted. Counts the bytes read."""

    def __init__(self, client: Client, shard_id: str, stall_timeout_s: float) -> None:
        super().__init__(client, asyncio.get_running_loop(), stall_timeout_s=stall_timeout_s)
        self._own_client = client
        self._shard_id = shard_id
        self._is_stopped = False
        self._awaited: concurrent.futures.Future[Any] | None = None
        self.bytes_read = 0

    def stop(self) -> None:
        """Let the present read, and each later one, raise ``Closed``. Any thread."""
        self._is_stopped = True
        if self._awaited is not None:
            self._awaited.cancel()

    def _start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        self._awaited = future = super()._start(work)
        if self._is_stopped:  # Only now: `stop` may run at the same time.
            future.cancel()
        return future

    def _result(self, future: concurrent.futures.Future[T], log: JournalName) -> T:
        try:
            return super()._result(future, log)
        except concurrent.futures.CancelledError as error:
            raise Closed(f"the recovery of {self._shard_id} was stopped") from error

    def bounds(self, log: JournalName) -> tuple[Offset, Offset]:
        return self._result(self._start(bounds_of(self._own_client, log)), log)

    def read(self, log: JournalName, begin: Offset, end: Offset) -> Iterator[tuple[Offset, bytes]]:
        for offset, data in super().read(log, begin, end):
            self.bytes_read += len(data)
            if self.bytes_read > LOG_BYTES_MAX:
                raise Invalid(
                    f"a recovery of {self._shard_id} reads more than {bytes_text(LOG_BYTES_MAX)}",
                    hint=f"Query it by: gazctl shards query {self._shard_id} 'SELECT …'",
                )
            yield offset, data


@dataclass(frozen=True, slots=True)
class StateFiles:
    """A state in files. It ends at ``offset`` of the log. ``time`` is the time of its last commit."""

    store: StateKind
    offset: Offset
    time: datetime | None
    checkpoint: Checkpoint | GazetteError
    """The checkpoint, or why the state has none."""
    database: Path | GazetteError
    """Database with the tables of the state, or why it has none."""

    @property
    def own_tables(self) -> list[str]:
        """Tables that change with each transaction, and say nothing of the application."""
        return ["document"] if self.store is StateKind.JSON else ["gazette_checkpoint"]


def _recover(
    logs: ReadLogs, hints: Sequence[FSMHints], directory: Path, moment: Moment, shard_id: ShardId
) -> StateFiles:
    with open_at(logs, hints, directory, moment) as state:
        checkpoint: Checkpoint | GazetteError
        database: Path | GazetteError = directory / PRIMARY_DATABASE
        try:
            checkpoint = state.checkpoint
        except GazetteError as error:
            checkpoint = error
        if state.kind is StateKind.JSON:
            database = _tables_of(state.document(), directory / _JSON_TABLES)
        else:
            try:
                require_sql(state, shard_id)
            except GazetteError as error:
                database = error
        return StateFiles(state.kind, state.offset, state.time, checkpoint, database)


def _tables_of(document: Any, path: Path) -> Path:
    """Make a database of a state in JSON: ``document`` with the whole, ``state`` with paths and values."""
    connection = apsw.Connection(str(path))
    try:
        connection.execute("CREATE TABLE document (json TEXT)")
        connection.execute("INSERT INTO document VALUES (?)", (json.dumps(document),))
        connection.execute("CREATE TABLE state (path TEXT PRIMARY KEY, value, type TEXT)")
        connection.execute(
            "INSERT INTO state SELECT fullkey, atom, json_tree.type FROM document, json_tree(document.json)"
            " WHERE atom IS NOT NULL"
        )
    finally:
        connection.close()
    return path


@dataclass(slots=True)
class _Opening:
    """A state that is being recovered, or was recovered. It may be removed only without ``users``."""

    directory: Path
    task: asyncio.Task[StateFiles | GazetteError] = field(init=False)
    logs: ReadLogs | None = None
    """None before the recovery has begun."""
    users: int = 0

    def stop(self) -> None:
        if self.logs is None:
            self.task.cancel()
        else:
            self.logs.stop()


class States:
    """The states that pages have asked for lately. Loop-bound. Close it.

    ``life_of`` returns the life of a log; None if no list has it.
    """

    def __init__(
        self, context: Context, scratch: Path, life_of: Callable[[JournalName], JournalLife | None]
    ) -> None:
        self._context = context
        self._scratch = scratch
        self._life_of = life_of
        self._recoveries = BlockingPool("console-recoveries", RECOVERIES_MAX)
        self._files = BlockingPool("console-files", 1)
        self._sql = SqlProcesses()
        self._scope = TaskScope("states")
        self._openings: dict[_Key, _Opening] = {}
        self._checkpoints: dict[tuple[_Life, Offset], Checkpoint] = {}
        self._number = 0
        self._is_closed = False

    async def close(self) -> None:
        """Stop all recoveries. Wait for their threads, but not for long."""
        self._is_closed = True
        self._sql.close()
        removals = [self._forget(key) for key in list(self._openings)]
        if removals:
            await asyncio.wait(removals, timeout=_CLOSE_S)
        await self._scope.stop()
        self._recoveries.close()
        self._files.close()

    async def state(self, shard: ListedShard, at: str) -> StateFiles:
        """Return a state at a moment: a time, an offset of the shard's log, or a checkpoint.

        The state's files may be gone when this returns. Raise ``StillRecovering`` with the progress after
        some seconds. Raise the errors of `open_at`.
        """
        async with self._using(shard, at) as state:
            return state

    def known_checkpoint(self, shard: ListedShard, offset: Offset) -> Checkpoint | None:
        """Return a checkpoint that `checkpoint` has returned lately; None for any other checkpoint."""
        return self._checkpoints.get((self._life(shard), offset))

    async def checkpoint(self, shard: ListedShard, offset: Offset) -> Checkpoint:
        """Return the checkpoint at an offset that the log has. It is remembered longer than the state.

        For errors see `state`.
        """
        known = self.known_checkpoint(shard, offset)
        if known is None:
            known = _required((await self.state(shard, str(offset))).checkpoint)
            if len(self._checkpoints) >= CHECKPOINTS_MAX:
                del self._checkpoints[next(iter(self._checkpoints))]
            self._checkpoints[self._life(shard), offset] = known
        return known

    async def query(self, shard: ListedShard, at: str, sql: str) -> dict[str, Any]:
        """Run one statement that reads. For errors see `state` and `SqlProcesses`."""
        async with self._using(shard, at) as state:
            return await self._sql.query(_required(state.database), sql)

    async def difference(self, shard: ListedShard, before: str, after: str) -> list[dict[str, Any]]:
        """Return the rows that differ between two moments, by tables. For errors see `query`."""
        async with self._using(shard, before) as first, self._using(shard, after) as second:
            databases = _required(first.database), _required(second.database)
            return await self._sql.difference(*databases, second.own_tables)

    def _life(self, shard: ListedShard) -> _Life:
        return shard.spec.id, shard.create_revision, self._life_of(shard.spec.recovery_log)

    @asynccontextmanager
    async def _using(self, shard: ListedShard, at: str) -> AsyncIterator[StateFiles]:
        """Yield a state, which is not removed during the block."""
        key = (self._life(shard), at)
        opening = self._opening(shard, key)
        opening.users += 1
        try:
            await asyncio.wait({opening.task}, timeout=WAIT_S)
            if not opening.task.done():
                bytes_read = 0 if opening.logs is None else opening.logs.bytes_read
                raise StillRecovering(
                    f"the state is being recovered: {bytes_text(bytes_read)} of"
                    f" {shard.spec.recovery_log} read"
                )
            if opening.task.cancelled():
                raise _closed()
            state = opening.task.result()
            if isinstance(state, GazetteError):
                if self._openings.get(key) is opening:
                    self._forget(key)
                raise state
            yield state
        finally:
            opening.users -= 1

    def _opening(self, shard: ListedShard, key: _Key) -> _Opening:
        """Return the opening of a state. It begins at once: two requests never recover the same state."""
        spec, moment = shard.spec, Moment.parse(key[1])
        if self._is_closed:
            raise _closed()
        if not spec.recovery_log:
            raise Invalid(
                f"{spec.id} has no recovery log: its state is in a database of your own",
                hint="Query that database itself.",
            )
        if (opening := self._openings.pop(key, None)) is None:
            if len(self._openings) >= STATES_MAX:
                unused = [other for other, known in self._openings.items() if not known.users]
                if not unused:
                    raise StillRecovering(f"{STATES_MAX} other states are in use at once")
                self._forget(unused[0])
            self._number += 1
            opening = _Opening(self._scratch / f"state-{self._number}")
            opening.task = self._scope.spawn(self._recovered(opening, shard, moment), name=spec.id)
        self._openings[key] = opening  # The newest is the last.
        return opening

    async def _recovered(
        self, opening: _Opening, shard: ListedShard, moment: Moment
    ) -> StateFiles | GazetteError:
        """Return a state, or its error: a task that raises would end all other tasks."""
        spec, context = shard.spec, self._context
        try:
            consumer, client = await context.consumer(), await context.broker()
            async with context.answering(consumer.address, WAIT_S):
                stored = await consumer.get_hints(spec.id)
            hints = [slot for slot in (stored.primary, *stored.backups) if slot is not None]
            hints = hints or [FSMHints(log=spec.recovery_log)]
            logs = opening.logs = ReadLogs(client, spec.id, context.timeout_s)
            return await self._recoveries.run(
                _recover, logs, hints, opening.directory, moment, spec.id
            )
        except GazetteError as error:
            return error
        except (OSError, apsw.Error) as error:
            return GazetteError(
                f"the state cannot be recovered: {error}", hint="See the disk of the console."
            )
        except Exception as error:
            log.exception("a recovery of the console failed: %(what)s", {"what": spec.id})
            return GazetteError(
                f"the recovery failed: {type(error).__name__}: {error}",
                hint="The log of the console says where. Please report it.",
            )

    def _forget(self, key: _Key) -> asyncio.Task[None]:
        """Stop a recovery, and remove its files. Return the task of the removal."""
        opening = self._openings.pop(key)
        opening.stop()
        return self._scope.spawn(self._remove(opening), name="remove")

    async def _remove(self, opening: _Opening) -> None:
        await asyncio.wait({opening.task})
        await self._files.run(lambda: shutil.rmtree(opening.directory, ignore_errors=True))


def _closed() -> Closed:
    return Closed("the console stops", hint="Start it again.")


def _required(value: T | GazetteError) -> T:
    if isinstance(value, GazetteError):
        raise value
    return value
