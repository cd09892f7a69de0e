"""Tests of the behaviour that every store with its state in a database must have, to be inherited.

    class TestMyStore(RemoteStoreTests):
        def create_schema(self):
            ...                         # tables of the application, and that of checkpoints

        def open(self, shard):
            return MyStore(shard, ...)  # as new_store() does

        def add(self, store, word, n):
            ...                         # add n to a counter, within the running transaction

        def counts(self):
            return ...                  # the counters that are committed, by word

Owners of a shard come and go here like members that crash, stand still or are cut off. The
committed state must equal that of one owner that never failed. Every test has a shard and words of
its own, so that a database may be used again.
"""

from __future__ import annotations

import random
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import pytest

from gazette.consumer.application import Store
from gazette.errors import Broken, Fenced, GazetteError, Unavailable
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import OpFuture, failed
from gazette.testing.store_tests import check_restored, checkpoint

TIMEOUT_S: Final = 60.0
"""Seconds to wait for a commit, and for other operations of a database."""
OWNERS: Final = 4
CRASHES: Final = 12


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """The part of a shard that stores in a database may use."""

    id: str
    fqn: str


class RemoteStoreTests(ABC):
    """Tests of a store. Inherit this class, and implement the abstract methods."""

    former_blocks: bool = False
    """True if an owner that stops within a transaction blocks the next owner until the transaction ends.

    For example, a SQLite file admits only one writer.
    """
    former_idle_s: float = 0.0
    """Seconds for which an owner must stand still before the next owner can pass it."""

    @abstractmethod
    def create_schema(self) -> None:
        """Create the tables that stores need, as every member does when it starts. Members may
        call this at the same time.
        """

    @abstractmethod
    def open(self, shard: Any) -> Store:
        """Return the store of one more owner of the shard."""

    @abstractmethod
    def add(self, store: Any, word: str, n: int) -> None:
        """Add ``n`` to the counter of a word, within the running transaction."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Return the committed counters of all words. Read them without a store."""

    def lost_answers(self) -> AbstractContextManager[None]:
        """Return a context in which commits take place, but fail for their callers."""
        pytest.skip("override lost_answers() to run this test")

    # -- what tests are written with

    @pytest.fixture  # noqa: B027 - nothing has to be begun
    def database(self) -> Any:
        """Set up and tear down resources of the other methods. Override this fixture if needed."""

    @pytest.fixture(autouse=True)
    def _of_its_own(self, database: None) -> Iterator[None]:
        """Make a unique shard and word, in a database with the tables that stores need."""
        self.create_schema()
        token = uuid.uuid4().hex[:12]
        self.shard = RemoteShard(f"shard-{token}", f"/tests/items/shard-{token}")
        self.word = f"word-{token}"
        self._opened: list[Store] = []
        yield
        for store in self._opened:
            store.destroy()

    def _owner(self, shard: RemoteShard | None = None) -> tuple[Any, Checkpoint]:
        """Return the next owner's store, and the checkpoint that it restored."""
        store = self.open(shard or self.shard)
        self._opened.append(store)
        return store, store.restore_checkpoint(_as_shard(shard or self.shard))

    def _end(self, store: Store) -> None:
        self._opened.remove(store)
        store.destroy()

    def _start(self, store: Any, number: int, *wait_for: OpFuture[Any]) -> OpFuture[Any]:
        """Start a commit with the checkpoint of this number. Return the commit's future."""
        return store.start_commit(_as_shard(self.shard), checkpoint(number), wait_for)  # type: ignore[no-any-return]

    def _commit(self, store: Any, number: int, n: int = 1) -> None:
        self.add(store, self.word, n)
        self._start(store, number).result(TIMEOUT_S)

    def _count(self, word: str | None = None) -> int:
        return self.counts().get(word or self.word, 0)

    # -- state and checkpoint

    def test_a_new_shard_has_no_checkpoint(self) -> None:
        _, restored = self._owner()
        check_restored(restored, 0)

    def test_state_and_checkpoint_are_restored(self) -> None:
        """Check that each of several owners restores the last commit of the owner before."""
        for number in range(1, 5):
            store, restored = self._owner()
            check_restored(restored, number - 1)
            self._commit(store, number)
            self._end(store)
        assert self._count() == 4

    def test_what_was_not_committed_is_gone(self) -> None:
        store, _ = self._owner()
        self._commit(store, 1)
        self.add(store, self.word, 100)
        self._end(store)
        store, restored = self._owner()
        check_restored(restored, 1)
        assert self._count() == 1
        self._commit(store, 2)
        assert self._count() == 2

    def test_transactions_without_changes_move_the_checkpoint(self) -> None:
        store, _ = self._owner()
        for number in range(1, 4):
            self._start(store, number).result(TIMEOUT_S)
        self._end(store)
        check_restored(self._owner()[1], 3)

    def test_the_schema_is_created_by_many_at_once(self) -> None:
        """Check that many may create the schema at once, even while it is in use, without loss."""
        store, _ = self._owner()
        self._commit(store, 1)
        errors: list[BaseException] = []
        barrier = threading.Barrier(OWNERS)

        def create() -> None:
            try:
                barrier.wait(TIMEOUT_S)
                self.create_schema()
            except Exception as error:  # noqa: BLE001 - shown below
                errors.append(error)

        _at_once([create] * OWNERS)
        assert not errors
        assert self._count() == 1
        self._commit(store, 2)
        self._end(store)
        check_restored(self._owner()[1], 2)

    def test_shards_have_nothing_to_do_with_each_other(self) -> None:
        other_shard = RemoteShard(self.shard.id + "-b", self.shard.fqn + "-b")
        store, _ = self._owner()
        self._commit(store, 1)
        other_store, restored = self._owner(other_shard)
        check_restored(restored, 0)
        other_store.start_commit(_as_shard(other_shard), checkpoint(7), ()).result(TIMEOUT_S)
        self._commit(store, 2)  # The owner of the other shard does not fence this one.
        self._end(store)
        self._end(other_store)
        check_restored(self._owner()[1], 2)
        check_restored(self._owner(other_shard)[1], 7)

    def test_a_savepoint_undoes_what_came_behind_it(self) -> None:
        store, _ = self._owner()
        if not store.has_savepoints:
            pytest.skip("the store has no savepoints, and poison policies that need them refuse it")
        self.add(store, self.word, 1)
        point = store.savepoint()
        self.add(store, self.word, 10)
        point.roll_back()
        point = store.savepoint()
        self.add(store, self.word, 100)
        point.release()
        self._start(store, 1).result(TIMEOUT_S)
        assert self._count() == 101

    # -- what a commit waits for

    def test_a_commit_waits_for_its_futures_and_blocks_no_other(self) -> None:
        store, _ = self._owner()
        self.add(store, self.word, 1)
        published: list[OpFuture[None]] = [OpFuture(), OpFuture()]
        future = self._start(store, 1, *published)
        published[1].set_result(None)
        assert not future.done()
        assert self._count() == 0
        published[0].set_result(None)
        future.result(TIMEOUT_S)
        assert self._count() == 1

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_failed_dependency_fails_the_commit(self, when: str) -> None:
        """Check that the commit has no effect, and that none of its locks blocks the next owner."""
        store, _ = self._owner()
        self._commit(store, 1)
        self.add(store, self.word, 10)
        lost = Unavailable("no broker")
        published: OpFuture[None] = failed(lost) if when == "before" else OpFuture()
        future = self._start(store, 2, published)
        if when == "after":
            published.set_exception(lost)
        with pytest.raises(GazetteError, match="no broker"):
            future.result(TIMEOUT_S)
        owner, restored = self._owner()
        check_restored(restored, 1)
        self._commit(owner, 2)
        assert self._count() == 2

    def test_is_destroyed_with_a_commit_under_way(self) -> None:
        """Check that `destroy` does not wait for a commit.

        The futures that the commit waits for may succeed when another owner exists.
        """
        store, _ = self._owner()
        self._commit(store, 1)
        self.add(store, self.word, 10)
        published: OpFuture[None] = OpFuture()
        self._start(store, 2, published)
        self._end(store)
        owner, restored = self._owner()
        check_restored(restored, 1)
        published.set_result(None)
        self._commit(owner, 2)
        assert self._count() == 2

    # -- former owners

    def test_a_zombie_commits_nothing(self) -> None:
        """Check an owner that is replaced while its commit waits; with ``former_blocks``, before it begins
        the transaction."""
        zombie, _ = self._owner()
        self._commit(zombie, 1)
        published: OpFuture[None] = OpFuture()
        future: OpFuture[Any] | None = None
        if not self.former_blocks:
            self.add(zombie, self.word, 10)
            future = self._start(zombie, 2, published)
            threading.Event().wait(self.former_idle_s)
        owner, restored = self._owner()
        check_restored(restored, 1)
        if future is None:
            self.add(zombie, self.word, 10)
            future = self._start(zombie, 2, published)
        published.set_result(None)
        with pytest.raises(GazetteError) as raised:
            future.result(TIMEOUT_S)
        # The database may have ended the session of the zombie.
        assert isinstance(raised.value, Fenced | Broken | Unavailable)
        self._end(zombie)
        assert self._count() == 1
        self._commit(owner, 2)
        assert self._count() == 2

    def test_a_zombie_that_begins_a_transaction_is_fenced(self) -> None:
        """Check three owners that were replaced before their transaction, with 0 to 2 commits of the new
        owner in between."""
        for commits in range(3):
            zombie, _ = self._owner()
            count_before = self._count()
            owner, _ = self._owner()
            for number in range(commits):
                self._commit(owner, number + 1)
            self.add(zombie, self.word, 100)
            with pytest.raises(Fenced):
                self._start(zombie, 99).result(TIMEOUT_S)
            self._end(zombie)
            self._commit(owner, 9)
            assert self._count() == count_before + commits + 1
            self._end(owner)

    def test_of_owners_that_start_at_once_one_may_commit(self) -> None:
        stores: list[Any] = []
        barrier = threading.Barrier(OWNERS)

        def own() -> None:
            barrier.wait(TIMEOUT_S)
            stores.append(self._owner()[0])

        _at_once([own] * OWNERS)
        assert len(stores) == OWNERS, "an owner could not restore its checkpoint"
        committed = 0
        for store in stores:
            try:
                self._commit(store, 1)
                committed += 1
            except Fenced:
                pass
            self._end(store)
        assert committed == self._count() == 1

    # -- exactly once

    def test_exactly_once_after_an_answer_was_lost(self) -> None:
        """Check that the next owner learns of a commit from the checkpoint if the
        database's answer was lost.
        """
        with self.lost_answers():
            store, _ = self._owner()
            self.add(store, self.word, 1)
            with pytest.raises(GazetteError):
                self._start(store, 1).result(TIMEOUT_S)
            self._end(store)
        store, restored = self._owner()
        check_restored(restored, 1)
        assert self._count() == 1
        self._commit(store, 2)
        assert self._count() == 2

    def test_exactly_once_however_owners_end(self) -> None:
        """Check owners that end in a transaction, before its commit, while the commit waits, and
        during it.

        The next owner repeats a transaction that its checkpoint does not have.
        """
        rng = random.Random("owners")
        number = crashes = 0
        while crashes < CRASHES:
            store, restored = self._owner()
            sources = restored.sources
            number = sources["a/source"].read_through // 1000 if sources else 0
            for _ in range(rng.randrange(1, 4)):
                number += 1
                self._commit(store, number)
            published: OpFuture[None] = OpFuture()
            self.add(store, self.word, 1)
            match crashes % 3:
                case 1:
                    self._start(store, number + 1, published)
                case 2:
                    self._start(store, number + 1, published)
                    threading.Timer(rng.random() / 200, published.set_result, (None,)).start()
                    threading.Event().wait(rng.random() / 100)
            self._end(store)
            crashes += 1
        _, restored = self._owner()
        assert self._count() == restored.sources["a/source"].read_through // 1000


def _as_shard(shard: RemoteShard) -> Any:
    return shard


def _at_once(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
