"""The members of a simulated consumer cluster: they can be killed, held, stopped and started again."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prometheus_client import REGISTRY

from gazette.client.read.fragment_reader import FragmentAccess
from gazette.cluster.etcd.client import EtcdSettings
from gazette.cluster.process.membership import MemberEnvironment
from gazette.consumer.application import Application
from gazette.consumer.member import ConsumerMember
from gazette.consumer.settings import ConsumerSettings
from gazette.consumer.shard.shard import Shard
from gazette.runtime.failpoints import hooked
from gazette.testing.simulation.cluster import (
    ETCD_ADDRESS,
    ZONE,
    BrokerServer,
    Cluster,
    SimProcess,
    client_of,
    names_of,
)
from gazette.testing.simulation.loop import NodeClock, current_node
from gazette.testing.simulation.network import SimTransport
from gazette.testing.simulation.storage import Threads
from gazette.testing.simulation.workers import SimWorker, Workers

_MEMORY: Final = "/dev/shm"
"""Holds the files of members, where it exists: a disk would take most of the time of a run."""


@dataclass(slots=True)
class Trap:
    """An action on a process of ``host`` when it passes a failpoint for the n-th time."""

    host: str
    point: str
    passes: int
    spring: Callable[[Any], float | None]
    """Called with the process. Returns the seconds for which the thread waits; None: no wait."""
    detail: str = ""
    """If it is given, only passes with this detail count."""

    def matches(self, host: str, point: str, detail: str) -> bool:
        return (host, point) == (self.host, self.point) and self.detail in ("", detail)


class _Service(ConsumerMember):
    """The shipped member."""

    process: SimMember

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.process.cluster.on_member_failure(self.process, error)
        super().fail(error)


class SimMember(SimProcess):
    """One process of a member."""

    cluster: MemberCluster

    def __init__(self, cluster: MemberCluster, host: str, id: str, number: int) -> None:
        super().__init__(cluster, host, id, number)
        self.clock = NodeClock(cluster.loop)
        self.threads = Threads(self.node, random.Random(cluster.rng.getrandbits(64)))
        self.workers: list[SimWorker] = []
        self._rng = random.Random(cluster.rng.getrandbits(64))
        self._new_worker = cluster.workers.of(self.threads)
        self.node.spawn(self._main(), f"main {self.name}")

    def application(self, rng: random.Random) -> Application[Any]:
        """Create the application of this process."""
        raise NotImplementedError

    def config(self, application: Application[Any]) -> Mapping[str, Any] | None:
        """Return the settings of the application's groups, or None if it has none."""
        return None

    def serve_beside(self, service: ConsumerMember) -> None:
        """Add servicers of the simulation to a member's server, before it starts."""

    def fragments(self) -> FragmentAccess | None:
        """Return how the process reads stored fragments without a broker, or None if it does not."""
        return None

    async def _main(self) -> None:
        """Run the member as ``runconsumer.main`` does."""
        cluster, rng = self.cluster, self._rng
        app = self.application(random.Random(rng.getrandbits(64)))
        environment = MemberEnvironment(
            self.clock,
            random.Random(rng.getrandbits(64)),
            BrokerServer(cluster.network, self.node, self.clock),
            EtcdSettings(endpoints=(f"http://{ETCD_ADDRESS}",)),
            transport=SimTransport(cluster.network, self.node),
            pools=self.threads.pool,
        )
        client = client_of(
            cluster.network, self.node, *cluster.broker_hosts, fragments=self.fragments()
        )
        service = self.service = _Service(
            app,
            environment,
            ConsumerSettings(
                zone=ZONE,
                id=self.id,
                root=cluster.root,
                scratch_directory=cluster.scratch_of(self.name),
                **cluster.consumer_options,
            ),
            client,
            config=self.config(app),
            workers=self._worker,
            producer_rng=random.Random(rng.getrandbits(64)),
        )
        service.process = self
        self.serve_beside(service)
        await self.serve("member")
        cluster.on_member_exit(self)

    def _worker(self, name: str) -> SimWorker:
        worker = self._new_worker(name)
        worker.stall_chance, worker.stall_s = self.cluster.stalls
        self.workers.append(worker)
        return worker

    def pause(self, seconds: float) -> bool:
        """Block the caller's worker for that long. Return False if the caller is no worker."""
        worker = next((other for other in self.workers if other.is_current), None)
        if worker is not None and seconds > 0:
            worker.sleep(seconds)
        return worker is not None

    def passed(self, seconds: float) -> float:
        """Wait at a failpoint: for ever, if the process was killed there. Return the seconds that are left
        for the caller to wait."""
        if not self.node.alive:
            seconds = math.inf
        elif self.node.blocked:
            seconds = max(seconds, 1e-6)  # Let a held process stop here, not at its next wait.
        return 0.0 if self.pause(seconds) else seconds

    @property
    def shards(self) -> dict[str, Shard]:
        """The replicas of shards that the process holds, by id; empty while it starts."""
        service = self.service
        if self.ended or service is None or service._parts is None:
            return {}
        return dict(service._parts.resolver.local_shards)

    def forget(self) -> None:
        """Remove what the simulated process has registered in the real process."""
        if self.service is not None and self.service._up is not None:
            REGISTRY.unregister(self.service._up)
            self.service._up = None


