"""Fields of pydantic models that readers would not read back as they are published. Pure.

A model that was validated may still hold such a value. Fields of type ``Any`` take all values, an assignment
is not validated, and validators may change what they read. So a message is decoded again, unless all its
fields are flat and no code of the application runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from gazette.errors import InvalidValue
from gazette.message.value_parts import attributes_of, difference
from gazette.message.value_types import json_misfit
from gazette.message.values import REFUSALS, finite

_FLAT: Final = frozenset({str, int, bool, float, NoneType})
_INT_BITS: Final = 64
"""Bits of an integer that each reader takes. Python refuses to read numbers of thousands of digits."""
_DEEP: Final = "is nested too deeply, or holds itself"


class ReadableModel:
    """The check of messages of one model. ``decode`` is that of the model's codec."""

    def __init__(self, model: Any, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._flat = _flat_fields(model)
        self._names = {_alias_of(name, one): name for name, one in model.model_fields.items()}

    def fits(self, message: Any) -> bool:
        """Return True for a message whose fields all hold values of their declared flat types."""
        if self._flat is None:
            return False
        values = message.__dict__
        for name, kinds in self._flat:
            value = values.get(name, self)
            kind = type(value)
            if kind not in kinds or (kind is int and value.bit_length() > _INT_BITS):
                return False
        return True

    def require(self, message: Any, payload: bytes) -> None:
        """Raise ``InvalidValue``, with a path, for a message that does not read back from its payload."""
        try:
            back = self._decode(payload)
        except REFUSALS as error:
            raise self.unreadable(message, error) from error
        if message.__dict__ == back.__dict__ and not message.__pydantic_extra__:
            return
        ones, others = attributes_of(message), attributes_of(back)
        assert ones is not None
        assert others is not None
        found_again = dict(zip(*others, strict=True))
        for name, value in zip(*ones, strict=True):
            other = found_again.get(name)
            if value != other and (found := difference(value, other)) is not None:
                finite(value, name)
                advice = found.advice or "Convert it, or declare its type."
                raise InvalidValue(found.reason, path=found.path(name), hint=advice)

    def unreadable(self, message: Any, error: BaseException) -> InvalidValue:
        """Return the error of a message that cannot be encoded or read back, with the path of a part."""
        if isinstance(error, InvalidValue):
            return error
        if (name := self._named_by(error)) is not None:
            return InvalidValue(
                f"does not read back: {error}",
                path=name,
                hint="Convert it to the type that is declared.",
            )
        for name, value in zip(*(attributes_of(message) or ((), ())), strict=True):
            try:
                found = json_misfit(value)
            except RecursionError:
                return InvalidValue(_DEEP, path=name, hint="Keep values flat, or by keys.")
            if found is not None:
                return InvalidValue(found.reason, path=found.path(name), hint=found.advice)
        return InvalidValue(
            f"cannot be written: {error}",
            path="message",
            hint="Correct the value, or the type that is declared for it.",
        )

    def _named_by(self, error: BaseException) -> str | None:
        """Return the field that an error of pydantic names first; None without one."""
        errors: Any = getattr(error, "errors", None)
        places = [one["loc"] for one in errors() if one["loc"]] if callable(errors) else []
        if not places:
            return None
        first = str(places[0][0])
        return str(self._names.get(first, first))


def _flat_fields(model: Any) -> list[tuple[str, frozenset[type]]] | None:
    """Return the fields of a model if for each only the class of its value counts; else None."""
    decorators = model.__pydantic_decorators__
    if model.model_config or any(getattr(decorators, name) for name in decorators.__slots__):
        return None
    fields = [one for one in model.model_fields.items() if one[0] != "uuid"]
    kinds = [(name, _flat_kinds(one)) for name, one in fields]
    return kinds if all(kind for _, kind in kinds) else None


def _flat_kinds(field: Any) -> frozenset[type]:
    """Return the classes that a field may hold; none if more than the class of a value counts."""
    # A field with one name for readers and another one for writers does not read back.
    aliases = {field.alias, field.serialization_alias, field.validation_alias}
    if field.metadata or field.exclude or len(aliases) > 1:
        return frozenset()
    declared = field.annotation
    is_union = get_origin(declared) in (Union, UnionType)
    kinds = frozenset(get_args(declared) if is_union else (declared,))
    return kinds if kinds <= _FLAT else frozenset()


def _alias_of(name: str, field: Any) -> str:
    alias = field.validation_alias or field.alias
    return alias if isinstance(alias, str) else name
