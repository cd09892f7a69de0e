from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from prometheus_client import REGISTRY

from gazette.blobs import health
from gazette.blobs.registry import SWEEP_INTERVAL_S, BlobSettings, BlobStores
from gazette.blobs.thread_call import ended
from gazette.errors import Invalid, NotAllowed, Unavailable
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.runtime.metrics import render
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.support.blob_store_tests import get, put
from tests.support.loop_time import LoopTime
from tests.support.memory_store import MemoryStore


class Switch(MemoryStore):
    """A store that can be turned off, or held."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.puts = 0

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        self.puts += 1
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        super().put(path, source, content_encoding=content_encoding)


@pytest.fixture
async def pool() -> AsyncIterator[BlockingPool]:
    pool = BlockingPool("blobs", 2)
    yield pool
    pool.close()


@pytest.fixture
def switch(clock: ManualClock) -> Switch:
    return Switch(clock.now)


@pytest.fixture
def stores(clock: ManualClock, switch: Switch) -> Iterator[BlobStores]:
    def bucket(url: FragmentStoreUrl) -> Switch:
        if url.host == "forbidden":
            raise NotAllowed("no credentials", bucket=url.host)
        return switch

    stores = BlobStores(
        BlobSettings(), clock, threads=2, rng=random.Random(1), constructors={"s3": bucket}
    )
    stores.close()  # Repeated calls do not wait in these tests.
    yield stores
    stores.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something in a thread has happened."""
    clock = ManualClock()
    while not condition():
        await clock.sleep(0)


async def test_stores_are_made_once(stores: BlobStores, switch: Switch) -> None:
    """A URL gives the same store again, instrumented and repeating."""
    active = stores.get("s3://bucket/prefix/")
    assert stores.get("s3://bucket/prefix/") is active
    assert stores.get("s3://bucket/prefix/?find=a") is not active
    put(active.store, "a", b"content")
    assert get(switch, "a") == b"content"
    assert active.health.error == "first health check has not completed"


async def test_what_cannot_be_made_says_why(stores: BlobStores) -> None:
    """Each `get` tries again; the health of such a store is final at once."""
    active = stores.get("s3://forbidden/")
    assert stores.get("s3://forbidden/") is not active
    with raises(NotAllowed, bucket="forbidden"):
        _ = active.store
    assert active.health.error == "no credentials (bucket=forbidden)"
    assert await active.wait_health_change(active.health) is active.health

    for url in ("nonsense", "ftp://host/", "s3://bucket/no-slash"):
        with pytest.raises(Invalid):
            _ = stores.get(url).store


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("s3://bucket/", "pygazette[s3]"),
        ("gs://bucket/", "pygazette[gcs]"),
        ("azure://container/", "pygazette[azure]"),
        ("azure-ad://tenant/account/container/", "pygazette[azure]"),
    ],
)
async def test_a_store_that_is_not_installed_names_its_extra(
    clock: ManualClock, url: str, extra: str
) -> None:
    """An operator learns what to install."""
    stores = BlobStores(BlobSettings(), clock, constructors={})
    error = stores.get(url).health.error
    assert error is not None
    assert extra in error


