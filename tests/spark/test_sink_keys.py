"""Where rows of a sink go: by the key that labels of journals say, or by the column that is given."""

from __future__ import annotations

from typing import Any

import pytest

from gazette.errors import Invalid
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.message.key_hash import fnv32a
from gazette.message.key_rule import KeyRule
from gazette.message.keys import FLOAT
from gazette.message.mapping import Partitions
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import journal_spec
from tests.facts import raises

pytest.importorskip("pyspark")

from gazette.history.spark.sink.publishing import choice_of
from gazette.history.spark.source.options import WriteOptions

COUNT = 3
PLAIN = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
KEYED = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), *KeyRule.of_field("n", FLOAT, COUNT).labels)


def choose(labels: LabelSet, row: Any, value: Any = None, count: int = COUNT, **given: str) -> str:
    """Return the journal of a row among the first journals. ``value`` is that of the mapping's column."""
    specs = [journal_spec(f"out/part-{n:03d}", labels=labels) for n in range(COUNT)]
    options = WriteOptions.parse(
        {"broker.address": "http://localhost:1", "selector": "prefix=out/", **given},
        streaming=False,
    )
    return choice_of(options, Partitions.of_specs(specs[:count]))(row, value).journal


def part(text: str) -> str:
    return f"out/part-{fnv32a(text.encode()) % COUNT:03d}"


BY_COLUMN: dict[str, Any] = {"mapping": "modulo", "key": "n"}


@pytest.mark.parametrize("value", [7, 7.0])
def test_labels_say_the_key_of_a_row(value: Any) -> None:
    row = {"uuid": "", "n": value}
    assert choose(KEYED, row) == choose(KEYED, row, value, **BY_COLUMN) == part("7")
    assert choose(KEYED, row, part("7"), journalColumn="to") == part("7")
    assert choose(PLAIN, row, value, **BY_COLUMN) == part("7")


def test_rows_without_their_key_are_refused() -> None:
    other = next(f"out/part-{n:03d}" for n in range(COUNT) if f"out/part-{n:03d}" != part("7"))
    with raises(Invalid, says="'n'"):
        choose(KEYED, {"word": "x"})
    with raises(Invalid, path="key"):
        choose(KEYED, {"n": 7, "m": 8}, 8, mapping="modulo", key="m")
    with raises(Invalid, path="output", journal=other):
        choose(KEYED, {"n": 7}, other, journalColumn="to")
    with raises(Invalid, path="output", says="2 of 3"):
        choose(KEYED, {"n": 7}, count=2)
    for labels in (KEYED, PLAIN):
        with raises(Invalid, path="key", says="null"):
            choose(labels, {"n": None}, None, **BY_COLUMN)
