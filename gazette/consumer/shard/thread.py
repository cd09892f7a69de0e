"""The thread of a shard. All that may block for this shard runs there, and nothing of another shard."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from gazette.errors import Closed
from gazette.runtime.tasks import OpFuture, as_plain_error, await_future, wait_done

T = TypeVar("T")


class Worker(Protocol):
    """Worker that runs the functions of one shard in order, where they may block. `ShardThread` is one.

    Simulations replace it: theirs runs one worker at a time, and waits in virtual time. So a
    function waits only by ``condition`` or ``wait``.
    """

    def submit(self, fn: Callable[[], T]) -> OpFuture[T]:
        """Queue a function. Raise ``Closed`` after ``close``."""
        ...

    async def run(self, fn: Callable[[], T]) -> T:
        """Queue a function and wait for it. After a cancellation it still runs."""
        ...

    def close(self) -> None:
        """End the worker after what is queued."""
        ...

    def condition(self) -> threading.Condition:
        """Make a condition that a function of this worker waits for."""
        ...

    def wait(self, future: OpFuture[Any], timeout_s: float | None) -> bool:
        """Block the running function until the future is done. Return False if that takes longer."""
        ...


WorkerFactory: TypeAlias = Callable[[str], Worker]
"""Factory of the worker of a shard, by its name."""


class ShardThread:
    """Runs functions one after the other on one thread.

    The thread is a daemon. A callback of the application that never returns stops neither the end
    of the process nor that of another shard.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], OpFuture[Any]] | None]
        self._work = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], T]) -> OpFuture[T]:
        """Enqueue a function. Raise ``Closed`` after ``close``."""
        if self._closed:
            raise Closed("the shard's thread has ended")
        future: OpFuture[T] = OpFuture()
        self._work.put((fn, future))
        return future

    async def run(self, fn: Callable[[], T]) -> T:
        """Enqueue a function and wait for it. After a cancellation it still runs."""
        return await await_future(self.submit(fn))

    def close(self) -> None:
        """Let the thread end after what is enqueued."""
        if not self._closed:
            self._closed = True
            self._work.put(None)

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def wait(self, future: OpFuture[Any], timeout_s: float | None) -> bool:
        return wait_done(future, timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            fn, future = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn()
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller that enqueued it
                future.set_exception(as_plain_error(error))
            else:
                future.set_result(result)
            del fn, future, work
