"""Faults of a simulation are what they are said to be, and its judge knows what brokers lose by them."""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar

import pytest

from gazette.client.journals import list_journals
from gazette.client.read.reader import Reader, ReadParams
from gazette.cluster.etcd.pb import rpc_pb2
from gazette.testing.simulation.loop import SimNode
from tools.simulation.checker import check
from tools.simulation.run import in_children, quiet
from tools.simulation.scenario import Scenario

SEED = 3


def simulated(tale: Callable[[Scenario], Awaitable[Any]]) -> Any:
    """Return the result of a tale in a simulation without other faults. It runs in a process of its own."""
    (given,) = in_children([partial(_simulate, tale)], 1)
    return given


def _simulate(tale: Callable[[Scenario], Awaitable[Any]]) -> Any:
    quiet()
    scenario, given = Scenario(SEED), []

    async def story() -> None:
        given.append(await tale(scenario))

    scenario.story = story
    scenario.run()
    scenario.world.close()
    assert check(scenario.world.history) == []
    return given[0]


async def leader_is_stopped(scenario: Scenario) -> tuple[bool, bool]:
    process = scenario.world.brokers[scenario.leader()]
    scenario.note_fault("terminate", 10.0, process.host)
    process.terminate(hurried=True)
    await scenario.clock.sleep(10.0)
    history = scenario.world.history
    return process.name in history.evicted, process.name in history.lost_brokers


async def reader_takes_late(scenario: Scenario) -> tuple[int, float]:
    await scenario.append_often(2.0, scenario.plan.hosts)
    (journal, *_), loop = scenario.plan.journals, scenario.world.loop
    node, read, late_s = SimNode(loop, "late"), 0, 0.0

    async def take() -> None:
        nonlocal read, late_s
        client = scenario.new_client(node)
        async with Reader(client, ReadParams(journal, 0, block=True)) as reader:
            await reader.open()
            await scenario.clock.sleep(10.0)
            read = len(await reader.read())
            late_s = loop.now - scenario.world.network.taken["late"]

    await node.spawn(take(), "take")
    return read, late_s


async def leader_is_held(scenario: Scenario) -> tuple[bool, bool]:
    process = scenario.world.brokers[scenario.leader()]
    scenario.hold(process.host, 40.0)
    await scenario.clock.sleep(30.0)
    history = scenario.world.history
    return process.name in history.evicted, process.name in history.lost_brokers


async def leader_cannot_store(scenario: Scenario) -> tuple[bool, bool]:
    world = scenario.world
    await scenario.append_often(2.0, scenario.plan.hosts)
    process = world.brokers[scenario.leader()]
    (bucket,) = world.buckets.values()
    scenario.note_fault("errors of store", 400.0, process.host, after_s=150.0)
    bucket.trouble.error_chance = 1.0
    process.terminate(hurried=True)
    await scenario.clock.sleep(400.0)
    bucket.heal()
    return process.name in world.history.evicted, process.name in world.history.lost_brokers


async def leader_gives_its_lease_back_too_soon(scenario: Scenario) -> tuple[bool, bool]:
    world = scenario.world
    process = world.brokers[scenario.leader()]
    scenario.note_fault("lease is given back", 1.0, process.host, lease=True)
    assert process.lease_id is not None
    world.etcd.store.revoke(rpc_pb2.LeaseRevokeRequest(ID=process.lease_id))
    await scenario.clock.sleep(10.0)
    return process.name in world.history.evicted, process.name in world.history.lost_brokers


@pytest.mark.parametrize(
    ("tale", "lost"),
    [
        (leader_is_stopped, False),
        (leader_is_held, True),
        (leader_cannot_store, True),
        (leader_gives_its_lease_back_too_soon, False),
    ],
)
def test_who_gives_its_lease_back_has_lost_nothing_unless_it_says_so(
    tale: Callable[[Scenario], Awaitable[Any]], lost: bool
) -> None:
    assert simulated(tale) == (True, lost)


async def host_is_reached_again(scenario: Scenario) -> float:
    """Return the seconds that a call takes which begins while its host cannot be reached for 2.5 s."""
    world, host = scenario.world, scenario.plan.hosts[0]
    links, begun = (("op", host), (host, "op")), world.loop.now
    scenario.note_fault("partition", 2.5, host)
    for link in links:
        world.network.block(*link)
    call = scenario.node.spawn(list_journals(world.client(scenario.node, host)), "list")
    await scenario.clock.sleep(2.5)
    for link in links:
        world.network.unblock(*link)
    await call
    return world.loop.now - begun


def test_what_a_reader_takes_late_is_judged_by_when_it_had_arrived() -> None:
    read, late_s = simulated(reader_takes_late)
    assert read
    assert 5.0 < late_s <= 10.0


def test_a_connection_that_is_begun_in_a_partition_is_made_soon_after_it() -> None:
    assert 2.5 < simulated(host_is_reached_again) < 4.0


async def journal_is_created_again_unseen(
    scenario: Scenario, compacts: bool
) -> tuple[list[int], list[int]]:
    """Return the lives of the journal that one broker saw while its watch was held, and behind that."""
    world, journal = scenario.world, next(iter(scenario.plan.journals))
    host, others = world.assigned(journal)[0], list(scenario.plan.hosts)
    others.remove(host)
    service = world.brokers[host].service
    assert service is not None
    context = service.context
    held: list[int] = []
    after: list[int] = []
    steps = held

    def life() -> int:
        item = context.state.item(journal)
        return 0 if item is None else item.raw.create_revision

    held.append(life())
    context.key_space.observers.append(lambda: steps.append(life()))
    streams = world.hold_watches(host)
    await scenario.recreate_now(journal, world.client(scenario.node, *others))
    await scenario.clock.sleep(5.0)
    if compacts:
        world.compact_etcd()
    steps = after
    for stream in streams:
        stream.release()
    await scenario.clock.sleep(10.0)
    return held, after


@pytest.mark.parametrize("compacts", [False, True])
def test_what_a_broker_with_a_lagging_watch_missed_comes_in_one_step(compacts: bool) -> None:
    held, after = simulated(partial(journal_is_created_again_unseen, compacts=compacts))
    assert len(held) == 1, "it heard of changes while its watch was held"
    assert after[0] > held[0], "it saw that the journal was gone"


def test_a_fault_that_takes_long_is_over_before_anything_is_judged() -> None:
    assert in_children([_with_a_long_fault], 1).__next__() == [True]


def _with_a_long_fault() -> list[bool]:
    quiet()
    over: list[bool] = []
    scenario: Any = Scenario(SEED)

    async def fault() -> None:
        await scenario.clock.sleep(900.0)
        over.append(scenario.writing)

    scenario.story = None
    scenario.faults = lambda: [fault]
    scenario.rng.choice = lambda options: options[0]
    scenario.run()
    scenario.world.close()
    return over


class _Leftover:
    """Garbage in a cycle, as a channel of gRPC is. Its finalizer says in which process it ran."""

    ran: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.ran.append(os.getpid())


def _collected() -> list[int]:
    gc.collect()
    return list(_Leftover.ran)


def test_a_child_does_not_finalize_what_its_parent_left() -> None:
    """Finalizers of gRPC wait without end for threads that a fork does not have."""
    gc.collect()
    _Leftover()
    assert list(in_children([_collected], 1)) == [[]]
    assert _collected() == [os.getpid()]
