"""Simulated members: a run is a function of its seed, and what is planted in the shipped code is found."""

from __future__ import annotations

import subprocess

from tests.simulation.test_simulation import simulate


def consumers(*arguments: str) -> subprocess.CompletedProcess[str]:
    return simulate("--consumers", *arguments)


def test_a_seed_with_consumers_is_reproduced_by_another_process():
    runs = [consumers("--seed", "3", "--trace") for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stdout[-2000:] + runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert "messages committed" in runs[0].stdout
    assert len(runs[0].stdout.splitlines()) > 100


def test_some_seeds_with_consumers_hold():
    run = consumers("--seeds", "3", "--first", "15")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr
