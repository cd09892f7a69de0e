"""Large histories of windows and joins, by a seed: many messages and keys, and much that is due at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gazette.windows import Hopping, JoinKind, Sessions, Tumbling, tables
from tests.fuzzing import seeds
from tests.windows import test_joins, test_windows
from tests.windows.members import FATES, us

LONG = "k" * 1100
KEYS = ("a", "", LONG, f"{LONG}:", "é" * 500, *(f"key {n}" for n in range(65)))
LEAP = 300
"""Microseconds after which all that is open is due."""


def steps(rng: random.Random, producers: int) -> list[tuple[int, int, str]]:
    """Return messages in bursts: of many keys at few times, or of few keys, and then a leap."""
    found: list[tuple[int, int, str]] = []
    while len(found) < 350:
        keys = KEYS[: rng.choice((1, 2, 8, 70))]
        ahead = rng.choice(((0, 1), (0, 0, 0, 5), (-3, 0, 3, 9), (4, 11, 26)))
        for _ in range(rng.choice((5, 40, 90))):
            found.append((rng.randrange(producers), rng.choice(ahead), rng.choice(keys)))
        # All producers leap, so that the watermark does.
        found += [(one, LEAP * rng.randrange(2), rng.choice(keys)) for one in range(producers)]
    return found


def fates(rng: random.Random, count: int) -> dict[int, str]:
    return {rng.randrange(count): rng.choice(FATES) for _ in range(rng.randrange(4))}


def window_story(seed: int) -> test_windows.Story:
    rng = random.Random(seed)
    kinds: tuple[Any, ...] = (
        Tumbling(us(rng.randrange(1, 60))),
        Hopping(us(rng.randrange(12, 40)), us(rng.randrange(4, 12))),
        Sessions(us(rng.randrange(1, 25))),
    )
    messages = tuple(steps(rng, 3))
    early = bool(seed // len(kinds) % 2)
    return test_windows.Story(
        kinds[seed % len(kinds)],
        lateness=rng.choice((0, 3, 40, 200)),
        steps=messages,
        fates=fates(rng, len(messages)),
        run_every=rng.choice((1, 20, 200)),
        chunk_bytes=rng.choice((300, 1 << 20)),
        early_s=1.0 if early else 0.0,
        pauses=tuple(rng.choice((0, 0, 0, 0.25, 0.5, 2)) for _ in messages) if early else (),
    )


def join_story(seed: int) -> test_joins.Story:
    rng = random.Random(seed)
    found = steps(rng, 5)
    return test_joins.Story(
        bounds=(rng.choice((0, 3, 20)), rng.choice((0, 5, 30))),
        kind=tuple(JoinKind)[seed % 3],
        lateness=rng.choice((0, 3, 40)),
        steps=tuple((*one, bool(rng.randrange(4))) for one in found),
        fates=fates(rng, len(found)),
        run_every=rng.choice((1, 20, 200)),
        chunk_bytes=rng.choice((300, 1 << 20)),
        swept=rng.choice((1, 3, tables.SWEPT_MAX)),
    )


@pytest.mark.parametrize("seed", seeds(12))
def test_large_windows_equal_their_oracle(seed: int) -> None:
    test_windows.check(window_story(seed))


@pytest.mark.parametrize("seed", seeds(12))
def test_large_joins_equal_their_oracle(seed: int) -> None:
    test_joins.check_stream(join_story(seed))
    test_joins.check_table(join_story(seed))
