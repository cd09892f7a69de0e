"""``python -m tools.simulation``: simulate seeds, or replay one with its trace.

Exit codes: 0 nothing was violated; 1 something was, and the trace says how it came to it.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from functools import partial

from tools.simulation.run import in_children, quiet, report, run_seed, simulate

_HASH_SEED = "0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="number of seeds")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--seed", type=int, help="simulate this seed only, and print its digest")
    parser.add_argument("--consumers", action="store_true", help="simulate consumers, too")
    parser.add_argument("--trace", action="store_true", help="print the trace of --seed")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument(
        "--slice", type=int, default=25, help="seeds that one process simulates, then it ends"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation")
    return parser


def _one(seed: int, *, trace: bool, consumers: bool) -> int:
    quiet()
    call = partial(run_seed, seed, trace=trace, consumers=consumers)
    (outcome,) = in_children([call], 1)
    sys.stdout.write(report(outcome) + "\n" if outcome.trace or outcome.violations else "")
    sys.stdout.write(
        f"seed {seed}: {len(outcome.violations)} violations, {outcome.acknowledged} of "
        f"{outcome.appends} {'messages committed' if consumers else 'appends acknowledged'}, "
        f"{outcome.virtual_s:.0f} virtual seconds, "
        f"{outcome.steps} steps, digest {outcome.digest:016x}\n"
    )
    return 1 if outcome.violations else 0


def _many(
    first: int, count: int, workers: int, slice: int, *, keep_going: bool, consumers: bool
) -> int:
    slices = [
        range(begin, min(begin + slice, first + count))
        for begin in range(first, first + count, slice)
    ]
    done, failures, spent = 0, 0, 0.0
    flag = " --consumers" if consumers else ""
    calls = [partial(simulate, seeds, consumers=consumers) for seeds in slices]
    with closing(in_children(calls, workers)) as results:
        for seeds, (failed, seconds) in zip(slices, results, strict=True):
            done, spent = done + len(seeds), spent + seconds
            for outcome in failed:
                failures += 1
                sys.stdout.write(report(outcome) + "\n")
                sys.stdout.write(
                    f"replay: python -m tools.simulation{flag} --seed {outcome.seed} --trace\n"
                )
            sys.stdout.flush()
            if failures and not keep_going:
                break
    rate = done / spent if spent else 0.0
    sys.stdout.write(
        f"{done} seeds from {first}, {failures} with violations, {rate:.1f} seeds/s per process\n"
    )
    return 1 if failures else 0


def main() -> int:
    arguments = _parser().parse_args()
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        # The order of sets of strings must not depend on the process.
        environ = {**os.environ, "PYTHONHASHSEED": _HASH_SEED}
        command = [sys.executable, "-m", "tools.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, environ)  # noqa: S606 - the same program again
    if arguments.seed is not None:
        return _one(arguments.seed, trace=arguments.trace, consumers=arguments.consumers)
    return _many(
        arguments.first,
        arguments.seeds,
        arguments.workers,
        arguments.slice,
        keep_going=arguments.keep_going,
        consumers=arguments.consumers,
    )


if __name__ == "__main__":
    sys.exit(main())
