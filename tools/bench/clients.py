"""`gazette bench clients`: a publisher and a shard that catches up, beside those of the original.

With ``GAZETTE_GO`` the publisher and the consumer of the original use the same brokers and the same etcd.
They take turns with ours, round by round. Their program is built of ``benchmarks/original``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.client.shards import ShardClient
from gazette.errors import Broken, GazetteError, Unavailable
from gazette.message.mapping import Partitions, modulo_mapping
from gazette.message.publisher import Publisher
from gazette.protocol.shard import ShardSpec
from gazette.run.dev.processes import ChildProcess
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import BlockingPool, OpFuture, resolved
from gazette.runtime.timeouts import timeout
from tools.bench.app import BenchMessage, Mode, message_of
from tools.bench.cluster import Bench, journal_spec
from tools.bench.messages import member, publish_one_by_one, shard, shard_spec, word_of
from tools.bench.processes import cpu_seconds
from tools.bench.report import Baseline, Figure, Target, ratio_at_least
from tools.bench.sides import ORIGINAL, ORIGINAL_ENV, original_program

PROGRAM: Final = "gazette-bench"
PARTITIONS: Final = 4
PUBLISH_MESSAGES: Final = 400_000
CONSUME_MESSAGES: Final = 1_200_000
MAX_TXN_S: Final = 0.25
OURS: Final = "ours"
_ORIGINAL_PREFIX: Final = "/gazette/consumers/bench-original"
_LEFT_OUT: Final = (
    "the original is left out of all figures of clients, since"
    f" {ORIGINAL_ENV} names no directory with its program {PROGRAM}"
)
BUILD_HINT: Final = "Build it as benchmarks/original/README.md says, or unset the variable."
_TIMEOUT_S: Final = 120.0
_READY_TIMEOUT_S: Final = 30.0


class Taken(msgspec.Struct):
    """One measurement. Also the line that the original's publisher prints."""

    messages: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Messages per second."""
        return self.messages / self.seconds

    @property
    def cpu_s_per_million(self) -> float:
        return 1e6 * self.cpu_seconds / self.messages


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work, and the measurements of its rounds: ours, and the original's if there is one."""

    name: str
    bound: Target | None
    ours: list[Taken] = field(default_factory=list)
    original: list[Taken] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        rate = tuple(one.rate for one in self.ours)
        cpu = tuple(one.cpu_s_per_million for one in self.ours)
        if not self.original:
            return [
                Figure("clients", self.name, "msg/s", rate),
                Figure("clients", f"{self.name}, CPU", "s/M msg", cpu),
            ]
        rates = Baseline(ORIGINAL, tuple(one.rate for one in self.original))
        spent = Baseline(ORIGINAL, tuple(one.cpu_s_per_million for one in self.original))
        return [
            Figure("clients", self.name, "msg/s", rate, rates, self.bound),
            Figure("clients", f"{self.name}, CPU", "s/M msg", cpu, spent),
        ]


async def clients(bench: Bench) -> list[Figure]:
    """Measure publishing one by one, and catching up. Raise ``Invalid`` for a wrong `ORIGINAL_ENV`."""
    program = original_program(PROGRAM, BUILD_HINT)
    rows = [*await _publishing(bench, program), *await _catching_up(bench, program)]
    figures = [figure for row in rows for figure in row.figures()]
    if program is None:
        figures[0] = replace(figures[0], note=_LEFT_OUT)
    return figures


# Publishing.


class _NoAppends:
    """An append service that drops everything."""

    must_wait = False

    def __init__(self) -> None:
        self._buffer = bytearray()

    def journal(self, _: AppendParams, /) -> Self:
        return self

    def enqueue(self, _: bytearray, /) -> OpFuture[AppendResult]:
        return _DROPPED

    def in_place(
        self, write: Callable[[Any, int, bytearray], None], item: Any, flags: int, _: int, /
    ) -> OpFuture[AppendResult]:
        write(item, flags, self._buffer)
        self._buffer.clear()
        return _DROPPED

    def await_room(self) -> None:
        pass


