"""Calls whose requests are written one by one, and how they ended.

A server may end such a call at any time. If a request is being written just then, gRPC replaces the status
that the server gave by INTERNAL. Its reason would be lost: here it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from gazette.client.rpc.errors import END_OF_STREAM

T = TypeVar("T")

_REPLACED: Final = "Internal error from Core"
"""Details of the status INTERNAL that gRPC puts in place of the server's status."""
_ENDED: Final = (
    asyncio.InvalidStateError,
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,
)
"""Errors that gRPC raises for sending to a call that has ended."""


class StreamCall:
    """A call of ``grpc.aio`` without a request iterator. It fails with the status that the server gave.

    Loop-bound. Wrap a call before anything is written.
    """

    __slots__ = ("_call", "_ended", "_error")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ended = asyncio.Event()
        self._error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._on_done)

    async def write(self, request: Any) -> bool:
        """Send a request, and return True. Return False if the call has ended.

        Await the response, or read on, to learn how the call ended. Cancellation ends the call.
        """
        return await self._sent(self._call.write(request))

    def send_now(self, *requests: Any) -> bool:
        """Send requests if that needs no wait. Return False if ``write`` must send them: none was sent.

        Only calls of our own HTTP/2 can, and none whose ``write`` is under way.
        """
        send = getattr(self._call, "send_now", None)
        return send is not None and bool(send(*requests))

    def listen(self, sink: Callable[[Any], None]) -> bool:
        """Give each response to ``sink`` as it arrives, so that ``read`` returns only the end.

        Return False if the call cannot do that: then ``read`` returns responses.
        """
        listen = getattr(self._call, "listen", None)
        if listen is None:
            return False
        listen(sink)
        return True

    def on_end(self, callback: Callable[[grpc.aio.AioRpcError | None], None]) -> None:
        """Call ``callback`` with the status once the call has ended, now if it has. None stands for OK."""
        self._call.add_done_callback(lambda _: callback(self._error))

    async def done_writing(self) -> None:
        """Send the end of the requests. Do nothing if the call has ended. Cancellation ends the call."""
        await self._sent(self._call.done_writing())

    async def _sent(self, sending: Coroutine[Any, Any, None]) -> bool:
        try:
            await sending
        except _ENDED as error:
            # The core refuses only what is sent to a call that has ended. Its status may arrive later.
            if not self._call.done() and not isinstance(error, grpc.aio.InternalError):
                raise
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return False  # The channel was closed.
        return True

    async def read(self) -> Any:
        """Return the next response, or `END_OF_STREAM`. Raise ``AioRpcError``."""
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            return self._end_of(error)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the only response. Raise ``AioRpcError``."""
        return self._response().__await__()

    async def _response(self) -> Any:
        try:
            return await self._call
        except grpc.aio.AioRpcError as error:
            return self._end_of(error)

    def _end_of(self, error: grpc.aio.AioRpcError) -> Any:
        """Raise the error that the server gave. Return `END_OF_STREAM` if it ended the call well."""
        if error.details() != _REPLACED:
            raise error
        if self._error is not None:
            raise self._error from error
        return END_OF_STREAM

    async def wait_ended(self) -> None:
        """Return once the call has ended."""
        await self._ended.wait()

    def cancel(self) -> None:
        """End the call. Do nothing if it has ended."""
        self._call.cancel()

    def done(self) -> bool:
        """Return whether the call has ended."""
        return bool(self._call.done())

    def _on_done(self, call: Any) -> None:
        """Keep the first status. In any case, wait for responses until the server's status has arrived."""
        code = of_ended(call.code())
        if code is not grpc.StatusCode.OK:
            self._error = grpc.aio.AioRpcError(
                code or grpc.StatusCode.UNKNOWN,
                initial_metadata=grpc.aio.Metadata(),
                trailing_metadata=of_ended(call.trailing_metadata()) or grpc.aio.Metadata(),
                details=of_ended(call.details()),
                debug_error_string=None,
            )
        self._ended.set()
        # grpc.aio lets the first write wait until the call's metadata was sent, and forgets it if the call
        # is cancelled before: its channel was closed. The write then finds that the call has ended.
        sent: asyncio.Event | None = getattr(call, "_metadata_sent", None)
        if sent is not None:
            sent.set()


def of_ended(waiting: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of a coroutine of gRPC, whose call has ended. Return None if it would wait."""
    try:
        waiting.send(None)
    except StopIteration as answer:
        value: T = answer.value
        return value
    waiting.close()
    return None
