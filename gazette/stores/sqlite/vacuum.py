"""The cost of VACUUM, computed before it begins: `require_small` (ADR 31)."""

from __future__ import annotations

from typing import Final

import apsw

from gazette.errors import TooLarge

VACUUM_BYTES_MAX: Final = 512 << 20
"""Default of the largest database, in bytes, that `SQLiteStore.vacuum` makes."""


def require_small(connection: apsw.Connection, database: str, limit_bytes: int) -> None:
    """Raise ``TooLarge``, with the cost, if VACUUM would make a database of more than ``limit_bytes``."""
    size = _size_after(connection, database)
    if size <= limit_bytes:
        return
    raise TooLarge(
        f"VACUUM would make a database of {size:,} bytes, and the limit is {limit_bytes:,}. It takes so much"
        " memory, and its commit twice so much, until one append of that size is made",
        path="limit_bytes",
        hint="SQLite uses free pages again, so that few databases need VACUUM. If the process has the memory,"
        " give vacuum() a greater limit_bytes. A backfill makes a new state within bounds.",
        database=database,
        bytes=size,
        memory_bytes=2 * size,
        limit_bytes=limit_bytes,
    )


def _size_after(connection: apsw.Connection, database: str) -> int:
    """Return about the size of the database after a VACUUM: the bytes of all pages in use."""

    def pragma(name: str) -> int:
        ((value,),) = connection.execute(f'PRAGMA "{database}".{name}').fetchall()
        assert isinstance(value, int)
        return value

    return (pragma("page_count") - pragma("freelist_count")) * pragma("page_size")
