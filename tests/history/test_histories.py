"""Two passes over runs of a journal, against the sequencer that reads it from its begin to its end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette.errors import Corrupt
from gazette.history.columns import Columns, MessageFormat
from gazette.history.commit_filter import CommitFilter
from gazette.history.merge import FoldedSnapshot, fold_snapshot
from gazette.history.snapshot import JournalSnapshot, Piece, Run, Snapshot, cover
from gazette.history.summary import Summariser, Summary, combine, first_beyond
from gazette.message.envelope import Envelope
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    build_uuid,
    parse_arrays,
)
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint
from tests.facts import raises
from tests.fuzzing import examples

JOURNAL = "a/journal"
UNKNOWN_FLAGS = 0x2AA


class Item(NamedTuple):
    producer: int
    clock: int
    flags: int


def envelopes_of(items: list[Item]) -> list[Envelope[Any]]:
    found, offset = [], 0
    for number, item in enumerate(items):
        end = offset + 8 + number % 5
        producer = bytes([1, 0, 0, 0, 0, item.producer])
        found.append(Envelope(JOURNAL, offset, end, number, producer, item.clock, item.flags))
        offset = end
    return found


def columns_of(envelopes: list[Envelope[Any]]) -> Columns:
    uuids = b"".join(build_uuid(e.producer, e.clock, e.flags) for e in envelopes)
    return Columns(
        np.array([e.begin for e in envelopes], np.int64),
        np.array([e.end for e in envelopes], np.int64),
        parse_arrays(uuids),
    )


class History:
    """A journal whose bytes were given out in pieces, of which some may be gone."""

    def __init__(self, envelopes: list[Envelope[Any]], chunk: int) -> None:
        self.envelopes = envelopes
        self.chunk = chunk

    def columns(self, run: Run) -> list[Columns]:
        held = [
            e
            for e in self.envelopes
            if any(piece.begin <= e.begin and e.end <= piece.end for piece in run.pieces)
        ]
        return [columns_of(held[at : at + self.chunk]) for at in range(0, len(held), self.chunk)]

    def summary(self, run: Run) -> Summary:
        summariser = Summariser(run)
        for columns in self.columns(run):
            summariser.add(columns)
        return summariser.summary()

    def folded(self, snapshot: Snapshot, run_bytes: int) -> FoldedSnapshot:
        def resolve(run: Run, producer: int, clock: int) -> int:
            return first_beyond(run, self.columns(run), producer, clock)

        def summaries(runs: Sequence[Run]) -> list[Summary]:
            # The offsets of lost messages count as decoded, as in bytes.
            return [replace(self.summary(run), reached=run.end) for run in runs]

        return fold_snapshot(snapshot, summaries, resolve, run_bytes)

    def committed(self, folded: FoldedSnapshot) -> list[int]:
        found: list[int] = []
        for run in folded.runs:
            passes: CommitFilter[np.ndarray] = CommitFilter(run)
            for columns in self.columns(run.run):
                passes.add(columns, columns.begins)
                found += [b for begins, mask in passes.ready() for b in begins[mask].tolist()]
            passes.finish()
            found += [b for begins, mask in passes.ready() for b in begins[mask].tolist()]
        return found


def sequenced(
    envelopes: list[Envelope[Any]], source: SourceCheckpoint | None, begin: int, end: int
) -> tuple[list[Envelope[Any]], SourceCheckpoint]:
    """Return what a sequencer makes of the messages within a range of offsets."""
    sources = {} if source is None else {JOURNAL: source}
    sequencer: Sequencer[int] = Sequencer(sources, 4)
    delivered: list[Envelope[Any]] = []
    for envelope in envelopes:
        if not begin <= envelope.begin or envelope.end > end:
            continue
        sequencer.queue(envelope)
        if (wanted := sequencer.replay_range) is not None:
            held = [e for e in envelopes if wanted.begin <= e.begin and e.end <= wanted.end]
            sequencer.start_replay(iter([held] if held else []))
        while batch := sequencer.dequeue(3):
            delivered += batch
    return delivered, sequencer.checkpoint().get(JOURNAL, SourceCheckpoint(begin))


any_item = st.builds(
    Item,
    producer=st.integers(0, 2),
    clock=st.integers(0, 12),
    flags=st.sampled_from([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN, ACK_TXN, UNKNOWN_FLAGS]),
)


def published(rng: random.Random) -> list[Item]:
    """Draw what publishers write: transactions, retried appends, rollbacks, successors of the dead."""
    items: list[list[Item]] = []
    for producer in range(rng.randint(1, 3)):
        clock, acked, batches = rng.randint(1, 50), 0, []
        for _ in range(rng.randint(1, 6)):
            flags = rng.choice([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN])
            batch = []
            for _ in range(rng.randint(0, 8)):
                clock += 1
                batch.append(Item(producer, clock, flags))
                if flags == CONTINUE_TXN and rng.random() < 0.3:
                    batches.append(batch)
                    batch = []
            if flags == OUTSIDE_TXN:
                acked = clock
            elif rng.random() < 0.8:
                clock += 1
                acked = clock if rng.random() < 0.8 else acked
                if acked:
                    batch.append(Item(producer, acked, ACK_TXN))
            batches.append(batch)
        at = 0
        for batch in batches:
            at = rng.randint(at, len(items))
            items.insert(at, batch * rng.choice([1, 1, 1, 2]))
            at += 1
    return [item for batch in items for item in batch]


histories = st.one_of(
    st.lists(any_item, max_size=40),
    st.integers(0, 2**32).map(lambda seed: published(random.Random(seed))),
)


@settings(max_examples=examples(800), deadline=None)
@given(
    items=histories,
    middle=st.integers(0, 40),
    last=st.integers(0, 60),
    cuts=st.sets(st.integers(1, 60)),
    lost=st.sets(st.integers(0, 60), max_size=8),
    run_bytes=st.sampled_from([1, 30, 90, 10_000]),
    chunk=st.integers(1, 9),
)
@example(
    # Repeated after it was acknowledged, and going on: what is pending begins after the repetition.
    items=[
        Item(0, 1, 1),
        Item(0, 2, 1),
        Item(0, 2, 2),
        Item(0, 1, 1),
        Item(0, 2, 1),
        Item(0, 3, 1),
    ],
    middle=0,
    last=60,
    cuts={3},
    lost=set(),
    run_bytes=1,
    chunk=9,
)
@example(
    # Back to a clock that is new by what was before the run, and would not be by its first message.
    items=[Item(0, 1, 0), Item(0, 9, 1), Item(0, 5, 0)],
    middle=0,
    last=60,
    cuts={1},
    lost=set(),
    run_bytes=1,
    chunk=9,
)
@example(
    items=[Item(0, 1, 0), Item(0, 6, 1), Item(0, 9, 1), Item(0, 5, 0)],
    middle=0,
    last=60,
    cuts={2},
    lost=set(),
    run_bytes=1,
    chunk=9,
)
def test_two_passes_are_one_sequencer(
    items: list[Item],
    middle: int,
    last: int,
    cuts: set[int],
    lost: set[int],
    run_bytes: int,
    chunk: int,
) -> None:
    """From any checkpoint, to any end, over any runs: the same messages and the same checkpoint."""
    envelopes = envelopes_of(items)
    count = len(envelopes)
    middle, last = min(middle, count), max(min(middle, count), min(last, count))
    begin = envelopes[middle].begin if middle < count else (envelopes[-1].end if count else 0)
    end = envelopes[last - 1].end if last else 0
    prior: SourceCheckpoint | None = None
    if middle:
        _, prior = sequenced(envelopes, None, 0, begin)
    # Fragments that were deleted: behind what the checkpoint still needs.
    kept = [e for at, e in enumerate(envelopes) if at not in lost or at < middle]
    want, checkpoint = sequenced(kept, prior, begin, max(begin, end))

    bounds = sorted({0, *(cut for cut in cuts if cut < count), count})
    pieces: list[Piece] = []
    for low, high in itertools.pairwise(bounds):
        for at in range(low, high):
            envelope = envelopes[at]
            if envelope not in kept:
                continue
            if at > low and pieces and pieces[-1].end == envelope.begin:
                pieces[-1] = Piece(pieces[-1].begin, envelope.end)
            else:
                pieces.append(Piece(envelope.begin, envelope.end))
    snapshot = snapshot_of(pieces, begin, max(begin, end), prior)
    history = History(kept, chunk)
    folded = history.folded(snapshot, run_bytes)
    assert folded.sources[JOURNAL] == checkpoint
    assert history.committed(folded) == sorted(e.begin for e in want if not e.is_ack)


def snapshot_of(
    pieces: Sequence[Piece], begin: int, end: int, prior: SourceCheckpoint | None
) -> Snapshot:
    producers = {} if prior is None else prior.producers
    journal = JournalSnapshot(JOURNAL, MessageFormat(), begin, end, (), producers)
    held = cover(pieces, journal.pieces_begin, end)
    return Snapshot((JournalSnapshot(JOURNAL, MessageFormat(), begin, end, held, producers),))


def test_a_transaction_whose_begin_is_lost_does_not_commit_without_it() -> None:
    """As the sequencer's replay, which finds out when the acknowledgement comes, and not before."""
    envelopes = envelopes_of(
        [Item(0, 5, ACK_TXN), Item(0, 6, 1), Item(0, 7, 1), Item(0, 8, 1), Item(0, 9, ACK_TXN)]
    )
    _, prior = sequenced(envelopes, None, 0, envelopes[2].end)
    pieces = [Piece(e.begin, e.end) for e in envelopes if e.clock != 6]
    history = History([e for e in envelopes if e.clock != 6], 10)
    begin = envelopes[2].end
    pending = history.folded(snapshot_of(pieces, begin, envelopes[3].end, prior), 1)
    assert pending.sources[JOURNAL].producers == {
        envelopes[0].producer: ProducerState(5, envelopes[1].begin)
    }
    assert pending.open == {JOURNAL: (envelopes[0].producer,)}
    with raises(Corrupt, journal="a/journal", producer="010000000000", begin=8):
        history.folded(snapshot_of(pieces, begin, envelopes[4].end, prior), 1)
    # Rolled back, it does not matter.
    rolled_back = [*envelopes[:4], envelopes[4].__class__(*_fields(envelopes[4], clock=5))]
    history = History([e for e in rolled_back if e.clock != 6], 10)
    folded = history.folded(snapshot_of(pieces, begin, envelopes[4].end, prior), 1)
    assert history.committed(folded) == []
    assert folded.open == {}


