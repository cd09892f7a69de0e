"""The life of shards, on a real etcd and a real broker."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import Compare, Op
from gazette.consumer.shard import hints_store as hints_store_module
from gazette.consumer.shard import primary as primary_module
from gazette.consumer.shard import shard as shard_module
from gazette.consumer.shard.hints_store import store_recorded_hints, store_recovered_hints
from gazette.errors import Closed, GazetteError, NotAllowed, NotFound, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.hints import decode_hints
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ReplicaStatus, ShardSource
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture, log_spec, shard_spec
from tests.consumer.apps import (
    OTHER,
    SHARD,
    SOURCE,
    Echo,
    Gate,
    Start,
    Tally,
    append,
    frame,
    pending,
    source_spec,
)
from tests.support.instant_clock import eventually
from tests.support.left_scratch import left_scratch
from tools.simulation.remote_store import RemoteDatabase

TARGET = "b/target"
CLOCK = SystemClock()


# --- Recovery


async def test_a_shard_recovers_from_its_log(start: Start, broker: BrokerFixture) -> None:
    first = await start()
    await first.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a"), frame("b", 1), frame("b", 1), frame("b", 2))
    await first.read_to_heads(SHARD)
    assert first.store(SHARD).read() == {"a": 1, "b": 2}
    await first.stop()
    assert list(first.service.settings.scratch_directory.iterdir()) == []
    # What a member that was killed has left is removed by the next one.
    parent = first.service.settings.scratch_directory
    (killed,) = await asyncio.to_thread(left_scratch, parent, SHARD)
    assert killed.exists()
    second = await start(id="consumer-two", scratch_directory=parent)
    await second.await_primary(SHARD)
    assert not killed.exists()
    end = await append(broker, frame("b", 2), frame("c", 3))
    stat = await second.read_to_heads(SHARD)
    assert stat == {SOURCE: end}
    assert second.store(SHARD).read() == {"a": 1, "b": 2, "c": 1}


async def test_a_shard_without_a_log_keeps_its_state_elsewhere(
    start: Start, broker: BrokerFixture
) -> None:
    application = Tally(RemoteDatabase())
    first = await start(application)
    await first.create(shard_spec(SHARD, SOURCE, log=False))
    await append(broker, frame("a"), frame("b", 1))
    await first.read_to_heads(SHARD)
    await first.delete(SHARD)
    await first.until(lambda: not first.assignments(SHARD))
    await eventually(lambda: application.stores[0].destroyed)
    await first.create(shard_spec(SHARD, SOURCE, log=False))
    await append(broker, frame("b", 2))
    await first.read_to_heads(SHARD)
    assert first.store(SHARD).read() == {"a": 1, "b": 2}
    assert len(application.stores) == 2


async def test_a_deleted_shard_that_is_written_again_at_once_starts_again(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    application = Tally()
    member = await start(application)
    spec = shard_spec(SHARD, SOURCE)
    await member.create(spec)
    await append(broker, frame("a"))
    await member.read_to_heads(SHARD)
    before = member.shard(SHARD)
    key = before.fqn
    # In one step of the key space: no member sees that the shard was gone.
    await etcd.delete(key)
    await etcd.put(key, spec.to_pb().SerializeToString())
    await member.until(
        lambda: member.service.resolver.local_shards.get(SHARD) not in (None, before)
    )
    await append(broker, frame("a"))
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 2}
    assert len(application.stores) == 2


async def test_a_hot_standby_takes_over_from_a_member_that_died(
    start: Start, broker: BrokerFixture
) -> None:
    first = await start()
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    second = await start(id="consumer-two")
    await second.await_standby(SHARD)
    await append(broker, frame("a", 1), frame("b", 2))
    await second.read_to_heads(SHARD)  # Asked of the primary, through this member.
    assert second.shard(SHARD).store is None
    await first.die()
    await second.await_primary(SHARD)
    await append(broker, frame("b", 2), frame("c", 3))
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "b": 1, "c": 1}


async def test_a_member_that_leaves_hands_its_shards_over(
    start: Start, broker: BrokerFixture
) -> None:
    """Without standbys, too: the shard is recovered elsewhere before it is given up."""
    first = await start(drain_timeout_s=20.0)
    await first.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    second = await start(id="consumer-two")
    seen: list[int] = []
    second.service.key_space.observers.append(lambda: seen.append(len(second.assignments(SHARD))))
    await first.stop()
    await second.await_primary(SHARD)
    assert max(seen) == 2, "it was given up before the other was ready"
    assert 0 not in seen
    await append(broker, frame("a", 1), frame("b", 2))
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "b": 1}


async def test_a_promotion_without_consent_loses_and_repeats_nothing(
    start: Start, broker: BrokerFixture
) -> None:
    """The primary is busy with a transaction when its assignment goes away."""
    await broker.create(source_spec(TARGET))
    gate = Gate()
    busy = Echo(TARGET, on_word=lambda word: gate() if word == "busy" else None)
    first = await start(busy)
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    second = await start(Echo(TARGET), id="consumer-two")
    await second.await_standby(SHARD)
    await append(broker, frame("a", 1), frame("busy", 2))
    await eventually(gate.entered.is_set)
    await second.promote(SHARD)
    gate.open()
    await append(broker, frame("b", 3))
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "busy": 1, "b": 1}
    reader = await start(Tally(RemoteDatabase()), id="consumer-three", root="/gazette/consumers/b")
    await reader.create(shard_spec(OTHER, TARGET, log=False))
    await reader.read_to_heads(OTHER)
    assert {k: v for k, v in reader.store(OTHER).read().items() if k} == {"a": 1, "busy": 1, "b": 1}


# --- Failures end as FAILED, with a text


class Fails(Tally):
    """Raises something somewhere."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def _at(self, where: str) -> None:
        if self.where == where:
            raise self.error

    def new_store(self, shard: Any, recorder: Any) -> Any:
        self._at("new_store")
        store: Any = super().new_store(shard, recorder)
        if self.where == "restore":
            store.restore_checkpoint = lambda shard: self._at("restore")
        return store

    def message_type_of(self, journal: Any) -> Any:
        self._at("type")
        return super().message_type_of(journal)

    def consume_message(self, *args: Any) -> None:
        self._at("consume")
        super().consume_message(*args)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


