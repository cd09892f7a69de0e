"""The faults of a soaking cluster.

Replication covers each fault, except the two that end all brokers. These lose nothing, and leave journals
whose heads an operator has to confirm.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from gazette.errors import GazetteError, Unavailable
from tools.chaos.cluster import ETCD, Broker
from tools.chaos.network import LinkState
from tools.chaos.store import BreakableStore, empty_disk, fill_disk
from tools.soak.cluster import Member, SoakCluster

STOP_S: Final = 120.0
BACK_S: Final = 180.0
"""Seconds within which a cluster must be back between two steps of a rolling restart."""
SCRATCH_KEY: Final = "/soak/scratch"
"""A key that no process reads. Writes to it give etcd a history that can be compacted."""
KINDS: Final = (
    "crash-consumer",
    "crash-all-consumers",
    "stop-all-consumers",
    "zombie-consumer",
    "pause-consumer",
    "unassign-shards",
    "crash-broker",
    "stop-all-brokers",
    "zombie-broker",
    "crash-etcd",
    "pause-etcd",
    "pause-etcd-beyond-leases",
    "compact-etcd",
    "cut-consumer-etcd",
    "cut-broker-etcd",
    "cut-consumer-brokers",
    "cut-broker-consumers",
    "cut-brokers",
    "store-missing",
    "full-disk-broker",
    "full-disk-consumer",
    "roll-consumers",
    "roll-brokers",
    "store-read-only",
    "crash-database",
)
"""All kinds of faults. The last two do not work on every machine: see `Faults.all`."""
_CUTS: Final = (LinkState.HELD, LinkState.REFUSED)

Act: TypeAlias = Callable[[random.Random], Awaitable[None]]
Process: TypeAlias = Member | Broker


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault. ``act`` returns when the fault is over. ``ends_brokers``: all brokers end by it."""

    kind: str
    act: Act
    ends_brokers: bool = False


