"""A gRPC server over our own HTTP/2: it takes handlers as `grpc.aio.server` does. A task serves each call,
except calls that are served as a whole (`whole_call`).

Each connection is a protocol of asyncio that passes bytes to `connection`, and calls to the handlers. If its
first bytes are not HTTP/2, an HTTP server of the process gets the connection: one port serves both.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
import grpc.aio
import msgspec

from gazette.errors import GazetteError, NotAllowed, Unavailable
from gazette.http2.connection import (
    STREAMS_MAX,
    BytesLike,
    Http2Connection,
    Http2Stream,
    StreamListener,
)
from gazette.http2.frames import FaultCode
from gazette.http2.headers import Fields, RequestHead, encode_fields
from gazette.http2.messages import ENCODINGS, MessageQueue
from gazette.http2.metadata import EOF, Metadata, is_grpc, timeout_of
from gazette.http2.socket import CLOSING_S
from gazette.net.grpc.call_metrics import MeasuredMethod
from gazette.net.grpc.grpc_call import GrpcCall, status_of_fault
from gazette.net.grpc.held_memory import HELD_MAX, HeldMemory
from gazette.net.grpc.server_connection import ServerConnection
from gazette.net.grpc.turns import Turns
from gazette.net.grpc.unfinished import Unfinished
from gazette.net.grpc.whole_call import GATHER_S, TakeWhole, WholeCall
from gazette.net.http_accept import Acceptor
from gazette.net.http_server import FIRST_REQUEST_S, ReloadedTls
from gazette.protocol.error_codes import code_of
from gazette.runtime import tracing
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout

log = logging.getLogger(__name__)

TASK_WORK: Final = 12
"""Work of a call that a task serves, in addition to its frames: see `turns`."""
_HANDED_MAX: Final = 16
"""Greatest number of tasks that begin in one turn of the loop, for calls that were not complete in time."""
_DRAIN_S: Final = 0.5
"""Seconds in which the server still takes calls that clients began before they learned of its end."""
_REFUSED_MAX: Final = 2 * STREAMS_MAX
"""Greatest number of requests that were refused and have not ended: twice a connection's streams."""
_NOT_GRPC: Final = (
    b"This port serves gRPC by HTTP/2. For the HTTP gateway and /debug use HTTP/1.1.\n"
)


Admit: TypeAlias = Callable[[str, Metadata], None]
"""Raises ``NotAllowed`` if a caller with this metadata may not call the method at this path.
Raises ``Unavailable`` if that is not known now."""


class _Method(msgspec.Struct, frozen=True):
    """A method as it is served: its handler, wrapped so that calls are counted.

    ``take`` gets the method's whole calls first (None: nothing does). ``admit`` checks the heads of all other
    calls (None: the handler checks them).
    """

    path: bytes
    call: Any
    request_streaming: bool
    response_streaming: bool
    decode: Any
    encode: Any
    measured: MeasuredMethod
    take: TakeWhole | None
    admit: Admit | None


class _Plan(msgspec.Struct, frozen=True):
    """The method, encoding and time limit of a request, or the status that refuses it."""

    encoding: str
    method: _Method | None = None
    timeout_s: float | None = None
    refusal: tuple[grpc.StatusCode, str] | None = None


