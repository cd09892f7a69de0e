"""Event time from messages: watermark, timers, windows and joins follow the time that a source declares."""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import (
    Application,
    DeadLetter,
    Envelope,
    EventTime,
    Message,
    MessageTime,
    PoisonPolicy,
    Source,
    UnusableTime,
)
from gazette.consumer.timers.watermark import Watermark
from gazette.errors import Invalid, NotAllowed
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import StreamJoin, TableJoin, Tumbling, Windows, count
from tests.facts import raises
from tests.fuzzing import examples

OLD = datetime(2020, 3, 1, 12, tzinfo=UTC)
"""Years before anything is published here."""
DEAD = "dead/letters"
MINUTE = timedelta(minutes=1)


class Order(Message):
    user: str = "ada"
    ordered_at: datetime | None = None
    n: int = 0


class Click(Message):
    user: str = "ada"
    ms: int | None = None


class Plain(Message):
    user: str = "ada"


class PerMinute(Application[SQLiteStore]):
    """Counts orders of each minute in which they were placed."""

    orders = Source("orders", Order, time="ordered_at")
    event_time: ClassVar[EventTime | None] = EventTime(lateness=timedelta(seconds=10))
    windows = Windows("clicks", Tumbling(MINUTE), count())
    schema = (
        "CREATE TABLE IF NOT EXISTS closed (begin TEXT, n INTEGER);"
        "CREATE TABLE IF NOT EXISTS late (at TEXT);"
        "CREATE TABLE IF NOT EXISTS seen (journal TEXT, at TEXT, watermark TEXT);"
    )

    def __init__(self, policy: PoisonPolicy | None = None) -> None:
        self.policy = policy

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return self.policy

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, self.windows.schema + self.schema)

    def consume_message(
        self, shard: Any, store: SQLiteStore, envelope: Envelope[Any], publisher: Any
    ) -> None:
        at = envelope.time
        row = (envelope.journal, at.isoformat(), str(shard.watermark))
        store.execute("INSERT INTO seen VALUES (?, ?, ?)", row)
        if not self.windows.add(shard, store, envelope.message.user, at, 1):
            store.execute("INSERT INTO late VALUES (?)", (at.isoformat(),))

    def on_timer(self, shard: Any, store: SQLiteStore, timer: Any, publisher: Any) -> None:
        for one in self.windows.on_timer(shard, store, timer):
            store.execute("INSERT INTO closed VALUES (?, ?)", (one.begin.isoformat(), one.value))


def closed(driver: AppDriver[Any]) -> list[tuple[datetime, int]]:
    rows = driver.store.query("SELECT begin, n FROM closed ORDER BY begin")
    return [(datetime.fromisoformat(begin), n) for begin, n in rows]


def watermark_of(driver: AppDriver[Any]) -> datetime | None:
    ((data,),) = driver.store.query("SELECT state FROM gazette_event_time")
    value = json.loads(data)["watermark"]
    return None if value is None else datetime.fromtimestamp(value / 1e6, UTC)


def order(seconds: float, **fields: Any) -> Order:
    return Order(ordered_at=OLD + timedelta(seconds=seconds), **fields)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[AppDriver[Any]]:
    with AppDriver(PerMinute(), tmp_path, ["orders/part-000"]) as driver:
        yield driver


ORDERS = "orders/part-000"


def test_history_that_is_published_now_falls_into_its_windows(driver: AppDriver[Any]) -> None:
    driver.publish(ORDERS, *(order(20 * number) for number in range(9)))
    driver.run()
    driver.crash()
    driver.publish(ORDERS, order(200))
    driver.run()
    assert closed(driver) == [(OLD, 3), (OLD + MINUTE, 3), (OLD + 2 * MINUTE, 3)]
    assert watermark_of(driver) == OLD + timedelta(seconds=190)
    driver.publish(ORDERS, order(5))
    driver.run()
    assert driver.store.query("SELECT at FROM late") == [
        ((OLD + timedelta(seconds=5)).isoformat(),)
    ]


class Dated(PerMinute):
    dates = Source("dates", Click, time=MessageTime("ms", unit="ms"))
    orders = Source("orders", Order, time=lambda message: message.ordered_at)
    plain = Source("plain", Plain)


