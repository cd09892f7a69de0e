"""Fixtures of the consumer's tests: a broker with journals, and members that end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gazette import Application
from gazette.cluster.etcd.client import Etcd
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, log_spec
from tests.consumer.apps import SHARD, Start, Tally, source_spec


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(source_spec(), log_spec(SHARD))
        yield broker


@pytest.fixture
async def start(etcd: Etcd, broker: BrokerFixture, tmp_path: Path) -> AsyncIterator[Start]:
    """Yield a function that starts members; those that are left at the end crash."""
    members: list[ConsumerFixture] = []

    async def start(
        application: Application[Any] | None = None, id: str = "consumer-one", **settings: Any
    ) -> ConsumerFixture:
        application = Tally() if application is None else application
        member = await ConsumerFixture.start(
            etcd, broker, application, tmp_path, id=id, **{"lease_ttl_s": 60.0, **settings}
        )
        members.append(member)
        return member

    yield start
    for member in reversed(members):
        await member.crash()
