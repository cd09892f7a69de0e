"""States and messages are compared as text: it differs if they do, and is the same if they are equal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gazette.consumer.application import Store
from gazette.protocol.pb import consumer_pb2
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite import SQLiteStore
from gazette.testing.memory_journals import JournalLog, MemoryAppends, MemoryJournals
from gazette.testing.recovery import take_over
from gazette.testing.simulation.states import deviation_of, state_of, text_of


class Tagged(msgspec.Struct):
    tags: set[str]
    at: dict[str, Any] = {}


def recorder(directory: Path) -> Any:
    log = JournalLog(MemoryAppends(MemoryJournals()))
    return take_over(log, directory, random.Random(1))


def of_json(directory: Path, state: Any, declared: Any = Any) -> Store:
    return JSONFileStore(recorder(directory), declared, lambda: state)


def of_rows(directory: Path, *rows: tuple[Any, ...]) -> Store:
    schema = 'CREATE TABLE "a ""b" ("x y" TEXT, at TEXT, n, PRIMARY KEY ("x y", at))'
    store = SQLiteStore(recorder(directory), schema)
    for row in rows:
        store.execute('INSERT INTO "a ""b" VALUES (?, ?, ?)', row)
    return store


def deviate(store: Store, other: Store, *ignore: str) -> bool:
    rows, others = state_of(store, ignore), state_of(other, ignore)
    assert rows is not None
    assert others is not None
    return deviation_of(rows, others) is not None


@pytest.mark.parametrize(
    ("state", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": "1"}, {"a": 1}),
        ({"a": None}, {}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a[0]": 1}, {"a": [1]}),
        ({"a": {"": 1}}, {"a": 1}),
        ({"": 1}, {"state": 1}),
        ({"(document)": 1}, 1),
        ({"a": []}, {"a": {}}),
    ],
)
def test_documents_that_differ_deviate(tmp_path: Path, state: Any, other: Any) -> None:
    assert deviate(of_json(tmp_path / "1", state), of_json(tmp_path / "2", other))
    assert not deviate(of_json(tmp_path / "3", state), of_json(tmp_path / "4", state))


def test_sets_of_documents_have_no_order(tmp_path: Path) -> None:
    # 8 and 16 are at the same place of a set of eight: the first one comes first.
    states = [Tagged(set(), {"of": 1}), Tagged(set(), {"of": 1})]
    for state, tags in zip(states, (("8", "16", "24"), ("24", "16", "8")), strict=True):
        state.tags.update(tags)
    stores = [of_json(tmp_path / str(n), state, Tagged) for n, state in enumerate(states)]
    assert not deviate(stores[0], stores[1])
    assert text_of({8, 16}) == text_of({16, 8}) == "{16, 8}"


def test_rows_with_equal_keys_are_all_compared(tmp_path: Path) -> None:
    rows = [(None, "a", 1), (None, "a", 2)]
    assert not deviate(of_rows(tmp_path / "1", *rows), of_rows(tmp_path / "2", *rows[::-1]))
    assert deviate(of_rows(tmp_path / "3", *rows), of_rows(tmp_path / "4", rows[1]))
    assert deviate(of_rows(tmp_path / "5", *rows), of_rows(tmp_path / "6", rows[0], rows[0]))
    named = [("k", "a", 1), ("k", "b", 2)]
    stores = of_rows(tmp_path / "7", *named), of_rows(tmp_path / "8", named[1])
    assert deviate(*stores, 'a "b.at')
    assert not deviate(*stores, 'a "b')


def test_the_text_of_a_message_shows_each_character_and_no_order() -> None:
    assert text_of(Tagged({"b", "a"}, {"y": 1, "x": 1.0})) == (
        "Tagged(tags={'a', 'b'}, at={'x': 1.0, 'y': 1})"
    )
    assert text_of(["a  b"]) != text_of(["a b"])
    messages = [consumer_pb2.ShardSpec(id=id) for id in ("a  b", "a b")]
    assert [text_of(message) for message in messages] == [
        'ShardSpec(id: "a  b")',
        'ShardSpec(id: "a b")',
    ]
