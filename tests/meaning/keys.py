"""Keys of cases: each door gives a value the same text and partition. See `tests.meaning.places`."""

from __future__ import annotations

import base64
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple
from urllib.parse import quote, urlencode
from uuid import UUID

import msgspec
from starlette.datastructures import QueryParams

from gazette import EventTime, Source
from gazette.consumer.contract.key_check import KeyCheck
from gazette.errors import Invalid
from gazette.gazctl.messages import key_at, object_of
from gazette.history.spark.sink.publishing import choice_of
from gazette.history.spark.source.options import WriteOptions
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.envelope import build_envelopes
from gazette.message.key_hash import hash_of_key
from gazette.message.keys import CanonicalKey, KeyEncoding, canonical_key, encoding_named
from gazette.message.mapping import Partitions
from gazette.message.publishing.outputs import (
    Choice,
    choice_as_declared,
    choice_by_labels,
    choice_of_named,
)
from gazette.net.raw_path import RawPathRoute
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import JoinKind, StreamJoin, TableJoin, Tumbling, Windows, count
from tests.facts import raises
from tests.meaning import values as made
from tests.meaning.places import HOUR, SOURCE, Number, Writer, require_named
from tests.meaning.values import Case, odd

COUNT: Final = 16
"""Partitions of each source."""


class KeyKind(NamedTuple):
    """A declared type of keys, its values, values like a given one, and the value of a text."""

    type: Any
    make: made.Make
    near: Callable[[random.Random, Any], Any]
    read: Callable[[str], Any]


def _whole(rng: random.Random) -> int:
    return rng.choice(made.HUGE_INTS[:3]) if not rng.randrange(9) else made.whole(rng)


def _amount(rng: random.Random) -> float:
    return float(made.whole(rng)) if not rng.randrange(4) else made.real(rng)


def _moment(rng: random.Random) -> datetime:
    at = made.moment(rng)
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _near_moment(rng: random.Random, at: datetime) -> datetime:
    if at.year in (1, 9999):
        return at
    if rng.randrange(2):
        return at + timedelta(microseconds=1)
    return at.astimezone(timezone(timedelta(minutes=rng.randrange(-900, 900))))


def _near_number(rng: random.Random, number: Decimal) -> Decimal:
    if rng.randrange(2):
        return number.scaleb(0) + Decimal(0) if len(number.as_tuple().digits) < 28 else number
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    return Decimal((sign, (*digits, rng.randrange(2)), exponent - 1))


def _near_text(rng: random.Random, value: str) -> str:
    return rng.choice((f"{value}\0", f" {value}", value.swapcase(), f'"{value}"', f"{value},"))


def _read_moment(value: str) -> datetime:
    assert value.endswith("Z")
    return datetime.fromisoformat(value)


def _enum_of(kind: Any, read: Callable[[str], Any]) -> KeyKind:
    return KeyKind(kind, lambda rng: rng.choice([*kind]), lambda rng, _: rng.choice([*kind]), read)


def _either(rng: random.Random) -> int | float:
    return rng.choice((_amount(rng), rng.randrange(2**53)))


LEAVES: Final = (
    KeyKind(bool, lambda rng: bool(rng.randrange(2)), lambda _, v: not v, lambda v: v == "true"),
    KeyKind(int, _whole, lambda rng, v: v + rng.choice((-1, 1)), int),
    KeyKind(float, _amount, lambda _, v: math.nextafter(v, math.inf), float),
    KeyKind(str, made.text, _near_text, str),
    KeyKind(bytes, made.raw, lambda _, v: v + b"\0", lambda v: base64.b64decode(v, validate=True)),
    KeyKind(Decimal, made.number, _near_number, Decimal),
    KeyKind(date, made.day, lambda _, v: v.replace(day=1), date.fromisoformat),
    KeyKind(datetime, _moment, _near_moment, _read_moment),
    KeyKind(UUID, made.identity, lambda _, v: UUID(int=v.int ^ 1), UUID),
    _enum_of(made.Color, made.Color),
    _enum_of(made.Level, lambda v: made.Level(int(v))),
    _enum_of(made.Word, made.Word),
    KeyKind(Literal["a", "b"], lambda rng: rng.choice("ab"), lambda rng, _: rng.choice("ab"), str),
    KeyKind(int | float, _either, lambda _, v: -v, float),
    KeyKind(str | None, made.text, _near_text, str),
)  # fmt: skip


def _tuple_of(rng: random.Random) -> KeyKind:
    """Return a type of tuples: of some types each, or any number of one."""
    if rng.randrange(2):
        kinds = [rng.choice(LEAVES) for _ in range(rng.randrange(1, 4))]
        declared: Any = tuple[tuple(one.type for one in kinds)]  # type: ignore[misc]
        return KeyKind(
            declared,
            lambda rng: tuple(one.make(rng) for one in kinds),
            lambda rng, value: _with_near_part(rng, kinds, value),
            lambda text: _read_tuple(kinds, text),
        )
    one = rng.choice(LEAVES)
    return KeyKind(
        tuple[one.type, ...],  # type: ignore[name-defined]
        lambda rng: tuple(one.make(rng) for _ in range(rng.randrange(4))),
        lambda rng, value: (*value, one.make(rng)),
        lambda text: _read_tuple([one] * len(json.loads(text)), text),
    )