def _fields(envelope: Envelope[Any], *, clock: int) -> tuple[Any, ...]:
    return (
        envelope.journal,
        envelope.begin,
        envelope.end,
        envelope.message,
        envelope.producer,
        clock,
        envelope.flags,
    )


@settings(max_examples=examples(800), deadline=None)
@given(
    items=histories,
    cuts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    chunk=st.integers(1, 9),
)
@example(
    # What is pending in the second part begins after a repetition of what the first one has committed.
    items=[Item(0, 1, 0), Item(0, 4, ACK_TXN), Item(0, 3, 1), Item(0, 6, 1)],
    cuts=[2],
    chunk=9,
)
def test_summaries_of_parts_combine(items: list[Item], cuts: list[int], chunk: int) -> None:
    """To the very summary of the whole, wherever it is cut."""
    envelopes = envelopes_of(items)
    if not envelopes:
        return
    history = History(envelopes, chunk)

    def summary(begin: int, end: int) -> tuple[Run, Summary]:
        run = Run(JOURNAL, MessageFormat(), 0, (Piece(begin, end),), begin)
        return run, history.summary(run)

    bounds = sorted({0, len(items), *(min(cut, len(items)) for cut in cuts)})
    offsets = [e.begin for e in envelopes] + [envelopes[-1].end]
    total: Summary | None = None
    for low, high in itertools.pairwise(bounds):
        run, part = summary(offsets[low], offsets[high])

        def beyond(producer: int, clock: int, run: Run = run) -> int:
            return first_beyond(run, history.columns(run), producer, clock)

        total = part if total is None else combine(total, part, beyond)
    assert total == summary(0, offsets[-1])[1]
