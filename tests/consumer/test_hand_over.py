"""Shards that go from a member which leaves to one that stays."""

from __future__ import annotations

import threading

import pytest

from gazette.cluster.allocator.model import Member, item_key, member_key
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, append, frame
from tests.support.instant_clock import breathe


@pytest.mark.parametrize("standbys", [0, 1, 2])
async def test_a_member_that_leaves_does_not_wait_for_a_replacement(
    start: Start, broker: BrokerFixture, standbys: int
) -> None:
    """Of two members one leaves, whatever number of replicas the shard would like to have."""
    first = await start(drain_timeout_s=3600.0, drain_timeout_max_s=3600.0)
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=standbys))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    second = await start(id="consumer-two")
    if standbys:
        await second.await_standby(SHARD)
    seen: list[list[int]] = []

    def see() -> None:
        seen.append([kv.decoded.slot for kv in second.assignments(SHARD)])

    second.service.key_space.observers.append(see)
    await first.stop()
    await second.await_primary(SHARD)
    assert all(0 in slots for slots in seen), "for a moment it had no primary"
    await append(broker, frame("a", 1), frame("b", 2))
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "b": 1}


async def test_a_member_that_leaves_waits_for_a_standby_that_has_not_caught_up(
    start: Start, broker: BrokerFixture
) -> None:
    first = await start(drain_timeout_s=3600.0, drain_timeout_max_s=3600.0)
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    second = await start(id="consumer-two", player_threads=1)
    # Nothing is played back while its only thread for that is taken.
    gate = threading.Event()
    held = second.service._players.submit(gate.wait)
    await second.until(lambda: len(second.assignments(SHARD)) == 2)
    async with TaskScope("leave") as scope:
        leaving = scope.spawn(first.stop(), name="leave")
        await second.until(lambda: is_exiting(second, "consumer-one"))
        for _ in range(50):
            await breathe()
            assert len(second.assignments(SHARD)) == 2
        await append(broker, frame("b", 2))
        await second.read_to_heads(SHARD)  # Of the one that leaves.
        gate.set()
        await leaving
    await second.await_primary(SHARD)
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "b": 1}
    assert held.done()


async def test_a_member_leaves_although_shards_are_created_all_the_time(
    start: Start, broker: BrokerFixture
) -> None:
    """It is the last one, waits ``drain_timeout_s`` for another, and gets none of the new shards."""
    first = await start(drain_timeout_s=1.0, drain_timeout_max_s=3600.0)
    await first.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    clock, created = SystemClock(), 0
    async with TaskScope("leave") as scope:
        leaving = scope.spawn(first.stop(), name="leave")
        await first.until(lambda: is_exiting(first, "consumer-one"))
        begun = clock.monotonic()
        while not leaving.done():
            spec = shard_spec(f"new-{created}", SOURCE)
            key = item_key(first.service.key_space.root, spec.id)
            await broker.etcd.put(key, spec.to_pb().SerializeToString())
            created += 1
            await clock.sleep(0.05)
            assert clock.monotonic() - begun < 15.0
    assert created > 2
    second = await start(id="consumer-two")
    await second.await_primary(SHARD)
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1}


def is_exiting(member: ConsumerFixture, id: str) -> bool:
    key_space = member.service.key_space
    kv = key_space.get(member_key(key_space.root, "local", id))
    if kv is None:
        return False
    assert isinstance(kv.decoded, Member)
    return kv.decoded.value.exiting()
