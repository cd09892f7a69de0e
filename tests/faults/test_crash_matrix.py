"""The crash-point matrix: a member dies at each point of a transaction, with each kind of store.

After each death, everything that was published must have taken effect once. ``GAZETTE_REPEATS`` says how
often (default 10), ``GAZETTE_STORES`` and ``GAZETTE_ROWS`` which (names, or parts of them, separated by
commas), ``GAZETTE_FIRST_SEED`` which load and which transactions. A third of all runs are without a standby.
The table of what came of it is printed in the end, with or without violations.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.crash_matrix import ROWS, TIMER_ROWS
from tests.faults.databases import sql_environ
from tests.faults.fold_app import PLANT_ENV, TIMERS_ENV
from tests.faults.fold_cluster import report
from tests.faults.matrix_lanes import Matrix

REPEATS = int(os.environ.get("GAZETTE_REPEATS", "10"))
SEED = int(os.environ.get("GAZETTE_FIRST_SEED", "1"))
STORES = os.environ.get("GAZETTE_STORES", "sqlite,rocksdb,json,postgres,sqlfile").split(",")
CHOSEN = os.environ.get("GAZETTE_ROWS", "").split(",")
REPRESENTATIVE = ("commit durable, no acknowledgement sent", "finalized, publishes")


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[dict[str, str]]:
    with sql_environ(tmp_path, [one for one in STORES if one != "sqlfile"]) as environ:
        yield environ


@pytest.mark.faults
@pytest.mark.timeout(6 * 3600)
def test_every_output_once_wherever_a_member_dies(
    tmp_path: Path, databases: dict[str, str]
) -> None:
    """Every row of the matrix with every store, ``GAZETTE_REPEATS`` times."""
    rows = [row for row in ROWS if any(part in row.name for part in CHOSEN)]
    matrix = Matrix(STORES, rows, REPEATS, SEED, tmp_path, databases)
    results = asyncio.run(matrix.run())
    for line in results.lines(rows):
        report(line)
    assert not results.violations
    expected = {(row.name, kind) for row in rows for kind in STORES if row.applies_to(kind)}
    assert set(results.deaths) == expected
    assert all(len(found) == REPEATS for found in results.deaths.values())


@pytest.mark.faults
@pytest.mark.timeout(6 * 3600)
def test_every_timer_fires_once_wherever_a_member_dies(
    tmp_path: Path, databases: dict[str, str]
) -> None:
    """The rows of timers with every store, ``GAZETTE_REPEATS`` times."""
    rows = [row for row in TIMER_ROWS if any(part in row.name for part in CHOSEN)]
    environ = {**databases, TIMERS_ENV: "1"}
    results = asyncio.run(Matrix(STORES, rows, REPEATS, SEED, tmp_path, environ).run())
    for line in results.lines(rows):
        report(line)
    assert not results.violations
    assert results.count == len(rows) * len(STORES) * REPEATS


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_row_of_timers_with_sqlite(tmp_path: Path) -> None:
    rows = TIMER_ROWS[:1]
    results = asyncio.run(Matrix(["sqlite"], rows, 1, SEED, tmp_path, {TIMERS_ENV: "1"}).run())
    assert not results.violations
    assert results.count == 1


@pytest.mark.timeout(120)
def test_some_rows_with_sqlite(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.name.startswith(REPRESENTATIVE)]
    assert len(rows) == len(REPRESENTATIVE)
    results = asyncio.run(Matrix(["sqlite"], rows, 1, SEED, tmp_path).run())
    assert not results.violations
    assert results.count == len(rows)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plant", "row", "found"),
    [
        # Published, and not committed: its successor publishes it again.
        ("eager", "committed locally", "outputs, expected"),
        ("forgetful", "commit durable", "state is not the fold of the input"),
    ],
)
def test_what_an_application_does_wrong_is_found(
    tmp_path: Path, plant: str, row: str, found: str
) -> None:
    rows = [one for one in ROWS if one.name.startswith(row)]
    matrix = Matrix(["json"], rows, 1, SEED, tmp_path, {PLANT_ENV: plant})
    results = asyncio.run(matrix.run())
    assert results.count == 0
    ((text,),) = results.violations.values()
    assert found in text
