"""What applications see of a RocksDB store: a transaction's own writes, views, families, reserved keys."""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Closed, Corrupt, Invalid
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.rocksdb.keys import (
    CHECKPOINT_KEY,
    MARK_PREFIX,
    decode_offset,
    encode_offset,
    journal_of,
    mark_key,
)
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from gazette.stores.rocksdb.wal import _FIRST, _LAST, batches, records
from gazette.testing.recovery import LOG, MemoryLog, take_over
from tests.facts import is_advised, raises
from tests.support.missing import missing

rocksdict: Any = pytest.importorskip("rocksdict")

SHARD: Any = None  # Stores take nothing of their shard.


def recorder_of(log: MemoryLog, directory: Path) -> Recorder:
    directory.mkdir(parents=True, exist_ok=True)
    fsm = RecoveryFSM(FSMHints(log=LOG))
    return Recorder(fsm, 1234, directory, log, LOG, 0)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def commit(store: RocksDBStore, checkpoint: Checkpoint | None = None) -> None:
    store.start_commit(SHARD, checkpoint or Checkpoint(), ()).result()


def test_reserved_keys_are_those_of_the_go_original() -> None:
    assert CHECKPOINT_KEY.hex() == "0012636865636b706f696e740001"
    assert MARK_PREFIX.hex() == "00126d61726b0001"
    assert encode_offset(5).hex() == "8d"
    assert encode_offset(1234).hex() == "f704d2"
    assert journal_of(mark_key("a/journal")) == "a/journal"
    for offset in (0, 1, 109, 110, 255, 256, 1 << 20, (1 << 63) - 1):
        assert decode_offset(encode_offset(offset)) == offset
    encoded = [encode_offset(offset) for offset in (0, 109, 110, 255, 256, 65535, 65536, 1 << 40)]
    assert encoded == sorted(encoded)
    for bad in (b"", b"\x01", b"\x8d\x00", b"\xf7\x01"):
        with pytest.raises(Corrupt):
            decode_offset(bad)


def test_legacy_marks_are_the_checkpoint_where_there_is_no_other(
    log: MemoryLog, tmp_path: Path
) -> None:
    store = RocksDBStore(recorder_of(log, tmp_path / "one"))
    full = Checkpoint(sources={"a/b": SourceCheckpoint(1234), "c": SourceCheckpoint(7)})
    commit(store, full)
    assert store._database.get(mark_key("a/b")).hex() == "f704d2"
    assert store.restore_checkpoint(SHARD) == full
    store._database.delete(CHECKPOINT_KEY)
    assert store.restore_checkpoint(SHARD) == full
    store.destroy()


def test_a_transaction_sees_its_own_writes(log: MemoryLog, tmp_path: Path) -> None:
    """Random operations, compared with a dict, in the middle of transactions and across them."""
    rng = random.Random(11)
    store = RocksDBStore(recorder_of(log, tmp_path / "one"), column_families=["f"], batch_bytes=64)
    models: dict[str, dict[bytes, bytes]] = {"default": {}, "f": {}}
    for _ in range(1500):
        family = rng.choice(("default", "f"))
        model = models[family]
        key = bytes((rng.choice(b"ab\xff"), rng.randrange(1, 30)))
        match rng.randrange(10):
            case 0 | 1 | 2:
                value = rng.randbytes(rng.randrange(30))
                store.put(key, value, column_family=family)
                model[key] = value
            case 3:
                store.delete(key, column_family=family)
                model.pop(key, None)
            case 4:
                end = key[:1] + bytes((key[1] + rng.randrange(4),))
                store.delete_range(key, end, column_family=family)
                for gone in [k for k in model if key <= k < end]:
                    del model[gone]
            case 5:
                assert store.get(key, column_family=family) == model.get(key)
            case 6 | 7:
                prefix = rng.choice((b"", b"a", b"\xff"))
                bounds: tuple[tuple[bytes | None, bytes | None], ...] = (
                    (None, None),
                    (key, None),
                    (None, key),
                    (b"a", key),
                )
                low, high = rng.choice(bounds)
                reverse = rng.random() < 0.5
                expected = sorted(
                    (
                        (k, v)
                        for k, v in model.items()
                        if k.startswith(prefix)
                        and (low is None or k >= low)
                        and (high is None or k < high)
                    ),
                    reverse=reverse,
                )
                found = store.iterate(
                    prefix, begin=low, end=high, reverse=reverse, column_family=family
                )
                assert list(found) == expected
            case 8 if rng.randrange(4) == 0:
                commit(store)
            case _:
                pass
    commit(store)
    for family, model in models.items():
        assert dict(store.iterate(column_family=family)) == model
        with store.view() as view:
            assert list(view.iterate(reverse=True, column_family=family)) == sorted(
                model.items(), reverse=True
            )
    store.destroy()


