"""A message of a declared type to try an application with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect

from gazette.declare.source import Source, sources_of
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.codec import DECODE_ERRORS
from gazette.message.framing.framing import framing_of

_VALUES: Final[dict[type[inspect.Type], Any]] = {
    inspect.StrType: "gazette",
    inspect.IntType: 1,
    inspect.FloatType: 1.5,
    inspect.BoolType: True,
    inspect.ListType: [],
    inspect.DictType: {},
}


class MessageSample(msgspec.Struct, frozen=True):
    """A message as a line of JSON, and its key; empty without one."""

    line: str
    key: str = ""


def samples_of(application: Any) -> Iterator[tuple[Source[Any], MessageSample]]:
    """Yield the sources of which a sample can be made, with it: those of JSON with simple fields."""
    for source in sources_of(application):
        if source.content_type == CONTENT_JSON_LINES and (sample := _sample_of(source)) is not None:
            yield source, sample


def _sample_of(source: Source[Any]) -> MessageSample | None:
    try:
        info = inspect.type_info(source.message_type)
    except TypeError:
        return None
    if not isinstance(info, inspect.StructType | inspect.DataclassType):
        return None
    value = {
        field.encode_name: _VALUES.get(type(field.type))
        for field in info.fields
        if field.required and field.name != "uuid"
    }
    line = msgspec.json.encode(value)
    try:
        framing = framing_of(source.content_type, source.message_type, place=source.uuid)
        message = framing.codec.decode(line)
        key = "" if source.key is None else source.key_of(message)
    except DECODE_ERRORS:
        return None  # The type wants more of its fields than their kinds.
    if isinstance(key, bytes):
        key = key.decode(errors="replace")
    return MessageSample(line.decode(), key) if key.isprintable() else None
