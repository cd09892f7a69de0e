"""Stage 5 of the byte path: takes messages from `pipeline`, gives them to `broker/api/replicate` of one peer.

One Replicate call, in full duplex. Sending never waits for answers, and answers are taken as they arrive. So
the stream notices a peer that goes away even while it waits for no answer.

A message goes out at once if the transport permits it, and otherwise by a task. An idle stream has no task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import grpc
import grpc.aio

from gazette.client.rpc.errors import rpc_error
from gazette.client.rpc.stream_call import StreamCall
from gazette.errors import Broken, Closed, GazetteError, Unavailable
from gazette.http2.messages import prefixed
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2
from gazette.runtime.tasks import TaskScope

OUTBOX_BYTES_MAX: Final = 1 << 20
"""Upper bound of bytes that wait to be sent to one peer. A single message may exceed this limit."""
_INBOX_MAX: Final = 1 << 14
"""Greatest number of answers that wait to be gathered: a peer that sends more is cut off.

Answers of one peer wait while another peer stalls, one for each append that is in flight.
"""


def _do_nothing() -> None:
    pass


class _Answers:
    """The answers of a peer that have arrived, in order, and a watch over the answers that the peer owes.

    ``on_late`` is called if the peer makes no progress for ``timeout_s`` while it owes an expected answer.
    One timer watches all expected answers.
    """

    __slots__ = ("_expected", "_on_late", "_progressed_at", "_timer", "arrived", "timeout_s")

    def __init__(self, timeout_s: float, on_late: Callable[[str], None]) -> None:
        self.timeout_s = timeout_s
        self.arrived: deque[broker_pb2.ReplicateResponse] = deque()
        self._on_late = on_late
        self._expected = 0
        """Answers that ``expect`` has announced, and ``drop_first`` has not removed."""
        self._progressed_at = 0.0
        """The loop's time of the last progress while answers were expected."""
        self._timer: asyncio.TimerHandle | None = None

    def expect(self) -> None:
        """Expect one more answer."""
        loop = asyncio.get_running_loop()
        if not self._expected:
            self._progressed_at = loop.time()
        self._expected += 1
        if self._timer is None:
            self._timer = loop.call_later(self.timeout_s, self._look)

    def drop_first(self) -> None:
        """Remove the next answer, which was expected and has arrived."""
        self.arrived.popleft()
        self._expected -= 1

    def progressed(self) -> None:
        """Note that the peer has taken or sent something."""
        if self._expected:
            self._progressed_at = asyncio.get_running_loop().time()

    def end(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._expected:
            return
        loop = asyncio.get_running_loop()
        left_s = self._progressed_at + self.timeout_s - loop.time()
        if self.arrived:  # This peer is not late: its answer waits for another peer's answer.
            left_s = self.timeout_s
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._look)
        else:
            self._on_late("does not answer")


