"""The requests of one call, handled one after the other: as they arrive, or by the task of the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sized
from typing import Any, Protocol, TypeAlias

from gazette.errors import GazetteError


class HandledCall(Protocol):
    """The part of a call that the handling of its requests uses."""

    @property
    def fault(self) -> GazetteError | None:
        """Why requests end too early; None otherwise."""
        ...

    @property
    def has_ended(self) -> bool:
        """True if all requests have arrived."""
        ...

    def take(self) -> Any:
        """Return the next request, which has arrived."""
        ...


HandleRequest: TypeAlias = Callable[[Any], Coroutine[Any, Any, None] | None]
"""Handles a request at once, or returns a coroutine that a task must run for it."""


class Handling:
    """Handles a call's requests: as they arrive while the task of the handler waits, else in that task."""

    __slots__ = ("_call", "_failure", "_handle", "_rest", "_waiting", "_woken")

    def __init__(self, call: HandledCall, waiting: Sized, handle: HandleRequest) -> None:
        """Handle the requests of ``call`` by ``handle``. ``waiting`` holds the requests that have arrived."""
        self._call = call
        self._waiting = waiting
        self._handle = handle
        self._rest: Coroutine[Any, Any, None] | None = None
        """The coroutine of a request, which the task runs before the call takes another request."""
        self._failure: BaseException | None = None
        """The error of ``handle`` in ``arrived``, which the task raises."""
        self._woken: asyncio.Future[None] | None = None
        """Not None while the task waits. Meanwhile, ``arrived`` handles the requests."""

    async def turn(self) -> bool:
        """Handle the requests that have arrived. Return False after the last. Raise the call's error."""
        while True:
            coroutine, self._rest = self._rest, None
            if coroutine is not None:
                await coroutine
            if self._failure is not None:
                raise self._failure
            if not self._waiting:
                break
            self._rest = self._handle(self._call.take())
        if self._call.fault is not None:
            raise self._call.fault
        return not self._call.has_ended

    async def wait(self) -> None:
        """Return once ``turn`` has something to do."""
        self._woken = asyncio.get_running_loop().create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def close(self) -> None:
        """Close the coroutine of a request that the task has not begun to run."""
        coroutine, self._rest = self._rest, None
        if coroutine is not None:
            coroutine.close()

    def arrived(self) -> None:
        """Handle the requests that have arrived while the task waits. Wake the task if only the task can
        continue."""
        woken, call = self._woken, self._call
        if woken is None or woken.done():
            return
        try:
            while self._waiting and self._rest is None:
                self._rest = self._handle(call.take())
        except BaseException as error:  # noqa: BLE001 - raised by the task
            self._failure = error
        needs_task = self._rest is not None or self._failure is not None
        if needs_task or call.fault is not None or call.has_ended:
            woken.set_result(None)
