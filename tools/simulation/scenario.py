"""The events of one seed: a cluster, clients that append and read, and faults that overlap."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from gazette.client.append.appender import (
    Appender,
    AppendParams,
    AppendResult,
    SuspendControl,
    append_once,
)
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.journals import JournalChange, apply_journals, get_journal
from gazette.client.read.reader import OffsetJump, Reader, ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.client.rpc.errors import status_of
from gazette.errors import Bug, GazetteError
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.status import Status
from gazette.protocol.text import duration
from gazette.runtime.tasks import TaskScope, await_future
from gazette.testing.simulation.cluster import ETCD
from gazette.testing.simulation.etcd.watches import WatchStream
from gazette.testing.simulation.loop import NodeClock, SimNode
from gazette.testing.simulation.storage import Threads
from tools.simulation.checker import assigned_ended, is_lost, replicas_ended
from tools.simulation.cold_reads import COLD_SHARE, ColdReader, SimFragments, decode_in_steps
from tools.simulation.history import Append, Confirmed, Fault, Jump, Piece
from tools.simulation.other_version import OtherVersion
from tools.simulation.world import BrokerProcess, World

LEASE_S: Final = 20.0
_HEAL_S: Final = 420.0
"""Seconds after the last fault, within which every journal must take appends and give all its bytes."""
_STOP_S: Final = 420.0
_CALL_S: Final = 45.0
_BACKOFF_S: Final = 150.0
"""Seconds for which a broker may keep away from a store that was down."""
_STORE_WAIT_S: Final = 55.0
"""An append waits longer than so many seconds for a store in trouble, before it is refused."""
_PARTED_S: Final = 60.0
"""Longest delay of the first attempt of an append."""
_LARGE: Final = 1_600_000
"""Bytes of an append that is so large that brokers write a part before they have the rest."""
_SMALL: Final = 1 << 18
"""Greatest number of bytes of a journal whose last reader decodes in short steps."""
_REGISTER: Final = "tag"
_ETCD_LOST_SHARE: Final = 0.1
"""Share of the seeds without another story that lose their etcd."""
_LEFT_UNSEEN_SHARE: Final = 0.5
"""Share of the seeds with `_reassigned_unseen` that do `_left_unseen` instead."""
_INDEX_GREATER: Final = Status.INDEX_HAS_GREATER_OFFSET.name


_CLASSES: Final = {
    "processes": (
        "_crash",
        "_crash_pair",
        "_deaths_apart",
        "_pause",
        "_terminate",
        "_terminate_many",
    ),
    "network": (
        "_amid_append",
        "_amid_group",
        "_cut_connections",
        "_late_copy",
        "_part_client",
        "_partition",
        "_slow_link",
    ),
    "etcd": ("_lagging_watch", "_late_etcd", "_partition_etcd", "_pause_etcd"),
    "stores": ("_store_errors", "_store_hangs", "_store_unmounted"),
    "disks and clocks": ("_clock_jump", "_disk", "_slow_disk"),
    "journals": ("_large_registers", "_recreate"),
}
"""Names of the faults of each class."""


@dataclass(slots=True)
class Plan:
    """The choices of a seed."""

    hosts: list[str]
    journals: dict[str, JournalSpec]
    until: float
    """When the last fault is over."""


class Scenario:
    """One run. ``run`` returns when it is over; the history is in ``world``."""

    def __init__(
        self, seed: int, *, trace: bool = False, other: OtherVersion | None = None
    ) -> None:
        self.world = world = World(seed, trace=trace, other=other)
        self.rng = random.Random(world.rng.getrandbits(64))
        self.node = SimNode(world.loop, "op")
        self.clock = NodeClock(world.loop)
        self.story: Callable[[], Any] | None = None
        """The method that makes all faults of this run; None: faults of all kinds."""
        self._story_apart = random.Random(f"a story of {seed}")
        """Other random numbers, so that this story does not change the other choices of a seed."""
        self._cold = random.Random(f"cold reads of {seed}")
        self.has_cold_readers = self._cold.random() < COLD_SHARE
        """True if readers take stored fragments from their stores themselves."""
        world.loop.sees_done = self.has_cold_readers and self._cold.random() < 0.5
        decode_in_steps(self._cold if self.has_cold_readers else None)
        self.has_operator = True
        self.plan = self._plan(seed)
        self.lives: dict[str, int] = dict.fromkeys(self.plan.journals, 0)
        """How often each journal was created."""
        self.heads: dict[str, int] = {}
        """The end of the last acknowledged append."""
        self.tags: dict[str, int | None] = {}
        self.writing = True
        self._faults_open = 0
        """Number of faults that have not ended yet. At its end, a fault repairs what it broke."""
        self.done = False
        self._numbers = 0
        self._refusals: dict[int, BaseException] = {}
        """Errors of stores that were judged, by ``id``. They are kept, so that no other error gets the id."""
        self._writers: list[asyncio.Task[None]] = []
        self._down: dict[str, Callable[[], None]] = {}
        self._client: Client | None = None
        world.on_exited = self._on_exited

    # Choosing.

    def _plan(self, seed: int) -> Plan:
        rng, world = self.rng, self.world
        tales = (
            self._deaths_apart,
            self._paused_leader,
            self._reassigned_unseen,
            self._late_and_together,
        )
        self.story = rng.choice((*[None] * 8, *tales))
        if self.story is None and self._story_apart.random() < _ETCD_LOST_SHARE:
            # Brokers of another version may leave no closing: then an operator must confirm heads.
            self.story, self.has_operator = self._etcd_lost, world.other is not None
        is_tale_of_deaths = self.story == self._deaths_apart
        is_tale_of_pauses = self.story == self._paused_leader
        count = 3 if self.story else rng.choice((2, 3, 3, 3, 3, 4))
        hosts = [f"broker-{number}" for number in range(count)]
        world.network.delay_s = rng.choice((0.0003, 0.001, 0.005))
        world.network.window = rng.choice((1 << 12, 1 << 16, 1 << 22))
        world.settings = {
            "lease_ttl_s": LEASE_S,
            "watch_delay_s": rng.choice((0.0, 0.03, 0.03)),
            "auto_suspend": rng.random() < 0.15,
            "suspend_after_idle_ticks": 2,
            # Appends are short: with these values, spools write after each, after some, or hardly ever.
            "spool_memory_bytes": (0, 8_000, 200_000)[seed % 3],
        }
        replications: tuple[int, ...] = (1, 2, 3, 3)
        if self.story is not None:
            replications = (3,) if is_tale_of_deaths else (1,) if is_tale_of_pauses else (1, 1, 2)
        if self.story == self._late_and_together:
            replications = (2, 3)
        if self.story == self._etcd_lost:
            replications = (1, 2, 3)
        journals = {}
        for number in range(rng.choice((2, 3)) if is_tale_of_deaths else rng.choice((1, 1, 1, 2))):
            name = f"journal-{number}"
            journals[name] = JournalSpec(
                name,
                replication=min(rng.choice(replications), count),
                fragment=FragmentSpec(
                    length=rng.choice((1 << 10, 1 << 12, 1 << 16, 1 << 24)),
                    codec=rng.choice((Codec.NONE, Codec.NONE, Codec.GZIP, Codec.ZSTANDARD)),
                    refresh_interval_ns=rng.choice((10, 60, 300, 300)) * duration.SECOND,
                    flush_interval_ns=rng.choice((0, 0, 60, 120)) * duration.SECOND,
                ),
            )
            if self.has_cold_readers and self._cold.random() < 0.7:
                spec = journals[name]
                short = replace(
                    spec.fragment, length=self._cold.choice((1 << 10, 1 << 10, 1 << 12))
                )
                journals[name] = replace(spec, fragment=short)
        return Plan(hosts, journals, 0.0)

    def _spec(self, journal: str) -> JournalSpec:
        """Return the journal's specification in its next life, with a store of its own."""
        spec = self.plan.journals[journal]
        self.lives[journal] += 1
        store = f"s3://{journal}-{self.lives[journal]}/"
        return replace(spec, fragment=replace(spec.fragment, stores=(store,)))

    # Running.

    def run(self) -> None:
        world = self.world
        main = self.node.spawn(self._main(), "scenario")
        main.add_done_callback(lambda _: world.loop.stop())
        ended = world.loop.run(until=6_000.0)
        if not main.done():
            world.violated("nothing is left to wait for" if not ended else "the run does not end")
        elif main.cancelled():
            world.violated("the scenario was cancelled")
        elif (error := main.exception()) is not None:
            world.failed(error)

    async def _main(self) -> None:
        world, rng, plan = self.world, self.rng, self.plan
        for host in plan.hosts:
            world.start_broker(host)
        self._client = client = self.new_client(self.node)
        async with TaskScope("scenario") as scope:
            for journal in plan.journals:
                await self._create(client, journal)
            for number, journal in enumerate(plan.journals):
                for _ in range(3 if self.is_busy else rng.choice((1, 1, 1, 2))):
                    self._spawn_writer(f"w{number}", journal)
                self._spawn_reader(f"r{number}", journal)
                if self.has_cold_readers:
                    rng = random.Random(self._cold.getrandbits(64))
                    reader = ColdReader(self, f"c{number}", journal, rng)
                    reader.node.spawn(reader.run(), f"read {journal} at its stores")
            await self._break(scope)
            await self._heal()
            scope.cancel()
        await self._end_writing()
        await self._judge()
        self.done = True
        world.loop.stop()

    def new_client(self, node: SimNode) -> Client:
        hosts = list(self.plan.hosts)
        self.rng.shuffle(hosts)
        return self.world.client(node, *hosts)

    async def _create(self, client: Client, journal: str) -> None:
        change = JournalChange(upsert=self._spec(journal))
        while True:
            try:
                async with asyncio.timeout(_CALL_S):
                    await apply_journals(client, [change])
                break
            except (GazetteError, TimeoutError):
                life = self.world.history.last_life(journal)
                if life is not None and life.deleted is None:
                    break
                await self.clock.sleep(1.0)
        self.heads[journal] = 0
        self.tags[journal] = None

    # Faults.

    async def _break(self, scope: TaskScope) -> None:
        """Begin faults at random times. Some may still go on at the return: `_heal` waits for them."""
        rng = self.rng
        await self.clock.sleep(rng.uniform(1.0, 20.0))
        if self.story is not None:
            await self.story()
            return
        faults = self.faults()
        for _ in range(rng.choice((1, 1, 2, 2))):
            for _ in range(rng.choice((1, 2, 2, 3, 4))):
                chosen = rng.choice(faults)
                scope.spawn(self._delayed(rng.expovariate(1 / 8.0), chosen), name="fault")
            # Some waves overlap. After others, brokers have time to store everything.
            await self.clock.sleep(rng.choice((5.0, 30.0, 100.0, 130.0)) * rng.uniform(0.8, 1.2))

    async def _delayed(self, seconds: float, fault: Callable[[], Any]) -> None:
        self._faults_open += 1
        try:
            await self.clock.sleep(seconds)
            await fault()
        finally:
            self._faults_open -= 1

    def faults(self) -> list[Callable[[], Any]]:
        """Return the faults to choose from. In half of the seeds whole classes of them are off."""
        faults = self._all_faults()
        on = {kind for kind in _CLASSES if self.rng.random() < 0.5}
        if self.rng.random() < 0.5 or not on:
            return faults
        names = {name for kind in on for name in _CLASSES[kind]}
        return [fault for fault in faults if fault.__name__ in names]

    def _all_faults(self) -> list[Callable[[], Any]]:
        common = [self._crash, self._crash, self._pause, self._partition, self._partition_etcd]
        rare = [
            self._crash_pair,
            self._terminate,
            self._terminate_many,
            self._amid_append,
            self._slow_link,
            self._cut_connections,
            self._store_errors,
            self._store_hangs,
            self._store_unmounted,
            self._disk,
            self._slow_disk,
            self._lagging_watch,
            self._pause_etcd,
            self._clock_jump,
            self._recreate,
            self._part_client,
            self._deaths_apart,
            self._late_etcd,
            *[self._amid_group] * 3,
            *[self._late_copy] * 2,
        ]
        if self.rng.random() < 0.25:
            rare.append(self._large_registers)  # It costs more time than all others.
        return common * 2 + rare

    def note_fault(
        self, what: str, seconds: float, *hosts: str, lease: bool = False, after_s: float = 0.0
    ) -> None:
        """Note a fault. With ``lease``, the brokers of these hosts may lose their leases by it.

        For ``after_s`` after the fault, brokers may still keep away from the store in trouble.
        """
        world = self.world
        now = world.loop.now
        world.say("fault", what, f"for {seconds:.1f} s", *hosts)
        world.history.faults.append(Fault(now, now + seconds + after_s, what))
        until = now + seconds
        if lease:
            until += LEASE_S + 10.0  # A lease may be lost a little after the fault.
            for host in hosts:
                world.excused_until[host] = max(world.excused_until.get(host, 0.0), until)
        self.plan.until = max(self.plan.until, until)

    def _host(self) -> str:
        return self.rng.choice(self.plan.hosts)

    def leader(self) -> str:
        """Return a host whose broker believes that it is the primary of some journal."""
        running = (one for one in self.world.brokers.values() if not one.ended)
        primaries: list[str] = [one.host for one in running if 0 in one.slots]
        return self.rng.choice(primaries or self.plan.hosts)

    async def _crash(self) -> None:
        self._kill(self._host())

    async def _crash_pair(self) -> None:
        hosts = self.rng.sample(self.plan.hosts, 2)
        self._kill(hosts[0])
        await self.clock.sleep(self.rng.choice((0.0, 0.5, 2.0, 25.0)))
        self._kill(hosts[1])

    async def _deaths_apart(self) -> None:
        """Kill two brokers at nearly the same time, and the others later.

        The others die just after the two have come back, or long after.
        """
        hosts = self.rng.sample(self.plan.hosts, len(self.plan.hosts))
        self._kill(hosts[0])
        await self.clock.sleep(self.rng.uniform(0.0, 2.0))
        self._kill(hosts[1])
        await self.clock.sleep(
            self.rng.choice((self.rng.uniform(1.0, 200.0), self.rng.uniform(95.0, 150.0)))
        )
        for host in hosts[2:]:
            self._kill(host)

    def _kill(self, host: str) -> None:
        process = self.world.brokers[host]
        if process.ended:
            return
        self.note_fault("crash", LEASE_S + 5.0, host)
        self.world.crash(host, silent=self.rng.random() < 0.3)
        self._restart_later(host)

    def _restart_later(self, host: str) -> None:
        rng, world = self.rng, self.world
        delay = rng.choice((0.2, 2.0, 10.0, 40.0)) * rng.uniform(0.5, 1.5)
        id = None
        if rng.random() < 0.5:
            world.identities += 1
            id = f"{host}-{world.identities}"

        def restart() -> None:
            if world.brokers[host].ended and not self.done:
                world.start_broker(host, id)

        world.loop.at(world.loop.now + delay, restart)

    def _on_exited(self, process: BrokerProcess) -> None:
        if not self.done and self.writing:
            self.note_fault("exit", LEASE_S, process.host)
            self._restart_later(process.host)

    async def _terminate(self) -> None:
        host = self._host()
        process = self.world.brokers[host]
        hurried = self.rng.random() < 0.5
        self.note_fault("terminate" + (" hurriedly" if hurried else ""), 10.0, host)
        process.terminate(hurried=hurried)

    async def _terminate_many(self) -> None:
        """Stop brokers together, perhaps all of them. Meanwhile a store or etcd may be slow."""
        rng, world = self.rng, self.world
        leader, hosts, bucket = self.leader(), self.plan.hosts, self._bucket()
        seconds = rng.uniform(10.0, 60.0)
        slow = rng.choice(("", "store", "etcd", "etcd"))
        if slow == "store" and bucket is not None:
            self.note_fault(f"slow store {bucket.name}", seconds, after_s=_BACKOFF_S)
            bucket.trouble.delay_s = rng.choice((1.0, 5.0, 15.0))
        if slow == "etcd":
            delay = rng.choice((0.1, 0.5, 2.0))
            self.note_fault(f"slow link to etcd by {delay} s", seconds, leader, lease=True)
            world.network.slow(leader, ETCD, delay)
            world.network.slow(ETCD, leader, delay)
        for host in {leader: None, **dict.fromkeys(rng.sample(hosts, rng.randrange(len(hosts))))}:
            hurried = rng.random() < 0.7
            self.note_fault("terminate" + (" hurriedly" if hurried else ""), 10.0, host)
            world.brokers[host].terminate(hurried=hurried)
        await self.append_often(min(seconds, 15.0), self.plan.hosts)
        await self.clock.sleep(max(0.0, seconds - 15.0))
        if slow == "store" and bucket is not None:
            bucket.heal()
        if slow == "etcd":
            world.network.slow(leader, ETCD, 0.0)
            world.network.slow(ETCD, leader, 0.0)

    async def _amid_append(self) -> None:
        """Send an append in two parts, and break something between the parts, or right after them."""
        rng, network = self.rng, self.world.network
        journal = rng.choice(list(self.plan.journals))
        append = self.new_append("op", journal, rng.choice((1_000, _LARGE)))
        pause_s, late_s = rng.choice((0.01, 0.1, 0.5, 2.0)), rng.choice((0.0, 0.0, 0.5, 3.0))
        hosts = self.world.assigned(journal)
        peer = rng.choice(hosts[1:] or hosts or self.plan.hosts)

        async def parts() -> AsyncIterator[bytes]:
            middle = len(append.payload) // 2
            yield append.payload[:middle]
            await self.clock.sleep(pause_s)
            yield append.payload[middle:]

        async def send() -> None:
            assert self._client is not None
            try:
                async with asyncio.timeout(_CALL_S):
                    result = await append_once(self._client, AppendParams(journal), parts())
                    self.answered(append, result)
            except (GazetteError, TimeoutError) as error:
                self.failed(append, error)

        async with TaskScope("amid an append") as scope:
            scope.spawn(send(), name="append")
            if not hosts:
                return
            if late_s and peer != hosts[0]:
                # At the fault, the end of the append may have reached one replica, and not yet another.
                self.note_fault(f"slow link to {peer} by {late_s} s", 2 * late_s, hosts[0])
                network.slow(hosts[0], peer, late_s)
            await self.clock.sleep(rng.uniform(0.0, 1.2 * pause_s + late_s))
            network.slow(hosts[0], peer, 0.0)
            match rng.choice(("part", "part", "crash", "terminate", "pause", "cut")):
                case "part" if peer != hosts[0]:
                    await self._part(hosts[0], peer, "partition amid an append")
                case "crash":
                    self._kill(rng.choice((hosts[0], peer)))
                case "terminate":
                    self.note_fault("terminate hurriedly", 10.0, hosts[0])
                    self.world.brokers[hosts[0]].terminate(hurried=True)
                    await self.append_often(2.0, self.plan.hosts)
                case "pause":
                    self.hold(rng.choice((hosts[0], peer)), rng.choice((2.0, 15.0, 25.0)))
                case _:
                    self._cut(peer)

    async def _amid_group(self) -> None:
        """Send small appends together, and break something before their replicas have answered."""
        rng, network = self.rng, self.world.network
        journal = rng.choice(list(self.plan.journals))
        hosts = self.world.assigned(journal)
        if len(hosts) < 2:
            return
        leader, peers = hosts[0], hosts[1:]
        late = peers if rng.random() < 0.7 else [rng.choice(peers)]
        late_s = rng.choice((0.05, 0.5, 3.0))
        await self.append_often(0.5, [leader], 1)  # Now the leader has a pipeline.
        self.note_fault(f"slow link to {late} by {late_s} s", 2 * late_s, leader)
        for peer in late:
            network.slow(leader, peer, late_s)
        await self.append_often(0.01, [leader], rng.randint(3, 12))
        await self.clock.sleep(rng.uniform(0.0, late_s))
        match rng.choice(("cut", "cut", "part", "crash", "terminate")):
            case "cut":
                for peer in late:
                    self._cut(peer)
            case "part":
                await self._part(leader, rng.choice(peers), "partition amid a group")
            case "crash":
                self._kill(rng.choice(peers))
            case _:
                self.note_fault("terminate hurriedly", 10.0, leader)
                self.world.brokers[leader].terminate(hurried=True)
        if rng.random() < 0.6:
            await self.clock.sleep(rng.uniform(0.0, 0.2))
            self._kill(leader)
        for peer in late:
            network.slow(leader, peer, 0.0)

    async def _late_and_together(self) -> None:
        """Break something amid a group commit, or let a copy of an append arrive late, several times."""
        for _ in range(self.rng.choice((2, 3, 4))):
            await self.rng.choice((self._amid_group, self._late_copy))()
            await self.clock.sleep(self.rng.choice((2.0, 40.0, 90.0)))

    async def _late_copy(self) -> None:
        """Let the first attempt of an append arrive late, at a later primary. Meanwhile a second attempt has
        succeeded, and the session has appended more."""
        rng, journal = self.rng, self.rng.choice(list(self.plan.journals))
        hosts = self.world.assigned(journal)
        heir = rng.choice(hosts[1:] or self.plan.hosts)
        others = [host for host in self.plan.hosts if host != heir]
        node = SimNode(self.world.loop, f"late-{self._numbers}")
        client = self.world.client(node, heir, *rng.sample(others, len(others)))
        session = Session(self, node, journal, client)
        self.note_fault(f"partition of {node.name} and {heir}", 60.0)
        self._writers.append(node.spawn(session.append_around(heir), "append late"))
        deadline = self.world.loop.now + 60.0
        await session.ahead.wait()
        while self.world.loop.now < deadline:
            hosts = self.world.assigned(journal)
            if not hosts or hosts[0] == heir:
                break
            self._end_leader(hosts[0])
            await self.clock.sleep(rng.choice((3.0, LEASE_S + 3.0)))
        await self.append_often(rng.choice((0.5, 3.0)), [heir], 2)
        session.free.set()

    def _end_leader(self, host: str) -> None:
        if self.rng.random() < 0.3:
            self._kill(host)
            return
        self.note_fault("terminate hurriedly", 10.0, host)
        self.world.brokers[host].terminate(hurried=True)

    async def _reassigned_unseen(self) -> None:
        """Take a journal from a broker, let others lead it, and give it back, all unseen by the broker.

        The broker's watch lags, or is so late that etcd has compacted what it missed.
        """
        if self._story_apart.random() < _LEFT_UNSEEN_SHARE:
            await self._left_unseen()
            return
        rng, world = self.rng, self.world
        journal = rng.choice(list(self.plan.journals))
        replication = self.plan.journals[journal].replication
        await self._replicate(journal, replication + 1)
        await self.clock.sleep(rng.uniform(2.0, 8.0))
        hosts = world.assigned(journal)
        if not hosts:
            return
        unseeing = rng.choice((hosts[0], hosts[0], *hosts[1:]))
        others = [host for host in self.plan.hosts if host != unseeing]
        seconds = rng.uniform(30.0, 60.0)
        self.note_fault("lagging watch", seconds, unseeing)
        streams = world.hold_watches(unseeing)
        until = world.loop.now + seconds
        await self._replicate(journal, replication)
        await self.append_often(rng.uniform(6.0, 12.0), others)
        for _ in range(replication):
            hosts = world.assigned(journal)
            if not hosts or hosts[0] == unseeing:
                break
            hurried = rng.random() < 0.8
            if hurried:
                self.note_fault("terminate hurriedly", 10.0, hosts[0])
                world.brokers[hosts[0]].terminate(hurried=True)
            else:
                self._kill(hosts[0])
            await self.clock.sleep(rng.uniform(1.0, 5.0) if hurried else LEASE_S + 2.0)
        await self.clock.sleep(max(0.0, until - world.loop.now) * rng.random())
        self._release(streams)
        await self.append_often(5.0, [unseeing])

    async def _left_unseen(self) -> None:
        """Take a journal from a follower that does not see it, and kill the primary: then others lead.

        An operator confirms a head below what the follower has. The follower sees nothing of all that, and
        leaves in good order.
        """
        rng, world = self._story_apart, self.world
        journal = rng.choice(list(self.plan.journals))
        await self._replicate(journal, 1)
        await self.clock.sleep(rng.uniform(1.0, 3.0))
        hosts = world.assigned(journal)
        if len(hosts) != 1:
            return
        (primary,) = hosts
        # Of brokers with equal load, the first by name gets the journal. The oldest broker assigns it.
        follower = min(host for host in self.plan.hosts if host != primary)
        others = [host for host in self.plan.hosts if host != follower]
        await self._renew(follower)
        await self._replicate(journal, 2)
        await self.append_often(rng.uniform(3.0, 6.0), [primary])
        self.note_fault("lagging watch", 60.0, follower)
        streams = world.hold_watches(follower)
        await self.append_often(rng.uniform(0.5, 2.0), [primary])
        await self._replicate(journal, 1)
        await self.clock.sleep(rng.uniform(1.0, 3.0))
        process = world.brokers[follower]
        process.terminate(hurried=False)  # It gets no journal from now on.
        self._kill(primary)
        await self.clock.sleep(LEASE_S + 3.0)
        if self._client is not None and self.may_reset(journal):
            with suppress(GazetteError, TimeoutError):
                await self.reset_head(self._client, journal)
        await self.append_often(rng.uniform(2.0, 6.0), others)
        self.note_fault("terminate hurriedly", 10.0, follower)
        process.terminate(hurried=True)
        await self.clock.sleep(rng.uniform(5.0, 20.0))
        self._release(streams)

    async def _renew(self, host: str) -> None:
        """Stop a broker in good order, and wait until its next process serves: it is the youngest then."""
        self.note_fault("terminate", 10.0, host)
        before = self.world.brokers[host]
        before.terminate(hurried=False)
        while self.world.brokers[host] is before:
            await self.clock.sleep(1.0)
        await self.clock.sleep(5.0)

    async def _replicate(self, journal: str, replication: int) -> None:
        """Give a journal another replication, as an operator does."""
        client = self._client
        assert client is not None
        self.note_fault(f"replication of {journal} is {replication}", 5.0)
        with suppress(GazetteError, TimeoutError):
            async with asyncio.timeout(_CALL_S):
                listed = await get_journal(client, journal)
                spec = replace(listed.spec, replication=replication)
                change = JournalChange(upsert=spec, expect_mod_revision=listed.mod_revision)
                await apply_journals(client, [change])

    async def _pause(self) -> None:
        host, seconds = self._host(), self.rng.choice((2.0, 15.0, 25.0, 60.0))
        self.hold(host, seconds * self.rng.uniform(0.7, 1.3))

    async def _paused_leader(self) -> None:
        """Hold the only broker of a journal beyond its lease, while clients continue to append."""
        for _ in range(self.rng.choice((1, 2, 3))):
            host = self.leader()
            seconds = LEASE_S + self.rng.uniform(1.0, 15.0)
            self.hold(host, seconds)
            await self.clock.sleep(seconds + self.rng.uniform(5.0, 30.0))

    @property
    def is_busy(self) -> bool:
        """True if writers append so often that a paused broker gets many appends at once."""
        return self.story == self._paused_leader

    def hold(self, host: str, seconds: float) -> None:
        self.note_fault("pause", seconds, host, lease=seconds > 5.0)
        node = self.world.brokers[host].node
        node.hold(seconds)
        self.world.network.held(node)

    async def _pause_etcd(self) -> None:
        seconds = self.rng.choice((1.0, 10.0, 25.0)) * self.rng.uniform(0.7, 1.3)
        self.note_fault("pause etcd", seconds, *self.plan.hosts, lease=seconds > 3.0)
        self.world.etcd_node.hold(seconds)
        self.world.network.held(self.world.etcd_node)

    async def _etcd_lost(self) -> None:
        """Let etcd be away, or answer too late, until all brokers have lost their leases and ended.

        Journals must go on without an operator. Sometimes all brokers are killed afterwards: then journals
        have to wait for an operator.
        """
        rng, hosts = self._story_apart, self.plan.hosts
        for _ in range(rng.choice((1, 1, 2))):
            await self.append_often(rng.uniform(2.0, 20.0), hosts)
            seconds = LEASE_S + rng.uniform(5.0, 60.0)
            self.note_fault("etcd is away", seconds, *hosts, lease=True)
            if rng.random() < 0.7:
                self.world.etcd_node.hold(seconds)
                self.world.network.held(self.world.etcd_node)
            else:
                self._slow_etcd(rng.uniform(8.0, 15.0))
            await self.append_often(LEASE_S, hosts, rng.choice((2, 10, 30)))
            await self.clock.sleep(seconds - LEASE_S)
            self._slow_etcd(0.0)
            await self.clock.sleep(rng.uniform(60.0, 120.0))
        if rng.random() < 0.4:
            await self.append_often(rng.uniform(2.0, 20.0), hosts)
            self.has_operator = True
            for host in hosts:
                self._kill(host)

    def _slow_etcd(self, delay_s: float) -> None:
        for host in self.plan.hosts:
            self.world.network.slow(host, ETCD, delay_s)
            self.world.network.slow(ETCD, host, delay_s)

    async def _part(self, one: str, other: str, what: str, lease_of: str | None = None) -> None:
        rng, network = self.rng, self.world.network
        seconds = rng.choice((2.0, 15.0, 30.0, 60.0)) * rng.uniform(0.7, 1.3)
        links = [(one, other), (other, one)]
        if rng.random() < 0.3:
            links = [rng.choice(links)]
        hosts = [lease_of] if lease_of else []
        self.note_fault(f"{what} {links}", seconds, *hosts, lease=bool(lease_of) and seconds > 3.0)
        for link in links:
            network.block(*link)
        await self.clock.sleep(seconds)
        for link in links:
            network.unblock(*link)

    async def _partition(self) -> None:
        one, other = self.rng.sample(self.plan.hosts, 2)
        await self._part(one, other, "partition")

    async def _partition_etcd(self) -> None:
        host = self._host()
        await self._part(host, ETCD, "partition", lease_of=host)

    async def _part_client(self) -> None:
        number = self.rng.randrange(len(self.plan.journals))
        await self._part(f"w{number}", self._host(), "partition of a client")

    async def _slow_link(self) -> None:
        rng, network = self.rng, self.world.network
        one = self._host()
        other = rng.choice([ETCD, *(host for host in self.plan.hosts if host != one)])
        seconds, delay = rng.uniform(5.0, 60.0), rng.choice((0.05, 0.5, 3.0, 8.0))
        late = other == ETCD and delay > 1.0
        self.note_fault(f"slow link to {other} by {delay} s", seconds, one, lease=late)
        for link in ((one, other), (other, one)):
            if rng.random() < 0.7:
                network.slow(*link, delay)
        await self.clock.sleep(seconds)
        network.slow(one, other, 0.0)
        network.slow(other, one, 0.0)

    async def _late_etcd(self) -> None:
        """Delay, and then withhold, etcd's answers to a broker, while clients continue to append there."""
        rng, network = self.rng, self.world.network
        host = self.leader()
        late_s, cut_s = rng.uniform(8.0, 16.0), rng.uniform(25.0, 50.0)
        self.note_fault("etcd answers late, then not", late_s + cut_s, host, lease=True)
        network.slow(ETCD, host, rng.uniform(2.0, 8.0))
        await self.clock.sleep(late_s)
        network.block(host, ETCD)
        # Append from before the lease ends until the broker knows of its end.
        await self.clock.sleep(LEASE_S - 7.0)
        await self.append_often(cut_s - LEASE_S + 7.0, [host], 15)
        network.unblock(host, ETCD)
        network.slow(ETCD, host, 0.0)

    async def _cut_connections(self) -> None:
        self._cut(self.rng.choice([ETCD, *self.plan.hosts]))

    def _cut(self, host: str) -> None:
        self.note_fault("cut connections", 0.0, host)
        node = self.world.etcd_node if host == ETCD else self.world.brokers[host].node
        self.world.network.break_connections(node, self.rng.choice((0.3, 1.0)))

    def _bucket(self) -> Any:
        names = [name for name in self.world.buckets if self.world.buckets[name].trouble_free]
        return self.world.buckets[self.rng.choice(names)] if names else None

    async def _store_errors(self) -> None:
        bucket, rng = self._bucket(), self.rng
        if bucket is None:
            return
        seconds = rng.uniform(5.0, 90.0)
        self.note_fault(f"errors of store {bucket.name}", seconds, after_s=_BACKOFF_S)
        trouble = bucket.trouble
        trouble.error_chance = rng.choice((0.0, 0.3, 1.0))
        trouble.lost_answer_chance = rng.choice((0.0, 0.5))
        trouble.delay_s = rng.choice((0.0, 1.0, 10.0))
        # Other random numbers, so that this choice does not change the other choices of a seed.
        trouble.refuses = random.Random(f"refuses {bucket.name} {seconds}").random() < 0.5
        await self.clock.sleep(seconds)
        bucket.heal()

    async def _store_hangs(self) -> None:
        bucket, rng = self._bucket(), self.rng
        if bucket is None:
            return
        seconds = rng.uniform(5.0, 150.0)
        self.note_fault(f"store {bucket.name} hangs", seconds, after_s=_BACKOFF_S)
        bucket.trouble.hangs_until = self.world.loop.now + seconds
        await self.clock.sleep(seconds)
        bucket.heal()

    async def _store_unmounted(self) -> None:
        """Put an empty directory where the store was; then bring the store back, with the new content."""
        bucket, rng = self._bucket(), self.rng
        if bucket is None:
            return
        seconds = rng.choice((5.0, 40.0, 100.0)) * rng.uniform(0.7, 1.3)
        self.note_fault(f"store {bucket.name} is not mounted", seconds, after_s=_BACKOFF_S)
        # A listing may be as old as the interval between listings.
        refresh_s = max(
            spec.fragment.refresh_interval_ns // duration.SECOND
            for spec in self.plan.journals.values()
        )
        now = self.world.loop.now
        listed = now + seconds + refresh_s + 10.0
        self.world.history.unlisted.append(Fault(now, listed, bucket.name))
        self.plan.until = max(self.plan.until, listed)
        bucket.trouble.unmounted = True
        await self.clock.sleep(seconds)
        bucket.heal()

    async def _disk(self) -> None:
        host, rng = self._host(), self.rng
        seconds = rng.uniform(5.0, 60.0)
        disk = self.world.brokers[host].disk
        full = rng.random() < 0.6
        self.note_fault("disk full" if full else "disk errors", seconds, host)
        disk.full, disk.broken = full, not full
        await self.clock.sleep(seconds)
        disk.full = disk.broken = False

    async def _slow_disk(self) -> None:
        host, rng = self._host(), self.rng
        seconds = rng.uniform(20.0, 60.0)
        disk = self.world.brokers[host].disk
        self.note_fault("slow disk", seconds, host)
        until = self.world.loop.now + seconds
        disk.write_s = rng.choice((0.01, 0.5, 2.5))
        await self._append_much()
        await self.clock.sleep(max(0.0, until - self.world.loop.now))
        disk.write_s = 0.0

    async def _append_much(self) -> None:
        """Append several times to each journal, at once."""
        client = self._client
        assert client is not None
        async with TaskScope("appends") as scope:
            for journal in self.plan.journals:
                for _ in range(5):
                    append = self.new_append("op", journal, 5_000)
                    scope.spawn(self._append(client, append), name="append")

    async def append_often(self, seconds: float, hosts: Sequence[str], times: int = 8) -> None:
        """Begin ``times`` appends to each journal in so many seconds, through brokers of ``hosts``."""
        addresses = self.rng.sample(hosts, len(hosts))
        client = self.world.client(self.node, *addresses)
        for _ in range(times):
            for journal in self.plan.journals:
                append = self.new_append("op", journal, self.rng.choice((30, 700)))
                # Some appends take long, and later ones do not wait for them.
                self._writers.append(self.node.spawn(self._append(client, append), "append"))
            await self.clock.sleep(seconds / times)

    async def _append(self, client: Client, append: Append) -> None:
        try:
            async with asyncio.timeout(_CALL_S):
                params = AppendParams(append.journal)
                self.answered(append, await append_once(client, params, append.payload))
        except (GazetteError, TimeoutError) as error:
            self.failed(append, error)

    async def _lagging_watch(self) -> None:
        host, seconds = self._host(), self.rng.uniform(1.0, 40.0)
        self.note_fault("lagging watch", seconds, host)
        streams = self.world.hold_watches(host)
        await self.clock.sleep(seconds)
        self._release(streams)

    def _release(self, streams: Iterable[WatchStream]) -> None:
        """Deliver what was held back: as events, or by a load of all keys if etcd has compacted these."""
        if self.rng.random() < 0.4:
            self.world.compact_etcd()
        for stream in streams:
            stream.release()

    async def _clock_jump(self) -> None:
        host = self._host()
        jump = self.rng.choice((-3600.0, -5.0, 5.0, 3600.0, 86_400.0))
        self.note_fault(f"clock jumps by {jump} s", 0.0, host)
        self.world.clock_offsets[host] = jump
        self.world.brokers[host].clock.offset_s = jump

    async def _recreate(self) -> None:
        """Delete a journal and create it again.

        Sometimes one of its brokers does not see that, or fragments of the former life wait for their store.
        """
        rng, journal = self.rng, self.rng.choice(list(self.plan.journals))
        life = self.world.history.last_life(journal)
        match rng.choice(("plainly", "unseen", "unstored")):
            case "unseen" if hosts := self.world.assigned(journal):
                host, seconds = rng.choice(hosts), rng.uniform(0.2, 10.0)
                self.note_fault("lagging watch", seconds, host)
                others = [one for one in self.plan.hosts if one != host]
                streams = self.world.hold_watches(host)
                await self.recreate_now(journal, self.world.client(self.node, *others))
                await self.clock.sleep(seconds)
                self._release(streams)
            case "unstored" if life is not None and self.world.bucket(life.bucket).trouble_free:
                bucket, seconds = self.world.bucket(life.bucket), rng.uniform(5.0, 20.0)
                self.note_fault(f"store {bucket.name} is down", seconds, after_s=_BACKOFF_S)
                bucket.trouble.error_chance = 1.0
                await self.append_often(seconds, self.plan.hosts)
                await self.recreate_now(journal)
                bucket.heal()
            case _:
                await self.recreate_now(journal)

    async def recreate_now(self, journal: str, client: Client | None = None) -> None:
        client = client or self._client
        assert client is not None
        self.note_fault(f"re-creation of {journal}", 10.0)
        life = self.world.history.last_life(journal)
        delete = JournalChange(delete=journal, expect_mod_revision=-1)
        try:
            async with asyncio.timeout(_CALL_S):
                await apply_journals(client, [delete])
        except (GazetteError, TimeoutError):
            pass
        if life is None or life.deleted is None:
            return
        await self.clock.sleep(self.rng.choice((0.0, 0.0, 0.1, 5.0)))
        await self._create(client, journal)

    async def _large_registers(self) -> None:
        """Set registers that together are larger than a message between brokers may be."""
        journal = self.rng.choice(list(self.plan.journals))
        client = self._client
        assert client is not None
        self.note_fault(f"large registers of {journal}", 0.0)
        for part in range(3):
            values = [(f"large-{part}", f"{number:01000d}") for number in range(1_650)]
            append = self.new_append("op", journal, 30)
            params = AppendParams(journal, union_registers=LabelSet.of(*values))
            try:
                async with asyncio.timeout(_CALL_S):
                    self.answered(append, await append_once(client, params, append.payload))
            except (GazetteError, TimeoutError) as error:
                self.failed(append, error)
                return

    async def _heal(self) -> None:
        """Wait until faults are over, and every broker runs."""
        world = self.world
        while True:
            down = any(process.ended or process.stopping for process in world.brokers.values())
            if self.plan.until < world.loop.now and not down and not self._faults_open:
                break
            await self.clock.sleep(5.0)
        for journal in self.plan.journals:
            # A deletion whose answer was lost may take effect late.
            life = world.history.last_life(journal)
            if life is None or life.deleted is not None:
                assert self._client is not None
                await self._create(self._client, journal)
        world.say("fault", "all are over")

    async def _end_writing(self) -> None:
        """Let the appends in progress end."""
        self.writing = False
        while any(not writer.done() for writer in self._writers):
            await self.clock.sleep(1.0)

    # Appends.

    def pool(self, node: SimNode) -> Any:
        """Create threads for a client."""
        threads = Threads(node, random.Random(self.rng.getrandbits(64)))
        return threads.pool("spill", 2)

    def _spawn_writer(self, name: str, journal: str) -> None:
        node = SimNode(self.world.loop, name)
        rng = random.Random(self.rng.getrandbits(64))
        writer = Writer(self, node, journal, rng, self.new_client(node))
        self._writers.append(node.spawn(writer.run(), f"write {journal}"))

    def _spawn_reader(self, name: str, journal: str) -> None:
        node = SimNode(self.world.loop, name)
        rng = random.Random(self.rng.getrandbits(64))
        node.spawn(self._tail(node, journal, rng), f"read {journal}")

    def new_append(self, client: str, journal: str, length: int) -> Append:
        self._numbers += 1
        head = f"<{self._numbers}:{journal}:{length}>".encode()
        payload = (head * (length // len(head) + 1))[:length] if length else b""
        append = Append(self._numbers, client, journal, payload, self.world.loop.now)
        self.world.history.appends.append(append)
        return append

    def answered(self, append: Append, result: AppendResult, at: int | None = None) -> None:
        """Record that an append was acknowledged. ``at`` is its offset if the commit has more than it."""
        world = self.world
        append.ended = world.loop.now
        append.begin = result.commit.begin if at is None else at
        append.revision = result.header.etcd.revision
        if not append.repeated and at is None:
            append.answered_tags = result.registers.values_of(_REGISTER)
        primary, revision = result.header.process_id, append.revision
        if primary is not None:
            append.primary = world.primary(primary.suffix, append.begun, revision)
        # Processes that ended before the primary began did not get the append.
        since = max(append.begun, world.began(append.primary))
        append.holders = tuple(
            append.primary if member == primary else world.holder(member.suffix, since, revision)
            for member in result.header.route.members
        )
        world.say(append.client, f"append {append.number} is at {append.begin}", append.holders)
        if at is None and result.commit.end - result.commit.begin != len(append.payload):
            world.violated(
                f"append {append.number} of {len(append.payload)} bytes was answered with "
                f"[{result.commit.begin}, {result.commit.end})"
            )
        life = world.history.last_life(append.journal)
        if life is not None and life.has(append.revision):
            # A broker that does not know yet that the journal was created again answers for its former life.
            self.heads[append.journal] = append.end

    def failed(self, append: Append, error: BaseException, *, refused: bool = False) -> None:
        append.ended = self.world.loop.now
        append.error = str(error)
        append.refused = refused or (bool(status_of(error)) and not append.repeated)
        if isinstance(error, Bug):
            self.world.violated(f"append {append.number} raised {error!r}")
        if status_of(error) == Status.FRAGMENT_STORE_UNHEALTHY.name:
            self._require_trouble(append, error)
        self.world.say(append.client, f"append {append.number} failed", append.refused, error)

    def _require_trouble(self, append: Append, error: BaseException) -> None:
        """Record a violation unless a store has been in trouble for as long as brokers wait for one.

        An append service that has ended by such an error raises the same error again later: judge it once.
        """
        if id(error) in self._refusals:
            return
        self._refusals[id(error)] = error
        now = since = self.world.loop.now
        stores = [one for one in self.world.history.faults if "store" in one.what]
        for fault in sorted(stores, key=lambda one: one.end, reverse=True):
            if fault.begin <= now and fault.end >= since:
                since = min(since, fault.begin)
        if now - since < _STORE_WAIT_S:
            self.world.violated(
                f"append {append.number} was refused for a store that has been in trouble for "
                f"{now - since:.0f} s only: {error}"
            )

    def may_reset(self, journal: str) -> bool:
        """Return True if a journal's head may have to be confirmed.

        That is so if all of its replicas or brokers were replaced, or if its store has more than was
        acknowledged. An operator does not confirm a head while the store is not mounted.
        """
        history, now = self.world.history, self.world.loop.now
        life = history.last_life(journal)
        if not self.has_operator:
            return False
        if life is None or any(
            one.what == life.bucket and one.begin <= now <= one.end for one in history.unlisted
        ):
            return False
        # A replica that leaves uploads what it was sent. If its primary dies before all others have that,
        # the store has bytes that no replica has, and that were never acknowledged.
        stored = max(
            (
                one.end
                for one in history.stored
                if one.bucket == life.bucket and one.removed is None
            ),
            default=0,
        )
        if stored > self.heads[journal] and (history.lost_brokers or history.hurried):
            return True
        # A broker that was removed from the journal may still run, but no broker asks it for its bytes.
        if assigned_ended(history, life, history.hurried):
            return True
        return any(
            replicas_ended(history, one, history.hurried) is not None
            for one in history.appends
            if one.journal == journal and one.acknowledged and life.has(one.revision)
        )

    async def reset_head(self, client: Client, journal: str) -> None:
        """Reset the head as ``gazctl journals reset-head`` does."""
        async with asyncio.timeout(_CALL_S):
            reader = Reader(client, ReadParams(journal, offset=-1, metadata_only=True))
            with suppress(GazetteError):
                await reader.open()
            head = reader.write_head
            reader.close()
            self.world.say("op", f"resets the head of {journal} to {head}")
            history = self.world.history
            life = history.last_life(journal)
            if life is not None:
                history.resets.append(Confirmed(life, self.world.loop.now, head))
            if life is not None and assigned_ended(history, life, history.hurried):
                history.confirmed.append(Confirmed(life, self.world.loop.now, head))
            if head:
                await client.append(AppendParams(journal, offset=head, suspend=SuspendControl.KEEP))

    # Reads.

    async def _tail(self, node: SimNode, journal: str, rng: random.Random) -> None:
        """Follow a journal to the end of the run; in a new life, begin at its offset 0."""
        client = self.new_client(node)
        clock = NodeClock(self.world.loop)
        offset, created = 0, 0
        while not self.done:
            params = ReadParams(journal, offset, block=True)
            try:
                async with Reader(client, params) as reader:
                    async with asyncio.timeout(rng.choice((30.0, 120.0))):
                        await reader.open()
                        life = self.world.history.life_of(journal, _revision(reader))
                        if life is not None and life.created != created:
                            created = life.created
                            if offset:
                                offset = 0
                                continue
                        while True:
                            content = await reader.read()
                            if not content:
                                break
                            arrived = self.world.network.taken[node.name]
                            self.got(node.name, journal, reader, content, arrived)
                            offset = reader.offset
                            if rng.random() < 0.02:
                                await clock.sleep(rng.uniform(0.0, 20.0))
            except OffsetJump as jump:
                self.jumped(node.name, journal, reader, jump)
                offset = jump.offset
            except TimeoutError:
                life = self.world.history.last_life(journal)
                if life is not None and life.created != created and created:
                    offset = 0
            except GazetteError as error:
                if isinstance(error, Bug):
                    self.world.violated(f"reader {node.name} raised {error!r}")
                await clock.sleep(rng.uniform(0.5, 6.0))

    def got(
        self,
        name: str,
        journal: str,
        reader: Reader | RetryReader,
        content: bytes,
        arrived: float,
        *,
        final: bool = False,
    ) -> None:
        begin, revision = reader.offset - len(content), _revision(reader)
        self.world.loop.note(name, begin, len(content))
        self.world.history.pieces.append(
            Piece(name, arrived, journal, revision, begin, content, final)
        )

    def jumped(
        self,
        name: str,
        journal: str,
        reader: Reader | RetryReader,
        jump: OffsetJump,
        since: float = math.inf,
    ) -> None:
        now, revision = self.world.loop.now, _revision(reader)
        self.world.say(name, f"jumps from {jump.expected} to {jump.offset}")
        self.world.history.jumps.append(
            Jump(name, now, journal, revision, jump.expected, jump.offset, min(since, now))
        )

    # After the faults.

    async def _judge(self) -> None:
        """Append to all journals, read them through each broker, and stop the brokers. All must work."""
        world = self.world
        for journal in self.plan.journals:
            await self._judge_append(journal)
        for journal in self.plan.journals:
            for host in self.plan.hosts:
                await self._judge_read(journal, host)
            if self.has_cold_readers:
                host, seed = self.plan.hosts[0], self._cold.getrandbits(64)
                fragments = SimFragments(self.node, random.Random(seed), world.bucket)
                fragments.threads.slow_s = 0.0  # The reader has to reach the head in time.
                if self.heads[journal] > _SMALL:
                    decode_in_steps(None)
                await self._judge_read(journal, host, fragments)
        self.done = True
        together = self.rng.random() < 0.5
        for host in self.plan.hosts if together else ():
            world.brokers[host].terminate(hurried=False)
        for host in self.plan.hosts:
            process = world.brokers[host]
            world.say("op", f"stops {host}")
            if not together:
                process.terminate(hurried=False)
            deadline = world.loop.now + _STOP_S
            while not process.ended:
                if world.loop.now > deadline:
                    tasks = sorted(task.get_name() for task in process.node.pending_tasks())
                    world.violated(f"{host} does not stop within {_STOP_S} s: {tasks}")
                    return
                await self.clock.sleep(1.0)
            if process.error is not None:
                world.violated(f"{host} could not stop in good order: {process.error!r}")
        world.history.stopped = True

    async def _judge_append(self, journal: str) -> None:
        world, client = self.world, self._client
        assert client is not None
        deadline = world.loop.now + _HEAL_S
        error: BaseException | None = None
        while world.loop.now < deadline:
            append = self.new_append("op", journal, 40)
            try:
                async with asyncio.timeout(_CALL_S):
                    result = await append_once(client, AppendParams(journal), append.payload)
                self.answered(append, result)
                return
            except (GazetteError, TimeoutError) as caught:
                error = caught
                self.failed(append, error)
                if status_of(error) == _INDEX_GREATER and self.may_reset(journal):
                    try:
                        await self.reset_head(client, journal)
                    except (GazetteError, TimeoutError) as caught:
                        error = caught
            await self.clock.sleep(2.0)
        world.violated(f"{journal} takes no appends {_HEAL_S:g} s after the last fault: {error!r}")

    async def _judge_read(
        self, journal: str, host: str, fragments: SimFragments | None = None
    ) -> None:
        """Read everything through one broker. With ``fragments``, read stored fragments from their stores."""
        world = self.world
        client = world.client(self.node, host, fragments=fragments)
        head, offset = self.heads[journal], 0
        name = f"the last {'cold ' if fragments else ''}reader of {journal} at {host}"
        deadline = world.loop.now + _HEAL_S
        error: BaseException | None = None
        while offset < head and world.loop.now < deadline:
            params = ReadParams(journal, offset, block=True, end_offset=head)
            reader: Reader | RetryReader = Reader(client, params)
            if fragments is not None:
                reader = RetryReader(client, params, clock=self.clock)
            try:
                async with asyncio.timeout(_CALL_S):
                    while content := await reader.read():
                        self.got(name, journal, reader, content, world.loop.now, final=True)
                        offset = reader.offset
            except OffsetJump as jump:
                self.jumped(name, journal, reader, jump)
                offset = jump.offset
            except (GazetteError, TimeoutError) as caught:
                error = caught
                if isinstance(error, TimeoutError):
                    offset = self._behind_hole(journal, offset)
                await self.clock.sleep(2.0)
            finally:
                reader.close()
        if offset < head and not self.may_reset(journal):
            world.violated(f"{name} is stuck at {offset} of {head}: {error!r}")
        await client.close()

    def _behind_hole(self, journal: str, offset: int) -> int:
        """Return the offset behind bytes that a journal may lack: the last readers do not wait for these."""
        history = self.world.history
        life = history.last_life(journal)
        assert life is not None
        stored = [one for one in history.stored if one.bucket == life.bucket]
        spans = [
            (one.begin, one.begin + len(one.payload))
            for one in history.appends
            if one.journal == journal
            and one.begin is not None
            and life.has(one.revision)
            and not is_lost(history, one, stored)
        ]
        if any(begin <= offset < end for begin, end in spans) or not self.may_reset(journal):
            return offset  # These bytes are there, or on their way into the store.
        return min((begin for begin, _ in spans if begin > offset), default=offset)


def _revision(reader: Reader | RetryReader) -> int:
    """Return the revision of etcd at which a broker began a reader's answer; 0 before it has answered."""
    return 0 if reader.header is None else reader.header.etcd.revision


class Session:
    """An append session: appends of one append service to one journal, in order."""

    def __init__(self, scenario: Scenario, node: SimNode, journal: str, client: Client) -> None:
        self._scenario = scenario
        self._world = scenario.world
        self._node = node
        self._journal = journal
        self._client = client
        self._service = AppendService(client, pool=scenario.pool(node))
        self._world.sessions += 1
        self._number = self._world.sessions
        self.ahead = asyncio.Event()
        """Set once the session has made further appends after the late one."""
        self.free = asyncio.Event()
        """Set by the scenario to let the late append arrive."""

    async def append(self, append: Append) -> None:
        """Append through the service, which repeats attempts. Appends take place in the order of calls."""
        append.repeated, append.session = True, self._number
        result = await await_future(
            self._service.append(AppendParams(self._journal), append.payload)
        )
        append.batch = (result.commit.begin, result.commit.end)
        # Appends of one commit get one result: it does not say where this append is.
        if result.commit.length == len(append.payload):
            self._scenario.answered(append, result)
        else:
            append.shared = True
            append.ended = self._world.loop.now

    async def append_around(self, host: str) -> None:
        """Append through ``host``, to which the link is blocked; repeat and go on through other brokers."""
        network, name = self._world.network, self._node.name
        await self._append_new()
        self._client.forget_route(self._journal)
        network.block(name, host)
        for _ in range(2):
            await self._append_new()
        self.ahead.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PARTED_S):
                await self.free.wait()
        network.unblock(name, host)
        await self._append_new()

    async def _append_new(self) -> None:
        append = self._scenario.new_append(self._node.name, self._journal, 60)
        try:
            async with asyncio.timeout(_CALL_S):
                await self.append(append)
        except (GazetteError, TimeoutError) as error:
            self._scenario.failed(append, error)


class Writer:
    """A client that appends to one journal, in several ways."""

    def __init__(
        self, scenario: Scenario, node: SimNode, journal: str, rng: random.Random, client: Client
    ) -> None:
        self._scenario = scenario
        self._world = scenario.world
        self._name = node.name
        self._journal = journal
        self._rng = rng
        self._client = client
        self._clock = NodeClock(scenario.world.loop)
        self._think_s = 2.0 if scenario.is_busy else rng.choice((4.0, 8.0, 16.0))
        self._left = 30 if scenario.is_busy else rng.choice((6, 12, 18))
        self._sizes = rng.choice(((0, 30, 100), (30, 700, 5000), (100, 1000, 1000, 1000, 300_000)))
        self._uses_registers = rng.random() < 0.3
        self._bursts = random.Random(f"bursts of {self._name} {self._left} {self._think_s}")
        """Other random numbers, so that bursts do not change the other choices of a seed."""
        self._most_at_once = self._bursts.choice((1, 16, 24))
        self._sessions: list[Session] = []
        if rng.random() < 0.5:
            count = self._bursts.choice((1, 3, 6))
            self._sessions = [Session(scenario, node, journal, client) for _ in range(count)]

    async def run(self) -> None:
        async with TaskScope(f"writer {self._name}") as scope:
            while self._scenario.writing and self._left:
                self._left -= 1
                await self._clock.sleep(self._rng.expovariate(1 / self._think_s))
                for _ in range(self._bursts.randint(1, self._most_at_once)):
                    scope.spawn(self._append(), name="append")
                if self._rng.random() < 0.8:
                    await scope.wait()

    async def _append(self) -> None:
        rng, scenario = self._rng, self._scenario
        append = scenario.new_append(self._name, self._journal, rng.choice(self._sizes))
        kind = rng.random()
        try:
            async with asyncio.timeout(_CALL_S):
                if self._sessions:
                    await self._bursts.choice(self._sessions).append(append)
                elif kind < 0.1 and append.payload:
                    await self._go_away(append)
                elif self._uses_registers and append.payload:
                    await self._with_registers(append)
                else:
                    await self._plainly(append, kind)
        except (GazetteError, TimeoutError) as error:
            scenario.failed(append, error)
            if status_of(error) == _INDEX_GREATER and scenario.may_reset(self._journal):
                with suppress(GazetteError, TimeoutError):
                    await scenario.reset_head(self._client, self._journal)

    async def _go_away(self, append: Append) -> None:
        """Send a part of an append, and leave without its end: it must be refused."""
        append.refused = True
        async with Appender(self._client, AppendParams(self._journal)) as appender:
            await appender.write(append.payload[: self._rng.randrange(len(append.payload)) + 1])
            await self._clock.sleep(self._rng.choice((0.0, 0.01, 3.0)))

    async def _plainly(self, append: Append, kind: float) -> None:
        offset = 0
        if kind < 0.3 and (head := self._scenario.heads[self._journal]):
            append.offset = offset = head
        params = AppendParams(self._journal, offset=offset)
        slowly = kind > 0.9 and len(append.payload) > 1
        content: Any = self._slowly(append.payload) if slowly else append.payload
        self._scenario.answered(append, await append_once(self._client, params, content))

    async def _slowly(self, content: bytes) -> AsyncIterator[bytes]:
        middle = len(content) // 2
        yield content[:middle]
        await self._clock.sleep(self._rng.choice((0.01, 0.5, 2.0)))
        yield content[middle:]

    async def _with_registers(self, append: Append) -> None:
        """Append, and set the register to the append's number. Mostly require its last known value."""
        tags, journal = self._scenario.tags, self._journal
        before = tags[journal]
        check = None
        subtract = None
        if before is not None:
            subtract = LabelSet.of((_REGISTER, str(before)))
            if self._rng.random() < 0.7:
                check = LabelSelector.of((_REGISTER, str(before)))
                append.expected_tag = before
        append.tag = append.number
        params = AppendParams(
            journal,
            check_registers=check,
            subtract_registers=subtract,
            union_registers=LabelSet.of((_REGISTER, str(append.number))),
        )
        try:
            result = await append_once(self._client, params, append.payload)
        except (GazetteError, TimeoutError):
            tags[journal] = None
            with suppress(GazetteError, TimeoutError):
                probe = await append_once(self._client, AppendParams(journal), b"")
                values = probe.registers.values_of(_REGISTER)
                tags[journal] = int(values[0]) if values else None
            raise
        self._scenario.answered(append, result)
        tags[journal] = append.number
