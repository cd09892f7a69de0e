"""Waiting for something that may be overtaken by something else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from gazette.runtime.mutex import Mutex
from gazette.runtime.tasks import TaskScope

T = TypeVar("T")


class Superseded(Exception):
    """What the wait was for is no longer wanted: ``invalidated`` was set first."""


async def take_unless(baton: Mutex[T], invalidated: asyncio.Event) -> T:
    """Take from ``baton``, unless ``invalidated`` is set before; then raise ``Superseded``.

    Raises ``Closed`` as ``Mutex.take`` does. Cancellation: nothing was taken.
    """
    if invalidated.is_set():
        raise Superseded
    if baton.idle:
        return await baton.take()  # Does not wait.
    taken: list[T] = []

    async def take() -> None:
        taken.append(await baton.take())

    try:
        async with TaskScope(f"take {baton.name}") as scope:
            taking = scope.spawn(take(), name="take")
            overtaken = scope.spawn(_wait(invalidated), name="invalidated")
            await asyncio.wait({taking, overtaken}, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()
        if invalidated.is_set() or not taken:
            raise Superseded
        return taken.pop()
    finally:
        # It may have come in the very moment in which we were cancelled or overtaken.
        if taken:
            baton.give(taken.pop())


async def changed(invalidated: asyncio.Event, *changes: Awaitable[object]) -> None:
    """Return when one of ``changes`` has come about; raise ``Superseded`` if ``invalidated`` is set.

    Raises what the first of them raises. The others are cancelled. Cancellation: so are all.
    """
    async with TaskScope("changed") as scope:
        waits = {scope.spawn(_wait(invalidated), name="invalidated")}
        for index, change in enumerate(changes):
            waits.add(scope.spawn(_await(change), name=f"change {index}"))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        scope.cancel()
    if invalidated.is_set():
        raise Superseded


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _await(change: Awaitable[object]) -> None:
    await change
