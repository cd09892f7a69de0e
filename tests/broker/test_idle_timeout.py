"""The deadline of callers that keep an append waiting: their pauses count, those of our own loop do not."""

from __future__ import annotations

import asyncio

import pytest

from gazette.broker.append.idle_timeout import IdleTimeout
from gazette.runtime.tasks import TaskScope


def stand_still(seconds: float) -> None:
    """Block the loop, as when it gets no processor."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        pass


async def test_who_says_nothing_is_given_up() -> None:
    timeout = IdleTimeout(0.01)
    with pytest.raises(TimeoutError):
        async with timeout:
            await asyncio.Event().wait()
    assert not timeout.stalled


async def test_no_deadline() -> None:
    async with IdleTimeout(None) as timeout:
        stand_still(0.1)
    assert not timeout.stalled


async def test_what_came_while_the_loop_stood_still_is_in_time() -> None:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[bytes] = loop.create_future()

    def late() -> None:
        stand_still(0.2)
        # As gRPC does it: what was ready all the while is found in the loop's next round, when
        # the deadline has passed already.
        loop.call_soon(came.set_result, b"content")

    loop.call_soon(late)
    async with IdleTimeout(0.01) as timeout:
        assert await came == b"content"
    assert timeout.stalled


async def test_who_says_nothing_after_that_either_is_given_up() -> None:
    asyncio.get_running_loop().call_soon(stand_still, 0.2)
    timeout = IdleTimeout(0.01)
    with pytest.raises(TimeoutError):
        async with timeout:
            await asyncio.Event().wait()
    assert timeout.stalled


async def test_cancellation_is_no_timeout() -> None:
    async def wait() -> None:
        async with IdleTimeout(60.0):
            await asyncio.Event().wait()

    async with TaskScope("test") as scope:
        task = scope.spawn(wait(), name="wait")
        began = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(began.set_result, None)
        await began
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
