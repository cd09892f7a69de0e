"""Shards that failed and are started again, if an operator asked for it; standbys that fall behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gazette.client.shards import ShardChange
from gazette.consumer.shard.restarts import DELAY_MAX_S, LABEL, WINDOW_S, Restarts
from gazette.consumer.shard.standby_lag import StandbyLag
from gazette.errors import Aborted
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode
from gazette.testing.broker import BrokerFixture
from gazette.testing.consumer import shard_spec
from tests.consumer.apps import SHARD, SOURCE, Start, Tally, append, frame
from tests.support.instant_clock import breathe


def labelled(text: str) -> Any:
    return shard_spec(SHARD, SOURCE, labels=LabelSet.of((LABEL, text)))


def test_nothing_is_restarted_unless_asked_for() -> None:
    assert Restarts(0).failed(shard_spec(SHARD), 0.0).delay_s is None
    assert Restarts(0).failed(shard_spec(SHARD), 0.0).text == ""
    # Case: the label has the last word.
    assert Restarts(9).failed(labelled("0"), 0.0).delay_s is None
    assert Restarts(0).failed(labelled("1"), 0.0).delay_s == 1.0
    assert Restarts(1).failed(shard_spec(SHARD), 0.0).delay_s == 1.0


@pytest.mark.parametrize("text", ["many", "-1", "1001", "١", "1.5"])
def test_a_label_that_is_no_number_restarts_nothing_and_says_so(text: str) -> None:
    verdict = Restarts(9).failed(labelled(text), 0.0)
    assert verdict.delay_s is None
    assert repr(text) in verdict.text


def test_restarts_are_bounded_and_come_at_growing_distances() -> None:
    restarts = Restarts(8)
    delays = [restarts.failed(shard_spec(SHARD), float(n)).delay_s for n in range(9)]
    assert delays == [1, 2, 4, 8, 16, 32, DELAY_MAX_S, DELAY_MAX_S, None]
    assert "8 times within 10 minutes" in restarts.failed(shard_spec(SHARD), 9.0).text
    assert restarts.count(SHARD, 9.0) == 8
    # Case: another shard has its own; old ones do not count.
    assert restarts.failed(shard_spec("other"), 9.0).delay_s == 1
    assert restarts.count(SHARD, WINDOW_S + 3.5) == 4
    assert restarts.failed(shard_spec(SHARD), WINDOW_S + 3.5).delay_s == 16


def test_lag_is_counted_from_the_oldest_head_that_was_not_reached() -> None:
    lag = StandbyLag()
    assert lag.at(0, 5.0) == (0, 0.0)
    lag.note_head(100, 10.0)
    lag.note_head(100, 15.0)
    lag.note_head(300, 20.0)
    assert lag.at(0, 25.0) == (300, 15.0)
    assert lag.at(99, 25.0) == (201, 15.0)
    assert lag.at(100, 25.0) == (200, 5.0)
    assert lag.at(300, 25.0) == (0, 0.0)
    # Case: it may be ahead of what was seen, and a head that went back does not count.
    lag.note_head(200, 30.0)
    assert lag.at(500, 30.0) == (0, 0.0)


class Fails(Tally):
    """Raises for a word, so many times."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        super().__init__(on_word=self._look)
        self.left = times
        self.error = ValueError("not now") if error is None else error

    def _look(self, word: str) -> None:
        if word == "bad" and self.left:
            self.left -= 1
            raise self.error


async def test_a_failed_shard_is_started_again_as_often_as_its_label_says(
    start: Start, broker: BrokerFixture
) -> None:
    """Here the second start succeeds; nothing is lost or counted twice."""
    member = await start(Fails(1))
    await append(broker, frame("a", 1), frame("bad", 2))
    await member.shards.apply_shards([ShardChange(upsert=labelled("2"))])
    assert "It is restarted after 1 s (1 of 2)." in await member.await_failed(SHARD)
    await member.until(lambda: _code(member) is ReplicaCode.PRIMARY)
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 1, "bad": 1}


async def test_a_shard_whose_transaction_was_rolled_back_is_started_again_unasked(
    start: Start, broker: BrokerFixture
) -> None:
    """Regression: a former owner that did not know yet was in the way, and the new one failed for good."""
    member = await start(Fails(1, Aborted("deadlock detected")))
    await append(broker, frame("a", 1), frame("bad", 2))
    await member.shards.apply_shards([ShardChange(upsert=shard_spec(SHARD, SOURCE))])
    text = await member.await_failed(SHARD)
    assert "in favour of another one. It is restarted after 1 s (1 of 5)." in text
    await member.until(lambda: _code(member) is ReplicaCode.PRIMARY)
    await member.read_to_heads(SHARD)
    assert member.store(SHARD).read() == {"a": 1, "bad": 1}


async def test_a_shard_that_goes_on_failing_stays_failed(
    start: Start, broker: BrokerFixture
) -> None:
    application = Fails(2)
    member = await start(application)
    await append(broker, frame("bad", 1))
    await member.shards.apply_shards([ShardChange(upsert=labelled("1"))])
    text = await member.await_failed(SHARD)
    await member.until(lambda: "is not again" in _errors(member))
    assert "not now" in _errors(member)
    assert text != _errors(member)
    # Case: an operator may still do it.
    await member.shards.unassign([SHARD], only_failed=True)
    await member.until(lambda: _code(member) is ReplicaCode.PRIMARY)
    await member.read_to_heads(SHARD)


def _code(member: Any) -> ReplicaCode | None:
    status = member.status_of(SHARD)
    return None if status is None else status.code


def _errors(member: Any) -> str:
    status = member.status_of(SHARD)
    return "" if status is None else "; ".join(status.errors)


async def test_members_show_what_their_shards_do(start: Start, broker: BrokerFixture) -> None:
    first = await start(lag_interval_s=0.05)
    await first.create(shard_spec(SHARD, SOURCE, hot_standbys=1))
    second = await start(id="consumer-two", lag_interval_s=0.05)
    await second.await_standby(SHARD)
    end = await append(broker, frame("a", 1))
    await first.read_to_heads(SHARD)
    async with httpx.AsyncClient() as http:
        shown = (await http.get(f"{first.http}/debug/shards/{SHARD}")).json()
        assert (shown["slot"], shown["status"], shown["serves"]) == (0, "PRIMARY", True)
        assert shown["read_through"] == {SOURCE: end}
        assert shown["recovery_horizon_bytes"] is not None
        assert shown["standby_lag_bytes"] is None
        while True:
            (shown,) = (await http.get(f"{second.http}/debug/shards")).json()["shards"]
            if shown["standby_lag_bytes"] == 0:
                break
            await breathe()
        assert (shown["status"], shown["serves"]) == ("STANDBY", False)
        assert "tailing" in shown["play_back"]
        metrics = (await http.get(f"{second.http}/metrics")).text
        for name in (
            "gazette_shard_standby_lag_bytes",
            "gazette_shard_standby_lag_seconds",
            "gazette_shard_playback_bytes_per_second",
            "gazette_consumer_append_backlog_bytes 0.0",
            "gazette_consumer_append_memory_bytes",
            "gazette_shard_recovery_horizon_bytes",
        ):
            assert name in metrics
        assert (await http.get(f"{first.http}/debug/shards/none")).status_code == 404
