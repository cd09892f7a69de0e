"""The check that readers decode a pydantic model as it was published: `ReadableModel`. Pure.

A validated model may still hold a value that does not read back. Fields of type ``Any`` take all values, an
assignment is not validated, and validators may change the values that they read. So a message is decoded
again, unless all its fields are flat and no code of the application runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from gazette.errors import InvalidValue
from gazette.message.value_parts import attributes_of, difference
from gazette.message.value_types import json_misfit
from gazette.message.values import NO_ZONE, REFUSALS, finite

_FLAT: Final = frozenset({str, int, bool, float, NoneType})
_INT_BITS: Final = 64
"""Bits of an integer that every reader accepts. Python refuses to read numbers of thousands of digits."""
_DEEP: Final = "is nested too deeply, or holds itself"


class ReadableModel:
    """The check of messages of one model. ``decode`` is the method of the model's codec."""

    def __init__(self, model: Any, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._flat = _flat_fields(model)
        self._names = {_alias_of(name, field): name for name, field in model.model_fields.items()}

    def fits(self, message: Any) -> bool:
        """Return True for a message whose fields all hold values of their declared flat types."""
        if self._flat is None:
            return False
        values = message.__dict__
        for name, classes in self._flat:
            value = values.get(name, self)  # An absent field gives `self`, whose class is not flat.
            cls = type(value)
            if cls not in classes or (cls is int and value.bit_length() > _INT_BITS):
                return False
        return True

    def require(self, message: Any, payload: bytes) -> None:
        """Raise ``InvalidValue``, with a path, for a message that does not read back from its payload."""
        try:
            read_back = self._decode(payload)
        except REFUSALS as error:
            raise self.unreadable(message, error) from error
        is_equal = message.__dict__ == read_back.__dict__ and not message.__pydantic_extra__
        holds_times = NO_ZONE.search(payload) is not None  # Equal times may differ in their `fold`.
        if is_equal and not holds_times:
            return
        attributes, attributes_back = attributes_of(message), attributes_of(read_back)
        assert attributes is not None
        assert attributes_back is not None
        values_back = dict(zip(*attributes_back, strict=True))
        for name, value in zip(*attributes, strict=True):
            value_back = values_back.get(name)
            if value == value_back and not holds_times:
                continue
            if (misfit := difference(value, value_back, by_type=not holds_times)) is not None:
                finite(value, name)
                advice = misfit.advice or "Convert it, or declare its type."
                raise InvalidValue(misfit.reason, path=misfit.path(name), hint=advice)

    def unreadable(self, message: Any, error: BaseException) -> InvalidValue:
        """Return the error of a message that cannot be encoded or read back, with the path to the fault."""
        if isinstance(error, InvalidValue):
            return error
        if (name := self._named_by(error)) is not None:
            return InvalidValue(
                f"does not read back: {error}",
                path=name,
                hint="Convert it to the type that is declared.",
            )
        # If the attributes are not known, try none.
        for name, value in zip(*(attributes_of(message) or ((), ())), strict=True):
            try:
                misfit = json_misfit(value)
            except RecursionError:
                return InvalidValue(_DEEP, path=name, hint="Keep values flat, or by keys.")
            if misfit is not None:
                return InvalidValue(misfit.reason, path=misfit.path(name), hint=misfit.advice)
        return InvalidValue(
            f"cannot be written: {error}",
            path="message",
            hint="Correct the value, or the type that is declared for it.",
        )

    def _named_by(self, error: BaseException) -> str | None:
        """Return the field that an error of pydantic names first; None if it names no field."""
        errors: Any = getattr(error, "errors", None)
        paths = [detail["loc"] for detail in errors() if detail["loc"]] if callable(errors) else []
        if not paths:
            return None
        field_name = str(paths[0][0])
        return str(self._names.get(field_name, field_name))


def _flat_fields(model: Any) -> list[tuple[str, frozenset[type]]] | None:
    """Return each field with the classes of its values; None if some value may not read back equal although
    its class is right."""
    decorators = model.__pydantic_decorators__
    if model.model_config or any(getattr(decorators, name) for name in decorators.__slots__):
        return None  # A setting or a validator may change what is read.
    fields = [item for item in model.model_fields.items() if item[0] != "uuid"]
    classes_by_name = [(name, _flat_kinds(field)) for name, field in fields]
    return classes_by_name if all(classes for _, classes in classes_by_name) else None


def _flat_kinds(field: Any) -> frozenset[type]:
    """Return the classes of a field's values; empty if some value may not read back equal."""
    # A field whose name differs for readers and writers does not read back.
    aliases = {field.alias, field.serialization_alias, field.validation_alias}
    if field.metadata or field.exclude or len(aliases) > 1:
        return frozenset()
    declared = field.annotation
    is_union = get_origin(declared) in (Union, UnionType)
    classes = frozenset(get_args(declared) if is_union else (declared,))
    return classes if classes <= _FLAT else frozenset()


def _alias_of(name: str, field: Any) -> str:
    alias = field.validation_alias or field.alias
    return alias if isinstance(alias, str) else name
