"""Pruning at any time leaves every recovery intact that hints promise."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.consumer.application import Store
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog import open_at
from gazette.recoverylog.log.recorder import Recorder
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.redo_recording import RedoRecording
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, FragmentLog, MemoryLogs, take_over
from tests.support.memory_store import MemoryStore

SHARD: Any = None
SCHEMA = "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v BLOB)"
BACKUPS = 2


def sqlite(recorder: Recorder) -> Store:
    return SQLiteStore(recorder, SCHEMA, page_size=512)


def json_file(recorder: Recorder) -> Store:
    return JSONFileStore(recorder, dict[str, str], dict)


class Shard:
    """A shard whose primary stores hints now and then, and whose log is pruned now and then."""

    def __init__(self, directory: Path, seed: int, make: Callable[[Recorder], Store]) -> None:
        self.directory = directory
        self.rng = random.Random(seed)
        self.make = make
        store = MemoryStore(lambda: 1_700_000_000.0)
        self.log = FragmentLog(store, fragment_bytes=2000)
        self.primary = FSMHints(log=LOG)
        self.backups: list[FSMHints] = []
        self.number = 0
        self.owners = 0
        self.pruned = 0
        self.own()

    def own(self) -> None:
        self.owners += 1
        directory = self.directory / f"owner-{self.owners}"
        self.recorder = take_over(self.log, directory, self.rng, hints=self.primary)
        recovered = self.recorder.fsm.build_hints(LOG)
        if recovered.live_nodes:
            self.backups = [recovered, *self.backups][:BACKUPS]
        self.store: Any = self.make(self.recorder)

    def commit(self) -> None:
        self.number += 1
        value = self.rng.randbytes(200)
        if isinstance(self.store, SQLiteStore):
            key = self.rng.randrange(25)
            self.store.execute("INSERT OR REPLACE INTO t VALUES (?, ?)", (key, value))
        else:
            self.store.state[str(self.rng.randrange(5))] = value.hex()
        checkpoint = Checkpoint({"a/source": SourceCheckpoint(self.number)})
        self.store.start_commit(SHARD, checkpoint, ()).result()

    def note_hints(self) -> None:
        self.primary = self.recorder.build_hints()
        # Slots that have none get the first ones, as the primary of a shard does it.
        self.backups += [self.primary] * (BACKUPS - len(self.backups))

    def prune(self) -> None:
        if self.primary.live_nodes and len(self.backups) == BACKUPS:
            self.pruned += self.log.prune([self.primary, *self.backups])

    def fail_over(self) -> None:
        self.store.destroy()
        self.own()

    def check(self) -> None:
        """Check that each of the hints leads to the last commit."""
        expected = self.content()
        for index, hints in enumerate([self.primary, *self.backups]):
            target = self.directory / f"check-{index}"
            with open_at(MemoryLogs(self.log), [hints], target) as state:
                read = state.checkpoint.sources.get("a/source", SourceCheckpoint(0)).read_through
                assert read == self.number
                found = state.query("SELECT * FROM t") if state.databases else state.document()
                assert found == expected
            for path in target.iterdir():
                path.unlink()

    def content(self) -> Any:
        if isinstance(self.store, SQLiteStore):
            return self.store.query("SELECT * FROM t")
        return self.store.read()


STEPS = st.lists(
    st.sampled_from(["commit"] * 5 + ["many", "hints", "prune", "fail_over"]),
    min_size=5,
    max_size=25,
)


@pytest.mark.parametrize("make", [sqlite, json_file])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 30), steps=STEPS)
def test_pruning_at_any_time_leaves_recovery_intact(
    make: Callable[[Recorder], Store],
    seed: int,
    steps: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RedoRecording.__init__, "__kwdefaults__", SMALL)
    shard = Shard(tmp_path_factory.mktemp("shard"), seed, make)
    shard.commit()
    for step in steps:
        match step:
            case "commit":
                shard.commit()
            case "many":
                for _ in range(25):
                    shard.commit()
            case "hints":
                shard.note_hints()
            case "prune":
                shard.prune()
            case "fail_over":
                shard.fail_over()
    shard.prune()
    shard.check()
    shard.store.destroy()


SMALL = {
    "schema": "main",
    "page_size": 512,
    "checkpoint_frames": 40,
    "group_pages": 8,
    "horizon_slack": 4000,
}


@pytest.mark.parametrize("make", [sqlite, json_file])
def test_a_log_of_many_owners_stays_short(
    make: Callable[[Recorder], Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a log that is pruned again and again is bounded by what hints need."""
    monkeypatch.setattr(RedoRecording.__init__, "__kwdefaults__", SMALL)
    shard = Shard(tmp_path, 7, make)
    for round_ in range(12):
        for _ in range(40):
            shard.commit()
        shard.note_hints()
        shard.prune()
        if round_ % 3 == 2:
            shard.fail_over()
    shard.check()
    assert shard.pruned > shard.log.end / 8
    shard.store.destroy()
