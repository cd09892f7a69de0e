"""``gazctl shards query``: one read-only statement on the SQLite state of a shard, from its recovery log."""

from __future__ import annotations

import asyncio
import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from gazette.errors import GazetteError, Invalid, NotAllowed, NotFound, printable
from gazette.gazctl.context import Context
from gazette.gazctl.flags import ShardsQueryFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.shards.list import get_shard
from gazette.gazctl.shards.recover import choose_hints, play, travel
from gazette.gazctl.shards.select_rows import (
    OF_THE_DISK,
    ResultBounds,
    Rows,
    json_value,
    only_reads,
    select,
)
from gazette.protocol.ids import ShardId
from gazette.protocol.text.validation import within
from gazette.recoverylog.disk_errors import disk_error
from gazette.recoverylog.shard_state import ShardState, StateKind
from gazette.recoverylog.time_travel import Moment
from gazette.runtime.tasks import BlockingPool
from gazette.runtime.timeouts import timeout
from gazette.stores.sqlite.errors import of_the_disk
from gazette.stores.sqlite.read_pool import authorize_reading

RESULT_BYTES_MAX: Final = 64 << 20
"""Upper bound of a result, which stays in memory: characters of texts, bytes of blobs, 8 for other values."""
_CELL_MAX: Final = 1024
"""Greatest number of characters of a value in a table."""
VALUE_BYTES_MAX: Final = 1 << 24
ROWS_MAX: Final = 1_000_000


async def run(context: Context) -> int:
    flags = context.flags(ShardsQueryFlags)
    arguments = context.loaded.arguments
    if len(arguments) != 2:
        raise Invalid(
            f"give the id of a shard and one SQL statement ({len(arguments)} arguments given)",
            path="ID SQL",
            hint="As in: gazctl shards query shard-000 'SELECT count(*) FROM counts'",
        )
    if not 1 <= flags.max_rows <= ROWS_MAX:
        raise Invalid(
            f"invalid number ({flags.max_rows}; expected 1 to {ROWS_MAX})", path="--max-rows"
        )
    shard_id, sql = arguments
    moment = None
    if flags.at:
        with within("--at"):
            moment = Moment.parse(flags.at)
    pool = BlockingPool("query", 1)
    try:
        scratch = tempfile.TemporaryDirectory(
            prefix="gazctl-query-", dir=flags.scratch_dir, ignore_cleanup_errors=True
        )
    except OSError as error:
        directory = flags.scratch_dir or Path(tempfile.gettempdir())
        raise disk_error("make a temporary directory", directory, error) from error
    try:
        with scratch as name:
            try:
                state = await _state(context, shard_id, moment, Path(name) / "state", pool)
                try:
                    require_sql(state, shard_id)
                    result = await _query(context, pool, state, sql, flags.max_rows)
                finally:
                    await pool.run(state.close)
            finally:
                # After an interrupt, the pool's one thread may still write files: remove the files after
                # that.
                await pool.run(lambda: None)
    finally:
        pool.close()
    context.terminal.write(_render(context, shard_id, state, result, flags.format))
    if result.truncated:
        context.terminal.note(
            f"only the first {flags.max_rows} rows are shown: see --max-rows, or LIMIT of SQL"
        )
    return 0


async def _state(
    context: Context, shard_id: ShardId, moment: Moment | None, directory: Path, pool: BlockingPool
) -> ShardState:
    """Recover the newest state of a shard, or a past one, into a directory."""
    consumer, client = await context.consumer(), await context.broker()
    spec = (await get_shard(context, consumer, shard_id)).spec
    if not spec.recovery_log:
        raise Invalid(
            f"{spec.id} has no recovery log: its state is in a database of your own",
            path="ID",
            hint="Query that database itself.",
        )
    if moment is not None:
        return await travel(context, consumer, client, spec, moment, directory, pool)
    hints = await choose_hints(context, consumer, client, spec)
    played = await play(context, client, hints, directory, pool)
    context.terminal.note(f"the state at offset {played.write_head}")
    return await pool.run(ShardState, directory, log=played.log, offset=played.write_head)


def require_sql(state: ShardState, shard_id: ShardId) -> None:
    """Raise ``Invalid`` for a state without SQL, and ``NotFound`` if there is no state at all."""
    if state.kind is StateKind.SQLITE:
        return
    if state.kind is StateKind.FILES and not any(state.directory.iterdir()):
        raise NotFound(
            f"{shard_id} has no state: no transaction was committed up to there",
            hint="Ask again after its first transaction, or for a later moment.",
        )
    name = {StateKind.ROCKSDB: "a RocksDB store", StateKind.JSON: "a JSON file"}
    raise Invalid(
        f"{shard_id} has no SQLite database: its state is {name.get(state.kind, 'other files')}",
        path="ID",
        hint=f"Get the files: gazctl shards recover --id {shard_id} --dir DIRECTORY",
    )


async def _query(
    context: Context, pool: BlockingPool, state: ShardState, sql: str, max_rows: int
) -> Rows:
    """Run a statement. Raise ``GazetteError`` after --timeout, and ``Invalid`` for SQL that is refused."""
    ended = asyncio.Event()  # The thread only looks whether it is set.
    try:
        async with timeout(context.timeout_s):
            return await pool.run(_select, state, sql, max_rows, ended)
    except TimeoutError as error:
        raise GazetteError(
            f"the query did not end within {context.timeout_s:g} s, and was interrupted",
            hint="Give it more time by --timeout. For several queries, see `gazctl shards recover`.",
        ) from error
    finally:
        ended.set()


def _select(state: ShardState, sql: str, max_rows: int, ended: asyncio.Event) -> Rows:
    limits = ResultBounds(max_rows, RESULT_BYTES_MAX, VALUE_BYTES_MAX)
    try:
        return select(state.connection(), sql, _authorize, limits, ended.is_set)
    except OF_THE_DISK as error:
        raise of_the_disk("run the query", state.directory, error) from error


def _authorize(action: int, first: str | None, second: str | None, *more: str | None) -> int:
    try:
        return authorize_reading(action, first, second, *more)
    except NotAllowed as error:
        raise only_reads() from error


def _render(context: Context, shard_id: ShardId, state: ShardState, result: Rows, form: str) -> str:
    if form == "json":
        document = {
            "shard": shard_id,
            "log": state.log,
            "offset": state.offset,
            "time": None if state.time is None else state.time.isoformat(),
            "columns": result.columns,
            "rows": [[json_value(value) for value in row] for row in result.rows],
            "truncated": result.truncated,
        }
        # Escapes of JSON keep the control characters of a state away from a terminal.
        return json.dumps(document, allow_nan=False) + "\n"
    if form == "csv":
        lines: list[str] = []
        # By this line end, a value with a carriage return or a newline is quoted. Lines end with a newline.
        writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
        writer.writerow(result.columns)
        writer.writerows(
            ["" if value is None else _text(value) for value in row] for row in result.rows
        )
        text = "".join(f"{line[:-2]}\n" for line in lines)
        return printable(text) if context.terminal.stdout.isatty() else text
    return _table(result).text(context.terminal)


def _table(result: Rows) -> Table:
    headers: Sequence[str] = [printable(name, one_line=True) for name in result.columns]
    table = Table(headers)
    for row in result.rows:
        table.add(*map(_cell, row))
    return table


def _text(value: Any) -> str:
    if value is None:
        return "NULL"
    return f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)


def _cell(value: object) -> str:
    """Return the text of a value, cut to `_CELL_MAX`: a table pads all cells of a column to one width."""
    text = _text(value)
    return text if len(text) <= _CELL_MAX else f"{text[:_CELL_MAX]}…"
