"""A recorded RocksDB opens, and is what was committed, wherever its log is cut between appends."""

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

import pytest

from gazette.errors import Fenced
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.ops import HEADER_LENGTH, Unlink, decode_op, frame_length
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.rocksdb.keys import CHECKPOINT_KEY
from gazette.runtime.tasks import OpFuture, failed
from gazette.stores.rocksdb import recording
from gazette.stores.rocksdb.recording import RocksDBRecording
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from gazette.testing.recovery import LOG, MemoryLog, Replayer, pruned, replay, take_over
from tests.facts import raises

rocksdict: Any = pytest.importorskip("rocksdict")

FAMILIES = ("default", "a", "b")
SHARD: Any = None  # Stores take nothing of their shard.
CUTS = int(os.environ.get("GAZETTE_CUTS", "40"))
"""How many cuts a test looks at. The long form of these tests has a thousand."""

Model = dict[str, dict[bytes, bytes]]


def _churn(options: Any) -> None:
    """Make everything so small that a short run flushes, compacts and rolls files all the time."""
    options.set_max_bytes_for_level_base(128 << 10)
    options.set_level_zero_file_num_compaction_trigger(2)


TINY = RocksDBOptions(
    write_buffer_bytes=48 << 10, table_bytes=64 << 10, cache_bytes=1 << 20, tune=_churn
)
BLOBS = RocksDBOptions(
    write_buffer_bytes=48 << 10,
    table_bytes=64 << 10,
    cache_bytes=1 << 20,
    min_blob_bytes=400,
    background_jobs=6,
    tune=_churn,
)
VARIANTS = {"tables": TINY, "blobs": BLOBS}


@dataclass
class Recorded:
    """A log, and by transaction the offset at which its commit ends and the content it left."""

    log: MemoryLog = field(default_factory=MemoryLog)
    ends: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    syncs: int = 0


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gazette.stores.rocksdb.options.MANIFEST_BYTES", 4 << 10)
    monkeypatch.setattr("gazette.stores.rocksdb.recording.PIECE", 16 << 10)
    monkeypatch.setattr("gazette.stores.rocksdb.recording.COPY_MIN", 8 << 10)
    init = RocksDBRecording.__init__

    def small(self: RocksDBRecording, recorder: Recorder) -> None:
        init(self, recorder, horizon_slack=64 << 10)

    monkeypatch.setattr(RocksDBRecording, "__init__", small)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory in memory, if the machine has one: what is tested does not depend on the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="gazette-test-", dir=memory) as directory:
        yield Path(directory)


def new_recorder(log: MemoryLog, directory: Path) -> Recorder:
    directory.mkdir(parents=True)
    fsm = RecoveryFSM(FSMHints(log=LOG))
    return Recorder(fsm, 1234, directory, log, LOG, 0)


def open_store(recorder: Recorder, options: RocksDBOptions) -> RocksDBStore:
    return RocksDBStore(
        recorder,
        options=options,
        column_families=dict.fromkeys(FAMILIES[1:], options),
        batch_bytes=32 << 10,
    )


def key_of(rng: random.Random) -> bytes:
    return b"k%05d" % rng.randrange(1500)


def transaction(store: RocksDBStore, model: Model, rng: random.Random) -> None:
    """Do random work on all column families, from single keys to more than a memtable holds."""
    for _ in range(rng.choice((1, 1, 3, 30, 30, 250))):
        family = rng.choice(FAMILIES)
        content = model[family]
        match rng.randrange(20):
            case 0:
                begin, end = sorted((key_of(rng), key_of(rng)))
                end = min(end, begin[:-1] + b"~")
                store.delete_range(begin, end, column_family=family)
                for key in [key for key in content if begin <= key < end]:
                    del content[key]
            case 1 | 2 | 3:
                key = key_of(rng)
                store.delete(key, column_family=family)
                content.pop(key, None)
            case _:
                key, value = key_of(rng), rng.randbytes(rng.choice((0, 20, 100, 100, 900)))
                store.put(key, value, column_family=family)
                content[key] = value


def background(store: RocksDBStore, rng: random.Random) -> None:
    """Do at a bad moment what RocksDB does unasked sooner or later."""
    family = store._families[rng.choice(FAMILIES)]
    match rng.randrange(24):
        case 0:
            family.flush(False)
        case 1:
            family.flush(True)
        case 2:
            family.compact_range(None, None)


def digest(model: Model) -> str:
    result = hashlib.sha256()
    for family in FAMILIES:
        result.update(family.encode())
        for key, value in sorted(model[family].items()):
            result.update(b"%d %b %d " % (len(key), key, len(value)) + value)
    return result.hexdigest()


