"""The state of a SQLite shard on a hot standby: at each refresh the last commit, for the price of the
redo since the one before."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Closed, Corrupt, GazetteError, NotAllowed, NotYet
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.stores.double_buffer import DoubleBuffer
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.view import FollowedDatabases
from gazette.testing.recovery import MemoryLog, Replayer, take_over
from tests.facts import raises
from tests.stores.test_sqlite_recovery import (
    MODES,
    Recorded,
    content_of,
    new_recorder,
    open_store,
    record,
    run,
    scratch,
    small_recordings,
)

__all__ = ["scratch"]
COUNT = 100
SHARD: Any = None  # Stores take nothing of their shard.


class Counted(SQLiteStore):
    """As applications make one: with a constructor of its own."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder)
        self.gathered: list[str] = []

    def words(self) -> int:
        (row,) = self.query("SELECT count(*) FROM word")
        return int(row[0])


def content(store: SQLiteStore) -> str:
    with store._readers.connection() as connection:
        return content_of(connection)


@pytest.mark.parametrize("mode", MODES)
def test_each_refresh_is_the_last_commit(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through checkpoints, new redo files, images and vacuums; what is read meanwhile stays."""
    small_recordings(monkeypatch, mode)
    rng = random.Random(f"view {mode}")
    recorded = record(mode, scratch, rng, COUNT)
    follow(recorded, scratch, rng)


def test_fail_overs_do_not_disturb_it(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_recordings(monkeypatch, "redo")
    rng = random.Random("view of several owners")
    recorded = Recorded()
    store = open_store(new_recorder(recorded.log, scratch / "first"), "redo")
    for owner in range(5):
        run(recorded, store, rng, COUNT // 5)
        store.destroy()
        recorder = take_over(recorded.log, scratch / f"owner-{owner}", rng)
        store = open_store(recorder, "redo")
    store.destroy()
    follow(recorded, scratch, rng)


def follow(recorded: Recorded, directory: Path, rng: random.Random) -> None:
    data = bytes(recorded.log.data)
    replayer = Replayer(directory / "staged")
    view = Counted.view(directory / "view")
    assert isinstance(view, DoubleBuffer)
    copies: tuple[FollowedDatabases, ...] = view.copies
    former: Counted | None = None
    was = ""
    refreshes = 0
    for index in range(0, len(recorded.ends), 2):
        if rng.randrange(3) == 0:
            continue
        replayer.advance(data, recorded.ends[index])
        store = replayer.view(view.refresh)
        refreshes += 1
        assert content(store) == recorded.content[index]
        assert store.words() >= 0
        if former is not None:
            assert content(former) == was, "what is in use was changed"
            view.release(former)
            with pytest.raises(Closed):
                former.query("SELECT 1")
        former, was = store, recorded.content[index]
    view.close()
    replayer.abandon()
    rebuilds = sum(copy.rebuilds for copy in copies)
    assert refreshes > COUNT / 5
    if b".redo-" in recorded.log.data[:4000]:
        assert rebuilds < refreshes / 2, "it hardly ever followed the redo"


def test_redo_that_loses_its_end_on_a_standby_is_an_error(scratch: Path) -> None:
    """What is left may end between two commits: an older state, which must not come back."""
    recorded = record("redo", scratch, random.Random(5), 30)
    data = bytes(recorded.log.data)
    replayer = Replayer(scratch / "staged")
    view = FollowedDatabases(scratch / "view")
    replayer.advance(data, recorded.ends[10])
    sizes = []
    for end in recorded.ends[10:]:
        replayer.advance(data, end)
        replayer.view(view.follow)
        path = replayer.view(lambda files: files.paths["primary.db.redo-00000001"])
        sizes.append(path.stat().st_size)
    os.truncate(path, sizes[-2])
    with raises(Corrupt, "length", "expected", path="/primary.db.redo-00000001") as raised:
        replayer.view(view.follow)
    assert (raised.value.facts["length"], raised.value.facts["expected"]) == tuple(sizes[-2:])
    # It stays one, also for a view that is made later, and for a promotion.
    for read in (lambda: replayer.view(FollowedDatabases(scratch / "new").follow), replayer.finish):
        with raises(Corrupt, "length", "expected"):
            read()
    replayer.abandon()


def test_a_view_only_reads(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = record("redo", scratch, random.Random("reads"), 5)
    replayer = Replayer(scratch / "staged")
    replayer.advance(bytes(recorded.log.data), recorded.ends[-1])
    view = Counted.view(scratch / "view")
    store = replayer.view(view.refresh)
    for write in ("execute", "executemany"):
        with pytest.raises(NotAllowed, match="read-only"):
            getattr(store, write)("INSERT INTO word VALUES (?, ?)", ("a", 1))
    with pytest.raises(NotAllowed):
        store.query("DELETE FROM word")
    view.close()
    replayer.abandon()


@pytest.mark.parametrize("mode", MODES)
def test_a_view_has_nothing_to_show_before_its_schema_was_committed(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query then goes to the primary. Here it would find no table."""
    recorded = record(mode, scratch, random.Random(f"early {mode}"), 3)
    data = bytes(recorded.log.data)
    replayer = Replayer(scratch / "staged")
    view = Counted.view(scratch / "view")
    early = 0
    for end in [0, *recorded.log.ends]:
        replayer.advance(data, end)
        try:
            store = replayer.view(view.refresh)
        except NotYet:
            early += 1
            continue
        assert store.words() >= 0
        view.release(store)
    assert early
    view.close()
    replayer.abandon()


def test_a_copy_that_was_damaged_is_made_again(scratch: Path) -> None:
    recorded = record("redo", scratch, random.Random("damage"), 30)
    replayer = Replayer(scratch / "staged")
    copy = FollowedDatabases(scratch / "copy")
    data = bytes(recorded.log.data)

    def files_of(end: int) -> PlayedFiles:
        replayer.advance(data, end)
        files: PlayedFiles = replayer.view(lambda files: files)
        return files

    copy.follow(files_of(recorded.ends[10]))
    shutil.rmtree(scratch / "copy")
    with raises(GazetteError, "directory"):
        copy.follow(files_of(recorded.ends[20]))
    copy.follow(files_of(recorded.ends[20]))
    assert copy.rebuilds == 2
    replayer.abandon()


@pytest.mark.parametrize("mode", MODES)
def test_attached_databases_are_of_the_same_commit(
    mode: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a later owner attaches first."""
    small_recordings(monkeypatch, mode)
    log = MemoryLog()
    kind: Any = mode.partition("-")[0]
    replayer = Replayer(scratch / "staged")
    view: Any = Counted.view(scratch / "view")
    store = SQLiteStore(new_recorder(log, scratch / "first"), mode=kind, databases=["archive"])
    store.execute("CREATE TABLE live (n INTEGER)")
    store.execute("CREATE TABLE archive.past (n INTEGER, filler BLOB)")
    both = "SELECT (SELECT count(*) FROM live), (SELECT count(*) FROM archive.past)"

    def grown(number: int) -> None:
        store.execute("INSERT INTO live VALUES (?)", (number,))
        store.execute("INSERT INTO archive.past VALUES (?, randomblob(3000))", (number,))
        store.start_commit(SHARD, Checkpoint(), ()).result()

    seen = 0
    for number in range(1, 60):
        grown(number)
        if number % 3 == 0:
            replayer.advance(log, log.end)
            reader = replayer.view(view.refresh)
            assert reader.query(both) == [(number, number)]
            with pytest.raises(NotAllowed):
                reader.query("DELETE FROM archive.past")
            view.release(reader)
            seen += 1
    store.destroy()
    recorder = take_over(log, scratch / "second", random.Random(1))
    store = SQLiteStore(recorder, mode=kind, databases=["more"])
    store.execute("CREATE TABLE more.added (n INTEGER)")
    store.execute("INSERT INTO more.added VALUES (7)")
    grown(60)
    replayer.advance(log, log.end)
    reader = replayer.view(view.refresh)
    assert reader.query(both) == [(60, 60)]
    assert reader.query("SELECT n FROM more.added") == [(7,)]
    view.close()
    store.destroy()
    replayer.abandon()
    assert seen > 10
    if mode == "redo":
        assert sum(copy.rebuilds for copy in view.copies) <= 2, "it hardly ever followed the redo"