class _Details(NamedTuple):
    """The key by which generic handlers look a method up."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class GrpcServer:
    """Serves handlers to at most ``limit`` connections, of ``streams_max`` calls each. Loop-bound.

    ``max_recv_bytes`` bounds a request, and ``held_max`` the memory of requests and responses that wait. Call
    ``listen``, then ``start``, then ``stop``.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_recv_bytes: int,
        limit: int,
        streams_max: int = STREAMS_MAX,
        held_max: int = HELD_MAX,
    ) -> None:
        self._clock = clock
        self.streams_max = streams_max
        self._scope = TaskScope("grpc")
        self._max_recv_bytes = max_recv_bytes
        self._limit = limit
        self._listener: socket.socket | None = None
        self._tls: ReloadedTls | None = None
        self._acceptor: Acceptor | None = None
        self._handlers: list[tuple[grpc.GenericRpcHandler[Any, Any], Admit | None]] = []
        self._methods: dict[bytes, _Method] = {}
        self._takers: dict[str, TakeWhole] = {}
        self._fresh: dict[WholeCall, None] = {}
        """Calls of which a part has arrived since the last ``begin_calls``."""
        self._gathering: dict[WholeCall, None] = {}
        """Calls whose end has not arrived, oldest first."""
        self._gathered: asyncio.TimerHandle | None = None
        """The timer of ``_stop_gathering``, if it is set."""
        self._whole: dict[WholeCall, None] = {}
        """Whole calls that were taken and not answered yet."""
        self.connections: dict[ServerConnection, None] = {}
        """All connections, in the order in which they were made."""
        self._calls: set[asyncio.Task[None]] = set()
        self.turns = Turns(clock.monotonic, _call_soon)
        """The turns in which connections handle what arrives."""
        self._memory = HeldMemory(held_max)
        self._unfinished = Unfinished(clock.monotonic)
        # Strangers make refused requests: these must evict no calls.
        self._refused = Unfinished(clock.monotonic, _REFUSED_MAX)
        self.http1: Callable[[asyncio.Transport, bytes], None] | None = None
        """Takes a connection of HTTP/1.1, with its first bytes. None: such connections are ended."""
        self.decided = asyncio.Event()
        """Set during ``stop``, once no connection can be passed on to ``http1`` any more."""
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(
        self, handlers: Iterable[grpc.GenericRpcHandler[Any, Any]], admit: Admit | None = None
    ) -> None:
        """Serve the methods of ``handlers``, too. If several handlers know a method, the first serves it.

        ``admit`` checks the head of each call. Without ``admit``, an attribute ``admit`` of the method itself
        checks the head, if there is such an attribute. With either check, the first message must arrive
        within `unfinished.FIRST_MESSAGE_S`. Methods of one request always have this limit.
        """
        self._handlers += [(handler, admit) for handler in handlers]

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Serve methods of a service by name. Generated code registers each servicer in both ways."""
        table = grpc.method_handlers_generic_handler(service, dict(handlers))
        self.add_generic_rpc_handlers((table,))

    def take_whole_calls(self, path: str, take: TakeWhole) -> None:
        """Offer the whole calls of a method to ``take``. The method's handler serves all others.

        While OpenTelemetry traces calls, the handler serves all of them.
        """
        self._takers[path] = take

    def listen(self, listener: socket.socket, tls: ReloadedTls | None) -> None:
        """Take over a listening socket. Connections wait until ``start``."""
        self._listener, self._tls = listener, tls

    async def start(self) -> None:
        """Accept connections."""
        assert self._listener is not None, "listen() comes first"
        self._acceptor = Acceptor(
            self._listener,
            self._scope,
            self.connect,
            limit=self._limit,
            count=lambda: len(self.connections),
            make_room=self._make_room,
            tls=self._tls_context(),
            refusal=b"",
        )
        self._acceptor.start()

    def _tls_context(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        # A gRPC client offers only h2. A client that offers both, such as a browser, gets HTTP/1.1: the HTTP
        # gateway does not speak HTTP/2.
        return self._tls.context(*(("http/1.1", "h2") if self.http1 is not None else ("h2",)))

    def connect(self, made: Callable[[], None] = lambda: None) -> ServerConnection:
        """Make the protocol of a new connection, which calls ``made`` once the connection is made."""
        return ServerConnection(self, made)

    def _make_room(self) -> bool:
        """End a connection on which no call has a message, or return False. Choose first among clients that
        never sent a message; among equals, the connection that is longest without a call."""
        unfinished = self._unfinished.by_connection()
        useless = [
            connection
            for connection in self.connections
            if connection.http2.running == unfinished[connection.http2]
            and not connection.is_closing
        ]
        if not useless:
            return False
        min(useless, key=lambda client: (client.http2.is_known, client.busy_at)).give_up()
        return True

    async def stop(self, grace_s: float) -> None:
        """Take no more calls. Let running calls end within ``grace_s``, then cancel them.

        Wait `FIRST_REQUEST_S` at most for the first bytes of undecided connections. For `_DRAIN_S` at most,
        still take calls that clients began before they learned of the stop.
        Cancellation has the effect of the end of ``grace_s``.
        """
        try:
            async with timeout(grace_s):
                if self._acceptor is not None:
                    await self._acceptor.stop()
                await self._wait(FIRST_REQUEST_S, lambda connection: connection.is_undecided)
                self.decided.set()
                for connection in list(self.connections):
                    connection.drain(last=False)
                await self._wait(min(_DRAIN_S, grace_s / 2), lambda connection: connection.is_busy)
                for connection in list(self.connections):
                    connection.drain(last=True)
                await self._wait(None, lambda connection: connection.is_busy)
        except TimeoutError:
            log.debug("%(count)d calls are cut off", {"count": len(self._calls)})
        finally:
            self.decided.set()
            self._stop_listening()
            for call in [*self._gathering, *self._whole]:
                call.give_up(grpc.StatusCode.UNAVAILABLE, "the server stops")
            for task in list(self._calls):
                task.cancel("the server stops")
            try:
                if self._calls:
                    await asyncio.wait(set(self._calls), timeout=CLOSING_S)
            finally:
                await self._close_connections()
                self._stopped.set()

    async def _close_connections(self) -> None:
        """Close all connections. Return once all sockets are closed."""
        for connection in list(self.connections):
            connection.close()  # A connection cuts itself off if its peer takes too long.
        while self.connections:
            self._changed.clear()
            await self._changed.wait()

    def _stop_listening(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        if self._listener is not None:
            self._listener.close()
        self._acceptor = self._listener = None

    async def _wait(
        self, timeout_s: float | None, holds_up: Callable[[ServerConnection], bool]
    ) -> None:
        """Return once ``holds_up`` is False for all connections, or after ``timeout_s``."""
        try:
            async with timeout(timeout_s):
                while any(holds_up(connection) for connection in self.connections):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    async def wait_for_termination(self) -> None:
        """Return once ``stop`` has cut off all calls and closed all sockets."""
        await self._stopped.wait()

    def changed(self) -> None:
        """Note that a call or a connection has ended."""
        self._changed.set()

    def lost(self, connection: ServerConnection) -> None:
        """Forget a connection."""
        self.connections.pop(connection, None)
        self._changed.set()

    # -- calls

    def accept(self, stream: Http2Stream, request: RequestHead, ended: bool) -> StreamListener:
        """Begin a call of the peer: a `WholeCall` if its method takes whole calls. Refuse all but gRPC."""
        del ended
        plan: _Plan | None = request.plan
        if plan is None:
            plan = request.plan = self._plan(request)
            if plan is None:
                return _refuse(stream, self._refused)
        method = plan.method
        if method is not None and method.take is not None:
            call = WholeCall(self, stream, request, method, plan.timeout_s, self._clock.monotonic())
            self._fresh[call] = None
            return call
        return self._begin(stream, request, plan)

    def _plan(self, request: RequestHead) -> _Plan | None:
        """Return the plan of a request; None if the request is no gRPC call."""
        fields = dict(request.fields)
        content_type = fields.get(b"content-type", b"")
        if request.method != b"POST" or not is_grpc(content_type):
            return None
        encoding = fields.get(b"grpc-encoding", b"identity").decode("latin-1")
        method = self._method(request.path)
        code = grpc.StatusCode.UNIMPLEMENTED
        if method is None:
            return _Plan(encoding, refusal=(code, "Method not found!"))
        if encoding not in ENCODINGS:
            return _Plan(encoding, refusal=(code, f"messages cannot be encoded by {encoding}"))
        try:
            return _Plan(encoding, method, timeout_of(request.fields))
        except ValueError as error:
            return _Plan(encoding, refusal=(grpc.StatusCode.INTERNAL, str(error)))

    def _begin(self, stream: Http2Stream, request: RequestHead, plan: _Plan) -> GrpcCall:
        """Begin a call that a task serves."""
        queue = MessageQueue(self._max_recv_bytes, plan.encoding)
        call = GrpcCall(stream, request, queue, self._memory)
        method = plan.method
        if method is None:
            assert plan.refusal is not None
            call.finish(*plan.refusal)
            return call
        stream.charge(TASK_WORK)
        if not self._admitted(call, method):
            return call
        call.decode, call.encode = method.decode, method.encode
        if method.admit is not None or not method.request_streaming:
            call.unfinished = self._unfinished
            self._unfinished.add(call)
        self._spawn(call, self._run(call, method, plan.timeout_s), method)
        return call

    def _admitted(self, call: GrpcCall, method: _Method) -> bool:
        """Check the head of a call. Return False if the check has ended the call."""
        if method.admit is not None:
            try:
                method.admit(method.measured.name, call.invocation_metadata())
            except (NotAllowed, Unavailable) as error:
                code = code_of(error)
                call.finish(code, error.message)
                method.measured.count(code, 0.0, 0)
                return False
        return True

    def _spawn(self, call: GrpcCall, running: Coroutine[Any, Any, None], method: _Method) -> None:
        """Serve a call by a task. The end of the task ends the call in any case."""
        task = self._scope.spawn(running, name=method.path.decode("latin-1"))
        call.task = task
        self._calls.add(task)

        def finish(done: asyncio.Task[None]) -> None:
            self._calls.discard(done)
            # A task that was cancelled before it began has not finished its call.
            call.finish(grpc.StatusCode.CANCELLED)

        task.add_done_callback(finish)

    def begin_calls(self) -> None:
        """Serve the calls that the last reads of sockets have completed. Give long calls to tasks.

        While calls are traced, give all to tasks. Incomplete calls have `GATHER_S` to become complete.
        """
        if not self._fresh:
            return
        complete_calls: dict[bytes, list[WholeCall]] = {}
        traced = tracing.active()
        fresh_calls, self._fresh = self._fresh, {}
        for call in fresh_calls:
            if not call.is_open:
                continue
            if traced or call.is_long:
                call.hand_back()
            elif call.stream.remote_ended:
                self._gathering.pop(call, None)
                complete_calls.setdefault(call.method.path, []).append(call)
            else:
                call.keep()
                self._gathering[call] = None
        if self._gathering and self._gathered is None:
            loop = asyncio.get_running_loop()
            self._gathered = loop.call_later(GATHER_S, self._stop_gathering)
        for calls in complete_calls.values():
            self._offer(calls)

    def arrived(self, call: WholeCall) -> None:
        """See ``CallOwner.arrived``."""
        if call in self._gathering:
            self._fresh[call] = None

    def _stop_gathering(self) -> None:
        """Serve by tasks the calls that were not complete in time. Set the timer again for younger calls."""
        self._gathered, handed_back = None, 0
        now = self._clock.monotonic()
        while self._gathering:
            call = next(iter(self._gathering))
            if call.stream.remote_ended:  # The call is complete: ``begin_calls`` serves it.
                del self._gathering[call]
                continue
            left_s = call.began + GATHER_S - now
            if left_s > 0 or handed_back == _HANDED_MAX:
                loop = asyncio.get_running_loop()
                self._gathered = loop.call_later(max(left_s, 0.0), self._stop_gathering)
                return
            del self._gathering[call]
            call.hand_back()
            handed_back += 1

    def _offer(self, calls: list[WholeCall]) -> None:
        """Offer whole calls of one method to its function. Tasks serve the calls that the function leaves."""
        self._whole.update(dict.fromkeys(calls))
        try:
            declined = calls[0].method.take(calls)
        except Exception as error:
            log.exception("whole calls could not be taken")
            for call in calls:
                call.give_up(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            return
        for call in declined:
            call.hand_back()
        for call in calls:
            call.limit()

    def serve_by_task(self, call: WholeCall) -> None:
        """See ``CallOwner.serve_by_task``."""
        self._whole.pop(call, None)
        self._gathering.pop(call, None)
        stream, ended = call.stream, call.stream.remote_ended
        listener = stream.listener = self._begin(stream, call.request, call.request.plan)
        content = call.content()
        if content:
            listener.on_data(content, ended=ended)
        elif ended:
            listener.on_fields([], ended=True)

    def answer_by_task(self, call: WholeCall, response: bytes) -> None:
        """See ``CallOwner.answer_by_task``."""
        self._whole.pop(call, None)
        queue = MessageQueue(self._max_recv_bytes)
        answering = GrpcCall(call.stream, call.request, queue, self._memory)
        call.stream.listener = answering

        left_s = call.timeout_s
        if left_s is not None:
            left_s = max(0.0, call.began + left_s - self._clock.monotonic())

        async def answer() -> None:
            code, details = grpc.StatusCode.OK, ""
            try:
                async with timeout(left_s):
                    await answering.write(response)
            except TimeoutError:
                code, details = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
            answering.finish(code, details)
            seconds = self._clock.monotonic() - call.began
            call.method.measured.count(code, seconds, call.received)

        self._spawn(answering, answer(), call.method)

    def answered(self, call: WholeCall, code: grpc.StatusCode) -> None:
        """See ``CallOwner.answered``."""
        self._whole.pop(call, None)
        self._gathering.pop(call, None)
        if code is grpc.StatusCode.OK:
            call.stream.connection.is_known = True
        seconds = self._clock.monotonic() - call.began
        call.method.measured.count(code, seconds, call.received)

    def _method(self, path: bytes) -> _Method | None:
        """Return the method at a path, wrapped once; None if no handler knows it."""
        method = self._methods.get(path)
        if method is None:
            name = path.decode("latin-1")
            for handler, admit in self._handlers:
                rpc = handler.service(_Details(name))  # type: ignore[arg-type]
                if rpc is not None:
                    method = _measured(name, rpc, self._clock, self._takers.get(name), admit)
                    self._methods[path] = method
                    break
        return method

    async def _run(self, call: GrpcCall, method: _Method, timeout_s: float | None) -> None:
        """Run a call to its end. Only a cancellation from outside is raised."""
        deadline = timeout(timeout_s)
        try:
            async with deadline:
                call.ends_at = deadline.when()
                request = call if method.request_streaming else await _only_request(call)
                response = await method.call(request, call)
                if not method.response_streaming:
                    await call.write(response)
            call.finish(call.code() or grpc.StatusCode.OK, call.details())
        except grpc.aio.AbortError:
            call.finish(call.code() or grpc.StatusCode.UNKNOWN, call.details())
        except TimeoutError as error:
            if deadline.expired():
                call.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            else:
                self._defect(call, error)
        except asyncio.CancelledError:
            if not call.is_over:
                task = asyncio.current_task()
                stops = task is not None and task.cancelling()
                text = "the server stops" if stops else "the handler was cancelled"
                call.finish(grpc.StatusCode.UNAVAILABLE, text)
                raise
            call.finish(grpc.StatusCode.CANCELLED)
        except GazetteError as error:
            if error is not call.fault:
                self._defect(call, error)
            else:
                call.finish(status_of_fault(error), str(error))
        except Exception as error:  # noqa: BLE001 - one handler's defect must not end the server
            self._defect(call, error)

    def _defect(self, call: GrpcCall, error: Exception) -> None:
        log.error("a handler of gRPC has failed: %(error)r", {"error": error}, exc_info=error)
        call.finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")


def _call_soon(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)


async def _only_request(call: GrpcCall) -> Any:
    """Return the request of a call that has exactly one. Otherwise end the call, and raise ``AbortError``."""
    request = await call.read()
    if request is EOF:
        await call.abort(grpc.StatusCode.INTERNAL, "the call has no request")
    if await call.read() is not EOF:
        await call.abort(grpc.StatusCode.INTERNAL, "the call has more than one request")
    return request


def _measured(
    name: str, handler: Any, clock: Clock, take: TakeWhole | None, admit: Admit | None
) -> _Method:
    """Wrap a handler of a method, so that its calls are counted. ``admit`` None: use the handler's check."""
    measured = MeasuredMethod(name, handler, clock)
    wrapped = measured.handler
    shapes = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    (shape,) = (shape for shape in shapes if getattr(handler, shape) is not None)
    call = getattr(wrapped, shape)
    admit = admit or getattr(getattr(handler, shape), "admit", None)
    return _Method(
        name.encode("latin-1"),
        call,
        bool(wrapped.request_streaming),
        bool(wrapped.response_streaming),
        wrapped.request_deserializer,
        wrapped.response_serializer,
        measured,
        take,
        admit,
    )


