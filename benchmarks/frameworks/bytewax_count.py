"""The word count on bytewax: ``python bytewax_count.py FILE DIRECTORY {recovery | none} GROUP STEP``.

Run by `compare.py`, in an environment that has bytewax and msgspec and nothing of ours. When it ends, its
counts are in the directory.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import msgspec
from bytewax.connectors.files import FileSource
from bytewax.dataflow import Dataflow
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

EPOCH_S = 1.0


class Counted(msgspec.Struct):
    word: str
    count: int


COUNTS: dict[str, int] = {}
SEEN = [0]
STEP = int(sys.argv[5])


class Latest(StatelessSinkPartition[tuple[str, int]]):
    def write_batch(self, items: list[tuple[str, int]]) -> None:
        COUNTS.update(items)
        before, SEEN[0] = SEEN[0], SEEN[0] + len(items)
        if SEEN[0] // STEP > before // STEP:
            print(SEEN[0], time.perf_counter(), flush=True)


class ToMemory(DynamicSink[tuple[str, int]]):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Latest:
        return Latest()


def main() -> None:
    path, directory, recovery = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "recovery"
    decode = msgspec.json.Decoder(Counted).decode

    def keyed(line: str) -> tuple[str, int]:
        message = decode(line)
        return message.word, message.count

    def add(state: int | None, count: int) -> tuple[int, int]:
        total = (state or 0) + count
        return total, total

    flow = Dataflow("word_count")
    lines = op.input("lines", flow, FileSource(path, batch_size=1000))
    counts = op.stateful_map("count", op.map("decode", lines, keyed), add)
    op.output("out", counts, ToMemory())
    options: dict[str, Any] = {}
    if recovery:
        snapshots = directory / "snapshots"
        if not snapshots.exists():
            snapshots.mkdir()
            init_db_dir(snapshots, 1)
        options["recovery_config"] = RecoveryConfig(str(snapshots))
    cluster_main(flow, [], 0, epoch_interval=timedelta(seconds=EPOCH_S), **options)
    (directory / "counts.json").write_text(json.dumps(COUNTS))


if __name__ == "__main__":
    main()
