"""Breaks things, one after another, and waits after each until all is as it was before.

Two lanes run beside each other: one for processes and what is between them, which waits until every
journal has all of its replicas again, and everything that a former replica held alone is stored; one for
the blob store and clients. So never are more brokers lost at once than replication permits.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gazette.client.appender import AppendParams, append_once
from gazette.client.client import Client
from gazette.client.journals import FragmentsParams
from gazette.client.rpc_errors import status_of
from gazette.clock import Clock
from gazette.dev.chaos.cluster import ETCD, Broker, ChaosCluster
from gazette.dev.chaos.history import FaultEvent, HeadReset, Phase
from gazette.dev.chaos.network import CLIENT, LinkState
from gazette.dev.chaos.recorder import Recorder
from gazette.dev.chaos.store import BreakableStore, empty_disk, fill_disk
from gazette.dev.heads import write_head
from gazette.errors import GazetteError, Unavailable
from gazette.protocol.status import Status

SETTLE_S: Final = 240.0
"""Within which everything must be as it was before a fault."""
_PROCESS_PAUSE_S: Final = 2.0
_SURROUNDING_PAUSE_S: Final = 10.0
_PROBE_S: Final = 10.0
_WORTH_MENTION_MS: Final = 5_000
_CUTS: Final = (LinkState.HELD, LinkState.REFUSED)

Break: TypeAlias = Callable[[random.Random], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A way of breaking things. ``act`` returns what it broke when it is over; ``weight`` says how often it
    is chosen."""

    kind: str
    act: Break
    weight: int = 1


