"""Ends of messages in a stream of bytes, to merge streams between messages. Pure.

An edge finder takes the pieces of one journal in order. For each piece, the finder returns the position at
which the last message ends.
"""

from __future__ import annotations

import struct
from typing import Final, Protocol

from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED

_FIXED_HEADER: Final = struct.Struct("<4sI")
_FIXED_MAGIC: Final = bytes.fromhex("66339336")
_NEWLINES_TRIED: Final = 64
"""Newlines of a piece to look at, from its end. If all are quoted, the piece has no end of a row."""


class EdgeFinder(Protocol):
    """Finder of the ends of messages."""

    def feed(self, piece: bytes) -> int:
        """Return how many bytes of the piece precede the end of its last message; zero if no message ends."""
        ...

    def reset(self) -> None:
        """Begin again: the stream continues at another offset, with the begin of a message."""
        ...


class LineEdges:
    """Messages end with a newline."""

    def feed(self, piece: bytes) -> int:
        return piece.rfind(b"\n") + 1

    def reset(self) -> None:
        """Do nothing: there is no state."""


class CSVEdges:
    """Rows end with a newline that is not within quotes."""

    def __init__(self) -> None:
        self._quoted = False

    def feed(self, piece: bytes) -> int:
        quotes = piece.count(b'"')
        end = len(piece)
        last_end = 0
        quoted = (quotes + self._quoted) % 2 == 1
        self._quoted = quoted
        # ``quoted`` says whether the position ``end`` is within quotes. Go back from newline to newline.
        for _ in range(_NEWLINES_TRIED):
            newline = piece.rfind(b"\n", 0, end)
            if newline < 0:
                break
            quoted ^= piece.count(b'"', newline, end) % 2 == 1
            if not quoted:
                last_end = newline + 1
                break
            end = newline
        return last_end

    def reset(self) -> None:
        self._quoted = False


class FixedEdges:
    """Messages begin with a magic word and their length. Without the word, a piece ends with a message."""

    def __init__(self) -> None:
        self._missing = 0
        """Bytes that the present message still lacks. 0: its header is not complete yet."""
        self._header = b""

    def feed(self, piece: bytes) -> int:
        offset, last_end, size = 0, 0, len(piece)
        while offset < size:
            if self._missing:
                step = min(self._missing, size - offset)
                self._missing -= step
                offset += step
            else:
                step = min(_FIXED_HEADER.size - len(self._header), size - offset)
                self._header += piece[offset : offset + step]
                offset += step
                if len(self._header) < _FIXED_HEADER.size:
                    break
                magic, self._missing = _FIXED_HEADER.unpack(self._header)
                self._header = b""
                if magic != _FIXED_MAGIC:
                    self._missing = 0
                    return size
            if not self._missing:
                last_end = offset
        return last_end

    def reset(self) -> None:
        self._missing, self._header = 0, b""


def edges_of(content_type: str) -> EdgeFinder | None:
    """Return the edge finder of a content type; None if messages of that type have no known ends."""
    match content_type:
        case t if t == CONTENT_JSON_LINES:
            return LineEdges()
        case t if t == CONTENT_CSV:
            return CSVEdges()
        case t if t == CONTENT_PROTO_FIXED:
            return FixedEdges()
    return None