@contextmanager
def unheard() -> Iterator[None]:
    """Keep lines about shards from pytest: what it captures must be UTF-8 to get out of a worker."""
    shard_module.log.propagate = False
    try:
        yield
    finally:
        shard_module.log.propagate = True


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        ("new_store", ValueError("no room"), "new_store raised ValueError: no room"),
        ("new_store", StopIteration(), "new_store raised StopIteration"),
        ("restore", OSError("gone"), "Store.restore_checkpoint raised OSError: gone"),
        ("type", KeyError("schema"), "'schema'"),
        ("consume", ValueError("odd"), "consume_message raised ValueError: odd (line="),
        ("consume", SystemExit(3), "consume_message raised SystemExit: 3"),
        ("consume", asyncio.CancelledError(), "consume_message raised CancelledError"),
        ("consume", Closed("a connection"), "a connection"),
        ("consume", ValueError("file \udcff"), "file \\udcff"),
        ("consume", ValueError("x" * 9000), "xxx ...[truncated]"),
        ("consume", Unprintable(), "consume_message raised Unprintable"),
    ],
)
async def test_an_error_of_the_application_fails_its_shard(
    start: Start,
    broker: BrokerFixture,
    where: str,
    error: BaseException,
    text: str,
) -> None:
    with unheard():
        application = Fails(where, error)
        member = await start(application)
        await append(broker, frame("a", 1))
        await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
        assert text in await member.await_failed(SHARD)
    assert member.service.failure is None, "the member broke with its shard"
    # As operators repair it.
    application.where = ""
    await member.shards.unassign([SHARD], only_failed=True)
    await member.until(lambda: _code(member) is ReplicaCode.PRIMARY)
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 1}


