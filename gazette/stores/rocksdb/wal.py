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
    at, length = 0, len(data)
    while at < length:
        room = BLOCK - (offset + at) % BLOCK
        if room < HEADER:
            at += room
            continue
        if at + HEADER > length:
            yield None
            return
        _, size, kind = _FRAGMENT.unpack_from(data, at)
        begin = at + HEADER
        at = begin + size
        if HEADER + size > room:
            yield _INVALID, begin, begin
            return
        if at > length:
            yield None
            return
        yield kind, begin, at


def batches(data: bytes, offset: int) -> list[tuple[int, int]] | None:
    """Return (first sequence number, count) of each batch in ``data``, at ``offset`` of a WAL.

    Return None unless ``data`` has only whole records.
    """
    found: list[tuple[int, int]] = []
    head: bytearray | None = None
    for fragment in _fragments(data, offset):
        if fragment is None:
            return None
        kind, begin, end = fragment
        if kind in (_FULL, _FIRST) and head is None:
            head = bytearray()
        elif kind not in (_MIDDLE, _LAST) or head is None:
            return None
        if len(head) < BATCH_HEADER:
            head += data[begin : min(end, begin + BATCH_HEADER - len(head))]
        if kind in (_FULL, _LAST):
            if len(head) < BATCH_HEADER:
                return None
            found.append(_BATCH.unpack(head))
            head = None
    return found if head is None else None


def records(data: bytes, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield (record, its end in the file) of each complete record in ``data``, which stands at ``offset``.

    End, as RocksDB does, at a record without its end, or at zeros, which RocksDB has not written yet.
    Manifests have the same form. Raise ``Corrupt`` at anything else: a reader that ended there in
    silence would never get past it, and would show old content as the present one.
    """
    # None between records. A first fragment may be empty: its block had only room for the header.
    record: bytearray | None = None
    for fragment in _fragments(data, offset):
        if fragment is None:
            return
        kind, begin, end = fragment
        if kind == _ZEROS and begin == end and record is None:
            return
        begins = kind in (_FULL, _FIRST)
        if not (begins or kind in (_MIDDLE, _LAST)) or begins != (record is None):
            raise Corrupt(
                "a file of RocksDB holds bytes that are not a record",
                offset=offset + begin - HEADER,
                kind=kind,
            )
        record = bytearray() if record is None else record
        record += data[begin:end]
        if kind in (_FULL, _LAST):
            yield bytes(record), offset + end
            record = None


def continues(tails: Iterable[tuple[bytes, int]], last: int, latest: int) -> bool:
    """Return True if the tails of WALs (data, offset), in order, have exactly the writes (last, latest].

    If not, a write is missing: it is in a table already, or in a WAL that was removed before a commit
    has seen it.
    """
    following = last + 1
    for data, offset in tails:
        found = batches(data, offset)
        if found is None:
            return False
        for first, count in found:
            if first != following:
                return False
            following += count
    return following == latest + 1
