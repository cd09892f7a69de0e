"""Which keys of a RocksDB store are Gazette's, and the form of tables that others read."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from gazette.consumer.timers.timer import BEFORE_ALL, TimeDomain, TimerRow
from gazette.errors import Invalid
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.recoverylog.rocksdb.keys import (
    CHECKPOINT_KEY,
    EVENT_TIME_KEY,
    MARK_PREFIX,
    TIMER_AT_PREFIX,
    TIMER_KEY_PREFIX,
    mark_key,
)
from gazette.recoverylog.shard_state import ShardState
from gazette.stores.rocksdb.store import RocksDBOptions, RocksDBStore
from gazette.testing.recovery import MemoryLog, replay, take_over
from tests.facts import raises

rocksdict: Any = pytest.importorskip("rocksdict")

SHARD: Any = None
RESERVED = (CHECKPOINT_KEY, MARK_PREFIX, TIMER_AT_PREFIX, TIMER_KEY_PREFIX, EVENT_TIME_KEY)
CHECKPOINT = Checkpoint({"a/source": SourceCheckpoint(7)})
_VERSION = struct.Struct("<I8x")
"""The last bytes of a table: the version of its form, and a magic number."""


def commit(store: RocksDBStore) -> None:
    store.start_commit(SHARD, CHECKPOINT, ()).result()


def near(rng: random.Random) -> bytes:
    """Return a key that is close to a reserved one, mostly."""
    key = bytearray(rng.choice(RESERVED))
    match rng.randrange(6):
        case 0:
            key[rng.randrange(len(key))] = rng.randrange(256)
        case 1:
            del key[rng.randrange(len(key)) :]
        case 2:
            key[-1] = 0
        case 3:
            return rng.randbytes(rng.randrange(3))
        case 4:
            return b"\x00" + rng.randbytes(rng.randrange(3))
        case _:
            return bytes((rng.choice(b"\x00\x01a\xff"),)) * rng.randrange(1, 4)
    return bytes(key)


def is_ours(key: bytes) -> bool:
    return key.startswith(RESERVED)


def spanned(
    model: dict[bytes, bytes], begin: bytes | None, end: bytes | None
) -> list[tuple[bytes, bytes]]:
    return sorted(
        (key, value)
        for key, value in model.items()
        if (begin is None or key >= begin) and (end is None or key < end)
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_key_but_ours_is_the_applications(seed: int, tmp_path: Path) -> None:
    """As the original has it: random keys around ours, in transactions, views, and all readers of a log."""
    rng = random.Random(seed)
    log, model = MemoryLog(), dict[bytes, bytes]()
    store = RocksDBStore(take_over(log, tmp_path / "one", rng))
    timers = store.timer_table(SHARD)
    timers.put(TimeDomain.EVENT, TimerRow(5, "timer", b"payload"))
    commit(store)
    for step in range(400):
        key, other = near(rng), near(rng)
        match rng.randrange(7):
            case 0 | 1 | 2 if is_ours(key):
                with raises(Invalid, key=key.hex()):
                    store.put(key, b"")
                with raises(Invalid, key=key.hex()):
                    store.delete(key)
            case 0 | 1 | 2:
                store.put(key, model.setdefault(key, b"%d" % step))
            case 3 if not is_ours(key):
                store.delete(key)
                model.pop(key, None)
            case 4 if rng.random() < 0.2:
                store.delete_range(key, other)
                for gone, _ in spanned(model, key, other):
                    del model[gone]
            case 5:
                commit(store)
            case _:
                expected = spanned(model, key, other)
                assert list(store.iterate(begin=key, end=other)) == expected
                assert list(store.iterate(begin=key, end=other, reverse=True)) == expected[::-1]
                with store.view() as view:
                    assert list(view.iterate(begin=key, end=other)) == expected
    store.delete_range(b"", b"\xff" * 5)
    assert not list(store.iterate())
    for key, value in model.items():
        store.put(key, value)
    commit(store)
    assert store.restore_checkpoint(SHARD) == CHECKPOINT
    assert timers.first(TimeDomain.EVENT, BEFORE_ALL) == 5
    assert store.get(mark_key("a/source")) is not None
    store.destroy()
    replay(bytes(log.data), tmp_path / "two")
    with ShardState(tmp_path / "two") as state:
        assert list(state.iterate()) == spanned(model, None, None)
        assert state.checkpoint == CHECKPOINT


def forms(directory: Path) -> dict[str, int]:
    """Return the version of the form of each table of a database."""
    return {
        path.name: _VERSION.unpack(path.read_bytes()[-_VERSION.size :])[0]
        for path in directory.glob("*.sst")
    }


def write(store: RocksDBStore, rng: random.Random) -> None:
    """Write what fills several memtables of 64 KiB, so that there are new tables."""
    for family in store.column_families:
        for number in range(30):
            store.put(b"%d" % number, rng.randbytes(20_000), column_family=family)
            commit(store)


def test_new_tables_have_a_form_that_older_versions_of_rocksdb_read(tmp_path: Path) -> None:
    """Also those of a database whose recorded options still name the binding's default."""
    rng, log = random.Random(1), MemoryLog()

    def as_before(options: Any) -> None:
        table = rocksdict.BlockBasedOptions()
        table.set_format_version(6)
        options.set_block_based_table_factory(table)

    former = RocksDBOptions(write_buffer_bytes=64 << 10, tune=as_before)
    store = RocksDBStore(
        take_over(log, tmp_path / "one", rng), options=former, column_families={"f": former}
    )
    write(store, rng)
    store.destroy()
    known = forms(tmp_path / "one")
    assert set(known.values()) == {6}
    given = RocksDBOptions(write_buffer_bytes=64 << 10)
    for owner, options in (("two", None), ("three", given)):
        store = RocksDBStore(take_over(log, tmp_path / owner, rng), options=options)
        write(store, rng)
        store.destroy()
        found = forms(tmp_path / owner)
        new = {version for name, version in found.items() if name not in known}
        assert new == {5}
        known |= found
    writer = RocksDBStore(take_over(log, tmp_path / "four", rng))
    assert writer.get(b"0") is not None
    writer.destroy()
