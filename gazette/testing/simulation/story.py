"""The story of one seed: which messages are published when, and which faults strike where.

A story is drawn as a whole before the run. So a run may leave out some of its messages and faults.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from gazette.errors import Invalid
from gazette.testing.simulation.load import spread
from gazette.testing.simulation.loop import NodeClock
from gazette.testing.simulation.setup import SHARDS_MAX, DrawnMessage, Setup

POINTS: Final = (
    "transaction.begun",
    "transaction.consumed",
    "commit.finalized",
    "commit.recording",
    "commit.started",
    "commit.enqueued",
    "append.applied",
    "ack.appended",
    "transaction.acknowledged",
    "promotion.opened",
)
"""Failpoints at which members are killed, or stand still."""
_SQL_POINTS: Final = (*POINTS, "sql.committing", "sql.committing", "sql.committed", "sql.committed")
_MESSAGES: Final = (12, 20, 30, 40)
_DRAWS_MAX: Final = 100
"""Greatest number of draws of messages until one of them reaches a shard."""
TO_TIMER: Final = 1
"""Value of `PlannedFault.number` with which time passes until the next timer."""
_LATER_S: Final = (70.0, 1900.0)
_FAULTS: Final = (0, 1, 1, 2, 2, 3, 4)


class FaultForm(StrEnum):
    """What a fault does."""

    KILL = "kill"
    KILL_AT = "kill at a failpoint"
    HOLD = "hold beyond the lease"
    HOLD_AT = "hold at a failpoint"
    """With a SQLStore: a member stands still with its locks."""
    PARTITION = "cut off from etcd"
    HAND_OFF = "hand a shard over"
    RESTART = "restart in good order"
    LATE = "delay appends"
    SLOW = "slow callbacks"
    CLOCK = "clock jump"
    LATER = "time passes"
    FAIL = "fail a call"
    REBUILD = "rebuild by a backfill"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. ``at`` is its time in seconds. ``number`` says at which pass or call it strikes."""

    form: FaultForm
    at: float
    host: str
    seconds: float
    point: str
    number: int

    def __str__(self) -> str:
        match self.form:
            case FaultForm.KILL:
                what = f"{self.host} is killed, and starts again {self.seconds:.1f} s later"
            case FaultForm.KILL_AT:
                what = f"a member is killed at {self.point}"
            case FaultForm.HOLD:
                what = (
                    f"{self.host} stands still for {self.seconds:.0f} s: another member takes over"
                )
            case FaultForm.PARTITION:
                what = f"{self.host} is cut off from etcd for {self.seconds:.0f} s"
            case FaultForm.HAND_OFF:
                what = "a shard is handed over"
            case FaultForm.RESTART:
                what = f"{self.host} is restarted in good order"
            case FaultForm.LATE:
                what = f"appends of members are late by up to {self.seconds:.1f} s"
            case FaultForm.SLOW:
                what = f"callbacks are slow for {self.seconds:.0f} s"
            case FaultForm.CLOCK:
                what = f"the clock of {self.host} jumps by {self.seconds:+.0f} s"
            case FaultForm.LATER:
                what = f"{self.seconds:.0f} s pass"
                if self.number == TO_TIMER:
                    what = f"time passes until the next timer, or {what}"
            case FaultForm.HOLD_AT:
                what = f"a member stands still at {self.point} for {self.seconds:.0f} s"
            case FaultForm.FAIL:
                what = "a call of the store or of the publisher fails"
            case FaultForm.REBUILD:
                what = "the state of a shard is rebuilt by the backfill"
        return f"{self.at:6.1f} s  {what}"


class SendForm(StrEnum):
    """How a message reaches its journal."""

    ALONE = "alone"
    TOGETHER = "together"
    """In a transaction with the messages before it that are sent together."""
    UNFINISHED = "unfinished"
    """In a transaction that never commits."""
    TWICE = "twice"
    """Alone, and appended again, as by a publisher that had no answer."""
    MALFORMED = "malformed"
    """As bytes that are no message."""


_COMMITTED: Final = (SendForm.ALONE, SendForm.TOGETHER, SendForm.TWICE)


@dataclass(frozen=True, slots=True)
class Send:
    """One message of a story."""

    at: float
    sent: DrawnMessage
    form: SendForm
    producer: int

    def __str__(self) -> str:
        message = " ".join(repr(self.sent.message).split())
        return f"{self.at:6.1f} s  publish {message:.120} ({self.form}, producer {self.producer})"


