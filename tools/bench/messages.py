"""`gazette bench publish | consume | end-to-end`: messages into journals, through shards, and out."""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from types import MappingProxyType
from typing import Final

import msgspec

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.read.reader import ReadParams
from gazette.client.shards import ShardChange, ShardClient
from gazette.errors import GazetteError, Unavailable
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG
from gazette.message.envelope_reader import CommittedReader
from gazette.message.mapping import Mapping, Partition, Partitions, modulo_mapping
from gazette.message.publisher import Publisher
from gazette.protocol.fragment import Codec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ReplicaCode, ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.run.dev.processes import ChildProcess, await_ready, python_module
from gazette.runtime.ports import free_port
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.runtime.timeouts import timeout
from tools.bench.app import MODE, BenchMessage, Mode, message_of, out_of
from tools.bench.bare import TXN_MESSAGES, BareSQLite
from tools.bench.cluster import Bench, journal_spec
from tools.bench.report import (
    Baseline,
    Figure,
    percentile,
    value_at_least,
    value_at_most,
)

PARTITIONS: Final = 4
PUBLISH_MESSAGES: Final = 200_000
BATCH: Final = 1_000
TXN: Final = 100_000
CONSUME_MESSAGES: Final = 800_000
SEGMENTS: Final = 4
FRAGMENT_BYTES: Final = 16 << 20
LOGS: Final = "bench/logs"
HINTS: Final = "/gazette/hints/bench"
PREFIX: Final = "/gazette/consumers/bench"
ECHO_RATE: Final = 100
ECHO_SECONDS: Final = 8.0
_TIMEOUT_S: Final = 120.0

Environ = abc.Mapping[str, str]
Way = Callable[[AppendService, Publisher, Sequence[BenchMessage]], None]


async def publish(bench: Bench) -> list[Figure]:
    """Publish small messages from one thread into four journals, until all are acknowledged."""
    specs = [journal_spec(f"bench/publish/part-{index}") for index in range(PARTITIONS)]
    partitions = Partitions.of_specs(specs)
    mapping = modulo_mapping(lambda: partitions, word_of)
    messages = [message_of(index) for index in range(bench.scaled(PUBLISH_MESSAGES))]
    pool = BlockingPool("bench-publish", 1)
    ways: dict[str, Way] = {
        "publish committed, in batches": lambda _, to, all_: _in_batches(to, mapping, all_),
        "publish uncommitted": lambda _, to, all_: _uncommitted(to, mapping, all_),
        "publish committed, one by one": lambda _, to, all_: publish_one_by_one(to, mapping, all_),
        "append service, raw bytes": lambda to, _, all_: append_lines(to, specs[0].name, len(all_)),
    }

    async def encode() -> float:
        return len(messages) / await bench.timed(pool.run(_encode, messages))

    def published(way: Way) -> Callable[[], Awaitable[float]]:
        async def measure() -> float:
            async with bench.publisher() as (appends, publisher):

                async def all_of_it() -> None:
                    await pool.run(way, appends, publisher, messages)
                    await appends.flush()

                return len(messages) / await bench.timed(all_of_it())

        return measure

    try:
        async with bench.journals(*specs):
            measures = [encode, *(published(way) for way in ways.values())]
            for measure in measures:
                await measure()
            rates = await bench.rounds(*measures)
    finally:
        pool.close()
    beside = Baseline("encoding alone", rates[0])
    target = value_at_least(300_000, "msg/s")
    return [
        Figure("publish", name, "msg/s", values, beside, target)
        for name, values in zip(ways, rates[1:], strict=True)
    ]


def word_of(message: BenchMessage) -> str:
    return message.word


def _encode(messages: Sequence[BenchMessage]) -> None:
    encode = msgspec.json.Encoder().encode
    for message in messages:
        encode(message)


def _in_batches(
    to: Publisher, mapping: Mapping[BenchMessage], all_: Sequence[BenchMessage]
) -> None:
    for begin in range(0, len(all_), BATCH):
        to.publish_committed_batch(mapping, all_[begin : begin + BATCH])


