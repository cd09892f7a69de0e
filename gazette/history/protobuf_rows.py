"""Converts protobuf messages to rows: the Arrow type of a class, and the values of its messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gazette.errors import Invalid

_DEPTH_MAX: Final = 16
_KINDS: Final[dict[int, pa.DataType]] = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    # Spark has no unsigned integers, so use the next larger type.
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
}

Value = Callable[[Any], Any]


def protobuf_schema(message_type: Any) -> pa.Schema:
    """Return the fields of a generated class as columns. Raise `Invalid` for a class that contains itself."""
    return pa.schema(_struct(message_type.DESCRIPTOR, 0))


def protobuf_row(message_type: Any, schema: pa.Schema) -> Callable[[Any], dict[str, Any]]:
    """Return a function from messages of a class to the values of a schema's fields, for Arrow.

    Raise `Invalid` for a field that the class does not have, or that its column cannot hold.
    """
    return _row(message_type.DESCRIPTOR, list(schema))


def _struct(descriptor: Descriptor, depth: int) -> list[pa.Field]:
    if depth > _DEPTH_MAX:
        raise Invalid(
            f"{descriptor.full_name} contains itself and cannot be a table",
            hint="Read value=binary, or name the fields that you need.",
        )
    return [pa.field(field.name, _kind(field, depth)) for field in descriptor.fields]


def _kind(field: FieldDescriptor, depth: int) -> pa.DataType:
    if _is_map(field):
        entry = _message(field).fields_by_name
        return pa.map_(_single(entry["key"], depth), _single(entry["value"], depth))
    single = _single(field, depth)
    return pa.list_(single) if field.is_repeated else single


def _single(field: FieldDescriptor, depth: int) -> pa.DataType:
    """Return the type of one value: of one item, if the field is repeated."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return pa.struct(_struct(_message(field), depth + 1))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return pa.binary() if field.type == FieldDescriptor.TYPE_BYTES else pa.string()
    return _KINDS[field.cpp_type]


def _row(descriptor: Descriptor, columns: Sequence[pa.Field]) -> Callable[[Any], dict[str, Any]]:
    """Return the function from a message to the values of columns, by name. Errors: see `protobuf_row`."""
    readers = []
    for column in columns:
        field = descriptor.fields_by_name.get(column.name)
        if field is None:
            names = ", ".join(known_field.name for known_field in descriptor.fields)
            raise Invalid(
                f"{descriptor.full_name} has no such field (its fields are {names})",
                path=column.name,
            )
        readers.append((column.name, _value(field, column.type)))
    return lambda message: {name: read(message) for name, read in readers}


def _value(field: FieldDescriptor, kind: pa.DataType) -> Value:
    """Return the function from a message to the value of one field, for Arrow. Raise ``Invalid`` if the types
    do not fit."""
    name = field.name
    if _is_map(field) and pa.types.is_map(kind):
        read = _one(_message(field).fields_by_name["value"], kind.item_type)
        return lambda message: [(key, read(value)) for key, value in getattr(message, name).items()]
    if field.is_repeated and pa.types.is_list(kind):
        read = _one(field, kind.value_type)
        return lambda message: [read(item) for item in getattr(message, name)]
    if field.is_repeated:
        raise Invalid(f"the field is repeated and cannot be read as {kind}", path=name)
    read = _one(field, kind)
    if field.has_presence:
        return lambda message: read(getattr(message, name)) if message.HasField(name) else None
    return lambda message: read(getattr(message, name))


def _one(field: FieldDescriptor, kind: pa.DataType) -> Value:
    """Return the function from one value of a field, or one item, to its value for Arrow."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if not pa.types.is_struct(kind):
            raise Invalid(f"the field is a message and cannot be read as {kind}", path=field.name)
        return _row(_message(field), [kind.field(position) for position in range(kind.num_fields)])
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM and pa.types.is_string(kind):
        enum: Any = field.enum_type
        names = {number: value.name for number, value in enum.values_by_number.items()}
        return lambda number: names.get(number, str(number))
    return lambda value: value


def _message(field: FieldDescriptor) -> Descriptor:
    descriptor = field.message_type
    assert descriptor is not None, "the caller checks for a message type first"
    return descriptor


def _is_map(field: FieldDescriptor) -> bool:
    return bool(
        field.is_repeated
        and field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        and _message(field).GetOptions().map_entry
    )
