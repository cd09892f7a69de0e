"""Values in windows and joins: what cannot be kept is an error of its message, and changes nothing."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from gazette import Application, EventTime
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.consumer.contract.poison import PoisonPolicy
from gazette.errors import Corrupt, InvalidValue
from gazette.message.message import Message
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import (
    Aggregate,
    Hopping,
    JoinKind,
    Sessions,
    StreamJoin,
    TableJoin,
    Tumbling,
    Windows,
    greatest,
    least,
    mean,
    total,
)
from tests.facts import failed_by_its_message, raises
from tests.windows.members import us

SOURCE: Final = "numbers"
HOUR: Final = us(3_600_000_000)
HUGE: Final = 1.5e308
AWARE: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Number(Message):
    """A message whose value the application makes of it: JSON has no NaN."""

    index: int


class Kept(Application[SQLiteStore]):
    """Adds the values to windows or a join, and keeps what its timers give."""

    message_type = Number
    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, part: Any, values: list[Any], *, skips: bool = True) -> None:
        self.part = part
        self.values = values
        self.skips = skips
        self.results: list[Any] = []

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, self.part.schema)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        value = self.values[envelope.message.index]
        add = self.part.add_left if isinstance(self.part, StreamJoin) else self.part.add
        add(shard, store, "a", envelope.time, value)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self.results += self.part.on_timer(shard, store, timer)

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return PoisonPolicy("dead") if self.skips else None


def driven(tmp_path: Path, application: Kept) -> AppDriver[Any]:
    return AppDriver(application, tmp_path, [SOURCE])


def feed(driver: AppDriver[Any], index: int) -> None:
    driver.publish(SOURCE, Number(index=index))
    driver.run()


def states(driver: AppDriver[Any]) -> list[str]:
    return [row[0] for row in driver.store.query("SELECT state FROM part ORDER BY begin")]


@pytest.mark.parametrize(
    ("aggregate", "good", "bad", "state", "later"),
    [
        (total(), 1.5, math.nan, "1.5", "3.0"),
        (total(), 1.5, -math.inf, "1.5", "3.0"),
        (total(), HUGE, HUGE, "1.5e308", ""),
        (mean(), 2, math.nan, "[2,1]", "[4,2]"),
        (mean(), HUGE, HUGE, "[1.5e308,1]", ""),
        (least(), 2, math.nan, "2", "2"),
        (least(), 2, math.inf, "2", "2"),
        (greatest(), 2, -math.inf, "2", "2"),
        (greatest(tuple[int, float]), (2, 3.0), (1, math.nan), "[2,3.0]", "[2,3.0]"),
        (greatest(), "b", b"c", '"b"', '"b"'),
        (greatest(), "b", 7, '"b"', '"b"'),
        (least(), 2, None, "2", "2"),
        (least(datetime), AWARE, AWARE.replace(tzinfo=None), '"2026-01-01T00:00:00Z"', ""),
        (total(), 1.5, "1", "1.5", "3.0"),
        (total(), 1.5, 10**400, "1.5", "3.0"),
        (mean(), 2, 10**400, "[2,1]", "[4,2]"),
    ],
)
def test_a_value_that_a_window_cannot_keep_leaves_it_as_it_was(
    tmp_path: Path, aggregate: Any, good: Any, bad: Any, state: str, later: str
) -> None:
    """The policy sets the message aside, and the innocent ones after it count."""
    application = Kept(Windows("part", Tumbling(HOUR), aggregate), [good, bad])
    with driven(tmp_path, application) as driver:
        feed(driver, 0)
        feed(driver, 1)
        assert [reason for _, reason in driver.skipped] == ["application"]
        assert states(driver) == [state]
        if later:
            driver.crash()
            feed(driver, 0)
            assert states(driver) == [later]
        driver.advance(3600)
        feed(driver, 0)
        assert len(application.results) == 1


@pytest.mark.parametrize(
    ("aggregate", "good", "bad", "path", "says"),
    [
        (total(), HUGE, HUGE, "value", "1.5e+308"),
        (total(), 1, math.nan, "value", "nan"),
        (mean(), HUGE, HUGE, "value", "1.5e+308"),
        (mean(), 1, 10**400, "result", "too large"),
        (greatest(), "b", 7, "value", "7"),
        (least(), 1, None, "value", "None"),
    ],
)
@pytest.mark.parametrize("spans", [Tumbling(HOUR), Sessions(HOUR)])
def test_an_error_names_the_value_that_was_added(
    tmp_path: Path, spans: Any, aggregate: Any, good: Any, bad: Any, path: str, says: str
) -> None:
    windows = Windows("part", spans, aggregate)
    with driven(tmp_path, Kept(windows, [good, bad], skips=False)) as driver:
        feed(driver, 0)
        with (
            raises(InvalidValue, path=path, says=says, windows="part", key="a"),
            failed_by_its_message(),
        ):
            feed(driver, 1)


RESULTS: Final[list[Any]] = [
    lambda state: state * HUGE,
    lambda state: {"mean": [state * HUGE]},
    lambda state: 1 / (state - 2),
    lambda state: float(10 ** (308 * (state // 2 + 1))),
    lambda state: math.nan if state == 2 else state,
]


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("spans", [Tumbling(HOUR), Hopping(HOUR, HOUR / 2), Sessions(HOUR)])
def test_a_result_that_overflows_is_an_error_of_the_message_that_makes_it(
    tmp_path: Path, spans: Any, result: Any
) -> None:
    """The window closes with the messages that are left: its timer cannot stop the shard."""
    summed = Aggregate(zero=lambda: 0, add=_plus, merge=_plus, result=result, state_type=int)
    with (
        driven(tmp_path / "1", Kept(Windows("part", spans, summed), [1], skips=False)) as driver,
        raises(InvalidValue, "windows", "key"),
        failed_by_its_message(),
    ):
        feed(driver, 0)
        feed(driver, 0)
    application = Kept(Windows("part", spans, summed), [1])
    with driven(tmp_path / "2", application) as driver:
        feed(driver, 0)
        feed(driver, 0)
        driver.crash()
        driver.advance(3 * 3600)
        feed(driver, 0)
        assert [reason for _, reason in driver.skipped] == ["application"]
        assert {str(one.value) for one in application.results} == {str(result(1))}


def _plus(one: int, other: int) -> int:
    return one + other


def test_a_result_that_a_newer_aggregate_cannot_make_is_an_error_of_its_timer(
    tmp_path: Path,
) -> None:
    """The shard fails by name at each start. With a policy it goes on, and the row stays."""

    class Ticking(Kept):
        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            if envelope.message.index == 0:
                super().consume_message(shard, store, envelope, publisher)

    def windows(result: Any) -> Windows[Any, Any, Any]:
        aggregate = Aggregate(zero=lambda: 0, add=_plus, result=result, state_type=int)
        return Windows("part", Tumbling(HOUR), aggregate)

    application = Ticking(windows(int), [1], skips=False)
    with driven(tmp_path, application) as driver:
        feed(driver, 0)
        application.part = windows(lambda state: state * math.inf)
        driver.advance(2 * 3600)
        for _ in range(2):
            with raises(ApplicationFailed, "timer", "at") as raised:
                feed(driver, 1)
            cause = raised.value.__cause__
            assert isinstance(cause, InvalidValue)
            assert (cause.path, cause.facts["windows"]) == ("result", "part")
            driver.crash()
        application.skips = True
        feed(driver, 1)
        assert [reason for _, reason in driver.skipped] == ["timer"]
        assert states(driver) == ["1"]
        assert application.results == []


def test_an_early_result_comes_again_after_its_timer_was_skipped(tmp_path: Path) -> None:
    class Stumbles(Kept):
        stumbles = True

        def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
            if self.stumbles:
                raise ValueError("poison")
            super().on_timer(shard, store, timer, publisher)

    windows = Windows("part", Tumbling(HOUR), total(), early=us(5_000_000))
    application = Stumbles(windows, [1, 2, 4, 8])
    with driven(tmp_path, application) as driver:
        feed(driver, 0)
        driver.advance(6)
        feed(driver, 1)
        driver.advance(10)
        assert [reason for _, reason in driver.skipped] == ["timer"]
        application.stumbles = False
        feed(driver, 2)
        driver.advance(10)
        assert [result.value for result in application.results] == [7]
        feed(driver, 3)
        driver.advance(10)
        assert [(result.value, result.final) for result in application.results[1:]] == [(15, False)]


@pytest.mark.parametrize("spans", [Tumbling(us(10)), Hopping(us(10), us(5)), Sessions(us(10))])
def test_a_state_of_an_undeclared_type_is_refused_at_the_first_add(
    tmp_path: Path, spans: Any
) -> None:
    """An int as key would come back as a text, without any crash."""

    def added(state: dict[Any, int], value: Any) -> dict[Any, int]:
        return {**state, value: state.get(value, 0) + 1}

    def counts(**options: Any) -> Windows[Any, Any, Any]:
        merge: Any = lambda one, other: {**one, **other}  # noqa: E731
        aggregate = Aggregate(zero=dict, add=added, result=dict, merge=merge, **options)
        return Windows("part", spans, aggregate)

    with (
        driven(tmp_path / "1", Kept(counts(), [7], skips=False)) as driver,
        raises(InvalidValue, "windows", "key", path="state[7]", advises="dict[int, int]"),
        failed_by_its_message(),
    ):
        feed(driver, 0)
    with driven(tmp_path / "2", Kept(counts(state_type=dict[int, int]), [7])) as driver:
        feed(driver, 0)
        driver.crash()
        feed(driver, 0)
        assert set(states(driver)) == {'{"7":2}'}


def test_hopping_windows_change_together_or_not_at_all(tmp_path: Path) -> None:
    """An application that catches the error goes on with all windows as they were."""

    class Catching(Kept):
        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            try:
                super().consume_message(shard, store, envelope, publisher)
            except InvalidValue as error:
                self.results.append(error.path)

    def added(state: int, value: int) -> int:
        refuses: Any = math.nan
        return refuses if value == 5 and not state else state + value

    aggregate = Aggregate(zero=lambda: 0, add=added, result=int, state_type=int)
    application = Catching(Windows("part", Hopping(2 * HOUR, HOUR), aggregate), [1, 5])
    with driven(tmp_path, application) as driver:
        feed(driver, 0)
        feed(driver, 0)
        assert states(driver) == ["2", "2"]
        driver.advance(3600)
        feed(driver, 1)
        assert application.results[0] == "state"
        assert [one.value for one in application.results[1:]] == [2]
        assert states(driver) == ["2"]


@pytest.mark.parametrize(
    ("join", "good", "bad", "path"),
    [
        (StreamJoin("part", before=HOUR, after=HOUR, kind=JoinKind.LEFT), 1.5, math.nan, "left"),
        (
            StreamJoin("part", before=us(0), after=us(0), kind=JoinKind.LEFT, left_type=float),
            1.5,
            math.inf,
            "left",
        ),
        (StreamJoin("part", before=us(0), after=us(0), kind=JoinKind.LEFT), [1], (1,), "left"),
        (TableJoin("part", value_type=float), 1.5, math.nan, "value"),
        (TableJoin("part"), {"a": 1}, {"a": datetime(2026, 1, 1, tzinfo=UTC)}, 'value["a"]'),
        (TableJoin("part", value_type=Number), Number(index=1), {"index": 1}, "value"),
    ],
)
def test_a_value_that_a_join_cannot_keep_does_not_fail_its_timer(
    tmp_path: Path, join: Any, good: Any, bad: Any, path: str
) -> None:
    """Without a policy the error names the part. With one, the join goes on, and its timer fires."""
    with (
        driven(tmp_path / "1", Kept(join, [good, bad], skips=False)) as driver,
        raises(InvalidValue, path=path, join="part", key="a"),
        failed_by_its_message(),
    ):
        feed(driver, 1)
    application = Kept(join, [good, bad])
    with driven(tmp_path / "2", application) as driver:
        feed(driver, 0)
        feed(driver, 1)
        driver.advance(3 * 3600)
        feed(driver, 0)
        assert [reason for _, reason in driver.skipped] == ["application"]
        found = [getattr(one, "left", None) or one.value for one in application.results]
        assert found == [good]
        assert type(found[0]) is type(good)


class Rows(Kept):
    """Puts the values as rows of a table."""

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        self.part.put(shard, store, "a", envelope.time, self.values[envelope.message.index])


def test_a_row_that_a_table_cannot_keep_is_refused(tmp_path: Path) -> None:
    table = TableJoin[Any, Any]("part", row_type=dict[int, float])
    application = Rows(table, [{7: 1.5}, {7: math.nan}])
    with driven(tmp_path, application) as driver:
        feed(driver, 0)
        driver.advance(1)
        feed(driver, 1)
        assert len(driver.skipped) == 1
        assert table.latest(driver.store, "a") == {7: 1.5}


def test_a_state_that_was_written_with_another_type_stops_the_shard(tmp_path: Path) -> None:
    """No message is to blame, so a policy skips none."""
    application = Kept(Windows("part", Tumbling(HOUR), total()), [1])
    with driven(tmp_path, application) as driver:
        feed(driver, 0)
        driver.store.execute("UPDATE part SET state = 'null'")
        with raises(Corrupt, "windows", "key"):
            feed(driver, 0)
        assert driver.skipped == []
