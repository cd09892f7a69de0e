"""`simulate`: thousands of histories of an application, from a test.

    def test_totals_survive_everything(gazette_simulation):
        gazette_simulation(Totals, seeds=200)

The simulation runs in a process of its own, so that a seed gives the same run in each process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gazette.consumer.application import Application
from gazette.errors import Invalid
from gazette.runtime.decoders import json_decoder
from gazette.testing.simulation.seeds import FailedSeed


class SimulationFailed(AssertionError):
    """A seed of a simulation has failed. The text has the shortest story, and how to replay it."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation in which no seed has failed."""

    seeds: int
    seconds: float
    """Processor time."""


def simulate(
    app: type[Application[Any]],
    *,
    seeds: int | range = 100,
    load: Callable[..., Any] | None = None,
    faults: str = "",
    invariant: Callable[..., Any] | None = None,
    ignore: Collection[str] = (),
    transactions: str = "any",
    journals: Path | None = None,
    shards: Path | None = None,
    backfill: type[Any] | None = None,
    database: str = "",
) -> SimulationResult:
    """Simulate an application, and raise `SimulationFailed` for the first seed that fails.

    ``load`` takes a `random.Random`, and yields messages, or pairs of a source's name and a message.
    ``faults`` selects the seeds with a fault whose name has this text. ``invariant`` takes the committed
    states, and raises or returns False if they are wrong. ``ignore`` names tables, columns or paths that may
    differ. ``transactions="recorded"`` permits results that depend on where transactions end. ``journals``
    and ``shards`` are files of YAML, for an application that declares no sources. ``backfill`` is the
    `Backfill` by which states are rebuilt, by default one in the module of the application. ``database`` is
    the URL of an empty database of PostgreSQL, for a SQLStore: each run has a copy.

    The class and the functions are imported by their names in another process. Raise ``Invalid`` for one that
    its module does not have by name.
    """
    numbers = range(1, seeds + 1) if isinstance(seeds, int) else seeds
    if not numbers or numbers.start < 1 or numbers.step != 1:
        raise Invalid(
            f"{seeds!r} is no range of seeds", path="seeds", hint="Seeds begin at 1, and follow."
        )
    place, module = _module_of(app, "app")
    words = [f"{place}:{app.__name__}", "--first", str(numbers.start), "--seeds", str(len(numbers))]
    words += ["--json", "--transactions", transactions]
    for name, function in (
        ("--load", load),
        ("--invariant", invariant),
        ("--backfill", backfill),
    ):
        if function is not None:
            _, home = _module_of(function, name.removeprefix("--"))
            text = function.__name__
            words += [name, text if home == module else f"{home}:{text}"]
    given = (
        ("-k", faults),
        ("--journals", journals),
        ("--shards", shards),
        ("--database", database),
    )
    for name, value in given:
        if value:
            words += [name, str(value)]
    for each in ignore:
        words += ["--ignore", each]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "gazette.main", "test", *words],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        outcomes = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
        return SimulationResult(len(outcomes), sum(outcome["seconds"] for outcome in outcomes))
    if done.returncode != 1 or not done.stdout.strip():
        raise Invalid(f"the simulation has not run\n{done.stderr.strip()}", path="simulate")
    failure = json_decoder(FailedSeed).decode(done.stdout.splitlines()[-1])
    raise SimulationFailed(failure.text)


def _module_of(named: Any, path: str) -> tuple[str, str]:
    """Return the place of a class or function for ``gazette test``, and the name of its module."""
    name = named.__qualname__
    module = sys.modules.get(named.__module__)
    if module is None or getattr(module, name, None) is not named:
        raise Invalid(
            f"{name} is no name of a module",
            path=path,
            hint="Define it at the top level of a module: another process imports it by its name.",
        )
    if "." in named.__module__:
        return named.__module__, named.__module__
    return str(module.__file__), named.__module__