def test_views_are_of_one_commit(log: MemoryLog, tmp_path: Path) -> None:
    """Threads that read while commits of many batches are written never see half of one."""
    store = RocksDBStore(recorder_of(log, tmp_path / "one"), batch_bytes=200)
    keys = [b"k%03d" % n for n in range(100)]
    failures: list[object] = []
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            with store.view() as view:
                values = {value for _, value in view.iterate(b"k")}
                values |= {value for key in keys[::9] if (value := view.get(key)) is not None}
                seen.update(values)
                if len(values) > 1:
                    failures.append(values)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(100):
        for key in keys:
            store.put(key, b"%d" % number)
        commit(store)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(seen) > 1
    store.destroy()


def test_destroy_ends_views_and_releases_the_lock(log: MemoryLog, tmp_path: Path) -> None:
    store = RocksDBStore(recorder_of(log, tmp_path / "one"), column_families=["f"])
    store.put(b"a", b"1")
    store.put(b"b", b"2")
    commit(store)
    view = store.view()
    scan, ours = view.iterate(), store.iterate()
    assert next(scan) == next(ours) == (b"a", b"1")
    store.destroy()
    store.destroy()
    for use in (lambda: next(scan), lambda: next(ours), lambda: view.get(b"a"), store.view):
        with pytest.raises(Closed):
            use()
    with pytest.raises(Closed):
        store.put(b"a", b"1")
    families = {"f": rocksdict.Options(raw_mode=True)}
    database = rocksdict.Rdict(str(tmp_path / "one"), rocksdict.Options(raw_mode=True), families)
    assert database.get(b"b") == b"2"
    database.close()


def test_families_and_options_survive_that_they_are_not_named_any_more(
    log: MemoryLog, tmp_path: Path
) -> None:
    first = RocksDBStore(
        recorder_of(log, tmp_path / "one"),
        column_families={"old": RocksDBOptions(write_buffer_bytes=1 << 20, compression="zstd")},
    )
    first.put(b"\x00any", b"1", column_family="old")
    commit(first)
    first.destroy()
    second = RocksDBStore(
        take_over(log, tmp_path / "two", random.Random(1)), column_families=["new"]
    )
    assert second.get(b"\x00any", column_family="old") == b"1"
    text = second._recording.options_text()
    old = text[text.index('[CFOptions "old"]') :]
    old = old[: old.index("[TableOptions")]
    assert "compression=kZSTD" in old
    assert "write_buffer_size=1048576" in old
    second.put(b"x", b"2", column_family="new")
    commit(second)
    second.destroy()
    third = RocksDBStore(take_over(log, tmp_path / "three", random.Random(2)))
    assert third.get(b"x", column_family="new") == b"2"
    with raises(Invalid, says="'never'"):
        third.get(b"x", column_family="never")
    third.destroy()


