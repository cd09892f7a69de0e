"""One member of a consumer cluster: its parts, and its work in each phase of a `ClusterMember`."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.routing import Route as HttpRoute

from gazette.auth import admission
from gazette.client.append.service import MemoryBudget
from gazette.client.client import Client
from gazette.cluster.allocator.drain_status import ItemNames
from gazette.cluster.keyspace.key_space import KeySpace
from gazette.cluster.process.cluster_member import CANCEL_S, ClusterMember
from gazette.cluster.process.membership import MemberEnvironment, MemberRole, Membership
from gazette.consumer.api.json_gateway import json_routes
from gazette.consumer.api.shard_api import CAPABILITIES, ShardApi
from gazette.consumer.application import Application
from gazette.consumer.application_name import Owner, checked_name, name_of
from gazette.consumer.broker_watch import BrokerWatch
from gazette.consumer.collector import ShardCollector
from gazette.consumer.contract.callbacks import initialized, require_callbacks
from gazette.consumer.debug_routes import debug_routes
from gazette.consumer.key_space import consumer_decoder, is_consistent, progress
from gazette.consumer.prefix_owner import claim_prefix, other_application, owner_key
from gazette.consumer.query.http_queries import error_answer
from gazette.consumer.query_router import QueryRouter
from gazette.consumer.resolver import Resolver
from gazette.consumer.service import ConsumerService
from gazette.consumer.settings import ConsumerSettings
from gazette.consumer.shard.callback_watch import CallbackWatch
from gazette.consumer.shard.context import ShardContext
from gazette.consumer.shard.journals import retried
from gazette.consumer.shard.restarts import Restarts
from gazette.consumer.shard.shard import Shard
from gazette.consumer.shard.thread import ShardThread, WorkerFactory
from gazette.errors import GazetteError, Unavailable
from gazette.protocol.ids import ProcessId
from gazette.protocol.process import ConsumerSpec
from gazette.recoverylog.scratch import SHARDS, sweep

log = logging.getLogger(__name__)

_INITIALIZING: Final = "initializing the application"
_ANSWER_SHARE: Final = 0.8
"""Share of the time for a graceful stop in which members still answer running queries."""
_WORDS: Final = ItemNames("shard", "member")
_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that exist once etcd is connected."""

    membership: Membership
    resolver: Resolver
    shard_api: ShardApi


