"""Fixtures that every test may use. Nothing else belongs here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings

from gazette.etcd.client import Etcd, EtcdSettings
from gazette.runtime.clock import SystemClock
from gazette.testing.clock import ManualClock
from gazette.testing.etcd import EtcdServer, etcd_for_tests

# Machines are shared: how long an example takes says nothing.
settings.register_profile("gazette", deadline=None)
settings.load_profile("gazette")


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd, shared by all tests: do not stop, pause or compact this one."""
    with etcd_for_tests(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    """A connected client; the whole keyspace is emptied after the test."""
    settings = EtcdSettings(endpoints=(etcd_server.endpoint,))
    async with await Etcd.connect(settings, SystemClock()) as client:
        yield client
        await client.delete_prefix("")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()
