"""The sequencer against the meaning of a journal's history, computed with unlimited memory.

The oracle knows nothing of rings, replays, batches or checkpoints: it folds a history of
(producer, clock, flag) into the messages that committed and what is still open.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.message.envelope import Envelope, EnvelopeBatch, build_envelopes
from gazette.message.sequencer.sequencer import Sequencer
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, clock_at
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint

JOURNAL = "a/journal"


class Item(NamedTuple):
    producer: int
    clock: int
    flags: int


@dataclass
class OracleProducer:
    acked: int
    open: list[Envelope[Any]] = field(default_factory=list)


@dataclass
class Oracle:
    """What a history means."""

    delivered: list[Envelope[Any]] = field(default_factory=list)
    producers: dict[bytes, OracleProducer] = field(default_factory=dict)
    end: int = 0

    def read(self, envelope: Envelope[Any]) -> None:
        self.end = envelope.end
        if envelope.clock == 0:
            self.delivered.append(envelope)
            return
        state = self.producers.setdefault(envelope.producer, OracleProducer(envelope.clock - 1))
        if envelope.flags == CONTINUE_TXN:
            newest = max([state.acked, *(e.clock for e in state.open)])
            if envelope.clock > newest:
                state.open.append(envelope)
        elif envelope.flags == ACK_TXN:
            if envelope.clock > state.acked:
                covered = [e for e in state.open if e.clock <= envelope.clock]
                self.delivered += covered
                if envelope.clock not in {e.clock for e in covered}:
                    self.delivered.append(envelope)
            state.open, state.acked = [], envelope.clock
        elif envelope.clock > state.acked:
            self.delivered.append(envelope)
            state.open, state.acked = [], envelope.clock

    @property
    def checkpoint(self) -> SourceCheckpoint:
        return SourceCheckpoint(
            self.end,
            {
                producer: ProducerState(state.acked, state.open[0].begin if state.open else None)
                for producer, state in self.producers.items()
            },
        )


def history_of(items: list[Item], journal: str = JOURNAL) -> list[Envelope[Any]]:
    """Return envelopes of uneven length, with now and then a gap between them (bytes that were skipped)."""
    envelopes, offset = [], 0
    for number, item in enumerate(items):
        begin = offset + (7 if number % 5 == 4 else 0)
        offset = begin + 10 + number % 3
        producer = bytes([1, 0, 0, 0, 0, item.producer])
        envelopes.append(Envelope(journal, begin, offset, number, producer, item.clock, item.flags))
    return envelopes


def replay(history: list[Envelope[Any]], sequencer: Sequencer[Any], piece: int) -> None:
    """Start the replay that a sequencer asks for, if it does."""
    wanted = sequencer.replay_range
    if wanted is not None:
        found = [
            e
            for e in history
            if e.journal == wanted.journal and wanted.begin <= e.begin and e.end <= wanted.end
        ]
        sequencer.start_replay(iter([found[at : at + piece] for at in range(0, len(found), piece)]))


any_item = st.builds(
    Item,
    producer=st.integers(0, 3),
    clock=st.integers(0, 12),
    flags=st.sampled_from([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN, ACK_TXN, 0x2AA]),
)


def published(rng: random.Random) -> list[Item]:
    """Draw what real publishers write: clocks ascend, and retries repeat batches whole and at once.

    A dead publisher is acknowledged once more (or less) by its successor.
    """
    streams = [_stream(rng, producer) for producer in range(rng.randint(1, 3))]
    items: list[Item] = []
    while streams := [stream for stream in streams if stream]:
        items += rng.choice(streams).pop(0)
    return items


def _stream(rng: random.Random, producer: int) -> list[list[Item]]:
    batches: list[list[Item]] = [[]]
    clock, acked = 100, 0
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(["transaction", "transaction", "outside", "outside", "rollback"])
        if kind == "outside":
            for _ in range(rng.randint(1, 6)):
                clock += rng.randint(1, 2)
                batches[-1].append(Item(producer, clock, OUTSIDE_TXN))
            acked = clock
        else:
            for _ in range(rng.randint(0, 6)):
                clock += rng.randint(1, 2)
                batches[-1].append(Item(producer, clock, CONTINUE_TXN))
                if rng.random() < 0.4:
                    batches.append([])
            if kind == "transaction":
                clock += 1
                acked = clock
            if acked:
                batches[-1].append(Item(producer, acked, ACK_TXN))
        if rng.random() < 0.5:
            batches.append([])
    if acked > 101 and rng.random() < 0.5:
        batches.append([Item(producer, acked - rng.randint(0, 2), ACK_TXN)])
    return [batch * rng.choice([1, 1, 2, 3]) for batch in batches if batch]


histories = st.one_of(
    st.lists(any_item, max_size=40),
    st.integers(0, 2**32).map(lambda seed: published(random.Random(seed))),
)


@settings(max_examples=400, deadline=None)
@given(
    items=histories,
    ring=st.integers(1, 12),
    piece=st.integers(1, 5),
    limit=st.integers(1, 5),
)
def test_any_history_is_delivered_as_it_means(
    items: list[Item], ring: int, piece: int, limit: int
) -> None:
    """Whatever was written, and however small the ring: the same messages in the same order."""
    history = history_of(items)
    sequencer: Sequencer[Any] = Sequencer({}, ring)
    oracle, delivered = Oracle(), list[Envelope[Any]]()
    for envelope in history:
        oracle.read(envelope)
        sequencer.queue(envelope)
        replay(history, sequencer, piece)
        while batch := sequencer.dequeue(limit):
            delivered += batch
        assert sequencer.drain is None
        assert delivered == oracle.delivered
        assert sequencer.checkpoint() == {JOURNAL: oracle.checkpoint}


@settings(max_examples=400, deadline=None)
@given(
    items=histories,
    ring=st.integers(1, 12),
    limit=st.integers(1, 7),
    cuts=st.sets(st.integers(0, 60)),
    journals=st.integers(1, 2),
)
def test_batches_are_queued_as_single_messages_are(
    items: list[Item], ring: int, limit: int, cuts: set[int], journals: int
) -> None:
    """The fast path: same deliveries, outcomes, replays and checkpoints as the slow one."""
    history = history_of(items)
    history = [
        Envelope(f"a/journal/{n * journals // 7 % journals}", e.begin, e.end, n, *_uuid(e))
        for n, e in enumerate(history)
    ]
    bounds = [0, *sorted(cut for cut in cuts if cut < len(history)), len(history)]
    assert_queued_alike(history, bounds, ring, limit)


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(any_item, max_size=12),
    first=st.integers(0, 14),
    steps=st.lists(st.integers(1, 2), min_size=5, max_size=12),
    odd=st.dictionaries(st.integers(1, 12), st.sampled_from([CONTINUE_TXN, ACK_TXN]), max_size=2),
    after=st.lists(any_item, max_size=12),
    limit=st.integers(1, 20),
)
def test_a_run_is_queued_as_its_messages_are(
    before: list[Item],
    first: int,
    steps: list[int],
    odd: dict[int, int],
    after: list[Item],
    limit: int,
) -> None:
    """Whatever of the run was seen before, and whatever its producer has pending. Transactions in the
    middle end it.
    """
    clocks = itertools.accumulate(steps, initial=first)
    run = [Item(1, clock, odd.get(at, OUTSIDE_TXN)) for at, clock in enumerate(clocks)]
    history = history_of([*before, *run, *after])
    bounds = [0, len(before), len(history) - len(after), len(history)]
    outside = not any(item.flags for item in run)
    assert decoded(history[bounds[1] : bounds[2]]).is_run == (first > 0 and outside)
    assert_queued_alike(history, bounds, 5, limit)


def assert_queued_alike(
    history: list[Envelope[Any]], bounds: list[int], ring: int, limit: int
) -> None:
    """Assert that batches between ``bounds`` have the effect of single messages."""
    slow, fast = Sequencer[Any]({}, ring), Sequencer[Any]({}, ring)
    by_one: list[Envelope[Any]] = []
    ranges: list[object] = []
    for envelope in history:
        slow.queue(envelope)
        ranges += [slow.replay_range] if slow.replay_range else []
        replay(history, slow, 3)
        while step := slow.step():
            by_one.append(step)
    by_batch: list[Envelope[Any]] = []
    fast_ranges: list[object] = []
    for begin, end in itertools.pairwise(bounds):
        batch, index = decoded(history[begin:end]), 0
        while index < len(batch):
            index = fast.queue_batch(batch, index)
            fast_ranges += [fast.replay_range] if fast.replay_range else []
            replay(history, fast, 3)
            while committed := fast.dequeue(limit):
                by_batch += committed
    assert by_batch == by_one
    assert fast_ranges == ranges
    assert fast.outcomes == slow.outcomes
    assert (fast.rewinds, fast.clobbers) == (slow.rewinds, slow.clobbers)
    assert fast.has_pending == slow.has_pending
    assert fast.checkpoint() == slow.checkpoint()


def test_a_batch_to_which_messages_were_added_is_no_run() -> None:
    """Even a repeated message: as a run, it would be delivered twice."""
    run = decoded(history_of([Item(1, clock, OUTSIDE_TXN) for clock in range(5, 15)]))
    assert run.is_run
    run += run[-2:]
    assert not run.is_run
    assert_queued_alike([*run], [0, len(run)], 5, 20)
    sequencer = Sequencer[Any]({}, 5)
    assert sequencer.queue_batch(run) == 10
    assert len(sequencer.dequeue(100)) == 10


def decoded(batch: list[Envelope[Any]]) -> EnvelopeBatch[Any]:
    """Return the batch as decoders give it, whose batches know a run. They read one journal each."""
    if len({e.journal for e in batch}) != 1:
        return EnvelopeBatch(batch)
    uuids = b"".join(build_uuid(*_uuid(e)) for e in batch)
    begins, ends = [e.begin for e in batch], [e.end for e in batch]
    found = build_envelopes(batch[0].journal, begins, ends, [e.message for e in batch], uuids)
    assert found == batch
    return found


def _uuid(envelope: Envelope[Any]) -> tuple[bytes, int, int]:
    return envelope.producer, envelope.clock, envelope.flags


@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_committed_message_takes_effect_once_across_crashes(seed: int) -> None:
    """Transactions end anywhere, also within a sequence; a crash loses what came after the last."""
    rng = random.Random(seed)
    history = history_of(published(rng))
    oracle = Oracle()
    for envelope in history:
        oracle.read(envelope)
    durable: list[Envelope[Any]] = []
    checkpoint: dict[str, SourceCheckpoint] = {}
    crashes = rng.randint(0, 6)
    while True:
        sequencer = Sequencer[Any](checkpoint, rng.randint(1, 8))
        source = checkpoint.get(JOURNAL, SourceCheckpoint())
        unread = [e for e in history if e.begin >= source.read_through]
        running, index, crashed = list(durable), 0, False
        while index < len(unread) and not crashed:
            index = sequencer.queue_batch(unread[: index + rng.randint(1, 9)], index)
            replay(history, sequencer, 2)
            while batch := sequencer.dequeue(rng.randint(1, 4)):
                taken = rng.randint(0, len(batch))
                running += batch[:taken]
                sequencer.consumed(taken)
                if crashes and rng.random() < 0.4:
                    # A transaction commits here; what was dequeued and not consumed is in the next.
                    checkpoint, durable = sequencer.checkpoint(), list(running)
                    if rng.random() < 0.4:
                        crashes, crashed = crashes - 1, True
                        break
        if not crashed:
            break
    assert running == oracle.delivered
    assert not history or sequencer.checkpoint() == {JOURNAL: oracle.checkpoint}


HOUR_NS: Final = 3600 * 10**9
HORIZON_NS: Final = 24 * HOUR_NS
START_NS: Final = 1_700_000_000 * 10**9
OFFSETS_H: Final = (0, 0, 0.1, -0.1, 5, -5, 20, -20, 23.9, 24.1, 30, -30, 48, -48, 40_000, -40_000)
"""Hours by which the clocks of publishers differ from that of the member."""


class Write(NamedTuple):
    """A message, or the repetition of messages, at a time of the member's clock."""

    at_ns: int
    item: Item