def publish_one_by_one(
    to: Publisher, mapping: Mapping[BenchMessage], all_: Sequence[BenchMessage]
) -> None:
    for message in all_:
        to.publish_committed(mapping, message)


def _uncommitted(
    to: Publisher, mapping: Mapping[BenchMessage], all_: Sequence[BenchMessage]
) -> None:
    for begin in range(0, len(all_), TXN):
        for message in all_[begin : begin + TXN]:
            to.publish_uncommitted(mapping, message)
        to.build_ack_intents()


def append_lines(appends: AppendService, journal: str, count: int) -> None:
    """Append lines of 100 bytes one by one, and do not wait for their outcome. Blocks."""
    params, line = AppendParams(journal), b"x" * 99 + b"\n"
    for _ in range(count):
        txn = appends.start_append(params)
        txn.write(line)
        txn.release()


@asynccontextmanager
async def application(
    bench: Bench, environ: Environ = MappingProxyType({})
) -> AsyncIterator[ShardClient]:
    """Run a member, and yield a client of it. ``environ`` is added to the member's."""
    async with member(bench, environ) as (_, shards):
        yield shards


@asynccontextmanager
async def member(
    bench: Bench, environ: Environ = MappingProxyType({}), http_port: int = 0
) -> AsyncIterator[tuple[ChildProcess, ShardClient]]:
    """Run a member as `application` does, and yield also its process. It takes any HTTP port if that is 0."""
    cluster, clock = bench.cluster, bench.clock
    scratch = cluster.directory / "scratch" / "bench-app"
    scratch.mkdir(parents=True, exist_ok=True)
    grpc_port, http_port = free_port(), http_port or free_port()
    argv = python_module(
        "tools.bench.app",
        "serve",
        "--consumer.id=bench-app",
        "--consumer.zone=zone-a",
        "--consumer.bind-host=127.0.0.1",
        f"--consumer.port={grpc_port}",
        f"--consumer.http-port={http_port}",
        f"--consumer.scratch-dir={scratch}",
        "--consumer.drain-timeout=0s",
        f"--broker.address={bench.addresses}",
        f"--broker.file-root={bench.file_root}",
        f"--etcd.address={cluster.etcd.endpoint}",
        f"--etcd.prefix={PREFIX}",
        "--log.level=warn",
    )
    log = cluster.directory / "logs" / "bench-app.log"
    process = ChildProcess("bench-app", argv, log, {**cluster.environ, **environ}, clock)
    await process.start()
    try:
        await await_ready(process, http_port, clock, _TIMEOUT_S)
        address = f"http://127.0.0.1:{grpc_port}"
        async with ShardClient(address, route_cache_size=0, clock=clock) as shards:
            yield process, shards
    finally:
        await process.stop(20.0)


def shard_spec(shard_id: str, mode: Mode, source: str, max_txn_s: float) -> ShardSpec:
    return ShardSpec(
        shard_id,
        sources=(ShardSource(source),),
        recovery_log_prefix=LOGS,
        hint_prefix=HINTS,
        hint_backups=2,
        max_txn_duration_ns=int(max_txn_s * duration.SECOND),
        labels=LabelSet.of((MODE, mode.value)),
    )


@asynccontextmanager
async def shard(
    bench: Bench, shards: ShardClient, spec: ShardSpec, *, replication: int
) -> AsyncIterator[ShardSpec]:
    """Run a shard that is primary, and its log; delete both in the end."""
    log = journal_spec(
        spec.recovery_log, replication=replication, content_type=CONTENT_RECOVERY_LOG
    )
    async with bench.journals(log):
        await shards.apply_shards([ShardChange(upsert=spec)])
        try:
            await await_primary(bench, shards, spec.id)
            yield spec
        finally:
            change = ShardChange(delete=spec.id, expect_mod_revision=-1)
            with suppress(GazetteError):
                await asyncio.shield(shards.apply_shards([change]))  # noqa: TID251 - a task of its own
            # End the shard's last appends before its log is deleted.
            await bench.clock.sleep(0.2)


