"""The cost of timers, against a bare apsw loop of the same table in the same run.

::

    python benchmarks/bench_timers.py [--timers 10000000] [--stores sqlite,rocksdb]

Each measurement has a process of its own. It sets timers in transactions of 10,000, at random times,
under keys of 16 characters. Then it recovers nothing and fires all of them, in transactions of 16,384.
It prints timers per second of processor time, and the most memory that the process took. The recovery log
is dropped, so its bytes are counted and not kept. Ten million take an hour or more: each tenth is reported
on standard error, with the memory of the process then.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import process_time
from typing import Any, Final

import apsw

from gazette.consumer.timers.timer import TimeDomain
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.consumer.transaction.transactor import CONSUME_MAX, FIRED_MAX
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.fragment import Fragment
from gazette.protocol.label_set import EMPTY_LABELS
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.sqlite.timers import CREATE
from gazette.testing.clock import ManualClock
from gazette.testing.recovery import _HEADER, LOG, MemoryLog, take_over

BATCH: Final = 10_000
PAYLOAD: Final = b"twenty bytes or so.."
BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)
SPAN_S: Final = 30 * 86_400
PUT: Final = (
    "INSERT INTO gazette_timer VALUES (0, ?, ?, ?)"
    " ON CONFLICT (domain, key) DO UPDATE SET at = excluded.at, payload = excluded.payload"
)
DUE: Final = "SELECT at, key, payload FROM gazette_timer WHERE domain = 0 ORDER BY at, key LIMIT ?"
REMOVE: Final = "DELETE FROM gazette_timer WHERE domain = 0 AND (at, key) <= (?, ?)"


class DroppedLog(MemoryLog):
    """A log that counts its bytes and drops them."""

    length = 0

    @property
    def end(self) -> int:
        return self.length

    def _commit(self, content: bytes, future: Any) -> None:
        from gazette.client.append.appender import AppendResult

        begin, self.length = self.length, self.length + len(content)
        future.set_result(AppendResult(Fragment(LOG, begin, self.length), EMPTY_LABELS, _HEADER))


class Named:
    id = "shard-one"


def timers_of(rng: random.Random, count: int) -> Iterator[tuple[str, float]]:
    for _ in range(count):
        yield f"{rng.getrandbits(64):016x}", rng.random() * SPAN_S


class Progress:
    """Print each tenth of ``count``, with the seconds of processor time and the memory at that point."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._tenth = max(1, count // 10)
        self._next = self._tenth

    def report(self, done: int, began: float) -> None:
        if done < self._next:
            return
        self._next += self._tenth
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * resource.getpagesize() / 2**20
        spent = process_time() - began
        print(f"{self._name} {done} in {spent:.1f} s; {memory:.0f} MB", file=sys.stderr, flush=True)


def run_bare(directory: Path, count: int) -> dict[str, float]:
    connection = apsw.Connection(str(directory / "bare.db"))
    for pragma in ("journal_mode=WAL", "synchronous=OFF", "wal_autocheckpoint=4000"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    connection.execute("PRAGMA cache_size=-65536").fetchall()
    connection.execute(CREATE).fetchall()
    rng = random.Random(1)
    progress, began = Progress("bare: set", count), process_time()
    for first in range(0, count, BATCH):
        connection.execute("BEGIN IMMEDIATE")
        for key, at in timers_of(rng, min(BATCH, count - first)):
            connection.execute(PUT, (key, int(at * 1e6), PAYLOAD))
        connection.execute("COMMIT")
        progress.report(first + BATCH, began)
    set_s, began = process_time() - began, process_time()
    fired, progress = 0, Progress("bare: fired", count)
    while True:
        connection.execute("BEGIN IMMEDIATE")
        for _ in range(FIRED_MAX // CONSUME_MAX):
            rows = connection.execute(DUE, (CONSUME_MAX,)).fetchall()
            if not rows:
                break
            connection.execute(REMOVE, rows[-1][:2]).fetchall()
            fired += len(rows)
        connection.execute("COMMIT")
        progress.report(fired, began)
        if not rows:
            break
    return measured(count, fired, set_s, process_time() - began, 0)


def run_store(directory: Path, count: int, kind: str) -> dict[str, float]:
    log, clock = DroppedLog(), ManualClock(BEGIN.timestamp())
    recorder = take_over(log, directory / kind, random.Random(1))
    store: Any = SQLiteStore(recorder) if kind == "sqlite" else RocksDBStore(recorder)
    shard: Any = Named()
    store.restore_checkpoint(shard)
    timers = ShardTimers(lambda: store.timer_table(shard), None, (), clock, shard.id)
    transactions = 0

    def commit() -> None:
        nonlocal transactions
        transactions += 1
        timers.finish()
        checkpoint = Checkpoint({"a/source": SourceCheckpoint(transactions)})
        store.start_commit(shard, checkpoint, ()).result()

    rng = random.Random(1)
    progress, began = Progress(f"{kind}: set", count), process_time()
    for first in range(0, count, BATCH):
        timers.begin()
        for key, at in timers_of(rng, min(BATCH, count - first)):
            timers.schedule(key, BEGIN + timedelta(seconds=at), PAYLOAD, TimeDomain.PROCESSING)
        commit()
        progress.report(first + BATCH, began)
    set_s = process_time() - began
    clock.advance(SPAN_S + 1)
    progress = Progress(f"{kind}: fired", count)
    fired, began = 0, process_time()
    while timers.is_due(ready=False):
        timers.begin()
        for _ in range(FIRED_MAX // CONSUME_MAX):
            if timers.confirm_due():
                fired += sum(1 for _ in timers.fire(CONSUME_MAX))
        commit()
        progress.report(fired, began)
    fire_s = process_time() - began
    store.destroy()
    return measured(count, fired, set_s, fire_s, log.length)


def measured(count: int, fired: int, set_s: float, fire_s: float, logged: int) -> dict[str, float]:
    if fired != count:
        raise SystemExit(f"{fired} of {count} timers have fired")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "set": count / set_s,
        "fire": count / fire_s,
        "mb": memory,
        "logged": logged / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--stores", default="sqlite,rocksdb")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as name:
            if arguments.one == "bare":
                found = run_bare(Path(name), arguments.timers)
            else:
                found = run_store(Path(name), arguments.timers, arguments.one)
        print(json.dumps(found))
        return
    print(f"{arguments.timers} timers; {'':10}set/s     fire/s    most MB   log B/timer")
    for one in ("bare", *arguments.stores.split(",")):
        command = [sys.executable, __file__, "--one", one, "--timers", str(arguments.timers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        print(
            f"{one:20} {found['set']:15.0f} {found['fire']:10.0f} {found['mb']:10.0f}"
            f" {found['logged']:10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
