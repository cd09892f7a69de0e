"""Fixtures of the tests of gazctl: a broker, a consumer, and a runner that knows both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture
from tests.consumer.apps import Tally
from tests.gazctl.runner import Runner


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into an empty directory: no gazctl.ini of the user is read."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(
        etcd, tmp_path, lease_ttl_s=60.0, store_check_timeout_s=10.0
    ) as broker:
        yield broker


@pytest.fixture
def gazctl(broker: BrokerFixture) -> Runner:
    return Runner({"BROKER_ADDRESS": broker.endpoint, "BROKER_FILE_ROOT": str(broker.file_root)})


@pytest.fixture
async def consumer(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> AsyncIterator[ConsumerFixture]:
    """Run a member that counts words; ``gazctl`` knows it."""
    member = await ConsumerFixture.start(etcd, broker, Tally(), tmp_path, lease_ttl_s=60.0)
    gazctl.environ["CONSUMER_ADDRESS"] = member.endpoint
    yield member
    await member.crash()


@pytest.fixture
def gazctl_alone() -> Runner:
    """Return a runner that knows no cluster."""
    return Runner({})
