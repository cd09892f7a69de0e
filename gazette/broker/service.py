"""One broker: its parts, and its work in each phase of a `ClusterMember`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.routing import Route as HttpRoute

from gazette.auth import admission
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
from gazette.broker.lease_guard import LeaseGuard
from gazette.broker.pulse import new_pulse
from gazette.broker.pulser import Pulser
from gazette.broker.refresher import Refresher
from gazette.broker.replica import Replica
from gazette.broker.replica_context import Pools
from gazette.broker.resolver import Resolver
from gazette.broker.settings import BrokerSettings
from gazette.broker.upload_limits import UploadLimits
from gazette.cluster.allocator.drain_status import ItemNames
from gazette.cluster.process.cluster_member import ClusterMember
from gazette.cluster.process.membership import MemberEnvironment, MemberRole, Membership
from gazette.errors import Unavailable
from gazette.fragment.kept_files import KeptFiles
from gazette.fragment.local_file import Disk, LocalDisk
from gazette.fragment.persister import Persister, PersisterSettings
from gazette.fragment.spool_bytes import SpoolMemory
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.process import BrokerSpec
from gazette.protocol.route import Route

log = logging.getLogger(__name__)

_WORDS: Final = ItemNames("journal", "broker")
_ANY_METHOD: Final = ("GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS")


class BrokerService(ClusterMember[BrokerSettings]):
    """A broker in this process. Loop-bound. Call ``start``, then ``wait``, then ``stop``; or ``crash``.

    Tests and simulations replace the outside world: ``constructors`` make blob stores, and ``disk`` makes
    spool files.
    """

    def __init__(
        self,
        environment: MemberEnvironment,
        settings: BrokerSettings,
        *,
        constructors: Mapping[str, StoreConstructor] | None = None,
        disk: Disk | None = None,
    ) -> None:
        server, pools = environment.server, environment.pools
        spec = BrokerSpec(
            ProcessId(settings.zone, settings.id),
            server.endpoint,
            settings.journal_limit,
            http_endpoint=server.http_endpoint,
        )
        decoder = broker_decoder(settings.root, settings.max_replication)
        role = MemberRole("broker", "replicas", _WORDS, spec, decoder, is_consistent, progress)
        super().__init__(environment, settings, role)
        self._constructors = constructors
        self._disk = disk if disk is not None else LocalDisk(settings.spool_dir)
        self._pools = Pools(
            *(
                pools(name, settings.spool_threads)
                for name in ("spools", "spool writes", "spool reads")
            )
        )
        self._parts: _Parts | None = None  # None before `start`.

    @property
    def context(self) -> BrokerContext:
        """The broker's components. Raises ``Unavailable`` before it has started."""
        if self._parts is None:
            raise Unavailable("the broker is starting")
        return self._parts.context

    async def start(self) -> None:
        """Return once the broker is a member of its cluster and serves: see `ClusterMember.start`."""
        await super().start()
        log.info(
            "broker %(member)s serves at %(endpoint)s",
            {"member": self.process_id, "endpoint": self.server.endpoint},
        )

    async def _prepare(self) -> None:
        self._start_http(self._app())

    async def _set_up(self, membership: Membership) -> None:
        parts = self._parts = _Parts(self._new_context(membership))
        state = membership.state
        membership.key_space.observers += [
            state.observe,
            parts.context.resolver.update,
            lambda: self.peers.follow(state.peers()),
            parts.list_apply.updated,
        ]

    def _new_context(self, membership: Membership) -> BrokerContext:
        """Put the components together; nothing runs yet.

        The components refer to each other: lambdas use ``resolver`` and ``context``, which are made later.
        """
        settings, scope, state = self.settings, self.scopes.items, membership.state
        clock, rng, auth = self.clock, self.environment.rng, self.environment.auth
        blob_stores = self._new_blob_stores()
        lease = LeaseGuard()
        persister = Persister(
            blob_stores,
            partial(spec_of, state),
            clock,
            limit_of=UploadLimits(membership.etcd, state, lease, clock).of,
            relies_on=lambda fragment: resolver.relies_on(fragment),
            on_stored=lambda fragment: resolver.stored(fragment),
            rng=rng,
            settings=PersisterSettings(
                parallel=settings.parallel_persists, refused_after_s=settings.store_check_timeout_s
            ),
        )
        resolver = Resolver(
            membership.key_space,
            state,
            scope,
            new_replica=lambda journal, life: Replica(journal, life, context),
            open_store=blob_stores.get,
            assignment_wait_s=settings.assignment_wait_s,
        )
        context = BrokerContext(
            clock=clock,
            rng=rng,
            settings=settings,
            etcd=membership.etcd,
            lease=lease,
            key_space=membership.key_space,
            state=state,
            resolver=resolver,
            blob_stores=blob_stores,
            persister=persister,
            peers=self.peers,
            signer=auth,
            verifier=auth,
            pools=self._pools,
            disk=self._disk,
            spool_memory=SpoolMemory(self._pools.writes, settings.spool_memory_bytes),
            kept_files=KeptFiles(settings.kept_spools),
            refresher=Refresher(clock, scope),
            pulser=Pulser(
                clock,
                scope,
                settings,
                lambda journal, control: new_pulse(context, journal, control),
            ),
            scope=scope,
        )
        return context

    def _new_blob_stores(self) -> BlobStores:
        settings, environment = self.settings, self.environment
        return BlobStores(
            BlobSettings(settings.file_root, settings.file_only, settings.fsspec_protocols),
            environment.clock,
            threads=settings.blob_threads,
            pools=environment.pools,
            hung_after_s=settings.store_hung_after_s,
            rng=environment.rng,
            constructors=self._constructors,
        )

    def _serve(self, membership: Membership) -> None:
        assert self._parts is not None
        context = self._parts.context
        context.lease.attach(membership.lease)
        daemons = self.daemons
        daemons.daemon(context.blob_stores.run_health(), name="blob stores")
        daemons.daemon(context.persister.serve(), name="persister")
        daemons.daemon(context.refresher.run(), name="refresher")
        daemons.daemon(context.pulser.run(), name="pulser")
        admit = admission(self.environment.auth, CAPABILITIES)
        self.server.add_handlers(
            self._parts.handler, {APPEND: SmallAppends(context).take_whole}, admit
        )

    def _app(self) -> Starlette:
        origins = self.settings.allow_origins
        gateway = HttpGateway(self._loopback, origins, self._pools.spools)
        routes: list[HttpRoute] = []
        if not self.environment.private_diagnostics:
            routes += self.diagnostics()
        routes += json_routes(origins, lambda: self._own_stub().List, lambda: self._own_stub().Read)
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
        http_endpoints: dict[str, str] = {}
        for process_id in route.members:
            member = state.member(process_id.zone, process_id.suffix)
            if member is not None and (http_endpoint := member.decoded.value.spec.http_endpoint):
                http_endpoints[member.decoded.value.spec.endpoint] = http_endpoint
        return http_endpoints

    def _created(self, journal: str) -> int:
        item = self.context.state.item(journal)
        return 0 if item is None else item.raw.create_revision

    def _check_serving(self) -> None:
        if self.phase not in ("ready", "draining"):
            raise Unavailable(f"the broker is not serving now: {self.phase}")

    def _stages(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {"finishing accepted calls": self._finish, "persisting": self._persist}

    async def _finish(self) -> None:
        """Refuse new calls, and let accepted calls end. Replicas give up their spools."""
        parts, settings = self._parts, self.settings
        if parts is not None:
            parts.list_apply.stop()
            parts.read.stop()
            parts.context.resolver.stop_serving()
        await self.server.stop(self._grace_s)
        if parts is not None:
            # Peers get time to answer earlier proposals.
            timeout_s = max(settings.graceful_stop_s, settings.peer_timeout_s + 1.0)
            await parts.context.resolver.wait_torn_down(timeout_s)

    async def _persist(self) -> None:
        """Upload all spools to their blob stores. Raise ``Unavailable`` if that takes too long: then content
        that no other broker has is lost."""
        if self._parts is not None:
            await self._parts.context.persister.finish(self.settings.persist_timeout_s)

    async def _abandon(self) -> None:
        self.scopes.items.cancel()
        await self.server.stop(0)

    async def _end_calls(self) -> None:
        if self._parts is not None:
            self._parts.context.blob_stores.close()

    async def _close(self) -> None:
        self._pools.close()


@dataclass(slots=True)
class _Parts:
    """The parts that exist once etcd is connected."""

    context: BrokerContext
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