class MemberCluster(Cluster):
    """Brokers and etcd, and beside them the members of one application."""

    root = "/gazette/consumers/simulated"

    def __init__(self, seed: int, *, trace: bool = False, **more: Any) -> None:
        super().__init__(seed, trace=trace, **more)
        self.workers = Workers()
        self.stalls = (0.0, 0.0)
        """Share of the turns of workers that are late, and by how many seconds at most."""
        self.broker_hosts: list[str] = []
        self.members: dict[str, Any] = {}
        """The present process of each host."""
        self.all_members: list[Any] = []
        self.consumer_options: dict[str, Any] = {}
        self.traps: list[Trap] = []
        self.late: dict[str, tuple[float, float]] = {}
        """By journal: the time until which appends of members begin late, and by how many seconds."""
        memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
        self.scratch = Path(tempfile.mkdtemp(prefix="gazette-simulation-", dir=memory))

    def scratch_of(self, process: str) -> Path:
        """Make the directory of a member's process."""
        directory = self.scratch / process.replace("/", "-")
        directory.mkdir()
        return directory

    def start_member(self, host: str, id: str | None = None) -> Any:
        """Start a process of a member. Without ``id``, it has the id of the former process."""
        before = self.members.get(host)
        chosen = id or (before.id if before is not None else host)
        process = self._new_member(host, chosen, len(self.all_members) + 1)
        self.members[host] = process
        self.all_members.append(process)
        self.say(host, f"starts as {process.name}", getattr(process, "origin", ""))
        return process

    def _new_member(self, host: str, id: str, number: int) -> Any:
        return SimMember(self, host, id, number)

    def crash_member(self, host: str, *, silent: bool = False) -> None:
        """Kill a member's process, or with ``silent`` its machine."""
        process = self.members[host]
        if not process.ended:
            self._kill(process, silent=silent)

    def on_member_failure(self, process: Any, error: BaseException) -> None:
        """Note that a member finds itself broken, and is about to end."""
        self.on_failure(process, error)

    def on_member_exit(self, process: Any) -> None:
        """Judge the exit of a member's process."""
        self._judge_exit(process)

    def run(self, until: float) -> bool:
        """Run the loop. Meanwhile, traps take effect at failpoints."""
        with self._instrumented():
            return self.loop.run(until)

    @contextlib.contextmanager
    def _instrumented(self) -> Iterator[None]:
        with hooked(self._passed):
            yield

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
        return float(process.passed(seconds))

    def look_at_failures(self) -> None:
        """Judge the errors by which shards of the present members have failed."""
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
