"""What becomes of a shard when its journals come and go while it runs."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.shards import ShardChange
from gazette.consumer.inbox import Inbox
from gazette.consumer.shard.source_reader import check_source
from gazette.errors import Unavailable
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.shard import ReplicaCode, ShardSource
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import LOGS, shard_spec
from tests.consumer.apps import (
    SHARD,
    SOURCE,
    Echo,
    Start,
    ack,
    append,
    frame,
    pending,
    source_spec,
)
from tests.facts import raises
from tests.support.instant_clock import eventually

TARGET = "b/target"
OTHER_PRODUCER = bytes([1, 2, 3, 4, 5, 7])


class Hasty(SystemClock):
    """The machine's clock, on which pauses are shorter than they are asked for."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 40)


CLOCK = Hasty()


@pytest.fixture
def start(start: Start) -> Start:
    """Start members that pause for shorter times."""
    return partial(start, clock=CLOCK)


async def change(broker: BrokerFixture, **changes: Any) -> None:
    await broker.client.apply_journals([JournalChange(**changes, expect_mod_revision=-1)])


async def running(start: Start, broker: BrokerFixture) -> Any:
    member = await start()
    await member.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1), frame("b", 2))
    await member.read_to_heads(SHARD)
    return member


async def test_a_source_that_is_deleted_fails_the_shard(
    start: Start, broker: BrokerFixture
) -> None:
    member = await running(start, broker)
    await change(broker, delete=SOURCE)
    assert f"source {SOURCE} cannot be read" in await member.await_failed(SHARD)
    # Case: created again, it is another journal. That is reported, and not read on.
    # (What the store has of it would be its content again: it is pruned.)
    shutil.rmtree(broker.file_root / "fragments" / SOURCE)
    await change(broker, upsert=source_spec())
    await append(broker, frame("c", 3))
    await member.shards.unassign([SHARD], only_failed=True)
    await member.until(lambda: "created again" in errors(member))
    # Case: a shard with nothing of its own begins with what there is.
    await member.shards.apply_shards([ShardChange(upsert=shard_spec("fresh", SOURCE, log=False))])
    await member.await_failed("fresh")  # (Its store wants a log.)


async def test_a_source_that_is_suspended_is_waited_for(
    start: Start, broker: BrokerFixture
) -> None:
    member = await running(start, broker)
    head = (await member.shards.stat(SHARD)).read_through[SOURCE]
    listed = await broker.client.get_journal(SOURCE)
    spec = listed.spec
    suspended = type(spec)(
        **{
            **{name: getattr(spec, name) for name in spec.__slots__},
            "suspend": Suspend(SuspendLevel.FULL, head),
        }
    )
    await change(broker, upsert=suspended)
    await member.shards.unassign([SHARD])
    await member.until(lambda: code(member) is ReplicaCode.PRIMARY)
    assert await append(broker, frame("c", 3)) > head
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 1, "b": 1, "c": 1}
    assert member.shard(SHARD).failure is None


async def test_a_recovery_log_that_is_deleted_fails_the_shard(
    start: Start, broker: BrokerFixture
) -> None:
    """With the next commit, and until it is there again."""
    member = await running(start, broker)
    await change(broker, delete=f"{LOGS}/{SHARD}")
    await append(broker, frame("c", 3))
    assert f"{LOGS}/{SHARD}" in await member.await_failed(SHARD)


def code(member: Any) -> ReplicaCode | None:
    status = member.status_of(SHARD)
    return None if status is None else status.code


def errors(member: Any) -> str:
    status = member.status_of(SHARD)
    return "" if status is None else "; ".join(status.errors)


async def test_only_a_recovered_acknowledgement_may_find_its_journal_gone(
    start: Start, broker: BrokerFixture
) -> None:
    """It acknowledges what is pruned. A transaction that publishes to it is another matter."""
    await broker.create(source_spec(TARGET))
    first = await start(Echo(TARGET))
    await first.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    await first.stop()
    await change(broker, delete=TARGET)
    second = await start(Echo(TARGET), id="consumer-two")
    await second.await_primary(SHARD)
    stat = await second.read_to_heads(SHARD)
    assert stat[SOURCE] > 0
    assert second.store(SHARD).read() == {"a": 1}
    await append(broker, frame("b", 2))
    text = await second.await_failed(SHARD)
    assert TARGET in text
    assert "not found" in text or "does not exist" in text


PRUNED = "pruned/source"


