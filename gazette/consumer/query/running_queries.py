"""The queries that a member answers now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gazette.errors import Unavailable


class RunningQueries:
    """The queries that this member answers now, to end all of them at once. Loop-bound."""

    def __init__(self) -> None:
        # A dict keeps the order, so that queries end in the order in which they began.
        self._deadlines: dict[asyncio.Timeout, None] = {}
        self._reason = ""
        self._end_at: float | None = None
        """Time of the event loop at which all queries end; None before `end`."""

    @property
    def ended(self) -> bool:
        """True if this member answers no more queries."""
        return self._end_at is not None and asyncio.get_running_loop().time() >= self._end_at

    @contextmanager
    def query(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Register a query while the block runs, so that ``end`` can bring its ``deadline`` forward."""
        self._deadlines[deadline] = None
        try:
            self._bring_forward(deadline)
            yield
        finally:
            del self._deadlines[deadline]

    def end(self, reason: str, within_s: float = 0.0) -> None:
        """End running queries, and queries that begin later, within ``within_s`` seconds."""
        until = asyncio.get_running_loop().time() + within_s
        if self._end_at is None or until < self._end_at:
            self._end_at, self._reason = until, reason
            for deadline in self._deadlines:
                self._bring_forward(deadline)

    def _bring_forward(self, deadline: asyncio.Timeout) -> None:
        """Bring a deadline forward to the time at which all queries must end, if `end` has set that time."""
        when = deadline.when()
        if self._end_at is not None and (when is None or self._end_at < when):
            deadline.reschedule(self._end_at)

    def leaving(self, **facts: Any) -> Unavailable:
        """Return the error of a query that was ended."""
        return Unavailable(
            f"this member leaves its cluster: {self._reason}",
            hint="Ask again: another member answers.",
            **facts,
        )