def _code(member: ConsumerFixture) -> ReplicaCode | None:
    status = member.status_of(SHARD)
    return None if status is None else status.code


async def test_a_malformed_message_is_named(start: Start, broker: BrokerFixture) -> None:
    member = await start()
    begin = await append(broker, frame("a", 1))
    end = await append(broker, b"{]\n")
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
    assert f"journal={SOURCE}, begin={begin}, end={end}" in await member.await_failed(SHARD)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sources": (ShardSource("no/such"),)}, "source journal no/such does not exist"),
        ({"recovery_log_prefix": "no/logs"}, "recovery log no/logs/shard-one does not exist"),
        ({"recovery_log_prefix": "not"}, "expected label content-type value"),
    ],
)
async def test_a_journal_that_is_missing_or_wrong_is_named(
    start: Start, broker: BrokerFixture, fields: dict[str, Any], text: str
) -> None:
    await broker.create(
        journal_spec(f"not/{SHARD}", labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))
    )
    member = await start()
    spec = replace(shard_spec(SHARD, SOURCE), **fields)
    await member.shards.apply_shards([ShardChange(upsert=spec)])
    assert text in await member.await_failed(SHARD)


async def test_a_journal_that_a_broker_has_not_heard_of_yet_is_asked_for_again(
    start: Start,
) -> None:
    """Brokers learn of a new journal one after the other, and some are away for a moment."""
    member = await start()
    client = member.service.client
    get, asked = client.get_journal, []
    found: set[str] = set()

    async def hesitant(name: str) -> Any:
        if name in found:
            return await get(name)  # By what reads it, once the shard knows it.
        asked.append(name)
        if asked.count(name) == 1:
            raise NotFound("journal not found", journal=name)
        if asked.count(name) == 2:
            raise Unavailable("no server is there")
        found.add(name)
        return await get(name)

    client.get_journal = hesitant
    await member.create(shard_spec(SHARD, SOURCE))
    assert asked.count(SOURCE) == 3
    assert asked.count(f"recovery/test/{SHARD}") == 3


async def test_what_is_cancelled_unasked_does_not_silence_a_shard(start: Start) -> None:
    member = await start(Tally(RemoteDatabase()))
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waited.cancel()

    async def wait() -> None:
        await waited

    await member.shard(SHARD)._fail_on_error(wait())
    assert "cancelled unasked" in await member.await_failed(SHARD)


@pytest.mark.parametrize("carried", [True, False])
async def test_a_failed_standby_that_becomes_primary_is_not_silent(
    start: Start, broker: BrokerFixture, etcd: Etcd, carried: bool
) -> None:
    """A promotion takes its status along. Assigned without one, it is a new attempt."""
    first = await start()
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    second = await start(id="consumer-two")
    await second.await_standby(SHARD)
    scratch = second.service.settings.scratch_directory
    # Its replica is made again, on a disk without space for files.
    (standby,) = [kv for kv in second.assignments(SHARD) if kv.decoded.slot]
    shutil.rmtree(scratch)
    await etcd.delete(standby.key)
    await second.until(lambda: _own_code(second) is ReplicaCode.FAILED)
    scratch.mkdir()
    (primary, failed) = sorted(second.assignments(SHARD), key=lambda kv: kv.decoded.slot)
    target = failed.key.rpartition("#")[0] + "#0"
    value = failed.raw.value if carried else b""
    result = await etcd.txn(
        (Compare.mod_revision(failed.key, "=", failed.raw.mod_revision),),
        (
            Op.delete(primary.key),
            Op.delete(failed.key),
            Op.put(target, value, lease=failed.raw.lease),
        ),
    )
    assert result.succeeded
    await second.service.key_space.wait_for_revision(result.header.revision)
    if carried:
        assert "No such file" in await second.await_failed(SHARD)
    else:
        await second.await_primary(SHARD)
        await append(broker, frame("a", 1))
        await second.read_to_heads(SHARD)


