"""`gazette bench small | large | tailers | many`: appends, many readers and many journals.

With ``GAZETTE_GO`` all rounds alternate with brokers of the original, and ratios are to these. Without it,
small appends are compared with the bare service of our own transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gazette.client.append.appender import AppendParams
from gazette.errors import Unavailable
from gazette.http2.messages import prefixed
from gazette.protocol.content import CHUNK_BYTES
from gazette.protocol.journal import JournalSpec
from gazette.run.dev.processes import await_ready
from gazette.runtime.tasks import BlockingPool
from tools.bench.bare import HTTP2
from tools.bench.cluster import Bench, journal_spec
from tools.bench.load import BARE_APPEND, Appended, LoadTarget, Tailed, append_for, tail_for
from tools.bench.messages import append_lines
from tools.bench.processes import cpu_seconds
from tools.bench.report import (
    Baseline,
    Figure,
    percentile,
    ratio_at_least,
    ratio_at_most,
    value_at_most,
)
from tools.bench.report import Target as Bound
from tools.bench.sides import ORIGINAL, Side, addresses_of, sides

SMALL: Final = b"x" * 100
APPENDERS: Final = 8
READERS: Final = 500
RATES: Final = {"100 kB/s": 100_000, "1 MB/s": 1_000_000}
JOURNALS: Final = 1_000
_LARGE_CHUNKS: Final = 256
_SERVICE_LINES: Final = 200_000
_IDLE_S: Final = 30.0
_SETTLE_S: Final = 135.0
"""A broker lists the store of a new journal after 1 s, 3 s, 7 s and so on: none from 127 s to 255 s."""
_WARM_S: Final = 0.2
_READY_TIMEOUT_S: Final = 120.0
_STOP_S: Final = 60.0
_SETTLE_WINDOWS: Final = 60
_SETTLE_WINDOW_S: Final = 1.0
_SETTLED_SHARE: Final = 0.1
"""Share of a processor that brokers at rest may use, all together."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A shape of load, and the bounds beside the original: of p50, p99 and rate."""

    name: str
    replication: int
    appenders: int
    journals: int
    bounds: tuple[Bound | None, Bound | None, Bound | None] = (None, None, None)


_ROWS: Final = tuple(
    row
    for replication in (1, 3)
    for row in (
        _Row(
            f"R={replication}, one appender",
            replication,
            1,
            1,
            (ratio_at_most(1.8), ratio_at_most(2.2), None),
        ),
        _Row(
            f"R={replication}, {APPENDERS} appenders on {APPENDERS} journals",
            replication,
            APPENDERS,
            APPENDERS,
            (None, None, ratio_at_least(0.8 if replication == 1 else 0.55)),
        ),
        _Row(
            f"R={replication}, {APPENDERS} appenders on one journal",
            replication,
            APPENDERS,
            1,
            (None, None, ratio_at_least(0.75)),
        ),
    )
)


def _specs(row: _Row) -> list[JournalSpec]:
    name = f"bench/small/r{row.replication}-{row.appenders}-{row.journals}"
    return [
        journal_spec(f"{name}/{index:02}", replication=row.replication)
        for index in range(row.journals)
    ]


async def small(bench: Bench) -> list[Figure]:
    """Measure appends of 100 bytes: one after the other, by one appender and by eight."""
    figures: list[Figure] = []
    async with sides(bench) as running:
        for row in _ROWS:
            figures += await _row(bench, running, row)
    return figures


