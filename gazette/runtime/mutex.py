"""Exclusive access by hand-over: an owner takes the object itself, not a lock around it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar, cast

from gazette.errors import Bug, Closed

T = TypeVar("T")


class Mutex(Generic[T]):
    """Holds one mutable object. Its holder, and no other task, may change the object.

    Waiters are served in the order in which they came. Loop-bound, not thread-safe.
    """

    def __init__(self, name: str, value: T) -> None:
        self.name = name
        self.idle = True
        """True unless the object is taken. Only `Mutex` changes ``idle`` and ``free``."""
        self.free: T | None = value
        """The object; None while it is taken."""
        self._waiters: deque[asyncio.Future[T]] = deque()
        self._closed = False

    async def take(self) -> T:
        """Take the object. Raise ``Closed`` once ``close`` was called.

        Cancellation: the object stays where it was, or goes to the next waiter.
        """
        if self._closed:
            raise Closed(f"{self.name} was closed")
        if self.idle and not self._waiters:
            return self._taken()
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # ``give`` may have handed the object to this waiter before the cancellation came: pass it on.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give(waiter.result())
            else:
                waiter.cancel()
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            raise

    def give(self, value: T) -> None:
        """Give back the object, or another object in its place. Never block."""
        if self.idle:
            raise Bug("mutex given back twice", mutex=self.name)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(value)
                return
        self.idle, self.free = True, value

    def _taken(self) -> T:
        value, self.idle, self.free = self.free, False, None
        return cast("T", value)

    def close(self) -> None:
        """Raise ``Closed`` in all present and later waiters. The present holder keeps the object."""
        self._closed = True
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(Closed(f"{self.name} was closed"))

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[T]:
        """Take the object for the block, as ``take`` does, and give it back at the end."""
        value = await self.take()
        try:
            yield value
        finally:
            self.give(value)
