"""The wheels of this tree, and environments of their own to install them into. Nothing is downloaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
PROJECTS: Final = {"pygazette": ROOT, "pygazette-client": ROOT / "packages" / "client"}
"""Directories of the distributions."""
_PIP: Final = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def project_of(distribution: str) -> dict[str, Any]:
    """Return the pyproject.toml of a distribution."""
    return tomllib.loads((PROJECTS[distribution] / "pyproject.toml").read_text())


def build_wheels(directory: Path) -> dict[str, Path]:
    """Build the wheels into ``directory``. Return them by the names of their distributions."""
    here = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    for project in PROJECTS.values():
        run([*_PIP, "wheel", "--no-deps", *here, "--wheel-dir", str(directory), str(project)])
    return {name: next(directory.glob(f"{name.replace('-', '_')}-[0-9]*.whl")) for name in PROJECTS}


def install_wheels(directory: Path) -> Path:
    """Build the wheels, and install them into ``directory``. Return the directory of its programs.

    What they depend on comes from this environment.
    """
    wheels = build_wheels(directory)
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", *map(str, wheels.values()))
    # After the wheels' own: this environment may have an editable installation of the source.
    purelib = sysconfig.get_path("purelib")
    (packages_of(python) / "dependencies.pth").write_text(f"{purelib}\n")
    return directory / "bin"


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of the distributions that pip installs for the requirements and their extras."""
    found: set[str] = set()
    todo = [(Requirement(one), {""}) for one in requirements]
    while todo:
        one, extras = todo.pop()
        name = canonicalize_name(one.name)
        if one.marker is not None and not any(
            one.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        if name in found and not one.extras:
            continue
        found.add(name)
        required = map(Requirement, importlib.metadata.distribution(name).requires or [])
        todo += [(each, {"", *one.extras}) for each in required]
    return found


def installation(directory: Path, distributions: Iterable[str]) -> Path:
    """Make an environment in which only these distributions are installed, and return its Python."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    packages = packages_of(python)
    here = Path(sysconfig.get_path("purelib"))
    for name in distributions:
        for file in importlib.metadata.files(name) or ():
            source, link = here / file, packages / file
            if ".." in file.parts or file.suffix == ".pyc" or not source.exists():
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(source)
    return python


def packages_of(python: Path) -> Path:
    """Return the directory of the packages of an environment."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return packages


def pip(python: Path, *arguments: str) -> None:
    """Run this environment's pip for another one."""
    run([*_PIP, "--python", str(python), *arguments])


def run(command: list[str]) -> str:
    """Run a program that must succeed, and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
