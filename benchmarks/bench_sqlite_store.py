"""The cost of recording for a SQLite store, against a bare apsw loop of the same statements in the same run.

::

    python benchmarks/bench_sqlite_store.py [--seconds 2] [--modes redo,vfs]

For transactions of 1, 100 and 10,000 rows (of 108 bytes, updated at random, beside a checkpoint of one
source): the time of a transaction of the bare loop (WAL, synchronous=OFF), of the store, and their
difference; and the bytes of the log per byte that the transaction changed. Appends go to a log in
memory: what brokers take is not part of it. Runs of both alternate, and the best of each counts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import apsw

from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.stores.sqlite.store import CHECKPOINT_TABLE, SQLiteStore
from gazette.testing.recovery import MemoryLog, take_over

ROWS = 100_000
ROW_BYTES = 108
SCHEMA = "CREATE TABLE IF NOT EXISTS kv (k INTEGER PRIMARY KEY, v BLOB)"
UPDATE = "UPDATE kv SET v = ? WHERE k = ?"
SAVE = (
    "INSERT INTO gazette_checkpoint VALUES (0, ?)"
    " ON CONFLICT (rowid) DO UPDATE SET checkpoint = excluded.checkpoint"
)


def changes(rng: random.Random, rows: int) -> list[tuple[bytes, int]]:
    return [(rng.randbytes(100), rng.randrange(ROWS)) for _ in range(rows)]


def checkpoint(number: int) -> Checkpoint:
    producer = ProducerState(last_ack=(1 << 60) + number, begin=None)
    return Checkpoint({"a/source/journal": SourceCheckpoint(number * 1000, {b"abcdef": producer})})


class Bare:
    """The same statements, without a store."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.connection = apsw.Connection(str(directory / "bare.db"))
        for pragma in ("journal_mode=WAL", "synchronous=OFF", "wal_autocheckpoint=4000"):
            self.connection.execute(f"PRAGMA {pragma}").fetchall()
        self.connection.execute("PRAGMA cache_size=-65536").fetchall()
        self.connection.execute(CHECKPOINT_TABLE)
        self.connection.execute(SCHEMA)
        self.number = 0
        self.connection.execute("BEGIN")
        self.connection.executemany(
            "INSERT INTO kv VALUES (?, ?)", ((k, rng.randbytes(100)) for k in range(ROWS))
        )
        self.connection.execute("COMMIT")

    def transaction(self, rows: list[tuple[bytes, int]]) -> None:
        self.number += 1
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(UPDATE, rows)
        self.connection.execute(SAVE, (checkpoint(self.number).to_bytes(),))
        self.connection.execute("COMMIT")


class Stored:
    """The store, on a log in memory."""

    def __init__(self, directory: Path, rng: random.Random, mode: Any) -> None:
        self.log = MemoryLog()
        self.store = SQLiteStore(take_over(self.log, directory / mode, rng), SCHEMA, mode=mode)
        self.number = 0
        self.store.executemany(
            "INSERT INTO kv VALUES (?, ?)", ((k, rng.randbytes(100)) for k in range(ROWS))
        )
        self.transaction([])

    def transaction(self, rows: list[tuple[bytes, int]]) -> None:
        self.number += 1
        if rows:
            self.store.executemany(UPDATE, rows)
        self.store.start_commit(None, checkpoint(self.number), ()).result()  # type: ignore[arg-type]


def measured(
    transaction: Callable[[Any], None], rows: int, rng: random.Random, seconds: float
) -> tuple[float, float]:
    """Return the microseconds (of time, of this thread's processor) of one transaction."""
    count, elapsed, busy = 0, 0.0, 0.0
    while elapsed < seconds:
        batch = changes(rng, rows)  # New values each time: SQLite does not write what is there.
        began, began_busy = perf_counter(), thread_time()
        transaction(batch)
        elapsed += perf_counter() - began
        busy += thread_time() - began_busy
        count += 1
    return elapsed / count * 1e6, busy / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of three runs of each")
    parser.add_argument("--modes", default="redo,vfs")
    arguments = parser.parse_args()
    rng = random.Random(1)
    print(f"{ROWS} rows of {ROW_BYTES} bytes, pages of 4096; microseconds per transaction")
    print("mode    rows      bare     store  recording  (its cpu)   log B/txn  per byte changed")
    memory = Path("/dev/shm")
    for mode in arguments.modes.split(","):
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
            bare, stored = Bare(Path(name), rng), Stored(Path(name), rng, mode)
            for rows in (1, 100, 10_000):
                before, first = len(stored.log.data), stored.number
                pairs = [
                    (
                        measured(bare.transaction, rows, rng, arguments.seconds),
                        measured(stored.transaction, rows, rng, arguments.seconds),
                    )
                    for _ in range(3)
                ]
                plain, plain_cpu = (min(pair[0][i] for pair in pairs) for i in (0, 1))
                total, total_cpu = (min(pair[1][i] for pair in pairs) for i in (0, 1))
                logged = (len(stored.log.data) - before) / (stored.number - first)
                changed = rows * ROW_BYTES + len(checkpoint(1000).to_bytes())
                print(
                    f"{mode:5} {rows:6} {plain:9.1f} {total:9.1f} {total - plain:10.1f}"
                    f" {total_cpu - plain_cpu:10.1f} {logged:11.0f} {logged / changed:10.2f}"
                )
            stored.store.destroy()
            bare.connection.close()


if __name__ == "__main__":
    main()
