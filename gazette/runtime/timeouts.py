"""Time limits of waits. `asyncio.timeout` of early Pythons does not work in tasks that were cancelled."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, cast


class _Timeout:
    """The object of `asyncio.timeout`, with the behaviour that it has from Python 3.11.3 on.

    In a task that was cancelled earlier, older versions raise ``CancelledError`` at the limit. So the cleanup
    of a task would stop there: for example, a process would not be killed.
    """

    def __init__(self, seconds: float | None) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._cancellations = 0

    async def __aenter__(self) -> Self:
        self._cancellations = _cancellations()
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._timeout.__aexit__(kind, error, tb)
        # The limit is the only reason for which the task was cancelled.
        if (
            kind is asyncio.CancelledError
            and self._timeout.expired()
            and _cancellations() <= self._cancellations
        ):
            raise TimeoutError from error

    def expired(self) -> bool:
        return self._timeout.expired()

    def when(self) -> float | None:
        return self._timeout.when()

    def reschedule(self, when: float | None) -> None:
        self._timeout.reschedule(when)


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


timeout: Final[Callable[[float | None], asyncio.Timeout]] = (
    asyncio.timeout if sys.version_info >= (3, 11, 3) else cast("Any", _Timeout)
)
"""Makes a context manager that raises ``TimeoutError`` after a number of seconds; None: no limit."""
