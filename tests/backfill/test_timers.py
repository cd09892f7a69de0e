"""Backfills of applications with timers: what a replay fires, what it leaves, and what goes on from there."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import Application, Envelope, EventTime, MessageTime, Source, TimeDomain, Timer
from gazette.errors import NotAllowed
from gazette.history.backfill.build import merge_by_time
from gazette.history.backfill.definition import Backfill, replay
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.uuid import OUTSIDE_TXN, build_uuid, clock_at, clock_unix_ns
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.shard import ShardSpec
from gazette.stores.claims import BackfillClaim
from gazette.stores.sql import SQLStore, create_checkpoint_table, create_engine, create_timer_table
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.state_builder import StateBuilder
from gazette.testing.app_driver import AppDriver
from gazette.testing.stored import json_line
from tests.backfill.apps import Word
from tests.backfill.cluster import Line, line
from tests.backfill.replays import Replay, Story, Subject
from tests.facts import raises

SCHEMA = """
CREATE TABLE IF NOT EXISTS window (at INTEGER PRIMARY KEY, n INTEGER);
CREATE TABLE IF NOT EXISTS final (at INTEGER, n INTEGER);
CREATE TABLE IF NOT EXISTS late (at INTEGER);
"""
WIDTH_US = 16
FIRST = clock_at(1_700_000_000 * 10**9)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Windows(Application[SQLiteStore]):
    """Counts messages in windows of 16 microseconds, which timers of event time close."""

    message_type = Word
    event_time = EventTime(lateness=timedelta(microseconds=40))

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, SCHEMA)

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Word], publisher: Any
    ) -> None:
        at = clock_unix_ns(envelope.clock) // 1000 // WIDTH_US
        left = timedelta(microseconds=WIDTH_US - clock_unix_ns(envelope.clock) // 1000 % WIDTH_US)
        if shard.watermark is not None and envelope.time + left <= shard.watermark:
            store.execute("INSERT INTO late VALUES (?)", (at,))
            return
        store.execute("INSERT INTO window VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1", (at,))
        shard.schedule(str(at), envelope.time + left, domain=TimeDomain.EVENT)

    def on_timer(self, shard: Any, store: SQLiteStore, timer: Timer, publisher: Any) -> None:
        store.execute("INSERT INTO final SELECT * FROM window WHERE at = ?", (int(timer.key),))
        store.execute("DELETE FROM window WHERE at = ?", (int(timer.key),))


class WindowsBackfill(Backfill):
    application = Windows

    def content(self, shard: Any, store: Any) -> Any:
        """Yield rows in an order that does not depend on how journals were interleaved."""
        for table in ("window", "final", "gazette_timer"):
            yield from store.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()


WINDOWS = Subject(Windows, WindowsBackfill(), Word, CONTENT_JSON_LINES, lambda journal: line)
stories = st.builds(
    Story,
    seed=st.integers(0, 1 << 32),
    counts=st.tuples(st.integers(0, 120), st.integers(1, 120)),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    per_fragment=st.integers(1, 30),
    lost=st.integers(0, 2),
    torn=st.booleans(),
    old=st.booleans(),
)


@settings(max_examples=12, report_multiple_bugs=False)
@given(story=stories)
def test_windows_that_were_backfilled_close_as_those_that_were_not(story: Story) -> None:
    """Check rows, timers and checkpoint, over any history, against a shard that consumed everything."""
    with tempfile.TemporaryDirectory(prefix="gazette-timers-") as directory:
        Replay(WINDOWS, story, Path(directory)).check()


class Dated(Word):
    at: int | None = None
    """Time of the message, which is not that of its publication."""


class WindowsOfDated(Windows):
    """The same, by times of the messages."""

    words = Source("words", Dated, time=MessageTime("at", unit="us"))
    # Longer than transactions are pending, so that no message is late.
    event_time = EventTime(lateness=timedelta(microseconds=15_000))

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Any], publisher: Any
    ) -> None:
        message = envelope.message
        assert envelope.time == EPOCH + timedelta(microseconds=message.at)
        at = message.at // WIDTH_US
        left = timedelta(microseconds=WIDTH_US - message.at % WIDTH_US)
        if shard.watermark is not None and envelope.time + left <= shard.watermark:
            store.execute("INSERT INTO late VALUES (?)", (at,))
            return
        store.execute("INSERT INTO window VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1", (at,))
        shard.schedule(str(at), envelope.time + left, domain=TimeDomain.EVENT)


class WindowsOfDatedBackfill(WindowsBackfill):
    application = WindowsOfDated

    def content(self, shard: Any, store: Any) -> Any:
        yield from super().content(shard, store)
        yield from store.execute("SELECT * FROM gazette_event_time").fetchall()
        yield from store.execute("SELECT * FROM late").fetchall()


def dated_lines(journal: str) -> Line:
    """Make lines of times years behind their publication, and not in order.

    All of the first journal is published before the second one, and its times are ahead of those.
    """
    ahead_us = 50_000 if journal == "words/one" else 0
    delay = 0 if journal == "words/one" else 10**6
    numbers = count()

    def line(producer: bytes, clock: int, flags: int = OUTSIDE_TXN, word: str = "") -> bytes:
        number = next(numbers)
        jitter = random.Random(f"{journal} {number}").randrange(-200, 200)
        # The last line of a journal is that of a far clock: it closes all windows.
        at = 10**9 + (10**6 if clock > 10**6 else ahead_us + 100 * number + jitter)
        uuid = build_uuid(producer, FIRST + (clock + delay << 4), flags)
        return json_line({"word": word, "at": at}, uuid)

    return line


DATED = Subject(WindowsOfDated, WindowsOfDatedBackfill(), Dated, CONTENT_JSON_LINES, dated_lines)


@settings(max_examples=12, report_multiple_bugs=False)
@given(story=stories)
def test_windows_by_times_of_messages_close_after_a_backfill_as_without_one(story: Story) -> None:
    """Check the watermark as well: a replay follows the declared times, and keeps them apart by source."""
    with tempfile.TemporaryDirectory(prefix="gazette-timers-") as directory:
        Replay(DATED, story, Path(directory)).check()


class Silences(Application[SQLiteStore]):
    """Counts messages until a word was silent for 50 s, by processing time and by event time."""

    message_type = Word
    event_time = EventTime(lateness=timedelta(seconds=3))

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(
            recorder,
            "CREATE TABLE IF NOT EXISTS open (word TEXT PRIMARY KEY, n INTEGER);"
            "CREATE TABLE IF NOT EXISTS closed (word TEXT, n INTEGER);",
        )

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        for domain in TimeDomain:
            name = f"{domain.name} {envelope.message.word}"
            sql = "INSERT INTO open VALUES (?, 1) ON CONFLICT DO UPDATE SET n = n + 1"
            store.execute(sql, (name,))
            shard.schedule(name, envelope.time + timedelta(seconds=50), domain=domain)

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Any) -> None:
        store.execute("INSERT INTO closed SELECT * FROM open WHERE word = ?", (timer.key,))
        store.execute("DELETE FROM open WHERE word = ?", (timer.key,))


TABLES = ("open", "closed", "gazette_timer", "gazette_event_time")


def content(store: Any) -> list[Any]:
    return [store.execute(f"SELECT * FROM {one} ORDER BY 1").fetchall() for one in TABLES]


def builder(tmp_path: Path, application: Application[Any]) -> StateBuilder:
    spec = ShardSpec("shard-one", recovery_log_prefix="logs", hint_prefix="/hints")
    return StateBuilder(application, spec, tmp_path / "built", random.Random(1))


def test_a_replay_fires_as_the_shard_did(tmp_path: Path) -> None:
    """Check both domains: a message is replayed at the time at which it was published."""
    rng = random.Random(5)
    batches: list[list[Envelope[Any]]] = []

    class Remembers(Silences):
        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            batches.append([envelope])
            super().consume_message(shard, store, envelope, publisher)

    with AppDriver(Remembers(), tmp_path, ["a/source"]) as driver:
        for _ in range(200):
            driver.publish("a/source", Word(word=rng.choice("abcd")))
            driver.run()
            driver.advance(rng.uniform(0.1, 40))
        driver.publish("a/source", Word(word="a"))
        driver.run()
        lived = content(driver.store)
    with builder(tmp_path, Silences()) as built:
        assert built.shard.timers is not None
        replay(Silences(), built.shard, built.store, iter(batches))
        built.finish(Checkpoint())
        assert content(built.store) == lived
        assert len(lived[1]) > 100


def test_a_build_sets_timers_and_has_the_watermark(tmp_path: Path) -> None:
    from gazette.history.backfill.build import observed

    batch = [envelope("a/source", at) for at in (1, 5, 3)]
    with builder(tmp_path, Silences()) as built:
        with raises(NotAllowed, shard="shard-one"):
            _ = built.shard.now
        for one in observed(built.shard, iter([batch])):
            built.shard.schedule("kept", one[1].time, domain=TimeDomain.EVENT)
        assert built.shard.now == batch[1].time
        assert built.shard.watermark == batch[1].time - timedelta(seconds=3)
        built.finish(Checkpoint())
        assert [row[:2] for row in content(built.store)[2]] == [(1, "kept")]
        assert content(built.store)[3] != []


def test_a_build_of_an_application_without_timers_refuses_them(tmp_path: Path) -> None:
    class Plain(Application[SQLiteStore]):
        def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
            return SQLiteStore(recorder)

        def consume_message(self, *_: Any) -> None:
            return None

    with builder(tmp_path, Plain()) as built, raises(NotAllowed, says="Plain", advises="on_timer"):
        built.shard.schedule("a", envelope("a/source", 1).time)


def envelope(journal: str, seconds: int, begin: int = 0) -> Envelope[Word]:
    from gazette.message.uuid import clock_at

    clock = clock_at((1_700_000_000 + seconds) * 10**9)
    return Envelope(journal, begin, begin + 1, Word(), b"\x01" * 6, clock, 0)


def test_journals_are_merged_by_time() -> None:
    """Check that messages of several journals come by time, and each journal in its order."""
    rng = random.Random(3)
    journals: list[list[Envelope[Word]]] = []
    for name in ("a", "b", "c"):
        times = sorted(rng.randrange(5000) for _ in range(300))
        journals.append([envelope(name, at, begin) for begin, at in enumerate(times)])
    journals[2][10], journals[2][11] = journals[2][11], journals[2][10]

    def batches(one: Sequence[Envelope[Word]]) -> Iterator[Sequence[Envelope[Word]]]:
        yield from (one[n : n + 7] for n in range(0, len(one), 7))

    merged = list(chain.from_iterable(merge_by_time([batches(one) for one in journals])))
    for one in journals:
        assert [found for found in merged if found.journal == one[0].journal] == one
    disorder = sum(1 for one, other in pairwise(merged) if one.clock > other.clock)
    assert disorder <= 1


class Rows(Silences):
    """The same in a database."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLStore(self.engine)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        shard.schedule(envelope.message.word, envelope.time + timedelta(seconds=50))

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Any) -> None:
        return None


