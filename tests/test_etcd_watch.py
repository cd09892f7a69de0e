"""Watches over a real etcd."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from gazette.cluster.etcd.client import Compacted, Etcd, EtcdSettings, Op, WatchResponse
from gazette.errors import Closed, Unavailable
from gazette.runtime.clock import SystemClock
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from tests.facts import raises
from tests.support.tcp_proxy import TcpProxy


async def connected(*endpoints: str) -> Etcd:
    return await Etcd.connect(EtcdSettings(endpoints=endpoints), SystemClock())


def changes_of(response: WatchResponse) -> list[tuple[bytes, bytes | None]]:
    return [(e.kv.key, None if e.deleted else e.kv.value) for e in response.events]


async def test_events_come_in_order_from_the_given_revision(etcd: Etcd) -> None:
    first = (await etcd.put("w/a", b"1")).header.revision
    await etcd.put("w/a", b"2")
    await etcd.put("w2", b"a neighbour")
    await etcd.txn([], [Op.put("w/b", b"3"), Op.delete("w/a")])
    async with aclosing(etcd.watch("w/", start_revision=first + 1)) as watching:
        created = await anext(watching)
        assert created.created
        assert created.header.cluster_id != 0
        assert created.resume_revision is None
        past = await anext(watching)
        assert changes_of(past) == [(b"w/a", b"2"), (b"w/b", b"3"), (b"w/a", None)]
        assert past.resume_revision == first + 4
        # Case: from now on.
        await etcd.put("w/c", b"4")
        live = await anext(watching)
        assert changes_of(live) == [(b"w/c", b"4")]
        assert live.events[0].kv.version == 1
        assert live.header.revision == live.events[0].kv.mod_revision


async def test_several_watches_are_independent(etcd: Etcd) -> None:
    async with (
        aclosing(etcd.watch("w/a", start_revision=0)) as first,
        aclosing(etcd.watch("w/", start_revision=0)) as second,
    ):
        assert (await anext(first)).created
        assert (await anext(second)).created
        await etcd.put("w/b", b"1")
        await etcd.put("w/a", b"2")
        assert changes_of(await anext(first)) == [(b"w/a", b"2")]
        await first.aclose()
        assert changes_of(await anext(second)) == [(b"w/b", b"1")]
        assert changes_of(await anext(second)) == [(b"w/a", b"2")]


async def test_fragments_arrive_as_the_one_response_they_are(etcd: Etcd) -> None:
    revision = (await etcd.put("w/0", b"")).header.revision
    for i in range(4):
        await etcd.put(f"w/{i}", bytes(1 << 20))
    async with aclosing(etcd.watch("w/", start_revision=revision)) as watching:
        await anext(watching)
        response = await anext(watching)
        assert len(response.events) == 5
        assert response.resume_revision == revision + 5


async def test_progress_is_reported_when_nothing_happens(tmp_path: Path) -> None:
    often = "--experimental-watch-progress-notify-interval=50ms"
    with etcd_for_tests(tmp_path, arguments=[often]) as server:
        async with await connected(server.endpoint) as etcd:
            async with aclosing(etcd.watch("w/", start_revision=0)) as watching:
                assert (await anext(watching)).created
                revision = (await etcd.put("elsewhere", b"")).header.revision
                while (await anext(watching)).header.revision < revision:
                    pass
                response = await anext(watching)
                assert response.progress
                assert response.resume_revision == revision + 1
            # Case: unless it is not wanted.
            async with aclosing(etcd.watch("w/", start_revision=0, progress=False)) as watching:
                assert (await anext(watching)).created
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await anext(watching)


async def test_a_compacted_start_says_from_where_there_is_history(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        async with await connected(server.endpoint) as etcd:
            for _ in range(5):
                revision = (await etcd.put("w", b"")).header.revision
            await etcd.compact(revision)
            with pytest.raises(Compacted) as caught:
                async with aclosing(etcd.watch("w", start_revision=2)) as watching:
                    async for _ in watching:
                        pass
            assert caught.value.compact_revision == revision


async def test_a_lost_stream_is_unavailable_and_resumes_at_the_next_endpoint(
    etcd_server: EtcdServer, etcd: Etcd
) -> None:
    port = int(etcd_server.endpoint.rsplit(":", 1)[1])
    async with TcpProxy("127.0.0.1", port) as proxy:
        async with await connected(
            f"http://127.0.0.1:{proxy.port}", etcd_server.endpoint
        ) as client:
            async with aclosing(client.watch("w", start_revision=0)) as watching:
                assert (await anext(watching)).created
                await etcd.put("w", b"1")
                seen = await anext(watching)
                proxy.refuse()
                with pytest.raises(Unavailable, match="interrupted") as caught:
                    await anext(watching)
            assert str(proxy.port) in caught.value.facts["endpoint"]
            await etcd.put("w", b"2")
            resume = seen.resume_revision
            assert resume is not None
            async with aclosing(client.watch("w", start_revision=resume)) as watching:
                assert (await anext(watching)).created
                assert changes_of(await anext(watching)) == [(b"w", b"2")]


async def test_closing_the_client_ends_its_watches(etcd_server: EtcdServer) -> None:
    etcd = await connected(etcd_server.endpoint)
    watching = etcd.watch("w", start_revision=0)
    assert (await anext(watching)).created
    ended, _ = await asyncio.gather(anext(watching), etcd.close(), return_exceptions=True)
    assert isinstance(ended, Closed)


async def test_stopping_etcd_ends_its_watches(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path) as server:
        async with await connected(server.endpoint) as etcd:
            watching = etcd.watch("w", start_revision=0)
            assert (await anext(watching)).created
            _, ended = await asyncio.gather(
                asyncio.to_thread(server.stop), anext(watching), return_exceptions=True
            )
            assert isinstance(ended, Unavailable)


async def test_a_connection_that_falls_silent_is_noticed(tmp_path: Path) -> None:
    with etcd_for_tests(tmp_path, arguments=["--grpc-keepalive-min-time=10ms"]) as server:
        settings = EtcdSettings((server.endpoint,), keepalive_s=1.0)
        async with await Etcd.connect(settings, SystemClock()) as etcd:
            watching = etcd.watch("w", start_revision=0)
            assert (await anext(watching)).created
            server.pause()
            async with asyncio.timeout(20):  # without our setting, it takes a minute
                with raises(Unavailable, says="keepalive watchdog timeout"):
                    await anext(watching)
            server.resume()
            assert (await etcd.status()).version
