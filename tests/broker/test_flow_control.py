"""Rates of appends: what is held back, and which client is too slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.broker.append.flow_control import (
    BANK_S,
    TICKS_PER_S,
    AppendFlow,
    RateBalance,
    effective_rate_max,
)

KIB = 1024


@pytest.mark.parametrize(
    ("journal", "broker", "effective"),
    [(0, 0, 0), (100, 0, 100), (0, 100, 100), (100, 50, 50), (50, 100, 50)],
)
def test_lower_limit_counts_and_zero_is_no_limit(journal: int, broker: int, effective: int) -> None:
    """The broker's limit is for journals without a limit of their own, too."""
    assert effective_rate_max(journal, broker) == effective


def flow(rate_min: int = 0, rate_max: int = 0, balance: RateBalance | None = None) -> AppendFlow:
    return AppendFlow(balance or RateBalance(), rate_min, rate_max)


def test_burst_is_let_through_and_then_paid_for() -> None:
    """One second's worth of credit; a chunk may exceed it, and the next waits until that is paid."""
    appended = flow(rate_max=100 * KIB)
    assert appended.delay(0) == 0
    appended.take(64 * KIB, delayed=False)
    assert appended.delay(0) == 0
    appended.take(64 * KIB, delayed=False)
    # 28 KiB of debt, at 100 KiB/s.
    assert appended.delay(0) == 281
    assert appended.delay(280) == 1
    assert appended.delay(281) == 0


def test_idle_journal_saves_up_a_bounded_bank() -> None:
    balance = RateBalance()
    flow(rate_max=100, balance=balance).delay(0)
    later = flow(rate_max=100, balance=balance)
    assert later.delay(3_600 * TICKS_PER_S) == 0
    later.take(BANK_S * 100, delayed=False)
    assert later.delay(3_600 * TICKS_PER_S) == 1


def test_balance_is_the_journals_and_not_the_appends() -> None:
    balance = RateBalance()
    first = flow(rate_max=100, balance=balance)
    first.delay(0)
    first.take(200, delayed=False)
    assert flow(rate_max=100, balance=balance).delay(0) == 1001
    # Case: the rate is lowered, raised, and lifted.
    assert flow(rate_max=50, balance=balance).delay(0) == 2001
    assert flow(rate_max=200, balance=balance).delay(0) == 501
    assert flow(rate_max=0, balance=balance).delay(0) == 0


def test_clock_that_goes_back_is_no_harm() -> None:
    balance = RateBalance()
    appended = flow(rate_max=100, balance=balance)
    appended.delay(5_000)
    appended.take(150, delayed=False)
    assert appended.delay(1_000) == appended.delay(5_000) == 501
    assert appended.count_wait(-1_000)


def test_delayed_chunks_are_counted() -> None:
    appended = flow(rate_max=10)
    for delayed in (False, True, True):
        appended.received(5)
        appended.take(5, delayed=delayed)
    assert (appended.total_chunks, appended.delayed_chunks) == (3, 2)
    # Case: the intent to commit counts as a chunk.
    appended.received(0)
    assert appended.total_chunks == 4


def test_limit_may_be_lifted() -> None:
    appended = flow(rate_max=10)
    appended.delay(0)
    appended.take(1_000, delayed=False)
    assert appended.delay(0) > 0
    appended.unlimit()
    assert appended.delay(0) == 0


def test_client_has_one_second_of_idle_time() -> None:
    appended = flow(rate_min=64 * KIB)
    assert appended.idle_ticks() == 1_000
    assert appended.count_wait(999)
    assert appended.idle_ticks() == 1
    assert not appended.count_wait(1)


def test_idle_time_is_earned_by_content() -> None:
    appended = flow(rate_min=1_000)
    assert appended.count_wait(600)
    appended.received(100)
    assert appended.idle_ticks() == 500
    # Case: no more than a second's worth can be saved up.
    appended.received(1_000_000)
    assert appended.idle_ticks() == 1_000
    # Case: an intent to commit earns nothing, and the end of the stream must follow it soon.
    assert appended.count_wait(500)
    appended.received(0)
    assert appended.idle_ticks() == 500


def test_no_minimum_is_no_policing() -> None:
    appended = flow()
    assert appended.idle_ticks() is None
    assert appended.count_wait(1 << 40)


@given(
    rate=st.integers(1, 1 << 20),
    steps=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 1 << 20)), max_size=50),
)
def test_rate_is_never_exceeded(rate: int, steps: list[tuple[int, int]]) -> None:
    """Over any span from the start: at most burst, plus rate times time, plus one chunk of overdraft."""
    appended = flow(rate_max=rate)
    now, sent = 0, 0
    for pause, length in steps:
        now += pause
        delay = appended.delay(now)
        if delay:
            assert appended.delay(now + delay - 1) > 0
            now += delay
            assert appended.delay(now) == 0
        assert sent * TICKS_PER_S < rate * TICKS_PER_S + rate * now
        appended.take(length, delayed=delay > 0)
        sent += length


@given(
    rate=st.integers(1, 1 << 20),
    steps=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 1 << 20)), max_size=50),
)
def test_client_is_aborted_only_below_the_minimum(rate: int, steps: list[tuple[int, int]]) -> None:
    appended = flow(rate_min=rate)
    waited, sent = 0, 0
    for ticks, length in steps:
        waited += ticks
        if not appended.count_wait(ticks):
            # It cannot have kept up the rate over all of its time, with a second of grace, unless what
            # it sent at once was more than it could be credited.
            assert waited >= TICKS_PER_S
            return
        appended.received(length)
        sent += length
        assert 0 < (appended.idle_ticks() or 0) <= TICKS_PER_S
