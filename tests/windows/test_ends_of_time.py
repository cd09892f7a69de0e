"""Windows and joins at the ends of the calendar: each result has the times that its messages have."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gazette import Application, EventTime, Message, MessageTime, Source
from gazette.errors import InvalidValue
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import (
    Hopping,
    JoinKind,
    Sessions,
    StreamJoin,
    TableJoin,
    Tumbling,
    Windows,
    count,
)
from tests.facts import failed_by_its_message, raises

FIRST, LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
HOUR = timedelta(hours=1)
AHEAD = timedelta(days=9000 * 365)


class Stamp(Message):
    at: datetime


class Stamped(Application[SQLiteStore]):
    """Adds its messages to one part: windows or a join."""

    event_time: ClassVar[EventTime | None] = EventTime()
    stamps = Source("stamps", Stamp, time=MessageTime("at", ahead=AHEAD))

    def __init__(self, part: Any) -> None:
        self.part = part
        self.results: list[Any] = []

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, self.part.schema)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        add = self.part.add_left if isinstance(self.part, StreamJoin) else self.part.add
        add(shard, store, "a", envelope.time, 1)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self.results += self.part.on_timer(shard, store, timer)


def results(part: Any, directory: Path, *times: datetime) -> list[Any]:
    application = Stamped(part)
    with AppDriver(application, directory, ["stamps"]) as driver:
        for at in times:
            driver.publish("stamps", Stamp(at=at))
            driver.run()
        driver.advance(60)
    return application.results


def test_the_first_window_begins_with_the_calendar(tmp_path: Path) -> None:
    (first,) = results(Windows("w", Tumbling(HOUR), count()), tmp_path, FIRST, FIRST + 2 * HOUR)
    assert (first.begin, first.end, first.value) == (FIRST, FIRST + HOUR, 1)


Make = Callable[[], Any]


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda: Windows("w", Tumbling(timedelta(days=7)), count()), FIRST),
        (lambda: Windows("w", Tumbling(HOUR), count()), LAST),
        (lambda: Windows("w", Hopping(HOUR, HOUR / 2), count()), FIRST),
        (lambda: Windows("w", Hopping(HOUR, HOUR / 2), count()), LAST - HOUR / 4),
        (lambda: Windows("w", Sessions(HOUR), count()), LAST - HOUR / 2),
    ],
)
def test_a_window_beyond_the_calendar_is_refused(make: Make, at: datetime, tmp_path: Path) -> None:
    with raises(InvalidValue, path="at"), failed_by_its_message():
        results(make(), tmp_path, at)


def test_joins_end_with_the_calendar(tmp_path: Path) -> None:
    """A message of the last hour could still find a partner, so it waits. Its shard does not spin."""
    streams: Any = StreamJoin("j", kind=JoinKind.LEFT, before=HOUR, after=HOUR)
    alone = results(streams, tmp_path / "streams", FIRST, LAST - 2 * HOUR, LAST)
    assert [one.left_at for one in alone] == [FIRST, LAST - 2 * HOUR]
    table: Any = TableJoin("j", wait=HOUR)
    alone = results(table, tmp_path / "table", FIRST, LAST - 2 * HOUR, LAST)
    assert [one.at for one in alone] == [FIRST, LAST - 2 * HOUR]