def _own_code(member: ConsumerFixture) -> ReplicaCode | None:
    status = member.status_of(SHARD, of_primary=False)
    return None if status is None else status.code


async def test_the_store_of_a_failed_shard_answers_nothing(
    start: Start, broker: BrokerFixture
) -> None:
    application = Fails("consume", ValueError("odd"))
    member = await start(application)
    await member.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await member.await_failed(SHARD)
    with pytest.raises(GazetteError, match="SHARD_STOPPED"):
        await member.shards.stat(SHARD)


async def test_the_status_only_rises_and_a_failure_stays(start: Start, etcd: Etcd) -> None:
    member = await start()
    await member.create(shard_spec(SHARD, SOURCE))
    shard = member.shard(SHARD)
    await shard._update_status(ReplicaStatus(ReplicaCode.BACKFILL, ()))
    assert _code(member) is ReplicaCode.PRIMARY
    await shard._update_status(ReplicaStatus(ReplicaCode.FAILED, ("one",)))
    await shard._update_status(ReplicaStatus(ReplicaCode.FAILED, ("one",)))
    await shard._update_status(ReplicaStatus(ReplicaCode.PRIMARY, ()))
    assert member.status_of(SHARD) == ReplicaStatus(ReplicaCode.FAILED, ("one",))


# --- Slow callbacks


async def test_a_callback_that_does_not_return_holds_up_its_own_shard_only(
    start: Start, broker: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "STOP_TIMEOUT_S", 0.2)
    await broker.create(source_spec("slow/source"), log_spec(OTHER))
    gate = Gate()
    application = Tally(on_word=lambda word: gate() if word == "slow" else None)
    member = await start(application, lease_ttl_s=10.0, drain_timeout_s=0.0)
    await member.create(shard_spec(SHARD, SOURCE), shard_spec(OTHER, "slow/source"))
    await append(broker, frame("slow"), frame("more"), journal="slow/source")
    await eventually(gate.entered.is_set)
    slow = member.store(OTHER)
    revision = member.service.key_space.header.revision
    # The lease is renewed, and the other shard goes on.
    session = member.service.membership.session
    assert session is not None
    for count in range(1, 3):
        expires_at = session.lease.expires_at
        await append(broker, frame("a"))
        await member.read_to_heads(SHARD)
        assert member.store(SHARD).read() == {"a": count}
        while session.lease.expires_at == expires_at:
            await CLOCK.sleep(0.05)
    assert member.service.key_space.header.revision == revision, "the member came back, or left"
    async with asyncio.timeout(30):
        await member.stop()
    assert slow.read() == {}
    gate.open()
    await eventually(lambda: not any("shard-two" in one.name for one in threading.enumerate()))
    assert "more" not in slow.state, "went on consuming after it was stopped"


