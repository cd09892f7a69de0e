"""Folds the summaries of runs, in the order of each journal. Pure and fast.

The fold carries the states of producers from each run to the next. When a run decides the fate of pending
messages, the fold notes it in the earlier runs that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gazette.errors import Bug, Corrupt
from gazette.history.snapshot import RUN_BYTES, JournalSnapshot, Run, Snapshot
from gazette.history.summary import ProducerSummary, State, Summary, Undecided
from gazette.history.whole_runs import Summarise, whole_runs
from gazette.message.uuid import (
    AGE_STEPS,
    PRODUCER_BYTES,
    ProducerId,
    checkpoint_clock,
    clock_at,
    clock_span,
)
from gazette.protocol.checkpoint import Checkpoint, ProducerState, SourceCheckpoint
from gazette.protocol.ids import JournalName, Offset

Resolve = Callable[[Run, int, int], Offset]
"""Function from a run, a producer and a clock to the offset of the producer's first pending message
above the clock. The function reads the run again: see `summary.first_beyond`."""


@dataclass(frozen=True, slots=True)
class CommittedRun:
    """A run, and the facts that are needed, besides its bytes, to sequence its messages. A producer is a
    number: its six bytes."""

    run: Run
    known: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By producer of this run with earlier messages: its clocks ``acked`` and ``newest`` at the begin."""
    fates: dict[int, int] = field(default_factory=dict)
    """By producer whose messages are pending at the end of the run: the clock up to which these committed
    later. A producer that is absent here has committed none of them."""
    clock_min: int = 0
    """Least clock of the run's messages; zero if some messages have no clock."""
    clock_max: int = 0
    empty: bool = False
    """True if the run has no messages."""


@dataclass(frozen=True, slots=True)
class FoldedSnapshot:
    """A snapshot whose committed messages are known."""

    snapshot: Snapshot
    runs: tuple[CommittedRun, ...]
    sources: Mapping[JournalName, SourceCheckpoint]
    """By journal: the checkpoint of a consumer that has read exactly the snapshot."""
    newest: Mapping[JournalName, Mapping[ProducerId, int]] = field(default_factory=dict)
    """By journal and producer: the greatest clock of acknowledged or pending messages."""
    rows: int = 0
    """Number of messages that were read, committed or not."""
    replays: Mapping[JournalName, frozenset[ProducerId]] = field(default_factory=dict)
    """Producers that committed, in the snapshot, messages that were pending before its begin.

    Runs lack those messages. If there are such producers, fold the snapshot again with their replays.
    """

    @property
    def open(self) -> dict[JournalName, tuple[ProducerId, ...]]:
        """By journal: the producers with pending messages at its end."""
        pending = {
            journal: tuple(p for p, state in source.producers.items() if state.begin is not None)
            for journal, source in self.sources.items()
        }
        return {journal: producers for journal, producers in pending.items() if producers}

    def checkpoint(self, prune_horizon_ns: int = 0, now_ns: int = 0) -> Checkpoint:
        """Return the sources as a checkpoint, without ACK intents.

        Leave out producers that were silent for ``prune_horizon_ns`` (0: keep all), as does
        `Sequencer.checkpoint`. Here the states replace the sequencer's memory between two checkpoints:
        ``seen_at`` is set unless ``last_ack`` is about the same.
        """
        horizon = clock_span(prune_horizon_ns)
        sources = dict(self.sources)
        step, latest = horizon // AGE_STEPS, clock_at(now_ns) + horizon
        for journal in self.snapshot.journals if horizon else ():
            source = self.sources[journal.journal]
            acks = [state.last_ack for state in source.producers.values()]
            now = checkpoint_clock(acks, now_ns, horizon)
            seen = {p: _seen_at(state) for p, state in journal.producers.items()}
            seen = {p: clock for p, clock in seen.items() if 0 < clock <= latest}
            former = max(seen.values(), default=now)
            now = max(now, former)
            # At most one step has passed, as for the sequencer.
            skipped = max(0, now - former - step)
            newest = self.newest[journal.journal]
            producers = {}
            for producer, state in source.producers.items():
                before, seen_at = journal.producers.get(producer), now
                if before is not None and newest[producer] == before.last_ack and producer in seen:
                    seen_at = seen[producer] + skipped
                if seen_at >= now - horizon:
                    is_near = state.begin is None and abs(state.last_ack - seen_at) <= step
                    producers[producer] = replace(state, seen_at=0 if is_near else seen_at)
            sources[journal.journal] = SourceCheckpoint(source.read_through, producers)
        return Checkpoint(sources)


def _seen_at(state: ProducerState) -> int:
    """Return the time at which the last batches had messages of a producer; 0 if its state does not say.

    Offsets of version 0.1.0 do not say when an open transaction grew.
    """
    if state.seen_at or state.begin is not None:
        return state.seen_at
    return state.last_ack


_Part = tuple[CommittedRun, Summary]
"""A run and its summary. The fold fills in ``known`` and ``fates`` of the run."""


