"""Very many transactions on one shard's store: what its recovery log costs, and that it stays bounded.

::

    python benchmarks/soak_stores.py --store sqlite|rocksdb [--transactions 1000000] [--seed 1]
    make soak-stores

Each transaction changes one to four of ``--keys`` rows of 100 bytes, or now and then inserts, deletes or
rewrites some hundred, and has a checkpoint of one source. The log is kept as fragments, which are
pruned as ``gazctl shards prune`` does by the hints that a shard would keep (the primary's and two backups).

Checked, after each transaction: that a recovery from fresh hints would read at most twice the live state and
64 MiB. And ten times on the way, and at the end: that a new owner with nothing but the pruned log
finds exactly the rows and the checkpoint of the last transaction. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Protocol

from gazette.blobs.file import FileStore
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, FragmentLog, take_over

ROW_BYTES = 100
HORIZON_SLACK = 64 << 20
FAIL_OVERS = 10
BACKUPS = 2
HINTS_EVERY = 10_000
PUT = "INSERT INTO kv VALUES (?, ?) ON CONFLICT DO UPDATE SET v = excluded.v"
SCHEMA = "CREATE TABLE IF NOT EXISTS kv (k INTEGER PRIMARY KEY, v BLOB NOT NULL)"


def row(key: int, version: int) -> bytes:
    """Return the content of a row: it differs with every version, and does not compress."""
    return random.Random(key << 32 | version).randbytes(ROW_BYTES)


class Rows(Protocol):
    """A store as a map of numbered rows."""

    @property
    def store(self) -> SQLiteStore | RocksDBStore: ...

    def put(self, key: int, value: bytes) -> None: ...

    def delete(self, key: int) -> None: ...

    def items(self) -> Iterator[tuple[int, bytes]]: ...


class SQLiteRows:
    def __init__(self, recorder: Recorder) -> None:
        self.store = SQLiteStore(recorder, SCHEMA)

    def put(self, key: int, value: bytes) -> None:
        self.store.execute(PUT, (key, value))

    def delete(self, key: int) -> None:
        self.store.execute("DELETE FROM kv WHERE k = ?", (key,))

    def items(self) -> Iterator[tuple[int, bytes]]:
        return iter(self.store.query("SELECT k, v FROM kv"))


class RocksDBRows:
    def __init__(self, recorder: Recorder) -> None:
        self.store = RocksDBStore(recorder)

    def put(self, key: int, value: bytes) -> None:
        self.store.put(b"k%015d" % key, value)

    def delete(self, key: int) -> None:
        self.store.delete(b"k%015d" % key)

    def items(self) -> Iterator[tuple[int, bytes]]:
        return ((int(key[1:]), value) for key, value in self.store.iterate(b"k"))


def checkpoint(number: int) -> Checkpoint:
    producer = ProducerState(last_ack=(1 << 60) + number, begin=None)
    return Checkpoint({"a/source/journal": SourceCheckpoint(number * 1000, {b"abcdef": producer})})


class Soak:
    """One run. ``versions`` is the model: which version of each row there is."""

    def __init__(self, kind: str, seed: int, keys: int, directory: Path) -> None:
        self.kind = kind
        self.keys = keys
        self.rng = random.Random(seed)
        self.directory = directory
        (directory / "log").mkdir()
        store = FileStore(directory, FragmentStoreUrl.parse("file:///log/"))
        self.log = FragmentLog(store)
        self.versions: dict[int, int] = {}
        self.number = 0
        self.changed_bytes = 0
        self.owners = 0
        self.primary = FSMHints(log=LOG)
        self.backups: list[FSMHints] = []
        self.worst = 0.0
        self.horizon_max = 0
        self.recoveries: list[tuple[int, float, float]] = []
        self.recorder: Recorder
        self.rows: Rows
        self._own()

    def _own(self) -> None:
        """Become the next owner of the log, with nothing but it and the newest hints."""
        self.owners += 1
        begin = perf_counter()
        target = self.directory / f"owner-{self.owners}"
        self.recorder = take_over(self.log, target, self.rng, hints=self.primary)
        played = perf_counter()
        recovered = self.recorder.fsm.build_hints(LOG)
        self.rows = (SQLiteRows if self.kind == "sqlite" else RocksDBRows)(self.recorder)
        if self.number:
            self.recoveries.append(
                (self.recorder.horizon_bytes, played - begin, perf_counter() - begin)
            )
            self.backups = [recovered, *self.backups][:BACKUPS]

    def transaction(self) -> None:
        rng, rows = self.rng, self.rows
        self.number += 1
        fate = rng.random()
        if fate < 0.9 or not self.versions:
            changed = [rng.randrange(self.keys) for _ in range(rng.randrange(1, 5))]
        elif fate < 0.9995:
            changed = []
            for key in {rng.randrange(self.keys) for _ in range(2)} & self.versions.keys():
                rows.delete(key)
                del self.versions[key]
                self.changed_bytes += 8
        else:
            first = rng.randrange(self.keys)
            changed = [(first + step) % self.keys for step in range(400)]
        for key in changed:
            rows.put(key, row(key, self.number))
            self.versions[key] = self.number
        state = checkpoint(self.number)
        self.changed_bytes += len(changed) * (8 + ROW_BYTES) + len(state.to_bytes())
        rows.store.start_commit(None, state, ()).result()  # type: ignore[arg-type]
        horizon, live = self.recorder.horizon_bytes, rows.store.live_bytes
        self.horizon_max = max(self.horizon_max, horizon)
        ratio = horizon / (2 * live + HORIZON_SLACK)
        if ratio > self.worst:
            self.worst = ratio
            if ratio > 1:
                raise SystemExit(
                    f"horizon {horizon} exceeds 2 * {live} + 64 MiB after transaction {self.number}"
                )
        if self.number % HINTS_EVERY == 0:
            self.primary = self.recorder.build_hints()
            self.log.prune([self.primary, *self.backups])

    def fail_over(self) -> None:
        self.rows.store.destroy()
        shutil.rmtree(self.recorder.directory)
        self._own()
        self.check()

    def check(self) -> None:
        restored = self.rows.store.restore_checkpoint(None)  # type: ignore[arg-type]
        if restored != checkpoint(self.number):
            raise SystemExit(f"the checkpoint of transaction {self.number} is {restored}")
        found = 0
        for key, value in self.rows.items():
            if value != row(key, self.versions.get(key, -1)):
                raise SystemExit(f"row {key} is not of version {self.versions.get(key)}")
            found += 1
        if found != len(self.versions):
            raise SystemExit(f"{found} rows instead of {len(self.versions)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--store", choices=("sqlite", "rocksdb"), required=True)
    parser.add_argument("--transactions", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="where files go (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gazette-soak-", dir=options.directory) as scratch:
        begin = perf_counter()
        soak = Soak(options.store, options.seed, options.keys, Path(scratch))
        step = max(1, options.transactions // FAIL_OVERS)
        while soak.number < options.transactions:
            soak.transaction()
            if soak.number % step == 0:
                soak.fail_over()
                horizon, _, opened = soak.recoveries[-1]
                print(
                    f"{soak.number} transactions in {perf_counter() - begin:.0f} s: log"
                    f" {soak.log.end / 1e6:.0f} MB ({soak.log.pruned_bytes / 1e6:.0f} MB pruned), live"
                    f" {soak.rows.store.live_bytes / 1e6:.1f} MB, horizon {horizon / 1e6:.1f} MB,"
                    f" recovered in {opened:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
        soak.rows.store.destroy()
        last = soak.recoveries[-1]
        report = {
            "store": options.store,
            "seed": options.seed,
            "transactions": soak.number,
            "seconds": round(perf_counter() - begin),
            "owners": soak.owners,
            "rows": len(soak.versions),
            "log_bytes": soak.log.end,
            "pruned_bytes": soak.log.pruned_bytes,
            "changed_bytes": soak.changed_bytes,
            "log_bytes_per_byte_changed": round(soak.log.end / soak.changed_bytes, 2),
            "horizon_bytes_max": soak.horizon_max,
            "horizon_of_bound_max": round(soak.worst, 3),
            "cold_recovery_seconds_max": round(max(one[2] for one in soak.recoveries), 2),
            "cold_recovery_of_bytes": last[0],
            "playback_mb_per_second": round(last[0] / 1e6 / last[1], 1),
            "rss_max_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            "cpus": os.cpu_count(),
        }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
