"""The nodes of a simulation: an etcd, brokers that can end and come again, clients; and their history."""

from __future__ import annotations

import asyncio
import io
import math
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from gazette.blobs.blob_store import BlobStore
from gazette.broker.key_space import decode_journal
from gazette.broker.service import BrokerService
from gazette.broker.settings import BrokerSettings
from gazette.client.client import Client
from gazette.client.read.fragment_reader import FragmentAccess
from gazette.client.rpc.channel import Channels
from gazette.cluster.etcd.client import EtcdSettings
from gazette.cluster.etcd.pb import rpc_pb2
from gazette.cluster.process.membership import MemberEnvironment, Membership
from gazette.errors import Bug, GazetteError
from gazette.fragment.closing import ClosingName
from gazette.fragment.set_aside import SetAside
from gazette.net.server import Server
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Fragment, FragmentStoreUrl
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import TaskScope
from tools.simulation.etcd.service import FakeEtcd
from tools.simulation.etcd.watches import WatchStream
from tools.simulation.history import Assigned, History, Life, Stored
from tools.simulation.loop import Node, NodeClock, VirtualLoop
from tools.simulation.network import Network, SimServer, SimTransport
from tools.simulation.other_version import OtherVersion
from tools.simulation.storage import Bucket, SimDisk, SimStore, Threads

ROOT: Final = "/gazette/cluster"
ETCD: Final = "etcd"
ETCD_ADDRESS: Final = "etcd:2379"
ZONE: Final = "zone"
_LEAVING: Final = ("releasing its lease", "cancelling", "stopped")
_ETCD_TICK_S: Final = 1.0
_TRACE_MAX: Final = 200_000


def client_of(
    network: Network, node: Node, *hosts: str, fragments: FragmentAccess | None = None
) -> Client:
    """Create a client of a node that has these brokers as its address."""
    clock = NodeClock(network.loop)
    channels = Channels("", clock=clock, transport=SimTransport(network, node))
    address = ",".join(f"http://{host}:8080" for host in hosts)
    return Client(address, channels=channels, clock=clock, fragments=fragments)


def names_of(error: BaseException) -> set[str]:
    """Return the names of an error's classes, which may be of another version."""
    return {one.__name__ for one in type(error).__mro__}


def is_defect(error: BaseException) -> bool:
    """Return True for an error with which no process may end."""
    names = names_of(error)
    return GazetteError.__name__ not in names or Bug.__name__ in names


class BrokerServer(Server):
    """A broker's servers on the virtual network; it has no HTTP."""

    def __init__(self, network: Network, node: Node, clock: Clock) -> None:
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
    """Stands for the event that ends pauses between attempts at a store; those pauses take virtual time."""

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
    """The shipped broker; its threads are those of the simulation."""

    process: BrokerProcess

    @property
    def threads(self) -> Threads:
        return self.process.threads

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.process.world.on_failure(self.process, error)
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