_DROPPED: Final[OpFuture[Any]] = resolved(None)


async def _publishing(bench: Bench, program: Path | None) -> list[Row]:
    """Publish small messages one by one into four journals, until brokers have them all.

    A second row publishes them to nothing: what a thread of Python takes for mapping, UUID and encoding.
    """
    row = Row("publish committed, one by one", ratio_at_least(0.5))
    alone = Row("the same without appends", None)
    specs = [journal_spec(f"bench/clients/part-{index}") for index in range(PARTITIONS)]
    count = bench.scaled(PUBLISH_MESSAGES)
    messages = [message_of(index) for index in range(count)]
    pool = BlockingPool("bench-clients", 1)
    try:
        async with bench.journals(*specs):
            for _ in range(bench.settings.rounds):
                partitions = Partitions.of_specs(specs)
                row.ours.append(await _publish(bench, pool, partitions, messages))
                alone.ours.append(await _publish_to_nothing(bench, pool, partitions, messages))
                if program is not None:
                    names = ",".join(spec.name for spec in specs)
                    taken = await _publish_by(program, bench, names, count)
                    row.original.append(taken)
                    alone.original.append(taken)
    finally:
        pool.close()
    return [row, alone]


async def _publish_to_nothing(
    bench: Bench, pool: BlockingPool, partitions: Partitions, messages: Sequence[BenchMessage]
) -> Taken:
    mapping = modulo_mapping(lambda: partitions, word_of)
    publisher = Publisher.standalone(_NoAppends(), bench.clock, random.SystemRandom())
    began, cpu = bench.clock.monotonic(), time.process_time()
    await pool.run(publish_one_by_one, publisher, mapping, messages)
    return Taken(len(messages), bench.clock.monotonic() - began, time.process_time() - cpu)


