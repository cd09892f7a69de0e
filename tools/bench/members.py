"""`gazette bench failover | idle`: the cost of losing a member, and of idle members."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from gazette.errors import GazetteError, Unavailable
from gazette.labels import CONTENT_PROTO_FIXED
from gazette.message.mapping import Partition
from gazette.run.dev.demo_load import ask
from gazette.run.dev.word_count import (
    Member,
    WordCountCluster,
    WordCountSettings,
    import_examples,
)
from gazette.runtime.tasks import TaskScope
from tools.bench.cluster import Bench
from tools.bench.processes import by_method, cpu_seconds, exported, resident_bytes, total
from tools.bench.report import Figure, value_at_most

PARTITIONS: Final = 2
QUERY_PAUSE_S: Final = 0.005
TRICKLE_S: Final = 0.02
SETTLE_S: Final = 2.0
IDLE_SECONDS: Final = 8.0
_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class Asked:
    """Queries of some shards while their primary ends."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    longest_ms: float = 0.0


@asynccontextmanager
async def words(bench: Bench) -> AsyncIterator[WordCountCluster]:
    """Run the word count with two members: each shard has a primary and a ready hot standby."""
    settings = WordCountSettings(partitions=PARTITIONS, lease_ttl_s=bench.settings.lease_ttl_s)
    count = WordCountCluster(bench.cluster, settings, bench.clock)
    try:
        await count.apply_journals()
        async with TaskScope("members") as scope:
            for _ in range(2):
                scope.spawn(count.start_member(), name="member")
        await count.apply_shards()
        await count.await_shards(standbys=True)
        yield count
    finally:
        await asyncio.shield(count.stop())  # noqa: TID251 - a task of its own


async def failover(bench: Bench) -> list[Figure]:
    """Measure how long queries wait when their shards' primary is asked to stop, and when it is killed."""
    import_examples()
    stopped, killed = Asked(), Asked()
    hand_offs: list[float] = []
    fail_overs: list[float] = []
    async with words(bench) as count, TaskScope("failover") as scope:
        scope.spawn(_trickle(bench, count), name="trickle")
        for _ in range(bench.settings.hand_offs):
            hand_offs.append(await _lose_primary(bench, count, stopped, kill=False))
            await _replace(count)
        for _ in range(bench.settings.kills):
            fail_overs.append(await _lose_primary(bench, count, killed, kill=True))
            await _replace(count)
        scope.cancel()
    lease = bench.settings.lease_ttl_s
    note = (
        f"the longest that a query waited, of {{}} beside {1 / TRICKLE_S:.0f} messages per second"
    )
    figures = [
        Figure(
            "failover",
            "hand-off, SIGTERM",
            "ms",
            tuple(hand_offs),
            target=value_at_most(500, "ms"),
            note=note.format(stopped.answered),
        ),
        Figure(
            "failover",
            f"fail-over, SIGKILL, lease {lease:g} s",
            "ms",
            tuple(fail_overs),
            target=value_at_most(1e3 * (lease + 1), "ms"),
            note=note.format(killed.answered),
        ),
    ]
    failures = [*stopped.failed, *killed.failed]
    figures.append(
        Figure(
            "failover",
            "failed queries",
            "",
            (float(len(failures)),),
            target=value_at_most(0, ""),
            note=failures[0] if failures else "",
        )
    )
    return figures


async def _lose_primary(
    bench: Bench, count: WordCountCluster, asked: Asked, *, kill: bool
) -> float:
    """Return the longest time in milliseconds that a query of one of its shards waited."""
    held = await count.primaries()
    running = [one for one in count.members if one.process.running]
    victim = max(running, key=lambda one: len(held.get(one.id, ())))
    survivor = next(one for one in running if one is not victim)
    shards = held[victim.id]
    before = asked.longest_ms
    asked.longest_ms = 0.0
    async with TaskScope("queries") as scope:
        stop = asyncio.Event()
        for shard in shards:
            scope.spawn(_ask_on(bench, survivor, shard, asked, stop), name=shard)
        await bench.clock.sleep(0.2)
        if kill:
            await victim.process.kill()
        else:
            await victim.process.stop(_TIMEOUT_S)
        await _await_primary(bench, count, survivor, shards)
        stop.set()
    longest, asked.longest_ms = asked.longest_ms, max(before, asked.longest_ms)
    return longest


async def _ask_on(
    bench: Bench, member: Member, shard: str, asked: Asked, stop: asyncio.Event
) -> None:
    """Query one member for a shard, again and again; the last query begins after ``stop``."""
    clock, last = bench.clock, False
    while not last:
        last = stop.is_set()
        began = clock.monotonic()
        try:
            await asyncio.to_thread(ask, member, f"/query?prefix=import&shard={shard}")
            asked.answered += 1
        except GazetteError as error:
            asked.failed.append(str(error))
        asked.longest_ms = max(asked.longest_ms, 1e3 * (clock.monotonic() - began))
        await clock.sleep(QUERY_PAUSE_S)


