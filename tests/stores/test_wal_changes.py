"""How long a WAL may become while others read the database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw

from gazette.stores.sqlite.wal_changes import CHECKPOINT_OVERDUE, CHECKPOINT_WAIT_MS, WalChanges

DUE_FRAMES = 20


class Waits:
    """A connection whose waits for readers are noted."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self.longest_ms = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def wal_checkpoint(self, *words: Any) -> Any:
        self.longest_ms = max(self.longest_ms, self._connection.execute("PRAGMA busy_timeout").get)
        return self._connection.wal_checkpoint(*words)


def test_a_build_waits_for_readers_once_the_wal_is_much_too_long(tmp_path: Path) -> None:
    """As a shard does. Before that, a checkpoint that readers hold up is left for a later commit."""
    path = tmp_path / "primary.db"
    wal = WalChanges(path, "main", DUE_FRAMES)
    wal.open_file(4096)
    connection = Waits(apsw.Connection(str(path)))
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.wal_autocheckpoint(0)
    connection.execute("CREATE TABLE t (v)")
    wal.follow(connection)  # type: ignore[arg-type]
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM t").fetchall()
    frames = 0
    while connection.longest_ms < CHECKPOINT_WAIT_MS:
        connection.execute("INSERT INTO t VALUES (randomblob(4000))")
        assert wal.shorten()
        frames = path.with_name("primary.db-wal").stat().st_size // 4096
        assert frames < 2 * CHECKPOINT_OVERDUE * DUE_FRAMES
    assert frames >= CHECKPOINT_OVERDUE * DUE_FRAMES
    reader.close()
    connection.execute("INSERT INTO t VALUES (0)")
    assert wal.shorten()
    assert not path.with_name("primary.db-wal").stat().st_size
    wal.release()
    connection.close()
    wal.close()
