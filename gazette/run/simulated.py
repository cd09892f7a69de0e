"""Flags of `gazette test`, and the application that they name."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gazette.config.schema import Loaded, Schema, setting
from gazette.errors import Invalid, not_installed
from gazette.run.target import RunTarget
from gazette.runtime.user_code import place_of_error
from gazette.testing.simulation.elsewhere import serve
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.story import FaultForm

flag: Any = partial(setting, flag_only=True)

_DESCRIPTION = """Simulate an application: brokers, members and publishers in one process, with
kills, zombies, hand-overs, late and repeated messages. A seed decides everything, and time is virtual."""
_FAULTS = f"The faults are: {', '.join(FaultForm)}."
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
    seed: int = flag(0, "run this seed alone")
    only: str = flag(
        "", "run only seeds with a fault whose name has this text, such as kill", short="k"
    )
    shard: str = flag("", "run a part of the seeds, such as 1/4")
    load: str = flag("", "function that yields messages, in the module of the application")
    invariant: str = flag("", "function that checks the states, in the module of the application")
    backfill: str = flag(
        "", "Backfill by which states are rebuilt (default: that in the module of the application)"
    )
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
    database: str = flag(
        "",
        "empty database of PostgreSQL, for a SQLStore: each run has a copy (a URL of SQLAlchemy)",
    )
    timeout: float = flag(120.0, "seconds after which a seed has failed that does not end")
    attempts: int = flag(30, "most runs that look for a shorter story of a failure")
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


@contextlib.contextmanager
def opened_setup(loaded: Loaded) -> Iterator[Setup]:
    """Load the application that the arguments name, and keep copies of the database within the block.

    Raise ``Invalid`` if the application cannot be simulated.
    """
    url = loaded.group(SimulationFlags).database
    if not url:
        yield setup_of(loaded)
        return
    try:
        from gazette.testing.simulation.sql_server import SQLServer
    except ImportError as error:
        raise not_installed("--database", "sqlalchemy", "postgres") from error

    server = SQLServer(url)
    with server.attached():
        setup = setup_of(loaded)
        setup.database = server
        setup.rehearse()  # The stores create their tables in the database.
        server.rest()  # Its sessions end: a database in use cannot be copied.
        yield setup


def setup_of(loaded: Loaded) -> Setup:
    """Load the application that the arguments name. Raise ``Invalid`` if it cannot be simulated."""
    if len(loaded.arguments) != 1:
        raise Invalid(
            f"{len(loaded.arguments)} applications are named (expected 1)",
            path="gazette test",
            hint="Name its file or class, as in gazette test app.py.",
        )
    flags = _checked(loaded)
    target = RunTarget.parse(loaded.arguments[0])
    cls = type(target.load())
    module = sys.modules[cls.__module__]
    setup = Setup.of(
        cls,
        flags.journals,
        flags.shards,
        load=_function(module, flags.load, "--load"),
        invariant=_function(module, flags.invariant, "--invariant"),
        ignore=flags.ignore,
        recorded=flags.transactions == "recorded",
        backfill=_backfill(module, cls, flags.backfill),
        timeout_s=flags.timeout,
    )
    if flags.backfill and flags.database:
        raise Invalid(
            "a state in a database is not rebuilt in a simulation",
            path="--backfill",
            hint="Leave the flag out. `gazctl shards backfill --verify` compares its states.",
        )
    if flags.backfill and not setup.rebuilds:
        raise Invalid(
            "an application with on_timer or a PoisonPolicy is not rebuilt in a simulation",
            path="--backfill",
            hint="Leave the flag out. `gazctl shards backfill --verify` compares its states.",
        )
    return setup


def _checked(loaded: Loaded) -> SimulationFlags:
    """Return the flags. Raise ``Invalid`` for flags with which no seed would run."""
    flags = loaded.group(SimulationFlags)
    is_one = loaded.sources.get("seed") == "flag"
    for name, value in (("seeds", flags.seeds), ("first", flags.first), ("seed", flags.seed)):
        if value < 1 and (name != "seed" or is_one):
            raise Invalid(f"{value} is too small", path=f"--{name}", hint="Seeds begin at 1.")
    for name, seconds in (("minutes", flags.minutes), ("timeout", flags.timeout - 1)):
        if not 0 <= seconds < 1e9:
            raise Invalid("the time is too short or too long", path=f"--{name}")
    if flags.only and not any(flags.only in form for form in FaultForm):
        raise Invalid(f"no fault has {flags.only!r} in its name", path="-k", hint=_FAULTS)
    if flags.junit is not None:
        try:
            flags.junit.open("a").close()
        except OSError as error:
            what = f"{flags.junit} cannot be written: {error.strerror}"
            raise Invalid(what, path="--junit") from error
    return flags


def _function(module: Any, name: str, path: str) -> Callable[..., Any] | None:
    if not name:
        return None
    if ":" in name:
        place, _, name = name.partition(":")
        try:
            module = importlib.import_module(place)
        except Exception as error:
            what = f"{place} cannot be imported: {type(error).__name__}: {error}"
            raise Invalid(what, path=path, hint=place_of_error(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Invalid(
            f"{module.__name__} has no function {name}",
            path=path,
            hint="Name a function of the application's module, or module:function.",
        )
    return function  # type: ignore[no-any-return]


def _backfill(module: Any, application: type[Any], name: str) -> type[Any] | None:
    """Return the named class, or the one in the module of the application; None if neither exists.

    Raise ``Invalid`` for a name that is no `Backfill` of the application.
    """
    if not name and "gazette.history.backfill.definition" not in sys.modules:
        return None  # The module cannot have a backfill.
    from gazette.history.backfill.definition import Backfill
    from gazette.testing.simulation import rebuild  # noqa: F401 - here once, and not in each fork

    def is_right(value: Any) -> bool:
        return (
            isinstance(value, type)
            and issubclass(value, Backfill)
            and getattr(value, "application", None) is application
        )

    if not name:
        return next(filter(is_right, vars(module).values()), None)
    backfill = _function(module, name, "--backfill")
    if not is_right(backfill):
        raise Invalid(
            f"{name} is no Backfill of {application.__name__}",
            path="--backfill",
            hint="Name a class with the attribute application.",
        )
    return backfill  # type: ignore[return-value]


def fold_elsewhere(argv: Sequence[str]) -> int:
    """Fold the inputs of a simulation, by the standard streams. The user's code gets other streams."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        with opened_setup(schema().load(argv, {})) as setup:
            serve(setup, requests, answers)
    return 0


if __name__ == "__main__":
    sys.exit(fold_elsewhere(sys.argv[1:]))
