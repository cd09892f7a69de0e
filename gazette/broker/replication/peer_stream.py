"""Stage 5 of the byte path: takes messages from `pipeline`, gives them to `broker/api/replicate` of one peer.

One Replicate call, in full duplex. Sending never waits for answers, and answers are taken as they arrive. So
the stream notices a peer that goes away even while it waits for no answer.

A message goes out at once if the transport can, and otherwise by a task. The same holds for answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import grpc.aio

from gazette.client.rpc.errors import END_OF_STREAM, rpc_error
from gazette.client.rpc.stream_call import StreamCall
from gazette.errors import Broken, Closed, GazetteError, Unavailable
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2
from gazette.runtime.tasks import TaskScope

OUTBOX_BYTES_MAX: Final = 1 << 20
"""Bytes that may wait to be sent to one peer; one message may exceed it."""
_INBOX_MAX: Final = 1024
"""Answers that may wait to be gathered: more than appends can be in flight."""


class PeerStream:
    """The local end of a Replicate call to ``peer``. Loop-bound.

    ``call`` takes encoded requests. Two tasks of ``scope`` send and receive; they end with the call and
    never raise. ``failure`` is set once the call is of no further use. Answers that arrived before the
    failure can still be received.
    """

    def __init__(
        self, peer: ProcessId, call: StreamCall, scope: TaskScope, *, timeout_s: float
    ) -> None:
        self.peer = peer
        self.failure: GazetteError | None = None
        self._call = call
        self._timeout_s = timeout_s
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._closing = False
        self._ended = False
        self._inbox: deque[broker_pb2.ReplicateResponse] = deque()
        self._sending = False
        """The sender has taken a message that is not sent yet."""
        self._to_send: asyncio.Future[None] | None = None
        self._progress: dict[asyncio.Future[None], None] = {}
        call.listen(self._take)
        self._sender = scope.spawn(self._send_all(), name=f"send to {peer}")
        self._receiver = scope.spawn(self._receive_all(), name=f"receive from {peer}")

    @property
    def crowded(self) -> bool:
        """True if ``room`` must be awaited before more content is sent."""
        return self._outbox_bytes >= OUTBOX_BYTES_MAX and self.failure is None

    def send(self, *messages: bytes) -> None:
        """Queue encoded ReplicateRequests. Has no effect once the call has failed."""
        if self.failure is not None:
            return
        if not self._outbox and not self._sending and self._call.send_now(*messages):
            return
        self._outbox.extend(messages)
        self._outbox_bytes += sum(map(len, messages))
        self._wake_sender()

    async def room(self) -> None:
        """Return once there is room for more content.

        Raise ``Unavailable`` if the peer takes nothing for ``timeout_s``, or the call's
        failure. Cancellation: no effect.
        """
        while self.crowded:
            await self._progressed("takes no content")
        if self.failure is not None:
            raise self.failure

    async def receive(self) -> broker_pb2.ReplicateResponse:
        """Return the next answer, in order.

        Raise ``Unavailable`` if no answer arrives within ``timeout_s``, or the call's failure.
        Cancellation: no answer was taken.
        """
        while not self._inbox:
            if self.failure is not None:
                raise self.failure
            await self._progressed("does not answer")
        return self._inbox.popleft()

    def close_send(self) -> None:
        """End the requests, once those that are queued are sent."""
        self._closing = True
        self._wake_sender()

    async def wait_end(self) -> None:
        """Return when the call has ended. It is cut off after ``timeout_s`` without progress."""
        while not self._ended:
            await self._progressed("does not end its stream")

    def cancel(self, failure: GazetteError) -> None:
        """End the call at once. The peer gives up what was not committed."""
        self._fail(failure)
        self._sender.cancel()
        self._receiver.cancel()
        self._call.cancel()

    async def _progressed(self, lack: str) -> None:
        """Wait for any progress of the call. After ``timeout_s`` without progress, cut it off."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._progress[waiter] = None
        timer = loop.call_later(self._timeout_s, self._expire, waiter, lack)
        try:
            await waiter
        finally:
            timer.cancel()
            self._progress.pop(waiter, None)

    def _expire(self, waiter: asyncio.Future[None], lack: str) -> None:
        """Cut the peer off, unless there was progress. What waits for it finds the failure."""
        if waiter.done():
            return
        self.cancel(
            Unavailable(
                f"peer {self.peer} {lack}",
                hint="Check that broker and the network to it. The route changes once its lease ends.",
                timeout_s=self._timeout_s,
            )
        )

    def _wake_sender(self) -> None:
        if self._to_send is not None and not self._to_send.done():
            self._to_send.set_result(None)

    def _wake(self) -> None:
        for waiter in self._progress:
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, failure: GazetteError) -> None:
        if self.failure is None:
            self.failure = failure
        self._outbox.clear()
        self._outbox_bytes = 0
        self._wake_sender()
        self._wake()

    async def _send_all(self) -> None:
        while self.failure is None:
            if self._outbox:
                message = self._outbox.popleft()
                self._sending = True
                if not await self._call.write(message):
                    # The call has ended. The task that receives the answers sets the reason.
                    self._outbox.clear()
                    self._outbox_bytes = 0
                    self._wake()
                    return
                self._sending = False
                self._outbox_bytes = max(self._outbox_bytes - len(message), 0)
                self._wake()
            elif self._closing:
                await self._call.done_writing()
                return
            else:
                self._to_send = asyncio.get_running_loop().create_future()
                await self._to_send

    async def _receive_all(self) -> None:
        try:
            while await self._receive():
                pass
        finally:
            self._ended = True
            self._fail(Closed(f"the stream to {self.peer} has ended"))

    async def _receive(self) -> bool:
        """Take the next answer. Return False at the end, with the reason in ``failure``."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._fail(rpc_error(error, f"Replicate to {self.peer}"))
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._fail(Closed(f"the channel to {self.peer} was closed"))
            return False
        if response is END_OF_STREAM:
            self._fail(Broken(f"recv from {self.peer}: unexpected EOF"))
            return False
        self._take(response)
        return True

    def _take(self, response: broker_pb2.ReplicateResponse) -> None:
        self._inbox.append(response)
        if len(self._inbox) > _INBOX_MAX:
            self.cancel(Broken(f"peer {self.peer} sent an answer without a request"))
        self._wake()
