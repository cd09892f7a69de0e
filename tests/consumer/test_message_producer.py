"""Applications that bring the messages of their shards themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gazette import DeadLetter, Envelope, MessageProducer, PoisonPolicy
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardChange
from gazette.consumer.inbox import Feed, Inbox, Messages
from gazette.errors import Bug, Closed, Fenced, GazetteError
from gazette.message.envelope_reader import CommittedReader
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette.protocol.checkpoint import Checkpoint
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from gazette.testing.recovery import LOG
from tests.consumer.apps import CLOCK, PRODUCER, SHARD, Echo, Start, Tally, Word, source_spec
from tests.facts import raises
from tests.support.instant_clock import eventually

MADE_UP = "made/up"
DEAD = "dead/letters"
TARGET = "b/target"


def envelope(index: int, word: str, clock: int = 0, flags: int = 0) -> Envelope[Word]:
    """Return the message at an offset; each takes one."""
    stamp = CLOCK + 160 * clock if clock else 0
    return Envelope(MADE_UP, index, index + 1, Word(word=word), PRODUCER, stamp, flags)


class Brings(Echo, MessageProducer):
    """Brings what it was given, from where the checkpoint says; ends the feed after ``cycle`` messages."""

    def __init__(self, messages: list[Envelope[Word]], cycle: int = 1 << 30) -> None:
        super().__init__(TARGET)
        self.messages = messages
        self.cycle = cycle
        self.starts: list[int] = []
        self.replays = 0

    def begin_of(self, checkpoint: Any) -> int:
        source = checkpoint.sources.get(MADE_UP)
        return 0 if source is None else source.read_through

    def start_reading(self, shard: Any, store: Any, checkpoint: Any, feed: Feed) -> None:
        begin = self.begin_of(checkpoint)
        self.starts.append(begin)
        batch = self.messages[begin : begin + self.cycle]
        feed.put(batch)
        if begin + len(batch) < len(self.messages):
            feed.close()

    def replay(
        self, shard: Any, store: Any, journal: str, begin: int, end: int
    ) -> Iterator[Sequence[Envelope[Word]]]:
        self.replays += 1
        yield self.messages[begin:end]


def test_a_driver_waits_for_an_application_that_is_slow_to_begin(tmp_path: Path) -> None:
    """As it also is on a busy machine: the shard's thread has not begun when the driver looks."""
    looked = threading.Event()

    class Slow(Brings):
        def start_reading(self, *arguments: Any) -> None:
            assert looked.wait(60)
            super().start_reading(*arguments)

    class Driver(AppDriver[Any]):
        def _is_held(self, life: Any) -> bool:
            try:
                return super()._is_held(life)
            finally:
                looked.set()

    with Driver(Slow([envelope(0, "a")]), tmp_path, []) as driver:
        driver.run()
        assert driver.store.read() == {"a": 1}


def test_a_feed_that_ends_begins_again_from_the_checkpoint(tmp_path: Path) -> None:
    words = ["a", "b", "a", "c", "b", "a", "d"]
    application = Brings([envelope(i, word) for i, word in enumerate(words)], cycle=3)
    with AppDriver(application, tmp_path, []) as driver:
        driver.run()
        assert application.starts == [0, 3, 6]
        for _ in range(2):
            assert driver.store.read() == {"a": 3, "b": 2, "c": 1, "d": 1}
            assert [one.word for one in driver.committed(TARGET, Word)] == words
            assert driver.read_through[MADE_UP] == len(words)
            driver.crash()
            driver.run()
    assert application.starts[3] == len(words)


def test_a_crash_after_each_transaction_of_a_feed_that_ends_loses_nothing(tmp_path: Path) -> None:
    words = ["a", "b", "a", "c", "b", "a", "d"]
    for crash_after in range(1, len(words) + 1):
        messages = [envelope(i, word) for i, word in enumerate(words)]
        application = Brings(messages[:crash_after], cycle=2)
        with AppDriver(application, tmp_path / str(crash_after), []) as driver:
            driver.run()
            # What is published next is pending when the process dies.
            driver.journals.holds = lambda journal, content: journal == LOG
            application.messages = messages
            application.cycle = 1
            driver.crash()
            driver.run()
            driver.crash()
            driver.journals.release()
            driver.run()
            assert [one.word for one in driver.committed(TARGET, Word)] == words
            assert sum(driver.store.read().values()) == len(words)