async def await_primary(bench: Bench, shards: ShardClient, shard_id: str) -> None:
    deadline = bench.clock.monotonic() + _TIMEOUT_S
    while True:
        for one in (await shards.list_shards()).shards:
            for status in one.status if one.spec.id == shard_id else ():
                if status.code is ReplicaCode.FAILED:
                    raise GazetteError(f"shard {shard_id} failed: {status.errors[0]}")
                if status.code is ReplicaCode.PRIMARY:
                    return
        if bench.clock.monotonic() > deadline:
            raise Unavailable("a shard did not become primary", shard=shard_id)
        await bench.clock.sleep(0.02)


async def consume(bench: Bench) -> list[Figure]:
    """Measure one shard that catches up, with different work per message."""
    spooled = journal_spec("bench/consume/spooled")
    length = bench.scaled(FRAGMENT_BYTES)
    stored = journal_spec("bench/consume/stored", codec=Codec.ZSTANDARD, length=length, refresh_s=1)
    count = bench.scaled(CONSUME_MESSAGES)
    figures: list[Figure] = []
    ways = (
        (Mode.FOLD, spooled, "consume JSON, word count folded", 1.0, 300_000.0),
        (Mode.FOLD_BATCH, spooled, "the same, with consume_messages", 1.0, 300_000.0),
        (Mode.FOLD_TABLE, spooled, "the same, with consume_table", 1.0, 300_000.0),
        (Mode.FOLD, stored, "the same, from zstandard fragments", 1.0, 300_000.0),
        (Mode.UPSERT, spooled, "consume JSON, an SQL upsert each", 0.4, 100_000.0),
    )
    async with bench.journals(spooled, stored), application(bench) as shards:
        head = await bench.fill(spooled.name, count)
        await bench.copy(spooled.name, stored.name)
        await bench.stored_fragments(stored.name)
        lines = await _lines(bench, spooled.name, min(head, TXN_MESSAGES * 100 * 2))
        for index, (mode, source, name, part, bound) in enumerate(ways):
            bare = await asyncio.to_thread(_bare_rates, bench, mode, lines)
            spec = shard_spec(f"consume-{index}", mode, source.name, 0.25)
            async with shard(bench, shards, spec, replication=1):
                rates = await _catch_up(bench, shards, spec, int(head * part), head / count)
            beside = Baseline("bare loop", bare)
            target = value_at_least(bound, "msg/s")
            figures.append(Figure("consume", name, "msg/s", rates, beside, target))
    return figures


