"""Acknowledgements that a former owner of a shard may not have appended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc

from gazette.client.client import Client
from gazette.consumer.inbox import Inbox
from gazette.consumer.shard.loop_shard_io import LoopShardIO
from gazette.runtime.tasks import TaskScope, await_future, wait_done
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import Fail, LoseReply, StubBroker

JOURNAL = "an/output"


async def test_an_open_outcome_does_not_fail_the_shard() -> None:
    """A broker that loses a replica, or stops, does not say whether the append took place.

    Readers drop the second copy: it has the same clock.
    """
    async with (
        StubBroker() as broker,
        Client(broker.endpoint, clock=InstantClock()) as client,
        TaskScope("test") as scope,
    ):
        broker.on_append(Fail(grpc.StatusCode.UNKNOWN), LoseReply(grpc.StatusCode.UNKNOWN))
        context: Any = SimpleNamespace(client=client, clock=client.clock)
        parts: Any = SimpleNamespace(
            shard=SimpleNamespace(id="a-shard", fqn="a-shard"), scope=scope, ended=asyncio.Event()
        )
        inbox = Inbox(10, asyncio.get_running_loop())
        decoder: Any = None
        shard_io = LoopShardIO(context, parts, inbox, decoder, None, wait_done, {})
        result = await await_future(shard_io.append_recovered(JOURNAL, b"ack"))
        assert broker.content_of(JOURNAL) == b"ackack"
        assert result.commit.end == 6
