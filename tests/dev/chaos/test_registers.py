"""Registers of a journal, as its log explains them."""

from __future__ import annotations

from gazette.protocol.label_set import LabelSet
from tools.chaos.history import Completed, Invoked, Labels
from tools.chaos.registers import Attempt, check_registers

LOCK: Labels = (("lock", "a"),)
MARK: Labels = (("mark", "b"),)


def attempt(
    op: int, *, union: Labels = (), check: str = "", answered: Labels | None = None
) -> Attempt:
    invoked = Invoked(float(op), op, 1, "client", "a/journal", 10, check=check, union=union)
    if answered is None:
        return Attempt(invoked, None)
    registers = tuple((one.name, one.value) for one in LabelSet.of(*answered).labels)
    return Attempt(invoked, Completed(op + 0.5, op, 1, "ok", registers=registers))


def test_a_reset_leaves_the_registers_that_later_answers_show() -> None:
    """A broker that had not ended may have kept them. The answer to the first append is unknown."""
    log = [attempt(1, union=LOCK, answered=LOCK), attempt(2), attempt(3, answered=LOCK)]
    assert list(check_registers(log, [], gone={1})) == []
    # Case: they are gone.
    log[2] = attempt(3, answered=())
    assert list(check_registers(log, [], gone={1})) == []
    # Case: such registers were never there.
    log[2] = attempt(3, answered=MARK)
    assert len(list(check_registers(log, [], gone={1}))) == 1
    # Case: no broker had ended.
    log[2] = attempt(3, answered=())
    assert len(list(check_registers(log, []))) == 1


def test_a_refusal_for_an_append_that_was_taken_back() -> None:
    """A primary was lost with the append that it had begun, and had refused another one for it."""
    log = [attempt(1, union=LOCK, answered=LOCK), attempt(5, answered=LOCK)]
    begun = Invoked(2.0, 2, 1, "client", "a/journal", 10, union=(("lock", "b"),))
    invoked = Invoked(3.0, 3, 1, "client", "a/journal", 10, check="lock = a")
    refused = Attempt(invoked, Completed(3.5, 3, 1, "fail", status="REGISTER_MISMATCH"))
    for undone, violations in (
        ([], 1),
        ([Attempt(begun, None)], 0),
        ([Attempt(begun, Completed(2.5, 2, 1, "unknown"))], 0),
    ):
        assert len(list(check_registers(log, [refused], undone=undone))) == violations
    # Case: an append was acknowledged in between, so that the lost one had no effect any more.
    between = Invoked(2.6, 4, 1, "client", "a/journal", 10)
    known = Completed(2.8, 4, 1, "ok", registers=LOCK)
    undone = [Attempt(begun, Completed(2.5, 2, 1, "unknown"))]
    log.insert(1, Attempt(between, known))
    assert len(list(check_registers(log, [refused], undone=undone))) == 1
    # Case: its own condition was not met.
    strict = Invoked(2.0, 2, 1, "client", "a/journal", 10, check="lock = c", union=(("lock", "b"),))
    assert len(list(check_registers(log, [refused], undone=[Attempt(strict, None)]))) == 1
