"""Check that SQLite accepts the whole WAL of a recovered database.

After a crash, SQLite reads a WAL up to the first frame with a wrong checksum. It drops the later frames as an
unfinished transaction. If a WAL was damaged after play-back, SQLite drops commits in silence. The shard would
continue from an older state than its log has. A damaged WAL and an unfinished transaction differ. A log has
whole commits, and each generation of a WAL has its own file. So after the last commit, only frames of
rolled-back transactions may follow, and no such frame ends a transaction.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

import apsw

from gazette.errors import Corrupt

HEADER: Final = struct.Struct(">8I")
"""Fields: magic, version, page size, number of the checkpoint, two salts, two sums."""
FRAME_HEADER_BYTES: Final = 24
_MAGIC: Final = 0x377F0682
"""Magic number. Its last bit marks sums over big-endian words."""
_FRAME: Final = struct.Struct(">4I")
"""Fields: page, pages of the database after the commit that ends here (or 0), two salts."""
INDEX: Final = struct.Struct("=III4xII8x8s8x")
"""Fields of SQLite's index of a WAL: version, unused, transactions, frames, pages, salts.

The byte order is native. The fields stand there twice, so that a reader detects a write in progress.
"""


def require_whole_wal(connection: apsw.Connection, path: Path, schema: str = "main") -> None:
    """Check that ``connection`` accepts every commit in the WAL of the recovered database at ``path``.

    The connection has just opened the database as ``schema``, and has not written to it. Read the headers of
    frames that SQLite does not accept. Raise ``Corrupt`` if such a frame ends a commit, and for an invalid
    header.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        return
    # This statement makes the index. SQLite removes the index with the last connection.
    connection.execute(f'PRAGMA "{schema}".schema_version').fetchall()
    if not wal.exists():
        return  # The database is empty or uses no WAL any more: SQLite has removed it.
    fd = os.open(wal, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _require_whole(fd, wal, _valid_frames(path.with_name(path.name + "-shm")))
    finally:
        os.close(fd)


def _valid_frames(index: Path) -> int:
    """Return the number of frames that SQLite accepts, by its index of the WAL; 0 without an index."""
    try:
        with index.open("rb") as file:
            data = file.read(INDEX.size)
    except FileNotFoundError:
        return 0
    return int(INDEX.unpack(data)[3]) if len(data) == INDEX.size else 0


def _require_whole(fd: int, wal: Path, valid: int) -> None:
    """Raise ``Corrupt`` if a frame after the first ``valid`` ones ends a commit: SQLite would drop it."""
    size = os.fstat(fd).st_size
    if not size:
        return
    head = os.pread(fd, HEADER.size, 0)
    if not _is_header(head):
        raise _damaged(wal, "its header is invalid")
    page_size, salts = HEADER.unpack(head)[2], HEADER.unpack(head)[4:6]
    stride = FRAME_HEADER_BYTES + page_size
    for number in range(valid, (size - HEADER.size) // stride):
        frame = os.pread(fd, _FRAME.size, HEADER.size + number * stride)
        _, ends_with, *frame_salts = _FRAME.unpack(frame)
        if ends_with and tuple(frame_salts) == salts:  # Other salts: of a former generation.
            raise _damaged(wal, f"frame {number} ends a commit, but only {valid} frames are valid")


def _is_header(head: bytes) -> bool:
    """Return True if the first bytes of a WAL are a header whose two sums are right."""
    if len(head) < HEADER.size:
        return False
    magic, *_, sum0, sum1 = HEADER.unpack(head)
    if magic & ~1 != _MAGIC:
        return False
    sum_a = sum_b = 0
    words = struct.unpack(f"{'>' if magic & 1 else '<'}6I", head[:24])
    for even_word, odd_word in zip(words[::2], words[1::2], strict=True):
        sum_a = (sum_a + even_word + sum_b) & 0xFFFFFFFF
        sum_b = (sum_b + odd_word + sum_a) & 0xFFFFFFFF
    return (sum_a, sum_b) == (sum0, sum1)


def _damaged(wal: Path, what: str) -> Corrupt:
    return Corrupt(
        f"a recovered WAL is damaged: {what}",
        path=str(wal),
        hint="The disk or a program on this machine changed the WAL since it was played back. The recovery"
        " log is intact. Check the disk. `gazctl shards unassign --failed` recovers the shard again.",
    )
