"""The application of simulated members: it folds its input, and publishes one output for each message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from gazette.consumer.application import Application, Shard
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.envelope import Envelope
from gazette.message.mapping import Partition
from gazette.message.message import Message
from gazette.message.publisher import Publisher
from gazette.recoverylog.recorder import Recorder
from gazette.stores.json_file import JSONFileStore

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
    def __init__(self, recorder: Recorder | None) -> None:
        super().__init__(recorder, Folded)


class FoldApp(Application[FoldStore]):
    """Counts inputs by key. ``pause`` blocks the calling shard: some callbacks are slow."""

    message_type = Input

    def __init__(
        self, outputs: Sequence[str], rng: random.Random, pause: Callable[[float], object]
    ) -> None:
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

    def new_store(self, shard: Shard, recorder: Recorder | None) -> FoldStore:
        self._work()
        return FoldStore(recorder)

    def consume_message(
        self, shard: Shard, store: FoldStore, envelope: Envelope[Input], publisher: Publisher
    ) -> None:
        self._work()
        number = envelope.message.number
        key = str(number % KEYS)
        count = store.state.counts.get(key, 0) + 1
        store.state.counts[key] = count
        store.state.numbers.append(number)
        publisher.publish_uncommitted(self._map, Output(number=number, count=count))

    def finalize_transaction(self, shard: Shard, store: FoldStore, publisher: Publisher) -> None:
        self._work()
