"""A query of Spark from journals to journals, as a process: what test_spark_chain.py kills.

``python -m tests.faults.spark_chain BROKER CHECKPOINT [MASTER]`` runs it until its sources end where they do
now. With ``GATES_ENV``, the first attempt of a task waits for another attempt.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gazette.runtime import failpoints
from tests.faults.gated import GATES_ENV
from tests.faults.spark_cluster import CLOCK, POLL_S, ROOT, Standalone

ATTEMPTS = 2
SOURCES, TARGETS = "prefix=in/", "prefix=out/"
_SMALL = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def main(broker: str, checkpoint: str, master: str = "local[2,3]") -> None:
    from pyspark.sql.functions import col, upper

    from gazette.spark import session

    conf = {"spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    if master.startswith("local"):
        conf |= {"spark.driver.memory": "600m", "spark.driver.extraJavaOptions": _SMALL}
    spark = session(master, conf=conf)
    address = {"broker.address": broker}
    messages = (
        spark.readStream.format("gazette")
        .options(**address, selector=SOURCES, fields="word string", maxBytesPerTrigger="40000")
        .load()
    )
    if not master.startswith("local"):
        messages = messages.mapInArrow(_met, messages.schema)
    query = (
        messages.select(
            upper(col("word")).alias("word"),
            col("journal").alias("source"),
            col("offset").alias("at"),
        )
        .writeStream.format("gazette")
        .options(**address, selector=TARGETS, mapping="modulo", key="word")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def _met(batches: Iterator[Any]) -> Iterator[Any]:
    """Wait, in a task of the first partition that gets here, until both attempts are at work."""
    from pyspark import TaskContext

    gates, context = Path(os.environ[GATES_ENV]), TaskContext.get()
    assert context is not None
    yield from batches
    if context.partitionId():
        return
    (gates / f"begun-{context.stageId()}-{context.taskAttemptId()}").touch()
    while len({one.name for one in gates.glob("begun-*")}) < ATTEMPTS:
        threading.Event().wait(POLL_S)


@dataclass
class Query:
    """That process, and all that it has started."""

    process: asyncio.subprocess.Process
    log: Path

    @classmethod
    async def start(
        cls,
        broker: str,
        checkpoint: Path,
        log: Path,
        armed: str = "",
        cluster: Standalone | None = None,
        gates: Path | None = None,
    ) -> Query:
        """Start the query. ``armed`` are failpoints, in the driver and in its tasks."""
        arguments, environ = [broker, str(checkpoint)], dict(os.environ)
        if cluster is not None:
            assert gates is not None
            arguments.append(cluster.url)
            environ = {**cluster.environ, "SPARK_CONF_DIR": str(cluster.conf("chain", gates))}
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.faults.spark_chain", *arguments),
                env={**environ, failpoints.ENV: armed, "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdout=file,
                stderr=file,
            )
        return cls(process, log)

    def processes(self) -> list[Any]:
        """Return the driver, Java, and Python's workers."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def stopped(self) -> list[Any]:
        """Return the processes that stand still, by SIGSTOP."""
        found = []
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                if one.status() == psutil.STATUS_STOPPED:
                    found.append(one)
        return found

    async def kill(self, *but: Any) -> None:
        """Send SIGKILL to all of them, ``but`` to these: the driver first, which would inform Java."""
        for one in self.processes():
            if one not in but:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def ended(self) -> None:
        """Wait for its end, which is to be a good one."""
        code = await self.process.wait()
        assert code == 0, f"exit code {code}:\n{self.output()}"

    def cpu_seconds(self) -> float:
        """Return the processor time of those that run, and of their children that have ended."""
        found = 0.0
        for one in self.processes():
            with suppress(psutil.Error):
                found += sum(one.cpu_times()[:4])
        return found

    def state(self) -> str:
        """Return what each process is doing, and the last output."""
        lines = []
        for one in self.processes():
            with suppress(psutil.Error):
                lines.append(f"{one.pid} {one.status()} {one.cpu_times()} {one.cmdline()[-3:]}")
        return "\n".join((*lines, self.output()))

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")[-6000:]


async def gone(processes: list[Any]) -> None:
    """Have stopped processes go on, and wait until they have come to their end."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGCONT)
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes):
        await CLOCK.sleep(POLL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
