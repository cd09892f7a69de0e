"""Warnings of callbacks, event loops and processes that stand still for too long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from gazette.client.shards import ShardChange
from gazette.consumer.shard import callback_watch
from gazette.consumer.shard.callback_watch import REPEAT_S, CallbackWatch
from gazette.consumer.transaction.shard_callbacks import RunningCallback
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture
from gazette.testing.clock import ManualClock
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Gate, Start, Tally, append, frame
from tests.support.instant_clock import eventually

LEASE_S = 12.0
LIMIT_S = 4.0


class Watched:
    """A watch over the callbacks of one shard, with a clock that the test moves."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "gazette.consumer.shard.callback_watch")
        self.clock = ManualClock()
        self.watch = CallbackWatch(self.clock, LEASE_S)
        self.running = RunningCallback("shard-one")
        self.watch.add(self.running)
        self._caplog = caplog

    def look_for(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Look as often as the watch would in that time, and call ``each`` before each look."""
        for _ in range(round(seconds / self.watch.interval_s)):
            self.clock.advance(self.watch.interval_s)
            each()
            self.watch.look()

    @property
    def said(self) -> list[str]:
        texts = [one.getMessage() for one in self._caplog.records]
        self._caplog.clear()
        return texts


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Watched:
    return Watched(caplog)


def test_a_call_that_takes_longer_than_a_third_of_the_lease_is_reported_while_it_runs(
    watched: Watched,
) -> None:
    watched.watch.look()
    watched.running.enter("consume_message", object())
    watched.look_for(LIMIT_S)
    assert watched.said == []
    watched.look_for(watched.watch.interval_s)
    (text,) = watched.said
    assert text.startswith("shard shard-one: consume_message has not returned for 4.0 s (at ")
    assert "test_callback_watch.py" in text, "the line at which its thread is"
    assert "Give the call a time-out, or divide its work" in text
    watched.look_for(REPEAT_S - 1)
    assert watched.said == [], "once a minute"
    watched.look_for(2)
    (text,) = watched.said
    assert "has not returned for 64.0 s" in text
    watched.running.leave()
    watched.look_for(1)
    assert watched.said == ["shard shard-one: its callback has returned, after 66.0 s"]
    watched.look_for(REPEAT_S)
    assert watched.said == []


def test_many_short_calls_are_not_taken_for_one(watched: Watched) -> None:
    watched.look_for(10 * LIMIT_S, each=lambda: watched.running.enter("consume_message", object()))
    assert watched.said == []


def test_a_shard_that_is_gone_is_watched_no_longer(watched: Watched) -> None:
    watched.running.enter("consume_message", object())
    watched.watch.remove(watched.running)
    watched.watch.remove(watched.running)
    watched.look_for(2 * LIMIT_S)
    assert watched.said == []


def test_a_process_that_stood_still_names_what_runs(watched: Watched) -> None:
    watched.watch.look()
    watched.look_for(1)
    watched.clock.advance(8.0)
    watched.running.enter("on_timer", object())
    watched.watch.look()
    (text,) = watched.said
    assert text.startswith("this process stood still for 7.0 s: the member loses its lease of 12 s")
    assert "Now shard shard-one runs on_timer (at " in text
    watched.running.leave()
    watched.clock.advance(8.0)
    watched.watch.look()
    (text,) = watched.said
    assert "Now no callback of a shard runs" in text
    watched.clock.advance(LIMIT_S)  # The time between two looks is a part of it.
    watched.watch.look()
    assert watched.said == []


class Heard(logging.Handler):
    """Sets an event when a warning has come."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.came = threading.Event()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.came.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    callback_watch.log.addHandler(heard)
    yield heard
    callback_watch.log.removeHandler(heard)


async def test_a_loop_that_is_blocked_is_reported_while_it_is(heard: Heard) -> None:
    with CallbackWatch(SystemClock(), 0.3).watching():
        # This blocks the loop. Another thread ends the wait, by its warning.
        assert heard.came.wait(60), "no warning while the loop was blocked"
    blocked = [one for one in heard.texts if one.startswith("the event loop has run nothing for")]
    assert blocked or all(one.startswith("this process stood still") for one in heard.texts)
    assert all("in test_a_loop_that_is_blocked" in one for one in blocked)


class Slow(Tally):
    """Waits in one of its callbacks."""

    def __init__(self, slow: str, gate: Gate) -> None:
        super().__init__()
        self._slow = slow
        self._gate = gate

    def _pass(self, callback: str) -> None:
        if callback == self._slow:
            self._gate()

    def new_store(self, shard: Any, recorder: Any) -> Any:
        self._pass("new_store")
        return super().new_store(shard, recorder)

    def begin_transaction(self, shard: Any, store: Any) -> None:
        self._pass("begin_transaction")

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        if envelope.message.word == "slow":
            self._pass("consume_message")
        shard.schedule("key", shard.now - timedelta(seconds=1))

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self._pass("on_timer")

    def finalize_transaction(self, shard: Any, store: Any, publisher: Any) -> None:
        self._pass("finalize_transaction")


class SlowBatches(Slow):
    def consume_messages(
        self, shard: Any, store: Any, batch: Sequence[Any], publisher: Any
    ) -> None:
        self._pass("consume_messages")


@pytest.mark.parametrize(
    ("kind", "callback", "facts"),
    [
        (Slow, "new_store", ""),
        (Slow, "begin_transaction", ""),
        (Slow, "consume_message", f", message a/source {len(frame('a') + frame('b'))}"),
        (Slow, "on_timer", ", timer key"),
        (Slow, "finalize_transaction", ""),
        (SlowBatches, "consume_messages", ", messages from a/source 0 on"),
    ],
)
async def test_each_callback_of_a_shard_is_watched(
    start: Start,
    broker: BrokerFixture,
    heard: Heard,
    kind: type[Slow],
    callback: str,
    facts: str,
) -> None:
    gate = Gate()
    member = await start(kind(callback, gate))
    watch: CallbackWatch = member.service.callback_watch
    watch._limit_s = 0.0  # What two looks find is too slow.
    try:
        await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
        await append(broker, frame("a"), frame("b"), frame("slow"))
        await eventually(gate.entered.is_set)
        watch.look()
        watch.look()
    finally:
        gate.open()
    (text,) = [one for one in heard.texts if one.startswith("shard ")]
    assert text.startswith(f"shard {SHARD}: {callback} has not returned for 0.0 s (at ")
    assert f" in __call__{facts})" in text
    await member.read_to_heads(SHARD)
    heard.texts.clear()
    watch.look()
    watch.look()
    assert not any(one.startswith("shard ") for one in heard.texts)