async def create_source_with_retention(broker: BrokerFixture) -> None:
    spec = source_spec(PRUNED)
    fragment = replace(spec.fragment, length=1 << 10, retention_ns=duration.SECOND)
    await broker.create(replace(spec, fragment=fragment))


async def prune_whole(broker: BrokerFixture) -> None:
    """Prune all of a source once it is stored. Return when its broker knows."""
    # An append begins a new fragment if the last one is long enough.
    await append(broker, journal=PRUNED)
    directory = broker.file_root / "fragments" / PRUNED

    def stored() -> list[Path]:
        found = directory.glob("*") if directory.exists() else ()
        return [path for path in found if not path.name.startswith(".")]

    async def listed() -> list[int]:
        fragments = await broker.client.list_fragments(FragmentsParams(PRUNED))
        return [one.fragment.mod_time for one in fragments]

    await eventually(stored)
    [path] = stored()
    os.utime(path, (1_000, 1_000))  # Older than the retention.
    while await listed() != [1_000]:
        await CLOCK.sleep(0.05)
    path.unlink()
    while await listed():
        await CLOCK.sleep(0.05)


async def test_a_shard_reads_on_behind_a_source_that_was_pruned_whole(
    start: Start, broker: BrokerFixture
) -> None:
    """A broker that has no fragment of a journal answers reads with a head of 0."""
    await create_source_with_retention(broker)
    member = await start()
    await member.create(shard_spec(SHARD, PRUNED))
    words = [frame("a", number) for number in range(1, 40)]
    end = await append(broker, *words, journal=PRUNED)
    await member.read_through(SHARD, {PRUNED: end})
    await prune_whole(broker)
    inbox = Inbox(10, asyncio.get_running_loop())
    await check_source(PRUNED, end, inbox, broker.client, CLOCK)
    assert not inbox.inputs, inbox.get(0)
    former = member.shard(SHARD)
    await member.shards.unassign([SHARD])
    held = member.service.resolver
    await member.until(lambda: held.local_shards.get(SHARD, former) is not former)
    end = await append(broker, frame("b", 50), journal=PRUNED)
    await member.read_through(SHARD, {PRUNED: end})
    assert member.store(SHARD).read() == {"a": 39, "b": 1}


async def test_a_query_that_waits_for_pruned_bytes_says_so(
    start: Start, broker: BrokerFixture
) -> None:
    """The reader does not jump before something is stored behind them: a store may not be mounted."""
    await create_source_with_retention(broker)
    words = [frame("a", number) for number in range(1, 40)]
    end = await append(broker, *words, journal=PRUNED)
    await prune_whole(broker)
    member = await start()
    spec = shard_spec(SHARD, PRUNED)
    await member.create(spec)

    async def ask(timeout_s: float) -> dict[str, int]:
        return await member.service.service.call_shard(  # type: ignore[no-any-return]
            SHARD,
            lambda store: store.read(),
            not_passed_on,
            read_through={PRUNED: end},
            timeout_s=timeout_s,
        )

    with raises(Unavailable, shard=SHARD, says=f"bytes 0 to {end}"):
        await ask(1.0)
    # What the operator is advised to do.
    await member.update(replace(spec, sources=(ShardSource(PRUNED, end),)))
    await member.shards.unassign([SHARD])
    assert await ask(20.0) == {}


async def test_a_minimum_offset_leaves_out_transactions_that_began_before_it(
    start: Start, broker: BrokerFixture
) -> None:
    """Their first messages are gone: a shard that waited for these would consume nothing more."""
    await create_source_with_retention(broker)
    member = await start()
    spec = shard_spec(SHARD, PRUNED)
    await member.create(spec)
    words = [pending("a", number) for number in range(1, 40)]
    other = frame("other", 1, producer=OTHER_PRODUCER)
    end = await append(broker, *words, other, journal=PRUNED)
    await member.read_through(SHARD, {PRUNED: end})
    await prune_whole(broker)
    head = await append(broker, pending("b", 40), journal=PRUNED)
    former = member.shard(SHARD)
    await member.update(replace(spec, sources=(ShardSource(PRUNED, head),)))
    await member.shards.unassign([SHARD])
    held = member.service.resolver
    await member.until(lambda: held.local_shards.get(SHARD, former) is not former)
    end = await append(broker, pending("c", 41), ack(42), journal=PRUNED)
    await member.read_through(SHARD, {PRUNED: end})
    assert member.store(SHARD).read() == {"other": 1, "c": 1}


async def not_passed_on(channel: object, header: object) -> Any:
    raise AssertionError("there is no other member")
