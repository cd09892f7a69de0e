"""Windows: each final result is that of a fold by brute force, over any history, crash and duplicate."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import Application, Envelope, EventTime, Message, Publisher, TimeDomain, Timer
from gazette.errors import Invalid, NotAllowed
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import (
    Aggregate,
    Hopping,
    Sessions,
    Tumbling,
    Windows,
    count,
    greatest,
    least,
    mean,
    total,
)
from tests.facts import raises
from tests.fuzzing import examples
from tests.windows.members import EPOCH_US, TARGET, Event, Members, fates, since_epoch, us

SOURCE = "values"
TO_TARGET = fixed_mapping(TARGET, CONTENT_JSON_LINES)


class Value(Message):
    key: str = ""
    value: int = 0


class Closed(Message):
    key: str = ""
    begin: int = 0
    end: int = 0
    value: Any = None
    final: bool = True


def values() -> Aggregate[list[int], int, list[int]]:
    """Return the aggregate that keeps all values, in order: it hides no mistake."""
    return Aggregate(
        zero=list,
        add=lambda state, value: sorted([*state, value]),
        result=lambda state: state,
        merge=lambda one, other: sorted([*one, *other]),
        state_type=list[int],
    )


class Windowed(Application[SQLiteStore]):
    message_type = Value
    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, windows: Windows[Any, Any, Any], lateness_us: int = 0) -> None:
        self.windows = windows
        self.event_time = EventTime(us(lateness_us))  # type: ignore[misc]

    def new_store(self, shard: Any, recorder: Any) -> Any:
        late = "CREATE TABLE IF NOT EXISTS late (value INTEGER);"
        return SQLiteStore(recorder, self.windows.schema + late)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Value], publisher: Publisher
    ) -> None:
        message = envelope.message
        if not self.windows.add(shard, store, message.key, envelope.time, message.value):
            store.execute("INSERT INTO late VALUES (?)", (message.value,))

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        for one in self.windows.on_timer(shard, store, timer):
            begin, end = (since_epoch(at) for at in (one.begin, one.end))
            closed = Closed(key=one.key, begin=begin, end=end, value=one.value, final=one.final)
            publisher.publish_uncommitted(TO_TARGET, closed)


@dataclass
class Oracle:
    """Windows by brute force: lists of all values, looked through at each message."""

    spans: Any
    lateness: int
    watermark: int | None = None
    open: list[tuple[str, list[tuple[int, int]], int, int]] = field(default_factory=list)
    """Key, (time, value) of each message, begin and end."""
    closed: list[tuple[str, int, int, tuple[int, ...]]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    early_s: float = 0.0
    """Seconds between early results; 0 without them."""
    now: float = 0.0
    due: dict[tuple[str, int], float] = field(default_factory=dict)
    """When windows have their next early results, by key and begin."""
    early: list[tuple[str, int, int, tuple[int, ...]]] = field(default_factory=list)

    def advance(self, seconds: float) -> None:
        """Let time pass, and windows that have changed have early results."""
        self.now += seconds
        for key, messages, begin, end in self.open:
            if (due := self.due.get((key, begin))) is not None and due <= self.now:
                del self.due[key, begin]
                self.early.append((key, begin, end, tuple(sorted(v for _, v in messages))))

    def _changed(self, key: str, begin: int) -> None:
        if self.early_s:
            self.due.setdefault((key, begin), self.now + self.early_s)

    def add(self, event: Event) -> None:
        taken = False
        if isinstance(self.spans, Sessions):
            taken = self._add_to_session(event, self.spans.gap // us(1))
        else:
            size = self.spans.size // us(1)
            step = self.spans.step // us(1) if isinstance(self.spans, Hopping) else size
            for begin in range(event.at - size - step, event.at + 1):
                end = begin + size
                if (
                    (EPOCH_US + begin) % step == 0
                    and begin <= event.at < end
                    and self._is_open(end)
                ):
                    self._add_to(event, begin, end)
                    taken = True
        if not taken:
            self.late.append(event.value)
        reached = event.at - self.lateness
        self.watermark = reached if self.watermark is None else max(self.watermark, reached)
        for one in [one for one in self.open if not self._is_open(one[3])]:
            self.open.remove(one)
            key, messages, begin, end = one
            self.due.pop((key, begin), None)
            self.closed.append((key, begin, end, tuple(sorted(value for _, value in messages))))

    def _is_open(self, end: int) -> bool:
        return self.watermark is None or end > self.watermark

    def _add_to(self, event: Event, begin: int, end: int) -> None:
        self._changed(event.key, begin)
        for key, messages, other, _ in self.open:
            if (key, other) == (event.key, begin):
                messages.append((event.at, event.value))
                return
        self.open.append((event.key, [(event.at, event.value)], begin, end))

    def _add_to_session(self, event: Event, gap: int) -> bool:
        ours = [one for one in self.open if one[0] == event.key]
        messages = sorted([(event.at, event.value), *(m for one in ours for m in one[1])])
        groups: list[list[tuple[int, int]]] = []
        for message in messages:
            if groups and message[0] < groups[-1][-1][0] + gap:
                groups[-1].append(message)
            else:
                groups.append([message])
        mine = next(group for group in groups if (event.at, event.value) in group)
        if not self._is_open(mine[-1][0] + gap):
            return False
        joined = {begin for _, _, begin, end in ours if mine[0][0] <= begin <= mine[-1][0]}
        for begin in joined - {mine[0][0]}:
            self.due.pop((event.key, begin), None)
        self._changed(event.key, mine[0][0])
        self.open = [one for one in self.open if one not in ours]
        self.open += [(event.key, group, group[0][0], group[-1][0] + gap) for group in groups]
        return True


@dataclass(frozen=True)
class Story:
    """A history, and what happens to its members. Chunks of bytes have any size."""

    spans: Any
    lateness: int
    steps: tuple[tuple[int, int, str], ...]
    """Producer, time since its last message, key; a negative time repeats an earlier message."""
    fates: dict[int, str]
    """What happens to the primary, by steps."""
    run_every: int
    chunk_bytes: int
    early_s: float = 0.0
    pauses: tuple[float, ...] = ()
    """Seconds that pass behind each of the first steps."""


spans = st.one_of(
    st.builds(Tumbling, st.integers(1, 30).map(us)),
    st.builds(
        lambda step, extra: Hopping(us(step + extra), us(step)),
        st.integers(1, 12),
        st.integers(0, 25),
    ),
    st.builds(Sessions, st.integers(1, 25).map(us)),
)
stories = st.builds(
    Story,
    spans=spans,
    lateness=st.sampled_from((0, 0, 3, 10, 40)),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(-3, 12), st.sampled_from("ab")), max_size=40
    ).map(tuple),
    fates=fates,
    run_every=st.integers(1, 20),
    chunk_bytes=st.sampled_from((50, 300, 1 << 20)),
)


def check(story: Story) -> None:
    """Run a story through members and through the oracle, and compare all that they say."""
    oracle = Oracle(story.spans, story.lateness, early_s=story.early_s)
    clocks = [0, 7, 15]
    sent: list[Event] = []
    early = timedelta(seconds=story.early_s) if story.early_s else None

    def application() -> Windowed:
        windows = Windows("rows", story.spans, values(), early=early)
        return Windowed(windows, story.lateness)

    with (
        tempfile.TemporaryDirectory(prefix="gazette-windows-") as directory,
        Members(application, Path(directory), [SOURCE], story.chunk_bytes) as members,
    ):
        for number, (producer, ahead, key) in enumerate(story.steps):
            if ahead < 0 and sent:
                members.feed(sent[ahead % len(sent)])  # A duplicate.
            else:
                clocks[producer] += abs(ahead) + 1
                event = Event(SOURCE, producer, clocks[producer], key, number)
                sent.append(event)
                oracle.add(event)
                members.feed(event)
            if number in story.fates:
                members.meet(story.fates[number])
            elif number % story.run_every == 0:
                members.primary.run()
                check_timers(members.primary, oracle)
            if number < len(story.pauses):
                members.primary.advance(story.pauses[number])
                oracle.advance(story.pauses[number])
        driver = members.primary
        driver.run()
        results = driver.committed(TARGET, Closed)
        found = [(one.key, one.begin, one.end, tuple(one.value), one.final) for one in results]
        assert sorted(one[:-1] for one in found if one[-1]) == sorted(oracle.closed)
        assert sorted(one[:-1] for one in found if not one[-1]) == sorted(oracle.early)
        assert [value for (value,) in driver.store.query("SELECT value FROM late")] == oracle.late
        rows = driver.store.query("SELECT key, begin, end, state FROM rows")
        left = sorted((key, b - EPOCH_US, e - EPOCH_US, json.loads(v)) for key, b, e, v in rows)
        assert left == sorted(
            (key, b, e, sorted(v for _, v in ms)) for key, ms, b, e in oracle.open
        )
        check_timers(driver, oracle)


def check_timers(driver: AppDriver[Any], oracle: Oracle) -> None:
    """Check that each open window has the timer of its end, and that of its early result if it changed."""
    if not driver.store.holds_timers:
        assert not oracle.open
        return
    sql = "SELECT at FROM gazette_timer WHERE domain = ? ORDER BY at"
    ends = [at - EPOCH_US for (at,) in driver.store.query(sql, (TimeDomain.EVENT.value,))]
    assert ends == sorted(end for _, _, _, end in oracle.open)
    begun = driver.clock.now() - oracle.now
    early = driver.store.query(sql, (TimeDomain.PROCESSING.value,))
    assert [round(at / 1e6 - begun, 3) for (at,) in early] == sorted(oracle.due.values())


@settings(max_examples=examples(80), report_multiple_bugs=False)
@given(story=stories)
def test_windows_equal_their_oracle(story: Story) -> None:
    """Check final results, late messages and open windows: with duplicates, lateness, crashes and
    fail-overs. `make fuzz-windows` tries more.
    """
    check(story)


def driven(tmp_path: Path, windows: Windows[Any, Any, Any]) -> AppDriver[Any]:
    return AppDriver(Windowed(windows), tmp_path, [SOURCE])


def send(driver: AppDriver[Any], *events: tuple[int, int]) -> None:
    for at, value in events:
        driver.feed(SOURCE, Event(SOURCE, 1, at, "a", value).frame)
    driver.run()


def results(driver: AppDriver[Any]) -> list[tuple[Any, bool]]:
    return [(one.value, one.final) for one in driver.committed(TARGET, Closed)]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [(count(), 3), (total(), 6), (least(), 1), (greatest(), 3), (mean(), 2.0)],
)
@pytest.mark.parametrize("spans", [Tumbling(us(100)), Sessions(us(40))])
def test_aggregates(tmp_path: Path, aggregate: Any, expected: Any, spans: Any) -> None:
    """Check each aggregate, also of two sessions that a third message joins."""
    application = Windowed(Windows("rows", spans, aggregate), lateness_us=100)
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        for at, value in ((10, 3), (70, 1), (40, 2)):
            driver.feed(SOURCE, Event(SOURCE, at, at, "a", value).frame)
        driver.run()
        send(driver, (500, 9))
        assert results(driver) == [(expected, True)]


def test_sessions_are_joined_before_they_close(tmp_path: Path) -> None:
    application = Windowed(Windows("rows", Sessions(us(40)), total()), lateness_us=100)
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        for at, value in ((10, 3), (70, 1), (40, 2)):
            driver.feed(SOURCE, Event(SOURCE, at, at, "a", value).frame)
        driver.run()
        assert driver.store.query("SELECT begin, end FROM rows") == [
            (EPOCH_US + 10, EPOCH_US + 110)
        ]
        assert len(driver.store.query("SELECT * FROM gazette_timer")) == 1
        send(driver, (500, 9))
        assert results(driver) == [(6, True)]


@pytest.mark.parametrize("order", [(10, 50), (50, 10)])
def test_messages_a_whole_gap_apart_are_two_sessions(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    application = Windowed(Windows("rows", Sessions(us(40)), total()), lateness_us=100)
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        for at in order:
            driver.feed(SOURCE, Event(SOURCE, at, at, "a", at).frame)
        driver.run()
        assert driver.store.query("SELECT begin, end FROM rows") == [
            (EPOCH_US + 10, EPOCH_US + 50),
            (EPOCH_US + 50, EPOCH_US + 90),
        ]


@pytest.mark.parametrize("spans", [Tumbling(us(100)), Sessions(us(100))])
def test_early_results_come_before_the_final_one(tmp_path: Path, spans: Any) -> None:
    """Check that there is one for each second in which the window changed, and none after the end."""
    windows = Windows("rows", spans, total(), early=timedelta(seconds=1))
    with driven(tmp_path, windows) as driver:
        send(driver, (10, 1))
        driver.crash()
        driver.advance(0.5)
        send(driver, (11, 2))
        driver.advance(0.5)
        assert results(driver) == [(3, False)]
        driver.advance(10)
        assert results(driver) == [(3, False)]
        send(driver, (12, 3), (300, 9))
        driver.advance(0.9)
        assert results(driver) == [(3, False), (6, True)]
        driver.advance(0.2)
        assert results(driver) == [(3, False), (6, True), (9, False)]


BAD: Sequence[tuple[Any, str]] = [
    (lambda: Tumbling(us(0)), "size"),
    (lambda: Tumbling(5), "size"),  # type: ignore[arg-type]
    (lambda: Hopping(us(5), us(6)), "step"),
    (lambda: Hopping(us(5000), us(1)), "step"),
    (lambda: Sessions(us(-1)), "gap"),
    (lambda: Windows("Bad Name", Tumbling(us(1)), count()), "name"),
    (lambda: Windows("rows", us(1), count()), "spans"),  # type: ignore[arg-type]
    (lambda: Windows("rows", Tumbling(us(1)), count(), early=us(0)), "early"),
    (lambda: Windows("rows", Sessions(us(1)), Aggregate(list, max, max)), "aggregate"),
]


@pytest.mark.parametrize(("make", "path"), BAD)
def test_bad_windows_are_refused_by_name(make: Any, path: str) -> None:
    with pytest.raises(Invalid) as raised:
        make()
    assert raised.value.path == path


def test_windows_need_event_time_and_sqlite(tmp_path: Path) -> None:
    class Plain(Windowed):
        def __init__(self) -> None:
            super().__init__(Windows("rows", Tumbling(us(1)), count()))
            self.event_time = None  # type: ignore[misc]

    with (
        AppDriver(Plain(), tmp_path / "one", [SOURCE]) as driver,
        raises(NotAllowed, advises="event_time"),
    ):
        send(driver, (1, 1))

    class InJSON(Windowed):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            return JSONFileStore(recorder, dict)

    windows = Windows("rows", Tumbling(us(1)), count())
    json_store = AppDriver(InJSON(windows), tmp_path / "two", [SOURCE])
    with json_store as driver, raises(Invalid, says="JSONFileStore"):
        send(driver, (1, 1))
