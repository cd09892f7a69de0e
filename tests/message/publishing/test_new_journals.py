"""Publishers and readers whose broker lags behind the creation of a journal."""

from __future__ import annotations

from typing import Any

import pytest

from gazette import Source
from gazette.broker.api.list_apply import with_prefix_as_name
from gazette.client.client import Client
from gazette.client.read.reader import ReadParams
from gazette.client.rpc.channel import ChannelSettings
from gazette.client.waits import LAG_S
from gazette.errors import Invalid, NotFound, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.envelope_reader import CommittedReader, UncommittedReader
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.runtime.clock import Clock, SystemClock
from gazette.testing.broker import journal_spec
from tests.facts import raises
from tests.message.publishing.test_keyed_outputs import Word, specs_of
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import StubBroker

NAME = "words/part-000"
WORDS = journal_spec(NAME, labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))
EVERY = LabelSelector.parse("prefix=words/")
DECLARED = Source("words", Word, partitions=2, key="word")


class Hasty(SystemClock):
    """The machine's clock, on which pauses are shorter than they are asked for."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 40)


class Lagging(StubBroker):
    """A broker that learns of journals late: one list after another, and the last one from then on."""

    def __init__(self, *lists: tuple[JournalSpec, ...]) -> None:
        super().__init__()
        self.lists = list(lists)
        self.asked = 0
        self.answers["List"] = self._lists

    def _lists(self, request: broker_pb2.ListRequest) -> list[broker_pb2.ListResponse]:
        self.asked += 1
        response = broker_pb2.ListResponse(header=self.header().to_pb())
        response.header.etcd.revision = self.asked
        selector = with_prefix_as_name(LabelSelector.from_pb(request.selector))
        for spec in self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]:
            if selector.matches(spec.labels_with_name()):
                route = self.route_of(spec.name).to_pb()
                response.journals.add(
                    spec=spec.to_pb(), mod_revision=1, create_revision=1, route=route
                )
        end = [broker_pb2.ListResponse()] if request.watch else []
        return [response, *end]


def client_of(broker: StubBroker, clock: Clock) -> Client:
    # On such clocks every peer is silent for minutes.
    settings = ChannelSettings(silence_s=0)
    return Client(broker.endpoint, zone="local", clock=clock, channel_settings=settings)


@pytest.mark.parametrize("output", [NAME, EVERY], ids=["name", "selector"])
async def test_an_output_that_was_created_just_now(output: Any) -> None:
    async with (
        Lagging((), (), (), (WORDS,)) as broker,
        client_of(broker, InstantClock()) as client,
        ClientPublisher(client) as publisher,
    ):
        await publisher.publish(output, Word(word="new"), key="any")
        assert b"new" in broker.content_of(NAME)


async def test_the_watch_of_an_output_may_lag_as_well() -> None:
    """The list came from a broker that knows the journal, and the watch from another one."""
    async with (
        Lagging((WORDS,), (), (), (WORDS,)) as broker,
        client_of(broker, Hasty()) as client,
        ClientPublisher(client) as publisher,
    ):
        await publisher.publish(EVERY, Word(word="new"))
        assert b"new" in broker.content_of(NAME)


async def test_a_declared_output_of_which_some_partitions_are_known() -> None:
    specs = tuple(specs_of(DECLARED))
    async with (
        Lagging(specs[:1], specs[:1], specs) as broker,
        client_of(broker, Hasty()) as client,
        ClientPublisher(client) as publisher,
    ):
        await publisher.publish(DECLARED, Word(word="new"))
        assert b"new" in broker.content_of(specs[0].name) + broker.content_of(specs[1].name)


@pytest.mark.parametrize("output", [NAME, EVERY], ids=["name", "selector"])
async def test_an_output_that_stays_unknown(output: Any) -> None:
    clock = InstantClock()
    async with (
        Lagging(()) as broker,
        client_of(broker, clock) as client,
        ClientPublisher(client) as publisher,
    ):
        began = clock.monotonic()
        with raises(NotFound, says=str(output)):
            await publisher.publish(output, Word(word="w"))
        assert LAG_S <= clock.monotonic() - began < LAG_S + 1


async def test_a_declared_output_that_stays_incomplete() -> None:
    async with (
        Lagging(tuple(specs_of(DECLARED))[:1]) as broker,
        client_of(broker, Hasty()) as client,
        ClientPublisher(client) as publisher,
    ):
        with raises(Invalid, says="1 of 2 declared"):
            await publisher.publish(DECLARED, Word(word="w"))


async def test_a_publisher_with_less_time_than_that() -> None:
    """The error does not say that brokers are silent."""
    async with (
        Lagging(()) as broker,
        client_of(broker, SystemClock()) as client,
        ClientPublisher(client, timeout_s=0.3) as publisher,
    ):
        with raises(Unavailable, says="no broker has named a journal of the output within 0.3 s"):
            await publisher.publish(NAME, Word(word="w"))


@pytest.mark.parametrize("kind", [CommittedReader, UncommittedReader])
async def test_a_reader_of_a_journal_that_was_created_just_now(kind: Any) -> None:
    async with (
        Lagging((), (), (WORDS,)) as broker,
        client_of(broker, InstantClock()) as client,
    ):
        broker.journal(NAME).append(b'{"word":"new"}\n')
        batches = kind(client, ReadParams(NAME), Word).batches()
        assert [[e.message.word for e in batch] async for batch in batches] == [["new"]]