async def _publish(
    bench: Bench, pool: BlockingPool, partitions: Partitions, messages: Sequence[BenchMessage]
) -> Taken:
    mapping = modulo_mapping(lambda: partitions, word_of)
    async with bench.publisher() as (appends, publisher):
        # Connect to brokers, and learn the routes of journals, before the measurement.
        for part in (messages[: -(-len(messages) // 10)], messages):
            began, cpu = bench.clock.monotonic(), time.process_time()
            await pool.run(publish_one_by_one, publisher, mapping, part)
            await appends.flush()
        return Taken(len(messages), bench.clock.monotonic() - began, time.process_time() - cpu)


async def _publish_by(program: Path, bench: Bench, journals: str, count: int) -> Taken:
    """Let the original publish. Raise ``Broken`` if it fails."""
    log = bench.cluster.directory / "logs" / "original-publisher.log"
    process = ChildProcess(
        "the original's publisher",
        [
            str(program),
            "publish",
            f"--broker.address={_one_address(bench)}",
            f"--journals={journals}",
            f"--messages={count}",
        ],
        log,
        bench.cluster.environ,
        bench.clock,
    )
    await process.start()
    try:
        async with timeout(_TIMEOUT_S):
            code = await process.wait()
    finally:
        await process.kill()
    if code != 0:
        raise process.died()
    try:
        return msgspec.json.decode(process.log_tail(), type=Taken)
    except msgspec.DecodeError as error:
        raise Broken(f"{process.name} printed no result: {process.log_tail()}") from error


def _one_address(bench: Bench) -> str:
    """Return the endpoint of one broker: clients of the original take only one."""
    return bench.cluster.brokers[0].grpc_url


# Catching up.


async def _catching_up(bench: Bench, program: Path | None) -> list[Row]:
    """Consume a journal with one shard. The original counts in memory, and its store is a JSON file."""
    ways = {
        Mode.FOLD: Row("catch up, word count folded", ratio_at_least(2.0)),
        Mode.FOLD_TABLE: Row("catch up, tables folded", ratio_at_least(2.0)),
        Mode.UPSERT: Row("catch up, an SQL upsert each", ratio_at_least(1.2)),
        Mode.UPSERT_BATCH: Row("the same, with consume_messages", ratio_at_least(1.2)),
    }
    source = journal_spec("bench/clients/source")
    count = bench.scaled(CONSUME_MESSAGES)
    async with bench.journals(source), AsyncExitStack() as stack:
        head = await bench.fill(source.name, count)
        ours = await stack.enter_async_context(member(bench))
        original = None
        if program is not None:
            original = await stack.enter_async_context(_original_member(program, bench))
        for index in range(bench.settings.rounds):
            for mode, row in ways.items():
                spec = shard_spec(f"{OURS}-{mode.value}-{index}", mode, source.name, MAX_TXN_S)
                row.ours.append(await _catch_up(bench, ours, spec, head, head / count))
            if original is not None:
                spec = shard_spec(f"{ORIGINAL}-{index}", Mode.FOLD, source.name, MAX_TXN_S)
                taken = await _catch_up(bench, original, spec, head, head / count)
                for row in ways.values():
                    row.original.append(taken)
    return list(ways.values())


async def _catch_up(
    bench: Bench,
    by: tuple[ChildProcess, ShardClient],
    spec: ShardSpec,
    end: int,
    message_bytes: float,
) -> Taken:
    """Measure between two commits: the first behind a quarter of the journal, and the last.

    If a single transaction caught up, measure from when the shard was primary.
    """
    process, shards = by
    journal = spec.sources[0].journal
    async with shard(bench, shards, spec, replication=1):
        marks = [(0, bench.clock.monotonic(), cpu_seconds([process.pid]))]
        for through in (end // 4, end):
            async with timeout(_TIMEOUT_S):
                stat = await shards.stat(spec.id, {journal: through})
            now = bench.clock.monotonic()
            marks.append((stat.read_through[journal], now, cpu_seconds([process.pid])))
    first, last = marks[1], marks[2]
    if last[0] == first[0]:
        first = marks[0]
    count = round((last[0] - first[0]) / message_bytes)
    return Taken(count, last[1] - first[1], last[2] - first[2])


@asynccontextmanager
async def _original_member(
    program: Path, bench: Bench
) -> AsyncIterator[tuple[ChildProcess, ShardClient]]:
    """Run a member of the original. Yield its process, and a client of it."""
    cluster, port = bench.cluster, free_port()
    scratch = cluster.directory / "scratch" / "bench-original"
    scratch.mkdir(parents=True, exist_ok=True)
    process = ChildProcess(
        "the original's member",
        [
            str(program),
            "serve",
            "--consumer.id=bench-original",
            "--consumer.zone=zone-a",
            "--consumer.host=127.0.0.1",
            f"--consumer.port={port}",
            f"--broker.address={_one_address(bench)}",
            f"--broker.file-root={bench.file_root}",
            f"--etcd.address={cluster.etcd.endpoint}",
            f"--etcd.prefix={_ORIGINAL_PREFIX}",
            "--log.level=warn",
        ],
        cluster.directory / "logs" / "original-member.log",
        _environ_in(cluster.environ, scratch),
        bench.clock,
    )
    await process.start()
    try:
        address = f"http://127.0.0.1:{port}"
        async with ShardClient(address, route_cache_size=0, clock=bench.clock) as shards:
            await _await_answer(bench, process, shards)
            yield process, shards
    finally:
        await process.stop(20.0)


def _environ_in(environ: Mapping[str, str], directory: Path) -> Mapping[str, str]:
    """Return the environment of a process with files in a directory."""
    return {**environ, "TMPDIR": os.fspath(directory)}


async def _await_answer(bench: Bench, process: ChildProcess, shards: ShardClient) -> None:
    """Return when the member answers. Raise ``Broken`` if it died, ``Unavailable`` if it is too late."""
    deadline = bench.clock.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            await shards.list_shards()
        except GazetteError as error:
            if not process.running:
                raise process.died() from error
            if bench.clock.monotonic() > deadline:
                raise Unavailable(
                    f"{process.name} did not answer: {error}", log=process.log_tail()
                ) from error
            await bench.clock.sleep(0.05)
        else:
            return
