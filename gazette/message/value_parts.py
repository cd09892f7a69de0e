"""Parts of a value: the walk behind `gazette.message.values`. Pure.

A part has a step, such as ``["sales"]`` or ``.total``. The path of a part is the name of the value, then the
steps to the part. Paths are built from the inside out, and only for errors.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import msgspec

SHOWN_CHARS: Final = 60
"""Number of characters of a value that an error shows."""

Steps: TypeAlias = list[str]
"""Steps to a part, the last one first."""


class Misfit(NamedTuple):
    """A part of a value that JSON or the declared type cannot keep, and the reason."""

    steps: Steps
    reason: str
    advice: str = ""

    def below(self, step: str) -> Misfit:
        """Return the same misfit with one more step, for the value that has the part."""
        self.steps.append(step)
        return self

    def path(self, root: str) -> str:
        """Return the path of the part in a value with the name ``root``, which may be empty."""
        return (root + "".join(reversed(self.steps))).removeprefix(".")


Parts: TypeAlias = tuple[Sequence[str], Sequence[Any]]
"""Names of attributes, and their values."""


def key_step(key: object) -> str:
    """Return the step to the value of a key."""
    if type(key) is not str:
        return f"[{shown(key)}]"
    text = json.dumps(key, ensure_ascii=False)
    return f"[{text.encode(errors='backslashreplace').decode()}]"  # Shows lone surrogates.


def shown(value: object) -> str:
    """Return a short text of a value."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a foreign __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


@functools.lru_cache(maxsize=1024)
def _fields_of(kind: type[Any]) -> tuple[str, ...] | None:
    """Return the names of the fields of a class; None for a class without fields."""
    if issubclass(kind, msgspec.Struct):
        fields: tuple[str, ...] = kind.__struct_fields__
        return fields
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    attributes = getattr(kind, "__attrs_attrs__", None)
    return None if attributes is None else tuple(attribute.name for attribute in attributes)


def attributes_of(value: Any) -> Parts | None:
    """Return the attributes of a struct, a dataclass, a model or the like; None for other values.

    The attributes are the fields of the value, and the other entries of its ``__dict__``.
    """
    fields = _fields_of(type(value))  # type: ignore[arg-type]
    if fields is None:
        return _model_attributes(value)
    own: dict[str, Any] = getattr(value, "__dict__", {})
    names = fields
    if not own.keys() <= set(fields):
        # Leave out the value of a cached property: readers compute it again.
        cached = functools.cached_property
        extra = [name for name in own if not isinstance(getattr(type(value), name, None), cached)]
        names = (*fields, *sorted(set(extra) - set(fields)))
    return names, [getattr(value, name, msgspec.UNSET) for name in names]


def _model_attributes(value: Any) -> Parts | None:
    """Return the fields that a pydantic model writes; None for other values."""
    fields = getattr(type(value), "model_fields", None)
    if not isinstance(fields, dict):
        return None
    names = [name for name, field in fields.items() if not field.exclude]
    values = {**value.__dict__, **(value.__pydantic_extra__ or {})}
    names += values.keys() - fields.keys()
    return names, [values.get(name, msgspec.UNSET) for name in names]


_EXACT: Final = frozenset(
    {type(None), bool, int, float, str, bytes, bytearray, date, timedelta, UUID}
)
"""Classes for which equal values are surely the same."""


def difference(written: Any, read_back: Any, *, by_type: bool = True) -> Misfit | None:
    """Return the first part in which two values differ, in type or value; None if they do not differ.

    ``written`` reads back as ``read_back``. Without ``by_type``, parts of different types do not differ if
    they are equal, such as an int and a float, or times in two zones.
    """
    value_class = type(written)
    if value_class is not type(read_back):
        return None if not by_type and written == read_back else _type_misfit(written, read_back)
    if value_class in _EXACT:
        return None if written == read_back else _value_misfit(written, read_back)
    if value_class is dict:
        return _dict_difference(written, read_back, by_type)
    if value_class in (set, frozenset):
        return _set_difference(written, read_back, by_type)
    if isinstance(written, list | tuple):
        return _list_difference(written, read_back, by_type)
    attributes, attributes_back = attributes_of(written), attributes_of(read_back)
    if attributes is not None and attributes_back is not None:
        return _attribute_difference(attributes, attributes_back, by_type)
    if value_class in (datetime, time):
        return (
            None if _same_time(written, read_back, by_type) else _value_misfit(written, read_back)
        )
    is_same = _SAME.get(value_class, _equal)
    return None if is_same(written, read_back) else _value_misfit(written, read_back)


def _type_misfit(written: Any, read_back: Any) -> Misfit:
    class_name, class_name_back = type(written).__name__, type(read_back).__name__
    advice = f"Convert it to {class_name_back}, or declare {class_name}."
    if class_name == "int" and class_name_back == "float":
        advice = f"Write {written}.0, or declare int | float."
    return non_finite(written) or Misfit(
        [], f"is of type {class_name}, and would read back as {class_name_back}", advice
    )


