"""Measure what a driver spends to plan a read of many fragments, and to find new ones.

    python benchmarks/bench_plan.py --fragments 50000

It writes a journal of small fragments to a directory, and has their summaries made by another
process, as tasks make them. Then processes of their own plan a table, and poll a stream of which two
fragments are new. For each it prints CPU seconds, and the most memory that the process took.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gazette.message.uuid import OUTSIDE_TXN, build_uuid, clock_at
from gazette.testing.stored import json_line, write_fragment

JOURNAL: Final = "bench/plan"
STORE: Final = "file:///fragments/"
BEGAN: Final = clock_at(1_700_000_000 * 10**9)


def line(number: int) -> bytes:
    producer = bytes([1, 0, 0, 0, 0, number % 3])
    return json_line({"n": number}, build_uuid(producer, BEGAN + number, OUTSIDE_TXN))


def add(root: Path, begin: int, first: int, count: int) -> int:
    """Write fragments of one message each, and return where they end."""
    for number in range(first, first + count):
        begin = write_fragment(root, STORE, JOURNAL, begin, line(number)).end
    return begin


def options_of(root: Path) -> dict[str, str]:
    return {"store": f"file://{root}/fragments", "journal": JOURNAL, "refresh": "0"}


def schema() -> Any:
    from pyspark.sql.types import LongType, StructField, StructType

    return StructType([StructField("n", LongType())])


def summarised(root: Path) -> int:
    """Make the first pass, as tasks do."""
    return planned(root)


def planned(root: Path) -> int:
    """Plan a table, and return its number of tasks."""
    from gazette.history.spark.source.source import GazetteDataSource

    given = options_of(root)
    del given["refresh"]
    return len(GazetteDataSource(given).reader(schema()).partitions())


def polled(root: Path) -> int:
    """Follow the journal from its end, and return the milliseconds of CPU of a poll that finds two fragments.

    The first listing, of all fragments, is not a part of it.
    """
    from gazette.history.spark.source.source import GazetteDataSource

    given = {**options_of(root), "startingOffsets": "latest"}
    reader = GazetteDataSource(given).streamReader(schema())
    start = reader.initialOffset()
    start = reader.latestOffset(start, reader.getDefaultReadLimit())
    end = start[JOURNAL]["at"]
    polls = 10
    before = time.process_time()
    for poll in range(polls):
        end = add(root, end, 10**9 + 2 * poll, 2)
        until = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert until[JOURNAL]["at"] == end
        assert reader.partitions(start, until)
        start = until
    return round((time.process_time() - before) / polls * 1000)


WORKS: Final[dict[str, Callable[[Path], int]]] = {
    "first pass, as tasks make it": summarised,
    "plan of a table": planned,
    "poll of a stream": polled,
}


def measure(name: str, root: Path) -> None:
    """Do one work in this process, and print what it took."""
    before = time.process_time()
    found = WORKS[name](root)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([found, time.process_time() - before, usage.ru_maxrss / 1024]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fragments", type=int, default=50_000)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        measure(args.only, args.root)
        return
    root = Path(tempfile.mkdtemp(prefix="bench-plan-"))
    try:
        add(root, 0, 0, args.fragments)
        print(f"{args.fragments:,} fragments")
        for name in WORKS:
            command = [sys.executable, __file__, "--only", name, "--root", str(root)]
            made = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found, cpu_s, peak_mb = json.loads(made.stdout)
            print(f"{name}: {cpu_s:.1f} s of CPU, {peak_mb:.0f} MB ({found})", flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