def _with_near_part(rng: random.Random, kinds: Sequence[KeyKind], value: Any) -> Any:
    at = rng.randrange(len(value))
    return (*value[:at], kinds[at].near(rng, value[at]), *value[at + 1 :])


def _read_tuple(kinds: Sequence[KeyKind], text: str) -> Any:
    parts = json.loads(text, parse_float=str, parse_int=str)
    shown = ("true" if part is True else "false" if part is False else part for part in parts)
    return tuple(kind.read(part) for kind, part in zip(kinds, shown, strict=True))


class KeyDoors:
    """The doors through which values of one declared type become keys."""

    def __init__(self, kind: KeyKind) -> None:
        message = msgspec.defstruct("Keyed", [("id", kind.type), ("uuid", str, "")])
        self.new: Callable[[Any], Any] = message
        self.source: Any = Source("keyed", message, partitions=COUNT, key="id")
        self.encoding: KeyEncoding = self.source.key_encoding
        rule: Any = self.source.key_rule
        labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), *rule.labels)
        specs = [JournalSpec(one, labels=labels) for one in self.source.journals]
        self.partitions = Partitions.of_specs(specs)
        given = {"broker.address": "http://a:1", "selector": "name:prefix=keyed/"}
        rows = WriteOptions.parse(given, streaming=False)
        columns = WriteOptions.parse({**given, "key": "id", "mapping": "modulo"}, streaming=False)
        self._by_labels = (
            choice_as_declared(self.source, lambda: self.partitions),
            choice_by_labels(lambda: self.partitions, "modulo", random.Random(0)),
            choice_of(rows, self.partitions),
            choice_of(columns, self.partitions),
        )

    def require_one_place(self, case: Case, value: Any) -> CanonicalKey:
        """Return the key of a value, for which each door must have the same text and partition."""
        message = self.new(value)
        key: CanonicalKey = self.source.key_of(message)
        line = msgspec.json.encode(message)
        assert canonical_key(value) == key, f"{case}: of a function, of windows and joins"
        assert self.encoding.encode(key) == key or isinstance(key, bytes), f"{case}: key of a key"
        assert {self.encoding.encode(text) for text in _asked(key)} == {key}, f"{case}: by a route"
        produced = object_of(line)
        said = key_at("id", produced)
        assert encoding_named(self.encoding.name).encode(said) == key, f"{case}: of --key"
        row = msgspec.to_builtins({"id": value}, str_keys=True)
        number = hash_of_key(key) % COUNT
        found = {self.source(message).journal}
        declared, by_labels, of_rows, of_columns = self._by_labels
        named = self._named(number)
        found |= {declared(message, one).journal for one in (None, value, key)}
        found |= {by_labels(one, None).journal for one in (message, produced, row)}
        found |= {by_labels(one, said).journal for one in (message, produced)}
        found |= {of_rows(row, None).journal, of_columns(row, value).journal}
        found |= {named(one, None).journal for one in (message, produced)}
        assert found == {self.source.journals[number]}, f"{case}: partitions {found}"
        with raises(Invalid, path="output"):
            self._named(number + 1)(message, None)
        self._require_own(case, message, number)
        return key

    def _named(self, number: int) -> Choice:
        """Return the choice of a publisher to one partition."""
        at = number % COUNT
        return choice_of_named(self.partitions.all[at], self.partitions.labels[at])

    def _require_own(self, case: Case, message: Any, number: int) -> None:
        """Require that the shard of a partition, and no other, takes the message for its own."""
        for at, misplaced in (number, []), ((number + 1) % COUNT, [0]):
            journal = self.source.journals[at]
            check = KeyCheck(self.source.key_place(journal))
            batch = build_envelopes(journal, [0], [9], [message], b"\1" * 16)
            for _ in range(2):
                assert check.misplaced(batch) == misplaced, f"{case}: own key of {journal}"


_PLAIN_IN_PATHS: Final = "!$&'()*+,;=:@"
"""Characters that clients may leave as they are: in a path, + is no space."""
_ROUTE: Final = RawPathRoute("/keys/{key}", lambda _: NotImplemented, ["GET"], "key")


def _asked(key: CanonicalKey) -> set[str]:
    """Return the key of requests that clients make for it: in a path, and in the query."""
    sent = base64.b64encode(key).decode() if isinstance(key, bytes) else key
    found = set()
    for one in {sent, sent.translate(str.maketrans("+/", "-_"))} if key != sent else {sent}:
        for safe in ("", _PLAIN_IN_PATHS):
            path = b"/keys/" + quote(one, safe=safe).encode()
            scope = {"type": "http", "path": "", "raw_path": path, "method": "GET"}
            found.add(_ROUTE.matches(scope)[1]["path_params"]["key"])
        found.add(QueryParams(urlencode({"key": one}).encode())["key"])
    return found


