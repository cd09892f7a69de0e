"""``python -m tools.simulation``: simulate seeds, or replay one with its trace.

Exit codes: 0 no invariant was violated; 1 an invariant was, and the trace shows how; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from tools.simulation.code_digest import code_digests
from tools.simulation.other_version import OtherVersion
from tools.simulation.progress import Progress
from tools.simulation.run import (
    Outcome,
    in_children,
    plants_of,
    quiet,
    report,
    run_seed,
    simulate,
    watched,
)

_HASH_SEED = "0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="number of seeds")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--seed", type=int, help="simulate this seed only, and print its digest")
    parser.add_argument("--consumers", action="store_true", help="simulate consumers, too")
    parser.add_argument(
        "--timers", action="store_true", help="simulate consumers that publish by timers"
    )
    parser.add_argument(
        "--other",
        type=Path,
        metavar="CHECKOUT",
        help="let about half of the processes be of the version in this directory",
    )
    parser.add_argument("--trace", action="store_true", help="print the trace of --seed")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument(
        "--slice", type=int, default=25, help="seeds that one process simulates, then it ends"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation")
    parser.add_argument("--plant", default="", help="give brokers (or consumers) this defect")
    parser.add_argument(
        "--plants", action="store_true", help="say at which seed each planted defect is found"
    )
    return parser


def _one(arguments: argparse.Namespace, other: OtherVersion | None) -> int:
    quiet()
    seed, consumers = arguments.seed, arguments.consumers
    run = partial(
        run_seed,
        seed,
        trace=arguments.trace,
        consumers=consumers,
        timers=arguments.timers,
        other=other,
    )
    plants = plants_of(consumers, arguments.timers)
    (outcome,) = in_children([partial(_outcome, run, seed, plants.get(arguments.plant))], 1)
    sys.stdout.write(report(outcome) + "\n" if outcome.trace or outcome.violations else "")
    sys.stdout.write(
        f"seed {seed}: {len(outcome.violations)} violations, {outcome.acknowledged} of "
        f"{outcome.appends} {'messages committed' if consumers else 'appends acknowledged'}, "
        f"{outcome.virtual_s:.0f} virtual seconds, "
        f"{outcome.steps} steps, digest {outcome.digest:016x}\n"
    )
    return 1 if outcome.violations else 0


def _outcome(run: Callable[[], Outcome], seed: int, plant: Callable[[], object] | None) -> Outcome:
    if plant is not None:
        plant()
    with watched(seed):
        return run()


def _slices(arguments: argparse.Namespace) -> list[range]:
    end = arguments.first + arguments.seeds
    return [
        range(begin, min(begin + arguments.slice, end))
        for begin in range(arguments.first, end, arguments.slice)
    ]


def _find_plants(arguments: argparse.Namespace) -> int:
    """Run seeds with each planted defect until a violation; print a table."""
    missed = 0
    names = (
        [arguments.plant]
        if arguments.plant
        else list(plants_of(arguments.consumers, arguments.timers))
    )
    width = max(map(len, names))
    for name in names:
        calls = [
            partial(
                simulate,
                seeds,
                consumers=arguments.consumers,
                timers=arguments.timers,
                plant=name,
                keep_going=False,
            )
            for seeds in _slices(arguments)
        ]
        found, spent = None, 0.0
        with closing(in_children(calls, arguments.workers)) as results:
            for one in results:
                spent += one.seconds
                if one.failed:
                    found = one.failed[0]
                    break
        missed += found is None
        at = f"not in {arguments.seeds} seeds" if found is None else f"{found.seed}"
        what = "" if found is None else found.violations[0]
        sys.stdout.write(f"{name:{width}}  {at:>6}  {spent:7.1f} s  {what}\n")
        sys.stdout.flush()
    return 1 if missed else 0


def _many(arguments: argparse.Namespace, other: OtherVersion | None) -> int:
    consumers, plant = arguments.consumers, arguments.plant
    slices = _slices(arguments)
    done, failures, progress = 0, 0, Progress()
    timers = arguments.timers
    flag = (" --timers" if timers else " --consumers" if consumers else "") + (
        f" --plant {plant}" if plant else ""
    )
    flag += f" --other {arguments.other}" if other else ""
    calls = [
        partial(simulate, seeds, consumers=consumers, timers=timers, plant=plant, other=other)
        for seeds in slices
    ]
    with closing(in_children(calls, arguments.workers)) as results:
        for seeds, one in zip(slices, results, strict=True):
            done += len(seeds)
            progress.add(one, len(seeds))
            for outcome in one.failed:
                failures += 1
                sys.stdout.write(report(outcome) + "\n")
                sys.stdout.write(
                    f"replay: python -m tools.simulation{flag} --seed {outcome.seed} --trace\n"
                )
            sys.stdout.flush()
            if failures and not arguments.keep_going:
                break
    sys.stdout.write("".join(f"{line}\n" for line in progress.describe()))
    code, simulation = code_digests()
    rate = done / progress.seconds if progress.seconds else 0.0
    sys.stdout.write(
        f"{done} seeds from {arguments.first}, {failures} with violations, {rate:.1f} seeds/s per process, "
        f"code {code}, simulation {simulation}\n"
    )
    return 1 if failures else 0


def main() -> int:
    arguments = _parser().parse_args()
    arguments.consumers |= arguments.timers
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        # The order of sets of strings must not depend on the process.
        environ = {**os.environ, "PYTHONHASHSEED": _HASH_SEED}
        command = [sys.executable, "-m", "tools.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, environ)  # noqa: S606 - the same program again
    if arguments.plant and arguments.plant not in plants_of(arguments.consumers, arguments.timers):
        known = ", ".join(plants_of(arguments.consumers, arguments.timers))
        sys.stderr.write(f"there is no plant {arguments.plant!r}; there are: {known}\n")
        return 2
    if arguments.plants:
        return _find_plants(arguments)
    if arguments.other is not None and not (arguments.other / "gazette").is_dir():
        sys.stderr.write(f"{arguments.other} is no checkout of this repository\n")
        return 2
    # Import the other version before the children are forked: they inherit its modules.
    other = None if arguments.other is None else OtherVersion(arguments.other)
    if arguments.seed is None:
        return _many(arguments, other)
    return _one(arguments, other)


if __name__ == "__main__":
    sys.exit(main())
