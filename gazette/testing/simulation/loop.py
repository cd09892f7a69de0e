"""An event loop without real IO: ready callbacks run in order, and time jumps to the next timer.

Callbacks and timers belong to a node (a simulated process): the node of the context in which they were made.
A node can be held, as by SIGSTOP: then its callbacks wait. Callbacks of a killed node are forgotten.
"""

from __future__ import annotations

import asyncio
import contextvars
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from heapq import heappop, heappush
from typing import Any, Final, TypeVar

T = TypeVar("T")

_NODE: Final[contextvars.ContextVar[SimNode | None]] = contextvars.ContextVar("node", default=None)
_STEPS_PER_INSTANT_MAX: Final = 200_000
"""Greatest number of callbacks at one instant: with more of them, the code loops without a wait."""
_TASKS_KEPT: Final = 512
_CHAINED: Final = "_chain_future.<locals>._set_state"
"""The function that `asyncio.wrap_future` calls in the loop."""


class Livelock(Exception):
    """Callbacks follow each other without end, and time stands still."""


class Handle(list[Any]):
    """A callback to come, like an `asyncio.TimerHandle`. Items: time, number, callback, arguments, context.

    It is a list, since millions are made and compared: Python compares lists fast, here by their times. The
    callback of a cancelled handle is None.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def cancel(self) -> None:
        self[2] = self[3] = None

    def cancelled(self) -> bool:
        return self[2] is None

    def when(self) -> float:
        when: float = self[0]
        return when


class SimNode:
    """A simulated process: all code that runs in ``context`` is part of it."""

    __slots__ = (
        "_backlog",
        "_holds",
        "ahead_at",
        "alive",
        "blocked",
        "context",
        "held_since",
        "loop",
        "name",
        "tasks",
        "tasks_kept",
    )

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.blocked = False
        """True if callbacks are kept back: the node is held, or dead."""
        self.held_since: float | None = None
        self.ahead_at = 0.0
        """Time until which the node has blocked itself. The callback that blocks sees it as the present."""
        self._holds = 0
        self._backlog: list[Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.tasks_kept = _TASKS_KEPT
        """Length of ``tasks`` at which finished tasks are removed from it."""
        self.context = copy_context()
        self.context.run(_NODE.set, self)

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task of this node."""
        task = self.loop.create_task(coro, name=name, context=self.context.copy())
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            at = ", ".join(f"{frame.name}:{frame.lineno}" for frame in frames)
            self.loop.call_exception_handler(
                {"message": f"{task.get_name()} at {self.name} ended ({at})", "exception": error}
            )

    def hold(self, seconds: float) -> None:
        """Keep back all callbacks of this node, as SIGSTOP does, until its last hold has ended."""
        if not self.alive:
            return
        self._holds += 1
        if self.held_since is None:
            self.held_since = self.loop.now
        self.blocked = True
        self.loop.at(self.loop.now + seconds, self._release)

    def block(self, seconds: float) -> None:
        """Block the node from within: the present callback takes that long, and nothing else runs."""
        self.ahead_at = max(self.ahead_at, self.loop.now) + seconds
        self.hold(self.ahead_at - self.loop.now)

    def _release(self) -> None:
        self._holds -= 1
        if self._holds or not self.alive:
            return
        self.blocked, self.held_since = False, None
        backlog, self._backlog = self._backlog, []
        self.loop.ready.extend(backlog)

    def kill(self) -> None:
        """End the node as SIGKILL does: none of its code runs again, not even cancellation."""
        self.alive, self.blocked = False, True
        self.held_since = self.loop.now

    def keep(self, handle: Handle) -> None:
        """Take a callback that must not run now. A dead node keeps it, so that no finalizer runs."""
        self._backlog.append(handle)

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self.tasks if not task.done()]


_Loop: Any = asyncio.AbstractEventLoop  # Its stubs demand methods that brokers do not use.


