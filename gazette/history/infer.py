"""Infers the columns of messages in JSON, as ``spark.read.json`` does from the same lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from gazette.history import lenient_json

_LONG_DIGITS: Final = 18
"""Greatest number of digits that always fit an integer of 64 bits."""
_DECIMAL_DIGITS_MAX: Final = 38
_INT64: Final = range(-(1 << 63), 1 << 63)
_DEPTH_MAX: Final = 100
"""Greatest number of levels of objects and lists that become columns. A deeper value is a string."""


@dataclass(slots=True)
class _Object:
    fields: dict[str, _Kind] = field(default_factory=dict)


@dataclass(slots=True)
class _List:
    item: _Kind = None


_Kind: TypeAlias = "pa.DataType | _Object | _List | None"
"""Kind of the values so far. None: all of them were null."""


def infer_json(lines: Iterable[bytes]) -> pa.Schema:
    """Return the fields of some lines, in order of first appearance. Skip lines that are not objects.

    A field with values of several kinds is a decimal or a double if all are numbers, else a string. A field
    that is always null is a string, and so is a value below `_DEPTH_MAX` levels. Leave out fields that are
    always empty objects, or that have no name. Skip lines that are nested too deeply for Python.
    """
    kind: _Kind = _Object()
    for line in lines:
        try:
            value = json.loads(lenient_json.strict(line, kinds_only=True))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            kind = _widest(kind, _kind_of(value))
    struct = _arrow(kind)
    return pa.schema(list(struct) if struct is not None else [])


def _kind_of(value: Any, depth: int = 0) -> _Kind:
    """Return the kind of one value of JSON, which is within ``depth`` objects and lists."""
    if depth > _DEPTH_MAX and isinstance(value, dict | list):
        return pa.string()
    match value:
        case None:
            return None
        case bool():
            return pa.bool_()
        case int() if value in _INT64:
            return pa.int64()
        case int():
            # No decimal holds an integer of more digits: it is a double.
            digits = len(str(abs(value))) if abs(value) < 10**_DECIMAL_DIGITS_MAX else 0
            return pa.decimal128(digits, 0) if digits else pa.float64()
        case float():
            return pa.float64()
        case str():
            return pa.string()
        case dict():
            return _Object(
                {name: _kind_of(member, depth + 1) for name, member in value.items() if name}
            )
    item: _Kind = None  # The value is a list.
    for element in value:
        item = _widest(item, _kind_of(element, depth + 1))
    return _List(item)


def _widest(one: _Kind, other: _Kind) -> _Kind:
    """Return the narrowest kind that holds the values of both kinds."""
    if one is None:
        return other
    if other is None or one == other:
        return one  # `one` came first, so its fields are in the order of their first appearance.
    if isinstance(one, _Object) and isinstance(other, _Object):
        fields = dict(one.fields)
        for name, kind in other.fields.items():
            fields[name] = _widest(fields[name], kind) if name in fields else kind
        return _Object(fields)
    if isinstance(one, _List) and isinstance(other, _List):
        return _List(_widest(one.item, other.item))
    if _is_numeric(one) and _is_numeric(other):
        if pa.float64() in (one, other):
            return pa.float64()
        return pa.decimal128(max(_digits(one), _digits(other)), 0)
    return pa.string()


def _is_numeric(kind: _Kind) -> bool:
    return isinstance(kind, pa.DataType) and (
        pa.types.is_int64(kind) or pa.types.is_float64(kind) or pa.types.is_decimal(kind)
    )


def _digits(kind: Any) -> int:
    """Return the number of digits of a decimal that holds all integers of a kind: 20 for a long, as Spark."""
    return _LONG_DIGITS + 2 if pa.types.is_int64(kind) else int(kind.precision)


def _arrow(kind: _Kind) -> pa.DataType | None:
    """Return the type of a column; None for objects without fields: no column can hold them."""
    match kind:
        case None:
            return pa.string()
        case _Object(fields):
            columns = [(name, _arrow(field_kind)) for name, field_kind in fields.items()]
            present = [pa.field(name, type_) for name, type_ in columns if type_ is not None]
            return pa.struct(present) if present else None
        case _List(item):
            inner = _arrow(item)
            return None if inner is None else pa.list_(inner)
    return kind
