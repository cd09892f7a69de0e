"""``gazette test``: simulate an application with many seeds, and tell the shortest story of a failure.

Exit codes: 0 nothing is wrong; 1 a seed fails; 2 a mistake in the flags or the application.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape, quoteattr

import msgspec

from gazette.config.schema import exit_with
from gazette.errors import GazetteError, Invalid
from gazette.run.simulated import SimulationFlags, schema, setup_of
from gazette.runtime.clock import SystemClock
from gazette.testing.simulation.elsewhere import Elsewhere
from gazette.testing.simulation.seeds import (
    FailedSeed,
    SeedResult,
    in_child,
    run_seed,
    run_seeds,
    shortest,
    story_of,
)
from gazette.testing.simulation.setup import Setup

_HASH_SEED: Final = "0"
_STALE: Final = 200
"""Seeds without anything new after which ``--coverage`` ends a run."""


def run(argv: Sequence[str]) -> int:
    """Run the subcommand, and return its exit code."""
    try:
        loaded = schema().load(argv, {})
        if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
            # The order of sets of texts must not depend on the process.
            environ = {**os.environ, "PYTHONHASHSEED": _HASH_SEED}
            command = [sys.executable, "-m", "gazette.main", "test", *argv]
            os.execve(sys.executable, command, environ)  # noqa: S606 - the same program again
        return _Run(setup_of(loaded), loaded.group(SimulationFlags), argv).run()
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        print(f"gazette test: {error}\n{error.hint}", file=sys.stderr)
        return 2 if error.hint else 1


class _Run:
    """One run of the command."""

    def __init__(self, setup: Setup, flags: SimulationFlags, argv: Sequence[str]) -> None:
        self._setup = setup
        self._flags = flags
        self._argv = list(argv)
        self._outcomes: list[SeedResult] = []
        self._failures: list[FailedSeed] = []
        self._coverage: dict[str, int] = {}
        self._elsewhere = Elsewhere([sys.executable, "-m", "gazette.run.simulated", *argv])

    def run(self) -> int:
        flags, ended_by, clock = self._flags, "", SystemClock()
        begun, cpu = clock.monotonic(), 0.0
        stale = 0
        try:
            with closing(self._seeds(flags.seed or flags.first)) as outcomes:
                for outcome in outcomes:
                    self._outcomes.append(outcome)
                    cpu += outcome.seconds
                    stale = 0 if self._note(outcome) else stale + 1
                    if flags.json:
                        print(msgspec.json.encode(outcome).decode(), flush=True)
                    if outcome.what:
                        self._tell(outcome)
                        break
                    if flags.minutes and clock.monotonic() - begun > flags.minutes * 60:
                        break
                    if flags.coverage and stale >= _STALE:
                        ended_by = (
                            f"The last {_STALE} seeds have reached nothing new, so this run ends."
                        )
                        break
        finally:
            self._elsewhere.close()
        if flags.junit is not None:
            self._write_junit(flags.junit, clock.monotonic() - begun)
        if not flags.json:
            self._summarize(cpu, ended_by)
        return 1 if self._failures else 0

    def _seeds(self, first: int) -> Generator[SeedResult, None, None]:
        """Yield outcomes. The other process starts behind the first one, which is soon there."""
        flags = self._flags
        chosen = iter(self._chosen(first))
        if flags.seed:
            self._elsewhere.start()
            yield from in_child(lambda: [self._one(first)])
            return
        begin = next(chosen, None)
        if begin is None:
            return
        yield from run_seeds(self._setup, [begin], None)
        self._elsewhere.start()
        yield from run_seeds(self._setup, chosen, self._elsewhere)

    def _one(self, seed: int) -> SeedResult:
        return run_seed(self._setup, seed, elsewhere=self._elsewhere)

    def _chosen(self, first: int) -> Iterable[int]:
        flags = self._flags
        index, parts = _part(flags.shard)
        seeds = count(first) if flags.minutes else range(first, first + flags.seeds)
        for seed in seeds:
            if seed % parts == index and (not flags.only or self._has(seed, flags.only)):
                yield seed

    def _has(self, seed: int, text: str) -> bool:
        return any(text in str(fault.form) for fault in story_of(self._setup, seed).faults)

    def _note(self, outcome: SeedResult) -> bool:
        """Count what a seed has reached. Return True if something is new."""
        before = len(self._coverage)
        for reached in outcome.coverage:
            self._coverage[reached] = self._coverage.get(reached, 0) + 1
        return len(self._coverage) > before

    def _tell(self, outcome: SeedResult) -> None:
        self._elsewhere.start()
        failure = shortest(self._setup, outcome, self._elsewhere)
        failure.replay = self.replay(outcome.seed)
        self._failures.append(failure)
        if self._flags.json:
            print(msgspec.json.encode(failure).decode(), flush=True)
        else:
            print(failure.text, flush=True)

    def replay(self, seed: int) -> str:
        """Return the command that runs a seed again."""
        kept, skips = [], False
        for word in self._argv:
            name = word.partition("=")[0]
            if name in (
                "--seeds",
                "--first",
                "--seed",
                "--minutes",
                "-k",
                "--only",
                "--shard",
                "--junit",
            ):
                skips = "=" not in word
            elif skips:
                skips = False
            elif word not in ("--coverage", "--json"):
                kept.append(word)
        return shlex.join(["gazette", "test", *kept, "--seed", str(seed)])

    def _summarize(self, cpu: float, ended_by: str) -> None:
        done = len(self._outcomes)
        if self._flags.coverage:
            for reached, times in sorted(self._coverage.items()):
                print(f"{times:6}  {reached}")
        if ended_by:
            print(ended_by)
        rate = done / cpu if cpu else 0.0
        failed = len(self._failures)
        print(f"{done} seeds, {failed} failed, {rate:.1f} seeds/s of one processor")

    def _write_junit(self, path: Path, seconds: float) -> None:
        failures = {failure.outcome.seed: failure for failure in self._failures}
        name = quoteattr(self._argv[0] if self._argv else "")
        cases = []
        for outcome in self._outcomes:
            head = f'<testcase classname={name} name="seed {outcome.seed}" time="{outcome.seconds:.3f}"'
            failure = failures.get(outcome.seed)
            if failure is None:
                cases.append(f"{head}/>")
                continue
            text = escape(failure.text)
            cases.append(
                f"{head}><failure message={quoteattr(failure.outcome.what)}>{text}</failure></testcase>"
            )
        path.write_text(
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<testsuite name="gazette test" tests="{len(cases)}" failures="{len(failures)}"'
            f' errors="0" time="{seconds:.3f}">\n' + "\n".join(cases) + "\n</testsuite>\n"
        )


def _part(text: str) -> tuple[int, int]:
    """Return index and number of the parts of ``1/4``. Raise ``Invalid`` for another form."""
    if not text:
        return 0, 1
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise Invalid(f"invalid part {text!r}", path="--shard", hint="Write it as 1/4.")
    return int(number) - 1, int(parts)
