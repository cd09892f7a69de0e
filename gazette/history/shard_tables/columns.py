"""The columns of a type of messages: their types in Arrow, and their values. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import inspect

from gazette.errors import Invalid
from gazette.history.protobuf_rows import protobuf_row, protobuf_schema
from gazette.history.rows import ROW_ERRORS, strict_array
from gazette.message.codec import MsgspecCodec, ProtobufCodec, PydanticCodec
from gazette.message.framing.frames import Framing
from gazette.message.zero_value import alternatives
from gazette.runtime.decoders import type_info

_DEPTH_MAX: Final = 8
_TYPES: Final[dict[type[inspect.Type], pa.DataType]] = {
    inspect.StrType: pa.string(),
    inspect.IntType: pa.int64(),
    inspect.FloatType: pa.float64(),
    inspect.BoolType: pa.bool_(),
    inspect.BytesType: pa.binary(),
    inspect.DateTimeType: pa.timestamp("us", "UTC"),
    inspect.DateType: pa.date32(),
}
_CLASSES: Final[dict[pa.DataType, Any]] = {
    pa.string(): str,
    pa.int64(): int,
    pa.float64(): float | int,
    pa.bool_(): bool,
    pa.binary(): bytes,
    pa.timestamp("us", "UTC"): datetime,
    pa.date32(): date,
}
_KEPT: Final = (bytes, datetime, date)
"""Classes whose values Arrow takes as they are."""
_PLAIN: Final = (inspect.StrType, inspect.IntType, inspect.FloatType, inspect.BoolType)

_KEYS: Final = (inspect.StrType, inspect.IntType)

Values = Callable[[Sequence[Any]], Sequence[Any]]


class Column(NamedTuple):
    """A column of messages of a type."""

    name: str
    """Name of the field in JSON, or in protobuf."""
    attribute: str
    """Name of the attribute in a message's object."""
    type: pa.DataType
    info: inspect.Type | None
    """Type of the field, if the class says it."""
    default: Any = msgspec.NODEFAULT
    """Value of a missing field. ``NODEFAULT``: the field is required, or code makes its value."""

    @property
    def members(self) -> tuple[inspect.Type, ...]:
        """Types of the values, without null."""
        parts = () if self.info is None else alternatives(self.info)
        return tuple(part for part in parts if not isinstance(part, inspect.NoneType))

    @property
    def is_optional(self) -> bool:
        """True if null is a value."""
        return self.info is None or len(self.members) < len(alternatives(self.info))

    @property
    def is_key(self) -> bool:
        """True if the column has the values of the attribute, and they compare as keys do."""
        return len(self.members) == 1 and type(self.members[0]) in _KEYS

    @property
    def is_plain(self) -> bool:
        """True if the scanner reads exactly the values of the type: of one kind, without a constraint."""
        if len(self.members) != 1 or isinstance(self.info, inspect.Metadata):
            return False
        (member,) = self.members
        return type(member) in _PLAIN and all(
            getattr(member, name) is None for name in member.__struct_fields__
        )


class MessageColumns:
    """The columns of the messages of one framing, without the field of the UUID."""

    def __init__(self, framing: Framing[Any]) -> None:
        """Make the columns. Raise `Invalid` for a type without columns."""
        codec = framing.codec
        names = [] if codec.place is None else codec.place.names
        uuid = names[0] if len(names) == 1 else ""
        self._row: Callable[[Any], dict[str, Any]] | None = None
        if isinstance(codec, ProtobufCodec):
            schema = protobuf_schema(codec.message_type)
            self.columns = [Column(f.name, f.name, f.type, None) for f in schema if f.name != uuid]
            self._row = protobuf_row(codec.message_type, self.schema)
        else:
            fields = _fields(codec)
            self.columns = [column for column in fields if column.name != uuid]
        if not self.columns:
            raise Invalid(f"{_name(codec.message_type)} has no fields for the columns of a table")

    @property
    def schema(self) -> pa.Schema:
        """The columns with their types."""
        return pa.schema([(column.name, column.type) for column in self.columns])

    def arrays(self, messages: Sequence[Any]) -> list[pa.Array]:
        """Return the columns of messages. Raise one of `ROW_ERRORS` if a value is beyond its column."""
        if self._row is not None:
            rows = list(map(self._row, messages))
            return [strict_array([row[c.name] for row in rows], c.type) for c in self.columns]
        return [_array(column, messages) for column in self.columns]

    def fitting(self, messages: Sequence[Any]) -> tuple[list[pa.Array], int, BaseException | None]:
        """Return the columns of all messages before the first one that does not fit, the number of these
        messages, and the error of the misfit. The error is None if all messages fit."""
        try:
            return self.arrays(messages), len(messages), None
        except ROW_ERRORS as error:
            if len(messages) == 1:
                return self.arrays([]), 0, error
        middle = len(messages) // 2
        arrays, count, misfit = self.fitting(messages[:middle])
        if misfit is None:
            more, more_count, misfit = self.fitting(messages[middle:])
            arrays = [pa.concat_arrays(pair) for pair in zip(arrays, more, strict=True)]
            count += more_count
        return arrays, count, misfit


