"""Marks of objects that work in one process only, on one event loop only, or until their owner closes them.

Any other use raises an error that names the object. A child that `os.fork` makes has none of its parent's
threads, event loops and connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from gazette.errors import Closed, Invalid

log = logging.getLogger(__name__)

running_loop: Final = asyncio._get_running_loop
"""Function that returns the event loop of the present thread; None if no loop runs."""
_OURS: Final = "gazette"
_UNBOUND: Final = object()
_ONE_FOR_EACH: Final = (
    "Make one for each event loop, within the coroutine that uses it, and close it there. Other threads pass"
    " calls to the first loop: asyncio.run_coroutine_threadsafe(call, loop)."
)


class _Forks:
    """The number of forks between the first process of the program and this process."""

    count = 0


_bound_objects: Final[weakref.WeakSet[LoopBound]] = weakref.WeakSet()


def _count() -> None:
    _Forks.count += 1
    for bound in _bound_objects:
        # The child may run the same loop. So a comparison of loops must fail, and lead to `require`.
        bound.loop = _UNBOUND


os.register_at_fork(after_in_child=_count)


class MadeBeforeFork:
    """Mark of an object that works only in the process that made it."""

    __slots__ = ("_count", "_what")

    def __init__(self, what: str) -> None:
        """Note the process that makes an object. Errors call it ``what``, such as ``a publisher``."""
        self._what: Final = what
        self._count: Final = _Forks.count

    @property
    def was_forked(self) -> bool:
        """True if this process was forked after the object was made."""
        return self._count != _Forks.count

    def require(self) -> None:
        """Raise ``Closed`` if this process was forked after the object was made."""
        if self._count != _Forks.count:
            raise forked(self._what)


def forked(what: str) -> Closed:
    """Return the error for the use of an object in a process that was forked after it was made."""
    return Closed(
        f"{what} was made before this process was forked, and works in its parent only",
        process=os.getpid(),
        parent=os.getppid(),
        hint="Make it after the fork, in the process that uses it. With multiprocessing, use the start"
        " method 'spawn'; with a server that forks workers, the hook that runs in each worker.",
    )


class ClosedByOwner(MadeBeforeFork):
    """Mark of an object that its owner closes, with the line of code that made the object."""

    __slots__ = ("_made_at",)

    def __init__(self, what: str) -> None:
        """Note the line and the process that make an object. Errors and the log call the object ``what``."""
        super().__init__(what)
        self._made_at: Final = _line_of_caller()

    def dropped(self, close: Callable[[], object], hint: str) -> None:
        """Log that the object was dropped without being closed, and run ``close``.

        Call it from ``__del__``, in any thread. No effect in a forked child, or at the interpreter's end.
        """
        if self.was_forked or sys.is_finalizing():
            return
        log.warning(
            "%(what)s, made at %(where)s, was dropped without being closed, and is closed now. %(hint)s",
            {"what": self._what, "where": self._made_at, "hint": hint},
        )
        self._run(close)

    def _run(self, close: Callable[[], object]) -> None:
        close()


class LoopBound(ClosedByOwner):
    """Mark of an object that works on one event loop. The first use binds the object."""

    __slots__ = ("__weakref__", "loop")

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.loop: Any = _UNBOUND
        """The loop of the object; ``_UNBOUND`` before its first use, and in a forked child. Frequent code
        calls `require` only if `running_loop` returns another object."""
        _bound_objects.add(self)

    def require(self) -> None:
        """Bind the object to the running loop, if there is one.

        Raise ``Invalid`` if it is bound to another loop, and ``Closed`` in a forked child.
        """
        super().require()
        loop = running_loop()
        if loop is None or loop is self.loop:
            return
        if self.loop is not _UNBOUND:
            raise Invalid(
                f"{self._what} is used on another event loop than before",
                path="loop",
                made_at=self._made_at,
                former_loop="closed" if self.loop.is_closed() else "open",
                hint=_ONE_FOR_EACH,
            )
        self.loop = loop

    def _run(self, close: Callable[[], object]) -> None:
        """Let the loop run ``close``. Do nothing if there is no loop, or it has ended: then the garbage
        collector closes the object's sockets."""
        if self.loop is not _UNBOUND:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(close)


def _line_of_caller() -> str:
    """Return file and line of the innermost code outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != _OURS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line of gazette"