def test_units_functions_and_publishers_clocks_mix(tmp_path: Path) -> None:
    sources = ["dates/part-000", ORDERS, "plain/part-000"]
    with AppDriver(Dated(), tmp_path, sources) as driver:
        driver.publish("dates/part-000", Click(ms=int((OLD.timestamp() + 90) * 1000)))
        driver.publish(ORDERS, order(70))
        driver.run()
        assert watermark_of(driver) is None
        driver.publish("plain/part-000", Plain())
        driver.run()
        assert watermark_of(driver) == OLD + timedelta(seconds=60)
        driver.crash()
        assert watermark_of(driver) == OLD + timedelta(seconds=60)
        found = dict(driver.store.query("SELECT journal, at FROM seen"))
    assert found[ORDERS] == (OLD + timedelta(seconds=70)).isoformat()
    assert found["dates/part-000"] == (OLD + timedelta(seconds=90)).isoformat()
    assert datetime.fromisoformat(found["plain/part-000"]) > OLD + timedelta(days=365)


class Raw(msgspec.Struct):
    """What other programs may write."""

    ordered_at: Any = None
    user: str = "ada"
    uuid: str = ""


UNUSABLE: list[Any] = [None, "2020-03-01T12:00:00", "5055-01-01T00:00:00Z"]


@pytest.mark.parametrize("at", UNUSABLE)
def test_a_message_without_a_usable_time_fails_the_shard_by_name(
    driver: AppDriver[Any], at: Any
) -> None:
    driver.publish(ORDERS, order(0), Raw(at))
    with raises(UnusableTime, field="ordered_at", journal=ORDERS):
        driver.run()


@pytest.mark.parametrize("malformed_only", [False, True])
@pytest.mark.parametrize("batches", [False, True])
def test_a_message_without_a_usable_time_is_skipped_by_policy(
    tmp_path: Path, malformed_only: bool, batches: bool
) -> None:
    """Check that what is around it is consumed, that the watermark is not moved, and what is kept."""

    class Batches(PerMinute):
        def consume_messages(self, shard: Any, store: Any, batch: Any, publisher: Any) -> None:
            for envelope in batch:
                self.consume_message(shard, store, envelope, publisher)

    policy = PoisonPolicy(DEAD, malformed_only=malformed_only)
    application = Batches(policy) if batches else PerMinute(policy)
    with AppDriver(application, tmp_path, [ORDERS]) as driver:
        for at in UNUSABLE:
            driver.publish(ORDERS, Raw(at))
            driver.publish(ORDERS, order(20), order(50), Raw(at), order(70))
            driver.publish_pending(ORDERS, Raw(at), order(55), Raw(at))
            driver.acknowledge()
            driver.run()
            driver.crash()
        letters = driver.committed(DEAD, DeadLetter)
        assert driver.skipped == [(ORDERS, "time")] * 12
        assert [one.reason for one in letters] == ["time"] * 12
        assert all(one.message_uuid and one.raw.endswith(b"\n") for one in letters)
        assert all("ordered_at" in one.error for one in letters)
        assert watermark_of(driver) == OLD + timedelta(seconds=60)
        ((seen,),) = driver.store.query("SELECT count(*) FROM seen")
        assert seen == 12


def test_a_pending_message_that_never_commits_needs_no_time(driver: AppDriver[Any]) -> None:
    driver.publish_pending(ORDERS, Raw(None))
    driver.publish(ORDERS, order(0))
    driver.run()
    driver.advance(5)  # The transaction waits no longer for an acknowledgement.
    assert len(driver.store.query("SELECT * FROM seen")) == 1


def test_a_message_without_a_uuid_is_bound_by_the_clock_of_the_member(
    driver: AppDriver[Any],
) -> None:
    driver.feed(ORDERS, b'{"user":"ada","ordered_at":"2020-03-01T12:00:30Z"}\n')
    driver.run()
    assert watermark_of(driver) == OLD + timedelta(seconds=20)
    driver.feed(ORDERS, b'{"user":"ada","ordered_at":"5055-01-01T00:00:00Z"}\n')
    with raises(UnusableTime, field="ordered_at"):
        driver.run()


class Logged(PerMinute):
    """Keeps the order of messages and timers."""

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.execute("INSERT INTO late VALUES (?)", (f"message {envelope.message.n}",))
        self.windows.add(shard, store, "ada", envelope.time, 1)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        store.execute("INSERT INTO late VALUES (?)", (f"timer {(timer.at - OLD).seconds}",))


