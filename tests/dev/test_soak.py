"""`gazette soak`: what it counts and says, what it refuses, and that a planted violation is found."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gazette.consumer.shard.restarts import RestartReason, Restarts
from gazette.errors import Unavailable
from gazette.runtime.tasks import TaskScope
from gazette.testing.clock import ManualClock
from gazette.testing.consumer import shard_spec
from tests.support.instant_clock import breathe
from tests.support.loop_time import LoopTime
from tools.soak import driver as driver_module
from tools.soak.diagnosis import complaints
from tools.soak.driver import Driver, Outcome
from tools.soak.faults import KINDS, Faults
from tools.soak.report import Report, quantile
from tools.soak.run import Served, load_problem, run


@dataclass
class Done:
    journal: str
    began_at: float
    summed_at: float
    latency_s: float = 0.1


def served(*times: tuple[str, float, float]) -> Served:
    result = Served(["a", "b"])
    for journal, began_at, summed_at in times:
        result.add(Done(journal, began_at, summed_at))
    return result


def test_service_is_back_when_every_shard_has_done_something_that_began_since() -> None:
    of = served(("a", 1.0, 2.0), ("b", 1.0, 9.0), ("a", 6.0, 7.0))
    assert of.served_since(0.5) == 9.0
    assert of.served_since(5.0) is None, "b has done nothing that began since"
    of.add(Done("b", 8.0, 10.0))
    assert of.served_since(5.0) == 10.0


def test_the_longest_gap_is_that_of_the_worst_shard_and_counts_what_has_not_ended() -> None:
    of = served(("a", 0, 1.0), ("a", 0, 2.0), ("a", 0, 9.0), ("b", 0, 1.5), ("b", 0, 4.0))
    assert of.longest_gap(3.0, 10.0) == 7.0, "of a, from before the fault until 9"
    assert of.longest_gap(3.0, 20.0) == 16.0, "of b, which did nothing after 4"


def test_quantiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.9, 1.0)] == [1.0, 3.0, 5.0, 5.0]
    assert quantile([], 0.5) == 0.0


def test_the_report_has_a_line_for_each_kind_of_fault() -> None:
    report = Report(seed=3, violations=["torn: somewhere"])
    report.add_outcomes(
        [
            Outcome("crash-broker", "broker-1", 1.0, 4.0, 9.0),
            Outcome("crash-broker", "broker-2", 1.0, 6.0, 7.0, {"shard on member": "error"}, 2),
        ]
    )
    text = "\n".join(report.lines())
    assert "| crash-broker | 2 | 1.0 s | 4.0 s | 6.0 s | 6.0 s | 9.0 s |" in text
    assert "| all | 2 | | 4.0 s | 6.0 s | 6.0 s | |" in text
    assert "unassigned, by fault: crash-broker: 1" in text
    assert "automatically, by fault: crash-broker: 2" in text
    assert "VIOLATION torn: somewhere" in text


def test_the_report_tells_of_processes_that_ended_badly() -> None:
    """A broker says by its exit code what it could not store."""
    report = Report()
    for code in (1, 1, -9):
        report.add_bad_exit("broker-1", code)
    text = "\n".join(report.lines())
    assert "ended badly: broker-1 with 1: 2, broker-1 with -9: 1" in text
    assert report.as_dict()["bad_exits"] == {"broker-1 with 1": 2, "broker-1 with -9": 1}


def test_the_report_tells_of_confirmed_heads_and_of_the_load() -> None:
    report = Report(load={"begin": 1.0, "mean": 2.5, "max": 30.0})
    outcome = Outcome("stop-all-brokers", "", 1.0, 4.0, 9.0, heads=10)
    report.add_outcomes([outcome, outcome])
    text = "\n".join(report.lines())
    assert "after all brokers ended: stop-all-brokers: 20" in text
    assert "load of the machine: begin 1.0, mean 2.5, max 30.0" in text


def test_complaints_are_the_last_lines_of_a_log_that_are_no_mere_information(
    tmp_path: Path,
) -> None:
    log = tmp_path / "a.log"
    lines = [f"2026-01-31T12:00:0{i}.000Z warning gazette: number {i}" for i in range(8)]
    lines[7] = lines[7].replace("warning", "fatal")
    log.write_text("\n".join([*lines, "Traceback", "2026-01-31T12:00:09.000Z info gazette: fine"]))
    assert complaints(log) == lines[4:]
    assert complaints(tmp_path / "none")[0].startswith("no log")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stores", "sqlite,paper"], "unknown store 'paper'"),
        (["--stores", ","], "a store is needed"),
        (["--minutes", "0"], "0 minutes"),
        (["--brokers", "1"], "1 brokers"),
        (["--members", "0"], "0 members"),
        (["--database", "oracle"], "oracle"),
        (["--scenarios", "crash-broker,crash-brokr"], "unknown scenario 'crash-brokr'"),
    ],
)
def test_mistakes_in_the_flags_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("database", [True, False])
def test_every_kind_of_fault_can_be_asked_for(tmp_path: Path, database: bool) -> None:
    """And nothing else, so that no misspelt one is left out in silence."""
    store: Any = SimpleNamespace(can_protect=lambda: database)
    cluster: Any = SimpleNamespace(
        clock=None,
        store=tmp_path,
        settings=SimpleNamespace(lease_ttl_s=10.0),
        database=SimpleNamespace(can_be_killed=database),
        soak=SimpleNamespace(stores=("sql",)),
    )
    kinds = [one.kind for one in Faults(cluster, lambda event, **facts: None, store=store).all()]
    assert len(set(kinds)) == len(kinds)
    assert set(KINDS) - set(kinds) == (set() if database else {"crash-database", "store-read-only"})
    assert set(kinds) <= set(KINDS)


async def test_a_load_that_does_not_do_what_was_asked_is_a_violation() -> None:
    """A load that publishes nothing finds nothing wrong."""
    hangs, go = asyncio.Event(), asyncio.Event()

    async def end(error: BaseException | None, event: asyncio.Event | None = None) -> Any:
        if event is not None:
            await event.wait()
        return error

    async with TaskScope("loads") as scope:
        well = scope.spawn(end(None), name="well")
        ill = scope.spawn(end(Unavailable("no journals")), name="ill")
        never = scope.spawn(end(None, hangs), name="never")
        cancelled = scope.spawn(end(None, go), name="cancelled")
        await asyncio.wait({well, ill})
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert load_problem(well, ended_before=False) == ""
        assert load_problem(well, ended_before=True) == "it ended unasked"
        assert load_problem(ill, ended_before=False).startswith("no journals")
        assert "did not end within" in load_problem(never, ended_before=False)
        assert load_problem(cancelled, ended_before=False) == "it was cancelled"
        scope.cancel()


class Cluster:
    """As much of a cluster as the repairs of a driver ask for."""

    def __init__(self, clock: ManualClock, failed: dict[str, str]) -> None:
        self.clock = clock
        self.brokers: list[Any] = []
        self.members: list[Any] = []
        self.store = Path("/nowhere")
        self.settings = SimpleNamespace(lease_ttl_s=10.0)
        self.database = SimpleNamespace(can_be_killed=False)
        self.soak = SimpleNamespace(stores=())
        self.failed = failed
        self.unassigned = 0
        self.hangs = False

    def client(self) -> Any:
        return None

    async def missing_members(self) -> str:
        if self.hangs:
            await asyncio.Event().wait()
        return ""

    def has_replicas(self) -> str:
        return ""

    async def failed_shards(self) -> dict[str, str]:
        return dict(self.failed)

    async def unassign_failed(self) -> None:
        self.unassigned += 1
        self.failed.clear()

    async def missing_shards(self) -> str:
        return "a shard FAILED" if self.failed else ""

    async def listed_shards(self) -> tuple[Any, ...]:
        return ()

    def specs(self) -> list[Any]:
        return []


def driver_of(cluster: Cluster) -> tuple[Driver, list[tuple[str, Any]]]:
    notes: list[tuple[str, Any]] = []
    store: Any = SimpleNamespace(can_protect=lambda: False)
    of: Any = cluster
    service: Any = SimpleNamespace(served_since=lambda time: time)
    note = lambda event, **facts: notes.append((event, facts))  # noqa: E731
    faults = Faults(of, note, store=store)
    driver = Driver(of, service, random.Random(1), note, faults=faults)
    driver.ended = {"a broker"}
    return driver, notes


async def test_shards_that_say_that_they_are_restarted_are_left_to_it() -> None:
    """Else nothing would show that they are. Others are unassigned, as an operator does."""
    clock = ManualClock()
    restarts, spec = Restarts(0), shard_spec("shard")
    failed = {"shard on one": restarts.failed(spec, 0.0, RestartReason.FENCED).text}
    cluster = Cluster(clock, failed)
    driver, notes = driver_of(cluster)
    assert await driver.missing(0.0) == "a shard FAILED"
    assert await driver.missing(0.0) == "a shard FAILED"
    assert cluster.unassigned == 0
    assert [event for event, _ in notes] == ["restarted"]
    assert driver.restarts == 1
    while restarts.failed(spec, 0.0, RestartReason.FENCED).delay_s is not None:
        pass
    failed["shard on one"] = restarts.failed(spec, 0.0, RestartReason.FENCED).text
    assert await driver.missing(0.0) == ""
    assert cluster.unassigned == 1
    assert [event for event, _ in notes] == ["restarted", "failed"]


async def test_a_look_that_does_not_end_is_one_that_finds_something_missing() -> None:
    clock = ManualClock()
    cluster = Cluster(clock, {})
    cluster.hangs = True
    driver, _ = driver_of(cluster)
    time = LoopTime()
    async with TaskScope("test") as scope:
        task = scope.spawn(outcome(driver.settle(0.0)), name="settle")
        while not task.done():
            clock.advance(driver_module.SETTLE_S)
            time.advance(driver_module.SETTLE_S)
            await breathe()
        found = task.result()
    assert isinstance(found, Unavailable)
    assert "looking at it does not end" in str(found)


async def outcome(work: Any) -> BaseException | None:
    try:
        await work
    except Unavailable as error:
        return error
    return None


PLANT = """
import asyncio, sys
from tools.soak import run
from tools.soak.faults import Faults
from gazette.client.append.appender import AppendParams

