"""What waits to be appended is bounded: memory, then a file, then the producers wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.append.backlog import AppendServiceSettings, Backlog, JournalAppends
from gazette.client.append.queue import (
    BATCH_BYTES_MAX,
    SEGMENT_BYTES,
    JournalQueue,
    MemoryBudget,
    Segment,
    SpillFile,
    segments_of,
)
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.errors import Closed
from gazette.protocol.label_set import LabelSet
from gazette.runtime.tasks import OpFuture, TaskScope, await_future
from tests.support.instant_clock import eventually
from tests.support.stub_broker import Fail, StubBroker

A, B = (AppendParams(f"journal/{name}") for name in "AB")
NO_DEPS: frozenset[OpFuture[Any]] = frozenset()


def put(
    service: AppendService, params: AppendParams, content: bytes, *deps: OpFuture[Any]
) -> OpFuture[Any]:
    with service.start_append(params, deps) as txn:
        txn.write(content)
        return txn.release()


def spill_files(directory: Path) -> int:
    """Return how many files this process has open in a directory: spill files have no name there."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(one).startswith(f"{directory}/")
    return found


RESULT: Any = None
"""Result of an append, which the backlog passes on unseen."""


def backlog(**settings: Any) -> tuple[Backlog, list[JournalQueue]]:
    work: list[JournalQueue] = []
    chosen = AppendServiceSettings(**settings)
    return Backlog(chosen, MemoryBudget(chosen.memory_max), work.append), work


def test_a_queue_crosses_to_the_loop_once_however_much_is_put_in() -> None:
    """And again after the loop has found it empty."""
    store, work = backlog()
    queue = store.queue(A)
    futures = {store.enqueue(queue, A, NO_DEPS, b"x", None) for _ in range(1000)}
    assert len(work) == len(futures) == 1
    batch = store.first(queue)
    assert batch is not None
    store.seal(queue, batch)
    later = store.enqueue(queue, A, NO_DEPS, b"y", None)
    assert later not in futures
    store.succeed(queue, batch, RESULT)
    assert len(work) == 1
    batch = store.first(queue)
    assert batch is not None
    assert b"".join(bytes(one.load()) for one in store.seal(queue, batch)) == b"y"
    store.succeed(queue, batch, RESULT)
    assert store.first(queue) is None
    store.enqueue(queue, A, NO_DEPS, b"z", None)
    assert len(work) == 2


def test_a_batch_that_grew_beyond_its_bound_is_not_joined() -> None:
    store, _ = backlog()
    queue = store.queue(A)
    first = store.enqueue(queue, A, NO_DEPS, b"x", None)
    assert queue.tail is not None
    queue.tail.segments_bytes = BATCH_BYTES_MAX - 1
    assert store.enqueue(queue, A, NO_DEPS, b"x", None) is first
    assert store.enqueue(queue, A, NO_DEPS, b"x", None) is not first


def add(item: bytes, flags: int, buffer: bytearray) -> None:
    """Append an item, then fail if it says so."""
    assert flags == 7
    buffer += item
    if item.endswith(b"!"):
        raise ValueError(item)


def content_of(store: Backlog, queue: JournalQueue) -> bytes:
    """Take all batches out, as the loop does."""
    content = b""
    while (batch := store.first(queue)) is not None:
        content += b"".join(bytes(one.load()) for one in store.seal(queue, batch))
        store.succeed(queue, batch, RESULT)
    assert (store.bytes, queue.memory) == (0, 0)
    return content


