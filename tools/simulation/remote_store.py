"""A remote store whose database is in memory, and shared by all members."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from gazette.consumer.application import Shard, Store
from gazette.consumer.timers.memory_timers import MemoryTimers
from gazette.consumer.timers.timer import TimerTable
from gazette.errors import Fenced
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import OpFuture, first_failure


@dataclass
class RemoteRow:
    """Row of one shard in the database."""

    state: dict[str, int] = field(default_factory=dict)
    timers: bytes = b""
    checkpoint: bytes = b""
    fence: int = 0
    commits: int = 0


class RemoteDatabase:
    """The database: a row for each shard, by its fully qualified name. Any thread.

    While ``held`` is True, commits wait. While ``failing`` is an error, commits fail with it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: dict[str, RemoteRow] = {}
        self.failing: BaseException | None = None
        self.held = False
        self._waiting: list[tuple[RemoteStore, RemoteRow, OpFuture[None]]] = []

    def row(self, fqn: str) -> RemoteRow:
        return self.rows.setdefault(fqn, RemoteRow())

    @property
    def waiting(self) -> int:
        """Number of commits that are held."""
        return len(self._waiting)

    def commit(self, store: RemoteStore, new: RemoteRow, done: OpFuture[None]) -> None:
        """Commit a row for ``store``, unless another store has set the fence. ``done`` gets the outcome."""
        with self.lock:
            if self.held:
                self._waiting.append((store, new, done))
                return
            row = self.row(store.fqn)
            error = self.failing
            if error is None and row.fence != store.fence:
                error = Fenced("another member has taken the shard over", shard=store.fqn)
            if error is None:
                row.state, row.timers, row.checkpoint = new.state, new.timers, new.checkpoint
                row.commits += 1
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def release(self) -> None:
        """Let held commits take place."""
        self.held = False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self.commit(*one)


class RemoteStore(Store):
    """Counters by name, and timers, kept in a `RemoteDatabase`. ``state`` belongs to the shard's thread."""

    def __init__(self, database: RemoteDatabase, shard: Shard) -> None:
        self.database = database
        self.fqn = shard.fqn
        self.fence = 0
        self.state: dict[str, int] = {}
        self._timers = MemoryTimers()
        self.destroyed = False

    def read(self) -> dict[str, int]:
        """Return the committed counters. Any thread."""
        with self.database.lock:
            return dict(self.database.row(self.fqn).state)

    def restore_checkpoint(self, shard: Shard) -> Checkpoint:
        with self.database.lock:
            row = self.database.row(self.fqn)
            row.fence += 1
            self.fence, self.state = row.fence, dict(row.state)
            self._timers = MemoryTimers(row.timers)
            return Checkpoint.from_bytes(row.checkpoint)

    def timer_table(self, shard: Shard) -> TimerTable:
        return self._timers

    @property
    def holds_timers(self) -> bool:
        return self._timers.holds_timers

    def start_commit(
        self, shard: Shard, checkpoint: Checkpoint, wait_for: Collection[OpFuture[Any]]
    ) -> OpFuture[None]:
        # Commit when all futures of `wait_for` are done, or fail with the first error of these.
        done: OpFuture[None] = OpFuture()
        timers = b"" if self._timers.is_empty else self._timers.to_json()
        new = RemoteRow(dict(self.state), timers, checkpoint.to_bytes())
        waits = tuple(wait_for)
        left = [len(waits) + 1]
        guard = threading.Lock()

        def settled(_: object = None) -> None:
            with guard:
                left[0] -= 1
                if left[0]:
                    return
            if (error := first_failure(waits)) is not None:
                done.set_exception(error)
            else:
                self.database.commit(self, new, done)

        for future in waits:
            future.add_done_callback(settled)
        settled()
        return done

    def destroy(self) -> None:
        self.destroyed = True
