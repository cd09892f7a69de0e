"""What SQLite says of a WAL: where it ends, and whether SQLite sees all that a recovered one holds.

After a crash SQLite reads a WAL up to the first frame whose checksum is wrong, and takes what follows for
the rest of a transaction that was not finished. Of a WAL that was damaged since it was played back, that
drops commits without a word: the shard would go on from an older state than its log has.

It can be told apart. A log holds whole commits, and each generation of a WAL in a file of its own, so that
what may follow the last commit are frames of transactions that were rolled back, none of which ends one.
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
"""Magic, version, page size, number of the checkpoint, two salts, two sums."""
FRAME_HEADER_BYTES: Final = 24
_MAGIC: Final = 0x377F0682
"""Its last bit says that sums are of big-endian words."""
_FRAME: Final = struct.Struct(">4I")
"""Page, pages of the database after the commit that ends here (or 0), two salts."""
_INDEX: Final = struct.Struct("=III4xII8x8s8x")
"""Version, unused, transactions, frames, pages, salts: the index that SQLite makes of a WAL, in native byte
order. It stands there twice, so that a reader can tell a header that is being written."""
_INDEX_VERSION: Final = 3_007_000
_BACKFILLED: Final = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class WalPosition:
    """Where SQLite itself takes a WAL to end."""

    commits: int
    """Transactions that were ever committed to it, modulo 2**32. No checkpoint changes that."""
    frames: int
    """How many are valid since the WAL began anew."""
    backfilled: int
    """How many of them checkpoints have moved into the database."""
    salt: bytes
    """Of this generation of the WAL, as in the headers of its frames."""


class WalIndex:
    """The index of a WAL, read beside the connection that writes it."""

    def __init__(self, database: Path) -> None:
        """Open it once a connection has read ``database``, and close it after that connection.

        POSIX drops SQLite's locks when any descriptor of the file is closed. Raises ``OSError``.
        """
        self._path = database.with_name(database.name + "-shm")
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> WalPosition:
        """Return where the WAL ends. Call it while no statement runs. Raises ``Broken``."""
        data = os.pread(self._fd, 2 * _INDEX.size + _BACKFILLED.size, 0)
        header = data[: _INDEX.size]
        if len(data) < 2 * _INDEX.size + _BACKFILLED.size or header != data[_INDEX.size : -4]:
            raise Broken(
                "the index of a WAL is not whole",
                path=str(self._path),
                hint="Something else changes the files of this shard. Give it a directory of its own.",
            )
        version, _, commits, frames, _, salt = _INDEX.unpack(header)
        if version != _INDEX_VERSION:
            raise Broken(
                "SQLite writes an index of the WAL in a form that is not known",
                version=version,
                hint="Use the version of apsw that this release of Gazette names.",
            )
        return WalPosition(commits, frames, _BACKFILLED.unpack_from(data, len(data) - 4)[0], salt)

    def close(self) -> None:
        os.close(self._fd)


def require_whole_wal(connection: apsw.Connection, path: Path, schema: str = "main") -> None:
    """Require that ``connection``, which has just opened the recovered database at ``path`` as ``schema``
    and has not written to it, takes every commit of its WAL, if there is one. Reads the headers of frames
    that it does not take.

    Raises ``Corrupt``, and errors of SQLite.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        return
    # Makes the index, which is removed with the last connection.
    connection.execute(f'PRAGMA "{schema}".schema_version').fetchall()
    if not wal.exists():
        return  # Of a database that is empty, or does not use one any more: SQLite removes it.
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
    size = os.fstat(fd).st_size
    if not size:
        return
    head = os.pread(fd, HEADER.size, 0)
    if not _is_header(head):
        raise _damaged(wal, "its header is not one")
    page_size, salts = HEADER.unpack(head)[2], HEADER.unpack(head)[4:6]
    stride = FRAME_HEADER_BYTES + page_size
    for number in range(valid, (size - HEADER.size) // stride):
        frame = os.pread(fd, _FRAME.size, HEADER.size + number * stride)
        _, ends_with, *frame_salts = _FRAME.unpack(frame)
        if ends_with and tuple(frame_salts) == salts:
            raise _damaged(wal, f"frame {number} ends a commit, of {valid} that are valid")


def _is_header(head: bytes) -> bool:
    if len(head) < HEADER.size:
        return False
    magic, *_, sum0, sum1 = HEADER.unpack(head)
    if magic & ~1 != _MAGIC:
        return False
    a = b = 0
    words = struct.unpack(f"{'>' if magic & 1 else '<'}6I", head[:24])
    for x, y in zip(words[::2], words[1::2], strict=True):
        a = (a + x + b) & 0xFFFFFFFF
        b = (b + y + a) & 0xFFFFFFFF
    return (a, b) == (sum0, sum1)


def _damaged(wal: Path, what: str) -> Corrupt:
    return Corrupt(
        f"a recovered WAL is damaged: {what}",
        path=str(wal),
        hint="The disk or something on this machine changed it since it was played back; the recovery log"
        " is not concerned. Check the disk. `gazctl shards unassign --failed` recovers the shard anew.",
    )
