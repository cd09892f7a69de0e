"""The crash-point matrix: a member dies at each point of a transaction, with each kind of store.

One cluster of real processes goes through all cells; after each, everything that was published must have
taken effect once. ``GAZETTE_REPEATS`` says how often (default 10), ``GAZETTE_STORES`` and
``GAZETTE_ROWS`` which (names, or parts of them, separated by commas), ``GAZETTE_FIRST_SEED`` which
transactions are hit. A third of all runs are without a standby.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette.tasks import TaskScope
from tests.faults import crash_matrix
from tests.faults.crash_matrix import ROWS
from tests.faults.databases import sql_environ
from tests.faults.fold_cluster import FoldCluster, report

REPEATS = int(os.environ.get("GAZETTE_REPEATS", "10"))
SEED = int(os.environ.get("GAZETTE_FIRST_SEED", "1"))
STORES = os.environ.get("GAZETTE_STORES", "sqlite,rocksdb,json,postgres,sqlfile").split(",")
CHOSEN = os.environ.get("GAZETTE_ROWS", "").split(",")
REPRESENTATIVE = ("commit durable, no acknowledgement sent", "finalized, publishes")


async def run_matrix(cluster: FoldCluster, rows: list[crash_matrix.Row], repeats: int) -> Counter:
    done: Counter[tuple[str, str]] = Counter()
    async with TaskScope("load") as scope:
        load = scope.spawn(cluster.publish_forever(), name="publish")
        number = 0
        for repetition in range(repeats):
            for row in rows:
                for kind in cluster.kinds:
                    number += 1
                    began = cluster.clock.monotonic()
                    try:
                        ran = await crash_matrix.run(cluster, row, kind, cold=number % 3 == 0)
                    except BaseException as error:
                        error.add_note(f"in row {row.name!r} with {kind}, {repetition + 1}")
                        raise
                    if ran:
                        done[row.name, kind] += 1
                        took = cluster.clock.monotonic() - began
                        report(f"{repetition + 1} {row.name} | {kind}: {took:.1f} s")
        load.cancel()
    return done


async def run_cluster(
    directory: Path, kinds: list[str], rows: list[crash_matrix.Row], repeats: int, **kwargs: object
) -> Counter:
    cluster = FoldCluster(directory, kinds, seed=SEED, **kwargs)  # type: ignore[arg-type]
    try:
        await cluster.start()
        return await run_matrix(cluster, rows, repeats)
    finally:
        await cluster.stop()


@pytest.fixture
def databases(tmp_path: Path) -> Iterator[dict[str, str]]:
    with sql_environ(tmp_path, STORES) as environ:
        yield environ


@pytest.mark.faults
@pytest.mark.timeout(6 * 3600)
def test_every_output_once_wherever_a_member_dies(
    tmp_path: Path, databases: dict[str, str]
) -> None:
    """Every row of the matrix with every store, ``GAZETTE_REPEATS`` times."""
    rows = [row for row in ROWS if any(part in row.name for part in CHOSEN)]
    done = asyncio.run(run_cluster(tmp_path, STORES, rows, REPEATS, environ=databases))
    for row in rows:
        counts = ", ".join(f"{kind} {done[row.name, kind]}" for kind in STORES)
        report(f"{row.name}: {counts}")
    report(f"{sum(done.values())} deaths, no violation")


@pytest.mark.timeout(120)
def test_some_rows_with_sqlite(tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.name.startswith(REPRESENTATIVE)]
    assert len(rows) == len(REPRESENTATIVE)
    done = asyncio.run(run_cluster(tmp_path, ["sqlite"], rows, 1))
    assert sum(done.values()) == len(rows)
