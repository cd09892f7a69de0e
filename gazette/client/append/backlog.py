"""Stage 1 of the byte path: the bounded backlog of appends that were released and not yet sent.

Threads put content in, the event loop takes batches out. Threads and loop share only the mutex of this
module. A holder keeps the mutex for microseconds (longer to make a spill file), and never while it waits for
brokers. `JournalAppends` enqueues to one journal, at the least cost.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakSet

from gazette.client.append.queue import (
    BATCH_BYTES_MAX,
    SEGMENT_BYTES,
    Batch,
    JournalQueue,
    MemoryBudget,
    Segment,
    segments_of,
)
from gazette.errors import Closed, GazetteError
from gazette.protocol.content import BytesLike
from gazette.runtime.loop_bound import forked
from gazette.runtime.tasks import OpFuture

if TYPE_CHECKING:
    from gazette.client.append.appender import AppendParams, AppendResult

log = logging.getLogger(__name__)

NOTHING: Final[AbstractSet[OpFuture[Any]]] = frozenset()

_POLL_S: Final = 1.0
"""Seconds between two checks of a thread that waits for memory. Other services free memory without a
notice."""


@dataclass(frozen=True, slots=True)
class AppendServiceSettings:
    """Bounds of one service, in bytes.

    Content beyond ``journal_memory_max`` of one journal, or beyond the memory budget, goes to an unlinked
    file in ``spill_directory`` (None: the directory of temporary files). A producer on a thread writes to
    the file only when brokers make no progress; until then it waits. While more than ``backlog_max`` bytes
    are waiting, it waits without limit. On the event loop, no producer waits.
    """

    journal_memory_max: int = 8 << 20
    memory_max: int = 128 << 20
    """Size of the service's own memory budget, unless it shares the budget of other services."""
    backlog_max: int = 4 << 30
    headway_s: float = 0.25
    """Seconds that a producer waits for a batch to succeed before it writes to the file."""
    spill_directory: Path | None = None
    spill_threads: int = 2


class _LeftMutex:
    """The mutex of a backlog in a forked child. Every append locks the mutex, and so raises ``Closed``."""

    def acquire(self) -> bool:
        raise forked("an append service")

    def release(self) -> None:
        raise AssertionError("was not acquired")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_backlogs: Final[WeakSet[Backlog]] = WeakSet()


def _leave_backlogs() -> None:
    # A thread that held the mutex at the fork does not run here: it would never release the mutex.
    for backlog in list(_backlogs):
        backlog.queues = {}
        backlog.mutex = cast("threading.Lock", _LeftMutex())
        backlog._room = cast("threading.Condition", backlog.mutex)


os.register_at_fork(after_in_child=_leave_backlogs)


