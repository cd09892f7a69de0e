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