class Faults:
    """``all`` returns the faults that work on this machine; ``heal`` repairs what is broken."""

    def __init__(
        self,
        cluster: SoakCluster,
        note: Callable[..., None],
        *,
        store: BreakableStore | None = None,
    ) -> None:
        self.target = ""
        """The target of the present fault."""
        self.outage_s = 0.0
        """Seconds for which etcd did not answer because of the present fault."""
        self._cluster = cluster
        self._clock = cluster.clock
        self._note = note
        self._store = store or BreakableStore(cluster.store)
        self._full: set[int] = set()
        lease = cluster.settings.lease_ttl_s
        self._short_s, self._long_s = lease / 2, lease + 3.0

    def all(self) -> list[Fault]:
        faults = [
            Fault("crash-consumer", self._crash_consumer),
            Fault("crash-all-consumers", self._crash_consumers),
            Fault("stop-all-consumers", self._stop_consumers),
            Fault("zombie-consumer", self._zombie_consumer),
            Fault("pause-consumer", self._pause_consumer),
            Fault("unassign-shards", self._unassign_shards),
            Fault("crash-broker", self._crash_broker),
            Fault("stop-all-brokers", self._stop_brokers, ends_brokers=True),
            Fault("zombie-broker", self._zombie_broker),
            Fault("crash-etcd", self._crash_etcd),
            Fault("pause-etcd", self._pause_etcd),
            Fault("pause-etcd-beyond-leases", self._pause_etcd_long, ends_brokers=True),
            Fault("compact-etcd", self._compact_etcd),
            Fault("cut-consumer-etcd", self._cut_consumer_etcd),
            Fault("cut-broker-etcd", self._cut_broker_etcd),
            Fault("cut-consumer-brokers", self._cut_consumer_brokers),
            Fault("cut-broker-consumers", self._cut_broker_consumers),
            Fault("cut-brokers", self._cut_brokers),
            Fault("store-missing", self._store_missing),
            Fault("full-disk-broker", self._fill_broker),
            Fault("full-disk-consumer", self._fill_consumer),
            Fault("roll-consumers", self._roll_consumers),
            Fault("roll-brokers", self._roll_brokers),
        ]
        if self._store.can_protect():
            faults.append(Fault("store-read-only", self._protect_store))
        if self._cluster.database.can_be_killed and "sql" in self._cluster.soak.stores:
            faults.append(Fault("crash-database", self._crash_database))
        return faults

    async def heal(self) -> None:
        """Undo what faults have broken. Brokers and members that ended stay down."""
        cluster = self._cluster
        self._store.mend()
        for pid in self._full:
            empty_disk(pid)
        self._full.clear()
        cluster.network.heal()
        for member in cluster.members:
            if member.paused:
                cluster.resume(member)
        for broker in cluster.brokers:
            if broker.paused:
                self._resume_broker(broker)
        if not cluster.etcd.running:
            await asyncio.to_thread(cluster.etcd.start)
        else:
            await asyncio.to_thread(cluster.etcd.resume)
        await asyncio.to_thread(cluster.database.start)

    def _member(self, rng: random.Random) -> Member:
        member = rng.choice(self._cluster.members)
        self.target = member.name
        return member

    def _broker(self, rng: random.Random) -> Broker:
        broker = rng.choice(self._cluster.brokers)
        self.target = broker.name
        return broker

    async def _stop(self, one: Process) -> None:
        if not await one.process.stop(STOP_S):
            raise Unavailable(
                f"{one.name} did not end within {STOP_S:.0f} s of SIGTERM",
                hint=f"Its log is {one.process.log_path}.",
            )
        if one.process.exit_code != 0:
            self._note("bad-exit", process=one.name, code=one.process.exit_code)

    # -- consumers

    async def _crash_consumer(self, rng: random.Random) -> None:
        await self._member(rng).process.kill()
        await self._clock.sleep(rng.choice((0.0, self._long_s)))

    async def _crash_consumers(self, rng: random.Random) -> None:
        for member in self._cluster.members:
            await member.process.kill()

    async def _stop_consumers(self, rng: random.Random) -> None:
        await asyncio.gather(*(self._stop(one) for one in self._cluster.members))

    async def _zombie_consumer(self, rng: random.Random) -> None:
        await self._pause_member(self._member(rng), rng.uniform(self._long_s, 2 * self._long_s))

    async def _pause_consumer(self, rng: random.Random) -> None:
        await self._pause_member(self._member(rng), rng.uniform(0.2, self._short_s))

    async def _pause_member(self, member: Member, seconds: float) -> None:
        self._cluster.pause(member)
        await self._clock.sleep(seconds)
        self._cluster.resume(member)

    async def _unassign_shards(self, rng: random.Random) -> None:
        """Assign all shards to other members, and again while their new owners play logs back."""
        for _ in range(rng.randint(2, 4)):
            try:
                async with asyncio.timeout(10.0), self._cluster.shard_client() as shards:
                    await shards.unassign(self._cluster.shard_ids)
            except (GazetteError, TimeoutError) as error:
                self._note("not-unassigned", error=repr(error))
            await self._clock.sleep(rng.uniform(0.1, 1.5))

    async def _fill_consumer(self, rng: random.Random) -> None:
        await self._fill(self._member(rng), rng)

    async def _roll_consumers(self, rng: random.Random) -> None:
        for member in self._cluster.members:
            await self._stop(member)
            await member.process.start()
            await self._cluster.await_member(member)
            await self._cluster.await_shards(BACK_S)

    # -- brokers

    async def _crash_broker(self, rng: random.Random) -> None:
        await self._broker(rng).process.kill()
        await self._clock.sleep(rng.choice((0.0, self._long_s)))

    async def _stop_brokers(self, rng: random.Random) -> None:
        await asyncio.gather(*(self._stop(one) for one in self._cluster.brokers))

    async def _zombie_broker(self, rng: random.Random) -> None:
        broker = self._broker(rng)
        broker.process.signal(signal.SIGSTOP)
        broker.paused = True
        await self._clock.sleep(rng.uniform(self._long_s, 2 * self._long_s))
        self._resume_broker(broker)

    def _resume_broker(self, broker: Broker) -> None:
        broker.process.signal(signal.SIGCONT)
        broker.paused = False

    async def _fill_broker(self, rng: random.Random) -> None:
        await self._fill(self._broker(rng), rng)

    async def _fill(self, one: Process, rng: random.Random) -> None:
        """Let writes to files of a process fail for some seconds."""
        if not one.process.running:
            return
        pid = one.process.pid
        self._full.add(pid)
        fill_disk(pid)
        await self._clock.sleep(rng.uniform(1.0, 6.0))
        empty_disk(pid)
        self._full.discard(pid)

    async def _roll_brokers(self, rng: random.Random) -> None:
        for broker in self._cluster.brokers:
            await self._stop(broker)
            await self._cluster.revive(broker)
            await self._cluster.until("settling", self._cluster.has_replicas, BACK_S)

    # -- etcd

    async def _crash_etcd(self, rng: random.Random) -> None:
        began = self._clock.monotonic()
        await asyncio.to_thread(self._cluster.etcd.kill)
        await self._clock.sleep(rng.uniform(0.0, self._short_s / 2))
        await asyncio.to_thread(self._cluster.etcd.start)
        self._was_out(began)

    async def _pause_etcd(self, rng: random.Random) -> None:
        await self._pause_etcd_for(rng.uniform(0.5, self._short_s / 2))

    async def _pause_etcd_long(self, rng: random.Random) -> None:
        """Pause etcd until all leases run out together, and every process ends."""
        await self._pause_etcd_for(self._long_s)

    async def _pause_etcd_for(self, seconds: float) -> None:
        began = self._clock.monotonic()
        await asyncio.to_thread(self._cluster.etcd.pause)
        await self._clock.sleep(seconds)
        await asyncio.to_thread(self._cluster.etcd.resume)
        self._was_out(began)

    def _was_out(self, began: float) -> None:
        self.target = ETCD
        self.outage_s = self._clock.monotonic() - began
        self._note("etcd-outage", seconds=round(self.outage_s, 2))

    async def _compact_etcd(self, rng: random.Random) -> None:
        """Cut off a broker and a member, and compact the revisions that they would have watched."""
        broker, member = self._broker(rng), self._member(rng)
        self.target = f"{broker.name}, {member.name}"
        links = [self._cluster.network.link(one.name, ETCD) for one in (broker, member)]
        for link in links:
            link.set(LinkState.REFUSED)
        for _ in range(10):
            await self._cluster.touch_etcd(SCRATCH_KEY)
        await self._cluster.compact_etcd()
        await self._clock.sleep(rng.uniform(0.0, self._short_s / 2))
        for link in links:
            link.set(LinkState.OPEN)

    # -- what is between them

    async def _cut(self, rng: random.Random, pairs: list[tuple[str, str]], seconds: float) -> None:
        state = rng.choice(_CUTS)
        self.target += f" {state.value}"
        links = [self._cluster.network.link(one, other) for one, other in pairs]
        for link in links:
            link.set(state)
        await self._clock.sleep(seconds)
        for link in links:
            link.set(LinkState.OPEN)

    async def _cut_consumer_etcd(self, rng: random.Random) -> None:
        seconds = rng.choice((self._short_s / 2, self._long_s))
        await self._cut(rng, [(self._member(rng).name, ETCD)], seconds)

    async def _cut_broker_etcd(self, rng: random.Random) -> None:
        seconds = rng.choice((self._short_s / 2, self._long_s))
        await self._cut(rng, [(self._broker(rng).name, ETCD)], seconds)

    async def _cut_consumer_brokers(self, rng: random.Random) -> None:
        member = self._member(rng)
        pairs = [(member.name, broker.name) for broker in self._cluster.brokers]
        await self._cut(rng, pairs, rng.uniform(3.0, 12.0))

    async def _cut_broker_consumers(self, rng: random.Random) -> None:
        broker = self._broker(rng)
        pairs = [(member.name, broker.name) for member in self._cluster.members]
        await self._cut(rng, pairs, rng.uniform(3.0, 12.0))

    async def _cut_brokers(self, rng: random.Random) -> None:
        one, *others = rng.sample(self._cluster.brokers, len(self._cluster.brokers))
        self.target = one.name
        await self._cut(rng, [(one.name, other.name) for other in others], rng.uniform(3.0, 12.0))

    # -- stores and databases

    async def _store_missing(self, rng: random.Random) -> None:
        self._store.hide()
        try:
            await self._clock.sleep(rng.uniform(3.0, 12.0))
        finally:
            self._store.show()

    async def _protect_store(self, rng: random.Random) -> None:
        self._store.protect()
        try:
            await self._clock.sleep(rng.uniform(3.0, 12.0))
        finally:
            self._store.unprotect()

    async def _crash_database(self, rng: random.Random) -> None:
        await asyncio.to_thread(self._cluster.database.kill)
        await self._clock.sleep(rng.uniform(0.0, 3.0))
        await asyncio.to_thread(self._cluster.database.start)