async def test_file_stores_need_a_root(clock: ManualClock, tmp_path: Path) -> None:
    """Without one there are no file stores; with one they are below it."""
    stores = BlobStores(BlobSettings(), clock)
    with pytest.raises(Invalid, match=r"--broker\.file-root"):
        _ = stores.get("file:///").store
    stores = BlobStores(BlobSettings(file_root=tmp_path), clock)
    put(stores.get("file:///").store, "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"


async def test_file_only_keeps_buckets_apart(clock: ManualClock, tmp_path: Path) -> None:
    """Histories of one journal in two buckets do not become one."""
    stores = BlobStores(BlobSettings(file_root=tmp_path, file_only=True), clock)
    urls = ["s3://one/", "s3://two/", "s3://one/prefix/?region=x", "gs://one/", "file:///"]
    urls += ["fsspec+hdfs://one/", "fsspec+hdfs://two/", "fsspec+sftp://one/"]
    for url in urls:
        put(stores.get(url).store, "journal/name", url.encode())
    for url in urls:
        assert get(stores.get(url).store, "journal/name") == url.encode()
    assert (tmp_path / "s3/one/prefix/journal/name").exists()


async def test_health_follows_the_store(
    stores: BlobStores, switch: Switch, clock: ManualClock
) -> None:
    """Checks begin with the first use, fail fast, and find out when the store is back."""
    async with TaskScope("test") as scope:
        scope.daemon(stores.run_health(), name="health")
        active = stores.get("s3://bucket/")
        first = active.health
        status = await active.wait_health_change(first)
        assert status.error is None
        assert switch.exists(health.CHECK_PATH)
        await until(lambda: clock.sleepers == 2)

        # Case: down. It is checked again at once, then after 0.1 s, and so on.
        switch.error = Unavailable("down")
        clock.advance(health.next_check_s(0, random.Random(2)) * 1.5)
        status = await active.wait_health_change(status)
        assert status.error == "health check PUT failed: down"
        later = await active.wait_health_change(status)
        assert later.checks == status.checks + 1
        await until(lambda: clock.sleepers == 2)

        # Case: back.
        switch.error = None
        clock.advance(0.2)
        assert (await active.wait_health_change(later)).error is None
        for outcome, count in (("ok", 2), ("error", 2)):
            labels = {"store": "s3://bucket/", "status": outcome}
            value = REGISTRY.get_sample_value("gazette_store_health_check_total", labels)
            assert value is not None
            assert value >= count
        scope.cancel()


async def test_a_check_that_hangs_is_reported_and_not_repeated(
    stores: BlobStores, switch: Switch, clock: ManualClock
) -> None:
    """One thread may be stuck in a store, and only one."""
    time = LoopTime()
    switch.gate.clear()
    async with TaskScope("test") as scope:
        scope.daemon(stores.run_health(), name="health")
        active = stores.get("s3://bucket/")
        changes = scope.spawn(active.wait_health_change(), name="first")
        await time.pass_until(changes.done, health.CHECK_TIMEOUT_S)
        status = await changes
        assert "did not end in time" in (status.error or "")
        changes = scope.spawn(active.wait_health_change(status), name="second")
        await time.pass_until(changes.done, health.CHECK_TIMEOUT_S)
        status = await changes
        time.go_on()
        await until(lambda: clock.sleepers == 2)
        assert switch.puts == 1
        switch.gate.set()
        clock.advance(0.2)
        assert (await active.wait_health_change(status)).error is None
        scope.cancel()


async def test_unused_stores_are_swept(stores: BlobStores, clock: ManualClock) -> None:
    """One that was not asked for between two sweeps; a caller that still waits for it hears of it."""
    used, unused = stores.get("s3://used/"), stores.get("s3://unused/")
    assert stores.sweep() == 0
    stores.get("s3://used/")
    waiting = unused.health
    assert stores.sweep() == 1
    assert (await unused.wait_health_change(waiting)).error == "health checks have stopped"
    assert await unused.wait_health_change() is unused.health
    assert stores.get("s3://used/") is used
    assert stores.get("s3://unused/") is not unused


async def test_a_store_whose_calls_hang_is_not_swept(stores: BlobStores, switch: Switch) -> None:
    """Made again, it would hang as many threads again, every hour."""
    switch.gate.clear()
    active = stores.get("s3://bucket/")
    call = active.calls.submit(put, active.store, "a", b"content")
    await until(lambda: switch.puts == 1)
    for _ in range(3):
        stores.sweep()
    assert stores.get("s3://bucket/") is active
    switch.gate.set()
    await until(call.done)
    stores.sweep()
    assert stores.sweep() == 1


async def test_a_store_whose_threads_all_hang_is_unhealthy_until_one_returns(
    stores: BlobStores, switch: Switch, clock: ManualClock
) -> None:
    """Whatever its health check says, which has a thread of its own."""
    async with TaskScope("test") as scope:
        scope.daemon(stores.run_health(), name="health")
        active = stores.get("s3://bucket/")
        assert (await active.wait_health_change()).error is None
        await until(lambda: clock.sleepers == 2)
        gate = threading.Event()
        calls = [active.calls.submit(gate.wait, 10) for _ in range(2)]
        await until(lambda: clock.sleepers == 3)
        seen = active.health
        clock.advance(60.0)
        assert (await active.wait_health_change(seen)).error == "2 calls have not returned for 60 s"
        labels = {"store": "s3://bucket/"}
        assert REGISTRY.get_sample_value("gazette_store_hung_calls", labels) == 2
        with raises(Unavailable, store="s3://bucket/", says="2 calls"):
            active.calls.submit(int)

        # Case: the threads return. It is checked at once, and not when the next check is due.
        seen = active.health
        gate.set()
        await until(lambda: all(call.done() for call in calls))
        await until(lambda: clock.sleepers == 3)
        clock.advance(1.0)
        assert (await active.wait_health_change(seen)).error is None
        assert REGISTRY.get_sample_value("gazette_store_hung_calls", labels) == 0
        scope.cancel()


async def test_signing_takes_no_thread_where_it_is_computed(
    stores: BlobStores, switch: Switch, clock: ManualClock
) -> None:
    """And one that is for nothing else where it is not."""
    active = stores.get("s3://bucket/")
    gate = threading.Event()
    calls = [active.calls.submit(gate.wait, 10) for _ in range(2)]
    paths = [f"a/{number}" for number in range(100)]
    urls = await active.sign(paths, 60.0)
    assert urls == [f"memory:///{path}?ttl=60" for path in paths]
    assert not [one for one in threading.enumerate() if one.name.startswith("signing s3://bucket/")]

    class Asks(Switch):
        sign_now = None  # type: ignore[assignment]

        def sign_get(self, path: str, ttl_s: float) -> str:
            return f"{threading.current_thread().name} {path}"

    asking = BlobStores(BlobSettings(), clock, constructors={"s3": lambda _: Asks(clock.now)})
    urls = await asking.get("s3://other/").sign(paths[:2], 60.0)
    assert urls == ["signing s3://other/_0 a/0", "signing s3://other/_0 a/1"]
    asking.close()
    gate.set()
    for call in calls:
        assert await ended(call)


async def test_sweeps_are_hourly(stores: BlobStores, clock: ManualClock) -> None:
    """`run_health` sweeps, and the checks of what it swept end."""
    async with TaskScope("test") as scope:
        scope.daemon(stores.run_health(), name="health")
        active = stores.get("s3://bucket/")
        await active.wait_health_change()
        await until(lambda: clock.sleepers == 2)
        clock.advance(SWEEP_INTERVAL_S)
        await until(lambda: clock.sleepers == 2)
        assert active.health.error is None
        clock.advance(SWEEP_INTERVAL_S)
        await until(lambda: active.health.error is not None)
        assert active.health.error == "health checks have stopped"
        await until(lambda: clock.sleepers == 1)
        scope.cancel()


async def test_ended_outlasts_no_call(pool: BlockingPool) -> None:
    """A call that is late is left alone, and its outcome can be had later."""
    gate = threading.Event()
    call = pool.submit(gate.wait, 10)
    assert not await ended(call, 0.01)
    async with TaskScope("test") as scope:
        task = scope.spawn(ended(call), name="ended")
        await ManualClock().sleep(0)
        assert not task.done()
        gate.set()
        assert await task
    assert call.result() is True
    assert await ended(call, 0.0)


async def test_nothing_stays_of_stores_that_are_checked_and_not_used(
    clock: ManualClock, switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller may name any number of them."""
    stores = BlobStores(BlobSettings(), clock, constructors={"s3": lambda _: switch})
    assert await stores.check_unused("s3://one/", None, 10.0) == ""
    assert await stores.check_unused("s3://one/", "a/b/", 10.0) == ""
    assert "no blob store for gs://" in await stores.check_unused("gs://one/", None, 10.0)
    threads = threading.active_count()
    for index in range(50):
        switch.error = NotAllowed("no permission")
        error = await stores.check_unused(f"s3://named-{index}/", None, 10.0)
        assert error == "health check PUT failed: no permission"
    switch.error = TimeoutError()  # Its text is empty.
    assert await stores.check_unused("s3://named-50/", None, 10.0) == "TimeoutError()"
    assert threading.active_count() <= threads + 3
    assert stores.in_use("s3://named-1/") is None
    assert b"named-" not in render()
    assert not caplog.records
    used = stores.get("s3://one/")
    assert stores.in_use("s3://one/") is used
    stores.close()


async def test_few_stores_that_are_not_used_are_checked_at_a_time(
    clock: ManualClock, switch: Switch
) -> None:
    stores = BlobStores(BlobSettings(), clock, constructors={"s3": lambda _: switch})
    switch.gate.clear()
    try:
        async with TaskScope("test") as scope:
            hung = [
                scope.spawn(stores.check_unused(f"s3://hangs-{index}/", None, 0.01), name="hung")
                for index in range(4)
            ]
            for one in hung:
                assert await one == "health check failed: no outcome within 0 s"
            with raises(Unavailable, store="s3://fifth/", at_once=4):
                await stores.check_unused("s3://fifth/", None, 0.01)
            assert switch.puts == 4
            switch.gate.set()
            assert await stores.check_unused("s3://fifth/", None, 10.0) == ""
    finally:
        switch.gate.set()
        stores.close()
