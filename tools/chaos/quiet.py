"""Judges quiet times, in which nothing is broken and every journal must serve. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tools.chaos.history import (
    Completed,
    Created,
    Event,
    HeadReset,
    Invoked,
    Jumped,
    Lost,
    Opened,
    Quiet,
    Read,
)

_REASONS = 3
_REASON_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a rule."""

    kind: str
    journal: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.journal}: {self.text}"


@dataclass(slots=True)
class _Window:
    """One quiet time. ``heads`` are offsets that readers must reach."""

    begun: float
    heads: dict[str, int]
    acknowledged: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class QuietTimes:
    """Folds a history by ``enter``. It keeps the present state and the violations, and no events."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        """Journals that existed in a quiet time."""
        self._wrong: list[tuple[str, str, str]] = []
        self._journals: set[str] = set()
        self._heads: dict[str, int] = defaultdict(int)
        self._positions: dict[tuple[str, str], int] = {}
        """Offsets of the readers that follow the head, by journal and reader."""
        self.gaps: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By journal: spans without bytes, because of declared losses. Readers wait there."""
        self._stored: dict[str, tuple[tuple[int, int], ...]] = {}
        """By journal without a later append: the spans that were stored when all replicas were lost."""
        self._waits: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Further spans of each journal at which readers may have to wait: see `perhaps_empty`."""
        self._lost: dict[str, float] = {}
        """Time of the last declared loss, by journal."""
        self._ends: dict[str, int] = {}
        """By journal: the end of its stored bytes at the last loss, until an append that began later."""
        self._lives: dict[str, int] = {}
        """Revision at which each journal was last created."""
        self._ops: dict[int, Invoked] = {}
        self._window: _Window | None = None

    def enter(self, event: Event) -> None:
        """Take the next event of the history."""
        match event:
            case Created():
                self._journals.add(event.journal)
                self._lives[event.journal] = event.revision
                self.gaps.pop(event.journal, None)
                self._stored.pop(event.journal, None)
                self._lost.pop(event.journal, None)
                self._ends.pop(event.journal, None)
                self._waits.pop(event.journal, None)
                self._head_is(event.journal, 0)
            case Lost():
                self._stored[event.journal] = event.stored
                self._lost[event.journal] = event.time
                self._ends[event.journal] = event.stored[-1][1] if event.stored else 0
                self._enter_gaps(event.journal, event.stored)
            case Invoked():
                self._ops[event.op] = event
            case Completed():
                self._enter_completed(event)
            case HeadReset():
                if (stored := self._stored.pop(event.journal, None)) is not None:
                    self._enter_gaps(event.journal, [*stored, (event.offset, event.offset)])
                self._head_is(event.journal, event.offset)
            case Opened(follows=True):
                self._positions[event.journal, event.reader] = event.offset
            case Read() | Jumped() if (event.journal, event.reader) in self._positions:
                self._positions[event.journal, event.reader] = event.end
            case Quiet(phase="begun"):
                self._window = _Window(event.time, dict(self._heads))
            case Quiet() if self._window is not None:
                self._close(self._window, event.time)
                self._window = None

    def missing(self) -> str:
        """Return what the present quiet time still lacks; empty if nothing, or outside of one."""
        return "" if self._window is None else next((text for *_, text in self._lacks()), "")

    def violations(self) -> list[Violation]:
        """Return what was wrong in all quiet times."""
        violations = [Violation(*wrong) for wrong in self._wrong]
        violations += [
            Violation("unfinished", journal, "there was no quiet time")
            for journal in sorted(self._journals - self._served)
        ]
        return violations

    def _enter_gaps(self, journal: str, spans: Sequence[tuple[int, int]]) -> None:
        for (_, before), (begin, _) in pairwise([(0, 0), *spans]):
            if before < begin:
                self.gaps[journal].append((before, begin))

    def _enter_completed(self, event: Completed) -> None:
        invoked = self._ops.pop(event.op)
        journal = invoked.journal
        if event.outcome == "ok" and 0 < event.revision < self._lives.get(journal, 0):
            return  # This is the late answer to an append of a former life.
        if event.outcome == "ok":
            self._heads[journal] = max(self._heads[journal], event.end)
            if event.begin < event.end and invoked.time > self._lost.get(journal, float("inf")):
                end = self._ends.pop(journal, event.begin)
                if end < event.begin:
                    # Another broker may still have had the bytes before this append.
                    self._waits[journal].append((end, event.begin))
        if self._window is None:
            return
        if event.outcome == "ok":
            self._window.acknowledged[journal] += 1
        else:
            reason = event.status or event.error[:_REASON_CHARACTERS] or event.outcome
            self._window.reasons[journal][reason] += 1

    def _head_is(self, journal: str, offset: int) -> None:
        self._heads[journal] = offset
        if self._window is not None:
            self._window.heads[journal] = min(self._window.heads.get(journal, offset), offset)

    def _lacks(self) -> list[tuple[str, str, str]]:
        """Return what the present quiet time lacks: kind of violation, journal and text of each."""
        window = self._window
        assert window is not None
        lacks = []
        for journal in sorted(self._journals):
            if not window.acknowledged[journal]:
                reasons = window.reasons[journal].most_common(_REASONS)
                texts = "; ".join(f"{count} times {text}" for text, count in reasons)
                lacks.append(
                    ("refuses", journal, f"nothing was acknowledged: {texts or 'no answer'}")
                )
        for (journal, reader), position in sorted(self._positions.items()):
            head = window.heads.get(journal, 0)
            if position < head and not self._is_gap(journal, position):
                lacks.append(
                    ("stuck", journal, f"{reader} is at {position}, and the head at {head}")
                )
        return lacks

    def perhaps_empty(self, journal: str) -> list[tuple[int, int]]:
        """Return the spans that readers may find empty, because of declared losses."""
        return [*self.gaps.get(journal, ()), *self._waits.get(journal, ())]

    def _is_gap(self, journal: str, offset: int) -> bool:
        return any(begin <= offset < end for begin, end in self.perhaps_empty(journal))

    def _close(self, window: _Window, time: float) -> None:
        self._served |= self._journals
        when = f" (quiet from {window.begun:.1f} to {time:.1f} s)"
        self._wrong += [(kind, journal, text + when) for kind, journal, text in self._lacks()]