class PeerStream:
    """The local end of a Replicate call to ``peer``. Loop-bound.

    ``call`` takes encoded requests, and gives answers as they arrive. A task of ``scope`` sends messages that
    cannot go out at once; it never raises. ``failure`` is set once the call cannot be used any more. Answers
    that arrived before the failure can still be received. ``on_progress`` is called when an answer arrives,
    when a queued message has gone out, and when the call fails.
    """

    def __init__(
        self, peer: ProcessId, call: StreamCall, scope: TaskScope, *, timeout_s: float
    ) -> None:
        self.peer = peer
        self.failure: GazetteError | None = None
        self._call = call
        self._scope = scope
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._closing = False  # True once the requests are to end.
        self._ended = False  # True once the call has ended.
        self._answers = _Answers(timeout_s, self._cut_off)
        self._sender: asyncio.Task[None] | None = None
        """Sends the outbox, and the end of the requests. None: nothing waits to be sent."""
        self._progress: dict[asyncio.Future[None], None] = {}
        self.on_progress: Callable[[], None] = _do_nothing
        call.listen(self._on_response)
        call.on_end(self._on_end)

    @property
    def crowded(self) -> bool:
        """True if ``room`` must be awaited before more content is sent."""
        return self._outbox_bytes >= OUTBOX_BYTES_MAX and self.failure is None

    @property
    def is_idle(self) -> bool:
        """True if all that was sent has gone out, and the call can take more."""
        return self._sender is None and self.failure is None and not self._closing

    def send(self, *messages: bytes) -> None:
        """Send encoded ReplicateRequests, or queue them. No effect once the call has failed."""
        if self.failure is not None:
            return
        if self._sender is not None:
            self._queue(messages)
        else:
            self.send_joined(b"".join(map(prefixed, messages)), *messages)

    def send_joined(self, joined: bytes, *messages: bytes) -> None:
        """Send messages as ``send`` does. ``joined`` are the same messages, each `prefixed`, in one piece."""
        if self.failure is not None:
            return
        if self._sender is not None or not self._call.send_now(joined, len(messages)):
            self._queue(messages)

    def _queue(self, messages: Sequence[bytes]) -> None:
        self._outbox.extend(messages)
        self._outbox_bytes += sum(map(len, messages))
        self._begin_sending()

    async def room(self) -> None:
        """Return once there is room for more content.

        Raise ``Unavailable`` if the call makes no progress for ``timeout_s``, or the call's failure.
        Cancellation: no effect.
        """
        while self.crowded:
            await self._progressed("takes no content")
        if self.failure is not None:
            raise self.failure

    async def receive(self) -> broker_pb2.ReplicateResponse:
        """Return the next answer, in order.

        Raise ``Unavailable`` if the call makes no progress for ``timeout_s``, or the call's failure.
        Cancellation: no answer was taken.
        """
        while not self._answers.arrived:
            if self.failure is not None:
                raise self.failure
            await self._progressed("does not answer")
        return self._answers.arrived.popleft()

    def expect(self) -> None:
        """Expect one more answer. If the peer makes no progress for ``timeout_s``, end the call."""
        if self.failure is None:
            self._answers.expect()

    @property
    def answer(self) -> broker_pb2.ReplicateResponse | None:
        """The next answer, in order. None: it has not arrived."""
        arrived = self._answers.arrived
        return arrived[0] if arrived else None

    def drop_answer(self) -> None:
        """Remove the next answer, which was expected and has arrived."""
        self._answers.drop_first()

    def close_send(self) -> None:
        """End the requests, once the queued requests are sent."""
        self._closing = True
        self._begin_sending()

    async def wait_end(self) -> None:
        """Return when the call has ended. After ``timeout_s`` without progress, cut the peer off."""
        while not self._ended:
            await self._progressed("does not end its stream")

    def cancel(self, failure: GazetteError) -> None:
        """End the call at once. The peer gives up uncommitted content."""
        self._fail(failure)
        if self._sender is not None:
            self._sender.cancel()
        self._call.cancel()

    async def _progressed(self, lack: str) -> None:
        """Wait for any progress of the call. After ``timeout_s`` without progress, end the call."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._progress[waiter] = None
        timer = loop.call_later(self._answers.timeout_s, self._expire, waiter, lack)
        try:
            await waiter
        finally:
            timer.cancel()
            self._progress.pop(waiter, None)

    def _expire(self, waiter: asyncio.Future[None], lack: str) -> None:
        """Cut the peer off, unless there was progress. Tasks that wait for progress get the failure."""
        if not waiter.done():
            self._cut_off(lack)

    def _cut_off(self, lack: str) -> None:
        self.cancel(
            Unavailable(
                f"peer {self.peer} {lack}",
                hint="Check that broker and the network to it. The route changes once its lease ends.",
                timeout_s=self._answers.timeout_s,
            )
        )

    def _begin_sending(self) -> None:
        if self._sender is None and not self._ended and not self._scope.is_stopping:
            self._sender = self._scope.spawn(self._send_all(), name=f"send to {self.peer}")

    def _wake(self) -> None:
        self._answers.progressed()
        for waiter in self._progress:
            if not waiter.done():
                waiter.set_result(None)
        self.on_progress()

    def _fail(self, failure: GazetteError) -> None:
        """Note why the call cannot be used any more, drop unsent messages, and wake all waiting tasks."""
        if self.failure is None:
            self.failure = failure
        self._outbox.clear()
        self._outbox_bytes = 0
        self._answers.end()
        self._wake()
        self.on_progress = _do_nothing  # No progress follows. This frees the pipeline.

    async def _send_all(self) -> None:
        """Send the outbox, until it is empty or the call ends. Then end the requests if that is due."""
        try:
            while self._outbox and self.failure is None:
                message = self._outbox.popleft()
                if not await self._call.write(message):
                    return  # The call has ended, with the reason in ``failure``.
                self._outbox_bytes = max(self._outbox_bytes - len(message), 0)
                self._wake()
            if self._closing and self.failure is None:
                await self._call.done_writing()
        finally:
            self._sender = None

    def _on_end(self, error: grpc.aio.AioRpcError | None) -> None:
        self._ended = True
        if error is None:
            self._fail(Broken(f"recv from {self.peer}: unexpected EOF"))
        elif error.code() is grpc.StatusCode.CANCELLED:
            self._fail(Closed(f"the stream to {self.peer} was cancelled, or its channel closed"))
        else:
            self._fail(rpc_error(error, f"Replicate to {self.peer}"))

    def _on_response(self, response: broker_pb2.ReplicateResponse) -> None:
        self._answers.arrived.append(response)
        if len(self._answers.arrived) > _INBOX_MAX:
            self.cancel(Broken(f"peer {self.peer} sent an answer without a request"))
        self._wake()
