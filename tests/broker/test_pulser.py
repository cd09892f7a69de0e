"""Pulses of many journals: when they begin, and how many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from gazette.broker.append.events import Ending, Outcome, SuspendControl
from gazette.broker.pulser import FIRST_PER_S, Pulser
from gazette.broker.settings import BrokerSettings
from gazette.errors import GazetteError
from gazette.protocol.status import Status
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import journal_spec
from gazette.testing.clock import ManualClock
from tests.broker.test_known_head import append, until
from tests.broker.test_refresher import pass_time, settle
from tests.support.fixed_cluster import FixedCluster

OK = Outcome(Ending.COMMITTED)
REFUSED = Outcome(Ending.REFUSED, Status.INSUFFICIENT_JOURNAL_BROKERS)


class Beat:
    """A pulse that ends at once, or when it ``may_end``."""

    def __init__(self, replica: Pulsing) -> None:
        self.invalidated = Latch()
        self.interrupted: GazetteError | None = None
        self._replica = replica
        self._over = asyncio.Event()

    async def run(self) -> Outcome:
        if self._replica.hangs:
            await self._over.wait()
        return self._replica.outcome

    def interrupt(self, reason: GazetteError) -> None:
        self.interrupted = reason
        self.end()

    def end(self) -> None:
        self._over.set()


class Pulsing:
    """A replica that notes when it is pulsed. ``hangs``: its pulses wait for ``end``."""

    def __init__(self, clock: ManualClock, journal: str = "a/journal") -> None:
        self.journal = journal
        self.unlisted_reason = ""
        self.leads = True
        self.in_step = self.rests = False
        self.hangs = False
        self.outcome = OK
        self.beats: list[Beat] = []
        self.at: list[float] = []
        self.controls: list[SuspendControl] = []
        self._clock = clock

    def reload_head(self) -> None: ...

    def pulse(self, control: SuspendControl) -> Beat | None:
        if not self.leads:
            return None
        self.at.append(self._clock.monotonic())
        self.controls.append(control)
        self.beats.append(Beat(self))
        return self.beats[-1]


@pytest.fixture
def replicas(clock: ManualClock) -> dict[str, Pulsing]:
    return {name: Pulsing(clock, name) for name in ("a/journal", *(f"a/{n}" for n in range(110)))}


@pytest.fixture
async def pulser(clock: ManualClock, replicas: dict[str, Pulsing]) -> AsyncIterator[Pulser]:
    def new_pulse(journal: str, control: SuspendControl) -> Beat | None:
        return replicas[journal].pulse(control)

    settings = BrokerSettings(auto_suspend=True, suspend_after_idle_ticks=2)
    async with TaskScope("test") as scope:
        pulser = Pulser(clock, scope, settings, new_pulse)
        scope.daemon(pulser.run(), name="pulser")
        yield pulser
        scope.cancel()


async def test_a_primary_pulses_at_its_start_after_each_change_and_at_intervals(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    replica, begun = replicas["a/journal"], clock.monotonic()
    pulser.add(replica)
    await pass_time(clock, 130, 0.5)
    assert [round(at - begun) for at in replica.at] == [0, 60, 120]
    assert replica.controls[-1:] == [SuspendControl.IF_FLUSHED]
    # Case: a change begins a new count of idle intervals.
    pulser.route_changed(replica)
    await settle()
    assert round(replica.at[-1] - begun) == 130
    assert replica.controls[-1:] == [SuspendControl.NO_RESUME]
    # Case: after a failure it is soon repeated.
    replica.outcome = REFUSED
    pulser.route_changed(replica)
    await settle()
    await pass_time(clock, 8, 0.5)
    assert [round(at - begun) for at in replica.at[-4:]] == [130, 131, 133, 137]


async def test_most_pulses_of_a_replica_at_rest_are_left_out(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    replica = replicas["a/journal"]
    pulser.add(replica)
    await settle()
    replica.rests = replica.in_step = True
    await pass_time(clock, 90, 0.5)
    assert len(replica.at) == 1
    # Case: the pulse that may suspend an idle journal is not left out.
    await pass_time(clock, 60, 0.5)
    assert replica.controls[1:] == [SuspendControl.IF_FLUSHED]
    # Case: an append has brought the peers of a new route in step before the pulse.
    pulser.route_changed(replica)
    await settle()
    assert len(replica.at) == 2
    # Case: it did not complete the first fragment.
    pulser.first_committed(replica)
    await settle()
    assert len(replica.at) == 3
    # Case: it has bytes now, or a peer has gone.
    replica.rests = False
    await pass_time(clock, 61, 0.5)
    assert len(replica.at) == 4


async def test_no_pulse_behind_a_failed_one_is_left_out(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    """It says the reason of a wait again, until all is well."""
    replica, begun = replicas["a/journal"], clock.monotonic()
    replica.outcome = REFUSED
    pulser.add(replica)
    await settle()
    replica.rests = replica.in_step = True
    await pass_time(clock, 8, 0.5)
    assert [round(at - begun) for at in replica.at] == [0, 1, 3, 7]
    replica.outcome = OK
    pulser.route_changed(replica)
    await settle()
    assert len(replica.at) == 5
    pulser.route_changed(replica)
    await settle()
    assert len(replica.at) == 5


async def test_the_peers_of_a_replica_at_rest_are_asked_from_time_to_time(
    clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    replica, begun = replicas["a/journal"], clock.monotonic()
    async with TaskScope("test") as scope:
        pulser = Pulser(clock, scope, BrokerSettings(), lambda _, control: replica.pulse(control))
        scope.daemon(pulser.run(), name="pulser")
        pulser.add(replica)
        await settle()
        replica.rests = replica.in_step = True
        await pass_time(clock, 1210, 1.0)
        scope.cancel()
    assert [round(at - begun) for at in replica.at] == [0, 600, 1200]


async def test_a_follower_pulses_once_it_leads(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    replica = replicas["a/journal"]
    replica.leads = False
    pulser.add(replica)
    await pass_time(clock, 130, 0.5)
    assert not replica.at
    replica.leads = True
    pulser.route_changed(replica)
    await settle()
    assert len(replica.at) == 1


async def test_a_journal_has_one_pulse_at_a_time(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    replica = replicas["a/journal"]
    replica.hangs = True
    pulser.add(replica)
    await settle()
    pulser.route_changed(replica)
    pulser.first_committed(replica)
    await settle()
    assert len(replica.beats) == 1
    # Case: one that was resolved before the change is followed by another one at once.
    replica.beats[0].invalidated.set()
    replica.beats[0].end()
    await settle()
    assert len(replica.beats) == 2
    # Case: one that was resolved after it is not. It may have begun before the first commit.
    replica.beats[1].end()
    await settle()
    assert len(replica.beats) == 2
    pulser.first_committed(replica)
    await settle()
    assert len(replica.beats) == 3
    pulser.first_committed(replica)
    replica.beats[2].end()
    await settle()
    assert len(replica.beats) == 4
    # Case: it is interrupted when its replica ends, and none follows.
    pulser.remove(replica)
    pulser.remove(replica)
    assert replica.beats[3].interrupted is not None
    await pass_time(clock, 130, 0.5)
    assert len(replica.beats) == 4


async def test_first_fragments_are_completed_at_once_up_to_a_bound(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    """Each is an upload. The pulses of other journals do not wait for them."""
    many = [replicas[f"a/{n}"] for n in range(110)]
    for replica in many:
        pulser.add(replica)
    await settle()
    assert all(len(one.at) == 1 for one in many)
    for replica in many[:100]:
        for _ in range(3):
            pulser.first_committed(replica)
    await settle()
    assert sum(len(one.at) - 1 for one in many) == FIRST_PER_S
    pulser.route_changed(many[109])
    await settle()
    assert len(many[109].at) == 2
    await pass_time(clock, 2)
    done = sum(len(one.at) - 1 for one in many[:100])
    assert 2 * FIRST_PER_S <= done <= 3 * FIRST_PER_S + 1
    pulser.remove(many[99])
    await pass_time(clock, 5)
    assert [len(one.at) for one in many[:100]] == [2] * 99 + [1]


async def test_a_burst_begins_some_pulses_at_a_time_and_those_that_hang_stop_no_others(
    pulser: Pulser, clock: ManualClock, replicas: dict[str, Pulsing]
) -> None:
    many = list(replicas.values())
    for replica in many:
        replica.hangs = True
        pulser.add(replica)
    await settle()
    begun = sum(len(one.at) for one in many)
    assert 1 <= begun < len(many) / 2
    # Case: one that ends makes room for the next.
    next(one for one in many if one.at).beats[0].end()
    await settle()
    assert sum(len(one.at) for one in many) == begun + 1
    # Case: the others do not wait for long.
    await pass_time(clock, 1.5)
    assert [len(one.at) for one in many] == [1] * len(many)


async def test_journals_at_rest_have_no_tasks_but_one_for_each_stream(
    cluster: FixedCluster,
) -> None:
    """A follower serves the stream of its primary."""
    before = len(asyncio.all_tasks())
    journals = [f"many/{n}" for n in range(20)]
    for journal in journals:
        cluster.create(journal_spec(journal, replication=3, stores=()), "a", "b", "c")
    for journal in journals:
        await until(partial(cluster.consistent, journal))
        assert (await append(cluster["a"], journal=journal)).ending is Ending.COMMITTED
    await until(lambda: len(asyncio.all_tasks()) <= before + 2 * len(journals))


async def test_a_primary_rests_while_its_peers_are_in_step_and_all_bytes_are_flushed(
    cluster: FixedCluster,
) -> None:
    cluster.create(journal_spec("rests", replication=3), "a", "b", "c")
    replica = cluster["a"].replica("rests")
    await until(lambda: replica.rests)
    assert cluster.consistent("rests")
    assert not cluster["b"].replica("rests").in_step
    # Case: the pulse that follows the first append completes its fragment.
    assert (await append(cluster["a"], b"x", journal="rests")).ending is Ending.COMMITTED
    assert not replica.rests
    await until(lambda: replica.rests)
    # Case: those of a later append wait to be flushed.
    assert (await append(cluster["a"], b"y", journal="rests")).ending is Ending.COMMITTED
    await until(lambda: replica.in_step)
    assert not replica.rests
    # Case: a peer has gone.
    await cluster["c"].stop()
    await until(lambda: not replica.in_step)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FixedCluster]:
    async with await FixedCluster.start(3, tmp_path) as cluster:
        yield cluster
