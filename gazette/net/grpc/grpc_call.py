"""One call of a gRPC server: the listener of its stream, and the context of its handler.

The handler sees an interface like `grpc.aio.ServicerContext`. If the caller goes away, or its time is up, the
handler is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from gazette.errors import Broken, Closed, GazetteError, TooLarge, Unavailable
from gazette.http2.connection import BytesLike, Http2Connection, Http2Stream
from gazette.http2.frames import FaultCode
from gazette.http2.headers import Fields, RequestHead, encode_fields, fits
from gazette.http2.messages import MessageQueue, prefixed
from gazette.http2.metadata import (
    EOF,
    HEAD_BLOCK,
    OK_BLOCK,
    Metadata,
    fields_of,
    metadata_of,
    trailers,
)
from gazette.http2.peer import Peer
from gazette.http2.socket import Waiters
from gazette.net.grpc.handling import HandleRequest, Handling
from gazette.net.grpc.held_memory import HeldMemory
from gazette.net.grpc.servicer_context import ServicerContext
from gazette.net.grpc.unfinished import Unfinished
from gazette.net.http_accept import next_turn

_AT_HAND_MAX: Final = 1 << 20
"""Upper bound of the bytes that a handler takes from waiting messages before other tasks get the loop."""
_MESSAGE_AT_HAND: Final = 1 << 8
"""Bytes that a message counts as for `_AT_HAND_MAX`. A decompressed message also counts with its length."""
_CALL_BYTES: Final = 1 << 14
"""Bytes of memory that a waiting response costs beside its content: for the call's task and handler."""
_DECODED: Final = 4
"""Factor for the memory of a response that was encoded here: its handler also holds it as objects."""
_MANY: Final = 32
"""For each `_MANY` messages that wait, a frame costs one more unit of work."""


class _Ended(Closed):
    """The call has ended by a status, and not because its caller left."""


