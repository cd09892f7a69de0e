"""The columns of journals as a table: given, known by the messages' class, or inferred."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.history.meta_columns import META
from gazette.history.protobuf_rows import protobuf_schema
from gazette.history.read import read_columns
from gazette.history.row_format import RowFormat
from gazette.history.snapshot import JournalSnapshot, Run, Snapshot
from gazette.history.snapshot_builder import require_stored, take_snapshot
from gazette.history.source import OpenAccess
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES
from gazette.message.framing.csv import parse_record
from gazette.message.uuid import ACK_TXN
from gazette.spark.message_class import message_class
from gazette.spark.source.ddl import parse_columns
from gazette.spark.source.infer import infer_json
from gazette.spark.source.options import ReadOptions, one_of

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
_INFER_JOURNALS: Final = 16
"""Largest number of journals whose messages are read to infer columns."""
_INFER_BYTES: Final = 1 << 20
"""Number of bytes of each journal that are read to infer columns."""
_INFER_PLACES: Final = 4
"""Number of places in each journal from which messages are read, besides its first fragment."""


def table_schema(options: ReadOptions) -> tuple[Any, bool]:
    """Return the ``StructType`` of a table whose reader gave none, and True if it is inferred.

    Raise `Invalid`, and what reading raises: some of the messages are read to infer columns.
    """
    fields, inferred = _fields(options)
    meta = [pa.field(f"{options.meta_prefix}{name}", kind) for name, kind in META.items()]
    # The UUID of a message is already a column of every table.
    names = {field.name for field in meta} & {options.selection.shape.uuid_field}
    fields = pa.schema([field for field in fields if field.name not in names])
    clash = {field.name for field in meta} & set(fields.names)
    if clash:
        raise Invalid(
            f"messages have fields of the same names: {one_of(clash)}",
            path="option metaPrefix",
            hint='Set metaPrefix to "_", so that these columns are _journal, _offset and so on.',
        )
    columns = [*meta, *fields]
    if options.columns:
        by_name = {field.name: field for field in columns}
        if unknown := [name for name in options.columns if name not in by_name]:
            raise Invalid(
                f"there are no such columns: {one_of(unknown)} (there are {one_of(by_name)})",
                path="option columns",
            )
        columns = [by_name[name] for name in options.columns]
    return from_arrow_schema(pa.schema(columns), prefer_timestamp_ntz=False), inferred


def row_format(options: ReadOptions, schema: Any, snapshot_value: str) -> RowFormat:
    """Return how rows of a schema are made. Raise `Invalid`."""
    for field in schema.fields:
        _require_readable(field.name, field.dataType)
    arrow = to_arrow_schema(schema, timezone="UTC")
    if any(not field.nullable for field in schema.fields):
        name = next(field.name for field in schema.fields if not field.nullable)
        raise Invalid("columns of journals may be null: leave out NOT NULL", path=name)
    prefix = options.meta_prefix
    if snapshot_value == "csv" and options.columns:
        places = {f"{prefix}{key}" for key in META}
        _require_leading(options, [name for name in arrow.names if name not in places])
    meta = tuple((f"{prefix}{key}", key) for key in META if f"{prefix}{key}" in arrow.names)
    format = RowFormat(
        snapshot_value,  # type: ignore[arg-type]
        arrow,
        meta,
        options.acks,
        options.clock_begin,
        options.clock_end,
        corrupt=options.corrupt if options.corrupt in arrow.names else "",
        encode_variant=_encode_variant,
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


def _require_leading(options: ReadOptions, chosen: list[str]) -> None:
    """Require the first fields of CSV: they have no names, only positions. Raise `Invalid`."""
    every = (
        list(parse_columns(options.fields).names)
        if options.fields
        else [f"c{at + 1}" for at in range(len(chosen))]
    )
    if chosen != every[: len(chosen)]:
        raise Invalid(
            f"CSV fields are positional: name a prefix of the columns, not {', '.join(chosen)}",
            path="option columns",
            hint="Name all fields before them, too, and in their order.",
        )


def value_of(options: ReadOptions, content_type: str) -> str:
    """Return how messages of a content type are read."""
    if options.value:
        return options.value
    return {CONTENT_JSON_LINES: "json", CONTENT_CSV: "csv"}.get(content_type, "binary")


def common_value(options: ReadOptions, shapes: Iterable[MessageFormat]) -> str:
    """Return how the messages of all journals are read. Raise `Invalid` if that differs."""
    values = {value_of(options, shape.content_type) for shape in shapes}
    if len(values) > 1:
        raise Invalid(
            f"the journals are of several content types ({one_of(values)})",
            path="option value",
            hint="Read them one type at a time, or set value to text or binary.",
        )
    return values.pop() if values else options.value or "json"


def _fields(options: ReadOptions) -> tuple[pa.Schema, bool]:
    """Return the columns of messages, and True if they are inferred from some of these."""
    if options.fields:
        return parse_columns(options.fields), False
    value = options.value
    if value == "protobuf":
        return protobuf_schema(message_class(options.selection.shape.message)), False
    if not value or value in ("json", "csv"):
        with options.access.open() as access:
            snapshot = take_snapshot(access, options.selection)
            require_stored(snapshot, options.selection)
            value = common_value(options, snapshot.shapes)
            if value in ("json", "csv"):
                return _inferred(options, access, snapshot, value), True
    kind = pa.string() if value == "text" else pa.binary()
    return pa.schema([("value", kind)]), False


def _inferred(
    options: ReadOptions, access: OpenAccess, snapshot: Snapshot, value: str
) -> pa.Schema:
    """Return the fields of some messages. Raise `Invalid` if there are no messages."""
    lines: list[bytes] = []
    for journal in snapshot.journals[:_INFER_JOURNALS]:
        lines += _sample(access, journal, _INFER_BYTES)
    if value == "csv" and lines:
        record = parse_record(lines[0], 0)
        width = 0 if record is None else len(record.fields)
        return pa.schema([(f"c{at}", pa.string()) for at in range(1, width)])
    fields = infer_json(lines)
    if not fields.names:
        raise Invalid(
            "there is no message to infer the fields from",
            path="option fields",
            hint="Give the fields, as of CREATE TABLE, or give schema() to the reader.",
        )
    return fields


def _sample(access: OpenAccess, journal: JournalSnapshot, bytes_max: int) -> list[bytes]:
    """Return messages of the first fragment, the last, and some between, of about ``bytes_max`` bytes."""
    pieces = journal.pieces
    places = sorted(
        {round(at * (len(pieces) - 1) / _INFER_PLACES) for at in range(_INFER_PLACES + 1)}
    )
    lines: list[bytes] = []
    for place in places if pieces else ():
        # A fragment may begin within a message.
        shape = replace(journal.shape, malformed="skip")
        run = Run(journal.journal, shape, 0, pieces[place : place + 1], 0)
        lines += _first_messages(access, run, bytes_max // len(places) + 1)
    return lines


def _first_messages(access: OpenAccess, run: Run, bytes_max: int) -> list[bytes]:
    """Return frames that are not acknowledgements, of about ``bytes_max`` bytes."""
    found: list[bytes] = []
    size = 0
    for columns, buffer, base, _ in read_columns(access, run):
        wanted = columns.uuids.flags != ACK_TXN
        begins, ends = columns.begins[wanted].tolist(), columns.ends[wanted].tolist()
        for begin, end in zip(begins, ends, strict=True):
            found.append(buffer[begin - base : end - base])
            size += end - begin
            if size >= bytes_max:
                return found
    return found
