"""The wrapper of all handlers of our gRPC servers: counts calls and messages. The metrics have the names of
the common Prometheus interceptors. A call whose caller is gone ends without a log entry."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gazette.net.grpc.handling import HandleRequest
from gazette.runtime import tracing
from gazette.runtime.clock import Clock
from gazette.runtime.metrics import (
    GRPC_SERVER_HANDLED,
    GRPC_SERVER_RECEIVED,
    GRPC_SERVER_SECONDS,
    GRPC_SERVER_SENT,
    GRPC_SERVER_STARTED,
    Tally,
    grpc_code_name,
)

_REASON_MAX: Final = 200
_TYPES = {
    (False, False): "unary",
    (False, True): "server_stream",
    (True, False): "client_stream",
    (True, True): "bidi_stream",
}


class MalformedRequest(DecodeError):
    """A message of a stream that cannot be decoded as the type that its method takes."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"malformed request: {cause}"[:_REASON_MAX])


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a unary request that cannot be decoded. If decoding raised, a traceback would be logged."""

    reason: str


def _tolerant(decode: Callable[[bytes], Any] | None, *, streaming: bool) -> Any:
    """Return a deserializer that causes no traceback in the log. For bytes that cannot be decoded, it returns
    `_Malformed` or, if ``streaming``, raises `MalformedRequest`. The wrapper of the handler refuses the call.
    """
    if decode is None:
        return None

    def tolerant(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception as error:
            malformed = MalformedRequest(error)
            if streaming:
                raise malformed from error
            return _Malformed(str(malformed))

    return tolerant


class _Requests:
    """Counts requests as the handler takes them."""

    __slots__ = ("_next", "_received", "_requests")

    def __init__(self, requests: AsyncIterator[Any], received: Tally) -> None:
        self._requests = requests
        self._next: Callable[[], Awaitable[Any]] | None = None  # None before the first request.
        self._received = received

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        if self._next is None:  # gRPC warns of an iterator that was made and never used.
            self._next = self._requests.__aiter__().__anext__
        request = await self._next()
        self._received.count += 1
        return request


class _Call:
    """The context of a call whose handler reads and writes messages itself."""

    __slots__ = ("_context", "_each", "_received", "_send_now", "_sent")

    def __init__(self, context: Any, received: Tally, sent: Tally) -> None:
        self._context = context
        self._received = received
        self._sent = sent
        self._send_now: Callable[[bytes], bool] | None = getattr(context, "send_now", None)
        self._each: Any = getattr(context, "each", None)

    async def write(self, message: Any) -> None:
        """Write a message. Raise ``CancelledError`` if the caller is gone."""
        self._sent.count += 1
        await self._context.write(message)

    @property
    def can_handle_each(self) -> bool:
        """True if the transport has ``each``."""
        return self._each is not None

    async def each(
        self,
        handle: HandleRequest,
        bound: Callable[[Awaitable[None]], Awaitable[None]],
    ) -> None:
        """Handle requests as ``GrpcCall.each`` does."""
        received = self._received

        def counted(request: Any) -> Coroutine[Any, Any, None] | None:
            received.count += 1
            return handle(request)

        await self._each(counted, bound)

    @property
    def can_send_now(self) -> bool:
        """True if the transport has ``send_now``."""
        return self._send_now is not None

    def send_now(self, content: bytes, messages: int) -> bool:
        """Send encoded messages as ``GrpcCall.send_now`` does."""
        assert self._send_now is not None
        sent = self._send_now(content)
        if sent:
            self._sent.count += messages
        return sent

    def read(self) -> Any:
        self._received.count += 1
        return self._context.read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class MeasuredMethod:
    """Metrics of one method, and its handler in a wrapper that counts calls and messages.

    The wrapper is always a coroutine function. It sends the responses of a stream by the call's ``write``.
    """

    def __init__(self, name: str, handler: grpc.RpcMethodHandler[Any, Any], clock: Clock) -> None:
        service, _, method = name.lstrip("/").partition("/")
        streams = (bool(handler.request_streaming), bool(handler.response_streaming))
        self.name = name
        self.labels = (_TYPES[streams], service, method)
        self._clock = clock
        self._started = GRPC_SERVER_STARTED.labels(*self.labels)
        self._received = GRPC_SERVER_RECEIVED.labels(*self.labels)
        self._sent = GRPC_SERVER_SENT.labels(*self.labels)
        self._seconds = GRPC_SERVER_SECONDS.labels(*self.labels)
        self._handled: dict[Any, Tally] = {}
        """Counters by the status of a call."""
        self.inner = handler
        self.handler = self._wrapped(handler, streams)

    def _wrapped(self, handler: Any, streams: tuple[bool, bool]) -> Any:
        make, inner = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }[streams]
        generates = inspect.isasyncgenfunction(inner)
        behavior = self._coroutine(_writing(inner) if generates else inner)
        decode = _tolerant(handler.request_deserializer, streaming=streams[0])
        return make(behavior, decode, handler.response_serializer)

    def _request(self, request: Any) -> Any:
        if self.inner.request_streaming:
            return _Requests(request, self._received)
        self._received.count += 1
        return request

    def _coroutine(self, inner: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Return ``inner`` in a wrapper that measures and traces the call, and counts its messages."""

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            counting_context: Any = context
            if self.inner.response_streaming:
                counting_context = _Call(context, self._received, self._sent)
            with self._measured(context), self._traced(context):
                if isinstance(request, _Malformed):
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.reason)
                try:
                    response = await inner(self._request(request), counting_context)
                except MalformedRequest as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                if response is not None:
                    self._sent.count += 1
                return response

        return call

    def _traced(self, context: Any) -> AbstractContextManager[None]:
        if not tracing.active():
            return nullcontext()
        return tracing.serving(self.name, context.invocation_metadata())

    @contextmanager
    def _measured(self, context: Any) -> Iterator[None]:
        """Count the block as a call, with its duration and its status."""
        self._started.count += 1
        begin = self._clock.monotonic()
        code = grpc.StatusCode.UNKNOWN
        try:
            yield
            code = context.code() or grpc.StatusCode.OK
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AbortError:
            code = context.code() or code
            raise
        finally:
            self._count_end(code, self._clock.monotonic() - begin)

    def _count_end(self, code: Any, seconds: float) -> None:
        self._seconds.observe(seconds)
        counter = self._handled.get(code)
        if counter is None:
            name = grpc_code_name(_code(code))
            counter = self._handled[code] = GRPC_SERVER_HANDLED.labels(*self.labels, name)
        counter.count += 1

    def count(self, code: grpc.StatusCode, seconds: float, received: int) -> None:
        """Count a call that ended outside of the wrapper, with one response if its status is OK."""
        self._started.count += 1
        self._received.count += received
        if code is grpc.StatusCode.OK:
            self._sent.count += 1
        self._count_end(code, seconds)


def _writing(
    generator: Callable[[Any, Any], AsyncIterator[Any]],
) -> Callable[[Any, Any], Awaitable[None]]:
    """Adapt a handler that yields its responses: return a handler that writes them."""

    async def call(request: Any, context: Any) -> None:
        responses = generator(request, context)
        try:
            async for response in responses:
                await context.write(response)
        finally:
            if isinstance(responses, AsyncGenerator):
                await responses.aclose()

    return call


def _code(code: Any) -> Any:
    """Return a status as ``StatusCode``: contexts of aio give an integer."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((status for status in grpc.StatusCode if status.value[0] == code), code)
