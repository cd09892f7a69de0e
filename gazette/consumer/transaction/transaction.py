"""Stage 13 of the byte path: decides when a shard's transaction consumes, commits or waits.

Pure: `Transaction` holds the timing and the barriers of the running and the prior transaction. `transactor`
calls ``decide`` for the next step, and performs it on the shard's thread.

This order makes transactions exactly-once:

    publishes of N ──► store commit of N ──► acknowledgements of N ──► store commit of N+1 may start
                            └── messages of N+1 are consumed meanwhile

    IDLE ──consumed──► CONSUMING ──decide: COMMIT──► (next transaction; this one is "prior")
                           │
                           └── prior not done at max duration: STALLED until it is
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from gazette.errors import Bug

NANOS: Final = 1_000_000_000


class Step(enum.Enum):
    """The next step of a shard."""

    CONSUME = "consume"
    """Consume messages that are ready, or decode bytes that have arrived."""
    FIRE = "fire"
    """Fire timers that are due."""
    WAIT = "wait"
    """Wait for input, for the prior transaction, or until ``Decision.until``."""
    COMMIT = "commit"
    """Finalize, and start the commit."""
    END = "end"
    """Stop: the input has ended, and everything is committed and acknowledged."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A step. For WAIT, ``until`` is the monotonic time in seconds at which to decide again, or None."""

    step: Step
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the shard for a transaction, read before it waits for its first message. Durations are in
    seconds."""

    min_duration_s: float = 0.0
    max_duration_s: float = 1.0
    wait_for_ack: bool = True

    @property
    def consume_s(self) -> float:
        """Longest time for which to consume messages, in seconds: the greater of both durations."""
        return max(self.min_duration_s, self.max_duration_s)


class Prior(enum.Enum):
    """State of the prior transaction."""

    COMMITTING = "committing"
    ACKNOWLEDGING = "acknowledging"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds that a finished transaction spent in each phase. Labels of the metric name the fields."""

    not_running: float
    consuming: float
    stalled: float
    preparing: float
    committing: float
    acknowledging: float