def fold(
    snapshot: Snapshot, runs: Sequence[Run], summaries: Sequence[Summary], resolve: Resolve
) -> FoldedSnapshot:
    """Fold the summaries of all runs of a snapshot.

    Raise `Corrupt` if the start of a committed transaction was pruned. Raise the errors of ``resolve``.
    Raise `Bug` if the runs are not those of the snapshot.
    """
    parts: dict[JournalName, list[_Part]] = {j.journal: [] for j in snapshot.journals}
    for run, summary in zip(runs, summaries, strict=True):
        if run.journal not in parts:
            raise Bug("not a run of the snapshot", journal=run.journal, number=run.number)
        clocks = summary.clock_min, summary.clock_max
        committed = CommittedRun(run, {}, {}, *clocks, empty=not summary.rows)
        parts[run.journal].append((committed, summary))
    folds = [_JournalFold(journal, resolve) for journal in snapshot.journals]
    sources = {fold_.journal: fold_.fold(parts[fold_.journal]) for fold_ in folds}
    return FoldedSnapshot(
        snapshot,
        tuple(committed for of_journal in parts.values() for committed, _ in of_journal),
        sources,
        {fold_.journal: fold_.newest for fold_ in folds},
        sum(summary.rows for summary in summaries),
        {fold_.journal: frozenset(fold_.replays) for fold_ in folds if fold_.replays},
    )


def fold_snapshot(
    snapshot: Snapshot, summarise: Summarise, resolve: Resolve, run_bytes: int = RUN_BYTES
) -> FoldedSnapshot:
    """Do the whole first pass. Summarise some runs twice if a message spans two runs, or if messages from
    before the snapshot commit. Raise the errors of ``summarise`` and ``resolve``. Raise `MalformedMessage`
    if lost bytes cut off a message and such messages fail, `Corrupt` if the start of a committed transaction
    was pruned.
    """
    while True:
        runs, summaries = whole_runs(snapshot.runs(run_bytes), summarise)
        folded = fold(snapshot, runs, summaries, resolve)
        if not folded.replays:
            return folded
        replays = {
            journal.journal: journal.replays | folded.replays.get(journal.journal, frozenset())
            for journal in snapshot.journals
        }
        snapshot = snapshot.replaying(replays)


class _JournalFold:
    """The fold of one journal: the states of its producers, run after run."""

    def __init__(self, journal: JournalSnapshot, resolve: Resolve) -> None:
        self.journal = journal.journal
        self.replays: set[ProducerId] = set()
        self._begin = journal.begin
        self._resolve = resolve
        self._states: dict[int, State] = {}
        self._waiting: dict[int, list[CommittedRun]] = {}
        """By producer: the runs with its pending messages."""
        self._lost: dict[int, Offset] = {}
        """By replayed producer: the offset of its first message pending at the begin, until it is read."""
        self._unread: set[int] = set()
        """Producers with messages that are pending at the begin, are not replayed, and have no fate yet."""
        pending = journal.pending
        for producer, state in journal.producers.items():
            number = int.from_bytes(producer, "big")
            self._states[number] = State(state.last_ack, state.last_ack, state.begin)
            if producer in journal.replays:
                offset = pending[producer]
                # If lost bytes with that message are skipped, the rest of the transaction counts.
                if not any(lost.begin <= offset < lost.end for lost in journal.lost):
                    self._lost[number] = offset
            elif producer in pending:
                self._unread.add(number)

    def fold(self, parts: Sequence[_Part]) -> SourceCheckpoint:
        """Step over the journal's runs in order. Return the checkpoint of a consumer that has read them.

        Raise ``Corrupt`` if the start of a committed transaction was pruned.
        """
        end = self._begin
        for run, run_summary in parts:
            end = max(end, run_summary.end)
            for producer, summary in run_summary.producers.items():
                self._step(run, producer, summary)
        return SourceCheckpoint(
            end,
            {
                producer.to_bytes(PRODUCER_BYTES, "big"): ProducerState(state.acked, state.begin)
                for producer, state in self._states.items()
            },
        )

    @property
    def newest(self) -> dict[ProducerId, int]:
        return {
            producer.to_bytes(PRODUCER_BYTES, "big"): state.newest
            for producer, state in self._states.items()
        }

    def _step(self, run: CommittedRun, producer: int, summary: ProducerSummary) -> None:
        """Move the state of a producer over one run, and note the fate of its earlier pending messages. Raise
        ``Corrupt`` if these messages are lost, and the run commits them."""
        former = self._states.get(producer)
        if former is None:
            clock = summary.first_clock - 1  # So the producer's first message is new.
            former = State(clock, clock, None)
        else:
            run.known[producer] = (former.acked, former.newest)
        if self._lost.get(producer) == summary.first_begin:
            del self._lost[producer]  # The begin of the transaction is not lost.
        state, fate = summary.apply(former, lambda clock: self._resolve(run.run, producer, clock))
        waiting = self._waiting.setdefault(producer, [])
        if fate is not Undecided.PENDING:
            # If the fate is a clock, pending messages up to it have committed. Otherwise all are rolled back.
            if isinstance(fate, int) and former.begin is not None:
                if producer in self._lost:
                    raise self._corrupt(producer, self._lost[producer])
                if producer in self._unread:
                    self.replays.add(producer.to_bytes(PRODUCER_BYTES, "big"))
                for earlier in waiting:
                    earlier.fates[producer] = fate
            self._lost.pop(producer, None)
            self._unread.discard(producer)
            waiting.clear()
        if state.begin is not None:
            waiting.append(run)
        self._states[producer] = state

    def _corrupt(self, producer: int, begin: Offset) -> Corrupt:
        return Corrupt(
            "the start of a committed transaction was pruned from the journal",
            hint="Retain fragments for longer than transactions of producers take. Or begin behind the "
            "transaction, without the states of producers.",
            journal=self.journal,
            producer=producer.to_bytes(PRODUCER_BYTES, "big").hex(),
            begin=begin,
        )