def _dict_difference(
    written: dict[Any, Any], read_back: dict[Any, Any], by_type: bool
) -> Misfit | None:
    for (key, value), (key_back, value_back) in zip(
        written.items(), read_back.items(), strict=False
    ):
        if difference(key, key_back, by_type=by_type) is not None:
            return Misfit(
                [key_step(key)],
                f"has a key of type {type(key).__name__}, which would read back as {shown(key_back)}",
            )
        if type(value) is type(value_back) and type(value) in _EXACT and value == value_back:
            continue
        if (misfit := difference(value, value_back, by_type=by_type)) is not None:
            return misfit.below(key_step(key))
    return _length_difference(written, read_back)


def _list_difference(
    written: Sequence[Any], read_back: Sequence[Any], by_type: bool
) -> Misfit | None:
    for index, (value, value_back) in enumerate(zip(written, read_back, strict=False)):
        # A fast path: most parts are equal, and then need no call.
        if type(value) is type(value_back) and type(value) in _EXACT and value == value_back:
            continue
        if (misfit := difference(value, value_back, by_type=by_type)) is not None:
            return misfit.below(f"[{index}]")
    return _length_difference(written, read_back)


def _set_difference(written: Any, read_back: Any, by_type: bool) -> Misfit | None:
    by_value = {value: value for value in read_back}
    for value in written:
        if value not in by_value or difference(value, by_value[value], by_type=by_type):
            return Misfit(
                [], f"has the element {shown(value)}, which would read back as another one"
            )
    return _length_difference(written, read_back)


def _length_difference(written: Any, read_back: Any) -> Misfit | None:
    if len(written) == len(read_back):
        return None
    return Misfit([], f"has {len(written)} elements, of which {len(read_back)} would read back")


def _attribute_difference(written: Parts, read_back: Parts, by_type: bool) -> Misfit | None:
    """Return the first attribute that differs. Both arguments are (names, values)."""
    for name, value, name_back, value_back in zip(*written, *read_back, strict=False):
        if name != name_back:
            break
        if type(value) is type(value_back) and type(value) in _EXACT and value == value_back:
            continue
        if (misfit := difference(value, value_back, by_type=by_type)) is not None:
            return misfit.below(f".{name}")
    lost_names = [name for name in written[0] if name not in read_back[0]]
    if lost_names:
        return Misfit(
            [f".{lost_names[0]}"],
            "is no field of its class, and would not read back",
            "Make it a field, or a property.",
        )
    if len(written[0]) != len(read_back[0]):
        return Misfit([], "would read back with more attributes than it has")
    return None


def _value_misfit(written: Any, read_back: Any) -> Misfit:
    is_time = type(written) in (datetime, time)
    fact = (
        f"has the zone {shown(written.tzinfo)}"
        if is_time and written.tzinfo
        else f"is {shown(written)}"
    )
    advice = "Keep times in UTC: datetime.now(UTC), or at.astimezone(UTC)." if is_time else ""
    return Misfit([], f"{fact}, and would read back as {shown(read_back)}", advice)


def _same_time(written: Any, read_back: Any, by_type: bool) -> bool:
    same_zone = (
        type(written.tzinfo) is type(read_back.tzinfo) and written.tzinfo == read_back.tzinfo
    )
    if not by_type and written.tzinfo is not None:
        return bool(written == read_back)
    return same_zone and bool(written == read_back) and written.fold == read_back.fold


def _equal(written: Any, read_back: Any) -> bool:
    return bool(written == read_back)


_SAME: Final[dict[type, Callable[[Any, Any], bool]]] = {
    Decimal: lambda written, read_back: written.as_tuple() == read_back.as_tuple(),
    memoryview: lambda written, read_back: bytes(written) == bytes(read_back),
    msgspec.Raw: lambda written, read_back: bytes(written) == bytes(read_back),
}


def non_finite(value: Any) -> Misfit | None:
    """Return the first part that is NaN or an infinity; None if all parts are finite. Raise
    ``RecursionError`` for a value that holds itself."""
    value_class = type(value)
    if value_class is float:
        if math.isfinite(value):
            return None
        return Misfit([], f"is {value}, which JSON cannot hold", "Leave it out, or write None.")
    if value_class in _EXACT:
        return None
    if isinstance(value, dict):
        for key, part in value.items():
            if (misfit := non_finite(key) or non_finite(part)) is not None:
                return misfit.below(key_step(key))
        return None
    if isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            if (misfit := non_finite(part)) is not None:
                return misfit.below(f"[{index}]")
        return None
    if isinstance(value, float):
        return non_finite(float(value))
    if isinstance(value, enum.Enum):
        return non_finite(value.value)
    attributes = attributes_of(value)
    for name, part in zip(*attributes, strict=True) if attributes is not None else ():
        if (misfit := non_finite(part)) is not None:
            return misfit.below(f".{name}")
    return None
