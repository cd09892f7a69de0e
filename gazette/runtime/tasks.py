"""Structured concurrency: each task has a parent, and a daemon that returns is a failure.

Only this module creates asyncio tasks, and all blocking work goes through it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeAlias, TypeVar

from gazette.errors import Broken, Bug, Closed, Unavailable
from gazette.runtime.clock import Clock
from gazette.runtime.loop_bound import MadeBeforeFork

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)


class TaskScope:
    """A named owner of tasks.

    Use it as ``async with TaskScope("name") as scope``. Leaving the body waits for the children and raises
    their first failure; an error in the body cancels them. Or keep it as a field of a service that calls
    ``wait`` and ``stop`` itself.

    The error of the first child that fails becomes ``failure``. Then its siblings are cancelled, and
    ``on_failure`` is called once, on the loop. A child that is only cancelled has not failed.
    """

    def __init__(
        self, name: str, *, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        # Not a set: children are cancelled in the order in which they were spawned.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._cut_offs: dict[Callable[[], None], None] = {}
        self._on_failure = on_failure
        self.is_stopping = False
        """True if the scope takes no more children."""
        self._owner: asyncio.Task[Any] | None = None  # The task in the body; None outside of it.
        self._owner_cancelled = False  # True: a failed child has cancelled the owner.
        self._waiters: list[asyncio.Future[None]] = []
        """Tasks that wait in `_empty`."""

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a child that may end. Raise ``Bug``, and close ``coro``, once the scope has stopped."""
        if self.is_stopping:
            coro.close()
            raise Bug("task scope has stopped", scope=self.name, task=name)
        task = asyncio.get_running_loop().create_task(coro, name=f"{self.name}/{name}")
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def daemon(self, coro: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[None]:
        """Start a child that must run until it is cancelled: returning early fails the scope."""

        async def run() -> None:
            await coro
            raise Bug("daemon returned", scope=self.name, task=name)

        task = self.spawn(run(), name=name)
        # If the task is cancelled before it begins, it never awaits ``coro``: close it here.
        task.add_done_callback(lambda _: coro.close())
        return task

    def add_cut_off(self, cut_off: Callable[[], None]) -> None:
        """Call ``cut_off`` whenever all children are cancelled, to end waits that need no task."""
        self._cut_offs[cut_off] = None

    def drop_cut_off(self, cut_off: Callable[[], None]) -> None:
        """Undo ``add_cut_off``. May be repeated."""
        self._cut_offs.pop(cut_off, None)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not self._tasks:
            self._wake()
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record a failure, as if a child had failed. The first one cancels all children, and the body."""
        if self.failure is not None:
            return
        self.failure = error
        self.cancel()
        if self._owner is not None and not self._owner.done():
            self._owner_cancelled = True
            self._owner.cancel()
        if self._on_failure is not None:
            self._on_failure(error)

    @property
    def children(self) -> int:
        return len(self._tasks)

    def cancel(self) -> None:
        """Cancel all children. Do not wait for them."""
        for task in self._tasks:
            task.cancel()
        for cut_off in list(self._cut_offs):
            cut_off()

    async def wait(self) -> None:
        """Return when all children have ended; raise the first failure."""
        while self._tasks:
            await self._empty()
        if self.failure is not None:
            raise self.failure

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Cancel the children and wait for them, at most ``timeout_s`` seconds.

        Raise ``Unavailable`` with the names of tasks that did not end in time. Failures of children are in
        ``failure`` and are not raised here, so that stopping is one straight sequence.
        """
        self.is_stopping = True
        self.cancel()
        if self._tasks:
            _, pending = await asyncio.wait(set(self._tasks), timeout=timeout_s)
            if pending:
                names = sorted(task.get_name() for task in pending)
                raise Unavailable(
                    "tasks did not stop in time",
                    scope=self.name,
                    tasks=", ".join(names),
                    timeout_s=timeout_s,
                )

    async def _empty(self) -> None:
        """Wait until the last child has ended, including children that are spawned meanwhile.

        This is cheaper than `asyncio.wait`, which would add a callback to each child.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Wait for all children. Raise ``CancelledError`` if cancelled from outside, else the first failure.

        `asyncio.TaskGroup` would raise exception groups, and cannot be a field of a service. When a child
        fails, the scope cancels its owner to end the body. The scope must take back that cancellation where
        it arrives: in the body, in the wait below, or after both. If the body and a child have failed, raise
        the body's error.
        """
        owner = self._owner
        outer_cancel = exc_type is asyncio.CancelledError
        if outer_cancel and self._owner_cancelled and owner is not None:
            # The scope has cancelled its owner for a failed child: take that back.
            outer_cancel = owner.uncancel() > 0
            self._owner_cancelled = False
        if exc_type is not None:
            self.cancel()
        while self._tasks:
            try:
                await self._empty()
            except asyncio.CancelledError:
                if self._owner_cancelled and owner is not None:
                    self._owner_cancelled = False
                    if owner.uncancel() == 0:
                        continue
                outer_cancel = True
                self.cancel()
        self._owner = None
        self.is_stopping = True
        if self._owner_cancelled and owner is not None:
            # The cancellation reached neither the body nor the wait. Take it back before it surfaces later.
            self._owner_cancelled = False
            owner.uncancel()
        if outer_cancel:
            if exc_type is asyncio.CancelledError:
                return
            raise asyncio.CancelledError
        if self.failure is not None and exc is not self.failure:
            if exc is not None and exc_type is not asyncio.CancelledError:
                return
            raise self.failure


class Pool(Protocol):
    """Runs blocking calls outside of the loop. `BlockingPool` runs them in threads.

    A simulation has a pool of its own, in which calls are events of a virtual loop. See `PoolFactory`.
    """

    name: str

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` and return its result. Cancellation: a call that has begun goes on."""
        ...

    def submit(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Queue ``fn``. Any thread may call this. Raise ``RuntimeError`` once the pool is closed, and
        ``Unavailable`` if the system starts no thread."""
        ...

    def lock(self) -> AbstractContextManager[object]:
        """Return a new lock for calls of this pool. It blocks a thread while another thread holds it."""
        ...

    def close(self) -> None:
        """Refuse new calls, and drop calls that have not begun. Do not wait for running calls."""
        ...


PoolFactory: TypeAlias = Callable[[str, int], Pool]
"""Makes a pool, given a name and a number of concurrent calls. `BlockingPool` is one."""


class _Executor(concurrent.futures.ThreadPoolExecutor):
    """Threads that a pool starts when needed. If the system starts no more, the running threads do all calls.

    The executor of the library raises an error then, and nevertheless does the refused call later.
    """

    def _adjust_thread_count(self) -> None:
        """Start a thread if one is needed. ``submit`` calls this under its lock, with its call queued."""
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                self._work_queue.get_nowait()  # Only the refused call is queued.
                raise Unavailable(
                    f"the system starts no thread for this process: {error}",
                    hint="Raise its limits of processes (`ulimit -u`, or pids of its cgroup) or of memory.",
                ) from error


class BlockingPool:
    """Threads for work that would block the loop: compression, fsync, SQL, cloud SDKs.

    At most ``threads`` calls run at a time. Further calls wait in order. In a forked child, ``run`` and
    ``submit`` raise ``Closed``. If not even one thread can be started, they raise ``Unavailable``.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._process = MadeBeforeFork(f"the pool of threads {name!r}")
        self._executor = _Executor(threads, thread_name_prefix=name)

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` in a thread of the pool.

        Cancellation: the caller returns at once. A call that a thread has begun runs to its end. So ``fn``
        must leave its objects usable even if its caller has gone.
        """
        self._process.require()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: fn(*args, **kwargs))

    def submit(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        self._process.require()
        return self._executor.submit(fn, *args, **kwargs)

    def lock(self) -> AbstractContextManager[object]:
        """Return a lock of `threading`."""
        return threading.Lock()

    def close(self) -> None:
        """Refuse new calls, and drop calls that have not begun. Do not wait for running calls."""
        if self._process.was_forked:
            return
        self._executor.shutdown(wait=False, cancel_futures=True)


def submitted(
    pool: Pool, failure: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> concurrent.futures.Future[T]:
    """Queue ``fn`` as ``Pool.submit`` does, but raise ``Closed(failure)`` once the pool is closed."""
    try:
        return pool.submit(fn, *args, **kwargs)
    except RuntimeError as error:
        raise Closed(failure) from error


class LoopThread:
    """An event loop in its own thread, for blocking code without a loop.

    Call ``run`` from any thread but the loop's own. Close the object at the end: ``close`` cancels running
    coroutines. From then on, and in a forked child, ``run`` raises ``Closed``. In a forked child, ``close``
    changes nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = MadeBeforeFork(f"the {name}")
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._ended = False
        """True once the loop takes no more coroutines. Changed and read under the lock."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; return its result or raise its error.

        An interrupt of the waiting thread (``KeyboardInterrupt``) cancels the coroutine.
        """
        future = self.begin(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop, without waiting for it. Cancel the returned future to cancel it."""
        if self._process.was_forked:
            coro.close()
        self._process.require()
        with self._lock:
            if not self._ended:
                return asyncio.run_coroutine_threadsafe(coro, self._loop)
        coro.close()
        raise Closed(f"the {self._name} was closed")

    def leave(self, coro: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine on the loop, then end the thread. Return before the coroutine has ended."""
        loop = self._loop
        self.begin(coro).add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))

    def close(self) -> None:
        """Cancel all running coroutines, wait for them, and end the thread. May be repeated. Not on the
        loop's own thread."""
        if self._process.was_forked:
            return
        with self._lock:
            if not self._ended:
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            loop = runner.get_loop()
            loop.run_forever()
            with self._lock:
                self._ended = True
            # Begin the coroutines that came meanwhile: the runner cancels only coroutines that have begun.
            loop.call_soon(loop.stop)
            loop.run_forever()


