"""Seeds of an application, some in each forked process, and the shortest story of a seed that fails."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from gazette.errors import Broken
from gazette.testing.simulation.app_judge import Judge
from gazette.testing.simulation.app_run import AppRun, Finding
from gazette.testing.simulation.elsewhere import Elsewhere
from gazette.testing.simulation.hints import advice, source_line
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.story import Story
from gazette.testing.simulation.user_code import UserSurroundings

SLICE: Final = 12
"""Seeds that one process simulates: it ends with all that they leave."""
HUNG_S: Final = 120
"""Seconds after which a seed hangs."""
_ATTEMPTS_MAX: Final = 30
"""Most runs that look for a shorter story."""


class SeedResult(msgspec.Struct):
    """What one seed came to."""

    seed: int
    seconds: float
    """Of the processor."""
    digest: str
    sends: int
    faults: list[str]
    coverage: list[str]
    what: str = ""
    """The first finding; empty if nothing is wrong."""
    place: str = ""
    details: str = ""
    cause: str = ""
    trace: list[str] = []

    @property
    def key(self) -> str:
        """What the finding has in common with those of other stories of the same mistake."""
        return f"{self.cause} {re.sub('[0-9]+', '', self.what)[:24]}"


class FailedSeed(msgspec.Struct):
    """The shortest story of a seed that fails, ready to print."""

    outcome: SeedResult
    story: list[str]
    hint: str
    place: str
    sends: int
    """Messages of the whole story."""
    faults: int
    line: str = ""
    """The line of ``place``."""
    replay: str = ""
    """The command that runs the seed again."""

    @property
    def text(self) -> str:
        """All of it, for people."""
        outcome = self.outcome
        lines = [f"seed {outcome.seed}: {outcome.what}", ""]
        if outcome.details:
            lines += [f"  {line}" for line in outcome.details.splitlines()] + [""]
        count = len(self.story) - len(outcome.faults)
        lines.append(
            f"  the shortest story, {count} of {self.sends} messages and {len(outcome.faults)} of"
            f" {self.faults} faults:"
        )
        lines += [f"  {line}" for line in self.story] + [""]
        if self.place:
            lines += [f"  your code: {self.place}", f"      {self.line}"]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        lines.append(f"  replay: {self.replay}")
        return "\n".join(lines)


def run_seed(
    setup: Setup,
    seed: int,
    *,
    sends: Collection[int] | None = None,
    faults: Collection[int] | None = None,
    elsewhere: Elsewhere | None = None,
    trace: bool = False,
) -> SeedResult:
    """Run one seed, or the part of its story with these messages and faults.

    What it leaves is not collected: a process simulates some seeds, and ends.
    """
    gc.disable()
    begun = time.process_time()
    story = story_of(setup, seed)
    story.kept_sends, story.kept_faults = sends, faults
    user = UserSurroundings(seed)
    run = AppRun(setup, story, user, trace=trace)
    try:
        run.run()
        findings = Judge(run, user, elsewhere).findings()
    finally:
        run.cluster.close()
    first = findings[0] if findings else Finding("")
    return SeedResult(
        seed,
        time.process_time() - begun,
        f"{run.cluster.loop.digest & 0xFFFF_FFFF_FFFF_FFFF:016x}",
        len(story.sends),
        [str(fault.form) for fault in story.faults_to_make()],
        sorted(run.ended.coverage),
        first.what,
        first.place,
        first.details,
        first.hint,
        [f"{when:10.4f}  {node:12}  {what}" for when, node, what in run.cluster.trace or ()],
    )


def story_of(setup: Setup, seed: int) -> Story:
    """Draw the story of a seed."""
    return Story.draw(setup, seed, poison=setup.skips_poison)


def shortest(setup: Setup, outcome: SeedResult, elsewhere: Elsewhere | None) -> FailedSeed:
    """Leave messages and faults out of a failing story, as long as it fails in the same way."""
    story = story_of(setup, outcome.seed)
    sends, faults = list(range(len(story.sends))), list(range(len(story.faults)))
    best, left = outcome, _ATTEMPTS_MAX

    def fails(kept_sends: list[int], kept_faults: list[int]) -> bool:
        nonlocal best, left
        left -= 1
        (tried,) = in_child(
            lambda: [
                run_seed(
                    setup, outcome.seed, sends=kept_sends, faults=kept_faults, elsewhere=elsewhere
                )
            ]
        )
        if tried.what and tried.key == outcome.key:
            best = tried
            return True
        return False

    for fault in list(faults):
        rest = [other for other in faults if other != fault]
        if left and fails(sends, rest):
            faults = rest
    size = max(1, len(sends) // 2)
    while size and left:
        # Of messages of the user's load, only the last ones: the others may need those before them.
        begin = 0 if setup.load is None else max(0, len(sends) - size)
        while begin < len(sends) and left:
            rest = sends[:begin] + sends[begin + size :]
            if fails(rest, faults):
                sends = rest
            else:
                begin += size
        size //= 2
    story.kept_sends, story.kept_faults = sends, faults
    application = type(setup.new_application())
    hint, place = advice(best.cause, application, best.faults)
    place = best.place or place
    counts = len(story.sends), len(story.faults)
    return FailedSeed(best, story.tell(), hint, place, *counts, source_line(place))


def run_seeds(
    setup: Setup, seeds: Iterable[int], elsewhere: Elsewhere | None
) -> Generator[SeedResult, None, None]:
    """Yield the outcome of each seed, in order. Closed early, it ends what runs."""
    waiting = iter(seeds)
    first = True
    while True:
        # One seed alone comes first: its outcome is there soon.
        some = list(islice(waiting, 1 if first else SLICE))
        first = False
        if not some:
            return
        yield from in_child(
            lambda some=some: (run_seed(setup, seed, elsewhere=elsewhere) for seed in some)  # type: ignore[misc]
        )


def in_child(call: Callable[[], Iterable[SeedResult]]) -> Iterator[SeedResult]:
    """Yield what a call yields in a forked process. Raise ``Broken`` if that process dies."""
    reading, writing = os.pipe()
    gc.freeze()  # A child must not finalize what its parent left as garbage.
    child = os.fork()
    if not child:
        os.close(reading)
        _serve(call, writing)
    gc.unfreeze()
    os.close(writing)
    ended = False
    try:
        with os.fdopen(reading, "rb") as file:
            for line in file:
                if line == b"done\n":
                    ended = True
                else:
                    yield msgspec.json.decode(line, type=SeedResult)
        if not ended:
            raise Broken(
                "a process of the simulation has died",
                hint="Its standard error says why. A seed that hangs ends so, too.",
            )
    finally:
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(call: Callable[[], Iterable[SeedResult]], writing: int) -> Any:
    """Run a call, and write what it yields. Do not return."""
    code = 1
    try:
        logging.disable(logging.CRITICAL)
        with os.fdopen(writing, "wb") as file:
            faulthandler.dump_traceback_later(HUNG_S, exit=True)
            for outcome in call():
                file.write(msgspec.json.encode(outcome) + b"\n")
                file.flush()
                faulthandler.dump_traceback_later(HUNG_S, exit=True)
            file.write(b"done\n")
        code = 0
    except BrokenPipeError:
        code = 0  # The parent has enough.
    except BaseException as error:  # noqa: BLE001 - the parent reports that the process has died
        traceback.print_exception(error)
    finally:
        os._exit(code)
