"""The nodes of a simulation: an etcd, brokers that can end and start again, and clients."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Sequence
from typing import Any, Final

from gazette.blobs.blob_store import BlobStore
from gazette.broker.service import BrokerService
from gazette.broker.settings import BrokerSettings
from gazette.client.client import Client
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.rpc.channel import Channels
from gazette.cluster.etcd.client import EtcdSettings
from gazette.cluster.process.membership import MemberEnvironment, Membership
from gazette.errors import Bug, GazetteError
from gazette.net.server import Server
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope
from gazette.testing.simulation.etcd.service import FakeEtcd
from gazette.testing.simulation.loop import NodeClock, SimNode, VirtualLoop
from gazette.testing.simulation.network import Network, SimServer, SimTransport
from gazette.testing.simulation.storage import Bucket, SimStore, SpoolDisk, Threads

ROOT: Final = "/gazette/cluster"
ETCD: Final = "etcd"
ETCD_ADDRESS: Final = "etcd:2379"
ZONE: Final = "zone"
_ETCD_TICK_S: Final = 1.0
_TRACE_MAX: Final = 200_000


def client_of(
    network: Network, node: SimNode, *hosts: str, fragments: FragmentAccess | None = None
) -> Client:
    """Create a client of a node that has these brokers as its address."""
    clock = NodeClock(network.loop)
    channels = Channels("", clock=clock, transport=SimTransport(network, node))
    address = ",".join(f"http://{host}:8080" for host in hosts)
    return Client(address, channels=channels, clock=clock, fragments=fragments)


def names_of(error: BaseException) -> set[str]:
    """Return the names of an error's classes, which may be of another version."""
    return {base.__name__ for base in type(error).__mro__}


def is_defect(error: BaseException) -> bool:
    """Return True for an error with which no process may end."""
    names = names_of(error)
    return GazetteError.__name__ not in names or Bug.__name__ in names


class BrokerServer(Server):
    """A broker's servers on the virtual network; it has no HTTP."""

    def __init__(self, network: Network, node: SimNode, clock: Clock) -> None:
        address = f"{node.name}:8080"
        grpc_server: Any = SimServer(network, node, address, clock)
        self.grpc = grpc_server
        self.endpoint = f"http://{address}"
        self.http_endpoint = f"http://{node.name}:8081"

    def start_http(self, scope: TaskScope, app: Any) -> None:
        pass

    async def start_grpc(self) -> None:
        await self.grpc.start()

    async def stop(self, grace_s: float | None = None) -> None:
        await self.grpc.stop(15.0 if grace_s is None else grace_s)


