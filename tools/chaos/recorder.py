"""Writes the history of a run, and keeps in memory the part that the run itself needs.

That memory does not grow with the run, except by eight bytes per acknowledgement.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from gazette.runtime.clock import Clock
from tools.chaos.history import Completed, Created, Event, HeadReset, Invoked, encode
from tools.chaos.quiet import QuietTimes


class Recorder:
    """``record`` events in the order in which they happen. ``close`` it in the end."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.heads: dict[str, int] = defaultdict(int)
        """By journal: the end of the acknowledged bytes."""
        self.members: dict[str, tuple[str, ...]] = {}
        """By journal: the brokers that held the append that was acknowledged last."""
        self.acknowledged: dict[str, array[float]] = defaultdict(lambda: array("d"))
        """By journal: the times of all acknowledgements."""
        self.revisions: dict[str, int] = {}
        """Revision as of which each journal was created."""
        self.restarted: list[Callable[[str, int], None]] = []
        """Functions to call with a journal and an offset: readers beyond it must start again there."""
        self.counts: Counter[str] = Counter()
        self.quiet = QuietTimes()
        self._clock = clock
        self._begun = clock.monotonic()
        self._file = path.open("wb")
        self._ops = itertools.count(1)
        self._journals: dict[int, str] = {}

    @property
    def time(self) -> float:
        """Seconds since the run began."""
        return self._clock.monotonic() - self._begun

    def new_op(self) -> int:
        return next(self._ops)

    def record(self, event: Event) -> None:
        self._file.write(encode(event))
        self.quiet.enter(event)
        if isinstance(event, Invoked):
            self._journals[event.op] = event.journal
        elif isinstance(event, Completed):
            self.counts[event.outcome] += 1
            journal = self._journals.pop(event.op)
            if event.outcome == "ok" and event.revision >= self.revisions.get(journal, 0):
                self.heads[journal] = max(self.heads[journal], event.end)
                self.acknowledged[journal].append(event.time)
                self.members[journal] = event.members
        else:
            self.counts[type(event).__name__] += 1

    def create(self, created: Created) -> None:
        """Record the beginning of a journal's life."""
        self.record(created)
        self.revisions[created.journal] = created.revision
        self.heads[created.journal] = 0
        self.members.pop(created.journal, None)
        self._tell(created.journal, 0)

    def restart(self, journal: str, begin: int, head: int) -> None:
        """Record that a journal went on after all of its replicas had ended.

        Its bytes from ``begin`` on may differ from those of before. Its head was ``head`` a moment ago. The
        journal may have gone on behind a gap, if its head in etcd is greater than what was stored.
        """
        self.record(HeadReset(self.time, journal, head, begin))
        self.heads[journal] = head
        gaps = self.quiet.gaps.get(journal, [])
        self._tell(journal, next((end for at, end in gaps if at <= begin < end), begin))

    def _tell(self, journal: str, begin: int) -> None:
        for call in self.restarted:
            call(journal, begin)

    def close(self) -> None:
        self._file.close()
