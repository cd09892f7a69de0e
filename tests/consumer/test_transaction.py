"""When a transaction does what: timing and barriers, as tables of what is asked and what is answered."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.consumer.transaction.transaction import Decision, Policy, Prior, Step, Transaction
from gazette.errors import Bug

CONSUME, END = Decision(Step.CONSUME), Decision(Step.END)
WAIT, COMMIT = Decision(Step.WAIT), Decision(Step.COMMIT)
T0 = 100.0


def transaction(prior: Prior = Prior.DONE, consumed: int = 0, **policy: Any) -> Transaction:
    one = Transaction(Policy(**policy), T0, prior=prior)
    if consumed:
        one.begin(T0)
        one.note_consumed(consumed)
    return one


def wait(until: float) -> Decision:
    return Decision(Step.WAIT, until)


# prior, consumed, seconds since the first message, ready, pending, policy → decision
TABLE: list[tuple[Prior, int, float, bool, bool, dict[str, Any], Decision]] = [
    # Whatever is ready is consumed, whether or not the prior transaction is done.
    (Prior.DONE, 0, 0, True, False, {}, CONSUME),
    (Prior.COMMITTING, 0, 0, True, False, {}, CONSUME),
    (Prior.ACKNOWLEDGING, 3, 0.5, True, False, {}, CONSUME),
    # With nothing to consume, and nothing consumed, it waits for both, without a deadline.
    (Prior.DONE, 0, 0, False, False, {}, WAIT),
    (Prior.DONE, 0, 99, False, True, {}, WAIT),
    (Prior.COMMITTING, 0, 0, False, False, {}, WAIT),
    # It commits as soon as nothing is ready …
    (Prior.DONE, 1, 0, False, False, {}, COMMIT),
    # … but not before the prior one is committed and acknowledged: the first such moment is its turn.
    (Prior.COMMITTING, 1, 0.2, False, False, {}, wait(T0 + 1)),
    (Prior.ACKNOWLEDGING, 1, 0.2, False, False, {}, wait(T0 + 1)),
    (Prior.COMMITTING, 1, 5, False, False, {}, WAIT),
    # … not before the minimum …
    (Prior.DONE, 1, 0.2, False, False, {"min_duration_s": 0.5}, wait(T0 + 0.5)),
    (Prior.DONE, 1, 0.5, False, False, {"min_duration_s": 0.5}, COMMIT),
    (Prior.DONE, 1, 0.2, True, False, {"min_duration_s": 0.5}, CONSUME),
    # … and not while a span is pending whose acknowledgement is likely to come, until the maximum.
    (Prior.DONE, 1, 0.2, False, True, {}, wait(T0 + 1)),
    (Prior.DONE, 1, 1.0, False, True, {}, COMMIT),
    (Prior.DONE, 1, 0.2, False, True, {"wait_for_ack": False}, COMMIT),
    # Past the maximum nothing more is consumed.
    (Prior.DONE, 1, 1.0, True, False, {}, COMMIT),
    (Prior.DONE, 1, 0.999, True, False, {}, CONSUME),
    (Prior.COMMITTING, 1, 1.0, True, False, {}, WAIT),
    # A minimum above the maximum is the maximum: it consumes for as long.
    (Prior.DONE, 1, 1.5, True, False, {"min_duration_s": 2.0}, CONSUME),
    (Prior.DONE, 1, 1.5, False, False, {"min_duration_s": 2.0}, wait(T0 + 2)),
    (Prior.DONE, 1, 2.0, True, False, {"min_duration_s": 2.0}, COMMIT),
]


@pytest.mark.parametrize(
    ("prior", "consumed", "after", "ready", "pending", "policy", "decision"), TABLE
)
def test_decisions(
    prior: Prior,
    consumed: int,
    after: float,
    ready: bool,
    pending: bool,
    policy: dict[str, Any],
    decision: Decision,
) -> None:
    one = transaction(prior, consumed, **policy)
    assert one.decide(T0 + after, ready=ready, pending=pending) == decision


def test_time_counts_from_the_first_message_on() -> None:
    one = transaction()
    assert one.decide(T0 + 50, ready=True, pending=False) == CONSUME
    one.begin(T0 + 50)
    one.note_consumed(1)
    assert one.decide(T0 + 50.9, ready=True, pending=False) == CONSUME
    assert one.decide(T0 + 51, ready=True, pending=False) == COMMIT


def test_what_was_ready_when_the_prior_was_done_is_consumed_in_the_same_transaction() -> None:
    one = transaction(Prior.COMMITTING, 1)
    one.prior_committed()
    assert one.decide(T0 + 0.1, ready=False, pending=False).step is Step.WAIT
    one.prior_acknowledged()
    assert one.decide(T0 + 0.1, ready=True, pending=False) == CONSUME
    assert one.decide(T0 + 0.1, ready=False, pending=False) == COMMIT


def test_a_deferral_ends_consuming_and_obeys_the_minimum_and_the_prior() -> None:
    one = transaction(Prior.COMMITTING, 1, min_duration_s=0.5)
    one.defer()
    assert one.decide(T0 + 0.1, ready=True, pending=True) == wait(T0 + 0.5)
    one.prior_committed()
    one.prior_acknowledged()
    assert one.decide(T0 + 0.1, ready=True, pending=True) == wait(T0 + 0.5)
    assert one.decide(T0 + 0.5, ready=True, pending=True) == COMMIT
    assert one.stalled_at is None


def test_at_the_end_of_input_everything_is_drained() -> None:
    one = transaction(Prior.COMMITTING, 2, min_duration_s=0.5)
    one.end_input()
    assert one.decide(T0, ready=True, pending=False) == CONSUME
    assert one.decide(T0, ready=False, pending=True).step is Step.WAIT
    one.prior_committed()
    one.prior_acknowledged()
    assert one.decide(T0, ready=False, pending=True) == COMMIT
    empty = transaction(Prior.ACKNOWLEDGING)
    empty.end_input()
    assert empty.decide(T0, ready=False, pending=False).step is Step.WAIT
    empty.prior_acknowledged()
    assert empty.decide(T0, ready=False, pending=False) == END


def test_phases_of_a_stalled_transaction() -> None:
    one = Transaction(Policy(), T0, prior=Prior.COMMITTING)
    one.begin(T0 + 1)
    one.note_consumed(1)
    one.decide(T0 + 2, ready=True, pending=False)
    assert one.stalled_at == T0 + 2
    one.prior_committed()
    one.prior_acknowledged()
    one.prepared_at = T0 + 4
    one.start_commit(T0 + 4.5)
    one.committed_at, one.acknowledged_at = T0 + 6, T0 + 9
    phases = one.phases()
    assert (phases.not_running, phases.consuming, phases.stalled) == (1, 1, 2)
    assert (phases.preparing, phases.committing, phases.acknowledging) == (0.5, 1.5, 3)


def commit_early() -> None:
    transaction(Prior.ACKNOWLEDGING, 1).start_commit(T0)


def commit_nothing() -> None:
    transaction().start_commit(T0)


def defer_first() -> None:
    transaction().defer()


def consume_after_the_maximum() -> None:
    one = transaction(consumed=1)
    one.decide(T0 + 1, ready=True, pending=False)
    one.note_consumed(1)


def acknowledge_before_the_commit() -> None:
    transaction(Prior.COMMITTING).prior_acknowledged()


@pytest.mark.parametrize(
    "wrong",
    [
        commit_early,
        commit_nothing,
        defer_first,
        consume_after_the_maximum,
        acknowledge_before_the_commit,
    ],
)
def test_the_order_is_guarded(wrong: Any) -> None:
    with pytest.raises(Bug):
        wrong()


@given(
    minimum=st.floats(0, 3),
    maximum=st.floats(0.1, 3),
    events=st.lists(
        st.tuples(st.sampled_from(["time", "prior", "more", "none"]), st.floats(0, 1)), max_size=40
    ),
    wait_for_ack=st.booleans(),
)
def test_a_commit_keeps_to_its_bounds(
    minimum: float, maximum: float, events: list[tuple[str, float]], wait_for_ack: bool
) -> None:
    """Whatever happens in whatever order: no commit before the prior is done or before the minimum,
    nothing consumed past the maximum, and never a wait for a moment that has passed."""
    policy = Policy(minimum, maximum, wait_for_ack)
    one = Transaction(policy, T0, prior=Prior.COMMITTING)
    now, ready = T0, True
    for kind, amount in events:
        if kind == "time":
            now += amount
        elif kind == "prior" and one.prior is Prior.COMMITTING:
            one.prior_committed()
        elif kind == "prior" and one.prior is Prior.ACKNOWLEDGING:
            one.prior_acknowledged()
        ready = kind == "more"
        decision = one.decide(now, ready=ready, pending=amount > 0.5)
        if decision.step is Step.CONSUME:
            if one.began_at is None:
                one.begin(now)
            assert now < one.began_at + max(minimum, maximum)  # type: ignore[operator]
            one.note_consumed(1)
        elif decision.step is Step.WAIT:
            assert decision.until is None or decision.until > now
        elif decision.step is Step.COMMIT:
            assert one.prior is Prior.DONE
            assert one.began_at is not None
            assert now >= one.began_at + minimum
            one.start_commit(now)
            return


def test_timers_fire_before_messages_in_an_open_transaction() -> None:
    """Check that due timers come first, also before anything was consumed, until it closes."""
    for prior in Prior:
        for one in (transaction(prior), transaction(prior, consumed=1)):
            for ready in (False, True):
                decision = one.decide(T0, ready=ready, pending=False, due=True)
                assert decision == Decision(Step.FIRE)
    one = transaction(consumed=1)
    one.close()
    assert one.decide(T0, ready=True, pending=False, due=True) == COMMIT
    late = transaction(consumed=1)
    assert late.decide(T0 + 1, ready=False, pending=False, due=True) == COMMIT


def test_a_transaction_of_timers_alone_commits() -> None:
    """Check that it does, even if all of them were cancelled when it began."""
    for count in (0, 3):
        one = transaction()
        assert one.is_empty
        one.begin(T0)
        one.note_fired(count)
        assert not one.is_empty
        assert one.decide(T0, ready=False, pending=False) == COMMIT
        one.defer()  # The first message may wait for the next transaction: this one is not empty.
        one.start_commit(T0)
    with pytest.raises(Bug):
        one.note_fired(1)
    with pytest.raises(Bug):
        transaction().note_fired(1)