def far_clocks(rng: random.Random, steps: int, dead: int) -> list[Write]:
    """Draw what 2 to 4 publishers write whose clocks differ, each at least once in 12 hours while it lives.

    ``dead`` of them have ended, with or without an open transaction, and others write on under new names.
    """
    now_ns, names, writes = START_NS, itertools.count(), list[Write]()
    seats = [_Seat(next(names), rng) for _ in range(rng.randint(2, 4))]
    for _ in range(steps):
        due = [seat for seat in seats if now_ns - seat.wrote_ns > 5 * HOUR_NS]
        now_ns += int(rng.choice([0.001, 0.1, 1, 3 if due else 4]) * HOUR_NS)
        if dead and rng.random() < 0.3:
            dead -= 1
            seats[rng.randrange(len(seats))] = _Seat(next(names), rng)
        for seat in due or [rng.choice(seats)]:
            writes += seat.write(now_ns, rng)
    return writes


class _Seat:
    """A publisher: the number of its producer, and the difference of its clock."""

    def __init__(self, name: int, rng: random.Random) -> None:
        self.name, self.offset_ns = name, int(rng.choice(OFFSETS_H) * HOUR_NS)
        self.wrote_ns = START_NS
        self.clock = self.acked = 0

    def write(self, now_ns: int, rng: random.Random) -> list[Write]:
        self.wrote_ns = now_ns
        items = []
        for _ in range(rng.randint(1, 3)):
            self.clock = max(self.clock + 16, clock_at(now_ns + self.offset_ns))
            flags = rng.choice([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN, ACK_TXN])
            items.append(Item(self.name, self.clock, flags))
        return [Write(now_ns, item) for item in items * rng.choice([1, 1, 2])]


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_far_clocks_cost_no_message_that_comes_within_the_horizon(seed: int) -> None:
    """Whatever the clocks of publishers say, and wherever transactions end: no producer is forgotten while it
    writes at least once in 12 hours. The shard reads at once, or all of it days later."""
    rng = random.Random(seed)
    writes = far_clocks(rng, rng.randint(5, 60), dead=rng.choice([0, 0, 5]))
    history = history_of([write.item for write in writes])
    times = {e.begin: write.at_ns for e, write in zip(history, writes, strict=True)}
    late_ns = rng.choice([0, 0, 100 * HOUR_NS])
    oracle = Oracle()
    for envelope in history:
        oracle.read(envelope)
    checkpoint: dict[str, SourceCheckpoint] = {}
    durable, running = list[Envelope[Any]](), list[Envelope[Any]]()
    crashes, done = rng.randint(0, 4), False
    while not done:
        sequencer = Sequencer[Any](checkpoint, rng.randint(1, 8))
        source = checkpoint.get(JOURNAL, SourceCheckpoint())
        running, done = list(durable), True
        for envelope in [e for e in history if e.begin >= source.read_through]:
            sequencer.queue(envelope)
            replay(history, sequencer, 2)
            while batch := sequencer.dequeue(3):
                running += batch
            if rng.random() < 0.5:
                now_ns = max(times[envelope.begin], late_ns and times[history[-1].begin] + late_ns)
                checkpoint, durable = sequencer.checkpoint(HORIZON_NS, now_ns), list(running)
                if crashes and rng.random() < 0.1:
                    crashes, done = crashes - 1, False
                    break
    assert running == oracle.delivered
