"""The application of simulated members: it folds its input, and publishes one output for each message."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from gazette.consumer.application import Application, Shard, StateView, Store
from gazette.consumer.service import ConsumerService
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import Envelope
from gazette.message.mapping import Partition
from gazette.message.message import Message
from gazette.message.publisher import Publisher
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.log.recorder import Recorder
from gazette.runtime.tasks import OpFuture
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from tools.simulation.consumer_queries import (
    EMPTY,
    FoldsApi,
    MemberQueries,
    Notes,
    added,
    fingerprint,
)
from tools.simulation.remote_store import RemoteDatabase, RemoteStore

KEYS: Final = 3
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counts (key TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS numbers (id INTEGER PRIMARY KEY, number INTEGER NOT NULL, filling BLOB);
"""
_FOLDED: Final = """
SELECT 0, 0, key, count FROM counts UNION ALL SELECT 1, id, NULL, number FROM numbers ORDER BY 1, 2, 3
"""


class Input(Message):
    """What writers publish. ``number`` is unique in a run."""

    number: int = 0


class Output(Message):
    """The message that a shard publishes for an input. ``count`` is the state of its key after the input."""

    number: int = 0
    count: int = 0


class Folded(msgspec.Struct):
    """The state of a shard: the number of inputs of each key, and the numbers of all inputs, in order."""

    counts: dict[str, int] = msgspec.field(default_factory=dict)
    numbers: list[int] = msgspec.field(default_factory=list)


class FoldStore(JSONFileStore[Folded]):
    """The state in a JSON file, whose recovery log brokers keep."""

    life = 0
    """Number of this store in `Notes`; 0 for a standby's view."""

    def __init__(self, recorder: Recorder | None) -> None:
        super().__init__(recorder, Folded)
        self.state_of = fingerprint(self.state.numbers)

    def fold(self, number: int) -> int:
        key = str(number % KEYS)
        self.state.counts[key] = count = self.state.counts.get(key, 0) + 1
        self.state.numbers.append(number)
        self.state_of = added(self.state_of, number)
        return count

    def folded(self) -> Folded:
        return self.read()


class SQLiteFold(SQLiteStore):
    """The state in a SQLite database, whose redo frames and images are in the recovery log."""

    life = 0
    """Number of this store in `Notes`; 0 for a standby's view."""

    def __init__(self, recorder: Recorder | None) -> None:
        super().__init__(recorder, _SCHEMA, page_size=512)
        self.state_of = fingerprint(self.folded().numbers)

    def fold(self, number: int) -> int:
        rows = self.execute(
            "INSERT INTO counts VALUES (?, 1)"
            " ON CONFLICT (key) DO UPDATE SET count = count + 1 RETURNING count",
            (str(number % KEYS),),
        ).fetchall()
        filling = bytes([number & 0xFF]) * (number * 37 % 300)
        self.execute("INSERT INTO numbers (number, filling) VALUES (?, ?)", (number, filling))
        self.state_of = added(self.state_of, number)
        (count,) = rows[0]
        assert isinstance(count, int)
        return count

    def folded(self) -> Folded:
        folded = Folded()
        for kind, _, key, value in self.query(_FOLDED):
            if kind:
                folded.numbers.append(value)
            else:
                folded.counts[key] = value
        return folded


class RemoteFold(RemoteStore):
    """The state in a database that all members share. A fence in it stops a former owner."""

    def __init__(
        self, database: RemoteDatabase, shard: Any, on_late_fence: Callable[[str], None]
    ) -> None:
        super().__init__(database, shard)
        self._on_late_fence = on_late_fence
        self.life = 0
        self.state_of = EMPTY

    def restore_checkpoint(self, shard: Any) -> Checkpoint:
        if shard.ended.is_set():
            self._on_late_fence(f"{shard.id} set a fence after it had ended")
        checkpoint = super().restore_checkpoint(shard)
        self.state_of = fingerprint(_numbers(self.state))
        return checkpoint

    def fold(self, number: int) -> int:
        key = f"key {number % KEYS}"
        self.state[key] = count = self.state.get(key, 0) + 1
        self.state[str(number)] = self.state.get(str(number), 0) + 1
        self.state_of = added(self.state_of, number)
        return count

    def folded(self) -> Folded:
        state = self.read()
        folded = Folded(numbers=_numbers(state))
        for name, count in state.items():
            if name.startswith("key "):
                folded.counts[name.removeprefix("key ")] = count
        return folded


