"""The threads of shards in a simulation: real threads, of which only one runs at a time.

Code of a shard blocks in ordinary calls, so it needs a stack of its own. The virtual loop gives a turn to a
worker's thread, and goes on when that thread waits or has nothing to do. A turn is a callback of the worker's
node. It comes after a random delay, not while the node is held, and never after the node is killed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gazette.errors import Bug, Closed
from gazette.runtime.tasks import OpFuture, as_plain_error, await_future
from gazette.testing.simulation.loop import Handle
from gazette.testing.simulation.storage import Threads, TurnThread, Unwound

T = TypeVar("T")

_TURN_S: Final = 0.0002
"""Mean delay of a turn."""


class Workers:
    """The workers of one run. ``close`` ends their threads."""

    def __init__(self) -> None:
        self._all: list[SimWorker] = []

    def of(self, threads: Threads) -> Callable[[str], SimWorker]:
        """Return the `gazette.consumer.shard.thread.WorkerFactory` of one node."""

        def new(name: str) -> SimWorker:
            worker = SimWorker(threads, name)
            self._all.append(worker)
            return worker

        return new

    def close(self) -> None:
        """End every thread, wherever it waits. Ignore errors that a thread raises as it ends."""
        for worker in self._all:
            worker.end()
        self._all.clear()


class SimWorker:
    """A `gazette.consumer.shard.thread.Worker` whose turns are events of the virtual loop."""

    def __init__(self, threads: Threads, name: str) -> None:
        self.name = name
        self._node = threads.node
        self._loop = threads.node.loop
        self._rng = threads.rng
        self._work: deque[tuple[Callable[[], Any], OpFuture[Any]]] = deque()
        self._closed = False
        self._over = False
        self._turn_due = False
        self._thread: TurnThread | None = None
        """The thread; None until the first turn, and once the worker has ended."""
        self.stall_chance = 0.0
        """Share of the turns that come late by up to ``stall_s``, as on a busy machine."""
        self.stall_s = 0.0

    # The methods that the code of shards calls.

    def submit(self, fn: Callable[[], T]) -> OpFuture[T]:
        if self._closed:
            raise Closed("the shard's thread has ended")
        future: OpFuture[T] = OpFuture()
        self._work.append((fn, future))
        self.wake()
        return future

    async def run(self, fn: Callable[[], T]) -> T:
        return await await_future(self.submit(fn))

    def close(self) -> None:
        self._closed = True
        self.wake()

    def condition(self) -> threading.Condition:
        return _SimCondition(self)

    def wait(self, future: OpFuture[Any], timeout_s: float | None) -> bool:
        if not future.done():
            future.add_done_callback(lambda _: self.wake())
            self.pause_until(future.done, timeout_s)
        return future.done()

    def sleep(self, seconds: float) -> None:
        """Block the running function for that long, as a slow callback does."""
        self.pause_until(lambda: False, seconds)

    @property
    def is_current(self) -> bool:
        """True if the caller runs on this worker."""
        return self._thread is not None and TurnThread.current() is self._thread

    # Turns.

    def pause_until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Give turns back to the loop until ``timeout_s`` has passed, or a `wake` finds that ``ready()``."""
        if not self.is_current:
            raise Bug("only the thread of a worker waits for it", worker=self.name)
        loop = self._loop
        deadline = None if timeout_s is None else loop.now + timeout_s
        timer: Handle | None = None
        if deadline is not None and not ready():
            timer = loop.call_at(deadline, self.wake, context=self._node.context)
        while not ready() and (deadline is None or loop.now < deadline):
            self._give_back()
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        """Have the worker look again whether it is ready."""
        if self._turn_due or self._over:
            return
        self._turn_due = True
        delay = self._rng.expovariate(1.0) * _TURN_S
        if self.stall_chance and self._rng.random() < self.stall_chance:
            delay += self._rng.random() * self.stall_s
        self._loop.call_later(delay, self._take_turn, context=self._node.context)

    def _take_turn(self) -> None:
        """Let the thread run until it gives the turn back. Called on the loop."""
        self._turn_due = False
        if self._over:
            return
        if self._thread is not None:
            self._thread.resume()
            return
        context = self._node.context.copy()
        self._thread = TurnThread.take()
        self._thread.begin(lambda: context.run(self._main))

    def _give_back(self) -> None:
        """Let the loop continue until the next turn. Called on the thread."""
        assert self._thread is not None
        self._thread.wait(0.0)

    def _main(self) -> None:
        try:
            while self._work or not self._closed:
                if self._work:
                    self._perform(*self._work.popleft())
                else:
                    self._give_back()
        except Unwound:
            pass
        finally:
            self._over = True
            self._thread = None  # Other calls may use the thread now.

    def _perform(self, fn: Callable[[], Any], future: OpFuture[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn()
        except Unwound:
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller that enqueued it
            future.set_exception(as_plain_error(error))
        else:
            future.set_result(result)

    def end(self) -> None:
        """End the thread's work, after the run."""
        self._over = True
        if self._thread is not None:
            self._thread.unwind()


class _SimCondition(threading.Condition):
    """A condition on which one worker waits. Other workers on their turns, or code on the loop, notify it."""

    def __init__(self, worker: SimWorker) -> None:
        super().__init__()
        self._worker = worker
        self._notified = 0

    def wait(self, timeout: float | None = None) -> bool:
        seen = self._notified
        self.release()
        try:
            self._worker.pause_until(lambda: self._notified != seen, timeout)
        finally:
            self.acquire()
        return self._notified != seen

    def notify(self, n: int = 1) -> None:
        self._notified += 1
        self._worker.wake()

    def notify_all(self) -> None:
        self.notify()
