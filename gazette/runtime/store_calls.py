"""Stage 8 of the byte path: calls to one blob store, in threads of its own.

A thread cannot be interrupted, so a store that never answers keeps the threads that call it. Therefore each
store has its own threads: a bounded number, which are started when needed. While all its threads hang, new
calls fail at once. Calls are accepted again as soon as one thread has returned.

A call *hangs* if it has waited for its store for ``hung_after_s`` seconds without progress. A store makes
progress when it takes or gives bytes, and with each object of a listing. Time that a call spends elsewhere,
such as in compression, does not count.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, ParamSpec, TypeVar

from gazette.errors import Closed, Unavailable
from gazette.runtime.tasks import Pool

T = TypeVar("T")
P = ParamSpec("P")

HUNG_AFTER_S: Final = 60.0
"""Seconds. Longer than any silence that SDKs permit."""

_HINT: Final = (
    "Check the store. Its calls continue as soon as threads return. A restart drops them."
)

_thread = threading.local()


def on_store() -> None:
    """Note that the call of this thread has made progress, and waits for its store from now on."""
    call: StoreCall[Any] | None = getattr(_thread, "call", None)
    if call is not None:
        call.since = call.monotonic()


def off_store() -> None:
    """Note that the call of this thread does not wait for its store any more."""
    call: StoreCall[Any] | None = getattr(_thread, "call", None)
    if call is not None:
        call.since = None


class StoreCall(Generic[T]):
    """One call. ``future`` is done when a thread has ended the call, however late, or when it is refused."""

    __slots__ = ("fn", "future", "late", "monotonic", "since", "wakers")

    def __init__(self, fn: Callable[[], T], monotonic: Callable[[], float]) -> None:
        self.fn = fn
        self.monotonic = monotonic
        self.future: Future[T] = Future()
        self.since: float | None = None
        """The time since which the call waits for its store; None while it does not."""
        self.late = False
        """True once the call has hung, and its waiters have got an error."""
        self.wakers: list[Callable[[], None]] = []
        """Functions that end the waits in `StoreCalls.answer`. Called on the loop if the call hangs."""

    def waited_s(self, now: float) -> float:
        """Return the seconds for which the call has waited for its store without progress."""
        since = self.since
        return 0.0 if since is None else now - since


class StoreCalls:
    """A pool of at most ``threads`` threads for one store. Loop-bound.

    ``on_start`` is called for each accepted call. From then on the owner calls ``watch`` every second:
    otherwise the waiters of a hung call never get an error.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        threads: int,
        monotonic: Callable[[], float],
        *,
        hung_after_s: float = HUNG_AFTER_S,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._pool = pool
        self._threads = threads
        self._monotonic = monotonic
        self._hung_after_s = hung_after_s
        self._on_start = on_start
        self._lock = threading.RLock()
        self._running: set[StoreCall[Any]] = set()
        self._queue: deque[StoreCall[Any]] = deque()
        self._closed = False

    @property
    def in_progress(self) -> int:
        """Number of calls that have begun and not ended."""
        return len(self._running)

    @property
    def hung(self) -> int:
        """Number of calls in progress that hang."""
        with self._lock:
            return len(self._hung())

    @property
    def trouble(self) -> str:
        """Why new calls are refused; empty while they are accepted."""
        with self._lock:
            hung = self._hung()
            if len(hung) < self._threads:
                return ""
            shortest_s = min(hung)
        calls = "call has" if len(hung) == 1 else "calls have"
        return f"{len(hung)} {calls} not returned for {shortest_s:.0f} s"

    def start(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> StoreCall[T]:
        """Begin a call, or queue it until a thread is free. ``answer`` waits for its result.

        Raise ``Unavailable`` while all threads hang, and ``Closed`` after ``close``.
        """
        call = StoreCall(lambda: fn(*args, **kwargs), self._monotonic)
        with self._lock:
            if self._closed:
                raise Closed("the blob store is closed", store=self.name)
            if len(self._running) < self._threads:
                self._begin(call)
            else:
                if trouble := self.trouble:
                    raise self._refusal(trouble)
                self._queue.append(call)
        self._on_start()
        return call

    async def answer(self, call: StoreCall[T]) -> T:
        """Return or raise the result of the call.

        Raise ``Unavailable`` once the call hangs. Cancellation: the call goes on; its result is dropped.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not answered.done():
                answered.set_result(None)

        def ended(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        call.wakers.append(wake)
        if call.late:
            wake()
        call.future.add_done_callback(ended)
        await answered
        if not call.future.done():
            raise self._refusal(f"a call has not returned for {self._hung_after_s:.0f} s")
        return call.future.result()

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``start`` and return the ``answer``."""
        return await self.answer(self.start(fn, *args, **kwargs))

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``start``, and return a future to wait for without a limit."""
        return self.start(fn, *args, **kwargs).future

    def lock(self) -> AbstractContextManager[object]:
        """See ``Pool.lock``."""
        return self._pool.lock()

    def watch(self) -> str:
        """Give the waiters of hung calls an error. Return ``trouble``. Call this every second.

        While all threads hang, also refuse the calls that wait for a thread.
        """
        with self._lock:
            now = self._monotonic()
            newly_hung = [
                call
                for call in self._running
                if not call.late and call.waited_s(now) >= self._hung_after_s
            ]
            for call in newly_hung:
                call.late = True
            trouble = self.trouble
            refused = list(self._queue) if trouble else []
            if refused:
                self._queue.clear()
        for call in newly_hung:
            for wake in call.wakers:
                wake()
        for call in refused:
            call.future.set_exception(self._refusal(trouble))
        return trouble

    def close(self) -> None:
        """Refuse new calls, and calls that have not begun. Do not wait for running calls."""
        with self._lock:
            self._closed = True
            refused = list(self._queue)
            self._queue.clear()
        for call in refused:
            call.future.set_exception(Closed("the blob store is closed", store=self.name))
        self._pool.close()

    def _begin(self, call: StoreCall[Any]) -> None:
        """Let a thread of the pool take the call. Call under the lock."""
        call.since = self._monotonic()
        self._running.add(call)
        try:
            work = self._pool.submit(self._work, call)
        except RuntimeError:
            self._running.discard(call)
            call.future.set_exception(Closed("the blob store is closed", store=self.name))
            return
        except Unavailable as error:
            self._running.discard(call)
            call.future.set_exception(error)
            return
        work.add_done_callback(lambda ended: self._dropped(call) if ended.cancelled() else None)

    def _dropped(self, call: StoreCall[Any]) -> None:
        """Fail a call that no thread had taken when the pool was closed."""
        with self._lock:
            self._running.discard(call)
        call.future.set_exception(Closed("the blob store is closed", store=self.name))

    def _work(self, call: StoreCall[Any]) -> None:
        """Run the call, in a thread."""
        result, failure = None, None
        _thread.call = call
        try:
            result = call.fn()
        except BaseException as error:  # noqa: BLE001 - the waiter of the call raises it
            failure = error
        finally:
            _thread.call = None
        with self._lock:
            self._running.discard(call)
            if self._queue:
                self._begin(self._queue.popleft())
        if failure is not None:
            call.future.set_exception(failure)
        else:
            call.future.set_result(result)

    def _hung(self) -> list[float]:
        """Return the seconds for which each hung call has waited. Call under the lock."""
        now = self._monotonic()
        waits = (call.waited_s(now) for call in self._running)
        return [wait for wait in waits if wait >= self._hung_after_s]

    def _refusal(self, trouble: str) -> Unavailable:
        return Unavailable(
            f"the blob store does not answer: {trouble}", hint=_HINT, store=self.name
        )