@dataclass(slots=True)
class Story:
    """All that happens in one seed."""

    seed: int
    members: list[str]
    standbys: int
    shards: list[str]
    delay_s: float
    txn_s: float
    restarts: bool
    """True if all members are killed at the end, and their states compared."""
    sends: list[Send] = field(default_factory=list)
    faults: list[PlannedFault] = field(default_factory=list)
    kept_sends: Collection[int] | None = None
    """Numbers of the messages that are sent; None: all."""
    kept_faults: Collection[int] | None = None

    @classmethod
    def draw(cls, setup: Setup, seed: int, *, poison: bool = False) -> Story:
        """Draw the story of a seed. With ``poison``, some bytes are no messages."""
        rng = random.Random(f"story {seed}")
        members = [f"member-{number}" for number in range(rng.choice((1, 2, 2, 2, 2)))]
        ids = [spec.id for spec in setup.shards]
        story = cls(
            seed,
            members,
            rng.choice((0, 0, 1)) if len(members) > 1 else 0,
            sorted(rng.sample(ids, min(rng.choice((1, 1, SHARDS_MAX)), len(ids)))),
            rng.choice((0.0005, 0.002)),
            rng.choice((0.05, 0.3, 1.0)),
            rng.random() < 0.4,
        )
        span_s = rng.choice((8.0, 15.0, 25.0))
        times = spread(rng.choice(_MESSAGES), span_s, rng)
        if setup.has_timers:
            story.faults += _passing_time(random.Random(f"later {seed}"), members[0], span_s)
        if setup.rebuilds:
            story.faults += _rebuilds(random.Random(f"rebuilds {seed}"), members[0], span_s)
        passed = [sum(fault.seconds for fault in story.faults if fault.at < at) for at in times]
        event_times = [at + seconds for at, seconds in zip(times, passed, strict=True)]
        kinds = random.Random(f"kinds {seed}")
        drawn = random.Random(f"load {seed}")
        for _ in range(_DRAWS_MAX):
            story.sends.clear()
            sent = setup.draw(drawn, event_times, NodeClock.EPOCH_S)
            for at, each in zip(times, sent, strict=False):
                form, producer = _send_form(kinds, poison=poison), kinds.randrange(2)
                if setup.load is not None:
                    # A user's messages may depend on each other: keep their order, and leave none out.
                    producer = 0
                    form = form if form in _COMMITTED else SendForm.ALONE
                story.sends.append(Send(at, each, form, producer))
            if reached := story._reached(setup):
                break
        else:
            raise Invalid("no shard reads any of the messages", path="load")
        kept = [id for id in story.shards if id in reached]
        story.shards = kept or [kinds.choice(reached)]
        for _ in range(rng.choice(_FAULTS)):
            points = POINTS if setup.database is None else _SQL_POINTS
            story.faults.append(_fault(rng, story, span_s, points))
        story.faults.sort(key=lambda fault: fault.at)
        return story

    def _reached(self, setup: Setup) -> list[str]:
        """Return the shards that committed messages reach, once for each message."""
        journals = [send.sent.journal for send in self.sends if send.form in _COMMITTED]
        readers: dict[str, list[str]] = {}
        for spec in setup.shards:
            for source in spec.sources:
                readers.setdefault(source.journal, []).append(spec.id)
        return [id for journal in journals for id in readers.get(journal, ())]

    def sends_to_make(self) -> list[Send]:
        kept = self.kept_sends
        return [send for n, send in enumerate(self.sends) if kept is None or n in kept]

    def faults_to_make(self) -> list[PlannedFault]:
        kept = self.kept_faults
        return [fault for n, fault in enumerate(self.faults) if kept is None or n in kept]

    def tell(self) -> list[str]:
        """Return a line for each message and each fault, in order of their times."""
        lines = [(fault.at, str(fault)) for fault in self.faults_to_make()]
        lines += [(send.at, str(send)) for send in self.sends_to_make()]
        return [line for _, line in sorted(lines)]


def _send_form(rng: random.Random, *, poison: bool) -> SendForm:
    draw = rng.random()
    if poison and draw < 0.05:
        return SendForm.MALFORMED
    if draw < 0.5:
        return SendForm.ALONE
    if draw < 0.8:
        return SendForm.TOGETHER
    return SendForm.TWICE if draw < 0.92 else SendForm.UNFINISHED


def _passing_time(rng: random.Random, host: str, span_s: float) -> list[PlannedFault]:
    """Draw faults by which the clocks of members and publishers jump ahead together."""
    return [
        PlannedFault(
            FaultForm.LATER,
            rng.uniform(1.0, span_s + 2.0),
            host,
            rng.choice(_LATER_S),
            "",
            rng.choice((TO_TIMER, TO_TIMER, 2)),
        )
        for _ in range(rng.choice((0, 1, 2)))
    ]


def _rebuilds(rng: random.Random, host: str, span_s: float) -> list[PlannedFault]:
    """Draw faults by which states are rebuilt from their histories."""
    return [
        PlannedFault(FaultForm.REBUILD, rng.uniform(2.0, span_s + 2.0), host, 0.0, "", number)
        for number in range(rng.choice((0, 0, 1, 1, 2)))
    ]


def _fault(rng: random.Random, story: Story, span_s: float, points: Sequence[str]) -> PlannedFault:
    forms = [FaultForm.KILL, FaultForm.KILL_AT, FaultForm.KILL_AT, FaultForm.FAIL, FaultForm.LATE]
    forms += [FaultForm.SLOW, FaultForm.CLOCK, FaultForm.RESTART]
    if len(story.members) > 1:
        forms += [FaultForm.HOLD, FaultForm.PARTITION, FaultForm.HAND_OFF, FaultForm.HAND_OFF]
        if points is not POINTS:
            forms += [FaultForm.HOLD_AT, FaultForm.HOLD_AT]
    form = rng.choice(forms)
    seconds = {
        FaultForm.HOLD: rng.uniform(8.0, 20.0),
        FaultForm.PARTITION: rng.uniform(8.0, 20.0),
        FaultForm.LATE: rng.choice((0.2, 2.0, 6.0)),
        FaultForm.SLOW: rng.uniform(2.0, 10.0),
        FaultForm.CLOCK: rng.choice((-3600.0, -5.0, 5.0, 3600.0)),
    }.get(FaultForm.HOLD if form is FaultForm.HOLD_AT else form, rng.choice((0.1, 1.0, 4.0)))
    return PlannedFault(
        form,
        rng.uniform(1.0, span_s),
        rng.choice(story.members),
        seconds,
        rng.choice(points),
        min(rng.choice((1, 1, 2, 3, 5)), 2 if form is FaultForm.FAIL else 5),
    )
