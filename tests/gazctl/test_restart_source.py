"""A journal that is deleted and created again, for shards, readers and publishers of the former one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gazette import CommitFailed
from gazette.client import AppendService
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.cluster.etcd.client import Etcd
from gazette.errors import Corrupt, GazetteError, NotYet
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.runtime.tasks import await_future
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Tally, Word, append, frame, source_spec
from tests.facts import raises
from tests.gazctl.runner import Runner

OLD = [frame("old", clock) for clock in range(1, 101)]
NEW = [frame("new", clock, producer=b"\x02" * 6) for clock in range(1, 201)]
"""Twice as many messages, of the same length: their journal is longer than what was read before."""


async def create_again(broker: BrokerFixture, store: str = "second") -> None:
    """Delete the source, and create it again with another store: nothing of the former life is in it."""
    delete = JournalChange(delete=SOURCE, expect_mod_revision=-1)
    await broker.client.apply_journals([delete])
    spec = source_spec()
    (broker.file_root / store).mkdir()
    fragment = replace(spec.fragment, stores=(f"file:///{store}/",))
    await broker.create(replace(spec, fragment=fragment))


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(
    ("offset", "counted"), [(0, {"old": 100, "new": 200}), (150, {"old": 100, "new": 50})]
)
async def test_a_shard_reads_another_life_of_its_source_only_as_it_was_chosen(
    etcd: Etcd,
    broker: BrokerFixture,
    gazctl: Runner,
    tmp_path: Path,
    running: bool,
    offset: int,
    counted: dict[str, int],
) -> None:
    async def member(number: int) -> ConsumerFixture:
        started = await ConsumerFixture.start(
            etcd, broker, Tally(), tmp_path, id=f"consumer-{number}", lease_ttl_s=60.0
        )
        gazctl.environ["CONSUMER_ADDRESS"] = started.endpoint
        return started

    await broker.create(source_spec(), log_spec(SHARD))
    assert len(NEW[0]) == len(OLD[0])
    consumer = await member(1)
    try:
        await consumer.create(shard_spec(SHARD, SOURCE))
        await append(broker, *OLD)
        await consumer.read_to_heads(SHARD)
        if not running:
            await consumer.stop()
        await create_again(broker)
        await append(broker, *NEW)
        if not running:
            consumer = await member(2)
        error = await consumer.await_failed(SHARD)
        assert "created again" in error
        assert "gazctl shards restart-source" in (await gazctl.ok("shards", "list")).out

        # Unassigned without a choice, it fails again. Nothing of the other life was consumed.
        await gazctl.ok("shards", "unassign", "-l", f"id={SHARD}", "--failed")
        await consumer.await_failed(SHARD)

        begin = str(offset * len(NEW[0]))
        command = ("shards", "restart-source", "-l", f"id={SHARD}", "--source", SOURCE)
        dry = await gazctl.ok(*command, "--offset", begin, "--dry-run")
        assert dry.out == f"{SHARD}\n"
        await gazctl.ok(*command, "--offset", begin)
        await consumer.await_primary(SHARD)
        await consumer.read_to_heads(SHARD)
        assert consumer.store(SHARD).state == counted

        # Case: the choice was for that life. It is not taken again, neither for this one nor another.
        await gazctl.ok("shards", "unassign", "-l", f"id={SHARD}")
        await consumer.await_primary(SHARD)
        await append(broker, frame("more", 300))
        await consumer.read_to_heads(SHARD)
        assert consumer.store(SHARD).state == {**counted, "more": 1}
        await create_again(broker, "third")
        await append(broker, *NEW, *NEW)
        assert "created again" in await consumer.await_failed(SHARD)
    finally:
        await consumer.crash()


async def test_what_cannot_be_a_choice_is_refused(
    broker: BrokerFixture, gazctl: Runner, consumer: ConsumerFixture
) -> None:
    await broker.create(source_spec(), log_spec(SHARD))
    await consumer.create(shard_spec(SHARD, SOURCE))
    command = ("shards", "restart-source", "-l", f"id={SHARD}")
    for more, says in (
        ((), "--source"),
        (("--source", "none", "--offset", "0"), "none"),
        (("--source", SOURCE), "--offset"),
        (("--source", SOURCE, "--offset", "-5"), "--offset"),
        (("--source", SOURCE, "--offset", "0", "--same-bytes"), "--same-bytes"),
    ):
        result = await gazctl(*command, *more)
        assert result.code != 0
        assert says in result.err


@pytest.mark.parametrize("block", [True, False])
async def test_a_reader_does_not_go_on_in_another_life(broker: BrokerFixture, block: bool) -> None:
    await broker.create(source_spec())
    end = await append(broker, *OLD)
    reader = RetryReader(broker.client, ReadParams(SOURCE, block=block))
    async with reader:
        while reader.offset < end:
            await reader.read()
        await create_again(broker)
        await append(broker, *NEW)
        with raises(Corrupt, "created", "created_before", journal=SOURCE, offset=end):
            with contextlib.suppress(NotYet):  # The last answer about the former life.
                await reader.read()
            await reader.read()
        # One that was made with the position of another one, too.
        resumed = RetryReader(broker.client, ReadParams(SOURCE, end, life=reader.life))
        with raises(Corrupt, "created"):
            await resumed.read()
        reader.seek(0)
        content = b""
        while len(content) < len(NEW) * len(NEW[0]):
            content += await reader.read()
        assert content == b"".join(NEW)


async def test_an_append_service_ends_with_the_life_of_its_journal(broker: BrokerFixture) -> None:
    await broker.create(source_spec())
    service = AppendService(broker.client)
    params = AppendParams(SOURCE)
    await await_future(service.append(params, OLD[0]))
    await create_again(broker)
    for _ in range(2):
        with raises(Corrupt, "created", "created_before", journal=SOURCE):
            await await_future(service.append(params, OLD[1]))
    await service.close()
    fresh = AppendService(broker.client)
    assert (await await_future(fresh.append(params, OLD[2]))).commit.begin == 0
    await fresh.close()


async def test_a_transaction_does_not_commit_into_another_life(broker: BrokerFixture) -> None:
    """Its messages are gone with the former journal: an acknowledgement would say that they are there."""
    await broker.create(source_spec())
    async with ClientPublisher(broker.client) as publisher:

        async def publish() -> None:
            async with publisher.transaction() as transaction:
                await transaction.publish(SOURCE, Word(word="x" * 40_000_000))
                await transaction.publish(SOURCE, Word(word="y"))
                await create_again(broker)

        error: Any
        with pytest.raises(CommitFailed) as error:
            await publish()
        assert "created again" in str(error.value)
        with pytest.raises(GazetteError):
            await publisher.publish(SOURCE, Word(word="z"))
    async with ClientPublisher(broker.client) as publisher:
        assert (await publisher.publish(SOURCE, Word(word="z"))).commit.begin == 0
