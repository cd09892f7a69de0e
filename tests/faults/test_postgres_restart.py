"""PostgreSQL is killed in the middle of transactions, and started again: exactly once, all the same.

A shard whose database is gone fails; here as there, an operator retries it (`gazctl shards unassign
--failed`). ``GAZETTE_REPEATS`` says how often (default 10).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gazette.errors import GazetteError
from gazette.runtime.tasks import TaskScope
from tests.faults.databases import prepare
from tests.faults.fold_app import SQL_URL_ENV
from tests.faults.fold_cluster import FoldCluster, report, shard_of
from tools.soak.postgres import PostgresServer

REPEATS = int(os.environ.get("GAZETTE_REPEATS", "10"))
SHARD = shard_of("postgres")
MOMENTS = (
    "",  # Whenever it is.
    "sql.committing(*)=delay:1.0",  # With everything of a transaction done, but its COMMIT.
    "sql.committed(*)=delay:1.0",  # With a transaction committed that no client learned of.
)


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_database_that_is_killed_and_restarted(tmp_path: Path) -> None:
    with PostgresServer() as server:
        prepare(server.url)
        environ = {SQL_URL_ENV.format("POSTGRES"): server.url}
        cluster = FoldCluster(tmp_path, ("postgres",), environ=environ)
        asyncio.run(run(cluster, server))


async def run(cluster: FoldCluster, server: PostgresServer) -> None:
    try:
        await cluster.start()
        async with TaskScope("load") as scope:
            load = scope.spawn(cluster.publish_forever(), name="publish")
            for number in range(REPEATS):
                await kill_once(cluster, server, MOMENTS[number % len(MOMENTS)])
            load.cancel()
    finally:
        await cluster.stop()


async def kill_once(cluster: FoldCluster, server: PostgresServer, moment: str) -> None:
    primary = await cluster.primary_of(SHARD)
    if moment:
        await cluster.arm(primary, moment)
        await cluster.clock.sleep(0.6)
    else:
        await cluster.clock.sleep(cluster.rng.uniform(0.0, 0.5))
    await asyncio.to_thread(server.kill)
    await cluster.clock.sleep(cluster.rng.uniform(0.0, 1.0))
    await asyncio.to_thread(server.start)
    began, repairs = cluster.clock.monotonic(), 0
    for member in cluster.running:
        await cluster.arm(member, "")
    while True:
        try:
            await cluster.await_up(standbys=True, timeout_s=10.0)
            await cluster.check()
            break
        except (GazetteError, TimeoutError):
            # It may have failed only after it was found to be up.
            if repairs == 5:
                raise
            repairs += 1
            await cluster.repair()
            await cluster.clock.sleep(0.5)
            cluster.resume()
    took = cluster.clock.monotonic() - began
    report(f"killed at {moment or 'some moment'}: exact {took:.1f} s later, {repairs} repairs")
