"""Definitions of windows and joins stand beside their tables; and keys of users, whatever their length."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw
import pytest

from gazette import Application, Envelope, EventTime, Publisher, Timer
from gazette.errors import Invalid
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import fixed_mapping
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.shard import ShardSpec
from gazette.stores.sqlite.definitions import without_definitions
from gazette.stores.sqlite.store import SQLiteStore
from gazette.stores.state_builder import StateBuilder
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
    count,
    greatest,
    least,
    total,
)
from tests.facts import raises
from tests.stores.timer_stores import SHARD, recorded
from tests.windows.members import TARGET, Event, us
from tests.windows.test_windows import Closed, Value

SOURCE = "values"
TO_TARGET = fixed_mapping(TARGET, CONTENT_JSON_LINES)


class Declares(Application[SQLiteStore]):
    """Declares windows or a join, by the schema alone."""

    message_type = Value
    event_time = EventTime()
    application_name = "declares"

    def __init__(self, declared: Any, *, migrates: bool = False, old: bool = False) -> None:
        self.schema = without_definitions(declared.schema) if old else declared.schema
        self.migrates = migrates

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        if self.migrates:
            return SQLiteStore(recorder, migrations=[self.schema])
        return SQLiteStore(recorder, self.schema)

    def consume_message(self, *_: Any) -> None:
        return None

    def on_timer(self, *_: Any) -> None:
        return None


def windows(spans: Any = None, aggregate: Any = None) -> Any:
    return Windows("rows", spans or Tumbling(us(10)), aggregate or count())


def typed(state_type: Any) -> Any:
    return windows(aggregate=Aggregate(dict, lambda state, _: state, len, state_type=state_type))


def stream(**changed: Any) -> Any:
    given: dict[str, Any] = {"before": us(1), "after": us(2), "left_type": int, "right_type": int}
    return StreamJoin("rows", **{**given, **changed})


def table(**changed: Any) -> Any:
    return TableJoin("rows", **{"wait": us(1), "value_type": int, "row_type": int, **changed})


CHANGES: list[tuple[Any, Any]] = [
    (windows(), windows(Tumbling(us(60)))),
    (windows(), windows(Hopping(us(10), us(5)))),
    (windows(Hopping(us(10), us(5))), windows(Hopping(us(10), us(2)))),
    (windows(Sessions(us(10))), windows(Sessions(us(11)))),
    (windows(), windows(aggregate=total())),
    (windows(aggregate=least()), windows(aggregate=greatest())),
    (typed(dict[str, int]), typed(dict[int, int])),
    (typed(dict[str, Any]), typed(dict[str, Decimal])),
    (stream(), stream(before=us(2))),
    (stream(), stream(after=us(3))),
    (stream(), stream(kind=JoinKind.LEFT)),
    (stream(), stream(left_type=datetime)),
    (stream(), stream(right_type=str)),
    (table(), table(wait=us(0))),
    (table(), table(value_type=str)),
    (table(), table(row_type=str)),
]
OTHER_TABLES: list[tuple[Any, Any]] = [
    (one, other)
    for one in (windows(), stream(), table())
    for other in (windows(), stream(), table())
    if type(one) is not type(other)
]
CASES = [
    *((*one, migrates) for one in CHANGES for migrates in (False, True)),
    *((*one, False) for one in OTHER_TABLES),
]


def start(driver: AppDriver[Any], application: Any) -> None:
    driver.crash()
    driver.application = application
    driver.run()


@pytest.mark.parametrize(("before", "now", "migrates"), CASES)
def test_another_definition_is_refused(
    tmp_path: Path, before: Any, now: Any, migrates: bool
) -> None:
    """Check that both are named, that nothing of the new one is kept, and that the old one goes on."""
    with AppDriver(Declares(before, migrates=migrates), tmp_path, [SOURCE]) as driver:
        driver.run()
        for _ in range(2):
            with raises(Invalid, "before", "declared", path="rows", advises="another name"):
                start(driver, Declares(now, migrates=migrates))
        start(driver, Declares(before, migrates=migrates))
        assert driver.store.query("SELECT name FROM gazette_definition") == [("rows",)]


@pytest.mark.parametrize(("before", "now"), CHANGES)
def test_the_schema_on_a_copy_of_a_state_shows_what_has_changed(before: Any, now: Any) -> None:
    """As the page on windows compares them, before a standby of a new version is promoted."""
    changed = "SELECT name FROM gazette_definition GROUP BY name HAVING count(*) > 1"
    copy = apsw.Connection(":memory:")
    copy.execute(before.schema).fetchall()
    for declared, expected in ((before, []), (now, [("rows",)])):
        copy.execute(declared.schema).fetchall()
        assert copy.execute(changed).fetchall() == expected


@pytest.mark.parametrize("migrates", [False, True])
def test_a_state_without_a_definition_adopts_what_is_declared(
    tmp_path: Path, migrates: bool
) -> None:
    before, now = CHANGES[0]
    old = Declares(before, migrates=migrates, old=True)
    with AppDriver(old, tmp_path, [SOURCE]) as driver:
        driver.run()
        start(driver, Declares(before, migrates=migrates))
        with raises(Invalid, path="rows"):
            start(driver, Declares(now, migrates=migrates))


def test_several_names_have_their_own_definitions(tmp_path: Path) -> None:
    one, other = Windows("one", Tumbling(us(1)), count()), Windows("two", Tumbling(us(2)), count())
    open_store = recorded(
        tmp_path, lambda recorder: SQLiteStore(recorder, one.schema + other.schema)
    )
    for _ in range(2):
        store = open_store()
        store.restore_checkpoint(SHARD)
        assert len(store.query("SELECT * FROM gazette_definition")) == 2
        store.start_commit(SHARD, Checkpoint(), ()).result(10)
        store.destroy()
    twice = Windows("one", Tumbling(us(3)), count())
    with raises(Invalid, path="one"):
        recorded(tmp_path / "twice", lambda to: SQLiteStore(to, one.schema + twice.schema))()


def test_a_built_state_has_its_definition(tmp_path: Path) -> None:
    spec = ShardSpec("shard-one", recovery_log_prefix="logs", hint_prefix="/hints")
    with StateBuilder(Declares(windows()), spec, tmp_path, random.Random(1)) as built:
        built.finish(Checkpoint())
        assert len(built.store.execute("SELECT * FROM gazette_definition").fetchall()) == 1


class Keyed(Application[SQLiteStore]):
    """Counts in windows, and joins each message with itself in two ways."""

    message_type = Value
    event_time = EventTime(us(50))

    def __init__(self, spans: Any = None) -> None:
        self.windows = Windows("counts", spans or Tumbling(us(100)), count(), early=us(1_000_000))
        self.stream: Any = StreamJoin("pairs", before=us(0), after=us(0))
        self.table: Any = TableJoin("priced")

    def new_store(self, shard: Any, recorder: Any) -> SQLiteStore:
        return SQLiteStore(recorder, self.windows.schema + self.stream.schema + self.table.schema)

    def consume_message(
        self, shard: Any, store: Any, envelope: Envelope[Value], publisher: Publisher
    ) -> None:
        key, at = envelope.message.key, envelope.time
        self.windows.add(shard, store, key, at, 1)
        self.stream.add_left(shard, store, key, at, 1)
        for one in self.stream.add_right(shard, store, key, at, 2).pairs:
            self.say(publisher, one.key, "pair")
        self.table.put(shard, store, key, at, 3)
        self.table.add(shard, store, key, at, 4)

    def on_timer(self, shard: Any, store: Any, timer: Timer, publisher: Publisher) -> None:
        for one in self.windows.on_timer(shard, store, timer):
            self.say(publisher, one.key, f"{one.value} {one.final}")
        for joined in self.table.on_timer(shard, store, timer):
            self.say(publisher, joined.key, f"row {joined.row}")
        assert not self.stream.on_timer(shard, store, timer)

    def say(self, publisher: Publisher, key: str, value: str) -> None:
        publisher.publish_uncommitted(TO_TARGET, Closed(key=key, value=value))


KEYS = ("", "#", ":", "\0", "x" * 1000, "x" * 1024, "x" * 1024 + "y", "é" * 8000, "k" * 16384)


@pytest.mark.parametrize("spans", [Tumbling(us(100)), Sessions(us(60))])
def test_keys_of_any_length_work(tmp_path: Path, spans: Any) -> None:
    """Check early and final results, pairs and rows of each key, over a crash between them."""
    with AppDriver(Keyed(spans), tmp_path, [SOURCE]) as driver:
        for producer, at in enumerate((1, 81, 41)):  # The third one joins two sessions.
            for number, key in enumerate(KEYS):
                driver.feed(SOURCE, Event(SOURCE, 20 * producer + number, at, key, 1).frame)
        driver.run()
        driver.crash()
        driver.advance(1)
        driver.feed(SOURCE, Event(SOURCE, 99, 1000, "end", 1).frame)
        driver.run()
        said = [(one.key, one.value) for one in driver.committed(TARGET, Closed)]
        for key in KEYS:
            found = Counter(value for one, value in said if one == key)
            assert found == {"pair": 3, "row 3": 3, "3 False": 1, "3 True": 1}, key[:10]
        left = [key for (key,) in driver.store.query("SELECT key FROM gazette_timer")]
        assert all(len(key) < 40 for key in left)
