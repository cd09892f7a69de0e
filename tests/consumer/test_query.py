"""Having a shard answer, from any member, through fail-overs."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette import Application
from gazette.client.shards import ShardChange
from gazette.consumer.query.query import rpc_errors
from gazette.consumer.service import ConsumerService
from gazette.consumer.shard.restarts import LABEL
from gazette.errors import GazetteError, Invalid, Moved, NotFound, Unavailable
from gazette.protocol.label_set import LabelSet
from gazette.protocol.pb import consumer_pb2 as pb
from gazette.protocol.route import Header
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, Tally, append, frame, source_spec
from tests.facts import raises
from tests.support.instant_clock import breathe
from tools.simulation.remote_store import RemoteDatabase

CLOCK = SystemClock()


class Asked(Tally):
    """Answers over gRPC what a word's count is: `/test.Asked/Count`, in the clothes of Stat."""

    service: ConsumerService
    proxied = 0
    hangs = False

    async def initialize(self, service: ConsumerService) -> None:
        self.service = service
        method = grpc.unary_unary_rpc_method_handler(
            self._count, pb.StatRequest.FromString, pb.StatResponse.SerializeToString
        )
        service.grpc_server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Asked", {"Count": method}),)
        )

    async def _count(self, request: pb.StatRequest, context: Any) -> pb.StatResponse:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        async with rpc_errors(context):
            header = Header.from_pb(request.header) if request.HasField("header") else None
            count = await self.count(request.extension.decode(), header=header)
        return pb.StatResponse(read_through={"count": count})

    async def count(self, word: str, **options: Any) -> int:
        def serve(store: Any) -> int:
            if word == "invalid":
                raise Invalid("not a word")
            if word == "exit":
                raise SystemExit(1)
            return int(store.read().get(word, 0))

        async def proxy(channel: grpc.aio.Channel, header: Header) -> int:
            self.proxied += 1
            call = channel.unary_unary(
                "/test.Asked/Count",
                request_serializer=pb.StatRequest.SerializeToString,
                response_deserializer=pb.StatResponse.FromString,
            )
            request = pb.StatRequest(shard=SHARD, header=header.to_pb(), extension=word.encode())
            response = await call(request)
            return int(response.read_through["count"])

        return await self.service.call_shard(SHARD, serve, proxy, **options)


async def two_members(
    start: Start, broker: BrokerFixture, **fields: Any
) -> tuple[ConsumerFixture, Asked, ConsumerFixture, Asked]:
    """Start two members. The first is the primary of a shard that has counted one "a"."""
    database = RemoteDatabase()
    one, two = Asked(database), Asked(database)
    first = await start(one, drain_timeout_s=20.0)
    await first.create(shard_spec(SHARD, SOURCE, log=False, **fields))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    second = await start(two, id="consumer-two")
    await second.await_primary(SHARD)
    return first, one, second, two


async def test_any_member_answers(start: Start, broker: BrokerFixture) -> None:
    _, one, _, two = await two_members(start, broker)
    assert await one.count("a") == 1
    assert one.proxied == 0
    assert await two.count("a") == 1
    assert two.proxied == 1
    assert await two.count("b") == 0


async def test_errors_are_the_same_whoever_is_asked(start: Start, broker: BrokerFixture) -> None:
    _, one, _, two = await two_members(start, broker)
    for application in (one, two):
        with pytest.raises(Invalid, match="not a word"):
            await application.count("invalid")
        with raises(GazetteError, says="SystemExit"):
            await application.count("exit")


async def test_a_query_waits_for_a_fail_over(start: Start, broker: BrokerFixture) -> None:
    first, _, _, two = await two_members(start, broker)
    async with asyncio.timeout(30), TaskScope("test") as scope:
        scope.spawn(first.die(), name="die")
        assert await two.count("a") == 1


async def test_a_query_does_not_wait_for_a_member_that_is_primary_no_more(
    start: Start, broker: BrokerFixture
) -> None:
    """Asked, it does not answer; then the shard is another member's."""
    _, one, second, two = await two_members(start, broker, hot_standbys=1)
    await second.await_standby(SHARD)
    one.hangs = True
    async with asyncio.timeout(30), TaskScope("test") as scope:
        asking = scope.spawn(two.count("a"), name="ask")
        while not two.proxied:
            await breathe()
        await second.promote(SHARD)
        assert await asking == 1


async def test_queries_go_on_while_a_shard_is_handed_over(
    start: Start, broker: BrokerFixture
) -> None:
    first, _, _, two = await two_members(start, broker)
    answers: list[int] = []

    async def ask(application: Asked) -> None:
        while True:
            answers.append(await application.count("a"))
            await CLOCK.sleep(0.002)

    async with TaskScope("queries") as scope:
        for _ in range(3):
            scope.spawn(ask(two), name="ask")
        await first.stop()
        seen = len(answers)
        while len(answers) < seen + 10:
            await CLOCK.sleep(0.002)
        scope.cancel()
    assert set(answers) == {1}
    assert first.service.failure is None