@dataclass(slots=True)
class Transaction:
    """The running transaction of one shard.

    Invariants:

    - Between two steps, `is_empty` is True if and only if ``began_at`` is None.
    - Once ``closed`` (maximum duration, a deferral, or many timers) no message is consumed, and no timer
      fires.
    - A commit starts only when ``prior`` is DONE.
    """

    policy: Policy
    initialized_at: float
    prior: Prior = Prior.DONE
    began_at: float | None = None
    consumed: int = 0
    fired: int = 0
    was_due: bool = False
    """True if timers were due in the transaction, even if callbacks cancelled all of them before they could
    fire."""
    closed: bool = False
    input_ended: bool = False
    stalled_at: float | None = None
    """Time at which the maximum duration was reached, if the prior transaction was not done yet."""
    # Times of the monotonic clock at which these steps began or ended; None before.
    prepared_at: float | None = None
    started_commit_at: float | None = None
    committed_at: float | None = None
    acknowledged_at: float | None = None
    _max_reached: bool = field(default=False)

    def begin(self, now: float) -> None:
        """Begin at the first message or timer. The wait for it does not count for the durations."""
        if self.began_at is not None:
            raise Bug("transaction began twice")
        self.began_at = now

    def note_consumed(self, count: int) -> None:
        """Note that messages were consumed."""
        if self.began_at is None or self.closed:
            raise Bug("consumed outside of a transaction", consumed=count)
        self.consumed += count

    def note_fired(self, count: int) -> None:
        """Note that timers have fired."""
        if self.began_at is None or self.closed:
            raise Bug("fired outside of a transaction", fired=count)
        self.fired += count
        self.was_due = True

    @property
    def is_empty(self) -> bool:
        """True if no message was consumed or skipped, and no timer was due."""
        return self.consumed == 0 and not self.was_due

    def close(self) -> None:
        """Close the transaction: consume no more messages, fire no more timers, and commit soon."""
        self.closed = True

    def defer(self) -> None:
        """Close the transaction: the application has deferred a message to the next transaction."""
        if self.is_empty:
            raise Bug("an empty transaction cannot defer a message")
        self.closed = True

    def end_input(self) -> None:
        """Note that no more input will come. Messages that have arrived are still consumed."""
        self.input_ended = True

    def decide(self, now: float, *, ready: bool, pending: bool, due: bool = False) -> Decision:
        """Return the next step.

        ``ready``: messages or undecoded bytes wait. ``pending``: the sequencer holds messages whose
        acknowledgement is likely to come soon. ``due``: timers may be due, which fire before messages.
        """
        self._observe_time(now)
        if due and not self.closed:
            return Decision(Step.FIRE)
        if ready and not self.closed:
            return Decision(Step.CONSUME)
        if self._blocks(now, pending=pending):
            return Decision(Step.WAIT, self._next_tick(now))
        if self.is_empty:
            return Decision(Step.END)
        return Decision(Step.COMMIT)

    def _observe_time(self, now: float) -> None:
        """Close the transaction once its maximum duration is reached."""
        if self.began_at is None or self._max_reached:
            return
        if now >= self.began_at + self.policy.consume_s:
            self._max_reached = True
            self.closed = True
            if self.prior is not Prior.DONE:
                self.stalled_at = now

    def _min_elapsed(self, now: float) -> bool:
        return self.began_at is not None and now >= self.began_at + self.policy.min_duration_s

    def _blocks(self, now: float, *, pending: bool) -> bool:
        """Return True if the shard must wait: it may neither commit nor end now."""
        if self.prior is not Prior.DONE:
            return True
        if self.is_empty:
            return not self.input_ended
        if self.input_ended or self.closed:
            # Consume no more messages. After a deferral, still wait for the minimum duration.
            return not self.input_ended and not self._min_elapsed(now)
        if not self._min_elapsed(now):
            return True
        return self.policy.wait_for_ack and pending

    def _next_tick(self, now: float) -> float | None:
        """Return the next time at which a duration of the policy is reached, or None."""
        if self.began_at is None:
            return None
        durations_s = self.policy.min_duration_s, self.policy.consume_s
        ticks = [self.began_at + duration_s for duration_s in durations_s]
        return min([tick for tick in ticks if tick > now], default=None)

    def start_commit(self, now: float) -> None:
        """Note that the store's commit was started: this becomes the prior transaction."""
        if self.prior is not Prior.DONE:
            raise Bug("a commit started before the prior transaction was done")
        if self.is_empty:
            raise Bug("a commit of a transaction without messages and timers")
        self.started_commit_at = now

    def prior_committed(self) -> None:
        if self.prior is not Prior.COMMITTING:
            raise Bug("prior transaction committed twice", prior=self.prior.value)
        self.prior = Prior.ACKNOWLEDGING

    def prior_acknowledged(self) -> None:
        if self.prior is not Prior.ACKNOWLEDGING:
            raise Bug("prior transaction acknowledged before it committed", prior=self.prior.value)
        self.prior = Prior.DONE

    def phases(self) -> Phases:
        """Return the duration of each phase of an acknowledged transaction."""
        began, started = self.began_at, self.started_commit_at
        committed, acknowledged = self.committed_at, self.acknowledged_at
        if began is None or started is None or committed is None or acknowledged is None:
            raise Bug("phases of a transaction that is not finished")
        prepared = self.prepared_at if self.prepared_at is not None else started
        consumed_until = self.stalled_at if self.stalled_at is not None else prepared
        return Phases(
            not_running=began - self.initialized_at,
            consuming=consumed_until - began,
            stalled=prepared - consumed_until,
            preparing=started - prepared,
            committing=committed - started,
            acknowledging=acknowledged - committed,
        )
