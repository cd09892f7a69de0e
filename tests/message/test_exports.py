"""The package's front: names that are imported when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gazette


@pytest.mark.parametrize("name", gazette.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(gazette, name) is not None
    assert name in dir(gazette)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        getattr(gazette, "Nothing")  # noqa: B009 - type checkers know that it is not there


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, gazette, gazette.message.uuid;"
        "print(sorted(m for m in sys.modules if m.startswith(('gazette.', 'grpc', 'msgspec'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = [
        "gazette.errors",
        "gazette.lazy",
        "gazette.lazy_numpy",
        "gazette.message",
        "gazette.message.uuid",
    ]
    assert done.stdout.strip() == str(names)