class HeldOpening(Tally):
    """Holds the thread of a shard that opens its store, after all that may stop it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def poison_policy(self, shard: Any) -> None:
        self.gate()


async def test_a_shard_that_is_stopped_while_it_opens_its_store_runs_no_transaction(
    start: Start, broker: BrokerFixture
) -> None:
    """Its thread would wait for messages for ever, and its store would never be released."""
    application = HeldOpening()
    member = await start(application, drain_timeout_s=0.0)
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
    await append(broker, frame("a"))
    await eventually(application.gate.entered.is_set)
    shard = member.shard(SHARD)
    primary = shard._primary
    assert primary is not None
    async with TaskScope("test") as scope:
        # The stop takes a moment, as by a query that goes on.
        opened = asyncio.Event()
        shard._reports.spawn(_despite_a_cancellation(opened), name="query")
        stop = scope.spawn(shard.stop(), name="stop")
        await eventually(shard.ended.is_set)
        application.gate.open()
        await eventually(lambda: primary._transactor is not None)
        opened.set()
        await stop
        await eventually(lambda: not primary.thread.alive)
    assert application.calls == []


async def _despite_a_cancellation(event: asyncio.Event) -> None:
    try:
        await event.wait()
    finally:
        await event.wait()


async def test_a_query_keeps_the_store_until_it_ends(start: Start, broker: BrokerFixture) -> None:
    application = Tally(RemoteDatabase())
    member = await start(application)
    await member.create(shard_spec(SHARD, SOURCE, log=False))
    gate = Gate()

    def serve(store: Any) -> bool:
        gate()
        return bool(store.destroyed)

    async def proxy(channel: Any, header: Any) -> bool:
        raise AssertionError

    async with asyncio.timeout(30), TaskScope("test") as scope:
        query = scope.spawn(member.service.service.call_shard(SHARD, serve, proxy), name="query")
        await eventually(gate.entered.is_set)
        await member.delete(SHARD)
        await member.until(lambda: not member.assignments(SHARD))
        await CLOCK.sleep(0.05)
        gate.open()
        assert await query is False
    await eventually(lambda: application.stores[0].destroyed)


# --- Specifications


async def test_min_offset_is_where_reading_begins(start: Start, broker: BrokerFixture) -> None:
    begin = await append(broker, frame("before"))
    spec = replace(shard_spec(SHARD), sources=(ShardSource(SOURCE, begin),))
    member = await start()
    await member.create(spec)
    # Nothing before it is going to be read, so no reader has to wait for it.
    assert await member.read_to_heads(SHARD) == {SOURCE: begin}
    end = await append(broker, frame("after"))
    assert await member.read_to_heads(SHARD) == {SOURCE: end}
    assert member.store(SHARD).read() == {"after": 1}


async def test_a_disabled_shard_is_given_up_and_taken_again(
    start: Start, broker: BrokerFixture
) -> None:
    member = await start()
    spec = shard_spec(SHARD, SOURCE)
    await member.create(spec)
    await append(broker, frame("a"))
    await member.read_to_heads(SHARD)
    await member.update(replace(spec, disable=True))
    await member.until(lambda: not member.assignments(SHARD))
    with pytest.raises(GazetteError, match="NO_SHARD_PRIMARY"):
        await member.shards.stat(SHARD)
    await member.update(spec)
    await member.await_primary(SHARD)
    await append(broker, frame("a"))
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 2}


async def test_durations_take_effect_with_the_next_transaction(
    start: Start, broker: BrokerFixture
) -> None:
    member = await start()
    spec = shard_spec(SHARD, SOURCE, max_txn_duration_ns=3600 * 10**9)
    await member.create(spec)
    await append(broker, frame("a", 1))
    await member.read_to_heads(SHARD)
    # A transaction would now wait an hour for a span to end, unless it must not.
    await member.update(replace(spec, disable_wait_for_ack=True))
    await append(broker, frame("b", 2))
    await member.read_to_heads(SHARD)
    end = await append(broker, frame("c", 3), pending("d", 4))
    async with asyncio.timeout(60):
        await member.read_through(SHARD, {SOURCE: end})
    assert member.store(SHARD).read() == {"a": 1, "b": 1, "c": 1}


async def test_a_changed_log_is_that_of_the_next_life(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    """Hints of a running shard are of the log that it writes, whatever its specification says now."""
    member = await start(hints_interval_s=0.05)
    spec = shard_spec(SHARD, SOURCE)
    await member.create(spec)
    await member.update(replace(spec, recovery_log_prefix="other/logs"))
    await append(broker, frame("a", 1))
    await member.read_to_heads(SHARD)

    async def stored() -> Any:
        return await etcd.get(spec.hint_primary_key)

    while (kv := await stored()) is None:
        await CLOCK.sleep(0.02)
    assert decode_hints(kv.value).log == spec.recovery_log


async def test_a_changed_source_is_read_from_the_next_promotion_on(
    start: Start, broker: BrokerFixture
) -> None:
    """Beside the checkpoint, which keeps what was read of the others."""
    await broker.create(source_spec(TARGET))
    member = await start()
    spec = shard_spec(SHARD, SOURCE)
    await member.create(spec)
    await append(broker, frame("a", 1))
    await member.read_to_heads(SHARD)
    await member.update(replace(spec, sources=(*spec.sources, ShardSource(TARGET))))
    other = await broker.client.append(AppendParams(TARGET), frame("z", 1))
    await append(broker, frame("b", 2))
    await member.read_through(SHARD, {SOURCE: other.commit.end})
    while "b" not in member.store(SHARD).read():
        await CLOCK.sleep(0.02)
    assert member.store(SHARD).read() == {"a": 1, "b": 1}
    await member.stop()
    second = await start(id="consumer-two")
    await second.await_primary(SHARD)
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "b": 1, "z": 1}


async def test_a_source_may_be_read_with_a_metadata_segment(
    start: Start, broker: BrokerFixture
) -> None:
    member = await start()
    await member.create(shard_spec(SHARD, f"{SOURCE};one/more"))
    end = await append(broker, frame("a", 1))
    offsets = await member.read_through(SHARD, {f"{SOURCE};one/more": end})
    assert offsets == {f"{SOURCE};one/more": end}


# --- Hints


async def test_the_horizon_is_known_without_hints(start: Start, broker: BrokerFixture) -> None:
    """After every commit, however seldom hints are stored; and without a word to the shard."""
    member = await start(hints_interval_s=3600.0)
    await member.create(shard_spec(SHARD, SOURCE))
    await member.await_primary(SHARD)
    before = member.shard(SHARD).horizon_bytes
    assert before == 0
    for number in range(3):
        # Each state is longer than the one before, and all there is to recover.
        await append(broker, frame(f"word {number} " * 100, number + 1))
        await member.read_to_heads(SHARD)
        while (known := member.shard(SHARD).horizon_bytes or 0) <= before:
            await CLOCK.sleep(0.02)
        before = known
    assert before > 2000


async def test_hints_are_stored_from_time_to_time_and_kept_at_promotions(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    spec = shard_spec(SHARD, SOURCE)
    first = await start(hints_interval_s=0.05)
    await first.create(spec)
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)

    async def hints_with_files() -> Any:
        while True:
            kv = await etcd.get(spec.hint_primary_key)
            if kv is not None and decode_hints(kv.value).live_nodes:
                return kv
            await CLOCK.sleep(0.02)

    kv = await hints_with_files()
    # An idle shard writes nothing: the key stays as it is over several intervals.
    await CLOCK.sleep(0.3)
    idle = await etcd.get(spec.hint_primary_key)
    assert idle is not None
    assert idle.version - kv.version <= 1
    await first.stop()
    second = await start(id="consumer-two")
    await second.await_primary(SHARD)
    backups = [await etcd.get(key) for key in spec.hint_backup_keys]
    assert [one is not None for one in backups] == [True, True]
    # The first owner recovered nothing. Its first hints filled all slots, else the log could not be pruned.
    assert all(decode_hints(one.value).live_nodes for one in backups)  # type: ignore[union-attr]
    got = await second.shards.get_hints(SHARD)
    assert got.primary is not None
    assert len(got.backups) == 2
    # Damaged hints are passed over, if others are there.
    await second.stop()
    await etcd.put(spec.hint_primary_key, b"{")
    third = await start(id="consumer-three")
    await third.await_primary(SHARD)
    assert third.store(SHARD).read() == {"a": 1}


async def test_a_shard_serves_before_the_hints_that_it_recovered_from_are_stored(
    start: Start, broker: BrokerFixture, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd may be slow to take them. Until it has, there are those that the shard recovered from."""
    spec = shard_spec(SHARD, SOURCE)
    first = await start(hints_interval_s=0.05)
    await first.create(spec)
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    while (kv := await etcd.get(spec.hint_primary_key)) is None:
        await CLOCK.sleep(0.02)
    await first.stop()
    stored = asyncio.Event()

    async def slow(*arguments: Any) -> None:
        await stored.wait()
        await store_recovered_hints(*arguments)

    monkeypatch.setattr(primary_module, "store_recovered_hints", slow)
    second = await start(id="consumer-two", hints_interval_s=0.05)
    await second.await_primary(SHARD)
    await append(broker, frame("b", 2))
    await second.read_to_heads(SHARD)
    assert second.store(SHARD).read() == {"a": 1, "b": 1}
    # New hints do not wait for them.
    again = kv
    while again.mod_revision == kv.mod_revision:
        await CLOCK.sleep(0.02)
        found = await etcd.get(spec.hint_primary_key)
        assert found is not None
        again = found
    stored.set()


