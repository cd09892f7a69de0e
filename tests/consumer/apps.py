"""Applications and journals that tests of the consumer share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from gazette import Application, Envelope, Message, Publisher
from gazette.client.append.appender import AppendParams
from gazette.consumer.application import Store
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.stores.json_file import JSONFileStore
from gazette.testing.broker import BrokerFixture, journal_spec
from tools.simulation.remote_store import RemoteDatabase, RemoteStore

SOURCE = "a/source"
SHARD, OTHER = "shard-one", "shard-two"
Start = Callable[..., Any]
"""Of the fixture ``start``: starts a member of an application."""
PRODUCER = bytes([1, 2, 3, 4, 5, 6])
CLOCK = 0x1E9CC5F83FC2F950
"""A realistic message clock: producers are pruned by it."""


class Word(Message):
    word: str = ""


def source_spec(name: str = SOURCE) -> JournalSpec:
    return journal_spec(name, labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))


def uuid_text(clock: int, flags: int, producer: bytes = PRODUCER) -> str:
    raw = build_uuid(producer, CLOCK + 160 * clock, flags).hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def frame(word: str, clock: int = 0, flags: int = OUTSIDE_TXN, producer: bytes = PRODUCER) -> bytes:
    """Return a message as it stands in a journal; without a clock, it takes no part in exactly-once."""
    uuid = uuid_text(clock, flags, producer) if clock else ""
    return json.dumps({"uuid": uuid, "word": word}).encode() + b"\n"


def pending(word: str, clock: int, producer: bytes = PRODUCER) -> bytes:
    return frame(word, clock, CONTINUE_TXN, producer)


def ack(clock: int, producer: bytes = PRODUCER) -> bytes:
    return frame("", clock, ACK_TXN, producer)


async def append(broker: BrokerFixture, *frames: bytes, journal: str = SOURCE) -> int:
    """Append, and the offset behind it."""
    result = await broker.client.append(AppendParams(journal), b"".join(frames))
    return result.commit.end


class Counts(JSONFileStore[dict[str, int]]):
    def __init__(self, recorder: Any) -> None:
        super().__init__(recorder, dict[str, int], dict)


class Tally(Application[Any]):
    """Counts words, in a JSON file or (with a ``database``) elsewhere. ``on_word`` may do more."""

    message_type = Word

    def __init__(
        self,
        database: RemoteDatabase | None = None,
        on_word: Callable[[str], None] = lambda word: None,
    ) -> None:
        self.database = database
        self.on_word = on_word
        self.stores: list[Any] = []
        self.calls: list[str] = []

    def new_store(self, shard: Any, recorder: Any) -> Store:
        store = Counts(recorder) if self.database is None else RemoteStore(self.database, shard)
        self.stores.append(store)
        return store

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        self.on_word(word)
        store.state[word] = store.state.get(word, 0) + 1

    def begin_transaction(self, shard: Any, store: Any) -> None:
        self.calls.append("begin")

    def finalize_transaction(self, shard: Any, store: Any, publisher: Publisher) -> None:
        self.calls.append("finalize")

    def finished_transaction(self, shard: Any, store: Any, commit: Any) -> None:
        self.calls.append("finished")


class Echo(Tally):
    """Counts words, and publishes each to another journal in its transaction."""

    def __init__(self, target: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mapping = fixed_mapping(target, CONTENT_JSON_LINES)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        super().consume_message(shard, store, envelope, publisher)
        publisher.publish_uncommitted(self.mapping, Word(word=envelope.message.word))


class Gate:
    """Holds every task that passes, until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self, _: object = None) -> None:
        self.entered.set()
        self._open.wait()

    def open(self) -> None:
        self._open.set()
