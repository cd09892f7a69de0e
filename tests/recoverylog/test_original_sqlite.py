"""What the original makes of a log of a SQLite store, by its rules for playing one back and plain SQLite."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.shard_state import ShardState
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.vfs_recording import VfsRecording
from gazette.testing.recovery import MemoryLog, replay, take_over
from tests.recoverylog.original_player import play

SHARD: Any = None
SCHEMA = """
CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY, n INTEGER);
CREATE INDEX IF NOT EXISTS word_n ON word (n);
"""


def recorded(log: MemoryLog, directory: Path, mode: Any) -> list[tuple[Any, ...]]:
    """Record two owners' work of every kind. Return the rows that it leaves."""
    rng = random.Random(mode)
    for owner in range(2):
        store = SQLiteStore(take_over(log, directory / f"{mode}-{owner}", rng), SCHEMA, mode=mode)
        for number in range(25):
            words = [(f"w{rng.randrange(500)}", rng.randbytes(50).hex()) for _ in range(40)]
            store.executemany("INSERT OR REPLACE INTO word VALUES (?, ?)", words)
            if number % 7 == 0:
                store.execute("DELETE FROM word WHERE w LIKE 'w1%'")
            sources = {"a/source": SourceCheckpoint(owner * 100 + number)}
            store.start_commit(SHARD, Checkpoint(sources), ()).result()
        rows: list[tuple[Any, ...]] = store.execute("SELECT * FROM word ORDER BY w").fetchall()
        # What is not committed is not in the log.
        store.execute("DELETE FROM word")
        store.destroy()
    return rows


@pytest.mark.parametrize("journal_mode", ["WAL", "DELETE", "TRUNCATE", "PERSIST"])
def test_a_log_of_the_vfs_mode_plays_back_to_a_database(
    journal_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the original's player are opened by plain SQLite, and by nothing of ours."""
    init = VfsRecording.__init__

    def with_journal(self: VfsRecording, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "journal_mode": journal_mode})

    monkeypatch.setattr(VfsRecording, "__init__", with_journal)
    log = MemoryLog()
    rows = recorded(log, tmp_path, "vfs")
    assert len(rows) > 100
    play(bytes(log.data), tmp_path / "original")
    replay(bytes(log.data), tmp_path / "ours")
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir()}
        for one in ("ours", "original")
    )
    assert theirs == ours
    connection = sqlite3.connect(tmp_path / "original" / "primary.db")
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT * FROM word ORDER BY w").fetchall() == rows
        (data,) = connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchone()
    finally:
        connection.close()
    assert Checkpoint.from_bytes(data).sources["a/source"].read_through == 124


def test_a_log_of_the_redo_mode_plays_back_to_images_and_redo(tmp_path: Path) -> None:
    """There is no database: `gazctl shards recover --convert` makes one."""
    log = MemoryLog()
    rows = recorded(log, tmp_path, "redo")
    directory = tmp_path / "original"
    play(bytes(log.data), directory)
    names = {path.name for path in directory.iterdir()}
    assert "primary.db" not in names
    assert "pageDB" in names
    names.discard("pageDB")
    assert all(name.startswith(("primary.db.image-", "primary.db.redo-")) for name in names)
    with ShardState(directory) as state:
        assert state.query("SELECT * FROM word ORDER BY w") == rows
