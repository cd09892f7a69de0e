"""Folding a history with Spark, beside what else could read it: everything in one run, over the same files.

Writes journals of JSON messages (those of ``gazette bench consume``) to a directory, in compressed fragments,
and counts their words

* by ``spark.read.json`` with a schema, which knows nothing of transactions or duplicates;
* by ``format("gazette")``, uncommitted and committed;
* as a backfill that builds and stages the SQLite stores of shards: as a DataFrame, and row by row,
  by Spark; and row by row without Spark;
* by a shard that consumes ``--consume`` messages of one of the journals, from its fragments.

Everything is run once to warm up, and then ``--repeats`` times in turn, of which the best counts: first on
a short history, where fixed costs are most of it, and then on a long one. Rates per core count the CPU
seconds of all processes: Java, Python's workers, and for the shard those of its process and of its brokers.
``--no-spark`` reads with one thread of this process, beside the shard: the least that a fold can take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import pyarrow as pa
from spark_history import SHAPES, STORE, journal_name, stored_bytes, write_history

from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.plan import tasks_of
from gazette.history.backfill.settings import RunSettings
from gazette.history.columns import MessageFormat
from gazette.history.ddl import parse_columns
from gazette.history.field_arrays import scannable
from gazette.history.first_pass import fold_by_threads
from gazette.history.meta_columns import META
from gazette.history.one_pass import read_once
from gazette.history.read import read_columns
from gazette.history.row_format import RowFormat
from gazette.history.rows import read_rows
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import EVERYTHING
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.runtime.clock import SystemClock
from tools.bench.app import Mode
from tools.bench.backfill import BenchColumns, BenchCombined, BenchRows
from tools.bench.cluster import BenchSettings, journal_spec, running
from tools.bench.messages import application, shard, shard_spec

JSON = "spark.read.json"
COMMITTED = "gazette, committed"
WORDS = "words"
"""The messages of `tools.bench.app`, which shards consume, too."""
CONSUME = "a shard that consumes"
SAMPLE_S = 0.5
Work = Callable[[], int]


@dataclass(frozen=True)
class Taken:
    """The cost of one measurement: seconds of the clock, of CPUs, and bytes of memory at the most."""

    messages: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int = 0
    peak_worker_bytes: int = 0
    java_seconds: float = 0.0
    """Java's part of the CPU seconds."""

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def rate_per_core(self) -> float:
        # The kernel counts in hundredths of a second: a short pass may have taken none.
        return self.messages / max(self.cpu_seconds, 0.01)


def tree() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