async def _catch_up(
    bench: Bench, shards: ShardClient, spec: ShardSpec, end: int, message_bytes: float
) -> tuple[float, ...]:
    """Return messages per second between commits, each about a quarter of the way.

    If a single transaction caught up, count from when the shard was primary.
    """
    journal = spec.sources[0].journal
    began = bench.clock.monotonic()
    rates: list[float] = []
    at: tuple[float, int] | None = None
    for segment in range(1, SEGMENTS + 1):
        async with timeout(_TIMEOUT_S):
            stat = await shards.stat(spec.id, {journal: end * segment // SEGMENTS})
        now, offset = bench.clock.monotonic(), stat.read_through[journal]
        if at is not None and offset > at[1]:
            rates.append((offset - at[1]) / message_bytes / (now - at[0]))
        elif at is not None:
            continue  # One transaction was larger than this part.
        at = now, offset
    assert at is not None
    return tuple(rates) or (at[1] / message_bytes / (at[0] - began),)


async def _lines(bench: Bench, journal: str, end: int) -> list[bytes]:
    """Return the journal's first bytes, in pieces of whole lines."""
    content = bytearray()
    async with bench.client.retry_reader(ReadParams(journal, end_offset=end)) as reader:
        async for chunk in reader.chunks():
            content += chunk
    pieces: list[bytes] = []
    begin, size = 0, TXN_MESSAGES * 100
    while begin < len(content):
        cut = content.rfind(b"\n", begin, begin + size) + 1
        if not cut:
            break
        pieces.append(bytes(content[begin:cut]))
        begin = cut
    return pieces


def _bare_rates(bench: Bench, mode: Mode, lines: Sequence[bytes]) -> tuple[float, ...]:
    path = bench.cluster.directory / f"bare-{mode.value}.db"
    bare = BareSQLite(path)
    work = bare.upsert if mode is Mode.UPSERT else bare.fold
    rates: list[float] = []
    try:
        for _ in range(SEGMENTS - 1):
            began = bench.clock.monotonic()
            count = work(lines)
            rates.append(count / (bench.clock.monotonic() - began))
    finally:
        bare.close()
        for one in path.parent.glob(f"{path.name}*"):
            one.unlink()
    return tuple(rates)


async def end_to_end(bench: Bench) -> list[Figure]:
    """Measure from ``publish`` to a committed reader of what a shard published in the same transaction.

    That is four appends, one after the other: of the message, of what the shard publishes, of its
    state, and of the acknowledgement.
    """
    source = journal_spec("bench/echo/in", replication=3)
    out = journal_spec(out_of(source.name), replication=3)
    plain = journal_spec("bench/echo/plain", replication=3)
    rounds = bench.settings.rounds
    count = max(20, int(ECHO_RATE * ECHO_SECONDS * bench.settings.seconds) // rounds)
    samples: list[list[float]] = []
    appends: list[list[float]] = []
    async with bench.journals(source, out, plain), application(bench) as shards:
        spec = shard_spec("echo", Mode.ECHO, source.name, 1.0)
        async with shard(bench, shards, spec, replication=3):
            await _echo(bench, source.name, 20)
            await _append_ms(bench, plain.name, 5)
            for _ in range(rounds):
                appends.append(await _append_ms(bench, plain.name, 50))
                samples.append(await _echo(bench, source.name, count))
    figures: list[Figure] = []
    for percent, bound in ((50, 15.0), (99, 60.0)):
        values = tuple(percentile(one, percent) for one in samples)
        beside = tuple(percentile(one, percent) for one in appends)
        figures.append(
            Figure(
                "end-to-end",
                f"end to end, {ECHO_RATE} msg/s, R=3, p{percent}",
                "ms",
                values,
                Baseline(f"append, R=3, p{percent}", beside),
                value_at_most(bound, "ms"),
            )
        )
    return figures


async def _append_ms(bench: Bench, journal: str, count: int) -> list[float]:
    content = b"x" * 100
    return [
        1e3 * await bench.timed(bench.client.append(AppendParams(journal), content))
        for _ in range(count)
    ]


async def _echo(bench: Bench, source: str, count: int) -> list[float]:
    """Publish at a fixed rate and read committed. Return latencies in ms."""
    head = await bench.write_head(out_of(source))
    params = ReadParams(out_of(source), offset=head, block=True)
    reader = CommittedReader(bench.client, params, BenchMessage)
    taken: list[float] = []
    async with bench.publisher() as (_, publisher), TaskScope("echo") as scope:
        scope.spawn(paced(bench, publisher, source, count), name="publish")
        async with timeout(_TIMEOUT_S), aclosing(reader.batches()) as batches:
            async for batch in batches:
                now = bench.clock.monotonic()
                taken += [1e3 * (now - one.message.sent / 1e9) for one in batch]
                if len(taken) >= count:
                    break
    return taken


async def paced(
    bench: Bench,
    publisher: Publisher,
    journal: str,
    count: int,
    rate: int = ECHO_RATE,
    on_published: Callable[[float], None] = lambda _: None,
) -> None:
    """Publish ``count`` messages, ``rate`` a second.

    ``on_published`` gets the time at which each of them was acknowledged, in order.
    """
    partition = Partition(journal, CONTENT_JSON_LINES)
    clock = bench.clock
    began = clock.monotonic()
    for index in range(count):
        due = began + index / rate
        if (wait := due - clock.monotonic()) > 0:
            await clock.sleep(wait)
        message = message_of(index)
        message.sent = int(clock.monotonic() * 1e9)
        futures = await publisher.publish_from_loop(lambda _: partition, (message,))
        futures[journal].add_done_callback(lambda _: on_published(clock.monotonic()))
