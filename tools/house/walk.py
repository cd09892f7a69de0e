"""The files and functions that one small append, or one transaction of a shard, runs through.

Client, brokers and member share one process, so that one profile sees them all. The first calls are not
counted, as they fill caches. Background work may come in between: of some walks, the shortest one counts.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import gazette
from gazette import Application, Message
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.labels import CONTENT_TYPE
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.label_set import LabelSet
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.stores.sqlite import SQLiteStore
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from gazette.testing.etcd import etcd_for_tests

_ROOT: Final = f"{Path(gazette.__file__).parent}/"
_BEFORE: Final = 30
_COUNTED: Final = 10
_APPEND_WALKS: Final = 10
_TRANSACTION_WALKS: Final = 5
_CONTENT: Final = b"hello" * 20
_SETTLE_S: Final = 1.0
"""Seconds that background work of a publish and its transaction gets."""
_LEASE_S: Final = 600.0
"""So long that no renewal falls into a walk."""
_REFRESH_NS: Final = 5 * duration.MINUTE
"""Refresh interval of the journals, as in production. Fixtures list their stores each second."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Calls by file, and functions by file, of some calls; ``calls_of_others`` are outside of the package."""

    count: int
    calls: Counter[str]
    functions: Counter[str]
    calls_of_others: int

    def show(self, title: str) -> Iterator[str]:
        """Yield the lines of a report."""
        yield (
            f"{title}: {len(self.calls)} files, {self.functions.total()} functions, "
            f"{self.calls.total() / self.count:.0f} own calls, "
            f"{self.calls_of_others / self.count:.0f} of others"
        )
        for name, calls in self.calls.items():
            yield f"  {name:48}{calls / self.count:8.1f} calls {self.functions[name]:4} functions"


class _Profile:
    """Notes the calls of all threads while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self._calls = Counter[str]()
        self._functions = set[tuple[str, str]]()
        self._others = 0

    def note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.on or event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(_ROOT):
            self._calls[name.removeprefix(_ROOT)] += 1
            self._functions.add((name.removeprefix(_ROOT), frame.f_code.co_qualname))
        else:
            self._others += 1

    def walk(self, count: int) -> Walk:
        """End the walk of ``count`` calls, and return it."""
        self.on = False
        functions = Counter(name for name, _ in self._functions)
        walk = Walk(count, self._calls, functions, self._others)
        self._calls, self._functions, self._others = Counter(), set(), 0
        return walk


class _Word(Message):
    word: str


class _Words(Application[SQLiteStore]):
    message_type = _Word

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        create = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER)"
        return SQLiteStore(recorder, create)

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Any, publisher: Any
    ) -> None:
        upsert = "INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
        store.execute(upsert, (envelope.message.word,))


async def walk_append(replication: int) -> Walk:
    """Walk small appends to one journal, one after the other."""
    walks: list[Walk] = []
    with _profiled() as profile:
        async with _etcd() as (etcd, directory):
            brokers = [
                await BrokerFixture.start(
                    etcd, directory, id=f"broker-{n}", zone=f"zone-{n}", lease_ttl_s=_LEASE_S
                )
                for n in range(replication)
            ]
            await brokers[0].create(journal_spec("a/journal", replication=replication))
            client, params = brokers[0].client, AppendParams("a/journal")
            for _ in range(_BEFORE):
                await client.append(params, _CONTENT)
            for _ in range(_APPEND_WALKS):
                profile.on = True
                for _ in range(_COUNTED):
                    await client.append(params, _CONTENT)
                walks.append(profile.walk(_COUNTED))
            for broker in reversed(brokers):
                await broker.crash()
    return min(walks, key=lambda walk: walk.functions.total())


async def walk_transaction() -> Walk:
    """Walk one message that is published, and the transaction that consumes it."""
    clock, walks = SystemClock(), list[Walk]()
    with _profiled() as profile:
        async with _etcd() as (etcd, directory):
            broker = await BrokerFixture.start(etcd, directory, lease_ttl_s=_LEASE_S)
            labels = LabelSet.of((CONTENT_TYPE, "application/x-ndjson"))
            for spec in journal_spec("a/source", labels=labels), log_spec("a-shard"):
                fragment = replace(spec.fragment, refresh_interval_ns=_REFRESH_NS)
                await broker.create(replace(spec, fragment=fragment))
            member = await ConsumerFixture.start(
                etcd, broker, _Words(), directory, lease_ttl_s=_LEASE_S
            )
            await member.create(shard_spec("a-shard", "a/source"))
            async with ClientPublisher(broker.client) as publisher:
                for n in range(_BEFORE):
                    await publisher.publish("a/source", _Word(word=f"x{n}"))
                await member.read_to_heads("a-shard")
                await clock.sleep(_SETTLE_S)
                for _ in range(_TRANSACTION_WALKS):
                    profile.on = True
                    await publisher.publish("a/source", _Word(word="y"))
                    await asyncio.sleep(_SETTLE_S)  # noqa: TID251 - calls of a `Clock` are counted
                    walks.append(profile.walk(1))
            await member.crash()
            await broker.crash()
    return min(walks, key=lambda walk: walk.functions.total())


@contextmanager
def _profiled() -> Iterator[_Profile]:
    profile = _Profile()
    threading.setprofile(profile.note)
    sys.setprofile(profile.note)
    try:
        yield profile
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@asynccontextmanager
async def _etcd() -> AsyncIterator[tuple[Etcd, Path]]:
    with tempfile.TemporaryDirectory() as name, etcd_for_tests(Path(name) / "etcd") as server:
        settings = EtcdSettings(endpoints=(server.endpoint,))
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            yield etcd, Path(name)
