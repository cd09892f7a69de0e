"""Processes that `os.fork` makes: threads, event loops and connections stay behind in their parent."""

from __future__ import annotations

import os
from typing import Final

from gazette.errors import Closed


class _Forks:
    """The number of forks between the first process of the program and this one."""

    count = 0


def _count() -> None:
    _Forks.count += 1


os.register_at_fork(after_in_child=_count)


class MadeBeforeFork:
    """Mark of an object that works only in the process that made it."""

    __slots__ = ("_count", "_what")

    def __init__(self, what: str) -> None:
        """Note the process that makes an object. Errors call the object ``what``, such as ``a publisher``."""
        self._what: Final = what
        self._count: Final = _Forks.count

    @property
    def is_left(self) -> bool:
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
