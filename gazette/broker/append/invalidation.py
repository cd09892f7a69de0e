"""Waits that end early, once their result is not needed any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from gazette.errors import GazetteError
from gazette.runtime.latch import Latch
from gazette.runtime.mutex import Mutex
from gazette.runtime.tasks import TaskScope

T = TypeVar("T")


class Superseded(Exception):
    """Raised when ``invalidated`` is set before a wait ends: its result is not needed any more."""


class Interrupted(Exception):
    """Raised by a wait that ``Interruptible.interrupt`` cut short, for ``reason``."""

    def __init__(self, reason: GazetteError) -> None:
        super().__init__(reason)
        self.reason = reason


class Interruptible:
    """The waits of one task. Other tasks may interrupt them, once for all, with a ``reason``."""

    __slots__ = ("_is_waiting", "_task", "reason")

    def __init__(self) -> None:
        self.reason: GazetteError | None = None
        self._task: asyncio.Task[Any] | None = None  # The task that waits; None before `begin`.
        self._is_waiting = False  # True during a `run`.

    def begin(self) -> None:
        """Note that the present task is the one that waits in `run`, and that `interrupt` wakes."""
        self._task = asyncio.current_task()

    def interrupt(self, reason: GazetteError) -> None:
        """End the present wait, and all later waits. No effect after the first call."""
        if self.reason is None:
            self.reason = reason
            if self._is_waiting and self._task is not None:
                self._task.cancel()

    async def run(self, wait: Coroutine[Any, Any, T]) -> T:
        """Await ``wait``. Raise `Interrupted` if ``interrupt`` cuts the wait short, or was called before."""
        if self.reason is not None:
            wait.close()
            raise Interrupted(self.reason)
        self._is_waiting = True
        try:
            return await wait
        except asyncio.CancelledError:
            raise Interrupted(self._uncancel()) from None
        finally:
            self._is_waiting = False

    def _uncancel(self) -> GazetteError:
        """Take back the cancellation by ``interrupt``. Raise ``CancelledError`` for another cancellation."""
        assert self._task is not None
        if self.reason is None or self._task.uncancel() > 0:
            raise asyncio.CancelledError
        return self.reason


async def take_unless(mutex: Mutex[T], invalidated: Latch) -> T:
    """Take from ``mutex``. Raise ``Superseded`` if ``invalidated`` is set before the value is taken.

    Raise ``Closed`` if the mutex is closed. Cancellation: the mutex keeps its value.
    """
    if invalidated.is_set:
        raise Superseded
    if mutex.idle:
        return await mutex.take()  # Does not wait.
    values: list[T] = []

    async def take() -> None:
        values.append(await mutex.take())

    try:
        async with TaskScope(f"take {mutex.name}") as scope:
            take_task = scope.spawn(take(), name="take")
            invalidation = scope.spawn(_wait(invalidated), name="invalidated")
            await asyncio.wait({take_task, invalidation}, return_when=asyncio.FIRST_COMPLETED)
            scope.cancel()
        # mypy does not know that a wait may change an attribute.
        if invalidated.is_set or not values:  # type: ignore[redundant-expr]
            raise Superseded
        return values.pop()
    finally:
        # The value may have arrived in the same turn of the loop as the cancellation or the invalidation.
        if values:
            mutex.give(values.pop())


async def changed(invalidated: Latch, *changes: Awaitable[object]) -> None:
    """Return when the first of ``changes`` is done, or raise its error. Cancel the others.

    Raise ``Superseded`` if ``invalidated`` is set. Cancellation cancels all ``changes``.
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
