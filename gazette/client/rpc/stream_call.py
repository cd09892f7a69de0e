"""Calls whose requests are written one by one.

A server may end a call at any time. A later write reports the end, and the response gives the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

import grpc.aio

_ENDED: Final = (asyncio.InvalidStateError, grpc.aio.AioRpcError)
"""Errors of a request that is sent after the end of its call."""


class StreamCall:
    """A call whose requests are written one by one. Loop-bound. ``count_sent`` counts those of `send_now`."""

    __slots__ = ("_call", "_count_sent")

    def __init__(self, call: Any, count_sent: Callable[[float], None] | None = None) -> None:
        self._call = call
        self._count_sent = count_sent

    async def write(self, request: Any) -> bool:
        """Send a request, and return True. Return False if the call has ended.

        Await the response, or read on, to learn how the call ended. Cancellation ends the call.
        """
        return await self._sent(self._call.write(request))

    def send_now(self, content: bytes, messages: int) -> bool:
        """Send ``content``, which is ``messages`` requests, encoded and `prefixed`. Return True.

        If sending needs a wait, send nothing and return False: call ``write`` instead. Do not call this
        during a ``write``.
        """
        if not self._call.send_now(content):
            return False
        if self._count_sent is not None:
            self._count_sent(messages)
        return True

    def listen(self, sink: Callable[[Any], None]) -> None:
        """Give each response to ``sink`` as it arrives."""
        self._call.listen(sink)

    def on_end(self, callback: Callable[[grpc.aio.AioRpcError | None], None]) -> None:
        """Call ``callback`` once the call has ended, or now if it has, with its error, or None after
        success."""
        self._call.add_done_callback(lambda call: callback(call.error))

    async def done_writing(self) -> None:
        """Send the end of the requests. Do nothing if the call has ended. Cancellation ends the call."""
        await self._sent(self._call.done_writing())

    async def _sent(self, sending: Coroutine[Any, Any, None]) -> bool:
        try:
            await sending
        except _ENDED:
            if not self._call.done():
                raise
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return False  # The channel was closed.
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the only response. Raise ``AioRpcError`` if the call fails."""
        response: Generator[Any, None, Any] = self._call.__await__()
        return response

    async def wait_ended(self) -> None:
        """Return once the call has ended."""
        await self._call.code()

    def cancel(self) -> None:
        """Cancel the call. Do nothing if it has ended already."""
        self._call.cancel()

    def done(self) -> bool:
        """Return whether the call has ended."""
        return bool(self._call.done())
