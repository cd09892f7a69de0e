"""Stage 1 of the byte path: the bounded backlog of appends that were released and not yet sent.

Threads put content in, the event loop takes batches out. They share only the mutex of this module. It is
held for microseconds, and never during a wait.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakSet

from gazette.client.append.content import SEGMENT_BYTES, MemoryBudget, Segment
from gazette.client.append.queue import Batch, JournalQueue
from gazette.errors import Closed, GazetteError
from gazette.protocol.content import BytesLike
from gazette.runtime.loop_bound import forked
from gazette.runtime.tasks import OpFuture

if TYPE_CHECKING:
    from gazette.client.append.appender import AppendParams, AppendResult

log = logging.getLogger(__name__)

_POLL_S: Final = 1.0
"""Seconds between two checks of a thread that waits for memory of other services. They do not notify it."""


@dataclass(frozen=True, slots=True)
class AppendServiceSettings:
    """Bounds of one service, in bytes.

    Content beyond ``journal_memory_max`` of one journal, or beyond the memory budget, goes to an unlinked
    file. The file is in ``spill_directory`` (None: the directory of temporary files). Before content goes
    there, its producer waits as long as the broker makes progress. Producers wait without limit while
    ``backlog_max`` bytes are waiting.
    """

    journal_memory_max: int = 8 << 20
    memory_max: int = 128 << 20
    """Size of the service's own memory budget, if it does not share another one."""
    backlog_max: int = 4 << 30
    headway_s: float = 0.25
    """Seconds that a producer waits for a batch to succeed before it writes to the file."""
    spill_directory: Path | None = None
    spill_threads: int = 2


class _LeftMutex:
    """The mutex of a backlog in a forked child: every append takes it, and gets ``Closed``."""

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
    # Another thread may have held the mutex at the fork. It does not run here, so it would never release it.
    for backlog in list(_backlogs):
        backlog.queues = {}
        backlog.mutex = cast("threading.Lock", _LeftMutex())
        backlog._room = cast("threading.Condition", backlog.mutex)


os.register_at_fork(after_in_child=_leave_backlogs)


