"""Locks by which other copies of SQLite in this process see that a database is open.

POSIX locks belong to a process, and locks of one process do not conflict. Python's module ``sqlite3`` has its
own copy of SQLite. That copy sees no lock of the store's copy, and assumes that the database is closed. When
it opens the database, it makes the index of the WAL again. When it closes the database, it moves the WAL into
the database file, deletes the WAL, and drops the store's locks. Then another process may do the same.

Locks of an open file description conflict with locks of any copy, and no other close drops them. The store
holds such locks on two bytes, shared, as a reader in another process would. So other copies do no harm, where
the system and the file system have such locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
from typing import Final

_SHARED_BYTE: Final = 0x4000_0002
"""First byte of the range of a database that readers lock shared, and the last connection exclusively."""
_INDEX_BYTE: Final = 128
"""Byte of a WAL's index that each process locks while it uses the index."""
_FLOCK: Final = struct.Struct("hhqqi4x")
_OFD_SETLK: Final = getattr(fcntl, "F_OFD_SETLK", 37)
"""Linux's number. Pythons that were built with old headers, such as those of ``uv``, lack the name."""
_IS_KNOWN: Final = sys.platform == "linux" and sys.maxsize > 1 << 32
"""True if the structure of a lock is known here. Without locks, the next commit detects the damage."""


class OpenLocks:
    """Locks on one database in WAL mode and on its index. Release them before the connection is closed."""

    def __init__(self, database_fd: int, index_fd: int) -> None:
        """Take the locks, where they exist, once the store's connection has read the database."""
        self._places = ((database_fd, _SHARED_BYTE), (index_fd, _INDEX_BYTE))
        self._set(fcntl.F_RDLCK)

    def release(self) -> None:
        self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> None:
        if not _IS_KNOWN:
            return
        for descriptor, byte in self._places:
            lock = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
            # A file system may lack such locks.
            with contextlib.suppress(OSError):
                fcntl.fcntl(descriptor, _OFD_SETLK, lock)
