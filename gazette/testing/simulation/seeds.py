"""Runs seeds of an application in forked processes, and finds the shortest story of a seed that fails."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from itertools import islice
from typing import IO, Final, NoReturn

import msgspec

from gazette.errors import Invalid
from gazette.runtime.decoders import json_decoder
from gazette.runtime.user_code import is_user_file, place_of_error, shown_path
from gazette.testing.simulation.app_judge import Judge
from gazette.testing.simulation.app_run import AppRun, Finding
from gazette.testing.simulation.elsewhere import Elsewhere, is_elsewhere
from gazette.testing.simulation.hints import HINTS, advice, source_line
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.story import Story
from gazette.testing.simulation.user_code import UserSurroundings

SLICE: Final = 12
"""Number of seeds that one process simulates. Its end frees their garbage."""
_ENDED: Final = ("hang", "death")
"""Causes of outcomes that a process cannot report itself: it hangs, or has died."""
_FRAME: Final = re.compile(r'File "(.+)", line (\d+) in (.+)')
_ATTEMPT_S: Final = 20.0
"""Seconds of the processor for one run. After a longer run, no other run looks for a shorter story."""


class SeedResult(msgspec.Struct):
    """The result of one seed."""

    seed: int
    seconds: float
    """Processor time."""
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
    before: list[int] = []
    """The seeds that ran before in the same process."""

    @property
    def key(self) -> str:
        """A text that findings of the same mistake share, in all stories."""
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
    after: str = ""
    """The earlier seeds of the process, if the seed fails only after them."""

    @property
    def text(self) -> str:
        """The whole report, for people."""
        outcome = self.outcome
        lines = [f"seed {outcome.seed}: {outcome.what}", ""]
        if outcome.details:
            lines += [f"  {line}" for line in outcome.details.splitlines()] + [""]
        if self.after:
            lines += [f"  it fails only after {self.after} in the same process", ""]
        if self.story:
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

    Garbage is not collected. So a process should simulate a few seeds, and end.
    """
    gc.disable()
    begun = time.process_time()
    story = story_of(setup, seed)
    story.kept_sends, story.kept_faults = sends, faults
    user = UserSurroundings(seed)
    run = AppRun(setup, story, user, trace=trace)
    try:
        with (
            contextlib.nullcontext()
            if setup.database is None
            else setup.database.fresh() as database
        ):
            run.use(database)
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


