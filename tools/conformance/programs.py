"""Programs that share a cluster, logs and stores with ours: those of the original, or of another version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gazette.errors import Invalid

_APPLICATION: Final = (
    "from gazette import runconsumer; from tools.conformance.tally import Tally; "
    "runconsumer.main(Tally())"
)


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one side."""

    name: str
    directory: Path
    """Has ``gazette`` and ``gazctl``."""
    tally: tuple[str, ...] = ()
    """Command of the application that counts words; empty without it."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Further variables of that command."""
    takes_pages: bool = True
    """True if the application can go on with a SQLite database of our application."""


def original(directory: Path) -> Programs:
    """Return the programs of the Go original in a directory."""
    tally = directory / "tally"
    command = (str(tally),) if tally.exists() else ()
    return Programs("the original", directory, command, takes_pages=False)


def version(checkout: Path) -> Programs:
    """Return the programs of another version, from a checkout of it with an environment ``.venv``.

    Raise ``Invalid`` without that environment.
    """
    directory = checkout.resolve() / ".venv" / "bin"
    if not (directory / "gazctl").exists():
        raise Invalid(
            f"{checkout} has no environment of its own",
            hint="Install that version there: python3 -m venv .venv, then .venv/bin/pip install -e '.[all]'.",
        )
    command = (str(directory / "python"), "-c", _APPLICATION)
    environ = {"PYTHONPATH": str(checkout.resolve())}
    return Programs("the other version", directory, command, environ)
