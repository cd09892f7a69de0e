"""Timers: set, fired and cancelled with the transaction, in every store, once over crashes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import pytest

from gazette import (
    Application,
    DeadTimer,
    DeferToNextTransaction,
    Envelope,
    EventTime,
    PoisonPolicy,
    Publisher,
    TimeDomain,
    Timer,
)
from gazette.consumer.application import Store
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.timers.timer import KEY_BYTES_MAX, PAYLOAD_BYTES_MAX
from gazette.consumer.transaction import shard_timers
from gazette.consumer.transaction.transactor import CONSUME_MAX, FIRED_MAX
from gazette.errors import GazetteError, Invalid, InvalidValue, NotAllowed
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sql import SQLStore, create_checkpoint_table, create_engine, create_timer_table
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.clock import ManualClock
from tests.consumer.apps import SOURCE, Word
from tests.facts import failed_by_its_message, raises

TARGET, DEAD = "b/target", "dead/letters"
TABLE = "CREATE TABLE IF NOT EXISTS fired (id INTEGER PRIMARY KEY, line TEXT)"
MINUTE = timedelta(minutes=1)
EVENT, PROCESSING = TimeDomain.EVENT, TimeDomain.PROCESSING
KINDS = ("sqlite", "vfs", "rocksdb", "json", "sql")


class Alarms(Application[Any]):
    """Does what its messages say: each is a line of Python, with the names of ``do``.

    Every timer adds a line to the state, and publishes it.
    """

    message_type = Word
    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, kind: str = "sqlite", directory: Path | None = None) -> None:
        self.kind = kind
        self.mapping = fixed_mapping(TARGET, CONTENT_JSON_LINES)
        self.on_fired: Callable[..., None] = lambda *_: None
        self.policy: PoisonPolicy | None = None
        self.engine: Any = None
        if kind == "sql":
            assert directory is not None
            self.engine = create_engine(f"sqlite:///{directory}/state.db")
            create_checkpoint_table(self.engine)
            create_timer_table(self.engine)
            with self.engine.begin() as connection:
                connection.exec_driver_sql(TABLE)

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return self.policy

    def new_store(self, shard: Any, recorder: Any) -> Store:
        match self.kind:
            case "sqlite":
                return SQLiteStore(recorder, TABLE)
            case "vfs":
                return SQLiteStore(recorder, TABLE, mode="vfs")
            case "rocksdb":
                return RocksDBStore(recorder)
            case "sql":
                return SQLStore(self.engine)
        return JSONFileStore(recorder, list[str], list)

    def add(self, store: Any, line: str) -> None:
        match self.kind:
            case "sqlite" | "vfs":
                store.execute("INSERT INTO fired (line) VALUES (?)", (line,))
            case "sql":
                store.execute("INSERT INTO fired (line) VALUES (:line)", {"line": line})
            case "rocksdb":
                number = sum(1 for _ in store.iterate())
                store.put(b"%06d" % (number + 1), line.encode())
            case _:
                store.state.append(line)

    def lines(self, store: Any) -> list[str]:
        """Return what was added, as of the last commit."""
        match self.kind:
            case "rocksdb":
                with store.view() as view:
                    return [line.decode() for _, line in view.iterate()]
            case "json":
                found: list[str] = store.read()
                return found
        return [line for (line,) in map(tuple, store.query("SELECT line FROM fired ORDER BY id"))]

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        exec(envelope.message.word, self.do(shard, store, envelope.time))

    def do(self, shard: Any, store: Any, time: datetime | None = None) -> dict[str, Any]:
        def at(key: str, seconds: float, payload: bytes = b"") -> None:
            shard.schedule(key, shard.now + timedelta(seconds=seconds), payload)

        def event(key: str, seconds: float) -> None:
            assert time is not None
            shard.schedule(key, time + timedelta(seconds=seconds), domain=EVENT)

        return {
            "at": at,
            "event": event,
            "cancel": shard.cancel,
            "add": lambda line: self.add(store, line),
            "shard": shard,
            "store": store,
            "EVENT": EVENT,
            "MINUTE": MINUTE,
            "datetime": datetime,
        }

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        line = f"{timer.key} {timer.domain.name[0]} {timer.payload.decode()}".strip()
        self.add(store, line)
        publisher.publish_uncommitted(self.mapping, Word(word=line))
        self.on_fired(shard, store, timer)


class Silent(Application[Any]):
    """An application without timers, over the same states."""

    message_type = Word
    consumed = 0

    def __init__(self, other: Alarms) -> None:
        self.other = other

    def new_store(self, shard: Any, recorder: Any) -> Store:
        return self.other.new_store(shard, recorder)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        shard.schedule("a", shard.now)


def driven(tmp_path: Path, kind: str = "sqlite", **fields: Any) -> AppDriver[Any]:
    log = kind != "sql"
    return AppDriver(Alarms(kind, tmp_path), tmp_path, [SOURCE], log=log, **fields)


def say(driver: AppDriver[Any], *lines: str) -> int:
    driver.publish(SOURCE, *[Word(word=line) for line in lines])
    return driver.run()


def shard_of(driver: AppDriver[Any]) -> Any:
    return driver._alive().shard


def inbox_of(driver: AppDriver[Any]) -> Any:
    return driver._alive().inbox


def wake(driver: AppDriver[Any]) -> None:
    """Have the shard look at the clock, which moved by more than one timer."""
    inbox_of(driver).wake()
    driver.run()


def lines(driver: AppDriver[Any]) -> list[str]:
    application: Any = driver.application
    found: list[str] = application.lines(driver.store)
    return found


def published(driver: AppDriver[Any]) -> list[str]:
    return [one.word for one in driver.committed(TARGET, Word)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_timer_fires_once_at_its_time(tmp_path: Path, kind: str) -> None:
    """Check set, cancelled, replaced and fired timers, with a crash before each step."""
    if kind == "rocksdb":
        pytest.importorskip("rocksdict")
    with driven(tmp_path, kind) as driver:
        assert say(driver, "at('a', 60, b'one'); at('b', 120); at('c', 90)", "cancel('c')") == 1
        driver.crash()
        assert driver.advance(59.999) == 0
        assert lines(driver) == []
        driver.crash()
        assert driver.advance(0.001) == 1
        assert lines(driver) == published(driver) == ["a P one"]
        driver.crash()
        say(driver, "at('b', 60)", "at('a', 30)")  # 'b' was due in 60 s, too: it is replaced.
        driver.advance(30)
        driver.crash()
        driver.advance(29)
        assert lines(driver) == published(driver) == ["a P one", "a P"]
        driver.advance(1)
        assert lines(driver) == published(driver) == ["a P one", "a P", "b P"]
        driver.crash()
        assert driver.advance(1e6) == 0
        assert lines(driver) == ["a P one", "a P", "b P"]
        assert [one.timers for one in driver.transactions if one.timers] == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_event_time_follows_messages(tmp_path: Path, kind: str) -> None:
    """Check that a watermark is the same after a crash, and fires between two messages."""
    if kind == "rocksdb":
        pytest.importorskip("rocksdict")
    with driven(tmp_path, kind) as driver:
        say(driver, "event('a', 60); event('b', 10)")
        driver.crash()
        driver.advance(60)
        assert lines(driver) == []
        say(driver, "add('before'); event('c', -50)", "add('after')")
        assert lines(driver) == ["before", "b E", "c E", "a E", "after"]
        driver.crash()
        driver.run()
        watermark = shard_of(driver).watermark
        assert abs(watermark - shard_of(driver).now) < timedelta(seconds=1)
        assert published(driver) == ["b E", "c E", "a E"]


def test_advance_stops_at_each_timer(tmp_path: Path) -> None:
    """Check that a timer which sets the next one sees its own time."""
    seen: list[float] = []
    with driven(tmp_path) as driver:

        def again(shard: Any, store: Any, timer: Timer) -> None:
            assert shard.now == timer.at
            seen.append(driver.clock.now())
            shard.schedule("every", shard.now + MINUTE)

        driver.application.on_fired = again  # type: ignore[attr-defined]
        begun = driver.clock.now()
        say(driver, "at('every', 60)")
        driver.advance(3600)
        assert [round(at - begun) for at in seen] == list(range(60, 3601, 60))


def test_timers_fire_in_order(tmp_path: Path) -> None:
    """Check that order is by time and then key, also among timers that timers set."""
    with driven(tmp_path) as driver:

        def more(shard: Any, store: Any, timer: Timer) -> None:
            if timer.key == "a":
                shard.schedule("ab", timer.at + timedelta(seconds=1))  # between two that are due
                shard.schedule("early", timer.at - timedelta(seconds=1))  # behind itself
                shard.cancel("d")
                shard.schedule("e", timer.at + timedelta(seconds=500))

        driver.application.on_fired = more  # type: ignore[attr-defined]
        say(driver, "at('c', 20); at('b', 20); at('a', 10); at('d', 30); at('e', 30); at('f', 30)")
        driver.clock.advance(100)  # All at once, and not one by one.
        wake(driver)
        assert [line.split()[0] for line in lines(driver)] == ["a", "ab", "b", "c", "f", "early"]
        assert [one.timers for one in driver.transactions if one.timers] == [5, 1]
        driver.advance(500)
        assert lines(driver)[-1] == "e P"


def test_a_pass_never_repeats_a_timer(tmp_path: Path) -> None:
    """Check that a timer which sets itself at once fires once in each transaction."""
    with driven(tmp_path) as driver:
        counts = {"fired": 0}

        def again(shard: Any, store: Any, timer: Timer) -> None:
            counts["fired"] += 1
            if counts["fired"] < 50:
                shard.schedule(timer.key, timer.at)

        driver.application.on_fired = again  # type: ignore[attr-defined]
        say(driver, "at('again', 1)")
        assert driver.advance(1) == 50
        assert {one.timers for one in driver.transactions[1:]} == {1}


@pytest.mark.parametrize("call", ["at", "event"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_timer_that_another_one_of_its_batch_sets_again_fires(
    tmp_path: Path, kind: str, call: str
) -> None:
    """Check that each fires once, in batches of 1 to 64, if the one before sets it again for its own time."""
    if kind == "rocksdb":
        pytest.importorskip("rocksdict")
    many = 130
    with driven(tmp_path, kind) as driver:

        def again(shard: Any, store: Any, timer: Timer) -> None:
            following = int(timer.key) + 1
            if following < many:
                shard.schedule(f"{following:03}", timer.at, b"again", domain=timer.domain)

        driver.application.on_fired = again  # type: ignore[attr-defined]
        say(driver, f"[{call}('%03d' % n, 1) for n in range({many})]")
        driver.advance(1)
        say(driver, "add('end')")
        letter = "P" if call == "at" else "E"
        expected = [f"{n:03} {letter} again" for n in range(1, many)]
        assert published(driver) == [f"000 {letter}", *expected]


def test_many_due_timers_take_turns_with_messages(tmp_path: Path) -> None:
    """Check that transactions are bounded after a promotion, and that messages do not wait for all."""
    many = 2 * FIRED_MAX + 5
    with driven(tmp_path) as driver:
        say(driver, f"[at('%06d' % n, 1) for n in range({many})]")
        driver.clock.advance(3600)
        say(driver, "add('message')")
        found = lines(driver)
        assert found.index("message") < 3000
        found.remove("message")
        assert found == [f"{n:06} P" for n in range(many)]
        counts = [one.timers for one in driver.transactions[1:]]
        assert counts == [FIRED_MAX, FIRED_MAX, 5]


def test_timers_fire_while_input_comes_that_does_not_commit(tmp_path: Path) -> None:
    """Check that a long transaction of a producer holds no timer back."""
    with driven(tmp_path, chunk_bytes=60) as driver:
        say(driver, f"[at('%06d' % n, 1) for n in range({3 * CONSUME_MAX})]")
        driver.clock.advance(10)
        driver.publish_pending(SOURCE, *[Word(word="add('late')")] * 300)
        fired: list[int] = []
        inbox = inbox_of(driver)

        def note(*_: Any) -> None:
            fired.append(inbox.inputs > 0)

        driver.application.on_fired = note  # type: ignore[attr-defined]
        driver.run()
        assert len(fired) == 3 * CONSUME_MAX
        assert fired.count(True) > CONSUME_MAX, "they waited until all input was read"


def test_due_timers_that_are_cancelled_at_the_begin_end_nothing(tmp_path: Path) -> None:
    class Cancels(Alarms):
        def begin_transaction(self, shard: Any, store: Any) -> None:
            shard.cancel("a")

    with AppDriver(Cancels(), tmp_path, [SOURCE]) as driver:
        say(driver, "at('a', 10)")
        driver.advance(20)
        say(driver, "add('goes on')")
        assert lines(driver) == ["goes on"]


def test_a_cancelled_timer_begins_no_transaction(tmp_path: Path) -> None:
    with driven(tmp_path) as driver:
        say(driver, "at('a', 10); at('b', 20)", "cancel('a')")
        assert driver.advance(15) == 0
        assert driver.advance(5) == 1


def test_a_timer_commits_with_what_it_publishes(tmp_path: Path) -> None:
    """Check that nothing of a firing is seen while its commit is held, and all of it once."""
    with driven(tmp_path) as driver:
        say(driver, "at('a', 10)")
        for _ in range(3):
            driver.journals.holds = lambda journal, content: True
            driver.advance(10)
            assert published(driver) == []
            driver.crash()
            driver.journals.release()
        driver.run()
        assert lines(driver) == published(driver) == ["a P"]


def test_an_error_fails_the_shard_and_the_timer_stays(tmp_path: Path) -> None:
    with driven(tmp_path) as driver:

        def refuse(*_: Any) -> None:
            raise ValueError("not now")

        application: Any = driver.application
        application.on_fired = refuse
        say(driver, "at('a', 10)")
        with raises(ApplicationFailed, "at", timer="a", domain="processing", says="on_timer"):
            driver.advance(10)
        driver.crash()
        application.on_fired = lambda *_: None
        driver.run()
        assert lines(driver) == ["a P"]


def test_a_poison_timer_is_undone_and_published(tmp_path: Path) -> None:
    """Check that a skipped timer leaves no effect, also on others of its batch."""
    application = Alarms()
    application.policy = PoisonPolicy(DEAD)

    def refuse(shard: Any, store: Any, timer: Timer) -> None:
        if timer.key == "b":
            shard.cancel("c")
            shard.schedule("d", timer.at)
            shard.schedule("more", timer.at)
            raise ValueError("not this one")

    application.on_fired = refuse
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        say(driver, "at('a', 10); at('b', 10, b'raw'); at('c', 10); at('d', 10, b'kept')")
        driver.clock.advance(10)
        wake(driver)
        assert lines(driver) == published(driver) == ["a P", "c P", "d P kept"]
        (letter,) = driver.committed(DEAD, DeadTimer)
        assert (letter.timer, letter.reason, letter.raw) == ("b", "timer", b"raw")
        assert letter.domain == "processing"
        assert letter.at == "2023-11-14T22:13:30+00:00"
        assert "not this one" in letter.error
        assert driver.skipped == [("", "timer")]
        driver.crash()
        assert driver.advance(1e5) == 0


def test_a_timer_cannot_be_deferred(tmp_path: Path) -> None:
    def defer(*_: Any) -> None:
        raise DeferToNextTransaction("later")

    for policy in (None, PoisonPolicy(DEAD)):
        application = Alarms()
        application.policy, application.on_fired = policy, defer
        with AppDriver(application, tmp_path / str(policy is None), [SOURCE]) as driver:
            say(driver, "at('a', 10)")
            with raises(ApplicationFailed, timer="a", advises="again"):
                driver.advance(10)


BAD: list[tuple[str, str]] = [
    ("shard.schedule(b'a', shard.now)", "key"),
    ("shard.schedule('', shard.now)", "key"),
    (f"shard.schedule('é' * {KEY_BYTES_MAX // 2 + 1}, shard.now)", "key"),
    ("shard.schedule('\\ud800', shard.now)", "key"),
    ("shard.schedule('a', shard.now.replace(tzinfo=None))", "at"),
    ("shard.schedule('a', MINUTE)", "at"),
    ("shard.schedule('a', 17.5)", "at"),
    ("shard.schedule('a', shard.now, 'text')", "payload"),
    (f"shard.schedule('a', shard.now, bytes({PAYLOAD_BYTES_MAX + 1}))", "payload"),
    ("shard.schedule('a', shard.now, domain='event')", "domain"),
    ("shard.cancel(7)", "key"),
]


@pytest.mark.parametrize(("line", "path"), BAD)
def test_bad_arguments_are_refused_by_name(tmp_path: Path, line: str, path: str) -> None:
    """A policy skips the message that has led to a bad value. A bad domain is a fault of the program."""
    is_value = path != "domain"
    with driven(tmp_path / "1") as driver, raises(Invalid, path=path) as raised:
        with failed_by_its_message() if is_value else nullcontext():
            say(driver, line)
    assert isinstance(raised.value, InvalidValue) is is_value
    application = Alarms()
    application.policy = PoisonPolicy(DEAD)
    with AppDriver(application, tmp_path / "2", [SOURCE]) as driver:
        with nullcontext() if is_value else raises(Invalid, path=path):
            say(driver, line)
        assert len(driver.skipped) == is_value


LAST = datetime.max.replace(tzinfo=UTC)
EAST, WEST = (timezone(timedelta(hours=hours)) for hours in (2, -7))


def test_zones_and_the_ends_of_time_are_kept(tmp_path: Path) -> None:
    nepal = datetime.fromtimestamp(1_700_000_000, ZoneInfo("Asia/Kathmandu"))
    first = datetime.min.replace(tzinfo=UTC)
    wanted = [
        nepal,
        first,
        datetime.min.replace(tzinfo=WEST),
        datetime.max.replace(tzinfo=EAST),
        LAST,
    ]
    seen = []
    with driven(tmp_path) as driver:
        driver.application.on_fired = lambda shard, store, timer: seen.append(timer.at)  # type: ignore[attr-defined]
        for number, at in enumerate(wanted):
            say(driver, f"shard.schedule('{number}', datetime.fromisoformat('{at.isoformat()}'))")
        driver.advance((LAST - nepal).total_seconds())
    # A timer fires once it is set, if its time has passed.
    assert sorted(seen) == sorted(wanted)
    assert all(one.tzinfo is UTC for one in seen)


@pytest.mark.parametrize(
    "at", [datetime.min.replace(tzinfo=EAST), datetime.max.replace(tzinfo=WEST)]
)
def test_a_time_beyond_the_calendar_in_utc_is_refused(tmp_path: Path, at: datetime) -> None:
    """Instead of a timer that fires at another time than the one it was given."""
    with driven(tmp_path) as driver, raises(InvalidValue, path="at"), failed_by_its_message():
        say(driver, f"shard.schedule('a', datetime.fromisoformat('{at.isoformat()}'))")


def test_timers_belong_to_transactions(tmp_path: Path) -> None:
    """Check that schedule() is refused in new_store, behind the commit, and on another thread."""
    errors: list[BaseException] = []

    class Misplaced(Alarms):
        def misuse(self, shard: Any) -> None:
            with pytest.raises(NotAllowed) as raised:
                shard.schedule("a", datetime.now(UTC))
            errors.append(raised.value)

        def new_store(self, shard: Any, recorder: Any) -> Store:
            self.misuse(shard)
            return super().new_store(shard, recorder)

        def consume_message(self, shard: Any, *_: Any) -> None:
            thread = threading.Thread(target=self.misuse, args=(shard,))
            thread.start()
            thread.join()

        def begin_transaction(self, shard: Any, store: Any) -> None:
            shard.schedule(f"begin {len(errors)}", shard.now + MINUTE)

        def finalize_transaction(self, shard: Any, store: Any, publisher: Publisher) -> None:
            shard.schedule(f"end {len(errors)}", shard.now + 2 * MINUTE)

        def finished_transaction(self, shard: Any, store: Any, commit: Any) -> None:
            self.misuse(shard)

    with AppDriver(Misplaced(), tmp_path, [SOURCE]) as driver:
        say(driver, "")
        assert len(errors) == 3
        assert all(isinstance(one, GazetteError) and one.hint for one in errors)
        driver.advance(90)
        assert lines(driver) == ["begin 1 P"]
        driver.advance(30)
        assert lines(driver) == ["begin 1 P", "begin 3 P", "end 2 P"]


def test_an_application_without_on_timer_is_refused(tmp_path: Path) -> None:
    """Check that it can neither set timers nor open a state that has some."""
    alarms = Alarms()
    with (
        AppDriver(Silent(alarms), tmp_path / "one", [SOURCE]) as driver,
        raises(NotAllowed, says="Silent", advises="on_timer", shard="driven-shard"),
    ):
        say(driver, "")
    for kind in ("sqlite", "rocksdb", "json"):
        alarms = Alarms(kind)
        alarms.application_name = "same"  # type: ignore[misc]
        driver = AppDriver(alarms, tmp_path / kind, [SOURCE])
        say(driver, "at('a', 10)")
        driver.crash()
        silent = Silent(alarms)
        silent.application_name = "same"  # type: ignore[misc]
        driver.application = silent
        with raises(NotAllowed, says="Silent", advises="on_timer", shard="driven-shard"):
            driver.run()


def test_event_time_has_to_be_asked_for(tmp_path: Path) -> None:
    class Plain(Alarms):
        event_time: ClassVar[EventTime | None] = None

    with AppDriver(Plain(), tmp_path / "one", [SOURCE]) as driver:
        with raises(NotAllowed, advises="event_time"):
            say(driver, "event('a', 1)")
        driver.crash()
        with raises(NotAllowed, advises="event_time"):
            say(driver, "shard.watermark")

    class Wrong(Alarms):
        event_time: ClassVar[Any] = timedelta(seconds=1)

    with (
        AppDriver(Wrong(), tmp_path / "two", [SOURCE]) as driver,
        raises(Invalid, path="event_time"),
    ):
        driver.run()
    alarms, plain = Alarms(), Plain()
    alarms.application_name = plain.application_name = "same"  # type: ignore[misc]
    with AppDriver(alarms, tmp_path / "three", [SOURCE]) as driver:
        say(driver, "event('a', 1)")
        driver.crash()
        driver.application = plain
        with raises(NotAllowed, advises="event_time"):
            driver.run()


def test_a_clock_that_goes_back_fires_nothing_twice(tmp_path: Path) -> None:
    with driven(tmp_path) as driver:
        say(driver, "at('a', 10)")
        driver.advance(10)
        driver.clock.jump(-3600)
        say(driver, "add(shard.now.isoformat()); at('b', 10)")
        assert lines(driver) == ["a P", "2023-11-14T22:13:30+00:00"]
        driver.advance(3599)
        assert lines(driver)[2:] == []
        driver.crash()  # The next owner's clock is the one that went back.
        driver.advance(12)
        assert lines(driver)[2:] == ["b P"]


class CountingClock(ManualClock):
    """Counts its steps."""

    steps = 0

    def advance(self, seconds: float) -> None:
        self.steps += 1
        super().advance(seconds)


def test_a_driver_advances_in_few_steps_after_its_clock_went_back(tmp_path: Path) -> None:
    """Processing time stands still until the clock is where it was, and no timer is due before."""
    clock = CountingClock()
    with AppDriver(Alarms(), tmp_path, [SOURCE], clock=clock) as driver:
        say(driver, "at('a', 0.001)")
        clock.jump(-3600)
        driver.advance(3600)
        assert (lines(driver), clock.steps) == ([], 1)
        driver.advance(1)
        assert (lines(driver), clock.steps) == (["a P"], 3)


def test_watermark_of_several_sources(tmp_path: Path) -> None:
    """Check lateness, a source that holds back, and one that is idle."""

    class Late(Alarms):
        event_time = EventTime(timedelta(seconds=5), idle_after=timedelta(seconds=60))

    with AppDriver(Late(), tmp_path, ["a/one", "a/two"]) as driver:
        driver.publish("a/one", Word(word="event('a', 10)"))
        driver.run()
        driver.advance(20)
        driver.publish("a/one", Word(word="add('one')"))
        driver.run()
        assert lines(driver) == ["one"]  # The other source had no message.
        driver.publish("a/two", Word(word="add('two')"))
        driver.run()
        assert lines(driver) == ["one", "two", "a E"]
        driver.publish("a/one", Word(word="event('b', 10)"))
        driver.run()
        driver.advance(30)
        driver.publish("a/one", Word(word="add('three')"))
        driver.run()
        assert lines(driver)[3:] == ["three"]
        driver.advance(29)
        assert lines(driver)[3:] == ["three"]
        driver.advance(1)  # 60 s after its last message.
        assert lines(driver)[3:] == ["three", "b E"]
        assert shard_of(driver).now == datetime.fromtimestamp(driver.clock.now(), UTC)


def test_batches_see_the_watermark_before_them(tmp_path: Path) -> None:
    class Batches(Alarms):
        def consume_messages(self, shard: Any, store: Any, batch: Any, publisher: Any) -> None:
            for envelope in batch:
                self.consume_message(shard, store, envelope, publisher)

    with AppDriver(Batches(), tmp_path, [SOURCE]) as driver:
        say(driver, "event('a', 10)")
        driver.advance(10)
        say(driver, "add('one')", "add('two')")
        assert sorted(lines(driver)) == ["a E", "one", "two"]


def test_a_schedule_is_the_same_whenever_it_crashes(tmp_path: Path) -> None:
    """Check random histories against a model in plain Python, with crashes at random."""
    for seed in range(20):
        rng = random.Random(seed)
        model: dict[str, int] = {}
        fired: list[str] = []
        now = 0
        kind = rng.choice(("sqlite", "json", "rocksdb"))
        with driven(tmp_path / str(seed), kind, chunk_bytes=rng.choice((100, 1 << 20))) as driver:
            for _ in range(40):
                key = f"k{rng.randrange(8)}"
                match rng.randrange(5):
                    case 0 | 1:
                        delay = rng.randrange(1, 50)
                        say(driver, f"at('{key}', {delay})")
                        model[key] = now + delay
                    case 2:
                        say(driver, f"cancel('{key}')")
                        model.pop(key, None)
                    case 3:
                        step = rng.randrange(40)
                        driver.advance(step)
                        now += step
                        due = sorted((at, one) for one, at in model.items() if at <= now)
                        fired += [one for _, one in due]
                        for _, one in due:
                            del model[one]
                    case 4:
                        driver.crash()
                assert driver.failure is None
            assert lines(driver) == [f"{one} P" for one in fired], seed
            assert published(driver) == [f"{one} P" for one in fired], seed


def test_the_transactor_looks_while_the_wall_clock_may_jump() -> None:
    assert shard_timers.LOOK_S < 60
