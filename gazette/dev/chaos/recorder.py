"""Writes the history of a run, and keeps what the run itself needs to know of it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

from gazette.clock import Clock
from gazette.dev.chaos.history import Completed, Event, Invoked, encode


class Recorder:
    """``record`` events in the order in which they happen. ``close`` it in the end."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.heads: dict[str, int] = defaultdict(int)
        """The end of what was acknowledged, by journal."""
        self.acknowledged: dict[str, list[float]] = defaultdict(list)
        """When, by journal."""
        self.counts: Counter[str] = Counter()
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
        if isinstance(event, Invoked):
            self._journals[event.op] = event.journal
        elif isinstance(event, Completed):
            self.counts[event.outcome] += 1
            if event.outcome == "ok":
                journal = self._journals[event.op]
                self.heads[journal] = max(self.heads[journal], event.end)
                self.acknowledged[journal].append(event.time)
            if event.outcome != "unknown":
                self._journals.pop(event.op, None)
        else:
            self.counts[type(event).__name__] += 1

    def close(self) -> None:
        self._file.close()
