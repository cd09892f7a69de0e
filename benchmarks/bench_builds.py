"""Small appends of clusters that other interpreters or trees run, in alternating rounds of one run.

::

    python benchmarks/bench_builds.py plain=/usr/bin/python3 other=/opt/python/bin/python3:/path/of/a/tree

Each argument is ``NAME=INTERPRETER[:TREE]``. Without a tree, the brokers run this one. ``GAZETTE_GO`` names
the directory of the original's binaries, and adds them. Ratios are to the first argument, round by round:
above 1, the other one is better. Prints medians, with least and most, and how each interpreter was built.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.protocol.label_set import LabelSelector
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.run.dev.processes import ChildProcess
from gazette.runtime.clock import SystemClock
from gazette.runtime.timeouts import timeout
from tools.bench.cluster import journal_spec
from tools.bench.load import LoadTarget, append_for
from tools.bench.processes import cpu_seconds
from tools.bench.report import load_average, number, percentile, python_build
from tools.bench.sides import ORIGINAL, addresses_of, original_directory

_CLOCK: Final = SystemClock()
_ROWS: Final = ((1, 1, 1), (1, 8, 8), (3, 1, 1), (3, 8, 8))
"""Replicas, appenders and journals."""
_MEASURES: Final = (("p50", "ms", False), ("rate", "/s", True), ("CPU", "ms", False))
_WARM_S: Final = 0.5
_READY_TIMEOUT_S: Final = 120.0
_STOP_S: Final = 20.0
_FACTS: Final = (
    "import platform, sysconfig; print(platform.python_version());"
    "print(sysconfig.get_config_var('CONFIG_ARGS'))"
)


@dataclass(frozen=True, slots=True)
class Build:
    """A cluster to measure, by the interpreter and the tree that run it."""

    name: str
    python: str
    tree: Path

    @classmethod
    def parse(cls, text: str) -> Build:
        name, _, where = text.partition("=")
        python, _, tree = where.partition(":")
        return cls(name, python, Path(tree or os.curdir).absolute())

    def facts(self) -> str:
        """Return the version of the interpreter, and how it was built."""
        command = [self.python, "-c", _FACTS]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        version, _, arguments = printed.partition("\n")
        return f"{self.name}: Python {version} ({python_build(arguments)})"


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that runs: its client, and the ids of its brokers' processes."""

    client: Client
    pids: tuple[int, ...]

    async def targets(self, row: tuple[int, int, int]) -> list[LoadTarget]:
        """Create the journals of a row, and return its appenders."""
        replication, appenders, count = row
        names = [f"bench/r{replication}-{appenders}/{index}" for index in range(count)]
        specs = [journal_spec(name, replication=replication) for name in names]
        await self.client.apply_journals([JournalChange(upsert=spec) for spec in specs])
        places: dict[str, tuple[str, int]] = {}
        async with timeout(_READY_TIMEOUT_S):
            while len(places) < count:
                listed = await self.client.list_journals(LabelSelector.of())
                for one in listed.journals:
                    route = one.route
                    is_whole = len(route.members) == replication and route.primary is not None
                    if one.spec.name in names and is_whole:
                        parts = urlsplit(route.endpoints[route.primary or 0])
                        places[one.spec.name] = (parts.hostname or "", parts.port or 0)
        pairs = [(places[name], name) for name in names]
        return [LoadTarget.of(*pairs[index % count], b"x" * 100) for index in range(appenders)]


