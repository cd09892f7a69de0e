"""The sequencer's outcomes, replays and checkpoints, case by case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gazette.errors import Bug, Corrupt
from gazette.message.envelope import Envelope
from gazette.message.sequencer.sequencer import QueueOutcome, ReplayRange, Sequencer
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    NIL_PRODUCER,
    OUTSIDE_TXN,
    clock_at,
    clock_span,
)
from gazette.protocol.checkpoint import ProducerState, SourceCheckpoint

JOURNAL = "a/journal"
A, B, C = b"\x01aaaaa", b"\x01bbbbb", b"\x01ccccc"
HOUR_NS = 3600 * 10**9


def step(story: Story) -> Envelope[Any]:
    envelope = story.sequencer.step()
    assert envelope is not None
    return envelope


class Story:
    """A journal being written and read: each call appends one message of ten bytes and queues it."""

    def __init__(self, ring: int = 16, sources: Any = None, offset: int = 0) -> None:
        self.sequencer: Sequencer[Any] = Sequencer(sources or {}, ring)
        self.offset = offset
        self.written: list[Envelope[Any]] = []

    def write(self, flags: int, clock: int, producer: bytes = A) -> Envelope[Any]:
        envelope = Envelope(
            JOURNAL, self.offset, self.offset + 10, (clock, flags), producer, clock, flags
        )
        self.offset += 10
        self.written.append(envelope)
        return envelope

    def queue(self, flags: int, clock: int, producer: bytes = A) -> QueueOutcome:
        return self.sequencer.queue(self.write(flags, clock, producer))

    def cont(self, clock: int, producer: bytes = A) -> str:
        return self.queue(CONTINUE_TXN, clock, producer).name

    def ack(self, clock: int, producer: bytes = A) -> str:
        return self.queue(ACK_TXN, clock, producer).name

    def outside(self, clock: int, producer: bytes = A) -> str:
        return self.queue(OUTSIDE_TXN, clock, producer).name

    def between(self, begin: int, end: int) -> list[Envelope[Any]]:
        return [e for e in self.written if begin <= e.begin and e.end <= end]

    def replay(self) -> Any:
        wanted = self.sequencer.replay_range
        assert wanted is not None
        self.sequencer.start_replay(iter([self.between(wanted.begin, wanted.end)]))
        return wanted

    def drain(self) -> list[int]:
        """Return the clocks that are delivered, and require that nothing is left after."""
        clocks = []
        while (envelope := self.sequencer.step()) is not None:
            clocks.append(envelope.clock)
        assert self.sequencer.drain is None
        return clocks

    def state(self, producer: bytes = A) -> tuple[int, int | None]:
        producers = self.sequencer.checkpoint()[JOURNAL].producers
        return producers[producer].last_ack, producers[producer].begin

    @property
    def read_through(self) -> int | None:
        return self.sequencer.offsets.get(JOURNAL)


def test_messages_outside_of_transactions_commit_by_themselves() -> None:
    story = Story()
    assert story.outside(5) == "OUTSIDE_COMMIT"
    # Case: until it was drained, the journal is not read through, and a restart finds it again.
    assert JOURNAL not in story.sequencer.offsets
    assert story.state() == (4, 0)
    assert story.drain() == [5]
    assert (story.read_through, story.state()) == (10, (5, None))
    # Case: repeated, or older.
    assert story.outside(5) == "OUTSIDE_ALREADY_ACKED"
    assert story.outside(4) == "OUTSIDE_ALREADY_ACKED"
    assert (story.read_through, story.state()) == (30, (5, None))
    # Case: flags from the future.
    assert story.queue(0x2AA, 6) is QueueOutcome.OUTSIDE_COMMIT
    assert story.drain() == [6]


def test_a_transaction_is_delivered_when_it_is_acknowledged() -> None:
    story = Story()
    assert story.cont(5) == "CONTINUE_BEGIN_SPAN"
    assert story.cont(6) == "CONTINUE_EXTEND_SPAN"
    assert story.cont(6) == "CONTINUE_TXN_CLOCK_LARGER"
    assert story.cont(5) == "CONTINUE_TXN_CLOCK_LARGER"
    assert story.drain() == []
    assert (story.read_through, story.state()) == (40, (4, 0))
    assert story.ack(7) == "ACK_COMMIT_RING"
    assert story.read_through == 40
    assert story.drain() == [5, 6, 7]
    assert (story.read_through, story.state()) == (50, (7, None))
    assert story.cont(6) == "CONTINUE_ALREADY_ACKED"
    assert story.ack(7) == "ACK_ROLLBACK"
    assert story.sequencer.rewinds == 0
    assert story.ack(8) == "ACK_EMPTY"
    assert story.drain() == [8]


def test_the_first_thing_seen_of_a_producer_may_be_a_duplicate_acknowledgement() -> None:
    """It is delivered, because nothing tells that it was before."""
    story = Story()
    assert story.ack(7) == "ACK_EMPTY"
    assert story.drain() == [7]
    assert story.ack(7) == "ACK_ROLLBACK"


def test_an_acknowledgement_of_before_rolls_back_what_is_pending() -> None:
    story = Story()
    story.cont(5)
    story.ack(6)
    story.drain()
    story.cont(7)
    story.cont(8)
    assert story.sequencer.has_pending
    assert story.ack(6) == "ACK_ROLLBACK"
    assert not story.sequencer.has_pending
    assert story.state() == (6, None)
    # Case: the same clocks may then begin again, as in a batch that was appended twice.
    assert story.cont(7) == "CONTINUE_BEGIN_SPAN"
    assert story.ack(9) == "ACK_COMMIT_RING"
    assert story.drain() == [7, 9]


def test_an_older_acknowledgement_sets_its_producer_back() -> None:
    """It lost state: what it now sends again is new to it, and must not be dropped."""
    story = Story()
    story.cont(5)
    story.ack(9)
    story.drain()
    assert story.ack(3) == "ACK_ROLLBACK"
    assert story.sequencer.rewinds == 1
    assert story.state() == (3, None)
    assert story.cont(5) == "CONTINUE_BEGIN_SPAN"
    story.ack(6)
    assert story.drain() == [5, 6]


def test_an_acknowledgement_commits_only_what_it_covers() -> None:
    story = Story()
    for clock in (5, 6, 8, 9):
        story.cont(clock)
    assert story.ack(7) == "ACK_COMMIT_RING"
    assert story.drain() == [5, 6, 7]
    assert story.state() == (7, None)
    assert story.cont(8) == "CONTINUE_BEGIN_SPAN"


def test_a_message_outside_of_transactions_discards_an_open_one() -> None:
    story = Story()
    story.cont(5)
    story.cont(6)
    assert story.outside(7) == "OUTSIDE_COMMIT"
    assert story.sequencer.clobbers == 1
    assert story.drain() == [7]
    assert not story.sequencer.has_pending
    # Case: a duplicate does not.
    story.cont(8)
    assert story.outside(7) == "OUTSIDE_ALREADY_ACKED"
    story.ack(9)
    assert story.drain() == [8, 9]


def test_messages_without_a_clock_always_commit_and_are_not_remembered() -> None:
    story = Story()
    story.cont(5)
    for flags in (OUTSIDE_TXN, CONTINUE_TXN, ACK_TXN):
        assert story.queue(flags, 0, NIL_PRODUCER) is QueueOutcome.OUTSIDE_COMMIT
        assert story.drain() == [0]
    assert story.read_through == 40
    assert set(story.sequencer.checkpoint()[JOURNAL].producers) == {A}
    story.ack(6)
    assert story.drain() == [5, 6]


def test_what_the_ring_has_dropped_is_replayed() -> None:
    story = Story(ring=3)
    story.cont(1, B)
    for clock in (5, 6, 7):
        story.cont(clock)
    # Case: A fills the ring, and B is not in it any more.
    assert story.ack(2, B) == "ACK_COMMIT_REPLAY"
    assert story.sequencer.replay_range == ReplayRange(JOURNAL, 0, 40)
    with pytest.raises(Bug):
        story.sequencer.step()
    story.replay()
    assert story.drain() == [1, 2]
    # Case: of A, five was overwritten by B's acknowledgement, and six by its own.
    assert story.ack(8) == "ACK_COMMIT_REPLAY"
    assert story.replay() == (JOURNAL, 10, 30)
    assert story.drain() == [5, 6, 7, 8]


def test_a_ring_of_one_replays_everything() -> None:
    story = Story(ring=0)
    story.cont(5)
    story.cont(6)
    assert story.ack(7) == "ACK_COMMIT_REPLAY"
    assert story.replay() == (JOURNAL, 0, 20)
    assert story.drain() == [5, 6, 7]


def test_queueing_duplicates_drops_from_a_full_ring_too() -> None:
    """Every message makes room before it is looked at, whether or not it is added."""
    story = Story(ring=2)
    story.cont(5)
    story.cont(6)
    assert story.cont(6) == "CONTINUE_TXN_CLOCK_LARGER"
    assert story.ack(7) == "ACK_COMMIT_REPLAY"
    assert story.replay() == (JOURNAL, 0, 10)
    assert story.drain() == [5, 6, 7]


def test_duplicates_in_a_replay_are_dropped() -> None:
    story = Story(ring=1)
    for clock in (5, 6, 5, 6, 7, 6):
        story.cont(clock)
    story.cont(99, B)
    story.ack(8)
    story.replay()
    assert story.drain() == [5, 6, 7, 8]


def test_messages_without_a_clock_are_not_repeated_by_a_replay() -> None:
    """They took effect when they were read, whosever producer they name."""
    story = Story(ring=1)
    story.cont(5)
    story.outside(0)
    assert story.drain() == [0]
    story.cont(6)
    story.ack(7)
    story.replay()
    assert story.drain() == [5, 6, 7]


def test_a_replay_drops_what_queueing_dropped() -> None:
    """A smaller clock behind a greater one is a duplicate, even if the greater is not covered."""
    story = Story(ring=1)
    story.cont(5)
    story.cont(9)
    assert story.cont(7) == "CONTINUE_TXN_CLOCK_LARGER"
    story.ack(8)
    story.replay()
    assert story.drain() == [5, 8]


def test_a_replay_may_be_fed_piece_by_piece() -> None:
    story = Story(ring=1)
    for clock in (5, 6, 7):
        story.cont(clock)
    story.ack(8)
    pieces = story.between(0, 30)
    sequencer = story.sequencer
    sequencer.feed_replay(pieces[:2])
    assert [e.clock for e in sequencer.dequeue(9)] == [5, 6]
    assert sequencer.dequeue(9) == []
    assert sequencer.drain is not None
    sequencer.feed_replay(pieces[2:])
    assert [e.clock for e in sequencer.dequeue(9)] == [7]
    assert story.state() == (6, 20)
    assert sequencer.dequeue(9) == []
    sequencer.end_replay()
    assert story.drain() == [8]


@pytest.mark.parametrize(
    ("journal", "begin", "end", "text"),
    [
        ("other/journal", 10, 20, "wrong journal"),
        (JOURNAL, 0, 10, "wrong Begin"),
        (JOURNAL, 20, 30, "wrong Begin"),  # The span's first message is gone.
        (JOURNAL, 10, 50, "wrong End"),
    ],
)
def test_a_replay_of_something_else_is_corrupt(
    journal: str, begin: int, end: int, text: str
) -> None:
    story = Story(ring=1)
    story.outside(1)
    story.drain()
    for clock in (5, 6, 7):
        story.cont(clock)
    assert story.ack(8) == "ACK_COMMIT_REPLAY"
    story.sequencer.start_replay(iter([[Envelope(journal, begin, end, None, A, 5, CONTINUE_TXN)]]))
    with pytest.raises(Corrupt, match=text) as caught:
        story.sequencer.step()
    assert caught.value.facts["journal"] == JOURNAL


def test_what_a_replay_raises_is_passed_on() -> None:
    story = Story(ring=1)
    story.cont(5)
    story.cont(6)
    story.ack(7)

    def broken() -> Iterator[Any]:
        yield story.between(0, 10)
        raise Corrupt("reader broke")

    story.sequencer.start_replay(broken())
    assert step(story).clock == 5
    with pytest.raises(Corrupt, match="reader broke"):
        story.sequencer.step()


def test_pending_is_what_began_since_the_last_checkpoint() -> None:
    story = Story()
    story.cont(5)
    assert story.sequencer.has_pending
    story.sequencer.checkpoint()
    assert not story.sequencer.has_pending
    # Case: extending an old one is not pending, its end may be far away.
    story.cont(6)
    assert not story.sequencer.has_pending
    story.cont(1, B)
    assert story.sequencer.has_pending
    story.ack(2, B)
    assert story.sequencer.has_pending
    story.drain()
    assert not story.sequencer.has_pending


def test_a_checkpoint_within_a_sequence_resumes_at_the_rest() -> None:
    story = Story()
    for clock in (5, 6, 7):
        story.cont(clock)
    story.ack(8)
    assert [e.clock for e in story.sequencer.dequeue(2)] == [5, 6]
    # Case: what was dequeued has not taken effect yet.
    assert story.state() == (4, 0)
    story.sequencer.consumed(1)
    assert story.state() == (5, 10)
    assert [e.clock for e in story.sequencer.dequeue(2)] == [6, 7]
    story.sequencer.consumed()
    sources = story.sequencer.checkpoint()
    assert sources[JOURNAL] == SourceCheckpoint(30, {A: ProducerState(7, 30)})
    # Case: another producer goes on with the acknowledgement.
    resumed = Story(sources=sources, offset=30)
    assert resumed.ack(8) == "ACK_COMMIT_REPLAY"
    assert resumed.sequencer.replay_range == (JOURNAL, 30, 30)
    resumed.sequencer.start_replay(iter([]))
    assert resumed.drain() == [8]
    # Case: consuming the last message ends the sequence, without another dequeue.
    assert [e.clock for e in story.sequencer.dequeue(9)] == [8]
    story.sequencer.consumed()
    assert story.sequencer.drain is None
    assert story.sequencer.checkpoint()[JOURNAL] == SourceCheckpoint(
        40, {A: ProducerState(8, None)}
    )


def test_duplicates_of_before_a_checkpoint_are_dropped_when_dequeued() -> None:
    """Which clocks were seen is not part of a checkpoint, so queueing cannot tell."""
    story = Story()
    story.cont(5)
    story.cont(6)
    resumed = Story(sources=story.sequencer.checkpoint(), offset=20)
    resumed.written = story.written
    assert resumed.cont(5) == "CONTINUE_EXTEND_SPAN"
    assert resumed.cont(6) == "CONTINUE_EXTEND_SPAN"
    assert resumed.cont(7) == "CONTINUE_EXTEND_SPAN"
    assert resumed.ack(8) == "ACK_COMMIT_REPLAY"
    assert resumed.replay() == (JOURNAL, 0, 20)
    assert resumed.drain() == [5, 6, 7, 8]


def test_a_batch_may_make_a_run_ready_and_take_effect_in_part() -> None:
    story = Story()
    batch = [
        story.write(OUTSIDE_TXN, 5),
        story.write(OUTSIDE_TXN, 1, B),
        story.write(OUTSIDE_TXN, 6),
        story.write(OUTSIDE_TXN, 6),  # A duplicate ends the run.
        story.write(CONTINUE_TXN, 7),
        story.write(CONTINUE_TXN, 8),
        story.write(ACK_TXN, 9),
        story.write(OUTSIDE_TXN, 2, B),
    ]
    sequencer = story.sequencer
    assert sequencer.queue_batch(batch) == 3
    assert len(sequencer.dequeue(100)) == 3
    sequencer.consumed(2)
    assert sequencer.checkpoint()[JOURNAL] == SourceCheckpoint(
        20, {A: ProducerState(5, None), B: ProducerState(1, None)}
    )
    assert [e.clock for e in sequencer.dequeue(100)] == [6]
    assert sequencer.dequeue(100) == []
    assert sequencer.queue_batch(batch, 3) == 7
    assert [e.clock for e in sequencer.dequeue(100)] == [7, 8, 9]
    assert sequencer.dequeue(100) == []
    assert sequencer.queue_batch(batch, 7) == 8
    assert story.drain() == [2]
    assert sequencer.outcomes[JOURNAL, OUTSIDE_TXN, QueueOutcome.OUTSIDE_COMMIT] == 4
    assert sequencer.outcomes[JOURNAL, ACK_TXN, QueueOutcome.ACK_COMMIT_RING] == 1


def test_nothing_is_queued_during_a_drain() -> None:
    story = Story()
    story.outside(5)
    late = story.write(OUTSIDE_TXN, 6)
    for refused in (
        lambda: story.sequencer.queue(late),
        lambda: story.sequencer.queue_batch([late]),
        lambda: story.sequencer.skip(JOURNAL, 50),
        lambda: story.sequencer.consumed(1),
        lambda: story.sequencer.start_replay(iter([])),
    ):
        with pytest.raises(Bug):
            refused()
    assert story.drain() == [5]
    with pytest.raises(Bug):
        story.sequencer.end_replay()


def test_skipped_bytes_are_read_through() -> None:
    story = Story()
    story.outside(5)
    story.drain()
    story.sequencer.skip(JOURNAL, 33)
    assert story.sequencer.checkpoint()[JOURNAL].read_through == 33


NOW_NS = 1_700_000_000 * 10**9
NOW = clock_at(NOW_NS)
HORIZON_NS = 24 * HOUR_NS


def hours(number: float) -> int:
    return clock_span(int(number * HOUR_NS))


def producers_of(story: Story, horizon_ns: int = HORIZON_NS, now_ns: int = NOW_NS) -> set[bytes]:
    """Return the producers in a checkpoint of the story."""
    return set(story.sequencer.checkpoint(horizon_ns, now_ns)[JOURNAL].producers)


def producers_after(
    story: Story, begin_h: int, end_h: int, producer: bytes = A, horizon_ns: int = HORIZON_NS
) -> set[bytes]:
    """Have a producer write each hour, with a checkpoint after it. Return the producers in the last one."""
    producers = set[bytes]()
    for hour in range(begin_h, end_h + 1):
        story.outside(NOW + hours(hour), producer)
        story.drain()
        producers = producers_of(story, horizon_ns, NOW_NS + hour * HOUR_NS)
    return producers


def test_producers_that_were_silent_for_the_horizon_are_forgotten() -> None:
    story = Story()
    story.outside(NOW - hours(25), B)
    story.drain()
    assert producers_of(story) == {B}
    assert producers_after(story, -24, -1) == {A, B}
    assert producers_of(story, 0) == {A, B}
    assert producers_after(story, 0, 0, horizon_ns=26 * HOUR_NS) == {A, B}
    assert producers_of(story) == {A}
    # Case: a forgotten producer is new.
    assert story.outside(NOW - hours(25), B) == "OUTSIDE_COMMIT"


def test_a_producer_that_wrote_since_the_last_checkpoint_is_not_forgotten() -> None:
    """Messages of 30 hours, read in one transaction: only the next one finds that B was silent."""
    story = Story()
    story.outside(NOW - hours(30), B)
    story.drain()
    story.outside(NOW)
    story.drain()
    assert producers_of(story) == {A, B}
    assert producers_after(story, 1, 24) == {A, B}
    assert producers_after(story, 25, 25) == {A}


def test_a_silence_of_a_day_makes_no_open_transaction_old() -> None:
    """Publishers write once a night: one acknowledges while the transaction of another is open."""
    story = Story()
    for producer in (A, B):
        story.outside(NOW, producer)
        story.drain()
    assert producers_of(story) == {A, B}
    story.cont(NOW + hours(25), B)
    assert producers_of(story, now_ns=NOW_NS + 25 * HOUR_NS) == {A, B}
    story.outside(NOW + hours(25.1))
    story.drain()
    assert producers_of(story, now_ns=NOW_NS + 26 * HOUR_NS) == {A, B}
    assert story.ack(NOW + hours(25.2), B) == "ACK_COMMIT_RING"


def test_a_clock_that_was_far_ahead_makes_no_other_producer_old_later() -> None:
    """It is 30 hours ahead, and counts once the clock of the member is 6 hours later."""
    story = Story()
    story.outside(NOW + hours(30))
    story.drain()
    assert producers_after(story, 0, 0, C) == {A, C}
    producers_after(story, 1, 5, C)
    story.cont(NOW + hours(5.9), B)
    assert producers_after(story, 6, 7, C) == {A, B, C}
    assert story.ack(NOW + hours(8), B) == "ACK_COMMIT_RING"


def test_a_clock_a_day_ahead_may_count_in_every_other_checkpoint() -> None:
    story = Story()
    story.cont(NOW, B)
    story.outside(NOW, C)
    story.drain()
    for minute in range(60):
        now_ns = NOW_NS + minute * HOUR_NS // 60
        story.outside(clock_at(now_ns + 24 * HOUR_NS + 10**9))
        story.drain()
        assert producers_of(story, now_ns=now_ns) == {A, B, C}
        assert producers_of(story, now_ns=now_ns + 2 * 10**9) == {A, B, C}
    assert story.ack(NOW + hours(2), B) == "ACK_COMMIT_REPLAY"


def test_a_clock_of_the_member_that_is_set_right_makes_no_producer_old() -> None:
    story = Story()
    story.cont(NOW, B)
    story.outside(NOW)
    story.drain()
    assert producers_of(story, now_ns=0) == {A, B}
    assert producers_of(story) == {A, B}
    # Case: it was ahead. Time passes all the same.
    assert producers_of(story, now_ns=NOW_NS * 2) == {A, B}
    assert producers_after(story, 1, 26) == {A}


def test_few_producers_that_have_ended_are_remembered() -> None:
    """Each writes once a day, and is another one each time. Some clocks are years ahead."""
    story, producers = Story(), set[bytes]()
    for day in range(200):
        ahead = hours(24 * 1000) if day % 3 else 0
        story.cont(NOW + day * hours(24) + ahead, bytes([1, 0, 0, 0, 1, day]))
        story.outside(NOW + day * hours(24) + 160, bytes([1, 0, 0, 0, 2, day]))
        story.drain()
        producers = producers_of(story, now_ns=NOW_NS + 24 * day * HOUR_NS)
        assert len(producers) <= 2 * 27
    assert producers


@pytest.mark.parametrize("ahead_h", [0, -30, 24 * 1000])
def test_few_producers_are_remembered_although_the_shard_is_restarted(ahead_h: int) -> None:
    """It restarts every 12 hours. A script publishes once an hour, each time as another producer."""
    story, producers = Story(), set[bytes]()
    for hour in range(240):
        if hour % 12 == 0:
            sources = story.sequencer.checkpoint(HORIZON_NS, NOW_NS + hour * HOUR_NS)
            story.sequencer = Sequencer(sources, 16)
        story.outside(NOW + hours(hour + ahead_h), bytes([1, 0, 0, 0, 1, hour]))
        story.drain()
        producers = producers_after(story, hour, hour)
        assert len(producers) <= 2 + 26
    # Case: clocks differ. What was restored is remembered for an hour at least.
    sources = story.sequencer.checkpoint(HORIZON_NS, NOW_NS + 240 * HOUR_NS)
    story.sequencer = Sequencer(sources, 16)
    assert producers_after(story, 240, 240) == producers | {A}
    for minute in range(1, 60):
        story.outside(NOW + hours(240 + minute / 60))
        story.drain()
        now_ns = NOW_NS + 240 * HOUR_NS + minute * HOUR_NS // 60
        assert producers_of(story, now_ns=now_ns) == producers | {A}


def test_a_clock_years_ahead_makes_no_other_producer_old() -> None:
    years = hours(24 * 365 * 50)
    story = Story()
    story.outside(NOW, B)
    story.drain()
    assert producers_of(story) == {B}
    story.outside(NOW + years)
    story.drain()
    assert producers_of(story) == {A, B}
    # Case: it is forgotten as others are.
    assert producers_after(story, 1, 25, B) == {B}


def test_a_producer_is_as_young_as_its_newest_message_even_if_pending() -> None:
    story = Story()
    story.outside(NOW - hours(30), B)
    story.drain()
    assert producers_of(story) == {B}
    story.cont(NOW - hours(10), B)
    story.outside(NOW)
    story.drain()
    assert producers_of(story) == {A, B}


def test_a_producer_that_was_restored_is_as_young_as_the_next_checkpoint() -> None:
    """It committed a day ago, and publishes one transaction a day."""
    story = Story()
    story.outside(NOW - hours(24), B)
    story.drain()
    story.outside(NOW - hours(0.5))
    story.drain()
    story.cont(NOW - hours(0.25), B)
    story.sequencer = Sequencer(story.sequencer.checkpoint(HORIZON_NS, NOW_NS), 16)
    story.outside(NOW + hours(1))
    story.drain()
    assert producers_of(story) == {A, B}
    # Case: it never ends.
    assert producers_after(story, 2, 26) == {A}


@pytest.mark.parametrize("days", [2, -2, 20_000, -10_000])
def test_the_clock_of_one_publisher_costs_no_message_of_others(days: int) -> None:
    """The clock of a machine is days ahead, or late. A shard commits within a transaction."""
    for usual, other in ((A, B), (B, A)):
        story = Story()
        clocks = {usual: NOW, other: NOW + days * hours(24)}
        for pending, done in ((usual, other), (other, usual)):
            first = clocks[pending]
            story.cont(first, pending)
            story.outside(clocks[done], done)
            story.drain()
            assert producers_of(story) == {A, B}
            story.cont(first + 160, pending)
            story.outside(clocks[done] + 160, done)
            story.drain()
            assert producers_of(story) == {A, B}
            assert story.ack(first + 320, pending) == "ACK_COMMIT_RING"
            assert story.drain() == [first, first + 160, first + 320]
            assert producers_of(story) == {A, B}
            # Case: the append was unclear, and is repeated.
            assert story.cont(first + 160, pending) == "CONTINUE_ALREADY_ACKED"
            clocks = {producer: clock + 1600 for producer, clock in clocks.items()}


def test_a_producer_whose_messages_are_being_delivered_is_not_forgotten() -> None:
    """Its transaction lasted for 30 hours, and is consumed in several of a shard's."""
    clocks = [NOW - hours(30), NOW - hours(15), NOW, NOW + 160]
    story = Story()
    for clock in clocks[:-1]:
        story.cont(clock)
    story.ack(clocks[-1])
    for index, clock in enumerate(clocks):
        assert step(story).clock == clock
        state = story.sequencer.checkpoint(HORIZON_NS, NOW_NS)[JOURNAL].producers[A]
        assert state.begin == index * 10
    assert story.drain() == []


def test_small_clocks_do_not_make_every_producer_old() -> None:
    """The bound does not wrap around below zero."""
    story = Story()
    story.outside(5)
    story.drain()
    story.cont(6, B)
    assert set(story.sequencer.checkpoint(24 * HOUR_NS)[JOURNAL].producers) == {A, B}


def test_a_checkpoint_keeps_journals_that_nothing_was_read_of() -> None:
    sources = {"other/journal": SourceCheckpoint(123, {A: ProducerState(9, 100)})}
    story = Story(sources=sources)
    story.outside(5)
    assert story.sequencer.checkpoint() == {
        "other/journal": sources["other/journal"],
        JOURNAL: SourceCheckpoint(0, {A: ProducerState(4, 0)}),
    }


def test_outcomes_have_the_labels_of_the_metric() -> None:
    assert [outcome.label for outcome in QueueOutcome] == [
        "outsideAlreadyAcked",
        "outsideCommit",
        "continueAlreadyAcked",
        "continueRingClockLarger",
        "continueBeginSpan",
        "continueExtendSpan",
        "ackRollback",
        "ackEmpty",
        "ackCommitRing",
        "ackCommitReplay",
    ]