class Backlog:
    """The queues of one append service. Thread-safe; created on the event loop's thread.

    In a forked child, every append raises ``Closed``.

    The backlog calls ``on_work``, under the mutex and on any thread, when a batch joins a queue that the loop
    is not serving. Only by this call does the loop learn of batches.
    """

    def __init__(
        self,
        settings: AppendServiceSettings,
        budget: MemoryBudget,
        on_work: Callable[[JournalQueue], None],
    ) -> None:
        self.settings = settings
        self.budget = budget
        self.bytes = 0
        self.queues: dict[str, JournalQueue] = {}
        """Read by any thread, changed under the mutex."""
        self._on_work = on_work
        self._loop_thread = threading.get_ident()
        self.mutex = threading.Lock()
        """Guards all of this object and its queues. The module says how long a holder may keep it."""
        self._room = threading.Condition(self.mutex)
        self._closed = False
        _backlogs.add(self)

    @property
    def on_loop(self) -> bool:
        """True if the caller runs on the event loop, which must not wait."""
        return threading.get_ident() == self._loop_thread

    def queue(self, params: AppendParams) -> JournalQueue:
        """Return the journal's queue. Raise ``Invalid`` for wrong parameters. After ``close``, return the
        journal's failed queue, or raise ``Closed`` if the journal has no queue."""
        journal = params.journal
        queue = self.queues.get(journal)
        if queue is not None and params == queue.validated:
            return queue
        params.validate()
        if queue is None:
            with self.mutex:
                if self._closed:
                    raise Closed("the append service was closed", journal=journal)
                queue = self.queues.setdefault(journal, JournalQueue(journal, self.budget))
        queue.validated = params
        return queue

    def enqueue(
        self,
        queue: JournalQueue,
        params: AppendParams,
        dependencies: AbstractSet[OpFuture[Any]],
        content: BytesLike,
        segments: Collection[Segment] | None,
    ) -> OpFuture[AppendResult]:
        """Add an append as ``put`` does. Off the loop, wait for room. Return the future of the append."""
        future, filled = self.put(queue, params, dependencies, content, segments)
        if filled is not None:
            self.make_room(queue, filled)
        return future

    def put(
        self,
        queue: JournalQueue,
        params: AppendParams,
        dependencies: AbstractSet[OpFuture[Any]],
        content: BytesLike,
        segments: Collection[Segment] | None,
    ) -> tuple[OpFuture[AppendResult], Segment | None]:
        """Add an append after all others of its journal: ``segments``, then ``content``.

        Return the future of its batch, and the segment that the append completed, or None. Then call
        ``make_room`` for that segment. If the queue has failed, drop ``segments``, and return its failed
        future. Count ``segments`` by ``hold`` or ``account`` before. ``content`` is shorter than a segment.
        """
        with self.mutex:
            batch = queue.tail
            if batch is None or not batch.accepts(params, dependencies):
                if queue.failed_future is not None:
                    queue.drop(segments or ())
                    return queue.failed_future, None
                batch = queue.chain(params, dependencies)
                if not queue.serving:
                    queue.serving = True
                    self._on_work(queue)
            filled = None
            if segments:
                # Since ``segments`` follow the buffer, the buffer becomes a segment now, even if it is not
                # full.
                filled = queue.cut(batch) if batch.buffer else None
                self.bytes += queue.put_segments(batch, segments)
            length = len(content)
            batch.buffer += content
            self.bytes += length
            if len(batch.buffer) >= SEGMENT_BYTES:
                filled = queue.cut(batch)
        return batch.future, filled

    def account(self, queue: JournalQueue, segments: Collection[Segment]) -> None:
        """Count the memory of segments that are not enqueued yet; do not wait."""
        with self.mutex:
            queue.hold(sum(segment.length for segment in segments))

    def hold(self, queue: JournalQueue, segment: Segment) -> None:
        """Count the memory of a segment that is not enqueued yet. Off the loop, wait for room."""
        self.account(queue, (segment,))
        self.make_room(queue, segment)

    def discard(self, queue: JournalQueue, segments: Collection[Segment]) -> None:
        """Forget segments that were counted and will not be enqueued."""
        with self.mutex:
            queue.drop(segments)
            self._room.notify_all()

    def pending_except(self, journal: str) -> AbstractSet[OpFuture[Any]]:
        """Return the pending futures of other journals: see `AppendService.pending_except`."""
        with self.mutex:
            futures: list[OpFuture[Any]] = []
            for queue in self.queues.values():
                if queue.journal == journal:
                    continue
                if queue.failed_future is not None:
                    futures.append(queue.failed_future)
                elif queue.batches:
                    futures.append(queue.batches[-1].future)
            # A dict keeps the order of the queues, so that callers await the futures in this order.
            return dict.fromkeys(futures).keys()

    # Taking out: the loop's side.

    def first(self, queue: JournalQueue) -> Batch | None:
        """Return the oldest batch, or None. After None, do not serve the queue until ``on_work`` names it."""
        with self.mutex:
            if queue.batches:
                return queue.batches[0]
            queue.serving = False
            queue.close_spill()
            return None

    def seal(self, queue: JournalQueue, batch: Batch) -> list[Segment]:
        """Let no more appends join a batch, and return its content."""
        with self.mutex:
            queue.flowing = True
            return queue.seal(batch)

    def succeed(self, queue: JournalQueue, batch: Batch, result: AppendResult) -> None:
        """Remove the oldest batch, which has been appended, and give its future the result."""
        with self.mutex:
            if not queue.batches or queue.batches[0] is not batch:
                return  # Closed meanwhile: its future has failed.
            queue.batches.popleft()
            self.bytes -= batch.size
            queue.drop(batch.segments)
            self._room.notify_all()
        batch.future.set_result(result)

    def fail(self, queue: JournalQueue, error: GazetteError) -> None:
        """Refuse all appends to the journal from now on. A later error does not replace the first."""
        with self.mutex:
            batches = queue.fail(error)
            queue.serving = False
            self.bytes -= sum(batch.size for batch in batches)
            self._room.notify_all()
        for batch in batches:
            batch.future.set_exception(error)

    def close(self, error: GazetteError) -> None:
        """Fail all queues, and refuse new ones."""
        with self.mutex:
            self._closed = True
            queues = list(self.queues.values())
        for queue in queues:
            self.fail(queue, error)

    # Back-pressure: the threads' side.

    def await_room(self, queue: JournalQueue) -> None:
        """Return when the backlog is within its bound or the queue has failed, or at once on the loop."""
        if self.bytes <= self.settings.backlog_max or self.on_loop:
            return
        with self._room:
            while self.bytes > self.settings.backlog_max and queue.failure is None:
                self._room.wait(_POLL_S)

    def _over(self, queue: JournalQueue) -> bool:
        """Return True if waiting content exceeds the memory of its journal, or of all journals."""
        return (
            queue.memory > self.settings.journal_memory_max
            or self.budget.used > self.budget.bytes_max
        )

    def _worth_waiting(self, queue: JournalQueue) -> bool:
        """Return True if batches of this journal are being sent, and may soon free enough memory."""
        return (
            queue.flowing
            and self._over(queue)
            and queue.memory > self.settings.journal_memory_max // 8
        )

    def make_room(self, queue: JournalQueue, segment: Segment) -> None:
        """Wait until memory is within bounds. If the wait takes long, move ``segment`` to the file.

        On the loop, move it at once, and return even if the disk fails. If the queue has failed or is empty,
        return although memory is full: no batch of the queue could free memory.
        """
        if not self._over(queue):
            return
        if self.on_loop:
            self.spill(queue, segment)
            return
        while True:
            with self._room:
                while self._worth_waiting(queue):
                    if not self._room.wait(self.settings.headway_s):
                        queue.flowing = False  # No batch came through in time: use the disk.
                if not self._over(queue) or queue.failure is not None:
                    return
            if self.spill(queue, segment):
                return
            with self._room:
                # Neither memory nor disk has room: brokers must catch up, or an operator must free space. If
                # the queue is empty, only this open append fills the memory: a wait would not end, so go on.
                if not queue.batches:
                    return
                self._room.wait(_POLL_S)

    def spill(self, queue: JournalQueue, segment: Segment) -> bool:
        """Move a segment to the journal's file. Log a warning and return False if the disk fails."""
        try:
            with self.mutex:
                data = segment.data
                if data is None:
                    return True
                file = queue.spill_file(self.settings.spill_directory)
                offset = file.reserve(segment.length)
        except OSError as error:
            log.warning("cannot make a file for waiting appends: %(error)s", {"error": error})
            return False
        written = False
        try:
            file.write(offset, data)
            written = True
        except OSError as error:
            log.warning("cannot write waiting appends to a file: %(error)s", {"error": error})
        with self.mutex:
            if written and not segment.dropped:
                segment.move(file, offset)
                queue.hold(-segment.length)
                self._room.notify_all()
            else:
                file.give_back()
        return written


