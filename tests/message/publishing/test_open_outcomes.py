"""Commits that fail without a certain outcome: the error names what may be visible."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import gazette
from gazette import CommitFailed
from gazette.client.client import Client
from gazette.client.rpc.channel import ChannelSettings
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.testing.broker import journal_spec
from tests.facts import raises
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import Fail, LoseReply, Reply, StubBroker

ONE = "words/part-000"
LABELS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))


class Word(gazette.Message):
    word: str


@pytest.fixture
async def broker() -> AsyncIterator[StubBroker]:
    async with StubBroker() as broker:
        broker.answers["List"] = lambda _: [
            broker_pb2.ListResponse(
                header=broker.header().to_pb(),
                journals=[
                    broker_pb2.ListResponse.Journal(
                        spec=journal_spec(name, labels=LABELS).to_pb(),
                        mod_revision=1,
                        create_revision=1,
                        route=broker.route_of(name).to_pb(),
                    )
                    for name in (ONE,)
                ],
            )
        ]
        yield broker


@pytest.fixture
async def publisher(broker: StubBroker) -> AsyncIterator[ClientPublisher]:
    settings = ChannelSettings(silence_s=0)  # On this clock every peer is silent for minutes.
    async with (
        Client(broker.endpoint, clock=InstantClock(), channel_settings=settings) as client,
        ClientPublisher(client) as publisher,
    ):
        yield publisher


async def test_a_refusal_after_a_lost_answer_leaves_a_message_open(
    broker: StubBroker, publisher: ClientPublisher
) -> None:
    broker.on_append(LoseReply(), Reply(Status.NOT_ALLOWED))
    with raises(CommitFailed, says="may be visible", advises="no reader can have seen") as raised:
        await publisher.publish(ONE, Word(word="to"))
    assert raised.value.unknown == (ONE,)
    assert b"to" in broker.content_of(ONE)


async def test_a_refusal_alone_says_that_a_message_is_not_visible(
    broker: StubBroker, publisher: ClientPublisher
) -> None:
    broker.on_append(Reply(Status.FRAGMENT_STORE_UNHEALTHY))
    with raises(CommitFailed, says=Status.FRAGMENT_STORE_UNHEALTHY.name) as raised:
        await publisher.publish(ONE, Word(word="to"))
    assert raised.value.unknown == ()
    assert "may be visible" not in str(raised.value)


async def test_a_refusal_after_a_lost_answer_leaves_a_commit_open(
    broker: StubBroker, publisher: ClientPublisher
) -> None:
    with raises(CommitFailed, says=f"may become visible in {ONE}") as raised:
        async with publisher.transaction() as transaction:
            await transaction.publish(ONE, Word(word="to"))
            broker.on_append(LoseReply(), Fail(), Reply(Status.REGISTER_MISMATCH))
    assert raised.value.unknown == (ONE,)
    assert raised.value.committed == ()
