"""Joins: their results are those of lists that are searched by brute force, over any history."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette import Application, Envelope, EventTime, Message, Publisher, Timer
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.errors import Invalid, NotAllowed
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import JoinKind, StreamJoin, TableJoin, Tumbling, Windows, count, tables
from tests.facts import raises
from tests.fuzzing import examples
from tests.windows.members import EPOCH_US, TARGET, Event, Members, fates, since_epoch, us

LEFT, RIGHT = "left", "right"
SOURCES = [LEFT, RIGHT]
TO_TARGET = fixed_mapping(TARGET, CONTENT_JSON_LINES)
SEEN = """
CREATE TABLE IF NOT EXISTS seen (number INTEGER PRIMARY KEY, source, at, key, value);
CREATE TABLE IF NOT EXISTS late (source, value);
"""


class Value(Message):
    key: str = ""
    value: int | None = 0


class Result(Message):
    key: str = ""
    values: tuple[Any, Any] = (None, None)
    times: tuple[int | None, int | None] = (None, None)


class Joining(Application[SQLiteStore]):
    """Notes what it consumes, in that order: journals are interleaved as it happens."""

    message_type = Value
    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, join: StreamJoin[int, int], lateness_us: int = 0) -> None:
        self.join = join
        self.event_time = EventTime(us(lateness_us))  # type: ignore[misc]

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, self.join.schema + SEEN)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Value], publisher: Publisher
    ) -> None:
        one, source, at = envelope.message, envelope.journal, envelope.time
        values = (source, since_epoch(at), one.key, one.value)
        store.execute("INSERT INTO seen VALUES (NULL, ?, ?, ?, ?)", values)
        if self.is_late(shard, store, source, one, at, publisher):
            store.execute("INSERT INTO late VALUES (?, ?)", (source, one.value))

    def is_late(
        self, shard: Any, store: Any, source: str, one: Value, at: Any, publisher: Publisher
    ) -> bool:
        assert one.value is not None
        add = self.join.add_left if source == LEFT else self.join.add_right
        added = add(shard, store, one.key, at, one.value)
        self.publish(added.pairs, publisher)
        return added.late

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        self.publish(self.join.on_timer(shard, store, timer), publisher)

    def publish(self, pairs: Sequence[Any], publisher: Publisher) -> None:
        for one in pairs:
            times = unix(one.left_at), unix(one.right_at)
            result = Result(key=one.key, values=(one.left, one.right), times=times)
            publisher.publish_uncommitted(TO_TARGET, result)


class Looking(Joining):
    """Joins the left side with the table of the right side."""

    def __init__(self, join: TableJoin[int, int], lateness_us: int = 0) -> None:
        self.table = join
        self.event_time = EventTime(us(lateness_us))  # type: ignore[misc]

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, self.table.schema + SEEN)

    def is_late(
        self, shard: Any, store: Any, source: str, one: Value, at: Any, publisher: Publisher
    ) -> bool:
        if source == LEFT:
            assert one.value is not None
            return not self.table.add(shard, store, one.key, at, one.value)
        return not self.table.put(shard, store, one.key, at, one.value)

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        for one in self.table.on_timer(shard, store, timer):
            times = unix(one.at), unix(one.row_at)
            result = Result(key=one.key, values=(one.value, one.row), times=times)
            publisher.publish_uncommitted(TO_TARGET, result)


def unix(at: datetime | None) -> int | None:
    return None if at is None else since_epoch(at)


Found = tuple[str, Any, Any, Any, Any]
"""Key, both values, both times."""


@dataclass
class Row:
    side: str
    key: str
    at: int
    value: int
    paired: bool = False


@dataclass
class Oracle:
    """The watermark by brute force: the least of the greatest times, less what is allowed."""

    lateness: int
    results: list[Found] = field(default_factory=list)
    late: list[tuple[str, Any]] = field(default_factory=list)
    watermark: int | None = None
    greatest: dict[str, int] = field(default_factory=dict)
    in_time: bool = True
    """True while no message was before the watermark."""
    taken: int = 0
    """Number of messages so far."""

    def observe(self, source: str, at: int) -> None:
        self.greatest[source] = max(at, self.greatest.get(source, at))
        if len(self.greatest) == 2:
            reached = min(self.greatest.values()) - self.lateness
            if self.watermark is None or reached > self.watermark:
                self.watermark = reached

    def passed(self, at: int) -> bool:
        return self.watermark is not None and at < self.watermark

    def add(self, source: str, at: int, key: str, value: int | None) -> None:
        self.in_time = self.in_time and not self.passed(at)
        if not self.accept(source, at, key, value):
            self.late.append((source, value))
        self.observe(source, at)
        self.settle()

    def accept(self, source: str, at: int, key: str, value: int | None) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError


@dataclass
class StreamOracle(Oracle):
    before: int = 0
    after: int = 0
    kind: JoinKind = JoinKind.INNER
    rows: list[Row] = field(default_factory=list)
    all: list[Row] = field(default_factory=list)

    def accept(self, source: str, at: int, key: str, value: int | None) -> bool:
        assert value is not None
        row = Row(source, key, at, value)
        if self.passed(self._last(row)):
            return False
        for one in self.rows:
            left, right = (row, one) if source == LEFT else (one, row)
            if one.side != source and self._belong(left, right):
                row.paired = one.paired = True
                self.results.append((key, left.value, right.value, left.at, right.at))
        self.rows.append(row)
        self.all.append(row)
        return True

    def _last(self, row: Row) -> int:
        return row.at + (self.after if row.side == LEFT else self.before)

    def _belong(self, left: Row, right: Row) -> bool:
        return left.key == right.key and -self.before <= right.at - left.at <= self.after

    def settle(self) -> None:
        for row in [one for one in self.rows if self.passed(self._last(one))]:
            self.rows.remove(row)
            if row.paired or self.kind is JoinKind.INNER:
                continue
            if row.side == LEFT:
                self.results.append((row.key, row.value, None, row.at, None))
            elif self.kind is JoinKind.OUTER:
                self.results.append((row.key, None, row.value, None, row.at))

    @property
    def pairs_without_order(self) -> list[Found]:
        return [
            (left.key, left.value, right.value, left.at, right.at)
            for left in self.all
            for right in self.all
            if (left.side, right.side) == (LEFT, RIGHT) and self._belong(left, right)
        ]


@dataclass
class TableOracle(Oracle):
    wait: int = 0
    rows: list[Row] = field(default_factory=list)
    table: dict[tuple[str, int], int | None] = field(default_factory=dict)

    def accept(self, source: str, at: int, key: str, value: int | None) -> bool:
        if source == LEFT:
            assert value is not None
            if not self.passed(at):
                self.rows.append(Row(source, key, at, value))
            return not self.passed(at)
        later = [t for k, t in self.table if k == key and t > at and not self._ahead(t)]
        if not later:
            self.table[key, at] = value
        return not later

    def _ahead(self, at: int) -> bool:
        return self.watermark is None or at > self.watermark

    def settle(self) -> None:
        for row in [one for one in self.rows if self.passed(one.at)]:
            times = sorted(at for key, at in self.table if key == row.key)
            held = max((at for at in times if at <= row.at), default=None)
            coming = [
                at
                for at in times
                if row.at < at <= row.at + self.wait and self.table[row.key, at] is not None
            ]
            if held is not None and self.table[row.key, held] is not None:
                self._join(row, held)
            elif coming and self.passed(coming[0]):
                self._join(row, coming[0])
            elif not coming and self.passed(row.at + self.wait):
                self._join(row, None)
        for key in {key for key, _ in self.table}:
            times = sorted(at for one, at in self.table if one == key and not self._ahead(at))
            # The last one that the watermark has passed holds, unless it deletes.
            gone = times if times and self.table[key, times[-1]] is None else times[:-1]
            for at in gone:
                del self.table[key, at]

    def _join(self, row: Row, at: int | None) -> None:
        self.rows.remove(row)
        found = None if at is None else self.table[row.key, at]
        self.results.append((row.key, row.value, found, row.at, at))


@dataclass(frozen=True)
class Story:
    """A history of two sources, and what happens to its members. Chunks of bytes have any size."""

    bounds: tuple[int, int]
    kind: JoinKind
    lateness: int
    steps: tuple[tuple[int, int, str, bool], ...]
    """Source and producer, time since its last message, key, and whether a row is deleted.

    A negative time repeats an earlier message. The producers of one source differ by their clocks.
    """
    fates: dict[int, str]
    run_every: int
    chunk_bytes: int
    swept: int
    """Rows that one timer removes."""


stories = st.builds(
    Story,
    bounds=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    kind=st.sampled_from(JoinKind),
    lateness=st.sampled_from((0, 0, 3, 10, 40)),
    steps=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(-3, 12),
            st.sampled_from("ab"),
            st.integers(0, 3).map(bool),
        ),
        max_size=40,
    ).map(tuple),
    fates=fates,
    run_every=st.integers(1, 20),
    chunk_bytes=st.sampled_from((50, 300, 1 << 20)),
    swept=st.sampled_from((1, 3, tables.SWEPT_MAX)),
)


def run(story: Story, application: Any, oracle: Oracle, *, deletes: bool) -> AppDriver[Any]:
    """Run a story through members, then what they consumed through the oracle. Compare all results."""
    clocks = [0, 7, 15, 2, 4]
    sent: list[Event] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="gazette-joins-") as directory,
        Members(application, Path(directory), SOURCES, story.chunk_bytes) as members,
    ):
        patch.setattr(tables, "SWEPT_MAX", story.swept)  # Joins are made at each promotion.
        for number, (producer, ahead, key, keeps) in enumerate(story.steps):
            if ahead < 0 and sent:
                members.feed(sent[ahead % len(sent)])  # A duplicate.
            else:
                # Steps of 0 let several messages of a key have one time.
                clocks[producer] += abs(ahead) or 1
                source = SOURCES[producer % 2]
                value = number if keeps or not deletes or source == LEFT else None
                sent.append(Event(source, producer, clocks[producer], key, value))
                members.feed(sent[-1])
            if number in story.fates:
                members.meet(story.fates[number])
            elif number % story.run_every == 0:
                members.primary.run()
                follow(members.primary, oracle)
        driver = members.primary
        driver.run()
        follow(driver, oracle)
        seen = driver.store.query("SELECT source, at, key, value FROM seen")
        assert sorted(seen, key=repr) == sorted(
            ((one.source, one.at, one.key, one.value) for one in sent), key=repr
        )
        found = [(one.key, *one.values, *one.times) for one in driver.committed(TARGET, Result)]
        assert sorted(found, key=repr) == sorted(oracle.results, key=repr)
        assert driver.store.query("SELECT source, value FROM late") == oracle.late
        return driver


def follow(driver: AppDriver[Any], oracle: Oracle) -> None:
    """Have the oracle take what was consumed since the last call, in that order. Compare what is kept."""
    seen = driver.store.query(
        "SELECT source, at, key, value FROM seen WHERE number > ? ORDER BY number", (oracle.taken,)
    )
    for source, at, key, value in seen:
        oracle.add(source, at, key, value)
    oracle.taken += len(seen)
    check_rows(driver, oracle)


def check_rows(driver: AppDriver[Any], oracle: Oracle) -> None:
    """Compare what is kept: nothing that the watermark has passed, and one timer for what is due."""
    keys = set()
    if driver.store.holds_timers:
        keys = {row for (row,) in driver.store.query("SELECT key FROM gazette_timer")}
    assert keys <= {"rows:due"}
    assert keys or not driver.store.query("SELECT 1 FROM rows WHERE due IS NOT NULL")
    if isinstance(oracle, StreamOracle):
        left = [(SOURCES[side], key, at) for side, key, at in kept(driver, "side, key, at", "rows")]
        assert sorted(left) == sorted((one.side, one.key, one.at) for one in oracle.rows)
    elif isinstance(oracle, TableOracle):
        assert sorted(kept(driver, "key, at", "rows.waiting")) == sorted(
            (one.key, one.at) for one in oracle.rows
        )
        assert sorted(kept(driver, "key, at", "rows")) == sorted(oracle.table)


def kept(driver: AppDriver[Any], columns: str, table: str) -> list[Any]:
    rows = driver.store.query(f'SELECT {columns} FROM "{table}"')
    return [(*rest, at - EPOCH_US) for *rest, at in rows]


def check_stream(story: Story) -> None:
    before, after = story.bounds
    oracle = StreamOracle(story.lateness, before=before, after=after, kind=story.kind)

    def application() -> Joining:
        join: StreamJoin[int, int] = StreamJoin(
            "rows", before=us(before), after=us(after), kind=story.kind
        )
        return Joining(join, story.lateness)

    run(story, application, oracle, deletes=False)
    if oracle.in_time:  # Then results do not depend on how the journals were interleaved.
        pairs = [one for one in oracle.results if None not in one]
        assert sorted(pairs) == sorted(oracle.pairs_without_order)


def check_table(story: Story) -> None:
    oracle = TableOracle(story.lateness, wait=story.bounds[0])

    def application() -> Looking:
        return Looking(TableJoin("rows", wait=us(story.bounds[0])), story.lateness)

    run(story, application, oracle, deletes=True)


@settings(max_examples=examples(60), report_multiple_bugs=False)
@given(story=stories)
def test_joins_of_streams_equal_their_oracle(story: Story) -> None:
    """Check pairs, messages without a partner, late ones and what is kept. `make fuzz-windows` tries more."""
    check_stream(story)


@settings(max_examples=examples(60), report_multiple_bugs=False)
@given(story=stories)
def test_joins_with_tables_equal_their_oracle(story: Story) -> None:
    check_table(story)


JOIN: StreamJoin[Any, Any] = StreamJoin("rows", before=us(10), after=us(20), kind=JoinKind.OUTER)


def feed(driver: AppDriver[Any], *events: tuple[str, int, int | None]) -> None:
    for source, at, value in events:
        driver.feed(source, Event(source, 1, at, "a", value).frame)
        driver.run()


def found(driver: AppDriver[Any]) -> list[tuple[Any, Any]]:
    return [one.values for one in driver.committed(TARGET, Result)]


def test_both_bounds_are_inclusive(tmp_path: Path) -> None:
    with AppDriver(Joining(JOIN, lateness_us=100), tmp_path, SOURCES) as driver:
        feed(
            driver, (LEFT, 100, 1), (RIGHT, 89, 2), (RIGHT, 90, 3), (RIGHT, 120, 4), (RIGHT, 121, 5)
        )
        assert found(driver) == [(1, 3), (1, 4)]


def test_a_message_waits_until_its_last_partner_would_be_late(tmp_path: Path) -> None:
    """Check both sides of the moment: a partner at the watermark is in time."""
    with AppDriver(Joining(JOIN), tmp_path, SOURCES) as driver:
        feed(driver, (LEFT, 100, 1), (RIGHT, 120, 2), (LEFT, 120, 3))
        assert found(driver) == [(1, 2), (3, 2)]
        feed(driver, (RIGHT, 121, 4), (LEFT, 121, 5))
        assert kept(driver, "value, at", "rows") == [("3", 120), ("5", 121), ("2", 120), ("4", 121)]
        feed(driver, (LEFT, 200, 6), (RIGHT, 200, 7))
        assert found(driver) == [(1, 2), (3, 2), (3, 4), (5, 2), (5, 4), (6, 7)]
        assert len(kept(driver, "value, at", "rows")) == 2
        feed(driver, (LEFT, 999, 8), (RIGHT, 999, 9), (LEFT, 2000, 10), (RIGHT, 2000, 11))
        assert found(driver)[6:] == [(8, 9), (10, 11)]


class Both(Joining):
    """Windows, and joins whose names begin alike, in one store. Values are messages."""

    def __init__(self) -> None:
        super().__init__(
            StreamJoin[Any, Any](
                "order", before=us(5), after=us(5), left_type=Value, right_type=Value
            )
        )
        self.outer: StreamJoin[Any, Any] = StreamJoin(
            "order_due",
            before=us(0),
            after=us(0),
            kind=JoinKind.OUTER,
            left_type=Value,
            right_type=Value,
        )
        self.table = TableJoin[Any, Any]("order_waiting", value_type=Value, row_type=Value)
        self.windows = Windows("group", Tumbling(us(10)), count())
        self.parts = (self.join, self.outer, self.table, self.windows)

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, SEEN + "".join(one.schema for one in self.parts))

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Value], publisher: Publisher
    ) -> None:
        one, at = envelope.message, envelope.time
        self.windows.add(shard, store, one.key, at, 1)
        for join in (self.join, self.outer):
            add = join.add_left if envelope.journal == LEFT else join.add_right
            for pair in add(shard, store, one.key, at, one).pairs:  # type: ignore[arg-type]
                self.say(publisher, join.name, type(pair.left).__name__, type(pair.right).__name__)
        if envelope.journal == RIGHT:
            self.table.put(shard, store, one.key, at, one)
        else:
            self.table.add(shard, store, one.key, at, one)
        if one.value is None:
            raise ValueError("poison")

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        for join in (self.join, self.outer):
            for pair in join.on_timer(shard, store, timer):
                self.say(publisher, join.name, pair.left is None, pair.right is None)
        for found in self.table.on_timer(shard, store, timer):
            self.say(publisher, self.table.name, found.value.value, type(found.row).__name__)
        for window in self.windows.on_timer(shard, store, timer):
            self.say(publisher, self.windows.name, window.value, None)

    def say(self, publisher: Publisher, name: str, one: Any, other: Any) -> None:
        publisher.publish_uncommitted(TO_TARGET, Result(key=name, values=(one, other)))

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return PoisonPolicy("dead")


def test_several_of_one_application_do_not_meet(tmp_path: Path) -> None:
    with AppDriver(Both(), tmp_path, SOURCES) as driver:
        feed(driver, (RIGHT, 1, 1), (LEFT, 3, 2), (RIGHT, 90, 3), (LEFT, 90, 4))
        assert [(one.key, *one.values) for one in driver.committed(TARGET, Result)] == [
            ("order", "Value", "Value"),
            ("order_due", True, False),
            ("order", "Value", "Value"),
            ("order_due", "Value", "Value"),
            ("order_due", False, True),
            ("order_waiting", 2, "Value"),
            ("group", 2, None),
        ]


def test_a_message_that_is_skipped_leaves_nothing_in_a_join(tmp_path: Path) -> None:
    with AppDriver(Both(), tmp_path, SOURCES) as driver:
        feed(driver, (RIGHT, 1, 1), (RIGHT, 2, None), (LEFT, 3, None), (LEFT, 4, 2))
        assert [reason for _, reason in driver.skipped] == ["application", "application"]
        assert kept(driver, "side, at", "order") == [(1, 1), (0, 4)]
        assert kept(driver, "at", "order_waiting.waiting") == [(4,)]
        assert kept(driver, "at", "order_waiting") == [(1,)]


def test_one_timer_removes_a_bounded_number_of_rows(tmp_path: Path) -> None:
    most = tables.SWEPT_MAX
    found: list[int] = []

    class Counting(Joining):
        def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
            found.append(len(self.join.on_timer(shard, store, timer)))

    join: StreamJoin[int, int] = StreamJoin("rows", before=us(0), after=us(0), kind=JoinKind.OUTER)
    with AppDriver(Counting(join), tmp_path, SOURCES) as driver:
        for at in range(1, 3 * most + 3):
            driver.feed(LEFT, Event(LEFT, 1, at, "a", at).frame)
        driver.run()
        feed(driver, (RIGHT, 4 * most, 0), (LEFT, 4 * most, 0))
        # The watermark comes to that of the last row, then behind it.
        assert found == [most, most, most, 1, 1]


def test_the_latest_row_is_read_by_queries(tmp_path: Path) -> None:
    table: TableJoin[int, int] = TableJoin("rows")
    with AppDriver(Looking(table), tmp_path, SOURCES) as driver:
        feed(driver, (RIGHT, 1, 7), (RIGHT, 5, 8))
        assert table.latest(driver.store, "a") == 8
        assert table.latest(driver.store, "b") is None
        feed(driver, (RIGHT, 9, None))
        assert table.latest(driver.store, "a") is None


BAD: Sequence[tuple[Any, str]] = [
    (lambda: StreamJoin("gazette_rows", before=us(1), after=us(1)), "name"),
    (lambda: StreamJoin("sqlite_rows", before=us(1), after=us(1)), "name"),
    (lambda: StreamJoin('a"b', before=us(1), after=us(1)), "name"),
    (lambda: StreamJoin("rows", before=us(-1), after=us(1)), "before"),
    (lambda: StreamJoin("rows", before=us(1), after=5), "after"),  # type: ignore[arg-type]
    (lambda: StreamJoin("rows", before=us(1), after=us(1), kind="left"), "kind"),  # type: ignore[arg-type]
    (lambda: TableJoin("Rows"), "name"),
    (lambda: TableJoin(None), "name"),  # type: ignore[arg-type]
    (lambda: TableJoin("rows", wait=us(-1)), "wait"),
    (lambda: tables.check_keeps(SQLiteStore.__new__(SQLiteStore), 7, "a join"), "key"),
]


@pytest.mark.parametrize(("make", "path"), BAD)
def test_bad_joins_are_refused_by_name(make: Any, path: str) -> None:
    with pytest.raises(Invalid) as raised:
        make()
    assert raised.value.path == path


def test_joins_need_event_time_and_sqlite(tmp_path: Path) -> None:
    plain = Joining(JOIN)
    plain.event_time = None  # type: ignore[misc]
    with (
        AppDriver(plain, tmp_path / "one", SOURCES) as driver,
        raises(NotAllowed, advises="event_time"),
    ):
        feed(driver, (LEFT, 1, 1))

    class InJSON(Joining):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            return JSONFileStore(recorder, dict, dict)

        def consume_message(
            self, shard: Any, store: Any, envelope: Envelope[Value], publisher: Publisher
        ) -> None:
            self.join.add_left(shard, store, "a", envelope.time, 1)

    with (
        AppDriver(InJSON(JOIN), tmp_path / "two", SOURCES) as driver,
        raises(Invalid, advises="SQLiteStore"),
    ):
        feed(driver, (LEFT, 1, 1))


class Stumbles(Both):
    """Its next timers raise, and a policy skips them."""

    stumbles = 0

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        super().on_timer(shard, store, timer, publisher)
        if self.stumbles:
            self.stumbles -= 1
            raise ValueError("poison")


def test_the_rows_of_a_timer_that_was_skipped_come_after_the_next_message(tmp_path: Path) -> None:
    application = Stumbles()
    with AppDriver(application, tmp_path, SOURCES) as driver:
        feed(driver, (LEFT, 1, 1), (RIGHT, 2, 2))
        application.stumbles = 3  # Of both joins of streams, and of the join with a table.
        feed(driver, (LEFT, 100, 3), (RIGHT, 100, 4))
        assert [reason for _, reason in driver.skipped] == ["timer"] * 3
        driver.crash()
        feed(driver, (LEFT, 200, 5), (RIGHT, 200, 6))
        assert kept(driver, "at", "order") == [(200,), (200,)]
        assert kept(driver, "at", "order_due") == [(200,), (200,)]
        names = [one.key for one in driver.committed(TARGET, Result)]
        assert names.count("order_waiting") == 2
        assert names.count("order_due") == 4