async def _await_primary(
    bench: Bench, count: WordCountCluster, member: Member, shards: Iterable[str]
) -> None:
    deadline = bench.clock.monotonic() + _TIMEOUT_S
    while not set(shards) <= set((await count.primaries()).get(member.id, ())):
        if bench.clock.monotonic() > deadline:
            raise Unavailable("shards did not get a new primary", member=member.id)
        await bench.clock.sleep(0.05)
    # The assignment makes it primary; it may still play the end of a log back. The last query waits for that.


async def _replace(count: WordCountCluster) -> None:
    """Start another member, and wait until it can take over."""
    await count.start_member()
    await count.await_shards(standbys=True)


async def _trickle(bench: Bench, count: WordCountCluster) -> None:
    """Publish a word from time to time, so that shards and standbys have work."""
    from word_count.ngram_pb2 import NGramCount

    rng = random.Random(1)
    partitions = [Partition(name, CONTENT_PROTO_FIXED) for name in count.partitions]
    async with bench.publisher() as (_, publisher):
        while True:
            message = NGramCount(n_gram=f"word{rng.randrange(1000)}", count=1)
            await publisher.publish_from_loop(lambda _: rng.choice(partitions), (message,))
            await bench.clock.sleep(TRICKLE_S)


async def idle(bench: Bench) -> list[Figure]:
    """Measure idle brokers, and idle members with primaries and standbys."""
    seconds = max(1.0, IDLE_SECONDS * bench.settings.seconds)
    async with words(bench) as count:
        await bench.clock.sleep(min(SETTLE_S, seconds))
        pids = {one.process.name: one.process.pid for one in bench.cluster.brokers}
        pids |= {one.id: one.process.pid for one in count.members}
        before = await _Sample.take(bench, pids)
        await bench.clock.sleep(seconds)
        after = await _Sample.take(bench, pids)
        memory = {member.id: resident_bytes(member.process.pid) / 1e6 for member in count.members}
    spent = after.at - before.at
    cpu = {name: 100 * (after.cpu_s[name] - before.cpu_s[name]) / spent for name in pids}
    calls = {
        name: (after.etcd_calls[name] - before.etcd_calls.get(name, 0.0)) / spent
        for name in after.etcd_calls
    }
    others = sum(rate for name, rate in calls.items() if name != "LeaseKeepAlive")
    note = ", ".join(f"{name} {percent:.2f} %" for name, percent in sorted(cpu.items()))
    named = ", ".join(f"{name} {rate:.2f}/s" for name, rate in sorted(calls.items()) if rate)
    target = value_at_most(1, "%")
    return [
        Figure("idle", "CPU of the busiest member", "%", (max(cpu.values()),), None, target, note),
        Figure(
            "idle",
            "memory of the largest member",
            "MB",
            (max(memory.values()),),
            target=value_at_most(60, "MB"),
            note=", ".join(f"{name} {megabytes:.1f} MB" for name, megabytes in memory.items()),
        ),
        Figure("idle", "CPU of all members, of one core", "%", (sum(cpu.values()),)),
        Figure(
            "idle",
            "requests to etcd that are no keep-alives",
            "/s",
            (others,),
            target=value_at_most(0, "/s"),
            note=named,
        ),
        Figure(
            "idle",
            "bytes to and from etcd",
            "B/s",
            ((after.etcd_bytes - before.etcd_bytes) / spent,),
        ),
        Figure(
            "idle",
            "blob store operations that are no listings",
            "/s",
            ((after.store_operations - before.store_operations) / spent,),
            target=value_at_most(0, "/s"),
        ),
        Figure(
            "idle",
            "listings of blob stores",
            "/s",
            ((after.store_listings - before.store_listings) / spent,),
            note="a new replica lists at intervals that double, up to its journal's refresh interval",
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters at one moment."""

    at: float
    cpu_s: Mapping[str, float]
    etcd_calls: Mapping[str, float]
    """Messages that etcd received, by method."""
    etcd_bytes: float
    store_operations: float
    """Without listings, which are due from time to time."""
    store_listings: float

    @classmethod
    async def take(cls, bench: Bench, pids: Mapping[str, int]) -> _Sample:
        etcd = await asyncio.to_thread(exported, bench.cluster.etcd.endpoint)
        brokers = [await asyncio.to_thread(exported, one.http_url) for one in bench.cluster.brokers]
        name = "gazette_store_operation_total"
        operations = sum(total(one, name) for one in brokers)
        listings = sum(
            value
            for one in brokers
            for (metric, labels), value in one.items()
            if metric == name and 'operation="list"' in labels
        )
        return cls(
            at=bench.clock.monotonic(),
            cpu_s={name: cpu_seconds([pid]) for name, pid in pids.items()},
            etcd_calls=by_method(etcd, "grpc_server_msg_received_total"),
            etcd_bytes=total(etcd, "etcd_network_client_grpc_received_bytes_total")
            + total(etcd, "etcd_network_client_grpc_sent_bytes_total"),
            store_operations=operations - listings,
            store_listings=listings,
        )
