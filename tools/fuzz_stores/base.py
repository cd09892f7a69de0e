"""The common part of the fuzzers of all stores: a log, its commits, its owners, and its cuts."""

from __future__ import annotations

import bisect
import contextlib
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from gazette.consumer.application import StateView, Store
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.recorder import Recorder
from gazette.testing.recovery import MemoryLog, Replayer, pruned, take_over

SHARD: Final[Any] = None
"""These stores use nothing of their shard."""

ContentT = TypeVar("ContentT")


class Difference(AssertionError):
    """Error of a recovery that differs from the commits."""


@dataclass(frozen=True, slots=True)
class Commit(Generic[ContentT]):
    """A commit: its end in the log, and the plain database then, as content and as a snapshot to restore."""

    end: int
    content: ContentT
    snapshot: Any


class Fuzzer(ABC, Generic[ContentT]):
    """One run: owners follow one another on one log, which is cut and pruned between them.

    Everything random comes from ``seed``. ``say`` is called with each step.
    """

    def __init__(self, seed: int, directory: Path, say: Callable[[str], None]) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.say = say
        self.log = MemoryLog()
        self.hints: FSMHints | None = None
        self.commits: list[Commit[ContentT]] = []
        self.recorder: Recorder
        self.store: Any = None
        self.checks = 0
        """Number of states that were compared."""
        self._floor = 0
        """The log is not cut before this offset: hints need what is before it."""
        self._owners = 0
        self._standby: _Standby | None = None

    # -- of a kind of store

    @abstractmethod
    def open_store(self, recorder: Recorder) -> Store:
        """Open the store, with options that may differ each time."""

    @abstractmethod
    def new_view(self, directory: Path) -> StateView:
        """Make the view of a standby."""

    @abstractmethod
    def work(self) -> None:
        """Do some random things to the store and to the plain database, within one transaction."""

    @abstractmethod
    def before_transaction(self) -> None:
        """Do what is only done between transactions."""

    @abstractmethod
    def commit_plain(self) -> tuple[ContentT, Any]:
        """Commit the plain database. Return its content, and a snapshot for `restore_plain`."""

    @abstractmethod
    def restore_plain(self, snapshot: Any) -> None:
        """Return the plain database to a commit."""

    @abstractmethod
    def content(self, reader: Any) -> ContentT:
        """Read everything that is in a store, or in a standby's reader."""

    def check_files(self, directory: Path, expected: ContentT) -> None:
        """Check played-back files without the store. Default: nothing."""

    # -- the run

    def run(self, transactions: int) -> None:
        """Run transactions. Raise `Difference` for a state that no commit left, and errors of stores."""
        try:
            self._open(None)
            while len(self.commits) < transactions:
                self.before_transaction()
                self.work()
                self._commit()
                match self.rng.randrange(12):
                    case 0:
                        self._fail_over()
                    case 1:
                        self._prune()
                    case 2 | 3:
                        self._look_at_standby()
                    case 4:
                        self.compare(
                            self.content(self.store), self.commits[-1].content, "the store"
                        )
                    case _:
                        pass
            self._fail_over()
        finally:
            self._close_standby()
            if self.store is not None:
                self.store.destroy()

    def compare(self, actual: ContentT, expected: ContentT, what: str) -> None:
        self.checks += 1
        if actual != expected:
            raise Difference(f"{what} differs: {difference(expected, actual)}")

    def _open(self, hints: FSMHints | None) -> None:
        directory = self.directory / f"owner-{self._owners}"
        self._owners += 1
        self.recorder = take_over(self.log, directory, self.rng, hints=hints)
        self.store = self.open_store(self.recorder)

    def _commit(self) -> None:
        number = len(self.commits)
        self.say(f"commit {number}")
        content, snapshot = self.commit_plain()
        checkpoint = Checkpoint({"source": SourceCheckpoint(number)})
        appended = self.store.start_commit(SHARD, checkpoint, ()).result()
        # What the store records again, to bound the log, comes after the commit.
        self.commits.append(Commit(appended.commit.end, content, snapshot))

    def _fail_over(self) -> None:
        """Let the owner die within a transaction, cut the log after an append, and check the next owner."""
        self.work()
        self.store.destroy()
        self.store = None
        low = max(self._floor, self.commits[0].end)
        ends = [end for end in self.log.ends if end >= low]
        cut = self.rng.choice([ends[-1], self.rng.choice(ends)])
        durable = bisect.bisect_right([one.end for one in self.commits], cut)
        self.say(f"cut at {cut}: commit {durable - 1} of {len(self.commits)} is the last")
        if cut < self.log.end:
            self._close_standby()
            kept = [end for end in self.log.ends if end <= cut]
            self.log = MemoryLog(bytes(self.log.data[:cut]))
            self.log.ends = kept
            del self.commits[durable:]
        last = self.commits[-1]
        if self.rng.randrange(3) == 0:
            files = self.directory / "files"
            with self._replayed(files) as replayer:
                replayer.copy_live(files / "copy")
                self.checks += 1
                self.check_files(files / "copy", last.content)
        self._open(self.hints)
        shutil.rmtree(self.directory / f"owner-{self._owners - 2}", ignore_errors=True)
        checkpoint = self.store.restore_checkpoint(SHARD)
        self.compare(self.content(self.store), last.content, "what the next owner recovers")
        if checkpoint.sources["source"].read_through != durable - 1:
            raise Difference(f"the checkpoint is {checkpoint}, not that of commit {durable - 1}")
        self.restore_plain(last.snapshot)

    @contextlib.contextmanager
    def _replayed(self, directory: Path) -> Iterator[Replayer]:
        replayer = Replayer(directory / "staged", hints=self.hints)
        try:
            replayer.advance(self.log, self.log.end)
            yield replayer
        finally:
            replayer.abandon()
            shutil.rmtree(directory, ignore_errors=True)

    def _prune(self) -> None:
        """Remove from the log what hints of this moment do not need."""
        self.hints = self.recorder.build_hints()
        self._floor = self.log.end
        self.say(f"prune at {self._floor}")
        self.log.data[:] = pruned(self.log.data, self.hints)
        self._close_standby()

    def _look_at_standby(self) -> None:
        if self._standby is None:
            self._standby = _Standby(self.directory / "standby", self.hints, self.new_view)
        reader = self._standby.refresh(self.log)
        self.say("look at the standby")
        self.compare(self.content(reader), self.commits[-1].content, "the standby")

    def _close_standby(self) -> None:
        if self._standby is not None:
            self._standby.close()
            self._standby = None


