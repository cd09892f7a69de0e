"""States of shards at moments, recovered from their recovery logs into a scratch directory: `States`.

Members answer no SQL. So a state is what the log has, and a member spends nothing on it but hints.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import apsw

from gazette.client.client import Client
from gazette.client.shards import ListedShard
from gazette.errors import GazetteError, Invalid, NotYet, Unavailable
from gazette.gazctl.context import Context
from gazette.gazctl.shards.query import json_value, require_sql, select
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset
from gazette.recoverylog.log.broker_logs import BrokerLogs
from gazette.recoverylog.shard_state import ShardState, StateKind
from gazette.recoverylog.time_travel import Moment, open_at
from gazette.run.console.journal_reads import bounds_of
from gazette.run.console.row_difference import TableDifference, differences
from gazette.runtime.numbers import bytes_text
from gazette.runtime.tasks import BlockingPool, TaskScope, await_shared
from gazette.runtime.timeouts import timeout

STATES_MAX: Final = 8
LOG_BYTES_MAX: Final = 2 << 30
"""Bytes of a log that are read for one state."""
ROWS_MAX: Final = 1000
RESULT_BYTES_MAX: Final = 4 << 20
QUERY_S: Final = 10.0
WAIT_S: Final = 8.0
"""Longest wait of an answer for a state. The page asks again, and shows how far it is."""


class StillRecovering(NotYet):
    """A state that is asked for is still being recovered."""


class ReadLogs(BrokerLogs):
    """Logs whose ends are found by reads, since an append may not be permitted. Counts the bytes read."""

    def __init__(self, client: Client, shard_id: str, stall_timeout_s: float) -> None:
        super().__init__(client, asyncio.get_running_loop(), stall_timeout_s=stall_timeout_s)
        self._own_client = client
        self._shard_id = shard_id
        self.bytes_read = 0

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


@dataclass(slots=True)
class _Opening:
    """A state that is being recovered, or was. Its lock is held by each query."""

    logs: ReadLogs
    task: asyncio.Task[ShardState | GazetteError]
    directory: Path
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: apsw.Connection | None = None


class States:
    """The states that pages have asked for lately. Loop-bound. Close it."""

    def __init__(self, context: Context, scratch: Path) -> None:
        self._context = context
        self._scratch = scratch
        self._pool = BlockingPool("console-states", 2)
        self._scope = TaskScope("states")
        self._openings: dict[tuple[str, str], _Opening] = {}
        self._number = 0

    async def close(self) -> None:
        """Close all states."""
        for key in list(self._openings):
            await self._forget(key)
        await self._scope.stop()
        self._pool.close()

    async def state(self, shard: ListedShard, at: str) -> ShardState:
        """Return the state of a shard at a moment: a time, an offset of its log, or a checkpoint.

        Raise ``StillRecovering`` with the progress after some seconds. Raise the errors of `open_at`.
        """
        opening = await self._opening(shard, at)
        try:
            async with timeout(WAIT_S):
                state = await await_shared(opening.task)
        except TimeoutError:
            read_text = bytes_text(opening.logs.bytes_read)
            raise StillRecovering(
                f"the state is being recovered: {read_text} of {shard.spec.recovery_log} read"
            ) from None
        if isinstance(state, GazetteError):
            await self._forget((shard.spec.id, at))
            raise state
        return state

    async def checkpoint(self, shard: ListedShard, at: str) -> Checkpoint:
        """Return the checkpoint of a state. Raise the errors of ``state``."""
        state = await self.state(shard, at)
        return await self._pool.run(lambda: state.checkpoint)

    async def _opening(self, shard: ListedShard, at: str) -> _Opening:
        spec, key = shard.spec, (shard.spec.id, at)
        moment = Moment.parse(at)
        if not spec.recovery_log:
            raise Invalid(
                f"{spec.id} has no recovery log: its state is in a database of your own",
                hint="Query that database itself.",
            )
        if (opening := self._openings.pop(key, None)) is None:
            while len(self._openings) >= STATES_MAX:
                await self._forget(next(iter(self._openings)))
            consumer, client = await self._context.consumer(), await self._context.broker()
            async with self._context.answering(consumer.address, WAIT_S):
                stored = await consumer.get_hints(spec.id)
            hints = [slot for slot in (stored.primary, *stored.backups) if slot is not None]
            hints = hints or [FSMHints(log=spec.recovery_log)]
            self._number += 1
            directory = self._scratch / f"state-{self._number}"
            logs = ReadLogs(client, spec.id, self._context.timeout_s)
            work = self._pool.run(open_at, logs, hints, directory, moment)
            opening = _Opening(logs, self._scope.spawn(_outcome(work), name=spec.id), directory)
        self._openings[key] = opening  # The newest is the last.
        return opening

    async def _forget(self, key: tuple[str, str]) -> None:
        opening = self._openings.pop(key, None)
        if opening is None:
            return
        async with opening.lock:
            if opening.connection is not None:
                opening.connection.close()
        if not opening.task.done():
            return  # Its thread goes on, and its files go with the scratch directory.
        if isinstance(state := opening.task.result(), ShardState):
            await self._pool.run(state.close)
        await self._pool.run(lambda: shutil.rmtree(opening.directory, ignore_errors=True))

    async def query(self, shard: ListedShard, at: str, sql: str) -> dict[str, Any]:
        """Run one statement that reads. Raise ``Unavailable`` once its time is over."""
        state = await self.state(shard, at)
        opening = self._openings[shard.spec.id, at]
        ended = asyncio.Event()  # The thread only looks whether it is set.

        def run() -> Any:
            if opening.connection is None:
                opening.connection = connection_of(state, shard.spec.id)
            arguments = (opening.connection, state.directory, sql, ROWS_MAX, ended)
            return select(*arguments, RESULT_BYTES_MAX)

        async with opening.lock:
            rows = await self._bounded("the query", run, ended)
        return {
            "columns": rows.columns,
            "rows": list(map(_cells, rows.rows)),
            "truncated": rows.truncated,
        }

    async def difference(self, shard: ListedShard, before: str, after: str) -> list[dict[str, Any]]:
        """Return the rows that differ between two moments, by tables."""
        states = [await self.state(shard, at) for at in (before, after)]
        ended = asyncio.Event()
        attached = [_attachable(state, shard.spec.id) for state in states]
        tables: list[TableDifference] = await self._bounded(
            "the comparison", lambda: differences(attached[0], attached[1], ended.is_set), ended
        )
        return [_document(table) for table in tables]

    async def _bounded(self, what: str, work: Any, ended: asyncio.Event) -> Any:
        try:
            async with timeout(QUERY_S):
                return await self._pool.run(work)
        except TimeoutError as error:
            raise Unavailable(
                f"{what} did not end within {QUERY_S:g} s, and was interrupted",
                hint="Ask for less: by LIMIT, by an index, or by gazctl shards query --timeout.",
            ) from error
        finally:
            ended.set()


async def _outcome(work: Awaitable[ShardState]) -> ShardState | GazetteError:
    """Return a state, or its error: a task that raises would end all other tasks."""
    try:
        return await work
    except GazetteError as error:
        return error
    except (OSError, apsw.Error) as error:
        return GazetteError(
            f"the state cannot be recovered: {error}", hint="See the disk of the console."
        )


def connection_of(state: ShardState, shard_id: str) -> apsw.Connection:
    """Return a connection of its own to a state. That of JSON has tables ``document`` and ``state``."""
    source = _attachable(state, shard_id)
    if isinstance(source, str):
        return apsw.Connection(source, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    connection = apsw.Connection(":memory:")
    source(connection, "main")
    return connection


def _attachable(state: ShardState, shard_id: str) -> Any:
    """Return the URI of a state's database; for JSON a function that fills a schema."""
    if state.kind is StateKind.JSON:
        return lambda connection, schema: _fill(connection, schema, state)
    require_sql(state, shard_id)
    return f"{(state.directory / 'primary.db').absolute().as_uri()}?mode=ro"


