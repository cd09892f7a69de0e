"""Fingerprints of values: equal fingerprints show that two values are the same, types included. Pure.

Module ``marshal`` is fast C code. It writes different values of Python's own types as different bytes.
Values of a declared type are first turned into values of Python's own types, by functions made once.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec
from msgspec import inspect

from gazette.message.value_types import class_of, is_flat

Flatten: TypeAlias = Callable[[Any], Any]
"""Function from a value of one class to a value of Python's own types. Raises ``TypeError`` for a value of
another class."""

_VERSION: Final = 2
"""Newest format of `marshal` that writes equal values as equal bytes: later formats write references."""
_KEYS: Final[dict[type, Flatten]] = {
    date: date.isoformat,
    datetime: lambda at: (at.isoformat(), at.fold, repr(at.tzinfo)),
    time: lambda at: (at.isoformat(), at.fold, repr(at.tzinfo)),
    timedelta: lambda span: (span.days, span.seconds, span.microseconds),
    Decimal: str,
    UUID: str,
}
"""Functions by class of the value. Their results keep all information of the value."""


class Fingerprint:
    """The fingerprint of values of one declared type."""

    __slots__ = ("_flatten",)

    def __init__(self, info: inspect.Type) -> None:
        try:
            self._flatten: Flatten | None = _Flatteners().of(info)
        except NotImplementedError:
            self._flatten = None

    def are_same(self, one: Any, other: Any) -> bool:
        """Return True if two values are surely the same. After False, they may be the same or differ.

        Raise ``RecursionError`` for a value that holds itself.
        """
        flatten = self._flatten
        if flatten is None:
            return False
        try:
            if flatten is not _itself:
                one, other = flatten(one), flatten(other)
            return marshal.dumps(one, _VERSION) == marshal.dumps(other, _VERSION)
        except (AttributeError, TypeError, ValueError):
            return False


class _Flatteners:
    """Makes the functions for a type and its parts. A type may hold itself."""

    def __init__(self) -> None:
        self._known: dict[int, Flatten] = {}

    def of(self, info: inspect.Type) -> Flatten:
        """Return the function of a type. Raise ``NotImplementedError`` for a type without one."""
        if is_flat(info):
            return _itself
        if id(info) not in self._known:
            # A type that holds itself needs its own function before that is made: look it up later.
            self._known[id(info)] = lambda value: self._known[id(info)](value)
            self._known[id(info)] = self._new_flatten(info)
        return self._known[id(info)]

    def _new_flatten(self, info: inspect.Type) -> Flatten:
        """Return a new function for a type that is not flat. For the error see `of`."""
        value_class = class_of(info)
        match info:
            case inspect.Metadata(type=part):
                return self.of(part)
            case inspect.UnionType(types=parts):
                return self._union(parts)
            case inspect.DictType(key_type=key, value_type=value):
                return _exactly(dict, _pairs(self.of(key), self.of(value)))
            case inspect.ListType(item_type=part) | inspect.VarTupleType(item_type=part):
                return _exactly(value_class, _flatten_each(self.of(part)))
            case inspect.SetType(item_type=part) | inspect.FrozenSetType(item_type=part):
                flatten_item = self.of(part)
                return _exactly(value_class, lambda value: frozenset(map(flatten_item, value)))
            case inspect.TupleType(item_types=parts):
                return _exactly(tuple, _row([self.of(part) for part in parts]))
            case inspect.StructType(fields=fields) | inspect.DataclassType(fields=fields):
                return self._object(value_class, fields)
            case inspect.EnumType():
                return _exactly(value_class, attrgetter("name", "value"))
            case inspect.BytesType() | inspect.ByteArrayType():
                return _exactly(value_class, _itself)
        if value_class in _KEYS:
            return _exactly(value_class, _KEYS[value_class])
        raise NotImplementedError

    def _object(self, kind: type, fields: Sequence[inspect.Field]) -> Flatten:
        """Return the function of a struct or dataclass, from an object to the values of its fields."""
        if not fields:
            return _exactly(kind, _nothing)
        get = attrgetter(*(field.name for field in fields))
        values = get if len(fields) > 1 else lambda value: (get(value),)
        flat = _row([self.of(field.type) for field in fields], values)
        if not hasattr(kind, "__dictoffset__") or not kind.__dictoffset__:
            return _exactly(kind, flat)
        count = 0 if issubclass(kind, msgspec.Struct) else len(fields)  # Structs have slots.

        def flatten(value: Any) -> Any:
            # A value with further attributes needs the slow comparison.
            if len(value.__dict__) != count:
                raise TypeError
            return flat(value)

        return _exactly(kind, flatten)

    def _union(self, parts: Sequence[inspect.Type]) -> Flatten:
        """Return the function of a union. Its results include the index of the part: parts may look alike."""
        by_class = {class_of(part): (index, self.of(part)) for index, part in enumerate(parts)}
        if len(by_class) != len(parts) or object in by_class:
            raise NotImplementedError

        def flatten(value: Any) -> Any:
            entry = by_class.get(type(value))
            if entry is None:
                raise TypeError
            return entry[0], entry[1](value)

        return flatten


def _itself(value: Any) -> Any:
    return value


def _nothing(_: Any) -> Any:
    return None


def _exactly(kind: type, flatten: Flatten) -> Flatten:
    """Return ``flatten`` restricted to values of exactly ``kind``: ``TypeError`` for all other values."""

    def checked(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return flatten(value)

    return checked


def _flatten_each(flatten: Flatten) -> Flatten:
    return lambda values: [*map(flatten, values)]


def _pairs(key: Flatten, value: Flatten) -> Flatten:
    keys = list if key is _itself else _flatten_each(key)
    return lambda pairs: (keys(pairs), [*map(value, pairs.values())])


def _row(flattens: Sequence[Flatten], values: Flatten = _itself) -> Flatten:
    """Return a function that flattens each part of a value by the function in the same position.

    ``values`` returns the parts of a value. The function raises ``TypeError`` for a wrong number of parts.
    """
    if all(flatten is _itself for flatten in flattens):
        return values

    def flatten(value: Any) -> Any:
        parts = values(value)
        if len(parts) != len(flattens):
            raise TypeError
        return [flatten_part(part) for flatten_part, part in zip(flattens, parts, strict=True)]

    return flatten