def shortest(
    setup: Setup, outcome: SeedResult, elsewhere: Elsewhere | None, attempts: int
) -> FailedSeed:
    """Leave messages and faults out of a failing story, as long as it fails in the same way.

    Ctrl-C ends the search, and not the command. A seed that hangs or kills its process has no story.
    """
    if outcome.cause in _ENDED:
        hint, line = HINTS[outcome.cause], source_line(outcome.place)
        return FailedSeed(outcome, [], hint, outcome.place, 0, 0, line)
    story = story_of(setup, outcome.seed)
    sends, faults = list(range(len(story.sends))), list(range(len(story.faults)))
    best, left = outcome, attempts

    def fails(kept_sends: list[int], kept_faults: list[int]) -> bool:
        nonlocal best, left
        left -= 1
        if elsewhere is not None and is_elsewhere(outcome.seed):
            elsewhere.start()
        (tried,) = in_child(
            setup,
            [outcome.seed],
            lambda seed: run_seed(
                setup, seed, sends=kept_sends, faults=kept_faults, elsewhere=elsewhere
            ),
        )
        if tried.cause in _ENDED and elsewhere is not None:
            elsewhere.close()  # Its answer to the dead process may still come.
        if tried.cause == "hang" or tried.seconds > _ATTEMPT_S:
            left = 0
        if tried.what and tried.key == outcome.key:
            best = tried
            return True
        return False

    after = ""
    with contextlib.suppress(KeyboardInterrupt):
        if attempts and outcome.before and not fails(sends, faults):
            after = f"seeds {outcome.before[0]} to {outcome.before[-1]}"
            left = 0
        for fault in list(faults):
            rest = [other for other in faults if other != fault]
            if left > 0 and fails(sends, rest):
                faults = rest
        size = max(1, len(sends) // 2)
        while size and left > 0:
            # Leave out only the last messages of a user's load: a message may need earlier messages.
            begin = 0 if setup.load is None else max(0, len(sends) - size)
            while begin < len(sends) and left > 0:
                rest = sends[:begin] + sends[begin + size :]
                if fails(rest, faults):
                    sends = rest
                else:
                    begin += size
            size //= 2
    story.kept_sends, story.kept_faults = sends, faults
    application = type(setup.new_application())
    hint, place = advice("global" if after else best.cause, application, best.faults)
    place = best.place or place
    counts = len(story.sends), len(story.faults)
    line = source_line(place)
    return FailedSeed(best, story.tell(), hint, place, *counts, line, after=after)


def run_seeds(
    setup: Setup, seeds: Iterable[int], elsewhere: Elsewhere | None
) -> Generator[SeedResult, None, None]:
    """Yield the outcome of each seed, in order. If it is closed early, it kills the running process."""
    waiting = iter(seeds)
    first = True
    while True:
        # The first process has one seed only, so that the first outcome comes soon.
        some = list(islice(waiting, 1 if first else SLICE))
        first = False
        if not some:
            return
        if elsewhere is not None and any(map(is_elsewhere, some)):
            elsewhere.start()
        yield from in_child(setup, some, lambda seed: run_seed(setup, seed, elsewhere=elsewhere))


def in_child(
    setup: Setup, seeds: Sequence[int], call: Callable[[int], SeedResult]
) -> Generator[SeedResult, None, None]:
    """Call ``call`` for each seed in a forked process, and yield its results. If the process dies, the seed
    has failed. Raise the ``Invalid`` of a call.
    """
    with tempfile.TemporaryFile() as report:
        reading, writing = os.pipe()
        gc.freeze()  # A child must not finalize what its parent left as garbage.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        child = os.fork()
        if not child:
            os.close(reading)
            _serve(setup.timeout_s, seeds, call, writing, report)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        gc.unfreeze()
        os.close(writing)
        ended, status = False, 0
        waiting = list(seeds)
        try:
            with os.fdopen(reading, "rb") as file:
                for line in file:
                    if line.startswith(b"{") and line.endswith(b"\n"):
                        yield json_decoder(SeedResult).decode(line)
                        waiting.pop(0)
                    elif line.startswith(b"["):
                        message, path, hint = msgspec.json.decode(line)
                        raise Invalid(message, path=path, hint=hint)
                    else:
                        ended = line == b"done\n"
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(child, 0)
        if waiting and not ended:
            report.seek(0)
            outcome = _death(waiting[0], report.read().decode(errors="replace"), status)
            yield msgspec.structs.replace(outcome, before=list(seeds[: -len(waiting)]))


def _death(seed: int, report: str, status: int) -> SeedResult:
    """Return the outcome of a seed whose process has ended, by the report of its fault handler."""
    code = os.waitstatus_to_exitcode(status)
    what, cause = f"its process exits with code {code}", "death"
    if "Timeout (" in report:
        what, cause = "it does not end in time", "hang"
    elif code < 0:
        what = f"its process dies by {signal.Signals(-code).name}"
    threads = [_FRAME.findall(thread) for thread in report.split("\n\n")]
    # First the threads that run the user's code, and then threads that this code waits for.
    stacks = sorted(threads, key=lambda frames: not (frames and is_user_file(frames[0][0])))
    places = [
        f"{shown_path(file)}:{line} in {name}"
        for frames in stacks
        for file, line, name in frames
        if is_user_file(file)
    ]
    place = places[0] if places else ""
    return SeedResult(seed, 0.0, "", 0, [], [], what, place, cause=cause)


def _serve(
    timeout_s: float,
    seeds: Sequence[int],
    call: Callable[[int], SeedResult],
    writing: int,
    report: IO[bytes],
) -> NoReturn:
    """Run a call for each seed, and write the result. Do not return."""
    code = 1
    try:
        # Ctrl-C is for the parent, which ends this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(2, 1)  # Output of the user's code must not be among reports.
        logging.disable(logging.CRITICAL)
        faulthandler.enable(report)
        with os.fdopen(writing, "wb") as file:
            for index, seed in enumerate(seeds):
                faulthandler.dump_traceback_later(timeout_s, exit=True, file=report)
                try:
                    outcome = call(seed)
                except Invalid as error:
                    text = msgspec.json.encode([error.message, error.path, error.hint])
                    file.write(text + b"\n")
                    break
                except BaseException as error:  # noqa: BLE001 - the seed fails by it
                    name, place = type(error).__name__, place_of_error(error)
                    outcome = SeedResult(seed, 0.0, "", 0, [], [], f"{name}: {error}", place)
                    outcome.details = "".join(traceback.format_exception(error)[-4:])
                outcome.before = list(seeds[:index])
                file.write(msgspec.json.encode(outcome) + b"\n")
                file.flush()
            file.write(b"done\n")
        code = 0
    except BrokenPipeError:
        code = 0  # The parent has enough.
    except BaseException as error:  # noqa: BLE001 - the parent reports that the process has died
        traceback.print_exception(error)
    finally:
        os._exit(code)