class BrokerProcess:
    """One broker process, from its start to its end. ``host`` outlives it; ``id`` names the member."""

    def __init__(self, world: World, host: str, id: str, number: int) -> None:
        self.world = world
        self.host = host
        self.id = id
        self.name = f"{id}/{number}"
        """Of this very process."""
        self.began_at = world.loop.now
        self.ended_at: float | None = None
        self.node = Node(world.loop, host)
        self.clock = NodeClock(world.loop, self.node)
        self.clock.offset_s = world.clock_offsets.get(host, 0.0)
        self.threads = Threads(self.node, random.Random(world.rng.getrandbits(64)))
        self.disk = SimDisk(self.threads)
        self.threads.troubled = self._is_troubled
        self.service: _Service | None = None
        self.ended = False
        self.stopping = False
        self.error: BaseException | None = None
        self.node.spawn(self._main(), f"main {self.name}")

    async def _main(self) -> None:
        """Run the broker as ``gazette serve`` does."""
        world = self.world
        rng = random.Random(world.rng.getrandbits(64))
        environment = MemberEnvironment(
            self.clock,
            rng,
            BrokerServer(world.network, self.node, self.clock),
            EtcdSettings(endpoints=(f"http://{ETCD_ADDRESS}",)),
            transport=SimTransport(world.network, self.node),
            pools=self.threads.pool,
        )
        service = self.service = _Service(
            environment,
            BrokerSettings(zone=ZONE, id=self.id, root=ROOT, **world.settings),
            constructors=dict.fromkeys(("s3", "file"), self._store),
            disk=self.disk,
        )
        service.process = self
        scope = TaskScope("broker", on_failure=service.fail)
        starting = scope.spawn(service.start(), name="start")
        self._starting = starting
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
        world.on_exit(self)

    def _is_troubled(self) -> bool:
        return self.disk.write_s > 0 or not all(
            bucket.trouble_free for bucket in self.world.buckets.values()
        )

    def _store(self, url: FragmentStoreUrl) -> BlobStore:
        return SimStore(self.world.bucket(url.host), self.threads, self.world.loop, self.name)

    @property
    def lease_id(self) -> int | None:
        """The lease under which it may acknowledge; None before it has one."""
        parts = None if self.service is None else self.service._parts
        lease: Any = None if parts is None else parts.context.lease._lease
        return None if lease is None else int(lease.id)

    @property
    def slots(self) -> list[int]:
        """Slots of the journals that it takes for its own; 0 is a primary's."""
        parts = None if self.service is None else self.service._parts
        items = () if parts is None else parts.context.state.local_items
        return [one.assignment.decoded.slot for one in items]

    @property
    def has_persisted(self) -> bool:
        """Whether it is at its end, behind the upload of its spools."""
        return self.service is not None and self.service.phase in _LEAVING

    def lose(self) -> None:
        """Note that the broker has not uploaded all that it had, and says
        so, or has lost its lease before.
        """
        self.world.history.lost_brokers.setdefault(self.name, self.world.loop.now)

    def terminate(self, *, hurried: bool) -> None:
        """Stop the broker as SIGTERM does; twice if ``hurried``."""
        if hurried:
            self.world.history.hurried.setdefault(self.name, self.world.loop.now)

        def signal() -> None:
            if self.service is None:
                return
            for _ in range(1 + hurried):
                self.service.stop_soon()
            self._starting.cancel()

        if self.node.alive and not self.ended:
            self.world.loop.call_soon(signal, context=self.node.context)


