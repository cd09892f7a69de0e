"""Events that happen once."""

from __future__ import annotations

import asyncio

from gazette.runtime.latch import Latch
from gazette.runtime.tasks import TaskScope


async def test_listeners_are_called_once_and_waiters_woken() -> None:
    latch, called = Latch(), list[str]()

    def first() -> None:
        called.append("first")

    def forgotten() -> None:
        called.append("forgotten")

    latch.listen(first)
    latch.listen(forgotten)
    latch.forget(forgotten)
    async with TaskScope("test") as scope:
        waiting = scope.spawn(latch.wait(), name="waits")
        leaving = scope.spawn(latch.wait(), name="leaves")
        turn = asyncio.Event()
        asyncio.get_running_loop().call_soon(turn.set)
        await turn.wait()
        leaving.cancel()
        assert not latch.is_set
        latch.set()
        latch.set()
        await waiting
    assert latch.is_set
    assert called == ["first"]
    # Case: what listens or waits later is called at once, and a listener may be forgotten again.
    latch.listen(first)
    latch.forget(first)
    await latch.wait()
    assert called == ["first", "first"]


async def test_a_listener_may_listen_and_forget_while_it_is_called() -> None:
    latch, called = Latch(), list[int]()

    def again() -> None:
        called.append(1)
        latch.forget(again)
        latch.listen(lambda: called.append(2))

    latch.listen(again)
    latch.set()
    assert called == [1, 2]
