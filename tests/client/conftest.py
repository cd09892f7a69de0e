"""Fixtures of the client's tests: a scripted broker, and a clock that makes no test wait."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.rpc.channel import ChannelSettings
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import StubBroker


@pytest.fixture
def instant() -> InstantClock:
    return InstantClock()


@pytest.fixture
async def broker() -> AsyncIterator[StubBroker]:
    async with StubBroker() as stub:
        yield stub


@pytest.fixture
async def client(broker: StubBroker, instant: InstantClock) -> AsyncIterator[Client]:
    settings = ChannelSettings(silence_s=0)  # On this clock every peer is silent for minutes.
    async with Client(
        broker.endpoint, zone="local", clock=instant, channel_settings=settings
    ) as client:
        yield client


@pytest.fixture
async def service(client: Client) -> AsyncIterator[AppendService]:
    service = AppendService(client)
    yield service
    await service.close()