def _fill(connection: apsw.Connection, schema: str, state: ShardState) -> None:
    text = json.dumps(state.document())
    connection.execute(f"CREATE TABLE {schema}.document (json TEXT)")
    connection.execute(f"INSERT INTO {schema}.document VALUES (?)", (text,))  # noqa: S608 - ours
    connection.execute(
        f"CREATE TABLE {schema}.state AS SELECT fullkey AS path, atom AS value, type"  # noqa: S608
        f" FROM {schema}.document, json_tree({schema}.document.json) WHERE atom IS NOT NULL"
    )


def _document(table: TableDifference) -> dict[str, Any]:
    return {
        **asdict(table),
        "added": list(map(_cells, table.added)),
        "removed": list(map(_cells, table.removed)),
        "changed": [[_cells(before), _cells(after)] for before, after in table.changed],
    }


def _cells(row: Sequence[Any]) -> list[Any]:
    return list(map(_cell, row))


def _cell(value: Any) -> Any:
    """Return a value for the page, cut: integers that JavaScript cannot hold are texts."""
    value = json_value(value)
    if isinstance(value, dict):
        value = f"x'{value['hex']}'"
    if isinstance(value, int) and abs(value) > 1 << 53:
        return str(value)
    if isinstance(value, str) and len(value) > 1000:
        return f"{value[:1000]}… ({len(value)} characters)"
    return value
