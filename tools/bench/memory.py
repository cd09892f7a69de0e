"""`gazette bench memory`: memory of brokers during one long append, and with many waiting readers."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping
from typing import Final

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.read.reader import Reader, ReadParams
from gazette.errors import NotFound
from gazette.protocol.content import CHUNK_BYTES
from gazette.runtime.tasks import TaskScope
from gazette.runtime.timeouts import timeout
from tools.bench.cluster import Bench, journal_spec
from tools.bench.journals import text
from tools.bench.processes import cpu_seconds, resident_bytes
from tools.bench.report import Figure, value_at_most

APPEND_BYTES_PER_S: Final = 1 << 30
"""Bytes of the append for each second of a measurement: ``--seconds 10`` makes 10 GiB."""
READERS: Final = 1000
IDLE_S: Final = 3.0
MB: Final = 1e6
_SAMPLE_S: Final = 0.1
_TIMEOUT_S: Final = 120.0


async def memory(bench: Bench) -> list[Figure]:
    """Measure the growth of the brokers' resident memory. Return nothing where that is not visible."""
    pids = {one.process.name: one.process.pid for one in bench.cluster.brokers}
    try:
        _resident(pids)
    except NotFound:
        return []
    return [*await _long_append(bench, pids), *await _waiting_readers(bench, pids)]


async def _long_append(bench: Bench, pids: Mapping[str, int]) -> list[Figure]:
    spec = journal_spec("bench/memory/append", replication=3, length=1 << 34)
    chunk = text(CHUNK_BYTES)
    count = max(1, int(APPEND_BYTES_PER_S * bench.settings.seconds) // CHUNK_BYTES)
    samples: list[dict[str, int]] = []

    async def content() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield chunk

    async def watch() -> None:
        while True:
            samples.append(_resident(pids))
            await bench.clock.sleep(_SAMPLE_S)

    async with bench.journals(spec):
        # Measure after a first append, which allocates what every append needs.
        await bench.client.append(AppendParams(spec.name), [chunk] * 256)
        samples.append(_resident(pids))
        async with TaskScope("memory") as scope:
            watching = scope.daemon(watch(), name="watch")
            await bench.client.append(AppendParams(spec.name), content())
            watching.cancel()
        samples.append(_resident(pids))
    peaks = {name: max(one[name] for one in samples) - samples[0][name] for name in pids}
    # Bytes in flight come and go. Bytes that stay would grow with the length of the append.
    part = max(1, len(samples) // 5)
    grown = {
        name: statistics.median(one[name] for one in samples[-part:])
        - statistics.median(one[name] for one in samples[:part])
        for name in pids
    }
    gib = count * CHUNK_BYTES / (1 << 30)
    note = f"{gib:.1f} GiB in one append; " + ", ".join(
        f"{name} {value / MB:.0f} MB" for name, value in sorted(grown.items())
    )
    name = "growth of a broker, first to last fifth of one append, R=3"
    return [
        Figure(
            "memory",
            name,
            "MB",
            (max(grown.values()) / MB,),
            target=value_at_most(32, "MB"),
            note=note,
        ),
        Figure("memory", "the most above what it had before", "MB", (max(peaks.values()) / MB,)),
    ]


async def _waiting_readers(bench: Bench, pids: Mapping[str, int]) -> list[Figure]:
    spec = journal_spec("bench/memory/readers", replication=3)
    count = bench.scaled(READERS)
    ready = asyncio.Semaphore(0)
    got = asyncio.Semaphore(0)

    async def tail(client: Client) -> None:
        async with Reader(client, ReadParams(spec.name, block=True), direct=False) as reader:
            await reader.read()
            ready.release()
            await reader.read()
            got.release()

    async with bench.journals(spec), Client(bench.addresses, clock=bench.clock) as client:
        await bench.client.append(AppendParams(spec.name), b"first\n")
        before = _resident(pids)
        async with timeout(_TIMEOUT_S), TaskScope("readers") as scope:
            for index in range(count):
                scope.spawn(tail(client), name=f"reader {index}")
            for _ in range(count):
                await ready.acquire()
            used, began = cpu_seconds(pids.values()), bench.clock.monotonic()
            await bench.clock.sleep(IDLE_S * min(1.0, bench.settings.seconds))
            spent = bench.clock.monotonic() - began
            cpu = 100 * (cpu_seconds(pids.values()) - used) / spent
            grown = sum(_resident(pids).values()) - sum(before.values())
            began = bench.clock.monotonic()
            await bench.client.append(AppendParams(spec.name), b"second\n")
            for _ in range(count):
                await got.acquire()
            woken = bench.clock.monotonic() - began
    note = f"{count} readers that wait at the write head"
    return [
        Figure(
            "memory", "brokers' growth per waiting reader", "kB", (grown / count / 1e3,), note=note
        ),
        Figure("memory", "CPU of brokers meanwhile, of one core", "%", (cpu,)),
        Figure("memory", "an append, until each has read it", "s", (woken,)),
    ]


def _resident(pids: Mapping[str, int]) -> dict[str, int]:
    return {name: resident_bytes(pid) for name, pid in pids.items()}
