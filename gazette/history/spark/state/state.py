"""The state of shards as a table, from their recovery logs: ``format("gazette-state")``.

The table has the rows of a table of SQLite, the entries of a RocksDB column family, or a JSON document. The
content is as of the last commit, or of a `gazette.recoverylog.time_travel.Moment`. Each shard is a task.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags, ConsumerClientFlags
from gazette.client.rpc.preflight import require_reachable
from gazette.client.shards import ShardClient
from gazette.errors import GazetteError, Invalid, NotFound
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.options import Options, credential_options
from gazette.protocol.hints import FSMHints
from gazette.protocol.label_set import LabelSelector
from gazette.recoverylog.log.broker_logs import BrokerLogs
from gazette.recoverylog.shard_state import ShardState, StateKind
from gazette.recoverylog.time_travel import NOW, Moment, open_at
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import LoopThread

T = TypeVar("T")

KNOWN: Final[dict[str, str]] = {
    "broker.address": "address of a broker, or of several, separated by commas",
    **credential_options("broker"),
    "consumer.address": "address of a member of the consumer",
    **credential_options("consumer"),
    "selector": "shards to read, such as id=shard-000 (default: all)",
    "table": "table of SQLite databases",
    "columnFamily": "column family of RocksDB databases (default: default)",
    "fields": "columns of the table, as in CREATE TABLE (default: those of the first shard's)",
    "at": "moment of the state: a time, an offset of the log, or journal=offset,… (default: now)",
}
SHARD: Final = "shard"
_CONNECT_S: Final = 10.0
_BATCH_ROWS: Final = 1 << 14
_TYPES: Final = (("INT", "long"), ("CHAR", "string"), ("TEXT", "string"), ("CLOB", "string"))
_REAL: Final = ("REAL", "FLOA", "DOUB")


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Options of ``format("gazette-state")``."""

    brokers: BrokerClientFlags
    consumers: ConsumerClientFlags
    selector: LabelSelector
    table: str
    column_family: str
    fields: str
    at: Moment

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StateOptions:
        """Parse the options. Raise `Invalid` with the name of the option."""
        values = Options(options, KNOWN)
        if "path" in values:
            raise Invalid(
                f"shards are not named by a path ({values.text('path')!r})",
                path="load()",
                hint="Set the option selector, as id=shard-000.",
            )
        for name in ("broker.address", "consumer.address"):
            if not values.text(name):
                values.fail(name, "an address is required")
        return cls(
            BrokerClientFlags(values.text("broker.address"), **values.credentials("broker")),
            ConsumerClientFlags(values.text("consumer.address"), **values.credentials("consumer")),
            values.selector() or LabelSelector.parse("id"),
            values.text("table"),
            values.text("columnFamily", "default"),
            values.text("fields"),
            values.parsed("at", Moment.parse) if values.text("at") else NOW,
        )


class ShardPartition(InputPartition):
    """A shard, and all its hints."""

    def __init__(self, shard: str, hints: tuple[FSMHints, ...]) -> None:
        super().__init__(shard)
        self.hints = hints


def list_partitions(options: StateOptions) -> list[ShardPartition]:
    """Return the matching shards. Blocks. Raise ``NotFound`` if no shard matches, and ``Invalid`` for a shard
    without a recovery log."""

    async def listed() -> list[ShardPartition]:
        partitions: list[ShardPartition] = []
        async with options.consumers.client("", SystemClock()) as client:
            await _require_reachable(client, "consumer")
            for shard in (await client.list_shards(options.selector)).shards:
                spec = shard.spec
                if not spec.recovery_log:
                    raise Invalid(f"shard {spec.id} has no recovery log: its state is elsewhere")
                stored = await client.get_hints(spec.id)
                hints = [one for one in (stored.primary, *stored.backups) if one is not None]
                partitions.append(
                    ShardPartition(spec.id, tuple(hints) or (FSMHints(log=spec.recovery_log),))
                )
        if not partitions:
            raise NotFound("no shard matches", selector=str(options.selector))
        return sorted(partitions, key=lambda partition: str(partition.value))

    with closing(LoopThread("state")) as loop:
        return loop.run(listed())


async def _require_reachable(client: Client | ShardClient, what: str) -> None:
    await require_reachable(
        client,
        what,
        connect_s=_CONNECT_S,
        wait_s=_CONNECT_S,
        hint=f"Check that it runs there and can be reached from here, or correct {what}.address.",
    )


