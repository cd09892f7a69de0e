"""Tests of the behaviour that every store with its state in a recovery log must have, to be
inherited.

    class TestMyStore(RecordedStoreTests):
        def open(self, recorder):
            return MyStore(recorder, ...)

        def change(self, store, rng):
            ...                         # some random change of the running transaction

        def content(self, store):
            return ...                  # the whole state, comparable with ==

The tests record transactions into a log in memory, and cut that log after its appends. A real log
may be cut there, too. Then a new owner recovers from the rest. No test depends on how a store keeps its
state.
"""

from __future__ import annotations

import random
import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gazette.consumer.application import Store
from gazette.errors import GazetteError, Invalid
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.protocol.journal_life import JournalLife
from gazette.recoverylog.log.recorder import Recorder
from gazette.runtime.tasks import OpFuture
from gazette.testing.recovery import MemoryLog, take_over

SHARD: Any = None
"""Placeholder for a shard: these tests have none. Tests of a store that needs a shard override ``shard``."""


class Owner:
    """Consecutive owners of one log, and the state after each transaction.

    ``ends`` has the offset at which each commit ends, ``contents`` the state after it.
    """

    def __init__(self, tests: RecordedStoreTests, directory: Path, seed: str) -> None:
        self._tests = tests
        self._directory = directory
        self._count = 0
        self.rng = random.Random(seed)
        self.log = MemoryLog()
        self.ends: list[int] = []
        self.contents: list[Any] = []
        self.recorder: Recorder
        self.store: Store
        self.open()

    def open(self) -> None:
        """Become the next owner of the log as it is."""
        self._count += 1
        self.recorder = take_over(self.log, self._directory / f"owner-{self._count}", self.rng)
        self.store = self._tests.open(self.recorder)

    def commit(self, count: int = 1) -> None:
        """Commit ``count`` transactions with random changes."""
        for _ in range(count):
            self._tests.change(self.store, self.rng)
            number = len(self.contents) + 1
            future = self.store.start_commit(self._tests.shard, checkpoint(number), ())
            self.ends.append(future.result().commit.end)
            self.contents.append(self._tests.content(self.store))

    def fail_over(self, cut: int | None = None) -> None:
        """Become the next owner, with the log up to ``cut`` and no file of the former owner."""
        self.store.destroy()
        if cut is not None:
            self.log = MemoryLog(bytes(self.log.data[:cut]))
            durable = bisect_right(self.ends, cut)
            del self.ends[durable:], self.contents[durable:]
        self.open()

    def check(self) -> None:
        """Check that the store has exactly the last transaction of the log, with its checkpoint."""
        number = len(self.contents)
        check_restored(self.store.restore_checkpoint(self._tests.shard), number)
        if number:
            assert self._tests.content(self.store) == self.contents[-1]


def checkpoint(number: int) -> Checkpoint:
    """Return a checkpoint with every part that a checkpoint may have."""
    producer = ProducerState(last_ack=(1 << 60) + number, begin=number * 100)
    return Checkpoint(
        sources={
            "a/source": SourceCheckpoint(number * 1000, {b"\x01\x02\x03\x04\x05\x06": producer})
        },
        ack_intents={"a/target": b"intent %d" % number},
        application=f"application {number}",
        lives={"a/source": JournalLife(number, number * 10)},
    )


def check_restored(restored: Checkpoint, number: int) -> None:
    """Check that a checkpoint is ``checkpoint(number)``, or empty for 0, in each of its parts."""
    # `==` passes over the application.
    assert restored.to_bytes() == (checkpoint(number) if number else Checkpoint()).to_bytes()


