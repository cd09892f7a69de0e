"""Breaks a soaking cluster, one fault after another, and says when it works again.

After each fault the cluster is repaired as whatever runs it would: processes that ended are started
again, FAILED shards are unassigned. The next fault waits until everything is as before, so that never
more is lost at once than replication permits.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from gazette.client.client import Client
from gazette.dev.chaos.cluster import ETCD, Broker
from gazette.dev.chaos.network import LinkState
from gazette.dev.chaos.store import BreakableStore
from gazette.dev.soak.cluster import Member, SoakCluster
from gazette.errors import GazetteError, Unavailable

SETTLE_S: Final = 180.0
"""Within which everything must be as it was before a fault."""
PAUSE_S: Final = 2.0
POLL_S: Final = 0.25
STOP_S: Final = 120.0
_CUTS: Final = (LinkState.HELD, LinkState.REFUSED)

Act: TypeAlias = Callable[[random.Random], Awaitable[None]]
Process: TypeAlias = Member | Broker


@dataclass(frozen=True, slots=True)
class Fault:
    """A way of breaking things. ``act`` returns when it is over."""

    kind: str
    act: Act


@dataclass(slots=True)
class Outcome:
    """What came of one fault. Seconds."""

    kind: str
    target: str
    lasted_s: float
    """From its begin until it was put right."""
    service_s: float
    """The longest time, of all shards and while it lasted, between two sums of a shard."""
    settled_s: float
    """From its begin until everything was as before."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of shards that were FAILED, and had to be unassigned."""


