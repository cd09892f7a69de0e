"""Reports of a backfill run: its progress, and its result."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gazette.history.backfill.build import Attempt, ShardTask


@dataclass(slots=True)
class Progress:
    """Progress of a run, in bytes or in ``unit``. Any thread may change and read it."""

    step: str = "planning"
    unit: str = "bytes"
    done: int = 0
    total: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, step: str, total: int, unit: str = "bytes") -> None:
        with self._lock:
            self.step, self.unit, self.done, self.total = step, unit, 0, total

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The result for one shard."""

    shard: str
    messages: int
    bytes: int
    sources: Mapping[str, int]
    """By source: the offset at which the live shard continues."""
    open_producers: int
    """Number of producers with an open transaction at that offset. The live shard reads it from its begin."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run. If ``published`` is false, the result that a real run would have."""

    run_id: str
    published: bool
    resumed: bool
    history_bytes: int = 0
    history_messages: int = 0
    shards: tuple[ShardReport, ...] = ()
    verified: tuple[str, ...] = ()
    seconds: float = 0.0
    acknowledged: int = 0
    """Number of appended acknowledgements that replaced states owed.

    Shards with a state in a database do not count: they append their acknowledgements when they start.
    """
    refusals: tuple[str, ...] = ()
    """The reasons why a real run would be refused now. Empty except for a dry run."""


def shard_report(task: ShardTask, attempts: Sequence[Attempt]) -> ShardReport:
    """Return the report of one shard. At most one of ``attempts`` has built its state."""
    built = {attempt.shard: attempt.built for attempt in attempts}.get(task.spec.id)
    sources = task.checkpoint.sources
    return ShardReport(
        task.spec.id,
        0 if built is None else built.messages,
        0 if built is None else built.size,
        {journal: source.read_through for journal, source in sources.items()},
        sum(
            state.begin is not None
            for source in sources.values()
            for state in source.producers.values()
        ),
    )
