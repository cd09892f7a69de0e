"""Any history, cut anywhere: a backfilled state and the live tail are a full replay."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backfill.replays import Replay, Story
from tests.backfill.subjects import SUBJECTS

stories = st.builds(
    Story,
    seed=st.integers(0, 1 << 32),
    counts=st.tuples(st.integers(0, 120), st.integers(1, 120)),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    per_fragment=st.integers(1, 30),
    lost=st.integers(0, 2),
    run_bytes=st.sampled_from([1, 500, 1 << 20]),
    torn=st.booleans(),
    old=st.booleans(),
)


@pytest.mark.parametrize("subject", SUBJECTS)
@settings(max_examples=60, report_multiple_bugs=False)
@given(story=stories)
def test_a_backfilled_state_and_its_tail_are_a_full_replay(subject: str, story: Story) -> None:
    """Several producers, duplicates, roll-backs, open transactions, lost fragments, a snapshot that
    ends within a message, and an old state of the shard or none: rows, checkpoint, and what the shard
    has published, are equal."""
    with tempfile.TemporaryDirectory(prefix="gazette-replayed-") as directory:
        Replay(SUBJECTS[subject], story, Path(directory)).check()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_histories_are_worth_it(subject: str, tmp_path: Path) -> None:
    """Transactions are open where the snapshot ends, and the application has something to publish."""
    replay = Replay(SUBJECTS[subject], Story(3, (150, 150)), tmp_path)
    replay.check()
    assert len(replay.open_producers) > 1
    if subject == "bike_share":
        driver = replay._head("again")
        assert len(SUBJECTS[subject].published(driver)) > 5