class VirtualLoop(_Loop):  # type: ignore[misc]
    """Runs everything in this thread, in an order that depends on nothing outside."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self.now = 0.0
        self.ready: deque[Handle] = deque()
        self.digest = 0
        """Changes with every timer that fired and every event noted: equal runs have equal digests."""
        self.steps = 0
        self.sees_done = False
        """True if a future on the loop is done as soon as its thread's future is, as from Python 3.14 on."""
        self._timers: list[Handle] = []
        self._count = 0
        self._on_error = on_error
        self._stopped = False
        self._closed = False
        self._running = False

    def run(self, until: float) -> bool:
        """Run until ``stop`` or that time. Return False if nothing is left to wait for: a deadlock."""
        asyncio._set_running_loop(self)
        self._running, self._stopped = True, False
        ready, timers, node_of = self.ready, self._timers, _NODE
        take = ready.popleft
        instant = 0
        try:
            while not self._stopped:
                if ready:
                    handle = take()
                    _, _, callback, args, context = handle
                    if callback is None:
                        continue
                    node = context.get(node_of)
                    if node is not None and node.blocked:
                        node.keep(handle)
                        continue
                    instant += 1
                    if instant > _STEPS_PER_INSTANT_MAX:
                        raise Livelock(f"{callback!r} with {args!r}")
                    try:
                        context.run(callback, *args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as asyncio does
                        self._on_error(f"exception in callback {callback!r}: {error!r}")
                    continue
                self.steps += instant
                instant = 0
                while timers and timers[0][2] is None:
                    heappop(timers)
                if not timers:
                    return False
                if timers[0][0] > until:
                    self.now = until
                    return True
                handle = heappop(timers)
                self.now = handle[0]
                self.digest = hash((self.digest, self.now))
                ready.append(handle)
            return True
        finally:
            self.steps += instant
            self._running = False
            asyncio._set_running_loop(None)

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> Handle:
        """Call something at a time, outside of all nodes."""
        return self.call_at(when, callback, *args, context=_OUTSIDE)

    def note(self, *event: object) -> None:
        """Make an event part of the digest."""
        self.digest = hash((self.digest, *event))

    def abandon(self) -> None:
        """Forget everything that is scheduled, after the end of a run."""
        self._on_error = lambda message: None
        self.ready.clear()
        self._timers.clear()

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Handle:
        if context is None:
            context = copy_context()
        handle = Handle((0.0, 0, callback, args, context))
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        is_chained = self.sees_done and getattr(callback, "__qualname__", "") == _CHAINED
        if is_chained and asyncio._get_running_loop() is self:
            callback(*args)
            return Handle((0.0, 0, None, None, context))
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Handle:
        if when < self.now:
            when = self.now
        if context is None:
            context = copy_context()
        self._count += 1
        handle = Handle((when, self._count, callback, args, context))
        heappush(self._timers, handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, **options)
        context = options.get("context")
        node = _NODE.get() if context is None else context.get(_NODE)
        if node is not None:
            tasks = node.tasks
            tasks.append(task)
            if len(tasks) >= node.tasks_kept:
                node.tasks = node.pending_tasks()
                node.tasks_kept = 2 * len(node.tasks) + _TASKS_KEPT
        return task

    def stop(self) -> None:
        self._stopped = True

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._on_error(f"{context.get('message')}: {error!r}")


def current_node() -> SimNode | None:
    """Return the node whose code runs now; None outside of all nodes."""
    return _NODE.get()


_OUTSIDE: Final = copy_context()


class NodeClock:
    """Time as one node sees it: the virtual loop's, and a wall clock that may be wrong."""

    __slots__ = ("_loop", "_node", "offset_s")

    EPOCH_S: Final = 1_700_000_000.0

    def __init__(self, loop: VirtualLoop, node: SimNode | None = None) -> None:
        self._loop = loop
        self._node = node
        self.offset_s = 0.0

    def now(self) -> float:
        return self.EPOCH_S + self.monotonic() + self.offset_s

    def monotonic(self) -> float:
        now = self._loop.now
        return now if self._node is None else max(now, self._node.ahead_at)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