@asynccontextmanager
async def _running(build: Build, directory: Path) -> AsyncIterator[Running]:
    """Run three brokers by `gazette dev` of an interpreter and a tree."""
    ready = directory / f"{build.name}.json"
    flags = f"--brokers=3 --zones=3 --port=0 --etcd-port=0 --ready-file={ready}".split()
    process = ChildProcess(
        build.name,
        [build.python, "-m", "gazette.main", "dev", f"--dir={directory / build.name}", *flags],
        directory / f"{build.name}.log",
        {**os.environ, "PYTHONPATH": f"{build.tree}:{os.environ.get('PYTHONPATH', '')}"},
        _CLOCK,
    )
    await process.start()
    try:
        async with timeout(_READY_TIMEOUT_S):
            while not ready.exists():
                if not process.running:
                    raise process.died()
                await _CLOCK.sleep(0.05)
        addresses = ",".join(one["grpc"] for one in json.loads(ready.read_text())["brokers"])
        async with Client(addresses, clock=_CLOCK) as client:
            yield Running(client, _brokers_of(process.pid))
    finally:
        await process.stop(_STOP_S)


def _brokers_of(pid: int) -> tuple[int, ...]:
    """Return the children of a process that serve as brokers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return tuple(
        int(child)
        for child in children
        if b"\0serve\0" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


@asynccontextmanager
async def _original(directory: Path, binaries: Path) -> AsyncIterator[Running]:
    """Run three brokers of the original."""
    settings = ClusterSettings(directory / ORIGINAL, zones=3, original=binaries)
    cluster = LocalCluster(settings, _CLOCK)
    try:
        await cluster.start()
        async with Client(addresses_of(cluster), clock=_CLOCK) as client:
            yield Running(client, tuple(one.process.pid for one in cluster.brokers))
    finally:
        await cluster.stop(1.0)


async def measure(builds: Sequence[Build], seconds: float, rounds: int) -> list[str]:
    """Return the lines of the table."""
    taken: dict[tuple[int, int, int], dict[str, list[tuple[float, ...]]]] = {}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-builds-")))
        running = {
            build.name: await stack.enter_async_context(_running(build, directory))
            for build in builds
        }
        binaries = original_directory()
        if binaries is not None:
            running[ORIGINAL] = await stack.enter_async_context(_original(directory, binaries))
        loads = {
            (row, name): await one.targets(row) for row in _ROWS for name, one in running.items()
        }
        for targets in loads.values():
            await asyncio.to_thread(append_for, targets, _WARM_S)
        for index in range(rounds):
            for row in _ROWS:
                for name in list(running)[:: 1 if index % 2 else -1]:
                    before = cpu_seconds(running[name].pids)
                    appended = await asyncio.to_thread(append_for, loads[row, name], seconds)
                    spent = cpu_seconds(running[name].pids) - before
                    latencies = appended.latencies_ms
                    values = (
                        percentile(latencies, 50),
                        appended.rate,
                        1e3 * spent / len(latencies),
                    )
                    taken.setdefault(row, {}).setdefault(name, []).append(values)
    lines = [f"| load, measure | {' | '.join(running)} |", f"|---|{'---|' * len(running)}"]
    for row, by_name in taken.items():
        title = f"R={row[0]}, {row[1]} appenders on {row[2]} journals"
        for place, (measure, unit, more_is_better) in enumerate(_MEASURES):
            first = [values[place] for values in by_name[builds[0].name]]
            cells = []
            for name in running:
                own = [one[place] for one in by_name[name]]
                pairs = zip(own, first, strict=True)
                ratios = [a / b if more_is_better else b / a for a, b in pairs]
                cells.append(f"{_shown(own)} {unit}, {statistics.median(ratios):.2f} ×")
            lines.append(f"| {title}, {measure} | {' | '.join(cells)} |")
    return lines


def _shown(values: Sequence[float]) -> str:
    return f"{number(statistics.median(values))} [{number(min(values))}–{number(max(values))}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("builds", nargs="+", metavar="NAME=INTERPRETER[:TREE]")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    builds = [Build.parse(text) for text in arguments.builds]
    facts = "; ".join(build.facts() for build in builds)
    before = load_average()[0]
    lines = asyncio.run(measure(builds, arguments.seconds, arguments.rounds))
    print(f"{facts}. {arguments.rounds} rounds on {os.cpu_count()} cores. The load was", end=" ")
    print(f"{before:.1f} before, and {load_average()[0]:.1f} after.\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
