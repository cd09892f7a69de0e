"""The state of a RocksDB shard on a hot standby: at each refresh the last commit, whatever its owner
flushes, compacts, deletes and records again meanwhile."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Closed, Corrupt, Invalid, NotAllowed, NotYet
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.stores.rocksdb.batch import WrittenAhead, lookup
from gazette.stores.rocksdb.follower import FollowedRocksDB
from gazette.stores.rocksdb.manifest import Manifest, RecordReader
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore, RocksDBView
from gazette.stores.rocksdb.wal import records
from gazette.testing.recovery import MemoryLog, Replayer, take_over
from tests.facts import raises
from tests.stores.test_rocksdb_recovery import (
    FAMILIES,
    SHARD,
    TINY,
    VARIANTS,
    Model,
    Recorded,
    digest,
    new_recorder,
    open_store,
    record,
    run,
    scratch,
    small_files,
)

rocksdict: Any = pytest.importorskip("rocksdict")
__all__ = ["scratch", "small_files"]
COUNT = 90


class Counted(RocksDBStore):
    """As applications make one: with a constructor of its own."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder)
        self.gathered: list[str] = []

    def keys(self) -> int:
        with self.view() as view:
            return sum(1 for _ in view.iterate())


def content(store: RocksDBStore) -> str:
    with store.view() as view:
        model: Model = {name: dict(view.iterate(column_family=name)) for name in FAMILIES}
        for name in FAMILIES:
            for key, value in list(model[name].items())[::7]:
                assert view.get(key, column_family=name) == value
            assert view.get(b"never", column_family=name) is None
        return digest(model)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_refresh_is_the_last_commit(variant: str, scratch: Path) -> None:
    """Tables that a copy reads are unlinked in the log all the time; what is read meanwhile stays."""
    rng = random.Random(f"view {variant}")
    recorded = record(VARIANTS[variant], scratch, rng, COUNT)
    assert recorded.syncs > 5, "nothing was flushed or compacted"
    openings, refreshes = follow(recorded, scratch, rng)
    assert 5 < openings < refreshes, (
        "tables are opened when the manifest has changed, and then only"
    )