def _numbers(state: dict[str, int]) -> list[int]:
    return [
        int(name)
        for name, count in state.items()
        if not name.startswith("key ")
        for _ in range(count)
    ]


@dataclass(slots=True)
class Surroundings:
    """The objects that the simulation gives to an application."""

    outputs: Sequence[str]
    pause: Callable[[float], object]
    """Blocks the calling shard for some seconds."""
    dawdle: Callable[[], None]
    """Blocks the calling query for a while, sometimes."""
    database: RemoteDatabase
    violated: Callable[[str], None]
    notes: Notes
    queries: MemberQueries
    sqlite: Collection[str]
    """Shards with a recovery log whose state is in SQLite, not in a JSON file."""


class FoldApp(Application[Any]):
    """Counts inputs by key, and answers what it has folded. Some callbacks are slow.

    A shard without a recovery log keeps its state in a database that all members share.
    """

    message_type = Input

    def __init__(self, around: Surroundings, rng: random.Random) -> None:
        self._around = around
        self._partitions = [Partition(name, CONTENT_JSON_LINES) for name in around.outputs]
        self._rng = rng
        self.slow_chance = rng.choice((0.0, 0.0, 0.02, 0.2))
        self.stores: list[Any] = []
        """All stores that this process opened. If it is killed, the simulation destroys them."""
        self.views: list[StateView] = []

    async def initialize(self, service: ConsumerService) -> None:
        around = self._around
        api = FoldsApi(service, around.dawdle)
        service.grpc_server.add_generic_rpc_handlers((around.queries.handler(api.Fold),))

    def _map(self, message: Any) -> Partition:
        number: int = message.number
        return self._partitions[number % len(self._partitions)]

    def _work(self) -> None:
        if self._rng.random() < self.slow_chance:
            self._around.pause(self._rng.choice((0.01, 0.3, 5.0)) * self._rng.random())

    def new_store(self, shard: Shard, recorder: Recorder | None) -> Store:
        self._work()
        around = self._around
        store: Any
        if recorder is None:
            store = RemoteFold(around.database, shard, around.violated)
        else:
            store = SQLiteFold(recorder) if shard.id in around.sqlite else FoldStore(recorder)
        store.life = around.notes.opened(shard.id, store.state_of, shared=recorder is None)
        self.stores.append(store)
        return store  # type: ignore[no-any-return]

    def new_view(self, shard: Shard, directory: Path) -> StateView | None:
        in_sqlite = shard.id in self._around.sqlite
        view = SQLiteFold.view(directory) if in_sqlite else FoldStore.view(Folded)
        self.views.append(view)
        return view

    def consume_message(
        self, shard: Shard, store: Any, envelope: Envelope[Input], publisher: Publisher
    ) -> None:
        self._work()
        number = envelope.message.number
        count = store.fold(number)
        publisher.publish_uncommitted(self._map, Output(number=number, count=count))

    def finalize_transaction(self, shard: Shard, store: Any, publisher: Publisher) -> None:
        self._work()
        self._around.notes.finalized(store.life, store.state_of)

    def finished_transaction(self, shard: Shard, store: Any, commit: OpFuture[Any]) -> None:
        state = store.state_of

        def done(future: OpFuture[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._around.notes.committed(store.life, state)

        commit.add_done_callback(done)
