"""Zero-byte appends by which the primary of a journal keeps its replicas in step.

A change of a journal's brokers is complete only when its primary has synchronized with them. Clients may not
append for days. So a primary pulses: when it begins, after each change of the route, and on a timer. Pulses
also roll spools that are due to be flushed, and suspend idle journals. While a replica rests, most pulses are
skipped.

One daemon begins the pulses of all journals. So a journal at rest has no task.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from gazette.broker.append.events import Ending, Outcome, SuspendControl
from gazette.errors import Broken, Closed, GazetteError, Unavailable
from gazette.protocol.status import Status
from gazette.runtime.agenda import Agenda, Allowance, Slots
from gazette.runtime.clock import Clock
from gazette.runtime.latch import Latch
from gazette.runtime.tasks import TaskScope, sleep_unless

if TYPE_CHECKING:
    from gazette.broker.settings import BrokerSettings
    from gazette.protocol.ids import JournalName

log = logging.getLogger(__name__)

FIRST_PER_S: Final = 20.0
"""Greatest number of first fragments that pulses complete in a second. Each fragment causes an upload."""
_AT_A_TIME: Final = 32
"""Number of slots: running pulses that occupy all slots keep other pulses waiting."""
_PATIENCE_S: Final = 0.25
"""Seconds after which a running pulse occupies no slot: another pulse may begin."""
_RETRY_MIN_S: Final = 1.0
_TICK_S: Final = 0.05
"""Least time between two looks for due pulses, in seconds. `_IDLE_S` is the greatest time."""
_LEFT_OUT: Final = 9
"""Greatest number of pulses that the timer skips in a row while the replica rests. Then a pulse is sent."""
_IDLE_S: Final = 3600.0
_EXPECTED: Final = frozenset(
    {
        Status.OK,
        Status.JOURNAL_NOT_FOUND,
        Status.NO_JOURNAL_PRIMARY_BROKER,
        Status.NOT_JOURNAL_PRIMARY_BROKER,
        Status.SUSPENDED,
    }
)
"""Statuses that need no warning: of a success, of a suspended journal, of a journal that is being removed,
and of a replica that is not primary."""


class Heartbeat:
    """The time of the next pulse, and its control. ``idle_ticks`` counts how often the timer was due since
    the route or the stores last changed. Appends do not matter."""

    def __init__(self, interval_s: float, suspend_after: int | None) -> None:
        self._interval_s = interval_s
        self._suspend_after = suspend_after
        self._retry_s = _RETRY_MIN_S
        self._left_out = 0  # Pulses left out in a row.
        self.idle_ticks = 0

    @property
    def control(self) -> SuspendControl:
        """The control of the next pulse. After ``suspend_after`` idle ticks, the pulse suspends the journal,
        if its newest content was stored long ago (`is_dirty`)."""
        if self._suspend_after is not None and self.idle_ticks >= self._suspend_after:
            return SuspendControl.IF_FLUSHED
        return SuspendControl.NO_RESUME

    def on_route_change(self) -> None:
        self.idle_ticks = 0
        self._retry_s = _RETRY_MIN_S

    def on_timer(self, *, rests: bool) -> bool:
        """Count that the timer was due. Return True if the replica rests, and the pulse may be left out."""
        self.idle_ticks += 1
        may_leave_out = (
            rests and self._left_out < _LEFT_OUT and self.control is SuspendControl.NO_RESUME
        )
        self._left_out = self._left_out + 1 if may_leave_out else 0
        return may_leave_out

    def next_s(self, *, succeeded: bool) -> float:
        """Return the seconds until the next pulse: few after a failure, more after each further failure."""
        if succeeded:
            self._retry_s = _RETRY_MIN_S
            return self._interval_s
        retry_s, self._retry_s = self._retry_s, self._retry_s * 2
        return min(retry_s, self._interval_s)


_HINTS: Final = {
    Status.INDEX_HAS_GREATER_OFFSET: "All replicas that held the end of the journal were lost, or have left; "
    "or its store is empty, stale or not mounted. "
    "docs/operating.md says how to go on at the end of what is stored: gazctl journals reset-head",
    Status.INSUFFICIENT_JOURNAL_BROKERS: "Fewer brokers have room than the journal's replication asks for: "
    "start another broker, raise --broker.limit, or lower the journal's replication",
    Status.FRAGMENT_STORE_UNHEALTHY: "Appends are refused until the journal's store is healthy: see gazctl "
    "journals store-health",
}


class Pulsed(Protocol):
    """The part of a replica that its pulses use."""

    @property
    def journal(self) -> JournalName: ...
    @property
    def in_step(self) -> bool:
        """Whether all replicas are connected and in step, as etcd records it, and lack no bytes."""
        ...

    @property
    def rests(self) -> bool:
        """Whether a pulse would have no effect: the replicas are in step, the spool is empty, and no problem
        is known."""
        ...

    @property
    def unlisted_reason(self) -> str:
        """Why the blob stores have not been listed yet; empty after their first listing."""
        ...

    def reload_head(self) -> None:
        """Forget the known head, so that the next append reads it from etcd."""
        ...


class Pulse(Protocol):
    """An append without content. `AppendDriver` is one."""

    @property
    def invalidated(self) -> Latch | None:
        """Set when the resolution of the pulse is superseded; None before the first resolution."""
        ...

    async def run(self) -> Outcome:
        """Run to the end, and return the outcome."""
        ...

    def interrupt(self, reason: GazetteError) -> None:
        """End the pulse early, in good order, for ``reason``."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    replica: Pulsed
    heartbeat: Heartbeat
    due_at: float = math.inf
    is_tick: bool = False
    """True if the pulse is due only because the interval is over."""
    pulse: Pulse | None = None
    """The running pulse."""
    failed: bool = False
    """True if the last pulse failed. Then the next pulse is not left out: it succeeds, or logs the reason."""
    has_first_fragment: bool = False
    """True if the first fragment of the journal is to be completed."""
    slot: int = 0
    """The slot of the running pulse."""


