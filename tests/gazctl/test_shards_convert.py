"""``gazctl shards recover --convert``: databases of directories that the original has recovered."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.sqlite.redo_format import (
    PageChange,
    encode_commit,
    encode_header,
    redo_name,
)
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import MemoryLog, take_over
from tests.gazctl.runner import Result, offline
from tests.recoverylog.original_player import play

SHARD: Any = None
SCHEMA = """
CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY, n INTEGER);
CREATE TABLE IF NOT EXISTS archive.word (w TEXT PRIMARY KEY, n INTEGER);
"""


@pytest.fixture
def recovered(tmp_path: Path) -> Path:
    """Return what the original's player makes of a store with two databases."""
    log = MemoryLog()
    recorder = take_over(log, tmp_path / "owner", random.Random(1))
    store = SQLiteStore(recorder, SCHEMA, databases=["archive"], page_size=1024)
    for number in range(30):
        for table in ("word", "archive.word"):
            rows = [(f"{table} {number} {at}", at) for at in range(20)]
            store.executemany(f"INSERT INTO {table} VALUES (?, ?)", rows)
        store.start_commit(SHARD, Checkpoint(), ()).result()
    store.destroy()
    play(bytes(log.data), tmp_path / "recovered")
    return tmp_path / "recovered"


def convert(directory: Path, *more: str) -> Result:
    return offline("shards", "recover", "--convert", str(directory), *more)


def rows_of(path: Path) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return connection.execute("SELECT count(*), sum(n), min(w) FROM word").fetchall()
    finally:
        connection.close()


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_databases_are_made_beside_what_was_recovered(recovered: Path) -> None:
    before = files(recovered)
    result = convert(recovered)
    assert result.code == 0, result
    after = files(recovered)
    assert set(after) - set(before) == {"primary.db", "archive.db"}
    assert {name: after[name] for name in before} == before
    assert rows_of(recovered / "primary.db") == [(600, 5700, "word 0 0")]
    assert rows_of(recovered / "archive.db") == [(600, 5700, "archive.word 0 0")]
    for name in ("primary.db", "archive.db"):
        assert f"{recovered / name} is a SQLite database" in result.err

    # Nothing is replaced, also if only one of them is there.
    (recovered / "archive.db").unlink()
    (recovered / "primary.db").write_bytes(b"precious")
    before = files(recovered)
    result = convert(recovered)
    assert result.code == 2
    assert f"{recovered / 'primary.db'} exists and is not replaced" in result.err
    assert files(recovered) == before


def test_what_an_interrupted_conversion_left_is_no_obstacle(recovered: Path) -> None:
    (recovered / ".gazctl-convert").mkdir()
    (recovered / ".gazctl-convert" / "primary.db").write_bytes(b"half of it")
    assert convert(recovered).code == 0
    assert not (recovered / ".gazctl-convert").exists()


def test_files_that_are_missing_or_damaged_are_named(recovered: Path) -> None:
    before = files(recovered)
    path = max(recovered.glob("archive.db.redo-*"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    result = convert(recovered)
    assert result.code == 1
    assert "redo frame fails its checksum" in result.err
    assert path.name in result.err
    assert set(files(recovered)) == set(before)
    for path in recovered.glob("archive.db.*"):
        path.unlink()
    (recovered / redo_name("primary.db", 3)).write_bytes(encode_header(1024, 3, 0))
    result = convert(recovered)
    assert result.code == 1
    expected = f"{redo_name('primary.db', 2)} is missing: the next redo file is {redo_name('primary.db', 3)}"
    assert expected in result.err
    assert not (recovered / "primary.db").exists()


def test_what_sqlite_cannot_check_is_reported(tmp_path: Path) -> None:
    """Collations and functions are the application's: the database is made all the same."""

    def prepare(connection: Any) -> None:
        connection.create_collation("length", lambda a, b: len(a) - len(b))

    schema = "CREATE TABLE IF NOT EXISTS word (w TEXT COLLATE length PRIMARY KEY)"
    log = MemoryLog()
    recorder = take_over(log, tmp_path / "owner", random.Random(1))
    store = SQLiteStore(recorder, schema, prepare_connection=prepare)
    store.execute("INSERT INTO word VALUES ('one')")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    store.destroy()
    play(bytes(log.data), tmp_path / "recovered")
    result = convert(tmp_path / "recovered")
    assert result.code == 0, result
    assert "could not be checked (no such collation sequence: length" in result.err
    connection = sqlite3.connect(tmp_path / "recovered" / "primary.db")
    assert connection.execute("SELECT w FROM word").fetchall() == [("one",)]
    connection.close()


def test_a_database_that_is_none_is_not_left(tmp_path: Path) -> None:
    """Frames that are whole, and make no database."""
    page = PageChange(1, ((0, b"SQLite format 3\0" + b"\1" * 1008),), whole=True)
    data = encode_header(1024, 1, 0) + encode_commit(1, [page])
    directory = tmp_path / "bad"
    directory.mkdir()
    (directory / redo_name("primary.db", 1)).write_bytes(data)
    result = convert(directory)
    assert result.code == 1
    assert "the database primary.db is damaged" in result.err
    assert list(files(directory)) == [redo_name("primary.db", 1)]


def test_what_is_not_to_be_converted_is_reported(tmp_path: Path) -> None:
    result = convert(tmp_path / "none")
    assert result.code == 2
    assert "--convert: cannot read" in result.err
    directory = tmp_path / "plain"
    directory.mkdir()
    connection = sqlite3.connect(directory / "primary.db")
    connection.execute("CREATE TABLE word (w, n)")
    connection.close()
    result = convert(directory)
    assert result.code == 2
    assert "holds no images and redo files of a SQLite database" in result.err
    for words in (["--id", "shard"], ["--dir", "x"], ["--at", "1"], ["--force"], ["--backup", "1"]):
        result = convert(directory, *words)
        assert result.code == 2
        assert f"{words[0]}: does not go with --convert" in result.err
