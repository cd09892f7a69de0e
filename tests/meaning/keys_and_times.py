"""Keys, timers and columns of cases: see `tests.meaning.places`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
import pyarrow as pa

import gazette
from gazette import Source
from gazette.message.keys import encoding_named
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.testing.stored import write_journal
from tests.meaning.places import SOURCE, StateWriter, Writer, feed, require_named
from tests.meaning.values import LEAVES, Case, Kind, odd, same, text

_KEYED: Final = [kind for kind in LEAVES if kind.type in (bool, int, float, str, bytes)]


def check_keys(cases: Sequence[Case], directory: Path) -> int:
    """Compare keys of two values of each case: of messages, of their JSON, and of texts in a path."""
    return sum(_check_key(case) for case in cases)


def _check_key(case: Case) -> int:
    rng = random.Random(case.seed)
    kind: Kind = rng.choice(_KEYED)
    message = msgspec.defstruct("Keyed", [("id", kind.type), ("uuid", str, "")])
    source: Any = Source("keyed", message, partitions=100, key="id")
    one, other = kind.make(rng), kind.make(rng)
    keys = [source.key_of(message(value)) for value in (one, other)]
    case = case._replace(type=kind.type, value=(one, other))
    assert (keys[0] == keys[1]) == (one == other), f"{case}: keys {keys!r:.300}"
    again = msgspec.json.decode(msgspec.json.encode(message(one)))["id"]
    doors = [source.key_encoding, encoding_named(source.key_encoding.name)]
    assert all(door.encode(again) == keys[0] for door in doors), f"{case}: key of JSON"
    if isinstance(keys[0], str):
        in_path = unquote(quote(keys[0], safe=""))
        assert doors[1].encode(in_path) == keys[0], f"{case}: key in a path"
    wild = odd(rng)
    try:
        source.key_of(message(wild))
    except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
        require_named(case._replace(value=wild, fits=False), error, "key")
    return 2


class TimerWriter(Writer):
    """Sets a timer for each case, whose key, time and payload a seed draws."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__(cases)
        self.wanted = [_timer_of(random.Random(case.seed)) for case in cases]
        self.fired: dict[str, tuple[datetime, bytes]] = {}

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        key, at, payload = self.wanted[index]
        self.write(index, lambda: shard.schedule(key, at, payload))

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        self.fired[timer.key] = timer.at, timer.payload


def _timer_of(rng: random.Random) -> tuple[Any, Any, Any]:
    at = datetime.fromtimestamp(rng.randrange(0, 1_700_000_000), UTC).replace(microsecond=999_999)
    parts: list[Any] = [f"{rng.getrandbits(60)}{text(rng)[:100]}", at, rng.randbytes(5)]
    if not rng.randrange(3):
        parts[rng.randrange(3)] = odd(rng)
    return parts[0], parts[1], parts[2]


def check_timers(cases: Sequence[Case], directory: Path) -> int:
    """Set timers, crash, and let those that are due fire with what they were set with."""
    application = TimerWriter(cases)
    with AppDriver(application, directory, [SOURCE]) as driver:
        feed(driver, cases)
        driver.crash()
        driver.advance(3600)
        now = datetime.fromtimestamp(driver.clock.now(), UTC)
    for index, case in enumerate(cases):
        key, at, payload = application.wanted[index]
        case = case._replace(type="timer", value=application.wanted[index], fits=False)
        if (error := application.refused.get(index)) is not None:
            require_named(case, error, "key", "at", "payload")
        elif at <= now:
            found = application.fired.get(key)
            assert found == (at, payload), f"{case}: fires as {found!r:.300}"
    return len(cases) - len(application.refused)


_COLUMNS: Final[dict[Any, pa.DataType]] = {
    bool: pa.bool_(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
}


def check_columns(cases: Sequence[Case], directory: Path) -> int:
    """Publish rows of one type, and read them as a table."""
    rng = random.Random(cases[0].seed)
    kinds = [kind for kind in LEAVES if kind.type in _COLUMNS]
    names = [f"c{n}" for n in range(len(kinds))]
    fields: Any = [(name, kind.type) for name, kind in zip(names, kinds, strict=True)]
    row: Any = msgspec.defstruct("Row", [*fields, ("uuid", str, "")])
    rows = [[kind.make(rng) for kind in kinds] for _ in cases]
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        driver.publish("rows", *[row(*values) for values in rows])
        content = driver.journals.content("rows")
    (directory / "fragments").mkdir()
    write_journal(directory, "file:///fragments/", "rows", [content])
    schema = pa.schema([(n, _COLUMNS[k.type]) for n, k in zip(names, kinds, strict=True)])
    table = gazette.read_table("rows", store=f"{directory}/fragments", fields=schema, columns=names)
    for case, values, found in zip(cases, rows, table.to_pylist(), strict=True):
        case = case._replace(type=tuple(kind.type for kind in kinds), value=values)
        assert same([found[name] for name in names], values), f"{case}: column {found!r:.300}"
    return len(cases)


__all__: Final = ["check_columns", "check_keys", "check_timers"]
