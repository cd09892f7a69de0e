"""An event loop whose time is processor time plus the length of all waits. It skips the waits."""

from __future__ import annotations

import asyncio
import resource
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from gazette.runtime.clock import SystemClock

T = TypeVar("T")

sleep: Final = SystemClock().sleep
"""Wait on the running loop."""

_NEVER_S = 1e6


class PaperLoop(asyncio.SelectorEventLoop):
    """A loop for work without real IO. `PaperClock` has its time.

    Its time is the processor time of this process without ``free`` sections, plus the length of all waits. No
    wait takes real time. So other work on the machine does not count. With ``work_is_free``, only waits take
    time: then each run is the same.
    """

    def __init__(self, *, work_is_free: bool = False) -> None:
        self.work_is_free = work_is_free
        self._skipped = 0.0
        self._freed = 0.0
        self.longest_s = 0.0
        """Longest turn of the loop: for so long, other tasks had to wait."""
        self.turn_began = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self.cpu_s + self._skipped

    @property
    def cpu_s(self) -> float:
        """Processor time of this process, without free sections."""
        return 0.0 if self.work_is_free else time.process_time() - self._freed

    def skip(self, seconds: float) -> None:
        """Let time pass without work."""
        self._skipped += seconds

    @contextmanager
    def free(self) -> Iterator[None]:
        """Let the work of a block take no time: other processes would do it."""
        began = time.process_time()
        try:
            yield
        finally:
            self._freed += time.process_time() - began

    def end_turn(self) -> None:
        self.longest_s = max(self.longest_s, self.time() - self.turn_began)


class _SkippingSelector(selectors.SelectSelector):
    """A selector that does not wait: it lets the time of its loop pass."""

    def __init__(self, loop: PaperLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.end_turn()
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("all tasks wait for each other")
        if not ready and timeout:
            self._loop.skip(timeout)
        self._loop.turn_began = self._loop.time()
        return ready


class PaperClock:
    """The time of a `PaperLoop`."""

    def __init__(self, loop: PaperLoop) -> None:
        self.monotonic = self.now = loop.time

    async def sleep(self, seconds: float) -> None:
        await sleep(seconds)


class PaperPool:
    """A `gazette.runtime.tasks.Pool` whose calls take the time of the child processes that they start."""

    name = "paper"

    def __init__(self, loop: PaperLoop) -> None:
        self._loop = loop
        self.child_s = 0.0
        """Processor time of child processes."""

    async def run(self, solve: Callable[[Any, float], T], problem: Any, timeout_s: float) -> T:
        """Compute a plan without its time limit: that is real time, in which the machine does other work."""
        del timeout_s
        before = _children_s()
        with self._loop.free():
            result = solve(problem, _NEVER_S)
        took_s = 0.0 if self._loop.work_is_free else _children_s() - before
        self.child_s += took_s
        await sleep(took_s)
        return result


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