@pytest.mark.timeout(3600)
def test_fail_overs_do_not_disturb_it(scratch: Path) -> None:
    """Each owner begins a manifest of its own, and one that died has left unreferenced files."""
    rng = random.Random("view of several owners")
    recorded = Recorded()
    store = open_store(new_recorder(recorded.log, scratch / "first"), TINY)
    for owner in range(5):
        run(recorded, store, rng, COUNT // 5)
        store.destroy()
        recorder = take_over(recorded.log, scratch / f"owner-{owner}", rng)
        store = open_store(recorder, TINY)
    store.destroy()
    follow(recorded, scratch, rng)


@pytest.mark.timeout(3600)
def test_where_files_cannot_be_linked(scratch: Path, tmp_path: Path) -> None:
    """They are copied, also those that the log has in part."""
    if scratch.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has no second file system to write to")
    rng = random.Random("copied")
    recorded = record(TINY, scratch, rng, COUNT // 2)
    follow(recorded, scratch, rng, views=tmp_path)


def follow(
    recorded: Recorded, directory: Path, rng: random.Random, *, views: Path | None = None
) -> tuple[int, int]:
    """Refresh a view at every third append of a log, commits and what is beside them; how often tables
    were opened, and how often it was refreshed."""
    data = bytes(recorded.log.data)
    replayer = Replayer(directory / "staged")
    view: Any = Counted.standby_view((views or directory) / "view")
    former: Counted | None = None
    was = ""
    refreshes = durable = 0
    open_view: RocksDBView | None = None
    for end in recorded.log.ends:
        while durable < len(recorded.ends) and recorded.ends[durable] <= end:
            durable += 1
        if not durable or rng.randrange(3):
            continue
        replayer.advance(data, end)
        store = replayer.view(view.refresh)
        refreshes += 1
        assert content(store) == recorded.content[durable - 1]
        if former is not None:
            assert content(former) == was, "what is in use was changed"
            assert open_view is not None
            scan = open_view.iterate()
            view.release(former)
            for use in (former.keys, lambda scan=scan: next(scan)):
                with pytest.raises(Closed):
                    use()
        former, was, open_view = store, recorded.content[durable - 1], store.view()
    openings = sum(copy.openings for copy in view.copies)
    view.close()
    with pytest.raises(Closed):
        store.view()
    replayer.abandon()
    assert refreshes > 10
    return openings, refreshes


@pytest.fixture
def small(scratch: Path) -> Iterator[tuple[MemoryLog, RocksDBStore]]:
    log = MemoryLog()
    options = RocksDBOptions(write_buffer_bytes=64 << 10)
    store = RocksDBStore(
        new_recorder(log, scratch / "small"), column_families=["f"], options=options
    )
    yield log, store
    store.destroy()


def commit(store: RocksDBStore) -> None:
    store.start_commit(SHARD, Checkpoint(), ()).result()


def test_a_view_only_reads(small: tuple[MemoryLog, RocksDBStore], scratch: Path) -> None:
    log, store = small
    store.put(b"a", b"1")
    commit(store)
    replayer = Replayer(scratch / "staged")
    replayer.advance(log, log.end)
    view = Counted.standby_view(scratch / "view")
    reader = replayer.view(view.refresh)
    assert reader.keys() == 1
    assert set(reader.column_families) == {"default", "f"}
    uses: tuple[Callable[[], Any], ...] = (
        lambda: reader.put(b"a", b"2"),
        lambda: reader.get(b"a"),
        lambda: reader.delete(b"a"),
        lambda: reader.iterate(),
        lambda: reader.savepoint(),
        lambda: reader.ingest([]),
        lambda: reader.live_bytes,
        lambda: reader.start_commit(SHARD, Checkpoint(), ()),
        lambda: reader.restore_checkpoint(SHARD),
    )
    for use in uses:
        with pytest.raises(NotAllowed, match="read-only"):
            use()
    view.close()
    replayer.abandon()


def test_families_that_are_made_later_are_seen(scratch: Path) -> None:
    log = MemoryLog()
    rng = random.Random("families")
    replayer = Replayer(scratch / "staged")
    view: Any = RocksDBStore.standby_view(scratch / "view")
    with pytest.raises(NotYet):
        replayer.view(view.refresh)
    for number, families in enumerate([[], ["f"], ["g"]]):
        store = RocksDBStore(
            take_over(log, scratch / f"owner-{number}", rng), column_families=families
        )
        for family in families:
            store.put(b"key", b"%d" % number, column_family=family)
        commit(store)
        store.destroy()
        replayer.advance(log, log.end)
        reader = replayer.view(view.refresh)
        with reader.view() as opened:
            assert set(opened.column_families) == {"default", *["f", "g"][:number]}
            for family in families:
                assert opened.get(b"key", column_family=family) == b"%d" % number
        view.release(reader)
    view.close()
    replayer.abandon()


def test_a_copy_that_was_damaged_is_made_again(
    small: tuple[MemoryLog, RocksDBStore], scratch: Path
) -> None:
    log, store = small
    replayer = Replayer(scratch / "staged")
    copy = FollowedRocksDB(rocksdict, scratch / "copy", rocksdict.Cache(1 << 20))

    def follow(number: int) -> None:
        store.put(b"a", b"%d" % number)
        commit(store)
        replayer.advance(log, log.end)
        replayer.view(copy.follow)
        family = copy.families["default"]
        assert lookup(family.layers, b"a") == (True, b"%d" % number)

    follow(1)
    follow(2)
    assert copy.openings == 1
    shutil.rmtree(scratch / "copy")
    (scratch / "copy").touch()
    with raises(Invalid, "directory"):
        for number in itertools.count(
            3
        ):  # Sooner or later RocksDB makes a table, which is new to the copy.
            store.put(b"b", random.Random(number).randbytes(50_000))
            follow(number)
    (scratch / "copy").unlink(missing_ok=True)
    follow(4)
    assert copy.openings == 2
    copy.close()
    replayer.abandon()


def test_the_manifest_of_a_real_database(tmp_path: Path) -> None:
    """Families that come and go, tables, blob files and compactions: every edit is read to its end."""
    path = tmp_path / "db"
    options = rocksdict.Options(raw_mode=True)
    options.set_enable_blob_files(True)
    options.set_min_blob_size(100)
    options.set_enable_blob_gc(True)
    database = rocksdict.Rdict(str(path), options)
    for name in ("a", "b", "c"):
        family = database.create_column_family(name, options)
        for number in range(6):
            for key in range(50):
                family[b"%d" % key] = bytes(50 if key % 2 else 500) + b"%d" % number
            family.flush()
        family.compact_range(None, None)
        del family
    database.drop_column_family("b")
    database[b"key"] = b"value"
    (current,) = (path / "CURRENT").read_text().split()
    manifest = Manifest.of((path / current).read_bytes())
    assert manifest.families == {0: "default", 1: "a", 3: "c"}
    wals = {int(wal.stem) for wal in path.glob("*.log")}
    for family_number in (1, 3):
        assert 0 < manifest.first_wals[family_number] <= max(wals)
    written = WrittenAhead()
    for wal in sorted(path.glob("*.log"), key=lambda wal: int(wal.stem)):
        for batch, _ in records(wal.read_bytes(), 0):
            written.apply(batch)
    assert lookup([written.layers[0]], b"key") == (True, b"value")
    database.close()


def test_a_wal_that_holds_what_is_no_record_is_not_taken_for_its_end(tmp_path: Path) -> None:
    """A copy would never get beyond it, and answer from there on as if nothing had been written since."""
    database = rocksdict.Rdict(str(tmp_path / "db"), rocksdict.Options(raw_mode=True))
    for number in range(3):
        database[b"%d" % number] = bytes(20_000)
    (path,) = (tmp_path / "db").glob("*.log")
    wal = path.read_bytes()
    database.close()
    ends = [end for _, end in records(wal, 0)]
    assert len(ends) == 3
    assert ends[1] > 32 << 10, "no record is in two blocks"
    # Case: cut off anywhere, or followed by zeros, it has what is whole.
    for length in (0, 3, 7, ends[0] - 1, ends[0], ends[0] + 6, ends[1] - 1, len(wal)):
        whole = [end for end in ends if end <= length]
        assert [end for _, end in records(wal[:length], 0)] == whole
    assert [end for _, end in records(wal + bytes(100), 0)] == ends
    # Case: of another kind, a part of nothing, or beyond its block.
    for at, value in ((6, 9), (ends[0] + 6, 5), (ends[0] + 6, 3), (ends[0] + 5, 0xFF)):
        damaged = bytearray(wal)
        damaged[at] = value
        with raises(Corrupt, "offset", "kind"):
            list(records(bytes(damaged), 0))


def test_what_no_store_writes_is_refused() -> None:
    with raises(NotAllowed, says="(2)"):
        WrittenAhead().apply(bytes(12) + b"\x02\x01k\x01v")  # A merge.
    with raises(Corrupt, length=17):
        WrittenAhead().apply(bytes(12) + b"\x01\x05key")
    # Case: a number goes on for ever, and the name of a family is no text.
    with raises(Corrupt, length=12):
        RecordReader(b"\xff" * 11 + b"\x01").number()
    assert RecordReader(b"\xff" * 9 + b"\x01").number() == (1 << 64) - 1
    with raises(Corrupt, "name"):
        Manifest()._apply(RecordReader(b"\xc9\x01\x02\xff\xfe"))


def test_a_wal_that_is_obsolete_and_still_there_is_not_read(tmp_path: Path) -> None:
    """RocksDB removes such files one after the other, and a younger one may go first."""
    path = tmp_path / "db"
    database = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))
    database[b"key"] = b"old"
    (first,) = path.glob("*.log")
    shutil.copyfile(first, tmp_path / first.name)
    database.flush()
    database[b"key"] = b"new"
    database.flush()
    assert not first.exists()
    database.close()
    paths = {one.name: one for one in path.iterdir()} | {first.name: tmp_path / first.name}
    copy = FollowedRocksDB(rocksdict, tmp_path / "copy", rocksdict.Cache(1 << 20))
    copy.follow(PlayedFiles(paths, {}))
    family = copy.families["default"]
    assert lookup(family.layers, b"key") == (False, None)
    assert family.tables.get(b"key") == b"new"
    del family
    copy.close()
