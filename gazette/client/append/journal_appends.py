"""Stage 1 of the byte path: appends to one journal that are made under a lock of the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gazette.client.append.backlog import Backlog
from gazette.client.append.content import SEGMENT_BYTES, Segment, segments_of
from gazette.client.append.queue import BATCH_BYTES_MAX, Batch, JournalQueue
from gazette.protocol.content import BytesLike
from gazette.runtime.tasks import OpFuture

if TYPE_CHECKING:
    from gazette.client.append.appender import AppendParams, AppendResult

_NOTHING: Final[AbstractSet[OpFuture[Any]]] = frozenset()


class JournalAppends:
    """Enqueues appends to one journal. Any thread may use it; `enqueue` never waits.

    If the order of content matters, make and enqueue it under one lock of the caller. To wait for slow
    brokers is a step of its own, `await_room`, without that lock.
    """

    __slots__ = ("_backlog", "_backlog_max", "_batch", "_filled", "_params", "_queue", "must_wait")

    def __init__(self, backlog: Backlog, queue: JournalQueue, params: AppendParams) -> None:
        self._backlog = backlog
        self._queue = queue
        self._params = params
        self._backlog_max = backlog.settings.backlog_max
        self._batch: Batch | None = None
        """The batch that the last append joined."""
        self._filled: deque[Segment] = deque()
        """Enqueued segments for which memory may have no room."""
        self.must_wait = False
        """True if the caller of `enqueue` must call `await_room` now."""

    def enqueue(self, content: BytesLike) -> OpFuture[AppendResult]:
        """Enqueue a copy of ``content`` as an append after all others of the journal.

        Return its future, which all appends of the same RPC share. If the journal has failed, so has the
        future; that is not raised. Raise ``Closed`` if the service's event loop has ended.
        """
        backlog, queue = self._backlog, self._queue
        # A fast path: content that joins the batch of the last call and completes no segment. Publishers come
        # here hundreds of thousands of times a second. A `with` would take twice as long as this `try`.
        length, mutex = len(content), backlog.mutex
        mutex.acquire()
        try:
            batch = queue.tail
            if batch is not None and (batch is self._batch or self._may_join(batch)):
                buffer = batch.buffer
                size = len(buffer) + length
                if size < SEGMENT_BYTES and batch.segments_bytes + size <= BATCH_BYTES_MAX:
                    buffer += content
                    backlog.bytes = waiting = backlog.bytes + length
                    if waiting > self._backlog_max:
                        self.must_wait = True
                    return batch.future
        finally:
            mutex.release()
        segments: list[Segment] | None = None
        if len(content) >= SEGMENT_BYTES:
            segments, content = segments_of(content), b""
            backlog.account(queue, segments)
        future, filled = backlog.put(queue, self._params, _NOTHING, content, segments)
        if segments is not None:
            self._filled.extend(segments)
            self.must_wait = True
        if filled is not None:
            self._filled.append(filled)
            self.must_wait = True
        elif backlog.bytes > self._backlog_max:
            self.must_wait = True
        return future

    def in_place(
        self,
        write: Callable[[Any, int, bytearray], None],
        item: Any,
        flags: int,
        length_max: int,
    ) -> OpFuture[AppendResult] | None:
        """Enqueue what ``write(item, flags, buffer)`` appends to ``buffer``: as `enqueue`, without a copy.

        Return None, and enqueue nothing, if there is no batch to join, or if the content is longer than
        ``length_max`` bytes. Raise what ``write`` raises, and then enqueue nothing.

        ``write`` runs under the service's mutex. So it must be short, wait for nothing, and call no code that
        may append.
        """
        backlog = self._backlog
        mutex = backlog.mutex
        mutex.acquire()
        try:
            batch = self._queue.tail
            if batch is None or (batch is not self._batch and not self._may_join(batch)):
                return None
            buffer = batch.buffer
            begin = len(buffer)
            try:
                write(item, flags, buffer)
            except BaseException:
                del buffer[begin:]
                raise
            size = len(buffer)
            length = size - begin
            if length > length_max:
                del buffer[begin:]
                return None
            if size >= SEGMENT_BYTES:
                self._filled.append(self._queue.cut(batch))
                self.must_wait = True
                # Before the next item, check again if the batch takes more.
                self._batch = None
            backlog.bytes = waiting = backlog.bytes + length
            if waiting > self._backlog_max:
                self.must_wait = True
            return batch.future
        finally:
            mutex.release()

    def _may_join(self, batch: Batch) -> bool:
        accepts = batch.accepts(self._params, _NOTHING)
        if accepts:
            self._batch = batch
        return accepts

    def await_room(self) -> None:
        """Wait until brokers or a disk have taken what exceeds the memory budget.

        On the event loop, write to the disk and do not wait.
        """
        # Reset it before the wait: an append of another thread may set it again meanwhile.
        self.must_wait = False
        with suppress(IndexError):
            while True:
                self._backlog.make_room(self._queue, self._filled.popleft())
        self._backlog.await_room(self._queue)
