"""A recovery log with the operations by which the original records RocksDB plays back to a database.

`make_rocksdb_log` says how it was made. It holds three generations of one database: files that are made,
appended to, renamed and removed, one operation per append, without times.
"""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import pytest

from gazette.protocol.hints import FSMHints
from gazette.recoverylog import Moment, open_at
from gazette.recoverylog.log.ops import Create, Link, SetProperty, Unlink, Write
from gazette.recoverylog.playback.playback import Playback
from gazette.testing.recovery import LOG, MemoryLog, MemoryLogs, replay

rocksdict = pytest.importorskip("rocksdict")
DATA = gzip.decompress((Path(__file__).parent / "testdata" / "rocksdb.log.gz").read_bytes())
DELETED = {b"key %03d" % number for number in range(100, 110)}


def expected(generation: int) -> dict[bytes, bytes]:
    """Return what the work of `make_rocksdb_log` leaves."""
    state: dict[bytes, bytes] = {}
    for one in range(generation + 1):
        for number in range(300):
            value = b"%d %d " % (one, number) + b"v" * 90
            state[b"key %03d" % ((number * 7 + one) % 200)] = value
        for key in DELETED:
            state.pop(key, None)
    return state | {b"generation": b"%d" % generation}


def test_its_operations_are_those_of_the_original() -> None:
    kinds: Counter[type] = Counter()
    playback = Playback(FSMHints(LOG), observer=lambda op, _: kinds.update([type(op.action)]))
    playback.feed(DATA)
    assert set(kinds) == {Create, Write, Link, Unlink, SetProperty}
    assert list(playback.fsm.properties) == ["/IDENTITY"]
    assert playback.op_count == kinds.total() > 1000


def test_it_plays_back_to_a_database(tmp_path: Path) -> None:
    """Which rocksdict opens, to read and to go on with."""
    fsm = replay(DATA, tmp_path / "db")
    assert (tmp_path / "db" / "IDENTITY").read_text() == fsm.properties["/IDENTITY"]
    assert not list((tmp_path / "db").glob("*.dbtmp"))
    database = rocksdict.Rdict(str(tmp_path / "db"), rocksdict.Options(raw_mode=True))
    assert dict(database.items()) == expected(2)
    database.put(b"more", b"value")
    database.close()


def test_its_hints_are_enough(tmp_path: Path) -> None:
    """Files that are gone are not read again."""
    hints = replay(DATA, tmp_path / "all").build_hints(LOG)
    begin = min(node.segments[0].first_offset for node in hints.live_nodes)
    assert begin > 0
    with open_at(MemoryLogs(MemoryLog(DATA), begin=begin), [hints], tmp_path / "state") as state:
        assert dict(state.iterate()) == expected(2)


def test_any_moment_of_it_opens(tmp_path: Path) -> None:
    """Single operations were appended, so the state of any offset is one that a crash may leave: what was
    written before is there, as far as it was whole."""
    rng = random.Random(1)
    source, hints = MemoryLogs(MemoryLog(DATA)), [FSMHints(log=LOG)]
    every = {value for generation in range(3) for value in expected(generation).values()}
    numbers = []
    for offset in sorted(rng.randrange(len(DATA) // 4, len(DATA)) for _ in range(6)):
        with open_at(source, hints, tmp_path / str(offset), Moment(offset=offset)) as state:
            found = dict(state.iterate())
            assert offset - (32 << 10) < state.offset <= offset
            assert len(found) > 10
            numbers.append(max(int(value.split()[0]) for value in found.values()))
            assert all(len(value) > 90 or value in every for value in found.values())
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 1
