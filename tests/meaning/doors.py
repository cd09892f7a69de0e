"""Doors of an application: see `tests.meaning.places`.

Outputs, dead letters, answers of routes, and what an application binds to a store of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from gazette import DeadLetter, Output, PoisonPolicy, ShardQuery, ShardRequest, shard_route
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import Partition, Partitions
from gazette.message.value_parts import attributes_of
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from tests.meaning.places import (
    SOURCE,
    Number,
    StateWriter,
    Writer,
    cause_of,
    feed,
    require_named,
)
from tests.meaning.values import Case, raw, real, same, text, whole

DEAD: Final = "dead/letters"


# -- outputs


class OutputWriter(Writer):
    """Publishes a message for each case, to an output of its own."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__(cases)
        self.types: list[Any] = [
            msgspec.defstruct("Result", [("value", case.type), ("n", int, 0), ("uuid", str, "")])
            for case in cases
        ]
        self.outputs = [Output(f"out{n}", one, key="n") for n, one in enumerate(self.types)]

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        (journal,) = self.outputs[index].journals
        found = Partitions([Partition(journal, CONTENT_JSON_LINES)])
        mapping = self.outputs[index].mapping(lambda: found)
        message = self.types[index](self.cases[index].value)
        self.write(index, lambda: publisher.publish_uncommitted(mapping, message))


def check_outputs(cases: Sequence[Case], directory: Path) -> int:
    """Publish each value from a shard, in one transaction, and read the journals behind a crash."""
    application = OutputWriter(cases)
    with AppDriver(application, directory, [SOURCE]) as driver:
        feed(driver, cases)
        driver.crash()
        driver.run()
        for index, case in enumerate(cases):
            (journal,) = application.outputs[index].journals
            found = driver.committed(journal, application.types[index])
            if (error := application.refused.get(index)) is not None:
                require_named(case, error, "value", "message")
                assert not found, f"{case}: refused, and written"
                continue
            (back,) = [one.value for one in found]
            is_equal = same(back, case.value) or (not case.fits and back == case.value)
            assert is_equal, f"{case}: reads back as {back!r:.300}"
    return len(cases) - len(application.refused)


# -- dead letters


class Refusing(Writer):
    """Refuses each message. Its policy keeps them."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder)

    def poison_policy(self, shard: Any) -> PoisonPolicy | None:
        return PoisonPolicy(DEAD, limit=1 << 20, raw_bytes_max=1 << 22)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        raise ValueError("not this one")


def check_dead_letters(cases: Sequence[Case], directory: Path) -> int:
    """Feed lines that no shard takes, and compare each byte with those of the dead letters."""
    lines = [_line_of(case) for case in cases]
    with AppDriver(Refusing(cases), directory, [SOURCE]) as driver:
        for line in lines:
            driver.feed(SOURCE, line)
        driver.run()
        driver.crash()
        driver.run()
        content = driver.journals.content(SOURCE)
        letters = driver.committed(DEAD, DeadLetter)
    found = b"".join(letter.raw for letter in letters)
    assert found == content, f"dead letters of seeds {cases[0].seed} to {cases[-1].seed}"
    for letter in letters:
        assert content[letter.begin : letter.end] == letter.raw
        assert letter.reason in ("malformed", "application")
    return len(cases)


def _line_of(case: Case) -> bytes:
    rng = random.Random(case.seed)
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(40)).replace(b"\n", b"") + b"\n"
        case 1:
            return msgspec.json.encode(Number(index=abs(whole(rng)) % 2**63)) + b"\n"
        case 2:
            return msgspec.json.encode({"index": text(rng), "uuid": text(rng)}) + b"\n"
    return msgspec.json.encode({"index": 7, "more": [real(rng), text(rng)]}) + b"\n"


# -- answers


class Answering(StateWriter):
    """Answers with the value of its case."""

    @shard_route("/value")
    def value(self, store: Any, request: ShardRequest) -> Any:
        return self.cases[0].value


def check_answers(cases: Sequence[Case], directory: Path) -> int:
    """Let a route answer with each value, and read the JSON as its type, strictly."""
    return sum(map(_is_answered, cases))


def _is_answered(case: Case) -> bool:
    request = ShardRequest("/value", "GET", {}, {}, {})
    try:
        answer = Answering([case]).value.serve(None, request, ShardQuery("a"))
    except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
        # Sets and bytes fit their types, and JSON cannot tell them.
        require_named(case._replace(fits=False), cause_of(error), "answer")
        return False
    document = json.loads(answer.body, object_pairs_hook=_distinct, parse_constant=_no_constant)
    assert _tells(document, case.value), f"{case}: answered as {document!r:.300}"
    if case.fits:
        back = msgspec.json.decode(answer.body, type=case.type)
        assert same(back, case.value), f"{case}: read as {back!r:.300}"
    return True


_Told = list[tuple[Any, Any, bool]]


def _tells(document: Any, value: Any) -> bool:
    """Return True if a document of JSON tells a value: each of its parts is there, and says what it is."""
    pairs: _Told = [(document, value, False)]
    while pairs:
        found = _told_parts(*pairs.pop())
        if found is None:
            return False
        pairs += found
    return True


def _told_parts(document: Any, value: Any, declared: bool) -> _Told | None:
    """Return the parts of a document and of its value; None if it does not tell it.

    ``declared``: a class says what a part is.
    """
    if isinstance(value, Enum):
        return [(document, value.value, declared)]
    if value is None or isinstance(value, bool | int | float | str):
        return [] if type(document) in type(value).mro() and document == value else None
    if isinstance(value, set | frozenset):
        return None  # Its order is another one in each process.
    if isinstance(value, bytes | bytearray | memoryview):
        return [] if declared and isinstance(document, str) else None
    if isinstance(value, list | tuple):
        return _paired(document, value, declared)
    if isinstance(value, dict):
        is_told = all(map(_is_key, document, value))
        return _paired([*document.values()], [*value.values()], declared) if is_told else None
    if (attributes := attributes_of(value)) is not None:
        parts = [*(document.values() if isinstance(document, dict) else document)]
        # The name of a tagged class comes first.
        return _paired(parts[-len(attributes[1]) :], attributes[1], declared=True)
    return [] if document is not None or isinstance(value, msgspec.Raw) else None


def _paired(document: Any, values: Sequence[Any], declared: bool) -> _Told | None:
    if len(document) != len(values):
        return None
    return [(*pair, declared) for pair in zip(document, values, strict=True)]


def _is_key(document: str, key: Any) -> bool:
    return document == key if isinstance(key, str) and not isinstance(key, Enum) else bool(document)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"an object has a key twice: {pairs!r:.300}"
    return found


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


# -- stores of the application


class Binding(Writer):
    """Binds values of all types of SQLite to a statement."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(
            recorder, "CREATE TABLE IF NOT EXISTS kept (n INTEGER PRIMARY KEY, a, b, c, d, e)"
        )

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        values = (index, *_bound(self.cases[index]))
        if index % 2:
            store.execute("INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?)", values)
        else:
            store.executemany("INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?)", [values])


