"""Runs of tests over copies of the source with one mistake each."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools.timer_plants.plants import Plant

_ROOT: Final = Path(__file__).parents[2]
_FAILED: Final = re.compile(r"^FAILED (\S+)", re.MULTILINE)
_NOT_FOUND: Final = "NOT FOUND"


def find_each(plants: Mapping[str, Plant], prog: str, description: str | None) -> int:
    """Run the tests of each mistake that arguments name, or of all. Return 0 if they find each."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"mistakes to make, of {', '.join(plants)}"
    )
    names = parser.parse_args().names or list(plants)
    if unknown := set(names) - set(plants):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="gazette-plants-") as directory:
        copy = Path(directory)
        for part in ("gazette", "tests", "pyproject.toml"):
            source = _ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        found = {name: _finder(copy, name, plants[name]) for name in names}
    return 1 if _NOT_FOUND in found.values() else 0


def _finder(copy: Path, name: str, plant: Plant) -> str:
    """Return the test that finds a mistake, and print it."""
    path = copy / plant.path
    right = path.read_text()
    path.write_text(plant.made_in(right))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *plant.tests]
    try:
        ended = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    finally:
        path.write_text(right)
    match = _FAILED.search(ended.stdout)
    if match is None and ended.returncode:
        sys.stderr.write(ended.stdout + ended.stderr)
    test = match[1] if match is not None else _NOT_FOUND
    sys.stdout.write(f"{name:40} {test}\n")
    sys.stdout.flush()
    return test
