"""Declared types of values: the text of a type, and the part of a value that does not fit it. Pure."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import inspect

from gazette.message.value_parts import Misfit, attributes_of, key_step, shown
from gazette.runtime.decoders import json_decoder, type_info

_TEXT_DEPTH: Final = 4
_CLASSES: Final[dict[type[inspect.Type], type]] = {
    inspect.NoneType: type(None),
    inspect.BoolType: bool,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.BytesType: bytes,
    inspect.ByteArrayType: bytearray,
    inspect.MemoryViewType: memoryview,
    inspect.DateTimeType: datetime,
    inspect.DateType: date,
    inspect.TimeType: time,
    inspect.TimeDeltaType: timedelta,
    inspect.DecimalType: Decimal,
    inspect.UUIDType: UUID,
    inspect.ListType: list,
    inspect.SetType: set,
    inspect.FrozenSetType: frozenset,
    inspect.VarTupleType: tuple,
    inspect.TupleType: tuple,
    inspect.DictType: dict,
    inspect.TypedDictType: dict,
}
_FLAT: Final = (
    inspect.AnyType,
    inspect.NoneType,
    inspect.BoolType,
    inspect.IntType,
    inspect.FloatType,
    inspect.StrType,
    inspect.LiteralType,
    inspect.Metadata,
    inspect.UnionType,
    inspect.DictType,
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.TupleType,
    inspect.TypedDictType,
)
_EQUALS: Final[tuple[Any, ...]] = (
    *(object.__eq__, int.__eq__, str.__eq__, dict.__eq__, tuple.__eq__),
    msgspec.Struct.__eq__,
)
"""Comparisons of Python and msgspec, which leave no field out."""
_INT_BITS_MAX: Final = 14_000
"""Greatest number of bits of an integer that is written as digits: Python refuses more than 4,300 digits."""
_FLOAT_BITS_MAX: Final = 1_023
_READ_AS: Final[dict[type, tuple[type, ...]]] = {
    float: (int,), Decimal: (int, float), set: (frozenset,), frozenset: (set,),
    bytes: (bytearray, memoryview), bytearray: (bytes, memoryview),
}  # fmt: skip
"""For each class, the other classes whose values may read back as equal values of this class."""
_JSON: Final = (type(None), bool, int, float, str, list, dict)


def parts_of(info: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the types of which a type directly consists."""
    match info:
        case inspect.Metadata(type=part):
            return (part,)
        case inspect.UnionType(types=parts) | inspect.TupleType(item_types=parts):
            return parts
        case inspect.DictType(key_type=key, value_type=value):
            return key, value
        case (
            inspect.ListType(item_type=part)
            | inspect.SetType(item_type=part)
            | inspect.FrozenSetType(item_type=part)
            | inspect.VarTupleType(item_type=part)
        ):
            return (part,)
        case (
            inspect.StructType(fields=fields)
            | inspect.DataclassType(fields=fields)
            | inspect.NamedTupleType(fields=fields)
            | inspect.TypedDictType(fields=fields)
        ):
            return tuple(field.type for field in fields)
    return ()


def all_parts(info: inspect.Type) -> Iterator[inspect.Type]:
    """Yield a type and all its parts at any depth. Yield each part once, since a type may hold itself."""
    seen: set[int] = set()
    pending = [info]
    while pending:
        part = pending.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            pending += parts_of(part)


def info_of(declared: Any) -> inspect.Type:
    """Return msgspec's description of a type.

    Raise ``TypeError`` or ``NameError`` for an unknown type. Raise ``TypeError`` for a dataclass of pydantic,
    whose default factories, aliases, constraints and validators msgspec would ignore.
    """
    info = type_info(declared)
    for part in all_parts(info):
        if isinstance(part, inspect.DataclassType) and hasattr(
            class_of(part), "__pydantic_fields__"
        ):
            raise TypeError(
                f"{class_of(part).__name__} is a dataclass of pydantic. Make it a pydantic.BaseModel, "
                "or a dataclass of Python"
            )
    return info


def decoder_of(declared: Any, infos: Iterable[inspect.Type]) -> msgspec.json.Decoder[Any]:
    """Return a decoder from JSON to a type, which ``infos`` describe. Errors are those of `json_decoder`.

    Work around a fault of msgspec 0.22. Unless msgspec has encoded a name that is not ASCII before, it takes
    the field of that name in a dataclass or ``TypedDict`` as missing, and uses its default. This holds for
    the tag of a struct and its ``tag_field``, too. So encode all these names first.
    """
    for part in (part for info in infos for part in all_parts(info)):
        match part:
            case inspect.StructType(tag_field=tag_field, tag=tag):
                msgspec.json.encode([tag_field, tag])
            case inspect.DataclassType(fields=fields) | inspect.TypedDictType(fields=fields):
                msgspec.json.encode([field.encode_name for field in fields])
    return json_decoder(declared)


def is_flat(info: inspect.Type) -> bool:
    """Return True if all values of a type are of Python's own types, without bytes."""
    return all(isinstance(part, _FLAT) for part in all_parts(info))