class JournalAppends:
    """Enqueues appends to one journal. Any thread may use it; `enqueue` never waits.

    If the order of content matters, make the content and enqueue it under one lock of your own. Release your
    lock before `await_room`, which waits for slow brokers.
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
        """Enqueued segments that may exceed the memory budget."""
        self.must_wait = False
        """True if the caller of `enqueue` must call `await_room` now."""

    def enqueue(self, content: BytesLike) -> OpFuture[AppendResult]:
        """Enqueue a copy of ``content`` as an append after all others of the journal.

        Return its future, which all appends of the same RPC share. If the journal's queue has failed, the
        future has the queue's error. Raise ``Closed`` if the service's event loop has ended. Look at
        ``must_wait`` after each call.
        """
        backlog, queue = self._backlog, self._queue
        # A fast path for content that joins the batch of the last call and completes no segment. Publishers
        # call it hundreds of thousands of times a second. `with` would take twice as long as this `try`.
        length, mutex = len(content), backlog.mutex
        mutex.acquire()
        try:
            batch = queue.tail
            if batch is not None and (batch is self._batch or self._may_join(batch)):
                buffer = batch.buffer
                size = len(buffer) + length
                if size < SEGMENT_BYTES and batch.segments_bytes + size <= BATCH_BYTES_MAX:
                    buffer += content
                    backlog.bytes = backlog_bytes = backlog.bytes + length
                    if backlog_bytes > self._backlog_max:
                        self.must_wait = True
                    return batch.future
        finally:
            mutex.release()
        segments: list[Segment] | None = None
        if len(content) >= SEGMENT_BYTES:
            segments, content = segments_of(content), b""
            backlog.account(queue, segments)
        future, filled = backlog.put(queue, self._params, NOTHING, content, segments)
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
        ``length_max`` bytes. If ``write`` raises an error, enqueue nothing, and raise the same error.

        ``write`` runs under the service's mutex. So it must be short, must not wait, and must not append.
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
                # Before the next item, check again whether the batch takes more.
                self._batch = None
            backlog.bytes = backlog_bytes = backlog.bytes + length
            if backlog_bytes > self._backlog_max:
                self.must_wait = True
            return batch.future
        finally:
            mutex.release()

    def _may_join(self, batch: Batch) -> bool:
        accepts = batch.accepts(self._params, NOTHING)
        if accepts:
            self._batch = batch
        return accepts

    def await_room(self) -> None:
        """Wait until brokers or a disk have taken the content beyond the memory budget. On the event loop,
        write to the disk and do not wait."""
        # Reset the flag before the wait: an append of another thread may set it again meanwhile.
        self.must_wait = False
        with suppress(IndexError):
            while True:
                self._backlog.make_room(self._queue, self._filled.popleft())
        self._backlog.await_room(self._queue)
