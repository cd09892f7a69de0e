"""Writes rows to journals: rows become messages. `publishing` publishes and commits the messages."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema

from gazette.errors import Invalid
from gazette.history.row_format import require_distinct
from gazette.history.spark.error_hints import with_hints
from gazette.history.spark.message_class import message_class
from gazette.history.spark.sink.publishing import (
    Attempt,
    abort,
    batch_name,
    commit,
    publish,
    tidy,
)
from gazette.history.spark.source.options import WriteOptions
from gazette.history.spark.source.schema import require_readable
from gazette.history.table_columns import one_of
from gazette.message.message import CSVRecord
from gazette.message.uuid import BytesForm, TextForm, UuidForm

_UUID: Final = "uuid"
_QUERY_PROPERTY: Final = "sql.streaming.queryId"

Maker = Callable[[dict[str, Any]], Any]


class Published(WriterCommitMessage):
    """A task's message to the driver about its published messages."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt


class _Writer:
    """The common part of both writers. The driver makes a writer, pickles it, and sends it to executors."""

    def __init__(self, options: WriteOptions, schema: Any) -> None:
        self._options = options
        self._schema = to_arrow_schema(schema, timezone="UTC")
        names = self._schema.names
        if options.key and options.key not in names:
            raise Invalid(
                f"there is no column {options.key} (there are {one_of(names)})", path="option key"
            )
        column = options.journal_column
        if column and column not in names:
            raise Invalid(
                f"there is no column {column} (there are {one_of(names)})",
                path="option journalColumn",
            )
        if column and not pa.types.is_string(self._schema.field(column).type):
            raise Invalid(
                f"the column {column} must be of type string, and not "
                f"{self._schema.field(column).type}",
                path="option journalColumn",
            )
        require_distinct(self._schema)
        # The column that names the journal is no part of messages. In CSV and protobuf, the same is true of
        # the column of the UUID.
        self._is_place = options.shape.uuid_field in ("", _UUID) and options.value != "json"
        extras = {*([column] if column else []), *([_UUID] if self._is_place else [])}
        self._fields = pa.schema([field for field in self._schema if field.name not in extras])
        if not {*self._fields.names} - {_UUID}:
            raise Invalid(
                "there is no column to publish beside the UUID and journalColumn", path="columns"
            )
        if options.value == "json":
            for field in schema.fields:
                if field.name in self._fields.names:
                    _require_json(field.name, field.dataType)
        if options.value == "csv":
            for field in self._fields:
                if not _is_text(field.type):
                    raise Invalid(
                        f"a {field.type} cannot be written as CSV",
                        path=field.name,
                        hint="Convert it to a string in Spark, or leave it out.",
                    )
        if options.value == "protobuf":
            message_type = message_class(options.message)
            field_names = set(message_type.DESCRIPTOR.fields_by_name)
            if unknown := set(self._fields.names) - field_names:
                raise Invalid(
                    f"messages {options.message} have no such fields: {one_of(unknown)}",
                    path="option message",
                    hint="Select the columns to publish.",
                )

    @with_hints()
    def write(self, iterator: Iterator[Any]) -> Published:
        """Publish the rows of a task, pending, and return the attempt, which the driver commits."""
        options = self._options
        make = _maker(options, self._fields.names)
        if self._is_place and _UUID in self._schema.names:
            make = _checked(make)
        key = options.journal_column or options.key

        def messages() -> Iterator[Sequence[Any]]:
            for batch in iterator:
                rows = _rows(batch)
                yield [(row.get(key), make(row)) for row in rows]

        context: Any = TaskContext.get()
        query = (context and context.getLocalProperty(_QUERY_PROPERTY)) or ""
        with self._options.access.open() as access:
            return Published(publish(access, options, messages(), query))


class GazetteWriter(_Writer, DataSourceArrowWriter):
    """Publishes a table: its rows become visible at the commit. If the driver dies in the commit, some rows
    may stay invisible. A write with the same ``commits`` and ``commitId`` completes that commit."""

    @with_hints()
    def commit(self, messages: list[Any]) -> None:
        options = self._options
        with options.access.open() as access:
            commit(access, _attempts(messages), options.commits, options.commit_id)

    @with_hints()
    def abort(self, messages: list[Any]) -> None:
        options = self._options
        with options.access.open() as access:
            abort(access, _attempts(messages), options.commits, options.commit_id)


class GazetteStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Publishes a stream: each batch becomes visible once, at its end."""

    @with_hints()
    def commit(self, messages: list[Any], batchId: int) -> None:
        attempts = _attempts(messages)
        if not attempts:
            return
        query, commits = _query_of(attempts), self._options.commits
        with self._options.access.open() as access:
            commit(access, attempts, commits, batch_name(query, batchId))
        tidy(commits, query, batchId)

    @with_hints()
    def abort(self, messages: list[Any], batchId: int) -> None:
        attempts = _attempts(messages)
        if not attempts:
            return
        name = batch_name(_query_of(attempts), batchId)
        with self._options.access.open() as access:
            abort(access, attempts, self._options.commits, name)


def _query_of(attempts: Sequence[Attempt]) -> str:
    """Return the query, for names of batches: batches of other queries have the same numbers."""
    return attempts[0].query or "query"


def _attempts(messages: Sequence[Any]) -> list[Attempt]:
    return [message.attempt for message in messages if isinstance(message, Published)]


def _maker(options: WriteOptions, names: Sequence[str]) -> Maker:
    """Return the function from rows to messages of the named columns, without UUIDs."""
    if options.value == "json":
        # Binary values, decimals, times and keys of maps become texts.
        return lambda row: msgspec.to_builtins({name: row[name] for name in names}, str_keys=True)
    if options.value == "csv":
        return lambda row: CSVRecord(["", *[_text(row[name]) for name in names]])
    message_type = message_class(options.message)

    def protobuf(row: dict[str, Any]) -> Any:
        values = {name: row[name] for name in names if row[name] is not None}
        try:
            return message_type(**values)
        except (TypeError, ValueError) as error:
            raise Invalid(
                f"a row does not fit message {options.message}: {error} ({str(values)[:200]})",
                path="option message",
                hint="Convert the columns to the types of its fields.",
            ) from error

    return protobuf


def _checked(make: Maker) -> Maker:
    """Return ``make`` with a check: the column of the UUID must be null, or hold a UUID of a publisher."""

    def checked(row: dict[str, Any]) -> Any:
        value = row.get(_UUID)
        form: UuidForm = BytesForm() if isinstance(value, bytes) else TextForm()
        if not form.is_free(value):
            raise Invalid(
                f"the column {_UUID} holds {str(value)[:64]!r}, and is where the UUID goes",
                path=_UUID,
                hint="Rename the column, or leave it out.",
            )
        return make(row)

    return checked


def _require_json(path: str, kind: types.DataType) -> None:
    """Raise `Invalid` for a type whose values would be read back as other values."""
    if isinstance(kind, types.VariantType):
        raise Invalid(
            "a variant cannot be written as JSON",
            path=path,
            hint="Convert it to a string by to_json, or cast it to another type in Spark.",
        )
    if isinstance(kind, types.NullType):
        return
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            _require_json(f"{path}.{field.name}", field.dataType)
    elif isinstance(kind, types.ArrayType):
        _require_json(path, kind.elementType)
    elif isinstance(kind, types.MapType) and isinstance(kind.keyType, types.IntegralType):
        _require_json(path, kind.valueType)  # Types of applications may have integers as keys.
    else:
        require_readable(path, kind)
        if isinstance(kind, types.MapType):
            _require_json(path, kind.valueType)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch. Raise `Invalid` for a value that Python cannot represent."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
        return rows
    except (OverflowError, ValueError, KeyError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist(maps_as_pydicts="strict")
            except (OverflowError, ValueError, KeyError) as error:
                raise Invalid(
                    f"a row has a value that no message can have: {error}",
                    path=name,
                    hint="Days and times are of the years 1 to 9999 in UTC, and a map has each key once. "
                    "Leave the row out, or convert the column to a string in Spark.",
                ) from error
        raise


def _is_text(kind: pa.DataType) -> bool:
    """Return True if values of a type are the same when they are read back from CSV."""
    is_of = pa.types
    return bool(
        is_of.is_string(kind)
        or is_of.is_boolean(kind)
        or is_of.is_integer(kind)
        or is_of.is_floating(kind)
        or is_of.is_decimal(kind)
        or is_of.is_date(kind)
        or is_of.is_timestamp(kind)
    )


def _text(value: Any) -> str:
    """Return a value as the text of a field of CSV, from which it reads back equal; a null as an empty text,
    which is a null in all columns except columns of strings."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case datetime.date():
            return value.isoformat()
        case decimal.Decimal():
            return format(value, "f")
    return value if isinstance(value, str) else str(value)
