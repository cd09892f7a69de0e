"""Waits that end early when their reason is superseded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from gazette.runtime.latch import Latch
from gazette.runtime.mutex import Mutex
from gazette.runtime.tasks import TaskScope

T = TypeVar("T")


class Superseded(Exception):
    """Raised when ``invalidated`` is set first: the result of the wait is not needed any more."""


async def take_unless(mutex: Mutex[T], invalidated: Latch) -> T:
    """Take from ``mutex``. Raise ``Superseded`` if ``invalidated`` is set first.

    Raise ``Closed`` as ``Mutex.take`` does. Cancellation: nothing was taken.
    """
    if invalidated.is_set:
        raise Superseded
    if mutex.idle:
        return await mutex.take()  # Does not wait.
    taken: list[T] = []

    async def take() -> None:
        taken.append(await mutex.take())

    try:
        async with TaskScope(f"take {mutex.name}") as scope:
            taking = scope.spawn(take(), name="take")
            overtaken = scope.spawn(_wait(invalidated), name="invalidated")
            await asyncio.wait({taking, overtaken}, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()
        # The checker of types does not know that a wait may change an attribute.
        if invalidated.is_set or not taken:  # type: ignore[redundant-expr]
            raise Superseded
        return taken.pop()
    finally:
        # The value may have arrived at the very moment of the cancellation or of the invalidation.
        if taken:
            mutex.give(taken.pop())


async def changed(invalidated: Latch, *changes: Awaitable[object]) -> None:
    """Return when the first of ``changes`` is done, or raise its error. Cancel the others.

    Raise ``Superseded`` if ``invalidated`` is set. Cancellation cancels all of them.
    """
    async with TaskScope("changed") as scope:
        waits = {scope.spawn(_wait(invalidated), name="invalidated")}
        for index, change in enumerate(changes):
            waits.add(scope.spawn(_await(change), name=f"change {index}"))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        scope.cancel()
    if invalidated.is_set:
        raise Superseded


async def _wait(event: Latch) -> None:
    await event.wait()


async def _await(change: Awaitable[object]) -> None:
    await change