async def test_a_shard_does_not_start_from_nothing_when_all_its_hints_are_damaged(
    start: Start, etcd: Etcd
) -> None:
    spec = shard_spec(SHARD, SOURCE)
    await etcd.put(spec.hint_primary_key, b"")
    member = await start()
    await member.shards.apply_shards([ShardChange(upsert=spec)])
    assert spec.hint_primary_key in await member.await_failed(SHARD)


async def test_a_shard_serves_although_its_hints_are_refused(
    start: Start, broker: BrokerFixture, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By etcd, for a right that was taken away or for their size: it is reported, and tried again."""
    spec, refusals = shard_spec(SHARD, SOURCE), 3

    async def refused(*arguments: Any) -> bool:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise NotAllowed("etcd refused the request")
        return await store_recorded_hints(*arguments)

    monkeypatch.setattr(primary_module, "store_recorded_hints", refused)
    member = await start(hints_interval_s=0.02)
    await member.create(spec)
    await append(broker, frame("a", 1))
    await member.read_to_heads(SHARD)
    while await etcd.get(spec.hint_primary_key) is None:
        assert member.shard(SHARD).failure is None
        await CLOCK.sleep(0.02)
    assert not refusals


async def test_recovered_hints_that_are_refused_are_stored_again(
    start: Start, broker: BrokerFixture, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, refusals = shard_spec(SHARD, SOURCE), 3
    first = await start(hints_interval_s=0.02)
    await first.create(spec)
    await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    while await etcd.get(spec.hint_primary_key) is None:
        await CLOCK.sleep(0.02)
    await first.stop()
    for key in spec.hint_backup_keys:
        await etcd.delete(key)
    real = hints_store_module.read_hints

    async def refused(*arguments: Any, **named: Any) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise NotAllowed("etcd refused the request")
        return await real(*arguments, **named)

    monkeypatch.setattr(hints_store_module, "read_hints", refused)
    second = await start(id="consumer-two")
    await second.await_primary(SHARD)
    while await etcd.get(spec.hint_backup_keys[0]) is None:
        assert second.shard(SHARD).failure is None
        await CLOCK.sleep(0.02)
    assert not refusals


async def test_hints_of_a_member_that_lost_the_shard_are_dropped(start: Start, etcd: Etcd) -> None:
    from gazette.protocol.hints import FSMHints

    spec = shard_spec(SHARD, SOURCE)
    member = await start()
    await member.create(spec)
    assignment = member.shard(SHARD).assignment
    hints = FSMHints(log=spec.recovery_log)
    revision = assignment.raw.create_revision
    assert not await store_recorded_hints(etcd, spec, hints, assignment.key, revision - 1)
    assert await etcd.get(spec.hint_primary_key) is None
    assert await store_recorded_hints(etcd, spec, hints, assignment.key, revision)
