"""The members of a simulated consumer cluster: they can be killed, held, stopped and come again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import apsw
from prometheus_client import REGISTRY

from gazette.cluster.etcd.client import EtcdSettings
from gazette.cluster.process.membership import MemberEnvironment
from gazette.consumer.application import Store
from gazette.consumer.member import ConsumerMember
from gazette.consumer.settings import ConsumerSettings
from gazette.consumer.shard.shard import Shard
from gazette.errors import GazetteError
from gazette.runtime.failpoints import hooked
from gazette.runtime.tasks import TaskScope
from gazette.stores.sqlite.redo_recording import RedoRecording
from tools.fuzz_stores.base import defaults
from tools.simulation.cold_reads import SimFragments
from tools.simulation.consumer_app import FoldApp, Surroundings
from tools.simulation.consumer_queries import MemberQueries, Notes
from tools.simulation.consumer_timers import TimedFoldApp
from tools.simulation.loop import Node, NodeClock, current_node
from tools.simulation.network import SimTransport
from tools.simulation.other_version import OtherVersion
from tools.simulation.remote_store import RemoteDatabase
from tools.simulation.storage import Threads
from tools.simulation.workers import SimWorker, Workers
from tools.simulation.world import (
    ETCD_ADDRESS,
    ZONE,
    BrokerServer,
    World,
    client_of,
    is_defect,
    names_of,
)

CONSUMERS: Final = "/gazette/consumers/fold"
_MEMORY: Final = "/dev/shm"
"""Holds the files of members, where it exists: a disk would take most of the time of a run."""


@dataclass(slots=True)
class Trap:
    """What happens to a process of ``host`` when it passes a failpoint for the n-th time."""

    host: str
    point: str
    passes: int
    spring: Callable[[MemberProcess], float | None]
    """Returns for how many seconds the thread waits there, if it does."""
    detail: str = ""
    """If it is given, only passes with this detail count."""

    def matches(self, host: str, point: str, detail: str) -> bool:
        return (host, point) == (self.host, self.point) and self.detail in ("", detail)


class _Service(ConsumerMember):
    """The shipped member."""

    process: MemberProcess

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.process.world.on_member_failure(self.process, error)
        super().fail(error)


class MemberProcess:
    """One process of a member, from its start to its end. ``host`` outlives it; ``id`` names the member."""

    def __init__(self, world: ConsumerWorld, host: str, id: str, number: int) -> None:
        self.world = world
        self.host = host
        self.id = id
        self.name = f"{id}/{number}"
        self.node = Node(world.loop, host)
        self.clock = NodeClock(world.loop)
        self.threads = Threads(self.node, random.Random(world.rng.getrandbits(64)))
        self.workers: list[SimWorker] = []
        self.service: _Service | None = None
        self.ended = False
        self.stopping = False
        self.error: BaseException | None = None
        self._rng = random.Random(world.rng.getrandbits(64))
        self._new_worker = world.workers.of(self.threads)
        self._starting: asyncio.Task[None] | None = None
        self._query_rng = random.Random(number)
        self._app: FoldApp | None = None
        self.queries = MemberQueries(
            self.name,
            self.node,
            world.consumer_options["query_timeout_s"],
            world.violated,
            lambda: self.stopping,
        )
        self.node.spawn(self._main(), f"main {self.name}")

    async def _main(self) -> None:
        """Run the member as ``runconsumer.main`` does."""
        world, rng = self.world, self._rng
        around = Surroundings(
            world.outputs,
            self._pause,
            self._dawdle,
            world.database,
            world.violated,
            world.notes,
            self.queries,
            world.sqlite,
        )
        make = TimedFoldApp if world.timers else FoldApp
        app = self._app = make(around, random.Random(rng.getrandbits(64)))
        environment = MemberEnvironment(
            self.clock,
            random.Random(rng.getrandbits(64)),
            BrokerServer(world.network, self.node, self.clock),
            EtcdSettings(endpoints=(f"http://{ETCD_ADDRESS}",)),
            transport=SimTransport(world.network, self.node),
            pools=self.threads.pool,
        )
        fragments = None
        if world.has_cold_readers:
            fragments = SimFragments(self.node, random.Random(self.name), world.bucket)
        service = self.service = _Service(
            app,
            environment,
            ConsumerSettings(
                zone=ZONE,
                id=self.id,
                root=CONSUMERS,
                scratch_directory=world.scratch_of(self.name),
                **world.consumer_options,
            ),
            client_of(world.network, self.node, *world.broker_hosts, fragments=fragments),
            workers=self._worker,
            producer_rng=random.Random(rng.getrandbits(64)),
        )
        service.process = self
        scope = TaskScope("member", on_failure=service.fail)
        starting = self._starting = scope.spawn(service.start(), name="start")
        try:
            try:
                await asyncio.wait({starting})
                if not starting.cancelled():
                    await service.wait()
            finally:
                self.stopping = True
                await service.stop()
                await scope.stop()
        except Exception as error:  # noqa: BLE001 - it is what the process ends with
            self.error = error
        world.on_member_exit(self)

    def _worker(self, name: str) -> SimWorker:
        worker = self._new_worker(name)
        worker.stall_chance, worker.stall_s = self.world.stalls
        self.workers.append(worker)
        return worker

    def _pause(self, seconds: float) -> bool:
        """Block the caller's worker for that long, if it is one."""
        worker = next((one for one in self.workers if one.is_current), None)
        if worker is not None and seconds > 0:
            worker.sleep(seconds)
        return worker is not None

    def _dawdle(self) -> None:
        """Let a query take its time."""
        rng = self._query_rng
        if rng.random() < self.world.slow_queries:
            self.threads.wait(rng.random() * 3.0)

    def passed(self, seconds: float) -> float:
        """Wait at a failpoint, for ever in a process that was killed there. What the caller is to wait."""
        if not self.node.alive:
            seconds = math.inf
        elif self.node.blocked:
            seconds = max(seconds, 1e-6)  # It stands still here, and not only where it waits next.
        return 0.0 if self._pause(seconds) else seconds

    def terminate(self, *, hurried: bool) -> None:
        """Stop the member as SIGTERM does; twice if ``hurried``."""

        def signal() -> None:
            if self.service is None:
                return
            for _ in range(1 + hurried):
                self.service.stop_soon()
            if self._starting is not None:
                self._starting.cancel()

        if self.node.alive and not self.ended:
            self.world.loop.call_soon(signal, context=self.node.context)

    @property
    def shards(self) -> dict[str, Shard]:
        """The replicas that it holds, by id; none while it starts."""
        service = self.service
        if self.ended or service is None or service._parts is None:
            return {}
        return dict(service._parts.resolver.local_shards)

    def forget(self) -> None:
        """Take back what the process has left in this one."""
        if self.service is not None and self.service._up is not None:
            REGISTRY.unregister(self.service._up)
            self.service._up = None
        if self._app is not None:
            for one in (*self._app.stores, *self._app.views):
                with contextlib.suppress(GazetteError, apsw.Error, OSError):
                    one.destroy() if isinstance(one, Store) else one.close()


