"""Turns in which the connections of a server do the work that their peers cause.

A little work is done at once. If a peer causes more, its connection reads nothing until that work is done.
The connection does a share of the work in each turn of the event loop. Connections with new work go before
connections that continue. So a peer that sends without end delays other peers by one turn or two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Protocol

WORK_MAX: Final = 1_024
"""Upper bound of the work of all connections in a turn of the loop. A unit: see `connection.BEGIN_WORK`."""
WORK_MIN: Final = 64
"""Least work of all connections in a turn, however long turns take."""
SHARE: Final = 256
"""Upper bound of the work of one connection before other connections have their turn."""
TURN_S: Final = 0.02
"""Seconds of a turn. The turn after a longer turn has less work: calls may cost more than their units."""


class BusyConnection(Protocol):
    """One connection."""

    @property
    def has_backlog(self) -> bool:
        """True if bytes have arrived and were not handled."""
        ...

    def work(self, data: bytes, units_max: int) -> int:
        """Take bytes, and handle at most ``units_max`` units of work. Return how many units were done."""
        ...

    def keep(self, data: bytes) -> None:
        """Take bytes, and leave them to a later ``work``."""
        ...

    def pause_reading(self) -> None:
        """Read nothing more. May be repeated."""
        ...

    def resume_reading(self) -> None:
        """Read again."""
        ...


class Turns:
    """The turns of a server's connections. Loop-bound.

    ``call_soon`` calls a function in the next turn of the loop. ``monotonic`` gives the time in seconds.
    """

    def __init__(
        self, monotonic: Callable[[], float], call_soon: Callable[[Callable[[], None]], Any]
    ) -> None:
        self._monotonic = monotonic
        self._call_soon = call_soon
        self._work = WORK_MAX
        """Work of a turn: fewer units after long turns."""
        self._left = WORK_MAX
        """Work that may still be done in this turn."""
        self._new: OrderedDict[BusyConnection, None] = OrderedDict()
        """Connections with a backlog that have had no share yet, in order."""
        self._old: OrderedDict[BusyConnection, None] = OrderedDict()
        """All other connections with a backlog, in order."""
        self._asked_at: float | None = None
        """The time at which the next turn was requested."""

    def arrived(self, worker: BusyConnection, data: bytes) -> None:
        """Let a connection handle bytes that have arrived, now or in later turns."""
        if self._left > 0 and worker not in self._new and worker not in self._old:
            self._left -= worker.work(data, min(SHARE, self._left))
            if worker.has_backlog:
                self._wait(self._old, worker)
        else:
            worker.keep(data)
            if worker not in self._old:
                self._wait(self._new, worker)
        if self._left < self._work // 2:
            self._ask()  # The next turn has its full work again.

    def forget(self, worker: BusyConnection) -> None:
        """Forget a connection that has ended."""
        self._new.pop(worker, None)
        self._old.pop(worker, None)

    def _wait(self, queue: OrderedDict[BusyConnection, None], worker: BusyConnection) -> None:
        queue[worker] = None
        worker.pause_reading()
        self._ask()

    def _ask(self) -> None:
        """Have the next turn begin, unless that was requested already."""
        if self._asked_at is None:
            self._asked_at = self._monotonic()
            self._call_soon(self._turn)

    def _turn(self) -> None:
        """Give connections their shares, first for new work. A long turn shortens the next turn."""
        assert self._asked_at is not None
        took_s = self._monotonic() - self._asked_at
        self._asked_at = None
        if took_s > TURN_S:
            self._work = max(WORK_MIN, int(self._work * TURN_S / took_s))
        else:
            self._work = min(WORK_MAX, self._work + self._work // 8)
        self._left = self._work
        while self._left > 0 and (queue := self._new or self._old):
            worker, _ = queue.popitem(last=False)
            self._left -= max(1, worker.work(b"", min(SHARE, self._left)))
            if worker.has_backlog:
                self._old[worker] = None
            else:
                worker.resume_reading()
        if self._new or self._old:
            self._ask()
