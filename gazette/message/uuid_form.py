"""The representation of a UUID in a type of message. Pure.

JSON has its text, from a ``str`` or a ``uuid.UUID``. Protobuf has 16 bytes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import msgspec

from gazette.errors import Invalid
from gazette.message import zero_value
from gazette.message.uuid import (
    ANOTHER_PLACE,
    NIL_UUID,
    UUID_BYTES,
    UuidMint,
    is_ours,
    parse_text,
    texts_to_bytes,
    uuid_text,
)

DECLARE_TEXT: Final = "Declare it `str` or `uuid.UUID`: these are the text of a UUID in JSON."
_TAILS_MAX: Final = 1 << 12
match_published: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[89ab][048c]0[012]-[0-9a-f]{12}"
).fullmatch
"""Matches a text that publishers write: of version 1 and our variant, with known flags."""


class UuidForm(ABC):
    """The representation of a UUID in a type of message."""

    @abstractmethod
    def join(self, values: list[Any]) -> bytes:
        """Return the bytes of all values, concatenated. Empty and absent values are nil. Raise if one is
        malformed."""

    @abstractmethod
    def of_bytes(self, uuid: bytes) -> Any:
        """Return the value to assign to the attribute."""

    @abstractmethod
    def mint(self, mint: UuidMint, flags: int) -> Any:
        """Return a new value."""

    @abstractmethod
    def is_free(self, value: Any) -> bool:
        """Return True if a publisher may replace a value: it is empty, or a publisher wrote it."""


class TextForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        try:
            return texts_to_bytes(values)
        except TypeError:
            return texts_to_bytes([_text_of(value) for value in values])

    def of_bytes(self, uuid: bytes) -> str:
        return uuid_text(uuid)

    def mint(self, mint: UuidMint, flags: int) -> str:
        return mint.text(flags)

    def is_free(self, value: Any) -> bool:
        if not isinstance(value, str):
            return value is None
        if not value or match_published(value):
            return True
        try:
            return is_ours(parse_text(value))
        except Invalid:
            return False


def _text_of(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise Invalid(f"{str(value)[:64]} is not the text of a UUID", path="uuid", hint=ANOTHER_PLACE)


class ObjectForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        return b"".join([value.bytes if value is not None else NIL_UUID for value in values])

    def of_bytes(self, uuid: bytes) -> UUID:
        return UUID(bytes=uuid)

    def mint(self, mint: UuidMint, flags: int) -> UUID:
        return UUID(bytes=mint.raw(flags))

    def is_free(self, value: Any) -> bool:
        return value is None or (isinstance(value, UUID) and is_ours(value.bytes))


class BytesForm(UuidForm):
    def join(self, values: list[Any]) -> bytes:
        values = [value or NIL_UUID for value in values]
        if values and set(map(len, values)) != {UUID_BYTES}:
            raise Invalid(
                f"invalid length of UUID (expected {UUID_BYTES} bytes)",
                path="uuid",
                hint=ANOTHER_PLACE,
            )
        return b"".join(values)

    def of_bytes(self, uuid: bytes) -> bytes:
        return uuid

    def mint(self, mint: UuidMint, flags: int) -> bytes:
        return mint.raw(flags)

    def is_free(self, value: Any) -> bool:
        return not value or (
            isinstance(value, bytes) and len(value) == UUID_BYTES and is_ours(value)
        )


class PublishedTails(set[str]):
    """The ends of UUIDs that publishers wrote: flags and producer, from character 18 on. They are few.

    They identify messages that are published again, in a third of the time of a look at the whole text. A
    producer is 48 random bits, so no other text ends like that.
    """

    def __init__(self, require_free: Callable[[Any], None]) -> None:
        self._require_free = require_free

    def check(self, former: str) -> None:
        """Raise as ``require_free`` does. Remember the end of what a publisher wrote."""
        self._require_free(former)
        if match_published(former):
            if len(self) >= _TAILS_MAX:
                self.clear()
            self.add(former[18:])


def form_of(type_info: msgspec.inspect.Type, place: str) -> UuidForm:
    """Return the form of a field of JSON of that type. Raise `Invalid` that names its ``place``."""
    kinds = {type(part) for part in zero_value.alternatives(type_info)} - {msgspec.inspect.NoneType}
    if kinds in ({msgspec.inspect.StrType}, {msgspec.inspect.AnyType}):
        return TextForm()
    if kinds == {msgspec.inspect.UUIDType}:
        return ObjectForm()
    # JSON would have base64 in place of bytes, and other readers look for the text of a UUID.
    hint = DECLARE_TEXT if msgspec.inspect.BytesType in kinds else ANOTHER_PLACE
    raise Invalid(f"field {place} must be of type str or uuid.UUID", path=place, hint=hint)
