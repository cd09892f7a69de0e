"""Late copies of appends are refused, whatever happened between; appends that are alive go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gazette.broker.append import sessions as append_sessions
from gazette.broker.append.sessions import ADMITTED, Admission, SessionLedger
from gazette.errors import Invalid, Unavailable
from gazette.protocol.append_session import (
    LEDGER_KEY,
    SESSION_KEY,
    SessionAppend,
    ledger_of,
)
from gazette.protocol.fragment import Fragment

ONE, TWO = "1" * 32, "2" * 32

HERE: Final = object()
"""An attempt of an append."""


def commit_at(begin: int) -> Fragment:
    return Fragment("a/journal", begin, begin + 1, b"\1" * 20)


def introduced(ledger: SessionLedger, session: str, tenure: int = 7) -> str:
    """Let a session be refused; return the name of the ledger in the refusal."""
    refusal = ledger.admit(SessionAppend(session, 1), tenure, HERE).refusal
    assert refusal is not None
    return str(refusal.facts["ledger"])


def test_a_session_that_is_not_known_learns_of_the_ledger_and_goes_on_with_it() -> None:
    ledger = SessionLedger(1)
    name = introduced(ledger, ONE)
    assert ledger.admit(SessionAppend(ONE, 1, name), 7, HERE) == ADMITTED
    # What is known is known, whatever ledger it names.
    assert ledger.admit(SessionAppend(ONE, 2), 7, HERE) == ADMITTED


def test_a_ledger_of_a_journal_that_was_created_again_has_another_name() -> None:
    """Although its primary has the assignment of before."""
    former = introduced(SessionLedger(1), ONE)
    ledger = SessionLedger(8)
    append = SessionAppend(ONE, 2, former)
    early, refusal = ledger.refusal_of(append, 7), ledger.admit(append, 7, HERE).refusal
    for error in (early, refusal):
        assert error is not None
        assert error.facts["created"] == 8
        assert error.facts["ledger"] != former
    assert ledger.admit(SessionAppend(ONE, 2, introduced(ledger, ONE)), 7, HERE) == ADMITTED


def test_an_earlier_append_is_refused_and_its_refusal_names_no_ledger() -> None:
    ledger = SessionLedger(1)
    name = introduced(ledger, ONE)
    ledger.admit(SessionAppend(ONE, 5, name), 7, HERE)
    refusal = ledger.admit(SessionAppend(ONE, 4, name), 7, HERE).refusal
    assert refusal is not None
    assert "ledger" not in refusal.facts, "a client would repeat it at once"


def test_an_attempt_of_what_committed_is_answered_as_before() -> None:
    ledger = SessionLedger(1)
    append = SessionAppend(ONE, 1, introduced(ledger, ONE))
    assert ledger.admit(append, 7, HERE) == ADMITTED
    ledger.ended(append, HERE, None)
    again = object()
    assert ledger.admit(append, 7, again) == ADMITTED, "whether it committed is not known"
    ledger.ended(append, HERE, commit_at(1))  # It has ended before, and changes nothing.
    ledger.ended(append, again, commit_at(3))
    assert ledger.admit(append, 7, HERE) == Admission(commit=commit_at(3))
    assert ledger.admit(SessionAppend(ONE, 2), 7, HERE) == ADMITTED
    ledger.ended(append, again, commit_at(3))  # An answer that comes late is not of the new append.
    assert ledger.admit(SessionAppend(ONE, 2), 7, HERE) == ADMITTED


def test_an_attempt_is_refused_while_another_one_of_its_append_goes_on() -> None:
    ledger = SessionLedger(1)
    append = SessionAppend(ONE, 1, introduced(ledger, ONE))
    other = object()
    assert ledger.admit(append, 7, HERE) == ADMITTED
    assert ledger.admit(append, 7, HERE) == ADMITTED, "it looks again"
    refusal = ledger.admit(append, 7, other).refusal
    assert isinstance(refusal, Unavailable), "clients repeat it"
    ledger.ended(append, other, None)  # It was not admitted, and changes nothing.
    assert ledger.admit(append, 7, other).refusal is not None
    ledger.ended(append, HERE, commit_at(3))
    assert ledger.admit(append, 7, other) == Admission(commit=commit_at(3))


def test_another_tenure_begins_another_ledger_and_an_older_one_changes_nothing() -> None:
    ledger = SessionLedger(1)
    former = introduced(ledger, ONE)
    ledger.admit(SessionAppend(ONE, 1, former), 7, HERE)
    refusal = ledger.admit(SessionAppend(ONE, 1, former), 9, HERE).refusal
    assert refusal is not None
    assert refusal.facts["ledger"] not in ("", former)
    assert ledger.admit(SessionAppend(ONE, 2, refusal.facts["ledger"]), 9, HERE) == ADMITTED
    assert ledger.admit(SessionAppend(ONE, 3, former), 7, HERE).refusal is not None
    assert ledger.admit(SessionAppend(ONE, 3), 9, HERE) == ADMITTED


HALF = append_sessions.GENERATION_SESSIONS // 2


@pytest.mark.parametrize(
    "others",
    [count * HALF + more for count in range(9) for more in (-1, 0, 1) if count + more >= 0],
)
def test_what_is_forgotten_must_name_the_present_ledger(others: int) -> None:
    ledger = SessionLedger(1)
    first = introduced(ledger, ONE)
    ledger.admit(SessionAppend(ONE, 2, first), 7, HERE)
    for number in range(others):
        other = f"{number + 3:032x}"
        ledger.admit(SessionAppend(other, 1, introduced(ledger, other)), 7, HERE)
    late = ledger.admit(SessionAppend(ONE, 1, first), 7, HERE).refusal
    assert late is not None
    alive = ledger.admit(SessionAppend(ONE, 3, first), 7, HERE).refusal
    if alive is not None:
        assert ledger.admit(SessionAppend(ONE, 3, alive.facts["ledger"]), 7, HERE) == ADMITTED


def test_an_attempt_that_goes_on_is_known_however_many_sessions_come() -> None:
    ledger = SessionLedger(1)
    append = SessionAppend(ONE, 1, introduced(ledger, ONE))
    assert ledger.admit(append, 7, HERE) == ADMITTED
    for number in range(9 * HALF):
        other = f"{number + 3:032x}"
        one = SessionAppend(other, 1, introduced(ledger, other))
        ledger.admit(one, 7, other)
        ledger.ended(one, other, None)
    repeated = SessionAppend(ONE, 1, ledger.name)
    assert isinstance(ledger.admit(repeated, 7, object()).refusal, Unavailable)
    ledger.ended(append, HERE, commit_at(3))
    assert ledger.admit(repeated, 7, object()) == Admission(commit=commit_at(3))


def test_a_ledger_is_bounded() -> None:
    ledger = SessionLedger(1)
    name = introduced(ledger, ONE)
    for index in range(5 * append_sessions.GENERATION_SESSIONS):
        append = SessionAppend(f"{index:032x}", 1, name)
        refusal = ledger.admit(append, 7, HERE).refusal
        if refusal is not None:
            name = refusal.facts["ledger"]
            assert ledger.admit(SessionAppend(append.session, 1, name), 7, HERE) == ADMITTED
        ledger.ended(append, HERE, None)
        assert len(ledger._newer) + len(ledger._older) <= 2 * append_sessions.GENERATION_SESSIONS


def test_metadata_round_trips() -> None:
    for append in (SessionAppend(ONE, 1), SessionAppend(TWO, 10**18 - 1, "12.3")):
        metadata = (("authorization", "Bearer x"), *append.metadata(), ("x-bin", b"\0"))
        assert SessionAppend.of(metadata) == append
    assert SessionAppend.of(None) is None
    assert SessionAppend.of((("authorization", "Bearer x"),)) is None
    assert ledger_of(((LEDGER_KEY, "7.1"),)) == "7.1"
    assert ledger_of(None) == ""


@pytest.mark.parametrize(
    "value",
    ["", ONE, f"{ONE} 1", f"{ONE} -1 ", f"{ONE} 1 7", f"{ONE} 1_0 ", f"{ONE} \u0661 ", f"{ONE[1:]} 1 ",
     f"{ONE} {'9' * 19} ", f"{ONE} 1 7.1 8", f"{ONE.replace('1', 'A')} 1 ", b"\0"],
)  # fmt: skip
def test_metadata_that_is_not_understood_is_refused(value: object) -> None:
    with pytest.raises(Invalid, match=SESSION_KEY):
        SessionAppend.of(((SESSION_KEY, value),))


def facts_of(admission: Admission) -> Mapping[str, Any]:
    return {} if admission.refusal is None else admission.refusal.facts


@dataclass
class Sender:
    """A session as the append service has it: one append at a time, repeated until it succeeds."""

    session: str
    sequence: int = 1
    ledger: str = ""
    begun: list[SessionAppend] = field(default_factory=list)
    """All its attempts: copies of any of them may arrive at any time."""

    def attempt(self) -> SessionAppend:
        append = SessionAppend(self.session, self.sequence, self.ledger)
        self.begun.append(append)
        return append


@settings(
    max_examples=200,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_late_copy_is_ever_appended_behind_a_later_append(
    data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two brokers take turns as primary, and remember few sessions; copies arrive whenever they like."""
    monkeypatch.setattr(append_sessions, "GENERATION_SESSIONS", 2)
    ledgers, tenure, primary = [SessionLedger(1), SessionLedger(1)], 1, 0
    senders = [Sender(digit * 32) for digit in "12345"]
    journal: list[tuple[str, int]] = []

    def arrive(append: SessionAppend, commits: bool) -> Admission:
        ledger = ledgers[primary]
        early = ledger.refusal_of(append, tenure)
        if early is not None and data.draw(st.booleans()):
            return Admission(early)
        admission = ledger.admit(append, tenure, HERE)
        # Before its turn, an append learns what it learns in its turn.
        facts = facts_of(admission)
        assert (facts if "ledger" in facts else {}) == ({} if early is None else early.facts)
        if admission == ADMITTED and commits:
            journal.append((append.session, append.sequence))
        if admission == ADMITTED:
            ledger.ended(append, HERE, commit_at(len(journal)) if commits else None)
        return admission

    for _ in range(data.draw(st.integers(5, 60))):
        sender = data.draw(st.sampled_from(senders))
        match data.draw(st.sampled_from(["attempt", "attempt", "lost", "late", "primary"])):
            case "attempt":
                admission = arrive(sender.attempt(), data.draw(st.booleans()))
                if admission.refusal is not None:
                    assert "ledger" in admission.refusal.facts, (
                        "one that is alive is not called late"
                    )
                    sender.ledger = admission.refusal.facts["ledger"]
                elif (sender.session, sender.sequence) in journal:
                    sender.sequence += 1
            case "lost":
                sender.attempt()
            case "late" if sender.begun:
                arrive(data.draw(st.sampled_from(sender.begun)), commits=True)
            case "primary":
                tenure, primary = tenure + 1, data.draw(st.integers(0, 1))
    for sender in senders:
        order = [sequence for session, sequence in journal if session == sender.session]
        assert order == sorted(order)