async def test_a_query_of_a_shard_that_has_failed_gives_the_reason_at_once(
    start: Start, broker: BrokerFixture
) -> None:
    """It is not started again, so there is nothing to wait for: the timeout of queries is a minute."""
    first, one, _, two = await two_members(start, broker)
    await append(broker, b"no message\n")
    await first.await_failed(SHARD)
    async with asyncio.timeout(30):
        for application in (one, two):
            with raises(Unavailable, says=f"shard {SHARD} has failed: line is not a message"):
                await application.count("a")


async def test_a_query_waits_for_a_failed_shard_that_is_started_again(
    start: Start, broker: BrokerFixture
) -> None:
    first, one, _, two = await two_members(start, broker, labels=LabelSet.of((LABEL, "3")))
    first.shard(SHARD)._fail(Unavailable("it cannot be reached now"))
    async with asyncio.timeout(30):
        assert await one.count("a") == 1
        assert await two.count("a") == 1


async def test_a_query_reads_through_what_it_is_asked_to(
    start: Start, broker: BrokerFixture
) -> None:
    _, one, _, _ = await two_members(start, broker)
    end = await append(broker, frame("a", 2))
    assert await one.count("a", read_through={SOURCE: end}) == 2


async def test_a_query_that_waits_too_long_for_an_offset_says_how_far_its_shard_has_read(
    start: Start, broker: BrokerFixture
) -> None:
    _, one, _, _ = await two_members(start, broker)
    end = await append(broker, frame("a", 2))
    assert await one.count("a", read_through={SOURCE: end}) == 2
    reason = f"it has read {SOURCE} up to {end}, and {end + 9} is asked for$"
    with pytest.raises(Unavailable) as raised:
        await one.count("a", read_through={SOURCE: end + 9}, timeout_s=0.2)
    assert re.search(reason, raised.value.message)


async def test_a_query_of_a_new_source_is_refused_until_its_shard_reads_that(
    start: Start, broker: BrokerFixture
) -> None:
    application, added = Asked(RemoteDatabase()), "another/source"
    member = await start(application)
    await broker.create(source_spec(added))
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    await member.update(shard_spec(SHARD, SOURCE, added, log=False))
    await member.until(lambda: len(member.shard(SHARD).spec.sources) == 2)
    offsets = {added: await append(broker, frame("b", 1), journal=added)}
    reason = f"it does not read its new source {added} before it is unassigned"
    with raises(Unavailable, says=reason):
        await application.count("b", read_through=offsets, timeout_s=0.2)
    with raises(Unavailable, says=reason):  # At once: nothing bounds this call.
        await member.shards.stat(SHARD, offsets)
    await member.shards.unassign([SHARD])
    assert await application.count("b", read_through=offsets) == 1


async def test_what_was_passed_on_is_not_passed_on_again(
    start: Start, broker: BrokerFixture
) -> None:
    _, _, second, two = await two_members(start, broker)
    header = second.service.resolver.unrouted_header()
    with pytest.raises(Moved):
        await two.count("a", header=header)
    assert two.proxied == 0


async def test_no_shard_no_answer(start: Start) -> None:
    application = Asked(RemoteDatabase())
    member = await start(application, shard_limit=0)
    with pytest.raises(NotFound):
        await application.count("a")
    spec = shard_spec(SHARD, SOURCE, log=False)
    await member.shards.apply_shards([ShardChange(upsert=spec)])
    with pytest.raises(Unavailable, match="NO_SHARD_PRIMARY"):
        await application.count("a", timeout_s=0.1)


def test_applications_may_be_generic() -> None:
    assert issubclass(Asked, Application)


async def test_a_member_that_stops_while_it_is_asked_is_no_error(
    start: Start, broker: BrokerFixture
) -> None:
    """Its threads end before its last call does: the caller goes on to the next primary."""
    first, _, _, two = await two_members(start, broker)
    first.service._queries.close()
    with raises(Unavailable, shard=SHARD):
        await two.count("a", timeout_s=0.5)
    await first.stop()
    assert await two.count("a") == 1


async def test_a_question_that_was_passed_on_is_asked_again_when_its_member_loses_its_lease(
    start: Start, broker: BrokerFixture
) -> None:
    """Regression: the channel is closed then, and its calls are cancelled, though the question is not."""
    _, one, second, two = await two_members(start, broker)
    one.hangs = True
    async with TaskScope("questions") as scope:
        asked = scope.spawn(two.count("a", timeout_s=20.0), name="ask")
        while not two.proxied:
            await breathe()
        one.hangs = False
        peers = second.service.peers
        members = dict(peers._members)
        # As the key space tells it; the member is back in the next step.
        peers.follow({})
        peers.follow(members)
        answer = await asked
    assert answer == 1
    assert two.proxied == 2
