"""A SQLite shard of the Go original comes over whole, and no owner begins without what the log holds."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Corrupt, Invalid
from gazette.gazctl.shards.recover import STAGING, finish_directory
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog import Moment, open_at
from gazette.recoverylog.shard_state import ShardState, StateKind
from gazette.recoverylog.store_files import StateForm, form_of
from gazette.stores.sqlite.hand_over import NOTE_PATH
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, MemoryLog, MemoryLogs, Replayer, replay, take_over
from tests.facts import raises
from tests.recoverylog.original_logs import NAMES, OriginalLog, original_log
from tests.support.missing import missing

rocksdict: Any = pytest.importorskip("rocksdict")

SHARD: Any = None
MODES = ("redo", "vfs")
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY NOT NULL, n INTEGER NOT NULL, filler BLOB)"
)
LOGS = {name: original_log(name) for name in NAMES}


def counts(store: SQLiteStore | ShardState) -> dict[str, int]:
    return dict(store.query("SELECT w, n FROM word"))


def count(store: SQLiteStore, word: str, read_through: int) -> None:
    store.execute(
        "INSERT INTO word VALUES (?, 1, zeroblob(500)) ON CONFLICT DO UPDATE SET n = n + 1", (word,)
    )
    sources = {"a/source": SourceCheckpoint(read_through)}
    store.start_commit(SHARD, Checkpoint(sources), ()).result()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_shard_of_the_original_comes_over_whole(name: str, mode: Any, tmp_path: Path) -> None:
    """State, offsets and producers are those of its last commit; later owners have ours only."""
    original, rng = LOGS[name], random.Random(1)
    log = MemoryLog(original.data)
    recorder = take_over(log, tmp_path / "one", rng)
    store = SQLiteStore(recorder, SCHEMA, mode=mode)
    assert counts(store) == original.counts
    source = store.restore_checkpoint(SHARD).sources[original.source]
    assert source.read_through == original.read_through
    assert [one.begin is None for one in source.producers.values()].count(False) == 1
    attached = name == "journal"
    if attached:
        assert store.query("SELECT count(*) FROM archive.seen") == [
            (sum(original.counts.values()),)
        ]
    assert form_of(recorder.fsm.links) is {"redo": StateForm.REDO, "vfs": StateForm.PLAIN}[mode]
    assert not [path for path in recorder.fsm.links if path.startswith(f"{NOTE_PATH}/")]
    expected = dict(original.counts)
    for owner in ("two", "three"):
        for _ in range(20):
            word = f"word {rng.randrange(60):02d}"
            expected[word] = expected.get(word, 0) + 1
            count(store, word, expected[word])
        store.execute("DELETE FROM word")
        store.destroy()
        store = SQLiteStore(take_over(log, tmp_path / owner, rng), SCHEMA, mode=mode)
        assert counts(store) == expected
        assert store.query("PRAGMA integrity_check") == [("ok",)]
        assert "a/source" in store.restore_checkpoint(SHARD).sources
    store.destroy()


def total(directory: Path) -> tuple[int, int, int]:
    """Return how many words a state has counted, in each database, and the offset of its checkpoint."""
    with ShardState(directory) as state:
        if state.kind is StateKind.FILES:
            return 0, 0, 0  # The original had made a RocksDB, and no database in it.
        tables = {row[0] for row in state.query("SELECT name FROM sqlite_master")}
        words = state.query("SELECT total(n) FROM word")[0][0] if "word" in tables else 0
        seen = words
        if "archive.db" in state.databases and words:
            seen = state.query("SELECT count(*) FROM archive.seen")[0][0]
        offsets = [one.read_through for one in state.checkpoint.sources.values()]
        for name in state.databases:
            connection = sqlite3.connect(directory / name)
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            connection.close()
        return int(words), int(seen), offsets[0] if offsets else 0


def chosen(original: OriginalLog, rng: random.Random) -> list[int]:
    """Return cuts of a log: any, and those within a transaction over two databases."""
    cuts = list(original.cuts())
    within = [at for at, paths in cuts if any("-mj" in path for path in paths)]
    assert bool(within) == (original.name == "journal")
    begun = [at for at, paths in cuts if "/pageDB/CURRENT" in paths]
    few = rng.sample(within, min(len(within), 30))
    return sorted({*rng.sample(begun, 30), *few})


@pytest.mark.parametrize("name", NAMES)
def test_an_owner_that_died_anywhere_leaves_a_commit(name: str, tmp_path: Path) -> None:
    """The original appends single writes. Unfinished transactions are rolled back, in all databases."""
    original = LOGS[name]
    replayer = Replayer(tmp_path / "played")
    found: list[tuple[int, int]] = []
    for cut in chosen(original, random.Random(7)):
        replayer.advance(original.data, cut)
        replayer.copy_live(tmp_path / "copy")
        words, seen, offset = total(tmp_path / "copy")
        assert words == seen
        found.append((offset, words))
    replayer.abandon()
    assert found == sorted(found)
    assert len(set(found)) == len({offset for offset, _ in found}) > 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_take_over_that_does_not_end_changes_nothing(
    name: str, mode: Any, tmp_path: Path
) -> None:
    """Until its last append the files of the original are the state, and whole, for every owner."""
    original, rng = LOGS[name], random.Random(1)
    log = MemoryLog(original.data)
    SQLiteStore(take_over(log, tmp_path / "one", rng), mode=mode).destroy()
    ends = [end for end in log.ends if end > len(original.data)]
    forms = []
    for end in ends:
        directory = tmp_path / str(end)
        played = directory / "played"
        forms.append(form_of(replay(bytes(log.data[:end]), played).links))
        with ShardState(played) as state:
            assert counts(state) == original.counts
        branch = MemoryLog(bytes(log.data[:end]))
        for number, owner in enumerate(("two", "three", "four")):
            store = SQLiteStore(take_over(branch, directory / owner, rng), SCHEMA, mode=mode)
            assert counts(store) == original.counts | {f"by {n}": 1 for n in range(number)}
            count(store, f"by {number}", number)
            store.destroy()
    assert forms[0] is StateForm.PAGES
    assert forms[-1] is not StateForm.PAGES
    assert forms == sorted(forms, key=lambda form: form is not StateForm.PAGES)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_original_recorded_is_read_without_a_take_over(name: str, tmp_path: Path) -> None:
    """By time travel, and by `gazctl shards recover`."""
    original, hints = LOGS[name], [FSMHints(log=LOG)]
    logs = MemoryLogs(MemoryLog(original.data))
    with open_at(logs, hints, tmp_path / "now") as state:
        assert state.kind is StateKind.SQLITE
        assert counts(state) == original.counts
        assert state.checkpoint.sources[original.source].read_through == original.read_through
    middle = Moment(offset=len(original.data) // 2)
    with open_at(logs, hints, tmp_path / "before", middle) as state:
        assert 0 < sum(counts(state).values()) < sum(original.counts.values())
    recovered = tmp_path / "recovered"
    replay(original.data, recovered / STAGING)
    names = finish_directory(recovered)
    assert sorted(names) == sorted(path.name for path in recovered.iterdir())
    connection = sqlite3.connect(recovered / "primary.db")
    assert dict(connection.execute("SELECT w, n FROM word").fetchall()) == original.counts
    connection.close()


@pytest.mark.parametrize("mode", MODES)
def test_logs_of_ours_have_a_note_for_the_original(mode: Any, tmp_path: Path) -> None:
    """Also those of former versions, once an owner of this one has opened them."""
    rng, log = random.Random(1), MemoryLog()
    recorder = take_over(log, tmp_path / "one", rng)
    store = SQLiteStore(recorder, SCHEMA, mode=mode)
    assert NOTE_PATH in recorder.fsm.links
    count(store, "a", 1)
    with recorder.group() as group:
        group.unlink(NOTE_PATH)  # As a former version had it.
    store.destroy()
    recorder = take_over(log, tmp_path / "two", rng)
    assert NOTE_PATH not in recorder.fsm.links
    store = SQLiteStore(recorder, SCHEMA, mode=mode)
    assert counts(store) == {"a": 1}
    store.destroy()
    fsm = replay(bytes(log.data), tmp_path / "played")
    assert fsm.nodes[fsm.links[NOTE_PATH]].length == (tmp_path / "played" / "pageDB").stat().st_size


def page_db(directory: Path, family: str, pages: dict[bytes, bytes]) -> None:
    """Make a RocksDB with one column family, as the original would name it."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    families = {family: rocksdict.Options(raw_mode=True)}
    database = rocksdict.Rdict(str(directory / "pageDB"), options, families)
    for key, page in pages.items():
        database.get_column_family(family).put(key, page)
    database.close()