class Pulser:
    """Begins the pulses of all replicas that were added. Run ``run`` as a daemon. Loop-bound.

    ``new_pulse`` returns the pulse of a journal; None if this broker does not lead the journal now. A replica
    has one pulse at a time. Of many due pulses, a few begin at a time. The tasks belong to ``scope``.
    """

    def __init__(
        self,
        clock: Clock,
        scope: TaskScope,
        settings: BrokerSettings,
        new_pulse: Callable[[JournalName, SuspendControl], Pulse | None],
    ) -> None:
        self._clock = clock
        self._scope = scope
        self._settings = settings
        self._new_pulse = new_pulse
        self._entries: dict[Pulsed, _Entry] = {}
        self._due: Agenda[_Entry] = Agenda()
        self._first_fragments: deque[_Entry] = deque()
        """Replicas whose journal's first fragment waits for the pulse that completes it, in order."""
        self._allowance = Allowance(FIRST_PER_S, clock.monotonic())
        self._slots = Slots(_AT_A_TIME, _PATIENCE_S, clock.monotonic())
        self._changed = asyncio.Event()

    def add(self, replica: Pulsed) -> None:
        """Pulse ``replica`` now, and then at its intervals, until ``remove``."""
        settings = self._settings
        suspend_after = settings.suspend_after_idle_ticks if settings.auto_suspend else None
        entry = _Entry(replica, Heartbeat(settings.pulse_interval_s, suspend_after))
        self._entries[replica] = entry
        self._wake(entry)

    def remove(self, replica: Pulsed) -> None:
        """End a running pulse of the replica, in good order, and begin no other. May be repeated."""
        entry = self._entries.pop(replica, None)
        if entry is None:
            return
        entry.due_at = math.inf
        if entry.pulse is not None:
            entry.pulse.interrupt(Broken("the replica is shut down"))

    def route_changed(self, replica: Pulsed) -> None:
        """Pulse ``replica`` now: its journal has another route, or other stores."""
        if (entry := self._entries.get(replica)) is not None:
            self._wake(entry)

    def first_committed(self, replica: Pulsed) -> None:
        """Pulse ``replica``, which leads, soon: its journal has got the first bytes of its first fragment.

        The pulse completes the fragment. Once the fragment is stored, an empty store means that fragments
        were lost.
        """
        entry = self._entries.get(replica)
        if entry is not None and not entry.has_first_fragment:
            entry.has_first_fragment = True
            # A running pulse may have begun before this commit. `_settle` then begins another pulse.
            if entry.pulse is None:
                self._queue_first_fragment(entry)

    async def run(self) -> NoReturn:
        """Begin pulses when they are due, for ever."""
        while True:
            self._changed.clear()
            next_s = self._begin_due(self._clock.monotonic())
            await sleep_unless(self._clock, next_s, self._changed)

    def _wake(self, entry: _Entry) -> None:
        entry.is_tick = False
        entry.heartbeat.on_route_change()
        self._due.push(entry, self._clock.monotonic())
        self._changed.set()

    def _begin_due(self, now: float) -> float:
        """Begin due pulses, as far as their limits permit. Return the seconds until the next look."""
        while self._begin_next(now):
            pass
        while self._first_fragments and self._allowance.take(now):
            self._complete(self._first_fragments.popleft())
        waits = [_IDLE_S]
        if (entry := self._due.first()) is not None:
            waits.append(entry.due_at - now if entry.due_at > now else self._slots.next_s(now))
        if self._first_fragments:
            waits.append(self._allowance.next_s)
        return max(min(waits), _TICK_S)

    def _begin_next(self, now: float) -> bool:
        """Begin the pulse that is due first. Return False if none is due, or none may begin now."""
        while self._slots.are_free(now) and (entry := self._due.take(now)) is not None:
            if self._begin(entry):
                return True
        return False

    def _queue_first_fragment(self, entry: _Entry) -> None:
        """Let a pulse complete the journal's first fragment, when `FIRST_PER_S` permits it."""
        self._first_fragments.append(entry)
        self._changed.set()

    def _complete(self, entry: _Entry) -> None:
        """Begin a pulse for the first fragment, unless a pulse has begun since, or the replica has gone."""
        if entry.has_first_fragment and self._entries.get(entry.replica) is entry:
            entry.is_tick = False
            self._begin(entry)

    def _begin(self, entry: _Entry) -> bool:
        """Begin the pulse of an entry. Return False if a pulse runs, if no pulse is needed, if another broker
        leads, or if this broker stops."""
        if entry.pulse is not None or self._scope.is_stopping:
            return False  # When the running pulse ends, `_settle` looks for changes of the route.
        if self._is_needless(entry):
            entry.is_tick = True
            self._due.push(entry, self._clock.monotonic() + self._settings.pulse_interval_s)
            return False
        pulse = self._new_pulse(entry.replica.journal, entry.heartbeat.control)
        if pulse is None:
            return False  # This broker does not lead the journal until the route changes.
        entry.pulse, entry.has_first_fragment = pulse, False
        entry.slot = self._slots.take()
        task = self._scope.spawn(pulse.run(), name=f"pulse {entry.replica.journal}")
        timer = asyncio.get_running_loop().call_later(
            self._settings.pulse_timeout_s, self._too_long, entry.replica, pulse
        )
        task.add_done_callback(lambda _: timer.cancel())
        task.add_done_callback(partial(self._ended, entry, pulse))
        return True

    def _is_needless(self, entry: _Entry) -> bool:
        """Return True if a due pulse can be left out. For a pulse of the timer, see `Heartbeat.on_timer`.
        Leave out any other pulse if the replica is in step, no first fragment waits, and the last pulse has
        not failed."""
        if entry.is_tick:
            return entry.heartbeat.on_timer(rests=entry.replica.rests)
        # An append may have brought the peers in step already.
        return not entry.has_first_fragment and not entry.failed and entry.replica.in_step

    def _too_long(self, replica: Pulsed, pulse: Pulse) -> None:
        reason = f": {replica.unlisted_reason}" if replica.unlisted_reason else ""
        timeout_s = self._settings.pulse_timeout_s
        pulse.interrupt(Unavailable(f"pulse took too long{reason}", timeout_s=timeout_s))

    def _ended(self, entry: _Entry, pulse: Pulse, task: asyncio.Task[Outcome]) -> None:
        entry.pulse = None
        self._slots.free(entry.slot)
        self._settle(entry, pulse, task)
        if not task.cancelled():
            self._begin_next(self._clock.monotonic())

    def _settle(self, entry: _Entry, pulse: Pulse, task: asyncio.Task[Outcome]) -> None:
        """Look at the outcome of a pulse, and schedule the next one."""
        if self._entries.get(entry.replica) is not entry or self._scope.is_stopping:
            return
        if task.cancelled() or task.exception() is not None:
            return  # The broker is torn down.
        outcome = task.result()
        problem = problem_of(outcome)
        if outcome.status is Status.INDEX_HAS_GREATER_OFFSET:
            entry.replica.reload_head()  # The last primary may have closed the journal meanwhile.
        if problem:
            log.warning(
                "pulse of %(journal)s failed (will retry): %(error)s",
                {"journal": entry.replica.journal, "error": problem},
                extra={"cause": f"pulse {cause_of(outcome)}"},
            )
        if entry.has_first_fragment:
            self._queue_first_fragment(entry)
        if pulse.invalidated is not None and pulse.invalidated.is_set:
            self._wake(entry)  # The route has changed since the pulse was resolved.
            return
        entry.failed, entry.is_tick = bool(problem), not problem
        next_s = entry.heartbeat.next_s(succeeded=not problem)
        self._due.push(entry, self._clock.monotonic() + next_s)
        if self._due.first() is entry:
            self._changed.set()


def problem_of(outcome: Outcome) -> GazetteError | None:
    """Return the problem of a failed pulse for operators; None after a success or an expected failure."""
    if outcome.ending is Ending.FAILED:
        error = outcome.error
        if error is None or isinstance(error, Closed):
            return None
        return Broken(f"{outcome.context}: {error}", hint=error.hint)
    if outcome.status in _EXPECTED:
        return None
    text = f"{outcome.status.name} {outcome.store_error}".rstrip()
    return Broken(text, hint=_HINTS.get(outcome.status))


def cause_of(outcome: Outcome) -> str:
    """Return a key for the log: failed pulses of all journals with this key are logged once."""
    if outcome.error is None:
        return outcome.status.name
    return f"{outcome.context}: {outcome.error.message}"
