"""The two etcds that must behave alike: a real one, and the fake on a real gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.connection import Member
from gazette.runtime.clock import Clock, SystemClock
from gazette.testing.clock import ManualClock
from gazette.testing.etcd import EtcdServer, etcd_for_tests
from gazette.testing.simulation.etcd.service import FakeEtcd
from tests.support.instant_clock import eventually


@dataclass
class Subject:
    """One etcd under test: our client of it, its bare stubs, and the fake if it is one."""

    etcd: Etcd
    stubs: Member
    fake: FakeEtcd | None = None
    clock: ManualClock | None = None

    def pass_time(self, seconds: float) -> None:
        """Let the fake's time pass. The real one's does so without us."""
        if self.fake is not None and self.clock is not None:
            self.clock.advance(seconds)
            self.fake.advance()


@pytest.fixture(scope="module")
def compactable_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Run a real etcd of this module, since these tests compact and the shared one is not to be."""
    with etcd_for_tests(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["real", "fake"])
async def subject(request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    if request.param == "real":
        server = request.getfixturevalue("compactable_server")
        async with connected(server.endpoint, SystemClock()) as (etcd, stubs):
            yield Subject(etcd, stubs)
            await etcd.delete_prefix("")
        return
    clock = ManualClock()
    fake = FakeEtcd(clock, lease_ttl_min_s=1)
    grpc_server = grpc.aio.server(options=(("grpc.max_receive_message_length", 2 << 20),))
    fake.register(grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    # One clock for both sides: a test that is slow for seconds loses no lease.
    async with connected(f"http://127.0.0.1:{port}", clock) as (etcd, stubs):
        yield Subject(etcd, stubs, fake, clock)
    await grpc_server.stop(10.0)
    # The server does not wait for calls that it cancelled.
    await eventually(lambda: not fake.streams)


class connected:
    """Our client of an endpoint, and stubs over a channel of their own."""

    def __init__(self, endpoint: str, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock

    async def __aenter__(self) -> tuple[Etcd, Member]:
        target = self._endpoint.removeprefix("http://")
        options = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._etcd = await Etcd.connect(EtcdSettings((self._endpoint,)), self._clock)
        return self._etcd, Member(self._endpoint, self._channel)

    async def __aexit__(self, *exc_info: object) -> None:
        await self._etcd.close()
        await self._channel.close(None)
