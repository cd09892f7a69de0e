"""A blob store that does not answer, in a real broker beside one that does."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from gazette.blobs.blob_store import BlobInfo
from gazette.broker.key_space import tenure_of
from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import GazetteError
from gazette.protocol.fragment import Fragment, FragmentStoreUrl
from gazette.protocol.journal import JournalSpec
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import raises
from tests.support.memory_store import MemoryStore
from tests.support.replicas import replica_of

HUNG, GOOD = "s3://hung/", "s3://good/"


class Hanging(MemoryStore):
    """A store whose calls return while ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__(SystemClock().now)
        self.gate = threading.Event()
        self.waiting = 0
        self._count = threading.Lock()

    def pass_gate(self) -> None:
        with self._count:
            self.waiting += 1
        self.gate.wait()
        with self._count:
            self.waiting -= 1

    def exists(self, path: str) -> bool:
        self.pass_gate()
        return super().exists(path)

    def open(self, path: str) -> BinaryIO:
        self.pass_gate()
        return super().open(path)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        self.pass_gate()
        super().put(path, source, content_encoding=content_encoding)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        self.pass_gate()
        yield from super().list(prefix)


@pytest.fixture
def stores() -> Iterator[dict[str, Hanging]]:
    stores = {"hung": Hanging(), "good": Hanging()}
    stores["good"].gate.set()
    yield stores
    stores["hung"].gate.set()


async def started(
    etcd: Etcd, tmp_path: Path, stores: dict[str, Hanging], **settings: Any
) -> BrokerFixture:
    def constructor(url: FragmentStoreUrl) -> Hanging:
        return stores[url.host]

    return await BrokerFixture.start(
        etcd,
        tmp_path,
        constructors={"s3": constructor},
        persist_timeout_s=0.5,
        lease_ttl_s=60.0,
        **settings,
    )


@pytest.fixture
async def broker(
    etcd: Etcd, tmp_path: Path, stores: dict[str, Hanging]
) -> AsyncIterator[BrokerFixture]:
    broker = await started(etcd, tmp_path, stores)
    try:
        yield broker
    finally:
        stores["hung"].gate.set()
        await broker.stop()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await SystemClock().sleep(0.01)


def spec(name: str, store: str) -> JournalSpec:
    return journal_spec(name, stores=(store,), length=1024)


async def append(broker: BrokerFixture, journal: str, content: bytes) -> None:
    await broker.client.append(AppendParams(journal), content)


async def test_a_store_that_hangs_stops_no_other(
    broker: BrokerFixture, stores: dict[str, Hanging]
) -> None:
    """Listing, uploading, reading, signing and health checks of another store go on."""
    names = [f"hung/{number:02}" for number in range(20)]
    await broker.create(*(spec(name, HUNG) for name in names))
    await until(lambda: stores["hung"].waiting >= 16)

    await broker.create(spec("good/one", GOOD))
    for content in (b"first,", b"second"):
        await append(broker, "good/one", content)
    replica = replica_of(broker.service.context.resolver, "good/one")
    await until(lambda: replica.index.fragments()[0].backing_store)
    reader = broker.client.reader(ReadParams("good/one"))
    assert await reader.read(100) == b"first,"
    fragments = await broker.client.list_fragments(
        FragmentsParams("good/one", signature_ttl_s=60.0)
    )
    assert fragments[0].signed_url.startswith("memory:///good/one/")
    health = await broker.client.fragment_store_health(GOOD)
    assert not health


@pytest.mark.timeout(30)
async def test_a_journal_leaves_a_store_that_hangs(
    broker: BrokerFixture, stores: dict[str, Hanging]
) -> None:
    """An operator takes it out: neither its listing nor the interval of listings is waited for."""
    await broker.create(spec("a/journal", HUNG))
    await until(lambda: stores["hung"].waiting)
    listed = await broker.client.get_journal("a/journal")
    change = JournalChange(upsert=spec("a/journal", GOOD), expect_mod_revision=listed.mod_revision)
    await broker.client.apply_journals([change])
    await append(broker, "a/journal", b"content")
    assert stores["hung"].waiting


async def test_a_store_that_hangs_is_unhealthy_with_the_reason_until_it_answers(
    etcd: Etcd, tmp_path: Path, stores: dict[str, Hanging]
) -> None:
    hung = stores["hung"]
    hung.gate.set()
    async with await started(
        etcd, tmp_path, stores, blob_threads=2, store_hung_after_s=0.2, listing_timeout_s=0.5
    ) as broker:
        await broker.create(spec("hung/one", HUNG))
        await append(broker, "hung/one", b"first,")
        await append(broker, "hung/one", b"second")
        replica = replica_of(broker.service.context.resolver, "hung/one")
        await until(lambda: replica.index.fragments()[0].backing_store)
        active = broker.service.context.blob_stores.get(HUNG)
        try:
            hung.gate.clear()
            names = [f"hung/late/{number}" for number in range(10)]
            changes = [JournalChange(upsert=spec(name, HUNG)) for name in names]
            await broker.client.apply_journals(changes)
            await until(lambda: active.health.error)
            # Two threads for calls; no other is taken by what comes later.
            assert hung.waiting == 2
            error = active.health.error
            assert error is not None
            assert error.startswith("2 calls have not returned for ")
            # Case: calls fail at once, with the reason, and not only when they are queued for long.
            for _ in range(3):
                with raises(GazetteError, journal="hung/one", says="2 calls"):
                    await broker.client.reader(ReadParams("hung/one")).read(100)
            assert hung.waiting == 2
            # Case: signing needs none of these threads.
            assert (await active.sign(["a"], 60.0))[0].startswith("memory:///a")
        finally:
            hung.gate.set()
        # Case: it is used again once it answers.
        await until(lambda: active.health.error is None)
        await broker.settled("hung/late/9")
        await append(broker, "hung/late/9", b"content")
        assert await broker.client.reader(ReadParams("hung/one")).read(100) == b"first,"


class SlowLister(MemoryStore):
    """A store whose next listing, once ``gate`` is clear, returns what the store had before the wait."""

    def __init__(self) -> None:
        super().__init__(SystemClock().now)
        self.gate = threading.Event()
        self.gate.set()
        self.waits = False

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        listed = list(super().list(prefix))
        if not self.gate.is_set() and not self.waits:
            self.waits = True
            self.gate.wait()
        yield from listed


async def test_a_slow_listing_does_not_hide_what_a_later_one_has_found(
    etcd: Etcd, tmp_path: Path
) -> None:
    """A primary begins during the listing, and lists again."""
    store = SlowLister()
    async with await BrokerFixture.start(
        etcd, tmp_path, constructors={"s3": lambda _: store}
    ) as broker:
        await broker.create(spec("a/journal", GOOD))
        await append(broker, "a/journal", b"first")
        context = broker.service.context
        replica = replica_of(context.resolver, "a/journal")
        await until(lambda: replica.index.fragments()[0].backing_store)
        store.gate.clear()
        replica.list_now()
        await until(lambda: store.waits)
        stored = Fragment("a/journal", 5, 9, hashlib.sha1(b"more").digest())
        store.put(stored.content_path(), io.BytesIO(b"more"))
        await replica.begin(tenure_of(context.state.assignments_of("a/journal")), 5)
        assert replica.index.end_offset == 9
        store.gate.set()
        await until(lambda: not context.blob_stores.get(GOOD).calls.in_progress)
        await SystemClock().sleep(0)
        assert replica.index.end_offset == 9
