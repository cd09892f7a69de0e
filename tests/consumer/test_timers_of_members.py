"""Timers on members with brokers: fired without messages, and once over fail-overs."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from gazette import Envelope, EventTime, Publisher, TimeDomain, Timer
from gazette.client.read.reader import ReadParams
from gazette.consumer.application import Store
from gazette.consumer.application_name import name_of
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, Tally, Word, append, frame, source_spec
from tests.support.instant_clock import eventually

TARGET = "b/target"


class Reminders(Tally):
    """Sets a timer for each word: soon, or once later words are a minute newer."""

    event_time = EventTime()

    def __init__(self) -> None:
        super().__init__()
        self.mapping = fixed_mapping(TARGET, CONTENT_JSON_LINES)

    def new_store(self, shard: Any, recorder: Any) -> Store:
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS fired (word TEXT)")

    def new_view(self, shard: Any, directory: Any) -> Any:
        return SQLiteStore.view(directory)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        word = envelope.message.word
        if word.startswith("soon"):
            shard.schedule(word, shard.now + timedelta(milliseconds=20))
        else:
            shard.schedule(word, envelope.time + timedelta(minutes=1), domain=TimeDomain.EVENT)

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        store.execute("INSERT INTO fired VALUES (?)", (timer.key,))
        publisher.publish_uncommitted(self.mapping, Word(word=timer.key))


async def fired(member: Any, *words: str) -> None:
    """Wait until these timers, and no others, have fired and committed."""

    def done() -> bool:
        found = member.store(SHARD).query("SELECT word FROM fired ORDER BY rowid")
        return [one for (one,) in found] == list(words)

    await eventually(done)


MINUTES = 60 * 1_000_000
"""Ticks of the clocks of `frame`, in a minute."""


async def test_timers_fire_without_messages(start: Start, broker: BrokerFixture) -> None:
    await broker.create(source_spec(TARGET))
    member = await start(Reminders())
    await member.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("soon", 1), frame("soon too", 2))
    await member.read_to_heads(SHARD)
    await fired(member, "soon", "soon too")


async def test_timers_fire_once_over_fail_overs(start: Start, broker: BrokerFixture) -> None:
    """Check that a standby has the timers, fires none, and goes on after a promotion."""
    await broker.create(source_spec(TARGET))
    one = await start(Reminders())
    await one.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    two = await start(Reminders(), id="consumer-two")
    await two.await_standby(SHARD)
    await append(broker, frame("a", 1), frame("b", MINUTES // 2))
    await one.read_to_heads(SHARD)
    await two.promote(SHARD)
    await append(broker, frame("c", MINUTES + 1))
    await two.read_to_heads(SHARD)
    await fired(two, "a")
    await one.await_standby(SHARD)
    await one.promote(SHARD)
    await append(broker, frame("d", 2 * MINUTES))
    await one.read_to_heads(SHARD)
    await fired(one, "a", "b")
    published = b""
    async with broker.client.retry_reader(ReadParams(TARGET, 0, block=True)) as reader:
        while b'"b"' not in published:
            published += await reader.read()
    words = [json.loads(line).get("word") for line in published.splitlines()]
    assert [word for word in words if word] == ["a", "b"]


async def test_an_application_that_lost_its_timers_is_refused(
    start: Start, broker: BrokerFixture
) -> None:
    """Check that the status of the shard names the class, and what to do."""
    await broker.create(source_spec(TARGET))
    one = await start(Reminders())
    await one.create(shard_spec(SHARD, SOURCE))
    await append(broker, frame("a", 1))
    await one.read_to_heads(SHARD)
    await one.die()

    class Silent(Reminders):
        on_timer = Tally.on_timer  # As if it were not defined.

    silent = Silent()
    silent.application_name = name_of(Reminders())  # type: ignore[misc]
    two = await start(silent, id="consumer-two")
    error = await two.await_failed(SHARD)
    assert "Silent" in error
    assert "on_timer" in error
