"""The word count on bytewax: ``python bytewax_count.py FILE DIRECTORY {recovery | none}``.

Run by `compare.py`, in an environment that has bytewax and msgspec and nothing of ours.
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


class Latest(StatelessSinkPartition[tuple[str, int]]):
    def write_batch(self, items: list[tuple[str, int]]) -> None:
        COUNTS.update(items)
        SEEN[0] += len(items)


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
        init_db_dir(directory, 1)
        options["recovery_config"] = RecoveryConfig(str(directory))
    began = time.perf_counter()
    cluster_main(flow, [], 0, epoch_interval=timedelta(seconds=EPOCH_S), **options)
    seconds = time.perf_counter() - began
    print(json.dumps({"messages": SEEN[0], "seconds": seconds, "counts": COUNTS}))


if __name__ == "__main__":
    main()
