"""Types of declared messages: classes, fields and content type; and partitions with their message types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.mapping import Partition, Partitions, PartitionsFunc
from gazette.message.message import CSVRecord


def with_declared(
    partitions: PartitionsFunc, declared: Callable[[Partition], Partition]
) -> PartitionsFunc:
    """Return a function that returns the same partitions, each changed by ``declared``.

    Any thread may call the function. An error of ``declared`` reaches its caller.
    """
    # The partitions of the last call, as given and as returned. One tuple holds both, so that threads replace
    # both at once.
    cached = Partitions(()), Partitions(())

    def typed() -> Partitions:
        nonlocal cached
        current = partitions()
        given, returned = cached
        if given is not current:
            returned = Partitions(map(declared, current.all), current.labels)
            cached = current, returned
        return returned

    return typed


def classes_of(message_type: Any) -> tuple[type, ...]:
    """Return the classes of messages of a type: several for a union."""
    origin = get_origin(message_type)
    if isinstance(message_type, UnionType) or origin is Union:
        return tuple(cls for member in get_args(message_type) for cls in classes_of(member))
    return (message_type if origin is None else origin,)


def type_name(message_type: Any) -> str:
    """Return the name of a type of messages. For a union, join the names of its members by ``+``."""
    return "+".join(str(getattr(cls, "__name__", cls)) for cls in classes_of(message_type))


def content_type_of(message_type: Any) -> str:
    """Return the content type of journals of a type: protobuf, CSV, or lines of JSON."""
    if hasattr(message_type, "DESCRIPTOR") and hasattr(message_type, "FromString"):
        return CONTENT_PROTO_FIXED
    if isinstance(message_type, type) and issubclass(message_type, CSVRecord):
        return CONTENT_CSV
    return CONTENT_JSON_LINES


def fields_of(message_type: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a type; for a union, the names that all its types have. Return None
    if they are unknown."""
    if len(classes := classes_of(message_type)) > 1:
        of_each = [fields_of(cls) for cls in classes]
        known_names = [set(names) for names in of_each if names is not None]
        return tuple(set.intersection(*known_names)) if len(known_names) == len(of_each) else None
    message_type = classes[0]
    if (names := getattr(message_type, "__struct_fields__", None)) is not None:
        return tuple(names)
    if is_dataclass(message_type):
        return tuple(field.name for field in fields(message_type))
    if (model := getattr(message_type, "model_fields", None)) is not None:
        return tuple(model)
    if (descriptor := getattr(message_type, "DESCRIPTOR", None)) is not None:
        return tuple(field.name for field in descriptor.fields)
    return None
