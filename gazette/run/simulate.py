"""``gazette test``: simulate an application with many seeds, and tell the shortest story of a failure.

Exit codes: 0 nothing is wrong; 1 a seed fails; 2 a mistake in the flags or the application, or no seed was
run; 130 Ctrl-C.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing, redirect_stdout
from functools import partial
from html import escape
from itertools import count, takewhile
from pathlib import Path
from typing import Final, TextIO

import msgspec

from gazette.config.schema import Loaded, exit_with
from gazette.errors import GazetteError, Invalid
from gazette.run.simulated import SimulationFlags, opened_setup, schema
from gazette.runtime.clock import SystemClock
from gazette.runtime.numbers import counted, is_digits
from gazette.testing.simulation.app_run import TIMERS
from gazette.testing.simulation.elsewhere import Elsewhere
from gazette.testing.simulation.seeds import (
    FailedSeed,
    SeedResult,
    run_seeds,
    shortest,
    story_of,
)
from gazette.testing.simulation.setup import Setup

_INTERRUPTED: Final = 130
_NO_XML: Final = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STALE: Final = 200
"""Seeds without anything new after which ``--coverage`` ends a run."""


def run(argv: Sequence[str]) -> int:
    """Run the subcommand, and return its exit code."""
    try:
        loaded = schema().load(argv, {})
        reports = sys.stdout
        # Output of the user's code must not be among reports.
        with redirect_stdout(sys.stderr), opened_setup(loaded) as setup:
            return _Run(setup, loaded, argv, reports).run()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Invalid as error:
        return exit_with(error, sys.stderr)
    except GazetteError as error:
        print(f"gazette test: {error}\n{error.hint}", file=sys.stderr)
        return 2 if error.hint else 1


class _Run:
    """One run of the command."""

    def __init__(self, setup: Setup, loaded: Loaded, argv: Sequence[str], reports: TextIO) -> None:
        self._say = partial(print, file=reports, flush=True)
        self._setup = setup
        self._flags = loaded.group(SimulationFlags)
        self._target = loaded.arguments[0]
        self._argv = list(argv)
        self._outcomes: list[SeedResult] = []
        self._failures: list[FailedSeed] = []
        self._coverage: dict[str, int] = {}
        self._elsewhere = Elsewhere([sys.executable, "-m", "gazette.run.simulated", *argv])

    def run(self) -> int:
        flags, ended_by, clock = self._flags, "", SystemClock()
        begun, cpu = clock.monotonic(), 0.0
        stale, interrupted = 0, False
        try:
            with closing(run_seeds(self._setup, self._chosen(flags), self._elsewhere)) as outcomes:
                for outcome in outcomes:
                    self._outcomes.append(outcome)
                    cpu += outcome.seconds
                    stale = 0 if self._note(outcome) else stale + 1
                    if flags.json:
                        self._say(msgspec.json.encode(outcome).decode())
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
        except KeyboardInterrupt:
            interrupted, ended_by = True, "Ctrl-C has ended this run."
        finally:
            self._elsewhere.close()
        if not self._outcomes and not interrupted:
            raise Invalid("no seed was run", path="gazette test", hint="Name more seeds.")
        if flags.junit is not None:
            self._write_junit(flags.junit, clock.monotonic() - begun)
        if not flags.json:
            self._summarize(cpu, ended_by)
        if self._failures:
            return 1
        return _INTERRUPTED if interrupted else 0

    def _chosen(self, flags: SimulationFlags) -> Iterable[int]:
        if flags.seed:
            yield flags.seed
            return
        first = flags.first
        index, parts = _part(flags.shard)
        seeds: Iterable[int] = range(first, first + flags.seeds)
        if flags.minutes:
            clock = SystemClock()
            ends = clock.monotonic() + flags.minutes * 60
            seeds = takewhile(lambda _: clock.monotonic() < ends, count(first))
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
        failure = shortest(self._setup, outcome, self._elsewhere, self._flags.attempts)
        again = shlex.join(["gazette", "test", *self._argv])
        failure.replay = again if failure.after else self.replay(outcome.seed)
        self._failures.append(failure)
        if self._flags.json:
            self._say(msgspec.json.encode(failure).decode())
        else:
            self._say(failure.text)

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
                self._say(f"{times:6}  {reached}")
        if ended_by:
            self._say(ended_by)
        if self._setup.has_timers and TIMERS not in self._coverage:
            self._say("No timer has fired in these seeds, so on_timer has not been tested.")
        rate = done / cpu if cpu else 0.0
        failed = len(self._failures)
        self._say(f"{counted(done, 'seed')}, {failed} failed, {rate:.1f} seeds/s of one processor")

    def _write_junit(self, path: Path, seconds: float) -> None:
        failures = {failure.outcome.seed: failure for failure in self._failures}
        name = _attribute(self._target)
        cases = []
        for outcome in self._outcomes:
            head = f'<testcase classname="{name}" name="seed {outcome.seed}" time="{outcome.seconds:.3f}"'
            failure = failures.get(outcome.seed)
            if failure is None:
                cases.append(f"{head}/>")
                continue
            text, what = (_NO_XML.sub("?", text) for text in (failure.text, failure.outcome.what))
            cases.append(
                f'{head}><failure message="{_attribute(what)}">{escape(text)}</failure></testcase>'
            )
        path.write_text(
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<testsuite name="gazette test" tests="{len(cases)}" failures="{len(failures)}"'
            f' errors="0" time="{seconds:.3f}">\n' + "\n".join(cases) + "\n</testsuite>\n"
        )


def _attribute(text: str) -> str:
    """Return a text as the value of an attribute of XML."""
    return escape(text).replace("\n", "&#10;")


def _part(text: str) -> tuple[int, int]:
    """Return index and number of the parts of ``1/4``. Raise ``Invalid`` for another form."""
    if not text:
        return 0, 1
    number, _, parts = text.partition("/")
    if not (is_digits(number) and is_digits(parts) and 1 <= int(number) <= int(parts)):
        raise Invalid(f"invalid part {text!r}", path="--shard", hint="Write it as 1/4.")
    return int(number) - 1, int(parts)
