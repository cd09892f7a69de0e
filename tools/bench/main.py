"""``gazette bench``: measure this machine, each figure beside a baseline of the same run."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from gazette.config.schema import Schema, exit_with, setting
from gazette.errors import GazetteError, Invalid
from gazette.runtime.clock import Clock, SystemClock
from tools.bench.allocator import allocator
from tools.bench.clients import clients
from tools.bench.cluster import Bench, BenchSettings, running
from tools.bench.journals import append, latency, read
from tools.bench.members import failover, idle
from tools.bench.memory import memory
from tools.bench.messages import consume, end_to_end, publish
from tools.bench.recovery import playback
from tools.bench.report import Figure, Report, load_average, machine_facts
from tools.bench.small import large, many, small, tailers
from tools.bench.timeline import timeline

Suite = Callable[[Bench], Awaitable[list[Figure]]]

SUITES: Final[dict[str, Suite]] = {
    "append": append,
    "latency": latency,
    "small": small,
    "large": large,
    "tailers": tailers,
    "read": read,
    "publish": publish,
    "consume": consume,
    "clients": clients,
    "end-to-end": end_to_end,
    "timeline": timeline,
    "failover": failover,
    "playback": playback,
    "idle": idle,
    "many": many,
    "memory": memory,
    "allocator": allocator,
}
ALL: Final = "all"
LINE_WIDTH: Final = 120
FULL_SECONDS: Final = 0.5
"""Shorter measurements (in seconds) get less initial data, in proportion."""
SCALE_MIN: Final = 0.001
"""Least fraction of the usual initial data, however short the measurements are."""


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """Flags of ``gazette bench``."""

    json: Path | None = setting(None, "JSON file to write all results to")
    into: Path | None = setting(
        None, "Markdown file whose table between two comments is replaced by this one"
    )
    seconds: float = setting(0.6, "seconds of each measurement of a round")
    rounds: int = setting(3, "number of rounds; the figure is their median")
    dir: Path | None = setting(
        None, "directory in which to create a temporary directory for all state"
    )


def run(argv: Sequence[str]) -> int:
    """Run the subcommand and return its exit code.

    0: measured, even if targets are missed. 1: a process failed. 2: a mistake in the flags.
    """
    schema = Schema(
        "gazette bench",
        {"": BenchFlags},
        arguments=f"[{' | '.join((*SUITES, ALL))}] ...",
        description="Measure this machine. Brokers and consumers run as processes of their own.",
    )
    try:
        loaded = schema.load(argv, {})
        flags = loaded.group(BenchFlags)
        names = suites_of(loaded.arguments)
        _check(flags)
        if flags.into is not None:
            table_of(flags.into, names)
    except Invalid as error:
        return exit_with(error, sys.stderr)
    # Without a terminal, lines need not be short.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else LINE_WIDTH)
    try:
        with tempfile.TemporaryDirectory(prefix="gazette-bench-", dir=flags.dir) as directory:
            return asyncio.run(_measure(flags, names, argv, Path(directory), console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except TimeoutError:
        console.print("[red]gazette bench: a measurement did not end in time[/]")
        return 1
    except GazetteError as error:
        console.print(f"[red]gazette bench: {error}[/]\n  {error.hint}")
        return 1


def suites_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the named suites, each once, in their order. Raise ``Invalid``."""
    for name in arguments:
        if name not in SUITES and name != ALL:
            known = ", ".join((*SUITES, ALL))
            raise Invalid(f'unknown suite "{name}"', path="gazette bench", hint=f"One of {known}.")
    if not arguments or ALL in arguments:
        return tuple(SUITES)
    return tuple(name for name in SUITES if name in arguments)


def _check(flags: BenchFlags) -> None:
    if not 0 < flags.seconds <= 600:
        raise Invalid(f"invalid seconds ({flags.seconds:g}; expected up to 600)", path="--seconds")
    if not 1 <= flags.rounds <= 100:
        raise Invalid(f"invalid rounds ({flags.rounds}; expected 1 to 100)", path="--rounds")
    if flags.dir is not None and not flags.dir.is_dir():
        raise Invalid(f"{flags.dir} is not a directory", path="--dir")
    if flags.json is not None and not flags.json.absolute().parent.is_dir():
        raise Invalid(f"{flags.json.parent} is not a directory", path="--json")


def settings_of(flags: BenchFlags, directory: Path) -> BenchSettings:
    return BenchSettings(
        directory=directory,
        seconds=flags.seconds,
        rounds=flags.rounds,
        scale=max(SCALE_MIN, min(1.0, flags.seconds / FULL_SECONDS)),
        hand_offs=flags.rounds,
        kills=max(1, flags.rounds - 1),
    )


async def _measure(
    flags: BenchFlags, names: Sequence[str], argv: Sequence[str], directory: Path, console: Console
) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    report = await measure(settings_of(flags, directory), names, argv, SystemClock(), console)
    console.print(report.table())
    for note in report.notes():
        console.print(f"[dim]{note}[/]")
    machine = report.machine
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_at_start'][:1]} before and"
        f" {machine['load_at_end'][:1]} after; Python {machine['python']}"
        f" ({machine['python_build']}); {report.seconds:.0f} s in all"
    )
    if flags.json is not None:
        write_json(flags.json, report.as_json())
        console.print(f"written to {flags.json}")
    if flags.into is not None:
        before, after = table_of(flags.into, names)
        command = (
            f"gazette bench {' '.join(names)} --seconds {flags.seconds:g} --rounds {flags.rounds}"
        )
        _write(flags.into, f"{before}\n{report.markdown(command)}\n{after}")
        console.print(f"written to {flags.into}")
    return 0


async def measure(
    settings: BenchSettings,
    names: Sequence[str],
    argv: Sequence[str],
    clock: Clock,
    console: Console,
) -> Report:
    """Run suites on one cluster. Raise what fails. Cancellation stops everything."""
    began = clock.monotonic()
    machine = machine_facts(clock)
    figures: list[Figure] = []
    seconds: dict[str, float] = {}
    console.print("starting etcd and 3 brokers …")
    async with running(settings, clock) as bench:
        begin = clock.monotonic()
        for name in names:
            console.print(f"{name} …")
            figures.extend(await SUITES[name](bench))
            seconds[name] = round(clock.monotonic() - begin, 1)
            begin = clock.monotonic()
    machine["load_at_end"] = load_average()
    command = " ".join(("gazette", "bench", *argv))
    return Report(tuple(figures), machine, command, clock.monotonic() - began, seconds)


def table_of(path: Path, names: Sequence[str]) -> tuple[str, str]:
    """Return a page's text before and after the table of these suites. Raise ``Invalid`` if it has none."""
    return place_of(path, f"gazette bench {' '.join(names)}")


def place_of(path: Path, command: str) -> tuple[str, str]:
    """Return a page's text before and after the table of a command. Raise ``Invalid`` if it has none."""
    begin, end = f"<!-- {command} -->\n", "<!-- end of the table -->"
    try:
        text = path.read_text()
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path="--into") from error
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise Invalid(
            f"{path} has no place for the table of these suites",
            path="--into",
            hint=f"Put these two lines where it belongs:\n{begin}{end}",
        )
    return before + begin, end + after


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write so that a reader sees all of it or none."""
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