def test_content_is_made_in_place_only_in_a_batch_that_takes_it() -> None:
    store, _ = backlog()
    queue = store.queue(A)
    appends = JournalAppends(store, queue, A)
    in_place = partial(appends.in_place, add, flags=7, length_max=4)
    # Case: there is no batch yet.
    assert in_place(b"none") is None
    future = appends.enqueue(b"a;")
    # Case: it joins the batch, in order with what is copied.
    assert in_place(b"b;") is future
    assert appends.enqueue(b"c;") is future
    # Case: too long, or it fails: nothing of it is left.
    assert in_place(b"longer") is None
    with pytest.raises(ValueError, match="d!"):
        in_place(b"d!")
    assert in_place(b"e;") is future
    assert store.bytes == 8
    batch = store.first(queue)
    assert batch is not None
    assert b"".join(bytes(one.load()) for one in store.seal(queue, batch)) == b"a;b;c;e;"
    # Case: the batch is being sent.
    assert in_place(b"late") is None
    store.succeed(queue, batch, RESULT)
    # Case: the batch has other parameters.
    other = AppendParams(A.journal, union_registers=LabelSet.of(("owner", "another")))
    store.enqueue(queue, other, NO_DEPS, b"x", None)
    assert in_place(b"f;") is None
    # Case: the batch is as long as a batch may be, when a segment of it is complete.
    later = appends.enqueue(b"y")
    assert in_place(b"z") is later
    rest = bytes(SEGMENT_BYTES - len(b"yzg"))
    assert appends.enqueue(rest) is later
    assert queue.tail is not None
    queue.tail.segments_bytes = BATCH_BYTES_MAX
    assert in_place(b"g") is later
    assert in_place(b"h;") is None
    queue.tail.segments_bytes = SEGMENT_BYTES
    assert content_of(store, queue) == b"xyz" + rest + b"g"
    # Case: the journal has failed.
    store.fail(queue, Closed("gone"))
    assert in_place(b"i;") is None


