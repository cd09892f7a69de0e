"""Simulated members: a run is a function of its seed, and what is planted in the shipped code is found."""

from __future__ import annotations

import subprocess

from tests.simulation.test_simulation import simulate


def consumers(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    return simulate("--consumers", *arguments, hash_seed=hash_seed)


REPRODUCED = 128
"""A seed with little to do, whose shard has its state in SQLite and is asked by queries."""


def test_a_seed_with_consumers_is_reproduced_by_another_process() -> None:
    arguments = ("--seed", str(REPRODUCED), "--trace")
    runs = [consumers(*arguments, hash_seed=hash_seed) for hash_seed in ("0", "random")]
    assert runs[0].returncode == 0, runs[0].stdout[-2000:] + runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert "state in SQLite: shard-0; with queries" in runs[0].stdout
    assert "messages committed" in runs[0].stdout
    assert len(runs[0].stdout.splitlines()) > 100


def test_some_seeds_with_consumers_hold() -> None:
    run = consumers("--seeds", "3", "--first", "15")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr
