"""`gazette bench append | latency | read`: the cost of journals beside the bare transport."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.read.reader import Reader, ReadParams
from gazette.errors import NotFound
from gazette.protocol.content import CHUNK_BYTES
from gazette.protocol.fragment import Codec
from tools.bench import bare as bench_bare
from tools.bench.app import message_of
from tools.bench.cluster import Bench, journal_spec
from tools.bench.processes import cpu_seconds
from tools.bench.report import (
    Baseline,
    Figure,
    percentile,
    ratio_at_least,
    ratio_at_most,
)

APPEND_CHUNKS: Final = 256
"""Content of one append: 32 MiB."""
READ_CHUNKS: Final = 512
"""Content of one read: 64 MiB."""
FRAGMENT_BYTES: Final = 16 << 20
FRAGMENTS: Final = 4
SMALL: Final = b"x" * 100
MB: Final = 1e6
BARE: Final = "bare stream, SHA-1"
BARE_FILED: Final = "bare stream, SHA-1, file"


def text(length: int) -> bytes:
    """Return lines of JSON."""
    lines: list[bytes] = []
    size = index = 0
    while size < length:
        message = message_of(index)
        message.uuid = f"{index * 0x9E3779B97F4A7C15 % (1 << 128):032x}"
        lines.append(msgspec.json.encode(message) + b"\n")
        size += len(lines[-1])
        index += 1
    return b"".join(lines)[:length]


async def append(bench: Bench) -> list[Figure]:
    """Measure the throughput of one journal: appends of 32 MiB in 128 KiB chunks, one after the other."""
    chunk = text(CHUNK_BYTES)
    count = bench.scaled(APPEND_CHUNKS)
    specs = {
        "append, R=1": journal_spec("bench/append/one"),
        "append, R=3": journal_spec("bench/append/three", replication=3),
        "append, R=1, zstandard": journal_spec("bench/append/zstd", codec=Codec.ZSTANDARD),
    }

    async def bare() -> int:
        await bench.bare.append(chunk, count)
        return count * CHUNK_BYTES

    def journal(name: str) -> Callable[[], Awaitable[int]]:
        async def work() -> int:
            await bench.client.append(AppendParams(name), [chunk] * count)
            return count * CHUNK_BYTES

        return work

    async def filed() -> int:
        await bench.bare.append(chunk, count, file=True)
        return count * CHUNK_BYTES

    works = [bare, filed, *(journal(spec.name) for spec in specs.values())]
    cpu: list[list[float]] = [[] for _ in works]
    async with bench.journals(*specs.values()):
        for work in works:
            await work()
        measures = [_with_cpu(bench, work, used) for work, used in zip(works, cpu, strict=True)]
        measured = await bench.rounds(*measures)
    ceiling = Baseline(BARE, measured[0])
    targets = (ratio_at_least(0.6), ratio_at_least(0.25), None)
    figures = [
        Figure("append", name, "MB/s", values, ceiling, target)
        for name, values, target in zip(specs, measured[2:], targets, strict=True)
    ]
    # If the machine is slow to allocate memory for files, no broker can be faster than that.
    beside = Baseline(BARE_FILED, measured[1])
    figures.insert(1, Figure("append", "the same", "MB/s", measured[2], beside))
    if all(cpu):
        # CPU depends less than throughput on what else the machine does.
        beside = Baseline(BARE_FILED, tuple(cpu[1]))
        figures += [
            Figure("append", f"CPU of {name}", "s/GB", tuple(used), beside)
            for name, used in zip(specs, cpu[2:], strict=True)
        ]
    return figures


def _with_cpu(
    bench: Bench, work: Callable[[], Awaitable[int]], used: list[float]
) -> Callable[[], Awaitable[float]]:
    """Return a measurement in MB/s that also notes the CPU seconds per GB of all processes."""
    pids = [os.getpid(), bench.bare.pid, *(one.process.pid for one in bench.cluster.brokers)]

    async def measure() -> float:
        done = 0

        async def counted() -> int:
            nonlocal done
            length = await work()
            done += length
            return length

        try:
            before = cpu_seconds(pids)
        except NotFound:
            return await bench.repeated(work) / MB
        rate = await bench.repeated(counted) / MB
        used.append((cpu_seconds(pids) - before) / (done / 1e9))
        return rate

    return measure


def _rate(bench: Bench, work: Callable[[], Awaitable[int]]) -> Callable[[], Awaitable[float]]:
    """Return a measurement in MB/s of repeated work that returns bytes."""

    async def measure() -> float:
        return await bench.repeated(work) / MB

    return measure


async def latency(bench: Bench) -> list[Figure]:
    """Measure appends of 100 bytes, each after the acknowledgement of the former, beside unary calls."""
    specs = [
        journal_spec("bench/latency/one"),
        journal_spec("bench/latency/three", replication=3),
    ]

    async def unary() -> object:
        return await bench.bare.unary(SMALL)

    async def streamed() -> object:
        # An append is three messages and an end: what it asks for, content, the intent to commit.
        await bench.bare.append(SMALL, 3)
        return None

    def appending(name: str) -> Callable[[], Awaitable[object]]:
        async def call() -> object:
            return await bench.client.append(AppendParams(name), SMALL)

        return call

    calls = [unary, streamed, *(appending(spec.name) for spec in specs)]
    samples: list[list[list[float]]] = [[] for _ in calls]
    async with bench.journals(*specs):
        for call in calls:
            for _ in range(20):
                await call()
        for _ in range(bench.settings.rounds):
            for taken, call in zip(samples, calls, strict=True):
                taken.append(await _latencies_ms(bench, call))
    figures: list[Figure] = []
    for percent, bounds in ((50, (2.0, 4.0)), (99, (None, None))):
        of_rounds = [tuple(percentile(one, percent) for one in taken) for taken in samples]
        beside = Baseline(f"bare unary call, p{percent}", of_rounds[0])
        messages = Baseline(f"bare call of three messages, p{percent}", of_rounds[1])
        for name, values, bound in zip(("R=1", "R=3"), of_rounds[2:], bounds, strict=True):
            target = None if bound is None else ratio_at_most(bound)
            title = f"append latency, {name}, p{percent}"
            figures += [
                Figure("latency", title, "ms", values, beside, target),
                Figure("latency", "the same", "ms", values, messages),
            ]
    return figures


async def _latencies_ms(bench: Bench, call: Callable[[], Awaitable[object]]) -> list[float]:
    clock = bench.clock
    end = clock.monotonic() + bench.settings.seconds
    taken: list[float] = []
    while (began := clock.monotonic()) < end or not taken:
        await call()
        taken.append(1e3 * (clock.monotonic() - began))
    return taken


async def read(bench: Bench) -> list[Figure]:
    """Measure the throughput of one reader: of brokers' spools, and of stored fragments."""
    return [*await _read_local(bench), *await _read_stored(bench)]


async def _read_local(bench: Bench) -> list[Figure]:
    spec = journal_spec("bench/read/local")
    count = bench.scaled(READ_CHUNKS)
    chunk = text(CHUNK_BYTES)

    async def bare() -> int:
        return await bench.bare.read(count)

    async def local() -> int:
        params = ReadParams(spec.name, end_offset=count * CHUNK_BYTES)
        return await _read_all(bench.client, params)

    async with bench.journals(spec):
        await bench.client.append(AppendParams(spec.name), [chunk] * count)
        for work in (bare, local):
            await work()
        ceiling, measured = await bench.rounds(_rate(bench, bare), _rate(bench, local))
    beside = Baseline("bare stream", ceiling)
    return [Figure("read", "read, caught up", "MB/s", measured, beside, ratio_at_least(0.8))]


async def _read_all(client: Client, params: ReadParams) -> int:
    length = 0
    async with Reader(client, params, direct=False) as reader:
        while piece := await reader.read():
            length += len(piece)
    return length


async def _read_stored(bench: Bench) -> list[Figure]:
    length = bench.scaled(FRAGMENT_BYTES)
    spec = journal_spec("bench/read/stored", codec=Codec.ZSTANDARD, length=length, refresh_s=1)
    # The first append after it is full rolls a spool.
    messages = (FRAGMENTS * length + length // 2) // len(_line())
    async with bench.journals(spec), bench.direct_client() as direct:
        await bench.fill(spec.name, messages)
        fragments = await bench.stored_fragments(spec.name)
        paths = [bench.file_root / one.content_path() for one in fragments]
        params = ReadParams(spec.name, end_offset=max(one.end for one in fragments))

        async def bare() -> int:
            return await asyncio.to_thread(bench_bare.decompress, paths)

        async def bare_verified() -> int:
            return await asyncio.to_thread(bench_bare.decompress, paths, verify=True)

        async def opened() -> int:
            async with direct.retry_reader(params) as reader:
                async for _ in reader.chunks():
                    pass
                return reader.offset

        async def through_broker() -> int:
            return await _read_all(bench.client, params)

        works = (bare, bare_verified, opened, through_broker)
        for work in works:
            await work()
        measured = await bench.rounds(*(_rate(bench, one) for one in works))
    ceiling, verified, by_client, by_broker = measured
    stored = sum(one.length for one in fragments)
    note = f"{stored / MB:.0f} MB of JSON in {len(fragments)} zstandard files; SHA-1 is verified"
    beside = Baseline("zstandard alone", ceiling)
    return [
        Figure(
            "read", "read fragments directly", "MB/s", by_client, beside, ratio_at_least(0.7), note
        ),
        Figure("read", "the same", "MB/s", by_client, Baseline("zstandard, then SHA-1", verified)),
        Figure("read", "read fragments through a broker", "MB/s", by_broker, beside),
    ]


def _line() -> bytes:
    message = message_of(0)
    message.uuid = "0" * 36
    return msgspec.json.encode(message) + b"\n"
