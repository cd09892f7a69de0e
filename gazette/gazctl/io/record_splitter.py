"""Records of an input, cut from pieces of any length. Pure."""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final, Protocol

from gazette.errors import Invalid

RECORD_BYTES_MAX: Final = 256 << 20
"""Bytes of the longest record: the limit of readers for a message."""

_FIXED_HEADER: Final = struct.Struct("<4sI")
_FIXED_MAGIC: Final = bytes.fromhex("66339336")


class Splitter(Protocol):
    """Splitter of an input into records."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the records that end in ``data``, with their framing. Raise ``Invalid`` if one is wrong."""
        ...

    def finish(self) -> list[bytes]:
        """Return the records left at the end of the input. Raise ``Invalid`` for an incomplete record."""
        ...

    def key_of(self, record: bytes) -> bytes:
        """Return the key of a key record, without its framing. Raise ``Invalid`` if it is not base64."""
        ...


class LineSplitter:
    """Records are lines with their newline. A missing last newline is added."""

    def __init__(self, *, base64_keys: bool = False) -> None:
        self._rest = bytearray()
        self._base64_keys = base64_keys

    def feed(self, data: bytes) -> list[bytes]:
        if b"\n" not in data:
            self._rest += data
            _check_length(len(self._rest))
            return []
        lines = data.split(b"\n")
        first = bytes(self._rest) + lines[0]
        self._rest = bytearray(lines.pop())
        return [first + b"\n", *(line + b"\n" for line in lines[1:])]

    def finish(self) -> list[bytes]:
        if not self._rest:
            return []
        line, self._rest = bytes(self._rest), bytearray()
        return [line + b"\n"]

    def key_of(self, record: bytes) -> bytes:
        key = record.rstrip(b"\r\n")
        if not self._base64_keys:
            return key
        try:
            return base64.b64decode(key, validate=True)
        except binascii.Error as error:
            raise Invalid(
                f"a key is not base64 ({key[:64]!r}): {error}", path="--base64"
            ) from error


class FixedSplitter:
    """Records begin with eight bytes: a magic word, and the length of the rest."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._offset = 0

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        records: list[bytes] = []
        offset, view = 0, memoryview(self._rest)
        while len(view) - offset >= _FIXED_HEADER.size:
            magic, length = _FIXED_HEADER.unpack_from(view, offset)
            if magic != _FIXED_MAGIC:
                raise Invalid(
                    f"no fixed header at offset {self._offset + offset} of the input ({magic.hex()})",
                    path="--input",
                )
            _check_length(length)
            end = offset + _FIXED_HEADER.size + length
            if end > len(view):
                break
            records.append(bytes(view[offset:end]))
            offset = end
        view.release()
        del self._rest[:offset]
        self._offset += offset
        return records

    def finish(self) -> list[bytes]:
        if self._rest:
            raise Invalid(
                f"the input ends within the record at offset {self._offset}", path="--input"
            )
        return []

    def key_of(self, record: bytes) -> bytes:
        return record[_FIXED_HEADER.size :]


def _check_length(length: int) -> None:
    if length > RECORD_BYTES_MAX:
        raise Invalid(f"a record is too long (expected <= {RECORD_BYTES_MAX})", path="--input")