def test_timers_fire_before_a_message_that_is_skipped_behind_them(tmp_path: Path) -> None:
    with AppDriver(Logged(PoisonPolicy(DEAD)), tmp_path, [ORDERS]) as driver:
        # Batches grow: what follows is in one.
        driver.publish(ORDERS, *(order(0, n=0) for _ in range(100)))
        messages = [order(0, n=0), order(100, n=1), Raw(None), order(101, n=2), order(500, n=3)]
        driver.publish(ORDERS, *messages)
        driver.run()
        found = [line for (line,) in driver.store.query("SELECT at FROM late ORDER BY rowid")]
    expected = ["message 0"] * 101 + [
        "message 1",
        "timer 60",
        "message 2",
        "message 3",
        "timer 120",
    ]
    assert found == expected
    assert driver.skipped == [(ORDERS, "time")]


class Acks(PerMinute):
    deliver_acks = True

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        if envelope.is_ack:
            store.execute("INSERT INTO late VALUES (?)", (envelope.time.isoformat(),))
            return
        super().consume_message(shard, store, envelope, publisher)


def test_acknowledgements_do_not_move_the_watermark(tmp_path: Path) -> None:
    with AppDriver(Acks(), tmp_path, [ORDERS]) as driver:
        driver.publish_pending(ORDERS, order(30))
        driver.acknowledge()
        driver.run()
        assert watermark_of(driver) == OLD + timedelta(seconds=20)
        (acked,) = driver.store.query("SELECT at FROM late")
        assert datetime.fromisoformat(acked[0]) > OLD + timedelta(days=365)


class Renamed(PerMinute):
    orders = Source("orders", Order)


class InMilliseconds(PerMinute):
    orders = Source("orders", Order, time=lambda message: message.ordered_at)


@pytest.mark.parametrize("kind", [Renamed, InMilliseconds])
def test_another_time_of_a_source_is_refused_while_the_state_follows_the_former(
    tmp_path: Path, kind: type[PerMinute]
) -> None:
    with AppDriver(PerMinute(), tmp_path, [ORDERS]) as driver:
        driver.publish(ORDERS, order(30))
        driver.run()
        driver.crash()
        kind.application_name = PerMinute.application_name = "one"
        driver.application = kind()
        with raises(NotAllowed, journal=ORDERS, former="ordered_at", advises="time="):
            driver.run()
        driver.application = PerMinute()
        driver.publish(ORDERS, order(40))
        driver.run()
        assert watermark_of(driver) == OLD + timedelta(seconds=30)


def test_a_state_without_declared_times_is_refused_to_those_and_the_other_way_round() -> None:
    times: list[dict[str, str]] = [{}, {"a": "at"}, {"a": "at", "b": "ms/ms"}, {"a": "at/ms"}]
    for former in times:
        watermark = Watermark(EventTime(), ("a", "b"), 0.0, former)
        watermark.observe("a", 5)
        for now in times:
            again = Watermark(EventTime(), ("a", "b"), 0.0, now)
            if now.get("a") == former.get("a"):  # The source b had no message yet.
                again.restore(watermark.to_bytes())
                assert again.value == watermark.value
                continue
            with raises(NotAllowed, journal="a"):
                again.restore(watermark.to_bytes())
    # A source that is gone decides nothing.
    watermark = Watermark(EventTime(), ("a",), 0.0, {"a": "at"})
    watermark.observe("a", 5)
    Watermark(EventTime(), ("c",), 0.0).restore(watermark.to_bytes())


class Joins(Application[SQLiteStore]):
    """Joins by the times of messages, whatever the order in which they were published."""

    orders = Source("orders", Order, time="ordered_at")
    clicks = Source("clicks", Click, time=MessageTime("ms", unit="ms"))
    event_time = EventTime()
    stream = StreamJoin(
        "stream", before=MINUTE, after=timedelta(0), left_type=Order, right_type=Click
    )
    table = TableJoin("prices", value_type=Order, row_type=int)

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        found = "CREATE TABLE IF NOT EXISTS found (kind TEXT, one INTEGER, other INTEGER);"
        return SQLiteStore(recorder, self.stream.schema + self.table.schema + found)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        message, at = envelope.message, envelope.time
        if isinstance(message, Order):
            pairs = self.stream.add_left(shard, store, "k", at, message).pairs
            self.table.add(shard, store, "k", at, message)
        else:
            pairs = self.stream.add_right(shard, store, "k", at, message).pairs
            self.table.put(shard, store, "k", at, message.ms)
        for pair in pairs:
            assert pair.left is not None
            assert pair.right is not None
            values = ("pair", pair.left.n, pair.right.ms)
            store.execute("INSERT INTO found VALUES (?, ?, ?)", values)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self.stream.on_timer(shard, store, timer)
        for one in self.table.on_timer(shard, store, timer):
            store.execute("INSERT INTO found VALUES ('row', ?, ?)", (one.value.n, one.row))


