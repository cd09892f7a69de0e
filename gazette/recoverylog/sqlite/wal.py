"""State of a WAL according to SQLite: its end, and a check that SQLite accepts a whole recovered WAL.

After a crash, SQLite reads a WAL up to the first frame with a wrong checksum. It drops the later frames as an
unfinished transaction. If a WAL was damaged after play-back, SQLite drops commits in silence. The shard would
continue from an older state than its log has.

The two cases differ. A log has whole commits, and each generation of a WAL has its own file. So after the
last commit, only frames of rolled-back transactions may follow, none of which ends a transaction.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import apsw

from gazette.errors import Broken, Corrupt

HEADER: Final = struct.Struct(">8I")
"""Fields: magic, version, page size, number of the checkpoint, two salts, two sums."""
FRAME_HEADER_BYTES: Final = 24
_MAGIC: Final = 0x377F0682
"""Magic number. Its last bit marks sums over big-endian words."""
_FRAME: Final = struct.Struct(">4I")
"""Fields: page, pages of the database after the commit that ends here (or 0), two salts."""
_INDEX: Final = struct.Struct("=III4xII8x8s8x")
"""Fields of SQLite's index of a WAL: version, unused, transactions, frames, pages, salts.

The byte order is native. The fields stand there twice, so that a reader detects a write in progress.
"""
_INDEX_VERSION: Final = 3_007_000
_BACKFILLED: Final = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class WalPosition:
    """End of a WAL according to SQLite."""

    commits: int
    """Number of all transactions committed to the WAL, modulo 2**32. Checkpoints do not change it."""
    frames: int
    """Number of valid frames of this generation of the WAL."""
    backfilled: int
    """Number of these frames that checkpoints have moved into the database."""
    salt: bytes
    """Salt of this generation of the WAL, as in the headers of its frames."""


class WalIndex:
    """Index of a WAL, read beside the connection that writes it."""

    def __init__(self, database: Path) -> None:
        """Open the index. Raise ``OSError`` unless a connection has read ``database`` before.

        Close it after that connection: POSIX drops SQLite's locks when any descriptor of the file is closed.
        """
        self._path = database.with_name(database.name + "-shm")
        self.fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> WalPosition:
        """Return the end of the WAL. Call this while no statement runs.

        Raise ``Broken`` if another program or copy of SQLite has used the database.
        """
        if not os.fstat(self.fd).st_nlink:
            raise used_elsewhere(self._path, "it deleted the WAL and its index")
        data = os.pread(self.fd, 2 * _INDEX.size + _BACKFILLED.size, 0)
        header = data[: _INDEX.size]
        if len(data) < 2 * _INDEX.size + _BACKFILLED.size or header != data[_INDEX.size : -4]:
            raise Broken(
                "the index of a WAL is inconsistent",
                path=str(self._path),
                hint="Another program changes the files of this shard. Give it a directory of its own.",
            )
        version, _, commits, frames, _, salt = _INDEX.unpack(header)
        if version != _INDEX_VERSION:
            raise Broken(
                "SQLite writes the index of the WAL in an unknown form",
                version=version,
                hint="Use the version of apsw that this release of Gazette requires.",
            )
        return WalPosition(commits, frames, _BACKFILLED.unpack_from(data, len(data) - 4)[0], salt)

    def close(self) -> None:
        os.close(self.fd)


def used_elsewhere(path: Path, what: str) -> Broken:
    """Return the error of a store whose database another copy of SQLite has used. ``what``: what it did."""
    return Broken(
        f"another copy of SQLite has used the shard's database: {what}",
        path=str(path),
        hint="Python's module sqlite3, and what builds on it, has a copy of SQLite of its own, which does not"
        " see the locks of the shard's. Read by store.query() or by a query of the shard. Code in the shard's"
        " process may open apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY). No other program may write"
        " these files. The recovery log is whole, and the shard recovers from it.",
    )


def require_whole_wal(connection: apsw.Connection, path: Path, schema: str = "main") -> None:
    """Check that ``connection`` accepts every commit in the WAL of the recovered database at ``path``.

    The connection has just opened the database as ``schema``, and has not written to it. Read the
    headers of frames that it does not accept. Raise ``Corrupt`` if one of them ends a commit.
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
    try:
        with index.open("rb") as file:
            data = file.read(_INDEX.size)
    except FileNotFoundError:
        return 0
    return int(_INDEX.unpack(data)[3]) if len(data) == _INDEX.size else 0


def _require_whole(fd: int, wal: Path, valid: int) -> None:
    """Raise ``Corrupt`` if a frame behind the first ``valid`` ones ends a commit: SQLite would drop it."""
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
