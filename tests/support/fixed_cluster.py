"""Brokers of one process whose routes a test sets. Key spaces, resolvers, replicas and gRPC are
real.

There is no etcd, lease or allocator. Use these for tests of replication, which must set a journal's
primary, the brokers that know it, and the brokers that are gone. `testing/broker.py` has the
brokers for all other tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import grpc

from gazette.auth import KeyedAuth, NoAuth
from gazette.blobs.registry import BlobSettings, BlobStores
from gazette.broker.api.append import AppendApi
from gazette.broker.api.read import ReadApi
from gazette.broker.api.replicate import ReplicateApi
from gazette.broker.context import BrokerContext
from gazette.broker.key_space import broker_decoder, is_consistent, spec_of
from gazette.broker.lease_guard import LeaseGuard
from gazette.broker.pulse import new_pulse
from gazette.broker.pulser import Pulser
from gazette.broker.refresher import Refresher
from gazette.broker.replica import Replica
from gazette.broker.replica_context import Pools
from gazette.broker.resolver import Resolver
from gazette.broker.settings import BrokerSettings
from gazette.broker.upload_limits import UploadLimits
from gazette.client.rpc.channel import Channels, ChannelSettings
from gazette.cluster.allocator.model import assignment_key, item_key, member_key
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd
from gazette.cluster.etcd.values import (
    Compare,
    KeyValue,
    Operation,
    PutOp,
    PutResult,
    RangeResult,
    ResponseHeader,
    Target,
    TxnResult,
    WatchEvent,
    WatchResponse,
)
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Unavailable
from gazette.fragment.kept_files import KeptFiles
from gazette.fragment.local_file import LocalDisk
from gazette.fragment.persister import Persister
from gazette.fragment.spool_bytes import SpoolMemory
from gazette.net.grpc.grpc_server import GrpcServer
from gazette.net.http_server import bind_tcp
from gazette.protocol.content import decode_append, decode_replicate, encode_read
from gazette.protocol.ids import ProcessId
from gazette.protocol.journal import JournalSpec
from gazette.protocol.pb import broker_pb2
from gazette.protocol.process import BrokerSpec
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import BlockingPool, TaskScope
from tests.support.replicas import replica_of

ROOT = "/fixed/cluster"


class MemoryEtcd:
    """The part of etcd that replication uses: puts, deletes, and transactions on revisions.

    Every change goes to ``watchers`` at once, as one response.
    """

    def __init__(self) -> None:
        self.revision = 1
        self.kvs: dict[bytes, KeyValue] = {}
        self.watchers: list[Any] = []
        self.transactions: list[bool] = []
        """Outcome of each transaction on watched keys: True if it succeeded."""
        self.failing = ""
        """Key whose writes fail, as if etcd were away."""
        self.silent = False
        """True to fail reads, too."""

    def header(self) -> ResponseHeader:
        return ResponseHeader(cluster_id=11, member_id=22, revision=self.revision, raft_term=33)

    async def range(self, prefix: str, *, revision: int = 0) -> RangeResult:
        del revision
        kvs = tuple(self.kvs[key] for key in sorted(self.kvs) if key.startswith(prefix.encode()))
        return RangeResult(self.header(), kvs, len(kvs))

    def change(self, puts: dict[str, bytes], deletes: Sequence[str] = ()) -> int:
        """Change several keys in one revision, and return it."""
        self.revision += 1
        events = []
        for name in deletes:
            gone = self.kvs.pop(name.encode())
            kv = KeyValue(gone.key, b"", gone.create_revision, self.revision, 0)
            events.append(WatchEvent(kv, deleted=True))
        for name, value in puts.items():
            key = name.encode()
            was = self.kvs.get(key)
            created, version = (self.revision, 1)
            if was is not None:
                created, version = was.create_revision, was.version + 1
            kv = self.kvs[key] = KeyValue(key, value, created, self.revision, version)
            events.append(WatchEvent(kv))
        watched = tuple(event for event in events if _is_watched(event.kv.key))
        if watched:
            for watcher in self.watchers:
                watcher(WatchResponse(self.header(), watched))
        return self.revision

    async def get(self, key: str) -> KeyValue | None:
        if self.silent:
            raise Unavailable("etcd is away")
        return self.kvs.get(key.encode())

    async def get_each(self, *keys: str) -> tuple[KeyValue | None, ...]:
        return tuple([await self.get(key) for key in keys])

    async def txn(self, compares: Sequence[Compare], success: Sequence[Operation]) -> TxnResult:
        if any(isinstance(op, PutOp) and op.key.decode() == self.failing for op in success):
            raise Unavailable("etcd is away")
        holds = all(self._holds(compare) for compare in compares)
        puts = {op.key.decode(): op.value for op in success if isinstance(op, PutOp)}
        if any(_is_watched(key.encode()) for key in puts):
            self.transactions.append(holds)
        if not holds:
            return TxnResult(self.header(), False, ())
        if puts:
            self.change(puts)
        assert len(puts) == len(success), "only puts are implemented"
        return TxnResult(self.header(), True, tuple(PutResult(self.header()) for _ in success))

    def _holds(self, compare: Compare) -> bool:
        kv = self.kvs.get(compare.key)
        if compare.target is Target.CREATE_REVISION:
            return (0 if kv is None else kv.create_revision) == compare.operand
        assert compare.target is Target.MOD_REVISION
        return (0 if kv is None else kv.mod_revision) == compare.operand


@dataclass
class FixedLease:
    """A lease that holds until the test ends it."""

    id: int
    remaining_s: float = math.inf


class FixedBroker:
    """One broker. ``context`` has its parts. It serves Append, Read and Replicate at ``endpoint``."""

    def __init__(
        self,
        etcd: MemoryEtcd,
        name: str,
        clock: Clock,
        files: Path,
        settings: BrokerSettings,
        auth: KeyedAuth | NoAuth,
    ) -> None:
        self.id = ProcessId(settings.zone, name)
        self.server = GrpcServer(SystemClock(), max_recv_bytes=16 << 20, limit=1024)
        listener = bind_tcp("127.0.0.1", 0)
        self.server.listen(listener, None)
        self.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.scope = TaskScope(f"broker {name}")
        self.lagging: list[WatchResponse] | None = None
        """List that receives the changes for the broker's key space in place of it. None passes them on."""
        self.lease = FixedLease(int.from_bytes(name.encode()))
        self._etcd = etcd
        pools = Pools(
            BlockingPool("spools", 2),
            BlockingPool("spool writes", 1),
            BlockingPool("spool reads", 1),
        )
        key_space = KeySpace(ROOT, broker_decoder(ROOT, settings.max_replication))
        state = State(key_space, member_key(ROOT, *_parts(self.id)), is_consistent)
        blob_stores = BlobStores(BlobSettings(file_root=files), clock, threads=2)

        channels = ChannelSettings(backoff_min_s=0.01, keepalive_s=1.0, keepalive_timeout_s=1.0)
        guard = LeaseGuard()
        guard.attach(self.lease)
        self.context = BrokerContext(
            clock=clock,
            rng=random.Random(name),
            settings=settings,
            etcd=cast("Etcd", etcd),
            lease=guard,
            key_space=key_space,
            state=state,
            resolver=Resolver(
                key_space,
                state,
                self.scope,
                new_replica=lambda journal, life: self.new_replica(journal, life),
                open_store=blob_stores.get,
            ),
            blob_stores=blob_stores,
            persister=Persister(
                blob_stores,
                partial(spec_of, state),
                clock,
                limit_of=UploadLimits(cast("Etcd", etcd), state, guard, clock).of,
                relies_on=lambda fragment: self.context.resolver.relies_on(fragment),
                on_stored=lambda fragment: self.context.resolver.stored(fragment),
                rng=random.Random(name),
            ),
            peers=Channels(settings.zone, signer=auth, settings=channels),
            signer=auth,
            verifier=auth,
            pools=pools,
            disk=LocalDisk(settings.spool_dir),
            spool_memory=SpoolMemory(pools.writes),
            kept_files=KeptFiles(settings.kept_spools),
            refresher=Refresher(clock, self.scope),
            pulser=Pulser(
                clock,
                self.scope,
                settings,
                lambda journal, control: new_pulse(self.context, journal, control),
            ),
            scope=self.scope,
        )
        key_space.observers += [
            state.observe,
            self.context.resolver.update,
            lambda: self.context.peers.follow(state.peers()),
        ]

    def new_replica(self, journal: str, life: int) -> Replica:
        return Replica(journal, life, self.context)

    def replica(self, journal: str) -> Replica:
        """Return the replica that this broker's resolver holds now."""
        return replica_of(self.context.resolver, journal)

    async def start(self) -> None:
        self.scope.daemon(self.context.refresher.run(), name="refresher")
        self.scope.daemon(self.context.pulser.run(), name="pulser")
        append, replicate = AppendApi(self.context), ReplicateApi(self.context)
        read = ReadApi(self.context)
        handlers: dict[str, Any] = {
            "Append": grpc.stream_unary_rpc_method_handler(
                append.append, decode_append, broker_pb2.AppendResponse.SerializeToString
            ),
            "Read": grpc.unary_stream_rpc_method_handler(
                read.read, broker_pb2.ReadRequest.FromString, encode_read
            ),
            "Replicate": grpc.stream_stream_rpc_method_handler(
                replicate.replicate,
                decode_replicate,
                broker_pb2.ReplicateResponse.SerializeToString,
            ),
        }
        handler = grpc.method_handlers_generic_handler("protocol.Journal", handlers)
        self.server.add_generic_rpc_handlers((handler,))
        await self.server.start()
        await self.context.key_space.load(self.context.etcd)
        self._etcd.watchers.append(self._on_change)
        self.scope.daemon(self.context.blob_stores.run_health(), name="health")

    def _on_change(self, response: WatchResponse) -> None:
        if self.lagging is not None:
            self.lagging.append(response)
        else:
            self.context.key_space.apply([response])

    def catch_up(self) -> None:
        """Apply the changes that were kept back while ``lagging``."""
        responses, self.lagging = self.lagging, None
        if responses:
            self.context.key_space.apply(responses)

    async def stop(self) -> None:
        """Stop the broker at once, without a drain."""
        if self._on_change in self._etcd.watchers:
            self._etcd.watchers.remove(self._on_change)
        await self.server.stop(0)
        await self.scope.stop()
        with suppress(Unavailable):
            await self.context.persister.finish(0)
        await self.context.peers.close()
        self.context.blob_stores.close()
        self.context.pools.close()
        if self.scope.failure is not None:
            raise self.scope.failure