def test_joins_follow_the_times_of_messages(tmp_path: Path) -> None:
    base = int(OLD.timestamp() * 1000)
    clicks = "clicks/part-000"
    with AppDriver(Joins(), tmp_path, [ORDERS, clicks]) as driver:
        driver.publish(ORDERS, *(order(seconds, n=seconds) for seconds in (30, 100, 200)))
        driver.run()
        driver.advance(3600)
        driver.publish(clicks, *(Click(ms=base + at * 1000) for at in (10, 50, 250)))
        driver.publish(ORDERS, order(300, n=300))
        driver.run()
        found = {
            (kind, one, (other - base) // 1000)
            for kind, one, other in driver.store.query("SELECT * FROM found")
        }
    assert found == {
        ("pair", 30, 10),
        ("pair", 100, 50),
        ("pair", 300, 250),
        ("row", 30, 10),
        ("row", 100, 50),
        ("row", 200, 50),
    }


class WithoutTimers(Application[JSONFileStore[list[float]]]):
    """Has no event time. The time of its messages is the declared one all the same."""

    orders = Source("orders", Order, time="ordered_at")

    def new_store(self, shard: Any, recorder: Any) -> JSONFileStore[list[float]]:
        return JSONFileStore(recorder, list[float], list)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.state.append(envelope.time.timestamp())


def test_an_application_without_event_time_has_the_times_of_messages(tmp_path: Path) -> None:
    with AppDriver(WithoutTimers(), tmp_path, [ORDERS]) as driver:
        driver.publish(ORDERS, order(1))
        driver.run()
        assert driver.store.state == [OLD.timestamp() + 1]
        driver.publish(ORDERS, Raw(None))
        with raises(UnusableTime, journal=ORDERS):
            driver.run()


def test_a_journal_that_is_no_source_has_no_declared_time() -> None:
    from gazette.protocol.journal import JournalSpec

    with raises(Invalid, path="sources"):
        PerMinute().message_time_of(JournalSpec("other/part-000"))
    assert Renamed().message_time_of(JournalSpec("other/part-000")) is None


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1 << 32))
def test_results_are_those_of_the_times_over_any_history(seed: int) -> None:
    """Check windows against a fold by brute force: with crashes, late and unusable messages, and batches."""
    rng = random.Random(seed)
    watermark: int | None = None
    windows: Counter[int] = Counter()
    late: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="gazette-event-time-") as directory,
        AppDriver(
            PerMinute(PoisonPolicy(DEAD, limit=1000)),
            Path(directory),
            [ORDERS],
            chunk_bytes=rng.choice((64, 300, 1 << 20)),
        ) as driver,
    ):
        at = unusable = 0
        for _ in range(rng.randrange(5, 60)):
            at += rng.randrange(-40, 60)
            if rng.random() < 0.2:
                driver.publish(ORDERS, Raw(rng.choice(UNUSABLE)))
                unusable += 1
            else:
                driver.publish(ORDERS, order(at))
                begin = at // 60
                if watermark is not None and (begin + 1) * 60 <= watermark:
                    late.append(at)
                else:
                    windows[begin] += 1
                watermark = at - 10 if watermark is None else max(watermark, at - 10)
            if rng.random() < 0.3:
                driver.run()
            if rng.random() < 0.1:
                driver.crash()
            driver.advance(rng.choice((0.0, 1.0, 5000.0)))
        driver.run()
        expected = [
            (OLD + begin * MINUTE, n)
            for begin, n in sorted(windows.items())
            if watermark is not None and (begin + 1) * 60 <= watermark
        ]
        assert closed(driver) == expected
        found = [
            (datetime.fromisoformat(text) - OLD).total_seconds()
            for (text,) in driver.store.query("SELECT at FROM late ORDER BY rowid")
        ]
        assert found == late
        assert len(driver.committed(DEAD, DeadLetter)) == unusable
