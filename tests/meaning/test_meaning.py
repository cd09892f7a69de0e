"""What is written reads back equal, or is refused by its path: values by a seed, in each place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gazette import Source
from gazette.errors import Invalid
from tests.facts import raises
from tests.fuzzing import seeds
from tests.meaning import (
    cluster_doors,
    columns,
    doors,
    fields,
    keys,
    message_types,
    names,
    places,
    times,
)
from tests.meaning.values import Case, case_of

Check = Callable[[Sequence[Case], Path], int]
PLACES: list[tuple[Check, int, int]] = [
    (places.check_messages, 800, 300),
    (places.check_states, 200, 50),
    (places.check_aggregates, 900, 40),
    (places.check_joins, 900, 40),
    (places.check_rows, 700, 40),
    (message_types.check_nested, 600, 300),
    (message_types.check_models, 600, 300),
    (message_types.check_protobuf, 400, 200),
    (message_types.check_csv, 600, 300),
    (doors.check_outputs, 400, 100),
    (doors.check_dead_letters, 400, 200),
    (doors.check_answers, 500, 500),
    (doors.check_sqlite_values, 200, 200),
    (doors.check_rocksdb_values, 200, 200),
    (cluster_doors.check_produced_lines, 150, 150),
    (cluster_doors.check_appended_lines, 150, 150),
    (cluster_doors.check_produced_keys, 150, 150),
    (fields.check_fields, 500, 100),
    (names.check_names, 200, 100),
    (keys.check_keys, 700, 500),
    (times.check_timers, 250, 50),
    (times.check_times, 250, 250),
    (columns.check_columns, 250, 50),
]
"""Functions of places, and how many cases `make test` writes there: in all, and at a time."""


@pytest.mark.parametrize(
    ("check", "count", "size"), PLACES, ids=[check.__name__ for check, _, _ in PLACES]
)
def test_values_read_back_equal_or_are_refused(
    check: Check, count: int, size: int, tmp_path: Path
) -> None:
    """`make fuzz-meaning` tries more. An error says the seed of its case, which `case_of` makes again."""
    first, *_, last = seeds(count)
    accepted = 0
    for begin in range(first, last + 1, size):
        cases = [case_of(seed) for seed in range(begin, min(begin + size, last + 1))]
        directory = tmp_path / str(begin)
        directory.mkdir()
        accepted += check(cases, directory)
    assert count / 4 < accepted, "the values are too odd"


def test_make_test_writes_ten_thousand_values() -> None:
    assert sum(count for _, count, _ in PLACES) == 10_000


@pytest.mark.parametrize("kind", times.NO_TIMES, ids=str)
def test_a_type_without_times_is_refused_where_it_is_declared(kind: Any) -> None:
    message: Any = msgspec.defstruct("Timed", [("at", kind), ("uuid", str, "")])
    with raises(Invalid, path="Source('timed').time"):
        Source("timed", message, time="at")