class GrpcCall(ServicerContext):
    """A call from its head to its trailers. Loop-bound; ``task`` and ``unfinished`` are set by its server.

    Iterate it for decoded requests. One task at a time may read, and one may write.
    """

    __slots__ = (
        "_arrived",
        "_at_hand",
        "_code",
        "_details",
        "_ended",
        "_fault",
        "_handling",
        "_head_sent",
        "_held",
        "_kept",
        "_memory",
        "_queue",
        "_request",
        "_rest",
        "_room",
        "_stream",
        "decode",
        "encode",
        "task",
        "unfinished",
    )

    def __init__(
        self, stream: Http2Stream, request: RequestHead, queue: MessageQueue, memory: HeldMemory
    ) -> None:
        super().__init__()
        self.task: asyncio.Task[None] | None = None
        self.unfinished: Unfinished | None = None
        """Watches the call until its first message has arrived; then None."""
        self.decode: Callable[[bytes], Any] | None = None
        self.encode: Callable[[Any], bytes] | None = None
        self._stream = stream
        self._request = request
        self._queue = queue
        self._memory = memory
        self._held = 0
        """Memory that ``HeldMemory`` counts for this call."""
        self._at_hand = 0
        """Bytes of the messages that were taken since the last wait."""
        self._arrived = Waiters()
        self._room = Waiters()
        self._rest = memoryview(b"")
        """The part of a response that waits for room."""
        self._kept = 0
        """Bytes of memory that the response counts as while it waits for room."""
        self._ended = stream.remote_ended  # True once no more requests arrive.
        self._fault: GazetteError | None = None  # Why requests end too early.
        self._handling: Handling | None = None  # Set while `each` runs.
        self._head_sent = False
        self._code: grpc.StatusCode | None = None
        self._details = ""

    # -- what arrives

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        del fields  # Clients of gRPC send no trailers: these fields can only end the stream.
        if ended:
            self._end()

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        """Queue the messages in content, and have them handled. After a fault, drop the content."""
        length, queue = len(content), self._queue
        if self._fault is None and length:
            try:
                consumed = queue.feed(memoryview(content))
            except GazetteError as error:
                self._fail(error)
                consumed = length
            if consumed:
                self._stream.consume(consumed)
            waiting = len(queue.messages)
            if waiting > _MANY:
                self._stream.charge(waiting // _MANY)
            if waiting and self.unfinished is not None:
                self._stream.connection.is_known = True
                self._watch_no_more()
            if self._handling is not None:
                self._handling.arrived()
            else:
                self._arrived.wake()
            if queue.held + self._kept != self._held:
                self._count()
        elif length:  # The content is dropped, but the caller's window must open again.
            self._stream.consume(length)
        if ended:
            self._end()

    def on_fault(self, error: GazetteError) -> None:
        """Cancel the handler, and drop the requests that it has not taken: the caller has gone."""
        if self._fault is None:
            self._fault = error
        self._drop()
        self._room.wake()
        if self.task is not None:
            self.task.cancel()
        self._call_back()

    def on_room(self) -> None:
        if self._rest and not self._stream.local_ended:
            self._rest = self._rest[self._stream.send(self._rest, ended=False) :]
        if not self._rest:
            self._room.wake()

    def _end(self) -> None:
        self._ended = True
        if self._fault is None and self._queue.is_cut:
            self._fault = Broken("the last message is cut short")
        self._wake()

    def _wake(self) -> None:
        if self._handling is not None:
            self._handling.arrived()
        else:
            self._arrived.wake()

    def _fail(self, error: GazetteError) -> None:
        """Drop the requests that were not taken. The handler gets ``error`` in their place."""
        self._fault = error
        self._drop()

    def _drop(self) -> None:
        self._queue.clear()
        self._watch_no_more()
        if self._held:
            self._count()

    def _count(self) -> None:
        """Report the bytes that the call holds. ``HeldMemory`` says how far the caller may send ahead now."""
        self._held = self._queue.held + self._kept
        self._memory.hold(self, self._held)
        self._stream.connection.ahead_bytes = self._memory.ahead_bytes

    def _watch_no_more(self) -> None:
        if self.unfinished is not None:
            self.unfinished.discard(self)
            self.unfinished = None

    def give_up_messages(self) -> None:
        """Drop requests that were not taken, or a response that waits: other calls need the memory."""
        self._held = self._kept = 0
        error = Unavailable("the server holds too many messages: try again later")
        if self._rest:
            self.give_up(status_of_fault(error), error.message)
        else:
            self._fail(error)
            self._wake()

    # -- what the handler uses

    async def read(self) -> Any:
        """Return the next request, decoded; ``grpc.aio.EOF`` at the end.

        Raise ``TooLarge`` or ``Invalid`` for a request that is refused, or the error of its decoding. Raise
        ``fault`` if requests end too early.
        """
        while not self._queue:
            if self._fault is not None:
                raise self._fault
            if self._ended:
                return EOF
            self._at_hand = 0
            await self._arrived.wait()
        if self._at_hand >= _AT_HAND_MAX:
            self._at_hand = 0
            await next_turn(asyncio.get_running_loop())
            return await self.read()
        request = self.take()
        self._at_hand += _MESSAGE_AT_HAND + self._queue.inflated
        return request

    def take(self) -> Any:
        """Return the next request, which must have arrived. Raise ``TooLarge`` or ``Invalid`` if the request
        is refused, or the error of its decoding."""
        queue = self._queue
        try:
            message, consumed = queue.take()
        except GazetteError as error:
            self._fail(error)
            raise
        if consumed:
            self._stream.consume(consumed)
        if (self._held or queue.inflated) and queue.held + self._kept != self._held:
            self._count()
        return message if self.decode is None else self.decode(message)

    async def each(
        self,
        handle: HandleRequest,
        bound: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        """Call ``handle`` with each further request, in order. Return at the end of the requests.

        ``handle`` is called as soon as a request arrives. A coroutine that ``handle`` returns is awaited
        before the next request. ``bound`` wraps each wait for requests. Errors of ``read``, ``handle`` and
        ``bound`` end this method. Cancellation cancels the coroutine that ``handle`` has returned.
        """
        handling = self._handling = Handling(self, self._queue.messages, handle)
        try:
            while await handling.turn():
                await bound(handling.wait())
        finally:
            self._handling = None
            handling.close()

    def __aiter__(self) -> GrpcCall:
        return self

    async def __anext__(self) -> Any:
        request = await self.read()
        if request is EOF:
            raise StopAsyncIteration
        return request

    async def write(self, response: Any) -> None:
        """Send a response. Return once caller and socket have room for it. Raise ``CancelledError`` if the
        caller has gone."""
        message = response if self.encode is None else self.encode(response)
        if not self._head_sent:
            self._send_head(())
        content = memoryview(prefixed(message))
        try:
            sent = self._stream.send(content, ended=False)
        except Closed as error:
            raise asyncio.CancelledError("the caller is gone") from error
        if sent < content.nbytes:
            copies = 1 if isinstance(response, bytes) else _DECODED
            await self._send_rest(content[sent:], _CALL_BYTES + copies * len(content))

    async def _send_rest(self, content: memoryview, kept: int) -> None:
        """Send the rest of a response as soon as there is room. Count the rest as ``kept`` bytes until then.

        Raise ``CancelledError`` if the caller goes meanwhile.
        """
        self._rest, self._kept = content, kept
        self._count()
        try:
            while self._rest:
                await self._room.wait()
                if self._stream.local_ended:
                    raise asyncio.CancelledError("the caller is gone")
        finally:
            self._rest, self._kept = content[:0], 0
            self._count()

    def send_now(self, content: bytes) -> bool:
        """Send encoded and `prefixed` responses if the caller and the socket take all of them at once.

        Otherwise, or if no head was sent before, send none and return False. No ``write`` may be under way.
        """
        return self._head_sent and self._stream.send_whole(content)

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Send the head of the answer now. Do nothing if the head was sent already."""
        if not self._head_sent:
            self._send_head(tuple(metadata))

    def invocation_metadata(self) -> Metadata:
        """Return the caller's metadata."""
        request = self._request
        if request.metadata is None:
            request.metadata = metadata_of(request.fields)
        return request.metadata  # type: ignore[no-any-return]

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Set the metadata that is sent at the end, with the status."""
        self._trailing = tuple(metadata)

    def set_code(self, code: grpc.StatusCode | int) -> None:
        """Set the status of a call that does not raise."""
        self._code = _status_of(code)

    def set_details(self, details: str) -> None:
        """Set the text of the status."""
        self._details = details

    def code(self) -> grpc.StatusCode | None:
        """Return the status that the handler has set; None before that."""
        return self._code

    def details(self) -> str:
        """Return the text of the status that was set."""
        return self._details

    def cancelled(self) -> bool:
        """Return True if the caller has gone before the end."""
        fault = self._fault
        return fault is not None and not isinstance(fault, _Ended) and self.is_over

    async def abort(
        self, code: grpc.StatusCode | int, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """End the call with a status. Raise ``AbortError``, which must leave the handler."""
        self.set_code(code)
        self._details = details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError(details)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with a status. Raise ``AbortError``, which must leave the handler."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    # -- what the server uses

    @property
    def caller(self) -> Peer:
        return self._stream.connection.peer

    @property
    def fault(self) -> GazetteError | None:
        """Why requests end too early; None otherwise."""
        return self._fault

    @property
    def has_ended(self) -> bool:
        """True if all requests have arrived."""
        return self._ended

    @property
    def connection(self) -> Http2Connection:
        """The caller's connection."""
        return self._stream.connection

    @property
    def is_over(self) -> bool:
        """True if the caller has gone, or the call has ended on both sides."""
        return self._stream.over

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status before its handler ends."""
        self.finish(code, details)
        if self.task is not None:
            self.task.cancel()

    def finish(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the call with a status. Do nothing if the call has ended, or if the caller has gone."""
        stream = self._stream
        if not stream.local_ended:
            ok = code is grpc.StatusCode.OK and not details and not self._trailing
            block = OK_BLOCK if ok else self._trailers(code, details)
            if not self._head_sent:
                block = HEAD_BLOCK + block
            stream.send_fields(block, ended=True)
        if not stream.remote_ended:
            stream.reset(FaultCode.NO_ERROR)  # The caller's remaining requests are not needed.
        stream.release()
        if self._fault is None:
            self._fault = _Ended("the call has ended")
        self._drop()
        self._call_back()

    def _trailers(self, code: grpc.StatusCode, details: str) -> bytes:
        try:
            return self._checked(encode_fields(trailers(code, details, self._trailing)))
        except Exception as error:  # noqa: BLE001 - the caller still needs an answer
            text = f"the handler set a status or metadata that cannot be sent: {error}"
            return encode_fields(trailers(grpc.StatusCode.INTERNAL, text, ()))

    def _send_head(self, metadata: Metadata) -> None:
        """Send the head of the answer. Raise ``ValueError`` or ``TypeError`` for unfit metadata."""
        block = HEAD_BLOCK
        if metadata:
            block = self._checked(block + encode_fields(fields_of(metadata)))
        self._head_sent = True
        self._stream.send_fields(block, ended=False)

    def _checked(self, block: bytes) -> bytes:
        """Return a header block. Raise ``ValueError`` if it is larger than the caller takes."""
        most = self._stream.connection.peer_list_bytes_max
        if not fits(block, most):
            raise ValueError(f"the caller takes at most {most} bytes of metadata")
        return block


def _status_of(code: grpc.StatusCode | int) -> grpc.StatusCode:
    """Return a status, which handlers may also give by its number."""
    if isinstance(code, grpc.StatusCode):
        return code
    known = (status for status in grpc.StatusCode if status.value[0] == code)
    return next(known, grpc.StatusCode.UNKNOWN)


def status_of_fault(error: GazetteError) -> grpc.StatusCode:
    """Return the status of a call whose requests could not be taken."""
    if isinstance(error, TooLarge):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, Unavailable):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.INTERNAL