async def first_of(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    async with TaskScope("first of") as scope:
        waits = {scope.spawn(event.wait(), name="event") for event in events}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        scope.cancel()


async def sleep_unless(clock: Clock, seconds: float, event: asyncio.Event) -> bool:
    """Sleep for ``seconds``, or until ``event`` is set. Return True if the event is set."""
    async with TaskScope("sleep") as scope:
        waits = {
            scope.spawn(clock.sleep(seconds), name="time"),
            scope.spawn(event.wait(), name="event"),
        }
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        scope.cancel()
    return event.is_set()


OpFuture = concurrent.futures.Future
"""The outcome of an operation for which threads and the loop wait (an append, a commit).

Its owner sets it once. Threads use ``result(timeout)``, the loop ``await await_future(future)``.
"""


async def await_future(future: OpFuture[T]) -> T:
    """Await an ``OpFuture`` on the loop. Cancellation: the operation itself goes on."""
    return await await_shared(asyncio.wrap_future(future))


async def await_shared(future: asyncio.Future[T]) -> T:
    """Await a future or task of another owner. Raise its error. Cancellation: the future goes on, and only
    its owner reports a later error. (From Python 3.14 on, `asyncio.shield` has the loop report that error,
    too.)
    """
    if not future.done():
        done = asyncio.Event()
        wake = lambda _: done.set()  # noqa: E731
        future.add_done_callback(wake)
        try:
            await done.wait()
        except asyncio.CancelledError:
            future.remove_done_callback(wake)
            future.remove_done_callback(_take_error)
            future.add_done_callback(_take_error)  # Once, however many callers are cancelled.
            raise
    return future.result()


def _take_error(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future as seen. Otherwise the loop would report it when the future is freed."""
    if not future.cancelled():
        future.exception()


def as_plain_error(error: BaseException) -> BaseException:
    """Return ``error`` in a form that the event loop treats as a plain error.

    Raised on the loop, SystemExit and KeyboardInterrupt would end the process. A CancelledError would look
    like a cancellation of the waiter. A StopIteration would keep the waiter waiting for ever.
    """
    special = StopIteration | asyncio.CancelledError | concurrent.futures.CancelledError
    if isinstance(error, Exception) and not isinstance(error, special):
        return error
    broken = Broken(
        f"a thread raised {type(error).__name__}: {error}",
        hint="Code on a thread must not raise this. The process goes on; the operation fails.",
    )
    broken.__cause__ = error
    return broken


Waiter: TypeAlias = Callable[[OpFuture[Any], float | None], bool]
"""Blocks the calling thread until a future is done, for at most so many seconds (None: no limit). Returns
True if it is done. `wait_done` is such a function; simulations have their own."""


def wait_done(future: OpFuture[Any], timeout_s: float | None) -> bool:
    """Block this thread until the future is done. Return False if that takes longer than ``timeout_s``."""
    return bool(concurrent.futures.wait((future,), timeout_s).done)


def begun() -> OpFuture[Any]:
    """Return an ``OpFuture`` of an operation that has begun: a caller that cancels it changes nothing.

    `asyncio.wrap_future` passes a cancellation of its waiter on, such as by a time-out.
    """
    future: OpFuture[Any] = OpFuture()
    future.set_running_or_notify_cancel()
    return future


def resolved(value: T) -> OpFuture[T]:
    """Return an ``OpFuture`` that has already succeeded."""
    future: OpFuture[T] = OpFuture()
    future.set_result(value)
    return future


def failed(error: BaseException) -> OpFuture[Any]:
    """Return an ``OpFuture`` that has already failed."""
    future: OpFuture[Any] = OpFuture()
    future.set_exception(error)
    return future


def first_failure(futures: Collection[OpFuture[Any]]) -> BaseException | None:
    """Return the error of one failed future; None if none has failed yet."""
    for future in futures:
        if not future.done():
            continue
        if future.cancelled():
            return Broken("an operation was cancelled")
        if (error := future.exception()) is not None:
            return error
    return None
