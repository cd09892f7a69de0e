"""The application of simulated members: it folds its input, and publishes one output for each message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gazette.consumer.application import Application, Shard, Store
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import Envelope
from gazette.message.mapping import Partition
from gazette.message.message import Message
from gazette.message.publisher import Publisher
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog.recorder import Recorder
from gazette.stores.json_file import JSONFileStore
from gazette.testing.remote_store import RemoteDatabase, RemoteStore

KEYS: Final = 3


class Input(Message):
    """What writers publish. ``number`` is unique in a run."""

    number: int = 0


class Output(Message):
    """What a shard publishes for an input. ``count`` is the state of its key after it."""

    number: int = 0
    count: int = 0


class Folded(msgspec.Struct):
    """The state of a shard: how many inputs each key had, and which, in their order."""

    counts: dict[str, int] = msgspec.field(default_factory=dict)
    numbers: list[int] = msgspec.field(default_factory=list)


class FoldStore(JSONFileStore[Folded]):
    """The state in a JSON file, whose recovery log brokers keep."""

    def __init__(self, recorder: Recorder | None) -> None:
        super().__init__(recorder, Folded)

    def fold(self, number: int) -> int:
        key = str(number % KEYS)
        self.state.counts[key] = count = self.state.counts.get(key, 0) + 1
        self.state.numbers.append(number)
        return count

    def folded(self) -> Folded:
        return self.read()


class RemoteFold(RemoteStore):
    """The state in a database that all members share; a fence there is what stops a former owner."""

    def __init__(
        self, database: RemoteDatabase, shard: Any, on_late_fence: Callable[[str], None]
    ) -> None:
        super().__init__(database, shard)
        self._on_late_fence = on_late_fence

    def restore_checkpoint(self, shard: Any) -> Checkpoint:
        if shard.ended.is_set():
            self._on_late_fence(f"{shard.id} set a fence after it had ended")
        return super().restore_checkpoint(shard)

    def fold(self, number: int) -> int:
        key = f"key {number % KEYS}"
        self.state[key] = count = self.state.get(key, 0) + 1
        self.state[str(number)] = self.state.get(str(number), 0) + 1
        return count

    def folded(self) -> Folded:
        folded = Folded()
        for name, count in self.read().items():
            if name.startswith("key "):
                folded.counts[name.removeprefix("key ")] = count
            else:
                folded.numbers += [int(name)] * count
        return folded


class FoldApp(Application[Any]):
    """Counts inputs by key. ``pause`` blocks the calling shard: some callbacks are slow.

    A shard without a recovery log keeps its state in ``database``.
    """

    message_type = Input

    def __init__(
        self,
        outputs: Sequence[str],
        rng: random.Random,
        pause: Callable[[float], object],
        database: RemoteDatabase,
        on_late_fence: Callable[[str], None],
    ) -> None:
        self._database = database
        self._on_late_fence = on_late_fence
        self._partitions = [Partition(name, CONTENT_JSON_LINES) for name in outputs]
        self._rng = rng
        self._pause = pause
        self.slow_chance = rng.choice((0.0, 0.0, 0.02, 0.2))

    def _map(self, message: Any) -> Partition:
        number: int = message.number
        return self._partitions[number % len(self._partitions)]

    def _work(self) -> None:
        if self._rng.random() < self.slow_chance:
            self._pause(self._rng.choice((0.01, 0.3, 5.0)) * self._rng.random())

    def new_store(self, shard: Shard, recorder: Recorder | None) -> Store:
        self._work()
        if recorder is None:
            return RemoteFold(self._database, shard, self._on_late_fence)
        return FoldStore(recorder)

    def consume_message(
        self, shard: Shard, store: Any, envelope: Envelope[Input], publisher: Publisher
    ) -> None:
        self._work()
        number = envelope.message.number
        count = store.fold(number)
        publisher.publish_uncommitted(self._map, Output(number=number, count=count))

    def finalize_transaction(self, shard: Shard, store: Any, publisher: Publisher) -> None:
        self._work()
