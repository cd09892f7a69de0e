"""RocksDB's write-ahead log: its records, and the batches of writes in them. Pure.

A WAL is a sequence of blocks of 32 KiB. A record (one batch of writes) is cut into fragments that
do not cross blocks. Each fragment has a header of checksum (4 bytes), length (2, little endian) and
type (1). A batch begins with the sequence number of its first write (8) and their count (4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

from gazette.errors import Corrupt

BLOCK: Final = 32 << 10
HEADER: Final = 7
BATCH_HEADER: Final = 12
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_ZEROS, _INVALID = 0, -1
_FRAGMENT: Final = struct.Struct("<IHB")
_BATCH: Final = struct.Struct("<QI")


def _fragments(data: bytes, offset: int) -> Iterator[tuple[int, int, int] | None]:
    """Yield (type, begin, end) of each fragment in ``data``, which stands at ``offset`` of a file.

    Yield None at the end for an incomplete fragment, and the type ``_INVALID`` for one that crosses blocks.
    """
    position, length = 0, len(data)
    while position < length:
        room = BLOCK - (offset + position) % BLOCK
        if room < HEADER:
            position += room
            continue
        if position + HEADER > length:
            yield None
            return
        _, size, fragment_type = _FRAGMENT.unpack_from(data, position)
        begin = position + HEADER
        position = begin + size
        if HEADER + size > room:
            yield _INVALID, begin, begin
            return
        if position > length:
            yield None
            return
        yield fragment_type, begin, position


def batches(data: bytes, offset: int) -> list[tuple[int, int]] | None:
    """Return (first sequence number, count) of each batch in ``data``, at ``offset`` of a WAL. Return None
    unless ``data`` has only whole records."""
    headers: list[tuple[int, int]] = []
    head: bytearray | None = None
    for fragment in _fragments(data, offset):
        if fragment is None:
            return None
        fragment_type, begin, end = fragment
        if fragment_type in (_FULL, _FIRST) and head is None:
            head = bytearray()
        elif fragment_type not in (_MIDDLE, _LAST) or head is None:
            return None
        if len(head) < BATCH_HEADER:
            head += data[begin : min(end, begin + BATCH_HEADER - len(head))]
        if fragment_type in (_FULL, _LAST):
            if len(head) < BATCH_HEADER:
                return None
            headers.append(_BATCH.unpack(head))
            head = None
    return headers if head is None else None


def records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield (record, its end in the file) of each complete record in ``data``, which stands at ``offset``.

    End, as RocksDB does, at an incomplete record, or at zeros, where RocksDB has not written yet.
    Manifests have the same form. Raise ``Corrupt`` for any other sequence of fragments. A reader that ended
    there in silence would show old content as the current content for ever. Checksums are not verified.
    """
    # None between records. A first fragment may be empty: its block had only room for the header.
    record: bytearray | None = None
    for fragment in _fragments(data, offset):
        if fragment is None:
            return
        fragment_type, begin, end = fragment
        if fragment_type == _ZEROS and begin == end and record is None:
            return
        begins = fragment_type in (_FULL, _FIRST)
        if not (begins or fragment_type in (_MIDDLE, _LAST)) or begins != (record is None):
            raise Corrupt(
                "a file of RocksDB holds bytes that are not a record",
                offset=offset + begin - HEADER,
                kind=fragment_type,
            )
        record = bytearray() if record is None else record
        record += data[begin:end]
        if fragment_type in (_FULL, _LAST):
            yield bytes(record), offset + end
            record = None


def continues(tails: Iterable[tuple[bytes, int]], last: int, latest: int) -> bool:
    """Return True if the tails of WALs (data, offset), in order, have exactly the writes (last, latest].

    Otherwise a write is missing: it is in a table already, or in a WAL that was removed before this call.
    """
    expected = last + 1
    for data, offset in tails:
        headers = batches(data, offset)
        if headers is None:
            return False
        for first_number, count in headers:
            if first_number != expected:
                return False
            expected += count
    return expected == latest + 1
