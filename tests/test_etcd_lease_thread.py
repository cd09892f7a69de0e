"""Leases that are renewed in a thread, while the event loop is busy, over a real etcd."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from gazette.cluster.etcd.client import Etcd, EtcdSettings, Lease, LeaseLost
from gazette.cluster.etcd.lease_thread import STALL_MAX_S, keep_alive_apart
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.etcd import EtcdServer
from tests.facts import raises

PATIENCE_S = 60.0
TTL_S = 300.0


class ShiftedClock(SystemClock):
    """The machine's clock, which any thread may move. Each move wakes its sleepers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead_s = 0.0
        self._sleepers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def monotonic(self) -> float:
        return SystemClock.monotonic() + self._ahead_s

    async def sleep(self, seconds: float) -> None:
        ends = self.monotonic() + seconds
        moved = asyncio.Event()
        with self._lock:
            self._sleepers[moved] = asyncio.get_running_loop()
        try:
            while (left_s := ends - self.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left_s):
                        await moved.wait()
                except TimeoutError:
                    return
                moved.clear()
        finally:
            with self._lock:
                del self._sleepers[moved]

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._ahead_s += seconds
            for moved, loop in self._sleepers.items():
                loop.call_soon_threadsafe(moved.set)


def block_until(done: Callable[[], bool]) -> bool:
    """Keep the event loop busy until ``done``. Return False if that takes too long."""
    ends = SystemClock.monotonic() + PATIENCE_S
    while not done():
        if SystemClock.monotonic() > ends:
            return False
    return True


async def connected(server: EtcdServer, clock: SystemClock | None = None) -> Etcd:
    settings = EtcdSettings(endpoints=(server.endpoint,))
    return await Etcd.connect(settings, clock or SystemClock())


async def granted(etcd: Etcd, scope: TaskScope, ttl_s: float) -> Lease:
    """Return a lease that a thread renews."""
    lease = await etcd.grant(ttl_s)
    scope.daemon(keep_alive_apart(lease), name="lease")
    await lease.status()
    return lease


async def test_a_busy_loop_keeps_its_lease(etcd_server: EtcdServer) -> None:
    async with await connected(etcd_server) as etcd, TaskScope("test") as scope:
        lease = await granted(etcd, scope, 2)
        end = lease.expires_at
        assert block_until(lambda: lease.expires_at > end + 2 * lease.ttl_s)
        assert (await lease.status()).remaining_s > 0
        scope.cancel()


async def test_a_loop_that_runs_nothing_loses_its_lease(
    etcd_server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Others can take over. The loop learns of it when it goes on."""
    clock = ShiftedClock()
    async with await connected(etcd_server, clock) as etcd:
        with raises(LeaseLost, ttl_s=TTL_S):
            async with TaskScope("test") as scope:
                lease = await granted(etcd, scope, TTL_S)
                clock.advance(TTL_S / 3 + STALL_MAX_S)
                assert block_until(lambda: bool(caplog.records))
                assert lease.remaining_s > 0
                clock.advance(TTL_S)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "test_etcd_lease_thread.py" in record.getMessage()


async def test_a_loop_that_goes_on_in_time_keeps_its_lease(
    etcd_server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ShiftedClock()
    async with await connected(etcd_server, clock) as etcd, TaskScope("test") as scope:
        lease = await granted(etcd, scope, TTL_S)
        end = lease.expires_at
        clock.advance(TTL_S / 3 + STALL_MAX_S)
        assert block_until(lambda: bool(caplog.records))
        async with asyncio.timeout(PATIENCE_S):
            while lease.expires_at <= end:
                await lease.status()
        scope.cancel()


async def test_a_lease_that_etcd_does_not_know_counts_as_ended_while_the_loop_is_busy(
    etcd_server: EtcdServer,
) -> None:
    """Nothing may be acknowledged before the loop has learned of it."""
    async with await connected(etcd_server) as etcd:
        with raises(LeaseLost, says="does not know the lease"):
            async with TaskScope("test") as scope:
                lease = await granted(etcd, scope, 6)
                await lease.revoke()
                assert lease.remaining_s > 0
                assert block_until(lambda: lease.remaining_s <= 0)


async def test_a_cancelled_renewal_leaves_the_lease_and_no_thread(etcd: Etcd) -> None:
    lease = await etcd.grant(60)
    before = set(threading.enumerate())
    async with TaskScope("test") as scope:
        scope.daemon(keep_alive_apart(lease), name="lease")
        await lease.status()
        (thread,) = [one for one in set(threading.enumerate()) - before if one.name == "lease"]
        scope.cancel()
    assert not thread.is_alive()
    assert (await lease.status()).remaining_s > 0
