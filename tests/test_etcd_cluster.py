"""The client against a cluster of three, members of which die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.errors import Unavailable
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from tests.facts import raises


@pytest.fixture
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EtcdServer]]:
    peers = {name: f"http://127.0.0.1:{free_port()}" for name in ("a", "b", "c")}
    cluster = ",".join(f"{name}={peer}" for name, peer in peers.items())
    servers = []
    for name, peer in peers.items():
        arguments = (
            f"--name={name}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            "--heartbeat-interval=50",
            "--election-timeout=250",
        )
        listen = f"http://127.0.0.1:{free_port()}"
        directory = tmp_path_factory.mktemp(name)
        servers.append(etcd_for_tests(directory, listen=listen, arguments=arguments))
    yield servers
    for server in servers:
        server.kill()


async def start(servers: list[EtcdServer]) -> EtcdSettings:
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
    return EtcdSettings(endpoints=tuple(server.endpoint for server in servers), request_timeout_s=5)


async def test_members_die_one_by_one(members: list[EtcdServer]) -> None:
    settings = await start(members)
    hasty = replace(settings, request_timeout_s=0.3)
    async with (
        await Etcd.connect(settings, SystemClock()) as etcd,
        await Etcd.connect(hasty, SystemClock()) as hurried,
    ):
        lease = await etcd.grant(3)
        revision = (await etcd.put("m", b"1", lease=lease.id)).header.revision
        async with TaskScope("test") as scope:
            keeping = scope.daemon(lease.keep_alive(), name="keep alive")
            watching = etcd.watch("m", start_revision=revision)
            assert (await anext(watching)).created
            assert len((await anext(watching)).events) == 1

            # Case: the preferred member dies. Everything goes on with the next one.
            members[0].kill()
            with pytest.raises(Unavailable, match="interrupted"):
                await anext(watching)
            async with aclosing(etcd.watch("m", start_revision=revision + 1)) as watching:
                assert (await anext(watching)).created
                await written(hurried, b"2")
                (event,) = (await anext(watching)).events
                assert (event.kv.value, event.kv.lease) == (b"2", lease.id)
                before = lease.expires_at
                while lease.expires_at == before:
                    await asyncio.wait([keeping], timeout=0.02)

                # Case: the majority is gone. The member that is left says that it has no leader,
                # on the open watch too.
                members[2].kill()
                with raises(Unavailable, reason="etcdserver: no leader"):
                    await anext(watching)
            with raises(Unavailable, operation="Put", outcome="not applied"):
                await hurried.put("m", b"3")
            with raises(Unavailable, "reason", operation="Status", retrying=False):
                await Etcd.connect(hasty, SystemClock())
            scope.cancel()


async def written(etcd: Etcd, value: bytes) -> None:
    """Put ``m``, over the moment in which the cluster elects a leader."""
    while True:
        try:
            await etcd.put("m", value, ignore_lease=True)
        except Unavailable:
            continue
        return
