"""Filters that are pushed down change what is read, and never what is found: of random filters, in this
process. Spark applies each filter once more."""

from __future__ import annotations

import datetime
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.pandas.types import from_arrow_schema

from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, clock_at
from gazette.protocol.fragment import Codec
from gazette.spark.source.ddl import parse_columns
from gazette.spark.source.source import GazetteDataSource
from gazette.testing.stored import json_line, write_journal

NOON = clock_at(1_700_000_000 * 10**9)
STORE = "file:///fragments/"
SCHEMA = from_arrow_schema(
    parse_columns(
        "journal string, offset long, uuid string, producer string, clock long, timestamp timestamp, "
        "flags int, word string, n long"
    ),
    prefer_timestamp_ntz=False,
)
JOURNALS = ("topic/a", "topic/ab", "topic/b")
Row = dict[str, Any]
UTC = datetime.UTC
FAR: dict[str, list[Any]] = {
    "journal": ["", "topic/", "topic/c", "zz"],
    "offset": [-1, 0, 1, 2**63 - 1, -(2**63)],
    "clock": [-1, 0, 1, 2**63 - 1],
    "timestamp": [
        datetime.datetime(1, 1, 1, tzinfo=UTC),
        datetime.datetime(1582, 10, 15, tzinfo=UTC),
        datetime.datetime(1970, 1, 1, tzinfo=UTC),
        datetime.datetime(5300, 12, 31, tzinfo=UTC),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    ],
    "flags": [-1, 5],
    "n": [-1, 10**6],
}


def history(rng: random.Random, numbers: int) -> list[bytes]:
    """Write fragments of several producers: transactions, rollbacks,
    duplicates, and messages without a UUID.
    """
    lines = []
    for n in range(numbers):
        flags = rng.choice([OUTSIDE_TXN, CONTINUE_TXN, CONTINUE_TXN, ACK_TXN, None])
        if flags is None:
            lines.append(json_line({"word": "none", "n": n}))
            continue
        at = n * 160 + rng.choice([0, 0, 16, -480]) + rng.choice([0, 1])
        producer = bytes([1, 0, 0, 0, 0, rng.randint(1, 3)])
        lines.append(
            json_line({"word": f"w{n % 5}", "n": n}, build_uuid(producer, NOON + at, flags))
        )
    cuts = sorted({0, numbers, *rng.sample(range(numbers), 4)})
    return [b"".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root, rng = tmp_path_factory.mktemp("pushdown"), random.Random(11)
    for name in JOURNALS:
        write_journal(root, STORE, name, history(rng, 40), Codec.ZSTANDARD)
    return {
        "store": f"file://{root}/fragments",
        "journal": ",".join(JOURNALS),
        "run_bytes": "200",
    }


def rows_of(options: dict[str, str], filters: list[Filter]) -> tuple[list[Row], int]:
    """Return what is read, and from how many partitions."""
    pushdown = "true" if filters else "false"
    reader = GazetteDataSource({**options, "pushdown": pushdown}).reader(SCHEMA)
    if filters:
        assert list(reader.pushFilters(filters)) == filters
    partitions = reader.partitions()
    rows = [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]
    return rows, len(partitions)


COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
    In: lambda a, b: a in b,
    StringStartsWith: lambda a, b: a.startswith(b),
    StringEndsWith: lambda a, b: a.endswith(b),
    StringContains: lambda a, b: b in a,
}


def holds(one: Any, row: Row) -> bool | None:
    """Evaluate a condition as SQL does: None if the column is null."""
    if isinstance(one, Not):
        inner = holds(one.child, row)
        return None if inner is None else not inner
    value = row[one.attribute[0]]
    if isinstance(one, IsNull):
        return value is None
    if isinstance(one, IsNotNull):
        return value is not None
    if isinstance(one, EqualNullSafe):
        return bool(value == one.value)
    return None if value is None else COMPARED[type(one)](value, one.value)


def draw(rng: random.Random, rows: list[Row]) -> Filter:
    name = rng.choice(["journal", "offset", "uuid", "producer", "clock", "timestamp", "flags", "n"])

    def value() -> Any:
        if rng.random() < 0.2 and name in FAR:
            return rng.choice(FAR[name])
        found = rng.choice(rows)[name]
        if isinstance(found, int):
            return found + rng.choice([-1, 0, 0, 1])
        if isinstance(found, datetime.datetime):
            return found + datetime.timedelta(microseconds=rng.choice([-1, 0, 0, 1]))
        return found if found is not None else FAR.get(name, ["x"])[0]

    kinds: list[Any] = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan]
    kinds += [LessThanOrEqual, In, IsNull, IsNotNull]
    if name in ("journal", "uuid", "producer"):
        kinds += [StringStartsWith, StringEndsWith, StringContains]
    kind = rng.choice(kinds)
    if kind in (IsNull, IsNotNull):
        one = kind((name,))
    elif kind is In:
        one = In((name,), tuple(value() for _ in range(rng.randint(1, 3))))
    elif kind in (StringStartsWith, StringEndsWith, StringContains):
        text = value()
        one = kind((name,), text[: rng.randint(0, len(text))])
    else:
        one = kind((name,), value())
    return Not(one) if rng.random() < 0.15 else one


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_filters_change_what_is_read_and_not_what_is_found(
    options: dict[str, str], isolation: str
) -> None:
    options = {**options, "isolation": isolation}
    every, partitions = rows_of(options, [])
    assert partitions > 10
    assert any(row["timestamp"] is None for row in every)
    rng = random.Random(isolation)
    spared = 0
    for _ in range(80):
        filters = [draw(rng, every) for _ in range(rng.randint(1, 3))]
        want = [row for row in every if all(holds(one, row) for one in filters)]
        read, count = rows_of(options, filters)
        spared += len(read) < len(every) or count < partitions
        assert [row for row in read if all(holds(one, row) for one in filters)] == want, filters
    assert spared > 15
