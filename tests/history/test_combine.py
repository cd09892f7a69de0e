"""Rows of a run that are combined before they leave its task."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from gazette.errors import Invalid
from gazette.history.combine import Combiner
from tests.facts import raises

SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64())])


def counted(rows: pa.Table) -> pa.Table:
    made = rows.group_by("word").aggregate([("n", "sum")])
    return made.rename_columns(rows.schema.names)


def batches(*sizes: int) -> list[pa.RecordBatch]:
    count = itertools.count()
    return [
        pa.RecordBatch.from_pydict(
            {"word": [f"w{next(count) % 3}" for _ in range(size)], "n": [1] * size}, SCHEMA
        )
        for size in sizes
    ]


def combined(combiner: Combiner, given: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    found = [batch for one in given for batch in combiner.add(one)]
    return [*found, *combiner.finish()]


def test_rows_are_put_together() -> None:
    combiner = Combiner(counted, SCHEMA)
    found = combined(combiner, batches(100_000, 40_000, 0, 150_000, 7))
    assert sum(batch.num_rows for batch in found) == 3
    assert sum(sum(batch.column(1).to_pylist()) for batch in found) == 290_007
    assert combined(combiner, []) == []


def test_rows_that_stay_as_many_are_not_held() -> None:
    """A key of its own for each: what was put together in vain is passed on, and not gone through again."""
    calls: list[int] = []

    def combine(rows: pa.Table) -> pa.Table:
        calls.append(rows.num_rows)
        return rows

    found = combined(Combiner(combine, SCHEMA), batches(*[50_000] * 9))
    assert sum(batch.num_rows for batch in found) == 450_000
    assert calls == [150_000] * 3


@pytest.mark.parametrize(
    "combine",
    [lambda rows: None, lambda rows: rows.drop_columns("n"), lambda rows: rows.to_batches()[0]],
)
def test_a_combine_that_gives_something_else(combine: Callable[[pa.Table], Any]) -> None:
    with raises(Invalid, says="combine()") as raised:
        combined(Combiner(combine, SCHEMA), batches(3))
    assert "word: string" in str(raised.value.hint)
