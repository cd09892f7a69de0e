"""What crosses to a shard's thread: in order, bounded, and never lost at the end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from gazette.consumer.inbox import Call, Chunk, Feed, Inbox, Jump, SourceFailed
from gazette.errors import Closed
from gazette.runtime.tasks import BlockingPool, OpFuture, TaskScope
from tests.support.instant_clock import breathe, eventually


def inbox(bytes_max: int = 10) -> Inbox:
    return Inbox(bytes_max, asyncio.get_running_loop())


def chunk(size: int, offset: int = 0) -> Chunk:
    return Chunk("a/journal", offset, bytes(size))


async def test_events_keep_their_order() -> None:
    box = inbox()
    call = Call(lambda: None, OpFuture())
    events: list[Any] = [
        chunk(1),
        Jump("a/journal", 9),
        SourceFailed("a/journal", ValueError()),
        call,
    ]
    await box.put_chunk(events[0])
    for event in events[1:]:
        box.put(event)
    assert box.inputs
    assert [box.get(0) for _ in events] == events
    assert not box.inputs
    assert box.get(0) is None


async def test_chunks_that_wait_are_bounded_in_bytes() -> None:
    box = inbox(10)
    await box.put_chunk(chunk(6))
    async with TaskScope("test") as scope:
        putting = scope.spawn(box.put_chunk(chunk(5, 6)), name="put")
        await breathe()
        assert not putting.done(), "11 bytes were taken where 10 may wait"
        assert box.get(0) == chunk(6)
        await eventually(putting.done)
    assert box.get(0) == chunk(5, 6)


async def test_a_chunk_beyond_the_bound_passes_when_nothing_else_waits() -> None:
    box = inbox(10)
    async with asyncio.timeout(30):
        await box.put_chunk(chunk(100))
    async with TaskScope("test") as scope:
        putting = scope.spawn(box.put_chunk(chunk(1, 100)), name="put")
        await breathe()
        assert not putting.done()
        box.get(0)
        await eventually(putting.done)


@pytest.mark.parametrize("by", ["wake", "call", "chunk"])
async def test_a_thread_that_brings_messages_takes_no_turn_of_others(by: str) -> None:
    """It waits for room, while a transaction that takes no more of them waits for its commit."""
    box, pool = inbox(), BlockingPool("threads", 2)
    feed = Feed(box, 1)
    feed_put, waiting = threading.Event(), box._changed
    envelope: Any = "a message"

    def bring() -> None:
        feed.put([envelope])
        feed_put.set()
        with contextlib.suppress(Closed):
            feed.put([envelope])

    async def waiters(count: int) -> None:
        await eventually(lambda: len(waiting._waiters) == count)  # type: ignore[attr-defined]

    call = Call(lambda: None, OpFuture())
    try:
        async with asyncio.timeout(60), TaskScope("test") as scope:
            scope.spawn(pool.run(bring), name="bring")
            await waiters(1)
            getting = scope.spawn(pool.run(lambda: box.get_call(None)), name="get")
            await waiters(2)
            if by == "wake":
                box.wake()
            elif by == "call":
                box.put(call)
            else:
                await box.put_chunk(chunk(1))
            # Not the one that waits for longer, and finds no room.
            async with asyncio.timeout(30):
                assert await getting == (call if by == "call" else None)
            box.stop()
    finally:
        box.stop()
        pool.close()


async def test_every_chunk_arrives_through_a_small_inbox() -> None:
    """Many writers, one reader, and room for two: no writer waits for ever, nothing is lost."""
    box, pool = inbox(20), BlockingPool("reader", 1)
    got: list[Any] = []
    total = 400

    def read() -> None:
        while len(got) < total:
            if (event := box.get(1.0)) is not None:
                got.append(event)

    async def write(journal: str) -> None:
        for offset in range(total // 4):
            await box.put_chunk(Chunk(journal, offset, bytes(1 + offset % 13)))

    async with asyncio.timeout(60), TaskScope("test") as scope:
        reading = scope.spawn(pool.run(read), name="read")
        for name in "abcd":
            scope.spawn(write(name), name=name)
        await reading
    pool.close()
    for name in "abcd":
        assert [one.offset for one in got if one.journal == name] == list(range(total // 4))


async def test_calls_pass_a_transaction_that_takes_no_more_input() -> None:
    box = inbox()
    await box.put_chunk(chunk(1))
    call = Call(lambda: None, OpFuture())
    box.put(call)
    assert box.get_call(0) is call
    assert box.get_call(0) is None
    assert box.get(0) == chunk(1)


async def test_a_wake_is_not_lost_when_it_comes_first() -> None:
    box = inbox()
    box.wake()
    finished = threading.Event()

    def read() -> None:
        assert box.get(None) is None
        finished.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert finished.wait(30)


async def test_a_stop_ends_every_wait() -> None:
    box = inbox(10)
    future: OpFuture[None] = OpFuture()
    await box.put_chunk(chunk(10))
    box.put(Call(lambda: None, future))
    async with TaskScope("test") as scope:
        putting = scope.spawn(_closed(box.put_chunk(chunk(1, 10))), name="put")
        await breathe()
        box.stop()
        async with asyncio.timeout(30):
            await putting
    assert isinstance(future.exception(0), Closed)
    late: OpFuture[None] = OpFuture()
    box.put(Call(lambda: None, late))
    assert isinstance(late.exception(0), Closed)
    for get in (box.get, box.get_call):
        with pytest.raises(Closed):
            get(None)


async def _closed(work: object) -> None:
    with pytest.raises(Closed):
        await work  # type: ignore[misc]