class Driver:
    """``processes`` and ``surroundings`` are the two lanes: daemons, until they are cancelled. ``heal``
    and ``settle`` then put everything right."""

    def __init__(
        self, cluster: ChaosCluster, recorder: Recorder, seed: int, *, say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._clock: Clock = cluster.clock
        self._recorder = recorder
        self._seed = seed
        self._say = say
        self._store = BreakableStore(cluster.store)
        self._client: Client = cluster.client()
        self._full: set[int] = set()
        self._heads: dict[str, int] = {}
        """What had been acknowledged when settling began."""
        self._joined: dict[str, tuple[tuple[tuple[str, int], ...], int]] = {}
        """By journal, its present replicas, and up to where all that they do not all have must be stored."""
        lease = cluster.settings.lease_ttl_s
        self._short_s, self._long_s = lease / 2, lease + 3

    @property
    def process_faults(self) -> list[Fault]:
        return [
            Fault("kill", self._kill, 3),
            Fault("pause beyond the lease", self._pause_long, 2),
            Fault("pause", self._pause_short),
            Fault("terminate", self._terminate, 2),
            Fault("kill etcd", self._kill_etcd),
            Fault("pause etcd", self._pause_etcd),
            Fault("pause etcd beyond the lease", self._pause_etcd_long),
            Fault("cut from etcd beyond the lease", self._cut_etcd_long, 2),
            Fault("cut from etcd", self._cut_etcd_short),
            Fault("cut from brokers", self._cut_peers, 2),
            Fault("cut between two brokers", self._cut_pair),
        ]

    @property
    def surrounding_faults(self) -> list[Fault]:
        faults = [
            Fault("cut from clients", self._cut_clients, 2),
            Fault("store is missing", self._hide_store),
            Fault("disk is full", self._fill_disk),
        ]
        if self._store.can_protect():
            faults.append(Fault("store is read-only", self._protect_store))
        return faults

    async def processes(self) -> None:
        """The first lane."""
        rng = random.Random(f"{self._seed} processes")
        await self._lane(self.process_faults, rng, _PROCESS_PAUSE_S, settle=True)

    async def surroundings(self) -> None:
        """The second lane."""
        rng = random.Random(f"{self._seed} surroundings")
        await self._lane(self.surrounding_faults, rng, _SURROUNDING_PAUSE_S, settle=False)

    async def _lane(
        self, faults: Sequence[Fault], rng: random.Random, pause_s: float, *, settle: bool
    ) -> None:
        weights = [fault.weight for fault in faults]
        # Each kind once, in any order, before the dice decide.
        first = list(faults)
        rng.shuffle(first)
        while True:
            await self._clock.sleep(rng.uniform(pause_s, 2 * pause_s))
            fault = first.pop() if first else rng.choices(faults, weights)[0]
            await self._one(fault, rng, settle=settle)

    async def _one(self, fault: Fault, rng: random.Random, *, settle: bool) -> None:
        begun = self._recorder.time
        self._note(fault.kind, "", "begun")
        target = await fault.act(rng)
        self._note(fault.kind, target, "ended")
        if settle:
            await self.settle()
        self._note(fault.kind, target, "settled")
        self._say(f"{fault.kind} ({target}): over after {self._recorder.time - begun:.1f} s")

    def _note(self, kind: str, target: str, phase: Phase) -> None:
        self._recorder.record(FaultEvent(self._recorder.time, kind, target, phase))

    # Settling.

    async def heal(self) -> None:
        """Put right whatever is broken."""
        self._store.mend()
        for pid in self._full:
            empty_disk(pid)
        self._full.clear()
        self._cluster.network.heal()
        for broker in self._cluster.brokers:
            self._resume(broker)
        if not self._cluster.etcd.running:
            await asyncio.to_thread(self._cluster.etcd.start)
        else:
            self._cluster.etcd.resume()

    async def settle(self) -> None:
        """Return when all brokers serve, every journal has all of its replicas, and these have stored
        what they do not hold in common. Raises ``Unavailable`` if that does not come to pass."""
        deadline = self._clock.monotonic() + SETTLE_S
        self._heads = defaultdict(int, self._recorder.heads)
        waits: Counter[str] = Counter()
        while True:
            begun = self._clock.monotonic()
            missing = await self._missing()
            if not missing:
                break
            if self._clock.monotonic() > deadline:
                raise Unavailable(
                    f"not settled within {SETTLE_S:.0f} s: {missing}",
                    hint=f"See the logs in {self._cluster.directory / 'logs'}.",
                )
            await self._clock.sleep(0.2)
            waits[missing] += int((self._clock.monotonic() - begun) * 1000)
        for what, waited_ms in waits.most_common(2):
            if waited_ms > _WORTH_MENTION_MS:
                self._say(f"waited {waited_ms / 1000:.1f} s: {what}")

    async def _missing(self) -> str:
        for broker in self._cluster.brokers:
            # What stands by a broker in production starts it again, too.
            if not broker.process.running:
                await self._cluster.revive(broker)
        if missing := self._cluster.has_replicas():
            return missing
        for spec in self._cluster.specs():
            missing = await self._refused(spec.name) or await self._unstored(spec.name)
            if missing:
                return missing
        return ""

    async def _refused(self, journal: str) -> str:
        """Empty if a journal takes appends. If it does not since all its brokers ended, its head is
        confirmed, as an operator does who knows that."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await append_once(self._client, AppendParams(journal), b"")
        except TimeoutError:
            return f"an append to {journal} is not answered"
        except GazetteError as error:
            if status_of(error) == Status.INDEX_HAS_GREATER_OFFSET.name:
                await self._reset_head(journal)
            return f"{journal} refuses appends: {status_of(error) or type(error).__name__}"
        return ""

    async def _reset_head(self, journal: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_S):
                head = await write_head(self._client, journal)
                await append_once(self._client, AppendParams(journal, offset=head), b"")
        except (GazetteError, TimeoutError) as error:
            self._say(f"the head of {journal} was not reset: {error}")
            return
        self._recorder.record(HeadReset(self._recorder.time, journal, head))
        self._say(f"all brokers of {journal} had ended: its head was reset to {head}")

    async def _unstored(self, journal: str) -> str:
        """Empty if every present replica has what is not stored, as the primary knows.

        What was completed before a replica joined, that one does not have.
        """
        try:
            async with asyncio.timeout(_PROBE_S):
                listed = await self._client.list_fragments(FragmentsParams(journal))
        except (GazetteError, TimeoutError) as error:
            return f"fragments of {journal} cannot be listed: {error}"
        fragments = [one.fragment for one in listed]
        known, acknowledged = 0, self._heads[journal]
        for fragment in fragments:
            if fragment.begin > known:
                return f"{journal} is not known from {known} to {fragment.begin}"
            known = max(known, fragment.end)
        if known < acknowledged:
            return f"{journal} is known to {known}, and was acknowledged to {acknowledged}"
        replicas = self._replicas(journal)
        held = [fragment.end for fragment in fragments[:-1] if not fragment.mod_time]
        was, required = self._joined.get(journal, ((), 0))
        if was != replicas:
            required = max(held, default=0)
            self._joined[journal] = (replicas, required)
        missing = sum(end <= required for end in held)
        return f"{missing} fragments of {journal} are not stored" if missing else ""

    def _replicas(self, journal: str) -> tuple[tuple[str, int], ...]:
        """The processes that have a journal."""
        route, _ = self._cluster.route(journal)
        pids = self._cluster.pids()
        return tuple((member.suffix, pids.get(member.suffix, 0)) for member in route.members)

    # Faults of processes.

    def _victim(self, rng: random.Random) -> Broker:
        return rng.choice(self._cluster.brokers)

    async def _kill(self, rng: random.Random) -> str:
        broker = self._victim(rng)
        await broker.process.kill()
        await self._clock.sleep(rng.choice((0.0, 1.0, self._long_s)))
        await self._cluster.revive(broker)
        return broker.name

    async def _terminate(self, rng: random.Random) -> str:
        broker = self._victim(rng)
        await broker.process.stop(SETTLE_S)
        await self._cluster.revive(broker)
        return broker.name

    async def _pause_short(self, rng: random.Random) -> str:
        return await self._pause(rng, rng.uniform(0.5, self._short_s))

    async def _pause_long(self, rng: random.Random) -> str:
        return await self._pause(rng, rng.uniform(self._long_s, 2 * self._long_s))

    async def _pause(self, rng: random.Random, seconds: float) -> str:
        broker = self._victim(rng)
        broker.process.signal(signal.SIGSTOP)
        broker.paused = True
        await self._clock.sleep(seconds)
        self._resume(broker)
        return broker.name

    def _resume(self, broker: Broker) -> None:
        if broker.paused:
            broker.process.signal(signal.SIGCONT)
            broker.paused = False

    async def _kill_etcd(self, rng: random.Random) -> str:
        await asyncio.to_thread(self._cluster.etcd.kill)
        await self._clock.sleep(rng.uniform(0.0, self._short_s / 2))
        await asyncio.to_thread(self._cluster.etcd.start)
        return ETCD

    async def _pause_etcd(self, rng: random.Random) -> str:
        await asyncio.to_thread(self._cluster.etcd.pause)
        await self._clock.sleep(rng.uniform(0.5, self._short_s / 2))
        await asyncio.to_thread(self._cluster.etcd.resume)
        return ETCD

    async def _pause_etcd_long(self, rng: random.Random) -> str:
        """All brokers end, in good order: nobody knows that it may go on."""
        del rng
        await asyncio.to_thread(self._cluster.etcd.pause)
        await self._clock.sleep(self._long_s)
        await asyncio.to_thread(self._cluster.etcd.resume)
        return ETCD

    async def _cut_etcd_short(self, rng: random.Random) -> str:
        return await self._cut(rng, [(self._victim(rng).name, ETCD)], self._short_s / 2)

    async def _cut_etcd_long(self, rng: random.Random) -> str:
        return await self._cut(rng, [(self._victim(rng).name, ETCD)], self._long_s)

    async def _cut_peers(self, rng: random.Random) -> str:
        victim = self._victim(rng)
        others = [one.name for one in self._cluster.brokers if one is not victim]
        return await self._cut(
            rng, [(victim.name, name) for name in others], rng.uniform(2.0, 12.0)
        )

    async def _cut_pair(self, rng: random.Random) -> str:
        one, other = rng.sample(self._cluster.brokers, 2)
        return await self._cut(rng, [(one.name, other.name)], rng.uniform(2.0, 12.0))

    async def _cut(
        self, rng: random.Random, pairs: Sequence[tuple[str, str]], seconds: float
    ) -> str:
        state = rng.choice(_CUTS)
        links = [self._cluster.network.link(one, other) for one, other in pairs]
        for link in links:
            link.set(state)
        await self._clock.sleep(seconds)
        for link in links:
            link.set(LinkState.OPEN)
        return ", ".join(f"{one} | {other}" for one, other in pairs) + f" {state.value}"

    # Faults of what is around.

    async def _cut_clients(self, rng: random.Random) -> str:
        return await self._cut(rng, [(self._victim(rng).name, CLIENT)], rng.uniform(2.0, 12.0))

    async def _hide_store(self, rng: random.Random) -> str:
        self._store.hide()
        await self._clock.sleep(rng.uniform(2.0, 10.0))
        self._store.show()
        return "store"

    async def _protect_store(self, rng: random.Random) -> str:
        self._store.protect()
        await self._clock.sleep(rng.uniform(2.0, 10.0))
        self._store.unprotect()
        return "store"

    async def _fill_disk(self, rng: random.Random) -> str:
        process = self._victim(rng).process
        if not process.running:
            return "nobody"
        pid = process.pid
        self._full.add(pid)
        fill_disk(pid)
        await self._clock.sleep(rng.uniform(1.0, 6.0))
        empty_disk(pid)
        self._full.discard(pid)
        return process.name

    async def close(self) -> None:
        await self._client.close()


async def rolling_restarts(
    cluster: ChaosCluster, recorder: Recorder, rounds: int, *, say: Callable[[str], None]
) -> None:
    """SIGTERM to each broker in turn, and start it again when it has ended; ``rounds`` times over."""
    for number in range(1, rounds + 1):
        for broker in cluster.brokers:
            recorder.record(FaultEvent(recorder.time, "restart", broker.name, "begun"))
            begun = recorder.time
            if not await broker.process.stop(SETTLE_S):
                raise Unavailable(f"{broker.name} did not end within {SETTLE_S:.0f} s")
            if broker.process.exit_code != 0:
                raise broker.process.died()
            recorder.record(FaultEvent(recorder.time, "restart", broker.name, "ended"))
            ended = recorder.time
            await cluster.revive(broker)
            await cluster.until("settling", cluster.has_replicas, SETTLE_S)
            recorder.record(FaultEvent(recorder.time, "restart", broker.name, "settled"))
            say(
                f"round {number}: {broker.name} left in {ended - begun:.1f} s, and was back in"
                f" {recorder.time - ended:.1f} s"
            )
