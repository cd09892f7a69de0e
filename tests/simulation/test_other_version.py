"""Processes of two versions share one simulated cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.simulation.test_simulation import REPOSITORY, simulate


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy this version: it is another one, as far as modules go."""
    for name in ("gazette", "tools"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=ignored)
    return tmp_path


@pytest.mark.parametrize(("consumers", "seed"), [((), 4), (("--consumers",), 3)])
def test_both_versions_take_part(checkout: Path, consumers: tuple[str, ...], seed: int) -> None:
    flags = (*consumers, "--seed", str(seed), "--other", str(checkout))
    said = simulate(*flags, "--trace").stdout
    assert f"seed {seed}: 0 violations" in said, said[-5000:]
    # Some seeds of consumers have one broker only.
    kind = "consumer_world.py" if consumers else "simulation/world.py"
    starts = [line for line in said.splitlines() if "starts as" in line and kind in line]
    assert {str(checkout) in line for line in starts} == {True, False}
    again = simulate(*flags).stdout
    assert again.split()[-1] == said.split()[-1], "a seed gives the same run in another process"


def test_a_version_that_others_do_not_understand_is_found(checkout: Path) -> None:
    heads = checkout / "gazette" / "broker" / "known_head.py"
    source = heads.read_text()
    assert '"tenures"' in source
    heads.write_text(source.replace('"tenures"', '"reigns"'))
    run = simulate("--seeds", "5", "--other", str(checkout))
    assert run.returncode == 1, run.stdout


def test_a_directory_without_a_version_is_refused(tmp_path: Path) -> None:
    run = simulate("--seed", "1", "--other", str(tmp_path))
    assert run.returncode == 2
    assert "no checkout of this repository" in run.stderr
