"""Lines that nothing else holds: each of these tests fails without the line that it names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gazette.client.shards import ShardChange
from gazette.cluster.etcd.client import Etcd
from gazette.consumer.inbox import Jump
from gazette.consumer.shard import primary as primary_module
from gazette.protocol.hints import FSMHints, Property
from gazette.runtime import failpoints
from gazette.runtime.tasks import OpFuture
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, Tally, ack, frame, pending
from tests.support.instant_clock import eventually
from tools.simulation.remote_store import RemoteDatabase


async def test_hints_are_not_stored_before_their_operations_are_in_the_log(
    start: Start, broker: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Primary.keep_hints` waits for what `snapshot_hints` returns with them."""
    stored: list[FSMHints] = []

    async def store(etcd: Any, spec: Any, hints: FSMHints, *rest: Any) -> bool:
        stored.append(hints)
        return True

    monkeypatch.setattr(primary_module, "store_recorded_hints", store)
    member = await start(hints_interval_s=0.01)
    await member.create(shard_spec(SHARD, SOURCE))
    shard = member.shard(SHARD)
    recorder = shard._primary._recorder
    taken: list[FSMHints] = []
    flushed: OpFuture[None] = OpFuture()

    def snapshot() -> tuple[FSMHints, OpFuture[None]]:
        taken.append(FSMHints(recorder.log, properties=(Property("/IDENTITY", "unlike others"),)))
        return taken[-1], flushed

    monkeypatch.setattr(recorder, "snapshot_hints", snapshot)
    stored.clear()
    await eventually(lambda: taken)
    for _ in range(
        20
    ):  # Through the shard's thread and back: code that does not wait has stored by then.
        await shard.call(lambda: None)
    assert not [one for one in stored if one in taken]
    assert len(taken) == 1
    flushed.set_result(None)
    await eventually(lambda: taken[0] in stored)


def test_a_jump_is_passed_to_the_sequencer(tmp_path: Path) -> None:
    """`Transactor._jump`: else no reader could read through it, and a checkpoint would go back."""
    with AppDriver(Tally(), tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, frame("a", 1))
        driver.run()
        end = driver.read_through[SOURCE] + 1000
        gap = bytes(1000)
        life = driver._alive()
        life.inbox.put(Jump(SOURCE, end))
        life.offsets[SOURCE] = end
        driver.feed(SOURCE, gap)
        driver.run()
        assert driver.read_through == {SOURCE: end}
        # Case: what comes behind it is consumed, pending messages and all.
        driver.feed(SOURCE, pending("b", 2) + pending("c", 3))
        driver.run()
        driver.feed(SOURCE, ack(4))
        driver.run()
        assert driver.store.read() == {"a": 1, "b": 1, "c": 1}


@contextmanager
def held_at(point: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold the thread that passes a point of a shard."""
    entered, opened = threading.Event(), threading.Event()

    def hook(name: str, detail: str) -> float:
        del detail
        if name == point:
            entered.set()
            opened.wait()
        return 0.0

    with failpoints.hooked(hook):
        try:
            yield entered, opened
        finally:
            opened.set()


async def test_a_shard_that_was_taken_away_sets_no_fence(
    start: Start, broker: BrokerFixture, etcd: Etcd
) -> None:
    """`Primary._restore` looks again whether it runs: it may have waited behind a callback."""
    restored: list[str] = []
    database = RemoteDatabase()

    class Watched(Tally):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            store: Any = super().new_store(shard, recorder)
            restore = store.restore_checkpoint

            def restore_checkpoint(shard: Any) -> Any:
                restored.append(shard.id)
                return restore(shard)

            store.restore_checkpoint = restore_checkpoint
            return store

    with held_at("promotion.fencing") as (entered, opened):
        member = await start(Watched(database))
        spec = shard_spec(SHARD, SOURCE, log=False)
        await member.shards.apply_shards([ShardChange(upsert=spec)])
        await eventually(entered.is_set)
        shard = member.shard(SHARD)
        await etcd.delete(shard.assignment.key)  # It is assigned again; this one ends.
        await eventually(shard.ended.is_set)
        assert restored == []
        thread = shard._primary.thread
        opened.set()
        await eventually(lambda: not thread.alive)
    await member.await_primary(SHARD)
    assert restored == [SHARD]