class RecordedStoreTests(ABC):
    """Tests of a store. Inherit this class, and implement the three methods."""

    shard: Any = SHARD

    @abstractmethod
    def open(self, recorder: Recorder | None) -> Store:
        """Return the store of the files in the recorder's directory."""

    @abstractmethod
    def change(self, store: Any, rng: random.Random) -> None:
        """Make a new, different change of the state within the running transaction."""

    @abstractmethod
    def content(self, store: Any) -> Any:
        """Return the whole state of the running transaction."""

    @pytest.fixture
    def owner(self, request: pytest.FixtureRequest) -> Iterator[Owner]:
        with tempfile.TemporaryDirectory(prefix="gazette-store-") as directory:
            owner = Owner(self, Path(directory), request.node.name)
            yield owner
            owner.store.destroy()

    def test_needs_a_recorder(self) -> None:
        """Check that a shard without a recovery log gets an error that names it."""
        with pytest.raises(Invalid, match="recovery log"):
            self.open(None)

    def test_a_new_store_has_no_checkpoint(self, owner: Owner) -> None:
        check_restored(owner.store.restore_checkpoint(self.shard), 0)

    def test_state_and_checkpoint_are_recovered(self, owner: Owner) -> None:
        """Check that each of several owners recovers the former owner's state and checkpoint."""
        for _ in range(4):
            owner.commit(3)
            owner.fail_over()
            owner.check()

    def test_a_commit_is_one_append(self, owner: Owner) -> None:
        """Check, for up to eight appends, that the log holds whole transactions after them."""
        owner.commit(12)
        ends = [end for end in owner.log.ends if end >= owner.ends[0]]
        for cut in sorted(owner.rng.sample(ends, min(8, len(ends))), reverse=True):
            owner.fail_over(cut)
            owner.check()

    def test_a_crash_at_every_prefix(self, owner: Owner) -> None:
        """Check a log of several owners, cut after each append from the first commit on: the next owner
        recovers the last commit before the cut.
        """
        for _ in range(2):
            owner.commit(6)
            owner.fail_over()
        owner.commit(6)
        log, ends, contents = owner.log, list(owner.ends), list(owner.contents)
        owner.store.destroy()
        begin = bisect_left(log.ends, ends[0])
        for cut in log.ends[begin:]:
            durable = bisect_right(ends, cut)
            owner.ends, owner.contents = ends[:durable], contents[:durable]
            owner.log = MemoryLog(bytes(log.data[:cut]))
            owner.open()
            owner.check()
            owner.store.destroy()
        owner.log, owner.ends, owner.contents = log, ends, contents
        owner.open()

    def test_goes_on_from_any_cut(self, owner: Owner) -> None:
        """Check that an owner continues from each cut of the log up to the end of the first commit."""
        owner.commit(2)
        for cut in sorted({0, *(end for end in owner.log.ends if end <= owner.ends[0])})[::-1]:
            owner.fail_over(cut)
            owner.check()
            owner.commit(2)
            owner.fail_over()
            owner.check()

    def test_what_was_not_committed_is_gone(self, owner: Owner) -> None:
        """Check that the next owner does not find changes that were not committed."""
        owner.commit(2)
        self.change(owner.store, owner.rng)
        owner.fail_over()
        owner.check()

    def test_a_commit_does_not_wait_for_its_append(self, owner: Owner) -> None:
        """Check that the next transaction begins before the log has answered, and does not change
        the commit.
        """
        owner.commit()
        content = self.content(owner.store)
        owner.log.held = True
        future = owner.store.start_commit(self.shard, checkpoint(2), ())
        assert not future.done()
        self.change(owner.store, owner.rng)
        owner.log.held = False
        owner.log.release_held()
        owner.ends.append(future.result().commit.end)
        owner.contents.append(content)
        owner.fail_over()
        owner.check()

    def test_a_commit_waits_for_its_futures(self, owner: Owner) -> None:
        """Check that the append of a transaction waits for the futures of its commit."""
        dependency: OpFuture[Any] = OpFuture()
        dependency.set_result(None)
        self.change(owner.store, owner.rng)
        owner.log.dependencies.clear()
        end = len(owner.log.data)
        owner.store.start_commit(self.shard, checkpoint(1), [dependency]).result()
        (position,) = owner.log.dependencies[dependency]
        assert position == end, "something of the transaction was appended before it waited"

    def test_hints_are_enough(self, owner: Owner) -> None:
        """Check that the bytes that hints name give the state, without the rest of the log."""
        owner.commit(10)
        hints = owner.recorder.build_hints()
        owner.commit(3)
        begin = min(node.segments[0].first_offset for node in hints.live_nodes)
        owner.log.data[:begin] = bytes(begin)
        owner.store.destroy()
        owner.recorder = take_over(
            owner.log, owner.recorder.directory.parent / "hinted", owner.rng, hints=hints
        )
        owner.store = self.open(owner.recorder)
        owner.check()

    def test_a_failed_log_ends_the_store(self, owner: Owner) -> None:
        """Check that an owner without its log gets the error at one of the next three commits."""
        owner.commit()
        owner.log.failure = GazetteError("fenced")
        with pytest.raises(GazetteError, match="fenced"):  # noqa: PT012 - any of them may raise
            for number in range(2, 5):
                self.change(owner.store, owner.rng)
                owner.store.start_commit(self.shard, checkpoint(number), ()).result()

    def test_is_destroyed_with_a_commit_under_way(self, owner: Owner) -> None:
        """Check that `destroy` waits neither for a commit nor for an open transaction."""
        owner.commit()
        owner.log.held = True
        self.change(owner.store, owner.rng)
        future = owner.store.start_commit(self.shard, checkpoint(2), ())
        self.change(owner.store, owner.rng)
        owner.store.destroy()
        assert not future.done()
        owner.log.held = False
        owner.open()
        owner.check()
