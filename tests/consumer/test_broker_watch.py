"""A member whose brokers do not answer: it says so, is not ready, and has its HTTP port all the same."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gazette.client.client import Client
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.process.membership import MemberEnvironment
from gazette.consumer.broker_watch import RetryLog
from gazette.consumer.member import ConsumerMember
from gazette.consumer.service import ConsumerService
from gazette.consumer.settings import ConsumerSettings
from gazette.net.server import Server, ServerSettings
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from tests.consumer.apps import Tally
from tests.support.instant_clock import eventually


class Publishes(Tally):
    """Waits for its partitions before it has any shard."""

    async def initialize(self, service: ConsumerService) -> None:
        outputs = service.partitions(LabelSelector.parse("app.gazette.dev/message-type = Out"))
        service.add_route("/mine", mine)
        await outputs.ready()


async def mine(_request: Any) -> Any:
    raise AssertionError("not asked")


@pytest.fixture
async def service(etcd: Etcd, tmp_path: Path) -> AsyncIterator[Any]:
    """Make members of a broker's address, started, and crashed after the test."""
    scope = TaskScope("members")
    made: list[ConsumerMember] = []

    def start(application: Any, address: str) -> ConsumerMember:
        clock = SystemClock()
        server = Server(clock, ServerSettings("127.0.0.1", bind_host="127.0.0.1"))
        server.bind()
        settings = ConsumerSettings(
            id=f"member-{len(made)}", root="/gazette/consumers/test", scratch_directory=tmp_path
        )
        environment = MemberEnvironment(clock, random.Random(1), server, etcd.settings)
        one = ConsumerMember(application, environment, settings, Client(address, clock=clock))
        scope.spawn(one.start(), name="start")
        made.append(one)
        return one

    yield start
    await scope.stop()
    for one in made:
        await one.crash()


async def ready(service: ConsumerMember) -> tuple[int, str]:
    async with httpx.AsyncClient() as http:
        while True:
            try:
                answer = await http.get(f"{service.server.http_endpoint}/debug/ready")
            except httpx.ConnectError:
                continue  # Not started for the first time.
            return answer.status_code, answer.text


async def test_a_member_with_a_wrong_broker_is_not_ready_and_says_why(
    service: Any, broker: BrokerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING, "gazette.consumer.broker_watch"):
        member = service(Tally(), f"http://127.0.0.1:{port}")
        await eventually(lambda: "not answered yet" in member.not_ready())
        await eventually(lambda: member.not_ready().startswith("brokers have not answered yet"))
        status, text = await ready(member)
        assert status == 503
        assert (
            f"brokers have not answered yet: cannot reach the brokers at http://127.0.0.1:{port}"
            in text
        )
        await eventually(lambda: "have not answered for" in caplog.text)
        assert "--broker.address" in caplog.text
    right = service(Tally(), broker.endpoint)
    await eventually(lambda: right.not_ready() == "")


async def test_a_server_that_is_no_broker_is_no_answer(service: Any, broker: BrokerFixture) -> None:
    """Such as another consumer, or etcd."""
    other = service(Tally(), broker.endpoint)
    await eventually(lambda: other.not_ready() == "")
    member = service(Tally(), other.server.endpoint)
    await eventually(lambda: "code=UNIMPLEMENTED" in member.not_ready())


async def test_http_answers_while_an_application_waits_for_brokers(service: Any) -> None:
    member = service(Publishes(), f"http://127.0.0.1:{free_port()}")
    await eventually(lambda: "cannot reach" in member.not_ready())
    status, text = await ready(member)
    assert status == 503
    assert text.startswith("initializing the application; brokers have not answered yet: cannot")
    async with httpx.AsyncClient(base_url=member.server.http_endpoint) as http:
        answer = await http.get("/mine")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "initializing the application" in answer.text
        assert (await http.get("/debug/metrics")).status_code == 200


async def test_a_member_is_ready_once_its_brokers_answer(
    service: Any, broker: BrokerFixture
) -> None:
    member = service(Publishes(), broker.endpoint)
    await eventually(lambda: member.not_ready() == "")
    assert (await ready(member))[0] == 200


def test_one_line_for_each_cause_and_minute() -> None:
    retries = RetryLog()
    assert retries.due("refused", 0.0) == 1
    assert [retries.due("refused", float(now)) for now in range(1, 60)] == [None] * 59
    assert retries.due("denied", 5.0) == 1
    assert retries.due("refused", 60.0) == 60
    assert retries.due("refused", 61.0) is None
    for cause in range(
        1000
    ):  # Causes that are all different are bounded, too: old ones are forgotten.
        assert retries.due(str(cause), 61.0) == 1
    assert sum(retries.due(str(cause), 61.0) is None for cause in range(900, 1000)) <= 64
    assert retries.due("refused", 61.0) == 1
