"""Flags of `gazette test`, and the application that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gazette.config.schema import Loaded, Schema, setting
from gazette.errors import Invalid
from gazette.run.target import RunTarget
from gazette.testing.simulation.elsewhere import serve
from gazette.testing.simulation.setup import Setup

flag: Any = partial(setting, flag_only=True)

_DESCRIPTION = """Simulate an application: brokers, members and publishers in one process, with
kills, zombies, hand-overs, late and repeated messages. A seed decides everything, and time is virtual."""
_EXAMPLES = """examples:
  gazette test app.py --seeds 1000
  gazette test app.py --minutes 5 --coverage --junit report.xml
  gazette test app.py --seed 17"""


@dataclass(frozen=True, slots=True)
class SimulationFlags:
    """Flags without a group."""

    seeds: int = flag(100, "number of seeds")
    minutes: float = flag(0.0, "minutes for which seeds run, in place of --seeds (0: no limit)")
    first: int = flag(1, "first seed")
    seed: int = flag(0, "run this seed alone, and say what happens (0: run all)")
    only: str = flag(
        "", "run only seeds with a fault whose name has this text, such as kill", short="k"
    )
    shard: str = flag("", "run a part of the seeds, such as 1/4")
    load: str = flag("", "function that yields messages, in the module of the application")
    invariant: str = flag("", "function that checks the states, in the module of the application")
    journals: Path | None = flag(None, "YAML of the journals, for an application without sources")
    shards: Path | None = flag(None, "YAML of the shards, with --journals")
    ignore: tuple[str, ...] = flag(
        (), "table, table.column or path that is not compared; may be repeated"
    )
    transactions: str = flag(
        "any",
        "whether results may depend on where transactions end",
        choices=("any", "recorded"),
    )
    junit: Path | None = flag(None, "file for a report in the form of JUnit")
    coverage: bool = flag(False, "list faults and callbacks; end when no seed reaches new ones")
    json: bool = flag(False, "print each result as a line of JSON")


def schema() -> Schema:
    """Return the flags of the command."""
    return Schema(
        "gazette test",
        {"": SimulationFlags},
        arguments="TARGET",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )


def setup_of(loaded: Loaded) -> Setup:
    """Load the application that the arguments name. Raise ``Invalid`` if it cannot be simulated."""
    if len(loaded.arguments) != 1:
        raise Invalid(
            f"{len(loaded.arguments)} applications are named (expected 1)",
            path="gazette test",
            hint="Name its file or class, as in gazette test app.py.",
        )
    flags = loaded.group(SimulationFlags)
    target = RunTarget.parse(loaded.arguments[0])
    cls = type(target.load())
    module = sys.modules[cls.__module__]
    return Setup.of(
        cls,
        flags.journals,
        flags.shards,
        load=_function(module, flags.load, "--load"),
        invariant=_function(module, flags.invariant, "--invariant"),
        ignore=flags.ignore,
        recorded=flags.transactions == "recorded",
    )


def _function(module: Any, name: str, path: str) -> Callable[..., Any] | None:
    if not name:
        return None
    if ":" in name:
        place, _, name = name.partition(":")
        __import__(place)
        module = sys.modules[place]
    function = getattr(module, name, None)
    if not callable(function):
        raise Invalid(
            f"{module.__name__} has no function {name}",
            path=path,
            hint="Name a function of the application's module, or module:function.",
        )
    return function  # type: ignore[no-any-return]


def fold_elsewhere(argv: Sequence[str]) -> int:
    """Fold what a simulation asks for, on the standard streams."""
    serve(setup_of(schema().load(argv, {})), sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(fold_elsewhere(sys.argv[1:]))
