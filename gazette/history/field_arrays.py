"""Makes Arrow arrays of the fields that a `LineScanner` has found in messages. Needs pyarrow.

The scanner converts most values, and cuts all others out as text, which Arrow casts. If neither the scanner
nor Arrow converts a value, `JsonRow`, the specification, reads the whole message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from gazette.history.commit_filter import Mask
from gazette.history.json_lines import (
    DEPTH_MAX,
    FIELDS_MAX,
    Field,
    FieldColumn,
    FieldKind,
    FoundFields,
    Texts,
)
from gazette.history.json_values import EncodeVariant, JsonRow, is_variant

_AddUnfit = Callable[[Any], None]
"""Function that is called with the positions of values that do not fit."""
_NAME: Final = "value"
_KERNEL_BITS: Final = 64
_UNIT_WORDS: Final = 2
"""Number of integers of 64 bits in a decimal of Arrow, the lowest first."""


class ArrowColumns(NamedTuple):
    """The columns of messages. ``rest`` masks the messages whose fields are not parsed yet, or is None.

    The columns have a meaningless row for each message of ``rest``.
    """

    columns: list[pa.Array]
    rest: Mask | None

    def part(self, first: int, last: int) -> ArrowColumns:
        """Return the messages from position ``first`` to before ``last``."""
        columns = [column.slice(first, last - first) for column in self.columns]
        rest = None if self.rest is None else self.rest[first:last]
        return ArrowColumns(columns, rest)


def scannable(schema: pa.Schema) -> tuple[Field, ...]:
    """Return the columns of a schema as fields for a scanner; an empty tuple if there are too many fields."""
    fields = tuple(_field(column.name, column.type) for column in schema)
    return fields if sum(field.size for field in fields) <= FIELDS_MAX else ()


def _field(name: str, kind: pa.DataType) -> Field:
    """Return a column as a field for the scanner: as a ``value`` if the scanner does not convert its type, or
    its fields are too deep or share a name."""
    if pa.types.is_decimal128(kind):
        return Field(name, "decimal", kind.scale, kind.precision)
    children: tuple[Field, ...] = ()
    kind_name: FieldKind = "value"
    if pa.types.is_list(kind):
        kind_name, children = "list", (_field("", kind.value_type),)
    elif pa.types.is_struct(kind) and not is_variant(kind):
        kind_name = "struct"
        children = tuple(_field(child.name, child.type) for child in kind)
    nested = Field(name, kind_name, children=children)
    if nested.depth > DEPTH_MAX or len({child.name for child in children}) < len(children):
        return Field(name, "value")
    return nested if children else Field(name, _kind_of(kind))


def _kind_of(kind: pa.DataType) -> FieldKind:
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return "instant" if kind.tz else "local"
    return next((kind_name for matches, kind_name in _KINDS if matches(kind)), "value")


_KINDS: Final[tuple[tuple[Any, FieldKind], ...]] = (
    (pa.types.is_string, "text"),
    (pa.types.is_integer, "integer"),
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_float32, "number"),
    (pa.types.is_float64, "number"),
    (pa.types.is_date32, "date"),
)


class FieldsBuilder:
    """Builder of the arrays of a schema. For one thread."""

    def __init__(self, schema: pa.Schema, encode_variant: EncodeVariant | None = None) -> None:
        """Make a builder. It accepts any type: `arrays` refuses a type that no JSON value converts to."""
        self.fields = scannable(schema)
        """Fields for the scanner."""
        self._schema = schema
        self._encode_variant = encode_variant

    def arrays(self, found: FoundFields) -> ArrowColumns:
        """Return the columns, and a mask of messages that are declined or have a value that does not fit.

        The mask is None if there are no such messages. Raise ``Invalid`` for a type that no JSON value
        converts to.
        """
        unfit = [found.declined]
        columns = [
            self._array(column, field.type, unfit.append)
            for column, field in zip(found.columns, self._schema, strict=True)
        ]
        mask: Mask | None = None
        if any(map(len, unfit)):
            mask = np.zeros(len(columns[0]), np.bool_)
            mask[np.concatenate(unfit)] = True
        if found.kept is not None:
            kept_rows = pa.array(found.kept)
            columns = [column.filter(kept_rows) for column in columns]
            mask = None if mask is None else mask[found.kept]
        return ArrowColumns(columns, mask)

    def _array(self, found: FieldColumn, kind: pa.DataType, add_unfit: _AddUnfit) -> pa.Array:
        """Return a column. Call ``add_unfit`` with the slots (positions) of values that do not fit it."""
        values: Any = found.values  # Texts, bounds of lists, or numbers: see `FieldColumn`.
        if isinstance(values, Texts):
            if pa.types.is_string(kind):
                return _strings(values, _bitmap(found.present))
            if pa.types.is_floating(kind):
                # Convert from the digits: a cast from double to a narrower type would round twice.
                return _strings(values, _bitmap(found.present)).cast(kind)
            return self._read(found, kind, add_unfit)
        if pa.types.is_struct(kind):
            children = [
                self._array(child, field.type, add_unfit)
                for child, field in zip(found.children, kind, strict=True)
            ]
            buffers = [_bitmap(found.present)]
            return pa.Array.from_buffers(kind, len(found.present), buffers, children=children)
        if pa.types.is_list(kind):
            bounds = values

            def add(slots: Any) -> None:
                # A misfit item makes its list a misfit: find the list by its bounds.
                add_unfit(np.searchsorted(bounds, slots, side="right") - 1)

            items = self._array(found.children[0], kind.value_type, add)
            buffers = [_bitmap(found.present), pa.py_buffer(bounds)]
            return pa.Array.from_buffers(kind, len(found.present), buffers, children=[items])
        if pa.types.is_decimal(kind):
            return _decimals(found, kind)
        present = found.present
        if pa.types.is_integer(kind) and kind.bit_width < _KERNEL_BITS:
            limit = 1 << (kind.bit_width - 1)
            unfit = present & ((values < -limit) | (values >= limit))
            if unfit.any():
                add_unfit(np.flatnonzero(unfit))
                present = present & ~unfit
        array = pa.array(values, mask=None if present.all() else ~present)
        # Arrow casts only integers of 32 bits to days.
        return array.cast(pa.int32()).cast(kind) if pa.types.is_date(kind) else array.cast(kind)

    def _read(self, found: FieldColumn, kind: pa.DataType, add_unfit: _AddUnfit) -> pa.Array:
        """Convert the texts of values by the specification. Call ``add_unfit`` with the slots of misfits."""
        read_line = JsonRow(pa.schema([(_NAME, kind)]), self._encode_variant).read
        data, bounds = found.values.data.tobytes(), found.values.bounds.tolist()
        values: list[Any] = []
        unfit = []
        for slot, present in enumerate(found.present.tolist()):
            value: Any = None
            misfits: list[str] = []
            if present:
                line = b'{"%s":%s}' % (_NAME.encode(), data[bounds[slot] : bounds[slot + 1]])
                (value,), misfits = read_line(line)
            values.append(None if misfits else value)
            if misfits:
                unfit.append(slot)
        if unfit:
            add_unfit(np.array(unfit))
        return pa.array(values, kind)


def _strings(texts: Texts, bitmap: pa.Buffer | None) -> pa.Array:
    return pa.StringArray.from_buffers(
        len(texts.bounds) - 1, pa.py_buffer(texts.bounds), pa.py_buffer(texts.data), bitmap
    )


def _bitmap(present: Mask) -> pa.Buffer | None:
    return None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))


def _decimals(found: FieldColumn, kind: pa.DataType) -> pa.Array:
    units: Any = found.values
    words = np.empty((len(units), _UNIT_WORDS), np.int64)
    words[:, 0] = units
    words[:, 1] = units >> 63  # All bits of the upper word repeat the sign.
    buffers = [_bitmap(found.present), pa.py_buffer(words)]
    return pa.Decimal128Array.from_buffers(kind, len(units), buffers)
