"""One broker: its parts put together, and taken apart in one sequence of stages.

Starting: HTTP answers (not ready), etcd is connected, the broker announces itself and loads the key space,
gRPC serves, ready. Stopping: see ``BrokerService.stop``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.routing import Route as HttpRoute

from gazette.auth import KeyedAuth, NoAuth, admission
from gazette.blobs.registry import BlobSettings, BlobStores, StoreConstructor
from gazette.broker.api.append import AppendApi
from gazette.broker.api.fragments import FragmentsApi
from gazette.broker.api.handlers import APPEND, CAPABILITIES, journal_handler
from gazette.broker.api.health import HealthApi
from gazette.broker.api.list_apply import ListApplyApi
from gazette.broker.api.read import ReadApi
from gazette.broker.api.replicate import ReplicateApi
from gazette.broker.api.whole_append import SmallAppends
from gazette.broker.context import BrokerContext
from gazette.broker.http.gateway import HttpGateway, Loopback
from gazette.broker.http.json_gateway import json_routes
from gazette.broker.key_space import broker_decoder, is_consistent, progress, spec_of
from gazette.broker.known_head import UploadLimits
from gazette.broker.lease_guard import LeaseGuard
from gazette.broker.pulse import new_pulse
from gazette.broker.pulser import Pulser
from gazette.broker.refresher import Refresher
from gazette.broker.replica import Replica
from gazette.broker.replica_context import Pools
from gazette.broker.resolver import Resolver
from gazette.broker.settings import BrokerSettings
from gazette.client.rpc.channel import Channels, TlsSettings
from gazette.cluster.allocator.drain import Drain
from gazette.cluster.allocator.drain_status import ItemNames
from gazette.cluster.allocator.membership import Membership
from gazette.cluster.allocator.model import member_key
from gazette.cluster.allocator.shutdown import end_all, leave
from gazette.cluster.allocator.state import State
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.cluster.etcd.startup import connect_with_retry
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.errors import Unavailable
from gazette.fragment.kept_files import KeptFiles
from gazette.fragment.local_file import Disk, LocalDisk
from gazette.fragment.persister import Persister, PersisterSettings
from gazette.fragment.spool_bytes import SpoolMemory
from gazette.http2.transport import Transport
from gazette.net.diagnostics import diagnostic_routes
from gazette.net.http_guard import GuardRules, HttpGuard
from gazette.net.server import Server
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.process import BrokerSpec
from gazette.protocol.route import Route
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import BlockingPool, PoolFactory, TaskScope, first_of

log = logging.getLogger(__name__)

_CANCEL_S: Final = 10.0
_HURRIED_GRACE_S: Final = 1.0
_WORDS: Final = ItemNames("journal", "broker")
_ANY_METHOD: Final = ("GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS")


class BrokerService:
    """A broker in this process. Loop-bound. Call ``start``, then ``wait``, then ``stop``; or ``crash``.

    ``server`` is bound, so that its endpoint can be announced. ``auth`` signs calls to peers and verifies
    those of callers. The other arguments let tests and simulations replace the outside world.
    ``constructors`` make blob stores, ``transport`` is the network to peers and etcd, ``disk`` makes spool
    files, and ``pools`` makes the threads for blocking calls.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        server: Server,
        etcd_settings: EtcdSettings,
        settings: BrokerSettings,
        *,
        auth: KeyedAuth | NoAuth | None = None,
        peer_tls: TlsSettings | None = None,
        constructors: Mapping[str, StoreConstructor] | None = None,
        private_diagnostics: bool = False,
        transport: Transport | None = None,
        disk: Disk | None = None,
        pools: PoolFactory = BlockingPool,
    ) -> None:
        self.settings = settings
        self._transport = transport
        self.server = server
        self.process_id = ProcessId(settings.zone, settings.id)
        self._clock = clock
        self._rng = rng
        self._etcd_settings = etcd_settings
        self._auth = NoAuth() if auth is None else auth
        self._constructors = constructors
        self._disk = disk if disk is not None else LocalDisk(settings.spool_dir)
        self._private_diagnostics = private_diagnostics
        self._spec = BrokerSpec(
            self.process_id,
            server.endpoint,
            settings.journal_limit,
            http_endpoint=server.http_endpoint,
        )
        self._spec.validate()
        self.peers = Channels(settings.zone, peer_tls, self._auth, clock=clock, transport=transport)
        self._make_pool = pools
        self._pools = Pools(
            *(
                pools(name, settings.spool_threads)
                for name in ("spools", "spool writes", "spool reads")
            )
        )
        self._solver_pool = pools("allocator", 1)
        self._servers = TaskScope("broker-servers", on_failure=self.fail)
        self._daemons = TaskScope("broker-daemons", on_failure=self.fail)
        self._replicas = TaskScope("broker-replicas", on_failure=self.fail)
        self.failure: BaseException | None = None
        """The error that made the broker fail; None while it works."""
        self._failed = asyncio.Event()
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._phase = "starting"
        self._parts: _Parts | None = None
        self._etcd: Etcd | None = None

    @property
    def context(self) -> BrokerContext:
        """The broker's components. Raises ``Unavailable`` before it has started."""
        if self._parts is None:
            raise Unavailable("the broker is starting")
        return self._parts.context

    @property
    def guard_rules(self) -> GuardRules:
        """The requests that the HTTP servers of this broker accept."""
        return GuardRules.of(
            keyless=self._auth.keyless,
            endpoint=self.server.endpoint,
            hosts=self.settings.allow_hosts,
            origins=self.settings.allow_origins,
        )

    def not_ready(self) -> str:
        """Return why the broker does not serve now; empty if it serves."""
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self._parts is not None and self._parts.membership.drain.is_running:
            return self._parts.membership.drain.describe()
        if self._phase != "ready":
            return self._phase
        state = self.context.state
        return "" if state.local_member is not None else "this broker is not in etcd"

    async def start(self) -> None:
        """Return once the broker is a member of its cluster and serves.

        Waits without bound for etcd, and for another member of the same id to leave. Raise errors that
        waiting cannot cure. Cancellation: call ``stop``.
        """
        self.server.start_http(self._servers, HttpGuard(self._app(), self.guard_rules))
        self._phase = "connecting to etcd"
        self._etcd = await connect_with_retry(
            self._etcd_settings, self._clock, transport=self._transport
        )
        parts = self._parts = self._build(self._etcd)
        context = parts.context
        self._phase = "announcing itself"
        session = await parts.membership.join(
            self._spec.to_pb().SerializeToString(), self.settings.lease_ttl_s
        )
        context.lease.attach(session.lease)
        parts.membership.follow()
        self._daemons.daemon(context.blob_stores.run_health(), name="blob stores")
        self._daemons.daemon(context.persister.serve(), name="persister")
        self._daemons.daemon(context.refresher.run(), name="refresher")
        self._daemons.daemon(context.pulser.run(), name="pulser")
        parts.membership.allocate(self._solver_pool)
        whole = {APPEND: SmallAppends(context).take_whole}
        self.server.add_handlers(parts.handler, whole, admission(self._auth, CAPABILITIES))
        await self.server.start_grpc()
        self._phase = "ready"
        log.info(
            "broker %(member)s serves at %(endpoint)s",
            {"member": self.process_id, "endpoint": self.server.endpoint},
        )

    def _build(self, etcd: Etcd) -> _Parts:
        """Put the parts together; nothing runs yet."""
        settings, clock = self.settings, self._clock
        decoder = broker_decoder(settings.root, settings.max_replication)
        key_space = KeySpace(settings.root, decoder, apply_delay_s=settings.watch_delay_s)
        state = State(
            key_space,
            member_key(settings.root, settings.zone, settings.id),
            is_consistent,
            progress,
        )
        blob_stores = BlobStores(
            BlobSettings(settings.file_root, settings.file_only, settings.fsspec_protocols),
            clock,
            threads=settings.blob_threads,
            pools=self._make_pool,
            hung_after_s=settings.store_hung_after_s,
            rng=self._rng,
            constructors=self._constructors,
        )

        lease = LeaseGuard()
        persister = Persister(
            blob_stores,
            partial(spec_of, state),
            clock,
            limit_of=UploadLimits(etcd, state, lease, clock).of,
            relies_on=lambda fragment: resolver.relies_on(fragment),
            on_stored=lambda fragment: resolver.stored(fragment),
            rng=self._rng,
            settings=PersisterSettings(
                parallel=settings.parallel_persists, refused_after_s=settings.store_check_timeout_s
            ),
        )
        resolver = Resolver(
            key_space,
            state,
            self._replicas,
            new_replica=lambda journal, life: Replica(journal, life, context),
            open_store=blob_stores.get,
            assignment_wait_s=settings.assignment_wait_s,
        )
        context = BrokerContext(
            clock=clock,
            rng=self._rng,
            settings=settings,
            etcd=etcd,
            lease=lease,
            key_space=key_space,
            state=state,
            resolver=resolver,
            blob_stores=blob_stores,
            persister=persister,
            peers=self.peers,
            signer=self._auth,
            verifier=self._auth,
            pools=self._pools,
            disk=self._disk,
            spool_memory=SpoolMemory(self._pools.writes, settings.spool_memory_bytes),
            kept_files=KeptFiles(settings.kept_spools),
            refresher=Refresher(clock, self._replicas),
            pulser=Pulser(
                clock,
                self._replicas,
                settings,
                lambda journal, control: new_pulse(context, journal, control),
            ),
            scope=self._replicas,
        )
        drain = Drain(
            self._clock,
            state,
            self.process_id,
            _WORDS,
            alone_timeout_s=settings.drain_timeout_s,
            timeout_s=settings.drain_timeout_max_s,
        )
        membership = Membership(etcd, key_space, state, drain, clock, self._daemons)
        parts = _Parts(context, membership)
        key_space.observers += [
            state.observe,
            resolver.update,
            lambda: self.peers.follow(state.peers()),
            parts.list_apply.updated,
        ]
        return parts

    def _app(self) -> Starlette:
        gateway = HttpGateway(self._loopback, self.settings.allow_origins, self._pools.spools)
        routes: list[HttpRoute] = []
        if not self._private_diagnostics:
            routes += diagnostic_routes(self.not_ready)
        routes += json_routes(
            self.settings.allow_origins,
            lambda: self._own_stub().List,
            lambda: self._own_stub().Read,
        )
        routes.append(HttpRoute("/{journal:path}", gateway.handle, methods=list(_ANY_METHOD)))
        return Starlette(routes=routes)

    def _own_stub(self) -> JournalStub:
        self._check_serving()
        return self.peers.journal(self.server.endpoint)

    def _loopback(self) -> Loopback:
        self._check_serving()
        calls = self.peers.byte_path(self.server.endpoint)
        return Loopback(calls.read, calls.append, self._http_endpoints, self._created)

    def _http_endpoints(self, route: Route) -> dict[str, str]:
        """Return the HTTP endpoints of a route's members, by gRPC endpoint, where they differ."""
        state = self.context.state
        found: dict[str, str] = {}
        for one in route.members:
            member = state.member(one.zone, one.suffix)
            if member is not None and (http := member.decoded.value.spec.http_endpoint):
                found[member.decoded.value.spec.endpoint] = http
        return found

    def _created(self, journal: str) -> int:
        item = self.context.state.item(journal)
        return 0 if item is None else item.raw.create_revision

    def _check_serving(self) -> None:
        if self._phase not in ("ready", "draining"):
            raise Unavailable(f"the broker is not serving now: {self._phase}")

    def stop_soon(self) -> None:
        """Ask for a graceful stop. A second call ends the wait for other members to take over."""
        (self._hurried if self._asked.is_set() else self._asked).set()

    def fail(self, error: BaseException) -> None:
        """Record that the broker has failed: ``wait`` returns, then call ``stop``. The
        first error is kept."""
        if self.failure is None:
            self.failure = error
        self._failed.set()

    async def wait(self) -> None:
        """Return when a stop was asked for, or the broker has failed."""
        await first_of(self._asked, self._failed)

    async def stop(self) -> None:
        """Leave, stage by stage. Each stage is bounded, and runs even if the one before failed.

        1. *Drain*: say in etcd that this broker is exiting, and go on serving until others have its journals
           (``drain.py`` says for how long). Skipped if the broker has failed.
        2. *Finish*: refuse new calls, and let accepted ones end. Replicas give up their spools.
        3. *Persist*: upload all spools to their blob stores.
        4. *Release* the lease, not before: until then, other members do not consider the journals abandoned.
        5. *Cancel* what is left.

        At the end, raises the error that made the broker fail, or else the first error of a stage.
        Cancellation: content that was not persisted is lost with this broker.
        """
        self._asked.set()
        stages = {
            "draining": self._drain,
            "finishing accepted calls": self._finish,
            "persisting": self._persist,
            "releasing its lease": self._release,
            "cancelling": self._cancel,
        }
        first = await leave(self.process_id, stages, self._enter)
        self._phase = "stopped"
        if self.failure is not None:
            raise self.failure
        if first is not None:
            raise first

    def _enter(self, phase: str) -> None:
        self._phase = phase

    async def _drain(self) -> None:
        if self.failure is None and self._parts is not None:
            exiting = replace(self._spec, exiting=True).to_pb().SerializeToString()
            ends = {"it was asked to hurry": self._hurried, "it is broken": self._failed}
            await self._parts.membership.leave(exiting, ends)

    async def _finish(self) -> None:
        parts, settings = self._parts, self.settings
        if parts is not None:
            parts.list_apply.stop()
            parts.read.stop()
            parts.context.resolver.stop_serving()
        hurried = self._hurried.is_set()
        await self.server.stop(_HURRIED_GRACE_S if hurried else settings.graceful_stop_s)
        if parts is not None:
            # Peers get time to answer what was sent before.
            timeout_s = max(settings.graceful_stop_s, settings.peer_timeout_s + 1.0)
            await parts.context.resolver.wait_torn_down(timeout_s)

    async def _persist(self) -> None:
        if self._parts is not None:
            await self._parts.context.persister.finish(self.settings.persist_timeout_s)

    async def _release(self) -> None:
        if self._parts is not None:
            await self._parts.membership.release()

    async def _cancel(self) -> None:
        if self._parts is not None:
            self._parts.context.blob_stores.close()
        try:
            scopes = (self._daemons, self._replicas, self._servers)
            await end_all(*(scope.stop(_CANCEL_S) for scope in scopes))
        finally:
            await self.peers.close()
            self._pools.close()
            self._solver_pool.close()
            if self._etcd is not None:
                await self._etcd.close()

    async def crash(self) -> None:
        """End as if the process was killed: nothing is finished, persisted or released (for tests)."""
        self._phase = "crashed"
        self._asked.set()
        for scope in (self._daemons, self._replicas):
            scope.cancel()
        await self.server.stop(0)
        await self._cancel()


@dataclass(slots=True)
class _Parts:
    """The parts that exist once etcd is connected."""

    context: BrokerContext
    membership: Membership
    list_apply: ListApplyApi = field(init=False)
    read: ReadApi = field(init=False)
    append: AppendApi = field(init=False)
    handler: Any = field(init=False)

    def __post_init__(self) -> None:
        context = self.context
        self.list_apply, self.read = ListApplyApi(context), ReadApi(context)
        self.append = AppendApi(context)
        self.handler = journal_handler(
            self.list_apply,
            self.read,
            self.append,
            ReplicateApi(context),
            FragmentsApi(context),
            HealthApi(context),
        )