class _Closing:
    """Replaces the event that ends pauses between attempts at a store. The pauses take virtual time."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._set = False

    def set(self) -> None:
        self._set = True

    def wait(self, seconds: float) -> bool:
        if not self._set:
            self._threads.wait(seconds)
        return self._set


class _Service(BrokerService):
    """The shipped broker, with threads of the simulation."""

    process: SimBroker

    @property
    def threads(self) -> Threads:
        return self.process.threads

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.process.cluster.on_failure(self.process, error)
        super().fail(error)

    async def _finish(self) -> None:
        try:
            await super()._finish()
        except GazetteError:
            self.process.lose()
            raise

    async def _persist(self) -> None:
        try:
            await super()._persist()
        except GazetteError:
            self.process.lose()
            raise

    async def _set_up(self, membership: Membership) -> None:
        await super()._set_up(membership)
        closing: Any = _Closing(self.threads)
        self.context.blob_stores._closing = closing


class SimProcess:
    """A simulated process, from its start to its end. ``host`` outlives it; ``id`` names the member."""

    def __init__(self, cluster: Cluster, host: str, id: str, number: int) -> None:
        self.cluster = cluster
        self.host = host
        self.id = id
        self.name = f"{id}/{number}"
        """Name of this process alone: a restarted process has the next number."""
        self.node = SimNode(cluster.loop, host)
        self.ended = False
        self.stopping = False
        self.error: BaseException | None = None
        self.service: Any = None
        self.starting: asyncio.Task[None] | None = None

    async def serve(self, scope_name: str) -> None:
        """Run the service until its end, as the command of the process does."""
        service = self.service
        scope = TaskScope(scope_name, on_failure=service.fail)
        starting = self.starting = scope.spawn(service.start(), name="start")
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

    def terminate(self, *, hurried: bool) -> None:
        """Stop the process as SIGTERM does; twice if ``hurried``."""

        def signal() -> None:
            if self.service is None:
                return
            for _ in range(1 + hurried):
                self.service.stop_soon()
            if self.starting is not None:
                self.starting.cancel()

        if self.node.alive and not self.ended:
            self.cluster.loop.call_soon(signal, context=self.node.context)


class SimBroker(SimProcess):
    """One broker process."""

    def __init__(self, cluster: Cluster, host: str, id: str, number: int) -> None:
        super().__init__(cluster, host, id, number)
        self.clock = NodeClock(cluster.loop, self.node)
        self.clock.offset_s = cluster.clock_offsets.get(host, 0.0)
        self.threads = Threads(self.node, random.Random(cluster.rng.getrandbits(64)))
        self.disk = SpoolDisk(self.threads)
        self.threads.troubled = self._is_troubled
        self.node.spawn(self._main(), f"main {self.name}")

    async def _main(self) -> None:
        """Run the broker as ``gazette serve`` does."""
        cluster = self.cluster
        rng = random.Random(cluster.rng.getrandbits(64))
        environment = MemberEnvironment(
            self.clock,
            rng,
            BrokerServer(cluster.network, self.node, self.clock),
            EtcdSettings(endpoints=(f"http://{ETCD_ADDRESS}",)),
            transport=SimTransport(cluster.network, self.node),
            pools=self.threads.pool,
        )
        service = self.service = _Service(
            environment,
            BrokerSettings(zone=ZONE, id=self.id, root=ROOT, **cluster.settings),
            constructors=dict.fromkeys(("s3", "file"), self._store),
            disk=self.disk,
        )
        service.process = self
        await self.serve("broker")
        cluster.on_exit(self)

    def _is_troubled(self) -> bool:
        return self.disk.write_s > 0 or not all(
            bucket.trouble_free for bucket in self.cluster.buckets.values()
        )

    def _store(self, url: FragmentStoreUrl) -> BlobStore:
        return SimStore(self.cluster.bucket(url.host), self.threads, self.cluster.loop, self.name)

    def lose(self) -> None:
        """Note that the broker has lost its lease, or has reported an upload that failed at its end."""


class Cluster:
    """An etcd, brokers and their stores. ``seed`` decides everything."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(self.violated)
        self.network = Network(self.loop, random.Random(self.rng.getrandbits(64)))
        self.network.on_error = self.violated
        self.violations: list[str] = []
        self.trace: list[tuple[float, str, str]] | None = [] if trace else None
        if trace:
            self.network.on_call = self._trace_call
        self.buckets: dict[str, Bucket] = {}
        self.brokers: dict[str, Any] = {}
        """The present process of each host."""
        self.processes: list[Any] = []
        """All processes of brokers, in the order of their starts."""
        self.clock_offsets: dict[str, float] = {}
        self.settings: dict[str, Any] = {}
        """Settings of all brokers."""
        self.excused_until: dict[str, float] = {}
        """By host: the time until which its process may lose its lease without being at fault."""
        self.etcd_node = SimNode(self.loop, ETCD)
        self.etcd = self._start_etcd()

    # Events.

    def say(self, node: str, what: str, *facts: object) -> None:
        """Note an event: it is part of the digest, and of the trace."""
        self.loop.note(node, what)
        if self.trace is not None and len(self.trace) < _TRACE_MAX:
            self.trace.append((self.loop.now, node, " ".join((what, *map(str, facts)))))

    def violated(self, what: str) -> None:
        self.say("!", what)
        self.violations.append(f"at {self.loop.now:.3f} s: {what}")

    def failed(self, error: BaseException) -> None:
        """Note an error of the simulation itself: its seed shows nothing about the cluster."""
        self.violated("the simulation failed: " + "".join(traceback.format_exception(error)))

    def _trace_call(self, caller: str, server: str, method: str, what: str) -> None:
        if self.trace is not None and len(self.trace) < _TRACE_MAX and "etcdserverpb" not in method:
            self.trace.append((self.loop.now, caller, f"-> {server} {method}: {what}"))

    # etcd.

    def _start_etcd(self) -> FakeEtcd:
        etcd = FakeEtcd(NodeClock(self.loop))
        server = SimServer(self.network, self.etcd_node, ETCD_ADDRESS)
        etcd.register(server)
        self.etcd_node.spawn(server.start(), "etcd server")
        self.loop.call_soon(self._tick, etcd, context=self.etcd_node.context)
        etcd.store.observers.append(self._on_etcd)
        return etcd

    def _tick(self, etcd: FakeEtcd) -> None:
        """Let etcd expire leases and report progress, every second."""
        etcd.advance()
        self.loop.call_later(_ETCD_TICK_S, self._tick, etcd, context=self.etcd_node.context)

    def _on_etcd(self, revision: int, events: Sequence[Any]) -> None:
        for event in events:
            key: bytes = event.kv.key
            self.say(ETCD, f"{revision} {'delete' if event.type else 'put'} {key.decode()}")

    # Stores.

    def bucket(self, name: str) -> Bucket:
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = Bucket(name)
            bucket.on_put = lambda path, content, by: self._on_put(name, path, content, by)
            bucket.on_remove = lambda path: self._on_remove(name, path)
        return bucket

    def _on_remove(self, bucket: str, path: str) -> None:
        self.say("store", f"remove {bucket}/{path}")

    def _on_put(self, bucket: str, path: str, content: bytes, by: str) -> None:
        del content, by
        self.say("store", f"put {bucket}/{path}")

    # Brokers.

    def start_broker(self, host: str, id: str | None = None) -> Any:
        """Start a process of a broker. Without ``id``, it has the id of the former process."""
        before = self.brokers.get(host)
        chosen = id or (before.id if before is not None else host)
        process = self._new_broker(host, chosen, len(self.processes) + 1)
        self.brokers[host] = process
        self.processes.append(process)
        self.say(host, f"starts as {process.name}", getattr(process, "origin", ""))
        return process

    def _new_broker(self, host: str, id: str, number: int) -> Any:
        return SimBroker(self, host, id, number)

    def crash(self, host: str, *, silent: bool = False) -> None:
        """Kill a broker's process, or with ``silent`` its machine."""
        process = self.brokers[host]
        if not process.ended:
            self._kill(process, silent=silent)

    def on_failure(self, process: Any, error: BaseException) -> None:
        """Note that a process finds itself broken, and is about to end."""
        self.say(process.host, f"fails: {type(error).__name__}", error)
        if self.excused_until.get(process.host, 0.0) < self.loop.now:
            self.violated(f"{process.name} has failed without a reason: {error!r}")

    def on_exit(self, process: Any) -> None:
        """Judge the exit of a broker's process."""
        self._judge_exit(process)

    # Processes, of which some may be of another version.

    def _kill(self, process: Any, *, silent: bool) -> None:
        self.say(process.host, f"is killed{' with its machine' if silent else ''}")
        process.ended = True
        process.node.kill()
        self.network.crashed(process.node, silent=silent)

    def _judge_exit(self, process: Any) -> None:
        """Judge the exit of a process that was not killed, and close its connections."""
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

    # Clients.

    def client(self, node: SimNode, *hosts: str, fragments: FragmentAccess | None = None) -> Client:
        return client_of(self.network, node, *hosts, fragments=fragments)

    def close(self) -> None:
        """Forget the nodes. Close all suspended coroutines, and ignore their errors."""
        self.loop.abandon()
        for process in self.processes:
            process.threads.unwind()
        self.loop.close()
