"""etcd is away for longer than the leases of all brokers, which end. Then everything starts again.

Each journal goes on without an operator, with its registers and all that was acknowledged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gazette.client.append.appender import AppendParams, append_once
from gazette.client.client import Client
from gazette.client.journals import JournalChange, apply_journals
from gazette.client.read.reader import Reader, ReadParams
from gazette.errors import GazetteError
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.text import duration
from gazette.run.dev.cluster import Broker, ClusterSettings, LocalCluster
from gazette.run.dev.processes import await_ready
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

JOURNALS = [f"outage/part-{number}" for number in range(8)]
CLOCK = SystemClock()


class Appending:
    """Appends to one journal until it is stopped. ``acknowledged`` has contents by their offset."""

    def __init__(self, client: Client, journal: str) -> None:
        self.client = client
        self.journal = journal
        self.acknowledged: dict[int, bytes] = {}
        self.stopped = False

    async def append(self, content: bytes, params: AppendParams | None = None) -> None:
        """Append by one call. A client that retries would wait for brokers, which wait for this test."""
        result = await append_once(self.client, params or AppendParams(self.journal), content)
        self.acknowledged[result.commit.begin] = content

    async def run(self) -> None:
        number = 0
        while not self.stopped:
            number += 1
            try:
                await self.append(f"<{self.journal} {number}>".encode() * 7)
            except GazetteError:
                await CLOCK.sleep(0.1)


def specs(replication: int) -> list[JournalChange]:
    fragment = FragmentSpec(
        length=1 << 12,
        codec=Codec.GZIP,
        stores=("file:///outage/",),
        refresh_interval_ns=5 * duration.SECOND,
    )
    return [
        JournalChange(upsert=JournalSpec(name, replication, fragment=fragment)) for name in JOURNALS
    ]


async def until_appended(one: Appending) -> None:
    """Append as soon as the journal takes it: with the register that was set before the outage."""
    check = LabelSelector.of(("author", one.journal))
    params = AppendParams(one.journal, check_registers=check)
    while True:
        try:
            await one.append(b"behind the outage", params)
        except GazetteError:
            await CLOCK.sleep(0.5)
        else:
            return


async def content_of(client: Client, journal: str, end: int) -> bytes:
    content = b""
    async with Reader(client, ReadParams(journal, end_offset=end, block=True)) as reader:
        while part := await reader.read():
            content += part
    return content


async def start_again(cluster: LocalCluster) -> None:
    async def start(broker: Broker) -> None:
        await broker.process.start()
        await await_ready(broker.process, broker.http_port, CLOCK, 120.0)

    await asyncio.gather(*(start(broker) for broker in cluster.brokers))


@pytest.mark.parametrize("replication", [1, 3])
async def test_journals_go_on_by_themselves(tmp_path: Path, replication: int) -> None:
    settings = ClusterSettings(tmp_path, brokers=3, zones=1, lease_ttl_s=20.0, log_level="info")
    cluster = LocalCluster(settings, CLOCK)
    (tmp_path / "fragments" / "outage").mkdir(parents=True)
    await cluster.start()
    try:
        addresses = ",".join(broker.grpc_url for broker in cluster.brokers)
        async with Client(addresses, clock=CLOCK) as client:
            await apply_journals(client, specs(replication))
            all_of_them = [Appending(client, name) for name in JOURNALS]
            for one in all_of_them:
                author = LabelSet.of(("author", one.journal))
                params = AppendParams(one.journal, union_registers=author)
                result = await client.append(params, b"first")
                one.acknowledged[result.commit.begin] = b"first"
            async with TaskScope("appends") as scope:
                for one in all_of_them:
                    scope.spawn(one.run(), name=one.journal)
                await asyncio.to_thread(cluster.etcd.pause)
                for broker in cluster.brokers:
                    await broker.process.wait()
                for one in all_of_them:
                    one.stopped = True
                await scope.wait()
            closings = [one.name for one in (tmp_path / "fragments").rglob("closed-*")]
            assert len(closings) == len(JOURNALS)
            await asyncio.to_thread(cluster.etcd.resume)
            await start_again(cluster)
        async with Client(addresses, clock=CLOCK) as client:
            for one in all_of_them:
                one.client = client
            await asyncio.gather(*(until_appended(one) for one in all_of_them))
            for one in all_of_them:
                last = max(one.acknowledged)
                content = await content_of(client, one.journal, last + 17)
                found = {
                    begin: content[begin : begin + len(sent)]
                    for begin, sent in one.acknowledged.items()
                }
                assert found == one.acknowledged
                probe = await client.append(AppendParams(one.journal), b"x")
                assert probe.registers == LabelSet.of(("author", one.journal))
    finally:
        await cluster.stop()
