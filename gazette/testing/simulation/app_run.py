"""One seed of an application: brokers, members of the application, publishers, and the story's faults.

After the last fault, a judge compares the state of each shard with a fold of the shard's input.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange, apply_journals
from gazette.client.read.reader import ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.cluster.etcd.client import Compare, Etcd, EtcdSettings, Op
from gazette.consumer.shard.shard import Shard
from gazette.consumer.transaction.shard_timers import ShardTimers
from gazette.errors import Aborted, Closed, Fenced, GazetteError, NotYet, Unavailable
from gazette.protocol.shard import ShardSpec
from gazette.protocol.text import duration
from gazette.runtime.tasks import TaskScope
from gazette.runtime.user_code import place_of_error
from gazette.testing.simulation.app_faults import CALL_S, LEASE_S, AppFaults
from gazette.testing.simulation.app_members import AppCluster
from gazette.testing.simulation.cluster import ETCD_ADDRESS
from gazette.testing.simulation.fold import OutputForm, noted_forms
from gazette.testing.simulation.loop import NodeClock, SimNode, current_node
from gazette.testing.simulation.network import SimTransport
from gazette.testing.simulation.queries import QueryClients, SeenRows
from gazette.testing.simulation.setup import Setup
from gazette.testing.simulation.shard_history import Promotion, ShardHistory, wrapped
from gazette.testing.simulation.states import Query, Rows, state_of
from gazette.testing.simulation.story import Story
from gazette.testing.simulation.story_publisher import StoryPublisher
from gazette.testing.simulation.travel import Logs, travels
from gazette.testing.simulation.user_code import UserSurroundings

BROKER: Final = "broker"
_CLIENTS: Final = 2
"""Clients that ask shards for their states."""
_QUIET_S: Final = 300.0
"""Seconds after the last fault, within which every shard must have read all of its input."""
_SETTLED_S: Final = 3.0
_TIMERS_S: Final = 15.0
"""Seconds from the last fault until the clock of timers stands still, and from then until all must rest."""
TIMERS: Final = "a timer fires"
"""Part of the coverage of a run in which a timer has fired."""
_HARMLESS: Final = (Closed, Fenced, Unavailable, Aborted, NotYet)
"""Errors by which the runtime ends a shard, when it is to be served elsewhere or later."""


@dataclass(slots=True)
class Finding:
    """A violation that a run or its judge has noticed."""

    what: str
    place: str = ""
    """The user's own frame, such as ``app.py:17 in consume_message``."""
    details: str = ""
    hint: str = ""


@dataclass(slots=True)
class Ended:
    """The end of a run: states, content of journals, and findings. A judge compares it with a fold."""

    findings: list[Finding] = field(default_factory=list)
    promotions: dict[str, Promotion] = field(default_factory=dict)
    """By shard, its last owner."""
    states: dict[str, Rows | None] = field(default_factory=dict)
    states_before: dict[str, Rows | None] = field(default_factory=dict)
    """The states before all members were restarted."""
    content: dict[str, bytes] = field(default_factory=dict)
    """Content of each journal that is no recovery log, by its name."""
    forms: dict[str, OutputForm] = field(default_factory=dict)
    answers: list[SeenRows] = field(default_factory=list)
    """The answers to queries, in the order in which they came."""
    logs: Logs = field(default_factory=Logs)
    """The recovery logs of a seed that goes back to former moments."""
    coverage: set[str] = field(default_factory=set)


