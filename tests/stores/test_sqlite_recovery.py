"""A recorded SQLite database opens, is whole, and is what was committed, wherever its log is cut."""

from __future__ import annotations

import bisect
import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette.errors import Corrupt
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.sqlite.redo import is_recorded, materialize
from gazette.stores.sqlite.redo_recording import RedoRecording
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.vfs_recording import VfsRecording
from gazette.testing.recovery import LOG, MemoryLog, Replayer, pruned, replay, take_over

SCHEMA = """
CREATE TABLE IF NOT EXISTS kv (k INTEGER PRIMARY KEY, v BLOB);
CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS word_n ON word (n);
"""
SHARD: Any = None  # Stores take nothing of their shard.


@dataclass
class Recorded:
    """A log, and by transaction the offset at which its commit ends and the content it left."""

    log: MemoryLog = field(default_factory=MemoryLog)
    ends: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)


def content_of(connection: apsw.Connection) -> str:
    digest = hashlib.sha256()
    tables = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name"
    ).fetchall()
    for name, sql in tables:
        if name == "gazette_checkpoint":
            continue
        digest.update(f"{name}{sql}".encode())
        for row in connection.execute(f"SELECT * FROM {name} ORDER BY 1"):
            for value in row:
                digest.update(value if isinstance(value, bytes) else repr(value).encode())
                digest.update(b";")
    return digest.hexdigest()


