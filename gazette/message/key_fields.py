"""Fields of messages that are keys: the encoding of a declared type, and the reading of a field. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from msgspec import inspect

from gazette.errors import Invalid
from gazette.message.keys import (
    ANY,
    BOOLEAN,
    BYTES,
    DATE,
    DATETIME,
    DECIMAL,
    FLOAT,
    INTEGER,
    TEXT,
    UUID_KEY,
    CanonicalKey,
    KeyEncoding,
    no_key,
    tuple_encoding,
)
from gazette.message.message import CSVRecord
from gazette.message.zero_value import alternatives, inspect_objects
from gazette.runtime.decoders import type_info

_BY_INFO: Final[dict[type[inspect.Type], KeyEncoding]] = {
    inspect.AnyType: ANY,
    inspect.BoolType: BOOLEAN,
    inspect.ByteArrayType: BYTES,
    inspect.BytesType: BYTES,
    inspect.DateTimeType: DATETIME,
    inspect.DateType: DATE,
    inspect.DecimalType: DECIMAL,
    inspect.FloatType: FLOAT,
    inspect.IntType: INTEGER,
    inspect.MemoryViewType: BYTES,
    inspect.StrType: TEXT,
    inspect.UUIDType: UUID_KEY,
}
_BY_BASE: Final = ((str, TEXT), (bytes, BYTES), (int, INTEGER), (float, FLOAT))
"""Encodings of subclasses that msgspec does not know, by their base class."""
_PROTOBUF: Final = {
    FieldDescriptor.CPPTYPE_BOOL: BOOLEAN,
    FieldDescriptor.CPPTYPE_DOUBLE: FLOAT,
    FieldDescriptor.CPPTYPE_ENUM: INTEGER,
    FieldDescriptor.CPPTYPE_INT32: INTEGER,
    FieldDescriptor.CPPTYPE_INT64: INTEGER,
    FieldDescriptor.CPPTYPE_UINT32: INTEGER,
    FieldDescriptor.CPPTYPE_UINT64: INTEGER,
    FieldDescriptor.CPPTYPE_STRING: TEXT,
}


@dataclass(frozen=True, slots=True)
class KeyField:
    """A field of a message type that is the key of its messages."""

    name: str
    """Name of the field in encoded messages: in JSON or protobuf, or the number of a CSV column."""
    encoding: KeyEncoding
    get: Callable[[Any], Any]
    """Function from a message to the value of the field."""
    attribute: str = ""
    """Attribute of the message. Empty for records of CSV."""

    def key_of(self, message: Any) -> CanonicalKey:
        """Return the key of a message. Raise an ``Invalid`` with field and value if the value is no key."""
        try:
            return self.encoding.encode(self.get(message))
        except Invalid as error:
            raise self.named(error) from error

    def named(self, error: Invalid) -> Invalid:
        """Return the error with the name of the field added."""
        return Invalid(error.message, path=f"key {self.name}", hint=error.hint)


def declared_field(message_type: Any, attribute: str) -> KeyField:
    """Return the field of an attribute of a message type. Raise ``Invalid`` if the attribute's declared type
    has values that are no keys, and for a union whose types differ in the field."""
    if isinstance(message_type, type) and issubclass(message_type, CSVRecord):
        return _csv_field(message_type, attribute)
    if (descriptor := getattr(message_type, "DESCRIPTOR", None)) is not None:
        return _protobuf_field(descriptor, attribute)
    if (model_fields := getattr(message_type, "model_fields", None)) is not None:
        field = model_fields[attribute]
        name = field.serialization_alias or field.alias or attribute
        return KeyField(
            name, _encoding_of_annotation(field.annotation), attrgetter(attribute), attribute
        )
    return _object_field(message_type, attribute)


def reader_by_wire_name(message_type: Any, name: str) -> Callable[[Any], Any]:
    """Return a function that reads the field ``name`` (its name in encoded messages) of a message.

    Raise ``Invalid`` if the message type has no such field. The function raises ``Invalid`` for a dict
    without the field.
    """
    if issubclass(message_type, CSVRecord):
        return _csv_field(message_type, name).get
    if issubclass(message_type, dict):
        return lambda message: _item(message, name)
    for attribute, wire_name in wire_names_of(message_type):
        if name == wire_name:
            return attrgetter(attribute)
    raise Invalid(
        f"messages of type {message_type.__name__} have no field {name!r}, which is the key",
        path="message",
        hint=f"Add the field {name!r}, or give the message's key.",
    )


def _item(message: dict[str, Any], name: str) -> Any:
    if name not in message:
        raise Invalid(
            f"the message has no field {name!r}, which is the key",
            path="message",
            hint="Every message needs its key.",
        )
    return message[name]


def wire_names_of(message_type: Any) -> list[tuple[str, str]]:
    """Return pairs of an attribute and its name in encoded messages; empty if the fields are not known."""
    if (descriptor := getattr(message_type, "DESCRIPTOR", None)) is not None:
        return [(field.name, field.name) for field in descriptor.fields]
    if (fields := getattr(message_type, "model_fields", None)) is not None:
        return [
            (name, info.serialization_alias or info.alias or name) for name, info in fields.items()
        ]
    try:
        objects = inspect_objects(message_type)
    except (Invalid, TypeError):
        return []
    return [(field.name, field.encode_name) for part in objects for field in part.fields]


def _object_field(message_type: Any, attribute: str) -> KeyField:
    """Return the field of a struct or dataclass, or of all types of a union. For any other class, the class
    of each value decides how the key is encoded."""
    try:
        objects = inspect_objects(message_type)
    except (Invalid, TypeError):
        return KeyField(attribute, ANY, attrgetter(attribute), attribute)
    fields = [field for part in objects for field in part.fields if field.name == attribute]
    encodings = {encoding_of(field.type) for field in fields}
    names = {field.encode_name for field in fields}
    if len(fields) < len(objects) or len(encodings) > 1 or len(names) > 1:
        raise Invalid(
            f"the types of the union do not all have the field {attribute!r}, of one name and type",
            path="key",
            hint="Give a function of the message.",
        )
    return KeyField(names.pop(), encodings.pop(), attrgetter(attribute), attribute)


def is_repeated(field: Any) -> bool:
    """Return True if a field of Protobuf is repeated. In old versions of the library, only ``label`` says
    so."""
    repeated: bool = (
        field.is_repeated
        if hasattr(field, "is_repeated")
        else field.label == FieldDescriptor.LABEL_REPEATED
    )
    return repeated


def _protobuf_field(descriptor: Any, attribute: str) -> KeyField:
    field = descriptor.fields_by_name[attribute]
    encoding = _PROTOBUF.get(field.cpp_type)
    if field.type == field.TYPE_BYTES:
        encoding = BYTES
    if encoding is None or is_repeated(field):
        raise _no_key_type(f"field {attribute} of {descriptor.full_name}")
    return KeyField(attribute, encoding, attrgetter(attribute), attribute)


def _csv_field(message_type: Any, name: str) -> KeyField:
    if name.isascii() and name.isdigit() and len(name) < 5:
        index = int(name)
        return KeyField(name, TEXT, lambda message: _column(message, index))
    if hasattr(message_type, name):
        return KeyField(name, ANY, attrgetter(name))
    raise Invalid(
        f"{message_type.__name__} has no column {name!r}",
        path="key",
        hint="Give the number of a column, such as 1: column 0 is the UUID.",
    )


def _column(record: list[str], index: int) -> str:
    if index >= len(record):
        raise Invalid(
            f"the row has {len(record)} columns, and the key is column {index}",
            path="message",
            hint="Every row needs its key. Column 0 is the UUID.",
        )
    return record[index]


def _encoding_of_annotation(annotation: Any) -> KeyEncoding:
    try:
        return encoding_of(type_info(annotation))
    except TypeError:
        return ANY


def encoding_of(info: inspect.Type) -> KeyEncoding:
    """Return the encoding of keys of a declared type. Raise ``Invalid`` if its values are no keys."""
    parts = [part for part in alternatives(info) if not isinstance(part, inspect.NoneType)]
    encodings = {_encoding_of_part(part) for part in parts}
    if encodings == {INTEGER, FLOAT}:
        return FLOAT
    if len(encodings) != 1:
        raise _no_key_type(" | ".join(sorted(encoding.name for encoding in encodings)) or "None")
    return encodings.pop()


def _encoding_of_part(info: inspect.Type) -> KeyEncoding:
    """Return the encoding of a type that is no union. Raise ``Invalid`` if its values are no keys."""
    match info:
        case inspect.EnumType(cls=enum):
            return _encoding_of_values([item.value for item in enum])
        case inspect.LiteralType(values=values):
            return _encoding_of_values(list(values))
        case inspect.TupleType(item_types=items) if items:
            return tuple_encoding([_part_of_tuple(item) for item in items])
        case inspect.VarTupleType(item_type=item):
            return tuple_encoding([_part_of_tuple(item)], more=True)
        case inspect.CustomType(cls=cls):
            bases = (encoding for base, encoding in _BY_BASE if issubclass(cls, base))
            # A subclass of a known type, such as a class of pydantic, has the keys of the known type.
            return next(bases, ANY)
    if (encoding := _BY_INFO.get(type(info))) is not None:
        return encoding
    raise _no_key_type(type(info).__name__.removesuffix("Type").lower())


def _part_of_tuple(info: inspect.Type) -> KeyEncoding:
    encoding = encoding_of(info)
    if encoding.name.startswith("tuple"):
        raise no_key((), "a tuple within a tuple", "Declare one tuple of all values.")
    return encoding


def _encoding_of_values(values: list[Any]) -> KeyEncoding:
    return encoding_of(inspect.UnionType(tuple(type_info(type(value)) for value in values)))


def _no_key_type(what: str) -> Invalid:
    return Invalid(
        f"values of type {what} are no keys",
        path="key",
        hint="Declare the field as text, bytes, a number, date, UUID, enum or tuple of these, or give "
        "a function of the message.",
    )
