"""Stage 1 of the byte path: takes content from publishers and recorders, gives
batches to `client/append/appender`.

Appends to one journal may share an RPC. Appends reach the broker in the order in which callers release them.
Transactions of shards rely on these rules:

- **Order.** Within a journal, content arrives in the order of ``release``. One RPC runs at a time, and the
  next begins when the former has succeeded. ``release`` has enqueued the append when it returns. An append
  that is released later comes later: in a later RPC, or later in the same RPC.
- **Dependencies.** An RPC begins only after all dependencies of each append in it have succeeded. An append
  joins a waiting batch only if the batch has all its dependencies already: so earlier appends wait for
  nothing new. An append *without* dependencies also waits for the appends before it. So a barrier (an empty
  append with dependencies) holds back all later appends to the journal.
- **No circles.** A dependency is a future that ``release`` has returned. So the dependency is older than each
  batch that depends on it. Journals may depend on each other in both directions.
- **Failure is for good.** When a retry cannot cure the failure of an append or of a dependency, the journal
  accepts nothing more from this service. All waiting and later appends fail with the same error.
  ``pending_except`` still contains that failure. So a failed publish stops the commit that depends on it.
- **At least once.** A batch with an unknown outcome is retried *whole*. So a journal may hold a batch twice,
  each copy in one piece and before all later appends. Readers drop the second copy by the clocks of its
  messages, which works because both copies have one order. The journal's primary refuses a copy that comes
  after a later append: see ``protocol/append_session``.

A thread that is ahead of the brokers must wait. The event loop never waits for brokers: it writes to a disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from gazette.client.append.appender import (
    AppendParams,
    AppendResult,
    Attempts,
    append_once,
    backoff_s,
)
from gazette.client.append.backlog import NOTHING, AppendServiceSettings, Backlog, JournalAppends
from gazette.client.append.queue import (
    SEGMENT_BYTES,
    Batch,
    JournalQueue,
    MemoryBudget,
    Segment,
    segments_of,
)
from gazette.client.rpc.credentials import FRESH_S
from gazette.client.rpc.errors import is_refusal_of_rights, status_of
from gazette.client.waits import reason_of
from gazette.errors import Broken, Bug, Closed, Fenced, GazetteError, Invalid
from gazette.protocol.content import BytesLike
from gazette.protocol.status import Status
from gazette.runtime.loop_bound import LoopBound
from gazette.runtime.tasks import (
    BlockingPool,
    OpFuture,
    Pool,
    TaskScope,
    await_future,
    await_shared,
)

if TYPE_CHECKING:
    from gazette.client.client import Client

__all__ = ["AppendService", "AppendServiceSettings", "AppendTxn", "MemoryBudget"]

log = logging.getLogger(__name__)

_TERMINAL: Final = frozenset(
    {
        Status.FRAGMENT_STORE_UNHEALTHY.name,
        Status.JOURNAL_NOT_FOUND.name,
        Status.NOT_ALLOWED.name,
        Status.REGISTER_MISMATCH.name,
        Status.WRONG_APPEND_OFFSET.name,
    }
)
"""Statuses that end appends without ``check_registers``."""
_TERMINAL_WHEN_CHECKED: Final = frozenset(
    {Status.JOURNAL_NOT_FOUND.name, Status.REGISTER_MISMATCH.name}
)
"""Statuses that end appends with ``check_registers``: the journal is gone, or has another owner. After any
other status the owner repeats its append, since no other process would append in its place."""

_QUIET_ATTEMPTS: Final = 4
"""Number of first attempts that may fail without a warning: some fail in each hand-over of a journal."""


def _nothing() -> None:
    """Do nothing."""


def is_terminal(error: Exception, *, checked: bool, lasted_s: float = 0.0) -> bool:
    """Return True if retrying cannot help. ``checked`` says that the append has ``check_registers``.

    A refusal of rights is final, unless the attempt lasted so long (``lasted_s``) that its token may have
    expired. Callers retry after these: unreachable brokers, a journal between owners, too few brokers,
    suspension, a head that an operator must confirm. They retry after any other failure of gRPC as well,
    since a broker that stops may cause it. (`Attempts` retries for some time after JOURNAL_NOT_FOUND.)
    """
    if isinstance(error, Closed | Bug | Invalid):
        return True
    if is_refusal_of_rights(error):
        return lasted_s < FRESH_S
    return status_of(error) in (_TERMINAL_WHEN_CHECKED if checked else _TERMINAL)


class AppendTxn:
    """One append, begun by `AppendService.start_append`.

    Release or roll back soon: until then, no other ``start_append`` to the same journal returns. Use it from
    one thread at a time. As a context manager, it releases at the end of the block, or rolls back after an
    exception.
    """

    __slots__ = ("_backlog", "_dependencies", "_params", "_queue", "_segments", "_staging")

    def __init__(
        self,
        backlog: Backlog,
        queue: JournalQueue,
        params: AppendParams,
        dependencies: AbstractSet[OpFuture[Any]],
    ) -> None:
        self._backlog = backlog
        self._queue = queue
        self._params = params
        self._dependencies = dependencies
        self._staging: bytearray | None = queue.staging
        """None once the append was released or rolled back."""
        self._segments: list[Segment] | None = None

    def write(self, content: BytesLike) -> None:
        """Add a copy of ``content``. Beyond the bounds of memory, a thread waits for brokers or writes to a
        disk; the event loop always writes. Raise ``Bug`` after `release` or `roll_back`."""
        staging = self._staging
        if staging is None:
            raise Bug("write to an append that was released or rolled back")
        if len(content) >= SEGMENT_BYTES:
            if staging:
                self._cut(staging)
            for segment in segments_of(content):
                self._hold(segment)
            return
        staging += content
        if len(staging) >= SEGMENT_BYTES:
            self._cut(staging)

    def _cut(self, staging: bytearray) -> None:
        self._staging = self._queue.staging = bytearray()
        self._hold(Segment(staging))

    def _hold(self, segment: Segment) -> None:
        if self._segments is None:
            self._segments = []
        self._segments.append(segment)
        self._backlog.hold(self._queue, segment)

    def release(self) -> OpFuture[AppendResult]:
        """Enqueue the append. Return its future, which all appends of the same RPC share.

        If appends to the journal have failed for good, the future has failed with their error. The call may
        wait as ``write`` does. Raise ``Bug`` after `release` or `roll_back`, and ``Closed`` if the service's
        event loop has ended.
        """
        staging = self._staging
        if staging is None:
            raise Bug("append was released or rolled back already")
        self._staging = None
        queue = self._queue
        try:
            return self._backlog.enqueue(
                queue, self._params, self._dependencies, staging, self._segments
            )
        finally:
            staging.clear()
            queue.lock.release()

    def roll_back(self) -> None:
        """Forget this append only. Has no effect after ``release``."""
        staging = self._staging
        if staging is None:
            return
        self._staging = None
        staging.clear()
        if self._segments is not None:
            self._backlog.discard(self._queue, self._segments)
        self._queue.lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.roll_back()
        elif self._staging is not None:
            self.release()


class AppendService:
    """Appends of threads and of the loop, batched per journal; the module states the guarantees.

    Create it on the event loop of ``client``. Call ``start_append``, ``append``, ``journal`` and
    ``pending_except`` from any thread, and the other methods on the loop.

    In a forked child, every append raises ``Closed``, and ``close`` changes nothing. A future from before
    the fork is never done in the child.

    A thread may have to wait until the brokers catch up. If a thread itself completes a dependency, it must
    do so before it enqueues gigabytes: otherwise it may wait for itself.
    """

    def __init__(
        self,
        client: Client,
        *,
        settings: AppendServiceSettings | None = None,
        budget: MemoryBudget | None = None,
        pool: Pool | None = None,
    ) -> None:
        settings = AppendServiceSettings() if settings is None else settings
        budget = MemoryBudget(settings.memory_max) if budget is None else budget
        self._client = client
        self._own_pool = pool is None
        self._pool: Pool = (
            BlockingPool("append-spill", settings.spill_threads) if pool is None else pool
        )
        self._loop = asyncio.get_running_loop()
        self._bound = LoopBound("an AppendService")
        self._bound.require()
        self._closed = False
        self._backlog = Backlog(settings, budget, self._on_work)
        self._defect: asyncio.Future[None] = self._loop.create_future()
        self._scope = TaskScope("append service", on_failure=self._on_failure)

    # From any thread.

    def start_append(
        self, params: AppendParams, dependencies: Collection[OpFuture[Any]] = ()
    ) -> AppendTxn:
        """Begin an append that takes place after all ``dependencies`` have succeeded.

        A thread waits while another thread has an append to the same journal open, and while the backlog is
        full. On the event loop, raise ``Bug`` instead if an append to the journal is open. (``append`` and
        ``journal`` do not wait for an open append.) Raise ``Invalid`` for wrong parameters. After ``close``,
        the future has failed; for a journal without earlier appends, raise ``Closed``.
        """
        backlog = self._backlog
        queue = backlog.queues.get(params.journal)
        if queue is None or params is not queue.validated:
            queue = backlog.queue(params)
        if backlog.bytes > backlog.settings.backlog_max:
            backlog.await_room(queue)
        if not queue.lock.acquire(blocking=False):
            self._take_turn(queue)
        unmet = _unmet(dependencies) if dependencies else NOTHING
        return AppendTxn(backlog, queue, params, unmet)

    def append(
        self,
        params: AppendParams,
        content: BytesLike = b"",
        dependencies: Collection[OpFuture[Any]] = (),
    ) -> OpFuture[AppendResult]:
        """Enqueue an append at once, even while a transaction of the journal is open.

        If you must make content in the order in which it is enqueued, use ``start_append``, which also names
        the errors.
        """
        backlog = self._backlog
        queue = backlog.queue(params)
        segments: list[Segment] = []
        if len(content) >= SEGMENT_BYTES:
            segments, content = segments_of(content), b""
            for segment in segments:
                backlog.hold(queue, segment)
        return backlog.enqueue(queue, params, _unmet(dependencies), content, segments)

    def journal(self, params: AppendParams) -> JournalAppends:
        """Return a `JournalAppends`, whose appends do not wait for an open transaction of the journal.

        For the errors see ``start_append``.
        """
        return JournalAppends(self._backlog, self._backlog.queue(params), params)

    def pending_except(self, journal: str) -> AbstractSet[OpFuture[Any]]:
        """Return the futures of all appends that were released to other journals and have not succeeded.

        A journal's last future stands for its earlier futures. A failed journal stays in the set, with its
        failed future. The set misses no append that was released before the call.
        """
        return self._backlog.pending_except(journal)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were released and not yet appended."""
        return self._backlog.bytes

    def waiting(self) -> dict[str, str]:
        """Return the journals with appends that wait, each with the error of the last attempt. The error is
        an empty text if that attempt has not failed. Call this on the loop."""
        return {
            name: queue.trouble for name, queue in self._backlog.queues.items() if queue.batches
        }

    def _take_turn(self, queue: JournalQueue) -> None:
        """Wait for the journal's lock, which another transaction holds. Raise ``Bug`` on the event loop."""
        if self._backlog.on_loop:
            raise Bug(
                "an append to the journal is open already, and the event loop cannot wait for it",
                journal=queue.journal,
                hint="Use append() or journal() on the loop, and hold no append over an await.",
            )
        queue.lock.acquire()

    def _on_work(self, queue: JournalQueue) -> None:
        """Have the loop send a queue's batches. Any thread. Raise ``Closed`` if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._serve_soon, queue)
        except RuntimeError as error:
            raise Closed("the event loop of the append service has ended") from error

    # On the loop.

    async def run(self) -> None:
        """Wait without end, to raise the error of a task of the service that must not fail.

        The service makes appends also without this call. Cancellation changes nothing.
        """
        self._bound.require()
        await await_shared(self._defect)

    async def flush(self) -> None:
        """Wait until all appends released so far have succeeded; raise the first failure. Appends go on
        after a cancellation."""
        self._bound.require()
        for future in self.pending_except(""):
            await await_future(future)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new appends. Futures of waiting appends fail with ``Closed``, and waiting threads return.

        To lose nothing, `flush` first: an append that is being sent may take place or not. Raise
        ``Unavailable`` if its task does not end within ``timeout_s``.
        """
        if self._bound.was_forked:
            return
        self._bound.require()
        self.abandon()
        try:
            await self._scope.stop(timeout_s)
        finally:
            if self._own_pool:
                self._pool.close()

    def _on_failure(self, error: BaseException) -> None:
        if not self._defect.done():
            self._defect.set_exception(error)
            # Retrieve the error even if `run` is not called: the futures have failed as well.
            self._defect.exception()

    def abandon(self) -> None:
        """Do what `close` does, but do not wait for the append that is being sent."""
        self._closed = True
        self._backlog.close(Closed("the append service was closed"))
        self._scope.cancel()

    def __del__(self) -> None:
        # The loop keeps a service with pending appends alive. So nothing is left here but to warn.
        if not getattr(self, "_closed", True):
            self._bound.dropped(_nothing, "Await its close(), before its client is closed.")

    def _serve_soon(self, queue: JournalQueue) -> None:
        if not self._closed:
            self._scope.spawn(self._serve(queue), name=f"append {queue.journal}")

    async def _serve(self, queue: JournalQueue) -> None:
        """Append the journal's batches until none is left. If a batch fails for good, fail all of them."""
        backlog = self._backlog
        try:
            while (batch := backlog.first(queue)) is not None:
                await self._await_dependencies(queue, batch)
                backlog.succeed(queue, batch, await self._append(queue, batch))
        except GazetteError as error:
            level = logging.INFO if isinstance(error, Fenced | Closed) else logging.WARNING
            log.log(
                level,
                "appends to %(journal)s have failed for good: %(error)s",
                {"journal": queue.journal, "error": error},
            )
            backlog.fail(queue, error)
        except asyncio.CancelledError:
            backlog.fail(queue, Closed("the append service was closed", journal=queue.journal))
            raise
        except Exception as error:
            backlog.fail(queue, Bug(f"append service: {error!r}", journal=queue.journal))
            raise

    async def _await_dependencies(self, queue: JournalQueue, batch: Batch) -> None:
        """Return when all dependencies have succeeded. Raise ``Broken`` if one fails or is cancelled."""
        for dependency in batch.dependencies:
            if not dependency.done():
                # The thread that fills this queue may be the one to complete the dependency. So the thread
                # must not wait for room.
                queue.flowing = False
                await _done(dependency)
            if dependency.cancelled():
                raise Broken("a dependency of the append was cancelled", journal=queue.journal)
            if (error := dependency.exception()) is not None:
                raise Broken(
                    f"a dependency of the append failed: {error}", journal=queue.journal
                ) from error

    async def _append(self, queue: JournalQueue, batch: Batch) -> AppendResult:
        """Append one batch: retry until it succeeds or fails for good."""
        segments = self._backlog.seal(queue, batch)
        queue.sequence += 1
        attempt = adoptions = 0
        queue.trouble = ""
        checked = batch.params.check_registers is not None
        clock = self._client.clock
        attempts: Attempts | None = None
        while True:
            begun = clock.monotonic()
            try:
                return await append_once(
                    self._client, batch.params, self._content(segments), queue.attempt()
                )
            except (GazetteError, OSError) as error:
                is_final = is_terminal(error, checked=checked, lasted_s=clock.monotonic() - begun)
                attempts = attempts or Attempts(clock)
                if attempts.end_with(error, is_final=is_final):
                    raise
                queue.flowing = False
                is_adopted = queue.adopt_ledger(error)
                if is_adopted:
                    # A new primary has refused the session, and has named its ledger. Since a primary
                    # answers, retry at once, even if brokers were away for long. If two primaries refuse in
                    # turn, pause longer each time.
                    attempt, adoptions = adoptions - 1, adoptions + 1
                # One adoption is normal. A second one means that primaries refuse in turn: report it.
                queue.trouble = "" if is_adopted and adoptions == 1 else reason_of(error)
                delay_s = backoff_s(attempt)
                log.log(
                    logging.DEBUG if attempt < _QUIET_ATTEMPTS else logging.WARNING,
                    "append to %(journal)s failed and is retried in %(seconds)s s: %(error)s",
                    {"journal": queue.journal, "seconds": delay_s, "error": error},
                )
            await clock.sleep(delay_s)
            attempt += 1

    def _content(self, segments: list[Segment]) -> Iterable[BytesLike] | AsyncIterator[BytesLike]:
        """Return the content of segments: a list if all are in memory, else an iterator that loads them."""
        if all(segment.file is None for segment in segments):
            return [segment.load() for segment in segments]
        return self._loaded(segments)

    async def _loaded(self, segments: list[Segment]) -> AsyncIterator[BytesLike]:
        for segment in segments:
            yield await self._pool.run(segment.load) if segment.file else segment.load()


async def _done(future: OpFuture[Any]) -> None:
    """Wait until a future is done, with any outcome. A cancellation does not stop the future's operation."""
    waiter = asyncio.wrap_future(future)
    # Retrieve an error whenever it comes: otherwise the loop would report it as never retrieved.
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiter])


def _unmet(dependencies: Collection[OpFuture[Any]]) -> AbstractSet[OpFuture[Any]]:
    """Return the dependencies that have not succeeded yet, in their order."""
    return dict.fromkeys(
        future
        for future in dependencies
        if not future.done() or future.cancelled() or future.exception() is not None
    ).keys()
