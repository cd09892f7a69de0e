"""One call of a gRPC client: the listener of its stream, and the methods that `grpc.aio` gives a call.

A call begins at once. Its owner reads the call to its end, or cancels it. Until then the call occupies a
stream, and holds the bytes that have arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc.aio

from gazette.errors import GazetteError, TooLarge, printable
from gazette.http2.connection import BytesLike, Http2Stream, StreamListener
from gazette.http2.frames import FaultCode
from gazette.http2.headers import Fields
from gazette.http2.messages import ENCODINGS, MessageQueue, prefixed
from gazette.http2.metadata import EOF, STATUS_OF_RESET, Metadata, reply_of, status_of
from gazette.http2.socket import Waiters

_NAME_LENGTH: Final = 40
"""Greatest number of characters that an error shows of an unknown encoding's name."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service. ``encode`` and ``decode`` are None for bytes."""

    head: bytes
    """The part of the header block that all calls of the method have."""
    streams_requests: bool
    streams_responses: bool
    encode: Callable[[Any], bytes] | None
    decode: Callable[[bytes], Any] | None

    def content(self, request: Any) -> bytes:
        """Return the bytes of the only request, or of a tuple of all. Raise ``UsageError`` for others."""
        if not self.streams_requests:
            return self.content_of_one(request)
        if not isinstance(request, tuple):
            raise grpc.aio.UsageError("Write the requests one by one: iterators are not taken.")
        return b"".join(map(self.content_of_one, request))

    def content_of_one(self, request: Any) -> bytes:
        return prefixed(request if self.encode is None else self.encode(request))


class Opener(Protocol):
    """The methods of a channel that its calls use."""

    def start(self, call: ClientCall) -> None:
        """Open the call's stream now or later, and pass it to ``call.opened``."""
        ...

    def ended(self, call: ClientCall) -> None:
        """Forget the call, which has ended."""
        ...


class Carrier(Protocol):
    """The part of a connection that its calls use."""

    answered: bool
    """Set to True by a call that the server has answered."""


