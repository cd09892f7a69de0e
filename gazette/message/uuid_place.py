"""The place of the UUID in messages of a type: a field of the message, or of an object within it. Pure.

A place is a path of names in JSON, joined by dots: ``uuid``, ``_meta.uuid``. A journal made from a
declaration has its place in a label, where every reader and publisher finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

from gazette.errors import Invalid
from gazette.message import zero_value
from gazette.message.message import Acknowledgement
from gazette.message.uuid import ANOTHER_PLACE, BytesForm, ObjectForm, TextForm, UuidForm
from gazette.runtime.decoders import json_decoder, type_info

M = TypeVar("M")

DEFAULT_PLACE: Final = "uuid"
_DECLARE_TEXT: Final = "Declare it `str` or `uuid.UUID`: these are the text of a UUID in JSON."
_HINT: Final = "Give a path of field names, as in _meta.uuid, that the type has."


class Attribute(NamedTuple):
    """An attribute on the way to the UUID."""

    name: str
    is_frozen: bool = False
    """True if the object with the attribute cannot be changed, and a copy must replace it."""
    make: Callable[[], Any] | None = None
    """Function that makes the attribute's object. None if that needs arguments, and for the UUID itself."""

    def get(self, owner: Any) -> Any:
        return getattr(owner, self.name, None)

    def put(self, owner: Any, value: Any) -> Any:
        if self.is_frozen:
            return _replaced(owner, {self.name: value})
        setattr(owner, self.name, value)
        return owner


class Key(NamedTuple):
    """A key of a dict on the way to the UUID."""

    name: str
    make: Callable[[], Any] | None = dict

    def get(self, owner: Any) -> Any:
        return _require_dict(owner, self.name).get(self.name)

    def put(self, owner: Any, value: Any) -> Any:
        _require_dict(owner, self.name)[self.name] = value
        return owner


Step: TypeAlias = Attribute | Key


class UuidPlace(Generic[M]):
    """The way from a message of one type to its UUID."""

    def __init__(self, text: str, steps: Sequence[Step], form: UuidForm) -> None:
        self.text = text
        """The names in JSON, joined by dots."""
        self.form = form
        self._steps = tuple(steps)
        self.is_plain = [*steps] == [Attribute("uuid")]
        """True if the place is the attribute ``uuid`` of the message, and can be set."""

    @property
    def names(self) -> list[str]:
        return names_of(self.text)

    def get(self, message: M) -> Any:
        """Return the value in the place, or None. Raise `Invalid` if a value on the way is no object."""
        value: Any = message
        if isinstance(value, Acknowledgement):
            return value.uuid
        for step in self._steps:
            if value is None:
                return None
            value = step.get(value)
        return value

    def put(self, message: M, value: Any) -> M:
        """Return the message with ``value`` in the place: the same object, or a copy of a frozen message."""
        changed: M = self._put(message, 0, value)
        return changed

    def _put(self, owner: Any, at: int, value: Any) -> Any:
        """Put the value below ``owner``, by the steps from ``at`` on. Return the owner, or a changed copy.
        Raise ``Invalid`` for a null on the way if no object can be made there."""
        step = self._steps[at]
        if at + 1 == len(self._steps):
            return step.put(owner, value)
        child = step.get(owner)
        if child is not None:
            changed = self._put(child, at + 1, value)
            return owner if changed is child else step.put(owner, changed)
        if step.make is None:
            raise Invalid(
                f"{step.name} is null, and has no place for the UUID",
                path=self.text,
                hint="Set it, or give all fields of its type a default.",
            )
        return step.put(owner, self._put(step.make(), at + 1, value))


def names_of(place: str) -> list[str]:
    """Return the names of a place. Raise `Invalid` for an empty name."""
    names = place.split(".")
    if not all(names):
        raise Invalid(f"invalid name of a field ({place!r})", path="uuid", hint=_HINT)
    return names


def declared_place(message_type: Any, given: str | None) -> str | None:
    """Return ``given``, or else the place in the class attribute ``gazette_uuid``, or else an empty text.

    Return None for None: UUIDs are then not decoded. Raise `Invalid` if ``given`` and the attribute differ,
    or if the attributes of a union's types differ.
    """
    if given is None:
        return None
    types = get_args(message_type) or (message_type,)
    # An empty text stands for a type without the attribute.
    places = {getattr(type_, "gazette_uuid", "") for type_ in types}
    if len(places) > 1 or (given and places not in ({""}, {given})):
        shown = " or ".join(place or "its default place" for place in sorted(places))
        raise Invalid(
            f"messages of type {name_of_type(message_type)} have their UUID in {shown}"
            f"{f', and not in {given}' if given else ''}",
            path="uuid",
            hint="Give the class attribute gazette_uuid, the declaration, and the label "
            "app.gazette.dev/message-uuid of the journal the same path.",
        )
    place: str = given or places.pop()
    if place:
        names_of(place)
    return place