class Watch:
    """Samples the CPU time and the memory of this process and of all below it.

    Memory that they share counts once. Of a process that ends, what it used since the last sample is lost.
    """

    def __init__(self) -> None:
        self.peak = self.peak_worker = 0
        self._cpu: dict[tuple[int, float], tuple[float, float]] = {}
        self._java: set[tuple[int, float]] = set()
        self._own = 0.0
        """The cost of sampling itself."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def cpu_seconds(self) -> float:
        return sum(last - first for first, last in self._cpu.values()) - self._own

    @property
    def java_seconds(self) -> float:
        return sum(last - first for key, (first, last) in self._cpu.items() if key in self._java)

    def __enter__(self) -> Self:
        self._sample(begins=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sample()
            self._own = time.thread_time()

    def _sample(self, *, begins: bool = False) -> None:
        total = 0
        for process in tree():
            with contextlib.suppress(psutil.Error):
                key, times = (process.pid, process.create_time()), process.cpu_times()
                used = times.user + times.system
                # What was there before has used some already.
                first, _ = self._cpu.get(key, (used if begins else 0.0, 0.0))
                self._cpu[key] = (first, used)
                memory = process.memory_full_info().pss
                total += memory
                if "java" in process.name():
                    self._java.add(key)
                elif process.pid != os.getpid():
                    self.peak_worker = max(self.peak_worker, memory)
        self.peak = max(self.peak, total)


def measured(work: Work, expected: int) -> Taken:
    with Watch() as watch:
        began = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - began
    if found != expected:
        raise SystemExit(f"counted {found} messages instead of {expected}")
    cpu = watch.cpu_seconds
    return Taken(found, seconds, cpu, watch.peak, watch.peak_worker, watch.java_seconds)


@dataclass(frozen=True)
class Measured:
    """Figures of one shape, by the way to read it."""

    taken: dict[str, Taken]
    """Figures of the long history."""
    short: dict[str, Taken]
    length: int
    """Length of the long history in bytes."""


class History:
    """A history in a directory, and the ways to count its words."""

    def __init__(self, root: Path, messages: int, shape: str, args: argparse.Namespace) -> None:
        self.root = root
        self.name = shape
        self.shape = SHAPES[shape]
        self.messages = messages
        self.run_bytes = args.run_bytes
        self._found: list[tuple[Any, ...]] | None = None
        self.journals = [journal_name(number) for number in range(args.journals)]
        self.access = Access.of(file_root=root, direct=True)
        self.selection = Selection(
            journals=tuple(self.journals),
            stores=(STORE,),
            shape=MessageFormat(),
        )
        with self.access.open() as opened:
            self.snapshot = take_snapshot(opened, self.selection)

    def by_json(self, spark: Any) -> int:
        path = str(self.root / "fragments" / "bench" / "words" / "*")
        return self._counted(spark.read.schema(self.shape.columns).json(path))

    def by_gazette(self, spark: Any, isolation: str, summaries: str = "none") -> int:
        from gazette.spark import read

        options = {
            "store": f"file://{self.root}/fragments",
            "maxPartitionBytes": self.run_bytes,
            "journal": self.journals,
            "isolation": isolation,
            "summaries": summaries,
        }
        return self._counted(read(spark, schema=self.shape.columns, **options))

    def _counted(self, table: Any) -> int:
        """Count the messages, and compare what the query found with what another way found."""
        from pyspark.sql.functions import expr

        query = table.groupBy("word").agg(*map(expr, ("sum(count)", *self.shape.aggregates)))
        rows = sorted(tuple(row) for row in query.collect() if row.word)
        if self._found is None:
            self._found = rows
        if rows != self._found:
            raise SystemExit(f"{self.name}: two ways found different values")
        return sum(row[1] for row in rows)

    def backfill(self, runner: Any, backfill: BenchRows) -> int:
        """Run both passes, and stage the states of all shards, one for each journal."""
        specs = [
            ShardSpec(
                f"shard-{number:03d}",
                sources=(ShardSource(journal),),
                recovery_log_prefix="logs",
                hint_prefix="/hints",
            )
            for number, journal in enumerate(self.journals)
        ]
        with tempfile.TemporaryDirectory(prefix="states-", dir=self.root) as directory:
            settings = RunSettings(
                EVERYTHING, f"{directory}/staging", "bench", scratch=Path(directory)
            )
            folded = runner.fold(self.access, self.snapshot, lambda _: None, backfill)
            tasks = tasks_of(
                backfill,
                "",
                specs,
                folded,
                self.access,
                settings,
            )
            attempts = runner.build(tasks, lambda _: None)
            assert folded.rows > self.messages, "acknowledgements are rows, too"
            if isinstance(backfill, BenchColumns):
                return self.messages  # The report of a fold counts the rows that it returned.
            return sum(attempt.built.messages for attempt in attempts)


def works_of(history: History, spark: Any) -> dict[str, Work]:
    from gazette.history.spark.backfill import SparkRunner

    def by_spark(backfill: BenchRows) -> int:
        runner = SparkRunner(spark=spark, run_bytes=history.run_bytes)
        try:
            return history.backfill(runner, backfill)
        finally:
            runner.stop()

    queries: dict[str, Work] = {
        JSON: lambda: history.by_json(spark),
        "gazette, uncommitted": lambda: history.by_gazette(spark, "read_uncommitted"),
        COMMITTED: lambda: history.by_gazette(spark, "read_committed"),
        "gazette, committed, summaries": lambda: history.by_gazette(spark, "read_committed", ""),
    }
    if history.name != WORDS:
        return queries
    return queries | {
        "backfill, columns": lambda: by_spark(BenchColumns()),
        "backfill, columns, combined": lambda: by_spark(BenchCombined()),
        "backfill, rows": lambda: by_spark(BenchRows()),
        "backfill, rows, no Spark": lambda: history.backfill(
            LocalRunner(2, run_bytes=history.run_bytes), BenchRows()
        ),
    }


def works_without_spark(history: History) -> dict[str, Work]:
    """Return the works of one thread of this process: what the source itself takes."""
    format = RowFormat("json", parse_columns(history.shape.columns))
    with_places = RowFormat(
        "json",
        pa.schema([(name, META[name]) for name in ("offset", "uuid")] + list(format.schema)),
        (("offset", "offset"), ("uuid", "uuid")),
    )

    runs = history.snapshot.runs(history.run_bytes)

    def fold() -> Any:
        with history.access.open() as opened:
            return fold_by_threads(opened, history.snapshot, run_bytes=history.run_bytes, threads=1)

    def first_pass() -> int:
        assert fold().rows > history.messages
        return history.messages

    def committed(format: RowFormat) -> int:
        folded = fold()
        with history.access.open() as opened:
            return sum(b.num_rows for run in folded.runs for b in read_rows(opened, run, format))

    def decompressed() -> int:
        with history.access.open() as opened:
            read = sum(len(d) for run in runs for _, d in opened.chunks(run.journal, run.pieces))
        assert read == history.snapshot.length
        return history.messages

    def scanned() -> int:
        wanted = scannable(format.schema)
        with history.access.open() as opened:
            found = sum(len(b.columns) for run in runs for b in read_columns(opened, run, wanted))
        assert found > history.messages
        return history.messages

    def combined() -> int:
        words, combine = (
            RowFormat("json", parse_columns(BenchCombined.fields)),
            BenchCombined().combine,
        )
        with history.access.open() as opened:
            rows = sum(len(p.rows) for run in runs for p in read_once(opened, run, words, combine))
        assert 0 < rows <= history.messages
        return history.messages

    return {
        "decompressing, SHA-1": decompressed,
        "… and finding lines, UUIDs, fields": scanned,
        "first pass": first_pass,
        "both passes": lambda: committed(format),
        "one pass of a fold that combines": combined,
        "both passes, with offset and UUID": lambda: committed(with_places),
    }


# -- consuming


async def consumed(
    history: History, fragments: Iterator[Path], messages: int, bytes_: int
) -> Taken:
    """Run a shard that reads the first fragments of a journal, which brokers find in their store."""
    with tempfile.TemporaryDirectory(prefix="bench-consume-") as directory:
        settings = BenchSettings(Path(directory))
        async with running(settings, SystemClock()) as bench, application(bench) as shards:
            codec, name = history.snapshot.journals[0].pieces[0].fragment.codec, history.journals[0]
            for path in fragments:
                target = bench.file_root / name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            journal = journal_spec(name, codec=codec, refresh_s=1)
            # A batch at a time, which is the fastest way to consume.
            spec = shard_spec("consume", Mode.FOLD_BATCH, name, 0.25)
            async with bench.journals(journal), shard(bench, shards, spec, replication=1):
                with Watch() as watch:
                    began = time.perf_counter()
                    async with asyncio.timeout(600):
                        await shards.stat(spec.id, {name: bytes_})
                    seconds = time.perf_counter() - began
    return Taken(messages, seconds, watch.cpu_seconds)


def by_consuming(history: History, wanted: int, args: argparse.Namespace) -> Taken:
    """Measure consuming of whole fragments, of about so many messages."""
    taken, messages, end = [], 0, 0
    share = args.messages // args.journals + (args.messages % args.journals > 0)
    for piece in history.snapshot.journals[0].pieces:
        if messages >= wanted:
            break
        assert piece.fragment is not None
        taken.append(history.root / "fragments" / piece.fragment.content_path())
        messages, end = min(share, messages + args.fragment), piece.end
    return asyncio.run(consumed(history, iter(taken), messages, end))


# -- all of it


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--messages", type=int, default=8_000_000, help="messages of the long history"
    )
    parser.add_argument(
        "--short", type=int, default=200_000, help="messages of the short one, read before it"
    )
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="messages to measure with, one after the other"
    )
    parser.add_argument("--journals", type=int, default=4, help="as many shards are backfilled")
    parser.add_argument("--fragment", type=int, default=250_000, help="messages of a fragment")
    parser.add_argument("--transaction", type=int, default=1000, help="messages of a transaction")
    parser.add_argument("--codec", choices=("gzip", "zstandard", "none"), default="zstandard")
    parser.add_argument("--run-bytes", type=int, default=32 << 20, help="what a task reads")
    parser.add_argument(
        "--consume", type=int, default=1_000_000, help="by a shard; 0: leave it out"
    )
    parser.add_argument("--only", default="", help="ways to measure, by parts of their names: a,b")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--driver-memory", default="2g", help="the most that Java's heap may take")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dir", help="where a temporary directory is made")
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--json", help="a file for the figures")
    return parser.parse_args()


def written(root: Path, messages: int, shape: str, args: argparse.Namespace) -> History:
    began = time.perf_counter()
    write_history(
        root,
        messages=messages,
        journals=args.journals,
        per_fragment=args.fragment,
        per_transaction=args.transaction,
        codec=Codec[args.codec.upper()],
        shape=shape,
    )
    history = History(root, messages, shape, args)
    print(
        f"{shape}: {messages:,} messages, {history.snapshot.length / 1e6:,.0f} MB of JSON in"
        f" {sum(len(one.pieces) for one in history.snapshot.journals)} fragments"
        f" ({args.codec}, {stored_bytes(root) / 1e6:,.0f} MB), written in"
        f" {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return history


def session_of(args: argparse.Namespace) -> Any:
    from gazette.spark import session

    conf = {
        "spark.log.level": "ERROR",
        "spark.driver.memory": args.driver_memory,
        "spark.sql.shuffle.partitions": str(args.journals),
    }
    return session(args.master, conf=conf)


def shown(taken: dict[str, Taken], length: float, messages: int) -> list[str]:
    base, consumed_ = taken.get(JSON), taken.get(CONSUME)
    heads = ("seconds", "msg/s", "MB/s", "msg/s/core", "x json", "/core", "x consume/core")
    widths = (9, 12, 8, 12, 8, 7, 16)
    head = "".join(f"{text:>{width}}" for text, width in zip(heads, widths, strict=True))
    lines = [f"{'':40}{head}{'peak MB':>9}{'worker':>8}"]
    for name, one in taken.items():
        megabytes = length * one.messages / messages / 1e6
        ratios = ["", "", ""]
        if base is not None:
            ratios[0] = f"{one.rate / base.rate:.2f}"
            ratios[1] = f"{one.rate_per_core / base.rate_per_core:.2f}"
        if consumed_ is not None:
            ratios[2] = f"{one.rate_per_core / consumed_.rate_per_core:.2f}"
        lines.append(
            f"{name:40}{one.seconds:9.2f}{one.rate:12,.0f}{megabytes / one.seconds:8.1f}"
            f"{one.rate_per_core:12,.0f}{ratios[0]:>8}{ratios[1]:>7}{ratios[2]:>16}"
            f"{one.peak_bytes / 1e6:9,.0f}{one.peak_worker_bytes / 1e6:8,.0f}"
        )
    return lines


def measure(
    shape: str, root: Path, make: Callable[[History], dict[str, Work]], args: argparse.Namespace
) -> Measured:
    """Measure messages of one shape, in a long history and in a short one, and print a table of each."""
    load = [os.getloadavg()[0]]
    history = written(root / "long", args.messages, shape, args)
    short = written(root / "short", min(args.short, args.messages), shape, args)
    parts = [part for part in args.only.split(",") if part]

    def chosen(history: History) -> dict[str, Work]:
        works = make(history)
        return {n: w for n, w in works.items() if not parts or any(p in n for p in parts)}

    for work in chosen(short).values():
        work()
    found = Measured({}, {}, history.snapshot.length)
    for _ in range(args.repeats):
        again = chosen(short)
        for name, work in chosen(history).items():
            # Spark ends workers of Python that were idle for a minute. So the short history comes
            # first, and the long one finds them.
            add(found.short, shape, name, measured(again[name], short.messages))
            add(found.taken, shape, name, measured(work, args.messages))
    try:
        if args.consume and shape == WORDS:
            consumed = by_consuming(history, args.consume, args)
            found.taken[CONSUME] = found.short[CONSUME] = consumed
    finally:  # The others stand, whatever becomes of it.
        load.append(os.getloadavg()[0])
        for one, taken in ((short, found.short), (history, found.taken)):
            print(f"\n{shape}, {one.messages:,} messages")
            print("\n".join(shown(taken, one.snapshot.length, one.messages)))
        print(
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()},"
            f" {os.cpu_count()} cores, load {load[0]:.1f} before and {load[1]:.1f} after\n",
            flush=True,
        )
    return found


def add(taken: dict[str, Taken], shape: str, name: str, one: Taken) -> None:
    """Print one measurement, and add it to the best ones so far."""
    print(
        f"{datetime.now(UTC):%H:%M:%S} {shape}, {name}: {one.messages:,} messages in"
        f" {one.seconds:.1f} s, {one.cpu_seconds:.1f} s of CPUs, Java {one.java_seconds:.1f} s of"
        f" these; {one.peak_bytes / 1e6:,.0f} MB at the most; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if (best := taken.get(name)) is not None:
        one = replace(
            one if one.seconds < best.seconds else best,
            cpu_seconds=min(one.cpu_seconds, best.cpu_seconds),
            peak_bytes=max(one.peak_bytes, best.peak_bytes),
            peak_worker_bytes=max(one.peak_worker_bytes, best.peak_worker_bytes),
        )
    taken[name] = one


def shown_worst(histories: str, taken: dict[str, dict[str, Taken]]) -> str:
    """Return which shape is read worst, beside `JSON`, per core. Return nothing if no shape has both."""
    ratios = {
        shape: found[COMMITTED].rate_per_core / found[JSON].rate_per_core
        for shape, found in taken.items()
        if JSON in found and COMMITTED in found
    }
    if not ratios:
        return ""
    worst = min(ratios, key=lambda shape: ratios[shape])
    each = ", ".join(f"{shape} {ratio:.2f}" for shape, ratio in ratios.items())
    return (
        f"{histories} histories, {COMMITTED}, per core, x {JSON}: {each};"
        f" the worst: {worst} {ratios[worst]:.2f}"
    )


def main() -> None:
    args = arguments()
    shapes = args.shapes.split(",")
    if unknown := set(shapes) - set(SHAPES):
        raise SystemExit(f"unknown shapes: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if args.no_spark:
        make: Callable[[History], dict[str, Work]] = works_without_spark
    else:
        make = partial(works_of, spark=session_of(args))
    found: dict[str, Measured] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="bench-spark-", dir=args.dir) as directory:
            found[shape] = measure(shape, Path(directory), make, args)
    for histories, taken in (
        ("short", {shape: one.short for shape, one in found.items()}),
        ("long", {shape: one.taken for shape, one in found.items()}),
    ):
        if worst := shown_worst(histories, taken):
            print(worst)
    if args.json:

        def figures(taken: dict[str, Taken]) -> dict[str, Any]:
            return {name: vars(one) for name, one in taken.items()}

        facts = {
            "arguments": vars(args),
            "bytes": {shape: one.length for shape, one in found.items()},
            "figures": {shape: figures(one.taken) for shape, one in found.items()},
            "short": {shape: figures(one.short) for shape, one in found.items()},
        }
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
