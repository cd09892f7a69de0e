"""A message of a declared type to try an application with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from gazette.consumer.declare.source import Source, sources_of
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.codec import CODEC_ERRORS
from gazette.message.framing.framing import framing_of
from gazette.message.message_time import MessageTime
from gazette.message.zero_value import ObjectType, alternatives, inspect_objects

NOW: Final = "2099-12-31T23:59:59"
"""The text in a sample that stands for the time at which it is published."""
NOW_S: Final = 4102444799
"""The number in a sample that stands for the same time, in seconds. Smaller units append zeros."""
_DEPTH_MAX: Final = 8
_UNIT_OF_S: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_VALUES: Final[dict[type[inspect.Type], Any]] = {
    inspect.BoolType: True,
    inspect.DateType: "2026-01-31",
    inspect.DecimalType: "1.5",
    inspect.DictType: {},
    inspect.FloatType: 1.5,
    inspect.FrozenSetType: [],
    inspect.IntType: 1,
    inspect.ListType: [],
    inspect.SetType: [],
    inspect.TimeDeltaType: "PT1S",
    inspect.TimeType: "12:00:00",
    inspect.UUIDType: "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
    inspect.VarTupleType: [],
}


class MessageSample(msgspec.Struct, frozen=True):
    """A message as a line of JSON, and its key. ``key`` is empty if the source has no key."""

    line: str
    key: str = ""
    declared: str = ""
    """Name of the source for ``gazctl produce --declared``, if the labels of its journals say too little."""
    directory: str = ""
    """Directory from which ``declared`` is imported."""
    has_uuid: bool = True
    """False for a type of messages without a UUID, which are appended and not published."""


def samples_of(application: Any, directory: str) -> Iterator[tuple[Source[Any], MessageSample]]:
    """Yield each source of JSON lines with simple fields, and a sample of its messages. The module of the
    application is imported from ``directory``."""
    for source in sources_of(application):
        if source.content_type != CONTENT_JSON_LINES:
            continue
        try:
            object_type = inspect_objects(source.message_type)[0]
            sample = _sample_of(source, object_type)
        except CODEC_ERRORS:
            continue  # The type has further conditions, which the sample does not meet.
        if sample is None:
            continue
        if _needs_declaration(source, object_type):
            name = _name_in_class(application, source)
            if not name:
                continue
            sample = msgspec.structs.replace(sample, declared=name, directory=directory)
        yield source, sample


def _sample_of(source: Source[Any], kind: ObjectType) -> MessageSample | None:
    """Return a sample of a source's messages; None if its key cannot be printed.

    Raise one of `CODEC_ERRORS` if the made-up message does not decode.
    """
    line = msgspec.json.encode(_object(kind, _Wanted(source), ()))
    framing = framing_of(source.content_type, source.message_type, place=source.uuid)
    message = framing.codec.decode(line)
    key = "" if source.key is None else source.key_of(message)
    if isinstance(key, bytes):
        key = key.decode(errors="replace")
    if not key.isprintable():
        return None
    return MessageSample(line.decode(), key, has_uuid=bool(source.uuid_place))


def _needs_declaration(source: Source[Any], kind: ObjectType) -> bool:
    """Return True if only the application knows the key or the time, or if messages are arrays."""
    time = source.message_time
    array = isinstance(kind, inspect.StructType) and kind.array_like
    return array or callable(source.key) or (time is not None and callable(time.field))


def _name_in_class(application: Any, source: Source[Any]) -> str:
    """Return the name that imports a source, ``module:Class.attribute``; empty if no name does."""
    cls = type(application)
    module = sys.modules.get(cls.__module__)
    if module is None or getattr(module, cls.__qualname__, None) is not cls:
        return ""
    names = (name for base in cls.__mro__ for name, value in vars(base).items() if value is source)
    return f"{cls.__module__}:{cls.__qualname__}.{next(names)}"


class _Wanted:
    """The fields that a sample sets even if they are optional: key and time. A sample omits the UUID."""

    def __init__(self, source: Source[Any]) -> None:
        self.key = source.key if isinstance(source.key, str) else ""
        self.time: MessageTime | None = source.message_time
        self.uuid = tuple(source.uuid_place.split("."))

    def is_time(self, name: str) -> bool:
        return self.time is not None and self.time.field == name

    @property
    def now(self) -> Any:
        unit = None if self.time is None else self.time.unit
        return f"{NOW}Z" if unit is None else NOW_S * _UNIT_OF_S[unit]


def _object(kind: ObjectType, wanted: _Wanted, path: tuple[str, ...]) -> Any:
    """Return an object with its required and wanted fields; with all fields if there are no such fields."""
    fields = [field for field in kind.fields if (*path, field.encode_name) != wanted.uuid]
    array = isinstance(kind, inspect.StructType) and kind.array_like
    needed = [
        field for field in fields if field.required or (not path and _is_wanted(field, wanted))
    ]
    values = {
        field.encode_name: wanted.now
        if not path and wanted.is_time(field.name)
        else _value(field.type, wanted, (*path, field.encode_name))
        for field in (fields if array or not needed else needed)
    }
    tag = kind.tag if isinstance(kind, inspect.StructType) else None
    if array:
        items = [values.get(field.encode_name, "") for field in kind.fields]
        return items if tag is None else [tag, *items]
    if tag is not None and isinstance(kind, inspect.StructType):
        values[str(kind.tag_field)] = tag
    return values


def _is_wanted(field: inspect.Field, wanted: _Wanted) -> bool:
    return field.name == wanted.key or wanted.is_time(field.name)


def _value(info: inspect.Type, wanted: _Wanted, path: tuple[str, ...]) -> Any:
    """Return a value of a type. Return None for an unknown type: then the decoder refuses the sample."""
    choices = [choice for choice in alternatives(info) if not isinstance(choice, inspect.NoneType)]
    if len(path) > _DEPTH_MAX or not choices:
        return None
    match choices[0]:
        case inspect.StrType() as part:
            text = "gazette".ljust(part.min_length or 0, "-")
            return text if part.max_length is None else text[: part.max_length]
        case inspect.IntType(multiple_of=None) as part:
            return _number_within(part, 1)
        case inspect.FloatType(multiple_of=None) as part:
            return _number_within(part, 1.5)
        case inspect.DateTimeType(tz=tz):
            return NOW if tz is False else f"{NOW}Z"
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case inspect.TupleType(item_types=types):
            return [_value(item_type, wanted, (*path, "")) for item_type in types]
        case inspect.StructType() | inspect.DataclassType() as part:
            return _object(part, wanted, path)
        case part:
            return _VALUES.get(type(part))


def _number_within(part: inspect.IntType | inspect.FloatType, value: Any) -> Any:
    """Return the number nearest to ``value`` that the bounds of a type permit."""
    lower = [bound for bound in (part.ge, part.gt and part.gt + 1) if bound is not None]
    upper = [bound for bound in (part.le, part.lt and part.lt - 1) if bound is not None]
    return max([*lower, min([*upper, value])])