class _Ignoring:
    """Answers a request with a text, and ignores the rest of the request, for a while."""

    def __init__(self, stream: Http2Stream, content: bytes, refused: Unfinished) -> None:
        self._stream = stream
        self._content = memoryview(content)
        self._refused = refused

    @property
    def connection(self) -> Http2Connection:
        return self._stream.connection

    def answer(self) -> None:
        """Send as much of the answer's content as may be sent now."""
        stream = self._stream
        if not stream.local_ended:
            self._content = self._content[stream.send(self._content, ended=True) :]
        if stream.over:
            self._release()

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """Reset the stream: the rest of the request is not needed."""
        answered = self._stream.local_ended
        self._stream.reset(FaultCode.NO_ERROR if answered else FaultCode.CANCEL)
        self._release()

    def _release(self) -> None:
        self._refused.discard(self)
        self._stream.release()

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        """Ignore trailers."""
        if self._stream.over:
            self._release()

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        """Ignore content."""
        self._stream.consume(len(content))
        if self._stream.over:
            self._release()

    def on_fault(self, error: GazetteError) -> None:
        """Give up the stream."""
        self._release()

    def on_room(self) -> None:
        """Send more of the answer's content."""
        self.answer()


def _refuse(stream: Http2Stream, refused: Unfinished) -> StreamListener:
    """Answer with a text to a request that is not gRPC."""
    head = [(b":status", b"415"), (b"content-type", b"text/plain; charset=utf-8")]
    stream.send_fields(encode_fields(head), ended=False)
    listener = _Ignoring(stream, _NOT_GRPC, refused)
    refused.add(listener)
    listener.answer()
    return listener
