"""Simulated members whose application publishes by timers: every input has its output, once."""

from __future__ import annotations

import pytest

from tests.simulation.test_simulation import simulate
from tools.simulation.consumer_plants import TIMER_PLANTS

FOUND: dict[str, tuple[int, str]] = {
    "timers-in-memory-only": (1, "inputs are missing"),
    "timers-of-the-former-pass": (272, "inputs are missing"),
    "timers-stay": (5, "too often"),
}
"""At which seed each is found, and a word of what is said then."""


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
    seed, word = FOUND[name]
    run = simulate("--timers", "--seed", str(seed), "--plant", name)
    assert run.returncode == 1
    assert word in run.stdout
