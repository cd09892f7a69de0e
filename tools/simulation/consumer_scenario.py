"""The events of one seed of consumers: writers, members that fold their messages, and faults that overlap.

After the last fault, each shard's state must be the fold of its committed input. Then all members are killed,
and the same must hold for the states that are recovered. At the end, every input must have one output.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gazette.client.append.appender import AppendParams, AppendResult
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.journals import JournalChange, apply_journals
from gazette.client.rpc.channel import Channels
from gazette.client.shards import ShardClient
from gazette.cluster.etcd.client import Compare, Etcd, EtcdSettings, Op
from gazette.errors import GazetteError
from gazette.labels import CONTENT_JSON_LINES, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.message.mapping import fixed_mapping
from gazette.message.publisher import Publisher
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import FragmentSpec, JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.protocol.text import duration
from gazette.runtime.tasks import TaskScope, await_future
from gazette.testing.simulation.cluster import ETCD, ETCD_ADDRESS
from gazette.testing.simulation.loop import NodeClock, SimNode
from gazette.testing.simulation.members import Trap
from gazette.testing.simulation.network import SimTransport
from gazette.testing.simulation.storage import Threads
from tools.simulation.cold_reads import COLD_SHARE, decode_in_steps
from tools.simulation.consumer_app import KEYS, Input, Output
from tools.simulation.consumer_pruning import Archive, Pruner
from tools.simulation.consumer_queries import Asked, QueryClient
from tools.simulation.consumer_world import CONSUMERS, ConsumerWorld, MemberProcess
from tools.simulation.history import Fault
from tools.simulation.other_version import OtherVersion
from tools.simulation.world import BrokerProcess

M = TypeVar("M")

LEASE_S: Final = 20.0
PLAIN: Final = 3
"""Seeds with this remainder modulo eight have neither queries, SQLite nor pruning."""
LOGS: Final = "recovery"
HINTS: Final = "/gazette/hints/fold"
_HEAL_S: Final = 420.0
"""Seconds after the last fault, within which every shard must have read all of its input."""
_CALL_S: Final = 45.0
_STORED_S: Final = 70.0
"""Seconds after which appended bytes are stored, or brokers know that fragments were removed."""
_FAILED_S: Final = 120.0
"""Seconds after a source was created again, within which its shards must have failed."""
_WRITTEN_AFTER: Final = 1
"""Greatest number of writes of each writer after the last fault: shards must still read these."""
_ANSWER_S: Final = 120.0
"""Seconds after the last fault, within which every member must answer every query."""
TRAPS: Final = (
    "transaction.begun",
    "transaction.consumed",
    "commit.finalized",
    "commit.recording",
    "commit.started",
    "commit.enqueued",
    "append.begin",
    "append.sent",
    "append.applied",
    "ack.appended",
    "transaction.acknowledged",
    "recovery.playing",
    "recovery.fencing",
    "recovery.handed_off",
    "recovery.live",
    "promotion.fencing",
    "promotion.opened",
    "promotion.hinted",
    "hints.storing",
)
"""Failpoints at which processes are killed or held."""
TIMER_TRAPS: Final = ("timers.fired", "timers.fired", "timers.fired")
"""Further failpoints, of applications with timers; repeated, so that they are chosen more often."""


@dataclass(slots=True)
class Plan:
    """The choices of a seed."""

    brokers: list[str]
    members: list[str]
    shards: list[ShardSpec]
    journals: list[JournalSpec]
    until: float = 0.0
    """When the last fault is over."""


class ConsumerScenario:
    """One run. ``run`` returns when it is over; violations are in the history of ``world``."""

    def __init__(
        self,
        seed: int,
        *,
        trace: bool = False,
        timers: bool = False,
        other: OtherVersion | None = None,
    ) -> None:
        self.world = world = ConsumerWorld(seed, trace=trace, other=other)
        world.timers = timers
        self.rng = random.Random(world.rng.getrandbits(64))
        self.more_rng = random.Random(seed * 1_000_003 + 17)
        """A source apart, for features that not every seed has."""
        self.asks = seed % 8 != PLAIN
        """True if there are queries, and perhaps SQLite stores and pruning."""
        self.prunes = False
        self.pruned_before = ""
        """A source that is pruned before members start."""
        self.recreates = ""
        """A source that is deleted and created again at the end."""
        self.plan = self._plan()
        if self.asks:
            self._plan_more()
        world.broker_hosts = self.plan.brokers
        cold = random.Random(f"cold reads of {seed}")
        world.has_cold_readers = cold.random() < COLD_SHARE
        world.loop.sees_done = world.has_cold_readers and cold.random() < 0.5
        decode_in_steps(cold if world.has_cold_readers else None)
        self.node = SimNode(world.loop, "op")
        self.clock = NodeClock(world.loop)
        self.done = False
        self.healed = False
        """True once the last fault is over: messages written later meet no fault."""
        self.numbers = 0
        """How many messages were published."""
        self.committed = 0
        """The number of these messages that have committed by the end."""
        self._writers: list[asyncio.Task[None]] = []
        self._askers: list[QueryClient] = []
        self.settled: dict[str, list[int]] = {}
        """By source: offsets such that all transactions with messages before them have ended."""
        self._archives = {
            source.journal: Archive(Input) for spec in self.plan.shards for source in spec.sources
        }
        self._broker_free_at = 0.0
        """Time from which on another broker may fail. Earlier, two failures could lose acknowledged bytes."""
        self._client: Client | None = None
        world.on_exited = self._on_broker_exited
        world.on_member_exited = self._on_member_exited

    # Choosing.

    def _plan(self) -> Plan:
        rng, world = self.rng, self.world
        world.network.delay_s = rng.choice((0.0003, 0.001, 0.005))
        world.settings = {"lease_ttl_s": LEASE_S, "watch_delay_s": rng.choice((0.0, 0.03))}
        world.stalls = rng.choice(((0.0, 0.0), (0.01, 1.0), (0.03, 30.0)))
        world.consumer_options = {
            "lease_ttl_s": LEASE_S,
            "watch_delay_s": rng.choice((0.0, 0.03)),
            "hints_interval_s": rng.choice((1.0, 5.0, 60.0)),
            "max_restarts": 0,  # As by default: no fault may fail a shard.
            "graceful_stop_s": 2.0,
            "query_timeout_s": 60.0,
        }
        brokers = [f"broker-{number}" for number in range(rng.choice((1, 3, 3)))]
        members = [f"member-{number}" for number in range(rng.choice((1, 2, 2, 3)))]
        replication = 1 if len(brokers) == 1 else rng.choice((2, 3))
        shards, journals = [], []
        world.outputs = [f"out/{number}" for number in range(rng.choice((1, 2, 3)))]
        for name in world.outputs:
            journals.append(self._journal(name, replication, CONTENT_JSON_LINES))
        for number in range(rng.choice((1, 1, 2))):
            sources = [f"in/{number}/{part}" for part in range(rng.choice((1, 1, 2)))]
            for name in sources:
                journals.append(self._journal(name, replication, CONTENT_JSON_LINES))
            id = f"shard-{number}"
            recorded = rng.random() < 0.7
            if recorded:
                log = self._journal(f"{LOGS}/{id}", replication, CONTENT_RECOVERY_LOG)
                journals.append(log)
            shards.append(
                ShardSpec(
                    id,
                    sources=tuple(ShardSource(name) for name in sources),
                    recovery_log_prefix=LOGS if recorded else "",
                    hint_prefix=HINTS if recorded else "",
                    hint_backups=rng.choice((0, 1, 2)) if recorded else 0,
                    min_txn_duration_ns=int(rng.choice((0.0, 0.0, 0.5)) * duration.SECOND),
                    max_txn_duration_ns=int(rng.choice((0.1, 1.0)) * duration.SECOND),
                    hot_standbys=rng.choice((0, 1, 1, 2)),
                    disable_wait_for_ack=rng.random() < 0.3,
                    ring_buffer_size=rng.choice((2, 8, 0)),
                )
            )
        return Plan(brokers, members, shards, journals)

    def _plan_more(self) -> None:
        rng, world = self.more_rng, self.world
        world.consumer_options["query_timeout_s"] = rng.choice((5.0, 20.0, 60.0))
        world.slow_queries = rng.choice((0.0, 0.02, 0.2))
        if rng.random() < 0.7:
            world.redo = {
                "checkpoint_frames": rng.choice((4, 20, 100)),
                "group_pages": rng.choice((2, 8)),
                "horizon_slack": rng.choice((1 << 10, 8 << 10, 64 << 10)),
            }
        self.prunes = rng.random() < 0.5
        if rng.random() < 0.15:
            self.pruned_before = rng.choice(rng.choice(self.plan.shards).sources).journal
        if rng.random() < 0.25:
            self.recreates = rng.choice(rng.choice(self.plan.shards).sources).journal
            world.consumer_options["max_restarts"] = 100
        world.sqlite = {
            spec.id for spec in self.plan.shards if spec.recovery_log and rng.random() < 0.6
        }

    def _journal(self, name: str, replication: int, content_type: str) -> JournalSpec:
        rng = self.rng
        return JournalSpec(
            name,
            replication=replication,
            labels=LabelSet.of((CONTENT_TYPE, content_type)),
            fragment=FragmentSpec(
                length=rng.choice((1 << 10, 1 << 12, 1 << 20)),
                codec=Codec.NONE,
                stores=(f"s3://{_bucket(name)}/",),
                refresh_interval_ns=rng.choice((5, 30)) * duration.SECOND,
                flush_interval_ns=rng.choice((0, 60)) * duration.SECOND,
            ),
        )

    # Running.

    def run(self) -> None:
        world = self.world
        main = self.node.spawn(self._main(), "scenario")
        main.add_done_callback(lambda _: world.loop.stop())
        ended = world.run(until=36_000.0)
        if not main.done():
            world.violated("nothing is left to wait for" if not ended else "the run does not end")
        elif main.cancelled():
            world.violated("the scenario was cancelled")
        elif (error := main.exception()) is not None:
            world.failed(error)

    async def _main(self) -> None:
        world, plan = self.world, self.plan
        in_sqlite = ", ".join(sorted(world.sqlite)) or "none"
        queries = "with" if self.asks else "without"
        world.say("op", f"plans state in SQLite: {in_sqlite}; {queries} queries")
        for host in plan.brokers:
            world.start_broker(host)
        self._client = client = world.client(self.node, *plan.brokers)
        await self._create_journals(client)
        async with await Etcd.connect(
            EtcdSettings(endpoints=(f"http://{ETCD_ADDRESS}",)),
            self.clock,
            transport=SimTransport(world.network, self.node),
        ) as etcd:
            for spec in plan.shards:
                key = f"{CONSUMERS}/items/{spec.id}"
                value = spec.to_pb().SerializeToString()
                await etcd.txn((Compare.version(key, "=", 0),), (Op.put(key, value),))
        if self.pruned_before:
            await self._prune_before(client, self.pruned_before)
        for host in plan.members:
            world.start_member(host)
        for spec in plan.shards:
            for source in spec.sources:
                if source.journal != self.pruned_before:
                    self._spawn_writer(source.journal)
        asking = self._start_queries() if self.asks else []
        pruning = self._start_pruning(client) if self.prunes else None
        async with TaskScope("scenario") as scope:
            await self._break(scope)
            await self._heal()
            self.healed = True
            scope.cancel()
        while any(not writer.done() for writer in self._writers):
            await self.clock.sleep(1.0)
        if pruning is not None:
            pruning.cancel()
        await self._judge(client)
        self.done = True
        for task in asking:
            task.cancel()
        world.loop.stop()

    async def _create_journals(self, client: Client) -> None:
        await self._apply(client, [JournalChange(upsert=spec) for spec in self.plan.journals])

    async def _apply(self, client: Client, changes: list[JournalChange]) -> int:
        """Apply changes, and return the revision of etcd that has them."""
        while True:
            try:
                async with asyncio.timeout(_CALL_S):
                    header = await apply_journals(client, changes)
                return header.etcd.revision
            except (GazetteError, TimeoutError):
                await self.clock.sleep(1.0)

    def _spawn_writer(self, journal: str) -> None:
        node = SimNode(self.world.loop, f"writer of {journal}")
        writer = Writer(self, node, journal, random.Random(self.rng.getrandbits(64)))
        self._writers.append(node.spawn(writer.run(), f"write {journal}"))

    def _start_queries(self) -> list[asyncio.Task[None]]:
        rng = self.more_rng
        tasks = []
        for number in range(rng.choice((1, 2))):
            node = SimNode(self.world.loop, f"asker {number}")
            client = self._query_client(node)
            self._askers.append(client)
            tasks.append(node.spawn(client.run(), "queries"))
        return tasks

    def _query_client(self, node: SimNode) -> QueryClient:
        world = self.world
        return QueryClient(
            node,
            SimTransport(world.network, node),
            self.plan.members,
            {spec.id: [source.journal for source in spec.sources] for spec in self.plan.shards},
            world.notes,
            random.Random(self.more_rng.getrandbits(64)),
        )

    # Pruning.

    def _start_pruning(self, client: Client) -> asyncio.Task[None]:
        node = SimNode(self.world.loop, "pruner")
        pruner = Pruner(
            client,
            self._shard_client(node),
            self.clock,
            random.Random(self.more_rng.getrandbits(64)),
            self.plan.shards,
            lambda journal: self.world.bucket(_bucket(journal)),
            lambda journal: self.settled.get(journal, []),
            self._archives,
            self.world.say,
        )
        return node.spawn(pruner.run(), "prune")

    def _shard_client(self, node: SimNode) -> ShardClient:
        transport = SimTransport(self.world.network, node)
        channels = Channels("", clock=self.clock, transport=transport)
        address = ",".join(f"http://{host}:8080" for host in self.plan.members)
        return ShardClient(address, channels=channels, clock=self.clock)

    async def _prune_before(self, client: Client, journal: str) -> None:
        """Write a source, and prune most of its fragments. No shard has read it: members start later."""
        world, archive = self.world, self._archives[journal]
        self._spawn_writer(journal)
        await asyncio.wait(self._writers)
        await self.clock.sleep(_STORED_S)
        await self._head(client, journal)  # An append rolls spools that are due.
        await self.clock.sleep(_STORED_S)
        objects = world.bucket(_bucket(journal)).objects
        begins = {
            path: int(name.split("-")[0], 16) for path in objects if (name := _fragment(path))
        }
        # The last fragment stays: at a hole with nothing behind it, a reader would wait.
        archive.skipped = max(begins.values(), default=0)
        for path, begin in begins.items():
            if begin < archive.skipped:
                del objects[path]
        world.say("op", f"prunes {journal} up to {archive.skipped}")
        world.notes.pruned(journal, archive.skipped)
        await self.clock.sleep(_STORED_S)

    async def _recreate(self, client: Client, journal: str) -> None:
        """Delete a source with its fragments, and create it again: its shards must fail with that reason.

        The new journal may be longer than the former one was. Then a shard could take bytes of the new
        journal for those that follow its checkpoint.
        """
        world = self.world
        head = (await client.append(AppendParams(journal))).commit.end
        specs = [one for one in self.plan.journals if one.name == journal]
        world.say("op", f"deletes {journal}")
        await self._apply(client, [JournalChange(delete=journal, expect_mod_revision=-1)])
        await self.clock.sleep(self.more_rng.choice((0.1, 5.0, 60.0)))
        objects = world.bucket(_bucket(journal)).objects
        for path in [path for path in objects if _fragment(path)]:
            del objects[path]
        world.say("op", f"creates {journal} again")
        revision = await self._apply(client, [JournalChange(upsert=one) for one in specs])
        if self.more_rng.random() < 0.5:
            # A broker that has not applied the change may know of the deletion, but not of the new journal.
            params = AppendParams(journal, min_etcd_revision=revision)
            await client.append(params, b"x" * head + b"\n")
        for spec in self.plan.shards:
            if any(source.journal == journal for source in spec.sources):
                await self._judge_recreated(spec, journal)

    async def _judge_recreated(self, spec: ShardSpec, journal: str) -> None:
        """Require that a shard whose source was created again fails with the reason, and reads no further."""
        world = self.world
        deadline = world.loop.now + _FAILED_S
        while world.loop.now < deadline:
            for process in world.members.values():
                shard: Any = process.shards.get(spec.id)
                failure = None if shard is None else shard.failure
                if "created_before" in getattr(failure, "facts", ()):
                    return
            await self.clock.sleep(0.1)
        world.violated(
            f"{spec.id} does not say that {journal} was created again: {self._states(spec.id)}"
        )

    # Faults.

    async def _break(self, scope: TaskScope) -> None:
        """Begin faults at random times. Some may still go on at the return: `_heal` waits for them."""
        rng = self.rng
        await self.clock.sleep(rng.uniform(1.0, 20.0))
        faults = [
            *[self._crash, self._pause, self._terminate, self._trap, self._trap] * 2,
            *[self._late_appends, self._late_appends],
            self._partition_etcd,
            self._partition_broker,
            self._slow_link,
            self._cut_connections,
            self._lagging_watch,
            self._crash_broker,
            self._pause_broker,
        ]
        if self.asks:
            faults += [self._partition_members, self._late_promotion]
        for _ in range(rng.choice((1, 2, 3))):
            for _ in range(rng.choice((1, 2, 4))):
                scope.spawn(
                    self._delayed(rng.expovariate(1 / 8.0), rng.choice(faults)), name="fault"
                )
            await self.clock.sleep(rng.choice((5.0, 30.0, 60.0)) * rng.uniform(0.8, 1.2))

    async def _delayed(self, seconds: float, fault: Callable[[], Any]) -> None:
        await self.clock.sleep(seconds)
        await fault()

    def _fault(self, what: str, seconds: float, *hosts: str, lease: bool = False) -> None:
        """Note a fault. ``lease``: the processes of these hosts may lose their leases by it."""
        world = self.world
        now = world.loop.now
        world.say("fault", what, f"for {seconds:.1f} s", *hosts)
        world.history.faults.append(Fault(now, now + seconds, what))
        self.plan.until = max(self.plan.until, now + seconds)
        if lease:
            for host in hosts:
                until = now + seconds + LEASE_S + 10.0
                world.excused_until[host] = max(world.excused_until.get(host, 0.0), until)

    def _member(self) -> str:
        return self.rng.choice(self.plan.members)

    async def _crash(self) -> None:
        self._kill(self._member())

    def _kill(self, host: str, restart_s: float | None = None) -> None:
        if not self.world.members[host].ended and not self.done:
            self._fault("crash", 1.0, host)
            self.world.crash_member(host, silent=self.rng.random() < 0.3)
            self._restart_later(host, restart_s)

    def _restart_later(self, host: str, seconds: float | None = None) -> None:
        rng, world = self.rng, self.world
        mean = rng.choice((0.2, 2.0, 10.0, 40.0)) if seconds is None else seconds
        delay = mean * rng.uniform(0.5, 1.5)
        id = f"{host}-{len(world.all_members)}" if rng.random() < 0.5 else None

        def restart() -> None:
            if world.members[host].ended and not self.done:
                world.start_member(host, id)

        self.plan.until = max(self.plan.until, world.loop.now + delay)
        world.loop.at(world.loop.now + delay, restart)

    def _on_member_exited(self, process: MemberProcess) -> None:
        if not self.done:
            self._restart_later(process.host)

    async def _trap(self) -> None:
        """Kill or hold a process at one of its failpoints."""
        rng, world = self.rng, self.world
        point = rng.choice((*TRAPS, *TIMER_TRAPS) if self.world.timers else TRAPS)
        kind = rng.choice(("kill", "kill", "kill soon", "pause"))
        seconds = rng.choice((0.01, 0.5, 5.0, 40.0)) * rng.random()

        def spring(process: MemberProcess) -> None:
            host = process.host
            if kind == "kill":
                self._kill(host)
            elif kind == "kill soon":
                self._fault("crash soon", seconds, host)
                world.loop.at(world.loop.now + seconds, self._kill, host)
            else:
                self._hold(host, seconds)

        passes = rng.choice((1, 1, 2, 5))
        world.traps += [Trap(host, point, passes, spring) for host in self.plan.members]

    async def _late_appends(self) -> None:
        """Delay the appends of members to a journal for some time, and kill members meanwhile."""
        rng, world = self.rng, self.world
        logs = [spec.recovery_log for spec in self.plan.shards if spec.recovery_log]
        journal = rng.choice([*world.outputs, *logs])
        # The next owner takes over when the lease has ended. Appends are late for longer than that.
        seconds, late_s = rng.uniform(20.0, 90.0), rng.choice((0.5, 5.0, 30.0))
        self._fault(f"appends to {journal} are late by {late_s} s", seconds)
        world.late[journal] = (world.loop.now + seconds, late_s)
        kills = rng.choice((0, 1, 2, 4))
        if logs and rng.random() < 0.5:
            # Kill a member once the log has a commit whose acknowledgements are late. Then kill the member
            # that recovers the shard.
            for host in self.plan.members:
                for _ in range(kills):
                    passes = rng.choice((1, 2, 3, 5))
                    trap = Trap(host, "append.applied", passes, self._kill_again, rng.choice(logs))
                    world.traps.append(trap)
            return
        for _ in range(kills):
            await self.clock.sleep(seconds / 3 * rng.random())
            self._kill(self._member(), restart_s=rng.choice((0.1, 1.0)))

    def _kill_again(self, process: MemberProcess) -> None:
        self._kill(process.host, restart_s=0.1)

    async def _terminate(self) -> None:
        host = self._member()
        hurried = self.rng.random() < 0.5
        self._fault("terminate" + (" hurriedly" if hurried else ""), 10.0, host)
        self.world.members[host].terminate(hurried=hurried)

    async def _pause(self) -> None:
        seconds = self.rng.choice((0.5, 5.0, 25.0, 60.0))
        self._hold(self._member(), seconds * self.rng.uniform(0.7, 1.3))

    def _hold(self, host: str, seconds: float) -> None:
        if self.world.members[host].ended:
            return
        self._fault("pause", seconds, host, lease=seconds > 5.0)
        process = self.world.members[host]
        now = self.world.loop.now
        process.queries.holds.append((now, now + seconds))
        process.node.hold(seconds)
        self.world.network.held(process.node)

    async def _part(self, one: str, other: str, *, lease: bool) -> None:
        rng, network = self.rng, self.world.network
        seconds = rng.choice((2.0, 15.0, 30.0, 60.0)) * rng.uniform(0.7, 1.3)
        links = [(one, other), (other, one)]
        if rng.random() < 0.3:
            links = [rng.choice(links)]
        self._fault(f"partition {links}", seconds, one, lease=lease and seconds > 3.0)
        for link in links:
            network.block(*link)
        await self.clock.sleep(seconds)
        for link in links:
            network.unblock(*link)

    async def _partition_etcd(self) -> None:
        await self._part(self._member(), ETCD, lease=True)

    async def _partition_broker(self) -> None:
        await self._part(self._member(), self.rng.choice(self.plan.brokers), lease=False)

    async def _partition_members(self) -> None:
        """Cut two members off from each other: they pass queries on to each other."""
        one, other = self._member(), self._member()
        if one != other:
            await self._part(one, other, lease=False)

    async def _late_promotion(self) -> None:
        """Move a shard, and move it again while the thread of its new owner is slow to restore it."""
        rng, world = self.rng, self.world
        spec = rng.choice(self.plan.shards)

        def spring(process: MemberProcess) -> float:
            seconds = rng.choice((0.5, 5.0, 20.0)) * rng.uniform(0.5, 1.5)
            self._fault(f"slow restore of {spec.id}", seconds, process.host)
            at = world.loop.now + seconds * rng.random()
            world.loop.at(at, lambda: self.node.spawn(self._unassign(spec.id), "unassign"))
            return seconds

        passes = rng.choice((1, 1, 2))
        world.traps += [
            Trap(host, "promotion.fencing", passes, spring, spec.id) for host in self.plan.members
        ]
        await self._unassign(spec.id)

    async def _unassign(self, shard_id: str) -> None:
        """Have the allocator choose another member for a shard, or the same one again."""
        client = self._shard_client(self.node)
        self.world.say("op", f"unassigns {shard_id}")
        try:
            async with asyncio.timeout(_CALL_S):
                await client.unassign([shard_id])
        except (GazetteError, TimeoutError) as error:
            self.world.say("op", f"cannot: {type(error).__name__}", error)

    async def _slow_link(self) -> None:
        rng, network = self.rng, self.world.network
        one, other = self._member(), rng.choice([ETCD, *self.plan.brokers])
        seconds, delay = rng.uniform(5.0, 60.0), rng.choice((0.05, 0.5, 3.0, 8.0))
        self._fault(f"slow link by {delay} s", seconds, one, lease=other == ETCD and delay > 1.0)
        for link in ((one, other), (other, one)):
            if rng.random() < 0.7:
                network.slow(*link, delay)
        await self.clock.sleep(seconds)
        network.slow(one, other, 0.0)
        network.slow(other, one, 0.0)

    async def _cut_connections(self) -> None:
        world = self.world
        host = self.rng.choice([ETCD, *self.plan.brokers, *self.plan.members])
        self._fault("cut connections", 0.0, host)
        node = world.etcd_node
        if host in world.brokers:
            node = world.brokers[host].node
        elif host in world.members:
            node = world.members[host].node
        world.network.break_connections(node, self.rng.choice((0.3, 1.0)))

    async def _lagging_watch(self) -> None:
        host, seconds = self._member(), self.rng.uniform(1.0, 40.0)
        self._fault("lagging watch", seconds, host)
        held = [one for one in self.world.etcd.streams if one.peer == f"sim:{host}"]
        for stream in held:
            stream.hold()
        await self.clock.sleep(seconds)
        for stream in held:
            stream.release()

    def _broker(self) -> str | None:
        """Return a broker that may fail without loss, if there is one."""
        now = self.world.loop.now
        if len(self.plan.brokers) == 1 or now < self._broker_free_at:
            return None
        self._broker_free_at = now + 240.0
        return self.rng.choice(self.plan.brokers)

    async def _crash_broker(self) -> None:
        host = self._broker()
        if host is not None and not self.world.brokers[host].ended:
            self._fault("crash", LEASE_S + 5.0, host)
            self.world.crash(host, silent=self.rng.random() < 0.3)
            self._restart_broker_later(host)

    async def _pause_broker(self) -> None:
        host, seconds = self._broker(), self.rng.uniform(0.5, 15.0)
        if host is not None:
            self._fault("pause", seconds, host, lease=True)
            node = self.world.brokers[host].node
            node.hold(seconds)
            self.world.network.held(node)

    def _restart_broker_later(self, host: str) -> None:
        world = self.world

        def restart() -> None:
            if world.brokers[host].ended and not self.done:
                world.start_broker(host)

        world.loop.at(world.loop.now + self.rng.uniform(1.0, 40.0), restart)

    def _on_broker_exited(self, process: BrokerProcess) -> None:
        if not self.done:
            self._restart_broker_later(process.host)

    async def _heal(self) -> None:
        """Wait until faults are over, and every process runs."""
        world = self.world
        while True:
            processes: list[BrokerProcess | MemberProcess]
            processes = [*world.brokers.values(), *world.members.values()]
            down = any(process.ended or process.stopping for process in processes)
            if self.plan.until < world.loop.now and not down:
                break
            await self.clock.sleep(5.0)
        world.traps.clear()
        world.say("fault", "all are over")

    # The end.

    async def _judge(self, client: Client) -> None:
        """Require that every shard reads all its input, also after all members were killed."""
        expected: dict[str, list[int]] = {}
        for spec in self.plan.shards:
            committed = []
            for source in spec.sources:
                committed += await self._committed(client, source.journal, Input)
            expected[spec.id] = [message.number for message in committed]
            self.committed += len(committed)
        for again in (False, True):
            if again:
                for host in self.plan.members:
                    self.world.crash_member(host)
                    self.world.start_member(host)
            for spec in self.plan.shards:
                await self._judge_shard(spec, expected[spec.id], "again " if again else "")
            if self.asks:
                await self._judge_queries(client)
        self.world.look_at_failures()
        inputs = [number for numbers in expected.values() for number in numbers]
        deadline = self.world.loop.now + _ANSWER_S
        while True:
            outputs: list[int] = []
            for journal in self.world.outputs:
                outputs += [one.number for one in await self._committed(client, journal, Output)]
            # A recovered shard serves its state before the acknowledgements that it owes are appended.
            if len(outputs) >= len(inputs) or self.world.loop.now > deadline:
                break
            await self.clock.sleep(1.0)
        self._compare("outputs", inputs, outputs)
        # Without a committed message, checkpoints do not name the source: shards may read the new journal.
        if self.recreates and self._archives[self.recreates].messages:
            await self._recreate(client, self.recreates)

    def _compare(self, what: str, expected: list[int], found: list[int]) -> None:
        want, have = Counter(expected), Counter(found)
        if missing := sorted((want - have).elements()):
            self.world.violated(f"{what}: {missing} of {len(expected)} inputs are missing")
        if extra := sorted((have - want).elements()):
            self.world.violated(f"{what}: {extra} are there too often, or were not committed")

    async def _judge_shard(self, spec: ShardSpec, expected: list[int], again: str) -> None:
        world = self.world
        deadline = world.loop.now + _HEAL_S
        store: Any = None
        while world.loop.now < deadline:
            store = self._caught_up(spec.id)
            if store is not None and len(store.folded().numbers) >= len(expected):
                break
            await self.clock.sleep(1.0)
        if store is None:
            world.violated(f"{spec.id} is stuck {again}: {self._states(spec.id)}")
            return
        state = store.folded()
        self._compare(f"{again}state of {spec.id}", expected, state.numbers)
        counts = Counter(str(number % KEYS) for number in state.numbers)
        if dict(counts) != state.counts:
            world.violated(f"{again}state of {spec.id} is torn: {state.counts} of {dict(counts)}")

    async def _judge_queries(self, client: Client) -> None:
        """Require that every member answers for each shard, from a state that has read all its input."""
        for spec in self.plan.shards:
            heads = {
                source.journal: await self._head(client, source.journal) for source in spec.sources
            }
            for host in self.plan.members:
                asked = Asked(spec.id, read_through={k: v for k, v in heads.items() if v})
                deadline = self.world.loop.now + _ANSWER_S
                while not await self._askers[0].ask(host, asked, _CALL_S):
                    if self.world.loop.now > deadline:
                        self.world.violated(
                            f"{host} does not answer for {spec.id}, read through {heads}"
                        )
                        break
                    await self.clock.sleep(1.0)

    def _caught_up(self, shard_id: str) -> Any:
        """Return the store of the shard's primary, if it serves."""
        for process in self.world.members.values():
            shard: Any = process.shards.get(shard_id)
            if shard is None or shard.failure is not None or shard.ended.is_set():
                continue
            if shard.is_primary and shard.store_ready.is_set():
                return shard.store
        return None

    def _states(self, shard_id: str) -> list[str]:
        states = []
        for process in self.world.members.values():
            shard: Any = process.shards.get(shard_id)
            if shard is not None:
                role = "primary" if shard.is_primary else "standby"
                states.append(f"{role} at {process.name}, failure {shard.failure!r}")
        return states

    async def _committed(self, client: Client, journal: str, message_type: type[M]) -> list[M]:
        """Return the committed messages of the whole journal, in order."""
        head = await self._head(client, journal)
        archive = self._archives.get(journal) or Archive(message_type)
        async with asyncio.timeout(_HEAL_S):
            while True:
                try:
                    await archive.read_to(client, journal, head)
                    return archive.messages
                except GazetteError:
                    await self.clock.sleep(1.0)

    async def _head(self, client: Client, journal: str) -> int:
        async with asyncio.timeout(_HEAL_S):
            while True:
                try:
                    result = await client.append(AppendParams(journal), b"")
                    return int(result.commit.end)
                except GazetteError:
                    await self.clock.sleep(1.0)


def _bucket(journal: str) -> str:
    return journal.replace("/", "-")


def _fragment(path: str) -> str:
    """Return the name of a fragment; empty for other objects."""
    return "" if path.startswith(".test/") else path.rpartition("/")[2]


class Writer:
    """Publishes to one journal: single messages, transactions, and transactions that never end."""

    def __init__(
        self, scenario: ConsumerScenario, node: SimNode, journal: str, rng: random.Random
    ) -> None:
        self._scenario = scenario
        self._rng = rng
        self._clock = NodeClock(scenario.world.loop)
        self._client = scenario.world.client(node, *scenario.plan.brokers)
        threads = Threads(node, random.Random(rng.getrandbits(64)))
        self._appends = AppendService(self._client, pool=threads.pool("spill", 1))
        self._journal = journal
        self._map = fixed_mapping(journal, CONTENT_JSON_LINES)
        self._publishers = [self._new_publisher() for _ in range(rng.choice((1, 2)))]
        self._left = rng.choice((5, 15, 30))
        self._think_s = rng.choice((0.3, 3.0))

    def _new_publisher(self) -> Publisher:
        return Publisher.standalone(self._appends, self._clock, self._rng)

    def _message(self) -> Input:
        self._scenario.numbers += 1
        return Input(number=self._scenario.numbers)

    async def run(self) -> None:
        rng = self._rng
        while self._left:
            self._left -= 1
            if self._scenario.healed:
                self._left = min(self._left, _WRITTEN_AFTER)
            if ends := self._scenario.world.notes.written_ends(self._journal):
                self._scenario.settled.setdefault(self._journal, []).append(max(ends))
            await self._clock.sleep(rng.expovariate(1 / self._think_s))
            index = rng.randrange(len(self._publishers))
            kind = rng.random()
            if kind < 0.5:
                message = self._message()
                published = self._publishers[index].publish_committed(self._map, message)
                self._note(await await_future(published), [message])
            else:
                await self._transaction(index, finished=kind < 0.9)
        await self._appends.flush()

    async def _transaction(self, index: int, *, finished: bool) -> None:
        rng, publisher = self._rng, self._publishers[index]
        messages = []
        for _ in range(rng.choice((1, 3, 12))):
            messages.append(self._message())
            publisher.publish_uncommitted(self._map, messages[-1])
            if rng.random() < 0.3:
                publisher.flush()
                await self._clock.sleep(rng.expovariate(1 / self._think_s))
        if not finished:
            publisher.flush()
            self._publishers[index] = self._new_publisher()
            return
        for journal, intent in publisher.build_ack_intents().items():
            appended = self._appends.append(AppendParams(journal), intent)
            self._note(await await_future(appended), messages)

    def _note(self, result: AppendResult, messages: list[Input]) -> None:
        """Note that these messages have committed, and at which offset at the latest."""
        numbers = [message.number for message in messages]
        self._scenario.world.notes.written(self._journal, result.commit.end, numbers)
