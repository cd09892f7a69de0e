"""Listings of many journals: when they begin, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from gazette.broker.refresher import AGAIN_PER_S, Refresher
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock


class Listed:
    """A replica that notes when it is listed. ``hangs``: its listing does not end."""

    def __init__(self, clock: ManualClock, interval_s: float = 10.0) -> None:
        self.at: list[float] = []
        self.is_listed = True
        self.hangs = False
        self.given_up = 0
        self.unhealthy: list[Any] = []
        self._clock = clock
        self._interval_s = interval_s

    async def refresh(self) -> None:
        self.at.append(self._clock.monotonic())
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up += 1

    def refresh_interval_s(self, soon_s: float) -> float:
        return min(soon_s, self._interval_s)

    def unhealthy_stores(self) -> Sequence[Any]:
        return self.unhealthy


class Store:
    """A store that a test repairs."""

    url = "file:///store/"

    def __init__(self) -> None:
        self.healthy = asyncio.Event()

    async def wait_healthy(self) -> None:
        await self.healthy.wait()


@pytest.fixture
async def refresher(clock: ManualClock) -> AsyncIterator[Refresher]:
    async with TaskScope("test") as scope:
        refresher = Refresher(clock, scope)
        scope.daemon(refresher.run(), name="refresher")
        yield refresher
        scope.cancel()


async def settle() -> None:
    """Let every task run that can."""
    ready = asyncio.Event()
    for _ in range(12):
        asyncio.get_running_loop().call_soon(ready.set)
        await ready.wait()
        ready.clear()


async def pass_time(clock: ManualClock, seconds: float, step_s: float = 0.05) -> None:
    for _ in range(round(seconds / step_s)):
        clock.advance(step_s)
        await settle()


async def test_a_new_replica_lists_at_once_and_then_at_intervals_that_double(
    refresher: Refresher, clock: ManualClock
) -> None:
    replica, begun = Listed(clock), clock.monotonic()
    refresher.add(replica)
    await settle()
    await pass_time(clock, 30)
    assert [round(at - begun) for at in replica.at] == [0, 1, 3, 7, 15, 25]


async def test_repeated_listings_are_bounded_and_each_gets_its_turn(
    refresher: Refresher, clock: ManualClock
) -> None:
    replicas = [Listed(clock, interval_s=1.0) for _ in range(300)]
    for replica in replicas:
        refresher.add(replica)
    while not all(one.at for one in replicas):
        await settle()
    # Case: first listings wait only for each other's end.
    assert all(len(one.at) == 1 for one in replicas)
    seconds = 9
    await pass_time(clock, seconds)
    counts = [len(one.at) - 1 for one in replicas]
    assert AGAIN_PER_S * (seconds - 2) <= sum(counts) <= AGAIN_PER_S * (seconds + 1)
    assert max(counts) - min(counts) <= 1


async def test_a_burst_begins_some_listings_at_a_time_and_those_that_hang_stop_no_others(
    refresher: Refresher, clock: ManualClock
) -> None:
    replicas = [Listed(clock) for _ in range(100)]
    for replica in replicas:
        replica.hangs, replica.is_listed = True, False
        refresher.add(replica)
    await settle()
    begun = sum(len(one.at) for one in replicas)
    assert 1 <= begun < 50
    # Case: the others do not wait for long.
    await pass_time(clock, 1.5)
    assert [len(one.at) for one in replicas] == [1] * 100


async def test_a_journal_that_was_never_listed_does_not_wait_for_others(
    refresher: Refresher, clock: ManualClock
) -> None:
    """Its appends wait for the first listing."""
    for _ in range(300):
        refresher.add(Listed(clock, interval_s=1.0))
    new = Listed(clock, interval_s=1.0)
    new.is_listed = False
    refresher.add(new)
    await settle()
    await pass_time(clock, 9)
    assert 8 <= len(new.at) <= 10


async def test_a_listing_that_hangs_is_given_up_for_another_one(
    refresher: Refresher, clock: ManualClock
) -> None:
    replica = Listed(clock)
    replica.hangs = True
    refresher.add(replica)
    await settle()
    replica.hangs = False
    refresher.list_now(replica)
    await settle()
    await pass_time(clock, 0.2)
    assert (len(replica.at), replica.given_up) == (2, 1)
    # Case: before its first turn of the loop.
    refresher.list_now(replica)
    refresher.list_now(replica)
    await pass_time(clock, 0.2)
    assert len(replica.at) == 3


async def test_a_removed_replica_is_not_listed(refresher: Refresher, clock: ManualClock) -> None:
    replica = Listed(clock)
    refresher.add(replica)
    await settle()
    await pass_time(clock, 2)
    count = len(replica.at)
    refresher.remove(replica)
    refresher.remove(replica)
    refresher.list_now(replica)
    await pass_time(clock, 60)
    assert len(replica.at) == count
    # Case: one that is being listed.
    replica.hangs = True
    refresher.add(replica)
    await settle()
    refresher.remove(replica)
    await settle()
    assert replica.given_up == 1
    # Case: one that is added again.
    replica.hangs = False
    refresher.add(replica)
    await pass_time(clock, 2)
    assert len(replica.at) >= count + 3


async def test_journals_of_a_store_are_listed_as_soon_as_it_is_healthy(
    refresher: Refresher, clock: ManualClock
) -> None:
    store = Store()
    replicas = [Listed(clock, interval_s=1000.0) for _ in range(3)]
    for replica in replicas:
        replica.unhealthy = [store]
        refresher.add(replica)
    await settle()
    await pass_time(clock, 100)
    counts = [len(one.at) for one in replicas]
    for replica in replicas:
        replica.unhealthy = []
    store.healthy.set()
    await pass_time(clock, 0.2)
    assert [len(one.at) for one in replicas] == [count + 1 for count in counts]
