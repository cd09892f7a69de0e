"""The columns of journals as a table: given, known by the messages' class, or inferred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.history.ddl import parse_columns
from gazette.history.meta_columns import META
from gazette.history.protobuf_rows import protobuf_schema
from gazette.history.row_format import RowFormat
from gazette.history.snapshot_builder import require_stored, take_snapshot
from gazette.history.table_columns import (
    INFER_BYTES,
    infer_fields,
    require_leading,
    table_columns,
    value_of_all,
)
from gazette.spark.message_class import message_class
from gazette.spark.source.options import ReadOptions

_READABLE: Final = (
    types.BooleanType,
    types.IntegralType,
    types.FractionalType,
    types.StringType,
    types.BinaryType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.VariantType,
)


_ARGUMENTS: Final = {
    "columns": "columns",
    "fields": "fields",
    "meta_prefix": "metaPrefix",
    "value": "value",
}
"""Arguments that errors of `gazette.history` name, and the options of the same meaning."""


def table_schema(options: ReadOptions) -> tuple[Any, bool]:
    """Return the ``StructType`` of a table whose reader gave none, and True if it is inferred.

    Raise `Invalid`, and what reading raises: some of the messages are read to infer columns.
    """
    fields, inferred = _fields(options)
    with _as_options():
        columns = table_columns(
            fields,
            uuid_field=options.selection.shape.uuid_field,
            meta_prefix=options.meta_prefix,
            columns=options.columns,
        )
    return from_arrow_schema(columns, prefer_timestamp_ntz=False), inferred


def row_format(options: ReadOptions, schema: Any, shapes: Iterable[MessageFormat]) -> RowFormat:
    """Return how rows of a schema are made of the messages of journals. Raise `Invalid`."""
    value = _common_value(options, shapes)
    if value == "csv" and options.columns:
        with _as_options():
            fields = parse_columns(options.fields).names if options.fields else None
            require_leading(schema.names, options.meta_prefix, fields)
    return make_format(
        schema,
        value,
        options.meta_prefix,
        acks=options.acks,
        clock_begin=options.clock_begin,
        clock_end=options.clock_end,
        corrupt=options.corrupt if options.corrupt in schema.names else "",
    )


def make_format(schema: Any, value: str, prefix: str, **bounds: Any) -> RowFormat:
    """Return how rows of a schema are made. ``prefix`` begins the names of metadata, and ``bounds`` are
    further fields of `RowFormat`. Raise `Invalid`.
    """
    for field in schema.fields:
        _require_readable(field.name, field.dataType)
    arrow = to_arrow_schema(schema, timezone="UTC")
    if any(not field.nullable for field in schema.fields):
        name = next(field.name for field in schema.fields if not field.nullable)
        raise Invalid("columns of journals may be null: leave out NOT NULL", path=name)
    meta = tuple((f"{prefix}{key}", key) for key in META if f"{prefix}{key}" in arrow.names)
    format = RowFormat(
        value,  # type: ignore[arg-type]
        arrow,
        meta,
        encode_variant=_encode_variant,
        **bounds,
    )
    try:
        format.validate()
    except Invalid as error:
        raise Invalid(
            error.message,
            path=error.path,
            hint='Where messages have a field of that name, set the option metaPrefix to "_".',
        ) from error
    return format


def _common_value(options: ReadOptions, shapes: Iterable[MessageFormat]) -> str:
    """Return how the messages of all journals are read. Raise `Invalid` if that differs."""
    with _as_options():
        return value_of_all(options.value, shapes)


@contextmanager
def _as_options() -> Iterator[None]:
    """Report the name of an argument as that of an option."""
    try:
        yield
    except Invalid as error:
        if error.path not in _ARGUMENTS:
            raise
        name = _ARGUMENTS[error.path]
        raise Invalid(
            error.message,
            path=f"option {name}",
            hint=error.hint.replace(error.path, name),
            **error.facts,
        ) from error


def _encode_variant(text: str) -> dict[str, bytes]:
    try:
        found = types.VariantVal.parseJson(text)
    except (
        Exception
    ) as error:  # PySpark's own errors (a duplicate key, a value too large) have no common class.
        raise ValueError(f"not a variant: {error}") from error
    return {"value": found.value, "metadata": found.metadata}


def _require_readable(path: str, kind: types.DataType) -> None:
    """Raise `Invalid` for types to which no part of a message converts."""
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            _require_readable(f"{path}.{field.name}", field.dataType)
    elif isinstance(kind, types.ArrayType):
        _require_readable(path, kind.elementType)
    elif isinstance(kind, types.MapType):
        if not isinstance(kind.keyType, types.StringType):
            raise Invalid(
                f"keys of maps are strings, and not {kind.keyType.simpleString()}", path=path
            )
        _require_readable(path, kind.valueType)
    elif not isinstance(kind, _READABLE):
        raise Invalid(
            f"messages are not read as {kind.simpleString()}",
            path=path,
            hint="Read it as a string, and convert that in Spark.",
        )


def _fields(options: ReadOptions) -> tuple[pa.Schema, bool]:
    """Return the columns of messages, and True if they are inferred from some of these."""
    if options.fields:
        with _as_options():
            return parse_columns(options.fields), False
    value = options.value
    if value == "protobuf":
        return protobuf_schema(message_class(options.selection.shape.message)), False
    if not value or value in ("json", "csv"):
        with options.access.open() as access:
            snapshot = take_snapshot(access, options.selection)
            require_stored(snapshot, options.selection)
            value = _common_value(options, snapshot.shapes)
            if value in ("json", "csv"):
                with _as_options():
                    inferred = infer_fields(access, options.selection, snapshot, value, INFER_BYTES)
                    return inferred, True
    kind = pa.string() if value == "text" else pa.binary()
    return pa.schema([("value", kind)]), False
