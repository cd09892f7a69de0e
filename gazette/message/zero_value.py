"""Zero values of message types in JSON: the content of an acknowledgement beside its UUID. Pure.

The original publishes the zero value of the message's type, with every field present. Types in Python may
have fields without a default. So this module derives a value for each field that readers require.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import inspect

from gazette.errors import Invalid
from gazette.message.value_types import info_of

ObjectType: TypeAlias = inspect.StructType | inspect.DataclassType

_DEPTH_MAX: Final = 16
_SIMPLE: Final[dict[type[inspect.Type], Any]] = {
    inspect.AnyType: None,
    inspect.BoolType: False,
    inspect.ByteArrayType: "",
    inspect.BytesType: "",
    inspect.CustomType: None,
    inspect.DateTimeType: "1970-01-01T00:00:00Z",
    inspect.DateType: "1970-01-01",
    inspect.DecimalType: "0",
    inspect.DictType: {},
    inspect.FloatType: 0.0,
    inspect.FrozenSetType: [],
    inspect.IntType: 0,
    inspect.ListType: [],
    inspect.MemoryViewType: "",
    inspect.NoneType: None,
    inspect.RawType: None,
    inspect.SetType: [],
    inspect.StrType: "",
    inspect.TimeDeltaType: "PT0S",
    inspect.TimeType: "00:00:00",
    inspect.UUIDType: "00000000-0000-0000-0000-000000000000",
    inspect.VarTupleType: [],
}


def alternatives(info: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the members of a union, or the type alone, without annotations."""
    if isinstance(info, inspect.Metadata):
        return alternatives(info.type)
    if isinstance(info, inspect.UnionType):
        return tuple(itertools.chain.from_iterable(map(alternatives, info.types)))
    return (info,)


def inspect_objects(message_type: Any) -> tuple[ObjectType, ...]:
    """Return the struct or dataclass of a type, or all types of a union. Raise `Invalid` for other types."""
    name = getattr(message_type, "__name__", str(message_type))
    try:
        members = alternatives(info_of(message_type))
    except (TypeError, NameError) as error:
        raise Invalid(f"{name} cannot be a message type: {error}") from error
    objects = tuple(
        part for part in members if isinstance(part, (inspect.StructType, inspect.DataclassType))
    )
    if not objects or len(objects) != len(members):
        raise Invalid(
            f"{name} cannot be a message type",
            hint="Use a subclass of gazette.Message, a msgspec.Struct, a dataclass, a pydantic model, "
            "a protobuf class, dict, or bytes.",
        )
    return objects


def uuid_field(objects: tuple[ObjectType, ...]) -> inspect.Field | None:
    """Return the field ``uuid``, which all types of a union must share. Raise `Invalid` if they differ."""
    fields = [next((f for f in part.fields if f.name == "uuid"), None) for part in objects]
    shapes = {None if f is None else (f.encode_name, type(f.type)) for f in fields}
    if len(shapes) > 1:
        raise Invalid("the types of a union must all have the same field uuid", path="uuid")
    return fields[0]


def is_array(objects: tuple[ObjectType, ...], cls: type) -> bool:
    """Return True if messages of class ``cls`` are JSON arrays, which hold every field in order."""
    part = _object_of(objects, cls)
    return isinstance(part, inspect.StructType) and part.array_like


def payload_maker(
    objects: tuple[ObjectType, ...], cls: type, names: Sequence[str], *, only_uuid: bool
) -> Callable[[Any], Any]:
    """Return a function from a UUID's JSON value to the JSON of an empty message of class ``cls``.

    ``names`` is the place of the UUID. ``only_uuid`` leaves out the fields that the type requires.
    """
    part = _object_of(objects, cls)
    if not only_uuid:
        value = _zero_object(part, 0)
        if isinstance(value, list):
            # In an array, the tag precedes the fields.
            tagged = isinstance(part, inspect.StructType) and part.tag is not None
            index = [f.encode_name for f in part.fields].index(names[0]) + tagged
            return lambda uuid: [*value[:index], uuid, *value[index + 1 :]]
        return lambda uuid: _with_value(value, names, uuid)
    return lambda uuid: only_at(names, uuid)


def only_at(names: Sequence[str], value: Any) -> Any:
    """Return a JSON object with only ``value``, in the place ``names``."""
    return _with_value({}, names, value)


def _with_value(found: Any, names: Sequence[str], value: Any) -> Any:
    """Return a copy of the JSON object ``found`` with ``value`` at the path ``names``. Replace any value on
    the path that is no object."""
    if not names:
        return value
    fields = found if isinstance(found, dict) else {}
    return {**fields, names[0]: _with_value(fields.get(names[0]), names[1:], value)}


def _object_of(objects: tuple[ObjectType, ...], cls: type) -> ObjectType:
    return next((part for part in objects if part.cls is cls), objects[0])


def _zero_object(part: ObjectType, depth: int) -> Any:
    """Return the zero value of an object in JSON: its required fields; for an array, all its fields."""
    tag_field = part.tag_field if isinstance(part, inspect.StructType) else None
    tag = part.tag if isinstance(part, inspect.StructType) else None
    if isinstance(part, inspect.StructType) and part.array_like:
        fields = [_zero(f.type, depth + 1) for f in part.fields]
        return fields if tag is None else [tag, *fields]
    value = {f.encode_name: _zero(f.type, depth + 1) for f in part.fields if f.required}
    if tag_field is not None:
        value[tag_field] = tag
    return value


def _zero(info: inspect.Type, depth: int) -> Any:
    """Return the zero value of a type in JSON: null if permitted, else the zero value of its first member."""
    parts = alternatives(info)
    if depth > _DEPTH_MAX or any(isinstance(part, inspect.NoneType) for part in parts):
        return None
    match parts[0]:
        case inspect.TupleType(item_types=types):
            return [_zero(item, depth + 1) for item in types]
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.StructType() | inspect.DataclassType() as part:
            return _zero_object(part, depth)
        case inspect.TypedDictType(fields=fields) | inspect.NamedTupleType(fields=fields) as part:
            if isinstance(part, inspect.NamedTupleType):
                return [_zero(f.type, depth + 1) for f in fields]
            return {f.encode_name: _zero(f.type, depth + 1) for f in fields if f.required}
        case part:
            return _SIMPLE.get(type(part), msgspec.UNSET)
