"""The life of shards, on a real etcd and a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.etcd import Etcd
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from gazette.testing.remote_store import RemoteDatabase
from tests.consumer.apps import SOURCE, Tally, append, frame, source_spec

SHARD = "shard-one"


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path) as broker:
        await broker.create(source_spec(), log_spec(SHARD))
        yield broker


async def test_smoke(etcd: Etcd, broker: BrokerFixture, tmp_path: Path) -> None:
    async with await ConsumerFixture.start(etcd, broker, Tally(), tmp_path) as consumer:
        await consumer.create(shard_spec(SHARD, SOURCE))
        await append(broker, frame("a"), frame("b", 1), frame("b", 1), frame("b", 2))
        await consumer.read_to_heads(SHARD)
        assert consumer.store(SHARD).read() == {"a": 1, "b": 2}


async def test_smoke_remote(etcd: Etcd, broker: BrokerFixture, tmp_path: Path) -> None:
    async with await ConsumerFixture.start(etcd, broker, Tally(RemoteDatabase()), tmp_path) as consumer:
        await consumer.create(shard_spec(SHARD, SOURCE, log=False))
        await append(broker, frame("a"), frame("b", 1), frame("b", 1), frame("b", 2))
        await consumer.read_to_heads(SHARD)
        assert consumer.store(SHARD).read() == {"a": 1, "b": 2}
