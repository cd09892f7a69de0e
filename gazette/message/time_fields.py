"""Check, before any message is read, that a field of a type can be the time of its messages. Pure."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from msgspec import inspect

from gazette.errors import Invalid
from gazette.message.key_fields import is_repeated
from gazette.message.message import CSVRecord
from gazette.message.message_time import NO_UNIT, TIMESTAMP, MessageTime
from gazette.message.zero_value import alternatives
from gazette.runtime.decoders import type_info

_NUMBERS: Final = (inspect.IntType, inspect.FloatType)
_UNKNOWN: Final = (inspect.AnyType, inspect.CustomType)
"""Types that leave open whether their values are times."""
_PROTO_NUMBERS: Final = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_FLOAT,
)


def check_time_field(kind: type, time: MessageTime) -> None:
    """Raise ``Invalid`` if the field of a class of messages does not exist, or can hold no time.

    Accept a field whose type leaves this open: readers check each of its values.
    """
    name = time.field
    if not isinstance(name, str):
        return
    if (descriptor := getattr(kind, "DESCRIPTOR", None)) is not None:
        _check_proto(descriptor.fields_by_name[name], time)
        return
    if issubclass(kind, CSVRecord) and not hasattr(kind, name):
        raise _refused(
            time,
            f"is no attribute of {kind.__name__}",
            "Give a function: time=lambda row: datetime.fromisoformat(row[1]).",
        )
    for part in _types_of(kind, name):
        if isinstance(part, _NUMBERS):
            if time.unit is None:
                raise _refused(time, "is a number, and no unit is declared", NO_UNIT)
        elif isinstance(part, inspect.DateTimeType):
            _check_datetime(part, time)
        elif not isinstance(part, _UNKNOWN):
            raise _refused(
                time, f"is of type {_name_of(part)}", "Give a field of type datetime, or a number."
            )


def _check_datetime(part: inspect.DateTimeType, time: MessageTime) -> None:
    if part.tz is False:
        raise _refused(time, "is a datetime without a zone", "Declare Meta(tz=True) for it.")
    if time.unit is not None:
        raise _refused(time, "is a datetime, and a unit is declared", "Leave the unit out.")


def _check_proto(field: Any, time: MessageTime) -> None:
    if is_repeated(field):
        raise _refused(time, "is repeated", "Give a field with one value.")
    if field.message_type is not None:
        if field.message_type.full_name != TIMESTAMP:
            raise _refused(
                time,
                f"is of type {field.message_type.full_name}",
                "Give a google.protobuf.Timestamp, or a number.",
            )
        if time.unit is not None:
            raise _refused(time, "is a Timestamp, and a unit is declared", "Leave the unit out.")
        return
    if field.cpp_type not in _PROTO_NUMBERS or field.enum_type is not None:
        raise _refused(time, "is no number", "Give a google.protobuf.Timestamp, or a number.")
    if time.unit is None:
        raise _refused(time, "is a number, and no unit is declared", NO_UNIT)


def _types_of(kind: type, name: str) -> list[inspect.Type]:
    """Return the types that a field may have, without None; empty if the types are not known."""
    fields = getattr(kind, "model_fields", None)
    try:
        if fields is not None:
            info = type_info(fields[name].annotation)
        else:
            owner: Any = type_info(kind)
            info = next(part.type for part in owner.fields if part.name == name)
    except (AttributeError, TypeError, NameError, KeyError, StopIteration):
        return []
    return [part for part in alternatives(info) if not isinstance(part, inspect.NoneType)]


def _name_of(part: inspect.Type) -> str:
    return type(part).__name__.removesuffix("Type").lower()


def _refused(time: MessageTime, reason: str, hint: str) -> Invalid:
    return Invalid(f"{time.name} {reason}", path="time", hint=hint)
