"""Zero-byte appends by which the primary of a journal keeps its replicas in step.

Brokers can neither join nor leave a journal until its primary has synchronized with them, and clients may not
append for days. So each replica pulses: at its start, after each change of the route, and on a timer. Pulses
also roll spools that are due to be flushed, and suspend idle journals.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NoReturn

from gazette.auth import Capability, Claims
from gazette.broker.append.driver import AppendCall, AppendDriver
from gazette.broker.append.events import AppendTerms, Ending, Outcome, SuspendControl
from gazette.broker.append.invalidation import Superseded, changed
from gazette.errors import Broken, Closed, GazetteError, Unavailable
from gazette.protocol.status import Status
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.broker.context import BrokerContext
    from gazette.broker.replica import Replica

log = logging.getLogger(__name__)

_RETRY_MIN_S: Final = 1.0
_EXPECTED: Final = frozenset(
    {
        Status.OK,
        Status.JOURNAL_NOT_FOUND,
        Status.NO_JOURNAL_PRIMARY_BROKER,
        Status.NOT_JOURNAL_PRIMARY_BROKER,
        Status.SUSPENDED,
    }
)
"""Statuses of replicas that are not primary, or of a journal that is being removed."""


class Heartbeat:
    """The time of the next pulse, and its control. ``idle_ticks`` counts timer
    pulses since the route last changed.
    """

    def __init__(self, interval_s: float, suspend_after: int | None) -> None:
        self._interval_s = interval_s
        self._suspend_after = suspend_after
        self._retry_s = _RETRY_MIN_S
        self.idle_ticks = 0

    @property
    def control(self) -> SuspendControl:
        if self._suspend_after is not None and self.idle_ticks >= self._suspend_after:
            return SuspendControl.IF_FLUSHED
        return SuspendControl.NO_RESUME

    def on_route_change(self) -> None:
        self.idle_ticks = 0
        self._retry_s = _RETRY_MIN_S

    def on_timer(self) -> None:
        self.idle_ticks += 1

    def next_s(self, *, succeeded: bool) -> float:
        """Return the seconds until the next pulse: soon after a failure, and later after each further one."""
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


class NoContent:
    """The content of a pulse: the intent to commit, and the end."""

    def __init__(self) -> None:
        self._intended = False

    async def next(self) -> bytes | None:
        if self._intended:
            return None
        self._intended = True
        return b""


async def pulse_forever(context: BrokerContext, replica: Replica) -> NoReturn:
    """Pulse one replica until cancelled. A daemon: never returns; failures are logged and retried."""
    settings = context.settings
    heartbeat = Heartbeat(
        settings.pulse_interval_s,
        settings.suspend_after_idle_ticks if settings.auto_suspend else None,
    )
    while True:
        replica.first_commit.clear()
        driver = _driver(context, replica, heartbeat.control)
        outcome = await _pulse(context, replica, driver)
        problem = problem_of(outcome)
        if outcome.status is Status.INDEX_HAS_GREATER_OFFSET:
            replica.head.loaded = False  # The last primary may have closed the journal since.
        if problem:
            log.warning(
                "pulse of %(journal)s failed (will retry): %(error)s",
                {"journal": replica.journal, "error": problem},
                extra={"cause": f"pulse {cause_of(outcome)}"},
            )
        invalidated = driver.invalidated or asyncio.Event()
        try:
            sleep = context.clock.sleep(heartbeat.next_s(succeeded=not problem))
            # Wake at the first commit, to complete its fragment at once: once that is stored, an
            # empty store shows that fragments were lost.
            await changed(invalidated, sleep, replica.first_commit.wait())
        except Superseded:
            heartbeat.on_route_change()
        else:
            if not problem and not replica.first_commit.is_set():
                heartbeat.on_timer()


def _driver(context: BrokerContext, replica: Replica, control: SuspendControl) -> AppendDriver:
    call = AppendCall(
        terms=AppendTerms(replica.journal, suspend=control),
        claims=Claims.of_journal(Capability.APPEND, replica.journal),
        may_proxy=False,
        in_line=False,
    )
    return AppendDriver(context, call, NoContent())


async def _pulse(context: BrokerContext, replica: Replica, driver: AppendDriver) -> Outcome:
    """Run one append. If it takes too long or is cancelled, wind it up in good order."""
    running = context.scope.spawn(driver.run(), name=f"pulse {driver.journal}")
    timeout_s = context.settings.pulse_timeout_s
    try:
        async with timeout(timeout_s):
            return await asyncio.shield(running)
    except TimeoutError:
        reason = "" if replica.index.first_refreshed else f": {replica.unlisted_reason}"
        driver.interrupt(Unavailable(f"pulse took too long{reason}", timeout_s=timeout_s))
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        driver.interrupt(Broken("the replica is shut down"))
        raise


def problem_of(outcome: Outcome) -> GazetteError | None:
    """Return the problem that an operator should know of a failed pulse; None if the failure is expected."""
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
    """Return the key under which failed pulses of all journals are logged once, if one reason
    explains them.
    """
    if outcome.error is None:
        return outcome.status.name
    return f"{outcome.context}: {outcome.error.message}"