class Backlog:
    """The queues of one append service. Thread-safe; created on the event loop's thread.

    In a forked child, every append raises ``Closed``.

    ``on_work`` is called, under the mutex and from any thread, when a batch joins a queue that is not being
    served. Batches cross to the loop only by this call.
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
        """Guards everything here and in the queues. Held for microseconds, never during a wait."""
        self._room = threading.Condition(self.mutex)
        self._closed = False
        _backlogs.add(self)

    @property
    def on_loop(self) -> bool:
        """True if the caller runs on the event loop, which must not wait."""
        return threading.get_ident() == self._loop_thread

    def queue(self, params: AppendParams) -> JournalQueue:
        """Return the journal's queue. Raise ``Invalid`` for wrong parameters, ``Closed``."""
        queue = self.queues.get(params.journal)
        if queue is not None and params == queue.validated:
            return queue
        params.validate()
        if queue is None:
            queue = self._new_queue(params.journal)
        queue.validated = params
        return queue

    def _new_queue(self, journal: str) -> JournalQueue:
        with self.mutex:
            if self._closed:
                raise Closed("the append service was closed", journal=journal)
            return self.queues.setdefault(journal, JournalQueue(journal, self.budget))

    def enqueue(
        self,
        queue: JournalQueue,
        params: AppendParams,
        dependencies: AbstractSet[OpFuture[Any]],
        content: BytesLike,
        segments: Collection[Segment] | None,
    ) -> OpFuture[AppendResult]:
        """Add an append as ``put`` does, then wait for room, unless on the loop. Return its future."""
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
        """Add an append after all others of its journal.

        Return the future of its batch, and the segment that it completed: call ``make_room`` for that one.
        ``hold`` or ``account`` has accounted for the memory of ``segments``. ``content`` comes after them,
        and is shorter than a segment.
        """
        with self.mutex:
            batch = queue.tail
            if batch is None or not batch.accepts(params, dependencies):
                if queue.failed is not None:
                    queue.drop(segments or ())
                    return queue.failed, None
                batch = queue.chain(params, dependencies)
                if not queue.serving:
                    queue.serving = True
                    self._on_work(queue)
            filled = None
            if segments:
                # This segment is not full, but nothing joins it any more: it may go to the file, too.
                filled = queue.cut(batch) if batch.buffer else None
                self.bytes += queue.put_segments(batch, segments)
            length = len(content)
            batch.buffer += content
            self.bytes += length
            if len(batch.buffer) >= SEGMENT_BYTES:
                filled = queue.cut(batch)
        return batch.future, filled

    def account(self, queue: JournalQueue, segments: Collection[Segment]) -> None:
        """Account for segments that are not enqueued yet; do not wait."""
        with self.mutex:
            queue.hold(sum(segment.length for segment in segments))

    def hold(self, queue: JournalQueue, segment: Segment) -> None:
        """Account for a segment that is not enqueued yet; wait for room, unless on the loop."""
        self.account(queue, (segment,))
        self.make_room(queue, segment)

    def discard(self, queue: JournalQueue, segments: Collection[Segment]) -> None:
        """Forget segments that are not enqueued."""
        with self.mutex:
            queue.drop(segments)
            self._room.notify_all()

    def pending_except(self, journal: str) -> AbstractSet[OpFuture[Any]]:
        """Return pending futures: see `AppendService.pending_except`."""
        with self.mutex:
            futures: list[OpFuture[Any]] = []
            for queue in self.queues.values():
                if queue.journal == journal:
                    continue
                if queue.failed is not None:
                    futures.append(queue.failed)
                elif queue.batches:
                    futures.append(queue.batches[-1].future)
            # Keep the order, in which the caller awaits the futures.
            return dict.fromkeys(futures).keys()

    # Taking out: the loop's side.

    def first(self, queue: JournalQueue) -> Batch | None:
        """Return the oldest batch, or None. After None the caller stops serving the queue: ``on_work`` will
        be called for the next batch."""
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
        """Complete the oldest batch, which is in the journal."""
        with self.mutex:
            if not queue.batches or queue.batches[0] is not batch:
                return  # Closed meanwhile: its future has failed.
            queue.batches.popleft()
            self.bytes -= batch.size
            queue.drop(batch.segments)
            self._room.notify_all()
        batch.future.set_result(result)

    def fail(self, queue: JournalQueue, error: GazetteError) -> None:
        """Refuse all appends to the journal from now on. The first such error stays."""
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
        """Return when the backlog is within its bound, or at once on the loop."""
        if self.bytes <= self.settings.backlog_max or self.on_loop:
            return
        with self._room:
            while self.bytes > self.settings.backlog_max and queue.failure is None:
                self._room.wait(_POLL_S)

    def _over(self, queue: JournalQueue) -> bool:
        return (
            queue.memory > self.settings.journal_memory_max
            or self.budget.used > self.budget.bytes_max
        )

    def _worth_waiting(self, queue: JournalQueue) -> bool:
        """Return True if batches of this very journal will soon free enough memory."""
        return (
            queue.flowing
            and self._over(queue)
            and queue.memory > self.settings.journal_memory_max // 8
        )

    def make_room(self, queue: JournalQueue, segment: Segment) -> None:
        """Return when memory is within bounds, or ``segment`` is not in memory any more."""
        if not self._over(queue):
            return
        if self.on_loop:
            self.spill(queue, segment)
            return
        while True:
            with self._room:
                while self._worth_waiting(queue):
                    if not self._room.wait(self.settings.headway_s):
                        queue.flowing = False
                if not self._over(queue) or queue.failure is not None:
                    return
            if self.spill(queue, segment):
                return
            with self._room:
                # Neither memory nor disk has room: brokers must catch up, or an operator must free space. If
                # nothing is enqueued, only this open append fills the memory: waiting would not end, so let
                # it pass.
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
