"""``gazette new``: a project that works, to begin from."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gazette.config.schema import Schema, exit_with
from gazette.errors import Invalid

_TEMPLATE: Final = Path(__file__).parent / "template"
_SUFFIX: Final = ".txt"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_PLACEHOLDER: Final = "PROJECT_NAME"
_IGNORED: Final = ".gazette/\n__pycache__/\n.pytest_cache/\n.venv/\n"
_DESCRIPTION: Final = """Write a project: an application, a test, and a page. NAME is its directory,
which must not exist."""


def run(argv: Sequence[str]) -> int:
    """Run the subcommand. Return 0, or 2 for wrong arguments or a project that cannot be written."""
    schema = Schema("gazette new", {}, arguments="NAME", description=_DESCRIPTION)
    try:
        words = schema.load(argv, {}).arguments
        if len(words) != 1:
            raise Invalid(
                f"{len(words)} names are given (expected 1)" if words else "no name is given",
                path="gazette new",
                hint="Name the project, as in gazette new word-count.",
            )
        directory = Path(words[0])
        names = write_project(directory)
    except Invalid as error:
        return exit_with(error, sys.stderr)
    listed = ", ".join(names)
    print(
        f"{directory}/ has {listed}\n\n  cd {directory}\n  gazette run app.py --reload", flush=True
    )
    return 0


def write_project(directory: Path) -> list[str]:
    """Write a new project, and return its files. Raise ``Invalid`` for a wrong name or a bad directory."""
    name = directory.name
    if not _NAME.fullmatch(name):
        clean = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_0123456789")[:64]
        raise Invalid(
            f'"{name}" is no name of a project',
            path="gazette new",
            hint="Use letters, digits, - and _, and begin with a letter"
            + (f", as in {clean}." if clean else ", as in word-count."),
        )
    try:
        directory.mkdir()
    except FileExistsError as error:
        raise Invalid(
            f"{directory} exists", path="gazette new", hint="Choose another name, or remove it."
        ) from error
    except OSError as error:
        raise Invalid(
            f"cannot create {directory}: {error.strerror}",
            path="gazette new",
            hint="Create the directory above it, or name another one.",
        ) from error
    files = {
        path.name.removesuffix(_SUFFIX): path.read_text().replace(_PLACEHOLDER, name)
        for path in sorted(_TEMPLATE.glob(f"*{_SUFFIX}"))
    }
    try:
        for file, text in {**files, ".gitignore": _IGNORED}.items():
            (directory / file).write_text(text)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise Invalid(
            f"cannot write {directory}: {error.strerror}",
            path="gazette new",
            hint="Make space, or name a directory of another disk.",
        ) from error
    return list(files)