class World:
    """Everything that one seed simulates."""

    def __init__(
        self, seed: int, *, trace: bool = False, other: OtherVersion | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.other = other
        """Another version, of which about half of the processes are."""
        self.history = History()
        self.loop = VirtualLoop(self.violated)
        self.network = Network(self.loop, random.Random(self.rng.getrandbits(64)))
        self.network.on_error = self.violated
        self.trace: list[tuple[float, str, str]] | None = [] if trace else None
        if trace:
            self.network.on_call = self._trace_call
        self.buckets: dict[str, Bucket] = {}
        self.brokers: dict[str, BrokerProcess] = {}
        """The present process of each host."""
        self.processes: list[BrokerProcess] = []
        self.announced: dict[str, BrokerProcess] = {}
        self._leases: dict[str, int] = {}
        """The lease of each member's key, by the member's id."""
        """Processes whose member key is in etcd, by name."""
        self.clock_offsets: dict[str, float] = {}
        self._settings: dict[str, Any] = {}
        self.excused_until: dict[str, float] = {}
        """Hosts whose broker may lose its lease, until then."""
        self.on_exited: Callable[[BrokerProcess], None] = lambda process: None
        self.sessions = 0
        """Number of sessions of appends."""
        self.identities = 0
        """How many member ids were made up."""
        self._processes = 0
        self._starts = Counter[str]()
        """Number of processes that were started, by the module that has their class."""
        self.etcd_node = Node(self.loop, ETCD)
        self.etcd = self._start_etcd()

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all brokers. Those that another version does not know are left out."""
        return self._settings

    @settings.setter
    def settings(self, chosen: dict[str, Any]) -> None:
        ours, *others = (
            one.BrokerSettings.__dataclass_fields__
            for one in self.versions("tools.simulation.world")
        )
        self._settings = {
            name: value
            for name, value in chosen.items()
            if name not in ours or all(name in other for other in others)
        }

    # Events.

    def say(self, node: str, what: str, *facts: object) -> None:
        """Note an event: it is part of the digest, and of the trace."""
        self.loop.note(node, what)
        if self.trace is not None and len(self.trace) < _TRACE_MAX:
            self.trace.append((self.loop.now, node, " ".join((what, *map(str, facts)))))

    def violated(self, what: str) -> None:
        self.say("!", what)
        self.history.violations.append(f"at {self.loop.now:.3f} s: {what}")

    def failed(self, error: BaseException) -> None:
        """Take note of an error of the simulation itself: that seed has shown nothing."""
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
        """Let etcd know the time, again and again."""
        etcd.advance()
        self.loop.call_later(_ETCD_TICK_S, self._tick, etcd, context=self.etcd_node.context)

    def _on_etcd(self, revision: int, events: Any) -> None:
        prefix, members = f"{ROOT}/items/".encode(), f"{ROOT}/members/".encode()
        assignments, assigned = f"{ROOT}/assign/".encode(), dict[str, None]()
        for event in events:
            key: bytes = event.kv.key
            self.say(ETCD, f"{revision} {'delete' if event.type else 'put'} {key.decode()}")
            if key.startswith(members):
                id = key.decode().rpartition("#")[2]
                if event.type:
                    self._evicted(id, revision, expired=self.etcd.store.expires)
                else:
                    self._announced(id, revision, event.kv.lease)
            if key.startswith(assignments):
                assigned[key[len(assignments) :].decode().partition("#")[0]] = None
            if not key.startswith(prefix):
                continue
            journal = key[len(prefix) :].decode()
            life = self.history.last_life(journal)
            if event.type:
                assert life is not None
                life.deleted, life.deleted_at = revision, self.loop.now
            elif life is None or life.deleted is not None:
                spec = decode_journal(journal, event.kv.value)
                bucket = FragmentStoreUrl.parse(spec.fragment.stores[0]).host
                self.history.lives.append(Life(journal, revision, bucket))
        names = {one.id: one.name for one in self.announced.values()}
        for journal in assigned:
            found = {names[id]: route for id, route in self._assigned(journal) if id in names}
            synchronized = frozenset(name for name, route in found.items() if route)
            self.history.assigned.append(
                Assigned(journal, revision, self.loop.now, frozenset(found), synchronized)
            )

    def assigned(self, journal: str) -> list[str]:
        """Return the hosts of a journal's brokers, as etcd has them: the primary, then the others."""
        hosts = {one.id: one.host for one in self.brokers.values()}
        return [hosts[id] for id, _ in self._assigned(journal) if id in hosts]

    def _assigned(self, journal: str) -> list[tuple[str, bytes]]:
        """Return the members that a journal is assigned to, in order of slots, with the route of each."""
        prefix = f"{ROOT}/assign/{journal}#"
        end = prefix[:-1] + chr(ord("#") + 1)
        request = rpc_pb2.RangeRequest(key=prefix.encode(), range_end=end.encode())
        slots = []
        for kv in self.etcd.store.range(request).kvs:
            _, id, slot = kv.key.decode().removeprefix(prefix).split("#")
            slots.append((int(slot), id, kv.value))
        return [(id, route) for _, id, route in sorted(slots)]

    def hold_watches(self, host: str) -> list[WatchStream]:
        """Let a host hear of no change in etcd until the streams are released."""
        streams = [one for one in self.etcd.streams if one.peer == f"sim:{host}"]
        for stream in streams:
            stream.hold()
        return streams

    def compact_etcd(self) -> None:
        """Let etcd forget how it came to its present keys."""
        store = self.etcd.store
        if store.compacted < store.revision:
            self.say(ETCD, f"compacts up to {store.revision}")
            store.compact(rpc_pb2.CompactionRequest(revision=store.revision))

    def _announced(self, id: str, revision: int, lease: int) -> None:
        self._leases[id] = lease
        for one in self.processes:
            if one.id == id and not one.ended:
                self.announced[one.name] = one
                self.history.members.setdefault(one.name, (revision, math.inf))

    def _evicted(self, id: str, revision: int, *, expired: bool) -> None:
        """Note the end of a member's lease. A member that gives it back claims that its spools are stored."""
        for name, process in self.announced.items():
            # The key may be of a process that was killed: what it sent can arrive late, and its lease ends.
            if process.id == id and process.lease_id == self._leases[id]:
                self.history.evicted.setdefault(name, self.loop.now)
                self.history.members[name] = (self.history.members[name][0], revision)
                if expired and not process.has_persisted:
                    process.lose()
                elif process.slots:  # No other broker has taken them over.
                    self.history.hurried.setdefault(name, self.loop.now)
        self.announced = {n: p for n, p in self.announced.items() if p.id != id}

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
        for one in self.history.stored:
            if one.bucket == bucket and one.path == path and one.removed is None:
                one.removed = self.loop.now

    def _on_put(self, bucket: str, path: str, content: bytes, by: str) -> None:
        self.say("store", f"put {bucket}/{path}")
        journal, _, name = path.rpartition("/")
        if path.startswith(".test/") or SetAside.parse(journal, name) is not None:
            return
        if ClosingName.parse(journal, name) is not None:
            self.history.closings += 1
            return
        marked = any(one.startswith(f"{path}.unconfirmed-") for one in self.buckets[bucket].objects)
        fragment = Fragment.parse(journal, name)
        file = DecodedFile(io.BytesIO(content), FragmentDecoder(fragment, start=fragment.begin))
        decoded = b""
        while block := file.read(1 << 20):
            decoded += block
        self.history.stored.append(
            Stored(self.loop.now, bucket, journal, fragment.begin, fragment.end, decoded, path, by)
        )
        self.history.stored[-1].marked = marked

    # Brokers.

    def start_broker(self, host: str, id: str | None = None) -> BrokerProcess:
        self._processes += 1
        before = self.brokers.get(host)
        chosen = id or (before.id if before is not None else host)
        version = self.version(__name__)
        process: BrokerProcess = version.BrokerProcess(self, host, chosen, self._processes)
        self.brokers[host] = process
        self.processes.append(process)
        self.say(host, f"starts as {process.name}", version.__file__)
        return process

    def versions(self, module: str) -> list[Any]:
        """Return a module as each version has it; ours is the first."""
        return [sys.modules[module], *([] if self.other is None else [self.other.module(module)])]

    def version(self, module: str) -> Any:
        """Return the version of a process that starts. Versions take turns, so a host goes to and fro."""
        found = self.versions(module)
        self._starts[module] += 1
        return found[self._starts[module] % len(found)]

    def crash(self, host: str, *, silent: bool = False) -> None:
        """Kill a broker's process, or with ``silent`` its machine."""
        process = self.brokers[host]
        if process.ended:
            return
        self.say(host, f"is killed{' with its machine' if silent else ''}")
        process.ended, process.ended_at = True, self.loop.now
        process.node.kill()
        process.lose()
        self.history.killed.setdefault(process.name, self.loop.now)
        self.network.crashed(process.node, silent=silent)

    def on_failure(self, process: BrokerProcess, error: BaseException) -> None:
        """Note that a broker finds itself broken, and is about to end."""
        self.say(process.host, f"fails: {type(error).__name__}", error)
        if self.excused_until.get(process.host, 0.0) < self.loop.now:
            self.violated(f"{process.name} has failed without a reason: {error!r}")

    def on_exit(self, process: BrokerProcess) -> None:
        """Judge the exit of a broker's process that was not stopped from
        outside, and close its connections.
        """
        error = process.error
        self.say(process.host, f"exits: {type(error).__name__ if error else 'as asked'}", error)
        process.ended, process.ended_at = True, self.loop.now
        leaked = [
            task.get_name()
            for task in process.node.pending_tasks()
            if not task.get_name().startswith("main ")
        ]
        if leaked:
            self.violated(f"{process.name} has exited with tasks: {sorted(leaked)}")
        if error is not None and is_defect(error):
            self.violated(f"{process.name} has ended with {error!r}")
        process.node.kill()
        self.network.crashed(process.node, silent=False)
        self.on_exited(process)

    def holder(self, id: str, since: float, revision: int) -> tuple[str, ...]:
        """Return the processes that had a member id, in order, from ``since`` until now.

        One that etcd has never named serves nothing yet. One that was no member any more at ``revision`` has
        no part in what was committed then: an append may have begun long before its last attempt. Such
        processes count only if there is no other.
        """
        names = [
            one.name
            for one in self.processes
            if one.id == id and (one.ended_at is None or one.ended_at >= since)
        ]
        members = self.history.members
        named = [name for name in names if name in members]
        present = tuple(name for name in named if members[name][1] > revision)
        return present or tuple(named or names)

    def primary(self, id: str, since: float, revision: int) -> tuple[str, ...]:
        """Return those of ``holder`` that can have led at a ``revision``, or all if none can."""
        names = self.holder(id, since, revision)
        return tuple(name for name in names if self.history.was_member(name, revision)) or names

    def began(self, names: Collection[str]) -> float:
        """Return when the first of these processes began; 0 for none."""
        return min((one.began_at for one in self.processes if one.name in names), default=0.0)

    # Clients.

    def client(self, node: Node, *hosts: str, fragments: FragmentAccess | None = None) -> Client:
        return client_of(self.network, node, *hosts, fragments=fragments)

    def close(self) -> None:
        """Forget the nodes: what is suspended is closed, unheard."""
        self.loop.abandon()
        for process in self.processes:
            process.threads.unwind()
        self.loop.close()
