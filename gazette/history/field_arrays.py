"""Arrow arrays of the fields of messages that a `LineScanner` has found. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gazette.history.json_lines import FIELDS_MAX, Field, FieldColumn, FieldKind, Texts


def scannable(schema: pa.Schema) -> tuple[Field, ...]:
    """Return the columns of a schema as fields of a scanner. Return none if the scanner cannot find
    all of them.
    """
    fields = []
    for column in schema:
        kind = _kind_of(column.type)
        if kind is None:
            return ()
        fields.append(Field(column.name, kind))
    return tuple(fields) if len(fields) <= FIELDS_MAX else ()


def _kind_of(kind: pa.DataType) -> FieldKind | None:
    if pa.types.is_string(kind):
        return "text"
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_boolean(kind):
        return "boolean"
    # The scanner returns doubles. A cast to a narrower type would round twice.
    return "float" if pa.types.is_float64(kind) else None


def arrow_arrays(fields: Sequence[FieldColumn], schema: pa.Schema) -> list[pa.Array] | None:
    """Return the columns of a schema. Return None if a value does not fit its column: the caller
    finds which.
    """
    try:
        return [_array(found, column.type) for found, column in zip(fields, schema, strict=True)]
    except pa.ArrowInvalid:
        return None


def _array(found: FieldColumn, kind: pa.DataType) -> pa.Array:
    present, values = found
    everywhere = bool(present.all())
    if isinstance(values, Texts):
        bitmap = None if everywhere else pa.py_buffer(np.packbits(present, bitorder="little"))
        return pa.StringArray.from_buffers(
            len(present), pa.py_buffer(values.bounds), pa.py_buffer(values.data), bitmap
        )
    mask: Any = None if everywhere else ~present
    return pa.array(values, mask=mask).cast(kind)
