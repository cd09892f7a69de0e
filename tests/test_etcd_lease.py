"""Leases over a real etcd: kept alive through what can be survived, lost when they are lost."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from gazette.cluster.etcd.client import Etcd, EtcdSettings, LeaseLost
from gazette.errors import Closed
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from tests.facts import raises
from tests.support.tcp_proxy import TcpProxy


async def connected(server: EtcdServer, clock: Clock | None = None) -> Etcd:
    return await Etcd.connect(EtcdSettings(endpoints=(server.endpoint,)), clock or SystemClock())


async def test_keys_end_with_their_lease(etcd: Etcd) -> None:
    lease = await etcd.grant(60)
    await etcd.put("m", b"1", lease=lease.id)
    await etcd.put("m", b"2", ignore_lease=True)
    kv = await etcd.get("m")
    assert kv is not None
    assert (kv.value, kv.lease) == (b"2", lease.id)
    status = await lease.status()
    assert (status.granted_s, status.keys) == (60, (b"m",))
    await lease.revoke()
    assert await etcd.get("m") is None
    assert (await lease.status()).remaining_s == -1
    # Case: once more is fine.
    await lease.revoke()


async def test_a_fraction_of_a_second_is_rounded_up(etcd: Etcd) -> None:
    assert (await etcd.grant(2.1)).ttl_s == 3.0


async def test_renewal_moves_the_end(etcd_server: EtcdServer, clock: ManualClock) -> None:
    async with await connected(etcd_server, clock) as etcd:
        lease = await etcd.grant(60)
        assert lease.remaining_s == 60
        clock.advance(50)
        await lease.renew()
        assert lease.remaining_s == 60
        # Case: etcd is not asked once the time is over.
        clock.advance(60)
        with raises(LeaseLost, "late_s", ttl_s=60.0):
            await lease.renew()


async def test_renewal_counts_from_its_sending(etcd_server: EtcdServer, clock: ManualClock) -> None:
    """An answer that is late says nothing about the time for which it was under way."""
    host, _, port = etcd_server.endpoint.removeprefix("http://").partition(":")
    async with TcpProxy(host, int(port)) as proxy:
        settings = EtcdSettings(endpoints=(f"http://127.0.0.1:{proxy.port}",))
        async with await Etcd.connect(settings, clock) as etcd:
            lease = await etcd.grant(60)
            proxy.hold_replies()
            async with TaskScope("test") as scope:
                renewing = scope.spawn(lease.renew(), name="renew")
                for _ in range(100):
                    await clock.sleep(0)  # It is sent, and cannot be answered.
                assert not renewing.done()
                clock.advance(15)
                proxy.release()
                await renewing
            assert lease.remaining_s == 45


class SignallingClock(ManualClock):
    def __init__(self) -> None:
        super().__init__()
        self.slept: asyncio.Queue[float] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        self.slept.put_nowait(seconds)
        await super().sleep(seconds)


async def test_it_is_renewed_three_times_per_ttl(etcd_server: EtcdServer) -> None:
    clock = SignallingClock()
    async with await connected(etcd_server, clock) as etcd:
        lease = await etcd.grant(60)
        async with TaskScope("test") as scope:
            scope.daemon(lease.keep_alive(), name="keep alive")
            for _ in range(5):
                assert await clock.slept.get() == pytest.approx(20)
                assert lease.remaining_s == 60
                clock.advance(20)
            scope.cancel()


async def test_it_is_lost_as_soon_as_etcd_does_not_know_it(etcd: Etcd) -> None:
    lease = await etcd.grant(6)
    other = await etcd.grant(60)
    with raises(LeaseLost, lease=f"{lease.id:x}", late_s=0.0) as caught:
        async with TaskScope("test") as scope:
            scope.daemon(lease.keep_alive(), name="keep alive")
            await lease.revoke()
    assert lease.remaining_s > 0
    assert f"{lease.id:x}" in str(caught.value)
    await other.renew()


async def test_it_is_lost_when_a_silent_etcd_outlasts_it(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        async with await connected(server) as etcd:
            lease = await etcd.grant(1)
            revision = (await etcd.put("m", b"", lease=lease.id)).header.revision
            server.pause()
            with raises(LeaseLost, "late_s", ttl_s=1.0) as caught:
                await lease.keep_alive()
            assert lease.remaining_s <= 0
            assert caught.value.__cause__ is not None
            assert server.endpoint in str(caught.value)
            # Case: etcd agrees, once it is back.
            server.resume()
            async with aclosing(etcd.watch("m", start_revision=revision + 1)) as watching:
                assert (await anext(watching)).created
                assert [event.deleted for event in (await anext(watching)).events] == [True]


async def test_it_survives_a_restart_of_etcd(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, durable=True) as server:
        async with await connected(server) as etcd:
            lease = await etcd.grant(9)
            await etcd.put("m", b"", lease=lease.id)
            async with TaskScope("test") as scope:
                keeping = scope.daemon(lease.keep_alive(), name="keep alive")
                await asyncio.to_thread(server.restart)
                before = lease.expires_at
                while lease.expires_at == before:
                    await asyncio.wait([keeping], timeout=0.02)
                assert (await lease.status()).keys == (b"m",)
                scope.cancel()


async def test_it_survives_the_loss_of_an_endpoint(etcd_server: EtcdServer) -> None:
    port = int(etcd_server.endpoint.rsplit(":", 1)[1])
    async with TcpProxy("127.0.0.1", port) as proxy:
        endpoints = (f"http://127.0.0.1:{proxy.port}", etcd_server.endpoint)
        async with await Etcd.connect(EtcdSettings(endpoints=endpoints), SystemClock()) as etcd:
            lease = await etcd.grant(60)
            before = lease.expires_at
            # Case: it is gone.
            proxy.refuse()
            await lease.renew()
            assert lease.expires_at > before


async def test_it_survives_an_endpoint_that_falls_silent(etcd_server: EtcdServer) -> None:
    port = int(etcd_server.endpoint.rsplit(":", 1)[1])
    async with TcpProxy("127.0.0.1", port) as proxy:
        endpoints = (f"http://127.0.0.1:{proxy.port}", etcd_server.endpoint)
        async with await Etcd.connect(EtcdSettings(endpoints=endpoints), SystemClock()) as etcd:
            lease = await etcd.grant(6)
            before = lease.expires_at
            proxy.hold_replies()
            await lease.renew()
            assert lease.expires_at > before


async def test_closing_the_client_ends_keeping_alive(
    etcd_server: EtcdServer, clock: ManualClock
) -> None:
    etcd = await connected(etcd_server, clock)
    lease = await etcd.grant(60)
    await etcd.close()
    clock.advance(30)
    with pytest.raises(Closed):
        await lease.keep_alive()