def test_content_that_is_made_in_place_fills_segments_and_the_backlog() -> None:
    store, _ = backlog(backlog_max=2 * SEGMENT_BYTES)
    queue = store.queue(A)
    appends = JournalAppends(store, queue, A)
    in_place = partial(appends.in_place, add, flags=7, length_max=1 << 20)
    appends.enqueue(b"x")
    line = bytes(SEGMENT_BYTES // 2)
    assert in_place(line) is not None
    assert not appends.must_wait
    in_place(line)
    assert appends.must_wait
    assert queue.memory == 2 * len(line) + 1
    appends.await_room()
    assert not appends.must_wait
    in_place(bytes(3 * SEGMENT_BYTES))
    assert appends.must_wait
    in_place(b"y")
    assert content_of(store, queue) == b"x" + bytes(4 * SEGMENT_BYTES) + b"y"


def test_a_spill_file_is_closed_once_it_is_retired_and_empty(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert spill_files(tmp_path) == 1
    segments = segments_of(bytes(range(200)) * 1000)
    for segment in segments:
        offset = file.reserve(segment.length)
        data = segment.load()
        file.write(offset, data)
        segment.move(file, offset)
        assert segment.load() == data
    file.retire()
    assert spill_files(tmp_path) == 1
    assert [segment.drop() for segment in segments] == [0, 0]
    assert spill_files(tmp_path) == 0
    assert segments[0].drop() == 0


def test_an_empty_spill_file_is_written_from_its_start_again(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    assert [file.reserve(10), file.reserve(10)] == [0, 10]
    file.give_back()
    file.give_back()
    assert file.reserve(5) == 0
    file.give_back()
    file.retire()
    file.retire()


def test_a_segment_in_memory_frees_it_once() -> None:
    segment = Segment(b"abc")
    assert [segment.drop(), segment.drop()] == [3, 0]


async def test_small_appends_are_put_into_the_file_too(
    client: Client, budget: MemoryBudget, broker: StubBroker, tmp_path: Path
) -> None:
    """Piece by piece, as they fill segments; and with two services on one budget."""
    gate: OpFuture[None] = OpFuture()
    lines = [b"%099d\n" % i for i in range(20_000)]

    settings = AppendServiceSettings(
        journal_memory_max=300_000, headway_s=0.01, spill_directory=tmp_path
    )
    service = AppendService(client, settings=settings, budget=budget)

    def work() -> None:
        for line in lines:
            put(service, A, line, gate)

    await asyncio.to_thread(work)
    assert budget.used <= 300_000 + 140_000
    gate.set_result(None)
    await service.flush()
    assert broker.content_of(A.journal) == b"".join(lines)
    await service.close()


async def test_short_appends_between_long_ones_are_put_into_the_file_too(
    small: AppendService, budget: MemoryBudget, broker: StubBroker
) -> None:
    """A long one ends the segment of the short one before it, which is not full."""
    gate: OpFuture[None] = OpFuture()
    contents = [bytes([number]) * (100_000 if number % 2 else 200_000) for number in range(12)]

    def work() -> None:
        for content in contents:
            put(small, A, content, gate)

    await asyncio.to_thread(work)
    assert budget.used <= 300_000 + 140_000
    gate.set_result(None)
    await small.flush()
    assert broker.content_of(A.journal) == b"".join(contents)


async def test_a_budget_is_shared_by_services(
    client: Client, broker: StubBroker, tmp_path: Path
) -> None:
    budget = MemoryBudget(500_000)
    chosen = AppendServiceSettings(headway_s=0.01, spill_directory=tmp_path)
    one, two = (AppendService(client, settings=chosen, budget=budget) for _ in range(2))
    gate: OpFuture[None] = OpFuture()
    await asyncio.to_thread(put, one, A, bytes(450_000), gate)
    assert spill_files(tmp_path) == 0
    await asyncio.to_thread(put, two, B, bytes(450_000), gate)
    assert spill_files(tmp_path) == 1
    assert budget.used <= 500_000 + 140_000
    gate.set_result(None)
    await one.flush()
    await two.flush()
    assert (budget.used, len(broker.content_of(B.journal))) == (0, 450_000)
    await one.close()
    await two.close()


async def test_a_producer_does_not_wait_for_memory_that_others_hold(tmp_path: Path) -> None:
    """Its own batches make headway, but they free too little."""
    store, _ = backlog(headway_s=30.0, spill_directory=tmp_path)
    queue = store.queue(A)
    queue.flowing = True
    store.budget.add(store.budget.bytes_max)
    async with asyncio.timeout(30):
        await asyncio.to_thread(store.enqueue, queue, A, NO_DEPS, bytes(200_000), None)
    assert queue.spill is not None
    queue.close_spill()
    queue.fail(Closed("the test has ended"))


async def test_a_producer_that_is_ahead_waits_for_headway_before_it_writes_to_disk(
    client: Client, broker: StubBroker, tmp_path: Path
) -> None:
    """While batches succeed, no file is ever made."""
    service = AppendService(
        client,
        settings=AppendServiceSettings(
            journal_memory_max=1 << 20, headway_s=30.0, spill_directory=tmp_path / "missing"
        ),
    )

    def work() -> None:
        for _ in range(100):
            put(service, A, bytes(200_000))

    thread = threading.Thread(target=work)
    thread.start()
    await eventually(lambda: not thread.is_alive())
    await service.flush()
    assert len(broker.content_of(A.journal)) == 20_000_000
    await service.close()


@pytest.fixture
async def budget() -> MemoryBudget:
    return MemoryBudget(1 << 30)


@pytest.fixture
async def small(
    client: Client, budget: MemoryBudget, tmp_path: Path
) -> AsyncIterator[AppendService]:
    """Yield a service with room for two segments per journal."""
    service = AppendService(
        client,
        budget=budget,
        settings=AppendServiceSettings(
            journal_memory_max=300_000,
            backlog_max=2_000_000,
            headway_s=0.01,
            spill_directory=tmp_path,
        ),
    )
    yield service
    await service.close()


async def test_content_beyond_memory_waits_in_a_file(
    small: AppendService, budget: MemoryBudget, broker: StubBroker, tmp_path: Path
) -> None:
    """While a dependency keeps a journal waiting: nothing is lost, little is in memory."""
    gate: OpFuture[None] = OpFuture()
    messages = [b"%06d" % i * 2_000 for i in range(100)]

    def work() -> None:
        for message in messages:
            put(small, A, message, gate)

    await asyncio.to_thread(work)
    assert spill_files(tmp_path) == 1
    assert budget.used <= 300_000 + 140_000
    assert small.backlog_bytes == 1_200_000
    gate.set_result(None)
    await small.flush()
    assert broker.content_of(A.journal) == b"".join(messages)
    await eventually(lambda: spill_files(tmp_path) == 0)
    assert (small.backlog_bytes, budget.used) == (0, 0)


async def test_one_large_append_is_spilled_while_it_is_written(
    small: AppendService, budget: MemoryBudget, broker: StubBroker
) -> None:
    content = bytes(range(250)) * 10_000

    def work() -> OpFuture[Any]:
        with small.start_append(A) as txn:
            txn.write(b"head;")
            txn.write(memoryview(content))
            txn.write(b";tail")
            assert budget.used <= 300_000 + 140_000
            return txn.release()

    await await_future(await asyncio.to_thread(work))
    assert broker.content_of(A.journal) == b"head;" + content + b";tail"


async def test_a_large_append_that_is_rolled_back_leaves_no_trace(
    small: AppendService, budget: MemoryBudget, broker: StubBroker
) -> None:
    def work() -> None:
        txn = small.start_append(A)
        txn.write(bytes(3_000_000))
        txn.roll_back()

    await asyncio.to_thread(work)
    assert budget.used == 0
    await await_future(put(small, A, b"1"))
    assert broker.content_of(A.journal) == b"1"


async def test_the_loop_writes_to_the_file_rather_than_wait(
    small: AppendService, broker: StubBroker
) -> None:
    content = bytes(range(250)) * 20_000
    future = put(small, A, content)
    future_2 = small.append(A, content)
    await await_future(future_2)
    assert future.done()
    assert broker.content_of(A.journal) == content * 2


async def test_a_spilled_batch_is_retried_from_its_file(
    small: AppendService, broker: StubBroker
) -> None:
    content = bytes(range(250)) * 10_000
    broker.on_append(Fail(after_bytes=1_000_000), Fail())
    await await_future(put(small, A, content))
    assert broker.content_of(A.journal) == content


async def test_threads_wait_while_too_much_is_waiting(
    small: AppendService, broker: StubBroker
) -> None:
    """The backlog is bounded, and the loop is free meanwhile."""
    gate: OpFuture[None] = OpFuture()
    written = 0

    def work() -> None:
        nonlocal written
        for _ in range(100):
            put(small, A, bytes(100_000), gate)
            written += 1

    async with TaskScope("test") as scope:
        scope.spawn(asyncio.to_thread(work), name="work")
        await eventually(lambda: small.backlog_bytes > 2_000_000)
        stopped_at = written
        await await_future(put(small, B, b"the loop is not held up"))
        assert written <= stopped_at + 1
        gate.set_result(None)
    await small.flush()
    assert broker.content_of(A.journal) == bytes(10_000_000)


async def test_what_is_enqueued_without_a_wait_is_bounded_by_waiting_afterwards(
    small: AppendService, budget: MemoryBudget, broker: StubBroker, tmp_path: Path
) -> None:
    """Small and large content of a journal goes to the file, and a thread waits at the bound of all."""
    gate: OpFuture[None] = OpFuture()
    small.append(A, b"", [gate])
    appends = small.journal(A)
    lines = [b"%099d\n" % number for number in range(3_000)]
    large = bytes(range(250)) * 2_000
    waits = 0

    def work() -> None:
        nonlocal waits
        for content in (*lines, large, *lines, *[large] * 3):
            appends.enqueue(content)
            if appends.must_wait:
                waits += 1
                appends.await_room()

    async with TaskScope("test") as scope:
        scope.spawn(asyncio.to_thread(work), name="work")
        await eventually(lambda: small.backlog_bytes > 2_000_000)
        await eventually(lambda: budget.used <= 300_000)
        assert spill_files(tmp_path) == 1
        # Case: the loop never waits, nor do other journals.
        beside = small.journal(B)
        future = beside.enqueue(b"beside")
        assert beside.must_wait
        beside.await_room()
        await await_future(future)
        gate.set_result(None)
    await small.flush()
    assert 4 < waits < 20
    assert broker.content_of(A.journal) == b"".join((*lines, large, *lines, *[large] * 3))
    assert (small.backlog_bytes, budget.used) == (0, 0)


async def test_a_full_disk_makes_threads_wait_for_the_brokers(
    client: Client, broker: StubBroker, tmp_path: object
) -> None:
    service = AppendService(
        client,
        settings=AppendServiceSettings(
            journal_memory_max=300_000,
            headway_s=0.01,
            spill_directory=tmp_path / "missing",  # type: ignore[operator]
        ),
    )
    gate: OpFuture[None] = OpFuture()
    content = bytes(range(250)) * 4_000
    done = []

    def work() -> None:
        for _ in range(2):
            done.append(put(service, A, content, gate))

    async with TaskScope("test") as scope:
        scope.spawn(asyncio.to_thread(work), name="work")
        await eventually(lambda: len(done) == 1)
        await await_future(put(service, B, b"the loop is not held up"))
        assert len(done) == 1
        gate.set_result(None)
    await service.flush()
    assert broker.content_of(A.journal) == content * 2
    await service.close()


async def test_closing_lets_waiting_threads_go(
    small: AppendService, budget: MemoryBudget, broker: StubBroker
) -> None:
    def work() -> OpFuture[Any]:
        for _ in range(100):
            future = put(small, A, bytes(100_000), OpFuture())
        return future

    async with TaskScope("test") as scope:
        thread = scope.spawn(asyncio.to_thread(work), name="work")
        await eventually(lambda: small.backlog_bytes > 2_000_000)
        await small.close()
        assert isinstance((await thread).exception(), Closed)
    assert budget.used == 0