def recorded(directory: Path, rng: random.Random) -> MemoryLog:
    """Return a log with the files of a directory."""
    log = MemoryLog()
    recorder = take_over(log, directory / "recorder", rng)
    for path in (directory / "pageDB").iterdir():
        if path.name not in ("LOCK", "LOG"):
            with recorder.group() as group:
                group.write(group.create(f"/pageDB/{path.name}"), 0, path.read_bytes())
    return log


def first_page(size: int = 4096, count: int = 2, sql: str = "CREATE TABLE t (x)") -> bytes:
    """Return the first page of a database of ``count`` pages."""
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA page_size=4096")
    connection.execute(sql)
    data = bytearray(connection.serialize()[:4096])
    connection.close()
    if "TABLE" in sql:
        data[28:32] = count.to_bytes(4, "big")
    return bytes(data[:size])


@pytest.mark.parametrize(
    ("family", "pages", "kind"),
    [
        ("/a-b.db", {bytes(8): first_page(sql="PRAGMA user_version=1")}, Invalid),
        ("/sub/primary.db", {bytes(8): first_page()}, Corrupt),
        ("/primary.db", {b"key": b"value"}, Corrupt),
        ("/primary.db", {bytes(8): first_page(100)}, Corrupt),
        ("/primary.db", {(4096).to_bytes(8, "big"): first_page()}, Corrupt),
        ("/primary.db", {bytes(8): first_page(), (4097).to_bytes(8, "big"): first_page()}, Corrupt),
        ("/primary.db", {bytes(8): first_page()}, Corrupt),  # The page of its table is missing.
        ("/primary.db", {bytes(8): first_page(count=3), bytes(7) + b"\x20": b""}, Corrupt),
    ],
)
def test_pages_that_are_no_database_are_refused(
    family: str, pages: dict[bytes, bytes], kind: type[Exception], tmp_path: Path
) -> None:
    rng = random.Random(1)
    page_db(tmp_path, family, pages)
    log = recorded(tmp_path, rng)
    recorder = take_over(log, tmp_path / "owner", rng)
    end = log.end
    with pytest.raises(kind):
        SQLiteStore(recorder)
    assert log.end == end