async def plant(self, rng):
    # A sum that is in the journal once more, as by a store that forgot it had committed.
    from stream_sum.messages import Sum
    from gazette.message.envelope_reader import CommittedReader
    from gazette.client.read.reader import ReadParams
    from tools.soak.cluster import SUMS
    from gazette.labels import CONTENT_JSON_LINES
    from gazette.message.framing.framing import framing_of
    async with self._cluster.client() as client:
        reader = CommittedReader(client, ReadParams(SUMS[0], 0, block=True), Sum)
        async for batch in reader.batches():
            again = batch[0].message
            again.uuid = ""
            frame = bytearray()
            framing_of(CONTENT_JSON_LINES, Sum).encode_into(again, frame)
            await client.append(AppendParams(SUMS[0]), bytes(frame))
            return

Faults._crash_consumer = plant
sys.exit(run.run(sys.argv[1:]))
"""


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_planted_duplicate_ends_a_run_with_exit_code_1(tmp_path: Path) -> None:
    """Real processes, a real journal: the run says what is there twice."""
    arguments = ["--minutes", "2", "--scenarios", "crash-consumer", "--stores", "json"]
    arguments += ["--members", "1", "--json", "--dir", str(tmp_path), "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-c", PLANT, *arguments],
        capture_output=True,
        text=True,
        timeout=380,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert any(one.startswith("duplicate: ") for one in report["violations"]), report
    assert not report["ok"]
    history = [json.loads(line) for line in (tmp_path / "history.ndjson").read_text().splitlines()]
    assert {"fault", "violation", "summed"} <= {line["event"] for line in history}
