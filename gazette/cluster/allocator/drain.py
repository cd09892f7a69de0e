"""Drain of a member that leaves: announce it, then wait until other members have taken over its items.

The wait ends early if no other member can take the items. The log, metrics and ``/debug/ready`` show what the
drain waits for.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from gazette.cluster.allocator import metrics
from gazette.cluster.allocator.drain_status import DrainStatus, ItemNames, drain_status
from gazette.cluster.allocator.model import DecodedKV
from gazette.cluster.allocator.state import State
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope, first_of

log = logging.getLogger(__name__)

REPORT_INTERVAL_S: Final = 10.0
_POLL_S: Final = 1.0
_POLL_MIN_S: Final = 0.01
_ANNOUNCED_POLL_S: Final = 0.02
"""Seconds between looks for our own announcement, which etcd delivers after a moment."""


class Announces(Protocol):
    """The method of ``gazette.cluster.allocator.session.MemberSession`` that a drain uses."""

    async def set_exiting(self, exiting_value: bytes) -> None: ...


class Drain:
    """Drain of one member, begun by ``run``. Loop-bound.

    ``timeout_s`` bounds the drain from its start. ``alone_timeout_s`` bounds the wait for items that no other
    member can take. A replacement of the member can start meanwhile.

    Each progress starts ``alone_timeout_s`` again. Progress is a change of the members that stay, or of the
    assignments of an item that the member held when it announced its leaving. Later items do not count.
    """

    def __init__(
        self,
        clock: Clock,
        state: State,
        member: object,
        names: ItemNames,
        *,
        alone_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._clock = clock
        self._state = state
        self._member = member
        self._names = names
        self._alone_timeout_s = alone_timeout_s
        self._timeout_s = timeout_s
        self.is_running = False
        self._begun = clock.monotonic()
        self._stuck = _StuckTime()
        self._held: frozenset[tuple[str, int]] | None = None
        """Items that the member held when it announced its leaving; None before."""
        self._seen: tuple[Sequence[DecodedKV], ...] | None = None  # The lists at the last look.
        self._reported_at: float | None = None
        self._reported: DrainStatus | None = None
        self.status = DrainStatus()
        """Items that remain, as of the last update."""

    async def run(
        self,
        session: Announces,
        exiting: bytes,
        allocating: asyncio.Task[None],
        ends: Mapping[str, asyncio.Event],
    ) -> None:
        """Announce ``exiting``, and return when the drain is over.

        The drain is over when ``allocating`` has ended: all items are handed over, or it failed. It is also
        over when a longer wait is useless, or when an event in ``ends`` is set. If items are left, log the
        reason: for an event, its key.

        Raise ``Broken`` if another process has changed the member's key. Cancellation may leave the
        announcement written.
        """
        reason = "it broke"
        self._begun, self.is_running = self._clock.monotonic(), True
        try:
            async with TaskScope("drain") as scope:
                scope.spawn(session.set_exiting(exiting), name="announce")
                timed_out = scope.spawn(self.await_timeout(), name="timeout")
                asked_to_end = scope.spawn(first_of(*ends.values()), name="ended")
                waits: set[asyncio.Task[Any]] = {allocating, timed_out, asked_to_end}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if timed_out.done() and not timed_out.cancelled():
                    reason = timed_out.result()
                else:
                    reason = next((why for why, event in ends.items() if event.is_set()), reason)
                scope.cancel()
        finally:
            self.is_running = False
            metrics.DRAINING_ITEMS.clear()
        if not allocating.done():
            self._look()
            log.warning(
                "%(member)s leaves because %(reason)s: %(left)s",
                {
                    "member": self._member,
                    "reason": reason,
                    "left": self.status.describe(self._names),
                },
            )

    async def await_timeout(self) -> str:
        """Return the reason once it is useless to wait longer for a hand-off."""
        while True:
            now = self._clock.monotonic()
            self._look()
            if (left_s := self._left_s(now)) <= 0:
                if now - self._begun >= self._timeout_s:
                    return (
                        f"other {self._names.member}s have not taken over in {self._timeout_s:g} s"
                    )
                return (
                    f"no other {self._names.member} could take over for {self._alone_timeout_s:g} s"
                )
            self._report(now, left_s)
            poll_s = _POLL_S if self._is_announced() else _ANNOUNCED_POLL_S
            # A wait shorter than the clock can resolve would never be over.
            await self._clock.sleep(max(min(poll_s, left_s), _POLL_MIN_S))

    def describe(self) -> str:
        """Return one line for an operator: what the drain waits for, and for how long at most."""
        if not self._is_announced():
            return "draining: etcd has not recorded yet that this member leaves"
        self._look()
        left_s = max(0.0, self._left_s(self._clock.monotonic()))
        return (
            f"draining: {self.status.describe(self._names)}; leaves in {left_s:.0f} s if that "
            "does not change, and on a second SIGTERM"
        )

    def _left_s(self, now: float) -> float:
        """Return the seconds until a longer wait is useless, if nothing changes; at most 0 from then on."""
        left_s = self._begun + self._timeout_s - now
        stuck_s = self._stuck.seconds(now)
        if self.status.is_stuck or stuck_s > self._alone_timeout_s:
            left_s = min(left_s, self._alone_timeout_s - stuck_s)
        return left_s

    def _look(self) -> None:
        """Update the status, its metrics and the time of being stuck, if the state has changed."""
        state = self._state
        snapshot = (state.items, state.members, state.assignments)
        if self._seen is not None and all(map(operator.is_, snapshot, self._seen)):
            return
        self._seen = snapshot
        # Before the announcement is in etcd, other members do not take over anything.
        self.status = drain_status(state) if self._is_announced() else DrainStatus()
        progress = (self._progress(), self.status.staying)
        self._stuck.look(self._clock.monotonic(), progress, is_stuck=self.status.is_stuck)
        status = self.status
        for waits_for, count in (
            ("members", len(status.needing_members)),
            ("room", status.needing_room),
            ("hand_over", len(status.moving) - status.needing_room),
        ):
            metrics.DRAINING_ITEMS.labels(waits_for).set(count)

    def _progress(self) -> Sequence[tuple[str, int]]:
        """Return the assignments of the items that this member held when it announced its leaving."""
        local_items = self._state.local_items
        if self._held is None:
            if not self._is_announced():
                return ()
            self._held = frozenset(_life(local_item.item) for local_item in local_items)
        return [
            (kv.key, kv.raw.mod_revision)
            for local_item in local_items
            if _life(local_item.item) in self._held
            for kv in local_item.assignments
        ]

    def _report(self, now: float, left_s: float) -> None:
        """Log the remaining items: at once if they wait for something else than before, else at intervals."""
        status, reported = self.status, self._reported
        if not status.count:
            return
        is_news = reported is None or (reported.needing_members, reported.needing_room > 0) != (
            status.needing_members,
            status.needing_room > 0,
        )
        if (
            not is_news
            and self._reported_at is not None
            and now - self._reported_at < REPORT_INTERVAL_S
        ):
            return
        self._reported_at, self._reported = now, status
        log.log(
            logging.WARNING if status.is_stuck else logging.INFO,
            "%(member)s is draining: %(left)s. It leaves in %(seconds).0f s if that does not change, and "
            "on a second SIGTERM",
            {
                "member": self._member,
                "left": status.describe(self._names),
                "seconds": left_s,
                "waits_for_members": len(status.needing_members),
                "waits_for_room": status.needing_room,
            },
        )

    def _is_announced(self) -> bool:
        """Return True if the state has our announcement, or if our key is gone."""
        local_member = self._state.local_member
        return local_member is None or local_member.decoded.value.exiting()


class _StuckTime:
    """Seconds for which a drain has been stuck since its last progress."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since: float | None = None  # Since when it is stuck; None: it is not.
        self._progress: object = None

    def seconds(self, now: float) -> float:
        return self._before_s + (now - self._since if self._since is not None else 0.0)

    def look(self, now: float, progress: object, *, is_stuck: bool) -> None:
        """Note the present state. If ``progress`` differs from the last one, count from zero."""
        self._before_s = self.seconds(now) if progress == self._progress else 0.0
        self._since = now if is_stuck else None
        self._progress = progress


def _life(item: DecodedKV) -> tuple[str, int]:
    """Return the identity of an item: a later item of the same name has another identity."""
    return item.key, item.raw.create_revision