@contextmanager
def _opened(options: StateOptions, partition: ShardPartition) -> Iterator[ShardState]:
    """Open a shard's state in a temporary directory."""

    async def connected() -> tuple[Any, asyncio.AbstractEventLoop]:
        client = options.brokers.client("", SystemClock())
        try:
            await _require_reachable(client, "broker")
        except BaseException:
            await client.close()
            raise
        return client, asyncio.get_running_loop()

    with tempfile.TemporaryDirectory(prefix="gazette-state-") as scratch:
        with closing(LoopThread("state")) as loop:
            client, running = loop.run(connected())
            try:
                logs = BrokerLogs(client, running)
                state = open_at(logs, partition.hints, Path(scratch) / "state", options.at)
            finally:
                loop.run(client.close())
        with state:
            yield state


def columns_of(options: StateOptions, state: ShardState) -> list[tuple[str, str]]:
    """Return name and Spark type of each column. Raise ``NotFound`` for a missing table or column family,
    and `Invalid` if the option ``table`` is needed, or the store is unknown."""
    if state.kind is StateKind.SQLITE:
        if not options.table:
            names = [
                row[0] for row in state.query("SELECT name FROM sqlite_master WHERE type = 'table'")
            ]
            raise Invalid(
                "a table is required", path="option table", hint=f"One of {', '.join(names)}."
            )
        rows = state.query("SELECT name, type FROM pragma_table_info(?)", (options.table,))
        if not rows:
            raise NotFound(
                "the state has no such table",
                hint="Leave shards of other applications out by the option selector.",
                table=options.table,
            )
        return [(name, _type_of(kind)) for name, kind in rows]
    if state.kind is StateKind.ROCKSDB:
        if options.column_family not in state.column_families:
            raise NotFound(
                "the state has no such column family",
                hint=f"One of {', '.join(state.column_families)}.",
                column_family=options.column_family,
            )
        return [("key", "binary"), ("value", "binary")]
    if state.kind is StateKind.JSON:
        return [("document", "string")]
    if is_empty(state):
        raise NotFound(
            "the shard has committed nothing yet, so its columns are unknown",
            hint='Give the option fields: "document string" of a JSON store.',
        )
    raise Invalid(
        "the state is not one of a SQLite, RocksDB or JSON store",
        hint="`gazctl shards recover` brings its files to a directory.",
    )


def is_empty(state: ShardState) -> bool:
    """Return True if the state has no file: a store of JSON has no file before its first commit."""
    return state.kind is StateKind.FILES and not any(state.directory.iterdir())


def require_columns(
    options: StateOptions, state: ShardState, shard: str, names: Sequence[str]
) -> None:
    """Raise `Invalid` unless the state of a shard has these columns. Other errors: see `columns_of`."""
    try:
        existing = [name for name, _ in columns_of(options, state)]
    except GazetteError as error:
        error.facts["shard"] = shard
        raise
    if unknown := [name for name in names if name not in existing]:
        raise Invalid(
            f"there are no such columns: {', '.join(unknown)} (there are {', '.join(existing)})",
            path="option fields",
            shard=shard,
        )


def _type_of(declared: str) -> str:
    """Return the Spark type of a column, by SQLite's rules of affinity."""
    upper = declared.upper()
    for part, kind in _TYPES:
        if part in upper:
            return kind
    if any(part in upper for part in _REAL):
        return "double"
    return "binary" if not upper or "BLOB" in upper else "double"