def _fields(codec: Any) -> list[Column]:
    """Return the columns of a codec's type. Raise ``Invalid`` for a type without declared fields."""
    message_type = codec.message_type
    if isinstance(codec, PydanticCodec):
        return [
            _column(field.alias or name, name, _info_of(field.annotation))
            for name, field in message_type.model_fields.items()
        ]
    try:
        info: Any = type_info(message_type)
    except (TypeError, NameError):
        info = None
    if isinstance(codec, MsgspecCodec) and isinstance(
        info, inspect.StructType | inspect.DataclassType
    ):
        return [_column(f.encode_name, f.name, f.type, _default_of(f)) for f in info.fields]
    raise Invalid(
        f"messages of type {_name(message_type)} have no columns",
        hint="Declare a Message, another msgspec.Struct, a dataclass, a pydantic model or a protobuf class.",
    )


def _default_of(field: inspect.Field) -> Any:
    """Return the value of a missing field. ``UNSET``: the field may be missing, without a value.
    ``NODEFAULT``: the field is required, or code makes its value."""
    has_default = field.default is not msgspec.NODEFAULT
    if has_default or field.required or field.default_factory is not msgspec.NODEFAULT:
        return field.default
    return msgspec.UNSET


def _name(message_type: Any) -> str:
    return str(getattr(message_type, "__name__", message_type))


def _info_of(annotation: Any) -> inspect.Type | None:
    """Return msgspec's description of a type; None for a type that msgspec does not know."""
    try:
        return type_info(annotation)
    except (TypeError, NameError):
        return None


def _column(
    name: str, attribute: str, info: inspect.Type | None, default: Any = msgspec.NODEFAULT
) -> Column:
    data_type = None if info is None else _data_type(info, 0)
    return Column(name, attribute, data_type or pa.string(), info, default)


def _data_type(info: inspect.Type, depth: int) -> pa.DataType | None:
    """Return the type of Arrow for a type of values; None for a type without a column of its own."""
    members = [m for m in alternatives(info) if not isinstance(m, inspect.NoneType)]
    if len(members) != 1 or depth > _DEPTH_MAX:
        return None
    member = members[0]
    if isinstance(member, inspect.ListType | inspect.VarTupleType):
        item = _data_type(member.item_type, depth + 1)
        return None if item is None else pa.list_(item)
    if isinstance(member, inspect.StructType | inspect.DataclassType):
        if getattr(member, "array_like", False) or getattr(member, "tag", None) is not None:
            return None
        parts = [(f.encode_name, _data_type(f.type, depth + 1)) for f in member.fields]
        if not parts or any(part is None for _, part in parts):
            return None
        return pa.struct(parts)
    return _TYPES.get(type(member))


def _array(column: Column, messages: Sequence[Any]) -> pa.Array:
    values: Sequence[Any] = list(map(attrgetter(column.attribute), messages))
    if column.default is msgspec.UNSET:
        values = [None if value is msgspec.UNSET else value for value in values]
    values = _values(column)(values)
    _require_types(values, column.type)
    return pa.array(values, column.type)


def _require_types(values: Iterable[Any], data_type: pa.DataType) -> None:
    """Raise ``TypeError`` for a value of another class than the type has: Arrow would refuse or change it.

    Messages that an application brings need not have the types that their class declares.
    """
    present = [value for value in values if value is not None]
    is_struct = pa.types.is_struct(data_type)
    classes = dict if is_struct else _CLASSES.get(data_type, list | tuple)
    for python in set(map(type, present)):
        # A datetime is a date, too: Arrow would cut its time off. A bool would become a number.
        is_cut = pa.types.is_date(data_type) and issubclass(python, datetime)
        is_counted = python is bool and not pa.types.is_boolean(data_type)
        if is_cut or is_counted or not issubclass(python, classes):
            raise TypeError(f"a value of type {python.__name__} is no {data_type}")
    if is_struct:
        for part in data_type:
            _require_types([value.get(part.name) for value in present], part.type)
    elif pa.types.is_list(data_type):
        _require_types(chain.from_iterable(present), data_type.value_type)


def _values(column: Column) -> Values:
    """Return the function from values of a field to values for Arrow: as they are, as built-in types for
    nested fields, or as text for fields that have no type of Arrow."""
    if column.info is not None and _data_type(column.info, 0) is not None:
        if pa.types.is_nested(column.type):
            return partial(msgspec.to_builtins, builtin_types=_KEPT)
        return lambda values: values
    return lambda values: list(map(_text, values))


def _text(value: Any) -> str | None:
    """Return a text as it is, null as None, and any other value as JSON."""
    if (plain := msgspec.to_builtins(value, enc_hook=_dumped)) is None or isinstance(plain, str):
        return plain
    return msgspec.json.encode(plain).decode()


def _dumped(value: Any) -> Any:
    """Return the JSON value of a pydantic model. Raise ``TypeError`` for any other value."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"a {type(value).__name__} has no value in JSON")
    return dump(mode="json")
