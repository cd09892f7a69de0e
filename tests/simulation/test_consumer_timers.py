"""Simulated members whose application publishes by timers: every input has its output, once."""

from __future__ import annotations

import pytest

from tests.simulation.test_simulation import simulate
from tools.simulation.consumer_plants import TIMER_PLANTS

FOUND: dict[str, tuple[int, str]] = {
    "timers-in-memory-only": (1, "inputs are missing"),
    "timers-of-the-former-pass": (1, "inputs are missing"),
    "timers-stay": (5, "too often"),
}
"""From which seed on each is searched, and a word of what is said once it is found."""
SEEDS = 200
"""Seeds that are tried: another order of events shows a defect elsewhere, and is no defect of the judge."""


def test_some_seeds_with_timers_hold() -> None:
    run = simulate("--timers", "--seeds", "3")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr


def test_every_plant_has_its_seed() -> None:
    assert set(TIMER_PLANTS) == set(FOUND)


@pytest.mark.parametrize(
    "name",
    [
        "timers-in-memory-only",
        *(pytest.param(one, marks=pytest.mark.long) for one in sorted(FOUND)[1:]),
    ],
)
def test_a_plant_is_found(name: str) -> None:
    first, word = FOUND[name]
    # A process each: after a defect has shown, timers may fire for ever.
    runs = (
        simulate("--timers", "--seed", str(seed), "--plant", name)
        for seed in range(first, first + SEEDS)
    )
    found = next(run for run in runs if run.returncode)
    assert found.returncode == 1
    assert word in found.stdout