def is_customized(info: inspect.Type) -> bool:
    """Return True if reading or comparing values of a type runs code of the application, or if ``==`` leaves
    a field out."""
    return any(
        _is_customized_class(class_of(part)) for part in all_parts(info) if hasattr(part, "cls")
    )


def _is_customized_class(kind: type) -> bool:
    if hasattr(kind, "__post_init__"):
        return True
    equals = kind.__eq__
    if not dataclasses.is_dataclass(kind):
        return equals not in _EQUALS
    # The code of an `__eq__` that `dataclass` generates is in a file "<string>". This `__eq__` leaves out
    # fields without `compare`: equal values may differ in these fields.
    is_generated = getattr(getattr(equals, "__code__", None), "co_filename", "") == "<string>"
    return not is_generated or not all(field.compare for field in dataclasses.fields(kind))


def class_of(info: inspect.Type) -> type:
    """Return the class of the values of a type; ``object`` if they may have several classes."""
    declared_class: Any = _CLASSES.get(type(info)) or getattr(info, "cls", object)
    value_class: type = getattr(declared_class, "__origin__", declared_class)
    return value_class


def type_text(info: inspect.Type) -> str:
    """Return a type as Python writes it. Show a class of the application by its name only."""
    match info:
        case inspect.AnyType():
            return "Any"
        case inspect.NoneType():
            return "None"
        case inspect.Metadata(type=part):
            return type_text(part)
        case inspect.UnionType(types=parts):
            return " | ".join(sorted(map(type_text, parts)))
        case inspect.LiteralType(values=values):
            return f"Literal[{', '.join(sorted(map(repr, values)))}]"
        case inspect.VarTupleType(item_type=part):
            return f"tuple[{type_text(part)}, ...]"
        case inspect.TypedDictType(cls=cls):
            return cls.__name__
    value_class = _CLASSES.get(type(info)) or getattr(info, "cls", type(info))
    name = getattr(value_class, "__name__", str(value_class))
    parts = () if hasattr(info, "cls") else parts_of(info)
    return f"{name}[{', '.join(map(type_text, parts))}]" if parts else name


def type_of(value: Any, depth: int = 0) -> str:
    """Return the type to declare for a value, guessed from its first parts."""
    value_class = type(value)
    if value is None or depth > _TEXT_DEPTH:
        return "None" if value is None else "Any"
    if value_class is dict:
        key_types = _union(value, depth)
        return f"dict[{key_types}, {_union(value.values(), depth)}]"
    if value_class is tuple:
        return f"tuple[{', '.join(type_of(element, depth + 1) for element in value) or '()'}]"
    if value_class in (list, set, frozenset):
        return f"{value_class.__name__}[{_union(value, depth)}]"
    return value_class.__name__


def _union(values: Any, depth: int) -> str:
    texts: dict[str, None] = {}
    for value, _ in zip(values, range(100), strict=False):
        texts[type_of(value, depth + 1)] = None
    return " | ".join(texts) or "Any"


def misfit(value: Any, info: inspect.Type) -> Misfit | None:
    """Return the first part of a value that its declared type, or JSON, cannot hold; None if there is no such
    part.

    Use the result only to explain an error: constraints, such as a greatest length, are not checked. Raise
    ``RecursionError`` for a value that holds itself.
    """
    if value is msgspec.UNSET:
        return None
    match info:
        case inspect.AnyType():
            return json_misfit(value)
        case inspect.Metadata(type=part):
            return misfit(value, part)
        case inspect.UnionType(types=parts):
            fitting = [part for part in parts if _head_fits(value, part)]
            misfits = [misfit(value, part) for part in fitting]
            # If all alternatives of the value's class have a misfit, report the first misfit.
            return (
                _wrong_type(value, info) if not misfits else None if None in misfits else misfits[0]
            )
    return _typed_misfit(value, info) if _head_fits(value, info) else _wrong_type(value, info)


def _head_fits(value: Any, info: inspect.Type) -> bool:
    """Return True if a value is of the class of a type. Do not look at its parts."""
    match info:
        case inspect.AnyType() | inspect.RawType() | inspect.CustomType():
            return True
        case inspect.LiteralType(values=values):
            return value in values
        case inspect.Metadata(type=part):
            return _head_fits(value, part)
    return type(value) is class_of(info) or _reads_as(value, class_of(info))


def _reads_as(value: Any, kind: type) -> bool:
    """Return True for a value of another class that reads back equal, such as an int as a float."""
    if isinstance(value, kind):
        return isinstance(value, enum.Enum | dict | list | tuple | set | frozenset)
    if type(value) not in _READ_AS.get(kind, ()):
        return False
    fits_float = type(value) is not int or value.bit_length() <= _FLOAT_BITS_MAX
    return fits_float and bool(kind(value) == value)


def _wrong_type(value: Any, info: inspect.Type) -> Misfit:
    declared = type_text(info)
    reason = f"is of type {type(value).__name__}, and {declared} is declared"
    if declared == "float" and type(value) is int:
        reason = f"is an integer of {value.bit_length()} bits, and float is declared"
    return Misfit([], reason, f"Convert it to {declared}, or declare {type_of(value)}.")


def _typed_misfit(value: Any, info: inspect.Type) -> Misfit | None:
    """Return the first misfit among the parts of a value. The class of the value itself fits its type."""
    match info:
        case inspect.DictType(key_type=key_type, value_type=value_type):
            return _dict_misfit(value, key_type, lambda _: value_type)
        case inspect.TypedDictType(fields=fields):
            by_key = {field.encode_name: field.type for field in fields}
            return _dict_misfit(value, inspect.StrType(), by_key.get)
        case inspect.TupleType(item_types=types):
            if len(types) != len(value):
                return _wrong_type(value, info)
            return _first_misfit(
                (f"[{n}]", *row) for n, row in enumerate(zip(value, types, strict=True))
            )
        case inspect.NamedTupleType(fields=fields):
            return _first_misfit(
                (f"[{n}]", *row)
                for n, row in enumerate(zip(value, (field.type for field in fields), strict=True))
            )
        case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
            # If the attributes are not known, use none.
            values = dict(zip(*(attributes_of(value) or ((), ())), strict=True))
            return _first_misfit((f".{f.name}", values.get(f.name), f.type) for f in fields)
        case inspect.SetType(item_type=part) | inspect.FrozenSetType(item_type=part):
            return _first_misfit(("", element, part) for element in value)
        case inspect.ListType(item_type=part) | inspect.VarTupleType(item_type=part):
            return _first_misfit((f"[{n}]", element, part) for n, element in enumerate(value))
    return _leaf_misfit(value)


def _first_misfit(parts: Iterator[tuple[str, Any, inspect.Type]]) -> Misfit | None:
    """Return the first misfit of ``parts``: the step, the value and the type of each part."""
    for step, value, info in parts:
        if (part_misfit := misfit(value, info)) is not None:
            return part_misfit.below(step)
    return None


def _dict_misfit(
    value: dict[Any, Any],
    key_type: inspect.Type,
    type_at: Callable[[Any], inspect.Type | None],
) -> Misfit | None:
    """Return the first misfit of a key or its value. ``type_at`` returns the type of a key's value, or None
    for a key that is not declared."""
    for key, part in value.items():
        if (part_misfit := _key_misfit(value, key, key_type)) is not None:
            return part_misfit.below(key_step(key))
        info = type_at(key)
        if info is None:
            return Misfit([key_step(key)], "is no key of the declared type", "Declare it.")
        if (part_misfit := misfit(part, info)) is not None:
            return part_misfit.below(key_step(key))
    return None


def _key_misfit(whole: dict[Any, Any], key: Any, key_type: inspect.Type) -> Misfit | None:
    if isinstance(key_type, inspect.AnyType):
        return json_key_misfit(whole, key)
    fault = misfit(key, key_type)
    return None if fault is None else Misfit([], f"has a key that {fault.reason}", fault.advice)


def json_key_misfit(whole: Any, key: Any) -> Misfit | None:
    """Return why JSON cannot have ``key`` of the dict ``whole``; None if JSON can have it."""
    if type(key) is str:
        return _leaf_misfit(key)
    return Misfit(
        [],
        f"has a key of type {type(key).__name__}, and JSON has texts only",
        f"Declare its type, such as {type_of(whole)}.",
    )


def json_misfit(value: Any) -> Misfit | None:
    """Return the first part of a value that JSON cannot hold unchanged; None if JSON can hold all parts.

    Raise ``RecursionError`` for a value that holds itself.
    """
    value_class = type(value)
    if value_class is dict:
        for key, part in value.items():
            part_misfit = None if type(key) is str else json_key_misfit(value, key)
            if part_misfit is not None or (part_misfit := json_misfit(part)) is not None:
                return part_misfit.below(key_step(key))
        return None
    if value_class is list:
        for index, part in enumerate(value):
            if (part_misfit := json_misfit(part)) is not None:
                return part_misfit.below(f"[{index}]")
        return None
    if value_class in _JSON:
        return _leaf_misfit(value)
    return Misfit(
        [],
        f"is of type {value_class.__name__}, which JSON does not have",
        f"Declare its type, such as {type_of(value)}.",
    )


def _leaf_misfit(value: Any) -> Misfit | None:
    """Return why JSON cannot hold a value without parts; None if JSON can hold it."""
    if type(value) is float and not math.isfinite(value):
        return Misfit([], f"is {value}, which JSON cannot hold", "Leave it out, or write None.")
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Misfit([], f"is no Unicode text ({shown(value)}: {error.reason})", "Correct it.")
    if type(value) is msgspec.Raw:
        return _raw_misfit(bytes(value))
    if type(value) is int and value.bit_length() > _INT_BITS_MAX:
        return Misfit([], f"has {value.bit_length()} bits", "Keep large numbers as bytes or text.")
    return None


def _raw_misfit(value: bytes) -> Misfit | None:
    if b"\n" in value:
        return Misfit([], "holds a newline, which ends a message", "Write the JSON on one line.")
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Misfit([], f"is no JSON: {error}", "Correct it.")
    return None
