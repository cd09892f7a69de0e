"""An error says what is wrong with a store's log, options or disk, and what to do."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Broken, Corrupt, GazetteError, Invalid, Unavailable
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.shard_state import to_standalone
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import MemoryLog, take_over
from tests.facts import is_advised, raises

pytest.importorskip("rocksdict")

SHARD: Any = None  # Stores take nothing of their shard.
SCHEMA = "CREATE TABLE IF NOT EXISTS kv (k INTEGER PRIMARY KEY, v BLOB)"
RNG = random.Random(1)

OPEN: dict[str, Callable[[Recorder], Any]] = {
    "sqlite": lambda recorder: SQLiteStore(recorder, SCHEMA),
    "vfs": lambda recorder: SQLiteStore(recorder, SCHEMA, mode="vfs"),
    "rocksdb": lambda recorder: RocksDBStore(
        recorder, options=RocksDBOptions(write_buffer_bytes=64 << 10, compression="none")
    ),
    "json": lambda recorder: JSONFileStore(recorder, dict[str, str], dict),
}


def put(store: Any, number: int) -> None:
    data = RNG.randbytes(50_000)
    if isinstance(store, SQLiteStore):
        store.execute("INSERT INTO kv VALUES (?, ?)", (number, data))
    elif isinstance(store, RocksDBStore):
        store.put(b"%d" % number, data)
    else:
        store.state[str(number)] = data.hex()


def commit(store: Any) -> None:
    store.start_commit(SHARD, Checkpoint(), ()).result()


def recorded(kind: str, directory: Path) -> MemoryLog:
    """Return the log of one commit."""
    log = MemoryLog()
    store = OPEN[kind](take_over(log, directory, RNG))
    put(store, 1)
    commit(store)
    store.destroy()
    return log


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("by", OPEN)
def test_a_log_of_another_store_is_refused(kind: str, by: str, tmp_path: Path) -> None:
    """It would find nothing of its own, and begin from nothing."""
    log = recorded(kind, tmp_path / "one")
    end = log.end
    recorder = take_over(log, tmp_path / "two", RNG)
    if kind == by:
        OPEN[by](recorder).destroy()
        return
    end = log.end
    with pytest.raises(Invalid) as raised:
        OPEN[by](recorder)
    assert "recovery log" in str(raised.value)
    assert is_advised(raised.value)
    assert log.end == end, "something was recorded"


@pytest.mark.parametrize("kind", OPEN)
def test_a_directory_that_cannot_be_written(kind: str, tmp_path: Path) -> None:
    """It was removed; for a user without the right to write, it is the same error."""
    recorder = take_over(MemoryLog(), tmp_path / "gone", RNG)
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "gone").touch()
    with pytest.raises(Broken) as raised:
        store = OPEN[kind](recorder)
        put(store, 1)
        commit(store)
    assert "gone" in str(raised.value)
    if kind != "rocksdb":
        assert is_advised(raised.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of a megabyte and a half."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "gazette-test", str(directory)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize("kind", OPEN)
def test_a_disk_that_gets_full(kind: str, small_disk: Path, tmp_path: Path) -> None:
    """The next owner, elsewhere, has every commit that was recorded, and not the one that failed."""
    log = MemoryLog()
    store = OPEN[kind](take_over(log, small_disk / "store", RNG))
    commits = 0
    with pytest.raises(GazetteError) as raised:
        for number in range(200):
            put(store, number)
            commit(store)
            commits += 1
    assert isinstance(raised.value, Unavailable)
    assert is_advised(raised.value)
    assert str(small_disk) in str(raised.value)
    store.destroy()
    store = OPEN[kind](take_over(log, tmp_path / "next", RNG))
    if kind == "rocksdb":
        assert sum(1 for _ in store.iterate()) == commits
    elif kind == "json":
        assert len(store.state) == commits
    else:
        assert store.query("SELECT count(*) FROM kv") == [(commits,)]
    store.destroy()


def test_a_damaged_local_wal_is_not_taken_for_a_shorter_one(tmp_path: Path) -> None:
    """SQLite reads up to what is damaged, and says nothing. Wherever that is, we do."""
    log = MemoryLog()
    store = OPEN["vfs"](take_over(log, tmp_path / "one", RNG))
    for number in range(30):
        put(store, number)
        commit(store)
    store.destroy()
    size = len(played_wal(log, tmp_path / "first"))
    rng = random.Random(1)
    places = [
        0,
        9,
        20,
        31,
        33,
        60,
        size - 4097,
        size - 1,
        *(rng.randrange(32, size) for _ in range(30)),
    ]
    for number, place in enumerate(places):
        recorder = take_over(log, tmp_path / f"{number}", RNG)
        wal = recorder.directory / "primary.db-wal"
        data = bytearray(wal.read_bytes())
        data[place] ^= 0x55
        wal.write_bytes(data)
        with raises(Corrupt, "path"):
            OPEN["vfs"](recorder)
        wal.write_bytes(data)
        with raises(Corrupt, "path"):
            to_standalone(recorder.directory)
    store = OPEN["vfs"](take_over(log, tmp_path / "last", RNG))
    assert store.query("SELECT count(*) FROM kv") == [(30,)]
    store.destroy()


def played_wal(log: MemoryLog, directory: Path) -> bytes:
    take_over(log, directory, RNG)
    return (directory / "primary.db-wal").read_bytes()


def test_frames_that_were_rolled_back_are_no_damage(tmp_path: Path) -> None:
    """A transaction that does not fit into the cache writes to the WAL before it commits, if it does."""
    log = MemoryLog()
    store = OPEN["vfs"](take_over(log, tmp_path / "one", RNG))
    put(store, 1)
    commit(store)
    savepoint = store.savepoint()
    store.execute("PRAGMA cache_spill=1")
    store.execute("PRAGMA cache_size=1")
    for number in range(100, 140):
        store.execute("INSERT INTO kv VALUES (?, ?)", (number, bytes(9000)))
    savepoint.roll_back()
    put(store, 2)
    commit(store)
    store.destroy()
    wal = played_wal(log, tmp_path / "two")
    assert len(wal) > 32 + 60 * 4120, "nothing was spilled"
    recorder = take_over(log, tmp_path / "three", RNG)
    store = OPEN["vfs"](recorder)
    assert store.query("SELECT count(*) FROM kv") == [(2,)]
    store.destroy()


@pytest.mark.parametrize("kind", ["sqlite", "rocksdb", "json"])
def test_a_damaged_local_file(kind: str, tmp_path: Path) -> None:
    """The log is not damaged, and the error says so."""
    log = MemoryLog()
    store = OPEN[kind](take_over(log, tmp_path / "one", RNG))
    for number in range(30):
        put(store, number)
        commit(store)
    store.destroy()
    recorder = take_over(log, tmp_path / "two", RNG)
    for path in (tmp_path / "two").iterdir():
        if path.suffix in (".sst", ".json", ".db") or ".redo-" in path.name:
            data = bytearray(path.read_bytes())
            data[len(data) // 3 : len(data) // 3 + 9000] = b"\xff" * 9000
            path.write_bytes(data)
    with pytest.raises(Corrupt):
        store = OPEN[kind](recorder)
        if kind == "rocksdb":
            list(store.iterate())


def test_databases_that_cannot_be_reached() -> None:
    pytest.importorskip("sqlalchemy")
    from gazette.stores.sql.store import SQLStore

    for url in ("no url at all", "nonsense://user:secret@host/name", "postgresql+none://host/name"):
        with pytest.raises(Invalid) as raised:
            SQLStore(url)
        assert "secret" not in str(raised.value)
        assert "postgresql+psycopg" in raised.value.hint


def test_readers_of_sqlite(tmp_path: Path) -> None:
    recorder = take_over(MemoryLog(), tmp_path / "one", RNG)
    with pytest.raises(Invalid, match="readers"):
        SQLiteStore(recorder, readers=0)
    with pytest.raises(Invalid, match="readers"):
        SQLiteStore.view(tmp_path, readers=0)


ODD: list[Any] = [None, "a", 7, 1.5, True, bytearray(b"a"), memoryview(b"a"), [b"a"], object()]
"""Something that is neither a key nor a value of RocksDB."""


@pytest.mark.parametrize("odd", ODD, ids=lambda one: type(one).__name__)
def test_keys_and_values_of_other_types_are_refused_by_name(odd: Any, tmp_path: Path) -> None:
    store: Any = OPEN["rocksdb"](take_over(MemoryLog(), tmp_path / "one", RNG))
    other = take_over(MemoryLog(), tmp_path / "other", RNG)
    store.put(b"a", b"1")
    store.delete_range(b"x", b"z")
    with store.view() as view:
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("key", lambda: store.get(odd)),
            ("key", lambda: store.put(odd, b"v")),
            ("value", lambda: store.put(b"k", odd)),
            ("key", lambda: store.delete(odd)),
            ("begin", lambda: store.delete_range(odd, b"z")),
            ("end", lambda: store.delete_range(b"a", odd)),
            ("prefix", lambda: store.iterate(odd)),
            ("key", lambda: view.get(odd)),
            ("prefix", lambda: view.iterate(odd)),
            ("batch_bytes", lambda: RocksDBStore(other, batch_bytes=odd)),
            ("cache_bytes", lambda: RocksDBStore.standby_view(tmp_path, cache_bytes=odd)),
        ]
        if odd is not None:
            calls += [
                ("begin", lambda: store.iterate(begin=odd)),
                ("end", lambda: store.iterate(end=odd)),
                ("begin", lambda: view.iterate(begin=odd)),
                ("end", lambda: view.iterate(end=odd)),
            ]
        calls += [
            ("column_family", lambda: store.get(b"a", column_family=odd)),
            ("column_family", lambda: store.put(b"a", b"b", column_family=odd)),
            ("column_family", lambda: store.iterate(column_family=odd)),
            ("column_family", lambda: view.get(b"a", column_family=odd)),
        ]
        for path, call in calls:
            if odd == 7 and path.endswith("_bytes"):
                continue
            with raises(Invalid, path=path):
                call()
    assert list(store.iterate()) == [(b"a", b"1")]
    store.destroy()


@pytest.mark.parametrize(
    "odd",
    [*ODD[:-2], [7], ["a", None], {7: None}, {"a": 7}, b"ab"],
    ids=lambda one: type(one).__name__,
)
def test_names_of_column_families_of_other_types_are_refused(odd: Any, tmp_path: Path) -> None:
    with raises(Invalid) as raised:
        RocksDBStore(take_over(MemoryLog(), tmp_path / "families", RNG), column_families=odd)
    assert (raised.value.path or "").startswith("column_families")
    if odd is not None:
        recorder = take_over(MemoryLog(), tmp_path / "options", RNG)
        with raises(Invalid, path="options"):
            RocksDBStore(recorder, options=odd)


def test_empty_and_large_keys_and_values_are_kept(tmp_path: Path) -> None:
    log = MemoryLog()
    store: Any = OPEN["rocksdb"](take_over(log, tmp_path / "one", RNG))
    wanted = [(b"", b"x"), (b"\0", b""), (b"k" * (1 << 20), b"v" * (4 << 20))]
    for key, value in wanted:
        store.put(key, value)
    commit(store)
    store.destroy()
    store = OPEN["rocksdb"](take_over(log, tmp_path / "two", RNG))
    assert list(store.iterate()) == wanted
    assert [store.get(key) for key, _ in wanted] == [value for _, value in wanted]
    store.destroy()


@pytest.mark.parametrize(
    ("state_type", "state"),
    [
        (dict[str, int], {None: 1}),
        (dict[str, int], {7: 1}),
        (dict[str, int], {b"a": 1}),
        (dict[str, int], {"a": "x"}),
        (dict[str, int], {"a": None}),
        (dict[str, int], {"a": True}),
        (dict[str, int], {"\ud800": 1}),
        (dict[str, int], None),
        (dict[str, int], ["a"]),
        (dict[str, int], object()),
        (dict, {None: 1}),
        (dict, {("a",): 1}),
        (dict, {"a": {7: 1}}),
        (dict, {"a": float("nan")}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_state_of_another_type_is_refused_by_name(
    state_type: Any, state: Any, tmp_path: Path
) -> None:
    store: Any = JSONFileStore(take_over(MemoryLog(), tmp_path, RNG), state_type, dict)
    store.state = state
    for call in (lambda: commit(store), store.read, store.plain):
        with raises(Invalid) as raised:
            call()
        assert (raised.value.path or "").startswith("state")
    store.state = {"": 1, "a" * (1 << 20): 2**70}
    commit(store)
    assert store.read() == store.state


@pytest.mark.parametrize(
    ("state_type", "new_state", "path"),
    [
        (None, None, "state_type"),
        (7, None, "state_type"),
        ("dict", None, "state_type"),
        (dict | None, None, "state_type"),
        (dict[str, int], 7, "new_state"),
        (dict[str, int], "dict", "new_state"),
        (dict[str, int], {}, "new_state"),
    ],
)
def test_a_type_that_makes_no_state_is_refused(
    state_type: Any, new_state: Any, path: str, tmp_path: Path
) -> None:
    """At a standby too, and before a query comes."""
    with raises(Invalid, path=path):
        JSONFileStore(take_over(MemoryLog(), tmp_path, RNG), state_type, new_state)
    with raises(Invalid, path=path):
        JSONFileStore.view(state_type, new_state)
