"""Header lists of HTTP/2: compressed blocks in both directions, and the rules for requests (RFC 9113, 8).

`hpack` decodes a block, within a bound on its decoded size. Blocks that we send use no table: each field is
written in full, so that a block can be made once and sent many times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import hpack
from hpack.exceptions import HPACKError, OversizedHeaderListError

from gazette.http2.frames import ConnectionFault, FaultCode, StreamFault

Fields: TypeAlias = list[tuple[bytes, bytes]]

LIST_BYTES_MAX: Final = 1 << 16
"""Greatest size of the header list of one request: names, values, and 32 bytes for each field."""
BLOCK_BYTES_MAX: Final = LIST_BYTES_MAX
"""Greatest compressed size of one header list, over all its frames."""
BLOCK_FRAMES_MAX: Final = 16
_FIELD_BYTES: Final = 32
"""Bytes that a field counts beyond its name and its value (RFC 9113, 6.5.2)."""
_GROWTH_MAX: Final = 11
"""A header list is at most this many times as large as a block of ours."""

_REFERENCE: Final = 0x80
"""Least first byte of a reference to one of the first 126 entries of the table (RFC 7541, 6.1)."""
_KNOWN_MAX: Final = 64
_KNOWN_BYTES_MAX: Final = 1 << 10
"""Greatest number, and greatest length in bytes, of blocks whose fields are kept."""
_UPDATE: Final = 0x20
"""A first byte from this value on, and below twice this value, changes the table's size (RFC 7541, 6.3)."""
_UPDATES_MAX: Final = 2
"""Greatest number of table sizes in a block: least since the last block, and present (RFC 7541, 4.2)."""

_OF_THE_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED: Final = (b":method", b":scheme", b":path")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]")


class HeaderDecoder:
    """Decodes the header blocks of one peer, in order: each may change the table for the next."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=LIST_BYTES_MAX)
        self._known: dict[bytes, Fields] = {}
        """Decoded fields, by blocks that leave the table unchanged; valid until the table changes."""

    def decode(self, block: bytes) -> Fields:
        """Return the fields of a block. After a ``ConnectionFault``, later blocks cannot be decoded."""
        fields = self._known.get(block)
        if fields is not None:
            return fields
        table = self._decoder.header_table
        was_empty = not table.dynamic_entries
        fields = self._checked(block)
        # A block that leaves the table as it is has the same fields when it comes again.
        keeps_table = not block or min(block) >= _REFERENCE
        if not keeps_table and was_empty and not _UPDATE <= block[0] < 2 * _UPDATE:
            # The table was empty before and after the block: the block has neither used nor added an entry.
            keeps_table = not table.dynamic_entries
        if not keeps_table or len(self._known) == _KNOWN_MAX:
            self._known.clear()
        if keeps_table and len(block) <= _KNOWN_BYTES_MAX:
            self._known[block] = fields
        return fields

    def _checked(self, block: bytes) -> Fields:
        """Decode a block. Raise ``ConnectionFault`` if it is malformed, or its fields are too many bytes."""
        if block and _UPDATE <= block[0] < 2 * _UPDATE and _updates(block) > _UPDATES_MAX:
            text = "a header block changes the size of the table too often"
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, text)
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decode(block)]
        except OversizedHeaderListError as error:
            text = f"a header list is larger than {LIST_BYTES_MAX} bytes"
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text) from error
        except (HPACKError, IndexError, ValueError) as error:
            text = f"a header block cannot be decoded: {error}"
            raise ConnectionFault(FaultCode.COMPRESSION_ERROR, text) from error

    def _decode(self, block: bytes) -> Iterable[tuple[bytes, bytes]]:
        return self._decoder.decode(block, raw=True)


def _updates(block: bytes) -> int:
    """Return how many changes of the table's size begin a block. `hpack` refuses changes after a field."""
    updates, position, end = 0, 0, len(block)
    while position < end and _UPDATE <= block[position] < 2 * _UPDATE and updates <= _UPDATES_MAX:
        updates += 1
        continues = block[position] == 2 * _UPDATE - 1  # Then more bytes of the size follow.
        position += 1
        while continues and position < end:
            continues = block[position] >= 0x80
            position += 1
    return updates


