"""A state that was built away from its shard is what the shard's promotion opens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gazette.consumer.application import Application, Store
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.errors import Corrupt, Invalid, NotAllowed
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.shard import ShardSpec
from gazette.protocol.text import duration
from gazette.recoverylog.log.log_file import Branch, moved_hints
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.rocksdb.keys import CHECKPOINT_KEY
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.state_builder import BuiltState, StateBuilder, pieces
from gazette.testing.recovery import LOG, MemoryLog, take_over
from gazette.testing.store_tests import checkpoint
from tests.facts import raises

SCHEMA = "CREATE TABLE IF NOT EXISTS kv (k BLOB PRIMARY KEY, v BLOB) WITHOUT ROWID"
SPEC = ShardSpec(
    "test",
    recovery_log_prefix="recovery",
    hint_prefix="/hints",
    max_txn_duration_ns=duration.SECOND,
)
ROWS = [(b"key %06d" % number, b"value %d" % number * 5) for number in range(3000)]

Opener = Callable[[Recorder | None], Any]


class App(Application[Any]):
    def __init__(self, opener: Opener) -> None:
        self.opener = opener

    def new_store(self, shard: Any, recorder: Recorder | None) -> Store:
        store: Store = self.opener(recorder)
        return store

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        raise AssertionError


def put(store: Any, rows: list[tuple[bytes, bytes]]) -> None:
    if isinstance(store, SQLiteStore):
        store.executemany("INSERT INTO kv VALUES (?, ?)", rows)
    elif isinstance(store, RocksDBStore):
        for key, value in rows:
            store.put(key, value)
    else:
        store.state.update((key.decode(), value.decode()) for key, value in rows)


def content(store: Any) -> list[tuple[bytes, bytes]]:
    if isinstance(store, SQLiteStore):
        found: Any = store.execute("SELECT k, v FROM kv ORDER BY k").fetchall()
        return list(found)
    if isinstance(store, RocksDBStore):
        return list(store.iterate())
    return sorted((key.encode(), value.encode()) for key, value in store.state.items())


OPENERS: dict[str, Opener] = {
    "sqlite": lambda recorder: SQLiteStore(recorder, SCHEMA),
    "sqlite-vfs": lambda recorder: SQLiteStore(recorder, SCHEMA, mode="vfs"),
    "json": lambda recorder: JSONFileStore(recorder, dict[str, str], dict),
    "rocksdb": lambda recorder: RocksDBStore(recorder),
}


@pytest.fixture(params=list(OPENERS))
def opener(request: pytest.FixtureRequest) -> Opener:
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict")
    return OPENERS[request.param]


def append(
    log: MemoryLog, builder: StateBuilder, built: BuiltState, rng: random.Random
) -> FSMHints:
    """Append a branch as a publication does; its hints."""
    log.enqueue(built.branch.opening(rng, empty=not log.data)).result()
    base = len(log.data)
    data = builder.path.read_bytes()
    begin = 0
    for end in built.ends:
        log.enqueue(data[begin:end]).result()
        begin = end
    assert begin == len(data) == built.size
    return moved_hints(built.hints, base)


@pytest.mark.parametrize("history", ["empty", "old", "cut"])
def test_a_promotion_opens_it_by_its_hints_and_nothing_else_does(
    opener: Opener, history: str, tmp_path: Path
) -> None:
    """By its hints the branch is the state, with the checkpoint; without them it is not there."""
    rng = random.Random(history)
    log = MemoryLog()
    old: list[tuple[bytes, bytes]] = []
    if history != "empty":
        store = opener(take_over(log, tmp_path / "old", rng))
        for number in range(5):
            old.append((b"old %d" % number, b"state"))
            put(store, old[-1:])
            store.start_commit(None, checkpoint(number), ()).result()
        store.destroy()
    with StateBuilder(App(opener), SPEC, tmp_path / "build", rng) as builder:
        assert builder.held.checkpoint == Checkpoint()
        put(builder.store, ROWS[:2000])
        builder.commit()
        put(builder.store, ROWS[2000:])
        built = builder.finish(checkpoint(77), messages=3000)
        hints = append(log, builder, built, rng)
        path = builder.directory
    assert not path.exists(), "the directory was left behind"
    assert BuiltState.from_json(built.to_json()) == built
    if history == "cut":
        # The driver was killed while it appended: what is there ends where one of its appends did.
        cut = [end for end in log.ends if end < len(log.data)][-1]
        del log.data[cut:]

    # Case: an owner that has no hints, or those of before, finds what was there before.
    before = opener(take_over(MemoryLog(bytes(log.data)), tmp_path / "before", rng))
    assert content(before) == old
    assert before.restore_checkpoint(None) == (checkpoint(4) if old else Checkpoint())
    before.destroy()
    if history == "cut":
        return

    # Case: by its hints the state is opened, goes on, and is handed over again.
    for round in range(3):
        recorder = take_over(log, tmp_path / f"owner {round}", rng, hints=hints)
        store = opener(recorder)
        assert content(store)[: len(ROWS)] == ROWS
        assert len(content(store)) == len(ROWS) + round
        assert store.restore_checkpoint(cast("Any", None)) == checkpoint(77 + round)
        put(store, [(b"tail %d" % round, b"x")])
        store.start_commit(None, checkpoint(78 + round), ()).result()
        if round == 1:
            hints = recorder.build_hints()
        store.destroy()


def test_a_failed_attempt_behind_a_published_one_changes_nothing(tmp_path: Path) -> None:
    opener, rng, log = OPENERS["sqlite"], random.Random(1), MemoryLog()
    published: list[FSMHints] = []
    for number in range(3):
        with StateBuilder(App(opener), SPEC, tmp_path / "build", rng) as builder:
            put(builder.store, ROWS[: 100 * (number + 1)])
            built = builder.finish(checkpoint(number))
            published.append(append(log, builder, built, rng))
    for number, hints in enumerate(published):
        fork = MemoryLog(bytes(log.data))
        store = opener(take_over(fork, tmp_path / f"owner {number}", rng, hints=hints))
        assert content(store) == ROWS[: 100 * (number + 1)]
        store.destroy()


def test_rocksdb_takes_whole_tables(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")

    def opener(recorder: Any) -> RocksDBStore:
        return RocksDBStore(recorder, column_families=["other"])

    rng, log = random.Random(2), MemoryLog()
    with StateBuilder(App(opener), SPEC, tmp_path / "build", rng) as builder:
        assert builder.store.ingest(iter(ROWS)) == len(ROWS)
        assert builder.store.ingest(iter(ROWS[:9]), column_family="other") == 9
        assert builder.store.ingest(iter(())) == 0
        assert builder.store.get(ROWS[5][0]) == ROWS[5][1]
        with pytest.raises(Invalid, match="ascending"):
            builder.store.ingest([ROWS[1], ROWS[0]])
        with pytest.raises(Invalid, match="ascending"):
            builder.store.ingest([ROWS[1], ROWS[1]])
        with raises(Invalid, key=CHECKPOINT_KEY.hex()):
            builder.store.ingest([(CHECKPOINT_KEY, b"")])
        hints = append(log, builder, builder.finish(checkpoint(3)), rng)
    store = opener(take_over(log, tmp_path / "owner", rng, hints=hints))
    assert content(store) == ROWS
    assert list(store.iterate(column_family="other")) == ROWS[:9]
    assert store.restore_checkpoint(cast("Any", None)) == checkpoint(3)
    with raises(NotAllowed, says="ingest()"):
        store.ingest([])
    store.destroy()


def test_large_databases_are_images_of_every_group(tmp_path: Path) -> None:
    """More than one group of pages, a commit on the way that moves the WAL, and shrinking at the end."""
    opener, rng, log = OPENERS["sqlite"], random.Random(3), MemoryLog()
    rows = [(b"key %06d" % number, rng.randbytes(500)) for number in range(24_000)]
    with StateBuilder(App(opener), SPEC, tmp_path / "build", rng) as builder:
        for begin in range(0, len(rows), 6000):
            put(builder.store, rows[begin : begin + 6000])
            builder.commit()
        builder.store.execute("DELETE FROM kv WHERE k >= ?", (rows[18_000][0],))
        built = builder.finish(checkpoint(1))
        assert built.size < 1.5 * 24_000 * 500, "changes were recorded on the way"
        hints = append(log, builder, built, rng)
    recorder = take_over(log, tmp_path / "owner", rng, hints=hints)
    store = opener(recorder)
    assert content(store) == rows[:18_000]
    assert store.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    store.destroy()


def test_errors(tmp_path: Path) -> None:
    opener, rng = OPENERS["sqlite"], random.Random(4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with raises(Invalid, "directory"):
        StateBuilder(App(opener), SPEC, tmp_path / "full", rng)
    with raises(ApplicationFailed, says="new_store"):
        StateBuilder(App(lambda recorder: None), SPEC, tmp_path / "none", rng)
    assert not (tmp_path / "none").exists()
    with raises(Invalid, says="`shard`"):
        BuiltState.from_json(b"{}")
    log = MemoryLog()
    with StateBuilder(App(opener), SPEC, tmp_path / "build", rng) as builder:
        put(builder.store, ROWS[:10])
        hints = append(log, builder, builder.finish(checkpoint(1)), rng)
    # What hints name is missing: that is an error, never an older state.
    with pytest.raises(Corrupt):
        take_over(
            MemoryLog(bytes(log.data[: len(log.data) // 2])), tmp_path / "cut", rng, hints=hints
        )


def test_pieces_are_large_and_end_where_appends_did() -> None:
    mib = 1 << 20
    assert pieces([]) == ()
    assert pieces([10, 20]) == (20,)
    assert pieces([mib, 5 * mib, 6 * mib, 20 * mib, 20 * mib + 1]) == (
        5 * mib,
        20 * mib,
        20 * mib + 1,
    )


def test_branches_are_like_no_other() -> None:
    rng = random.Random(5)
    branches = [Branch.new(rng) for _ in range(100)]
    assert len({one.first_seq_no for one in branches}) == 100
    assert all((1 << 48) <= one.first_seq_no < (1 << 63) - (1 << 50) for one in branches)
    assert SPEC.recovery_log == LOG