class ConsumerMember(ClusterMember[ConsumerSettings]):
    """A consumer member in this process. Loop-bound. ``start``, then ``wait``, then ``stop``.

    Applications get its ``service`` in ``Application.initialize``. ``client`` calls the brokers; the
    member closes it at its end.
    """

    def __init__(
        self,
        application: Application[Any],
        environment: MemberEnvironment,
        settings: ConsumerSettings,
        client: Client,
        *,
        config: Mapping[str, Any] | None = None,
        workers: WorkerFactory = ShardThread,
        producer_rng: random.Random | None = None,
    ) -> None:
        """Create a member that is not started.

        Simulations replace ``workers`` and ``producer_rng``. By default, ``producer_rng`` is the generator of
        the operating system, so that no two members draw the same producer.
        """
        require_callbacks(application)
        self.application = application
        self.client = client
        """Client of the brokers."""
        self.application_name = (
            checked_name(settings.application, "--consumer.application")
            if settings.application
            else name_of(application)
        )
        super().__init__(environment, settings, self._new_role(environment, settings))
        clock, pools = environment.clock, environment.pools
        self.callback_watch = CallbackWatch(clock, settings.lease_ttl_s)
        """Watch over the callbacks of all shards. ``runconsumer`` starts the watch for its process."""
        self._append_budget = MemoryBudget(settings.append_memory_bytes)
        self.service = ConsumerService(
            self,
            application,
            client,
            dict(config or {}),
            self._append_budget,
            random.SystemRandom() if producer_rng is None else producer_rng,
        )
        """Methods that the application may call."""
        self._broker_watch = BrokerWatch(client, clock)
        self._new_worker = workers
        self._queries = pools("queries", settings.query_threads)
        self._players = pools("players", settings.player_threads)
        self._parts: _Parts | None = None
        self._up: ShardCollector | None = None

    def _new_role(self, environment: MemberEnvironment, settings: ConsumerSettings) -> MemberRole:
        spec = ConsumerSpec(
            ProcessId(settings.zone, settings.id),
            environment.server.endpoint,
            settings.shard_limit,
            application=self.application_name,
        )
        decoder = consumer_decoder(settings.root, settings.max_hot_standbys)
        return MemberRole(
            program="consumer",
            replicas="shards",
            names=_WORDS,
            spec=spec,
            decoder=decoder,
            is_consistent=is_consistent,
            progress=progress,
        )

    @property
    def resolver(self) -> Resolver:
        return self._running.resolver

    @property
    def key_space(self) -> KeySpace:
        return self._running.membership.key_space

    @property
    def _running(self) -> _Parts:
        """The parts of this member. Raises ``Unavailable`` while the member does not know its cluster."""
        if self._parts is None or not self.service.has_begun:
            raise Unavailable("the consumer is starting")
        return self._parts

    def not_ready(self) -> str:
        """Return why the member does not serve now; empty while it serves."""
        reason, brokers = super().not_ready(), self._broker_watch.not_answered
        if reason in ("", _INITIALIZING):  # The application may wait for brokers in `initialize`.
            return "; ".join(filter(None, (reason, brokers)))
        return reason

    def diagnostics(self) -> list[HttpRoute]:
        """Return the routes that show the state and activity of this member."""
        return [*super().diagnostics(), *debug_routes(lambda: self.resolver.local_shards)]

    async def start(self) -> None:
        """Join the cluster. Return once this member serves: see `ClusterMember.start`."""
        await super().start()
        self._up = ShardCollector(self.resolver, self.service.append_service, self._append_budget)
        REGISTRY.register(self._up)
        log.info(
            "consumer %(member)s serves at %(endpoint)s",
            {"member": self.process_id, "endpoint": self.server.endpoint},
        )

    def fail(self, error: BaseException) -> None:
        """Record that the member has failed, and end queries: see `ClusterMember.fail`."""
        super().fail(error)
        # Another member may already serve the shards of this member.
        self.service.running_queries.end(f"it failed: {error}")

    async def _prepare(self) -> None:
        self._enter(_INITIALIZING)
        app = self._app()
        self._start_http(app)
        self.daemons.daemon(self._broker_watch.run(), name="brokers")
        self.daemons.daemon(self.service.append_service.run(), name="appends")
        self.daemons.spawn(self._sweep(), name="sweep")
        await initialized(self.application, self.service)
        self.service.add_routes(self.application)
        # Until here, the routes only say that the member starts. Put the application's routes in their place.
        app.router.routes[:] = self._all_routes()

    async def _sweep(self) -> None:
        """Remove the files that shards of killed processes left on the local disk."""
        parent, now = self.settings.scratch_directory, self.clock.now()
        removed = await self._players.run(sweep, parent, now, (SHARDS,))
        for leftover in removed:
            log.warning(
                "removed %(size)d bytes that a killed process left in %(path)s",
                {"size": leftover.size, "path": leftover.path},
            )

    def _app(self) -> Starlette:
        """Return the HTTP application. It has the user's routes once the application is initialized."""

        async def starting(_request: Any) -> Any:
            raise Unavailable(f"the consumer is {self.phase}")

        routes = [*self._all_routes(), HttpRoute("/{path:path}", starting, methods=[*_METHODS])]
        return Starlette(routes=routes, exception_handlers={GazetteError: error_answer})

    def _all_routes(self) -> list[HttpRoute]:
        environment = self.environment
        return [
            *(() if environment.private_diagnostics else self.diagnostics()),
            *self.service.routes,
            *json_routes(
                self.settings.allow_origins, lambda: self._running.shard_api, environment.auth
            ),
        ]

    async def _set_up(self, membership: Membership) -> None:
        settings, name = self.settings, self.application_name
        owner = await retried(
            lambda: claim_prefix(membership.etcd, settings.root, name, settings.adopt_from),
            "claiming the etcd prefix",
            name,
            self.clock,
        )
        key_space, state = membership.key_space, membership.state
        context = self._new_context(membership, owner)
        resolver = Resolver(
            key_space,
            state,
            self.scopes.items,
            lambda item, assignment: Shard(context, item, assignment),
        )
        shard_api = ShardApi(
            settings.root,
            membership.etcd,
            key_space,
            state,
            resolver,
            self.peers,
            self.environment.auth,
            context.hint_keys,
        )
        self._parts = _Parts(membership, resolver, shard_api)
        key_space.observers += [
            lambda: self._check_owner(key_space),
            state.observe,
            resolver.update,
            lambda: self.peers.follow(state.peers()),
        ]

    def _new_context(self, membership: Membership, owner: Owner) -> ShardContext:
        settings, environment = self.settings, self.environment
        return ShardContext(
            application=self.application,
            etcd=membership.etcd,
            key_space=membership.key_space,
            client=self.client,
            clock=environment.clock,
            rng=environment.rng,
            player_pool=self._players,
            new_publisher=self.service.new_publisher,
            callback_watch=self.callback_watch,
            owner=owner,
            hint_keys=settings.hint_keys,
            settings=settings,
            append_budget=self._append_budget,
            restarts=Restarts(settings.max_restarts),
            new_worker=self._new_worker,
        )

    def _check_owner(self, key_space: KeySpace) -> None:
        """Make the member fail if another application has meanwhile claimed its prefix."""
        kv = key_space.get(owner_key(self.settings.root))
        owner = None if kv is None else kv.decoded
        if isinstance(owner, Owner) and owner.name != self.application_name:
            self.fail(other_application(self.settings.root, owner.name, self.application_name))

    def _serve(self, membership: Membership) -> None:
        assert self._parts is not None
        service, auth = self.service, self.environment.auth
        service.begin(
            QueryRouter(
                self._parts.resolver,
                self.peers,
                self._queries,
                self.clock,
                membership.lease,
                service.running_queries,
            )
        )
        grpc_server, queries = self.server.grpc, service.http_queries
        grpc_server.add_generic_rpc_handlers(
            (self._parts.shard_api.handler(),), admission(auth, CAPABILITIES)
        )
        grpc_server.add_generic_rpc_handlers((queries.handler(),), queries.admit)

    def _stages(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {"finishing": self._finish}

    async def _finish(self) -> None:
        """Stop local shards, refuse new calls, and let accepted calls end."""
        if self._parts is not None:
            self._parts.resolver.stop_serving()
        # End queries before the server cuts their connections: a cut gives the caller no reason.
        self.service.running_queries.end("it stops", _ANSWER_SHARE * self._grace_s)
        await self.server.stop(self._grace_s)
        if self._parts is not None:
            await self._parts.resolver.wait_stopped(2 * self.settings.graceful_stop_s)

    async def _abandon(self) -> None:
        """End shards and their stores. After this, the member holds no locks of a database, as if killed.

        Raise ``Unavailable`` with the names of shards whose callbacks do not return.
        """
        if self._parts is not None:
            self._parts.resolver.stop_serving()
        await self.server.stop(0)
        if self._parts is not None:
            await self._parts.resolver.wait_stopped(CANCEL_S)

    async def _end_calls(self) -> None:
        if self._up is not None:
            REGISTRY.unregister(self._up)
            self._up = None
        await self.service.append_service.close(CANCEL_S)

    async def _close(self) -> None:
        await self.client.close()
        self._queries.close()
        self._players.close()