def test_a_state_in_a_database_is_replaced_with_its_timers(tmp_path: Path) -> None:
    """Check that a build writes timers behind its claim, and removes those of the state before."""
    engine = create_engine(f"sqlite:///{tmp_path}/state.db")
    create_checkpoint_table(engine)
    create_timer_table(engine)
    spec = ShardSpec("shard-one")
    fence = 0
    for number, word in enumerate(("old", "new")):
        with StateBuilder(
            Rows(engine),
            spec,
            tmp_path / word,
            random.Random(1),
            fqn="/test/items/shard-one",
            claim=BackfillClaim(fence, f"token-{word}"),
        ) as built:
            timers = built.shard.timers
            assert timers is not None
            timers.clear()
            timers.begin()
            message = envelope("a/source", number)
            message.message.word = word
            replay(Rows(engine), built.shard, built.store, iter([[message]]))
            built.finish(Checkpoint({"a/source": SourceCheckpoint(number + 1)}))
        with engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT key FROM gazette_timers WHERE domain < 2")
            assert [bytes(key) for (key,) in found] == [word.encode()]
            sql = "SELECT fence FROM gazette_checkpoints WHERE shard_fqn = '/test/items/shard-one'"
            ((fence,),) = connection.exec_driver_sql(sql).all()
    engine.dispose()


class Chains(Application[SQLiteStore]):
    """Sets many timers for one time. Each sets the following one again, for the same time."""

    message_type = Word
    event_time = EventTime()

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS fired (line TEXT)")

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        for number in range(70):
            for domain in TimeDomain:
                shard.schedule(f"{number:02}", envelope.time, domain=domain)

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Any) -> None:
        store.execute("INSERT INTO fired VALUES (?)", (f"{timer.key} {timer.domain.name}",))
        if timer.key < "69":
            following = f"{int(timer.key) + 1:02}"
            shard.schedule(following, timer.at, b"again", domain=timer.domain)


def test_a_replay_fires_timers_that_others_of_their_batch_set_again(tmp_path: Path) -> None:
    with builder(tmp_path, Chains()) as built:
        replay(Chains(), built.shard, built.store, iter([[envelope("a/source", 1)]]))
        built.finish(Checkpoint())
        fired = [line for (line,) in built.store.execute("SELECT line FROM fired").fetchall()]
        assert sorted(fired) == sorted(
            f"{n:02} {one.name}" for n in range(70) for one in TimeDomain
        )