class AppRun:
    """One run of a story. ``run`` returns when it is over."""

    def __init__(
        self, setup: Setup, story: Story, user: UserSurroundings, *, trace: bool = False
    ) -> None:
        self.setup = setup
        self.story = story
        self.user = user
        self.cluster = cluster = AppCluster(setup, story.seed, trace=trace)
        self.ended = Ended()
        self.history = ShardHistory(
            self.wall_clock, lambda: cluster.loop.now, setup.ignore, self._on_failure
        )
        self.specs = self._shard_specs()
        self.rng = random.Random(f"run {story.seed}")
        self.is_over = False
        self.faults = AppFaults(self)
        self._node = SimNode(cluster.loop, "op")
        self._clock = NodeClock(cluster.loop)
        cluster.network.delay_s = story.delay_s
        cluster.settings = {"lease_ttl_s": 60.0, "watch_delay_s": 0.0}
        cluster.consumer_options = {
            "lease_ttl_s": LEASE_S,
            "watch_delay_s": 0.0,
            "max_restarts": 1000,
            "graceful_stop_s": 2.0,
            "query_timeout_s": 20.0,
        }
        cluster.broker_hosts = [BROKER]
        cluster.on_member_exited = self.faults.on_member_exited
        user.bind(self.wall_clock, self._pause, self.note_finding)
        user.on_failed_call = self.faults.on_failed_call

    def _shard_specs(self) -> list[ShardSpec]:
        story, chosen = self.story, []
        for spec in self.setup.shards:
            if spec.id in story.shards:
                txn_ns = int(story.txn_s * duration.SECOND)
                chosen.append(
                    replace(spec, hot_standbys=story.standbys, max_txn_duration_ns=txn_ns)
                )
        return chosen

    def use(self, database: Any) -> None:
        """Let a SQLStore have a database. None: a SQLStore is refused."""
        self.cluster.database = self.user.database = database
        if database is None:
            return

        def of_process(name: str, otherwise: Any, *arguments: Any) -> Any:
            node = current_node()
            process = None if node is None else self.cluster.members.get(node.name)
            return otherwise if process is None else getattr(process, name)(*arguments)

        database.now = lambda: self.cluster.loop.now
        database.pause = lambda seconds: of_process("pause_thread", False, seconds)
        database.wait = lambda future: of_process("wait_for", None, future)
        database.new_pool = lambda: of_process("new_commit_pool", None)

    # The clocks that the user's code gets in place of the system's.

    def wall_clock(self) -> float:
        """Return the wall clock of the process whose code runs."""
        node = current_node()
        process = None if node is None else self.cluster.members.get(node.name)
        return self._clock.now() if process is None else float(process.clock.now())

    def _pause(self, seconds: float) -> None:
        node = current_node()
        process = None if node is None else self.cluster.members.get(node.name)
        if process is not None:
            process.pause(seconds)

    def note_finding(self, what: str, place: str = "", hint: str = "") -> None:
        """Add a finding, unless there is one with the same text."""
        if not any(finding.what == what for finding in self.ended.findings):
            self.ended.findings.append(Finding(what, place, hint=hint))

    def _on_failure(self, shard: Any, error: BaseException) -> None:
        """Judge the error by which a shard has failed: a mistake of the application, or a defect of ours."""
        if isinstance(error, _HARMLESS) or isinstance(error.__cause__, _HARMLESS):
            return
        if self.cluster.database is not None and self.cluster.database.is_harmless(error):
            return
        if self.cluster.loop.now == float("inf") or shard.ended.is_set():
            return
        place = getattr(error, "facts", {}).get("line", "") or place_of_error(error)
        self.note_finding(f"{shard.id} fails: {error}", str(place), "raises" if place else "")

    # Running.

    def run(self) -> Ended:
        """Run the story, and return the end of the run for its judge.

        Raise ``Invalid`` for an application that cannot be simulated.
        """
        cluster = self.cluster
        main = self._node.spawn(self._main(), "story")
        main.add_done_callback(lambda _: cluster.loop.stop())
        with ExitStack() as stack:
            stack.enter_context(self.history.attached())
            self.ended.forms = stack.enter_context(noted_forms())
            stack.enter_context(self.user.attached())
            stack.enter_context(wrapped(ShardTimers, "_clock_us", cluster.timer_clock_us))
            stack.enter_context(wrapped(ShardTimers, "_clock_s", cluster.idle_clock_s))
            ended = cluster.run(until=36_000.0)
        if self.user.refused is not None:
            raise self.user.refused
        if not main.done():
            cluster.violated("nothing is left to wait for" if not ended else "the run does not end")
        elif not main.cancelled() and (error := main.exception()) is not None:
            cluster.failed(error)
        self.ended.findings += [Finding(what) for what in cluster.violations]
        if any(step.timer is not None for step in self.history.steps()):
            self.ended.coverage.add(TIMERS)
        return self.ended

    async def _main(self) -> None:
        cluster, story = self.cluster, self.story
        cluster.start_broker(BROKER)
        client = cluster.client(self._node, BROKER)
        await self._create(client)
        for host in story.members:
            cluster.start_member(host)
        queries = QueryClients(cluster, story.members, self.specs, self.note_finding, story.seed)
        self.ended.answers = queries.answers
        async with TaskScope("queries") as scope:
            for number in range(_CLIENTS):
                scope.spawn(queries.run(number), name="ask")
            await self._play(client, queries)
            scope.cancel()
        self.is_over = True
        cluster.loop.stop()

    async def _play(self, client: Client, queries: QueryClients) -> None:
        """Publish, let faults strike, and wait until all is consumed."""
        cluster, story = self.cluster, self.story
        async with TaskScope("story") as scope:
            for producer in range(2):
                sends = [send for send in story.sends_to_make() if send.producer == producer]
                node = SimNode(cluster.loop, f"publisher-{producer}")
                publisher = StoryPublisher(
                    node, cluster, BROKER, sends, queries.acknowledged, self.rng.getrandbits(64)
                )
                scope.spawn(publisher.run(), name="publish")
            for fault in story.faults_to_make():
                scope.spawn(self.faults.strike_later(fault), name="fault")
        await self._heal()
        if await self._quiet(client):
            if story.restarts:
                await self._restart(client)
            if not self.ended.findings:
                await self._finish(client, queries)

    async def _restart(self, client: Client) -> None:
        """Kill all members, and wait until others serve their shards."""
        stores = self._stores()
        self._check_invariant(stores)
        self.ended.states_before = {id: self._state(store) for id, store in stores.items()}
        for host in self.story.members:
            self.cluster.crash_member(host)
            self.cluster.start_member(host)
        await self._quiet(client)

    async def _finish(self, client: Client, queries: QueryClients) -> None:
        stores, ended = self._stores(), self.ended
        self._check_invariant(stores)
        for shard_id, store in stores.items():
            promotion = self.history.last(shard_id)
            assert promotion is not None
            ended.promotions[shard_id] = promotion
            ended.states[shard_id] = self._state(store)
        names = self.setup.source_names | {*self.setup.outputs, *ended.forms}
        heads = {name: await self._head(client, name) for name in sorted(names)}
        for name, head in heads.items():
            ended.content[name] = await self._read(client, name, head)
        if travels(self.story.seed):
            await self._read_logs(client)
        try:
            await queries.finish(heads)
        except Unavailable as error:
            self.note_finding(str(error))

    async def _read_logs(self, client: Client) -> None:
        """Read the recovery logs and their hints, for time travel."""
        logs = self.ended.logs
        async with asyncio.timeout(_QUIET_S):
            for spec in self.specs:
                if log := spec.recovery_log:
                    logs.content[log] = await self.content_of(client, log)
                    hints = await self.faults.hints_of(spec.id)
                    logs.hints[spec.id] = [each for each in hints if each is not None]

    def _state(self, store: Any) -> Rows | None:
        rows = state_of(store, self.setup.ignore)
        if rows is None and self.cluster.database is not None:
            return self.cluster.database.rows(self.setup.ignore)  # type: ignore[no-any-return]
        return rows

    def _check_invariant(self, stores: Mapping[str, Any]) -> None:
        invariant = self.setup.invariant
        if invariant is None:
            return
        try:
            result = invariant(Query(stores))
        except Exception as error:  # noqa: BLE001 - it is the user's finding
            what = f"the invariant raises {type(error).__name__}: {error}"
            self.note_finding(what, place_of_error(error))
            return
        if result is False:
            self.note_finding("the invariant does not hold")

    # The cluster.

    async def _create(self, client: Client) -> None:
        changes = [JournalChange(upsert=spec) for spec in self.setup.journals]
        while True:
            try:
                async with asyncio.timeout(CALL_S):
                    await apply_journals(client, changes)
                break
            except (GazetteError, TimeoutError):
                await self._clock.sleep(0.2)
        transport = SimTransport(self.cluster.network, self._node)
        settings = EtcdSettings(endpoints=(f"http://{ETCD_ADDRESS}",))
        async with await Etcd.connect(settings, self._clock, transport=transport) as etcd:
            for spec in self.specs:
                key = f"{self.cluster.root}/items/{spec.id}"
                put = Op.put(key, spec.to_pb().SerializeToString())
                await etcd.txn((Compare.version(key, "=", 0),), (put,))

    async def _head(self, client: Client, journal: str) -> int:
        async with asyncio.timeout(_QUIET_S):
            while True:
                try:
                    result = await client.append(AppendParams(journal), b"")
                    return int(result.commit.end)
                except GazetteError:
                    await self._clock.sleep(0.5)

    async def content_of(self, client: Client, journal: str) -> bytes:
        """Return the content of a journal, up to its present end."""
        return await self._read(client, journal, await self._head(client, journal))

    async def _read(self, client: Client, journal: str, end: int) -> bytes:
        if not end:
            return b""
        reader = RetryReader(
            client, ReadParams(journal, 0, block=True, end_offset=end), clock=self._clock
        )
        content = b""
        while len(content) < end:
            content += await reader.read(1 << 20)
        reader.close()
        return content

    def _owner(self, shard_id: str) -> Shard | None:
        """Return the shard at its primary, if it serves."""
        for process in self.cluster.members.values():
            shard = process.shards.get(shard_id)
            if shard is None or shard.failure is not None or shard.ended.is_set():
                continue
            if shard.is_primary and shard.store_ready.is_set():
                return shard  # type: ignore[no-any-return]
        return None

    def _stores(self) -> dict[str, Any]:
        stores = {}
        for spec in self.specs:
            shard = self._owner(spec.id)
            assert shard is not None
            stores[spec.id] = shard.store
        return stores

    async def _heal(self) -> None:
        """Wait until faults are over, and every process runs."""
        cluster = self.cluster
        cluster.traps.clear()
        while self.faults.until > cluster.loop.now or any(
            process.ended or process.stopping for process in cluster.members.values()
        ):
            await self._clock.sleep(1.0)
            cluster.traps.clear()
        cluster.stalls = (0.0, 0.0)
        self.user.fail_after = 0
        cluster.late.clear()

    async def _quiet(self, client: Client) -> bool:
        """Wait until every shard has consumed its input, and rests. Return False if a shard does not."""
        heads = {}
        for spec in self.specs:
            for source in spec.sources:
                heads[source.journal] = await self._head(client, source.journal)
        cluster = self.cluster
        deadline = cluster.loop.now + _QUIET_S
        cluster.timers_until = min(cluster.timers_until, cluster.loop.now + _TIMERS_S)
        rested = max(cluster.timers_until, cluster.loop.now) + _TIMERS_S
        seen: list[int] = []
        while cluster.loop.now < deadline:
            await self._clock.sleep(_SETTLED_S)
            counts = [self._settled(spec, heads) for spec in self.specs]
            if None not in counts and counts == seen:
                return True
            seen = [count for count in counts if count is not None]
            if None not in counts and cluster.loop.now > rested:
                break
            if self.ended.findings:
                return False
        for spec in self.specs:
            if self._settled(spec, heads) is None:
                place = self._place_of_closed(spec.id)
                what = f"{spec.id} does not consume all of its input: {self._states(spec.id)}"
                self.note_finding(what, place, "closed" if place else "")
        if not self.ended.findings:
            self.note_finding("transactions do not end: messages or timers follow each other")
        return False

    def _settled(self, spec: ShardSpec, heads: Mapping[str, int]) -> int | None:
        """Return the number of transactions of a shard that rests; None if the shard has something to do."""
        shard, promotion = self._owner(spec.id), self.history.last(spec.id)
        if shard is None or promotion is None:
            return None
        wanted = {source.journal: heads[source.journal] for source in spec.sources}
        if not shard.progress.has({name: head for name, head in wanted.items() if head}):
            return None
        transactions = promotion.transactions
        if transactions and (transactions[-1].commit is None or not transactions[-1].commit.done()):
            return None
        return len(transactions)

    def _place_of_closed(self, shard_id: str) -> str:
        """Return the user's line if a shard has failed by the use of a closed store; otherwise empty."""
        for process in self.cluster.members.values():
            shard = process.shards.get(shard_id)
            if shard is not None and isinstance(shard.failure, Closed):
                return place_of_error(shard.failure)
        return ""

    def _states(self, shard_id: str) -> str:
        states = []
        for process in self.cluster.members.values():
            shard = process.shards.get(shard_id)
            if shard is not None:
                role = "primary" if shard.is_primary else "standby"
                through = shard.progress.read_through
                states.append(
                    f"{role} at {process.name}, read {through}, failure {shard.failure!r}"
                )
        return "; ".join(states) or "no member has it"