class FixedCluster:
    """Brokers ``a``, ``b``, ``c`` and so on, and the keys that they share:

    async with await FixedCluster.start(3, tmp_path) as cluster:
        cluster.create(spec, "b", "a")     # primary first
        await cluster["b"]…
    """

    def __init__(self, etcd: MemoryEtcd, brokers: dict[str, FixedBroker]) -> None:
        self.etcd = etcd
        self.brokers = brokers

    @classmethod
    async def start(
        cls,
        count: int,
        tmp_path: Path,
        *,
        clock: Clock | None = None,
        auth: KeyedAuth | NoAuth | None = None,
        **settings: Any,
    ) -> Self:
        etcd = MemoryEtcd()
        files = tmp_path / "root"
        (files / "fragments").mkdir(parents=True, exist_ok=True)
        clock = SystemClock() if clock is None else clock
        brokers = {}
        for name in "abcdefgh"[:count]:
            chosen = BrokerSettings(zone="zone", id=f"broker-{name}", root=ROOT, **settings)
            brokers[name] = FixedBroker(
                etcd, f"broker-{name}", clock, files, chosen, NoAuth() if auth is None else auth
            )
        for broker in brokers.values():
            spec = BrokerSpec(broker.id, broker.endpoint, 1024).to_pb()
            etcd.change({member_key(ROOT, *_parts(broker.id)): spec.SerializeToString()})
        for broker in brokers.values():
            await broker.start()
        return cls(etcd, brokers)

    def __getitem__(self, name: str) -> FixedBroker:
        return self.brokers[name]

    def put_spec(self, spec: JournalSpec) -> int:
        return self.etcd.change({item_key(ROOT, spec.name): spec.to_pb().SerializeToString()})

    def create(self, spec: JournalSpec, *names: str) -> int:
        """Create a journal, and assign it to those brokers. The first is its primary."""
        self.put_spec(spec)
        return self.assign(spec.name, *names)

    def assign(self, journal: str, *names: str) -> int:
        """Assign the journal to other brokers, in one revision.

        Assignments that stay, or move to another slot, keep their value.
        """
        prefix = f"{ROOT}/assign/{journal}#"
        before = {
            key.decode(): kv.value
            for key, kv in self.etcd.kvs.items()
            if key.startswith(prefix.encode())
        }
        held = {key.rpartition("#")[0]: value for key, value in before.items()}
        after = {}
        for slot, name in enumerate(names):
            key = assignment_key(ROOT, journal, *_parts(self.brokers[name].id), slot)
            after[key] = held.get(key.rpartition("#")[0], b"")
        puts = {key: value for key, value in after.items() if key not in before}
        return self.etcd.change(puts, sorted(set(before) - set(after)))

    def life(self, journal: str) -> int:
        """Return the revision at which the journal was created."""
        return self.etcd.kvs[item_key(ROOT, journal).encode()].create_revision

    def forget(self, name: str) -> None:
        """Remove a broker's member key, as its expired lease would."""
        self.etcd.change({}, [member_key(ROOT, *_parts(self.brokers[name].id))])

    def expire(self, name: str) -> None:
        """Remove a broker's member key and its assignments in one revision, as its expired lease
        would.
        """
        zone, suffix = _parts(self.brokers[name].id)
        assigned = [key.decode() for key in self.etcd.kvs if f"#{zone}#{suffix}#".encode() in key]
        self.etcd.change({}, [member_key(ROOT, zone, suffix), *assigned])

    def consistent(self, journal: str) -> bool:
        """Return True if the primary has advertised all of the present assignments."""
        state = next(iter(self.brokers.values())).context.state
        item, assignments = state.item(journal), state.assignments_of(journal)
        return item is not None and is_consistent(item, assignments[0], assignments)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        first: BaseException | None = None
        for broker in self.brokers.values():
            try:
                await broker.stop()
            except Exception as error:  # noqa: BLE001 - all of them are stopped, then one is raised
                first = first or error
        if first is not None and exc_info[0] is None:
            raise first


def _is_watched(key: bytes) -> bool:
    return key.startswith(f"{ROOT}/".encode())


def _parts(process_id: ProcessId) -> tuple[str, str]:
    return process_id.zone, process_id.suffix
