"""Fixtures of the backfill's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gazette.cluster.etcd.client import Etcd
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture
from tests.backfill.cluster import Cluster
from tests.blobs.conftest import s3_proxy as s3_proxy
from tests.blobs.conftest import s3_target as s3_target


@pytest.fixture
async def start(etcd: Etcd, tmp_path: Path) -> AsyncIterator[Callable[[Any], Any]]:
    """Yield a function that starts a cluster with a consumer of an application."""
    async with AsyncExitStack() as stack:

        async def start(application: Any) -> Cluster:
            broker = await stack.enter_async_context(
                await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=30.0)
            )
            consumer = await ConsumerFixture.start(
                etcd, broker, application, tmp_path, lease_ttl_s=30.0
            )
            stack.push_async_callback(consumer.crash)
            return Cluster(broker, consumer, tmp_path)

        yield start