def small_recordings(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Set thresholds so low that a short run goes through checkpoints, rotation, images and rebases."""
    init = RedoRecording.__init__

    def redo(self: RedoRecording, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        kwargs.update(checkpoint_frames=60, group_pages=16, horizon_slack=96 << 10)
        init(self, recorder, *args, **kwargs)

    monkeypatch.setattr(RedoRecording, "__init__", redo)
    vfs_init = VfsRecording.__init__
    journal_mode = mode.partition("-")[2].upper() or "WAL"

    def vfs(self: VfsRecording, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        kwargs.update(horizon_slack=256 << 10, journal_mode=journal_mode)
        vfs_init(self, recorder, *args, **kwargs)

    monkeypatch.setattr(VfsRecording, "__init__", vfs)


def new_recorder(log: MemoryLog, directory: Path) -> Recorder:
    directory.mkdir(parents=True)
    fsm = RecoveryFSM(FSMHints(log=LOG))
    return Recorder(fsm, 1234, directory, log, LOG, 0)


def open_store(recorder: Recorder, mode: str) -> SQLiteStore:
    family: Any = mode.partition("-")[0]
    return SQLiteStore(recorder, SCHEMA, mode=family, cache_bytes=64 << 10)


def transaction(store: SQLiteStore, rng: random.Random) -> None:
    """Do random work of every kind that a transaction may do, roll-backs and spills among it."""
    match rng.randrange(12):
        case 0:
            rows = [
                (rng.randrange(400), rng.randbytes(rng.choice((20, 300, 9000)))) for _ in range(30)
            ]
            store.executemany("INSERT OR REPLACE INTO kv VALUES (?, ?)", rows)
        case 1:
            store.execute("DELETE FROM kv WHERE k % 7 = ?", (rng.randrange(7),))
        case 2:
            store.execute("SAVEPOINT s")
            store.executemany(
                "INSERT OR REPLACE INTO kv VALUES (?, ?)",
                [(k, rng.randbytes(4000)) for k in range(60)],
            )
            store.execute("ROLLBACK TO s")
            store.execute("RELEASE s")
        case 3:
            store.execute(f"CREATE TABLE IF NOT EXISTS t{rng.randrange(3)} (a, b)").fetchall()
        case 4:
            store.execute(f"DROP TABLE IF EXISTS t{rng.randrange(3)}").fetchall()
        case _:
            store.executemany(
                "INSERT INTO word VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1",
                [(f"w{rng.randrange(3000)}",) for _ in range(rng.choice((1, 1, 5, 40)))],
            )


def run(recorded: Recorded, store: SQLiteStore, rng: random.Random, count: int) -> None:
    begin = len(recorded.content)
    for index in range(begin, begin + count):
        transaction(store, rng)
        if rng.randrange(40) == 0:
            store._commit()
            store.vacuum()
        checkpoint = Checkpoint(sources={"source": SourceCheckpoint(index + 1)})
        # What follows the commit's own append (an image, a rotation) is not part of it.
        recorded.ends.append(store.start_commit(SHARD, checkpoint, ()).result().commit.end)
        recorded.content.append(content_of(store.connection))


def record(mode: str, directory: Path, rng: random.Random, count: int) -> Recorded:
    recorded = Recorded()
    recorder = new_recorder(recorded.log, directory / "first")
    store = open_store(recorder, mode)
    run(recorded, store, rng, count)
    store.destroy()
    return recorded


def reopen(directory: Path) -> tuple[int, str]:
    """Return (transactions, content) of a played-back directory, as stock SQLite finds it."""
    if is_recorded(directory, "primary.db"):
        materialize(directory, "primary.db")
    connection = apsw.Connection(str(directory / "primary.db"))
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        row = connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchall()
        transactions = 0
        if row:
            stored = row[0][0]
            assert isinstance(stored, bytes)
            checkpoint = Checkpoint.from_bytes(stored)
            transactions = checkpoint.sources["source"].read_through
        return transactions, content_of(connection)
    finally:
        connection.close()


def check_cuts(recorded: Recorded, cuts: Iterable[int], directory: Path, *, exact: bool) -> int:
    """Check that what is left of the log is some committed transaction, and no older one than it must be.

    Return how many cuts were looked at, each as the play-back of the log up to it.
    """
    data = bytes(recorded.log.data)
    replayer = Replayer(directory / "staged")
    checked = 0
    for cut in sorted(cuts):
        replayer.advance(data, cut)
        checked += 1
        durable = bisect.bisect_right(recorded.ends, cut)
        if not any("primary.db" in path for path in replayer.fsm.links):
            assert durable == 0
            continue
        if durable == 0 and not exact:
            continue  # Cut within the very first append: nothing was promised.
        replayer.copy_live(directory / "cut")
        try:
            transactions, content = reopen(directory / "cut")
        except Corrupt:
            if exact or cut in recorded.log.ends:
                raise
            continue  # Within an append: refused, and not taken for an older commit.
        assert transactions == durable if exact else durable <= transactions <= durable + 1
        if transactions:
            assert content == recorded.content[transactions - 1]
    replayer.abandon()
    return checked


MODES = ("redo", "vfs-wal", "vfs-delete", "vfs-truncate")
CUTS = int(os.environ.get("GAZETTE_CUTS", "40"))
"""How many cuts a test looks at. The long form of these tests has a thousand."""


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory in memory, if the machine has one: what is tested does not depend on the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="gazette-test-", dir=memory) as directory:
        yield Path(directory)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(3600)
def test_a_cut_at_an_append_is_that_commit(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every append ends at a state that opens, and is the last commit that the log has whole."""
    small_recordings(monkeypatch, mode)
    rng = random.Random(f"barriers {mode}")
    recorded = record(mode, scratch, rng, max(160, CUTS))
    ends = [end for end in recorded.log.ends if end >= recorded.ends[0]]
    cuts = rng.sample(ends, CUTS)
    assert check_cuts(recorded, cuts, scratch, exact=True) == CUTS


@pytest.mark.parametrize("mode", ["redo"])
@pytest.mark.timeout(3600)
def test_a_cut_at_any_byte_is_a_commit_or_refused(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends are atomic, so a log is never cut within one; should it be, that is no older state."""
    small_recordings(monkeypatch, mode)
    rng = random.Random("bytes")
    recorded = record(mode, scratch, rng, max(160, CUTS))
    size = len(recorded.log.data)
    cuts = [rng.randrange(recorded.ends[0], size + 1) for _ in range(CUTS // 2)]
    cuts += rng.sample(
        [end for end in recorded.log.ends if end >= recorded.ends[0]], CUTS - len(cuts)
    )
    assert check_cuts(recorded, cuts, scratch, exact=False) == CUTS


@pytest.mark.parametrize("mode", MODES)
def test_a_log_of_hardly_anything(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new store's very first appends: an owner that recovers from one of them goes on as usual."""
    small_recordings(monkeypatch, mode)
    rng = random.Random("first appends")
    recorded = record(mode, scratch, rng, 2)
    for number, end in enumerate(recorded.log.ends):
        log = MemoryLog(bytes(recorded.log.data[:end]))
        durable = bisect.bisect_right(recorded.ends, end)
        follower = Recorded(log, recorded.ends[:durable], recorded.content[:durable])
        store = open_store(take_over(log, scratch / f"n{number}", rng), mode)
        run(follower, store, rng, 3)
        store.destroy()
        check_cuts(follower, [len(log.data)], scratch, exact=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(3600)
def test_generations_of_owners_go_on_where_the_last_was_cut(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain of fail-overs, each from a cut of its predecessor's log, loses no durable commit."""
    small_recordings(monkeypatch, mode)
    for seed in range(max(2, CUTS // 100)):
        rng = random.Random(f"chain {mode} {seed}")
        base = scratch / str(seed)
        recorded = record(mode, base, rng, 20)
        for generation in range(6):
            cut = rng.choice([end for end in recorded.log.ends if end >= recorded.ends[0]])
            durable = bisect.bisect_right(recorded.ends, cut)
            del recorded.ends[durable:], recorded.content[durable:]
            recorded.log = MemoryLog(bytes(recorded.log.data[:cut]))
            recorder = take_over(recorded.log, base / f"g{generation}", rng)
            store = open_store(recorder, mode)
            checkpoint = store.restore_checkpoint(SHARD)
            assert checkpoint.sources["source"].read_through == durable
            assert content_of(store.connection) == recorded.content[-1]
            run(recorded, store, rng, 20)
            store.destroy()
        check_cuts(recorded, [len(recorded.log.data)], base, exact=True)
        shutil.rmtree(base)


@pytest.mark.parametrize("mode", MODES)
def test_the_horizon_is_bounded(mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is written, a recovery from fresh hints reads little more than the live state."""
    small_recordings(monkeypatch, mode)
    rng = random.Random("horizon")
    log = MemoryLog()
    recorder = new_recorder(log, scratch / "first")
    store = open_store(recorder, mode)
    for index in range(900 if mode == "redo" else 300):
        transaction(store, rng)
        checkpoint = Checkpoint(sources={"source": SourceCheckpoint(index)})
        store.start_commit(SHARD, checkpoint, ()).result()
        assert recorder.horizon_bytes <= 2 * store.live_bytes + (1 << 20)
    hints = recorder.build_hints()
    assert len(log.data) > 8 * recorder.horizon_bytes, "the test wrote too little to show anything"
    content = content_of(store.connection)
    store.destroy()

    # What the hints do not need may be pruned: nothing before the horizon is read again.
    replay(pruned(log.data, hints), scratch / "pruned", hints=hints)
    assert reopen(scratch / "pruned")[1] == content


def test_small_transactions_log_little_more_than_they_change(tmp_path: Path) -> None:
    """At most three bytes of log for each byte of a small transaction's rows and checkpoint."""
    log = MemoryLog()
    store = SQLiteStore(new_recorder(log, tmp_path / "first"), SCHEMA)
    rng = random.Random("amplification")
    rows = [(k, rng.randbytes(100)) for k in range(20_000)]
    store.executemany("INSERT INTO kv VALUES (?, ?)", rows)
    store.start_commit(SHARD, Checkpoint(), ()).result()
    before, logical, count = len(log.data), 0, 500
    for index in range(count):
        store.execute(
            "UPDATE kv SET v = ? WHERE k = ?", (rng.randbytes(100), rng.randrange(20_000))
        )
        checkpoint = Checkpoint(sources={"a/source/journal": SourceCheckpoint(index * 1000)})
        logical += 108 + len(checkpoint.to_bytes())
        store.start_commit(SHARD, checkpoint, ()).result()
    amplification = (len(log.data) - before) / logical
    assert amplification <= 3.0
