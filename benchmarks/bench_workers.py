"""Brokers and members with `--workers` 1 and 2 on one and two processors, in alternating rounds.

::

    python benchmarks/bench_workers.py [--rounds 5] [--seconds 2] [--messages 100000]

The measured processes may use only some processors. The load may use all, and so may the brokers behind the
members. Prints the table of ``docs/appendix/performance-workers.md``: the rate of eight appenders on eight
journals with one replica, and that of eight shards that catch up. A figure is a median, with least and most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Final

from gazette.client.client import Client
from gazette.errors import Unavailable
from gazette.run.dev.cluster import ClusterSettings, LocalCluster
from gazette.runtime.clock import SystemClock
from gazette.runtime.ports import free_port
from gazette.runtime.timeouts import timeout
from tools.bench.app import Mode
from tools.bench.bare import HTTP2
from tools.bench.cluster import Bench, BenchSettings, journal_spec, running
from tools.bench.load import LoadTarget, append_for
from tools.bench.messages import member, shard, shard_spec
from tools.bench.report import load_average, number, python_build
from tools.bench.sides import Side, addresses_of

_CLOCK: Final = SystemClock()
_JOURNALS: Final = tuple(f"bench/workers/{index}" for index in range(8))
_WAYS: Final = ((1, 1), (1, 2), (2, 1), (2, 2))
"""Processors, and workers."""
_WARM_S: Final = 0.5
_TIMEOUT_S: Final = 120.0
_TXN_S: Final = 0.25


@contextmanager
def _starting_on(processors: int) -> Iterator[None]:
    """Let processes that the block starts use only so many processors."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(everywhere)[:processors])
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


async def _append_rate(directory: Path, processors: int, workers: int, seconds: float) -> float:
    """Return appends/s of a broker with so many workers, each the primary of some journals."""
    flags = (f"--workers={workers}",)
    settings = ClusterSettings(
        directory, brokers=1, zones=1, first_port=free_port(), broker_flags=flags
    )
    cluster = LocalCluster(settings, _CLOCK)
    try:
        with _starting_on(processors):
            await cluster.start()
        async with Client(addresses_of(cluster), clock=_CLOCK) as client:
            side = Side(HTTP2, cluster, client, None, _CLOCK)
            await side.apply([journal_spec(name) for name in _JOURNALS])
            places: dict[str, tuple[str, int] | None] = {}
            async with timeout(_TIMEOUT_S):
                while None in places.values() or len({*places.values()}) < workers:
                    places = {name: await side.primary(name) for name in _JOURNALS}
        targets = [
            LoadTarget.of(place, name, b"x" * 100) for name, place in places.items() if place
        ]
        await asyncio.to_thread(append_for, targets, _WARM_S)
        return (await asyncio.to_thread(append_for, targets, seconds)).rate
    finally:
        await cluster.stop(1.0)


async def _catch_up_rate(
    bench: Bench, ends: Mapping[str, int], processors: int, workers: int, count: int, name: str
) -> float:
    """Return the messages/s of shards between the first quarter of their journals and the end."""
    async with AsyncExitStack() as stack:
        with _starting_on(processors):
            _, shards = await stack.enter_async_context(
                member(bench, {"GAZETTE_WORKERS": str(workers)})
            )
        begun: dict[str, float] = {}
        specs = {
            journal: shard_spec(f"{name}-{index}", Mode.UPSERT, journal, _TXN_S)
            for index, journal in enumerate(ends)
        }
        for spec in specs.values():
            await stack.enter_async_context(shard(bench, shards, spec, replication=1))
        async with timeout(_TIMEOUT_S):
            for journal, spec in specs.items():
                stat = await shards.stat(spec.id, {journal: ends[journal] // 4})
                begun[journal] = stat.read_through[journal]
            began = _CLOCK.monotonic()
            for journal, spec in specs.items():
                await shards.stat(spec.id, {journal: ends[journal]})
        seconds = _CLOCK.monotonic() - began
        share = sum(1 - begun[journal] / ends[journal] for journal in ends)
        if not share:
            raise Unavailable("all was read at once", hint="Let it write more: --messages.")
        return share * count / seconds


async def measure(rounds: int, seconds: float, messages: int, directory: Path) -> list[str]:
    """Return the lines of the table."""
    appends: dict[tuple[int, int], list[float]] = {way: [] for way in _WAYS}
    caught_up: dict[tuple[int, int], list[float]] = {way: [] for way in _WAYS}
    for index in range(rounds):
        for way in _WAYS[:: 1 if index % 2 else -1]:
            place = directory / "appends" / f"{index}-{way[0]}-{way[1]}"
            appends[way].append(await _append_rate(place, *way, seconds))
    async with (
        running(BenchSettings(directory / "members"), _CLOCK) as bench,
        bench.journals(*(journal_spec(name) for name in _JOURNALS)),
    ):
        ends = {name: await bench.fill(name, messages) for name in _JOURNALS}
        for index in range(rounds):
            for way in _WAYS[:: 1 if index % 2 else -1]:
                name = f"workers-{index}-{way[0]}-{way[1]}"
                rate = await _catch_up_rate(bench, ends, *way, messages, name)
                caught_up[way].append(rate)
    lines = [
        "| processors | `--workers` | appends/s | beside 1 and 1 | messages/s of a member | beside 1 and 1 |",
        "|---|---|---|---|---|---|",
    ]
    for way in _WAYS:
        cells = [str(way[0]), str(way[1])]
        for taken in (appends, caught_up):
            ratios = [rate / first for rate, first in zip(taken[way], taken[1, 1], strict=True)]
            cells += [_shown(taken[way]), f"{_shown(ratios)} ×"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shown(values: list[float]) -> str:
    return f"{number(statistics.median(values))} [{number(min(values))}–{number(max(values))}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of appends")
    parser.add_argument("--messages", type=int, default=100_000, help="of each journal")
    arguments = parser.parse_args()
    before = load_average()[0]
    with tempfile.TemporaryDirectory(prefix="bench-workers-") as directory:
        lines = asyncio.run(
            measure(arguments.rounds, arguments.seconds, arguments.messages, Path(directory))
        )
    build = python_build(str(sysconfig.get_config_var("CONFIG_ARGS") or ""))
    print(
        f"On {os.cpu_count()} cores, by Python {platform.python_version()} ({build}), in {arguments.rounds}"
        f" rounds. The load was {before:.1f} before, and {load_average()[0]:.1f} after.\n"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
