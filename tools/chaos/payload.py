"""The content of appends: bytes that name their append, so that a journal can be taken apart again."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"\xc4CHAOS\x00\xff"
_HEADER: Final = struct.Struct(">8sQI")
LENGTH_MIN: Final = _HEADER.size


def digest(content: bytes) -> str:
    """Return the SHA-1 by which histories name bytes."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def payload(op: int, length: int) -> bytes:
    """Return the bytes of an append: a header, and noise that only its number determines."""
    assert length >= LENGTH_MIN
    header = _HEADER.pack(MAGIC, op, length)
    return header + hashlib.shake_128(header).digest(length - LENGTH_MIN)


def ops_of(content: bytes) -> Iterator[int]:
    """Yield the operations whose payloads begin in ``content``, whatever else is there."""
    at = content.find(MAGIC)
    while 0 <= at <= len(content) - LENGTH_MIN:
        _, op, _ = _HEADER.unpack_from(content, at)
        yield op
        at = content.find(MAGIC, at + 1)


@dataclass(frozen=True, slots=True)
class Placed:
    """A whole payload and where it is."""

    op: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are no whole payload. ``kind``: ``torn``, ``interleaved``, ``changed`` or ``foreign``
    (of no payload that was ever begun)."""

    kind: str
    op: int
    offset: int


def take_apart(content: bytes, lengths: Mapping[int, int]) -> tuple[list[Placed], list[Damage]]:
    """Find the payloads of a journal's bytes. ``lengths`` has the length of each append that ever began.

    Every byte belongs to one of the results' spans, or follows the offset of a damage.
    """
    placed: list[Placed] = []
    damages: list[Damage] = []
    at = 0
    while at < len(content):
        op = _op_at(content, at, lengths)
        if op is None:
            damages.append(Damage("foreign", 0, at))
            at = _next_magic(content, at + 1)
            continue
        expected = payload(op, lengths[op])
        end = at + len(expected)
        if content[at:end] == expected:
            placed.append(Placed(op, at, end))
            at = end
            continue
        damage, at = _damage(content, at, op, expected, lengths)
        damages.append(damage)
    return placed, damages


def _damage(
    content: bytes, at: int, op: int, expected: bytes, lengths: Mapping[int, int]
) -> tuple[Damage, int]:
    """Return what is wrong with the payload at an offset, and the offset at which to continue."""
    stored = content[at : at + len(expected)]
    same = _common(stored, expected)
    stop = at + same
    if stop == len(content):
        return Damage("torn", op, at), stop
    other = _op_at(content, stop, lengths)
    if other is None:
        return Damage("changed", op, at), _next_magic(content, stop)
    rest = expected[same:]
    inner = content[stop : stop + lengths[other]]
    kind = "interleaved" if content.startswith(rest, stop + len(inner)) else "torn"
    return Damage(kind, op, at), stop


def _common(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix of two strings."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _op_at(content: bytes, at: int, lengths: Mapping[int, int]) -> int | None:
    if len(content) - at < LENGTH_MIN:
        # The content ends within a header: take the first append whose header begins so.
        rest = content[at:]
        for op, length in lengths.items():
            if _HEADER.pack(MAGIC, op, length).startswith(rest):
                return op
        return None
    magic, op, length = _HEADER.unpack_from(content, at)
    return op if magic == MAGIC and lengths.get(op) == length else None


def _next_magic(content: bytes, at: int) -> int:
    found = content.find(MAGIC, at)
    return len(content) if found < 0 else found
