"""1,100 idle connections to each port of a broker and of a member: real processes, few descriptors.

Before there were limits, they cost a broker its lease, and made it log tens of megabytes a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardClient
from gazette.cluster.etcd.client import Etcd
from gazette.run.dev.processes import ChildProcess, await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.etcd import EtcdServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

CLOCK = SystemClock()
ROOT = Path(__file__).parents[1]
JOURNAL = "a/journal"
IDLE = 1_100
LEASE_S = 10
HELD_S = 1.2 * LEASE_S
LIMITS = {"soft": "-Sn 1024", "hard": "-n 1024"}

MEMBER = """
from gazette import Application, runconsumer

class Nothing(Application):
    message_type = dict
    def new_store(self, shard, recorder): raise NotImplementedError
    def consume_message(self, *args): raise NotImplementedError

if __name__ == "__main__":
    runconsumer.main(Nothing())
"""


@dataclass
class Process:
    """A process that was started with few descriptors. ``key`` is that of its member in etcd."""

    child: ChildProcess
    key: str
    grpc_port: int
    http_port: int
    debug_port: int

    @property
    def ports(self) -> tuple[int, int, int]:
        return self.grpc_port, self.http_port, self.debug_port


@pytest.fixture
def many_sockets() -> Iterator[None]:
    """Open many sockets; this process holds the other ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * IDLE:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * IDLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def launched(
    limit: str, kind: str, program: list[str], key: str, tmp_path: Path, *flags: str
) -> AsyncIterator[Process]:
    ports = free_port(), free_port(), free_port()
    argv = [
        *("sh", "-c", f'ulimit {LIMITS[limit]} && exec "$@"', "sh"),
        *(sys.executable, *program, *flags, f"--{kind}.host=127.0.0.1"),
        *(f"--{kind}.port={ports[0]}", f"--{kind}.http-port={ports[1]}"),
        *(f"--debug.port={ports[2]}", f"--etcd.lease={LEASE_S}s", "--log.level=info"),
        *(f"--{kind}.id=member-one", f"--{kind}.drain-timeout=0s"),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    child = ChildProcess(kind, argv, tmp_path / f"{kind}.log", environ, CLOCK)
    await child.start()
    try:
        await await_ready(child, ports[1], CLOCK, 60.0)
        yield Process(child, key, *ports)
    finally:
        await child.stop(30.0)


@contextlib.asynccontextmanager
async def idle(ports: tuple[int, ...]) -> AsyncIterator[None]:
    """Open connections that never send a byte, and keep our ends of them."""
    loop = asyncio.get_running_loop()
    ends: list[Any] = []
    try:
        for port in ports:
            for _ in range(IDLE):
                transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)
                ends.append(transport)
        yield
    finally:
        for transport in ends:
            transport.abort()


async def holds(etcd: Etcd, process: Process, created: int) -> None:
    """Check that a process lives, is the member that it was, and has said little."""
    assert process.child.running, process.child.log_tail()
    (kv,) = (await etcd.range(process.key)).kvs
    assert kv.create_revision == created
    assert process.child.log_path.stat().st_size < 100_000
    for port in (process.http_port, process.debug_port):
        async with httpx.AsyncClient() as http:
            response = await http.get(f"http://127.0.0.1:{port}/debug/ready")
        assert response.status_code == 200


@pytest.mark.usefixtures("many_sockets")
@pytest.mark.parametrize("limit", ["soft", "hard"])
async def test_a_broker_serves_beside_idle_connections(
    limit: str, etcd: Etcd, etcd_server: EtcdServer, tmp_path: Path
) -> None:
    (tmp_path / "root" / "fragments").mkdir(parents=True)
    program = ["-m", "gazette.main", "serve"]
    flags = (f"--etcd.address={etcd_server.endpoint}", f"--broker.file-root={tmp_path / 'root'}")
    key = "/gazette/cluster/members/local#member-one"
    async with launched(limit, "broker", program, key, tmp_path, *flags) as process:
        (kv,) = (await etcd.range(key)).kvs
        endpoint = f"http://127.0.0.1:{process.grpc_port}"
        async with Client(endpoint, clock=CLOCK) as client:
            await client.apply_journals([JournalChange(upsert=journal_spec(JOURNAL))])
            await client.append(AppendParams(JOURNAL), b"before.")
            async with asyncio.timeout(90), idle(process.ports):
                end = CLOCK.monotonic() + HELD_S
                while CLOCK.monotonic() < end:
                    await client.append(AppendParams(JOURNAL), b"beside.")
                    await holds(etcd, process, kv.create_revision)
                    await CLOCK.sleep(0.2)
                async with Client(endpoint, clock=CLOCK) as another:
                    result = await another.append(AppendParams(JOURNAL), b"after.")
                    content = b""
                    async with another.retry_reader(ReadParams(JOURNAL)) as reader:
                        while len(content) < result.commit.end:
                            content += await reader.read()
            assert content.startswith(b"before.beside.")
            assert content.endswith(b"beside.after.")


@pytest.mark.usefixtures("many_sockets")
@pytest.mark.parametrize("limit", ["soft", "hard"])
async def test_a_member_serves_beside_idle_connections(
    limit: str, etcd: Etcd, etcd_server: EtcdServer, tmp_path: Path
) -> None:
    (tmp_path / "member.py").write_text(MEMBER)
    key = "/gazette/consumers/nothing/members/local#member-one"
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        flags = (
            f"--etcd.address={etcd_server.endpoint}",
            "--etcd.prefix=/gazette/consumers/nothing",
            f"--broker.address={broker.endpoint}",
        )
        program = [str(tmp_path / "member.py")]
        async with launched(limit, "consumer", program, key, tmp_path, *flags) as process:
            (kv,) = (await etcd.range(key)).kvs
            endpoint = f"http://127.0.0.1:{process.grpc_port}"
            async with ShardClient(endpoint) as shards:
                assert (await shards.list_shards()).shards == ()
                async with asyncio.timeout(90), idle(process.ports):
                    end = CLOCK.monotonic() + HELD_S
                    while CLOCK.monotonic() < end:
                        await shards.list_shards()
                        await holds(etcd, process, kv.create_revision)
                        await CLOCK.sleep(0.2)
                    async with ShardClient(endpoint) as another:
                        await another.list_shards()