def rows_of(
    options: StateOptions, state: ShardState, types: Mapping[str, pa.DataType]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a state with these columns. Raise `Invalid` for a text of SQLite that is not UTF-8,
    unless its column is binary."""
    names = list(types)
    if state.kind is StateKind.SQLITE:
        is_utf8 = state.query("PRAGMA encoding")[0][0] == "UTF-8"
        texts = {
            name: _as_bytes(name) if is_utf8 and pa.types.is_binary(types[name]) else _quoted(name)
            for name in names
        }
        source = f"FROM {_quoted(options.table)}"
        try:
            yield from state.connection().execute(
                f"SELECT {', '.join(texts.values()) or 'NULL'} {source}"
            )
        except UnicodeDecodeError as error:
            bad = ", ".join(
                name for name, text in texts.items() if not _decodes(state, text, source)
            )
            raise Invalid(
                f"a text is not UTF-8: {error.object!r}",
                path="option fields",
                hint="Give the type binary to its column in the option fields.",
                column=bad,
            ) from error
    elif state.kind is StateKind.ROCKSDB:
        indices = [("key", "value").index(name) for name in names]
        for pair in state.iterate(column_family=options.column_family):
            yield tuple(pair[index] for index in indices)
    else:  # JSON: `columns_of` has refused all other kinds.
        yield (msgspec.json.encode(state.document()).decode(),)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _as_bytes(name: str) -> str:
    """Return the SQL of a column whose texts are read as their bytes."""
    column = _quoted(name)
    return f"CASE typeof({column}) WHEN 'text' THEN CAST({column} AS BLOB) ELSE {column} END"


def _decodes(state: ShardState, column: str, source: str) -> bool:
    try:
        for _ in state.connection().execute(f"SELECT {column} {source}"):
            pass
    except UnicodeDecodeError:
        return False
    return True


class StateReader(DataSourceReader):
    """Reader of states."""

    def __init__(self, options: StateOptions, schema: Any) -> None:
        self._options = options
        self._schema = schema

    @with_hints()
    def partitions(self) -> list[InputPartition]:
        return list(list_partitions(self._options))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from pyspark.sql.pandas.types import to_arrow_schema

        if not isinstance(partition, ShardPartition):
            return
        schema = to_arrow_schema(self._schema, timezone="UTC")
        names = [name for name in schema.names if name != SHARD]
        with with_hints(), _opened(self._options, partition) as state:
            if is_empty(state):
                return
            require_columns(self._options, state, partition.value, names)
            rows: list[tuple[Any, ...]] = []
            types = {name: schema.field(name).type for name in names}
            for row in rows_of(self._options, state, types):
                rows.append(row)
                if len(rows) >= _BATCH_ROWS:
                    yield _batch(schema, names, partition.value, rows)
                    rows = []
            if rows:
                yield _batch(schema, names, partition.value, rows)


def _batch(schema: pa.Schema, names: list[str], shard: str, rows: list[tuple[Any, ...]]) -> Any:
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if names else {}
    columns[SHARD] = (shard,) * len(rows)
    arrays = []
    for field in schema:
        try:
            arrays.append(_array(columns[field.name], field.type))
        except pa.ArrowException as error:
            hint = "SQLite keeps any type in any column: give the fields' types yourself."
            if pa.types.is_temporal(field.type):
                hint = (
                    "Give the field the type long, double or string, and convert it in Spark, such as by "
                    "timestamp_seconds() or to_timestamp()."
                )
            raise Invalid(
                f"a value of the state does not have its column's type: {error}",
                path="option fields",
                hint=hint,
                column=field.name,
                shard=shard,
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], data_type: pa.DataType) -> pa.Array:
    """Return a column. Raise an error of Arrow for a value that does not have its type."""
    if pa.types.is_temporal(data_type):
        # Stores have no type for times, and Arrow takes any number for microseconds.
        value = next((value for value in values if value is not None), None)
        if value is not None:
            raise pa.ArrowInvalid(f"{value!r} is not of type {data_type}")
    if pa.types.is_integer(data_type):
        # Arrow would cut off the fraction of a number.
        fraction = next((value for value in values if isinstance(value, float)), None)
        if fraction is not None:
            raise pa.ArrowInvalid(f"{fraction} is not an integer")
    return pa.array(values, data_type)


def state_schema(given: Mapping[str, str]) -> str:
    """Return the columns of the option ``fields``, as in CREATE TABLE. Without the option, recover a shard to
    find the columns: this blocks."""
    options = StateOptions.parse(given)
    if options.fields:
        return f"{SHARD} string, {options.fields}"
    with _opened(options, list_partitions(options)[0]) as state:
        columns = columns_of(options, state)
    if clash := [name for name, _ in columns if name.lower() == SHARD]:
        raise Invalid(
            f"the state has a column {clash[0]!r}, and {SHARD} is the name of the shard",
            path="option fields",
            hint="Name the other columns and their types by the option fields.",
        )
    escaped = [(name.replace("`", "``"), kind) for name, kind in columns]
    return ", ".join([f"{SHARD} string", *(f"`{name}` {kind}" for name, kind in escaped)])