async def _row(bench: Bench, running: list[Side], row: _Row) -> list[Figure]:
    loads: dict[str, list[LoadTarget]] = {}
    specs = _specs(row)
    for side in running:
        await side.apply(specs)
        targets = []
        for index in range(row.appenders):
            spec = specs[index % row.journals]
            address = await side.primary(spec.name, row.replication)
            assert address is not None
            targets.append(LoadTarget.of(address, spec.name, SMALL))
        loads[side.name] = targets
        if side.bare is not None:
            bare = LoadTarget(side.bare.address, prefixed(SMALL) * 3, BARE_APPEND)
            loads[f"bare {side.name}"] = [bare] * row.appenders

    def appending(targets: list[LoadTarget], seconds: float) -> Callable[[], Awaitable[Appended]]:
        return lambda: asyncio.to_thread(append_for, targets, seconds)

    for targets in loads.values():
        await appending(targets, _WARM_S)()
    pids = {side.name: side.pids for side in running}
    pids |= {f"bare {side.name}": [side.bare.pid] for side in running if side.bare is not None}
    taken: dict[str, list[Appended]] = {name: [] for name in loads}
    cpu_ms: dict[str, list[float]] = {name: [] for name in loads}
    for _ in range(bench.settings.rounds):
        for name, targets in loads.items():
            before = cpu_seconds(pids[name])
            taken[name].append(await appending(targets, bench.settings.seconds)())
            spent = cpu_seconds(pids[name]) - before
            cpu_ms[name].append(1e3 * spent / len(taken[name][-1].latencies_ms))

    beside = ORIGINAL if ORIGINAL in loads else f"bare {HTTP2}"
    figures = []
    kinds: tuple[tuple[str, str, Callable[[Appended], float]], ...] = (
        ("p50", "ms", lambda one: percentile(one.latencies_ms, 50)),
        ("p99", "ms", lambda one: percentile(one.latencies_ms, 99)),
        ("rate", "/s", lambda one: one.rate),
    )
    for (kind, unit, of), bound in zip(kinds, row.bounds, strict=True):
        if (kind == "rate") == (row.appenders == 1):
            continue
        baseline = Baseline(beside, tuple(of(one) for one in taken[beside]))
        for name in (name for name in loads if name != beside):
            target = bound if name == HTTP2 and beside == ORIGINAL else None
            values = tuple(of(one) for one in taken[name])
            title = f"{row.name}, {kind}, {name}"
            figures.append(Figure("small", title, unit, values, baseline, target))
    # CPU depends less than the rest on what else the machine does.
    baseline = Baseline(beside, tuple(cpu_ms[beside]))
    for name in (name for name in loads if name != beside):
        title = f"{row.name}, CPU of all brokers for each, {name}"
        figures.append(Figure("small", title, "ms", tuple(cpu_ms[name]), baseline))
    return figures


async def large(bench: Bench) -> list[Figure]:
    """Measure appends of 32 MiB, and many of 100 bytes that our client puts into few calls."""
    chunk, count = b"x" * CHUNK_BYTES, bench.scaled(_LARGE_CHUNKS)
    lines = bench.scaled(_SERVICE_LINES)
    pool = BlockingPool("bench-lines", 1)

    async def megabytes(side: Side, journal: str) -> float:
        seconds = await bench.timed(side.client.append(AppendParams(journal), [chunk] * count))
        return count * CHUNK_BYTES / 1e6 / seconds

    async def messages(side: Side, journal: str) -> float:
        async with bench.publisher(addresses_of(side.cluster)) as (appends, _):

            async def all_of_it() -> None:
                await pool.run(append_lines, appends, journal, lines)
                await appends.flush()

            return lines / await bench.timed(all_of_it())

    figures: list[Figure] = []
    try:
        async with sides(bench) as running:
            for replication, least in ((1, 0.9), (3, 1.2)):
                spec = journal_spec(f"bench/large/r{replication}", replication=replication)
                for side in running:
                    await side.apply([spec])
                for name, unit, work, bound in (
                    ("appends of 32 MiB", "MB/s", megabytes, ratio_at_least(least)),
                    ("append service, 100 bytes each", "msg/s", messages, ratio_at_least(0.9)),
                ):
                    taken: dict[str, list[float]] = {side.name: [] for side in running}
                    for side in running:
                        await work(side, spec.name)
                    for _ in range(bench.settings.rounds):
                        for side in running:
                            taken[side.name].append(await work(side, spec.name))
                    figures += _beside("large", f"R={replication}, {name}", unit, taken, bound)
    finally:
        pool.close()
    return figures


def _beside(
    suite: str, title: str, unit: str, taken: Mapping[str, Sequence[float]], bound: Bound | None
) -> list[Figure]:
    """Return the figures of our transports beside the original. The bound is of http2."""
    beside = Baseline(ORIGINAL, tuple(taken[ORIGINAL])) if ORIGINAL in taken else None
    if bound is not None and bound.of == "ratio" and beside is None:
        bound = None
    return [
        Figure(
            suite,
            f"{title}, {name}",
            unit,
            tuple(values),
            beside,
            bound if name == HTTP2 else None,
        )
        for name, values in taken.items()
        if name != ORIGINAL
    ]


async def tailers(bench: Bench) -> list[Figure]:
    """Measure appends to one journal, R=1, that 500 readers tail."""
    spec = journal_spec("bench/tailers")
    count = bench.scaled(READERS)
    figures: list[Figure] = []
    async with sides(bench) as running:
        for side in running:
            await side.apply([spec])
        for name, rate in RATES.items():
            tailed: dict[str, list[Tailed]] = {side.name: [] for side in running}
            cpu: dict[str, list[float]] = {side.name: [] for side in running}
            for _ in range(bench.settings.rounds):
                for side in running:
                    address = await side.primary(spec.name)
                    assert address is not None
                    before = cpu_seconds(side.pids)
                    load = await asyncio.to_thread(
                        tail_for,
                        address,
                        spec.name,
                        readers=count,
                        rate=rate,
                        seconds=2 * bench.settings.seconds,
                    )
                    tailed[side.name].append(load)
                    spent = cpu_seconds(side.pids) - before
                    cpu[side.name].append(1e3 * spent / len(load.latencies_ms))
            figures += _tailer_figures(f"{count} readers at {name}", tailed, cpu)
    return figures


