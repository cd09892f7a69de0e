"""Brokers that die one after the other, on a real etcd: what was acknowledged stays readable."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gazette.auth import Capability, Claims
from gazette.client.append.appender import AppendParams
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec

JOURNAL = "a/journal"


async def primary_of(brokers: list[BrokerFixture]) -> BrokerFixture:
    for broker in brokers:
        at = await broker.service.context.resolver.resolve(
            JOURNAL, claims=Claims(Capability.APPEND), may_proxy=True, require_primary=True
        )
        if at.is_local:
            return broker
    raise AssertionError("no broker leads the journal")


@pytest.mark.long
async def test_two_deaths_and_later_a_third_lose_nothing_with_three_replicas(
    etcd: Etcd, tmp_path: Path
) -> None:
    """The third comes when the journal has three replicas again, and not when the store has its bytes.

    The survivor of the first two alone holds what was acknowledged before them.
    """
    async with AsyncExitStack() as stack:

        async def start(number: int) -> BrokerFixture:
            broker = await BrokerFixture.start(
                etcd, tmp_path, zone="abc"[number % 3], id=f"broker-{number}", lease_ttl_s=60.0
            )
            return await stack.enter_async_context(broker)

        three = [await start(number) for number in range(3)]
        await three[0].create(journal_spec(JOURNAL, replication=3))
        parts = [f"append {number}, ".encode() for number in range(20)]
        for part in parts:
            await three[0].client.append(AppendParams(JOURNAL), part)
        primary = await primary_of(three)
        survivor = next(broker for broker in three if broker is not primary)
        for broker in three:
            if broker is not survivor:
                await broker.die()
        joined = [await start(number) for number in (3, 4)]
        for broker in three:
            if broker is not survivor:
                await survivor.settled_without(broker, JOURNAL)
        persister = survivor.service.context.persister
        async with asyncio.timeout(15.0):  # Far less than a follower waits for its primary.
            while persister.unpersisted:
                await SystemClock().sleep(0.01)
        await survivor.die()
        written = b"".join(parts)
        params = ReadParams(JOURNAL, end_offset=len(written), block=True)
        reader = joined[0].client.retry_reader(params)
        assert b"".join([chunk async for chunk in reader.chunks()]) == written
