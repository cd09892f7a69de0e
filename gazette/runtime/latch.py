"""An event that happens once. A latch is cheap until a task waits for it: each journal has several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Latch:
    """Is set once, and stays set. Loop-bound."""

    __slots__ = ("_listeners", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        """True once ``set`` was called. Only `Latch` changes it."""
        self._listeners: dict[Callable[[], None], None] | None = None

    def set(self) -> None:
        """Set the latch, and call its listeners. May be repeated."""
        self.is_set = True
        listeners, self._listeners = self._listeners, None
        for listener in listeners or ():
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once the latch is set, or now if it is set. The listener must neither block nor
        raise."""
        if self.is_set:
            listener()
            return
        if self._listeners is None:
            self._listeners = {}
        self._listeners[listener] = None

    def forget(self, listener: Callable[[], None]) -> None:
        """Do not call ``listener`` any more. No effect if it was called already."""
        if self._listeners is not None:
            self._listeners.pop(listener, None)

    async def wait(self) -> None:
        """Return once the latch is set. Cancellation: no effect."""
        if self.is_set:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        self.listen(wake)
        try:
            await waiter
        finally:
            self.forget(wake)