def test_wrong_calls_say_so(log: MemoryLog, tmp_path: Path) -> None:
    with raises(Invalid, says="RocksDBStore"):
        RocksDBStore(None)
    store = RocksDBStore(recorder_of(log, tmp_path / "one"))
    with pytest.raises(Invalid, match="bytes"):
        store.put("text", b"")  # type: ignore[arg-type]
    store.destroy()
    with raises(Invalid, says="WAL"):
        RocksDBStore(
            recorder_of(MemoryLog(), tmp_path / "tuned"),
            options=RocksDBOptions(tune=lambda o: o.set_wal_dir(str(tmp_path / "elsewhere"))),
        )
    with missing("rocksdict"), pytest.raises(Invalid) as raised:
        RocksDBStore(recorder_of(MemoryLog(), tmp_path / "none"))
    assert "pygazette[rocksdb]" in str(raised.value)


def test_other_threads_run_during_a_large_commit(log: MemoryLog, tmp_path: Path) -> None:
    """Batches are bounded, and stalls of RocksDB are waited for outside of the interpreter's lock."""
    options = RocksDBOptions(write_buffer_bytes=256 << 10, background_jobs=1)
    store = RocksDBStore(recorder_of(log, tmp_path / "one"), options=options)
    turns, stop = 0, threading.Event()

    def run() -> None:
        nonlocal turns
        while not stop.wait(0.0005):
            turns += 1

    thread = threading.Thread(target=run)
    for number in range(20_000):
        store.put(b"%08d" % number, bytes(400))
    thread.start()
    commit(store)
    stop.set()
    thread.join()
    assert turns > 3
    assert sum(1 for _ in store.iterate()) == 20_000
    store.destroy()


def test_batches_of_a_real_wal(tmp_path: Path) -> None:
    """Every batch is found, across blocks of 32 KiB, from any boundary between two of them."""
    rng = random.Random(3)
    database = rocksdict.Rdict(str(tmp_path / "db"), rocksdict.Options(raw_mode=True))
    (wal,) = (tmp_path / "db").glob("*.log")
    expected: list[tuple[int, int]] = []
    sizes = [0]
    for _ in range(300):
        batch = rocksdict.WriteBatch(raw_mode=True)
        count = rng.randrange(1, 6)
        for _ in range(count):
            batch.put(rng.randbytes(8), rng.randbytes(rng.choice((0, 10, 1000, 40_000))))
        expected.append((database.latest_sequence_number() + 1, count))
        database.write(batch)
        sizes.append(wal.stat().st_size)
    data = wal.read_bytes()
    database.close()
    assert batches(data, 0) == expected
    for number, size in enumerate(sizes):
        assert batches(data[size:], size) == expected[number:]
        assert batches(data[size : size + 5], size) in (None, [])
    assert batches(data[: sizes[5] - 1], 0) is None
    assert batches(b"\0" * 100, 0) is None