class Service(Protocol):
    """Of whom the driver asks whether the cluster does its work: the load."""

    def served_since(self, time: float) -> float | None:
        """When every shard had done work that began after ``time``; None if one has not."""
        ...

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time within which a shard got no work done, in seconds."""
        ...


class Driver:
    """``run`` breaks until it is cancelled; ``heal`` then puts everything right."""

    def __init__(
        self,
        cluster: SoakCluster,
        service: Service,
        rng: random.Random,
        note: Callable[..., None],
        *,
        scenarios: tuple[str, ...] = (),
    ) -> None:
        """``note(event, **facts)`` writes history. ``scenarios`` restricts which faults are used."""
        self.outcomes: list[Outcome] = []
        self._cluster = cluster
        self._clock = cluster.clock
        self._service = service
        self._rng = rng
        self._note = note
        self._store = BreakableStore(cluster.store)
        self._client: Client = cluster.client()
        self._target = ""
        self._down: set[str] = set()
        self._failed: dict[str, str] = {}
        lease = cluster.settings.lease_ttl_s
        self._short_s, self._long_s = lease / 2, lease + 3.0
        self.faults = [one for one in self._all() if not scenarios or one.kind in scenarios]

    def _all(self) -> list[Fault]:
        faults = [
            Fault("crash-consumer", self._crash_consumer),
            Fault("crash-all-consumers", self._crash_consumers),
            Fault("stop-all-consumers", self._stop_consumers),
            Fault("zombie-consumer", self._zombie_consumer),
            Fault("pause-consumer", self._pause_consumer),
            Fault("crash-broker", self._crash_broker),
            Fault("zombie-broker", self._zombie_broker),
            Fault("crash-etcd", self._crash_etcd),
            Fault("pause-etcd", self._pause_etcd),
            Fault("cut-consumer-etcd", self._cut_consumer_etcd),
            Fault("cut-broker-etcd", self._cut_broker_etcd),
            Fault("cut-consumer-brokers", self._cut_consumer_brokers),
            Fault("cut-broker-consumers", self._cut_broker_consumers),
            Fault("cut-brokers", self._cut_brokers),
            Fault("store-missing", self._store_missing),
            Fault("roll-consumers", self._roll_consumers),
            Fault("roll-brokers", self._roll_brokers),
        ]
        if self._cluster.database.can_be_killed and "sql" in self._cluster.soak.stores:
            faults.append(Fault("crash-database", self._crash_database))
        return faults

    async def run(self) -> None:
        """Each fault once, in any order, and then again. Raises ``Unavailable`` when the cluster does not
        come back."""
        while True:
            faults = list(self.faults)
            self._rng.shuffle(faults)
            for fault in faults:
                await self._clock.sleep(self._rng.uniform(PAUSE_S, 2 * PAUSE_S))
                await self._one(fault)

    async def _one(self, fault: Fault) -> None:
        began = self._clock.monotonic()
        self._target, self._failed = "", {}
        self._note("fault", kind=fault.kind)
        await fault.act(self._rng)
        healed = self._clock.monotonic()
        self._note("healed", kind=fault.kind, target=self._target)
        await self.settle(healed)
        settled = self._clock.monotonic()
        outcome = Outcome(
            fault.kind,
            self._target,
            healed - began,
            self._service.longest_gap(began, settled),
            settled - began,
            dict(self._failed),
        )
        self.outcomes.append(outcome)
        self._note(
            "settled",
            kind=fault.kind,
            target=self._target,
            lasted_s=round(outcome.lasted_s, 2),
            service_s=round(outcome.service_s, 2),
            settled_s=round(outcome.settled_s, 2),
            failed=outcome.failed,
        )

    # -- repairing

    async def settle(self, since: float) -> None:
        """Return when all is as it was before. Raises ``Unavailable`` if that does not come to pass."""
        deadline = self._clock.monotonic() + SETTLE_S
        while missing := await self._missing(since):
            if self._clock.monotonic() > deadline:
                raise Unavailable(
                    f"not settled within {SETTLE_S:.0f} s: {missing}",
                    hint=f"See the logs in {self._cluster.directory / 'logs'}.",
                )
            await self._clock.sleep(POLL_S)

    async def _missing(self, since: float) -> str:
        cluster = self._cluster
        await self._start_what_ended()
        if missing := await cluster.missing_members():
            return missing
        if missing := cluster.has_replicas():
            return missing
        await self._unassign_failed()
        if missing := await cluster.missing_shards():
            return missing
        if self._service.served_since(since) is None:
            return "a shard has not summed anything since"
        for spec in cluster.specs():
            if missing := await cluster.unstored(self._client, spec.name):
                return missing
        return ""

    async def _start_what_ended(self) -> None:
        """As what runs a cluster does: whoever has ended is started again."""
        processes: list[Process] = [*self._cluster.brokers, *self._cluster.members]
        for one in processes:
            if not one.process.running:
                self._note("ended", process=one.name, code=one.process.exit_code)
                await one.process.start()
                await self._await_ready(one)

    async def _await_ready(self, one: Process) -> None:
        if isinstance(one, Member):
            await self._cluster.await_member(one)
        else:
            await self._cluster.await_ready(one)

    async def _unassign_failed(self) -> None:
        failed = await self._cluster.failed_shards()
        if not failed:
            return
        new = {name: error for name, error in failed.items() if self._failed.get(name) != error}
        for name, error in new.items():
            self._note("failed", replica=name, error=error)
        self._failed |= failed
        try:
            await self._cluster.unassign_failed()
        except (GazetteError, TimeoutError) as error:
            self._note("not-unassigned", error=repr(error))

    async def heal(self) -> None:
        """Put right whatever is broken."""
        cluster = self._cluster
        self._store.show()
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

    async def close(self) -> None:
        await self._client.close()

    # -- faults

    def _member(self, rng: random.Random) -> Member:
        member = rng.choice(self._cluster.members)
        self._target = member.name
        return member

    def _broker(self, rng: random.Random) -> Broker:
        broker = rng.choice(self._cluster.brokers)
        self._target = broker.name
        return broker

    async def _crash_consumer(self, rng: random.Random) -> None:
        await self._member(rng).process.kill()
        await self._clock.sleep(rng.choice((0.0, self._long_s)))

    async def _crash_consumers(self, rng: random.Random) -> None:
        for member in self._cluster.members:
            await member.process.kill()

    async def _stop_consumers(self, rng: random.Random) -> None:
        await asyncio.gather(*(self._stop(one) for one in self._cluster.members))

    async def _stop(self, one: Process) -> None:
        if not await one.process.stop(STOP_S):
            raise Unavailable(f"{one.name} did not end within {STOP_S:.0f} s of SIGTERM")
        if one.process.exit_code != 0:
            self._note("bad-exit", process=one.name, code=one.process.exit_code)

    async def _zombie_consumer(self, rng: random.Random) -> None:
        await self._pause_member(self._member(rng), rng.uniform(self._long_s, 2 * self._long_s))

    async def _pause_consumer(self, rng: random.Random) -> None:
        await self._pause_member(self._member(rng), rng.uniform(0.2, self._short_s))

    async def _pause_member(self, member: Member, seconds: float) -> None:
        self._cluster.pause(member)
        await self._clock.sleep(seconds)
        self._cluster.resume(member)

    async def _crash_broker(self, rng: random.Random) -> None:
        await self._broker(rng).process.kill()
        await self._clock.sleep(rng.choice((0.0, self._long_s)))

    async def _zombie_broker(self, rng: random.Random) -> None:
        broker = self._broker(rng)
        self._pause_broker(broker)
        await self._clock.sleep(rng.uniform(self._long_s, 2 * self._long_s))
        self._resume_broker(broker)

    def _pause_broker(self, broker: Broker) -> None:
        broker.process.signal(signal.SIGSTOP)
        broker.paused = True

    def _resume_broker(self, broker: Broker) -> None:
        broker.process.signal(signal.SIGCONT)
        broker.paused = False

    async def _crash_etcd(self, rng: random.Random) -> None:
        await asyncio.to_thread(self._cluster.etcd.kill)
        await self._clock.sleep(rng.uniform(0.0, self._short_s / 2))
        await asyncio.to_thread(self._cluster.etcd.start)

    async def _pause_etcd(self, rng: random.Random) -> None:
        await asyncio.to_thread(self._cluster.etcd.pause)
        await self._clock.sleep(rng.uniform(0.5, self._short_s / 2))
        await asyncio.to_thread(self._cluster.etcd.resume)

    async def _cut(self, rng: random.Random, pairs: list[tuple[str, str]], seconds: float) -> None:
        state = rng.choice(_CUTS)
        self._target += f" {state.value}"
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
        self._target = one.name
        await self._cut(rng, [(one.name, other.name) for other in others], rng.uniform(3.0, 12.0))

    async def _store_missing(self, rng: random.Random) -> None:
        self._store.hide()
        try:
            await self._clock.sleep(rng.uniform(3.0, 12.0))
        finally:
            self._store.show()

    async def _crash_database(self, rng: random.Random) -> None:
        await asyncio.to_thread(self._cluster.database.kill)
        await self._clock.sleep(rng.uniform(0.0, 3.0))
        await asyncio.to_thread(self._cluster.database.start)

    async def _roll_consumers(self, rng: random.Random) -> None:
        for member in self._cluster.members:
            await self._stop(member)
            await member.process.start()
            await self._cluster.await_member(member)
            await self._cluster.await_shards(SETTLE_S)

    async def _roll_brokers(self, rng: random.Random) -> None:
        for broker in self._cluster.brokers:
            await self._stop(broker)
            await self._cluster.revive(broker)
            await self._cluster.until("settling", self._cluster.has_replicas, SETTLE_S)
