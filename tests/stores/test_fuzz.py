"""The short form of `make fuzz-stores`: a few seeds of each kind of store, and a bug that they find."""

from __future__ import annotations

from typing import Any

import pytest

from gazette.stores.sqlite.redo_recording import RedoRecording
from tools.fuzz_stores.__main__ import run_one

SEEDS = 4
TRANSACTIONS = 25


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
@pytest.mark.parametrize("kind", ["sqlite", "rocksdb"])
def test_recovered_states_are_commits(kind: str, seed: int) -> None:
    if kind == "rocksdb":
        pytest.importorskip("rocksdict")
    assert run_one(kind, seed, TRANSACTIONS) > 0


def test_a_page_that_is_not_recorded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the fuzzer looks where it should, and says how to repeat what it did."""
    collect = RedoRecording.collect

    def forgetful(self: RedoRecording) -> Any:
        collected = collect(self)
        if collected is None:
            return None
        changes = list(collected)
        return iter(changes[:-1] if len(changes) > 6 else changes)

    monkeypatch.setattr(RedoRecording, "collect", forgetful)
    with pytest.raises(Exception, match=r"differ|malformed|damaged") as raised:
        for seed in range(1, 20):
            run_one("sqlite", seed, TRANSACTIONS)
    assert any("--kind sqlite --seed" in note for note in raised.value.__notes__)
