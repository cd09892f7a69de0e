"""Whole calls: calls of gRPC whose requests have all arrived before the call is served. Such calls need no
task.

Many calls are short, and arrive in one piece or a few. The server offers such calls to a function of their
method. The function gets, at once, all calls that one read of a socket has completed. A task serves a call
that the function does not take. A task also serves a call that is long, or not complete within `GATHER_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import grpc

from gazette.errors import GazetteError
from gazette.http2.connection import BytesLike, Http2Stream
from gazette.http2.frames import FaultCode
from gazette.http2.headers import Fields, RequestHead, encode_fields
from gazette.http2.messages import PREFIX_BYTES, prefixed
from gazette.http2.metadata import (
    HEAD_BLOCK,
    OK_BLOCK,
    Metadata,
    metadata_of,
    trailers,
)

WHOLE_BYTES_MAX: Final = 1 << 17
"""Upper bound in bytes of a whole call's requests. A task serves longer calls."""
GATHER_S: Final = 0.005
"""Seconds for the rest of a call to arrive. Clients often send head, requests and end one after the other."""


class CallOwner(Protocol):
    """The part of a server that its whole calls use."""

    def serve_by_task(self, call: WholeCall) -> None:
        """Serve the call from its beginning, by a task."""
        ...

    def answer_by_task(self, call: WholeCall, response: bytes) -> None:
        """Send, by a task, a response for which there is no room now."""
        ...

    def arrived(self, call: WholeCall) -> None:
        """Handle that more of the call, or its end, has arrived."""
        ...

    def answered(self, call: WholeCall, code: grpc.StatusCode) -> None:
        """Handle that the call has ended with a status."""
        ...


class WholeCall:
    """A call whose requests may all arrive at once. Loop-bound.

    The function of its method calls one of ``answer``, ``refuse`` and ``hand_back``, once, at any time.
    ``hand_back`` leaves the call to a task. If the caller goes away before that, or the call's time is up,
    ``on_gone`` is called.
    """

    __slots__ = (
        "_content",
        "_length",
        "_owner",
        "_timer",
        "began",
        "is_open",
        "method",
        "on_gone",
        "received",
        "request",
        "stream",
        "timeout_s",
    )

    def __init__(
        self,
        owner: CallOwner,
        stream: Http2Stream,
        request: RequestHead,
        method: Any,
        timeout_s: float | None,
        began: float,
    ) -> None:
        self.stream = stream
        self.request = request
        self.method = method
        self.timeout_s = timeout_s
        self.began = began
        """The clock's monotonic time at which the call began."""
        self.received = 0
        """Requests that ``messages`` has returned."""
        self.on_gone: Callable[[], None] | None = None
        self._owner = owner
        self._content: list[BytesLike | bytearray] = []
        self._length = 0  # Bytes that have arrived.
        self.is_open = True
        """True until the call is answered, or its caller has gone."""
        self._timer: asyncio.TimerHandle | None = None

    # -- what arrives

    def on_fields(self, fields: Fields, *, ended: bool) -> None:
        """Ignore trailers, except that they end the stream."""
        if ended:
            self._owner.arrived(self)

    def on_data(self, content: BytesLike, *, ended: bool) -> None:
        del ended
        if self._content and isinstance(self._content[0], bytearray):
            self._content[0] += content
        else:
            self._content.append(content)
        self._length += len(content)
        self._owner.arrived(self)

    def on_fault(self, error: GazetteError) -> None:
        del error
        self._end(grpc.StatusCode.CANCELLED, gone=True)
        self.stream.release()

    def on_room(self) -> None:
        """Do nothing: an answer that finds no room is sent by a task."""

    # -- what the function uses

    def messages(self) -> list[bytes] | None:
        """Return the encoded requests; None unless all have arrived, uncompressed and not too long."""
        if not self.stream.remote_ended or self.is_long:
            return None
        content, offset, requests = self.content(), 0, []
        self._content = [content]  # The former parts kept the bytes of whole reads in memory.
        end = len(content)
        while end - offset >= PREFIX_BYTES:
            begin = offset + PREFIX_BYTES
            offset = begin + int.from_bytes(content[begin - 4 : begin], "big")
            if content[begin - PREFIX_BYTES] or offset > end:
                return None  # Compressed, or cut short.
            requests.append(content[begin:offset])
        if offset != end:
            return None
        self.received = len(requests)
        return requests

    def content(self) -> bytes:
        """Return the part of the requests that has arrived."""
        return b"".join(self._content)

    def invocation_metadata(self) -> Metadata:
        """Return the caller's metadata."""
        request = self.request
        if request.metadata is None:
            request.metadata = metadata_of(request.fields)
        return request.metadata  # type: ignore[no-any-return]

    def answer(self, response: bytes) -> None:
        """End the call with its response."""
        if not self.is_open:
            return
        stream, message = self.stream, prefixed(response)
        if stream.answer(HEAD_BLOCK, message, OK_BLOCK):
            self._end(grpc.StatusCode.OK)
            stream.release()
        else:
            self.is_open = False
            self._stop_timer()
            self._owner.answer_by_task(self, response)

    def refuse(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        """End the call with a status."""
        if not self.is_open:
            return
        block = HEAD_BLOCK + encode_fields(trailers(code, details, trailing))
        self.stream.send_fields(block, ended=True)
        self._end(code)
        self.stream.release()

    def hand_back(self) -> None:
        """Leave the call to a task, as if it had just arrived."""
        if self.is_open:
            self.is_open = False
            self._stop_timer()
            self._owner.serve_by_task(self)

    # -- what the server uses

    @property
    def is_long(self) -> bool:
        """True if more bytes have arrived than a whole call may have."""
        return self._length > WHOLE_BYTES_MAX

    def keep(self) -> None:
        """Copy what has arrived: views keep all bytes of their reads in memory."""
        self._content = [bytearray().join(self._content)]

    def limit(self) -> None:
        """Begin to watch the caller's time limit, because the call was not answered at once."""
        if self.timeout_s is not None and self.is_open:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.timeout_s, self._expire)

    def give_up(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status before its function does."""
        if self.is_open:
            self.stream.send_fields(
                HEAD_BLOCK + encode_fields(trailers(code, details, ())), ended=True
            )
            self.stream.reset(FaultCode.NO_ERROR)
            self._end(code, gone=True)
            self.stream.release()

    def _expire(self) -> None:
        self.give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self, code: grpc.StatusCode, *, gone: bool = False) -> None:
        """Record that the call has ended. With ``gone``, tell the function of its method by ``on_gone``."""
        if not self.is_open:
            return
        self.is_open = False
        self._stop_timer()
        self._owner.answered(self, code)
        if gone and self.on_gone is not None:
            self.on_gone()
        self.on_gone = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


TakeWhole: TypeAlias = Callable[[Sequence[WholeCall]], Sequence[WholeCall]]
"""Serves some whole calls, and returns the others."""
