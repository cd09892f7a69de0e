"""Bad keys are errors of their messages; and durations that no time can have are refused where they stand."""

from __future__ import annotations

import enum
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gazette import EventTime, PoisonPolicy
from gazette.errors import Invalid, InvalidValue
from gazette.testing.app_driver import AppDriver
from gazette.windows import (
    Hopping,
    Sessions,
    StreamJoin,
    TableJoin,
    Tumbling,
    Windows,
    count,
)
from tests.facts import failed_by_its_message, raises
from tests.windows.members import TARGET, Event, us
from tests.windows.test_definitions import Keyed
from tests.windows.test_windows import Closed

SOURCE = "values"
BAD_KEYS = ["k" * 16385, "\ud800", b"bytes", 7, 2**70, math.nan, None]


@pytest.mark.parametrize("key", BAD_KEYS)
@pytest.mark.parametrize("call", ["windows", "stream", "table", "row"])
def test_a_bad_key_is_an_error_of_its_message(tmp_path: Path, key: Any, call: str) -> None:
    """Without a policy the error names the key. With one, the messages behind it are consumed."""

    class Refused(Keyed):
        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            given = key if envelope.message.value else "good"
            add: Any = {
                "windows": self.windows.add,
                "stream": self.stream.add_left,
                "table": self.table.add,
                "row": self.table.put,
            }[call]
            add(shard, store, given, envelope.time, 1)

    class Skipping(Refused):
        def poison_policy(self, shard: Any) -> PoisonPolicy:
            return PoisonPolicy("dead")

    bad, good = Event(SOURCE, 1, 1, "a", 1).frame, Event(SOURCE, 1, 2, "a", 0).frame
    with (
        AppDriver(Refused(), tmp_path / "1", [SOURCE]) as driver,
        raises(InvalidValue, path="key"),
        failed_by_its_message(),
    ):
        driver.feed(SOURCE, bad)
        driver.run()
    with AppDriver(Skipping(), tmp_path / "2", [SOURCE]) as driver:
        driver.feed(SOURCE, bad)
        driver.feed(SOURCE, good)
        driver.run()
        assert [reason for _, reason in driver.skipped] == ["application"]
        tables = " UNION ALL ".join(
            f"SELECT key FROM {name}" for name in ("counts", "pairs", "priced", '"priced.waiting"')
        )
        assert driver.store.query(tables) == [("good",)]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_row_is_not_looked_up_by_a_bad_key(tmp_path: Path, key: Any) -> None:
    """SQLite would find the row of the text '7' for the number 7."""
    application = Keyed()
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, Event(SOURCE, 1, 1, "7", 1).frame)
        driver.run()
        assert application.table.latest(driver.store, "7") == 3
        with raises(InvalidValue, path="key"):
            application.table.latest(driver.store, key)


class Colour(str, enum.Enum):  # noqa: UP042 - a StrEnum would show its text.
    """Its text is ``rot``, and that of an f-string is ``Colour.RED``."""

    RED = "rot"


@pytest.mark.parametrize("spans", [Tumbling(us(10)), Sessions(us(10))])
def test_a_member_of_an_enum_of_texts_is_the_key_that_it_equals(tmp_path: Path, spans: Any) -> None:
    class Coloured(Keyed):
        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            self.windows.add(shard, store, Colour.RED, envelope.time, 1)

    with AppDriver(Coloured(spans), tmp_path, [SOURCE]) as driver:
        for at in (1, 2, 1000):
            driver.feed(SOURCE, Event(SOURCE, 1, at, "a", 1).frame)
            driver.run()
        closed = driver.committed(TARGET, Closed)
        assert [(one.key, one.value) for one in closed] == [("rot", "2 True")]


@pytest.mark.parametrize(
    "value", [timedelta.max, timedelta(days=1_000_001), timedelta(-1), 5, None, math.nan]
)
@pytest.mark.parametrize(
    "make",
    [
        Tumbling,
        Sessions,
        lambda value: Hopping(value, us(1)),
        lambda value: Hopping(us(5), value),
        lambda value: StreamJoin("part", before=value, after=us(0)),
        lambda value: StreamJoin("part", before=us(0), after=value),
        lambda value: TableJoin("part", wait=value),
        lambda value: Windows("part", Tumbling(us(1)), count(), early=value or us(0)),
        lambda value: EventTime(lateness=value),
        lambda value: EventTime(idle_after=value or us(0)),
    ],
)
def test_a_duration_that_no_time_can_have_is_refused(make: Any, value: Any) -> None:
    """With a longer one, each message would fail at its first time."""
    with raises(Invalid):
        make(value)
