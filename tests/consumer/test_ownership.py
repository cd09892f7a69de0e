"""Fences and assignments: a replaced owner claims nothing, and one that a late claim fenced recovers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.contract.error_cause import ErrorCause
from gazette.consumer.shard.ownership import HEARING_TIMEOUT_S, Ownership
from gazette.consumer.shard.restarts import UNASKED_MAX, RestartReason, Restarts, reason_of
from gazette.errors import Aborted, Closed, Fenced, GazetteError, Unavailable
from gazette.message.uuid import OUTSIDE_TXN
from gazette.protocol.hints import FSMHints
from gazette.protocol.shard import ReplicaCode
from gazette.recoverylog.playback.player import Player
from gazette.runtime.clock import SystemClock
from gazette.runtime.failpoints import armed, hooked
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import SHARD, SOURCE, Gate, Start, Tally, append, frame
from tests.facts import raises
from tests.support.instant_clock import eventually
from tests.support.loop_time import LoopTime
from tools.simulation.remote_store import RemoteDatabase

CLOCK = SystemClock()
FENCED = RestartReason.FENCED
HEARS_LATE_S = 0.5
"""How much later than others a member hears what changed: enough to act upon what is over."""


# --- The question


class Asked:
    """An `Ownership` of a key, as its member knows it."""

    def __init__(self, etcd: Any, revision: int) -> None:
        self.ended = asyncio.Event()
        raw = SimpleNamespace(create_revision=revision)
        assignment: Any = SimpleNamespace(key="/assigned", raw=raw)
        self.ownership = Ownership(etcd, SystemClock(), SHARD, lambda: assignment, self.ended)


async def test_who_is_assigned_may_go_on(etcd: Etcd) -> None:
    await etcd.put("/assigned", b"")
    kv = await etcd.get("/assigned")
    assert kv is not None
    asked = Asked(etcd, kv.create_revision)
    await asked.ownership.require()
    # Case: its status was written since.
    await etcd.put("/assigned", b"more")
    await asked.ownership.require()
    asked.ended.set()
    with raises(Closed, shard="shard-one"):
        await asked.ownership.require()


@pytest.mark.parametrize("again", [False, True])
async def test_who_was_replaced_may_not(etcd: Etcd, again: bool) -> None:
    """Nor if the key is there again: that is another assignment. It waits for hearing of it, not for ever."""
    await etcd.put("/assigned", b"")
    kv = await etcd.get("/assigned")
    assert kv is not None
    await etcd.delete("/assigned")
    if again:
        await etcd.put("/assigned", b"")
    asked = Asked(etcd, kv.create_revision)
    async with TaskScope("asks") as scope:
        task = scope.spawn(expect_closed(asked.ownership), name="asks")
        await etcd.get("/assigned")
        await etcd.get("/assigned")
        assert not task.done()
        asked.ended.set()
        await task
    asked.ended.clear()
    time = LoopTime()
    async with TaskScope("asks") as scope:
        task = scope.spawn(expect_closed(asked.ownership), name="asks")
        await time.pass_until(task.done, HEARING_TIMEOUT_S / 10)
    time.go_on()


async def expect_closed(ownership: Ownership) -> None:
    with raises(Closed, shard=SHARD):
        await ownership.require()


async def test_an_etcd_that_does_not_answer_is_asked_again(etcd: Etcd) -> None:
    await etcd.put("/assigned", b"")
    kv = await etcd.get("/assigned")
    assert kv is not None
    calls: list[str] = []

    class Flaky:
        async def get(self, key: str) -> Any:
            calls.append(key)
            if len(calls) < 3:
                raise Unavailable("no answer")
            return await etcd.get(key)

    await Asked(Flaky(), kv.create_revision).ownership.require()
    assert len(calls) == 3


# --- What becomes of a shard that was fenced


def test_a_fenced_shard_is_restarted_without_being_asked_and_within_bounds() -> None:
    restarts, spec = Restarts(0), shard_spec(SHARD)
    verdicts = [restarts.failed(spec, float(n), FENCED) for n in range(UNASKED_MAX + 1)]
    assert [one.delay_s for one in verdicts] == [1, 2, 4, 8, 16, None]
    assert "still assigned" in verdicts[0].text
    assert "another cluster" in verdicts[-1].text
    assert restarts.count(SHARD, 9.0) == UNASKED_MAX
    # Case: other failures have their own restarts, and do not get those.
    assert restarts.failed(spec, 9.0).delay_s is None
    assert Restarts(1).failed(spec, 9.0).delay_s == 1


def test_being_fenced_is_seen_through_what_it_caused() -> None:
    wrapped = GazetteError("the store's commit failed")
    wrapped.__cause__ = Fenced("counted up")
    assert reason_of(Fenced("counted up"), None) is FENCED
    assert reason_of(wrapped, None) is FENCED
    assert reason_of(GazetteError("something else"), None) is RestartReason.OTHER
    endless = GazetteError("its own cause")
    endless.__cause__ = endless
    assert reason_of(endless, None) is RestartReason.OTHER


def test_a_shard_whose_transaction_was_rolled_back_is_restarted_and_within_bounds() -> None:
    def classify(error: Exception) -> ErrorCause:
        return ErrorCause.ABORTED if isinstance(error, KeyError) else ErrorCause.STORE

    kind = RestartReason.ABORTED
    wrapped = ApplicationFailed("finalize_transaction raised DeadlockDetected")
    for cause in (Aborted("deadlock detected"), KeyError("an error of the store")):
        wrapped.__cause__ = cause
        assert reason_of(cause, classify) is reason_of(wrapped, classify) is kind
    wrapped.__cause__ = ValueError("another one")
    assert reason_of(wrapped, classify) is RestartReason.OTHER
    # Case: what an application's store says itself fails.
    assert reason_of(wrapped, {}.__getitem__) is RestartReason.OTHER  # type: ignore[arg-type]
    restarts, spec = Restarts(0), shard_spec(SHARD)
    verdicts = [restarts.failed(spec, float(n), kind) for n in range(UNASKED_MAX + 1)]
    assert [one.delay_s for one in verdicts] == [1, 2, 4, 8, 16, None]
    assert "in favour of another one" in verdicts[0].text
    assert "in the same order" in verdicts[-1].text
    # Case: each kind has its own bound.
    assert restarts.failed(spec, 9.0, FENCED).delay_s == 1
    assert restarts.failed(spec, 9.0).delay_s is None


# --- Two owners


async def unassign(etcd: Etcd, member: ConsumerFixture) -> None:
    """Unassign the shard as an operator does, without asking its owner."""
    (assignment,) = member.assignments(SHARD)
    assert (await etcd.delete(assignment.key)).deleted


class Opens(Tally):
    """Its first store takes its time."""

    def __init__(self) -> None:
        super().__init__(RemoteDatabase())
        self.gate = Gate()

    def new_store(self, shard: Any, recorder: Any) -> Any:
        store = super().new_store(shard, recorder)
        if len(self.stores) == 1:
            self.gate()
        return store


@pytest.mark.parametrize("heard", [True, False])
async def test_who_lost_the_shard_while_its_store_opened_does_not_fence_the_next_owner(
    start: Start, broker: BrokerFixture, etcd: Etcd, heard: bool
) -> None:
    """Whether its member has heard of that, and stopped it, or has not."""
    application = Opens()
    member = await start(application, watch_delay_s=0.002 if heard else HEARS_LATE_S)
    await member.shards.apply_shards([change(log=False)])
    await eventually(application.gate.entered.is_set)
    before = member.shard(SHARD)
    await unassign(etcd, member)
    if heard:
        await member.until(lambda: member.service.resolver.local_shards.get(SHARD) is not before)
        await member.await_primary(SHARD)
    application.gate.open()
    await append(broker, frame("a", 1))
    await member.until(lambda: member.service.resolver.local_shards.get(SHARD) is not before)
    await member.await_primary(SHARD)
    await before.stop()
    await append(broker, frame("a", 2))
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 2}
    former, present = application.stores
    assert (former.fence, present.fence) == (0, 1)
    assert before.failure is None


def change(**fields: Any) -> Any:
    return ShardChange(upsert=shard_spec(SHARD, SOURCE, **fields))


async def test_who_lost_the_shard_while_its_log_was_played_does_not_fence_the_next_owner(
    start: Start, etcd: Etcd
) -> None:
    member = await start(watch_delay_s=HEARS_LATE_S)
    passed: list[str] = []

    def hook(point: str, detail: str) -> float:
        del detail
        passed.append(point)
        return 0.0

    with armed("recovery.playing=delay:0.1"), hooked(hook):
        await member.shards.apply_shards([change()])
        await eventually(lambda: "recovery.playing" in passed)
        before = member.shard(SHARD)
        await unassign(etcd, member)
        await member.until(lambda: member.service.resolver.local_shards.get(SHARD) is not before)
        await member.await_primary(SHARD)
    assert before.failure is None
    assert passed.count("recovery.playing") == 2
    assert passed.count("recovery.handed_off") == 1


async def test_a_shard_that_a_late_owner_fenced_starts_again_by_itself(
    start: Start, broker: BrokerFixture
) -> None:
    """An owner that was replaced just as it was about to. Nothing is lost or counted twice."""
    database = RemoteDatabase()
    member = await start(Tally(database))
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    await append(broker, frame("a", 1))
    await member.read_to_heads(SHARD)
    before = member.shard(SHARD)
    with database.lock:
        database.row(before.fqn).fence += 1
    await append(broker, frame("a", 2), frame("b", 3))
    text = await member.await_failed(SHARD)
    assert "still assigned" in text
    assert "restarted after 1 s" in text
    await member.until(lambda: is_primary(member))
    await append(broker, frame("a", 4))
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 3, "b": 1}


def is_primary(member: ConsumerFixture) -> bool:
    status = member.status_of(SHARD)
    return status is not None and status.code is ReplicaCode.PRIMARY


async def test_a_restart_is_tried_until_the_assignment_is_as_the_member_knows_it(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    """Its status says that the shard is started again: so it is, also if another owner wrote there since."""
    database = RemoteDatabase()
    member = await start(Tally(database), watch_delay_s=0.1)
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    with database.lock:
        database.row(member.shard(SHARD).fqn).fence += 1
    await append(broker, frame("a", 1))
    await member.await_failed(SHARD)
    # For longer than the restart waits, the key is never as the member has it.
    deadline = CLOCK.monotonic() + 1.5
    while CLOCK.monotonic() < deadline:
        (failed,) = member.assignments(SHARD)
        kv = await etcd.get(failed.key)
        if kv is None:
            break
        # Not once the member has begun again: that key is another one.
        same = Compare.mod_revision(failed.key, "=", kv.mod_revision)
        await etcd.txn((same,), (Op.put(failed.key, kv.value, lease=kv.lease),))
        await CLOCK.sleep(0.01)
    await member.until(lambda: is_primary(member))
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 1}


async def test_a_shard_whose_log_a_late_hand_over_fenced_starts_again_by_itself(
    start: Start, broker: BrokerFixture, tmp_path: Any
) -> None:
    member = await start()
    await member.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await member.read_to_heads(SHARD)
    pool = BlockingPool("late", 1)
    late = Player(
        FSMHints(log=log_spec(SHARD).name), tmp_path / "late", broker.client, SystemClock(), pool
    )
    late.hand_off(7)
    await late.play()
    pool.close()
    await append(broker, frame("a", 2, OUTSIDE_TXN))
    assert "still assigned" in await member.await_failed(SHARD)
    await member.until(lambda: is_primary(member))
    await append(broker, frame("b", 3))
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 2, "b": 1}