def check_keys(cases: Sequence[Case], directory: Path) -> int:
    """Compare keys of two values of each case at each door, and keep things by them over a crash."""
    rng = random.Random(cases[0].seed)
    texts: list[str] = []
    for begin in range(0, len(cases), 10):
        kind = rng.choice(LEAVES) if rng.randrange(3) else _tuple_of(rng)
        texts += _check_type(kind, cases[begin : begin + 10])
    _check_kept(cases, texts, directory)
    return len(texts)


def _check_type(kind: KeyKind, cases: Sequence[Case]) -> list[str]:
    """Check values of one type: one key for equal values, and no other value has it."""
    doors = KeyDoors(kind)
    values: dict[CanonicalKey, Any] = {}
    for case in cases:
        rng = random.Random(case.seed)
        one = kind.make(rng)
        for value in (one, kind.near(rng, one) if rng.randrange(2) else kind.make(rng)):
            case = case._replace(type=kind.type, value=value)
            key = doors.require_one_place(case, value)
            known = values.setdefault(key, value)
            assert _is_equal(known, value), f"{case}: has the key of {known!r:.200}"
            text = base64.b64encode(key).decode() if isinstance(key, bytes) else key
            assert _is_equal(kind.read(text), value), f"{case}: {key!r:.200} reads as another"
        _check_refused(case._replace(value=odd(rng), fits=False), doors)
    equal = [pair for pair in combinations(values.values(), 2) if _is_equal(*pair)]
    assert not equal, f"seed {cases[0].seed}: keys differ of {equal[:1]!r:.300}"
    return [key for key in values if isinstance(key, str)]


def _check_refused(case: Case, doors: KeyDoors) -> None:
    try:
        doors.source.key_of(doors.new(case.value))
    except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
        require_named(case, error, "key")


def _is_equal(one: Any, other: Any) -> bool:
    """Return True for values that a declared type takes for one."""
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, datetime):  # Python finds no time of a repeated hour equal.
        return bool(one.astimezone(UTC) == other.astimezone(UTC))
    if isinstance(one, Enum) or isinstance(other, Enum):
        return one is other
    return bool(one == other)


# -- windows and joins


class KeyedWriter(Writer):
    """Adds each text to windows, a join, and a table, as their key."""

    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, cases: Sequence[Case], texts: Sequence[str]) -> None:
        super().__init__(cases)
        self.texts = texts
        self.windows = Windows("windows", Tumbling(HOUR), count())
        self.join: Any = StreamJoin("streams", kind=JoinKind.LEFT, before=HOUR, after=HOUR)
        self.table: Any = TableJoin("latest", row_type=int, value_type=int)
        self.found: dict[str, Counter[str]] = {}

    def new_store(self, shard: Any, recorder: Any) -> Any:
        parts = (self.windows, self.join, self.table)
        return SQLiteStore(recorder, "\n".join(one.schema for one in parts))

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        if index < len(self.texts):
            self.write(index, lambda: self._add(shard, store, self.texts[index], envelope.time))

    def _add(self, shard: Any, store: Any, key: str, at: datetime) -> None:
        self.windows.add(shard, store, key, at, 1)
        self.join.add_left(shard, store, key, at, 1)
        self.table.put(shard, store, key, at, 1)
        self.table.add(shard, store, key, at, 1)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        for name, part in ("windows", self.windows), ("join", self.join), ("table", self.table):
            for result in part.on_timer(shard, store, timer):
                amount = result.value if name == "windows" else 1
                self.found.setdefault(name, Counter())[result.key] += amount


def _check_kept(cases: Sequence[Case], texts: Sequence[str], directory: Path) -> None:
    """Let windows and joins keep things by keys, crash, and have their results."""
    application = KeyedWriter(cases, texts)
    with AppDriver(application, directory, [SOURCE]) as driver:
        driver.publish(SOURCE, *[Number(index=n) for n in range(len(texts))])
        driver.run()
        driver.crash()
        driver.advance(3 * 3600)
        driver.publish(SOURCE, Number(index=len(texts)))
        driver.run()
    for index, error in application.refused.items():
        assert isinstance(error, Invalid), f"{texts[index]!r:.200}: {error!r}"
        assert error.path == "key", f"{texts[index]!r:.200}: {error}"
        assert len(texts[index]) > 16_384, f"{texts[index]!r:.200}: {error}"
    wanted = Counter(text for n, text in enumerate(texts) if n not in application.refused)
    for name, found in application.found.items():
        assert found == wanted, f"seed {cases[0].seed}: {name} {found - wanted} {wanted - found}"
    assert len(application.found) == 3


__all__: Final = ["check_keys"]
