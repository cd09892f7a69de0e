"""A value that cannot be published is an error of the message, or of the timer, that led to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gazette import Application
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.contract.poison import DeadLetter, PoisonPolicy
from gazette.consumer.query.shard_route import encoded
from gazette.errors import InvalidValue
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.message.message import Message
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from tests.facts import raises

SOURCE, TARGET = "ratios", "results"
TO_TARGET = fixed_mapping(TARGET, CONTENT_JSON_LINES)


class Ratio(Message):
    part: int = 0
    whole: int = 1


class Result(Message):
    ratio: float = 0.0


class Ratios(Application[SQLiteStore]):
    """Publishes a ratio for each message: NaN for one without a whole. With a delay, a timer does."""

    message_type = Ratio

    def __init__(self, *, skips: bool, delays: bool = False, batches: bool = False) -> None:
        self.skips, self.delays = skips, delays
        if batches:
            self.consume_messages = self._consume_messages  # type: ignore[method-assign]

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS seen (part INTEGER)")

    def _consume_messages(self, shard: Any, store: Any, batch: Any, publisher: Any) -> None:
        for envelope in batch:
            self.consume_message(shard, store, envelope, publisher)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        one = envelope.message
        store.execute("INSERT INTO seen VALUES (?)", (one.part,))
        if self.delays:
            payload = f"{one.part} {one.whole}".encode()
            shard.schedule(f"ratio {one.part}", shard.now, payload)
            return
        self._publish(publisher, one.part, one.whole)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self._publish(publisher, *map(int, timer.payload.split()))

    def _publish(self, publisher: Any, part: int, whole: int) -> None:
        ratio = part / whole if whole else math.nan
        publisher.publish_uncommitted(TO_TARGET, Result(ratio=ratio))

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return PoisonPolicy("dead") if self.skips else None


RATIOS = [Ratio(part=1, whole=2), Ratio(part=2, whole=0), Ratio(part=3, whole=4)]


@pytest.mark.parametrize("batches", [False, True])
def test_a_message_whose_result_is_not_finite_is_skipped(tmp_path: Path, batches: bool) -> None:
    """What it wrote is undone, and it is a dead letter that names the field."""
    application = Ratios(skips=True, batches=batches)
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, *RATIOS)
        driver.run()
        assert [one.ratio for one in driver.committed(TARGET, Result)] == [0.5, 0.75]
        assert driver.store.query("SELECT part FROM seen ORDER BY part") == [(1,), (3,)]
        (letter,) = driver.committed("dead", DeadLetter)
        assert letter.reason == "application"
        assert "ratio" in letter.error


def test_a_timer_whose_result_is_not_finite_is_skipped(tmp_path: Path) -> None:
    with AppDriver(Ratios(skips=True, delays=True), tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, *RATIOS)
        driver.run()
        driver.advance(1)
        assert [one.ratio for one in driver.committed(TARGET, Result)] == [0.5, 0.75]
        assert [reason for _, reason in driver.skipped] == ["timer"]


def test_without_a_policy_the_error_has_the_place_of_the_message(tmp_path: Path) -> None:
    with AppDriver(Ratios(skips=False), tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, *RATIOS)
        with raises(ApplicationFailed, "begin", "end", "line", journal=SOURCE) as raised:
            driver.run()
        cause = raised.value.__cause__
        assert isinstance(cause, InvalidValue)
        assert cause.path == "ratio"
        assert driver.committed(TARGET, Result) == []


def test_an_answer_that_is_not_finite_is_refused() -> None:
    """Its reader would get null, and take it for nothing."""
    with raises(ApplicationFailed, route="/means", says='answer["means"][1]'):
        encoded({"means": [0.5, math.nan], "note": None}, "/means")
    assert encoded({"means": [0.5], "note": None}, "/means").body == b'{"means":[0.5],"note":null}'