@contextlib.contextmanager
def instrumented(passed: Callable[[str, str], float], thresholds: dict[str, int]) -> Iterator[None]:
    """Let processes of this version report their failpoints, and reach the thresholds of SQLite."""
    with hooked(passed), defaults(RedoRecording.__init__, **thresholds):
        yield


class ConsumerWorld(World):
    """Brokers and etcd, and beside them the members of one application."""

    def __init__(
        self, seed: int, *, trace: bool = False, other: OtherVersion | None = None
    ) -> None:
        super().__init__(seed, trace=trace, other=other)
        self.workers = Workers()
        self.stalls = (0.0, 0.0)
        """How often turns of workers are late, and by how many seconds at most."""
        self.outputs: list[str] = []
        self.database = RemoteDatabase()
        self.notes = Notes(self.loop, self.violated)
        self.sqlite: set[str] = set()
        """Shards whose state is in SQLite."""
        self.timers = False
        """True if the application publishes by timers."""
        self.has_cold_readers = False
        """True if members take stored fragments of sources and logs from the stores themselves."""
        self.redo: dict[str, int] = {}
        """Thresholds of recorded SQLite databases, so small that a run reaches them."""
        self.slow_queries = 0.0
        """How often a query takes up to three seconds."""
        self.broker_hosts: list[str] = []
        self.members: dict[str, MemberProcess] = {}
        """The present process of each host."""
        self.all_members: list[MemberProcess] = []
        self.consumer_options: dict[str, Any] = {}
        self.on_member_exited: Callable[[MemberProcess], None] = lambda process: None
        self.traps: list[Trap] = []
        self.late: dict[str, tuple[float, float]] = {}
        """Journals to which appends of members begin late: until when, and by how many seconds."""
        memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix="gazette-simulation-", dir=memory))

    def scratch_of(self, process: str) -> Path:
        """Make the directory of a member's process."""
        directory = self.scratch / process.replace("/", "-")
        directory.mkdir()
        return directory

    def start_member(self, host: str, id: str | None = None) -> MemberProcess:
        before = self.members.get(host)
        chosen = id or (before.id if before is not None else host)
        version = self.version(__name__)
        process: MemberProcess = version.MemberProcess(
            self, host, chosen, len(self.all_members) + 1
        )
        self.members[host] = process
        self.all_members.append(process)
        self.say(host, f"starts as {process.name}", version.__file__)
        return process

    def crash_member(self, host: str, *, silent: bool = False) -> None:
        """Kill a member's process, or with ``silent`` its machine."""
        process = self.members[host]
        if process.ended:
            return
        self.say(host, f"is killed{' with its machine' if silent else ''}")
        process.ended = True
        process.node.kill()
        self.network.crashed(process.node, silent=silent)

    def on_member_failure(self, process: MemberProcess, error: BaseException) -> None:
        self.say(process.host, f"fails: {type(error).__name__}", error)
        process.queries.failed()
        if self.excused_until.get(process.host, 0.0) < self.loop.now:
            self.violated(f"{process.name} has failed without a reason: {error!r}")

    def on_member_exit(self, process: MemberProcess) -> None:
        """Judge the exit of a member's process that was not stopped from
        outside, and close its connections.
        """
        error = process.error
        self.say(process.host, f"exits: {type(error).__name__ if error else 'as asked'}", error)
        process.ended = True
        leaked = sorted(
            task.get_name()
            for task in process.node.pending_tasks()
            if not task.get_name().startswith("main ")
        )
        if leaked:
            self.violated(f"{process.name} has exited with tasks: {leaked}")
        if error is not None and is_defect(error):
            self.violated(f"{process.name} has ended with {error!r}")
        process.node.kill()
        self.network.crashed(process.node, silent=False)
        self.on_member_exited(process)

    def run(self, until: float) -> bool:
        """Run the loop; processes that pass failpoints meanwhile may be trapped there."""
        with contextlib.ExitStack() as stack:
            for one in self.versions(__name__):
                stack.enter_context(one.instrumented(self._passed, self.redo))
            return self.loop.run(until)

    def _passed(self, point: str, detail: str) -> float:
        node = current_node()
        process = None if node is None else self.members.get(node.name)
        if process is None or process.node is not node:
            return 0.0
        self.loop.note(node.name, point)
        seconds = 0.0
        if point == "append.begin" and detail in self.late:
            until, most = self.late[detail]
            seconds = self.rng.random() * most if self.loop.now < until else 0.0
        for trap in self.traps:
            if trap.matches(node.name, point, detail):
                trap.passes -= 1
                if trap.passes == 0:
                    self.traps.remove(trap)
                    self.say(node.name, f"is trapped at {point}", detail)
                    seconds += trap.spring(process) or 0.0
                    break
        return process.passed(seconds)

    def look_at_failures(self) -> None:
        """Judge by what the shards have failed that members hold now."""
        for process in self.members.values():
            for shard in process.shards.values():
                if shard.failure is not None and {"Bug", "Corrupt"} & names_of(shard.failure):
                    self.violated(f"{shard.id} at {process.name} has failed: {shard.failure!r}")

    def close(self) -> None:
        super().close()
        self.workers.close()
        for process in self.all_members:
            process.forget()
        shutil.rmtree(self.scratch, ignore_errors=True)