class ClientCall(StreamListener):
    """A call from its beginning to its status. Loop-bound. One task at a time may read, and one may write. A
    task that is cancelled while it reads, writes or awaits the response cancels the call."""

    __slots__ = (
        "_arrived",
        "_callbacks",
        "_cancelled",
        "_carrier",
        "_changed",
        "_content",
        "_deadline",
        "_encoding",
        "_half_closed",
        "_head",
        "_method",
        "_opener",
        "_queue",
        "_receive_bytes_max",
        "_repeats",
        "_rest",
        "_room",
        "_sink",
        "_stream",
        "_trailers",
        "_trailing",
        "head",
        "status",
        "wait_for_ready",
    )

    def __init__(
        self,
        opener: Opener,
        method: Method,
        head: bytes,
        content: bytes | None,
        *,
        timeout_s: float | None,
        wait_for_ready: bool,
        receive_bytes_max: int,
    ) -> None:
        self.head = head
        """The header block that begins the call."""
        self.wait_for_ready = wait_for_ready
        self._content = content
        """The content of all requests. None if requests are written, or once it is not needed any more."""
        self._rest = memoryview(b"")
        """Bytes of the content, or of the request that ``write`` sends, that were not sent yet."""
        self._repeats = content is not None
        """True while the call may begin a second time: its content is kept, and no answer has come."""
        self._opener = opener
        self._method = method
        self._receive_bytes_max = receive_bytes_max
        self._stream: Http2Stream | None = None  # None before `opened`.
        self._carrier: Carrier | None = None
        self._queue: MessageQueue | None = None
        self._head: Metadata | None = None  # None before the head of the answer.
        self.status: tuple[grpc.StatusCode, str] | None = None
        """Code and text with which the call has ended; None before."""
        self._trailers: tuple[grpc.StatusCode, str] | None = None
        """The status of a successful call, until its last response is read; otherwise None."""
        self._trailing: Metadata = ()
        self._cancelled = False
        self._half_closed = content is not None  # True once no more requests may be written.
        self._callbacks: list[Callable[[Any], None]] = []
        self._changed = Waiters()
        """Wakes tasks that wait for the stream, the head of the answer, or the status."""
        self._arrived = Waiters()
        """Wakes the task that reads."""
        self._sink: Callable[[Any], None] | None = None  # None: `read` takes the responses.
        self._room = Waiters()
        """Wakes the task that writes."""
        self._deadline = (
            None
            if timeout_s is None
            else asyncio.get_running_loop().call_later(max(timeout_s, 0.0), self._expire)
        )
        opener.start(self)

    # -- called by the channel and the stream

    def opened(self, stream: Http2Stream, carrier: Carrier) -> None:
        """Take the stream, whose head was sent, and its connection."""
        self._stream, self._carrier = stream, carrier
        if self._content is not None:
            self._rest = self._send(memoryview(self._content), ended=True)
        self._changed.wake()

    def _send(self, content: memoryview, *, ended: bool) -> memoryview:
        """Send as much content as may be sent now, and return the rest."""
        assert self._stream is not None
        if self._stream.local_ended:
            return content[:0]
        return content[self._stream.send(content, ended=ended) :]

    def on_room(self) -> None:
        if self._rest:
            self._rest = self._send(self._rest, ended=self._half_closed)
        if not self._rest:
            self._room.wake()

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        """Take the head of the answer, or its trailers. End the call if gRPC does not permit them."""
        assert self._carrier is not None
        self._carrier.answered = True
        try:
            answer = reply_of(tuple(fields))
        except ValueError as error:
            self.finish(grpc.StatusCode.INTERNAL, f"the server's answer is malformed: {error}")
            return
        if ended:
            self._trailing = answer.metadata
            self._end(answer.code, answer.details)
            return
        if answer.http[:1] == b"1":
            return  # An informational status, such as 100, comes before the answer.
        if self._queue is not None:
            self.finish(grpc.StatusCode.INTERNAL, "the server sent a second head")
        elif answer.http != b"200" or not answer.is_grpc:
            self.finish(*status_of([(b":status", answer.http)]))
        elif answer.encoding not in ENCODINGS:
            name = printable(answer.encoding[:_NAME_LENGTH], one_line=True)
            self.finish(grpc.StatusCode.INTERNAL, f"messages are encoded by {name}")
        else:
            self._queue = MessageQueue(self._receive_bytes_max, answer.encoding)
            self._head = answer.metadata
            self._repeats = False
            self._changed.wake()

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        """Take content. End the call if it comes before the head, is malformed, or ends the stream."""
        stream, queue = self._stream, self._queue
        assert stream is not None
        if self.status is not None:
            stream.consume(len(content))
        elif queue is None:
            self.finish(grpc.StatusCode.INTERNAL, "the server sent content before its head")
        else:
            try:
                consumed = queue.feed(memoryview(content))
            except GazetteError as error:
                self.finish(_code_of(error), str(error))
                return
            if consumed:
                stream.consume(consumed)
            if ended:
                self.finish(grpc.StatusCode.INTERNAL, "the server ended the call without a status")
            if self._sink is None:
                self._arrived.wake()
            else:
                self._give(self._sink)

    def on_fault(self, error: GazetteError) -> None:
        """End the call after a fault. Repeat a refused call once, if it began with its requests."""
        if self._trailers is not None:
            return  # The call has succeeded already: its reader gets the responses and the status.
        name = str(error.facts.get("code"))
        if name == FaultCode.REFUSED_STREAM.name and self._repeats:
            self._repeat()
            return
        code = grpc.StatusCode.UNAVAILABLE
        if "stream" in error.facts:  # The fault is of this stream, and not of the connection.
            code = STATUS_OF_RESET.get(name, grpc.StatusCode.INTERNAL)
            if code is grpc.StatusCode.CANCELLED and self._is_late():
                self._expire()  # The server has seen the deadline first.
                return
        self.finish(code, str(error))

    def _is_late(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self._deadline is not None and now >= self._deadline.when()

    def _repeat(self) -> None:
        """Begin the call again. A server that refuses a stream has handled no part of its call."""
        assert self._stream is not None
        self._repeats = False
        self._stream.release()
        self._stream = None
        self._opener.start(self)

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with the status that the server has sent, once all responses are read."""
        queue = self._queue
        if code is grpc.StatusCode.OK and queue is not None:
            if queue.is_cut:
                code, details = grpc.StatusCode.INTERNAL, "the last response is cut short"
            elif not self._method.streams_responses and len(queue) != 1:
                code, details = grpc.StatusCode.INTERNAL, f"{len(queue)} responses instead of one"
            elif queue and self._method.streams_responses:
                # The call ends once the responses are read.
                self._trailers = (code, details)
                self._arrived.wake()
                return
        elif code is grpc.StatusCode.OK and not self._method.streams_responses:
            code, details = grpc.StatusCode.INTERNAL, "the server gave no response"
        self.finish(code, details)

    def _expire(self) -> None:
        self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, and reset its stream. Do nothing if the call has ended."""
        if self.status is not None:
            return
        self.status = (code, details)
        self._content, self._rest = None, memoryview(b"")
        if self._deadline is not None:
            self._deadline.cancel()
        stream = self._stream
        if stream is not None:
            stream.reset(FaultCode.CANCEL)  # Without effect once both sides have ended the stream.
            stream.release()
        self._opener.ended(self)
        for waiters in (self._changed, self._arrived, self._room):
            waiters.wake()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    # -- beyond grpc.aio

    @property
    def error(self) -> grpc.aio.AioRpcError | None:
        """The error with which the call has ended; None before, and after success."""
        if self.status is None or self.status[0] is grpc.StatusCode.OK:
            return None
        return self._failure(*self.status)

    # -- as in grpc.aio

    def cancel(self) -> bool:
        """End the call. Return False if it has ended before."""
        if self.status is not None:
            return False
        self._cancelled = True
        self.finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        """Return True if the call was cancelled, by either side."""
        return self.status is not None and self.status[0] is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """Return True once the call has a status."""
        return self.status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this call once the call has ended, or now if it has ended already."""
        if self.status is not None:
            callback(self)
        else:
            self._callbacks.append(callback)

    async def code(self) -> grpc.StatusCode:
        """Return the status once the call has ended."""
        return (await self._ended())[0]

    async def details(self) -> str:
        """Return the text of the status once the call has ended."""
        return (await self._ended())[1]

    async def initial_metadata(self) -> Metadata:
        """Return the metadata at the head of the answer; empty if the call ended before its head."""
        while self._head is None and self.status is None:
            await self._changed.wait()
        return self._head or ()

    async def trailing_metadata(self) -> Metadata:
        """Return the metadata that came with the status."""
        await self._ended()
        return self._trailing

    async def wait_for_connection(self) -> None:
        """Return once the call has a stream. Raise ``AioRpcError`` if the call has failed by then."""
        await self._until_opened()
        self._raise_for_status()

    async def write(self, request: Any) -> None:
        """Send a request. Return once the windows of the server and the socket have taken all of it.

        Raise ``AioRpcError`` or ``CancelledError`` if the call fails or is cancelled meanwhile, and
        ``InvalidStateError`` if the call, or its requests, ended before.
        """
        if self.status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        content = memoryview(self._method.content_of_one(request))
        with self._cancelling():
            await self._until_opened()
            if self.status is None:
                self._rest = self._send(content, ended=False)
            while self._rest:
                await self._room.wait()
        self._raise_for_status()

    def send_now(self, content: bytes) -> bool:
        """Send encoded and `prefixed` requests if the server and the socket take all of them at once.

        Otherwise send none, and return False. No ``write`` of the caller may be under way.
        """
        stream = self._stream
        if stream is None or self.status is not None or self._half_closed:
            return False
        return stream.send_whole(content)

    def listen(self, sink: Callable[[Any], None]) -> None:
        """Give each response to ``sink`` as it arrives. From then on ``read`` returns only the end."""
        self._sink = sink
        self._give(sink)

    def _give(self, sink: Callable[[Any], None]) -> None:
        while self._queue is not None and self._queue.messages:
            try:
                response = self._take()
            except grpc.aio.AioRpcError:  # The error is the status of the call now.
                return
            sink(response)

    async def done_writing(self) -> None:
        """End the requests, unless they or the call have ended. Raise ``AioRpcError`` if the call fails."""
        if self.status is not None or self._half_closed:
            return
        self._half_closed = True
        with self._cancelling():
            await self._until_opened()
            if self.status is None:
                self._send(memoryview(b""), ended=True)
        self._raise_for_status()

    async def read(self) -> Any:
        """Return the next response, or ``EOF``. Raise the error of a call that failed or was cancelled."""
        with self._cancelling():
            while not self._queue and self._trailers is None and self.status is None:
                await self._arrived.wait()
        if self._cancelled:
            raise asyncio.CancelledError
        if self._queue:
            return self._take()
        if self._trailers is not None:
            self.finish(*self._trailers)
        self._raise_for_status()
        return EOF

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._responses()

    async def _responses(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not EOF:
            yield response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._response().__await__()

    async def _response(self) -> Any:
        with self._cancelling():
            await self._ended()
        self._raise_for_status()
        return self._take()

    def _take(self) -> Any:
        """Return the next response, decoded. If decoding fails, end the call and raise ``AioRpcError``."""
        assert self._queue is not None
        try:
            message, consumed = self._queue.take()
        except GazetteError as error:
            self._queue.clear()
            self.finish(_code_of(error), str(error))
            # Replace the status: the server may have reported success.
            self.status = (_code_of(error), str(error))
            self._raise_for_status()
            raise
        if consumed and self._stream is not None:
            self._stream.consume(consumed)
        decode, response = self._method.decode, message
        try:
            if decode is not None:
                response = decode(message)
        except Exception as error:
            raise self._undecoded(error) from error
        if self._trailers is not None and not self._queue.messages:
            self.finish(*self._trailers)
        return response

    def _undecoded(self, error: Exception) -> grpc.aio.AioRpcError:
        """End the call with an error, even if its server reported success, and return the error."""
        text = printable(f"a response cannot be decoded: {error!r:.200}", one_line=True)
        code = grpc.StatusCode.INTERNAL
        self.finish(code, text)
        self.status = (code, text)
        return self._failure(code, text)

    async def _ended(self) -> tuple[grpc.StatusCode, str]:
        while self.status is None:
            await self._changed.wait()
        return self.status

    async def _until_opened(self) -> None:
        while self._stream is None and self.status is None:
            await self._changed.wait()

    @contextlib.contextmanager
    def _cancelling(self) -> Generator[None, None, None]:
        try:
            yield
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self.status is not None and self.status[0] is not grpc.StatusCode.OK:
            raise self._failure(*self.status)

    def _failure(self, code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(
            code,
            grpc.aio.Metadata(*(self._head or ())),
            grpc.aio.Metadata(*self._trailing),
            details=details,
            debug_error_string=details,
        )


def _code_of(error: GazetteError) -> grpc.StatusCode:
    """Return the status of a call that refuses a response."""
    is_too_large = isinstance(error, TooLarge)
    return grpc.StatusCode.RESOURCE_EXHAUSTED if is_too_large else grpc.StatusCode.INTERNAL
