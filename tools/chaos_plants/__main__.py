"""``python -m tools.chaos_plants [NAME …]``: exit code 0 if `gazette chaos` finds each mistake."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.chaos_plants.hook import PLANT_ENV
from tools.chaos_plants.plants import PLANTS

_HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.chaos_plants", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"mistakes to plant, of {', '.join(PLANTS)}"
    )
    parser.add_argument("--without", action="store_true", help="the same runs without the mistakes")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PLANTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    wrong = [name for name in arguments.names or PLANTS if not _run(name, arguments.without)]
    if wrong:
        _say(
            f"violations where none may be: {wrong}" if arguments.without else f"not found: {wrong}"
        )
    return 1 if wrong else 0


def _run(name: str, without: bool) -> bool:
    """Run `gazette chaos` with a mistake. Return True if it found violations, or none ``without`` it."""
    command = [sys.executable, "-m", "gazette.main", "chaos", *PLANTS[name].chaos]
    _say(f"--- {name}: gazette chaos {' '.join(PLANTS[name].chaos)}")
    paths = [str(_HERE / "site"), str(_HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if not without:
        environ[PLANT_ENV] = name
    code = subprocess.run(command, env=environ, check=False).returncode
    expected = 0 if without else 1
    _say(f"--- {name}: exit code {code}, expected {expected}")
    return code == expected


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