def content_of(store: RocksDBStore) -> Model:
    return {family: dict(store.iterate(column_family=family)) for family in FAMILIES}


def run(recorded: Recorded, store: RocksDBStore, rng: random.Random, count: int) -> None:
    model: Model = (
        {family: dict(recorded.models[-1][family]) for family in FAMILIES}
        if recorded.models
        else {family: {} for family in FAMILIES}
    )
    begin = len(recorded.content)
    for index in range(begin, begin + count):
        transaction(store, model, rng)
        background(store, rng)
        checkpoint = Checkpoint(sources={"source": SourceCheckpoint(index + 1)})
        # What follows the commit's own append (a copy) is not part of it.
        recorded.ends.append(store.start_commit(SHARD, checkpoint, ()).result().commit.end)
        recorded.content.append(digest(model))
        recorded.models.append({family: dict(model[family]) for family in FAMILIES})
    recorded.syncs += store._recording.syncs


def record(options: RocksDBOptions, directory: Path, rng: random.Random, count: int) -> Recorded:
    recorded = Recorded()
    store = open_store(new_recorder(recorded.log, directory / "first"), options)
    run(recorded, store, rng, count)
    store.destroy()
    return recorded


def reopen(directory: Path) -> tuple[int, str]:
    """Return (transactions, content) of a played-back directory, as plain RocksDB finds it."""
    options = rocksdict.Options(raw_mode=True)
    families = {name: rocksdict.Options(raw_mode=True) for name in FAMILIES[1:]}
    database = rocksdict.Rdict(str(directory), options, families)
    try:
        data = database.get(CHECKPOINT_KEY)
        transactions = 0
        if data is not None:
            sources = Checkpoint.from_bytes(data).sources
            transactions = sources["source"].read_through if sources else 0
        model: Model = {"default": {k: v for k, v in database.items() if k[0]}}
        for name in FAMILIES[1:]:
            family = database.get_column_family(name)
            model[name] = dict(family.items())
            del family
        return transactions, digest(model)
    finally:
        database.close()


def check_cuts(recorded: Recorded, cuts: Iterable[int], directory: Path) -> int:
    """Check that what is left of the log opens, and is the last transaction that it has whole.

    Return how many cuts were looked at, each as the play-back of the log up to it.
    """
    data = bytes(recorded.log.data)
    replayer = Replayer(directory / "staged")
    checked = 0
    for cut in sorted(cuts):
        replayer.advance(data, cut)
        checked += 1
        durable = bisect.bisect_right(recorded.ends, cut)
        replayer.copy_live(directory / "cut")
        transactions, content = reopen(directory / "cut")
        assert transactions == durable
        if transactions:
            assert content == recorded.content[transactions - 1]
    replayer.abandon()
    return checked


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.timeout(3600)
def test_a_cut_at_an_append_is_that_commit(variant: str, scratch: Path) -> None:
    """Every append ends at a state that opens, and is the last commit that the log has whole."""
    rng = random.Random(f"barriers {variant}")
    recorded = record(VARIANTS[variant], scratch, rng, max(300, CUTS))
    assert 10 < recorded.syncs < len(recorded.ends), "both ways of recording have to be looked at"
    ends = [end for end in recorded.log.ends if end >= recorded.ends[0]]
    cuts = rng.sample(ends, CUTS)
    assert check_cuts(recorded, cuts, scratch) == CUTS


@pytest.mark.timeout(3600)
def test_a_cut_within_what_is_appended_beside_commits(scratch: Path) -> None:
    """Tables and copies of files that grow in the log are nothing yet: any byte of them may be the last."""
    rng = random.Random("beside")
    recorded = record(TINY, scratch, rng, max(200, CUTS))
    commits = set(recorded.ends)
    beside = [
        (begin, end)
        for begin, end in zip(recorded.log.ends, recorded.log.ends[1:], strict=False)
        if end not in commits and begin >= recorded.ends[0]
    ]
    # What takes the place of a file is as atomic as a commit.
    data = bytes(recorded.log.data)
    beside = [(begin, end) for begin, end in beside if not _unlinks(data, begin, end)]
    assert len(beside) > 20
    cuts = [rng.randrange(*span) for span in rng.choices(beside, k=CUTS)]
    assert check_cuts(recorded, cuts, scratch) == CUTS


