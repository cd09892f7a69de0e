"""Timers of a batch that set and cancel each other: none is lost, and none fires twice, in any store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzzing import seeds
from tests.stores.timer_histories import TimerHistory
from tests.stores.timer_stores import KINDS, opened

STORES_OF = 20
"""Histories that one store has, one after the other."""


@pytest.mark.parametrize("kind", KINDS)
def test_histories_of_timers_equal_their_model(tmp_path: Path, kind: str) -> None:
    """Check order, times and payloads, over batches, crashes and callbacks that were undone.

    `make fuzz-timers` tries more.
    """
    for first in seeds(300 if kind == "remote" else 40)[::STORES_OF]:
        directory = tmp_path / str(first)
        directory.mkdir()
        with opened(kind, directory) as open_store:
            for seed in range(first, first + STORES_OF):
                try:
                    TimerHistory(seed, open_store).run()
                except BaseException as error:
                    error.add_note(f"seed {seed}")
                    raise
