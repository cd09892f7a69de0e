"""The thread of a shard, which runs all code of the shard that may block."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from gazette.errors import Closed
from gazette.runtime.tasks import OpFuture, as_plain_error, await_future, wait_done

T = TypeVar("T")


class Worker(Protocol):
    """Worker that runs the functions of one shard in order, such as a `ShardThread`. Functions may block.

    The worker of a simulation waits in virtual time. So functions wait only by ``condition`` or ``wait``.
    """

    def submit(self, fn: Callable[[], T]) -> OpFuture[T]:
        """Queue a function. Raise ``Closed`` after ``close``."""
        ...

    async def run(self, fn: Callable[[], T]) -> T:
        """Queue a function and wait for its end. After a cancellation the function still runs."""
        ...

    def close(self) -> None:
        """End the worker after the queued functions."""
        ...

    def condition(self) -> threading.Condition:
        """Make a condition on which a function of this worker may wait."""
        ...

    def wait(self, future: OpFuture[Any], timeout_s: float | None) -> bool:
        """Block the running function until the future is done. Return False after ``timeout_s`` seconds; None
        means no limit."""
        ...


WorkerFactory: TypeAlias = Callable[[str], Worker]
"""Factory of the worker of a shard, by its name."""


class ShardThread:
    """One thread that runs functions one after the other.

    The thread is a daemon: a callback that never returns delays no other shard, and not the process's end.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], OpFuture[Any]] | None]
        self._work = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], T]) -> OpFuture[T]:
        """Queue a function. Raise ``Closed`` after ``close``."""
        if self._closed:
            raise Closed("the shard's thread has ended")
        future: OpFuture[T] = OpFuture()
        self._work.put((fn, future))
        return future

    async def run(self, fn: Callable[[], T]) -> T:
        """Queue a function and wait for its end. After a cancellation the function still runs."""
        return await await_future(self.submit(fn))

    def close(self) -> None:
        """End the thread after the queued functions."""
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
            del fn, future, work  # Do not keep these alive during the wait for the next function.
