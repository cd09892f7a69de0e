"""A backfill on a standalone cluster of Spark: one right state is left, whatever process dies.

Each test has two shards built by the cluster, and two that consume the same journals as ever. Afterwards:
what was built, and went on live, equals an independent fold of the journals' lines, and the replay, the
checkpoint included; the hints name one log; and whatever attempts have left is listed.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas")
pytest.importorskip("pyspark")

from gazette.history.backfill.staging import DirectoryStaging
from tests.backfill.apps import Words, WordsBackfill
from tests.backfill.cluster import (
    GAMMA,
    Cluster,
    history,
    line,
    shard_settings,
    source,
)
from tests.backfill.conftest import start as start
from tests.backfill.test_drive import expected
from tests.faults.gated import GO, HOLD, MEET, MODE, SLOW, STOP
from tests.faults.spark_cluster import Driver, Standalone, standalone, until
from tests.gazctl.runner import Runner

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(1800)]

SHARDS = {"shard-1": "words/part-000", "shard-2": "words/part-001"}
LIVE = {"live-1": "words/part-000", "live-2": "words/part-001"}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("spark")) as cluster:
        yield cluster


class Scene:
    """Two shards with a history, drivers that build their states, and what has to hold afterwards."""

    def __init__(self, cluster: Cluster, spark: Standalone, directory: Path) -> None:
        self.cluster = cluster
        self.spark = spark
        self.gates = directory / "gates"
        self.gates.mkdir()
        self.lines: dict[str, list[bytes]] = {}

    async def prepare(self) -> None:
        cluster = self.cluster
        await until(self.spark.is_ready)
        await cluster.broker.create(*map(source, SHARDS.values()))
        both = {**SHARDS, **LIVE}
        await cluster.create(*(shard_settings(name, of) for name, of in both.items()))
        for name in SHARDS.values():
            self.lines[name] = history(random.Random(name), 200)
            await cluster.append(name, self.lines[name])

    def mode(self, mode: str) -> None:
        (self.gates / MODE).write_text(mode)

    def go(self) -> None:
        (self.gates / GO).touch()

    def begun(self, shard: str = "*") -> list[Path]:
        return list(self.gates.glob(f"begun-{shard}-*"))

    @property
    def environ(self) -> dict[str, str]:
        broker = self.cluster.broker
        return {
            "BROKER_ADDRESS": broker.endpoint,
            "BROKER_FILE_ROOT": str(broker.file_root),
            "CONSUMER_ADDRESS": self.cluster.consumer.endpoint,
        }

    async def driver(self, run_id: str, name: str = "") -> Driver:
        self.spark.environ.update(self.environ)
        return await self.spark.driver(
            name or run_id,
            self.gates,
            "--shards=id:prefix=shard-",
            f"--staging={self.cluster.staging}",
            f"--scratch-dir={self.cluster.scratch}",
            f"--run-id={run_id}",
            "--overwrite",
            "--enable",
        )

    def staged(self) -> set[str]:
        """Return everything that is in the staging area."""
        top = self.cluster.staging
        return {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}

    def is_published(self, run_id: str = "run") -> bool:
        return (self.cluster.staging / run_id / "PUBLISHED.json").exists()

    async def listed(self) -> dict[str, Any]:
        """Return what ``gazctl shards backfill --list`` prints."""
        found = await Runner(self.environ).ok(
            *("shards", "backfill", "--list", "--format=json"),
            f"--staging={self.cluster.staging}",
            f"--scratch-dir={self.cluster.scratch}",
        )
        value: dict[str, Any] = json.loads(found.out)
        return value

    async def require_right(self) -> None:
        """Require that the built shards, which consume new messages too, equal the live ones."""
        cluster = self.cluster
        for shard in SHARDS:
            await cluster.consumer.await_primary(shard)
            await self._require_one_log(shard)
        for name in SHARDS.values():
            more = [line(GAMMA, (1 << 40), word="last"), line(GAMMA, 5, word="late")]
            await cluster.append(name, more)
            self.lines[name] += more
        for built, live in zip(SHARDS, LIVE, strict=True):
            await cluster.enable(live)
            state = await cluster.state(built, WordsBackfill())
            assert state[0] == expected(self.lines[SHARDS[built]])
            assert state == await cluster.state(live, WordsBackfill())
            await self._require_one_log(built)

    async def _require_one_log(self, shard: str) -> None:
        log = (await self.cluster.spec(shard)).recovery_log
        stored = await self.cluster.consumer.shards.get_hints(shard)
        assert stored.primary is not None
        for hints in (stored.primary, *stored.backups):
            if hints is not None:
                named = {one.log or hints.log for node in hints.live_nodes for one in node.segments}
                assert named | {hints.log} == {log}

    async def require_listed(self, branches: int = 0) -> dict[str, Any]:
        """Require that all leftovers are listed, and that removing them leaves
        only records of published runs.
        """
        await until(lambda: not self.spark.executors())  # No executor is added.
        listed = await self.listed()
        runs = {run["run_id"]: run["step"] for run in listed["runs"]}
        assert runs == {
            name.partition("/")[0]: runs[name.partition("/")[0]] for name in self.staged()
        }
        kinds: dict[str, list[str]] = {}
        for one in listed["orphans"]:
            kinds.setdefault(one["kind"], []).append(one["where"])
        assert len(kinds.get("branch of a log", [])) == branches, listed["orphans"]
        staging = DirectoryStaging(self.cluster.staging)
        for name in kinds.get("staged object", []):
            staging.remove(name)
        for run, step in runs.items():
            left = {name for name in self.staged() if name.startswith(f"{run}/")}
            if step == "published":
                assert left == {f"{run}/PUBLISHED.json"}
        left_over = {str(one) for one in self.cluster.scratch.iterdir()}
        assert left_over == set(kinds.get("local directory", []))
        return listed


@pytest.fixture
async def scene(start: Any, spark: Standalone, tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(await start(Words()), spark, tmp_path)
    await scene.prepare()
    yield scene
    # Of the next test: no executor of this one holds its core.
    await until(lambda: not spark.executors())


async def test_the_driver_is_killed(scene: Scene) -> None:
    """While its tasks build. They go on without it, as far as they get; the same run is resumed."""
    scene.mode(HOLD)
    first = await scene.driver("run", "first")
    await until(lambda: len(scene.begun()) >= 2, first)
    await first.kill()
    assert not scene.is_published()
    scene.go()
    again = await scene.driver("run", "again")
    text = await again.ended()
    assert "published 2 shards" in text
    await scene.require_right()
    await scene.require_listed()


async def test_an_executor_is_killed(scene: Scene) -> None:
    """While it builds: another executor takes its task, and the run goes on."""
    scene.mode(HOLD)
    driver = await scene.driver("run")
    await until(lambda: len(scene.begun()) >= 2, driver)
    victim = scene.spark.executors()[0]
    victim.kill()
    others = await until(
        lambda: [one for one in scene.spark.executors() if one.pid != victim.pid][1:], driver
    )
    assert others
    scene.go()
    await driver.ended()
    assert len(scene.begun()) >= 3, "no task was run again"
    await scene.require_right()
    await scene.require_listed()


async def test_a_task_is_killed_in_mid_upload(scene: Scene) -> None:
    """Its bytes are in the staging area, under no name that is ever read; they are listed."""
    scene.mode(STOP)
    driver = await scene.driver("run")
    (worker,) = await until(scene.spark.stopped, driver)
    partial = [name for name in scene.staged() if ".partial-" in name]
    assert partial
    worker.kill()
    await driver.ended()
    assert len(scene.begun(SLOW)) >= 2
    await scene.require_right()
    orphans = (await scene.require_listed())["orphans"]
    assert set(partial) <= {one["where"] for one in orphans}


async def test_two_attempts_run_to_their_end_by_speculation(scene: Scene) -> None:
    """Each of the two at the slow shard waits for the other, so both have built a state."""
    scene.mode(MEET)
    driver = await scene.driver("run")
    await driver.ended()
    assert len(scene.begun(SLOW)) == 2
    assert len(scene.begun()) >= 3
    await scene.require_right()
    await scene.require_listed()


async def test_the_job_is_run_twice(scene: Scene) -> None:
    """By two drivers at once, under two names and under one; and once more when all is done."""
    scene.mode(HOLD)
    first = await scene.driver("first")
    await until(lambda: len(scene.begun()) >= 2, first)
    # It waits for executors that the first one has.
    second = await scene.driver("second")
    same = await scene.driver("first", "same")
    planned = scene.cluster.staging / "second" / "PLAN.json"
    await until(planned.exists, second)
    scene.go()
    await first.ended()
    text = await second.ended(1)
    assert "changed since the run began" in text
    assert not scene.is_published("second")
    assert "published" in await _either(same)
    again = await scene.driver("first", "again")
    assert "is published already; nothing was changed" in await again.ended()
    await scene.require_right()
    await scene.require_listed()


async def _either(driver: Driver) -> str:
    """Return the output of a second driver of the same run: it is published, or was changed by the first."""
    code = await driver.process.wait()
    text = driver.output()
    assert code in (0, 1), text[-4000:]
    assert code == 0 or "changed since the run began" in text, text[-4000:]
    return text
