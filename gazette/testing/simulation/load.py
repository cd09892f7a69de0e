"""Messages of declared types, drawn at random: few keys, small values, and now and then an odd one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import inspect

from gazette.errors import Invalid
from gazette.message.framing.framing import framing_of
from gazette.message.message_time import MessageTime
from gazette.message.zero_value import ObjectType, alternatives, inspect_objects

_TEXTS: Final = ("a", "b", "c", "d", "e")
_ODD_TEXTS: Final = ("", "é", "a b", "a\n", "0", "z" * 40, "'\"")
_ODD_CHANCE: Final = 0.05
_NONE_CHANCE: Final = 0.2
_LATE_CHANCE: Final = 0.15
_LATE_MAX_S: Final = 120.0
_DEPTH_MAX: Final = 6
_UNIT_OF_S: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class MessageLoad:
    """Draws messages of one source. ``uuid`` and ``time`` are the fields that the source names for these."""

    def __init__(
        self, message_type: Any, content_type: str, uuid: str = "", time: MessageTime | None = None
    ) -> None:
        """Raise ``Invalid`` for a type whose values cannot be drawn: the user then gives ``load``."""
        self._type = message_type
        self._framing = framing_of(content_type, message_type, place=uuid)
        place = self._framing.codec.place
        self._uuid = () if place is None else tuple(place.text.split("."))
        self._time = time
        self._descriptor = getattr(message_type, "DESCRIPTOR", None)
        try:
            self._objects = () if self._descriptor else inspect_objects(message_type)
        except (TypeError, Invalid) as error:
            raise self._unknown() from error
        if not self._objects and self._descriptor is None:
            raise self._unknown()

    def _unknown(self) -> Invalid:
        name = getattr(self._type, "__name__", self._type)
        return Invalid(
            f"no messages of type {name} can be drawn",
            path="load",
            hint="Give load=, a function of random numbers that yields messages.",
        )

    def draw(self, rng: random.Random, now: float) -> Any:
        """Return a message that is published at ``now``, in Unix seconds."""
        if self._descriptor is not None:
            return self._protobuf(self._type, rng)
        values = self._object(rng.choice(self._objects), rng, now, ())
        try:
            return self._framing.codec.decode(msgspec.json.encode(values))
        except Exception as error:
            raise Invalid(
                f"a drawn message is not valid: {error}",
                path="load",
                hint="Give load=, a function of random numbers that yields messages.",
            ) from error

    def _object(
        self, info: ObjectType, rng: random.Random, now: float, path: tuple[str, ...]
    ) -> Any:
        values: dict[str, Any] = {}
        is_array = isinstance(info, inspect.StructType) and info.array_like
        for field in info.fields:
            name = (*path, field.encode_name)
            if name == self._uuid:
                if is_array:
                    values[field.encode_name] = ""
            elif not path and self._time is not None and field.name == self._time.field:
                values[field.encode_name] = self._event_time(rng, now)
            elif field.required or is_array or rng.random() < 0.8:
                values[field.encode_name] = self._value(field.type, rng, now, name)
        tag = info.tag if isinstance(info, inspect.StructType) else None
        if is_array:
            items = list(values.values())
            return items if tag is None else [tag, *items]
        if tag is not None and isinstance(info, inspect.StructType):
            values[str(info.tag_field)] = tag
        return values

    def _event_time(self, rng: random.Random, now: float) -> Any:
        if rng.random() < _LATE_CHANCE:
            now -= rng.random() * _LATE_MAX_S
        assert self._time is not None
        unit = self._time.unit
        if unit is not None:
            return int(now * _UNIT_OF_S[unit])
        return datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z")

    def _value(
        self, info: inspect.Type, rng: random.Random, now: float, path: tuple[str, ...]
    ) -> Any:
        choices = alternatives(info)
        plain = [each for each in choices if not isinstance(each, inspect.NoneType)]
        if not plain or (len(plain) < len(choices) and rng.random() < _NONE_CHANCE):
            return None
        if len(path) > _DEPTH_MAX:
            return None
        match rng.choice(plain):
            case inspect.StrType() as part:
                odd = rng.random() < _ODD_CHANCE and part.pattern is None
                text = rng.choice(_ODD_TEXTS if odd else _TEXTS).ljust(part.min_length or 0, "-")
                return text if part.max_length is None else text[: part.max_length]
            case inspect.IntType() as part:
                return self._integer(part, rng)
            case inspect.FloatType() as part:
                value = rng.randint(-20, 60) / 10 + rng.choice((0.0, 0.01, 0.003))
                return _within(part, value)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.DecimalType():
                return f"{rng.randint(0, 500) / 100:.2f}"
            case inspect.DateTimeType(tz=tz):
                at = datetime.fromtimestamp(now - rng.random() * 60, UTC).replace(tzinfo=None)
                return at.isoformat() if tz is False else f"{at.isoformat()}Z"
            case inspect.DateType():
                return f"2026-01-{rng.randint(1, 3):02}"
            case inspect.TimeType():
                return f"12:00:0{rng.randint(0, 3)}"
            case inspect.TimeDeltaType():
                return f"PT{rng.randint(0, 90)}S"
            case inspect.UUIDType():
                return f"6ba7b810-9dad-11d1-80b4-00c04fd430c{rng.randint(0, 3)}"
            case inspect.BytesType() | inspect.ByteArrayType():
                return rng.choice(("", "AA==", "YQ==", "//8="))
            case inspect.LiteralType(values=values):
                return rng.choice(list(values))
            case inspect.EnumType(cls=cls):
                return rng.choice(list(cls)).value
            case inspect.TupleType(item_types=types):
                return [self._value(item, rng, now, (*path, "")) for item in types]
            case (
                inspect.ListType(item_type=item)
                | inspect.VarTupleType(item_type=item)
                | inspect.SetType(item_type=item)
                | inspect.FrozenSetType(item_type=item)
            ):
                return [self._value(item, rng, now, (*path, "")) for _ in range(rng.randint(0, 3))]
            case inspect.DictType(key_type=key, value_type=value_type):
                return {
                    str(self._value(key, rng, now, (*path, ""))): self._value(
                        value_type, rng, now, (*path, "")
                    )
                    for _ in range(rng.randint(0, 2))
                }
            case inspect.AnyType():
                return rng.choice((None, 1, "a", [], {}))
            case inspect.StructType() | inspect.DataclassType() as part:
                return self._object(part, rng, now, path)
            case _:
                raise self._unknown()

    def _integer(self, part: inspect.IntType, rng: random.Random) -> int:
        value = rng.randint(-(2**31), 2**31) if rng.random() < _ODD_CHANCE else rng.randint(0, 9)
        value = int(_within(part, value))
        step = part.multiple_of
        return value if step is None else value // int(step) * int(step)

    def _protobuf(self, message_type: Any, rng: random.Random, depth: int = 0) -> Any:
        message = message_type()
        for field in message_type.DESCRIPTOR.fields:
            if (field.name,) == self._uuid or rng.random() < 0.1:
                continue
            count = rng.randint(0, 3) if field.is_repeated else 1
            values = [self._protobuf_value(message, field, rng, depth) for _ in range(count)]
            values = [value for value in values if value is not None]
            if field.is_repeated:
                if field.message_type is None:
                    getattr(message, field.name).extend(values)
            elif values and field.message_type is None:
                setattr(message, field.name, values[0])
        return message

    def _protobuf_value(self, message: Any, field: Any, rng: random.Random, depth: int) -> Any:
        match field.cpp_type:
            case field.CPPTYPE_STRING:
                text = rng.choice(_TEXTS)
                return text.encode() if field.type == field.TYPE_BYTES else text
            case field.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case field.CPPTYPE_DOUBLE | field.CPPTYPE_FLOAT:
                return rng.randint(0, 60) / 10
            case field.CPPTYPE_ENUM:
                return rng.choice(field.enum_type.values).number
            case field.CPPTYPE_MESSAGE:
                if not field.is_repeated and depth < _DEPTH_MAX:
                    part = getattr(message, field.name)
                    part.CopyFrom(self._protobuf(type(part), rng, depth + 1))
                return None
            case _:
                return rng.randint(0, 9)


def _within(part: inspect.IntType | inspect.FloatType, value: float) -> float:
    """Return the number nearest to ``value`` that the bounds of a type permit."""
    lower = [bound for bound in (part.ge, part.gt and part.gt + 1) if bound is not None]
    upper = [bound for bound in (part.le, part.lt and part.lt - 1) if bound is not None]
    return max([*lower, min([*upper, value])])


def spread(count: int, span_s: float, rng: random.Random) -> Sequence[float]:
    """Return times of messages within a span, in order: some together, some with long gaps."""
    times: Iterator[float] = (rng.random() * span_s for _ in range(count))
    return sorted(
        round(time / 2) * 2 + rng.random() if rng.random() < 0.5 else time for time in times
    )
