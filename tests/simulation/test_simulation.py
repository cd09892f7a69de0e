"""A simulation is a function of its seed, and its judge finds what is planted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from tools.simulation import run

REPOSITORY = Path(__file__).parents[2]


def simulate(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.simulation", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("seed", ["4", "11"])
def test_a_seed_is_reproduced_by_another_process(seed: str) -> None:
    runs = [simulate("--seed", seed, "--trace") for _ in range(2)]
    digests = [re.search(r"digest ([0-9a-f]{16})", run.stdout) for run in runs]
    assert digests[0] is not None, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.splitlines()) > 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "first",
    [
        *(1, 26),
        *(pytest.param(first, marks=pytest.mark.long) for first in range(51, 251, 25)),
    ],
)
def test_seeds_hold(first: int) -> None:
    """Brokers, clients and faults of 50 seeds, and 200 in the long run: ``make sim`` runs more."""
    run = simulate("--first", str(first), "--seeds", "25", "--workers", "1", "--keep-going")
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr


def test_seeds_differ() -> None:
    digests = {simulate("--seed", seed).stdout.split()[-1] for seed in ("1", "2", "3")}
    assert len(digests) == 3


@pytest.mark.timeout(300)
def test_a_mistake_that_is_planted_is_found() -> None:
    """``make sim-plants`` has all of them."""
    run = simulate("--plants", "--plant", "lease-not-checked", "--first", "1", "--seeds", "50")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.match(r"lease-not-checked +\d+ ", run.stdout)
    missed = simulate("--plants", "--plant", "lease-not-checked", "--seeds", "0")
    assert missed.returncode == 1
    assert "not in 0 seeds" in missed.stdout
    assert simulate("--plant", "no-such-plant").returncode == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        pytest.param("unknown-session-admitted", 1, marks=pytest.mark.long),
        pytest.param("group-answered-ok", 151, marks=pytest.mark.long),
        ("steady-in-any-state", 1),
        pytest.param("journal-refused-for-its-store", 1, marks=pytest.mark.long),
    ],
)
def test_mistakes_of_sessions_and_groups_are_found(plant: str, first: int) -> None:
    """Within 150 seeds: sessions and groups have a fair share of what is simulated.

    ``make sim-plants`` begins with the first seed.
    """
    run = simulate("--plants", "--plant", plant, "--first", str(first), "--seeds", "150")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        ("closing-too-early", 51),
        pytest.param("closing-of-another-tenure", 161, marks=pytest.mark.long),
    ],
)
def test_mistakes_of_closings_are_found(plant: str, first: int) -> None:
    """``make sim-plants`` begins with the first seed: that takes longer."""
    run = simulate("--plants", "--plant", plant, "--first", str(first), "--seeds", "30")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        pytest.param("fragment-opened-twice", 1, marks=pytest.mark.long),
        pytest.param("late-fragment-left-open", 1, marks=pytest.mark.long),
        ("closed-read-is-cancelled", 61000091),
        pytest.param("closed-fragment-left-open", 1, marks=pytest.mark.long),
        pytest.param("end-left-to-brokers", 1, marks=pytest.mark.long),
    ],
)
def test_mistakes_of_reads_at_stores_are_found(plant: str, first: int) -> None:
    run = simulate("--plants", "--plant", plant, "--first", str(first), "--seeds", "150")
    assert run.returncode == 0, run.stdout + run.stderr


def test_seeds_go_the_ways_of_shipped_brokers() -> None:
    """By whole calls, groups, sessions, messages that are replicated as they arrive, and reads at stores."""
    said = simulate("--first", "1", "--seeds", "30").stdout
    shares = {way: int(share) for way, share in re.findall(r"\d+ ([a-z ]+) \((\d+)%\)", said)}
    assert shares["whole calls"] >= 20, said
    assert shares["in groups"] >= 15, said
    assert shares["of sessions"] >= 15, said
    assert re.search(r"^[1-9]\d{2,} messages replicated as they arrived$", said, re.MULTILINE), said
    assert re.search(r"^[1-9]\d+ fragments read at .* [1-9]\d+ opened ahead", said, re.MULTILINE), (
        said
    )
    assert re.search(r"^seeds 1 to 25: [1-9]\d* new branches and pairs", said, re.MULTILINE), said


def test_a_seed_that_hangs_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """A lock of `threading` that one simulated thread holds while another waits for it, for example."""

    def hang(seed: int, **_: object) -> NoReturn:
        threading.Event().wait()
        raise AssertionError

    simulate = partial(run.simulate, range(7, 9), run=hang, hung_s=0.1)
    with pytest.raises(RuntimeError, match="has died"):
        next(run.in_children([simulate], 1))
    said = capfd.readouterr().err
    assert "seed 7 has not ended" in said
    assert "in hang" in said
