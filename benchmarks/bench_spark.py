"""Rows per second of ``format("gazette")``, beside Spark's own reader of JSON on the same bytes.

Writes a journal of JSON messages to a directory, in gzip fragments, and reads it from there: uncommitted,
committed, and by ``spark.read.json`` with the same schema. Each is run once to warm up, and then
``--repeats`` times in turn, of which the best counts. ``--no-spark`` reads with one thread of this process
and without Spark, and counts CPU seconds: what the source itself can do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from gazette.history.access import Access
from gazette.history.read import fold_locally
from gazette.history.rows import META, RowFormat, read_rows
from gazette.history.take import Selection, take_snapshot
from gazette.message.message_uuid import ACK_TXN, CONTINUE_TXN, build_uuid, clock_at, uuid_text
from gazette.protocol.fragment import Codec
from gazette.testing.stored import write_journal

STORE = "file:///fragments/"
JOURNAL = "bench/events"
FIELDS = "ts long, user string, word string, amount double"
WORDS = [f"word-{n}" for n in range(10_000)]


def contents(messages: int, per_fragment: int, per_transaction: int):
    """Fragments of messages of one producer, in transactions."""
    rng = random.Random(1)
    producer, clock = bytes([1, 0, 0, 0, 0, 1]), clock_at(1_700_000_000 * 10**9)
    lines: list[str] = []
    for number in range(1, messages + 1):
        clock += 160
        uuid = uuid_text(build_uuid(producer, clock, CONTINUE_TXN))
        lines.append(
            f'{{"uuid":"{uuid}","ts":{1_700_000_000_000 + number},"user":"user-{rng.getrandbits(22)}",'
            f'"word":"{rng.choice(WORDS)}","amount":{rng.getrandbits(20) / 64}}}\n'
        )
        if number % per_transaction == 0 or number == messages:
            clock += 160
            lines.append(f'{{"uuid":"{uuid_text(build_uuid(producer, clock, ACK_TXN))}"}}\n')
        if len(lines) >= per_fragment or number == messages:
            yield "".join(lines).encode()
            lines = []


def timed(work: Callable[[], int], clock: Callable[[], float]) -> tuple[float, int]:
    begin = clock()
    rows = work()
    return clock() - begin, rows


def without_spark(root: Path) -> dict[str, Callable[[], int]]:
    access = Access.of(file_root=root, direct=True)
    doc = [
        ("ts", pa.int64()), ("user", pa.string()), ("word", pa.string()), ("amount", pa.float64()),
    ]  # fmt: skip
    meta = [(name, META[name]) for name in ("offset", "uuid")]
    format = RowFormat("json", pa.schema([*meta, *doc]), (("offset", "offset"), ("uuid", "uuid")))
    with access.open() as opened:
        snapshot = take_snapshot(opened, Selection(journals=(JOURNAL,), stores=(STORE,)))

    def uncommitted() -> int:
        with access.open() as opened:
            return sum(
                b.num_rows for run in snapshot.runs() for b in read_rows(opened, run, format)
            )

    def first_pass() -> int:
        return fold_locally(access, snapshot, threads=1).rows

    def committed() -> int:
        folded = fold_locally(access, snapshot, threads=1)
        with access.open() as opened:
            return sum(b.num_rows for run in folded.runs for b in read_rows(opened, run, format))

    return {"uncommitted": uncommitted, "first pass": first_pass, "committed": committed}


def by_spark(root: Path, master: str) -> dict[str, Callable[[], int]]:
    from gazette.spark import read, session

    spark = session(master, conf={"spark.log.level": "ERROR", "spark.driver.memory": "2g"})
    options = {"store": f"file://{root}/fragments", "run_bytes": str(16 << 20)}
    aggregates = ("count(1)", "sum(ts)", "max(user)", "max(word)", "sum(amount)")

    def rows_of(table) -> int:
        return table.selectExpr(*aggregates).collect()[0][0]

    def gazette(isolation: str) -> int:
        table = spark.read.format("gazette").options(**options, isolation=isolation)
        return rows_of(table.schema(f"offset long, uuid string, {FIELDS}").load(JOURNAL))

    def planned() -> int:
        return rows_of(
            read(spark, schema=f"offset long, uuid string, {FIELDS}", journal=JOURNAL, **options)
        )

    path = str(root / "fragments" / JOURNAL)

    def plain() -> int:
        return rows_of(spark.read.schema(f"uuid string, {FIELDS}").json(path))

    return {
        "spark.read.json": plain,
        "gazette, uncommitted": lambda: gazette("read_uncommitted"),
        "gazette, committed": lambda: gazette("read_committed"),
        "gazette, committed, both passes as jobs": planned,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--fragment", type=int, default=125_000, help="messages of a fragment")
    parser.add_argument("--transaction", type=int, default=1000, help="messages of a transaction")
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as directory:
        root = Path(directory)
        fragments = write_journal(
            root,
            STORE,
            JOURNAL,
            contents(args.messages, args.fragment, args.transaction),
            Codec.GZIP,
        )
        megabytes = fragments[-1].end / 1e6
        works = without_spark(root) if args.no_spark else by_spark(root, args.master)
        # Without Spark there is one process, whose own time does not depend on what else runs here.
        clock = time.process_time if args.no_spark else time.perf_counter
        best = {name: timed(work, clock) for name, work in works.items()}
        if args.repeats:
            best = {}
        for _ in range(args.repeats):
            for name, work in works.items():
                best[name] = min(best.get(name, (float("inf"), 0)), timed(work, clock))
        base = next(iter(best.values()))[0]
        figures = {
            name: {
                "seconds": round(seconds, 2),
                "krows_per_s": round(args.messages / seconds / 1e3, 1),
                "mb_per_s": round(megabytes / seconds, 1),
                "ratio_to_first": round(base / seconds, 2),
                "rows": rows,
            }
            for name, (seconds, rows) in best.items()
        }
    load = os.getloadavg()[0]
    if args.json:
        print(json.dumps({"figures": figures, "load": load, "cores": os.cpu_count()}))
        return
    print(
        f"{args.messages} messages, {megabytes:.0f} MB of JSON in {len(fragments)} gzip fragments; "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}"
    )
    for name, one in figures.items():
        print(
            f"{name:42} {one['seconds']:7.2f} s {one['krows_per_s']:9.1f} krows/s"
            f" {one['mb_per_s']:7.1f} MB/s  x {one['ratio_to_first']:.2f}"
        )


if __name__ == "__main__":
    main()