def test_a_take_over_needs_rocksdict(tmp_path: Path) -> None:
    recorder = take_over(MemoryLog(LOGS["sqlite"].data), tmp_path / "one", random.Random(1))
    with missing("rocksdict"), raises(Invalid, says="pygazette[rocksdb]"):
        SQLiteStore(recorder, SCHEMA)


def test_free_pages_may_be_missing(tmp_path: Path) -> None:
    """SQLite need not write a page that became free in the transaction that made it."""
    connection = sqlite3.connect(":memory:")
    connection.executescript("PRAGMA page_size=4096; CREATE TABLE t (x); CREATE TABLE u (x);")
    connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
    connection.execute("DROP TABLE t")
    connection.commit()
    data = connection.serialize()
    connection.close()
    trunk = int.from_bytes(data[32:36], "big")
    leaf = int.from_bytes(data[(trunk - 1) * 4096 + 8 :][:4], "big")
    offsets = [at for at in range(0, len(data), 4096) if at != (leaf - 1) * 4096]
    pages = {at.to_bytes(8, "big"): data[at : at + 4096] for at in offsets}
    page_db(tmp_path, "/primary.db", pages)
    rng = random.Random(1)
    store = SQLiteStore(take_over(recorded(tmp_path, rng), tmp_path / "owner", rng), SCHEMA)
    assert store.query("SELECT name FROM sqlite_master WHERE name IN ('t', 'u')") == [("u",)]
    store.destroy()