def encode_fields(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block with the fields as plain text, which changes no table (RFC 7541, 6.2.2)."""
    block = bytearray()
    for name, value in fields:
        block.append(0)
        _write_text(block, name)
        _write_text(block, value)
    return bytes(block)


def fits(block: bytes, list_bytes_max: int) -> bool:
    """Return True if the header list in a block of ours has at most ``list_bytes_max`` bytes."""
    if len(block) * _GROWTH_MAX <= list_bytes_max:
        return True
    fields = hpack.Decoder(max_header_list_size=len(block) * _GROWTH_MAX).decode(block, raw=True)
    return sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields) <= list_bytes_max


def _write_text(out: bytearray, text: bytes) -> None:
    length = len(text)
    if length < 0x7F:
        out.append(length)
    else:
        out.append(0x7F)
        length -= 0x7F
        while length > 0x7F:
            out.append(length & 0x7F | 0x80)
            length >>= 7
        out.append(length)
    out += text


@dataclass(slots=True)
class RequestHead:
    """The fields of a request: those that name its target, and all other fields in order.

    Requests with the same header block share one object. A server keeps in ``plan`` and ``metadata`` the
    values that it has derived from the fields.
    """

    method: bytes
    path: bytes
    authority: bytes
    fields: Fields
    content_length: int | None = None
    plan: Any = None
    metadata: Any = None

    @classmethod
    def of(cls, stream: int, fields: Fields) -> RequestHead:
        """Return the checked head of a request. Raise ``StreamFault`` if its header list is malformed."""
        pseudo: dict[bytes, bytes] = {}
        plain: Fields = []
        for name, value in fields:
            if name[:1] != b":":
                check_field(stream, name, value)
                plain.append((name, value))
            elif name not in _PSEUDO or name in pseudo or plain or _BAD_VALUE.search(value):
                raise _malformed(stream, "a pseudo-header is unknown, repeated or misplaced")
            else:
                pseudo[name] = value
        if any(not pseudo.get(name) for name in _NEEDED):
            raise _malformed(stream, "a request has no method, scheme or path")
        return cls(
            pseudo[b":method"],
            pseudo[b":path"],
            pseudo.get(b":authority", b""),
            plain,
            _length_of(stream, plain),
        )


def check_trailers(stream: int, fields: Fields) -> None:
    """Raise ``StreamFault`` if the trailers of a request are malformed."""
    for name, value in fields:
        check_field(stream, name, value)


def check_field(stream: int, name: bytes, value: bytes) -> None:
    """Raise ``StreamFault`` for a plain field with forbidden characters, or for a field of HTTP/1.1 alone."""
    if not is_field(name, value):
        raise _malformed(stream, "a header's name or value has a forbidden character")
    if name in _OF_THE_CONNECTION or (name == b"te" and value != b"trailers"):
        raise _malformed(stream, "a header belongs to HTTP/1.1")


def is_field(name: bytes, value: bytes) -> bool:
    """Return True if a name and a value have no forbidden character."""
    return _NAME.fullmatch(name) is not None and not _BAD_VALUE.search(value)


def _length_of(stream: int, fields: Fields) -> int | None:
    """Return the announced length of the content; None if absent. Raise ``StreamFault`` if malformed."""
    values = {value for name, value in fields if name == b"content-length"}
    if not values:
        return None
    value = values.pop()
    if values or not value.isdigit() or len(value) > len(str(1 << 63)):
        raise _malformed(stream, "the content length is no number")
    return int(value)


def _malformed(stream: int, text: str) -> StreamFault:
    return StreamFault(stream, FaultCode.PROTOCOL_ERROR, text)
