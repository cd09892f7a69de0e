"""The time of messages as the label of their journal says: `LabelledTime`. Pure.

A declaration labels its journals with the time of their messages: the field's name in encoded messages, its
unit, and the greatest `ahead`. Publishers and readers that have only the journals use the label.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec

from gazette.errors import Invalid
from gazette.labels import MESSAGE_TIME
from gazette.message.key_fields import wire_names_of
from gazette.message.message_time import FUNCTION, MessageTime, value_if_set
from gazette.runtime.numbers import is_digits

_MICROSECOND: Final = timedelta(microseconds=1)
_KINDS_KEPT: Final = 1024


class LabelledTime(MessageTime):
    """The time of messages as their journals' label says. ``field`` is the name of the field in JSON and
    protobuf, or the name of a function with `FUNCTION` at its end."""

    @property
    def name(self) -> str:
        """Name of the field or function."""
        return str(self.field).removesuffix(FUNCTION)

    @property
    def unbounded(self) -> LabelledTime:
        """This time without a bound, for readers: they have no watermark that a time could move too far."""
        return replace(self, ahead=timedelta.max)

    @property
    def _is_of_function(self) -> bool:
        return str(self.field).endswith(FUNCTION)

    @property
    def _path(self) -> str:
        return "message" if self._is_of_function else super()._path

    @property
    def _hint(self) -> str:
        if self._is_of_function:
            return (
                "Publish by the Source or Output of the application (gazctl: --declared), or declare a"
                " field as the time."
            )
        return super()._hint

    def read(self, message: Any) -> int | str:
        """Return the time in Unix microseconds, or the reason why it is missing or not known here."""
        if self._is_of_function:
            return "is what a function of its application returns, which is not known here without time="
        if isinstance(message, bytes):
            return "is not known, since the message is bytes"
        return super().read(message)

    def _value_of(self, message: Any) -> Any:
        name = str(self.field)
        if isinstance(message, dict):
            return self._decoded(message.get(name))
        message_type: Any = type(message)
        attribute = _attribute_of(message_type, name)
        is_proto = getattr(message, "HasField", None) is not None
        return value_if_set(message, attribute) if is_proto else getattr(message, attribute)

    def _decoded(self, value: Any) -> Any:
        """Return a value of a dict as the declared type would decode it."""
        if self.unit is None and isinstance(value, str):
            return msgspec.convert(value, datetime)
        return value

    def _unix_us(self, value: Any) -> int | str:
        if self.unit is not None and value is not None and not isinstance(value, int | float):
            return f"is of type {type(value).__name__}, and is declared as a number of {self.unit}"
        return super()._unix_us(value)


@lru_cache(maxsize=_KINDS_KEPT)
def labelled_time(text: str) -> LabelledTime:
    """Return the time that the label of a journal declares. Raise ``Invalid`` for another text.

    If the time is a function of an application, the label has only its name. Then `LabelledTime.read` returns
    a reason for each message.
    """
    # A label may lack its last parts: the two empty texts stand for them.
    name, unit, ahead, *extra = [*text.split("/"), "", ""]
    if any(extra) or not (is_digits(ahead) or not ahead):
        raise Invalid(
            f"{text!r} is no time of messages",
            path=MESSAGE_TIME,
            hint="Apply the declaration of the journals, which labels them.",
        )
    time = LabelledTime(unquote(name), unit=unit or None)  # type: ignore[arg-type]
    return replace(time, ahead=timedelta(microseconds=int(ahead))) if ahead else time


def label_of_time(time: MessageTime, kinds: Iterable[Any]) -> str:
    """Return the label for the time of messages of these types.

    If the types name the field differently, label the time as that of a function: only the application can
    read it."""
    unit, ahead = time.unit or "", "" if time.has_default_ahead else str(time.ahead // _MICROSECOND)
    return "/".join((_label_of_field(time, kinds), unit, ahead)).rstrip("/")


def _label_of_field(time: MessageTime, kinds: Iterable[Any]) -> str:
    if isinstance(time.field, str):
        names = {dict(wire_names_of(kind)).get(time.field, time.field) for kind in kinds}
        if len(names) == 1:
            # The name of a field must not look like the name of a function.
            return quote(names.pop(), safe="").replace(FUNCTION, "%2D" * len(FUNCTION))
    return time.text_of_function


@lru_cache(maxsize=_KINDS_KEPT)
def _attribute_of(kind: type, name: str) -> str:
    """Return the attribute of a type whose name in encoded messages is ``name``."""
    attributes = (attribute for attribute, wire_name in wire_names_of(kind) if wire_name == name)
    return next(attributes, name)