def dict_place(place: str | None) -> UuidPlace[dict[str, Any]] | None:
    """Return the place in dicts of JSON objects. Return None for None."""
    if place is None:
        return None
    place = place or DEFAULT_PLACE
    return UuidPlace(place, [Key(name) for name in names_of(place)], TextForm())


def object_place(
    objects: tuple[zero_value.ObjectType, ...], place: str | None
) -> UuidPlace[Any] | None:
    """Return the place in structs or dataclasses. Return None if ``place`` is None, or if ``place`` is empty
    and the types have no field ``uuid``.

    Raise an `Invalid` with the name of the field if it is missing, or cannot hold a UUID.
    """
    if place is None:
        return None
    if place:
        steps, form = _object_steps(objects, names_of(place), place)
        return UuidPlace(place, steps, form)
    field = zero_value.uuid_field(objects)
    if field is None:
        return None
    form = _form_of(field.type, DEFAULT_PLACE)
    return UuidPlace(field.encode_name, [Attribute("uuid", _is_frozen(objects))], form)


def _object_steps(
    types: tuple[zero_value.ObjectType, ...], names: list[str], place: str
) -> tuple[list[Step], UuidForm]:
    """Return the steps along ``names`` from an object of any of these types, and the form of the UUID at
    their end. A step makes an object in place of null if its type is clear, and all fields have defaults.

    Raise ``Invalid`` if the steps lead to no place.
    """
    field = _common_field(types, names[0], place)
    attribute = Attribute(field.name, _is_frozen(types))
    if len(names) == 1:
        return [attribute], _form_of(field.type, place)
    if any(zero_value.is_array((part,), part.cls) for part in types):
        raise Invalid("messages that are JSON arrays have no place within", path=place, hint=_HINT)
    inner = _not_null(field.type)
    if _are_dicts(inner):
        return [attribute._replace(make=dict), *(Key(name) for name in names[1:])], TextForm()
    nested = tuple(
        part
        for part in inner
        if isinstance(part, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
    )
    if not nested or len(nested) < len(inner):
        raise Invalid(f"field {names[0]} is no object", path=place, hint=_HINT)
    steps, form = _object_steps(nested, names[1:], place)
    can_make = len(nested) == 1 and not any(member.required for member in nested[0].fields)
    return [attribute._replace(make=nested[0].cls if can_make else None), *steps], form


def _not_null(info: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    parts = zero_value.alternatives(info)
    return [part for part in parts if not isinstance(part, msgspec.inspect.NoneType)]


def _are_dicts(parts: Sequence[msgspec.inspect.Type]) -> bool:
    return bool(parts) and all(
        isinstance(part, msgspec.inspect.DictType | msgspec.inspect.AnyType) for part in parts
    )


def _common_field(
    objects: tuple[zero_value.ObjectType, ...], name: str, place: str
) -> msgspec.inspect.Field:
    """Return the field ``name``. Raise ``Invalid`` unless all objects have this field, of the same type."""
    fields = [next((f for f in part.fields if f.encode_name == name), None) for part in objects]
    for part, field in zip(objects, fields, strict=True):
        if field is None:
            raise no_field(part.cls, name, place)
    first = fields[0]
    assert first is not None
    if len({(field.name, type(field.type)) for field in fields if field is not None}) > 1:
        raise Invalid(
            f"the types of a union must all have the same field {name}", path=place, hint=_HINT
        )
    return first


def pydantic_place(model: Any, place: str | None) -> UuidPlace[Any] | None:
    """Return the place in pydantic models. Return None and raise `Invalid` as `object_place` does."""
    if place is None:
        return None
    if not place and "uuid" not in model.model_fields:
        return None
    names = names_of(place) if place else [_alias_of("uuid", model.model_fields["uuid"])]
    steps, form = _model_steps(model, names, place or DEFAULT_PLACE)
    return UuidPlace(place or names[0], steps, form)


def _model_steps(model: Any, names: list[str], place: str) -> tuple[list[Step], UuidForm]:
    """Return the steps along ``names`` from a model, and the form of the UUID at their end. Raise ``Invalid``
    if the steps lead to no place."""
    fields = {_alias_of(name, field): (name, field) for name, field in model.model_fields.items()}
    if names[0] not in fields:
        raise no_field(model, names[0], place)
    name, field = fields[names[0]]
    attribute = Attribute(name, bool(model.model_config.get("frozen")))
    if len(names) == 1:
        return [attribute], _form_of(type_info(field.annotation), place)
    inner = _not_null(type_info(field.annotation))
    if _are_dicts(inner):
        return [attribute._replace(make=dict), *(Key(name) for name in names[1:])], TextForm()
    nested: Any = getattr(inner[0], "cls", None) if len(inner) == 1 else None
    if not hasattr(nested, "model_fields"):
        raise Invalid(f"field {names[0]} is no object", path=place, hint=_HINT)
    steps, form = _model_steps(nested, names[1:], place)
    can_make = not any(member.is_required() for member in nested.model_fields.values())
    return [attribute._replace(make=nested if can_make else None), *steps], form


def _alias_of(name: str, field: Any) -> str:
    # Use the alias of the field: encoded models have it, and other programs read it.
    alias: str = field.serialization_alias or field.alias or name
    return alias


def protobuf_place(message_type: Any, place: str | None) -> UuidPlace[Any] | None:
    """Return the place in protobuf messages. Return None and raise `Invalid` as `object_place` does."""
    if place is None:
        return None
    descriptor = message_type.DESCRIPTOR
    if not place and "uuid" not in descriptor.fields_by_name:
        return None
    place = place or DEFAULT_PLACE
    *parents, last = names_of(place)
    for name in parents:
        field = descriptor.fields_by_name.get(name)
        descriptor = None if field is None else field.message_type
        if descriptor is None or field.is_repeated:
            raise no_field(message_type, name, place)
    field = descriptor.fields_by_name.get(last)
    if field is None:
        raise no_field(message_type, last, place)
    if field.type != field.TYPE_BYTES or field.is_repeated:
        raise Invalid(
            f"field {place} of {message_type.__name__} must be of type bytes",
            path=place,
            hint="Make it bytes, or name another place.",
        )
    return UuidPlace(place, [Attribute(name) for name in (*parents, last)], BytesForm())


def no_field(kind: Any, name: str, place: str) -> Invalid:
    return Invalid(f"{name_of_type(kind)} has no field {name}", path=place, hint=_HINT)


def name_of_type(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def peek_decoder(names: Sequence[str]) -> Callable[[bytes], Any]:
    """Return a function from a JSON object to the text in the place ``names``. The function skips all other
    values. It raises ``msgspec.MsgspecError`` for a value of another type in the place, or on the way to it.
    """
    peek_type: Any = str
    for name in reversed(names):
        field = msgspec.field(default=None, name=name)
        peek_type = msgspec.defstruct("Peek", [("value", peek_type | None, field)])
    decode = json_decoder(peek_type).decode

    def peek(payload: bytes) -> Any:
        value = decode(payload)
        for _ in names:
            value = None if value is None else value.value
        return value

    return peek


def _is_frozen(objects: tuple[zero_value.ObjectType, ...]) -> bool:
    return any(_is_frozen_class(part.cls) for part in objects)


def _is_frozen_class(kind: Any) -> bool:
    config = getattr(kind, "__struct_config__", None)
    if config is not None:
        return bool(config.frozen)
    params = getattr(kind, "__dataclass_params__", None)
    return params is not None and bool(params.frozen)


def _replaced(owner: Any, values: dict[str, Any]) -> Any:
    if isinstance(owner, msgspec.Struct):
        return msgspec.structs.replace(owner, **values)
    if dataclasses.is_dataclass(owner):
        return dataclasses.replace(owner, **values)  # type: ignore[type-var]
    return owner.model_copy(update=values)


def _require_dict(owner: Any, name: str) -> dict[str, Any]:
    if isinstance(owner, dict):
        return owner
    raise Invalid(
        f"an object with the field {name} is expected, and not {str(owner)[:64]!r}",
        path="uuid",
        hint=_HINT,
    )


def _form_of(info: msgspec.inspect.Type, place: str) -> UuidForm:
    """Return the form of the UUID in a JSON field of this type. Raise `Invalid` for any other type."""
    types = {type(part) for part in zero_value.alternatives(info)} - {msgspec.inspect.NoneType}
    if types in ({msgspec.inspect.StrType}, {msgspec.inspect.AnyType}):
        return TextForm()
    if types == {msgspec.inspect.UUIDType}:
        return ObjectForm()
    # JSON would have bytes as base64, and other readers expect the text of a UUID.
    hint = _DECLARE_TEXT if msgspec.inspect.BytesType in types else ANOTHER_PLACE
    raise Invalid(f"field {place} must be of type str or uuid.UUID", path=place, hint=hint)
