"""The bytes of a journal that an HTTP request asks for, and its conditions.

A journal only grows, and the bytes at an offset never change. So a range of HTTP is a range of offsets. The
size of the whole is the head of the journal at the time of the response. An entity tag names the creation of
the journal and its head. Content with a later head begins with the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_OFFSET: Final = (1 << 63) - 1

_DIGITS_MAX: Final = 100
"""Greatest number of digits to convert. The time to convert digits grows with their square."""
_SPEC: Final = re.compile(r"[ \t]*(?:([0-9]+)-([0-9]*)|-([0-9]+))[ \t]*")
_TAG: Final = re.compile(r'"([0-9a-f]{1,16})-([0-9a-f]{1,16})"')


class Unsatisfiable(Exception):
    """A header ``Range`` that names no bytes of any journal, or several ranges."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``bytes=first-last`` (inclusive; ``last`` None: to the head), or the last ``suffix`` bytes."""

    first: int = 0
    last: int | None = None
    suffix: int | None = None

    @property
    def end(self) -> int | None:
        """The offset after the last byte; None: no end was given."""
        return None if self.last is None else self.last + 1


def parse_range(header: str | None) -> ByteRange | None:
    """Return the range of a ``Range`` header; None without that header, or for an unknown unit.

    Raise ``Unsatisfiable`` for a value that is no range of bytes, and for several ranges at once.
    """
    if header is None:
        return None
    unit, equals, ranges = header.partition("=")
    if not equals or unit.strip().lower() != "bytes":
        return None
    if "," in ranges:
        raise Unsatisfiable(
            "several ranges in one request are not supported: send one request for each"
        )
    match = _SPEC.fullmatch(ranges)
    if match is None:
        raise Unsatisfiable(f"not a range of bytes: {header}")
    first, last, suffix = match.groups()
    if max(len(digits or "") for digits in (first, last, suffix)) > _DIGITS_MAX:
        raise Unsatisfiable("the range is beyond the largest offset")
    if suffix is not None:
        return ByteRange(suffix=min(int(suffix), MAX_OFFSET))
    byte_range = ByteRange(int(first), int(last) if last else None)
    if byte_range.first > MAX_OFFSET:
        raise Unsatisfiable(f"the range is beyond the largest offset: {header}")
    if byte_range.last is not None and byte_range.last < byte_range.first:
        raise Unsatisfiable(f"the range ends before it begins: {header}")
    if byte_range.last is not None and byte_range.last >= MAX_OFFSET:
        return ByteRange(byte_range.first)
    return byte_range


@dataclass(frozen=True, slots=True)
class EntityTag:
    """An entity tag: the etcd revision at which a journal was created, and its head at the response."""

    created: int
    head: int

    def __str__(self) -> str:
        return f'"{self.created:x}-{self.head:x}"'

    def is_prefix_of(self, other: EntityTag) -> bool:
        """Return True if content with this tag is the beginning of content with ``other``."""
        return self.created == other.created and self.head <= other.head


def parse_tags(header: str) -> list[EntityTag]:
    """Return the tags of an ``If-…`` header that can be tags of a journal. Weak tags count as strong."""
    return [EntityTag(int(created, 16), int(head, 16)) for created, head in _TAG.findall(header)]
