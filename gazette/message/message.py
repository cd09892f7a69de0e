"""Base types of the messages that applications publish and consume."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, kw_only=True):
    """Base of an application's messages. Subclasses add fields, like any ``msgspec.Struct``:

        class Word(Message):
            word: str

    Publishing sets ``uuid``. If other programs use another name for the UUID, use a plain ``msgspec.Struct``
    with ``uuid: str = msgspec.field(default="", name="UUID")``.
    """

    uuid: str = ""
    """The UUID as canonical text, empty before publishing. A message without a UUID is never deduplicated."""


class CSVRecord(list[str]):
    """A row of a CSV journal. Its first field is the UUID."""

    __slots__ = ()

    @property
    def uuid(self) -> str:
        return self[0]

    @uuid.setter
    def uuid(self, text: str) -> None:
        self[0] = text

    @classmethod
    def from_csv(cls, fields: list[str]) -> CSVRecord:
        """Return the record of a row. Types that override this may raise ``ValueError``."""
        return cls(fields)

    def to_csv(self) -> list[str]:
        """Return the row of a record."""
        return self


class Acknowledgement:
    """An acknowledgement whose frame holds only a UUID, without the other fields of the message type."""

    __slots__ = ("uuid",)

    def __init__(self, uuid: Any) -> None:
        self.uuid = uuid

    def __repr__(self) -> str:
        return f"Acknowledgement({self.uuid!r})"
