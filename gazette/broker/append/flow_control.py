"""Minimum and maximum rates of the content of appends. Token buckets in ticks; pure.

A journal has one appender at a time: a slow appender keeps all others waiting. An append below a minimum rate
is aborted. A journal may also have a maximum rate, shared by all its appends. Above it, content is held back.

Callers give the time, in ticks of a monotonic clock. Credit is counted in byte-ticks (bytes ×
``TICKS_PER_S``), which makes every sum exact.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gazette.errors import Broken
from gazette.protocol.content import TOO_SLOW

TICKS_PER_S: Final = 1000
BURST_S: Final = 1
"""Initial credit of a replica, and initial idle time of an append, in seconds of its rate."""
BANK_S: Final = 10
"""Upper bound of the credit that an idle journal saves up, in seconds of its maximum rate."""


def effective_rate_max(journal_rate: int, broker_rate: int) -> int:
    """Return the lower of two rates; a rate of zero is no limit. The broker's limit is for each journal."""
    return (
        min(journal_rate, broker_rate)
        if journal_rate and broker_rate
        else journal_rate or broker_rate
    )


def too_slow(rate_min: int) -> Broken:
    """Return the error of an append whose client sends too little."""
    return Broken(
        TOO_SLOW,
        hint="Buffer the content before the append begins, or append smaller batches.",
        rate_min=rate_min,
    )


class RateBalance(msgspec.Struct):
    """The credit of a replica's appends, at ``rate`` bytes/s (0: no limit).

    A chunk of any size may make the credit negative. The next chunk waits until the credit is positive.
    Invariant: ``credit <= BANK_S × rate``, in byte-ticks.
    """

    rate: int = 0
    credit: int = 0
    _at: int | None = None

    def refill(self, rate: int, now: int) -> None:
        """Add credit for the ticks since the last refill; no credit if time goes back. Adopt ``rate``. The
        first refill, and one after a time without a limit, set the credit to `BURST_S`."""
        if self._at is None or not self.rate:
            self.credit = BURST_S * rate * TICKS_PER_S
        else:
            self.credit += self.rate * max(now - self._at, 0)
        self.rate = rate
        self.credit = min(self.credit, BANK_S * rate * TICKS_PER_S)
        self._at = now if self._at is None else max(now, self._at)

    def delay(self) -> int:
        """Return the ticks until the next chunk may be taken; zero if it may be taken now."""
        if not self.rate or self.credit > 0:
            return 0
        return -self.credit // self.rate + 1

    def spend(self, length: int) -> None:
        """Charge a chunk of ``length`` bytes."""
        if self.rate:
            self.credit -= length * TICKS_PER_S


class AppendFlow(msgspec.Struct):
    """The flow of one append, from its first wait for content on.

    ``rate_min`` is in bytes/s; zero means no minimum. Only time in which the append waits for the client
    counts. Time in which the broker held content back, or waited for replicas, does not count.
    """

    balance: RateBalance
    rate_min: int
    rate_max: int
    total_chunks: int = 0
    delayed_chunks: int = 0
    _allowance: int = 0

    def __post_init__(self) -> None:
        self._allowance = BURST_S * self.rate_min * TICKS_PER_S

    def idle_ticks(self) -> int | None:
        """Return for how many ticks to wait for the next message; None: for ever."""
        if not self.rate_min:
            return None
        return -(-self._allowance // self.rate_min)

    def count_wait(self, ticks: int) -> bool:
        """Count ``ticks`` of waiting. Return True if the client is still fast enough."""
        if not self.rate_min:
            return True
        self._allowance -= self.rate_min * max(ticks, 0)
        return self._allowance > 0

    def received(self, length: int) -> None:
        """Count a message with ``length`` bytes of content."""
        self.total_chunks += 1
        earned = self._allowance + length * TICKS_PER_S
        self._allowance = min(earned, BURST_S * self.rate_min * TICKS_PER_S)

    def unlimit(self) -> None:
        """Hold no content back any more: other appends wait for the end of this append."""
        self.rate_max = 0

    def delay(self, now: int) -> int:
        """Return the ticks for which a received chunk must wait before it is taken."""
        if not self.rate_max:
            return 0
        self.balance.refill(self.rate_max, now)
        return self.balance.delay()

    def take(self, length: int, *, delayed: bool) -> None:
        """Count a chunk that is passed on; ``delayed`` if it had to wait."""
        self.delayed_chunks += delayed
        if self.rate_max:
            self.balance.spend(length)
