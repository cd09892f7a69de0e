"""The columns of journals as a table: given, of the messages' class, or inferred. See `table_columns`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.history.meta_columns import META
from gazette.history.row_format import RowFormat, require_distinct
from gazette.history.spark.source.options import ReadOptions, as_options
from gazette.history.table_columns import value_of_all

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


def table_schema(options: ReadOptions) -> tuple[Any, bool]:
    """Return the ``StructType`` of a table without a given schema, and True if its columns are inferred.

    Raise `Invalid` for wrong columns. To infer columns, read some messages: see `infer_fields` for errors.
    """
    with as_options():
        fields, inferred = options.known_fields(options.value), False
        shapes: Iterable[MessageFormat] = ()
        if fields is None or options.needs_labels(fields):
            with options.access.open() as access:
                snapshot = options.snapshot(access)
                shapes = snapshot.shapes
                value = value_of_all(options.value, shapes)
                fields, inferred = options.fields_of(access, snapshot, value)
        columns = options.schema(fields, shapes)
    return from_arrow_schema(columns, prefer_timestamp_ntz=False), inferred


def row_format(options: ReadOptions, schema: Any, shapes: Iterable[MessageFormat]) -> RowFormat:
    """Return the format of rows with this schema, for these messages. Raise `Invalid` if schema and messages
    do not fit."""
    with as_options():
        value = value_of_all(options.value, shapes)
        if value == "csv":
            options.require_leading(schema.names)
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
    """Return the format of rows with this schema. Raise `Invalid` for a name or a type that is not possible.

    ``prefix`` is the prefix of metadata columns. ``bounds`` are further fields of `RowFormat`.
    """
    for field in schema.fields:
        require_readable(field.name, field.dataType)
    arrow = to_arrow_schema(schema, timezone="UTC")
    require_distinct(arrow)
    _require_cases(arrow.names, prefix)
    if any(not field.nullable for field in schema.fields):
        name = next(field.name for field in schema.fields if not field.nullable)
        raise Invalid("columns of journals may be null: leave out NOT NULL", path=name)
    format = RowFormat.of(value, arrow, prefix, encode_variant=_encode_variant, **bounds)
    try:
        format.validate()
    except Invalid as error:
        if error.path in dict(format.meta):
            error.hint = 'If messages have a field of that name, set the option metaPrefix to "_".'
        raise
    return format


def _require_cases(names: Sequence[str], prefix: str) -> None:
    """Raise `Invalid` for a column whose name differs from a metadata column only in case.

    To Spark the names are the same, unless ``spark.sql.caseSensitive`` is set. The column would be null.
    """
    meta = {f"{prefix}{key}".lower(): f"{prefix}{key}" for key in META}
    for name in names:
        meta_name = meta.get(name.lower(), name)
        if name != meta_name:
            raise Invalid(
                f"the column {name} and {meta_name}, which each journal has, differ in case alone",
                path=name,
                hint=f"Write {meta_name}. If messages have a field {name}, set the option metaPrefix "
                'to "_", or to another prefix.',
            )


def _encode_variant(text: str) -> dict[str, bytes]:
    try:
        variant = types.VariantVal.parseJson(text)
    # PySpark's own errors (a duplicate key, a value too large) have no common class.
    except Exception as error:
        raise ValueError(f"not a variant: {error}") from error
    return {"value": variant.value, "metadata": variant.metadata}


def require_readable(path: str, kind: types.DataType) -> None:
    """Raise `Invalid` for a type that no value of a message converts to."""
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            require_readable(f"{path}.{field.name}", field.dataType)
    elif isinstance(kind, types.ArrayType):
        require_readable(path, kind.elementType)
    elif isinstance(kind, types.MapType):
        if not isinstance(kind.keyType, types.StringType):
            raise Invalid(
                f"keys of maps are strings, and not {kind.keyType.simpleString()}", path=path
            )
        require_readable(path, kind.valueType)
    elif not isinstance(kind, _READABLE):
        raise Invalid(
            f"messages are not read as {kind.simpleString()}",
            path=path,
            hint="Read it as a string, and convert that in Spark.",
        )