def test_a_damaged_table_is_no_short_answer(log: MemoryLog, tmp_path: Path) -> None:
    """RocksDB's iterators end where they cannot read on; scans of stores, views and states say so."""
    options = RocksDBOptions(compression="none")
    store = RocksDBStore(recorder_of(log, tmp_path / "one"), options=options)
    for number in range(20_000):
        store.put(b"%06d" % number, random.Random(number).randbytes(40))
    commit(store)
    store.destroy()
    # An owner that opens the database makes a table of what its WAL has.
    store = RocksDBStore(take_over(log, tmp_path / "again", random.Random(1)))
    commit(store)
    store.destroy()
    recorder = take_over(log, tmp_path / "two", random.Random(2))
    table = max((tmp_path / "two").glob("*.sst"), key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(b"\xff" * 200)
    store = RocksDBStore(recorder)
    with store.view() as view:
        for scan in (store.iterate(), view.iterate(), store.iterate(reverse=True)):
            with pytest.raises(Corrupt) as raised:
                list(scan)
            assert is_advised(raised.value)
        for get in (store.get, view.get):
            with pytest.raises(Corrupt):
                for number in range(20_000):
                    get(b"%06d" % number)
    store.destroy()


def test_options_that_are_not_given_are_those_of_before(log: MemoryLog, tmp_path: Path) -> None:
    """Of the default family, and of those that are only named; what is given goes before it."""

    def section(store: RocksDBStore, family: str) -> str:
        text = store._recording.options_text()
        begin = text.index(f'[CFOptions "{family}"]')
        return text[begin : text.index("[CFOptions", begin + 1)] if family != "f" else text[begin:]

    given = RocksDBOptions(
        compression="zstd",
        write_buffer_bytes=3 << 20,
        bloom_bits_per_key=7,
        tune=lambda options: options.set_max_bytes_for_level_base(7 << 20),
    )
    store = RocksDBStore(
        recorder_of(log, tmp_path / "one"), options=given, column_families={"f": given}
    )
    store.put(b"a", b"1")
    commit(store)
    store.destroy()
    for number in range(2):
        store = RocksDBStore(
            take_over(log, tmp_path / f"next {number}", random.Random(number)),
            column_families=["f"],
        )
        for family in ("default", "f"):
            text = section(store, family)
            assert "compression=kZSTD" in text
            assert "write_buffer_size=3145728" in text
            assert "max_bytes_for_level_base=7340032" in text
            assert "filter_policy=bloomfilter" in text
        assert store.get(b"a") == b"1"
        store.put(b"b", b"2")
        commit(store)
        store.destroy()
    store = RocksDBStore(
        take_over(log, tmp_path / "other", random.Random(9)), options=RocksDBOptions()
    )
    assert "compression=kLZ4" in section(store, "default")
    assert "compression=kZSTD" in section(store, "f")
    store.destroy()


def test_options_that_cannot_be(log: MemoryLog, tmp_path: Path) -> None:
    for options, what in (
        ({"compression": "zip"}, "unknown compression 'zip'"),
        ({"cache_bytes": -1}, "RocksDBOptions.cache_bytes: invalid value"),
        ({"write_buffer_bytes": 0}, "RocksDBOptions.write_buffer_bytes"),
        ({"background_jobs": 0}, "RocksDBOptions.background_jobs"),
    ):
        with pytest.raises(Invalid, match=what):
            RocksDBOptions(**options)
    recorder = recorder_of(log, tmp_path / "one")
    wrong: Any
    for wrong, what in (
        ({"batch_bytes": 0}, "batch_bytes"),
        ({"column_families": [""]}, "needs a name"),
        ({"column_families": ["default"]}, "as `options`"),
        ({"column_families": {"f": {"compression": "zstd"}}}, "Use RocksDBOptions|not options"),
        ({"options": RocksDBOptions(tune=lambda o: o.set_write_buffer_size(-1))}, "open the data"),
    ):
        with pytest.raises(Invalid, match=what):
            RocksDBStore(recorder, **wrong)


def test_a_record_of_which_a_block_has_room_for_the_header_only() -> None:
    """RocksDB then writes a first fragment without any bytes; standbys took the next one for damage."""

    def fragment(kind: int, data: bytes) -> bytes:
        return struct.pack("<IHB", 0, len(data), kind) + data

    batch = struct.pack("<QI", 9, 1) + b"one write"
    filling = struct.pack("<QI", 8, 1).ljust((32 << 10) - 2 * 7, b"x")
    data = fragment(1, filling) + fragment(_FIRST, b"") + fragment(_LAST, batch)
    assert len(fragment(1, filling)) == (32 << 10) - 7
    assert [record for record, _ in records(data, 0)] == [filling, batch]
    assert batches(data, 0) == [(8, 1), (9, 1)]
    # Cut off behind the empty fragment, it is a record that is still to come.
    assert [record for record, _ in records(data[: 32 << 10], 0)] == [filling]
    for wrong in (fragment(_LAST, batch), fragment(_FIRST, b"") + fragment(1, batch)):
        with raises(Corrupt, "offset", "kind"):
            list(records(wrong, 0))