class _Standby:
    """Plays the log back as it grows, and reads its state by a view."""

    def __init__(
        self, directory: Path, hints: FSMHints | None, new_view: Callable[[Path], StateView]
    ) -> None:
        self._directory = directory
        self._replayer = Replayer(directory / "staged", hints=hints)
        self._view = new_view(directory / "view")
        self._reader: Any = None

    def refresh(self, log: MemoryLog) -> Any:
        self._replayer.advance(log, log.end)
        before, self._reader = self._reader, self._replayer.view(self._view.refresh)
        if before is not None:
            self._view.release(before)
        return self._reader

    def close(self) -> None:
        self._view.close()
        self._replayer.abandon()
        shutil.rmtree(self._directory, ignore_errors=True)


def difference(expected: Any, actual: Any) -> str:
    """Say where two contents first differ, briefly."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys(), key=repr):
            if expected.get(key) != actual.get(key):
                return f"{key!r}: {difference(expected.get(key), actual.get(key))}"
    if isinstance(expected, list) and isinstance(actual, list):
        for one, other in zip(expected, actual, strict=False):
            if one != other:
                return f"{str(one)[:200]} became {str(other)[:200]}"
    return f"{str(expected)[:200]} became {str(actual)[:200]}"


@contextlib.contextmanager
def defaults(function: Any, **values: Any) -> Iterator[None]:
    """Let keyword arguments of a function have other defaults, such as thresholds that short runs reach."""
    before = function.__kwdefaults__
    function.__kwdefaults__ = {**before, **values}
    try:
        yield
    finally:
        function.__kwdefaults__ = before
