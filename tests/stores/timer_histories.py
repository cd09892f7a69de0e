"""Histories of one shard's timers, by a seed: batches of up to 64, which set and cancel each other.

A `TimerModel` in plain Python says which timer fires next. It knows no batches: it has the timers one by one.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from gazette.consumer.timers.timer import EventTime, Position, TimeDomain, Timer, time_at
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.message.envelope import Envelope
from gazette.message.uuid import clock_at
from gazette.protocol.checkpoint import Checkpoint
from gazette.testing.clock import ManualClock
from tests.stores.timer_stores import SHARD, Open

EVENT, PROCESSING = TimeDomain.EVENT, TimeDomain.PROCESSING
BATCHES: Final = (1, 2, 3, 7, 64)
SOURCE: Final = "a/source"
MOMENTS: Final = 12
"""Timers of one transaction have few different times, so that many are due at once."""
FIRED_MAX: Final = 400
"""Most timers of one transaction: those that set each other need not come to an end."""

Rows = dict[TimeDomain, dict[str, tuple[int, bytes]]]
"""Time and payload of each timer."""


@dataclass
class TimerModel:
    """Timers by domain and key, and how far the present pass has come."""

    rows: Rows = field(default_factory=lambda: {EVENT: {}, PROCESSING: {}})
    passed: dict[TimeDomain, Position | None] = field(
        default_factory=lambda: {EVENT: None, PROCESSING: None}
    )

    def begin_pass(self) -> None:
        self.passed = {EVENT: None, PROCESSING: None}

    def saved(self) -> Rows:
        return {domain: dict(rows) for domain, rows in self.rows.items()}

    def next(self, domain: TimeDomain, until: int) -> Position | None:
        """Return the next timer that is due and was not passed over."""
        passed = self.passed[domain]
        due = [(at, key) for key, (at, _) in self.rows[domain].items() if at <= until]
        return min((one for one in due if passed is None or one > passed), default=None)

    def fire(self, timer: Timer, until: int) -> None:
        """Remove a timer, which has to be the next one."""
        expected = self.next(timer.domain, until)
        assert expected is not None, f"{timer} fires, and none is due"
        at, key = expected
        assert (timer.key, timer.at) == (key, time_at(at)), f"{key} comes before {timer.key}"
        assert timer.payload == self.rows[timer.domain].pop(key)[1]
        self.passed[timer.domain] = expected


class Died(Exception):
    """The member died in a callback."""


class TimerHistory:
    """One history: transactions of a shard that set, cancel and fire timers, and its owners."""

    def __init__(self, seed: int, open_store: Open) -> None:
        self._rng = random.Random(seed)
        self._open_store = open_store
        self._clock = ManualClock()
        self._base = round(self._clock.now() * 1e6)
        self._keys = [f"k{n}" for n in range(self._rng.choice((2, 5, 20, 150)))]
        self._busy = self._rng.choice((2, 5, 40))
        """One of so many callbacks sets or cancels timers."""
        self._model = TimerModel()
        self._watermark: int | None = None
        self._open()
        self._timers.clear()  # Of the history before.
        self._commit()
        self.batches: Counter[int] = Counter()
        """Numbers of timers that fired together."""

    def _open(self) -> None:
        self._store = self._open_store()
        self._store.restore_checkpoint(SHARD)
        self._timers = ShardTimers(
            lambda: self._store.timer_table(SHARD), EventTime(), [SOURCE], self._clock, SHARD.id
        )
        self._committed = self._model.saved(), self._watermark

    def run(self) -> None:
        """Have a few transactions, then fire what is left. Each timer fires once, or was cancelled."""
        rng = self._rng
        try:
            for _ in range(rng.randrange(1, 6)):
                try:
                    self._transaction(rng.choice(BATCHES))
                    if not rng.randrange(5):
                        raise Died
                except Died:
                    self._crash()
            self._drain()
        finally:
            self._store.destroy()

    def _transaction(self, limit: int, *, quiet: bool = False) -> None:
        rng, timers, model = self._rng, self._timers, self._model
        timers.begin()
        model.begin_pass()
        for _ in range(0 if quiet else rng.randrange(3)):
            timers.begin_pass()
            model.begin_pass()
            for _ in range(rng.randrange(2 * len(self._keys))):
                self._set_or_cancel(rng.choice((EVENT, PROCESSING)), rng.choice(self._keys))
            self._pass_time(rng.randrange(MOMENTS))
            if rng.randrange(3):
                self._fire(limit, quiet=quiet)
        self._fire(limit, quiet=quiet)
        if not quiet and not rng.randrange(8):
            raise Died  # Before the commit.
        timers.finish()
        model.begin_pass()
        self._commit()
        self._check_wait()

    def _commit(self) -> None:
        self._store.start_commit(SHARD, Checkpoint(), ()).result(10)
        self._committed = self._model.saved(), self._watermark

    def _pass_time(self, moments: int) -> None:
        self._clock.advance(moments * 1e-6)
        if self._rng.randrange(2):
            at = self._base + self._rng.randrange(3 * MOMENTS)
            self._watermark = max(at, self._watermark or at)
            clock = clock_at(at * 1000)
            self._timers.observe(Envelope(SOURCE, 0, 1, None, bytes(6), clock, 0))

    def _until(self, domain: TimeDomain) -> int:
        if domain is PROCESSING:
            return round(self._clock.now() * 1e6)
        return -1 if self._watermark is None else self._watermark

    def _fire(self, limit: int, *, quiet: bool = False) -> None:
        """Have timers fire as a transactor does, until no timer is due."""
        fired = 0
        while fired < FIRED_MAX and self._timers.confirm_due():
            count = 0
            for timer in self._timers.fire(min(limit, FIRED_MAX - fired)):
                count += 1
                self._model.fire(timer, self._until(timer.domain))
                if not quiet:
                    self._callback(timer)
            fired += count
            self.batches[count] += 1
        if fired < FIRED_MAX:
            for domain in TimeDomain:
                assert self._model.next(domain, self._until(domain)) is None, "a timer was lost"

    def _callback(self, timer: Timer) -> None:
        """Do what an application's `on_timer` may do. Undo it sometimes, as a poison policy does."""
        rng, before = self._rng, self._model.saved()
        if not rng.randrange(400):
            raise Died  # In the middle of a batch.
        savepoint = self._store.savepoint() if self._store.has_savepoints else None
        cancelled_keys = self._timers.cancelled_keys()
        for _ in range(0 if rng.randrange(self._busy) else rng.randrange(1, 4)):
            domain = timer.domain if rng.randrange(5) else rng.choice((EVENT, PROCESSING))
            self._set_or_cancel(domain, self._key_for(timer), timer)
        if savepoint is not None and not rng.randrange(10):
            savepoint.roll_back()
            self._timers.restore_cancelled_keys(cancelled_keys)
            self._model.rows = before
        elif savepoint is not None:
            savepoint.release()

    def _key_for(self, timer: Timer) -> str:
        """Return a key: that of the timer that fires, one that comes soon, or another."""
        rng, model = self._rng, self._model
        coming = sorted((at, key) for key, (at, _) in model.rows[timer.domain].items())
        coming = [one for one in coming if one > (model.passed[timer.domain] or one)]
        if coming and rng.randrange(2):
            return coming[min(rng.choice((0, 1, 5, 62)), len(coming) - 1)][1]
        return timer.key if rng.randrange(2) else rng.choice(self._keys)

    def _set_or_cancel(self, domain: TimeDomain, key: str, fired: Timer | None = None) -> None:
        rng, rows = self._rng, self._model.rows[domain]
        if not rng.randrange(5):
            self._timers.cancel(key, domain)
            rows.pop(key, None)
            return
        at = self._time_for(key, rows, fired)
        payload = rng.randbytes(2)
        self._timers.schedule(key, time_at(at), payload, domain)
        rows[key] = at, payload

    def _time_for(self, key: str, rows: dict[str, tuple[int, bytes]], fired: Timer | None) -> int:
        """Return a time: that of the timer that fires, the one that the key has, or another."""
        rng = self._rng
        choices = [self._base + rng.randrange(4 * MOMENTS)]
        if key in rows:
            choices += [rows[key][0]] * 3
        if fired is not None:
            at = (fired.at - time_at(0)) // timedelta(microseconds=1)
            choices += [at, at, at - 1, at + 1, at + rng.randrange(3 * MOMENTS)]
        return rng.choice(choices)

    def _check_wait(self) -> None:
        """Check that the shard does not sleep longer than until its first timer."""
        first = min((at for at, _ in self._model.rows[PROCESSING].values()), default=None)
        wait_s = self._timers.next_s()
        if first is not None:
            assert wait_s is not None
            assert wait_s <= first / 1e6 - self._clock.now() + 1e-6

    def _crash(self) -> None:
        self._store.destroy()
        rows, self._watermark = self._committed
        self._model = TimerModel(rows)
        self._open()

    def _drain(self) -> None:
        """Let all time pass. What is left fires, and then nothing is."""
        self._timers.begin()
        self._pass_time(8 * MOMENTS)
        at = self._base + 8 * MOMENTS
        self._watermark = at
        self._timers.observe(Envelope(SOURCE, 0, 1, None, bytes(6), clock_at(at * 1000), 0))
        self._transaction(64, quiet=True)
        assert self._model.rows == {EVENT: {}, PROCESSING: {}}, "timers were lost"


__all__: Final[list[Any]] = ["TimerHistory", "TimerModel"]