class Forgets(Brings):
    """Its store restores, when the feed has ended, what another owner has committed since."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        store: Any = super().new_store(shard, recorder)
        restore = store.restore_checkpoint
        restored: list[Checkpoint] = []

        def restore_checkpoint(shard: Any) -> Checkpoint:
            restored.append(restore(shard))
            if len(restored) == 1:
                return restored[0]
            return Checkpoint(restored[-1].sources, {TARGET: b"of another owner"})

        store.restore_checkpoint = restore_checkpoint
        return store


def test_a_checkpoint_of_another_owner_ends_the_shard(tmp_path: Path) -> None:
    application = Forgets([envelope(i, "a") for i in range(4)], cycle=2)
    with (
        AppDriver(application, tmp_path, []) as driver,
        raises(Fenced, shard="driven-shard", journal="b/target"),
    ):
        driver.run()


def test_before_its_store_is_restored_again_the_shard_must_still_be_ours(tmp_path: Path) -> None:
    """Restoring may fence the present owner of the shard."""
    application = Brings([envelope(i, "a") for i in range(4)], cycle=2)

    def lost(_: object) -> None:
        raise Closed("the shard has been assigned to another member")

    with AppDriver(application, tmp_path, []) as driver:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("gazette.testing.app_driver._DrivenIO.require_assigned", lost)
            with pytest.raises(Closed, match="another member"):
                driver.run()
        assert application.starts == [0]


def test_messages_with_clocks_are_sequenced_and_replayed(tmp_path: Path) -> None:
    messages = [envelope(0, "a", 1), envelope(1, "a", 1)]
    messages += [envelope(2 + i, f"w{i}", 2 + i, CONTINUE_TXN) for i in range(6)]
    messages += [envelope(8, "", 8, ACK_TXN), envelope(9, "lost", 9, CONTINUE_TXN)]
    application = Brings(messages)
    with AppDriver(application, tmp_path, [], ring_buffer_size=2) as driver:
        driver.run()
        driver.advance(2.0)  # It does not wait longer for an acknowledgement that may be lost.
        assert driver.store.read() == {"a": 1, **{f"w{i}": 1 for i in range(6)}}
    assert application.replays == 1


class Streams(Brings):
    """Brings them from a thread, one by one, as they become known."""

    def __init__(self) -> None:
        super().__init__([])
        self.known = threading.Condition()
        self.ended = threading.Event()
        self.failing: Exception | None = None

    def add(self, *words: str) -> None:
        with self.known:
            self.messages += [envelope(len(self.messages) + i, w) for i, w in enumerate(words)]
            self.known.notify_all()

    def start_reading(self, shard: Any, store: Any, checkpoint: Any, feed: Feed) -> None:
        at = self.begin_of(checkpoint)
        threading.Thread(target=self.stream, args=(at, feed), daemon=True).start()

    def stream(self, at: int, feed: Feed) -> None:
        while not feed.closed:
            if self.failing is not None:
                feed.fail(self.failing)
            with self.known:
                if len(self.messages) <= at:
                    self.known.wait(0.02)
                batch = self.messages[at:]
            try:
                feed.put(batch)
            except Closed:
                break
            at += len(batch)
        self.ended.set()

    def read_through(self, shard: Any, store: Any, offsets: Mapping[str, int]) -> Any:
        return {MADE_UP: len(self.messages)}


async def test_a_member_whose_application_brings_messages(
    start: Start, broker: BrokerFixture
) -> None:
    await broker.create(source_spec(TARGET))
    application = Streams()
    member = await start(application)
    await member.create(shard_spec(SHARD))
    application.add("a", "b", "a")
    # Whatever is asked for, the application says what that means.
    assert await member.read_through(SHARD, {"any/thing": 1}) == {MADE_UP: 3}
    assert member.store(SHARD).read() == {"a": 2, "b": 1}
    await member.stop()
    await eventually(application.ended.is_set)
    second = await start(application, id="consumer-two")
    await second.await_primary(SHARD)
    application.add("c")
    assert await second.read_through(SHARD, {"any/thing": 1}) == {MADE_UP: 4}
    assert second.store(SHARD).read() == {"a": 2, "b": 1, "c": 1}


async def test_messages_that_cannot_be_had_fail_the_shard(
    start: Start, broker: BrokerFixture
) -> None:
    await broker.create(source_spec(TARGET))
    application = Streams()
    application.failing = GazetteError("the other system is gone", hint="Start it.")
    member = await start(application)
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD))])
    assert "the other system is gone" in await member.await_failed(SHARD)
    await eventually(application.ended.is_set)


async def test_a_feed_is_bounded_and_ends_with_its_inbox() -> None:
    inbox = Inbox(1 << 20, asyncio.get_running_loop())
    feed = Feed(inbox, 3)
    with raises(Bug):
        feed.put([envelope(0, "a")])
    await asyncio.to_thread(feed.put, [envelope(0, "a"), envelope(1, "b")])
    await asyncio.to_thread(feed.put, [envelope(2, "c"), envelope(3, "d")])
    waiting = asyncio.get_running_loop().run_in_executor(None, feed.put, [envelope(4, "e")])
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    assert isinstance(inbox.get(0), Messages)
    await asyncio.wait_for(waiting, 60)
    waiting = asyncio.get_running_loop().run_in_executor(None, feed.put, [envelope(5, "f")])
    inbox.stop()
    with pytest.raises(Closed):
        await asyncio.wait_for(waiting, 60)
    assert feed.closed
    feed.close()


async def test_a_feed_that_was_closed_takes_no_more() -> None:
    feed = Feed(Inbox(1 << 20, asyncio.get_running_loop()), 3)
    feed.close()
    feed.close()
    with raises(Closed):
        await asyncio.to_thread(feed.put, [envelope(0, "a")])


def test_other_applications_are_no_producers() -> None:
    assert not isinstance(Tally(), MessageProducer)


class BringsPoison(Streams):
    """Refuses one word, by a policy that keeps dead letters."""

    def poison_policy(self, shard: Any) -> PoisonPolicy:
        return PoisonPolicy(DEAD)

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS words (word TEXT)")

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Any
    ) -> None:
        if envelope.message.word == "poison":
            raise ValueError("not this one")
        store.execute("INSERT INTO words VALUES (?)", (envelope.message.word,))


async def test_a_message_of_no_journal_is_skipped_as_a_dead_letter(
    start: Start, broker: BrokerFixture
) -> None:
    """No broker has its bytes."""
    await broker.create(source_spec(DEAD))
    application = BringsPoison()
    member = await start(application)
    await member.create(shard_spec(SHARD))
    application.add("a", "poison", "b")
    await member.read_through(SHARD, {"any/thing": 1})
    assert member.store(SHARD).query("SELECT word FROM words") == [("a",), ("b",)]
    reader = CommittedReader(broker.client, ReadParams(DEAD), DeadLetter)
    letters = [letter.message async for batch in reader.batches() for letter in batch]
    assert [(each.journal, each.begin, each.end, each.raw, each.cut) for each in letters] == [
        (MADE_UP, 1, 2, b"", False)
    ]
