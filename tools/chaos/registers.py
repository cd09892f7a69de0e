"""Checks that the registers of a journal are linearizable, given the order of its appends. Pure.

Appends change registers in the order of their bytes in the journal. So an append is checked against the
registers at its place. An append that was refused because of registers is checked against all registers
between its beginning and its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gazette.protocol.label_set import LabelSelector, LabelSet, subtract, union
from tools.chaos.history import Completed, Invoked, Labels

REGISTER_MISMATCH = "REGISTER_MISMATCH"
_LAST = 10
"""Number of last states of the registers, one of which may be left after a reset of the head."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to append. ``completed`` is None if its client never got an outcome."""

    invoked: Invoked
    completed: Completed | None

    @property
    def outcome(self) -> str:
        return "unknown" if self.completed is None else self.completed.outcome


def labels_of(labels: LabelSet) -> Labels:
    return tuple((label.name, label.value) for label in labels.labels)


def check_registers(
    log: Sequence[Attempt],
    refused: Sequence[Attempt],
    gone: Collection[int] = (),
    undone: Sequence[Attempt] = (),
) -> Iterator[str]:
    """Yield the violations of registers.

    ``log`` has the attempt at each place of the journal, in order. ``refused`` has those that failed with
    ``REGISTER_MISMATCH``. ``gone`` are places before which all brokers had ended, and registers with them.
    ``undone`` has the attempts of unknown outcome that are not in the journal, in the order of their
    beginning. Until a primary takes an append back, it refuses others for the registers that it sets.
    """
    states = [LabelSet()]
    forgotten: dict[int, LabelSet] = {}
    for place, attempt in enumerate(log):
        if place in gone:
            forgotten[place], states[-1] = states[-1], _left(states, log[place:])
        before = states[-1]
        invoked = attempt.invoked
        if not _passes(before, invoked.check):
            yield (
                f"op {invoked.op} is there, though it required {invoked.check!r} and the registers were"
                f" {_text(before)}"
            )
        after = _changed(before, invoked)
        completed = attempt.completed
        if attempt.outcome == "ok" and completed is not None:
            answered = LabelSet.of(*completed.registers)
            if answered != after:
                yield (
                    f"op {invoked.op} was answered registers {_text(answered)}, but left {_text(after)}"
                )
        states.append(after)
    yield from _check_refused(log, refused, states, forgotten, undone)


def _check_refused(
    log: Sequence[Attempt],
    refused: Sequence[Attempt],
    states: Sequence[LabelSet],
    forgotten: Mapping[int, LabelSet],
    undone: Sequence[Attempt],
) -> Iterator[str]:
    # An append that was acknowledged before the refused one began is before it; one that began after its end
    # is behind it.
    known = [
        (attempt.completed.time, index + 1)
        for index, attempt in enumerate(log)
        if attempt.completed is not None and attempt.outcome == "ok"
    ]
    known.sort()
    times = [time for time, _ in known]
    most: list[int] = []
    for _, place in known:
        most.append(max(place, most[-1] if most else 0))
    begun = sorted((attempt.invoked.time, index + 1) for index, attempt in enumerate(log))
    begun_times = [time for time, _ in begun]
    latest: list[int] = []
    for _, place in begun:
        latest.append(max(place, latest[-1] if latest else 0))
    for attempt in refused:
        invoked, completed = attempt.invoked, attempt.completed
        assert completed is not None
        before = bisect_left(times, invoked.time)
        first = most[before - 1] if before else 0
        until = bisect_left(begun_times, completed.time)
        last = max(latest[until - 1] if until else 0, first)
        possible = [*states[first : last + 1]]
        possible += [state for place, state in forgotten.items() if first <= place <= last]
        if any(not _passes(state, invoked.check) for state in possible):
            continue
        pending = _pending(log, undone, invoked.time, completed.time)
        if all(_passes(state, invoked.check) for state in _with_pending(possible, pending)):
            yield (
                f"op {invoked.op} was refused for its registers, but {invoked.check!r} held all the time"
            )


def _pending(
    log: Sequence[Attempt], undone: Sequence[Attempt], begin: float, end: float
) -> Iterator[Attempt]:
    """Yield the attempts that a primary may not have taken back at some time from ``begin`` to ``end``.

    It has taken an attempt back if a later append was acknowledged before ``begin``: one that began after the
    client of the attempt had given up.
    """
    decided = max(
        (
            attempt.invoked.time
            for attempt in log
            if attempt.outcome == "ok"
            and attempt.completed is not None
            and attempt.completed.time <= begin
        ),
        default=float("-inf"),
    )
    for attempt in undone:
        ended = float("inf") if attempt.completed is None else attempt.completed.time
        if attempt.invoked.time <= end and decided <= ended:
            yield attempt


def _with_pending(states: Sequence[LabelSet], pending: Iterable[Attempt]) -> set[LabelSet]:
    """Return the states, and those to which any of the pending attempts lead from there, in their order."""
    reached = set(states)
    for attempt in pending:
        reached |= {
            _changed(state, attempt.invoked)
            for state in reached
            if _passes(state, attempt.invoked.check)
        }
    return reached


def _changed(before: LabelSet, invoked: Invoked) -> LabelSet:
    return union(LabelSet.of(*invoked.union), subtract(before, LabelSet.of(*invoked.subtract)))


def _left(states: Sequence[LabelSet], following: Sequence[Attempt]) -> LabelSet:
    """Return the registers after a reset of the head, as the next acknowledged append shows.

    There are no registers, or those of a broker that had not ended, which may lack the last appends.
    """
    for state in (LabelSet(), *reversed(states[-_LAST:])):
        if _explains(state, following):
            return state
    return LabelSet()


def _explains(state: LabelSet, following: Sequence[Attempt]) -> bool:
    """Return True if a state permits the following appends, and explains the first answer to one of them."""
    for attempt in following:
        if not _passes(state, attempt.invoked.check):
            return False
        state = _changed(state, attempt.invoked)
        if attempt.outcome == "ok" and attempt.completed is not None:
            return LabelSet.of(*attempt.completed.registers) == state
    return True


def _passes(registers: LabelSet, check: str) -> bool:
    return not check or not registers or LabelSelector.parse(check).matches(registers)


def _text(registers: LabelSet) -> str:
    return "{" + ", ".join(f"{one.name}={one.value}" for one in registers.labels) + "}"