def _unlinks(data: bytes, begin: int, end: int) -> bool:
    while begin < end:
        frame_end = begin + HEADER_LENGTH + (frame_length(data, begin) or 0)
        payload = data[begin + HEADER_LENGTH : frame_end]
        op = decode_op(payload, log=LOG, first_offset=begin, frame_end=frame_end)
        if isinstance(op.action, Unlink):
            return True
        begin = op.last_offset
    return False


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.timeout(3600)
def test_generations_of_owners_go_on_where_the_last_was_cut(variant: str, scratch: Path) -> None:
    """A chain of fail-overs, each from a cut of its predecessor's log, loses no durable commit."""
    for seed in range(max(2, CUTS // 40)):
        rng = random.Random(f"chain {variant} {seed}")
        base = scratch / str(seed)
        recorded = record(VARIANTS[variant], base, rng, 20)
        for generation in range(8):
            cut = rng.choice([end for end in recorded.log.ends if end >= recorded.ends[0]])
            durable = bisect.bisect_right(recorded.ends, cut)
            del recorded.ends[durable:], recorded.content[durable:], recorded.models[durable:]
            recorded.log = MemoryLog(bytes(recorded.log.data[:cut]))
            recorder = take_over(recorded.log, base / f"g{generation}", rng)
            store = open_store(recorder, VARIANTS[variant])
            checkpoint = store.restore_checkpoint(SHARD)
            assert checkpoint.sources["source"].read_through == durable
            assert content_of(store) == recorded.models[-1]
            run(recorded, store, rng, 20)
            store.destroy()
        check_cuts(recorded, [len(recorded.log.data)], base)
        shutil.rmtree(base)


def test_a_log_of_hardly_anything(scratch: Path) -> None:
    """A new store's very first appends: an owner that recovers from one of them goes on as usual."""
    rng = random.Random("first appends")
    recorded = record(TINY, scratch, rng, 2)
    for number, end in enumerate(recorded.log.ends):
        log = MemoryLog(bytes(recorded.log.data[:end]))
        durable = bisect.bisect_right(recorded.ends, end)
        follower = Recorded(
            log, recorded.ends[:durable], recorded.content[:durable], recorded.models[:durable]
        )
        store = open_store(take_over(log, scratch / f"n{number}", rng), TINY)
        run(follower, store, rng, 3)
        store.destroy()
        check_cuts(follower, [len(log.data)], scratch)


def test_the_horizon_is_bounded(scratch: Path) -> None:
    """However much is written, a recovery from fresh hints reads little more than the live files."""
    rng = random.Random("horizon")
    log = MemoryLog()
    recorder = new_recorder(log, scratch / "first")
    store = open_store(recorder, TINY)
    # What is written once and then never touched keeps its tables for ever.
    for index in range(2000):
        store.put(b"z%05d" % index, rng.randbytes(100))
    store.start_commit(SHARD, Checkpoint(), ()).result()
    for family in store._families.values():
        family.flush(True)
    beyond = most = 0
    for index in range(1500):
        for _ in range(15):
            store.put(b"k%03d" % rng.randrange(200), rng.randbytes(100))
        checkpoint = Checkpoint(sources={"source": SourceCheckpoint(index)})
        store.start_commit(SHARD, checkpoint, ()).result()
        # A compaction, in its own time, makes the live files smaller and the bound with them. Each commit
        # then records a part again. Once all live files are, nothing older is before them.
        live = store.live_bytes
        beyond = 0 if recorder.horizon_bytes <= 2 * live + (256 << 10) else beyond + 1
        assert beyond <= live / recording.COPY_MIN + 2
        most = max(most, live)
        assert recorder.horizon_bytes <= 4 * most + (256 << 10)
    hints = recorder.build_hints()
    assert len(log.data) > 5 * recorder.horizon_bytes, "the test wrote too little to show anything"
    content = digest(content_of(store))
    store.destroy()

    # What the hints do not need may be pruned: nothing before the horizon is read again.
    replay(pruned(log.data, hints), scratch / "pruned", hints=hints)
    assert reopen(scratch / "pruned")[1] == content


def test_a_file_that_is_removed_late_holds_the_horizon_up_for_one_commit(scratch: Path) -> None:
    """RocksDB removes files some time after the manifest that ends them. The next one may be far away."""
    recorder = new_recorder(MemoryLog(), scratch / "first")
    store = open_store(recorder, RocksDBOptions())
    obsolete = scratch / "first" / "999999.sst"
    obsolete.write_bytes(bytes(1000))
    store.put(b"a", b"1")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    store._families["default"].flush(True)
    store.start_commit(SHARD, Checkpoint(), ()).result()
    assert "/999999.sst" in recorder.live_paths()
    obsolete.unlink()
    recorded = store._recording
    syncs = recorded.syncs
    store.put(b"b", b"1")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    assert recorded.syncs == syncs
    # It is the oldest file of the log, and its turn to be recorded again.
    assert recorded._begin_copy(recorded._tracked["999999.sst"]) is None
    store.put(b"c", b"1")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    assert "/999999.sst" not in recorder.live_paths()
    assert recorded.syncs == syncs + 1
    store.destroy()


def test_a_write_that_bypasses_the_wal_is_noticed(scratch: Path) -> None:
    """Sequence numbers that are in no WAL force a look at all files, and what they gave is recorded."""
    log = MemoryLog()
    store = open_store(new_recorder(log, scratch / "first"), RocksDBOptions())
    store.put(b"a", b"1")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    syncs = store._recording.syncs
    store.put(b"b", b"1")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    assert store._recording.syncs == syncs
    around = rocksdict.WriteOptions()
    around.disable_wal = True
    store._database.put(b"c", b"1", around)
    store.start_commit(SHARD, Checkpoint(), ()).result()
    assert store._recording.syncs == syncs + 1
    store.destroy()


def test_a_fenced_owner_fails_at_once_and_is_released(scratch: Path) -> None:
    """RocksDB's threads never wait for the log: a zombie's store can be destroyed like any other."""

    class FencedLog(MemoryLog):
        fenced = False

        def enqueue(self, content: bytes) -> OpFuture[Any]:
            return failed(Fenced("a newer owner")) if self.fenced else super().enqueue(content)

    log = FencedLog()
    store = open_store(new_recorder(log, scratch / "first"), TINY)
    store.put(b"a", b"1")
    store.start_commit(SHARD, Checkpoint(), ()).result()
    log.fenced = True
    for index in range(2000):
        store.put(b"a%d" % index, bytes(200))
    store._families["a"].flush(False)
    with pytest.raises(Fenced):
        store.start_commit(SHARD, Checkpoint(), ()).result()
    store.put(b"a", b"2")
    with pytest.raises(Fenced):
        store.start_commit(SHARD, Checkpoint(), ()).result()
    store.destroy()
    reopen(scratch / "first")  # The lock is free.


@pytest.mark.timeout(3600)
def test_files_that_change_while_they_are_gathered(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushes and compactions between any two steps of a look at all files make it look again."""
    rng = random.Random("race")
    original = RocksDBRecording._look
    holder: list[RocksDBStore] = []
    looks = 0

    def look(self: RocksDBRecording) -> Any:
        nonlocal looks
        looks += 1
        if holder and rng.randrange(4) == 0:
            family = holder[0]._families[rng.choice(FAMILIES)]
            family.flush(True)
            if rng.randrange(3) == 0:
                family.compact_range(None, None)
        return original(self)

    monkeypatch.setattr(RocksDBRecording, "_look", look)
    recorded = Recorded()
    store = open_store(new_recorder(recorded.log, scratch / "first"), TINY)
    holder.append(store)
    run(recorded, store, rng, 60)
    store.destroy()
    assert looks > 2 * recorded.syncs + 60
    ends = [end for end in recorded.log.ends if end >= recorded.ends[0]]
    check_cuts(recorded, rng.sample(ends, min(len(ends), CUTS)), scratch)


def test_a_foreign_log_is_refused(scratch: Path) -> None:
    from gazette.errors import Invalid
    from gazette.stores.json_file import JSONFileStore

    log = MemoryLog()
    other = JSONFileStore(new_recorder(log, scratch / "first"), dict)
    other.start_commit(SHARD, Checkpoint(), ()).result()
    with raises(Invalid, files="/state.json"):
        RocksDBStore(take_over(log, scratch / "second", random.Random(1)))


def test_a_new_file_with_the_name_of_a_recorded_one(scratch: Path) -> None:
    """After a fail-over RocksDB gives numbers again that a former owner's unfinished files had."""
    log = MemoryLog()
    recorder = new_recorder(log, scratch / "first")
    store = open_store(recorder, TINY)
    store.start_commit(SHARD, Checkpoint(), ()).result()
    with recorder.group() as group:
        group.write(group.create("/999999.sst"), 0, b"unfinished" * 50)
        group.write(group.create("/999998.log"), 0, b"unfinished" * 50)
    store.destroy()

    directory = scratch / "second"
    recording = RocksDBRecording(take_over(log, directory, random.Random(1)))
    recording.adopt()
    for name in ("999999.sst", "999998.log"):
        (directory / name).unlink()
        (directory / name).write_bytes(b"new")
    recording.start(lambda: 0, list)
    recording.close()
    replay(bytes(log.data), scratch / "third")
    for name in ("999999.sst", "999998.log"):
        assert (scratch / "third" / name).read_bytes() == b"new"