def _tailer_figures(
    load: str, tailed: dict[str, list[Tailed]], cpu: dict[str, list[float]]
) -> list[Figure]:
    measures = {
        "append p50": {
            name: tuple(percentile(one.latencies_ms, 50) for one in rounds)
            for name, rounds in tailed.items()
        },
        "CPU of brokers for each append": {name: tuple(used) for name, used in cpu.items()},
    }
    figures = []
    for measure, values in measures.items():
        bound = ratio_at_most(3.0) if measure == "append p50" else None
        figures += _beside("tailers", f"{load}, {measure}", "ms", values, bound)
    for name, rounds in tailed.items():
        late = tuple(one.seconds / one.planned_s for one in rounds)
        figures.append(
            Figure("tailers", f"{load}, time until all is read, {name}", "× the load's", late)
        )
    return figures


async def many(bench: Bench) -> list[Figure]:
    """Measure three idle brokers with 1,000 journals, and the start of one of them.

    It starts when the others are at rest, and while they still take over its journals.
    """
    specs = [
        journal_spec(f"bench/many/{index:04}", refresh_s=3600)
        for index in range(bench.scaled(JOURNALS))
    ]
    seconds = max(1.0, min(_IDLE_S, _IDLE_S * bench.settings.seconds))
    cpu: dict[str, list[float]] = {}
    at_rest: dict[str, list[float]] = {}
    at_once: dict[str, list[float]] = {}
    async with sides(bench) as running:
        for side in running:
            await side.apply(specs)
        await bench.clock.sleep(_SETTLE_S if bench.settings.scale == 1.0 else seconds)
        for _ in range(bench.settings.rounds):
            before = {side.name: cpu_seconds(side.pids) for side in running}
            await bench.clock.sleep(seconds)
            for side in running:
                spent = cpu_seconds(side.pids) - before[side.name]
                cpu.setdefault(side.name, []).append(100 * spent / seconds / len(side.pids))
        for _ in range(bench.settings.rounds):
            for side in running:
                for rests, start in ((True, at_rest), (False, at_once)):
                    taken = await _start_again(bench, side, at_rest=rests)
                    start.setdefault(side.name, []).append(taken)
    figures = []
    count, soon = f"{len(specs)} journals", value_at_most(0.25, "s")
    for title, unit, values, target in (
        (f"CPU of an idle broker, {count}", "%", cpu, value_at_most(0.3, "%")),
        (f"start of a broker, {count}", "s", at_rest, soon),
        (f"start of a broker, {count}, while others take over", "s", at_once, soon),
    ):
        figures += _beside("many", title, unit, values, target)
    return figures


async def _start_again(bench: Bench, side: Side, *, at_rest: bool) -> float:
    """Stop a broker and start it again, at once or when the others are at rest.

    Return the seconds until it was ready, when the brokers of this side have come to rest: what they still
    do would slow the start of the next.
    """
    *others, broker = side.cluster.brokers
    await broker.process.stop(_STOP_S)
    if at_rest:
        await _settled(bench, side.name, [one.process.pid for one in others])
    began = bench.clock.monotonic()
    await broker.process.start()
    await await_ready(
        broker.process, broker.http_port, bench.clock, _READY_TIMEOUT_S, host=broker.host
    )
    seconds = bench.clock.monotonic() - began
    await _settled(bench, side.name, side.pids)
    return seconds


async def _settled(bench: Bench, name: str, pids: Sequence[int]) -> None:
    """Return when brokers have used little of a processor for a while.

    Raise ``Unavailable`` if they stay busy.
    """
    for _ in range(_SETTLE_WINDOWS):
        before = cpu_seconds(pids)
        await bench.clock.sleep(_SETTLE_WINDOW_S)
        if cpu_seconds(pids) - before < _SETTLED_SHARE * _SETTLE_WINDOW_S:
            return
    raise Unavailable(
        f"the brokers of {name} do not come to rest",
        seconds=_SETTLE_WINDOWS * _SETTLE_WINDOW_S,
        hint="Repeat it with --seconds 0.2: then there are fewer journals.",
    )
