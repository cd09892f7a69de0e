"""A query from journals to journals whose driver, tasks and commits die: each message is there once.

The driver is killed between each two steps of docs/spark.md's table, and at random moments; what it has
stopped in mid-commit goes on later, when another driver has committed the same batch. In the end, a
read-committed reader of the targets finds what a table of the sources has, row by row and each once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas")
pytest.importorskip("pyspark")

from gazette.client.append.appender import AppendParams
from gazette.history.first_pass import fold_by_threads
from gazette.history.read import read_envelopes
from gazette.history.snapshot_builder import Selection, take_snapshot
from gazette.history.source import Access
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.backfill.cluster import history
from tests.faults.spark_chain import Query, gone
from tests.faults.spark_cluster import CLOCK, standalone, until

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(6000)]

SOURCES = ("in/part-000", "in/part-001")
TARGETS = ("out/part-000", "out/part-001")
SEED = 20261121
NOT_CONNECTED = "Timed out while waiting for the Python worker to connect back"
"""Spark's error on a machine that has no processor time for its worker. It has no setting."""
QUERY_S = 900
"""Deadline of what one query is awaited for: it takes half a minute of a processor."""
POINTS = (
    # In each worker: whether one process or two run the tasks of a batch depends on the machine.
    "sink.published=stop",
    "sink.deciding(*-{batch})=stop",
    "sink.decided(*-{batch})=stop",
    "sink.acknowledged=stop@2",
    "sink.committed(*-{batch})=stop",
)


class Chain:
    def __init__(self, broker: BrokerFixture, directory: Path, rng: random.Random) -> None:
        self.broker = broker
        self.checkpoint = directory / "checkpoint"
        self.log = directory / "queries.log"
        self.rng = rng
        self.clock = 1000

    async def append(self, count: int) -> None:
        """Append more messages: duplicates, roll-backs, and transactions that continue in the next call."""
        self.clock += 1000
        for name in SOURCES:
            lines = history(self.rng, count, self.clock)
            for at in range(0, len(lines), 12):
                content = b"".join(lines[at : at + 12])
                await self.broker.client.append(AppendParams(name), content)

    async def query(self, armed: str = "") -> Query:
        return await Query.start(self.broker.endpoint, self.checkpoint, self.log, armed)

    async def query_until(self, condition: Callable[[Query], Any], armed: str = "") -> Query:
        """Start the query, and return it when the condition holds.

        Start it again if Spark has ended it, since its worker did not connect within ten seconds: that is
        one more death of a driver.
        """
        while True:
            began = CLOCK.monotonic()
            query = await self.query(armed)
            try:
                async with asyncio.timeout(QUERY_S):
                    await until(partial(condition, query), query)  # type: ignore[arg-type]
            except TimeoutError as error:
                raise AssertionError(
                    f"{armed or 'the query'}: nothing for {QUERY_S} s\n{query.state()}"
                ) from error
            except AssertionError:
                if query.process.returncode and NOT_CONNECTED in query.output():
                    self.log.unlink()
                    continue
                raise
            print(  # noqa: T201 - how far a run of minutes is
                f"{armed or 'unarmed'}: after {CLOCK.monotonic() - began:.0f} s,"
                f" {query.cpu_seconds():.0f} s of CPU, {self.batches} batches"
            )
            return query

    async def drain(self, armed: str = "") -> None:
        """Run the query until it has come to the end of its sources."""
        query = await self.query_until(lambda query: query.process.returncode == 0, armed)
        await query.ended()

    @property
    def batches(self) -> int:
        """How many Spark knows to be committed."""
        return len([one for one in self.checkpoint.glob("commits/*") if one.name.isdigit()])

    def committed(self, *journals: str) -> list[tuple[str, int, dict[str, Any]]]:
        access = Access.of(self.broker.endpoint, file_root=self.broker.file_root)
        with access.open() as opened:
            folded = fold_by_threads(opened, take_snapshot(opened, Selection(journals=journals)))
            return [
                (run.run.journal, one.begin, one.message)
                for run in folded.runs
                for batch in read_envelopes(opened, run, dict)
                for one in batch
            ]

    async def require_once(self) -> None:
        """Require that each message of the sources is in the targets, and once."""

        def compare() -> None:
            want = Counter(
                (journal, at, message["word"].upper())
                for journal, at, message in self.committed(*SOURCES)
            )
            found = Counter(
                (message["source"], message["at"], message["word"])
                for _, _, message in self.committed(*TARGETS)
            )
            assert len(want) > 100
            assert found - want == Counter(), "twice, or never sent"
            assert want - found == Counter(), "lost"

        await asyncio.to_thread(compare)


@pytest.fixture
async def chain(etcd: Any, tmp_path: Path) -> Any:
    print(f"seed {SEED}")  # noqa: T201 - a run is repeated by it
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(
            *(journal_spec(name, labels=labels, length=2048) for name in (*SOURCES, *TARGETS))
        )
        yield Chain(broker, tmp_path, random.Random(SEED))


async def test_the_driver_is_killed_between_any_two_steps(chain: Chain) -> None:
    zombies: list[Any] = []
    for number, point in enumerate(POINTS):
        await chain.append(120)
        query = await chain.query_until(Query.stopped, point.format(batch=chain.batches + 1))
        stopped = query.stopped()
        await query.kill(*stopped)
        if number % 2:
            # Before another attempt does the same, and after.
            await gone(stopped)
        await gone(zombies)
        zombies = [] if number % 2 else stopped
    assert chain.batches >= 3
    await gone(zombies)
    await chain.drain()
    await chain.require_once()


async def test_the_driver_is_killed_at_random_and_tasks_die(chain: Chain) -> None:
    for _ in range(3):
        await chain.append(80)
        before = chain.batches
        query = await chain.query_until(lambda _, before=before: chain.batches > before)  # type: ignore[misc]
        await CLOCK.sleep(chain.rng.uniform(0, 1.5))
        await query.kill()
    await chain.append(80)
    # Workers of Python die in their third task, when all is published, and the task is run again.
    await chain.drain("sink.published=kill@3")
    await chain.require_once()


async def test_two_attempts_of_a_task_by_speculation(chain: Chain, tmp_path: Path) -> None:
    """On a cluster, each waits for the other behind its last row: both have it all, and one counts."""
    gates = tmp_path / "gates"
    gates.mkdir()
    await chain.append(120)
    with standalone(tmp_path) as cluster:
        await until(cluster.is_ready)
        broker, log = chain.broker.endpoint, chain.log
        query = await Query.start(broker, chain.checkpoint, log, cluster=cluster, gates=gates)
        await query.ended()
    first = min(int(one.name.split("-")[1]) for one in gates.iterdir())
    assert len(list(gates.glob(f"begun-{first}-*"))) == 2, "no attempt was speculated"
    await chain.require_once()
