"""Run the fuzzers: ``python -m tools.fuzz_stores --minutes 10``.

Each run has a seed, which a failure prints together with what was done last and how to repeat it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from gazette.runtime.clock import SystemClock
from tools.fuzz_stores.base import Fuzzer
from tools.fuzz_stores.rocksdb import RocksDBFuzzer
from tools.fuzz_stores.sqlite import SQLiteFuzzer

KINDS: dict[str, type[Fuzzer[Any]]] = {"sqlite": SQLiteFuzzer, "rocksdb": RocksDBFuzzer}
_LAST_STEPS = 40


def run_one(kind: str, seed: int, transactions: int, *, verbose: bool = False) -> int:
    """Run one seed. Return how many states were compared. Raise what the run raises."""
    last: deque[str] = deque(maxlen=_LAST_STEPS)

    def say(text: str) -> None:
        last.append(text)
        if verbose:
            sys.stdout.write(text + "\n")

    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gazette-fuzz-", dir=parent) as directory:
        fuzzer = KINDS[kind](seed, Path(directory), say)
        try:
            fuzzer.run(transactions)
        except BaseException as error:
            error.add_note(f"kind {kind}, seed {seed}; the last steps:\n  " + "\n  ".join(last))
            error.add_note(
                f"Repeat it: python -m tools.fuzz_stores --kind {kind} --seed {seed} --seeds 1"
                f" --transactions {transactions}"
            )
            raise
        return fuzzer.checks


def _goes_on(options: argparse.Namespace, runs: int, seconds: float) -> bool:
    if options.seeds:
        return bool(runs < options.seeds)
    return bool(seconds < options.minutes * 60)


def main() -> int:
    """Return 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_stores")
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all", help="store (all)")
    parser.add_argument("--seed", type=int, default=0, help="first seed; 0 picks one and prints it")
    parser.add_argument("--seeds", type=int, default=0, help="number of seeds (0: until --minutes)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to run (10)")
    parser.add_argument("--transactions", type=int, default=40, help="commits of one run (40)")
    parser.add_argument("--verbose", action="store_true", help="print each step")
    options = parser.parse_args()
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    kinds = list(KINDS) if options.kind == "all" else [options.kind]
    sys.stdout.write(f"first seed {seed}, kinds {', '.join(kinds)}\n")
    sys.stdout.flush()
    clock = SystemClock()
    begin = clock.monotonic()
    runs = checks = failed = 0
    while _goes_on(options, runs, clock.monotonic() - begin):
        for kind in kinds:
            try:
                checks += run_one(kind, seed + runs, options.transactions, verbose=options.verbose)
            except Exception:  # noqa: BLE001 - it is reported, and other seeds are run
                failed += 1
                traceback.print_exc()
        runs += 1
    seconds = clock.monotonic() - begin
    sys.stdout.write(
        f"{runs} seeds of {', '.join(kinds)} in {seconds:.0f} s, {checks} states compared,"
        f" {failed} runs failed\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
