"""Acknowledgements that a former owner of a shard may not have appended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc

from gazette.client.client import Client
from gazette.client.rpc.channel import ChannelSettings
from gazette.consumer.inbox import Inbox
from gazette.consumer.shard.loop_shard_io import LoopShardIO
from gazette.protocol.status import Status
from gazette.runtime.tasks import TaskScope, await_future, wait_done
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import Fail, LoseReply, Reply, StubBroker

JOURNAL = "an/output"


async def appended(broker: StubBroker) -> Any:
    """Return the result of appending a recovered acknowledgement."""
    settings = ChannelSettings(silence_s=0)  # On this clock every peer is silent for minutes.
    async with (
        Client(broker.endpoint, clock=InstantClock(), channel_settings=settings) as client,
        TaskScope("test") as scope,
    ):
        context: Any = SimpleNamespace(client=client, clock=client.clock)
        parts: Any = SimpleNamespace(
            shard=SimpleNamespace(id="a-shard", fqn="a-shard"), scope=scope, ended=asyncio.Event()
        )
        inbox = Inbox(10, asyncio.get_running_loop())
        decoder: Any = None
        shard_io = LoopShardIO(context, parts, inbox, decoder, None, wait_done, {})
        return await await_future(shard_io.append_recovered(JOURNAL, b"ack"))


async def test_an_open_outcome_does_not_fail_the_shard() -> None:
    """A broker that loses a replica, or stops, does not say whether the append took place.

    Readers drop the second copy: it has the same clock.
    """
    async with StubBroker() as broker:
        broker.on_append(Fail(grpc.StatusCode.UNKNOWN), LoseReply(grpc.StatusCode.UNKNOWN))
        assert (await appended(broker)).commit.end == 6
        assert broker.content_of(JOURNAL) == b"ackack"


async def test_a_journal_counts_as_gone_only_after_some_time() -> None:
    """A broker may not know a new journal yet. Without the acknowledgement, its messages would be lost."""
    async with StubBroker() as broker:
        broker.on_append(*[Reply(Status.JOURNAL_NOT_FOUND)] * 3)
        assert (await appended(broker)).commit.end == 3
        assert broker.content_of(JOURNAL) == b"ack"
        broker.missing.add(JOURNAL)
        assert await appended(broker) is None


async def test_a_journal_whose_head_must_be_confirmed_is_waited_for() -> None:
    """An operator confirms the head after all of the journal's brokers were lost. The shard then goes on."""
    async with StubBroker() as broker:
        broker.on_append(*[Reply(Status.INDEX_HAS_GREATER_OFFSET)] * 3)
        assert (await appended(broker)).commit.end == 3
