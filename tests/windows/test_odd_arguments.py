"""Odd arguments of windows, joins and timers: each is taken as it is, or refused by name."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from gazette import Application, EventTime, TimeDomain
from gazette.errors import GazetteError
from gazette.message.message import Message
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import Sessions, StreamJoin, TableJoin, Tumbling, Windows, least, mean, total
from tests.facts import is_advised

SOURCE: Final = "calls"
CALLS: Final = 1_500
HOUR: Final = timedelta(hours=1)


class Text(str):
    __slots__ = ()


AWARE: Final = datetime(2026, 1, 1, tzinfo=UTC)
ODD: Final[list[Any]] = [
    math.nan,
    math.inf,
    -math.inf,
    2**70,
    -(2**63),
    10**400,
    "\ud800",
    Text("t"),
    True,
    "",
    None,
    b"",
    b"\xff",
    "x" * 70_000,
    "é" * 9_000,
    "a\0b",
    1.5,
    7,
    (),
    [1],
    {"a": math.nan},
    {1: 2},
    object(),
    AWARE,
    AWARE.replace(tzinfo=None),
    datetime.min.replace(tzinfo=UTC),
    datetime.max.replace(tzinfo=UTC),
    HOUR,
    timedelta.max,
    TimeDomain.EVENT,
]
PARTS: Final[list[Any]] = [
    Windows("totals", Tumbling(HOUR), total()),
    Windows("means", Sessions(HOUR), mean()),
    Windows("leasts", Tumbling(HOUR), least()),
    StreamJoin("pairs", before=HOUR, after=HOUR),
    TableJoin("rows", wait=HOUR),
]


class Call(Message):
    index: int


class Caller(Application[SQLiteStore]):
    """Makes calls with one odd argument each, and goes on."""

    message_type = Call
    event_time = EventTime()

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bare: list[str] = []
        self.refused = 0

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, "".join(part.schema for part in PARTS))

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        windows, (stream, table) = PARTS[:3], PARTS[3:]
        usual = (shard, store, "key", envelope.time, 1)
        calls: list[tuple[Any, list[Any], int]] = [
            *((part.add, list(usual), 2) for part in windows),
            (stream.add_left, list(usual), 2),
            (stream.add_right, list(usual), 2),
            (table.put, list(usual), 2),
            (table.add, list(usual), 2),
            (table.latest, [store, "key"], 1),
            (shard.schedule, ["key", envelope.time + HOUR, b""], 0),
            (shard.cancel, ["key"], 0),
        ]
        call, arguments, first = self.rng.choice(calls)
        place = self.rng.randrange(first, len(arguments))
        arguments[place] = odd = self.rng.choice(ODD)
        try:
            call(*arguments)
        except GazetteError as error:
            self.refused += 1
            if not is_advised(error):
                self.bare.append(f"{call.__qualname__}, argument {place}: {error}")
        except Exception as error:  # noqa: BLE001 - any error but ours is a finding.
            self.bare.append(f"{call.__qualname__}, argument {place}, {odd!r:.40}: {error!r:.100}")

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        for part in PARTS:
            part.on_timer(shard, store, timer)


def test_odd_arguments_are_refused_by_name_and_stop_no_timer(tmp_path: Path) -> None:
    application = Caller(random.Random(11))
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        for number in range(CALLS):
            driver.publish(SOURCE, Call(index=number))
        driver.run()
        driver.crash()
        driver.advance(10 * 3600)
        driver.publish(SOURCE, Call(index=0))
        driver.run()
    assert sorted(set(application.bare)) == []
    assert CALLS / 4 < application.refused < CALLS