def _bound(case: Case) -> tuple[Any, ...]:
    rng = random.Random(case.seed)
    number = whole(rng)
    number = number if -(2**63) <= number < 2**63 else 7
    return number, real(rng), text(rng), raw(rng), rng.choice((None, b"", "", 0))


def check_sqlite_values(cases: Sequence[Case], directory: Path) -> int:
    """Bind values to columns without a type, crash, and read them."""
    with AppDriver(Binding(cases), directory, [SOURCE]) as driver:
        feed(driver, cases)
        driver.crash()
        rows = driver.store.query("SELECT * FROM kept ORDER BY n")
    for case, (_, *found) in zip(cases, rows, strict=True):
        wanted = _bound(case)
        assert same(tuple(found), wanted), f"{case}: columns {wanted!r:.300} read as {found!r:.300}"
    return len(cases)


class Putting(Writer):
    """Puts a key and a value for each case."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return RocksDBStore(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        key, value = _pair(self.cases[index])
        self.write(index, lambda: store.put(key, value))


def _pair(case: Case) -> tuple[bytes, bytes]:
    rng = random.Random(case.seed)
    key = rng.choice((raw, lambda rng: text(rng).encode()))(rng)
    return key + case.seed.to_bytes(8, "big"), raw(rng)


def check_rocksdb_values(cases: Sequence[Case], directory: Path) -> int:
    """Put keys and values of any bytes, crash, and read them one by one and in order."""
    application = Putting(cases)
    with AppDriver(application, directory, [SOURCE]) as driver:
        feed(driver, cases)
        driver.crash()
        store = driver.store
        wanted = {}
        for index, case in enumerate(cases):
            key, value = _pair(case)
            if (error := application.refused.get(index)) is not None:
                require_named(case._replace(fits=False), error, "key")
                continue
            wanted[key] = value
            assert store.get(key) == value, f"{case}: key {key!r}"
        with store.view() as view:
            found = [(key, value) for key, value in view.iterate() if key in wanted]
        assert found == sorted(wanted.items()), f"seeds {cases[0].seed} to {cases[-1].seed}"
    return len(wanted)


__all__: Final = [
    "check_answers",
    "check_dead_letters",
    "check_outputs",
    "check_rocksdb_values",
    "check_sqlite_values",
]
